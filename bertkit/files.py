"""Files that are either complete or absent, and folders that hold work of one kind.

`write_text`, `new_file` and `new_folder` write under a temporary name and rename. `check_output`
and `claim` decide whether a command may write where its user says.
"""

from __future__ import annotations

import dataclasses
import errno
import glob
import hashlib
import json
import math
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin

from bertkit.errors import BertkitError, HeldError

if TYPE_CHECKING:
    import numpy as np

T = TypeVar("T")
MAX_OBJECT_BYTES = 1 << 24
"""The maximum size in bytes of a JSON file that describes a model, such as `config.json`."""
MAX_DEPTH = 100
"""The maximum number of levels of such a file: functions that call themselves walk through them."""
RECORDS = {
    "pre-training run": "recipe.json",
    "fine-tuning": "finetune.json",
    "corpus": "corpus.json",
    "token store": "settings.json",
    "tokenizer": "vocabulary.json",
    "export": "export.json",
    "model": "bertkit.json",
}
"""What a folder can hold -> the file that records the settings with which it was made."""
SIGNS = (
    *("recipe.json", "finetune.json", "settings.json", "export.json", "bertkit.json"),
    *("config.json", "vocab.txt", "manifest.json", "journal.jsonl"),
)
"""Files by which a folder is recognized as one that holds something already."""
DIGEST = re.compile("[0-9a-f]{16,128}")
REASONS = {
    errno.ENOSPC: "the disk is full; free some space and run the same command again",
    errno.EDQUOT: "the disk quota is used up; free some space and run the command again",
    errno.EACCES: "permission denied; choose another folder or change its permissions",
    errno.EROFS: "the file system is read-only; choose another folder",
    errno.EMFILE: "too many files are open; raise the limit (ulimit -n)",
}


def from_home(path: str | Path) -> str:
    """Return a path or URL with a leading ~ expanded; ~NAME stays if there is no such user."""
    return os.path.expanduser(path)  # noqa: PTH111 - pathlib raises an error for an unknown user


def is_remote(path: Path | str) -> bool:
    """Return whether a path is a URL, such as `s3://bucket/folder`, and not `C:/folder`."""
    return re.match(r"[a-z][a-z0-9+.-]+:/", str(path), re.IGNORECASE) is not None


def check_output(
    out: Path | str, inputs: Iterable[Path | str] = (), *, folder: bool = False
) -> Path:
    """Return the path of an output, with ~ expanded, if it can be written and damages no input."""
    path = Path(from_home(out))
    if is_remote(path):
        raise BertkitError(f"{out} is remote; write to a local or mounted folder, then copy")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and path.is_dir() != folder:
            what = "is not a folder" if folder else "is a folder; give the name of a file"
            raise BertkitError(f"{path} {what}")
        if not os.access(path if path.is_dir() else path.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, "permission denied", str(path))
    real = Path(os.path.realpath(path))
    for name in [from_home(name) for name in inputs if name]:
        remote = is_remote(name) or name.startswith("hf:")
        local = [] if remote else glob.glob(name) or [name]  # noqa: PTH207
        for source in map(os.path.realpath, local):
            if real.is_relative_to(source):
                where = "is an input" if real == Path(source) else f"lies in the input {name}"
                raise BertkitError(f"{path} {where}; choose another path for the output")
    return path


def sign_of_work(out: Path, ignored: Collection[str] = ()) -> str:
    """Return the first of `SIGNS` in a folder that is not ignored; "" if there is none."""
    return next((n for n in SIGNS if n not in ignored and (out / n).exists()), "")


def claim(
    out: Path,
    kind: str,
    settings: Mapping[str, Any],
    *,
    may_change: Collection[str] = (),
) -> dict[str, Any]:
    """Take a folder for one piece of work, and return the settings in its record.

    A new folder gets the record. A folder whose record has equal settings (but those whose dotted
    names are in `may_change`) holds this same work, to be resumed. Any other folder is refused.
    """
    record, new = out / RECORDS[kind], json.loads(json.dumps(settings, default=str))
    if not record.is_file():
        if sign := sign_of_work(out):
            raise BertkitError(
                f"{out} has a {sign} but no {record.name}, so it holds no {kind}; choose another "
                "folder"
            )
        write_json(record, new)
        return dict(new)
    old = read_object(record)
    if changed := differences(old, new, ignored=may_change):
        named = "; ".join(text[:120] for text in changed[:3])
        raise BertkitError(
            f"{out} holds a {kind} with other settings ({named}); choose another folder, or "
            "restore the settings to resume"
        )
    return old


