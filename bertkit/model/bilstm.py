"""A BiLSTM over the sequences of a packed batch (paper sections 5.1 and 5.3); no padding."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bertkit.examples.packed import Packed
from bertkit.shapes import Hidden


def step_order(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The order in which a recurrent network takes tokens that lie sequence by sequence.

    First the first token of every sequence, longest sequence first, then all second tokens, ...

    Returns:
        (tokens,) indices of tokens, and (longest,) how many sequences have a token at each step.
    """
    sizes = np.asarray(lengths)
    starts = np.cumsum(sizes) - sizes
    longest_first = np.argsort(-sizes, kind="stable")
    steps = np.arange(sizes.max())
    alive = len(sizes) - np.searchsorted(np.sort(sizes), steps, side="right")
    rank = np.arange(sizes.sum()) - np.repeat(np.cumsum(alive) - alive, alive)
    return starts[longest_first][rank] + np.repeat(steps, alive), alive


class BiLSTM(nn.Module):
    """Two bidirectional layers over each sequence of a batch; no padding.

    Args:
        width: of the input.
        units: of each direction.
        dropout: between the layers.
    """

    def __init__(self, width: int, units: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, units, num_layers=2, bidirectional=True, dropout=dropout)

    def forward(self, hidden: Hidden, packed: Packed) -> Tensor:
        """(tokens, width) to (tokens, 2 * units), forward direction first.

        The sequences may come in any order; both ways are the same work.
        """
        order, alive = step_order(packed.lengths)
        there = torch.from_numpy(order).to(hidden.device)
        back = torch.from_numpy(np.argsort(order)).to(hidden.device)
        steps = PackedSequence(hidden.float().index_select(0, there), torch.from_numpy(alive))
        return self.lstm(steps)[0].data.index_select(0, back)
