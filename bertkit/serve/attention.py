"""The tokens of a text, and the attention weights of a model's heads (paper, section 3)."""

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
from bertkit.serve.schemas import AttentionRequest, TokenizeRequest
from bertkit.tokenizer.wordpiece import PairEncoding, Tokenizer

DIGITS = 5
"""The number of decimal digits to which a weight is rounded."""
MAX_WEIGHTS = 8_000_000
"""The limit on weights in the maps of one request: 235 tokens for BERT-base's 144 heads."""
MAX_TOKEN_ROWS = 10_000
"""The limit on tokens in a response that lists tokens only, at about 80 bytes each."""


class AttentionHead(NamedTuple):
    """A sequence and the head whose weights are requested; `layer` and `head` count from 0."""

    encoded: PairEncoding
    layer: int
    head: int


class AttentionOperation:
    """The operation that computes the attention weights of one head.

    The encoder that serves predictions is optimized for speed and does not keep attention weights,
    so a second encoder is built in fp32 at the first request.

    Args:
        start: the model's weights, held in memory, so later changes to its folder have no effect.
    """

    def __init__(self, start: PretrainedWeights) -> None:
        self.start, self.config, self.tokenizer = start, start.config, start.tokenizer
        self.built: Encoder | None = None
        self.building = threading.Lock()

    @property
    def encoder(self) -> Encoder:
        """The encoder in fp32 on the CPU, built on first use."""
        with self.building:
            if self.built is None:
                made = self.start.build(Encoder, keep_head=False, copy=False)
                self.built = made.model.eval()
            return self.built

    def prepare(self, asked: AttentionRequest) -> PreparedRequest:
        """Tokenize the request's text or pair.

        Raises:
            RefusedError: the model has no such layer or head, or the sequence exceeds its maximum
                length.
        """
        sizes = {
            "layer": self.config.num_hidden_layers,
            "head": self.config.num_attention_heads,
        }
        for field, most in sizes.items():
            if (number := getattr(asked, field)) > most:
                raise RefusedError(
                    422, f"{field}: the model has {most} {field}s, not {number}", field
                )
        encoded = self.encode(asked, self.config.max_position_embeddings, "the model allows")
        head = AttentionHead(encoded, asked.layer - 1, asked.head - 1)
        return PreparedRequest(head, len(encoded.ids), 1)

    def encode(self, asked: TokenizeRequest, most: int, reason: str) -> PairEncoding:
        """Encode a text or a pair of texts as one sequence.

        Raises:
            RefusedError: the sequence has more than `most` tokens; the message gives `reason`.
        """
        if asked.pair is not None and self.config.type_vocab_size == 1:
            raise RefusedError(422, f"pair: {ONE_SEGMENT}", "pair")
        encoded = self.tokenizer.encode_pair(asked.text, asked.pair)
        if len(encoded.ids) > most:
            raise RefusedError(
                422,
                f"text: {len(encoded.ids):,} tokens with [CLS] and [SEP], but {reason} {most:,}; "
                "shorten it",
                "text",
            )
        return encoded

    @torch.inference_mode()
    def run(self, many: Sequence[AttentionHead]) -> list[np.ndarray]:
        """Return rounded (tokens, tokens) float64 weights per request; rows are the queries."""
        found = []
        for encoded, number, head in many:
            *_, weights = self.weights(encoded, number + 1)
            found.append(weights[head].double().numpy().round(DIGITS))
        return found

    def weights(self, encoded: PairEncoding, layers: int) -> Iterator[Tensor]:
        """Yield the weights of each of the first `layers` layers as (heads, tokens, tokens)."""
        packed = pack([encoded.ids], [encoded.segment_ids])
        hidden = self.encoder.embed(packed)
        for number, layer in enumerate(self.encoder.stack[:layers], 1):
            assert isinstance(layer, Layer)
            yield attention_weights(layer, hidden)[0]
            if number < layers:
                hidden = layer(hidden, packed)


class AttentionMapsOperation:
    """The operation that computes the attention weights of all heads, as bytes for display.

    Args:
        one: the operation whose encoder is used.
    """

    def __init__(self, one: AttentionOperation) -> None:
        self.one, self.config = one, one.config

    def prepare(self, asked: TokenizeRequest) -> PreparedRequest:
        """Tokenize the request's text or pair.

        Raises:
            RefusedError: the sequence exceeds the model's maximum length or `MAX_WEIGHTS`.
        """
        heads = self.config.num_hidden_layers * self.config.num_attention_heads
        fitting, max_length = math.isqrt(MAX_WEIGHTS // heads), self.config.max_position_embeddings
        reason = "the model allows" if max_length <= fitting else "maps of all heads allow up to"
        encoded = self.one.encode(asked, min(fitting, max_length), reason)
        return PreparedRequest(encoded, len(encoded.ids), 1)

    @torch.inference_mode()
    def run(self, many: Sequence[PairEncoding]) -> list[bytes]:
        """Return one byte per (layer, head, query token, key token) for each request."""
        return [
            b"".join(
                as_shades(weights)
                for weights in self.one.weights(encoded, self.config.num_hidden_layers)
            )
            for encoded in many
        ]


def as_shades(weights: Tensor) -> bytes:
    """Return each weight as a byte: 255 times its square root, rounded.

    Raises:
        RefusedError: a weight is not finite (status 500).
    """
    if not weights.isfinite().all():
        raise not_finite()
    return (weights.sqrt() * 255).round().to(torch.uint8).numpy().tobytes()


def token_rows(tokenizer: Tokenizer, encoded: PairEncoding) -> list[dict[str, Any]]:
    """Return the tokens of a sequence with their offsets; see `bertkit.serve.schemas.TokenInfo`."""
    rows = zip(encoded.ids, encoded.segment_ids, encoded.offsets, encoded.text_index, strict=True)
    return [
        {
            "token": tokenizer.vocabulary[index],
            "id": index,
            "segment": segment,
            "start": start,
            "end": end,
            "part": None if part < 0 else part,
        }
        for index, segment, (start, end), part in rows
    ]
