"""Stores at an address: a web server of this machine, and the cache between."""

from __future__ import annotations

import functools
import multiprocessing
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
from benchmarks.reading import write_store

from bertkit.corpus import remote as remote_module
from bertkit.corpus.remote import address, open_remote
from bertkit.corpus.store import ARRAYS, TokenStore
from bertkit.errors import BertkitError

SHARDS, TOKENS = 12, 2500


@dataclass
class Served:
    """A folder behind a web server."""

    url: str
    folder: Path
    asked: Counter[str] = field(default_factory=Counter)
    """How often each file was sent."""
    broken: Counter[str] = field(default_factory=Counter)
    """Answers of these files that are still to be cut short."""

    def shards_sent(self) -> Counter[str]:
        return Counter({name: n for name, n in self.asked.items() if name.endswith("tokens.npy")})


class Handler(SimpleHTTPRequestHandler):
    """Sends files, remembers which, and breaks off where it is told to."""

    served: Served

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        self.served.asked[name] += 1
        if self.served.broken[name]:
            self.served.broken[name] -= 1
            content = (self.served.folder / name).read_bytes()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
            return
        super().do_GET()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "PAUSES", (0.0, 0.0))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    return write_store(tmp_path_factory.mktemp("original") / "store", SHARDS, TOKENS, real=SHARDS)


@pytest.fixture
def served(original: TokenStore, tmp_path: Path) -> Iterator[Served]:
    pytest.importorskip("aiohttp", reason="needs aiohttp: the extra 'remote'")
    folder = tmp_path / "served" / "store"
    shutil.copytree(original.folder, folder)
    handler = type("Own", (Handler,), {})
    web = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder.parent))
    )
    handler.served = Served(f"http://127.0.0.1:{web.server_port}/store", folder)  # type: ignore[attr-defined]
    thread = threading.Thread(target=web.serve_forever, args=(0.02,))
    thread.start()
    yield handler.served  # type: ignore[attr-defined]
    web.shutdown()
    thread.join()
    web.server_close()
    fsspec.filesystem("http").clear_instance_cache()


def size_of(store: TokenStore) -> int:
    """Bytes of the largest shard."""
    return max(sum(shard.bytes.values()) for shard in store.shards)


def room_for(store: TokenStore, shards: float) -> float:
    """Gigabytes of a cache for some shards and the files beside them."""
    unigrams = (store.folder / "unigrams.npy").stat().st_size
    return (unigrams + shards * size_of(store)) / 1e9


def cached(store: TokenStore) -> set[str]:
    return {path.name.partition(".")[0] for path in store.folder.glob("*.tokens.npy")}


def test_shards_come_when_they_are_needed(
    served: Served, original: TokenStore, tmp_path: Path
) -> None:
    store = TokenStore(served.url, cache=tmp_path / "cache")
    assert not served.shards_sent(), "opening fetches no shard"
    assert store.content_hash == original.content_hash
    assert (store.unigrams == original.unigrams).all()
    assert store.tokenizer.content_hash == original.tokenizer_hash
    assert store.place == served.url
    for index in (3, 7, 3):
        for ours, theirs in zip(store.arrays(index), original.arrays(index), strict=True):
            assert ours.tobytes() == theirs.tobytes()
    names = [original.shards[index].name for index in (3, 7)]
    assert served.shards_sent() == {f"{name}.tokens.npy": 1 for name in names}
    store.fetch(range(6))
    assert len(cached(store)) == 7
    again = TokenStore(Path(served.url), cache=tmp_path / "cache")  # Path takes a slash
    again.arrays(3)
    assert max(served.shards_sent().values()) == 1, "what is in the cache is not sent again"
    assert served.asked["vocab.txt"] == 1
    assert not list(store.folder.glob(".*.part"))


def test_the_cache_is_a_store_of_its_own(served: Served, tmp_path: Path) -> None:
    """What knows a folder only, such as the evaluation, opens the other split by it."""
    store = TokenStore(served.url, cache=tmp_path / "cache")
    asked = served.asked.total()
    other = TokenStore(store.folder, "held_out")
    assert other.place == served.url
    assert other.documents == 0
    assert served.asked.total() == asked, "without asking the address"
    TokenStore(store.folder).arrays(1)
    assert served.shards_sent().total() == 1


