from __future__ import annotations

import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.corpus.prepare import PrepareOptions, prepare
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.examples.pairs import (
    SPECIALS,
    PairOptions,
    measure_pairs,
    open_window,
    plan_window,
    truncation,
)
from tests.conftest import make_document
from tests.examples.reference_pairs import pairs_of_document, truncate


def sentences_by_document(store: TokenStore) -> list[list[list[int]]]:
    documents = []
    for shard in range(len(store.shards)):
        tokens, sentences, bounds = store.arrays(shard)
        for first, stop in pairwise(bounds):
            documents.append(
                [tokens[sentences[i] : sentences[i + 1]].tolist() for i in range(first, stop)]
            )
    return documents


def plan(store: TokenStore, *, length: int = 64, seed: int = 0, epoch: int = 0) -> np.ndarray:
    return plan_window(
        store, range(len(store.shards)), PairOptions(max_length=length), seed, epoch, 0
    )


def test_plan_is_a_pure_function_of_seed_and_epoch(store: TokenStore) -> None:
    again = TokenStore(store.folder)
    np.testing.assert_array_equal(plan(store), plan(again))
    assert not np.array_equal(plan(store)["a_start"], plan(store, epoch=1)["a_start"])
    assert not np.array_equal(plan(store)["a_start"], plan(store, seed=1)["a_start"])


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
        assert (rows["a_document"][is_random] != rows["b_document"][is_random]).all()
        assert (rows["a_document"][~is_random] == rows["b_document"][~is_random]).all()
        followed = rows[~is_random & (rows["cut"] == 0)]
        np.testing.assert_array_equal(
            followed["a_start"] + followed["a_length"], followed["b_start"]
        )
        for side in ("a", "b"):  # every span lies inside its document
            bases = window.token_bases[np.searchsorted(window.shards, rows[f"{side}_shard"])]
            start = rows[f"{side}_start"] + bases
            document = rows[f"{side}_document"]
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
@given(a=st.integers(1, 300), b=st.integers(1, 300), longest=st.integers(2, 200))
def test_truncation_takes_from_the_longer(a: int, b: int, longest: int) -> None:
    kept_a, kept_b = truncate([0] * a, [0] * b, longest, random.Random(0))
    from_a, from_b = truncation(np.array([a]), np.array([b]), longest)
    assert (a - from_a[0], b - from_b[0]) == (len(kept_a), len(kept_b))


def test_short_sequences_are_ten_percent_of_documents(tokenizer, tmp_path) -> None:
    rng = np.random.default_rng(3)
    text = tmp_path / "many.txt"
    text.write_text("\n\n".join(make_document(rng, 30) for _ in range(1500)))
    many = prepare([str(text)], tokenizer, tmp_path / "store", PrepareOptions(held_out=0))

    def share_of_short_documents(probability: float) -> tuple[float, np.ndarray]:
        options = PairOptions(max_length=128, short_probability=probability)
        rows = plan_window(many, range(len(many.shards)), options, 0, 0, 0)
        longest = np.zeros(many.documents, dtype=int)
        np.maximum.at(longest, rows["a_document"], rows["a_length"] + rows["b_length"])
        return float(np.mean(longest < 100)), rows

    none, _ = share_of_short_documents(0.0)
    every, _ = share_of_short_documents(1.0)
    tenth, rows = share_of_short_documents(0.1)
    assert none == 0
    assert every > 0.4  # a pair overshoots its target by part of a sentence
    assert tenth == pytest.approx(0.1 * every, abs=0.02)
    statistics = measure_pairs(rows, 128)
    assert statistics.examples == len(rows)
    assert statistics.full_share > 0.5
    assert 0 < statistics.cut_share < 0.3


def test_one_document_is_refused(tokenizer, tmp_path) -> None:
    rng = np.random.default_rng(0)
    (tmp_path / "one.txt").write_text(make_document(rng, 50))
    with pytest.raises(BertkitError, match="blank line ends a document"):
        prepare([str(tmp_path / "one.txt")], tokenizer, tmp_path / "store")


def test_too_short_length_is_refused() -> None:
    with pytest.raises(BertkitError, match="at least 5"):
        PairOptions(max_length=4)
