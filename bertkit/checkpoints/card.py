"""The model card: `README.md` of a model directory, with the metadata that the hub reads.

    card = Card(title="BERT for mrpc", summary="...", metadata={}, sections={"Data": "..."})
    write_card(folder, card, replaced=folder)

The last line of a card holds a checksum, by which bertkit recognises a card that nobody has edited.
An edited card is never replaced; whoever wants a new one deletes it first.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import bertkit
from bertkit.checkpoints.hub import hub_commit
from bertkit.checkpoints.names import heads_of_class
from bertkit.config import dotted_values
from bertkit.files import escaped, read_object, read_optional
from bertkit.model.encoder import ModelConfig

CARD = "README.md"
SEAL = re.compile(rb"\n<!-- bertkit ([0-9a-f]{64})[^\n]*-->\n\Z")
"""The last line of a card that bertkit wrote, with the SHA-256 of everything before it."""
INHERITED = ("language", "license", "license_name", "license_link", "base_model", "datasets")
"""The metadata that a model takes over from the card of the model that it was made from."""
MODEL_PATH = "path/to/this/folder"
"""The model's name in the code of a card, which `push` replaces by its name on the hub."""
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
    "classification": 'model("The sailor is in the garden.")',
    "multiple-choice": 'model("The sailor is tired.", ["She rests.", "She runs."])',
    "question-answering": 'model("Where is the sailor?", "The sailor is in the garden.")',
    "pretraining": 'model.fill_mask("The [MASK] is in the garden.")',
    "embedding": 'model.encode(["The sailor is in the garden."])',
}
METRIC_IDS = {
    "matthews": "matthews_correlation",
    "spearman": "spearmanr",
    "pearson": "pearsonr",
    "mean_squared_error": "mse",
    "micro_f1": "f1",
    "macro_f1": "f1",
    "mlm_perplexity": "perplexity",
    "mlm_accuracy": "accuracy",
}
"""bertkit's name of a score -> the hub's, where they differ."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a card says, except how the model is used, which follows from the model's files."""

    title: str
    summary: str
    """Plain sentences about what the model is."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the hub's YAML block, with JSON values."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """Heading -> Markdown."""

    def text(self) -> str:
        """Return the whole file, with its checksum."""
        from huggingface_hub.repocard_data import ModelCardData

        metadata = ModelCardData(**self.metadata, ignore_metadata_errors=True).to_yaml()
        parts = [f"---\n{metadata}\n---", f"# {self.title}", self.summary]
        parts += [f"## {heading}\n\n{body}" for heading, body in self.sections.items() if body]
        parts.append(f"*Made with bertkit {bertkit.__version__}.*")
        body = escaped("\n\n".join(part.strip() for part in parts)) + "\n"
        digest = hashlib.sha256(body.encode()).hexdigest()
        note = "bertkit keeps this file as it is once somebody has edited it"
        return f"{body}\n<!-- bertkit {digest}: {note} -->\n"


class Scored(NamedTuple):
    """The scores of a model on one split of a data set, for the hub's `model-index`."""

    dataset: str
    split: str
    scores: Mapping[str, float]
    hub_id: str = ""
    """The data set's name on the hub; "" if it is not there."""
    config: str = ""


def model_index(name: str, pipeline: str, scored: Sequence[Scored]) -> list[dict[str, Any]] | None:
    """Return the `model-index` of the hub for a model's name and task; None if there is no score.

    The scores of single entity types are left out.
    """
    results = []
    for data in scored:
        metrics = [
            {"type": METRIC_IDS.get(metric, metric), "value": value, "name": metric}
            for metric, value in data.scores.items()
            if "/" not in metric and not metric.endswith("threshold")
        ]
        dataset = {"name": data.dataset or "own data", "type": data.hub_id or "private"}
        dataset |= {"split": data.split} | ({"config": data.config} if data.config else {})
        if metrics:
            results.append({"task": {"type": pipeline}, "dataset": dataset, "metrics": metrics})
    return [{"name": name, "results": results}] if results else None


def is_edited(path: Path) -> bool:
    """Return whether a card exists and is not exactly what bertkit wrote."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    seal = SEAL.search(content)
    return not seal or hashlib.sha256(content[: seal.start()]).hexdigest().encode() != seal[1]


def kept_card(folder: Path) -> str:
    """Return a note if a folder has an edited card, which was therefore kept; else ""."""
    if not is_edited(folder / CARD):
        return ""
    return f"{folder / CARD} was edited and is kept as it is; delete it to get a new one"


def write_card(folder: Path, card: Card, *, replaced: Path) -> None:
    """Write the card of a model whose other files are complete, or keep the one of its user.

    An edited card is kept in `replaced`, the folder that a temporary `folder` will replace.
    """
    if is_edited(replaced / CARD):
        if folder != replaced:
            shutil.copyfile(replaced / CARD, folder / CARD)
        return
    text = with_use(card, folder).text()
    (folder / CARD).write_text(text, encoding="utf-8", newline="\n")


def with_use(card: Card, folder: Path) -> Card:
    """Return a card with the code that uses the model in a folder, and the hub's tags for it."""
    if "library_name" in card.metadata:
        return card
    config = read_object(folder / "config.json")
    task = model_task(folder, config)
    family = config.get("model_type", "bert")
    library = "bertkit" if family == "bertkit" else "transformers"
    load, call = f'model = load("{MODEL_PATH}")', CALLS.get(task, CALLS["classification"])
    code = f"```python\nfrom bertkit import load\n\n{load}\nprint({call})\n```"
    if task == "embedding":
        library = "sentence-transformers"
        code += "\n\nsentence-transformers loads this folder, too."
    elif library == "transformers":
        code += f"\n\ntransformers loads this folder, too, with {config['architectures'][0]}."
    added: dict[str, Any] = {"library_name": library, "tags": ["bertkit", family]}
    if task in PIPELINES:
        added["pipeline_tag"] = PIPELINES[task]
    sections = {"How to use it": code, **card.sections}
    return replace(card, metadata={**card.metadata, **added}, sections=sections)