def test_the_cache_stays_within_its_bound(
    served: Served, original: TokenStore, tmp_path: Path
) -> None:
    """Shards used longest ago go first."""
    gigabytes = room_for(original, 4.5)
    for turn, index in enumerate([0, 1, 2, 3, 0, 4, 5]):
        store = TokenStore(served.url, cache=tmp_path / "cache", cache_gigabytes=gigabytes)
        store.arrays(index)
        path = store.folder / f"{store.shards[index].name}.tokens.npy"
        os.utime(path, (turn, turn))  # seconds apart
        used = sum(path.stat().st_size for path in store.folder.glob("*.npy"))
        assert used <= gigabytes * 1e9
        del store
    names = [shard.name for shard in original.shards]
    assert cached(TokenStore(served.url, cache=tmp_path / "cache")) == {
        names[index] for index in (3, 0, 4, 5)
    }


def test_a_cache_too_small_for_one_shard(
    served: Served, original: TokenStore, tmp_path: Path
) -> None:
    store = TokenStore(
        served.url, cache=tmp_path / "cache", cache_gigabytes=room_for(original, 0.5)
    )
    with pytest.raises(BertkitError, match="allow more gigabytes"):
        store.arrays(0)
    assert not list(store.folder.glob(".*.part"))
    with pytest.raises(BertkitError, match="must be a number above 0, not 0"):
        TokenStore(served.url, cache=tmp_path / "cache", cache_gigabytes=0)


def test_damage_in_the_cache_is_mended(served: Served, tmp_path: Path) -> None:
    store = TokenStore(served.url, cache=tmp_path / "cache")
    expected = store.arrays(2).tokens.copy()
    name = store.shards[2].name
    for damage in (b"", b"\0"):
        path = store.folder / f"{name}.tokens.npy"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + damage)
        assert (TokenStore(store.folder).arrays(2).tokens == expected).all()
        path = store.folder / f"{name}.sentences.npy"
        path.unlink()
        assert (TokenStore(store.folder).arrays(2).tokens == expected).all()


def test_damage_at_the_address_is_named(served: Served, tmp_path: Path) -> None:
    store = TokenStore(served.url, cache=tmp_path / "cache")
    path = served.folder / f"{store.shards[5].name}.tokens.npy"
    path.write_bytes(path.read_bytes()[:-2] + b"xx")
    with pytest.raises(BertkitError, match=rf"shard {served.url}/{path.name} is corrupt or torn"):
        store.arrays(5)
    path.unlink()
    with pytest.raises(BertkitError, match=rf"shard {served.url}/{path.name} is missing"):
        store.arrays(5)
    assert not cached(store)
    assert not list(store.folder.glob(".*.part"))


def test_a_broken_connection_is_tried_again(served: Served, tmp_path: Path) -> None:
    served.broken["manifest.json"] = served.broken["vocab.txt"] = 2
    store = TokenStore(served.url, cache=tmp_path / "cache")
    name = f"{store.shards[4].name}.tokens.npy"
    served.broken[name] = 2
    store.arrays(4)
    assert served.asked[name] == 3
    served.broken[f"{store.shards[6].name}.tokens.npy"] = 3
    with pytest.raises(BertkitError, match=r"cannot read .*; check the address and the network"):
        store.arrays(6)


