"""Which tokens are masked, and by what (paper, section 3.1, task 1, and A.1).

Of n tokens, specials included, min(max_predictions, max(1, round(0.15 n))) become targets; never
[CLS] or [SEP]. Of the targets 80 % are replaced by [MASK], 10 % by a random token of the whole
vocabulary, and 10 % keep their token. Whole-word masking chooses words instead of tokens and skips
a word that would exceed the count; the 80/10/10 draw stays per token, as in the original.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bertkit.errors import BertkitError


@dataclass(frozen=True, kw_only=True)
class MaskingOptions:
    """How many targets there are and what the network sees in their place."""

    probability: float = 0.15
    """Share of tokens that become targets."""
    mask_share: float = 0.8
    """Share of targets shown as [MASK]."""
    random_share: float = 0.1
    """Share of targets shown as a random token; the rest is shown unchanged."""
    whole_words: bool = False
    """Mask all tokens of a word together."""

    def __post_init__(self) -> None:
        if not 0 < self.probability < 1:
            raise BertkitError(
                f"masking.probability must be between 0 and 1, got {self.probability}"
            )
        shares = (self.mask_share, self.random_share)
        if not (min(shares) >= 0 and sum(shares) <= 1 + 1e-9):  # of nan, too
            raise BertkitError(
                "masking.mask_share and masking.random_share must be at least 0 and at most 1 "
                f"together, got {shares[0]} and {shares[1]}"
            )


def count_targets(tokens: int, probability: float, max_predictions: int) -> int:
    """Number of targets of an example of `tokens` tokens, specials included."""
    return min(max_predictions, max(1, round(tokens * probability)))


def choose_tokens(candidates: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """`count` of the candidate positions (all, if there are fewer), in ascending order."""
    return np.sort(rng.permutation(candidates)[:count])


def choose_whole_words(
    candidates: np.ndarray, continuation: np.ndarray, count: int, rng: np.random.Generator
) -> np.ndarray:
    """Positions of whole words, at most `count` tokens in all, in ascending order.

    Args:
        candidates: (m,) ascending positions that may be masked.
        continuation: (m,) whether the token at each candidate begins with ##.
        count: the most positions to choose.
        rng: the example's generator.
    """
    starts_word = ~continuation
    starts_word[1:] |= np.diff(candidates) > 1  # a token after [SEP] belongs to no earlier word
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
    most: int,
    options: MaskingOptions,
    mask_id: int,
    rng: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """The targets of an example, and what the network sees there.

    Args:
        ids: (tokens,) of the example, specials included.
        candidates: (m,) ascending positions that may be masked.
        continuation: (vocabulary,) whether a token begins with ##.
        most: targets that an example may have.
        options: how to mask.
        mask_id: id of [MASK].
        rng: the example's generator.

    Returns:
        (targets,) ascending positions, and (targets,) the ids shown there.
    """
    count = count_targets(len(ids), options.probability, most)
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
    """What the network sees at the targets.

    Args:
        originals: (targets,) the true ids.
        options: the shares.
        mask_id: id of [MASK].
        vocabulary_size: random tokens are drawn from all of it, specials included, as in the
            original; a draw may hit the true token.
        rng: the example's generator.
    """
    draw = rng.random(len(originals))
    randoms = rng.integers(0, vocabulary_size, len(originals))
    shown = np.where(draw < options.mask_share + options.random_share, randoms, originals)
    return np.where(draw < options.mask_share, mask_id, shown)
