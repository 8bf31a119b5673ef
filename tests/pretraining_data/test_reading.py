"""Reading at scale: the window ahead, many shards, stores at an address, and what ranks read."""

from __future__ import annotations

import copy
import pickle
import shutil
import threading
from collections import Counter
from concurrent.futures import wait
from pathlib import Path

import numpy as np
import pytest
from benchmarks.reading import write_store

from bertkit.corpus import store as store_module
from bertkit.corpus.store import ShardArrays, TokenStore
from bertkit.errors import BertkitError
from bertkit.pretraining_data import sampler as table_module
from bertkit.pretraining_data.loader import BatchBuilder, StreamStep, stream_steps
from bertkit.pretraining_data.masking import MaskingOptions
from bertkit.pretraining_data.pairs import PairOptions
from bertkit.pretraining_data.rng import SHARD_ORDER, keyed_rng
from bertkit.pretraining_data.sampler import START, DataPosition, ExampleSampler
from tests.pretraining_data.test_stream import contents

SHARDS, TOKENS = 24, 2500
OPTIONS = PairOptions(max_length=64)


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Three windows of eight shards."""
    return write_store(tmp_path_factory.mktemp("many") / "store", SHARDS, TOKENS, real=SHARDS)


@pytest.fixture
def fresh(many: TokenStore) -> TokenStore:
    """The same store with nothing open."""
    return TokenStore(many.folder)


class Watched(TokenStore):
    """Remembers which shards were opened, and by which threads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.opened: list[tuple[int, str]] = []

    def _open(self, index: int) -> tuple[ShardArrays, object]:
        self.opened.append((index, threading.current_thread().name))
        return super()._open(index)


def take_all(table: ExampleSampler, place: DataPosition, windows: int) -> np.ndarray:
    """The rows of some windows, in pieces that do not fit them."""
    total = sum(
        len(copy.copy(table).window_rows(*divmod(place.window + n, table.windows)))
        for n in range(windows)
    )
    taken, at = [], place
    for start in range(0, total, 37):
        rows, at = table.take(at, min(37, total - start))
        taken.append(rows)
    return np.concatenate(taken)


