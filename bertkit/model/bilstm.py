"""The BiLSTM that reads the sequences of a packed batch (paper sections 5.1 and 5.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bertkit.model.cpu import has_products
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import Hidden

BILSTM_LAYERS = 2
MAX_PADDING_RATIO, MAX_PADDED_WIDTH = 2, 512
"""Limits for padding a batch on a CPU: padded positions per token, and input width or units."""
BLOCK_STEP = 8
"""Lengths are rounded up to a multiple of this, because oneDNN compiles code for each new one."""


def step_order(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the order in which `PackedSequence` expects the tokens of concatenated sequences.

    The first token of every sequence comes first, longest sequence first, then the second ones, ...

    Returns:
        (tokens,) token indices, and (max length,) the number of sequences that have each step.
    """
    sizes = np.asarray(lengths)
    starts = np.cumsum(sizes) - sizes
    longest_first = np.argsort(-sizes, kind="stable")
    steps = np.arange(sizes.max())
    alive = len(sizes) - np.searchsorted(np.sort(sizes), steps, side="right")
    rank = np.arange(sizes.sum()) - np.repeat(np.cumsum(alive) - alive, alive)
    return starts[longest_first][rank] + np.repeat(steps, alive), alive


def both_ways(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the layout of a batch padded to one length, for reading forwards and backwards.

    Returns:
        (2, steps * sequences): the token index at each padded position, forwards and backwards;
        a sequence is padded with its last token. And (2, tokens): the padded position per token.
    """
    sizes = np.asarray(lengths)
    max_length = -(-int(sizes.max()) // BLOCK_STEP) * BLOCK_STEP
    starts = np.cumsum(sizes) - sizes
    steps = np.minimum(np.arange(max_length)[:, None], sizes - 1)
    tokens = np.stack([starts + steps, starts + sizes - 1 - steps])
    sequence = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(sizes.sum()) - starts[sequence]
    steps_of = np.stack([within, sizes[sequence] - 1 - within])
    return tokens.reshape(2, -1), steps_of * len(sizes) + sequence


class BiLSTM(nn.Module):
    """A two-layer bidirectional LSTM that reads each sequence of a batch.

    On a CPU, if the network is narrow and the sequences have similar lengths, each direction of a
    layer is one call of torch's LSTM on padded sequences, which is faster there than its LSTM on
    packed sequences. In either direction the padding follows the end of the sequence, so it does
    not affect the outputs. There are `units` in each direction, and dropout between the layers.
    """

    def __init__(self, width: int, units: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstm = nn.LSTM(
            width, units, num_layers=BILSTM_LAYERS, bidirectional=True, dropout=dropout
        )

    def forward(self, hidden: Hidden, packed: Packed) -> Tensor:
        """Map (tokens, width) to (tokens, 2 * units), forward direction first.

        The sequences may be in any order; `padded` and `packed` compute the same function.
        """
        places = max(packed.lengths) * len(packed.lengths)
        asked = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        padded = (
            hidden.device.type == "cpu"
            and has_products(asked or torch.float32)
            and places <= MAX_PADDING_RATIO * len(hidden)
            and max(self.lstm.input_size, self.lstm.hidden_size) <= MAX_PADDED_WIDTH
        )
        return (self.padded if padded else self.packed)(hidden.float(), packed.lengths)

    def packed(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        """Run all layers in one call without padding, as cuDNN does best."""
        order, alive = step_order(lengths)
        there = torch.from_numpy(order).to(states.device)
        back = torch.from_numpy(np.argsort(order)).to(states.device)
        steps = PackedSequence(states.index_select(0, there), torch.from_numpy(alive))
        return self.lstm(steps)[0].data.index_select(0, back)

    def padded(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        """Run one call for each direction of each layer, as oneDNN does best."""
        tokens, places = map(torch.from_numpy, both_ways(lengths))
        sequences = len(lengths)
        nothing = states.new_zeros(1, sequences, self.lstm.hidden_size)
        every = self.lstm.all_weights  # of each layer, forwards and backwards
        for layer in range(BILSTM_LAYERS):
            if layer:
                states = F.dropout(states, self.lstm.dropout, self.training)
            outputs = []
            both = every[2 * layer : 2 * layer + 2]
            for own_tokens, own_places, weights in zip(tokens, places, both, strict=True):
                steps = states.index_select(0, own_tokens).view(-1, sequences, states.shape[-1])
                found = torch.lstm(
                    steps,
                    (nothing, nothing),
                    tuple(weights),
                    has_biases=True,
                    num_layers=1,
                    dropout=0.0,
                    train=self.training,
                    bidirectional=False,
                    batch_first=False,
                )[0]
                outputs.append(found.flatten(0, 1).index_select(0, own_places))
            states = torch.cat(outputs, dim=-1)
        return states.float()
