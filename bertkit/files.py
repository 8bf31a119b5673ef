"""Files that are either whole or absent (design law 8): atomic writes and checksums."""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bertkit.errors import BertkitError, HeldError

if TYPE_CHECKING:
    import numpy as np

BLOCK_BYTES = 1 << 20
MOST_OBJECT_BYTES = 1 << 24
"""Of a description of a model, such as `config.json`."""
LEFTOVER_SECONDS = 24 * 3600.0
"""What nobody has written to for so long is of a killed process, on this machine or another."""
WAIT_SECONDS = 60.0
"""How long to wait for another process that holds a folder for a moment; see `exclusive_lock`."""


def sha256_file(path: Path) -> str:
    """The SHA-256 of a file's bytes, as hex; reads in blocks of 1 MiB."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full disk or an impossible folder into one clear line that names `path`."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.ENOSPC: "the disk is full; free some space and run the same command again",
            errno.EDQUOT: "the disk quota is used up; free some space and run the command again",
            errno.EACCES: "permission denied; choose another folder or change its permissions",
            errno.EROFS: "the file system is read-only; choose another folder",
            errno.ELOOP: "it is a symbolic link, which is not followed here; remove it",
        }
        # NumPy says "8 requested and 0 written", and gives no number of an error.
        number = errno.ENOSPC if "requested and" in str(error) else error.errno or 0
        reason = reasons.get(number, f"{error.strerror or error}; choose another folder")
        raise BertkitError(f"cannot write {path}: {reason}") from error


def write_atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file under a temporary name, flush it to disk, then rename it to `path`.

    Args:
        path: the final file; its folder is made where it is missing.
        write: is given the temporary path and writes the whole content to it.

    Raises:
        BertkitError: the disk is full or the folder cannot be written.
    """
    with new_file(path) as temporary, disk_errors(path):
        write(temporary)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give a block a temporary name; what it wrote there becomes `path` when it ends well.

    After an error the old `path` stands. Disk errors here, not in the block, are `BertkitError`s.
    """
    if path.exists() and not path.is_file():  # a device would be replaced by a file
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise BertkitError(f"{path} is {what}; give the name of a file")
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
    """A name beside `path` that nobody else has: containers may share a folder and their pids.

    Raises:
        BertkitError: the path is a folder that something is in, such as ".".
    """
    if not path.name:
        raise BertkitError(f"{path} has no name of its own to be written under; give another name")
    own = f"{process_namespace()}-{os.getpid()}-{secrets.token_hex(4)}"
    return path.with_name(f".{path.name}.tmp-{own}")


@cache
def process_namespace() -> str:
    """The same for all processes that can see each other's ids; random where that is unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        namespace = boot + str(Path("/proc/self/ns/pid").readlink())
    except (OSError, ValueError):
        return secrets.token_hex(4)
    return hashlib.sha256(namespace.encode()).hexdigest()[:8]


def remove_leftovers(path: Path) -> None:
    """Clean up what killed writers of `path` have left under temporary names.

    A leftover goes when its process is dead. Processes of another machine or container cannot be
    asked; theirs go LEFTOVER_SECONDS after their last change. A folder that was put aside, with
    none in its place since, is what a kill between the two renames of `new_folder` leaves: it comes
    back.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
        if leftover.name.endswith("-old"):
            if path.exists():
                remove_path(leftover)
            else:
                with suppress(OSError):  # its own process may bring it back, or go on, just now
                    leftover.replace(path)
        elif is_of_dead_process(leftover) or time.time() - last_change(leftover) > LEFTOVER_SECONDS:
            remove_path(leftover)


def remove_path(path: Path) -> None:
    """Remove a file, a link or a whole folder, as far as that is possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def is_of_dead_process(leftover: Path) -> bool:
    """Whether a temporary name is that of a process which is known to have ended."""
    namespace, _, rest = leftover.name.rpartition(".tmp-")[2].partition("-")
    pid = rest.partition("-")[0]
    if namespace != process_namespace() or not pid.isdecimal() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):  # somebody else's process
        return False
    return False


def last_change(path: Path) -> float:
    """When a file, or anything in a folder, was last written, in seconds since 1970."""
    times = [0.0]
    for entry in (path, *path.rglob("*")):
        with suppress(OSError):  # gone meanwhile
            times.append(entry.stat().st_mtime)
    return max(times)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename survives a power cut; Windows cannot."""
    if os.name == "nt":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text atomically."""
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Write indented JSON atomically; bytes of names that are no UTF-8 come back the same."""
    text = (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode(
        errors="backslashreplace"
    )
    write_atomic(path, lambda temporary: temporary.write_bytes(text))


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a `.npy` file atomically (`path` keeps its name)."""
    import numpy as np

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)

    write_atomic(path, save)


