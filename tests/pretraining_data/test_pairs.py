from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.corpus.prepare import prepare
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.pretraining_data.examples import (
    PAIR_OBJECTIVES,
    SPECIALS,
    MaskingOptions,
    PairOptions,
    Spans,
    Window,
    example_lengths,
    example_rows,
    measure_pairs,
    open_window,
    plan_window,
    truncation,
)
from bertkit.pretraining_data.loader import BatchBuilder
from bertkit.processes import PAIRS, keyed_rng
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import make_document
from tests.pretraining_data.reference_pairs import pairs_of_document, truncate


def sentences_by_document(store: TokenStore) -> list[list[list[int]]]:
    documents = []
    for shard in range(len(store.shards)):
        tokens, sentences, bounds = store.arrays(shard)
        for first, stop in pairwise(bounds):
            documents.append(
                [tokens[sentences[i] : sentences[i + 1]].tolist() for i in range(first, stop)]
            )
    return documents


def plan(
    store: TokenStore,
    *,
    length: int = 64,
    seed: int = 0,
    epoch: int = 0,
    pair: str = "nsp",
    short: float = 0.1,
) -> np.ndarray:
    options = PairOptions(max_length=length, pair=pair, short_probability=short)
    return plan_window(store, range(len(store.shards)), options, seed, epoch, 0)


def documents(window: Window, rows: np.ndarray, side: str) -> np.ndarray:
    """The document of the window that each A or B is from."""
    bases = window.token_bases[np.searchsorted(window.shards, rows[f"{side}_shard"])]
    starts = window.sentences[window.documents]
    return np.searchsorted(starts, bases + rows[f"{side}_start"], side="right") - 1


def spans(store: TokenStore, rows: np.ndarray, side: str) -> tuple[np.ndarray, np.ndarray]:
    """First token of A or B, and the one after the last, in the window's run of tokens."""
    window = open_window(store, range(len(store.shards)))
    bases = window.token_bases[np.searchsorted(window.shards, rows[f"{side}_shard"])]
    start = rows[f"{side}_start"] + bases
    return start, start + rows[f"{side}_length"]


def own_store(tokenizer: Tokenizer, folder: Path, *documents: str) -> TokenStore:
    """A store of a few documents, one sentence a line."""
    (folder / "text.txt").write_text("\n\n".join(documents) + "\n")
    return prepare([str(folder / "text.txt")], tokenizer, folder / "store", held_out=0)


def test_plan_is_a_pure_function_of_seed_and_epoch(store: TokenStore) -> None:
    again = TokenStore(store.folder)
    np.testing.assert_array_equal(plan(store), plan(again))
    assert not np.array_equal(plan(store)["a_start"], plan(store, epoch=1)["a_start"])
    assert not np.array_equal(plan(store)["a_start"], plan(store, seed=1)["a_start"])


@pytest.mark.slow
@pytest.mark.parametrize("length", [16, 64, 512])
def test_statistics_equal_the_plain_walk(store: TokenStore, length: int) -> None:
    """Label balance, counts and lengths of 60 epochs against 60 runs of the reference."""
    documents = sentences_by_document(store)
    rng = random.Random(1)
    reference = [
        pair
        for _ in range(60)
        for index in range(len(documents))
        for pair in pairs_of_document(documents, index, length, rng)
    ]
    rows = np.concatenate([plan(store, length=length, epoch=epoch) for epoch in range(60)])
    assert len(rows) == pytest.approx(len(reference), rel=0.02)
    share = np.mean([is_random for _, _, is_random in reference])
    assert rows["is_random"].mean() == pytest.approx(share, abs=0.02)
    for side, column in ((0, "a_length"), (1, "b_length")):
        expected = np.array([len(pair[side]) for pair in reference])
        quantiles = [0.05, 0.25, 0.5, 0.75, 0.95]
        np.testing.assert_allclose(
            np.quantile(rows[column], quantiles),
            np.quantile(expected, quantiles),
            atol=2,
            rtol=0.06,
        )
        assert rows[column].mean() == pytest.approx(expected.mean(), rel=0.03)


