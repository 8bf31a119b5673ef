"""The model card: `README.md` of a model directory, with the metadata that the hub reads.

    card = Card(title="BERT for mrpc", summary="...", metadata={}, sections={"Data": "..."})
    write_card(folder, card, replaced=folder)

A card is a pure function of the model: it has no dates and no paths. Its last line holds a
checksum, by which bertkit recognises a card that nobody has edited. An edited card is never
replaced; whoever wants a new one deletes it first.
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
from bertkit.checkpoints.snippets import PIPELINES, SavedForm, saved_form, snippets
from bertkit.config import dotted_values
from bertkit.files import escaped
from bertkit.model.encoder import ModelConfig

CARD = "README.md"
MAX_CARD_BYTES = 1 << 20
SEAL = re.compile(rb"\n<!-- bertkit ([0-9a-f]{64})[^\n]*-->\n\Z")
"""The last line of a card that bertkit wrote, with the SHA-256 of everything before it."""
FENCE = re.compile(r"(```|~~~)")
INHERITED = ("language", "license", "license_name", "license_link", "base_model", "datasets")
"""The metadata that a model takes over from the card of the model that it was made from."""
RESERVED = {"eval_results", "model_name", "ignore_metadata_errors"}
"""Names that the hub's library uses for something else."""
USE = "How to use it"
METRIC_IDS = {
    "matthews": "matthews_correlation",
    "spearman": "spearmanr",
    "pearson": "pearsonr",
    "mean_squared_error": "mse",
    "micro_f1": "f1",
    "macro_f1": "f1",
    "mlm_perplexity": "perplexity",
    "lm_perplexity": "perplexity",
    **dict.fromkeys(("mlm_accuracy", "nsp_accuracy", "sop_accuracy"), "accuracy"),
    **dict.fromkeys(("lm_accuracy", "rtd_accuracy"), "accuracy"),
}
"""bertkit's name of a score -> the hub's, where they differ."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a card says, except what follows from the model's files: its use and its tags."""

    title: str
    summary: str
    """Plain sentences about what the model is."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The fields of the hub's YAML block, with JSON values."""
    sections: Mapping[str, str] = field(default_factory=dict)
    """Heading -> Markdown."""

    def text(self) -> str:
        """Return the whole file, with its checksum."""
        parts = [f"---\n{metadata_yaml(self.metadata)}\n---", f"# {self.title}", self.summary]
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


def metadata_yaml(values: Mapping[str, Any]) -> str:
    """Return metadata as YAML, formatted by the hub's own library.

    Scores that somebody has written in another form than the hub's are left out.
    """
    from huggingface_hub.repocard_data import ModelCardData

    return ModelCardData(**values, ignore_metadata_errors=True).to_yaml()


def model_index(name: str, pipeline: str, found: Sequence[Scored]) -> list[dict[str, Any]] | None:
    """Return the `model-index` of the hub for a model's name and task; None if there is no score.

    The scores of single entity types are left out.
    """
    results = []
    for one in found:
        metrics = [
            {"type": METRIC_IDS.get(name, name), "value": value, "name": name.replace("_", " ")}
            for name, value in one.scores.items()
            if "/" not in name and not name.endswith("threshold")
        ]
        kinds = {
            "name": one.dataset or "own data",
            "type": one.hub_id or "private",
            "config": one.config,
            "split": one.split,
        }
        dataset = {key: value for key, value in kinds.items() if value}
        if metrics:
            task = {"type": pipeline, "name": pipeline.replace("-", " ")}
            results.append({"task": task, "dataset": dataset, "metrics": metrics})
    return [{"name": name, "results": results}] if results else None


def is_edited(path: Path) -> bool:
    """Return whether a card exists and is not exactly what bertkit wrote."""
    if not path.is_file():
        return False
    content = path.read_bytes()
    seal = SEAL.search(content)
    return not seal or hashlib.sha256(content[: seal.start()]).hexdigest().encode() != seal[1]


def write_card(folder: Path, card: Card, *, replaced: Path, form: SavedForm | None = None) -> None:
    """Write the card of a model whose other files are complete, or keep the one of its user.

    Tags and the section about the model's use are added. An edited card is kept in `replaced`, the
    folder that a temporary `folder` will replace. Without `form`, how the model is used is read
    from a model directory.
    """
    if is_edited(replaced / CARD):
        if folder != replaced:
            shutil.copyfile(replaced / CARD, folder / CARD)
        return
    whole = completed(card, form or saved_form(folder))
    (folder / CARD).write_text(whole.text(), encoding="utf-8", newline="\n")


def completed(card: Card, form: SavedForm) -> Card:
    """Return a card with what follows from a model's files: tags, task, library and use."""
    tags = dict.fromkeys(["bertkit", form.family, form.task, *card.metadata.get("tags", ())])
    known = {"library_name": form.library, "pipeline_tag": PIPELINES.get(form.head)}
    rest = {k: v for k, v in card.metadata.items() if k not in (*known, "tags")}
    metadata = {**rest, **known, "tags": [tag for tag in tags if tag]}
    sections = {USE: snippets(form), **{k: v for k, v in card.sections.items() if k != USE}}
    kept = {name: value for name, value in metadata.items() if value}
    return replace(card, metadata=kept, sections=sections)


def kept_card(folder: Path) -> str:
    """Return a note if a folder has an edited card, which was therefore kept; else ""."""
    if not is_edited(folder / CARD):
        return ""
    return f"{folder / CARD} was edited and is kept as it is; delete it to get a new one"


