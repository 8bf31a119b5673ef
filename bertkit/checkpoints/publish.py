"""Publish a model on the Hugging Face hub: `bertkit push RUN ORG/NAME`.

Only the files of a model directory or an export are uploaded, in one commit: no optimizer state, no
journal, no training data, no pickle. HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE have their
usual meaning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import bertkit
from bertkit.checkpoints import hub
from bertkit.checkpoints.card import CARD, card_text
from bertkit.checkpoints.snippets import on_hub
from bertkit.errors import BertkitError
from bertkit.files import from_home
from bertkit.processes import interruptible

CONFIGS = ("config.json", "bert_config.json", "export.json")
WEIGHTS = ("*.safetensors", "model.onnx", "model.pt2", "bert_model.ckpt.index")
PUBLISHED = (
    *CONFIGS,
    *("model*.safetensors", "model*.safetensors.index.json", "head.safetensors", "bertkit.json"),
    *("model.onnx", "model.pt2", "bert_model.ckpt.index", "bert_model.ckpt.data-*"),
    *("vocab.txt", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "generation_config.json", "modules.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json", "[0-9]_*/config.json"),
    *("[0-9]_*/model.safetensors", "beside/config.json", "beside/model.safetensors"),
    *("beside/vocab.txt", "beside/tokenizer.json", "beside/tokenizer_config.json"),
    "beside/bertkit.json",
)
"""Patterns of a model's files, which are uploaded; those of an earlier model are removed."""
AROUND = (CARD, "LICENSE", "LICENSE.*")
"""Patterns of files that are uploaded, too."""
IMAGES = ("*.png", "*.svg", "*.jpg")
"""Patterns of images, which are uploaded if the card names them."""
SHARD_FILES = "model-*-of-*.safetensors"
"""The files that an index divides the weights into; without an index nothing reads them."""
LOGIN = "log in with `hf auth login`, or set HF_TOKEN, with a token that may write"


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
    check_name(name, revision)
    if license:
        check_license(license)
    files, left_out = published_files(folder)
    card = on_hub(card_text(folder), name)
    if license:
        card = with_license(card, license)
    sent = {file: folder / file for file in files}
    try:
        commit = interruptible(
            lambda: upload(name, sent, card, private=private, revision=revision, message=message)
        )
    except BertkitError:
        raise
    except Exception as error:
        explained = refused(name, error)
        if explained is None:
            raise
        raise explained from None
    from huggingface_hub import constants

    return Published(f"{constants.ENDPOINT}/{name}", commit, tuple(files), tuple(left_out))


def published_folder(path: Path) -> Path:
    """Return the folder of a model: a path itself, or `model/` in a run directory.

    Raises:
        BertkitError: there is no model.
    """
    for folder in (path, path / "model"):
        known = any((folder / name).is_file() for name in CONFIGS)
        if known and any(found for pattern in WEIGHTS for found in folder.glob(pattern)):
            return folder
    raise BertkitError(
        f"{path} holds no model to publish: no config.json with weights, here or in model/; name a "
        "model directory, a finished run or an export",
        code="no-model",
    )


def check_name(name: str, revision: str | None) -> None:
    """Raise a BertkitError unless the names of a repository and of its branch are valid."""
    if "/" not in name or not hub.REPOSITORY.fullmatch(name):
        raise BertkitError(
            f"'{name}' is not a name on the hub; give ORG/NAME, where ORG is your user name or an "
            "organization",
            code="hub-name",
        )
    if revision is not None and not hub.REVISION.fullmatch(revision):
        raise BertkitError(
            f"'{revision}' is not a valid name of a branch; give one such as main", code="hub-name"
        )


def check_license(name: str) -> None:
    """Raise a BertkitError unless a license is written as the hub's identifiers are."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", name):
        raise BertkitError(
            f"'{name}' is not an identifier of a license; give one as the hub lists them, such as "
            "apache-2.0, mit or cc-by-4.0, or 'other'",
            code="license",
        )


def published_files(folder: Path) -> tuple[list[str], list[str]]:
    """Return the files of a model to upload, and the other files in its folder, sorted.

    A link that leads out of the folder is left out, except in the hub's own cache.
    """
    found: list[str] = []
    others: list[str] = []
    card = unquote(card_text(folder))
    home = folder.resolve()
    cached = hub.COMMIT_FOLDER.search(home.as_posix())
    is_sharded = (folder / "model.safetensors.index.json").is_file()
    for path in sorted(files_of_model(folder)):
        relative = path.relative_to(folder).as_posix()
        inside = path.resolve().is_relative_to(home)
        shown = matches_any(relative, IMAGES) and relative in card
        known = shown or matches_any(relative, (*PUBLISHED, *AROUND))
        known = known and (is_sharded or not fnmatch(relative, SHARD_FILES))
        (found if known and (inside or cached) else others).append(relative)
    return found, others


def matches_any(file: str, patterns: Sequence[str]) -> bool:
    """Return whether a path relative to a model's folder matches one of some patterns."""
    return any(
        fnmatch(file, pattern) and pattern.count("/") == file.count("/") for pattern in patterns
    )


