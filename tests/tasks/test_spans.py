"""Windows, alignment and decoding: by hand, against a slow reference, and on real questions."""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.tasks.question_answering import (
    Answer,
    QuestionAnswering,
    QuestionColumns,
    QuestionWindows,
    SpanWindow,
    align,
)
from bertkit.tasks.squad import GoldAnswer, QuestionExample, squad_scores
from bertkit.tasks.squad import read_questions as read_squad
from bertkit.tasks.task import TrainingData
from bertkit.text.documents import TextCounts
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer

MARKS = "\u0301\u0323"
SYMBOLS = string.ascii_letters + string.digits + "()-.,?"
VOCABULARY = [*SPECIAL_TOKENS, *SYMBOLS, *(f"##{symbol}" for symbol in SYMBOLS), "18", "##95"]
CASED = Tokenizer.from_vocabulary(VOCABULARY, lowercase=False)
UNCASED = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True)

TEXTS = st.lists(
    st.sampled_from([*"abcXYZ189 (-).\n", *"\u202f\u200b\u0301🙂שمé中", "👩\u200d🚀"]), max_size=120
).map("".join)


class Made(NamedTuple):
    windows: list[SpanWindow]
    question_cut: int


def make_windows(question: str, context: str, tokenizer: Tokenizer, **lengths: int) -> Made:
    task = QuestionAnswering(**lengths)  # type: ignore[arg-type]
    [ids] = tokenizer.encode_batch([question])
    windows = task.span_windows(ids, context, tokenizer.encode(context), tokenizer)
    return Made(windows, max(0, len(ids) - task.question_limit))


def decode(
    windows: Sequence[SpanWindow],
    starts: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    context: str,
    **settings: Any,
) -> Answer:
    logits = [np.stack(pair, axis=1).astype(np.float64) for pair in zip(starts, ends, strict=True)]
    task = QuestionAnswering(**settings)
    return task.best_spans(list(zip(windows, logits, strict=True)), context)


def zeros(windows: Sequence[SpanWindow]) -> list[np.ndarray]:
    return [np.zeros(len(window.ids), dtype=np.float32) for window in windows]


def noise(windows: Sequence[SpanWindow], seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 3, len(window.ids)).astype(np.float32) for window in windows]


def context_starts(windows: Sequence[SpanWindow], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Index of each window's first context token; these tests use distinct offsets."""
    return [list(offsets).index(tuple(window.offsets[0].tolist())) for window in windows]


def with_marks(context: str, end: int) -> int:
    """The end of a text with the accents of its last letter."""
    return end + len(context[end:]) - len(context[end:].lstrip(MARKS))


def test_windows_by_hand() -> None:
    context = " ".join("abcdefghij")  # 10 tokens
    made = make_windows("x y", context, UNCASED, max_length=9, stride=3, max_question_length=5)
    ids = {piece: index for index, piece in enumerate(VOCABULARY)}
    texts = [[VOCABULARY[index] for index in window.ids] for window in made.windows]
    assert texts == [
        ["[CLS]", "x", "y", "[SEP]", *part, "[SEP]"] for part in ("abcd", "defg", "ghij")
    ]
    assert made.question_cut == 0
    first, middle, last = made.windows
    assert first.first == 4
    assert first.ids.dtype == first.offsets.dtype == np.dtype(np.int32)
    assert first.ids[0] == ids["[CLS]"]
    # d has 0 tokens to its right in the first window and 0 to its left in the second: the first.
    assert first.owned.tolist() == [True] * 4
    assert middle.owned.tolist() == [False, True, True, True]
    assert last.owned.tolist() == [False, True, True, True]
    assert [window.reach for window in made.windows] == [(0, 8), (5, 14), (11, 19)]


def test_a_context_that_fits_is_one_window() -> None:
    made = make_windows("Who?", "He (1895-1943).", CASED)
    assert len(made.windows) == 1
    assert made.windows[0].owned.all()
    assert made.windows[0].reach == (0, 15)


def test_a_long_question_is_cut_and_a_wide_stride_is_narrowed() -> None:
    made = make_windows(
        "a b c d e", "f g h i j", CASED, max_length=8, stride=100, max_question_length=3
    )
    assert made.question_cut == 2
    assert [window.first for window in made.windows] == [5] * 3
    assert [len(window.offsets) for window in made.windows] == [2, 2, 1]


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ({"max_length": 7}, "windows of 7 tokens have no room"),
    ],
)
def test_impossible_lengths_are_refused(lengths: dict[str, int], message: str) -> None:
    with pytest.raises(BertkitError, match=message):
        make_windows("a", "b", CASED, **lengths)


