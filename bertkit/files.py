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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from bertkit.errors import BertkitError, HeldError

if TYPE_CHECKING:
    import numpy as np

BLOCK_BYTES = 1 << 20
LEFTOVER_SECONDS = 24 * 3600.0
"""What nobody has written to for so long is of a killed process, on this machine or another."""
WAIT_SECONDS = 60.0
"""How long to wait for another process that holds a folder for a moment; see `only_process`."""


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
def new_text(path: Path) -> Iterator[Callable[[Iterable[str]], None]]:
    """Give a block what writes pieces of UTF-8 text; see `new_file`."""
    with new_file(path) as temporary:
        with disk_errors(path):
            file = temporary.open("w", encoding="utf-8")

        def write(pieces: Iterable[str]) -> None:
            with disk_errors(path):
                file.writelines(pieces)

        try:
            yield write
            with disk_errors(path):
                file.close()
        finally:
            with suppress(OSError):  # on a full disk closing fails, too
                file.close()


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """Give a block a temporary name; what it wrote there becomes `path` when it ends well.

    After an error the old `path` stands. Disk errors here, not in the block, are `BertkitError`s.
    """
    if path.is_dir():
        raise BertkitError(f"{path} is a folder; give the name of a file")
    temporary = temporary_name(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
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
    return path.with_name(f".{path.name}.tmp-{os.getpid()}-{secrets.token_hex(4)}")


def remove_leftovers(path: Path) -> None:
    """Clean up what killed writers of `path` have left under temporary names.

    Whether a process on another machine lives cannot be asked, so a leftover goes when its last
    change is LEFTOVER_SECONDS ago. A folder that was put aside, with none in its place since, is
    what a kill between the two renames of `new_folder` leaves: it comes back.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.tmp-*"):
        if leftover.name.endswith("-old"):
            if path.exists():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                with suppress(OSError):  # its own process may bring it back, or go on, just now
                    leftover.replace(path)
        elif time.time() - last_change(leftover) > LEFTOVER_SECONDS:
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


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
    """Write indented JSON atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


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
        BertkitError: says both sizes in bytes.
    """
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
            shutil.rmtree(temporary, ignore_errors=True)
            if aside.exists() and not path.exists():
                aside.replace(path)
            shutil.rmtree(aside, ignore_errors=True)


def keep_apart(out: Path, inputs: Iterable[str]) -> None:
    """Make sure that a file to be written is none of those that are read.

    Raises:
        BertkitError: it is one of them.
    """
    for path in inputs if out.exists() else ():
        if Path(path).exists() and out.samefile(path):
            raise BertkitError(f"{out} is what is read; give what is written another name")


@contextmanager
def only_process(folder: Path, wait: float = 0.0) -> Iterator[None]:
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
        file = (folder / ".lock").open("w")
    give_up = time.monotonic() + wait
    with file:
        while not try_lock(file, folder):
            if time.monotonic() >= give_up:
                raise HeldError(
                    f"another process is working in {folder}; wait for it or choose another folder"
                )
            time.sleep(0.1)
        yield


def try_lock(file: IO[str], folder: Path) -> bool:
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
