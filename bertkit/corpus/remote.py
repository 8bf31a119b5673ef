"""A token store at a remote address, whose shards are fetched into a bounded cache on demand.

The cache folder looks like the store itself with most shards missing, and `remote.json` records the
address. Processes of a host share it: a lock file of each shard lets one of them fetch it, and
files are removed under the lock of the whole cache. Every failure to read a remote file is a
one-line error, and network failures are retried.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import fsspec

from bertkit.corpus.store import ARRAYS, ShardInfo, check_shard
from bertkit.errors import BertkitError
from bertkit.files import (
    disk_errors,
    exclusive_lock,
    from_home,
    read_json,
    write_atomic,
    write_json,
)
from bertkit.text.remote import missing_package, time_limits
from bertkit.text.sources import is_remote, one_line

Fetched = TypeVar("Fetched")

GIGABYTES = 100.0
"""The default maximum size of the cache in gigabytes."""
PARALLEL = 4
"""The number of shards that are fetched at a time."""
ABANDONED_SECONDS = 3600.0
"""The age at which an unfinished file is removed: a killed process left it."""
SMALL_FILES = (
    "tokenizer/vocab.txt",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "unigrams.npy",
)


def open_remote(
    folder: Path | str, cache: Path | str | None, gigabytes: float | None
) -> RemoteStore | None:
    """Return the remote store at an address or behind a cache folder, or None if it is local.

    A cache folder is opened without a request to the address. For the arguments see `TokenStore`.
    """
    note = Path(folder) / "remote.json"
    if is_remote(Path(folder)):
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        root = Path(from_home(cache)).absolute() if cache else caches / "bertkit" / "stores"
        remote = RemoteStore(
            address(str(folder)), root, GIGABYTES if gigabytes is None else gigabytes
        )
        if not 0 < remote.gigabytes < float("inf"):
            given = f"{remote.gigabytes:g}"
            raise BertkitError(f"cache_gigabytes must be a number above 0, not {given}")
        remote.refresh()
        return remote
    if not note.is_file():
        return None
    values = read_json(note)
    try:
        return RemoteStore(
            str(values["url"]), note.absolute().parents[1], float(values["gigabytes"])
        )
    except (KeyError, TypeError, ValueError):
        raise BertkitError(f"{note} is damaged; give the store's address again") from None


def address(path: str) -> str:
    """Restore a URL from which `Path` removed a slash, and remove the one at its end."""
    scheme, _, rest = path.partition(":/")
    slashes = "///" if scheme == "file" else "//"
    return f"{scheme}:{slashes}{rest.strip('/')}"


@dataclass(frozen=True)
class RemoteStore:
    """A store's address and its cache."""

    url: str
    root: Path
    gigabytes: float

    @property
    def folder(self) -> Path:
        """The cache folder of this store."""
        name = re.sub(r"[^\w.-]+", "-", self.url.rpartition("/")[2])[:40]
        return self.root / f"{name}-{hashlib.sha256(self.url.encode()).hexdigest()[:12]}"

    def refresh(self) -> None:
        """Bring the manifest and the small files that every user needs up to date."""
        try:
            content = fetch_bytes(f"{self.url}/manifest.json")
        except FileNotFoundError:
            raise BertkitError(
                f"{self.url} is not a token store (no manifest.json there); check the address"
            ) from None
        manifest = self.folder / "manifest.json"
        with exclusive_lock(self.folder, math.inf, ".opening"):
            write_json(self.folder / "remote.json", {"url": self.url, "gigabytes": self.gigabytes})
            there = all((self.folder / name).is_file() for name in SMALL_FILES)
            if there and manifest.is_file() and manifest.read_bytes() == content:
                return
            for name in SMALL_FILES:
                self._copy(name)
            write_atomic(manifest, lambda path: path.write_bytes(content))

    def _copy(self, name: str) -> None:
        try:
            content = fetch_bytes(f"{self.url}/{name}")
        except FileNotFoundError:
            raise BertkitError(
                f"{self.url}/{name} is missing; copy the whole store there"
            ) from None
        write_atomic(self.folder / name, lambda path: path.write_bytes(content))

    def fetch(self, shards: Sequence[ShardInfo], *, verify: bool) -> None:
        """Bring shards into the cache, several at a time, and mark them as used.

        With `verify`, the checksums of cached files are checked, and damaged shards fetched again.

        Raises:
            BertkitError: a shard is missing or damaged at the address, the address cannot be
                reached, the disk is full, or the shard is larger than the cache may be.
        """

        def ensure(shard: ShardInfo) -> None:
            own = f".{shard.name}.lock"  # one process fetches it
            with exclusive_lock(self.folder, math.inf, own):
                try:
                    check_shard(self.folder, shard, checksums=verify)
                except BertkitError:  # absent, or damaged after it was fetched
                    self._fetch(shard)
                with suppress(FileNotFoundError):  # just removed: the caller fetches it again
                    os.utime(self.folder / f"{shard.name}.tokens.npy")

        with ThreadPoolExecutor(PARALLEL) as pool:
            list(pool.map(ensure, shards))

    def _fetch(self, shard: ShardInfo) -> None:
        """Download a shard's files into the cache, whose limit counts finished files only."""
        parts = {kind: self.folder / f".{shard.name}.{kind}.part" for kind in ARRAYS}
        try:
            with exclusive_lock(self.root, math.inf):
                make_room(self.root, self.gigabytes, sum(shard.bytes.values()))
            for kind, part in parts.items():
                self._download(shard, kind, part)
            with exclusive_lock(self.root, math.inf), disk_errors(self.folder):
                make_room(self.root, self.gigabytes, sum(shard.bytes.values()))  # others finished
                for kind, part in parts.items():
                    part.replace(self.folder / f"{shard.name}.{kind}.npy")
        except BaseException:
            for part in parts.values():
                part.unlink(missing_ok=True)
            raise

    def _download(self, shard: ShardInfo, kind: str, part: Path) -> None:
        """Download one file, in several attempts, and compare it with the manifest."""
        url = f"{self.url}/{shard.name}.{kind}.npy"

        def attempt() -> tuple[int, str]:
            digest, size = hashlib.sha256(), 0
            with open_remote_file(url) as stream, new_part(part) as write:
                while size <= shard.bytes[kind] and (block := stream(FETCH_BYTES)):
                    digest.update(block)
                    size += len(block)
                    write(block[: shard.bytes[kind]])
            return size, digest.hexdigest()

        try:
            found = retrying(attempt)
        except FileNotFoundError:
            raise BertkitError(f"shard {url} is missing; copy the whole store there") from None
        if found != (shard.bytes[kind], shard.sha256[kind]):
            raise BertkitError(
                f"shard {url} is corrupt or torn (its checksum is not the manifest's); copy the "
                "store there again"
            )


