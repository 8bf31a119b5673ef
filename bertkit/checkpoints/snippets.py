"""Code that uses a saved model, for its card: with bertkit, transformers, onnxruntime or torch.

Every snippet runs as it stands in the folder of the model. `on_hub` turns it into one that runs
anywhere once the model is on the hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.checkpoints.names import heads_of_class
from bertkit.checkpoints.pretrained import recorded_recipe
from bertkit.files import read_object, read_optional

HERE_LINE = 'model_name = "."  # this folder, or the name of the model on the hub'
FOLDER_LINE = 'folder = "."  # the folder of these files'
PIPELINES = {
    **dict.fromkeys(
        ("classification", "multi-label-classification", "regression"), "text-classification"
    ),
    "multiple-choice": "multiple-choice",
    "token-classification": "token-classification",
    "question-answering": "question-answering",
    "pretraining": "fill-mask",
    "words": "fill-mask",
    "causal": "text-generation",
    "replaced": "feature-extraction",
    "encoder": "feature-extraction",
    "embedding": "sentence-similarity",
}
"""Head -> the hub's name of the task."""
TUNED_HEADS = tuple(PIPELINES)[:6]
HEAD_OF_CLASS = {"pairs": "pretraining", "words": "words", "causal": "causal"}
HEAD_OF_CLASS |= {"replaced": "replaced", "encoder": "encoder"}


@dataclass(frozen=True, kw_only=True)
class SavedForm:
    """What the use of a saved model depends on."""

    head: str
    """A key of `PIPELINES`."""
    format: str = "model"
    """model, for a directory that bertkit reads, or a format of `bertkit export`."""
    family: str = "bert"
    """The `model_type` of config.json."""
    library: str = "bertkit"
    """The hub's name of the library that loads the whole model."""
    architecture: str = ""
    """transformers' class; "" if it has none."""
    pairs: bool = False
    """Whether a classifier reads two texts."""
    max_length: int = 512
    """The maximum number of tokens of a sequence."""
    prompt: str = ""
    """The prompt before every text of an embedding model."""
    lowercase: bool = False
    """Whether an embedding model lowercases texts before they are tokenised."""

    @property
    def task(self) -> str:
        """The name of the task among the tags of a card."""
        return {"words": "masked-language-model", "causal": "language-model"}.get(
            self.head, self.head
        )


def saved_form(folder: Path) -> SavedForm:
    """Read how the model in a complete model directory is used.

    Raises:
        BertkitError: a file is damaged.
    """
    config = read_object(folder / "config.json")
    details = read_optional(folder / "bertkit.json")
    family, names = str(config.get("model_type", "bert")), config.get("architectures")
    named = str(names[0]) if isinstance(names, list) and names else ""
    # with a head of its own, transformers loads only the encoder
    architecture = "" if family == "bertkit" or details.get("head") else named
    known: dict[str, Any] = {
        "family": family if family != "bertkit" else "",
        "library": "transformers" if architecture else "bertkit",
        "architecture": architecture,
        "pairs": bool(details.get("pairs")),
        "max_length": int(config.get("max_position_embeddings", 512)),
    }
    if (folder / "modules.json").is_file():
        return SavedForm(head="embedding", **{**known, "library": "sentence-transformers"})
    return SavedForm(head=saved_head(details, named), **known)


def saved_head(details: Mapping[str, Any], architecture: str) -> str:
    """Return the head of a model from its `bertkit.json` and the class in its `config.json`."""
    task = str(details.get("task"))
    if task in TUNED_HEADS:
        return task
    if found := sorted(heads_of_class(architecture) & HEAD_OF_CLASS.keys()):
        return HEAD_OF_CLASS[found[0]]
    objectives = recorded_recipe(details, "objectives")
    if str(objectives.get("token", "")).startswith("clm"):
        return "causal"
    if objectives and objectives.get("token") != "rtd":
        return "pretraining" if objectives.get("pair") in ("nsp", "sop") else "words"
    return "replaced" if objectives else "encoder"


def snippets(form: SavedForm) -> str:
    """Return Markdown with the code that uses a model, a block for each library."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("bertkit.checkpoints", ""),
        autoescape=False,  # noqa: S701 - the result is Markdown, which the hub escapes
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    lines = {"here": HERE_LINE, "here_folder": FOLDER_LINE}
    template = environment.get_template("snippets.md.jinja")
    return template.render(form=form, head=form.head, single=TUNED_HEADS[:3], **lines).rstrip()


def on_hub(text: str, name: str) -> str:
    """Return a card whose snippets load the model from the hub under its name there."""
    download = f'folder = snapshot_download("{name}")'
    text = text.replace(FOLDER_LINE, f"from huggingface_hub import snapshot_download\n\n{download}")
    return text.replace(HERE_LINE, f'model_name = "{name}"')
