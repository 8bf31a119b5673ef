"""Models named as on the Hugging Face hub: `ORG/NAME`, `NAME`, `ORG/NAME@REVISION`, or with `hf:`.

Only safetensors, configurations and tokenizers are downloaded, never a pickle. The files go to the
cache that transformers uses, too, so HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN have their
usual meaning, and a model that is in the cache needs no network.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from bertkit.errors import BertkitError

PREFIX = "hf:"
REPOSITORY = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")
REVISION = re.compile(r"(?!.*\.\.)[\w./-]+")
COMMIT_FOLDER = re.compile(r"models--(?P<repo>.+)/snapshots/(?P<commit>[0-9a-f]{40})")
"""The end of the path of a snapshot in the cache."""
DOWNLOADED = (
    *("config.json", "bertkit.json", "*.safetensors", "*.safetensors.index.json"),
    *("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "modules.json", "sentence_bert_config.json", "*/*.json", "*/vocab.txt"),
    *("config_sentence_transformers.json", "README.md"),
)
"""Patterns of the files that are downloaded."""
NOT_DOWNLOADED = ("onnx/*", "openvino/*")
LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


class HubName(NamedTuple):
    """A repository of the hub and one of its revisions."""

    repo: str
    revision: str | None = None
    """A branch, a tag or a commit; None for the main branch."""

    def __str__(self) -> str:
        """Return the name as a user writes it."""
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
    """Return the folder of a model's files in the cache; download what is missing.

    Raises:
        BertkitError: the hub has no such model or revision, the model is gated or has no
            safetensors, the hub cannot be reached, or the cache cannot be written.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def download(patterns: list[str], *, offline: bool) -> Path:
        return Path(
            snapshot_download(
                name.repo,
                revision=name.revision,
                allow_patterns=patterns,
                ignore_patterns=list(NOT_DOWNLOADED),
                local_files_only=offline,
            )
        )

    try:
        folder = download(list(DOWNLOADED), offline=False)
    except LocalEntryNotFoundError as error:
        try:  # what another program has put into the cache may be enough without a card
            folder = download([one for one in DOWNLOADED if one != "README.md"], offline=True)
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
    status = response.status_code if response is not None else 0
    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
    code = "hub"
    if isinstance(error, errors.GatedRepoError):
        text, code = (
            f"{name} is gated: accept its conditions on its page, then {LOGIN}",
            "hub-gated",
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        text, code = f"{name.repo} has no revision '{name.revision}'", "hub-revision"
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = f"{name} is neither a folder here nor a model of the hub; check the name, or {LOGIN}"
        code = "hub-not-found"
    elif status in (401, 403):
        text = f"the hub refused your access to {name} ({reason}): {LOGIN}, with a token that may"
        code = "hub-forbidden"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        revision = f" --revision {name.revision}" if name.revision else ""
        cause = type(error.__cause__).__name__ if error.__cause__ else reason
        text = (
            f"{name} is neither a folder here nor a model in the hub's cache, and the hub cannot "
            f"be reached ({cause}); where it can, run `hf download {name.repo}{revision} "
            f"--local-dir {name.repo.rpartition('/')[2]}`, and give that folder"
        )
        code = "hub-offline"
    elif isinstance(error, OSError) and error.filename is not None:
        text, code = f"cannot store {name} in the cache ({error}); set HF_HOME", "hub-cache"
    else:
        text = f"the hub failed for {name} ({type(error).__name__}: {reason}); run it again"
    return BertkitError(text, code=code)


def hub_commit(folder: Path) -> str:
    """Return `ORG/NAME@COMMIT` of a folder in the hub's cache, "" for any other folder."""
    found = COMMIT_FOLDER.search(folder.as_posix())
    return f"{found['repo'].replace('--', '/', 1)}@{found['commit']}" if found else ""
