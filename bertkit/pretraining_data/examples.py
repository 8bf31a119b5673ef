"""Pre-training examples: keyed random numbers, sentence pairs and masks.

Random numbers come from Philox (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"),
keyed by (seed, purpose) and started at the counter (row, window, epoch): any process can draw the
pairs of a window and the masks of an example, in any order and any number of times.

*Pairs* (paper, sections 3.1 and A.2). The algorithm is that of google-research/bert
`create_pretraining_data.py`: each document is cut into chunks of about the target length, and a
chunk is cut at random into A and B. With probability 1/2, or always if the chunk is one sentence, B
comes from a random document instead, and the next chunk starts with the unused sentences. A pair
that is too long loses tokens from the longer side, at random from its front or back. One defect is
fixed: the random document is never the current one.

Two other ways to cut examples are `sop` (B follows A, or the two are swapped: ALBERT, Lan et al.
2019, section 3.1) and `single-segment` (A is as many whole sentences of the document as fit, and
there is no B: DOC-SENTENCES of RoBERTa, Liu et al. 2019, section 4.2).

All documents of a window (a few shards) are processed together: each NumPy step below advances
every unfinished document by one chunk.

*Masks* (paper, section 3.1, task 1, and A.1). Of n tokens, specials included, min(max_predictions,
max(1, round(0.15 n))) become targets, but never [CLS] or [SEP]. Of the targets, 80 % are replaced
by [MASK], 10 % by a random token of the whole vocabulary, and 10 % are unchanged. Whole-word
masking chooses words instead of tokens and skips a word that would exceed the count; the 80/10/10
draw is per token, as in Google's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError, check_known
from bertkit.processes import PAIRS, keyed_rng

# Sentence pairs -----------------------------------------------------------------------------------

SPECIALS = 3
"""The special tokens of [CLS] A [SEP] B [SEP]; if B is empty, there is one fewer."""

TOKEN_OBJECTIVES = ("mlm", "clm", "rtd")
"""The token objectives: see `training.recipe.Objectives`."""
PAIR_OBJECTIVES = ("nsp", "sop", "none", "single-segment")
"""The pair objectives: see `PairOptions.pair`."""

EXAMPLE_DTYPE = np.dtype(
    [
        ("epoch", np.int32),
        ("window", np.int32),
        ("row", np.int32),  # together with epoch and window, identifies the example
        ("a_shard", np.int32),
        ("a_start", np.int64),  # first token of A within its shard
        ("a_length", np.int32),
        ("b_shard", np.int32),
        ("b_start", np.int64),
        ("b_length", np.int32),
        # the label: 0 = B follows A, 1 = random or swapped (Google's order)
        ("is_random", np.int8),
        ("cut", np.int32),  # tokens that truncation removed from the pair
    ]
)


@dataclass(frozen=True, kw_only=True)
class PairOptions:
    """Options for cutting documents into examples."""

    max_length: int = 128
    """The maximum number of tokens in an example, including [CLS] and both [SEP]."""
    short_probability: float = 0.1
    """Share of documents whose target length is drawn from 2 to max_length - 3 (Google's 10 %)."""
    pair: str = "nsp"
    """nsp: B follows A or, half the time, comes from another document; none: the same examples
    without a loss; sop: B follows A, or the two are swapped; single-segment: B is empty."""

    @property
    def room(self) -> int:
        """The maximum number of tokens of A and B together."""
        return self.max_length - SPECIALS + (self.pair == "single-segment")

    def __post_init__(self) -> None:
        check_known("pair objective", self.pair, PAIR_OBJECTIVES)
        if self.max_length < SPECIALS + 2:
            raise BertkitError(
                f"a pair needs a maximum length of at least {SPECIALS + 2}, got {self.max_length}"
            )


class Window(NamedTuple):
    """The documents of some shards as one sequence of tokens (offsets in window coordinates)."""

    shards: np.ndarray
    """(shards,) the index of each shard in the store."""
    token_bases: np.ndarray
    """(shards + 1,) the first token of each shard."""
    sentences: np.ndarray
    """(sentences + 1,) the first token of each sentence."""
    documents: np.ndarray
    """(documents + 1,) the first sentence of each document."""


class Spans(NamedTuple):
    """Pairs of token spans in window coordinates, with one entry for each example."""

    document: np.ndarray
    a_start: np.ndarray
    a_end: np.ndarray
    b_start: np.ndarray
    b_end: np.ndarray
    target: np.ndarray
    is_random: np.ndarray


def open_window(store: TokenStore, shards: Sequence[int]) -> Window:
    """Join the sentence and document tables of some shards."""
    sentences, documents, bases = [], [], [0]
    sentence_base = 0
    for shard in shards:
        arrays = store.arrays(shard)
        sentences.append(arrays.sentences[:-1].astype(np.int64) + bases[-1])
        documents.append(arrays.documents[:-1].astype(np.int64) + sentence_base)
        sentence_base += len(arrays.sentences) - 1
        bases.append(bases[-1] + len(arrays.tokens))
    return Window(
        shards=np.asarray(shards),
        token_bases=np.asarray(bases),
        sentences=np.append(np.concatenate(sentences), bases[-1]),
        documents=np.append(np.concatenate(documents), sentence_base),
    )


def plan_window(
    store: TokenStore,
    shards: Sequence[int],
    options: PairOptions,
    seed: int,
    epoch: int,
    number: int,
) -> np.ndarray:
    """Return the examples of a window of shards in random order, as rows of `EXAMPLE_DTYPE`.

    The seed, the epoch, counted from 0, and the window's number determine the random draws.
    """
    window = open_window(store, shards)
    if len(window.documents) < 3 and options.pair in ("nsp", "none"):
        raise BertkitError(
            f"store {store.folder} ({store.split}) has fewer than two documents in shards "
            f"{list(shards)}; next-sentence pairs need a second one to draw from"
        )
    rng = keyed_rng(seed, PAIRS, epoch=epoch, window=number)
    spans = cut_documents(window, options, rng)
    if options.pair == "sop":
        spans = swap(spans)
    elif options.pair != "single-segment":
        spans = draw_random_next(window, spans, rng)
    return example_rows(window, spans, options.room, epoch, number, rng)


def cut_documents(window: Window, options: PairOptions, rng: np.random.Generator) -> Spans:
    """Cut every document into chunks and each chunk into A and B (B not yet drawn where random)."""
    max_length = options.room
    count = len(window.documents) - 1
    is_short = rng.random(count) < options.short_probability
    targets = np.where(is_short, rng.integers(2, max_length, count, endpoint=True), max_length)
    cursor = window.documents[:-1].copy()
    active = np.arange(count)
    spans: list[Spans] = []
    starts = window.sentences
    while len(active):
        first, stop = cursor[active], window.documents[active + 1]
        target = targets[active]
        end = np.searchsorted(starts, starts[first] + target)  # first end that reaches the target
        # nothing is truncated, so the segment ends with the last sentence that fits
        if options.pair == "single-segment":
            end = np.searchsorted(starts, starts[first] + target, side="right") - 1
        end = np.clip(end, first + 1, stop)
        size = end - first
        a_size = np.maximum(1, 1 + np.floor(rng.random(len(active)) * (size - 1)).astype(np.int64))
        is_random = rng.random(len(active)) < 0.5
        middle = starts[first + a_size]
        next_cursor = end
        if options.pair == "sop":
            middle = np.where(size == 1, cut_sentence(starts[first], starts[end], rng), middle)
        elif options.pair == "single-segment":
            middle, is_random = starts[end], np.zeros(len(active), dtype=bool)
        else:
            is_random |= size == 1
            next_cursor = np.where(is_random, first + a_size, end)  # unused sentences come again
        spans.append(Spans(active, starts[first], middle, middle, starts[end], target, is_random))
        cursor[active] = next_cursor
        active = active[cursor[active] < stop]
    return Spans(*(np.concatenate(columns) for columns in zip(*spans, strict=True)))


def cut_sentence(start: np.ndarray, end: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw a token inside each sentence at which B starts, for chunks of a single sentence.

    A sentence of one token cannot be cut, so its B is empty.
    """
    inside = np.floor(rng.random(len(start)) * (end - start - 1)).astype(np.int64)
    return np.minimum(start + 1 + inside, end)


def swap(spans: Spans) -> Spans:
    """Swap A and B if the label is 1; if B is empty, leave them and set the label to 0."""
    swapped = spans.is_random & (spans.b_end > spans.b_start)
    return spans._replace(
        a_start=np.where(swapped, spans.b_start, spans.a_start),
        a_end=np.where(swapped, spans.b_end, spans.a_end),
        b_start=np.where(swapped, spans.a_start, spans.b_start),
        b_end=np.where(swapped, spans.a_end, spans.b_end),
        is_random=swapped,
    )


def draw_random_next(window: Window, spans: Spans, rng: np.random.Generator) -> Spans:
    """Draw B for each random example: sentences from a random position of another document."""
    chosen = np.flatnonzero(spans.is_random)
    current = spans.document[chosen]
    other = rng.integers(0, len(window.documents) - 2, len(chosen))
    other += other >= current  # uniform over all documents but the current one
    first, stop = window.documents[other], window.documents[other + 1]
    start = first + np.floor(rng.random(len(chosen)) * (stop - first)).astype(np.int64)
    wanted = spans.target[chosen] - (spans.a_end - spans.a_start)[chosen]
    starts = window.sentences
    end = np.clip(search(starts, starts[start] + wanted), start + 1, stop)
    b_start, b_end = spans.b_start.copy(), spans.b_end.copy()
    b_start[chosen], b_end[chosen] = starts[start], starts[end]
    return spans._replace(b_start=b_start, b_end=b_end)


def search(table: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Do `np.searchsorted` on sorted values, because neighbouring searches share cached memory."""
    order = np.argsort(values)
    positions = np.empty(len(values), dtype=np.int64)
    positions[order] = np.searchsorted(table, values[order])
    return positions


def truncation(a: np.ndarray, b: np.ndarray, max_length: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens to cut from A and B: one at a time from the longer, from B on ties.

    The lengths of A and B are (examples,), and those of a pair may add up to `max_length`.
    """
    excess = np.maximum(0, a + b - max_length)
    from_a = np.minimum(excess, np.maximum(0, a - b))
    from_b = np.minimum(excess, np.maximum(0, b - a))
    rest = excess - from_a - from_b
    return from_a + rest // 2, from_b + (rest + 1) // 2


def example_rows(
    window: Window,
    spans: Spans,
    max_length: int,
    epoch: int,
    number: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Truncate and shuffle the pairs, and return them as rows in shard coordinates."""
    a_length, b_length = spans.a_end - spans.a_start, spans.b_end - spans.b_start
    from_a, from_b = truncation(a_length, b_length, max_length)
    # Each lost token comes from front or back with probability 1/2.
    a_start = spans.a_start + rng.binomial(from_a, 0.5)
    b_start = spans.b_start + rng.binomial(from_b, 0.5)
    b_start = np.where(b_length == 0, a_start, b_start)  # an empty B may start at the window's end
    rows = np.zeros(len(a_start), dtype=EXAMPLE_DTYPE)
    for side, start in (("a", a_start), ("b", b_start)):
        shard = np.searchsorted(window.token_bases, start, side="right") - 1
        rows[f"{side}_shard"] = window.shards[shard]
        rows[f"{side}_start"] = start - window.token_bases[shard]
    rows["a_length"], rows["b_length"] = a_length - from_a, b_length - from_b
    rows["cut"] = from_a + from_b
    rows["is_random"] = spans.is_random
    rows = np.take(rows, rng.permutation(len(rows)))
    rows["epoch"], rows["window"] = epoch, number
    rows["row"] = np.arange(len(rows))
    return rows


def example_lengths(rows: np.ndarray) -> np.ndarray:
    """Return (rows,) the number of tokens of each example, including its special tokens."""
    return rows["a_length"] + rows["b_length"] + SPECIALS - (rows["b_length"] == 0)


@dataclass(frozen=True)
class PairStatistics:
    """Statistics of examples, which are printed before training."""

    examples: int
    random_share: float
    """The share of examples with a random B, above 1/2 if many chunks are a single sentence."""
    mean_tokens: float
    """The mean length, including special tokens."""
    cut_share: float
    """The share of tokens that truncation removed (as Google's code does)."""


def measure_pairs(rows: np.ndarray) -> PairStatistics:
    """Compute the statistics of an array of `EXAMPLE_DTYPE`."""
    tokens = example_lengths(rows)
    cut = rows["cut"].sum(dtype=np.int64)
    return PairStatistics(
        examples=len(rows),
        random_share=float(rows["is_random"].mean()),
        mean_tokens=float(tokens.mean()),
        cut_share=float(cut / (cut + (rows["a_length"] + rows["b_length"]).sum(dtype=np.int64))),
    )


# Masks --------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class MaskingOptions:
    """The share of tokens that become targets, and how those are replaced in the input."""

    probability: float = 0.15
    """Share of tokens that become targets."""
    mask_share: float = 0.8
    """Share of targets replaced by [MASK]."""
    random_share: float = 0.1
    """Share of targets replaced by a random token; the rest is unchanged."""
    whole_words: bool = False
    """Whether to mask all tokens of a word together."""

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise BertkitError(
                f"masking.probability must be between 0 and 1, got {self.probability}"
            )
        shares = (self.mask_share, self.random_share)
        if not (min(shares) >= 0 and sum(shares) <= 1 + 1e-9):  # also true for NaN
            raise BertkitError(
                "masking.mask_share and masking.random_share must be at least 0 and at most 1 "
                f"together, got {shares[0]} and {shares[1]}"
            )


def count_targets(tokens: int, probability: float, max_predictions: int) -> int:
    """Return the number of targets of an example of `tokens` tokens, specials included."""
    return min(max_predictions, max(1, round(tokens * probability)))


def choose_tokens(candidates: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """Choose `count` of the candidate positions, or all if there are fewer, in ascending order."""
    return np.sort(rng.permutation(candidates)[:count])


def choose_whole_words(
    candidates: np.ndarray, continuation: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Choose the positions of whole words, at most `count` tokens in total, in ascending order."""
    starts_word = ~continuation
    starts_word[1:] |= np.diff(candidates) > 1  # no word continues across [SEP]
    starts_word[:1] = True
    bounds = np.append(np.flatnonzero(starts_word), len(candidates))
    chosen: list[np.ndarray] = []
    total = 0
    for word in rng.permutation(len(bounds) - 1):
        tokens = candidates[bounds[word] : bounds[word + 1]]
        if total + len(tokens) <= count:
            chosen.append(tokens)
            total += len(tokens)
        if total == count:
            break
    return np.sort(np.concatenate(chosen)) if chosen else candidates[:0]


def draw_masks(
    ids: np.ndarray,
    candidates: np.ndarray,
    continuation: np.ndarray,
    maximum: int,
    options: MaskingOptions,
    mask_id: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """Choose the targets of an example and the input ids that replace them.

    There are at most `maximum` targets. The arrays are the ids of the example, (tokens,), specials
    included; the ascending positions that may be masked, (m,); and whether each token of the
    vocabulary starts with ##.

    Returns:
        (targets,) ascending positions, and (targets,) the input ids at these positions.
    """
    count = count_targets(len(ids), options.probability, maximum)
    if options.whole_words:
        chosen = choose_whole_words(candidates, continuation[ids[candidates]], count, rng)
    else:
        chosen = choose_tokens(candidates, count, rng)
    return chosen, corrupt(ids[chosen], options, mask_id, len(continuation), rng)


def corrupt(
    originals: np.ndarray,
    options: MaskingOptions,
    mask_id: int,
    vocabulary_size: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Draw the input ids of the targets from their original ids, (targets,).

    Random tokens are drawn from the whole vocabulary, as in Google's code: a draw may be a special
    token or equal the original.
    """
    draw = rng.random(len(originals))
    randoms = rng.integers(0, vocabulary_size, len(originals))
    shown = np.where(draw < options.mask_share + options.random_share, randoms, originals)
    return np.where(draw < options.mask_share, mask_id, shown)