def files_of_model(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder, without hidden ones."""
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden:
            yield path


def with_license(card: str, name: str) -> str:
    """Return a card whose metadata has this license."""
    line = f"license: {name}\n"
    if not card.startswith("---\n"):
        return f"---\n{line}---\n\n{card}"
    head, end, body = card[4:].partition("\n---\n")
    given = r"^license(_name|_link)?:.*\n(?:[ \t]+.*\n|- .*\n)*"  # with the lines of a list
    others = re.sub(given, "", f"{head}\n", flags=re.MULTILINE)
    return f"---\n{line}{others.removesuffix(chr(10))}{end}{body}"


def upload(
    name: str,
    files: dict[str, Path],
    card: str,
    *,
    private: bool,
    revision: str | None,
    message: str,
) -> str:
    """Upload files in one commit, which removes those of an earlier model; return its hash.

    Raises:
        BertkitError: nobody is logged in, the repository is public although it must not be, or its
            .gitignore names files of the model.
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
    contents: dict[str, Any] = {file: str(path.resolve()) for file, path in files.items()}
    if card:
        contents[CARD] = card.encode()
    parent = api.model_info(name, revision=revision).sha
    present = api.list_repo_files(name, revision=parent)
    stale = [one for one in present if matches_any(one, PUBLISHED) and one not in contents]
    added = [CommitOperationAdd(file, content) for file, content in contents.items()]
    api.preupload_lfs_files(name, added, revision=revision)
    if ignored := [one.path_in_repo for one in added if getattr(one, "_should_ignore", False)]:
        raise BertkitError(
            f"the .gitignore of {name} excludes {', '.join(ignored)}; remove these lines on the "
            "hub, or choose another name",
            code="hub-ignored",
        )
    found = api.create_commit(
        name,
        [*added, *(CommitOperationDelete(file) for file in stale)],
        commit_message=message or f"Upload a model with bertkit {bertkit.__version__}",
        revision=revision,
        parent_commit=parent,  # so that a commit of somebody else in between is an error
    )
    return str(found.oid)


def refused(name: str, error: Exception) -> BertkitError | None:
    """Explain why the hub did not take a model; None for an error of another kind."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    if isinstance(error, HfHubHTTPError):
        return refused_by_status(name, error)
    if isinstance(error, HFValidationError):
        return BertkitError(f"'{name}' is not a name on the hub; give ORG/NAME", code="hub-name")
    offline = isinstance(error, OfflineModeIsEnabled | ConnectionError | TimeoutError)
    if offline or type(error).__module__.startswith(hub.LIBRARIES_OF_REQUESTS):
        return BertkitError(
            f"the hub cannot be reached ({type(error).__name__}); check the network, HF_ENDPOINT "
            "and HF_HUB_OFFLINE, and run the same command again",
            code="hub-offline",
        )
    if isinstance(error, UnicodeError):
        return BertkitError(
            f"a file name or the token has characters that cannot be sent ({error}); rename the "
            "file, or correct HF_TOKEN",
            code="hub-characters",
        )
    said = " ".join(str(error).split())
    if isinstance(error, RuntimeError) and error.__cause__ is not None:  # for a large file
        cause, again = error.__cause__, "run the same command again"
        if not isinstance(cause, HfHubHTTPError) or is_busy(cause):
            message, code = f"the upload was interrupted ({said}); {again}", "hub-offline"
        else:
            check = "check that your token is still valid and that your storage there is not full"
            message, code = f"{said} {hub_reason(cause)}; {check}, and {again}", "hub-forbidden"
        return BertkitError(message, code=code)
    message, code = f"the hub's answer cannot be used ({said}); check HF_ENDPOINT", "hub"
    if type(error) is ValueError and CARD in said:  # of an edited card, for its metadata
        message, code = f"the hub does not accept {CARD}: {said}; edit it", "hub-card"
    return BertkitError(message, code=code) if isinstance(error, hub.UNREADABLE) else None


def hub_reason(error: Any) -> str:
    """Return the hub's own reason for an error, or else its status."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return [line.strip() for line in lines if not line.startswith("For more information")][-1]


def status_of(error: Any) -> int:
    """Return the HTTP status of the hub's answer, or 0 if there was none."""
    return error.response.status_code if error.response is not None else 0


def is_busy(error: Any) -> bool:
    """Return whether the same request may succeed later: too many requests, or a failing server."""
    return status_of(error) == 429 or status_of(error) >= 500


def refused_by_status(name: str, error: Any) -> BertkitError:
    """Explain an answer of the hub that is an error."""
    status, reason = status_of(error), hub_reason(error)
    if status == 401:
        return BertkitError(f"the hub does not accept your token: {LOGIN}", code="hub-login")
    if status == 403:
        return BertkitError(
            f"you may not write {name} ({reason}): use a token with write access, of a member of "
            f"{name.partition('/')[0]}",
            code="hub-forbidden",
        )
    if status == 412:
        return BertkitError(
            f"somebody else has changed {name} meanwhile; run the same command again",
            code="hub-changed",
        )
    if is_busy(error):
        return BertkitError(
            f"the hub is busy ({status}, {reason}); run the same command again", code="hub-offline"
        )
    return BertkitError(f"the hub did not take {name}: {reason}", code="hub")
