"""A token store at a remote address, whose shards are fetched into a bounded cache on demand.

The cache folder looks like the store itself with most shards missing, and `remote.json` records the
address. `bertkit.corpus.cache` describes how several processes share the folder. Every failure to
read a remote file is a one-line error, and network failures are retried.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import fsspec

from bertkit.corpus.cache import (
    CacheFullError,
    ShardLease,
    claim_file,
    lock,
    locked,
    make_room,
    remove_shard,
)
from bertkit.corpus.shards import ARRAYS, ShardInfo, check_shard
from bertkit.corpus.store import INDEXED_FORMAT
from bertkit.errors import BertkitError
from bertkit.files import disk_errors, not_through_links, read_json, write_atomic, write_json
from bertkit.text.remote import missing_package, time_limits
from bertkit.text.sources import is_remote, one_line

GIGABYTES = 100.0
"""The default maximum size of the cache in gigabytes."""
PARALLEL = 4
"""The number of shards that are fetched at a time."""
CACHE_POLL_SECONDS = 0.05
ROOM_SECONDS = 30.0
"""How long to wait for room in a cache that other processes also use."""
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

    Args:
        folder: an address (`https://...`, `s3://...`, `memory://...`), or its cache folder, which
            is opened without a request to the address.
        cache: the folder of all caches; by default in the user's cache folder.
        gigabytes: the maximum size of all caches together.

    Raises:
        BertkitError: there is no store, the address cannot be reached, or the cache not be written.
    """
    note = Path(folder) / "remote.json"
    if is_remote(Path(folder)):
        root = Path(cache).expanduser().absolute() if cache else default_cache()
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