def test_a_and_b_are_what_the_labels_say(store: TokenStore) -> None:
    window = open_window(store, range(len(store.shards)))
    for epoch in range(5):
        rows = plan(store, epoch=epoch)
        is_random = rows["is_random"] == 1
        other = documents(window, rows, "a") != documents(window, rows, "b")
        assert (other == is_random).all()
        followed = rows[~is_random & (rows["cut"] == 0)]
        np.testing.assert_array_equal(
            followed["a_start"] + followed["a_length"], followed["b_start"]
        )
        for side in ("a", "b"):  # every span lies inside its document
            bases = window.token_bases[np.searchsorted(window.shards, rows[f"{side}_shard"])]
            start = rows[f"{side}_start"] + bases
            document = documents(window, rows, side)
            assert (start >= window.sentences[window.documents[document]]).all()
            end = start + rows[f"{side}_length"]
            assert (end <= window.sentences[window.documents[document + 1]]).all()
        assert rows["a_length"].min() >= 1
        assert rows["b_length"].min() >= 1
        assert (rows["a_length"] + rows["b_length"] + SPECIALS).max() <= 64


def test_every_sentence_begins_some_a_or_follows(store: TokenStore) -> None:
    """The walk skips nothing: without truncation A and true B cover each document."""
    rows = plan(store, length=4000)
    window = open_window(store, range(len(store.shards)))
    covered = np.zeros(window.token_bases[-1], dtype=bool)
    for row in rows:
        sides = ("a",) if row["is_random"] else ("a", "b")
        for side in sides:
            start = row[f"{side}_start"] + window.token_bases[row[f"{side}_shard"]]
            covered[start : start + row[f"{side}_length"]] = True
    # a chunk's unused sentences are walked again, so the only gaps are those truncation cuts
    assert rows["cut"].sum() == 0
    assert covered.all()


@settings(max_examples=200, deadline=None)
@given(a=st.integers(1, 300), b=st.integers(1, 300), max_length=st.integers(2, 200))
def test_truncation_takes_from_the_longer(a: int, b: int, max_length: int) -> None:
    kept_a, kept_b = truncate([0] * a, [0] * b, max_length, random.Random(0))
    from_a, from_b = truncation(np.array([a]), np.array([b]), max_length)
    assert (a - from_a[0], b - from_b[0]) == (len(kept_a), len(kept_b))


