"""The operations behind the routes: predictors of `bertkit.predict`, applied to batched requests.

Each operation has the same methods: `size` estimates the tokens of a request's inputs before they
are tokenized; `prepare` tokenizes them, outside the model's threads; `run` computes several
requests at once; `rows` makes the JSON values of a response. Masks and next sentences follow paper
section 3.1.
"""

from __future__ import annotations

import base64
import math
import re
from collections.abc import Mapping, Sequence, Sized
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.errors import BertkitError
from bertkit.model.encoder import ONE_SEGMENT, Encoder, Layer
from bertkit.model.outputs import attention_weights
from bertkit.predict.embeddings import Embedder, EncodedText
from bertkit.predict.load import TaskPredictor
from bertkit.predict.pretrained import CUT_PAIRS, MASK, MaskedText, Predictor
from bertkit.pretraining_data.batch import pack
from bertkit.serve.admission import (
    CHARACTERS_PER_TOKEN,
    RefusedError,
    not_finite,
    shorten,
    too_many_tokens,
)
from bertkit.serve.batching import PreparedRequest
from bertkit.tasks.task import ItemPart, Items
from bertkit.tokenizer.wordpiece import PairEncoding

MAX_CANDIDATES = 50_000
"""The maximum number of candidates for masks in a response, at about 50 bytes each."""
MAX_WEIGHTS = 8_000_000
"""The limit on weights in the maps of one request: 235 tokens for BERT-base's 144 heads."""
MAX_TOKEN_ROWS = 10_000
"""The limit on tokens in a response that lists tokens, at about 80 bytes each."""
LOCATION = re.compile(r"inputs\[(\d+)\]|inputs\.\d+[\w.]*")
"""Matches the input, in Python's notation, or the field that a message begins with."""


def estimate_tokens(inputs: Sequence[Any]) -> int:
    """Estimate the tokens of inputs that are not tokenized yet."""
    return sum(map(count_characters, inputs)) // CHARACTERS_PER_TOKEN


def count_characters(example: Any) -> int:
    """Estimate the characters of an input, whose texts are read with each item of its lists."""
    if isinstance(example, str):
        return len(example)
    values = list(example.values() if isinstance(example, Mapping) else example)
    texts = sum(len(value) for value in values if isinstance(value, str))
    lists = [value for value in values if isinstance(value, list)]
    items = sum(max(CHARACTERS_PER_TOKEN, len(str(item))) for value in lists for item in value)
    return texts * max([1, *map(len, lists)]) + items


def refusal_of(error: BertkitError) -> RefusedError:
    """Return the error response for inputs that a predictor refuses."""
    location = LOCATION.match(str(error))
    param = location and (f"inputs.{location[1]}" if location[1] else location[0])
    return RefusedError(422, str(error), param)