def read_card(folder: Path) -> Card | None:
    """Read the card of a model that bertkit wrote, possibly edited; None if there is none.

    Cards of other libraries have other sections, so only their metadata is returned.
    """
    text = card_text(folder)
    if not text:
        return None
    body = text.split("\n---\n", 1)[1] if text.startswith("---\n") and "\n---\n" in text else text
    lines, fenced, heading = body.split("\n"), False, ""
    parts: dict[str, list[str]] = {"": []}
    title = ""
    for line in lines:
        fenced ^= bool(FENCE.match(line))
        if line.startswith("## ") and not fenced:
            heading = line.removeprefix("## ").strip()
            parts[heading] = []
        elif line.startswith("# ") and not title and not fenced:
            title = line.removeprefix("# ").strip()
        elif not line.startswith(("<!-- bertkit ", "*Made with bertkit ")):
            parts[heading].append(line)
    metadata = read_metadata(folder)
    if "bertkit" not in metadata.get("tags", ()):
        return Card(title="", summary="", metadata=metadata)
    sections = {name: "\n".join(found).strip() for name, found in parts.items()}
    return Card(title=title, summary=sections.pop(""), metadata=metadata, sections=sections)


def card_text(folder: Path) -> str:
    """Return the text of a folder's card; "" if there is none or it is unreasonably large."""
    path = folder / CARD
    if not path.is_file() or path.stat().st_size > MAX_CARD_BYTES:
        return ""
    return path.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")


def read_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata of a folder's card; {} if there is none or it is not valid."""
    if not card_text(folder).startswith("---\n"):
        return {}
    from huggingface_hub.repocard import metadata_load

    try:
        found = metadata_load(folder / CARD)
    except Exception:  # whatever another program wrote there; a card is not needed
        return {}
    if not isinstance(found, dict):
        return {}
    tags = found.get("tags")
    known = {key: value for key, value in found.items() if isinstance(key, str)}
    known["tags"] = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    return {key: value for key, value in known.items() if key not in RESERVED}


def inherited_metadata(folder: Path) -> dict[str, Any]:
    """Return the metadata that a model made from the one in a folder takes over.

    The base model is the folder's own name on the hub, if it is in the hub's cache.
    """
    metadata = read_metadata(folder)
    found = {name: metadata[name] for name in INHERITED if is_text(metadata.get(name))}
    if cached := hub_commit(folder):
        found["base_model"] = cached.partition("@")[0]
    return found


def is_text(value: Any) -> bool:
    """Return whether a value is a text or a list of texts."""
    several = value if isinstance(value, list) else [value]
    return bool(value) and all(isinstance(one, str) for one in several)


def origin_text(path: Path) -> str:
    """Return Markdown that names a model: on the hub with its commit, else its folder."""
    if found := hub_commit(path):
        name, _, commit = found.partition("@")
        return f"[{name}](https://huggingface.co/{name}) at commit `{commit}`"
    return f"the local model `{path.parent.name if path.name == 'model' else path.name}`"


def start_text(path: Path, digest: str) -> str:
    """Return Markdown about the model from which the weights were initialised."""
    said = f"The weights were initialised from {origin_text(path)}"
    return f"{said}. The SHA-256 of its weights, vocabulary and config is `{digest}`."


def derived_card(path: Path, folder: Path, config: ModelConfig, tokenizer: Any) -> Card:
    """Return the card to begin with for a model that is another one in another form.

    `path` is the other model, as its user named it, and `folder` its model directory, whose card is
    taken over if bertkit wrote it.
    """
    card = read_card(folder)
    metadata = {**(card.metadata if card else {}), **inherited_metadata(folder)}
    if card is not None and card.title:
        return replace(card, metadata=metadata)
    plain = {name: metadata[name] for name in INHERITED if name in metadata}
    about = f"This is {origin_text(path)} in another form. {network_text(config, tokenizer)}"
    return Card(title="BERT", summary=about, metadata=plain)


def network_text(config: ModelConfig, tokenizer: Any) -> str:
    """Return sentences about a network and its vocabulary."""
    case = "lowercased" if tokenizer.lowercase else "cased"
    direction = config.direction.replace("_", " ")
    layers = f"{config.num_hidden_layers} layer{'s' * (config.num_hidden_layers != 1)}"
    heads = f"{config.num_attention_heads} attention head{'s' * (config.num_attention_heads != 1)}"
    return (
        f"The network has {layers} with {heads} and a hidden size of {config.hidden_size:,}; "
        f"it is {direction} and reads "
        f"up to {config.max_position_embeddings:,} tokens at a time. The vocabulary has "
        f"{tokenizer.size:,} {case} WordPiece tokens."
    )


def settings_table(settings: Mapping[str, Any]) -> str:
    """Return a Markdown table of settings; those in nested objects get dotted names."""
    rows = [
        (name, ", ".join(map(str, value)) if isinstance(value, list | tuple) else value)
        for name, value in dotted_values(settings)
        if not (value is None or (isinstance(value, str | list | tuple) and not value))
    ]
    return table(("setting", "value"), rows)


def skipped_table(skipped: Mapping[str, int]) -> str:
    """Return Markdown about what was left out or changed while text or data was read."""
    if not skipped:
        return "Nothing was skipped."
    rows = sorted(skipped.items())
    return "Left out or changed while reading:\n\n" + table(("what", "number"), rows)


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
    return re.sub(r"[|\\<>\[\]*_`]", lambda found: f"\\{found[0]}", " ".join(text.split()))