def known_fields(kind: type[T], values: Mapping[str, Any]) -> T:
    """Make a dataclass of the fields in a file: unknown ones are ignored, missing ones default."""
    names = [item.name for item in dataclasses.fields(cast("Any", kind))]
    return kind(**{name: values[name] for name in names if name in values})


def check_replaceable(out: Path, kind: str) -> None:
    """Raise a BertkitError unless a folder may be replaced: it is absent, empty or of this kind."""
    empty = not out.exists() or (out.is_dir() and not any(out.iterdir()))
    if not empty and not (out / RECORDS[kind]).is_file():
        raise BertkitError(f"{out} exists and holds no {kind}; choose another folder")


def differences(
    before: Mapping[str, Any],
    after: Mapping[str, Any],
    prefix: str = "",
    *,
    ignored: Collection[str] = (),
) -> list[str]:
    """Describe the fields that differ; one that only one side has was off on the other."""
    changed: list[str] = []
    for key in sorted(key for key in {*before, *after} if f"{prefix}{key}" not in ignored):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            changed += differences(old, new, f"{prefix}{key}.", ignored=ignored)
        elif old != new and (old or new or (key in before and key in after)):
            digests = DIGEST.fullmatch(str(old)) and DIGEST.fullmatch(str(new))
            changed.append(f"{prefix}{key} {'differs' if digests else f'{old!r} -> {new!r}'}")
    return changed


def sha256_file(path: Path) -> str:
    """Return the SHA-256 of a file's bytes as hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def disk_errors(path: Path, inside: Path | None = None) -> Iterator[None]:
    """Turn an OSError of the block (about files `inside` a folder) into an error naming `path`."""
    try:
        yield
    except OSError as error:
        named = [Path(str(name)) for name in (error.filename, error.filename2) if name]
        if inside and named and not any(name.is_relative_to(inside) for name in named):
            raise
        # NumPy raises "8 requested and 0 written" without an error number.
        number = errno.ENOSPC if "requested and" in str(error) else error.errno or 0
        reason = REASONS.get(number, f"{error.strerror or error}; choose another folder")
        raise BertkitError(f"cannot write {path}: {reason}") from error


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file, flush it to disk, then rename it to `path`."""
    with new_file(path) as temporary, disk_errors(path):
        write(temporary)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; what the block writes there becomes `path` if the block succeeds."""
    if str(path.absolute().parent) in ("/dev", "/dev/fd", "/proc/self/fd") or (
        path.exists() and not path.is_file()
    ):
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise BertkitError(f"{path} is {what}; give the name of a file")
    path = Path(os.path.realpath(path))
    temporary = temporary_name(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
    try:
        yield temporary
        with disk_errors(path):
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
    finally:
        with disk_errors(path):
            temporary.unlink(missing_ok=True)


def temporary_name(path: Path) -> Path:
    """Return a unique name next to `path`; even containers that share a folder and pids differ."""
    if not path.name:
        raise BertkitError(f"{path} does not end in a name; give the path of a file or folder")
    unique = f"{os.getpid()}-{secrets.token_hex(4)}@{platform.node()}"
    return path.with_name(f".{path.name}.tmp-{unique}")


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files and folders that killed writers of `path` have left behind."""
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
        if leftover.name.endswith("-old"):
            if path.exists():
                remove_path(leftover)
            else:  # a kill between the two renames of `new_folder`
                with suppress(OSError):  # its process may restore it, or finish, at this moment
                    leftover.replace(path)
        elif is_abandoned(leftover):
            remove_path(leftover)


def remove_path(path: Path) -> None:
    """Remove a file, a link or a whole folder, ignoring errors."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def is_abandoned(leftover: Path) -> bool:
    """Return whether the process of this machine that writes a temporary file is dead."""
    pid, _, rest = leftover.name.rpartition(".tmp-")[2].partition("-")
    if not pid.isdecimal() or rest.partition("@")[2] != platform.node():
        return False  # of another machine, whose processes cannot be checked
    try:
        os.kill(int(pid), 0)
    except (OSError, OverflowError) as error:  # else it is another user's process
        return isinstance(error, ProcessLookupError)
    return False


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries so that a rename survives a power cut; not possible on Windows."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    r"""Write UTF-8 text atomically; undecodable bytes of file names become \udcXX."""
    content = text.encode(errors="backslashreplace")
    write_atomic(path, lambda temporary: temporary.write_bytes(content))


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically; undecodable bytes of file names survive a round trip."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_json_lines(path: Path, rows: Iterable[Any]) -> None:
    """Write JSON lines atomically: a value on each line."""
    write_text(path, "".join(map(json_line, rows)))


def json_line(value: Any) -> str:
    """Return a value as a line of standard JSON: NaN is null, and what JSON lacks is text."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"
    except (TypeError, ValueError):
        return json.dumps(jsonable(value), ensure_ascii=False) + "\n"