def map_array(path: Path) -> np.ndarray:
    """Map a `.npy` file into memory; one of objects, which would be a pickle, is refused.

    Raises:
        BertkitError: it is no such file, or shorter than it says.
    """
    import numpy as np

    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OverflowError) as error:
        reason = (str(error).splitlines() or ["cut short"])[0]
        raise BertkitError(f"{path} is no array of numbers ({reason}); remake it") from None


def check_file_size(path: Path, most: int) -> None:
    """Refuse a file that is larger than any of its kind, before it is read into memory.

    Raises:
        BertkitError: it is larger, or it is a folder, a pipe or a device.
    """
    if path.exists() and not path.is_file():  # a pipe or a device may never end
        raise BertkitError(f"{path} is no regular file; put a copy of the file there")
    if path.is_file() and (size := path.stat().st_size) > most:
        raise BertkitError(f"{path} has {size:,} bytes; at most {most:,} are read; is it the file?")


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        BertkitError: the file is missing or is not JSON; the message names file and line.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise BertkitError(f"{path} does not exist") from None
    except OSError as error:
        raise BertkitError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, too long, too deep
        raise BertkitError(f"{path} is not valid JSON ({error}); restore or remake it") from None


def read_object(path: Path, most: int = MOST_OBJECT_BYTES) -> dict[str, Any]:
    """Read a JSON object from a folder that a stranger may have made.

    Args:
        path: the file.
        most: the bytes that any such file may have.

    Raises:
        BertkitError: the file is missing, is no regular file, is too large or holds no JSON object,
            or some text in it is not Unicode: JSON can write half of a surrogate pair.
    """
    check_file_size(path, most)
    value = read_json(path)
    if not isinstance(value, dict):
        raise BertkitError(f"{path} does not hold a JSON object; restore or remake it")
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise BertkitError(
            f"{path} has the character {half}, half of a surrogate pair, in a text; restore or "
            "remake the file"
        ) from None
    except RecursionError:
        raise BertkitError(f"{path} is nested too deeply; restore or remake it") from None
    return value


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a folder under a temporary name and rename it to `path` when the block ends well.

    An existing `path` is replaced only after the new one is complete. After an error the temporary
    folder is removed and the old one, if any, stands. Of several processes that fill the same
    folder at once, each writes its own temporary one, and the last to end wins.
    """
    temporary = temporary_name(path)
    aside = temporary.with_name(f"{temporary.name}-old")
    with disk_errors(path):
        remove_leftovers(path)
        temporary.mkdir(parents=True)
        try:
            yield temporary
            for file in temporary.rglob("*"):
                if file.is_file():
                    with file.open("rb") as handle:
                        os.fsync(handle.fileno())
            sync_folder(temporary)
            if path.exists():
                path.replace(aside)
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            remove_path(temporary)
            if aside.exists() and not path.exists():
                aside.replace(path)
            remove_path(aside)


@contextmanager
def exclusive_lock(folder: Path, wait: float = 0.0) -> Iterator[None]:
    """Hold a folder against a second process for the length of a block; freed even by a kill.

    Args:
        folder: it is made where it is missing.
        wait: seconds to wait for another process that holds it.

    Raises:
        HeldError: another process holds it, and did so for all of `wait`.
        BertkitError: the folder cannot be written, or its file system has no locks.
    """
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    give_up = time.monotonic() + wait
    with open_lock(folder / ".lock") as file:
        while not try_lock(file, folder):
            if time.monotonic() >= give_up:
                raise HeldError(
                    f"another process is working in {folder}; wait for it or choose another folder"
                )
            time.sleep(0.1)
        yield


def not_through_links(path: str, flags: int) -> int:
    """An `opener` for files of a folder that somebody else may have made: no link is followed."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)


def open_lock(path: Path) -> IO[bytes]:
    """Open a lock file, made where it is missing and never changed.

    Raises:
        BertkitError: it is a link or a folder, or cannot be written.
    """
    with disk_errors(path):
        return open(path, "ab", opener=not_through_links)


def try_lock(file: IO[bytes], folder: Path) -> bool:
    """Lock an open file of a folder unless another process has; True on Windows, without a lock.

    Raises:
        BertkitError: the file system has no locks.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        return True
    except OSError as error:
        if error.errno in (errno.EAGAIN, errno.EACCES):  # the latter on some NFS
            return False
        raise BertkitError(
            f"cannot lock {folder} ({error.strerror}); choose a folder whose file system has flock"
        ) from None
    return True
