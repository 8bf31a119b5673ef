"""Optimizations for the CPU: dropout from few random bits, and sequence groups for attention.

Dropout (Srivastava et al. 2014; paper section A.2): on a CPU torch draws one double per element,
one after the other, which takes longer than the matrix product before it. Sixteen random bits per
element are as good and four times as fast: the probability is rounded to a multiple of 1/65536
(0.1 becomes 0.100006), and the scale of the kept values uses the rounded probability, so the mean
is preserved. Other devices use torch's own dropout.

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
    """A dropout layer: in training, elements become 0 with `probability`, others are scaled up."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.probability = probability

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `hidden`, of any shape, with dropout applied if the module is in training mode."""
        if not self.training or self.probability == 0.0:
            return hidden
        if hidden.device.type != "cpu":
            return torch.dropout(hidden, self.probability, train=True)
        mask = keep_mask(hidden.shape, self.probability, hidden.dtype)
        return hidden * mask * keep_scale(self.probability)

    def extra_repr(self) -> str:
        """Return the probability, for `print(model)`."""
        return f"probability={self.probability}"


def keep_mask(shape: torch.Size, probability: float, dtype: torch.dtype) -> Tensor:
    """Return a CPU tensor of ones, with zeros at `probability`, from torch's default generator.

    It has the `dtype` of the tensor it multiplies: converting booleans would take longer than the
    multiplication itself.
    """
    count = math.prod(shape)
    words = torch.empty(-(-count // 4), dtype=torch.int64)
    words.random_(-(1 << 63), None)  # None: all 64 bits; the default never sets the sign bit
    uniform = words.view(torch.int16)[:count].view(shape)
    ones = torch.empty(shape, dtype=dtype)
    return torch.ge(uniform, round(probability * UNIFORM_STEPS) - UNIFORM_STEPS // 2, out=ones)


def keep_scale(probability: float) -> float:
    """Return the factor for kept elements: one over their exact probability of being kept."""
    return UNIFORM_STEPS / (UNIFORM_STEPS - round(probability * UNIFORM_STEPS))


MOST_PADDED = 1 << 13
"""How many squares of lengths a group may compute because of padding: starting the operations of
another group takes longer than computing these."""

SHORT_STEP, LEAST_LENGTH, SHORT_LENGTH, LONG_STEP = 16, 32, 128, 32
"""How `bucket_lengths` rounds: lengths up to SHORT_LENGTH to multiples of SHORT_STEP, and to at
least LEAST_LENGTH; longer ones to multiples of LONG_STEP."""


class Group(NamedTuple):
    """Neighbouring sequences that share one call."""

    sequences: int
    length: int
    """The length to which all sequences are padded."""
    tokens: int
    inside: Tensor | None
    """(tokens,) indices into the sequences x length positions; None if nothing is padded."""
    mask: Tensor | None
    """(sequences, 1, 1, length) added to the scores of the keys; None if nothing is padded."""


def attention_groups(
    packed: Packed, dtype: torch.dtype, *, similar: bool, few: bool
) -> list[Group]:
    """Return the groups of a batch, which are computed once and kept for all layers.

    Args:
        packed: the batch.
        dtype: the dtype of the attention scores.
        similar: whether runs of similar lengths may share a group.
        few: whether to round lengths up, so that few different lengths occur: for each new one
            oneDNN compiles code, which takes as long as several batches, and keeps it in memory.
    """
    name = dtype, similar, few
    if name not in packed.kept:
        if few and 2 * len(packed.equal_lengths) <= len(packed.lengths):
            similar = few = False
        runs = merge_similar(packed, few=few) if similar else [[r] for r in packed.equal_lengths]
        packed.kept[name] = [sequence_group(own, dtype, few=few) for own in runs]
    return packed.kept[name]


def sequence_group(runs: Sequence[EqualLengths], dtype: torch.dtype, *, few: bool) -> Group:
    """Return the group made of some runs, which must start with the longest one."""
    length = bucket_lengths(runs[0].length) if few else runs[0].length
    sequences = sum(run.sequences for run in runs)
    tokens = sum(run.sequences * run.length for run in runs)
    if tokens == sequences * length:
        return Group(sequences, length, tokens, None, None)
    lengths = torch.tensor([run.length for run in runs for _ in range(run.sequences)])
    real = torch.arange(length) < lengths[:, None]
    inside = real.flatten().nonzero().squeeze(1)
    mask = torch.zeros(sequences, 1, 1, length, dtype=dtype)
    # A finite value: -inf would make rows without real keys NaN, and their gradients too.
    mask.masked_fill_(~real[:, None, None, :], torch.finfo(dtype).min / 2)
    return Group(sequences, length, tokens, inside, mask)


def bucket_lengths(length: int) -> int:
    """Return the rounded length to which a sequence of this length is padded."""
    step = SHORT_STEP if length <= SHORT_LENGTH else LONG_STEP
    return max(LEAST_LENGTH, -(-length // step) * step)


def merge_similar(packed: Packed, *, few: bool = False) -> list[list[EqualLengths]]:
    """Merge neighbouring runs, each padded to the first of its group, up to `MOST_PADDED`.

    Args:
        packed: the batch.
        few: whether to compare rounded lengths.
    """
    groups: list[list[EqualLengths]] = []
    padded = 0
    for run in packed.equal_lengths:
        first = groups[-1][0].length if groups else 0
        own, whole = (bucket_lengths(n) if few else n for n in (run.length, first))
        padded += run.sequences * (whole**2 - own**2)
        if run.length <= first and padded <= MOST_PADDED:
            groups[-1].append(run)
        else:
            groups.append([run])
            padded = 0
    return groups


def pad_rows(rows: Tensor, inside: Tensor | None, sequences: int, max_length: int) -> Tensor:
    """Return packed rows as (sequences, heads, max_length, head width), padded with zeros.

    Args:
        rows: (tokens, heads, head width) packed rows.
        inside: (tokens,) indices into the sequences x max_length positions; None without padding.
        sequences: the number of sequences.
        max_length: the length to which every sequence is padded.
    """
    if inside is not None:
        empty = rows.new_zeros(sequences * max_length, *rows.shape[1:])
        rows = empty.index_copy(0, inside, rows)
    return rows.view(sequences, max_length, *rows.shape[1:]).transpose(1, 2)