def test_a_connection_that_is_reset_in_a_file_is_tried_again(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, resets = TokenStore(served.url, cache=tmp_path / "cache"), [1, 1]
    opened = remote_module.open_remote_file

    @contextmanager
    def resetting(url: str) -> Iterator[Callable[[int], bytes]]:
        def read(size: int) -> bytes:
            if resets:
                resets.pop()
                raise ConnectionResetError(104, "Connection reset by peer")
            return stream(size)

        try:
            with opened(url) as stream:
                yield read
        except ConnectionResetError as error:  # as `open_remote_file` does for its own stream
            raise remote_module.UnreachableError(str(error)) from error

    monkeypatch.setattr(remote_module, "open_remote_file", resetting)
    assert len(store.arrays(4).tokens) == store.shards[4].tokens
    assert not resets


def test_a_store_that_was_made_again_is_fetched_again(served: Served, tmp_path: Path) -> None:
    first = TokenStore(served.url, cache=tmp_path / "cache")
    before = first.arrays(0).tokens.copy()
    shutil.rmtree(served.folder)
    other = write_store(served.folder, 3, TOKENS, seed=9)
    second = TokenStore(served.url, cache=tmp_path / "cache")
    assert second.content_hash == other.content_hash != first.content_hash
    assert (second.arrays(0).tokens == other.arrays(0).tokens).all()
    assert (
        before.shape != second.arrays(0).tokens.shape or (before != second.arrays(0).tokens).any()
    )


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:9/store", "cannot read http://127.0.0.1:9/store/manifest.json: "),
        ("memory://nowhere", "memory://nowhere is not a token store"),
        ("nonsense://bucket/store", "cannot read nonsense://bucket/store/manifest.json: "),
    ],
)
def test_places_without_a_store(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match=message) as caught:
        TokenStore(url, cache=tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


def test_a_cache_that_cannot_be_written(served: Served, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BertkitError, match="cannot write"):
        TokenStore(served.url, cache=tmp_path / "file")


def test_other_file_systems(original: TokenStore, tmp_path: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.put(str(original.folder), "/corpora/store", recursive=True)
    for url in ("memory://corpora/store", f"file://{original.folder}/"):
        store = TokenStore(url, cache=tmp_path / "cache")
        assert (store.arrays(1).tokens == original.arrays(1).tokens).all()
    assert len(list((tmp_path / "cache").glob("*/manifest.json"))) == 2
    memory.rm("/corpora", recursive=True)


def test_addresses() -> None:
    assert address("https:/host/store/") == "https://host/store"
    assert address("s3://bucket/a/b") == "s3://bucket/a/b"
    assert address(str(Path("file:///a/b"))) == "file:///a/b"
    assert open_remote("a/b:/c", None, None) is None


def read_all(url: str, cache: Path, gigabytes: float, results: Any) -> None:
    """A process: read every shard twice, and tell what it saw."""
    store = TokenStore(url, cache=cache, cache_gigabytes=gigabytes)
    sums = [int(store.arrays(index).tokens.sum()) for index in [*range(SHARDS), *range(SHARDS)]]
    results.put(sums)


@pytest.mark.slow
def test_processes_share_a_cache(served: Served, original: TokenStore, tmp_path: Path) -> None:
    """The cache has room for some of the shards, so that some are sent again."""
    shards = 7
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = (served.url, tmp_path / "cache", room_for(original, shards + 0.5), results)
    processes = [context.Process(target=read_all, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    expected = [int(original.arrays(index).tokens.sum()) for index in range(SHARDS)] * 2
    for _ in processes:
        assert results.get(timeout=60) == expected
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(served.shards_sent()) == SHARDS
    assert len(cached(TokenStore(served.url, cache=tmp_path / "cache"))) <= shards


def test_what_a_killed_process_left_is_removed(served: Served, tmp_path: Path) -> None:
    store = TokenStore(served.url, cache=tmp_path / "cache")
    for index in (3, 4):
        for kind in ARRAYS:
            part = store.folder / f".{store.shards[index].name}.{kind}.part"
            part.write_bytes(b"half")
            os.utime(part, (0, 0))
    store.arrays(3)
    assert not list(store.folder.glob(".*.part"))


def test_a_shard_that_is_removed_in_use_stays_readable(
    served: Served, original: TokenStore, tmp_path: Path
) -> None:
    options = {"cache": tmp_path / "cache", "cache_gigabytes": room_for(original, 2.5)}
    using, other = TokenStore(served.url, **options), TokenStore(served.url, **options)  # type: ignore[arg-type]
    opened = using.arrays(0)
    other.fetch(range(1, 6))
    assert original.shards[0].name not in cached(using)
    for ours, theirs in zip(opened, original.arrays(0), strict=True):
        assert ours.tobytes() == theirs.tobytes()
    assert (TokenStore(using.folder).arrays(0).tokens == opened.tokens).all(), "fetched again"


def test_one_of_several_threads_fetches(served: Served, tmp_path: Path) -> None:
    """The others wait for it, whichever store object they use."""
    stores = [TokenStore(served.url, cache=tmp_path / "cache") for _ in range(4)]
    threads = [threading.Thread(target=store.arrays, args=(0,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert served.shards_sent().total() == 1
