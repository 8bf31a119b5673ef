"""Publishing of a model on the Hugging Face hub, with a card made from what its files record.

Only the files of a model are uploaded: no training data, optimizer state, journal or pickle.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import bertkit
from bertkit.checkpoints.hub import CARD, CONFIGS, LOGIN, REPOSITORY, HubName, hub_error
from bertkit.checkpoints.pretrained import read_details
from bertkit.checkpoints.sentence_transformers import is_embedder
from bertkit.errors import BertkitError
from bertkit.files import dotted_values, from_home, read_object

PUBLISHED = (
    *(*CONFIGS, "model.onnx", "model.safetensors"),
    *("[0-9]_*/config.json", "[0-9]_*/model.safetensors"),
)
"""Patterns of a model's files, which are uploaded; those of an earlier model are removed."""


class Published(NamedTuple):
    """A model on the hub: its page, its commit and its files."""

    url: str
    commit: str
    files: list[str]


def push(model: Path | str, name: str, *, private: bool = False) -> Published:
    """Publish a model directory, a run directory that holds `model/`, or an export, in one commit.

    The card is the folder's README.md or, if there is none, made from what the model's files say.
    Files of an earlier model in the repository are removed.

    Args:
        model: the folder.
        name: the name on the hub, `ORG/NAME`; the repository is created if it does not exist.
        private: whether only members of ORG may see it.

    Raises:
        BertkitError: there is no model, the name is not ORG/NAME, nobody is logged in or may write,
            the repository is public although `private` is true, or the hub cannot be reached.
    """
    import huggingface_hub as hub

    folder = published_folder(Path(from_home(model)))
    if "/" not in name or not REPOSITORY.fullmatch(name):
        raise BertkitError(f"'{name}' is not a name on the hub; give ORG/NAME", code="hub-name")
    if hub.get_token() is None:
        raise BertkitError(f"nobody is logged in to the hub: {LOGIN}", code="hub-login")
    files: dict[str, str | bytes] = {f: str(folder / f) for f in published_files(folder)}
    if CARD not in files:
        files[CARD] = new_card(folder, name).encode(errors="backslashreplace")
    api = hub.HfApi(library_name="bertkit", library_version=bertkit.__version__)
    try:
        api.create_repo(name, private=private or None, exist_ok=True)
        info = api.model_info(name)
        if private and not info.private:
            raise BertkitError(
                f"{name} exists and is public; make it private in its settings, or choose another "
                "name",
                code="hub-public",
            )
        listed = api.list_repo_files(name, revision=info.sha)
        present = {file for file in listed if matches_any(file, PUBLISHED)}
        changes: list[Any] = [
            *(hub.CommitOperationAdd(file, content) for file, content in files.items()),
            *(hub.CommitOperationDelete(file) for file in sorted(present - {*files})),
        ]
        message = f"Upload a model with bertkit {bertkit.__version__}"
        # the parent makes a commit of somebody else in between an error
        commit = api.create_commit(name, changes, commit_message=message, parent_commit=info.sha)
    except BertkitError:
        raise
    except Exception as error:
        raise hub_error(error, HubName(name)) from error
    return Published(f"{hub.constants.ENDPOINT}/{name}", str(commit.oid), sorted(files))


def published_folder(path: Path) -> Path:
    """Return the folder of a model: a path itself, or `model/` in a run directory."""
    for folder in (path, path / "model"):
        if any((folder / name).is_file() for name in ("model.safetensors", "model.onnx")):
            return folder
    raise BertkitError(
        f"{path} holds no model to publish; name a model, a finished run or an export"
    )


def published_files(folder: Path) -> list[str]:
    """Return the files to upload, without links out of the folder, unless in the hub's cache."""
    home = folder.resolve()
    names = [
        path.relative_to(folder).as_posix()
        for path in folder.rglob("*")
        if path.is_file()
        and ("/snapshots/" in home.as_posix() or path.resolve().is_relative_to(home))
    ]
    patterns = (*PUBLISHED, CARD, "LICENSE", "LICENSE.*")
    return sorted(name for name in names if matches_any(name, patterns))


def matches_any(file: str, patterns: Sequence[str]) -> bool:
    """Return whether a path relative to a model's folder matches one of some patterns."""
    return any(
        fnmatch(file, pattern) and pattern.count("/") == file.count("/") for pattern in patterns
    )


def new_card(folder: Path, name: str) -> str:
    """Return the card of a model directory or an export: its use, its scores and its origin."""
    from huggingface_hub.repocard_data import ModelCardData

    config, details = read_object(folder / "config.json"), read_details(folder)
    is_export = (folder / "export.json").is_file()
    library = "onnx" if is_export else str(config.get("model_type"))
    if not is_export and library != "bertkit":
        library = "sentence-transformers" if is_embedder(folder) else "transformers"
    base = str(details.get("start") or "").partition("@")[0] or None
    front = ModelCardData(library_name=library, tags=["bertkit"], base_model=base).to_yaml()
    made = f"This is a BERT for {details.get('task') or 'texts'}."
    parts = [f"---\n{front}\n---", f"# {name.rpartition('/')[2]}", made]
    if not is_export:
        code = f'from bertkit import load\n\nmodel = load("{name}")'
        parts.append(f"```python\n{code}\n```\n\n{library} loads it, too.")
    scores = dotted_values(details.get("scores", {}))
    if rows := [f"| {plain(metric)} | {plain(value)} |" for metric, value in scores]:
        parts.append("| score | value |\n| --- | --- |\n" + "\n".join(rows))
    return "\n\n".join(parts) + "\n"


def plain(value: object) -> str:
    """Return a value as Markdown shows it unchanged."""
    return re.sub(r"[|\\<>\[\]*_`]", lambda match: f"\\{match[0]}", " ".join(str(value).split()))
