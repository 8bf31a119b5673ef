"""The operations behind the routes: predictors of `bertkit.predict`, applied to batched requests.

An operation tokenizes the inputs of a request in `prepare`, outside the model's threads; `run`
computes several requests at once, and `rows` makes the JSON values of a response. `sample` is an
input that every model with the operation can answer. Masks and next sentences follow paper section
3.1, attention section 3.
"""

from __future__ import annotations

import base64
import math
import re
import threading
from collections.abc import Mapping, Sequence, Sized
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.errors import BertkitError
from bertkit.model.encoder import ONE_SEGMENT, Encoder, Layer
from bertkit.predict.embeddings import Embedder, EncodedText
from bertkit.predict.predictor import TaskPredictor
from bertkit.predict.pretrained import MASK, MaskCandidate, MaskedText, PairSequence, Predictor
from bertkit.pretraining_data.batch import pack
from bertkit.report.explain import attention_weights
from bertkit.serve.batching import PreparedRequest
from bertkit.serve.limits import (
    CHARACTERS_PER_TOKEN,
    RefusedError,
    not_finite,
    shorten,
    too_many_tokens,
)
from bertkit.tasks.task import Items
from bertkit.tokenizer.wordpiece import PairEncoding, Tokenizer

MAX_CANDIDATES = 50_000
"""The maximum number of candidates in a response, at about 50 bytes each."""
MAX_WEIGHTS = 8_000_000
"""The limit on weights in the maps of one request: 235 tokens for BERT-base's 144 heads."""
MAX_TOKEN_ROWS = 10_000
"""The limit on tokens in a response that lists tokens, at about 80 bytes each."""
LOCATION = re.compile(r"inputs\[(\d+)\]|inputs\.\d+[\w.]*")
"""Matches the input, in Python's notation, or the field that a message begins with."""


def split_results(results: Any, many: Sequence[Sized]) -> list[Any]:
    """Return the results of all requests as one slice for each request."""
    ends = accumulate((len(inputs) for inputs in many), initial=0)
    return [results[start:end] for start, end in pairwise(ends)]


def count_characters(given: Any) -> int:
    """Estimate the characters to tokenize for an input: texts are read with each item of a list.

    An item has at least one token.
    """
    if isinstance(given, str):
        return len(given)
    values = list(given.values() if isinstance(given, Mapping) else given)
    texts = sum(len(value) for value in values if isinstance(value, str))
    lists = [value for value in values if isinstance(value, list)]
    items = sum(max(CHARACTERS_PER_TOKEN, len(str(item))) for value in lists for item in value)
    return texts * max([1, *map(len, lists)]) + items


def refusal_of(error: BertkitError) -> RefusedError:
    """Return the error response for inputs that a predictor refuses."""
    location = LOCATION.match(str(error))
    param = location and (f"inputs.{location[1]}" if location[1] else location[0])
    return RefusedError(422, str(error), param)


class TaskOperation:
    """The operation that returns a fine-tuned model's results."""

    def __init__(self, predictor: TaskPredictor) -> None:
        self.predictor = predictor
        lists = ("choices", "words")
        columns = predictor.columns
        self.sample = [["a"] if name in lists else "a" for name in columns.inputs]
        self.fields = {*columns.inputs, *columns.input_options}

    def size(self, inputs: Sequence[Any]) -> int:
        """Estimate the number of tokens of a request's inputs."""
        return sum(map(count_characters, inputs)) // CHARACTERS_PER_TOKEN

    def prepare(self, inputs: Sequence[Any]) -> PreparedRequest:
        """Convert a request's inputs into sequences."""
        for number, given in enumerate(inputs):
            unknown = sorted(given.keys() - self.fields) if isinstance(given, dict) else []
            if unknown:
                param = f"inputs.{number}.{shorten(unknown[0])}"
                raise RefusedError(422, f"{param}: there is no such field", param)
        examples = list(self.predictor.examples(inputs))
        items = self.predictor.items(examples)
        lost = {what: count for what, count in items.cut.items() if count}
        return PreparedRequest((examples, items), items.tokens, len(inputs), items.windowed, lost)

    def run(self, many: Sequence[tuple[list[Any], Items]]) -> list[list[Any]]:
        """Return the results of each request."""
        examples: list[Any] = []
        items = []
        for some, encoded in many:
            items += [item._replace(input=item.input + len(examples)) for item in encoded.items]
            examples += some
        results = self.predictor.run_items(examples, Items(items, len(examples), 0, {}))
        return split_results(results, [some for some, _ in many])

    def rows(self, content: tuple[list[Any], Items], results: Sequence[Any]) -> list[Any]:
        """Return the results as `bertkit.load(...)` returns them for the same inputs."""
        return [result.to_dict() for result in results]