def equal_pairs(count: int, a: int, b: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows of at most 40 tokens from pairs of `a` and `b` tokens.

    With them the tokens that each lost from the front of A and of B.
    """
    a_start = np.arange(count) * (a + b)
    middle, end = a_start + a, a_start + a + b
    size = count * (a + b)
    window = Window(*(np.array(column) for column in ([0], [0, size], [0, size], [0, 1])))
    target, is_random = np.full(count, 40), np.zeros(count, dtype=bool)
    spans = Spans(np.arange(count), a_start, middle, middle, end, target, is_random)
    rows = example_rows(window, spans, 40, 0, 0, keyed_rng(0, PAIRS))
    drawn = rows["a_start"] // (a + b)
    return rows, rows["a_start"] - a_start[drawn], rows["b_start"] - middle[drawn]


@pytest.mark.parametrize(("a", "b"), [(50, 10), (10, 50), (30, 30)])
def test_truncation_takes_from_front_and_back_with_equal_chance(a: int, b: int) -> None:
    rows, front_of_a, front_of_b = equal_pairs(4000, a, b)
    assert (rows["cut"] == 20).all()
    for length, left, front in ((a, "a_length", front_of_a), (b, "b_length", front_of_b)):
        lost = length - int(rows[left][0])
        assert (rows[left] == length - lost).all()
        assert front.min() >= 0
        assert front.max() <= lost
        assert front.mean() == pytest.approx(lost / 2, abs=0.2)
        assert front.var() == pytest.approx(lost / 4, rel=0.1)  # each token drawn by itself


@pytest.mark.slow
def test_short_sequences_are_ten_percent_of_documents(tokenizer, tmp_path) -> None:
    rng = np.random.default_rng(3)
    text = tmp_path / "many.txt"
    text.write_text("\n\n".join(make_document(rng, 30) for _ in range(1500)))
    many = prepare([str(text)], tokenizer, tmp_path / "store", held_out=0)

    def share_of_short_documents(probability: float) -> tuple[float, np.ndarray]:
        options = PairOptions(max_length=128, short_probability=probability)
        rows = plan_window(many, range(len(many.shards)), options, 0, 0, 0)
        max_length = np.zeros(many.documents, dtype=int)
        window = open_window(many, range(len(many.shards)))
        lengths = rows["a_length"] + rows["b_length"]
        np.maximum.at(max_length, documents(window, rows, "a"), lengths)
        return float(np.mean(max_length < 100)), rows

    none, _ = share_of_short_documents(0.0)
    every, _ = share_of_short_documents(1.0)
    tenth, rows = share_of_short_documents(0.1)
    assert none == 0
    assert every > 0.4  # a pair overshoots its target by part of a sentence
    assert tenth == pytest.approx(0.1 * every, abs=0.02)
    statistics = measure_pairs(rows)
    assert statistics.examples == len(rows)
    assert 0 < statistics.cut_share < 0.3


def test_one_document_is_refused(tokenizer, tmp_path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "one.txt").write_text(make_document(rng, 50))
    with pytest.raises(BertkitError, match="blank line ends a document"):
        prepare([str(tmp_path / "one.txt")], tokenizer, tmp_path / "store")


def test_none_is_the_very_table_of_next(store: TokenStore) -> None:
    for epoch in range(3):
        np.testing.assert_array_equal(
            plan(store, epoch=epoch, pair="none"), plan(store, epoch=epoch)
        )


@pytest.mark.parametrize("pair", PAIR_OBJECTIVES)
def test_every_table_keeps_the_length_and_the_documents(store: TokenStore, pair: str) -> None:
    window = open_window(store, range(len(store.shards)))
    rows = np.concatenate([plan(store, epoch=n, length=40, pair=pair) for n in range(4)])
    assert (rows["a_length"] >= 1).all()
    lengths = example_lengths(rows)
    assert lengths.max() == 40
    np.testing.assert_array_equal(
        lengths, rows["a_length"] + rows["b_length"] + np.where(rows["b_length"] > 0, 3, 2)
    )
    for side in ("a", "b"):
        start, end = spans(store, rows, side)
        document = documents(window, rows, side)
        assert (start >= window.sentences[window.documents[document]]).all()
        assert (end <= window.sentences[window.documents[document + 1]]).all()
    assert (plan(store, pair=pair) == plan(store, pair=pair)).all()
    found = measure_pairs(rows)
    assert found.mean_tokens == pytest.approx(float(lengths.mean()))
    assert found.random_share == pytest.approx(float(rows["is_random"].mean()))


def test_order_is_what_the_label_says(store: TokenStore) -> None:
    rows = np.concatenate([plan(store, epoch=n, pair="sop") for n in range(30)])
    (a_start, a_end), (b_start, b_end) = spans(store, rows, "a"), spans(store, rows, "b")
    swapped, whole = rows["is_random"] == 1, rows["cut"] == 0
    window = open_window(store, range(len(store.shards)))
    assert (documents(window, rows, "a") == documents(window, rows, "b")).all()
    np.testing.assert_array_equal(a_end[~swapped & whole], b_start[~swapped & whole])
    np.testing.assert_array_equal(b_end[swapped & whole], a_start[swapped & whole])
    both = rows["b_length"] > 0
    assert (a_end[~swapped & both] <= b_start[~swapped & both]).all()
    assert (b_end[swapped] <= a_start[swapped]).all()
    assert swapped.mean() == pytest.approx(0.5, abs=0.02)
    assert both.all()
    # nothing but the order tells the two apart: lengths of the earlier and the later part
    earlier = np.where(swapped, rows["b_length"], rows["a_length"])
    assert earlier[swapped].mean() == pytest.approx(earlier[~swapped].mean(), rel=0.05)


def test_order_reads_every_token_once(store: TokenStore) -> None:
    rows = plan(store, length=4000, pair="sop", short=0.0)
    assert rows["cut"].sum() == 0
    used = np.concatenate(
        [
            np.arange(start, end)
            for side in ("a", "b")
            for start, end in zip(*spans(store, rows, side), strict=True)
        ]
    )
    assert sorted(used) == list(range(store.tokens))


def test_a_chunk_of_one_sentence_is_cut_inside(tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = "river stone bridge lantern harvest winter"
    own = own_store(tokenizer, tmp_path, f"{words}.", f"{words}.")
    length = own.tokens // 2
    rows = np.concatenate([plan(own, pair="sop", epoch=n) for n in range(200)])
    assert len(rows) == 400, "each document is one chunk"
    earlier = np.where(rows["is_random"], rows["b_length"], rows["a_length"])
    assert set((rows["a_length"] + rows["b_length"]).tolist()) == {length}
    assert set(earlier.tolist()) == set(range(1, length)), "anywhere inside, both parts not empty"
    assert rows["is_random"].mean() == pytest.approx(0.5, abs=0.08)


def test_a_sentence_of_one_token_has_no_b(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Even the last of the window, whose empty B would begin behind the last token."""
    own = own_store(tokenizer, tmp_path, "river stone.\nbridge lantern.", "winter")
    last, window = own.tokens - 1, open_window(own, range(len(own.shards)))
    for epoch in range(20):
        rows = plan(own, pair="sop", epoch=epoch, short=0.0)
        single = rows[documents(window, rows, "a") == 1]
        assert single["a_start"].tolist() == single["b_start"].tolist() == [last]
        assert (single["a_length"][0], single["b_length"][0]) == (1, 0)
        assert single["is_random"][0] == 0
        assert example_lengths(single).tolist() == [3]
        batch = BatchBuilder(own, MaskingOptions(), 20, 0)[rows]
        assert batch.packed.lengths[-1] == 3
        assert batch.packed.segment_ids[-3:].tolist() == [0, 0, 0]
        assert batch.packed.ids[[-3, -1]].tolist() == [tokenizer.cls_id, tokenizer.sep_id]


@pytest.mark.parametrize("length", [40, 64, 4000])
def test_single_uses_every_token_once(store: TokenStore, length: int) -> None:
    """Where sentences fit: as many as fit, no B, and the next example begins where one ends."""
    rows = plan(store, length=length, pair="single-segment", short=0.0)
    assert (rows["b_length"] == 0).all()
    assert (rows["is_random"] == 0).all()
    np.testing.assert_array_equal(rows["b_start"], rows["a_start"])
    assert rows["a_length"].max() <= length - 2
    start, end = spans(store, rows, "a")
    assert rows["cut"].sum() == 0
    used = np.sort(np.concatenate([np.arange(*span) for span in zip(start, end, strict=True)]))
    np.testing.assert_array_equal(used, np.arange(store.tokens))
    window = open_window(store, range(len(store.shards)))
    stops = window.sentences[window.documents[documents(window, rows, "a") + 1]]
    following = np.searchsorted(window.sentences, end, side="right")
    inside = end < stops
    assert (window.sentences[following[inside]] - start[inside] > length - 2).all(), "no more fits"
    assert measure_pairs(rows).cut_share == 0
