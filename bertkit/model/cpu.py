"""What makes a CPU fast: dropout from few random bits, and sequences grouped for attention.

Dropout (Srivastava et al. 2014; paper section A.2): torch draws one double per element on a CPU,
one after the other, which takes longer than the matrix product before it. Sixteen random bits per
element are as good and four times as fast: the probability is rounded to a multiple of 1/65536
(0.1 becomes 0.100006), and the kept values are scaled by exactly that, so the mean is preserved.
Other devices use torch's own dropout.

Grouping (paper section 3): every call of an attention kernel has a fixed cost, and padding costs
time too, so neighbouring sequences of equal or similar length share one call.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from bertkit.pretraining_data.batch import EqualLengths, Packed

UNIFORM_STEPS = 1 << 16


class Dropout(nn.Module):
    """Sets elements to 0 with `probability` while training; scales the others to keep the mean."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, hidden: Tensor) -> Tensor:
        """`hidden`, thinned while training; any shape."""
        if not self.training or self.probability == 0.0:
            return hidden
        if hidden.device.type != "cpu":
            return torch.dropout(hidden, self.probability, train=True)
        mask = keep_mask(hidden.shape, self.probability, hidden.dtype)
        return hidden * mask * keep_scale(self.probability)

    def extra_repr(self) -> str:
        """The probability, for `print(model)`."""
        return f"probability={self.probability}"


def keep_mask(shape: torch.Size, probability: float, dtype: torch.dtype) -> Tensor:
    """Ones of `shape` on the CPU, zeros with `probability`; from torch's default generator.

    In `dtype`, that of the product: converting booleans takes longer than the product itself.
    """
    count = math.prod(shape)
    words = torch.empty(-(-count // 4), dtype=torch.int64)
    words.random_(-(1 << 63), None)  # None: all 64 bits, where the default leaves the sign 0
    uniform = words.view(torch.int16)[:count].view(shape)
    ones = torch.empty(shape, dtype=dtype)
    return torch.ge(uniform, round(probability * UNIFORM_STEPS) - UNIFORM_STEPS // 2, out=ones)


def keep_scale(probability: float) -> float:
    """What kept elements are multiplied with: one over the exact probability of being kept."""
    return UNIFORM_STEPS / (UNIFORM_STEPS - round(probability * UNIFORM_STEPS))


SIMILAR = 0.75
"""Sequences of at least this share of a length are padded to it, to share one call."""

STEP, LEAST_LENGTH, SHORT, LONG_STEP = 16, 32, 128, 32
"""Where few lengths are wanted, those up to the third are multiples of the first and no less than
the second, and longer ones are multiples of the last."""


class Group(NamedTuple):
    """Neighbouring sequences that share one call."""

    sequences: int
    length: int
    """That all are padded to."""
    tokens: int
    inside: Tensor | None
    """(tokens,) their places among sequences x length; None where they fill them."""
    mask: Tensor | None
    """(sequences, 1, 1, length) to be added to the scores of keys; None where all is filled."""


def attention_groups(
    packed: Packed, dtype: torch.dtype, *, similar: bool, few: bool
) -> list[Group]:
    """The groups of a batch; worked out once for all layers.

    Args:
        packed: the batch.
        dtype: of the scores.
        similar: let runs of similar lengths share a group.
        few: round lengths up, so that few lengths occur: for each new one oneDNN makes code, which
            takes as long as several batches, and keeps it.
    """
    name = dtype, similar, few
    if name not in packed.kept:
        if few and 2 * len(packed.equal_lengths) <= len(packed.lengths):
            similar = few = False
        runs = merge_similar(packed, few=few) if similar else [[r] for r in packed.equal_lengths]
        packed.kept[name] = [sequence_group(own, dtype, few=few) for own in runs]
    return packed.kept[name]


def sequence_group(runs: Sequence[EqualLengths], dtype: torch.dtype, *, few: bool) -> Group:
    """Some runs, longest first, as a group."""
    length = bucket_lengths(runs[0].length) if few else runs[0].length
    sequences = sum(run.sequences for run in runs)
    tokens = sum(run.sequences * run.length for run in runs)
    if tokens == sequences * length:
        return Group(sequences, length, tokens, None, None)
    lengths = torch.tensor([run.length for run in runs for _ in range(run.sequences)])
    real = torch.arange(length) < lengths[:, None]
    inside = real.flatten().nonzero().squeeze(1)
    mask = torch.zeros(sequences, 1, 1, length, dtype=dtype)
    # Finite: a padded row that sees nothing else would be NaN, and so its gradients.
    mask.masked_fill_(~real[:, None, None, :], torch.finfo(dtype).min / 2)
    return Group(sequences, length, tokens, inside, mask)


def bucket_lengths(length: int) -> int:
    """The length that a sequence is padded to where few lengths are wanted."""
    step = STEP if length <= SHORT else LONG_STEP
    return max(LEAST_LENGTH, -(-length // step) * step)


def merge_similar(packed: Packed, *, few: bool = False) -> list[list[EqualLengths]]:
    """Neighbouring runs whose lengths are at least `SIMILAR` of the first one's, together.

    Args:
        packed: the batch.
        few: compare rounded lengths.
    """
    groups: list[list[EqualLengths]] = []
    for run in packed.equal_lengths:
        max_length = groups[-1][0].length if groups else 0
        whole, own = (
            (bucket_lengths(max_length), bucket_lengths(run.length))
            if few
            else (max_length, run.length)
        )
        alike = SIMILAR * whole <= own and run.length <= whole
        if groups and alike and not (few and max_length > SHORT):
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def pad_rows(rows: Tensor, inside: Tensor | None, sequences: int, max_length: int) -> Tensor:
    """Packed rows as (sequences, heads, longest, head width), zeros where there is none.

    Args:
        rows: (tokens, heads, head width).
        inside: (tokens,) place of each among sequences x longest; None where they fill it.
        sequences: how many.
        max_length: of them.
    """
    if inside is not None:
        empty = rows.new_zeros(sequences * max_length, *rows.shape[1:])
        rows = empty.index_copy(0, inside, rows)
    return rows.view(sequences, max_length, *rows.shape[1:]).transpose(1, 2)