def map_array(path: Path) -> np.ndarray:
    """Map a `.npy` file into memory, refusing an array of objects, which would be a pickle."""
    import numpy as np

    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OverflowError) as error:
        reason = (str(error).splitlines() or ["cut short"])[0]
        raise BertkitError(f"{path} is not an array of numbers ({reason}); remake it") from None


def check_file_size(path: Path, maximum: int) -> None:
    """Refuse a file of more than `maximum` bytes, and what is no file: a pipe may never end."""
    if path.exists() and not path.is_file():
        raise BertkitError(f"{path} is not a regular file; put a copy of the file there")
    if path.is_file() and (size := path.stat().st_size) > maximum:
        raise BertkitError(
            f"{path} has {size:,} bytes; at most {maximum:,} are read; check the path"
        )


def read_json(path: Path) -> Any:
    """Read a JSON file; a BertkitError names the file and the line of what cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BertkitError(f"{path} does not exist") from None
    except OSError as error:
        raise BertkitError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, too long, too deep
        raise BertkitError(f"{path} is not valid JSON ({error}); restore or remake it") from None


def jsonable(value: Any) -> Any:
    """Return a value with JSON types only: NaN becomes None, scalars of NumPy and torch numbers."""
    if isinstance(value, Mapping):
        return {str(name): jsonable(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(item) for item in value]
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return value if value is None or isinstance(value, str | int | float) else str(value)


def as_json(settings: Any) -> dict[str, Any]:
    """Return a dataclass as the values that reading its JSON file gives: tuples become lists."""
    return json.loads(json.dumps(dataclasses.asdict(settings), default=str))


def matches_type(value: Any, kind: Any) -> bool:
    """Return whether a TOML or JSON value has a field's type; an integer is a float, NaN is not."""
    if get_origin(kind) is tuple:
        element, *_ = get_args(kind)
        return isinstance(value, list | tuple) and all(matches_type(v, element) for v in value)
    if isinstance(kind, UnionType):
        return any(matches_type(value, part) for part in get_args(kind))
    if kind is float:
        return type(value) is int or (isinstance(value, float) and not math.isnan(value))
    return type(value) is kind


def dotted_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each field, those of nested objects included."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from dotted_values(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def read_optional(path: Path, maximum: int = MAX_OBJECT_BYTES) -> dict[str, Any]:
    """Read a JSON object; return {} if the file does not exist."""
    return read_object(path, maximum) if path.exists() else {}


def read_object(path: Path, maximum: int = MAX_OBJECT_BYTES) -> dict[str, Any]:
    """Read a JSON object of at most `maximum` bytes from a folder that a stranger may have made."""
    check_file_size(path, maximum)
    value = read_json(path)
    if not isinstance(value, dict):
        raise BertkitError(f"{path} does not hold a JSON object; restore or remake it")
    nested: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        parts = (part.values() if isinstance(part, dict) else part for part in nested)
        nested = [item for part in parts for item in part if isinstance(item, dict | list)]
    if nested:
        raise BertkitError(f"{path} is nested more than {MAX_DEPTH} levels deep; remake it")
    return value


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `path` if the block succeeds."""
    temporary = temporary_name(path)
    aside = temporary.with_name(f"{temporary.name}-old")
    try:
        with disk_errors(path):
            remove_leftovers(path)
            temporary.mkdir(parents=True)
        with disk_errors(path, temporary):
            yield temporary
        with disk_errors(path):
            for file in temporary.rglob("*"):
                if file.is_file():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
            sync_folder(temporary)
            if path.exists():
                path.replace(aside)
            temporary.replace(path)
            sync_folder(path.parent)
            remove_path(aside)  # here, so that the block below goes on if a signal interrupts it
    finally:
        with disk_errors(path):
            if aside.exists() and not path.exists():
                aside.replace(path)
        remove_path(temporary)
        remove_path(aside)


@contextmanager
def exclusive_lock(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Lock a folder for the block, after up to `wait` seconds; a kill releases it."""
    give_up = time.monotonic() + max(wait, 0.2)  # others hold it for a moment to see if it is free
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("ab")
    with file:
        while os.name != "nt":
            import fcntl

            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):  # the latter on some NFS
                    raise BertkitError(
                        f"cannot lock {folder} ({error.strerror}); choose a folder whose file "
                        "system has flock"
                    ) from None
            if time.monotonic() >= give_up:
                raise HeldError(
                    f"another process is working in {folder}; wait for it or choose another folder"
                )
            time.sleep(0.1)
        yield
