"""Models named as on the Hugging Face hub: `ORG/NAME`, `NAME`, `ORG/NAME@REVISION`, or with `hf:`.

Only safetensors, configurations and tokenizers are downloaded, never a pickle. The files go to the
cache that transformers uses, too, so HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT and HF_TOKEN have their
usual meaning, and a model that is in the cache needs no network.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from bertkit.errors import BertkitError
from bertkit.processes import interruptible

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
UNREADABLE = (ValueError, LookupError, TypeError, AttributeError)
"""What `huggingface_hub` raises for an answer that is no JSON, or other JSON than it expects."""
LIBRARIES_OF_REQUESTS = ("httpx", "httpcore", "requests", "urllib3")
"""How the names of the libraries begin that huggingface_hub's versions send requests with."""


class HubName(NamedTuple):
    """A repository of the hub and one of its revisions."""

    repo: str
    revision: str | None = None
    """A branch, a tag or a commit; None for the main branch."""

    def __str__(self) -> str:
        """Return the name as a user writes it."""
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def parse_hub_name(name: str) -> HubName | None:
    """Split a name into repository and revision; None if it cannot be one of the hub.

    Raises:
        BertkitError: the name begins with `hf:` and what follows is not a hub name.
    """
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

    An interrupted download continues where it stopped. Nothing is downloaded if the cache holds the
    commit already.

    Raises:
        BertkitError: the hub has no such model or revision, the model is gated or has no
            safetensors, the hub cannot be reached, or the cache cannot be written.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def download(*, offline: bool = False) -> Path:
        return Path(
            snapshot_download(
                name.repo,
                revision=name.revision,
                # what another program has put into the cache may be enough without a card
                allow_patterns=[one for one in DOWNLOADED if not (offline and one == "README.md")],
                ignore_patterns=list(NOT_DOWNLOADED),
                local_files_only=offline,
            )
        )

    try:
        folder = interruptible(download)
    except LocalEntryNotFoundError as error:
        folder = cached_folder(name, download, error)
    except HFValidationError:
        raise BertkitError(f"'{name}' is not a hub name", code="hub-name") from None
    except HfHubHTTPError as error:
        raise refused_by_hub(name, error) from None
    except Exception as error:
        raise failed_download(name, error) from None
    if not any(folder.rglob("*.safetensors")):
        raise BertkitError(
            f"{name} has no safetensors, and bertkit reads no pickles; choose a revision that has "
            f"them (often {name.repo}@refs/pr/1), or convert it with transformers' save_pretrained",
            code="hub-safetensors",
        )
    return folder


def failed_download(name: HubName, error: Exception) -> Exception:
    """Return the error for a download that the hub did not refuse; itself if it is unknown."""
    if type(error).__module__.startswith(LIBRARIES_OF_REQUESTS):
        return BertkitError(
            f"the download of {name} was interrupted ({type(error).__name__}); check the network "
            "and the proxy, and run the same command again",
            code="hub-offline",
        )
    if isinstance(error, UNREADABLE):  # or a file's name leads out of the folder
        reason = (str(error).splitlines() or [""])[0] or type(error).__name__
        return BertkitError(
            f"the hub's list of the files of {name} cannot be used: {reason}", code="hub"
        )
    if isinstance(error, OSError):
        return BertkitError(
            f"cannot store {name} in the cache ({error}); make room, or set HF_HOME to a folder "
            "that can be written",
            code="hub-cache",
        )
    return error


def cached_folder(name: HubName, download: Callable[..., Path], error: Exception) -> Path:
    """Return the folder of a model in the cache, which another program may have filled.

    Raises:
        BertkitError: the cache does not have the model; the message says how to get it.
    """
    from huggingface_hub.errors import LocalEntryNotFoundError

    with suppress(LocalEntryNotFoundError):
        folder = download(offline=True)
        if any(folder.rglob("*.safetensors")):  # not one whose download was interrupted
            return folder
    revision = f" --revision {name.revision}" if name.revision else ""
    cause = type(error.__cause__).__name__ if error.__cause__ else str(error).splitlines()[0]
    raise BertkitError(
        f"{name} is neither a folder here nor a model in the hub's cache, and the hub cannot be "
        f"reached ({cause}); where it can, run `hf download {name.repo}{revision} "
        f"--local-dir {name.repo.rpartition('/')[2]}`, and give that folder",
        code="hub-offline",
    ) from None


def refused_by_hub(name: HubName, error: Exception) -> BertkitError:
    """Explain why the hub did not give a model."""
    from huggingface_hub import constants, errors

    login = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        page = f"{constants.ENDPOINT}/{name.repo}"
        return BertkitError(
            f"{name} is gated: accept its conditions at {page}, then {login}", code="hub-gated"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return BertkitError(
            f"{name} is neither a folder here nor a model of the hub; check the name, or {login} "
            "if it is private",
            code="hub-not-found",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return BertkitError(
            f"{name.repo} has no revision '{name.revision}'; name a branch, a tag or a commit",
            code="hub-revision",
        )
    return BertkitError(f"the hub did not give {name}: {str(error).splitlines()[0]}", code="hub")


def hub_commit(folder: Path) -> str:
    """Return `ORG/NAME@COMMIT` of a folder in the hub's cache, "" for any other folder."""
    found = COMMIT_FOLDER.search(folder.as_posix())
    return f"{found['repo'].replace('--', '/', 1)}@{found['commit']}" if found else ""