def reference_best(starts: Sequence[int], lengths: Sequence[int], token: int) -> int:
    """The window with the most context for a token, straight from the description."""
    scores = []
    for start, length in zip(starts, lengths, strict=True):
        inside = start <= token < start + length
        nearest = min(token - start, start + length - 1 - token)
        scores.append(nearest + 0.01 * length if inside else -1.0)
    return scores.index(max(scores))


@settings(max_examples=100, deadline=None)
@given(
    context=TEXTS,
    question=st.text("ab? ", max_size=12),
    max_length=st.integers(9, 40),
    stride=st.integers(1, 30),
    lowercase=st.booleans(),
)
def test_windows_hold_every_token_and_one_of_them_is_the_best(
    context: str, question: str, max_length: int, stride: int, lowercase: bool
) -> None:
    tokenizer = UNCASED if lowercase else CASED
    encoding = tokenizer.encode(context)
    windows = make_windows(
        question, context, tokenizer, max_length=max_length, stride=stride, max_question_length=5
    ).windows
    lengths = [len(window.offsets) for window in windows]
    if not encoding.ids:
        assert lengths == [0]
        return
    starts = context_starts(windows, encoding.offsets)
    step = min(stride, max_length - windows[0].first - 1)
    assert starts == [step * index for index in range(len(windows))]
    owners = np.full(len(encoding.ids), -1)
    for index, (start, length, window) in enumerate(zip(starts, lengths, windows, strict=True)):
        assert len(window.ids) == window.first + length + 1 <= max_length
        part = slice(start, start + length)
        assert window.ids[window.first : -1].tolist() == encoding.ids[part]
        assert [tuple(span) for span in window.offsets.tolist()] == encoding.offsets[part]
        own = start + np.flatnonzero(window.owned)
        assert (owners[own] == -1).all()
        owners[own] = index
    expected = [reference_best(starts, lengths, token) for token in range(len(owners))]
    assert owners.tolist() == expected