def joined(many: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the items of all requests in one list."""
    return [item for items in many for item in items]


def split_results(results: Any, many: Sequence[Sized]) -> list[Any]:
    """Return the results of all requests as one slice for each request."""
    ends = accumulate((len(inputs) for inputs in many), initial=0)
    return [results[start:end] for start, end in pairwise(ends)]


class TaskOperation:
    """The results of a fine-tuned model, as `bertkit.load(...)` returns them."""

    size = staticmethod(estimate_tokens)

    def __init__(self, predictor: TaskPredictor) -> None:
        self.predictor = predictor
        columns = predictor.columns
        self.fields = {*columns.inputs, *columns.input_options}

    def prepare(self, inputs: Sequence[Any]) -> PreparedRequest:
        for number, example in enumerate(inputs):
            unknown = sorted(example.keys() - self.fields) if isinstance(example, dict) else []
            if unknown:
                param = f"inputs.{number}.{shorten(unknown[0])}"
                raise RefusedError(422, f"{param}: there is no such field", param)
        examples = list(self.predictor.examples(inputs))
        items = self.predictor.items(examples)
        cut = {what: count for what, count in items.cut.items() if count}
        return PreparedRequest((examples, items), items.tokens, len(inputs), items.windowed, cut)

    def run(self, many: Sequence[tuple[list[Any], Items]]) -> list[list[Any]]:
        examples: list[Any] = []
        items = []
        for some, encoded in many:
            items += [item._replace(input=item.input + len(examples)) for item in encoded.items]
            examples += some
        results = self.predictor.run_items(examples, Items(items, len(examples), 0, {}))
        return split_results(results, [some for some, _ in many])

    def rows(self, content: Any, results: Sequence[Any]) -> list[Any]:
        return [result.to_dict() for result in results]


class EmbeddingOperation:
    """The vectors of texts."""

    size = staticmethod(estimate_tokens)

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder

    def prepare(self, inputs: Sequence[str]) -> PreparedRequest:
        encoded = self.embedder.tokenize(inputs)
        windowed = sum(len(text.parts) > 1 for text in encoded)
        tokens = sum(text.tokens for text in encoded)
        return PreparedRequest(encoded, tokens, len(encoded), windowed)

    def run(self, many: Sequence[list[EncodedText]]) -> list[np.ndarray]:
        return split_results(self.embedder.vectors(joined(many)), many)

    def rows(self, content: Any, vectors: np.ndarray) -> list[Any]:
        return list(vectors)


class FillMask:
    """The most probable tokens for each mask of a text."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def size(self, inputs: Sequence[Mapping[str, Any]]) -> int:  # each mask has a window
        room = self.predictor.max_length - 2
        lengths = (min(room, len(example["text"]) // CHARACTERS_PER_TOKEN) for example in inputs)
        masks = (example["text"].count(MASK) for example in inputs)
        return sum(count * (2 + length) for count, length in zip(masks, lengths, strict=True))

    def prepare(self, inputs: Sequence[Mapping[str, Any]]) -> PreparedRequest:
        candidates, vocabulary = 0, self.predictor.tokenizer.size
        for number, example in enumerate(inputs):
            if example["top"] > vocabulary:
                param = f"inputs.{number}.top"
                raise RefusedError(422, f"{param}: the model has {vocabulary:,} tokens", param)
            candidates += example["text"].count(MASK) * example["top"]
        if candidates > MAX_CANDIDATES:
            message = f"at most {MAX_CANDIDATES:,} candidates are returned, not {candidates:,}"
            raise RefusedError(413, f"{message}; lower top, or send fewer masks")
        texts = [self.predictor.mask_windows(example["text"], example["top"]) for example in inputs]
        tokens = sum(window.tokens for text in texts for window in text.windows)
        different = [{part.sequences[0].ids.tobytes() for part in text.windows} for text in texts]
        return PreparedRequest(texts, tokens, len(texts), sum(len(ids) > 1 for ids in different))

    def run(self, many: Sequence[list[MaskedText]]) -> list[Any]:
        return split_results(self.predictor.mask_candidates(joined(many)), many)

    def rows(self, content: Any, texts: Sequence[Any]) -> list[Any]:
        return [[[candidate._asdict() for candidate in mask] for mask in text] for text in texts]


class NextSentence:
    """The probability that one text follows another."""

    size = staticmethod(estimate_tokens)

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def prepare(self, inputs: Sequence[Mapping[str, Any]]) -> PreparedRequest:
        pairs, cut = [], 0
        for number, example in enumerate(inputs):
            ids = self.predictor.tokenizer.encode_batch([example["text"], example["following"]])
            for field, tokens in zip(("text", "following"), ids, strict=True):
                if not tokens:
                    param = f"inputs.{number}.{field}"
                    raise RefusedError(422, f"{param}: the text has no tokens", param)
            pair, is_cut = self.predictor.pair_sequence(*ids)
            pairs.append(pair)
            cut += is_cut
        size = sum(pair.tokens for pair in pairs)
        return PreparedRequest(pairs, size, len(pairs), cut={CUT_PAIRS: cut} if cut else {})

    def run(self, many: Sequence[list[ItemPart]]) -> list[list[float]]:
        return split_results(self.predictor.next_probabilities(joined(many)), many)

    def rows(self, content: Any, probabilities: Sequence[float]) -> list[Any]:
        return [{"probability": probability} for probability in probabilities]


class Tokens:
    """The tokens of one text or pair, with their offsets."""

    max_tokens = MAX_TOKEN_ROWS

    def __init__(self, start: PretrainedWeights) -> None:
        self.start, self.config, self.tokenizer = start, start.config, start.tokenizer

    def size(self, inputs: Sequence[Mapping[str, Any]]) -> int:
        if (tokens := estimate_tokens(inputs)) > MAX_TOKEN_ROWS:
            raise too_many_tokens(tokens, MAX_TOKEN_ROWS)
        return tokens

    def prepare(self, inputs: Sequence[Mapping[str, Any]]) -> PreparedRequest:
        [example] = inputs
        if example["pair"] is not None and self.config.type_vocab_size == 1:
            raise RefusedError(422, f"pair: {ONE_SEGMENT}", "pair")
        encoded = self.tokenizer.encode_pair(example["text"], example["pair"])
        if (tokens := len(encoded.ids)) > self.max_tokens:
            message = f"text: {tokens:,} tokens with [CLS] and [SEP] are more than the route's"
            raise RefusedError(422, f"{message} {self.max_tokens:,}; shorten it", "text")
        return PreparedRequest(encoded, tokens, 1)

    def run(self, many: Sequence[PairEncoding]) -> list[Any]:
        return [None] * len(many)

    def rows(self, content: PairEncoding, result: Any) -> list[Any]:
        tokens = [
            {
                "token": self.tokenizer.vocabulary[index],
                "id": index,
                "segment": segment,
                "start": start,
                "end": end,
                "part": None if part < 0 else part,  # 0 is the text and 1 the pair
            }
            for index, segment, (start, end), part in zip(*content, strict=True)
        ]
        return [{"tokens": tokens}]


class AttentionMaps(Tokens):
    """The attention weights of all heads, one byte each (paper section 3)."""

    def __init__(self, start: PretrainedWeights) -> None:
        super().__init__(start)
        heads = self.config.num_hidden_layers * self.config.num_attention_heads
        fitting = math.isqrt(MAX_WEIGHTS // heads)
        self.max_tokens = min(fitting, self.config.max_position_embeddings)

    @cached_property
    def encoder(self) -> Encoder:
        """The encoder in fp32, as that of the predictions does not keep attention weights."""
        return self.start.build(Encoder, keep_head=False, copy=False).model.eval()

    @torch.inference_mode()
    def run(self, many: Sequence[PairEncoding]) -> list[bytes]:
        """Return a byte per layer, head, query token and key token: 255 x the weight's root."""
        maps = []
        for encoded in many:
            packed, roots = pack([encoded.ids], [encoded.segment_ids]), b""
            hidden = self.encoder.embed(packed)
            for layer in self.encoder.stack:
                assert isinstance(layer, Layer)
                weights, _ = attention_weights(layer, hidden)
                if not weights.isfinite().all():
                    raise not_finite()
                roots += (weights.sqrt() * 255).round().to(torch.uint8).numpy().tobytes()
                hidden = layer(hidden, packed)
            maps.append(roots)
        return maps

    def rows(self, content: PairEncoding, result: bytes) -> list[Any]:
        heads, layers = self.config.num_attention_heads, self.config.num_hidden_layers
        [tokens] = super().rows(content, None)
        weights = base64.b64encode(result).decode()
        return [{**tokens, "layers": layers, "heads": heads, "weights": weights}]
