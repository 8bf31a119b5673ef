"""A token store at a remote place: its shards come to a bounded cache when they are needed.

The cache folder of a store looks like the store itself with most shards missing, and `remote.json`
says where they are. See `bertkit.corpus.cache` for how several processes share it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bertkit.corpus.cache import CacheFullError, Hold, claimed, lock, locked, make_room, remove
from bertkit.corpus.fetching import BLOCK_BYTES, fetched, opened, patiently
from bertkit.corpus.shards import ARRAYS, ShardInfo, check_shard
from bertkit.corpus.store import INDEXED_FORMAT
from bertkit.errors import BertkitError
from bertkit.files import disk_errors, read_json, write_atomic, write_json
from bertkit.text.sources import is_remote

GIGABYTES = 100.0
"""How large a cache grows where nothing is said."""
PARALLEL = 4
"""Shards that are fetched at a time."""
POLL_SECONDS = 0.05
WAIT_SECONDS = 30.0
"""How long to wait for room in a cache that other processes use."""
SMALL_FILES = (
    "tokenizer/vocab.txt",
    "tokenizer/tokenizer.json",
    "tokenizer/tokenizer_config.json",
    "unigrams.npy",
)


def open_remote(
    folder: Path | str, cache: Path | str | None, gigabytes: float | None
) -> RemoteStore | None:
    """What fetches the shards of a store at an address or in a cache folder; None for other ones.

    Args:
        folder: an address (`https://...`, `s3://...`, `memory://...`), or the cache folder of one,
            which is opened without asking the address.
        cache: where caches are; the user's cache folder where absent.
        gigabytes: the most that all stores of the cache take together.

    Raises:
        BertkitError: no store there, the address cannot be reached, or the cache not be written.
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
    """`bertkit/stores` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bertkit" / "stores"


def address(path: str) -> str:
    """A URL as it was before `Path` took one of its slashes, without one at its end."""
    scheme, _, rest = path.partition(":/")
    slashes = "///" if scheme == "file" else "//"
    return f"{scheme}:{slashes}{rest.strip('/')}"


@dataclass(frozen=True)
class RemoteStore:
    """A store's address and its cache.

    Args:
        url: of the store's folder.
        root: of the caches of all stores.
        gigabytes: the most that they take together.
    """

    url: str
    root: Path
    gigabytes: float

    @property
    def folder(self) -> Path:
        """The cache of this store."""
        name = re.sub(r"[^\w.-]+", "-", self.url.rpartition("/")[2])[:40]
        return self.root / f"{name}-{hashlib.sha256(self.url.encode()).hexdigest()[:12]}"

    def refresh(self) -> None:
        """Bring the manifest and what else every user needs up to date.

        Raises:
            BertkitError: no store there, the address cannot be reached, or the cache not written.
        """
        try:
            content = fetched(f"{self.url}/manifest.json")
        except FileNotFoundError:
            raise BertkitError(
                f"{self.url} is no token store (no manifest.json there); check the address"
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
            content = fetched(f"{self.url}/{name}")
        except FileNotFoundError:
            raise BertkitError(
                f"{self.url}/{name} is missing; copy the whole store there"
            ) from None
        write_atomic(self.folder / name, lambda path: path.write_bytes(content))

    def hold_all(
        self, shards: Sequence[ShardInfo], let_go: Callable[[], object], *, verify: bool
    ) -> list[Hold]:
        """`hold` for several shards at a time.

        Args:
            shards: which.
            let_go: gives up what the caller holds besides, where the cache has no room.
            verify: compare those that are in the cache with the manifest, and mend them.

        Raises:
            BertkitError: see `hold`.
        """

        def held(shard: ShardInfo) -> Hold:
            hold = self.hold(shard)
            try:
                check_shard(self.folder, shard, checksums=verify)
            except BertkitError:  # damaged since it was fetched
                hold.close()
                self.drop(shard)
                hold = self.hold(shard)
            return hold

        def every() -> list[Hold]:
            if len(shards) == 1:
                return [held(shards[0])]
            with ThreadPoolExecutor(PARALLEL) as pool:
                return list(pool.map(held, shards))

        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                return every()
            except CacheFullError:
                let_go()
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_SECONDS)  # other processes let go as they go on

    def hold(self, shard: ShardInfo) -> Hold:
        """Fetch a shard if it is not in the cache, and keep it there while the answer lives.

        Raises:
            BertkitError: the shard is missing or damaged there, the address cannot be reached, the
                disk is full, or all of the cache is in use (`CacheFullError`).
        """
        while True:
            if hold := self._held(shard):
                return hold
            part = self._path(shard, "tokens", unfinished=True)
            if (claim := claimed(part)) is None:
                time.sleep(POLL_SECONDS)  # another process is fetching it
                continue
            if self._path(shard, "tokens").exists():  # it has just finished
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
            remove(self._path(shard, "tokens"))

    def _path(self, shard: ShardInfo, kind: str, *, unfinished: bool = False) -> Path:
        name = f".{shard.name}.{kind}.part" if unfinished else f"{shard.name}.{kind}.npy"
        return self.folder / name

    def _held(self, shard: ShardInfo) -> Hold | None:
        """Hold a shard that is in the cache."""
        path = self._path(shard, "tokens")
        try:
            hold = Hold(os.open(path, os.O_RDONLY))
        except FileNotFoundError:
            return None
        lock(hold, "shared")
        if os.fstat(hold.descriptor).st_nlink == 0:  # removed in between
            return None
        for kind in ARRAYS:
            file = self._path(shard, kind)
            if not file.is_file() or file.stat().st_size != shard.bytes[kind]:
                self.drop(shard)
                return None
        os.utime(path)  # the time of its last use
        return hold

    def _fetch(self, shard: ShardInfo) -> None:
        """Download a shard's files, room for which is made and taken first."""
        with locked(self.root / ".lock"):
            part = self._path(shard, "tokens", unfinished=True)
            make_room(self.root, self.gigabytes, sum(shard.bytes.values()), part)
            for kind in ARRAYS:
                part = self._path(shard, kind, unfinished=True)
                with disk_errors(part), part.open("wb") as file:
                    file.truncate(shard.bytes[kind])
        for kind in ARRAYS:
            self._download(shard, kind)

    def _download(self, shard: ShardInfo, kind: str) -> None:
        """One file, in some attempts, compared with the manifest."""
        url = f"{self.url}/{shard.name}.{kind}.npy"
        part = self._path(shard, kind, unfinished=True)

        def attempt() -> tuple[int, str]:
            digest, size = hashlib.sha256(), 0
            with opened(url) as stream, disk_errors(part), part.open("r+b") as file:
                while block := stream(BLOCK_BYTES):
                    digest.update(block)
                    size += len(block)
                    if size > shard.bytes[kind]:
                        break
                    file.write(block)
            return size, digest.hexdigest()

        try:
            found = patiently(attempt)
        except FileNotFoundError:
            raise BertkitError(f"shard {url} is missing; copy the whole store there") from None
        if found != (shard.bytes[kind], shard.sha256[kind]):
            raise BertkitError(
                f"shard {url} is corrupt or torn (its checksum is not the manifest's); copy the "
                "store there again"
            )

    def _put(self, shard: ShardInfo, claim: Hold) -> None:
        """Make a downloaded shard one of the cache, held from the beginning."""
        with locked(self.root / ".lock"), disk_errors(self.folder):
            for kind in reversed(ARRAYS):  # the tokens last: a shard with tokens is whole
                self._path(shard, kind, unfinished=True).replace(self._path(shard, kind))
            lock(claim, "shared")


def has_index(manifest: bytes) -> bool:
    """Whether the list of shards is a file of its own."""
    try:
        values = json.loads(manifest)
    except (ValueError, RecursionError):
        return False  # opening the store will say so
    return isinstance(values, dict) and values.get("format") == INDEXED_FORMAT
