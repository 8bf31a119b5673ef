"""The tokens of a text, and the attention weights of a model's heads (paper, section 3)."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.explain.steps import attention_weights
from bertkit.model.encoder import ONE_SEGMENT, Encoder, Layer
from bertkit.pretraining_data.batch import pack
from bertkit.serve.batching import PreparedRequest
from bertkit.serve.limits import RefusedError, not_finite
from bertkit.serve.schemas import TokenizeRequest
from bertkit.tokenizer.wordpiece import PairEncoding, Tokenizer

MAX_WEIGHTS = 8_000_000
"""The limit on weights in the maps of one request: 235 tokens for BERT-base's 144 heads."""
MAX_TOKEN_ROWS = 10_000
"""The limit on tokens in a response that lists tokens only, at about 80 bytes each."""


class AttentionOperation:
    """The operation that computes the attention weights of all heads, as bytes for display.

    The encoder that serves predictions is optimized for speed and does not keep attention weights,
    so a second encoder is built in fp32 at the first request. Its weights are kept from when the
    model was loaded, since the folder may hold others by then.
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

    def encode(self, asked: TokenizeRequest, maximum: int, reason: str) -> PairEncoding:
        """Encode a text or a pair of texts as one sequence."""
        if asked.pair is not None and self.config.type_vocab_size == 1:
            raise RefusedError(422, f"pair: {ONE_SEGMENT}", "pair")
        encoded = self.tokenizer.encode_pair(asked.text, asked.pair)
        if len(encoded.ids) > maximum:
            raise RefusedError(
                422,
                f"text: {len(encoded.ids):,} tokens with [CLS] and [SEP], but {reason} {maximum:,}"
                "; shorten it",
                "text",
            )
        return encoded

    def prepare(self, asked: TokenizeRequest) -> PreparedRequest:
        """Tokenize the request's text or pair, of at most the model's length or `MAX_WEIGHTS`."""
        heads = self.config.num_hidden_layers * self.config.num_attention_heads
        fitting, max_length = math.isqrt(MAX_WEIGHTS // heads), self.config.max_position_embeddings
        reason = "the model allows" if max_length <= fitting else "maps of all heads allow up to"
        encoded = self.encode(asked, min(fitting, max_length), reason)
        return PreparedRequest(encoded, len(encoded.ids), 1)

    @torch.inference_mode()
    def run(self, many: Sequence[PairEncoding]) -> list[bytes]:
        """Return one byte per (layer, head, query token, key token) for each request."""
        found = []
        for encoded in many:
            packed, shades = pack([encoded.ids], [encoded.segment_ids]), b""
            hidden = self.encoder.embed(packed)
            for layer in self.encoder.stack:
                assert isinstance(layer, Layer)
                shades += as_shades(attention_weights(layer, hidden)[0])
                hidden = layer(hidden, packed)
            found.append(shades)
        return found


def as_shades(weights: Tensor) -> bytes:
    """Return each weight as a byte: 255 times its square root, rounded."""
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
