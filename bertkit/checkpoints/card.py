"""The model card: the `README.md` that the hub shows, made from what a model's files record."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import bertkit
from bertkit.checkpoints.names import heads_of_class
from bertkit.checkpoints.pretrained import read_details
from bertkit.config import dotted_values
from bertkit.files import escaped, read_object, read_optional

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
    export = read_optional(folder / "export.json")
    task = model_task(folder, config, {**details, **export})
    scores = details.get("scores") or {}
    library = "onnx" if export else "bertkit"
    if not export and config.get("model_type") != "bertkit":
        library = "sentence-transformers" if task == "embedding" else "transformers"
    metadata: dict[str, Any] = {"library_name": library, "tags": ["bertkit"]}
    if task in PIPELINES:
        metadata["pipeline_tag"] = PIPELINES[task]
    base = str(details.get("start") or export.get("model") or "").partition("@")
    if base[1]:  # a model of the hub, not a path
        metadata["base_model"] = base[0]
    if index := model_index(name, PIPELINES.get(task, ""), str(details.get("data", "")), scores):
        metadata["model-index"] = index
    front = ModelCardData(**metadata, ignore_metadata_errors=True).to_yaml()
    parts = [f"---\n{front}\n---", f"# {name.rpartition('/')[2]}", summary(task, details, base)]
    if not export:
        code = f'from bertkit import load\n\nmodel = load("{name}")\nprint({CALLS.get(task, CALL)})'
        parts.append(f"## How to use it\n\n```python\n{code}\n```")
    if library in ("transformers", "sentence-transformers"):
        parts.append(f"{library} loads it, too.")
    rows = [(split, n, f"{v:.4g}") for split, s in scores.items() for n, v in s.items()]
    parts += section("Scores", ("data", "score", "value"), rows)
    outputs = (export.get("check") or {}).get("outputs") or {}
    checks = [(n, f"{o['max_error']:.2g}", f"{o['largest']:.3g}") for n, o in outputs.items()]
    header = ("output", "largest difference from bertkit in fp32", "largest value")
    parts += section("Export", header, checks)
    groups: dict[str, Any] = {
        n: details[n] for n in ("recipe", "settings", "run", "training") if n in details
    }
    settings = [(n, v) for n, v in dotted_values(groups) if v not in (None, "", [], ())]
    parts += section("Settings", ("setting", "value"), settings)
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


def summary(task: str, details: Mapping[str, Any], base: tuple[str, str, str]) -> str:
    """Return sentences about what a model is and what it was made from."""
    made = f"This is a BERT for {task}." if task else "This is a BERT encoder."
    if details.get("task") == "pretraining":
        made = (
            "This is a pre-trained BERT. It has to be fine-tuned for most uses, such as the "
            "classification of texts."
        )
    if base[1]:
        made += (
            f" It was made from [{base[0]}](https://huggingface.co/{base[0]}), commit {base[2]}."
        )
    labels = details.get("labels") or []
    if labels:
        more = f" and {len(labels) - MAX_LABELS:,} more" if len(labels) > MAX_LABELS else ""
        made += f" Its labels are {', '.join(map(plain, labels[:MAX_LABELS]))}{more}."
    if extended := details.get("extended"):
        words = sum(len(one["words"]) for one in extended)
        made += f" {words:,} words were added to its vocabulary."
    return made


def model_index(
    name: str, pipeline: str, dataset: str, scores: Mapping[str, Mapping[str, float]]
) -> list[dict[str, Any]] | None:
    """Return the hub's `model-index`; None without scores. Those of entity types are left out."""
    results = [
        {
            "task": {"type": pipeline},
            "dataset": {
                "name": dataset or "own data",
                "type": dataset or "private",
                "split": split,
            },
            "metrics": [
                {"type": METRIC_IDS.get(metric, metric), "value": value, "name": metric}
                for metric, value in values.items()
                if "/" not in metric and not metric.endswith("threshold")
            ],
        }
        for split, values in scores.items()
        if values
    ]
    return [{"name": name, "results": results}] if results else None


def section(title: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    """Return a heading and a Markdown table; [] without rows."""
    lines = [header, ["---"] * len(header), *rows]
    table = "\n".join(f"| {' | '.join(plain(cell) for cell in line)} |" for line in lines)
    return [f"## {title}\n\n{table}"] if rows else []


def plain(value: object) -> str:
    """Return a value as Markdown shows it unchanged, numbers with thousands separators."""
    text = f"{value:,}" if type(value) is int else str(value)
    return re.sub(r"[|\\<>\[\]*_`]", lambda match: f"\\{match[0]}", " ".join(text.split()))
