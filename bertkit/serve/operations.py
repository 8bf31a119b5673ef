"""The operations behind the routes: predictors of `bertkit.predict`, applied to batched requests.

Each operation has two methods. `prepare` tokenizes the texts of a request, outside the model's
thread; `run` computes several requests at once and returns the predictions of each. Masks and next
sentences follow paper section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence, Sized
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from bertkit.errors import BertkitError
from bertkit.predict.embeddings import Embedder, EncodedText
from bertkit.predict.predictors import TaskPredictor
from bertkit.predict.pretrained import MASK, MaskCandidate, MaskedText, PairSequence, Predictor
from bertkit.serve.batching import PreparedRequest
from bertkit.serve.limits import CHARACTERS_OF_TOKEN, RefusedError, too_many
from bertkit.serve.schemas import Following, Masked
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.task import Items


def regrouped(found: Any, many: Sequence[Sized]) -> list[Any]:
    """Return the results of all requests as one slice for each request."""
    ends = accumulate((len(inputs) for inputs in many), initial=0)
    return [found[start:end] for start, end in pairwise(ends)]


class TaskOperation:
    """The operation that returns a fine-tuned model's predictions."""

    def __init__(self, predictor: TaskPredictor) -> None:
        self.predictor = predictor

    def prepare(self, asked: Sequence[Any]) -> PreparedRequest:
        """Convert a request's inputs, which have a method `example`, into sequences."""
        inputs = [given.example(number) for number, given in enumerate(asked)]
        items = self.predictor.items(inputs)
        lost = {what: count for what, count in items.cut.items() if count}
        # the other counts are about gold answers, which requests lack
        if isinstance(self.predictor.task, QuestionAnswering):
            lost = {what: count for what, count in lost.items() if what.startswith("questions")}
        return PreparedRequest((inputs, items), items.tokens, len(inputs), items.windowed, lost)

    def run(self, many: Sequence[tuple[Sequence[Any], Items]]) -> list[list[Any]]:
        """Return the predictions of each request, as the task's `decode` returns them."""
        together = [item for _, items in many for item in items.items]
        whole = Items(together, sum(len(inputs) for inputs, _ in many), 0, {})
        slices = regrouped(self.predictor.outputs(whole), [items.items for _, items in many])
        return [
            self.predictor.task.decode(inputs, items, own)
            for (inputs, items), own in zip(many, slices, strict=True)
        ]


class EmbeddingOperation:
    """The operation that returns vectors of texts."""

    def __init__(self, embedder: Embedder) -> None:
        self.embedder = embedder

    def prepare(self, asked: Sequence[str] | Sequence[list[int]]) -> PreparedRequest:
        """Convert texts, or lists of token ids, into sequences.

        Raises:
            RefusedError: a token id is not in the vocabulary.
        """
        texts = [one for one in asked if isinstance(one, str)]
        encoded = self.embedder.tokenize(texts) or self._of_ids(asked)
        windowed = sum(len(text.parts) > 1 for text in encoded)
        return PreparedRequest(
            encoded, sum(text.tokens for text in encoded), len(encoded), windowed
        )

    def _of_ids(self, asked: Sequence[Any]) -> list[EncodedText]:
        """Convert lists of token ids into sequences, with the model's prompt before each."""
        settings, tokenizer = self.embedder.settings, self.embedder.tokenizer
        prompt = settings.whole_texts([""], special=tokenizer.compat == "hf")
        [before], encoded = tokenizer.encode_batch(prompt), []
        for number, one in enumerate(asked):
            if (worst := max(one)) >= tokenizer.size:
                raise RefusedError(
                    422,
                    f"input.{number}: {worst} is not an id of the model's vocabulary of "
                    f"{tokenizer.size:,}; send the text, or ids of this model's tokenizer",
                    f"input.{number}",
                )
            ids = np.array([*before, *one], dtype=np.int32)
            encoded.append(self.embedder.split_ids(ids, windows=True))
        return encoded

    def run(self, many: Sequence[list[EncodedText]]) -> list[np.ndarray]:
        """Return (texts, width) float32 vectors for each request."""
        vectors = self.embedder.vectors([text for texts in many for text in texts])
        return regrouped(vectors, many)


MAX_CANDIDATES = 50_000
"""The maximum number of candidates in a response, at about 50 bytes each."""


class FillMask:
    """The operation that predicts masked tokens."""

    def __init__(self, predictor: Predictor, max_tokens: int) -> None:
        self.predictor, self.max_tokens = predictor, max_tokens

    def prepare(self, asked: Sequence[Masked]) -> PreparedRequest:
        """Cut a window of tokens around every mask.

        Raises:
            RefusedError: `top` exceeds the vocabulary, the request asks for too many candidates,
                or its windows have too many tokens.
        """
        self._check_size(asked)
        texts = [self.predictor.mask_windows(one.text, one.top) for one in asked]
        tokens = sum(len(ids) for text in texts for ids, _ in text.windows)
        windowed = sum(len({(*ids,) for ids, _ in text.windows}) > 1 for text in texts)
        return PreparedRequest(texts, tokens, len(texts), windowed)

    def _check_size(self, asked: Sequence[Masked]) -> None:
        candidates = tokens = 0
        vocabulary, room = self.predictor.tokenizer.size, self.predictor.max_length - 2
        for number, given in enumerate(asked):
            if given.top > vocabulary:
                field = f"inputs.{number}.top"
                message = f"{field}: the vocabulary has {vocabulary:,} tokens, not {given.top:,}"
                raise RefusedError(422, message, field)
            masks = given.text.count(MASK)
            candidates += masks * given.top
            tokens += masks * (2 + min(room, len(given.text) // CHARACTERS_OF_TOKEN))
        if tokens > self.max_tokens:
            raise too_many(tokens, self.max_tokens)
        if candidates > MAX_CANDIDATES:
            said = f"at most {MAX_CANDIDATES:,} candidates are returned, not {candidates:,}"
            raise RefusedError(413, f"{said}; lower top, or send fewer masks")

    def run(self, many: Sequence[list[MaskedText]]) -> list[list[list[list[MaskCandidate]]]]:
        """Return the most probable tokens for each request, text and mask, best first."""
        found = self.predictor.mask_candidates([text for texts in many for text in texts])
        return regrouped(found, many)


class NextSentence:
    """The operation that predicts whether one text follows another."""

    def __init__(self, predictor: Predictor) -> None:
        self.predictor = predictor

    def prepare(self, asked: Sequence[Following]) -> PreparedRequest:
        """Encode pairs; a long pair is cut to the tokens around its boundary.

        Raises:
            BertkitError: a text has no tokens.
        """
        pairs = []
        for number, given in enumerate(asked):
            ids = self.predictor.tokenizer.encode_batch([given.text, given.following])
            for field, one in zip(("text", "following"), ids, strict=True):
                if not one:
                    raise BertkitError(
                        f"inputs.{number}.{field}: the text is empty, or the tokenizer drops all "
                        "of it; send a text with words"
                    )
            pairs.append(self.predictor.pair_sequence(*ids))
        lost = sum(pair.cut for pair in pairs)
        return PreparedRequest(
            pairs,
            sum(len(pair.ids) for pair in pairs),
            len(pairs),
            cut={"pairs cut to the tokens around their boundary": lost} if lost else {},
        )

    def run(self, many: Sequence[list[PairSequence]]) -> list[list[float]]:
        """Return, for each request and pair, the probability that the second text follows."""
        found = self.predictor.next_probabilities([pair for pairs in many for pair in pairs])
        return regrouped(found, many)