def test_a_longer_window_wins_by_a_hundredth_of_a_token_for_each_token() -> None:
    windows = make_windows("x", " ".join("a" * 500), CASED).windows
    starts = [window.offsets[0, 0] // 2 for window in windows]
    lengths = [len(window.offsets) for window in windows]
    assert (starts, lengths) == ([0, 128], [380, 372])
    short = make_windows("x", " ".join("a" * 500), CASED, stride=370).windows[1]
    # The first is longer by 250 tokens, which is worth 2.5. Token 375 has 4 tokens to its right in
    # the first and 5 to its left in the second: the first keeps it. Token 376 has 3 and 6.
    assert len(short.offsets) == 130
    assert np.flatnonzero(short.owned)[0] == 376 - 370
    for window, start in zip(windows, starts, strict=True):
        own = set((start + np.flatnonzero(window.owned)).tolist())
        held = range(start, start + len(window.offsets))
        assert own == {t for t in held if starts[reference_best(starts, lengths, t)] == start}


@settings(max_examples=100, deadline=None)
@given(context=TEXTS, draw=st.data(), stride=st.integers(1, 12))
def test_answers_align_wherever_all_their_tokens_are(
    context: str, draw: st.DataObject, stride: int
) -> None:
    offsets = UNCASED.encode(context).offsets
    if not offsets:
        return
    first = draw.draw(st.integers(0, len(offsets) - 1))
    last = draw.draw(st.integers(first, min(len(offsets) - 1, first + 6)))
    begin, end = offsets[first][0], offsets[last][1]
    windows = make_windows(
        "a?", context, UNCASED, max_length=20, stride=stride, max_question_length=5
    ).windows
    oracle = zeros(windows), zeros(windows)
    for index, (start, window) in enumerate(
        zip(context_starts(windows, offsets), windows, strict=True)
    ):
        inside = start <= first and last < start + len(window.offsets)
        shift = window.first - start
        target = align(GoldAnswer(context[begin:end], begin), window)
        assert target == ((first + shift, last + shift) if inside else None)
        if target:
            oracle[0][index][target[0]] = oracle[1][index][target[1]] = 9.0
    if stride == 1:  # the window of the most context holds short answers whole
        found = decode(windows, *oracle, context)
        end = with_marks(context, end)
        assert found.best.text == context[begin:end] == context[found.start : found.end]


def test_an_answer_inside_a_word_gets_the_tightest_tokens() -> None:
    context = "He (1895-1943)."
    window = make_windows("When?", context, CASED).windows[0]
    pieces = [VOCABULARY[index] for index in window.ids]

    def aligned(text: str) -> list[str] | None:
        target = align(GoldAnswer(text, context.index(text)), window)
        return pieces[target[0] : target[1] + 1] if target else None

    assert aligned("1895") == ["18", "##95"]
    assert aligned("9") == ["##95"]
    assert aligned(" (18") == ["(", "18"]
    assert aligned(" ") is None
    assert align(GoldAnswer("1896", -1), window) is None


def test_dropped_characters_at_the_edges_do_not_lose_an_answer() -> None:
    context = "\u200bcafe\u0301"  # the mark belongs to no token once accents are stripped
    window = make_windows("a", context, UNCASED).windows[0]
    assert window.offsets.tolist()[-1] == [4, 5]
    first = window.first
    assert align(GoldAnswer(context, 0), window) == (first, first + 3)
    assert align(GoldAnswer("\u200b", 0), window) is None


@pytest.mark.parametrize(
    ("context", "answer"),
    [
        ("prix 5\u202fkm 🙂 fin", "5\u202fkm 🙂"),
        ("בשנת 1895 נולד", "1895 נולד"),
        ("ولد عام 1895.", "عام"),
        ("Zürich, ÉCOLE", "ÉCOLE"),
        ("中文名", "文"),
        ("le cafe\u0301 noir", "cafe\u0301"),
        ("e\u0301 puis e\u0301\u0323", "e\u0301\u0323"),
    ],
)
@pytest.mark.parametrize("tokenizer", [CASED, UNCASED])
def test_answers_come_back_as_raw_text(context: str, answer: str, tokenizer: Tokenizer) -> None:
    windows = make_windows("a?", context, tokenizer).windows
    starts, ends = zeros(windows), zeros(windows)
    target = align(GoldAnswer(answer, context.index(answer)), windows[0])
    assert target is not None
    starts[0][target[0]] = ends[0][target[1]] = 5.0
    found = decode(windows, starts, ends, context)
    assert (found.best.text, found.start) == (answer, context.index(answer))


def reference_decode(
    windows: Sequence[SpanWindow],
    starts: Sequence[np.ndarray],
    ends: Sequence[np.ndarray],
    context: str,
    nbest: int,
    max_length: int,
) -> list[tuple[str, float]]:
    """Texts and scores, best first, by loops."""
    best: dict[str, float] = {}
    for window, start, end in zip(windows, starts, ends, strict=True):
        places = range(window.first, len(window.ids) - 1)
        top_starts = sorted(places, key=lambda place: -start[place])[:nbest]
        for i in top_starts:
            top_ends = sorted(places, key=lambda place: -end[place])[:nbest]
            for j in top_ends:
                if window.owned[i - window.first] and i <= j < i + max_length:
                    left, right = window.offsets[[i - window.first, j - window.first]]
                    text = context[left[0] : with_marks(context, right[1])]
                    score = float(start[i]) + float(end[j])
                    best[text] = max(best.get(text, -np.inf), score)
    return sorted(best.items(), key=lambda item: -item[1])[:nbest]


@settings(max_examples=50, deadline=None)
@given(
    context=TEXTS,
    seed=st.integers(0, 999),
    nbest=st.integers(1, 8),
    max_length=st.integers(1, 6),
    null=st.booleans(),
)
def test_decoding_agrees_with_loops(
    context: str, seed: int, nbest: int, max_length: int, null: bool
) -> None:
    windows = make_windows(
        "a?", context, CASED, max_length=18, stride=5, max_question_length=5
    ).windows
    starts, ends = noise(windows, seed), noise(windows, seed + 1000)
    found = decode(
        windows, starts, ends, context, nbest=nbest, max_answer_length=max_length, null=null
    )
    expected = (
        reference_decode(windows, starts, ends, context, nbest, max_length)
        or reference_decode(windows, starts, ends, context, 10**6, max_length)[:nbest]
    )
    null_score = min(float(s[0]) + float(e[0]) for s, e in zip(starts, ends, strict=True))
    if expected:
        assert found.best.text == expected[0][0]
        assert found.null_odds == pytest.approx(null_score - expected[0][1])
        assert found.best.text == context[found.start : found.end] != ""
    else:
        assert (found.best.text, found.null_odds) == ("", 0.0)
    if null:
        expected = sorted([*expected, ("", null_score)], key=lambda item: -item[1])
        rank = expected.index(("", null_score))
        expected = expected[: max(nbest, rank + 1)]
    assert [span.text for span in found.nbest] == [text for text, _ in expected]
    assert [span.score for span in found.nbest] == pytest.approx([s for _, s in expected])
    if expected:
        assert sum(span.probability for span in found.nbest) == pytest.approx(1.0)
    in_list = sum(span.probability for span in found.nbest if span.text == "")
    assert found.no_answer_probability == pytest.approx(in_list)


def test_only_the_start_needs_the_most_context() -> None:
    context = " ".join("abcdefghij")
    windows = make_windows(
        "x y", context, UNCASED, max_length=9, stride=3, max_question_length=5
    ).windows
    starts, ends = zeros(windows), zeros(windows)
    starts[1][windows[1].first] = ends[1][windows[1].first + 1] = 9.0  # d e, but d is not its own
    starts[0][windows[0].first + 2] = ends[0][windows[0].first + 3] = 5.0  # c d
    assert decode(windows, starts, ends, context).best.text == "c d"

    shifted = make_windows(
        "x y", context, UNCASED, max_length=9, stride=2, max_question_length=5
    ).windows
    assert shifted[0].owned.tolist() == [True, True, True, False]
    starts, ends = zeros(shifted), zeros(shifted)
    starts[0][shifted[0].first + 1] = ends[0][shifted[0].first + 3] = 9.0  # d ends, not begins
    assert decode(shifted, starts, ends, context).best.text == "b c d"


def test_the_null_score_is_the_lowest_over_windows() -> None:
    context = " ".join("abcdefghij")
    windows = make_windows(
        "x y", context, UNCASED, max_length=9, stride=3, max_question_length=5
    ).windows
    starts, ends = zeros(windows), zeros(windows)
    for value, start, end in zip((8.0, 1.0, 5.0), starts, ends, strict=True):
        start[0] = end[0] = value
    starts[2][windows[2].first] = -1.0
    starts[2][windows[2].first + 1] = ends[2][windows[2].first + 1] = 2.0
    found = decode(windows, starts, ends, context, null=True)
    assert (found.best.text, found.null_odds) == ("h", -2.0)
    scores = {span.text: span.score for span in found.nbest}
    assert next(iter(scores)) == "h"
    assert (scores["h"], scores[""]) == (4.0, 2.0)
    assert 0.0 < found.no_answer_probability < 0.5
    assert decode(windows, starts, ends, context).no_answer_probability == 0.0


def test_the_best_starts_and_ends_may_not_fit_together() -> None:
    """There is an answer all the same: among the other starts and ends."""
    windows = make_windows("a", "b c", UNCASED).windows
    starts, ends = zeros(windows), zeros(windows)
    starts[0][windows[0].first + 1] = 9.0
    ends[0][windows[0].first] = 8.0  # ends before it begins
    found = decode(windows, starts, ends, "b c", nbest=1, null=True)
    assert (found.best.text, found.nbest[0].score, found.null_odds) == ("c", 9.0, -9.0)
    assert [span.text for span in found.nbest] == ["c", ""]


def test_windows_overlap_however_short_they_are() -> None:
    """128 tokens from one to the next leave gaps of context where a window has room for fewer."""
    context = " ".join("abcdefghij" * 4)
    made = make_windows("x", context, UNCASED, max_length=16, max_question_length=5).windows
    starts = [int(window.offsets[0, 0]) // 2 for window in made]
    assert starts == [0, 9, 18, 27, 36][: len(starts)], "3/4 of 12 tokens"
    assert len(starts) == 5
    for room in range(4, 13):
        made = make_windows(
            "x", context, UNCASED, max_length=room + 4, max_question_length=1
        ).windows
        assert all(
            one.offsets[-1, 1] > other.offsets[0, 0] for one, other in itertools.pairwise(made)
        ), room
    usual = make_windows("x", context * 20, UNCASED).windows
    assert int(usual[1].offsets[0, 0]) == int(usual[0].offsets[128, 0])


def test_no_allowed_span_is_no_answer_and_no_crash() -> None:
    windows = make_windows("a", "\u200b", UNCASED).windows  # a context without tokens
    found = decode(windows, zeros(windows), zeros(windows), "\u200b", null=True)
    assert (found.best.text, found.no_answer_probability, found.null_odds) == ("", 1.0, 0.0)
    assert decode(windows, zeros(windows), zeros(windows), "\u200b").nbest == ()


def test_equal_texts_are_listed_once_with_the_best_score() -> None:
    context = "b b b"
    windows = make_windows("a", context, UNCASED).windows
    starts, ends = zeros(windows), zeros(windows)
    starts[0][windows[0].first + 2] = 3.0
    found = decode(windows, starts, ends, context)
    assert (found.best.text, found.start, found.nbest[0].score) == ("b", 4, 3.0)
    assert [span.text for span in found.nbest] == ["b", "b b", "b b b"]


@pytest.mark.slow
def test_a_context_of_many_characters() -> None:
    rng = np.random.default_rng(0)
    words = ["a", "bc", "(1895-1943)", "🙂", "\u202f", "م"]
    context = " ".join(rng.choice(words, 90_000))[:300_000]
    assert len(context) == 300_000
    windows = make_windows("when was it?", context, UNCASED).windows
    assert windows[-1].reach[1] == len(context)
    offsets = np.array(UNCASED.encode(context).offsets)
    assert sum(int(window.owned.sum()) for window in windows) == len(offsets)
    end = int(offsets[-3, 1])
    answer = GoldAnswer(context[end - 40 : end], end - 40)
    starts, ends = zeros(windows), zeros(windows)
    aligned = [align(answer, window) for window in windows]
    assert 1 <= sum(target is not None for target in aligned) <= 3
    for start, last, target in zip(starts, ends, aligned, strict=True):
        if target:
            start[target[0]] = last[target[1]] = 9.0
    found = decode(windows, starts, ends, context)
    assert answer.text.strip() in found.best.text
    assert found.end == end


def oracle_answer(question: QuestionExample, tokenizer: Tokenizer) -> str:
    """What decoding gives for the logits of a model that knows the first gold answer."""
    assert question.answers
    windows = make_windows(question.question, question.context, tokenizer).windows
    starts, ends = zeros(windows), zeros(windows)
    for window, start, end in zip(windows, starts, ends, strict=True):
        target = align(question.answers[0], window)
        if target:
            start[target[0]] = end[target[1]] = 9.0
    return decode(windows, starts, ends, question.context).best.text


@pytest.mark.slow
@pytest.mark.parametrize("vocabulary", ["bert-base-uncased", "bert-base-cased"])
def test_the_ceiling_on_real_questions(data: Path, vocabulary: str) -> None:
    """What stands between it and 100: answers inside a word, and of more than 30 tokens."""
    questions = read_squad(data / "squad" / "dev-v1.1.json", TextCounts())[::10]
    path = data / "vocab" / f"{vocabulary}-vocab.txt"
    tokenizer = Tokenizer.load(path)
    scores = squad_scores(questions, [oracle_answer(q, tokenizer) for q in questions])
    assert scores["exact_match"] > 0.995


def test_new_tasks_cut_questions_at_half_of_a_window_and_saved_ones_as_they_did() -> None:
    for window, asked, limit in ((96, 60, 48), (96, 40, 40), (384, 64, 64), (8, 64, 4)):
        windows = QuestionWindows(max_question_length=asked)
        data = TrainingData([], QuestionColumns(), windows, window, TextCounts())
        assert QuestionAnswering.from_data(data).question_limit == limit
    assert QuestionAnswering.from_transformers(96)["max_question_length"] == 48
    assert QuestionAnswering(max_length=96, max_question_length=60).question_limit == 60
    made = make_windows("x" * 30, "a b", CASED, max_length=20, max_question_length=64)
    assert all(len(window.ids) <= 20 and len(window.offsets) for window in made.windows)
