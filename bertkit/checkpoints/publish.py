"""Publish a model on the Hugging Face hub: `bertkit push RUN ORG/NAME`.

Only the files of a model directory or an export are uploaded, in one commit: no optimizer state, no
journal, no training data, no pickle. HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE have their
usual meaning.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import bertkit
from bertkit.checkpoints.card import CARD, MODEL_PATH, card_text
from bertkit.checkpoints.hub import LOGIN, REPOSITORY, REVISION, HubName, hub_error
from bertkit.errors import BertkitError
from bertkit.files import from_home

CONFIGS = ("config.json", "export.json")
WEIGHTS = ("*.safetensors", "model.onnx")
PUBLISHED = (
    *CONFIGS,
    *("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json"),
    *("bertkit.json", "model.onnx", "vocab.txt", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "modules.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json", "[0-9]_*/config.json"),
    "[0-9]_*/model.safetensors",
)
"""Patterns of a model's files, which are uploaded; those of an earlier model are removed."""
AROUND = (CARD, "LICENSE", "LICENSE.*")
"""Patterns of files that are uploaded, too."""


class Published(NamedTuple):
    """A model on the hub."""

    url: str
    """The page of the model."""
    commit: str
    files: tuple[str, ...]
    """The files of the model, of which the hub may have had some already."""
    left_out: tuple[str, ...]
    """Other files in the folder, which were not uploaded."""


def push(
    model: Path | str,
    name: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str = "",
    license: str = "",  # noqa: A002 - the metadata's own name
) -> Published:
    """Publish a model on the hub, with its card.

    Args:
        model: a model directory, a run directory that holds `model/`, or an export.
        name: the name on the hub, `ORG/NAME`; the repository is created if it does not exist.
        private: whether only members of ORG may see it.
        revision: the branch to write, which is created if it does not exist; None for main.
        message: the message of the commit.
        license: the license for the card, as the hub writes it, such as "apache-2.0". The default
            keeps what the card says.

    Raises:
        BertkitError: there is no model, the name is not ORG/NAME, nobody is logged in or may write,
            the repository is public although `private` is true, or the hub cannot be reached.
    """
    folder = published_folder(Path(from_home(model)))
    if "/" not in name or not REPOSITORY.fullmatch(name):
        raise BertkitError(f"'{name}' is not a name on the hub; give ORG/NAME", code="hub-name")
    if revision is not None and not REVISION.fullmatch(revision):
        raise BertkitError(f"'{revision}' is not the name of a branch; give one such as main")
    if license and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license):
        raise BertkitError(
            f"'{license}' is not an identifier of a license; give one as the hub lists them, such "
            "as apache-2.0 or mit, or 'other'"
        )
    files, left_out = published_files(folder)
    card = card_text(folder).replace(MODEL_PATH, name)
    sent: dict[str, Any] = {file: str((folder / file).resolve()) for file in files}
    if license:
        card = with_license(card, license)
    if card:
        sent[CARD] = card.encode()
    try:
        commit = upload(name, sent, private=private, revision=revision, message=message)
    except BertkitError:
        raise
    except Exception as error:
        raise hub_error(error, HubName(name, revision)) from error
    from huggingface_hub import constants

    return Published(f"{constants.ENDPOINT}/{name}", commit, tuple(files), tuple(left_out))


def published_folder(path: Path) -> Path:
    """Return the folder of a model: a path itself, or `model/` in a run directory."""
    for folder in (path, path / "model"):
        known = any((folder / name).is_file() for name in CONFIGS)
        if known and any(file for pattern in WEIGHTS for file in folder.glob(pattern)):
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
    in_cache = "/snapshots/" in home.as_posix()
    is_sharded = (folder / "model.safetensors.index.json").is_file()
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if not path.is_file() or any(part.startswith(".") for part in relative.parts):
            continue
        inside = in_cache or path.resolve().is_relative_to(home)
        known = inside and matches_any(relative.as_posix(), (*PUBLISHED, *AROUND))
        known = known and (is_sharded or not fnmatch(path.name, "model-*-of-*.safetensors"))
        (published if known else others).append(relative.as_posix())
    return published, others


def matches_any(file: str, patterns: Sequence[str]) -> bool:
    """Return whether a path relative to a model's folder matches one of some patterns."""
    return any(
        fnmatch(file, pattern) and pattern.count("/") == file.count("/") for pattern in patterns
    )


def with_license(card: str, name: str) -> str:
    """Return a card whose metadata has this license."""
    from huggingface_hub import ModelCard

    changed = ModelCard(card, ignore_metadata_errors=True)
    changed.data["license"] = name
    return str(changed)


def upload(
    name: str, files: dict[str, Any], *, private: bool, revision: str | None, message: str
) -> str:
    """Upload files in one commit, which removes those of an earlier model; return its hash.

    Args:
        name: the repository.
        files: the path of each file in the repository, and its path here or its content.
        private: see `push`.
        revision: see `push`.
        message: see `push`.
    """
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
        parent_commit=parent,  # so that a commit of somebody else in between is an error
    )
    return str(commit.oid)