@contextmanager
def new_part(path: Path) -> Iterator[Callable[[bytes], None]]:
    """Yield a function that writes to a new file; errors of the caller are not those of the disk.

    Raises:
        BertkitError: the file cannot be written.
    """
    with disk_errors(path):
        file = path.open("wb")

    def write(block: bytes) -> None:
        with disk_errors(path):
            file.write(block)

    try:
        yield write
    except BaseException:
        with suppress(OSError):
            file.close()
        raise
    with disk_errors(path):
        file.close()


def make_room(root: Path, gigabytes: float, needed: int) -> None:
    """Remove the least recently used shards until a new one fits; needs the cache's lock.

    A process that has mapped a removed shard keeps reading it: the system frees its space later.
    """
    limit, used, shards = int(gigabytes * 1e9), needed, []
    for path in root.glob("*/*"):
        if not (path.parent / "remote.json").is_file() or path.suffix not in {".npy", ".part"}:
            continue
        try:
            found = path.stat()
        except FileNotFoundError:  # an unfinished file that has just been finished
            continue
        if path.suffix == ".part":
            if time.time() - found.st_mtime > ABANDONED_SECONDS:
                path.unlink(missing_ok=True)  # a killed process left it
            continue
        used += found.st_size
        if path.name.endswith(".tokens.npy"):
            shards.append((found.st_mtime, path))
    for _, tokens in sorted(shards):
        if used <= limit:
            return
        for kind in ARRAYS:
            path = tokens.with_name(tokens.name.replace(".tokens.", f".{kind}."))
            with suppress(OSError):  # on Windows, a process has mapped the file
                size = path.stat().st_size
                path.unlink()
                used -= size
    if used > limit:
        raise BertkitError(
            f"the cache {root} may hold {limit:,} bytes, and {used:,} are needed; allow more "
            "gigabytes"
        )


FETCH_BYTES = 1 << 20
PAUSES = (1.0, 5.0)
"""Seconds before the second and the third attempt."""


class UnreachableError(BertkitError):
    """A remote address does not answer, or stopped answering."""


@contextmanager
def open_remote_file(url: str) -> Iterator[Callable[[int], bytes]]:
    """Yield a function that reads the next bytes of a remote file.

    Raises:
        FileNotFoundError: there is no such file.
        BertkitError: the address cannot be reached; the message is one line.
    """
    try:
        system, path = fsspec.url_to_fs(url, **time_limits(url))
        # One request to a web server for the whole file, not for its size first nor for each block.
        web = {"block_size": 0, "size": 1} if url.startswith("http") else {}
        with system.open(path, "rb", **web) as stream:
            yield stream.read
    except (FileNotFoundError, BertkitError):
        raise
    except ImportError as error:
        raise missing_package(url, error) from error
    except Exception as error:  # every file system has its own exceptions
        raise UnreachableError(
            f"cannot read {url}: {one_line(error)}; check the address and the network"
        ) from error


def fetch_bytes(url: str) -> bytes:
    """Return the content of a small remote file, in several attempts; see `open_remote_file`."""

    def attempt() -> bytes:
        with open_remote_file(url) as stream:
            return b"".join(iter(lambda: stream(FETCH_BYTES), b""))

    return retrying(attempt)


def retrying(attempt: Callable[[], Fetched]) -> Fetched:
    """Call `attempt`, and repeat it after each pause if the address is unreachable."""
    for pause in PAUSES:
        with suppress(UnreachableError):
            return attempt()
        time.sleep(pause)
    return attempt()