def test_the_window_ahead_is_the_same(fresh: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    table = ExampleSampler(fresh, OPTIONS, 3)
    rows = take_all(table, START, 5)  # into the second epoch
    planned: list[str] = []
    plan = ExampleSampler._plan

    def watched(table: ExampleSampler, name: tuple[int, int]) -> np.ndarray:
        planned.append(threading.current_thread().name)
        return plan(table, name)

    monkeypatch.setattr(ExampleSampler, "_plan", watched)
    again = ExampleSampler(fresh, OPTIONS, 3)
    taken: list[np.ndarray] = []
    at = START
    while sum(len(piece) for piece in taken) < len(rows):
        piece, at = again.take(at, 100)
        taken.append(piece)
        if again._ahead:
            wait([again._ahead.rows])  # a step would take longer
    again.close()
    assert np.concatenate(taken)[: len(rows)].tobytes() == rows.tobytes()
    assert sum(name.startswith("bertkit-plan") for name in planned) >= 4, (
        "only the first is waited for"
    )
    assert not planned[0].startswith("bertkit-plan")
    monkeypatch.setattr(table_module.Prefetch, "result", lambda *_: None)
    alone = take_all(ExampleSampler(fresh, OPTIONS, 3), START, 5)
    assert alone.tobytes() == rows.tobytes()


def test_windows_are_parts_of_one_permutation(many: TokenStore) -> None:
    for shards in (1, 7, 15, 16, 23, 24):
        store = copy.copy(many)
        store.shards = many.shards[:shards]
        table = ExampleSampler(store, OPTIONS, 1)
        for epoch in (0, 5):
            rng = keyed_rng(1, SHARD_ORDER, epoch=epoch, window=0)
            expected = np.array_split(rng.permutation(shards), table.windows)
            found = [table.window_shards(epoch, window) for window in range(table.windows)]
            assert found == [part.tolist() for part in expected]


def test_seeking_opens_one_window(many: TokenStore) -> None:
    store = Watched(many.folder)
    assert not store.opened
    table = ExampleSampler(store, OPTIONS, 0)
    rows, _ = table.take(DataPosition(10**6, 1, 5), 20)
    table.close()
    assert {index for index, _ in store.opened} == set(table.window_shards(10**6, 1))
    assert (rows["epoch"] == 10**6).all()


def test_a_damaged_shard_of_the_next_window_is_named_when_it_is_due(
    many: TokenStore, tmp_path: Path
) -> None:
    """The thread that meets it first does not end the run before."""
    folder = shutil.copytree(many.folder, tmp_path / "store")
    table = ExampleSampler(TokenStore(folder), OPTIONS, 0)
    victim = table.store.shards[table.window_shards(0, 1)[4]].name
    path = folder / f"{victim}.tokens.npy"
    path.write_bytes(path.read_bytes()[:-1] + b"\1")
    whole = len(table.window_rows(0, 0))
    _, place = table.take(START, whole)  # the next window is planned meanwhile
    assert table._ahead is not None
    assert table._ahead.rows.exception() is not None
    with pytest.raises(BertkitError, match=rf"shard .*{victim}.tokens.npy is corrupt"):
        table.take(place, 1)
    path.unlink()
    with pytest.raises(BertkitError, match="is missing"):
        table.take(place, 1)
    shutil.copy(many.folder / path.name, path)
    assert len(table.take(place, 1)[0]) == 1, "once it is restored, the run goes on"


def test_what_nobody_wants_is_given_up(fresh: TokenStore) -> None:
    table = ExampleSampler(fresh, OPTIONS, 0)
    _, place = table.take(START, len(table.window_rows(0, 0)) - 1)
    ahead = table._ahead
    assert ahead is not None
    rows = table.window_rows(7, 2)  # somewhere else
    assert ahead.stop.is_set()
    assert rows["epoch"][0] == 7
    assert table.take(place, 1)[1].epoch == 0
    steps = stream_steps(
        table, BatchBuilder(fresh, MaskingOptions(), 5, 0), batch_size=100, steps=9, position=place
    )
    next(steps)
    del steps  # a run that was stopped
    assert table._ahead is None


def test_few_maps_are_kept(many: TokenStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process may have about 65,000 maps; what was let go is mapped again, not verified again."""
    monkeypatch.setattr(store_module, "KEPT_MAPS", 5)
    store = Watched(many.folder)
    table, expected = ExampleSampler(store, OPTIONS, 0), ExampleSampler(many, OPTIONS, 0)
    builders = [BatchBuilder(owner, MaskingOptions(), 5, 0) for owner in (store, many)]
    rows, _ = table.take(START, 200)
    assert contents([builders[0][rows]]) == contents([builders[1][rows]])
    assert expected.take(START, 200)[0].tobytes() == rows.tobytes()
    assert len(store._arrays) <= 5
    assert max(Counter(index for index, _ in store.opened).values()) > 1
    checked: list[Path] = []
    monkeypatch.setattr("bertkit.corpus.store.sha256_file", checked.append)
    store.arrays(rows["a_shard"][0])
    assert not checked


def test_loader_processes_trust_the_plan(
    fresh: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their shards were verified by the process that planned the rows."""
    checked: list[Path] = []

    def wrong(path: Path) -> str:
        checked.append(path)
        return "wrong"

    monkeypatch.setattr("bertkit.corpus.store.sha256_file", wrong)
    pickle.loads(pickle.dumps(fresh)).arrays(0)
    assert not checked
    with pytest.raises(BertkitError, match="is corrupt"):
        fresh.arrays(0)


# What ranks read.


def rank_steps(store: TokenStore, rank: int, world: int, steps: int) -> list[StreamStep]:
    table = ExampleSampler(store, OPTIONS, 0)
    builder = BatchBuilder(store, MaskingOptions(), 5, 0)
    return list(
        stream_steps(
            table, builder, batch_size=64, steps=steps, rank=rank, world=world, micro_batches=4
        )
    )


def test_a_rank_opens_the_shards_of_its_windows_only(many: TokenStore) -> None:
    """An epoch has three windows; in the first half of one, a rank has opened one, then two."""
    whole = len(ExampleSampler(many, OPTIONS, 0).window_rows(0, 0))
    for rank in (0, 3):
        store = Watched(many.folder)
        table = ExampleSampler(store, OPTIONS, 0)
        rank_steps(store, rank, 4, whole // 2 // 64 - 1)
        assert {index for index, _ in store.opened} == set(table.window_shards(0, 0))
        assert len(store.opened) == 8, "each once"