class EmbeddingOperation:
    """The operation that returns vectors of texts, or of lists of token ids."""

    sample = "a"

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder

    def size(self, inputs: Sequence[str] | Sequence[list[int]]) -> int:
        """Estimate the number of tokens of a request's inputs."""
        return sum(
            len(one) // CHARACTERS_PER_TOKEN if isinstance(one, str) else len(one) for one in inputs
        )

    def prepare(self, inputs: Sequence[str] | Sequence[list[int]]) -> PreparedRequest:
        """Convert a request's inputs into sequences."""
        texts = [one for one in inputs if isinstance(one, str)]
        encoded = self.embedder.tokenize(texts) or self._of_ids(inputs)
        tokens, windowed = 0, 0
        for text in encoded:
            tokens += text.tokens
            windowed += len(text.parts) > 1
        return PreparedRequest(encoded, tokens, len(encoded), windowed)

    def _of_ids(self, inputs: Sequence[Any]) -> list[EncodedText]:
        """Convert lists of token ids into sequences, with the model's prompt before each."""
        settings, tokenizer = self.embedder.settings, self.embedder.tokenizer
        prompt = settings.whole_texts([""], special=True)
        [before], encoded = tokenizer.encode_batch(prompt), []
        for number, ids in enumerate(inputs):
            if (largest := max(ids)) >= tokenizer.size:
                raise RefusedError(
                    422,
                    f"input.{number}: {largest} is not an id of the model's vocabulary of "
                    f"{tokenizer.size:,}; send the text, or ids of this model's tokenizer",
                    f"input.{number}",
                )
            whole = np.array([*before, *ids], dtype=np.int32)
            encoded.append(self.embedder.split_ids(whole, windows=True))
        return encoded

    def run(self, many: Sequence[list[EncodedText]]) -> list[np.ndarray]:
        """Return (texts, width) float32 vectors for each request."""
        return split_results(
            self.embedder.vectors([text for texts in many for text in texts]), many
        )

    def rows(self, content: list[EncodedText], vectors: np.ndarray) -> list[Any]:
        """Return the vectors."""
        return list(vectors)


