"""The model card of an export, which continues the card of the model that was exported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertkit.checkpoints.card import (
    USE,
    Card,
    Scored,
    derived_card,
    model_index,
    origin_text,
    source_name,
    table,
)
from bertkit.checkpoints.pretrained import model_folder
from bertkit.checkpoints.snippets import PIPELINES, SavedForm, saved_form
from bertkit.export.source import ExportSource

FORMAT_TEXTS = {
    "onnx": ("ONNX", "an ONNX graph with fp32 weights"),
    "onnx-int8": ("ONNX, 8 bits", "an ONNX graph with 8-bit weights"),
    "huggingface": ("Hugging Face", "a Hugging Face directory"),
    "tensorflow": ("TensorFlow", "a checkpoint for google-research/bert"),
    "torch-export": ("torch.export", "an exported program of torch"),
}
"""Format -> how a title and how a sentence name it."""
LIBRARIES_ON_HUB = {"onnx": "onnx", "onnx-int8": "onnx", "tensorflow": "bertkit"}


def export_form(source: ExportSource, to: str, folder: Path) -> SavedForm:
    """Return how an exported model is used."""
    if to == "huggingface":
        return saved_form(folder)
    return SavedForm(
        head=own_head(source),
        format=to,
        library=LIBRARIES_ON_HUB.get(to, ""),
        pairs=bool(source.details.get("pairs")),
        max_length=source.max_length,
        prompt=source.pooling.prompt if source.pooling else "",
        lowercase=bool(source.pooling and source.pooling.lowercase),
    )


def own_head(source: ExportSource) -> str:
    """Return the head of the exported model, a key of `PIPELINES`."""
    causal = source.head == "words" and source.config.direction != "bidirectional"
    return "causal" if causal else source.head


def export_card(source: ExportSource, to: str, manifest: Mapping[str, Any]) -> Card:
    """Return the card of an export.

    The scores of the original are kept if they hold for the export: it has the same head and fp32
    weights. With 8 bits only the scores that were measured on the export itself are.
    """
    folder = model_folder(source.path)
    card = derived_card(source.path, folder, source.config, source.tokenizer)
    known = (folder / "config.json").is_file()
    same_head = known and saved_form(folder).head == own_head(source)
    metadata, sections = dict(card.metadata), dict(card.sections)
    for name in (USE, "Export"):  # those of the original
        sections.pop(name, None)
    if not same_head or to == "onnx-int8":
        for name in ("model-index", "metrics"):
            metadata.pop(name, None)
        sections.pop("Scores", None)
    if to == "onnx-int8" and "base_model" in metadata:
        metadata["base_model_relation"] = "quantized"
    title, what = FORMAT_TEXTS[to]
    summary = f"{card.summary}\n\nThis folder holds {origin_text(source.path)} as {what}."
    tags = [tag for tag in metadata.get("tags", ()) if tag not in FORMAT_TEXTS]
    metadata["tags"] = [*tags, to]
    metric = manifest.get("metric")
    if metric and "model-index" not in metadata:
        found = Scored(source_name(metric["dev"]), "dev", metric["exported"])
        pipeline = PIPELINES[source.head]
        metadata["model-index"] = model_index(card.title, pipeline, [found])
    return replace(
        card,
        title=f"{card.title} ({title})",
        summary=summary,
        metadata=metadata,
        sections={"Export": export_text(manifest), **sections},
    )


def export_text(manifest: Mapping[str, Any]) -> str:
    """Return Markdown about how equal an export's outputs are to the original's."""
    check = manifest["check"]
    outputs = table(
        ("output", "largest difference", "largest value"),
        [
            (name, f"{one['max_error']:.2g}", f"{one['largest']:.3g}")
            for name, one in check["outputs"].items()
        ],
    )
    said = (
        f"The files were run by {check['by']} on {check['sequences']:,} sequences and compared "
        f"with bertkit in fp32:\n\n{outputs}"
    )
    if metric := manifest.get("metric"):
        name = metric["name"]
        before, after = (100 * metric[who][name] for who in ("bertkit", "exported"))
        said += (
            f"\n\nOn {metric['inputs']:,} labelled inputs, {name} is {after:.2f}, and {before:.2f} "
            "before the export."
        )
    elif manifest["format"] == "onnx-int8":
        said += "\n\nThe effect of 8 bits on the model's scores was not measured."
    return f"{said}\n\n`export.json` has the versions of the libraries and all settings."
