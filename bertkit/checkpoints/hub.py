"""Models on the Hugging Face hub: `ORG/NAME`, `NAME`, `ORG/NAME@REVISION`, or with `hf:`.

Only safetensors, configurations and tokenizers are downloaded, never a pickle. They go to the cache
that transformers uses, too, so HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN have their usual
meaning, and a model that is in the cache needs no network.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from bertkit.errors import BertkitError

PREFIX = "hf:"
REPOSITORY = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*")
REVISION = re.compile(r"(?!.*\.\.)[\w./-]+")
CONFIGS = (
    *("config.json", "bertkit.json", "vocab.txt", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "modules.json", "export.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json"),
)
DOWNLOADED = (*CONFIGS, "*.safetensors", "*/*.json", "*/vocab.txt", "adapter_config.json")
"""Patterns of the files that are downloaded, beside the card."""
NOT_DOWNLOADED = ("onnx/*", "openvino/*")
CARD = "README.md"
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
        code = "hub-gated"
        message = f"{name} is gated: accept its conditions on its page, then {LOGIN}"
    elif isinstance(error, errors.RevisionNotFoundError):
        code, message = "hub-revision", f"{name.repo} has no revision '{name.revision}'"
    elif isinstance(error, errors.RepositoryNotFoundError):
        code = "hub-not-found"
        message = f"{name} is neither a folder nor a model of the hub; check it, or {LOGIN}"
    elif response is not None and response.status_code in (401, 403):
        code = "hub-forbidden"
        message = f"the hub refused your access to {name} ({reason}): {LOGIN}"
    elif isinstance(error, errors.LocalEntryNotFoundError):
        cause = type(error.__cause__).__name__ if error.__cause__ else reason
        code = "hub-offline"
        message = (
            f"{name} is neither a folder nor in the hub's cache, and the hub cannot be reached "
            f"({cause}); where it can, run `hf download {name.repo} --local-dir "
            f"{name.repo.rpartition('/')[2]}`, and give that folder"
        )
    elif isinstance(error, OSError) and error.filename is not None:
        code, message = "hub-cache", f"cannot store {name} in the cache ({error}); set HF_HOME"
    else:
        failure = f"{type(error).__name__}: {reason}"
        code, message = "hub", f"the hub failed for {name} ({failure}); run it again"
    return BertkitError(message, code=code)
