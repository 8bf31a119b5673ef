"""Which sequences of a batch share a call of the CPU's attention (paper, section 3).

Calls cost time of their own, and so does padding; a group is neighbouring sequences of one length
or of similar ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bertkit.examples.packed import EqualLengths, Packed

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


def groups_of(packed: Packed, dtype: torch.dtype, *, similar: bool, few: bool) -> list[Group]:
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
        runs = similar_runs(packed, few=few) if similar else [[r] for r in packed.equal_lengths]
        packed.kept[name] = [group_of(own, dtype, few=few) for own in runs]
    return packed.kept[name]


def group_of(runs: Sequence[EqualLengths], dtype: torch.dtype, *, few: bool) -> Group:
    """Some runs, longest first, as a group."""
    length = rounded(runs[0].length) if few else runs[0].length
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


def rounded(length: int) -> int:
    """The length that a sequence is padded to where few lengths are wanted."""
    step = STEP if length <= SHORT else LONG_STEP
    return max(LEAST_LENGTH, -(-length // step) * step)


def similar_runs(packed: Packed, *, few: bool = False) -> list[list[EqualLengths]]:
    """Neighbouring runs whose lengths are at least `SIMILAR` of the first one's, together.

    Args:
        packed: the batch.
        few: compare rounded lengths.
    """
    groups: list[list[EqualLengths]] = []
    for run in packed.equal_lengths:
        longest = groups[-1][0].length if groups else 0
        whole, own = (rounded(longest), rounded(run.length)) if few else (longest, run.length)
        alike = SIMILAR * whole <= own and run.length <= whole
        if groups and alike and not (few and longest > SHORT):
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def pad_rows(rows: Tensor, inside: Tensor | None, sequences: int, longest: int) -> Tensor:
    """Packed rows as (sequences, heads, longest, head width), zeros where there is none.

    Args:
        rows: (tokens, heads, head width).
        inside: (tokens,) place of each among sequences x longest; None where they fill it.
        sequences: how many.
        longest: of them.
    """
    if inside is not None:
        empty = rows.new_zeros(sequences * longest, *rows.shape[1:])
        rows = empty.index_copy(0, inside, rows)
    return rows.view(sequences, longest, *rows.shape[1:]).transpose(1, 2)
