"""A bounded folder of shards that several processes of a host share.

A process that uses a shard has a shared lock on its tokens file (`flock`, released even by a kill);
one that fetches a shard has an exclusive lock on its unfinished file. Files are renamed and removed
under the lock of the whole cache. A shard whose tokens file exists is complete.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from bertkit.corpus.shards import ARRAYS
from bertkit.errors import BertkitError
from bertkit.files import disk_errors, not_through_links, open_lock

try:
    import fcntl
except ImportError:  # Windows has no such locks: only one process at a time is safe
    fcntl = None  # type: ignore[assignment]


class CacheFullError(BertkitError):
    """The cache has no room because every shard in it is in use."""


class ShardLease:
    """A lock that keeps a shard in the cache as long as this object lives."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def close(self) -> None:
        """Release the shard."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __del__(self) -> None:
        self.close()


def make_room(root: Path, gigabytes: float, needed: int, mine: Path) -> None:
    """Remove the least recently used shards until a new one fits; needs the cache's lock.

    Args:
        root: the folder with the caches of all stores.
        gigabytes: the maximum size of all caches together.
        needed: the size of the new shard in bytes.
        mine: the unfinished tokens file of the new shard.

    Raises:
        CacheFullError: the remaining shards are in use.
    """
    limit = int(gigabytes * 1e9)
    used, shards = contents(root, mine)
    for _, path, size in sorted(shards):
        if used + needed <= limit:
            return
        if remove_unused(path):
            used -= size
    if used + needed > limit:
        raise CacheFullError(
            f"the cache {root} may hold {limit:,} bytes, {used:,} of them are in use, and "
            f"{needed:,} more are needed; allow more gigabytes, or use fewer processes"
        )


def contents(root: Path, but: Path) -> tuple[int, list[tuple[float, Path, int]]]:
    """Return the bytes in all caches, and (last use, tokens file, bytes) of each complete shard.

    Unfinished files that killed processes left are removed, except `but`, the caller's.
    """
    used, shards = 0, []
    for folder in root.iterdir():
        if not (folder / "remote.json").is_file():
            continue
        for path in folder.iterdir():
            if path.name.endswith(".tokens.part") and path != but:
                remove_unused(path)
        sizes = {path: path.stat() for path in folder.glob("*.npy")}
        sizes |= {path: path.stat() for path in folder.glob(".*.part")}
        used += sum(found.st_size for found in sizes.values())
        for path, found in sizes.items():
            if path.name.endswith(".tokens.npy"):
                size = sum(sizes[file].st_size for file in siblings(path) if file in sizes)
                shards.append((found.st_mtime, path, size))
    return used, shards


def siblings(tokens: Path) -> list[Path]:
    """Return the files, complete or not, of the shard with this tokens file, which comes first."""
    return [tokens.with_name(tokens.name.replace(".tokens.", f".{kind}.")) for kind in ARRAYS]


def remove_shard(tokens: Path) -> None:
    """Remove a shard's files; the caller must hold the lock of the cache."""
    for path in siblings(tokens):
        path.unlink(missing_ok=True)


def remove_unused(tokens: Path) -> bool:
    """Remove a shard's files if no process holds it, and return whether they are gone."""
    claim = claim_file(tokens, create=False)
    if claim is None:
        return False
    with suppress(PermissionError):  # Windows: a process has mapped the file
        remove_shard(tokens)
    claim.close()
    return not tokens.exists()


def claim_file(path: Path, *, create: bool = True) -> ShardLease | None:
    """Lock a file for this process alone; None if another process has locked or removed it."""
    try:
        with disk_errors(path):
            hold = ShardLease(
                not_through_links(str(path), os.O_RDWR | (os.O_CREAT if create else 0))
            )
        lock(hold, "alone")
    except BlockingIOError:
        return None
    except BertkitError:
        if create:
            raise
        return None
    return hold if os.fstat(hold.descriptor).st_nlink else None


def lock(hold: ShardLease, how: str) -> None:
    """Lock an open file, "shared" or "alone"; the former waits for an exclusive lock to end.

    Raises:
        BlockingIOError: the lock is for this process alone, and another process holds one.
    """
    if fcntl is not None:
        ways = {"shared": fcntl.LOCK_SH, "alone": fcntl.LOCK_EX | fcntl.LOCK_NB}
        fcntl.flock(hold.descriptor, ways[how])


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Wait for a lock file and hold it for the duration of the block."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with open_lock(path) as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
