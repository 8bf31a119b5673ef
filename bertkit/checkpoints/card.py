"""The model card: the `README.md` that the hub shows, made from what a model's files record."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import bertkit
from bertkit.checkpoints.names import heads_of_class
from bertkit.checkpoints.pretrained import read_details
from bertkit.files import dotted_values, escaped, read_object, read_optional

CARD = "README.md"
PIPELINES = {
    "classification": "text-classification",
    "multi-label-classification": "text-classification",
    "regression": "text-classification",
    "multiple-choice": "multiple-choice",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
    "pretraining": "fill-mask",
    "embedding": "sentence-similarity",
}
"""Task -> the hub's name of it."""
CALLS = {
    "multiple-choice": 'model("The sailor is tired.", ["She rests.", "She runs."])',
    "question-answering": 'model("Where is the sailor?", "The sailor is in the garden.")',
    "pretraining": 'model.fill_mask("The [MASK] is in the garden.")',
    "embedding": 'model.encode(["The sailor is in the garden."])',
}
CALL = 'model("The sailor is in the garden.")'
METRIC_IDS = {
    "matthews": "matthews_correlation",
    "spearman": "spearmanr",
    "pearson": "pearsonr",
    "mean_squared_error": "mse",
    "micro_f1": "f1",
    "macro_f1": "f1",
}
"""bertkit's name of a score -> the hub's, where they differ."""
MAX_LABELS = 30
GROUPS = ("recipe", "settings", "run", "training", "format", "head", "check")
"""The fields of `bertkit.json` and `export.json` that a card shows."""
EMPTY: tuple[Any, ...] = (None, "", [], ())


def card_text(folder: Path, name: str, license: str = "") -> str:  # noqa: A002 - as in the metadata
    """Return the folder's README.md or, if there is none, a new card; with a license if it is set.

    `name` is the model's name on the hub.
    """
    from huggingface_hub import ModelCard

    path = folder / CARD
    text = path.read_text("utf-8", "replace") if path.is_file() else new_card(folder, name)
    if license:
        card = ModelCard(text, ignore_metadata_errors=True)
        card.data["license"] = license
        text = str(card)
    return text


def new_card(folder: Path, name: str) -> str:
    """Return the card of a model directory or an export: use, scores, settings and origin."""
    from huggingface_hub.repocard_data import ModelCardData

    config, details = read_object(folder / "config.json"), read_details(folder)
    details |= read_optional(folder / "export.json")
    task, is_export = model_task(folder, config, details), "check" in details
    library = "onnx" if is_export else "bertkit"
    if not is_export and config.get("model_type") != "bertkit":
        library = "sentence-transformers" if task == "embedding" else "transformers"
    base, _, commit = str(details.get("start") or "").partition("@")
    metadata: dict[str, Any] = {
        "library_name": library,
        "tags": ["bertkit"],
        "pipeline_tag": PIPELINES.get(task),
        "base_model": base or None,
        "model-index": model_index(name, task, details),
    }
    known = {name: value for name, value in metadata.items() if value}
    front = ModelCardData(**known, ignore_metadata_errors=True).to_yaml()
    made = "This is a pre-trained BERT, to be fine-tuned for most uses."
    made = (
        made if details.get("task") == "pretraining" else f"This is a BERT for {task or 'texts'}."
    )
    if base:
        made += f" It was made from [{base}](https://huggingface.co/{base}), commit {commit}."
    if labels := details.get("labels"):
        made += f" Its labels are {', '.join(map(plain, labels[:MAX_LABELS]))}."
    parts = [f"---\n{front}\n---", f"# {name.rpartition('/')[2]}", made]
    if not is_export:
        code = f'from bertkit import load\n\nmodel = load("{name}")\nprint({CALLS.get(task, CALL)})'
        parts.append(f"## How to use it\n\n```python\n{code}\n```\n\n{library} loads it, too.")
    groups = {n: details[n] for n in GROUPS if n in details}
    for title, values in (("Scores", details.get("scores", {})), ("Settings", groups)):
        rows = [f"| {plain(n)} | {plain(v)} |" for n, v in dotted_values(values) if v not in EMPTY]
        if rows:
            parts.append(f"## {title}\n\n| name | value |\n| --- | --- |\n" + "\n".join(rows))
    parts.append(f"*Made with bertkit {bertkit.__version__}.*")
    return escaped("\n\n".join(parts)) + "\n"


def model_task(folder: Path, config: Mapping[str, Any], details: Mapping[str, Any]) -> str:
    """Return a model's task, a key of `PIPELINES`; "" for an encoder or a discriminator."""
    if (folder / "modules.json").is_file():
        return "embedding"
    task = str(details.get("task") or details.get("head"))
    classes = config.get("architectures") or [""]
    masked = heads_of_class(str(classes[0])) & {"pairs", "words"}
    return task if task in PIPELINES else "pretraining" if masked else ""


def model_index(name: str, task: str, details: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the hub's `model-index`; None without scores. Those of entity types are left out."""
    data = str(details.get("data") or "")
    results = [
        {
            "task": {"type": PIPELINES.get(task, "")},
            "dataset": {"name": data or "own data", "type": data or "private", "split": split},
            "metrics": [
                {"type": METRIC_IDS.get(metric, metric), "value": value, "name": metric}
                for metric, value in values.items()
                if "/" not in metric and not metric.endswith("threshold")
            ],
        }
        for split, values in details.get("scores", {}).items()
        if values
    ]
    return [{"name": name, "results": results}] if results else None


def plain(value: object) -> str:
    """Return a value as Markdown shows it unchanged, numbers with thousands separators."""
    text = f"{value:,}" if type(value) is int else str(value)
    return re.sub(r"[|\\<>\[\]*_`]", lambda match: f"\\{match[0]}", " ".join(text.split()))