def model_task(folder: Path, config: Mapping[str, Any]) -> str:
    """Return a model's task, a key of `PIPELINES`; "" for an encoder or a discriminator."""
    if (folder / "modules.json").is_file():
        return "embedding"
    task = str(read_optional(folder / "bertkit.json").get("task"))
    masked = heads_of_class(str(config["architectures"][0])) & {"pairs", "words"}
    return task if task in CALLS or task in PIPELINES else "pretraining" if masked else ""


def card_text(folder: Path) -> str:
    """Return the text of a folder's card; "" if there is none."""
    path = folder / CARD
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def inherited_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata that a model made from the one in a folder takes over.

    The base model is the folder's own name on the hub, if it is in the hub's cache.
    """
    from huggingface_hub.repocard import metadata_load

    try:
        metadata = metadata_load(folder / CARD) if (folder / CARD).is_file() else {}
    except Exception:  # whatever another program wrote there; a card is not needed
        metadata = {}
    metadata = metadata if isinstance(metadata, dict) else {}
    kept = {name: metadata[name] for name in INHERITED if is_text(metadata.get(name))}
    if cached := hub_commit(folder):
        kept["base_model"] = cached.partition("@")[0]
    return kept


def is_text(value: Any) -> bool:
    """Return whether a value is a text or a list of texts."""
    items = value if isinstance(value, list) else [value]
    return bool(value) and all(isinstance(item, str) for item in items)


def derived_card(path: Path, folder: Path, config: ModelConfig, tokenizer: Any) -> Card:
    """Return the card of a model that is another one in another form.

    `path` is the other model, as its user named it, and `folder` its model directory.
    """
    about = f"This is {origin_text(path)} in another form. {network_text(config, tokenizer)}"
    return Card(title="BERT", summary=about, metadata=inherited_metadata(folder))


def origin_text(path: Path) -> str:
    """Return Markdown that names a model: on the hub with its commit, else its folder."""
    if cached := hub_commit(path):
        name, _, commit = cached.partition("@")
        return f"[{name}](https://huggingface.co/{name}) at commit `{commit}`"
    return f"the local model `{path.parent.name if path.name == 'model' else path.name}`"


def start_text(path: Path, digest: str) -> str:
    """Return Markdown about the model from which the weights were initialised."""
    return (
        f"The weights were initialised from {origin_text(path)}. The SHA-256 of its weights, "
        f"vocabulary and config is `{digest}`."
    )


def network_text(config: ModelConfig, tokenizer: Any) -> str:
    """Return sentences about a network and its vocabulary."""
    case = "lowercased" if tokenizer.lowercase else "cased"
    return (
        f"The network has {config.num_hidden_layers} layers of width {config.hidden_size:,} with "
        f"{config.num_attention_heads} attention heads and reads up to "
        f"{config.max_position_embeddings:,} tokens. The vocabulary has {tokenizer.size:,} {case} "
        "WordPiece tokens."
    )


def settings_table(settings: Mapping[str, Any]) -> str:
    """Return a Markdown table of settings; those in nested objects get dotted names."""
    rows = [
        (name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else value)
        for name, value in dotted_values(settings)
        if value not in (None, "", [], ())
    ]
    return table(("setting", "value"), rows)


def skipped_table(skipped: Mapping[str, int]) -> str:
    """Return Markdown about what was left out or changed while text or data was read."""
    if not skipped:
        return "Nothing was skipped."
    return "Left out or changed while reading:\n\n" + table(
        ("what", "number"), sorted(skipped.items())
    )


def source_name(source: str) -> str:
    """Return the name of a file, or of a data set on the hub, without folders or addresses."""
    return source if source.startswith("hf:") else re.split(r"[?#]", source)[0].split("/")[-1]


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a Markdown table; a cell's text is shown as it is."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(markdown_text(cell) for cell in line)} |" for line in lines)


def markdown_text(value: object) -> str:
    """Return a value as it stands in a Markdown table, numbers with thousands separators."""
    text = f"{value:,}" if type(value) is int else str(value)
    return re.sub(r"[|\\<>\[\]*_`]", lambda match: f"\\{match[0]}", " ".join(text.split()))