class FillMask:
    """The operation that predicts masked tokens."""

    sample: Mapping[str, Any] = {"text": MASK, "top": 1}

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def size(self, inputs: Sequence[Mapping[str, Any]]) -> int:
        """Estimate the number of tokens of a request's inputs: each mask has a window."""
        room = self.predictor.max_length - 2
        return sum(
            given["text"].count(MASK) * (2 + min(room, len(given["text"]) // CHARACTERS_PER_TOKEN))
            for given in inputs
        )

    def prepare(self, inputs: Sequence[Mapping[str, Any]]) -> PreparedRequest:
        """Cut a window of tokens around every mask."""
        candidates, vocabulary = 0, self.predictor.tokenizer.size
        for number, given in enumerate(inputs):
            if given["top"] > vocabulary:
                field = f"inputs.{number}.top"
                message = f"{field}: the vocabulary has {vocabulary:,} tokens, not {given['top']:,}"
                raise RefusedError(422, message, field)
            candidates += given["text"].count(MASK) * given["top"]
        if candidates > MAX_CANDIDATES:
            message = f"at most {MAX_CANDIDATES:,} candidates are returned, not {candidates:,}"
            raise RefusedError(413, f"{message}; lower top, or send fewer masks")
        texts = [self.predictor.mask_windows(given["text"], given["top"]) for given in inputs]
        tokens = sum(window.tokens for text in texts for window in text.windows)
        windowed = sum(
            len({window.sequences[0].ids.tobytes() for window in text.windows}) > 1
            for text in texts
        )
        return PreparedRequest(texts, tokens, len(texts), windowed)

    def run(self, many: Sequence[list[MaskedText]]) -> list[list[list[list[MaskCandidate]]]]:
        """Return the most probable tokens for each request, text and mask, best first."""
        found = self.predictor.mask_candidates([text for texts in many for text in texts])
        return split_results(found, many)

    def rows(self, content: list[MaskedText], found: list[list[list[MaskCandidate]]]) -> list[Any]:
        """Return a list of candidates for each text and mask."""
        return [[[guess._asdict() for guess in mask] for mask in masks] for masks in found]


class NextSentence:
    """The operation that predicts whether one text follows another."""

    sample: Mapping[str, Any] = {"text": "a", "following": "a"}

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def size(self, inputs: Sequence[Mapping[str, Any]]) -> int:
        """Estimate the number of tokens of a request's inputs."""
        return sum(map(count_characters, inputs)) // CHARACTERS_PER_TOKEN

    def prepare(self, inputs: Sequence[Mapping[str, Any]]) -> PreparedRequest:
        """Encode pairs; a long pair is cut to the tokens around its boundary."""
        pairs = []
        for number, given in enumerate(inputs):
            ids = self.predictor.tokenizer.encode_batch([given["text"], given["following"]])
            for field, one in zip(("text", "following"), ids, strict=True):
                if not one:
                    raise BertkitError(
                        f"inputs.{number}.{field}: the text is empty, or the tokenizer drops all "
                        "of it; send a text with words"
                    )
            pairs.append(self.predictor.pair_sequence(*ids))
        lost = sum(pair.cut for pair in pairs)
        cut = {"pairs cut to the tokens around their boundary": lost} if lost else {}
        return PreparedRequest(pairs, sum(pair.part.tokens for pair in pairs), len(pairs), cut=cut)

    def run(self, many: Sequence[list[PairSequence]]) -> list[list[float]]:
        """Return, for each request and pair, the probability that the second text follows."""
        found = self.predictor.next_probabilities([pair for pairs in many for pair in pairs])
        return split_results(found, many)

    def rows(self, content: list[PairSequence], probabilities: list[float]) -> list[Any]:
        """Return the probability for each pair."""
        return [{"probability": probability} for probability in probabilities]


class Tokens:
    """The operation that returns the tokens of one text or pair."""

    sample: Mapping[str, Any] = {"text": "a", "pair": None}
    max_tokens = MAX_TOKEN_ROWS

    def __init__(self, start: PretrainedWeights) -> None:
        self.start, self.config, self.tokenizer = start, start.config, start.tokenizer

    def size(self, inputs: Sequence[Mapping[str, Any]]) -> int:
        """Estimate the number of tokens of a request's inputs."""
        [given] = inputs
        tokens = count_characters(given) // CHARACTERS_PER_TOKEN
        if tokens > MAX_TOKEN_ROWS:
            raise too_many_tokens(tokens, MAX_TOKEN_ROWS)
        return tokens

    def prepare(self, inputs: Sequence[Mapping[str, Any]]) -> PreparedRequest:
        """Encode a text or a pair of texts as one sequence."""
        [given] = inputs
        if given["pair"] is not None and self.config.type_vocab_size == 1:
            raise RefusedError(422, f"pair: {ONE_SEGMENT}", "pair")
        encoded = self.tokenizer.encode_pair(given["text"], given["pair"])
        if (tokens := len(encoded.ids)) > self.max_tokens:
            raise RefusedError(
                422,
                f"text: {tokens:,} tokens with [CLS] and [SEP], but the route allows "
                f"{self.max_tokens:,}; shorten it",
                "text",
            )
        return PreparedRequest(encoded, tokens, 1)

    def run(self, many: Sequence[PairEncoding]) -> list[Any]:
        """Return nothing more, since `prepare` has done the work."""
        return [None] * len(many)

    def rows(self, content: PairEncoding, result: Any) -> list[Any]:
        """Return the tokens with their offsets."""
        return [{"tokens": token_rows(self.tokenizer, content)}]


class AttentionMaps(Tokens):
    """The operation that computes the attention weights of all heads, as bytes for display.

    The encoder that serves predictions is optimized for speed and does not keep attention weights,
    so a second encoder is built in fp32 at the first request. Its weights are kept from when the
    model was loaded, since the folder may hold others by then.
    """

    def __init__(self, start: PretrainedWeights) -> None:
        super().__init__(start)
        self.heads = self.config.num_hidden_layers * self.config.num_attention_heads
        fitting = math.isqrt(MAX_WEIGHTS // self.heads)
        self.max_tokens = min(fitting, self.config.max_position_embeddings)
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

    @torch.inference_mode()
    def run(self, many: Sequence[PairEncoding]) -> list[bytes]:
        """Return one byte per (layer, head, query token, key token) for each request."""
        found = []
        for encoded in many:
            packed, shades = pack([encoded.ids], [encoded.segment_ids]), b""
            hidden = self.encoder.embed(packed)
            for layer in self.encoder.stack:
                assert isinstance(layer, Layer)
                weights = attention_weights(layer, hidden)[0]
                if not weights.isfinite().all():
                    raise not_finite()
                shades += (weights.sqrt() * 255).round().to(torch.uint8).numpy().tobytes()
                hidden = layer(hidden, packed)
            found.append(shades)
        return found

    def rows(self, content: PairEncoding, result: bytes) -> list[Any]:
        """Return the tokens and the weights: 255 times their square root, in base64."""
        maps = {
            "layers": self.config.num_hidden_layers,
            "heads": self.config.num_attention_heads,
            "weights": base64.b64encode(result).decode(),
        }
        return [{"tokens": token_rows(self.tokenizer, content), **maps}]


def token_rows(tokenizer: Tokenizer, encoded: PairEncoding) -> list[dict[str, Any]]:
    """Return the tokens of a sequence; `part` is 0 for those of the text and 1 for the pair's."""
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
