"""Choosing the tokens to mask, and their replacements (paper, section 3.1, task 1, and A.1).

Of n tokens, specials included, min(max_predictions, max(1, round(0.15 n))) become targets, but
never [CLS] or [SEP]. Of the targets, 80 % are replaced by [MASK], 10 % by a random token of the
whole vocabulary, and 10 % are unchanged. Whole-word masking chooses words instead of tokens and
skips a word that would exceed the count; the 80/10/10 draw is per token, as in Google's code.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bertkit.errors import BertkitError


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
    """Draw the input ids of the targets.

    Args:
        originals: (targets,) the original ids.
        options: the shares of [MASK] and of random tokens.
        mask_id: the id of [MASK].
        vocabulary_size: the number of ids that random tokens are drawn from, including specials, as
            in Google's code; a draw may equal the original id.
        rng: the example's random generator.
    """
    draw = rng.random(len(originals))
    randoms = rng.integers(0, vocabulary_size, len(originals))
    shown = np.where(draw < options.mask_share + options.random_share, randoms, originals)
    return np.where(draw < options.mask_share, mask_id, shown)
