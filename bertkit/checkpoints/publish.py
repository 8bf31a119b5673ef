"""Publishing of a model on the Hugging Face hub, with a card made from what its files record.

Only the files of a model are uploaded: no training data, optimizer state, journal or pickle.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import bertkit
from bertkit.checkpoints.hub import CARD, CONFIGS, LOGIN, REPOSITORY, REVISION, HubName, hub_error
from bertkit.checkpoints.names import heads_of_class
from bertkit.checkpoints.pretrained import read_details
from bertkit.errors import BertkitError
from bertkit.files import dotted_values, escaped, from_home, read_object, read_optional

PUBLISHED = (
    *(*CONFIGS, "model.onnx", "model.safetensors"),
    *("[0-9]_*/config.json", "[0-9]_*/model.safetensors"),
)
"""Patterns of a model's files, which are uploaded; those of an earlier model are removed."""
LICENSES = ("LICENSE", "LICENSE.*")
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


class Published(NamedTuple):
    """A model on the hub: its page, its commit, its files, and other files that stayed here."""

    url: str
    commit: str
    files: list[str]
    left_out: list[str]


def push(
    model: Path | str,
    name: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "",
    license: str = "",  # noqa: A002 - the metadata's own name
) -> Published:
    """Publish a model directory, a run directory that holds `model/`, or an export, in one commit.

    The card is the folder's README.md or, if there is none, made from what the model's files say.

    Args:
        model: the folder.
        name: the name on the hub, `ORG/NAME`; the repository is created if it does not exist.
        private: whether only members of ORG may see it.
        revision: the branch to write, which is created if it does not exist; None for main.
        message: the message of the commit.
        license: the license for the card, as the hub writes it, such as "apache-2.0".

    Raises:
        BertkitError: there is no model, the name is not ORG/NAME, nobody is logged in or may write,
            the repository is public although `private` is true, or the hub cannot be reached.
    """
    folder = published_folder(Path(from_home(model)))
    if "/" not in name or not REPOSITORY.fullmatch(name):
        raise BertkitError(f"'{name}' is not a name on the hub; give ORG/NAME", code="hub-name")
    if revision is not None and not REVISION.fullmatch(revision):
        raise BertkitError(f"'{revision}' is not a branch name; use one such as main")
    if license and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise BertkitError(
            f"'{license}' is not an identifier of a license; give one as the hub lists them, such "
            "as apache-2.0 or mit, or 'other'"
        )
    files, left_out = published_files(folder)
    sent: dict[str, str | bytes] = {file: str((folder / file).resolve()) for file in files}
    sent[CARD] = card_text(folder, name, license).encode()
    target = HubName(name, revision)
    try:
        commit = upload(target, sent, private=private, message=message)
    except BertkitError:
        raise
    except Exception as error:
        raise hub_error(error, target) from error
    from huggingface_hub import constants

    return Published(f"{constants.ENDPOINT}/{name}", commit, sorted(sent), left_out)


def published_folder(path: Path) -> Path:
    """Return the folder of a model: a path itself, or `model/` in a run directory."""
    for folder in (path, path / "model"):
        weights = [*folder.glob("*.safetensors"), *folder.glob("model.onnx")]
        if weights and (folder / "config.json").is_file():
            return folder
    raise BertkitError(
        f"{path} holds no model to publish: no config.json with weights, here or in model/; name a "
        "model directory, a finished run or an export"
    )


def published_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files of a model to upload, and the other files in its folder, sorted.

    Hidden files are in neither list; a link that leads out of the folder is left out, except in the
    hub's own cache.
    """
    published: list[str] = []
    others: list[str] = []
    home = folder.resolve()
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_file() or re.search(r"(^|/)\.", name):
            continue
        inside = "/snapshots/" in home.as_posix() or path.resolve().is_relative_to(home)
        known = inside and matches_any(name, (*PUBLISHED, CARD, *LICENSES))
        (published if known else others).append(name)
    return published, others


def matches_any(file: str, patterns: Sequence[str]) -> bool:
    """Return whether a path relative to a model's folder matches one of some patterns."""
    return any(
        fnmatch(file, pattern) and pattern.count("/") == file.count("/") for pattern in patterns
    )


def upload(target: HubName, files: dict[str, str | bytes], *, private: bool, message: str) -> str:
    """Upload files (paths or contents) in one commit, without an earlier model's; return its hash.

    A commit of somebody else in between is an error.
    """
    name, revision = target
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token

    if get_token() is None:
        raise BertkitError(f"nobody is logged in to the hub: {LOGIN}", code="hub-login")
    api = HfApi(library_name="bertkit", library_version=bertkit.__version__)
    api.create_repo(name, private=private or None, exist_ok=True)
    if private and not api.model_info(name).private:
        raise BertkitError(
            f"{name} exists and is public; make it private in its settings, or choose another name",
            code="hub-public",
        )
    if revision is not None:
        api.create_branch(name, branch=revision, exist_ok=True)
    parent = api.model_info(name, revision=revision).sha
    present = api.list_repo_files(name, revision=parent)
    stale = [file for file in present if matches_any(file, PUBLISHED) and file not in files]
    commit = api.create_commit(
        name,
        [
            *(CommitOperationAdd(file, content) for file, content in files.items()),
            *(CommitOperationDelete(file) for file in stale),
        ],
        commit_message=message or f"Upload a model with bertkit {bertkit.__version__}",
        revision=revision,
        parent_commit=parent,
    )
    return str(commit.oid)


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
