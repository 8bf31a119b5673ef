"""A BiLSTM over the sequences of a packed batch (paper sections 5.1 and 5.3)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bertkit.model.attention import has_products
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import Hidden

BILSTM_LAYERS = 2
MOST_PLACES, NARROW = 2, 512
"""Where a batch is padded on a CPU: places for each token, and the width of input and units."""
STEP = 8
"""Lengths are rounded up to it: for each new one oneDNN makes code."""


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


def both_ways(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Where a network that takes one token of every sequence at a step finds them.

    Returns:
        (2, steps * sequences): the token of each place, for sequences read forwards and backwards;
        behind its end a sequence repeats its last one. And (2, tokens): the place of each token.
    """
    sizes = np.asarray(lengths)
    max_length = -(-int(sizes.max()) // STEP) * STEP
    starts = np.cumsum(sizes) - sizes
    steps = np.minimum(np.arange(max_length)[:, None], sizes - 1)
    tokens = np.stack([starts + steps, starts + sizes - 1 - steps])
    sequence = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(sizes.sum()) - starts[sequence]
    steps_of = np.stack([within, sizes[sequence] - 1 - within])
    return tokens.reshape(2, -1), steps_of * len(sizes) + sequence


class BiLSTM(nn.Module):
    """Two bidirectional layers over each sequence of a batch.

    Where sequences of similar length meet a narrow network on a CPU, each direction of a layer is a
    call of torch's LSTM for sequences of one length, which is faster there than the one for packed
    sequences. What a sequence is padded with comes behind its end in either direction, so it
    changes nothing.

    Args:
        width: of the input.
        units: of each direction.
        dropout: between the layers.
    """

    def __init__(self, width: int, units: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstm = nn.LSTM(
            width, units, num_layers=BILSTM_LAYERS, bidirectional=True, dropout=dropout
        )

    def forward(self, hidden: Hidden, packed: Packed) -> Tensor:
        """(tokens, width) to (tokens, 2 * units), forward direction first.

        The sequences may come in any order; both ways are the same work.
        """
        places = max(packed.lengths) * len(packed.lengths)
        asked = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None
        padded = (
            hidden.device.type == "cpu"
            and has_products(asked or torch.float32)
            and places <= MOST_PLACES * len(hidden)
            and max(self.lstm.input_size, self.lstm.hidden_size) <= NARROW
        )
        return (self.padded if padded else self.packed)(hidden.float(), packed.lengths)

    def packed(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        """One call for all, without padding: cuDNN's way."""
        order, alive = step_order(lengths)
        there = torch.from_numpy(order).to(states.device)
        back = torch.from_numpy(np.argsort(order)).to(states.device)
        steps = PackedSequence(states.index_select(0, there), torch.from_numpy(alive))
        return self.lstm(steps)[0].data.index_select(0, back)

    def padded(self, states: Tensor, lengths: Sequence[int]) -> Tensor:
        """A call for each direction of each layer: oneDNN's way."""
        tokens, places = map(torch.from_numpy, both_ways(lengths))
        sequences = len(lengths)
        nothing = states.new_zeros(1, sequences, self.lstm.hidden_size)
        for layer in range(BILSTM_LAYERS):
            if layer:
                states = F.dropout(states, self.lstm.dropout, self.training)
            outputs = []
            for own_tokens, own_places, weights in zip(
                tokens, places, self.weights(layer), strict=True
            ):
                steps = states.index_select(0, own_tokens).view(-1, sequences, states.shape[-1])
                found = torch.lstm(
                    steps,
                    (nothing, nothing),
                    weights,
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

    def weights(self, layer: int) -> list[list[Tensor]]:
        """Of both directions of a layer, in the order in which `torch.lstm` takes them."""
        return [
            [
                getattr(self.lstm, f"{name}_l{layer}{direction}")
                for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            ]
            for direction in ("", "_reverse")
        ]
