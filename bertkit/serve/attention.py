"""The pieces of a text, and what one head takes from where (paper, section 3)."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.explain.steps import attention_weights
from bertkit.model.encoder import ONE_SEGMENT, Encoder, Layer
from bertkit.pretraining_data.batch import pack
from bertkit.serve.batching import PreparedRequest
from bertkit.serve.limits import RefusedError, not_finite
from bertkit.serve.schemas import AttentionRequest, PiecesRequest
from bertkit.tokenizer.wordpiece import PairEncoding, Tokenizer

DIGITS = 5
"""Of a weight."""
MAX_WEIGHTS = 8_000_000
"""In the maps of one request; of base's 144 heads, 235 tokens."""
MOST_PIECES = 10_000
"""Of an answer with pieces alone, which has about 80 bytes for each."""


class AttentionHead(NamedTuple):
    """A sequence, and the head that is asked for; both numbers from 0."""

    encoded: PairEncoding
    layer: int
    head: int


class AttentionOperation:
    """The weights of one head.

    The served layers are laid out for speed and forget their weights at once, so the encoder is
    built once more, in fp32, when this is asked for the first time.

    Args:
        start: the weights, in memory: whatever becomes of its folder, these are shown.
    """

    def __init__(self, start: PretrainedWeights) -> None:
        self.start, self.config, self.tokenizer = start, start.config, start.tokenizer
        self.built: Encoder | None = None
        self.building = threading.Lock()

    @property
    def encoder(self) -> Encoder:
        """In fp32, on the CPU; built once, whoever asks first."""
        with self.building:
            if self.built is None:
                made = self.start.build(Encoder, keep_head=False, copy=False)
                self.built = made.model.eval()
            return self.built

    def prepare(self, asked: AttentionRequest) -> PreparedRequest:
        """The sequence.

        Raises:
            RefusedError: there is no such layer or head, or the sequence is longer than the model.
        """
        sizes = {
            "layer": self.config.num_hidden_layers,
            "head": self.config.num_attention_heads,
        }
        for field, most in sizes.items():
            if (number := getattr(asked, field)) > most:
                raise RefusedError(
                    422, f"{field}: the model has {most} {field}s, there is no {number}", field
                )
        encoded = self.encode(asked, self.config.max_position_embeddings, "the model reads")
        head = AttentionHead(encoded, asked.layer - 1, asked.head - 1)
        return PreparedRequest(head, len(encoded.ids), 1)

    def encode(self, asked: PiecesRequest, most: int, reason: str) -> PairEncoding:
        """The sequence of a text or a pair.

        Raises:
            RefusedError: it has more than `most` tokens.
        """
        if asked.pair is not None and self.config.type_vocab_size == 1:
            raise RefusedError(422, f"pair: {ONE_SEGMENT}", "pair")
        encoded = self.tokenizer.encode_pair(asked.text, asked.pair)
        if len(encoded.ids) > most:
            raise RefusedError(
                422,
                f"text: {len(encoded.ids):,} tokens with [CLS] and [SEP], and {reason} {most:,}; "
                "shorten it",
                "text",
            )
        return encoded

    @torch.inference_mode()
    def run(self, many: Sequence[AttentionHead]) -> list[np.ndarray]:
        """(tokens, tokens) for each request, rounded; rows are the tokens that look."""
        found = []
        for encoded, number, head in many:
            *_, weights = self.weights(encoded, number + 1)
            found.append(weights[head].double().numpy().round(DIGITS))
        return found

    def weights(self, encoded: PairEncoding, layers: int) -> Iterator[Tensor]:
        """(heads, tokens, tokens) of the first layers, one after the other."""
        packed = pack([encoded.ids], [encoded.segment_ids])
        hidden = self.encoder.embed(packed)
        for number, layer in enumerate(self.encoder.stack[:layers], 1):
            assert isinstance(layer, Layer)
            yield attention_weights(layer, hidden)[0]
            if number < layers:
                hidden = layer(hidden, packed)


class AttentionMapsOperation:
    """The weights of all heads at once, as bytes, to be looked at.

    Args:
        one: has the encoder.
    """

    def __init__(self, one: AttentionOperation) -> None:
        self.one, self.config = one, one.config

    def prepare(self, asked: PiecesRequest) -> PreparedRequest:
        """The sequence.

        Raises:
            RefusedError: it is longer than the model, or has too many weights.
        """
        heads = self.config.num_hidden_layers * self.config.num_attention_heads
        fitting, max_length = math.isqrt(MAX_WEIGHTS // heads), self.config.max_position_embeddings
        reason = "the model reads" if max_length <= fitting else "maps of all heads are made up to"
        encoded = self.one.encode(asked, min(fitting, max_length), reason)
        return PreparedRequest(encoded, len(encoded.ids), 1)

    @torch.inference_mode()
    def run(self, many: Sequence[PairEncoding]) -> list[bytes]:
        """A byte for each (layer, head, token, token), for each request."""
        return [
            b"".join(
                as_shades(weights)
                for weights in self.one.weights(encoded, self.config.num_hidden_layers)
            )
            for encoded in many
        ]


def as_shades(weights: Tensor) -> bytes:
    """A byte for each weight.

    Raises:
        RefusedError: 500 where one is not finite.
    """
    if not weights.isfinite().all():
        raise not_finite()
    return (weights.sqrt() * 255).round().to(torch.uint8).numpy().tobytes()


def token_rows(tokenizer: Tokenizer, encoded: PairEncoding) -> list[dict[str, Any]]:
    """The pieces of a sequence and where they stand, see `bertkit.serve.schemas.Piece`."""
    rows = zip(encoded.ids, encoded.segment_ids, encoded.offsets, encoded.text_index, strict=True)
    return [
        {
            "piece": tokenizer.vocabulary[index],
            "id": index,
            "segment": segment,
            "start": start,
            "end": end,
            "part": None if part < 0 else part,
        }
        for index, segment, (start, end), part in rows
    ]