def default_cache() -> Path:
    """Return the folder `bertkit/stores` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bertkit" / "stores"


def address(path: str) -> str:
    """Restore a URL from which `Path` removed a slash, and remove the one at its end."""
    scheme, _, rest = path.partition(":/")
    slashes = "///" if scheme == "file" else "//"
    return f"{scheme}:{slashes}{rest.strip('/')}"


@dataclass(frozen=True)
class RemoteStore:
    """A store's address and its cache.

    Args:
        url: the address of the store's folder.
        root: the folder of the caches of all stores.
        gigabytes: the maximum size of all caches together.
    """

    url: str
    root: Path
    gigabytes: float

    @property
    def folder(self) -> Path:
        """The cache folder of this store."""
        name = re.sub(r"[^\w.-]+", "-", self.url.rpartition("/")[2])[:40]
        return self.root / f"{name}-{hashlib.sha256(self.url.encode()).hexdigest()[:12]}"

    def refresh(self) -> None:
        """Bring the manifest and the small files that every user needs up to date.

        Raises:
            BertkitError: there is no store, or it cannot be reached, or the cache not be written.
        """
        try:
            content = fetch_bytes(f"{self.url}/manifest.json")
        except FileNotFoundError:
            raise BertkitError(
                f"{self.url} is not a token store (no manifest.json there); check the address"
            ) from None
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        manifest = self.folder / "manifest.json"
        with locked(self.folder / ".opening"):
            write_json(self.folder / "remote.json", {"url": self.url, "gigabytes": self.gigabytes})
            names = [*SMALL_FILES, *(["shards.npy"] if has_index(content) else [])]
            there = all((self.folder / name).is_file() for name in names)
            if there and manifest.is_file() and manifest.read_bytes() == content:
                return
            for name in names:
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

    def hold_all(
        self, shards: Sequence[ShardInfo], let_go: Callable[[], object], *, verify: bool
    ) -> list[ShardLease]:
        """Fetch and lock several shards at a time; see `hold`.

        Args:
            shards: the shards to fetch and lock.
            let_go: a function that releases the caller's other shards if the cache has no room.
            verify: whether to check the cached files' checksums, and to fetch damaged shards again.

        Raises:
            BertkitError: as for `hold`.
        """

        def held(shard: ShardInfo) -> ShardLease:
            hold = self.hold(shard)
            try:
                check_shard(self.folder, shard, checksums=verify)
            except BertkitError:  # the files were damaged after they were fetched
                hold.close()
                self.drop(shard)
                hold = self.hold(shard)
            return hold

        def every() -> list[ShardLease]:
            if len(shards) == 1:
                return [held(shards[0])]
            with ThreadPoolExecutor(PARALLEL) as pool:
                return list(pool.map(held, shards))

        deadline = time.monotonic() + ROOM_SECONDS
        while True:
            try:
                return every()
            except CacheFullError:
                let_go()
                if time.monotonic() > deadline:
                    raise
                time.sleep(CACHE_POLL_SECONDS)  # other processes release shards as they proceed

    def hold(self, shard: ShardInfo) -> ShardLease:
        """Fetch a shard if it is not in the cache, and keep it there while the lease lives.

        Raises:
            BertkitError: the shard is missing or damaged there, the address cannot be reached, the
                disk is full, or every cached shard is in use (`CacheFullError`).
        """
        while True:
            if hold := self._held(shard):
                return hold
            part = self._path(shard, "tokens", unfinished=True)
            if (claim := claim_file(part)) is None:
                time.sleep(CACHE_POLL_SECONDS)  # another process is fetching it
                continue
            if self._path(shard, "tokens").exists():  # another process has just finished it
                part.unlink(missing_ok=True)
                claim.close()
                continue
            try:
                self._fetch(shard)
                self._put(shard, claim)
                return claim
            except BaseException:
                for kind in ARRAYS:
                    self._path(shard, kind, unfinished=True).unlink(missing_ok=True)
                claim.close()
                raise

    def drop(self, shard: ShardInfo) -> None:
        """Remove a damaged shard from the cache."""
        with locked(self.root / ".lock"):
            remove_shard(self._path(shard, "tokens"))

    def _path(self, shard: ShardInfo, kind: str, *, unfinished: bool = False) -> Path:
        name = f".{shard.name}.{kind}.part" if unfinished else f"{shard.name}.{kind}.npy"
        return self.folder / name

    def _held(self, shard: ShardInfo) -> ShardLease | None:
        """Lock a shard that is in the cache; None if it is not, or is incomplete."""
        path = self._path(shard, "tokens")
        try:
            hold = ShardLease(os.open(path, os.O_RDONLY))
        except FileNotFoundError:
            return None
        lock(hold, "shared")
        if os.fstat(hold.descriptor).st_nlink == 0:  # removed in the meantime
            return None
        for kind in ARRAYS:
            file = self._path(shard, kind)
            if not file.is_file() or file.stat().st_size != shard.bytes[kind]:
                self.drop(shard)
                return None
        os.utime(path)  # records the time of its last use
        return hold

    def _fetch(self, shard: ShardInfo) -> None:
        """Reserve room in the cache for a shard's files, then download them."""
        with locked(self.root / ".lock"):
            part = self._path(shard, "tokens", unfinished=True)
            make_room(self.root, self.gigabytes, sum(shard.bytes.values()), part)
            for kind in ARRAYS:
                part = self._path(shard, kind, unfinished=True)
                with disk_errors(part), open(part, "wb", opener=not_through_links) as file:
                    file.truncate(shard.bytes[kind])
        for kind in ARRAYS:
            self._download(shard, kind)

    def _download(self, shard: ShardInfo, kind: str) -> None:
        """Download one file, in several attempts, and compare it with the manifest."""
        url = f"{self.url}/{shard.name}.{kind}.npy"
        part = self._path(shard, kind, unfinished=True)

        def attempt() -> tuple[int, str]:
            digest, size = hashlib.sha256(), 0
            with open_remote_file(url) as stream, disk_errors(part), part.open("r+b") as file:
                while block := stream(FETCH_BYTES):
                    digest.update(block)
                    size += len(block)
                    if size > shard.bytes[kind]:
                        break
                    file.write(block)
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

    def _put(self, shard: ShardInfo, claim: ShardLease) -> None:
        """Move a downloaded shard into the cache, where it is locked from the start."""
        with locked(self.root / ".lock"), disk_errors(self.folder):
            for kind in reversed(ARRAYS):  # tokens last: a shard with a tokens file is complete
                self._path(shard, kind, unfinished=True).replace(self._path(shard, kind))
            lock(claim, "shared")


def has_index(manifest: bytes) -> bool:
    """Return whether the shards are listed in a separate file, according to the manifest."""
    try:
        values = json.loads(manifest)
    except (ValueError, RecursionError):
        return False  # opening the store will report the damage
    return isinstance(values, dict) and values.get("format") == INDEXED_FORMAT


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
    """Return the content of a small remote file; see `open_remote_file`."""
    with open_remote_file(url) as stream:
        return b"".join(iter(lambda: stream(FETCH_BYTES), b""))


def retrying(attempt: Callable[[], tuple[int, str]]) -> tuple[int, str]:
    """Call `attempt`, and repeat it after each pause if the address is unreachable."""
    for pause in PAUSES:
        with suppress(UnreachableError):
            return attempt()
        time.sleep(pause)
    return attempt()
