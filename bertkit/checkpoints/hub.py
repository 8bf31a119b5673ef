"""Models on the Hugging Face hub: `ORG/NAME`, `NAME`, `ORG/NAME@REVISION`, or with `hf:`.

Only safetensors, configurations and tokenizers are downloaded or uploaded, never a pickle, training
data or optimizer state. Downloads go to the cache that transformers uses, too, so HF_HOME,
HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN have their usual meaning, and a model that is in the cache
needs no network.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import bertkit
from bertkit.errors import BertkitError
from bertkit.files import from_home

PREFIX = "hf:"
REPOSITORY = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")
REVISION = re.compile(r"(?!.*\.\.)[\w./-]+")
CONFIGS = (
    *("config.json", "bertkit.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "modules.json", "export.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json"),
)
DOWNLOADED = (*CONFIGS, "*.safetensors", "*/*.json", "*/vocab.txt")
"""Patterns of the files that are downloaded, beside the card."""
NOT_DOWNLOADED = ("onnx/*", "openvino/*")
PUBLISHED = (
    *(*CONFIGS, "model.onnx", "model.safetensors"),
    *("[0-9]_*/config.json", "[0-9]_*/model.safetensors"),
)
"""Patterns of a model's files, which are uploaded; those of an earlier model are removed."""
CARD, LICENSES = "README.md", ("LICENSE", "LICENSE.*")
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


class HubName(NamedTuple):
    """A repository of the hub and one of its revisions."""

    repo: str
    revision: str | None = None
    """A branch, a tag or a commit; None for the main branch."""

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse_hub_name(name: str) -> HubName | None:
    """Split a name into repository and revision; None if it cannot be one of the hub."""
    repo, at, revision = name.removeprefix(PREFIX).partition("@")
    if REPOSITORY.fullmatch(repo) and (REVISION.fullmatch(revision) if at else True):
        return HubName(repo, revision or None)
    if name.startswith(PREFIX):
        raise BertkitError(
            f"'{name}' is not a hub name; give {PREFIX}ORG/NAME or {PREFIX}ORG/NAME@REVISION",
            code="hub-name",
        )
    return None


def download_model(name: HubName) -> Path:
    """Return the folder of a model's files in the cache, after downloading what is missing."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(patterns: list[str], *, offline: bool) -> Path:
        only: Any = {"allow_patterns": patterns, "ignore_patterns": list(NOT_DOWNLOADED)}
        repo, revision = name
        return Path(snapshot_download(repo, revision=revision, local_files_only=offline, **only))

    try:
        folder = download([*DOWNLOADED, CARD], offline=False)
    except LocalEntryNotFoundError as error:
        try:  # what another program has put into the cache may be enough without a card
            folder = download([*DOWNLOADED], offline=True)
        except LocalEntryNotFoundError:
            raise hub_error(error, name) from None
        if not any(folder.rglob("*.safetensors")):  # its download was interrupted
            raise hub_error(error, name) from None
    except Exception as error:  # of the hub, the network, its libraries, or the disk
        raise hub_error(error, name) from error
    if not any(folder.rglob("*.safetensors")):
        raise BertkitError(
            f"{name} has no safetensors, and bertkit downloads no pickles; choose a revision that "
            f"has them (often {name.repo}@refs/pr/1), or convert it with transformers",
            code="hub-safetensors",
        )
    return folder


def hub_error(error: Exception, name: HubName) -> BertkitError:
    """Explain in one line why the hub did not give or take a model."""
    from huggingface_hub import errors

    response: Any = getattr(error, "response", None)
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    if isinstance(error, errors.GatedRepoError):
        text = f"-gated: {name} is gated: accept its conditions on its page, then {LOGIN}"
    elif isinstance(error, errors.RevisionNotFoundError):
        text = f"-revision: {name.repo} has no revision '{name.revision}'"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = (
            f"-not-found: {name} is neither a folder nor a model of the hub; check it, or {LOGIN}"
        )
    elif response is not None and response.status_code in (401, 403):
        text = f"-forbidden: the hub refused your access to {name} ({reason}): {LOGIN}"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        cause = type(error.__cause__).__name__ if error.__cause__ else reason
        text = (
            f"-offline: {name} is neither a folder nor in the hub's cache, and the hub cannot be "
            f"reached ({cause}); where it can, run `hf download {name.repo} --local-dir "
            f"{name.repo.rpartition('/')[2]}`, and give that folder"
        )
    elif isinstance(error, OSError) and error.filename is not None:
        text = f"-cache: cannot store {name} in the cache ({error}); set HF_HOME"
    else:
        text = f": the hub failed for {name} ({type(error).__name__}: {reason}); run it again"
    code, _, message = text.partition(": ")
    return BertkitError(message, code=f"hub{code}")


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
    from bertkit.checkpoints.card import card_text

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
