"""The operations behind the routes: predictors of `bertkit.predict`, applied to batched requests.

Each operation has two methods. `prepare` tokenizes the texts of a request, outside the model's
thread; `run` computes several requests at once and returns the predictions of each. Masks and next
sentences follow paper section 3.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from bertkit.datasets.examples import ChoiceExample, QuestionExample, TextExample, WordsExample
from bertkit.errors import BertkitError
from bertkit.model.heads import PretrainingOutput
from bertkit.model.inference import prepare_encoder
from bertkit.predict.embeddings import Embedder, EncodedText
from bertkit.predict.engine import choose_mode
from bertkit.predict.predictors import TaskPredictor
from bertkit.predict.pretrained import MASK, MaskCandidate, Predictor
from bertkit.predict.word_splitter import split_words_with_offsets
from bertkit.pretraining_data.batch import pack
from bertkit.serve.batching import PreparedRequest
from bertkit.serve.limits import CHARACTERS_OF_TOKEN, RefusedError, too_many
from bertkit.serve.schemas import Choices, Following, Masked, Question, Text, Words
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.task import PREDICTION_TOKENS, Items, mean_outputs
from bertkit.training.device import autocast


class TaskOperation:
    """The operation that returns a fine-tuned model's predictions."""

    def __init__(self, predictor: TaskPredictor) -> None:
        self.predictor = predictor

    def prepare(self, inputs: Sequence[Any]) -> PreparedRequest:
        """Convert a request's inputs (`bertkit.datasets.examples`) into sequences."""
        items = self.predictor.items(inputs)
        lost = {what: count for what, count in items.cut.items() if count}
        if isinstance(
            self.predictor.task, QuestionAnswering
        ):  # the other counts are about gold answers, which requests lack
            lost = {what: count for what, count in lost.items() if what.startswith("questions")}
        return PreparedRequest((inputs, items), items.tokens, len(inputs), items.windowed, lost)

    def run(self, many: Sequence[tuple[Sequence[Any], Items]]) -> list[list[Any]]:
        """Return the predictions of each request, as the task's `decode` returns them."""
        together = [item for _, items in many for item in items.items]
        whole = Items(together, sum(len(inputs) for inputs, _ in many), 0, {})
        by_model = [engine.run(whole) for engine in self.predictor.engines]
        outputs = by_model[0] if len(by_model) == 1 else mean_outputs(by_model)
        ends = accumulate((len(items.items) for _, items in many), initial=0)
        return [
            self.predictor.task.decode(inputs, items, outputs[start:end])
            for (inputs, items), (start, end) in zip(many, pairwise(ends), strict=True)
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
            encoded.append(self.embedder.windows_of(ids, windows=True))
        return encoded

    def run(self, many: Sequence[list[EncodedText]]) -> list[np.ndarray]:
        """Return (texts, width) float32 vectors for each request."""
        vectors = self.embedder.vectors([text for texts in many for text in texts])
        ends = accumulate((len(texts) for texts in many), initial=0)
        return [vectors[start:end] for start, end in pairwise(ends)]


def text_examples(asked: Sequence[Text]) -> list[TextExample]:
    """Convert a request's texts into task inputs."""
    return [
        TextExample(str(i), given.text, given.pair, None, f"inputs.{i}")
        for i, given in enumerate(asked)
    ]


def choice_examples(asked: Sequence[Choices]) -> list[ChoiceExample]:
    """Convert a request's texts and choices into task inputs."""
    return [
        ChoiceExample(str(i), given.text, tuple(given.choices), None, f"inputs.{i}")
        for i, given in enumerate(asked)
    ]


def question_examples(asked: Sequence[Question]) -> list[QuestionExample]:
    """Convert a request's questions into task inputs."""
    for i, given in enumerate(asked):
        for field in ("question", "context"):
            if not getattr(given, field).strip():
                raise BertkitError(f"inputs.{i}.{field}: the text is blank; send a text with words")
    return [
        QuestionExample(str(i), given.question, given.context, None, f"inputs.{i}")
        for i, given in enumerate(asked)
    ]


def words_examples(asked: Sequence[Words]) -> list[WordsExample]:
    """Convert a request's texts or word lists into task inputs."""
    inputs = []
    for i, given in enumerate(asked):
        if (given.text is None) == (given.words is None):
            both = "both" if given.words is not None else "neither"
            raise RefusedError(
                422, f"inputs.{i} has {both} of text and words; send one of them", f"inputs.{i}"
            )
        text, spans = split_words_with_offsets(given.given)
        words = tuple(text[start:end] for start, end in spans)
        document = -1 - i if given.document is None else given.document
        inputs.append(WordsExample(str(i), words, None, document, f"inputs.{i}"))
    return inputs


MOST_ROWS = 128
"""The most sequences in a batch: each mask needs a row as wide as the vocabulary."""
MOST_GUESSES = 50_000
"""The most candidates in a response, at about 50 bytes each."""


class Masks(NamedTuple):
    """The masks of one text, prepared for prediction."""

    windows: list[tuple[list[int], int]]
    """For each mask, its window's token ids with [CLS] and [SEP], and the mask's index there."""
    top: int


class EncodedPairs(NamedTuple):
    """A pair of texts as one sequence."""

    ids: list[int]
    segments: list[int]


class Network:
    """A pre-trained network, prepared for prediction.

    Args:
        predictor: the predictor of the model; on a CPU, its encoder is modified.
        precision: "fp32", "bf16", "int8" or "auto"; see `bertkit.predict.engine.choose_mode`.
    """

    def __init__(self, predictor: Predictor, precision: str) -> None:
        self.predictor = predictor
        self.mode = choose_mode(precision, predictor.device)
        if predictor.device.type == "cpu":
            prepare_encoder(predictor.model.encoder, self.mode)

    @torch.inference_mode()
    def __call__(
        self,
        sequences: Sequence[Sequence[int]],
        segments: Sequence[Sequence[int]] | None,
        places: Sequence[int],
    ) -> PretrainingOutput:
        """Return the logits of both heads, in fp32 on the CPU.

        Args:
            sequences: the token ids of each sequence, with special tokens.
            segments: the segment, 0 or 1, of each token; None for all 0.
            places: the index of the mask in each sequence; empty to compute no mask.
        """
        device = self.predictor.device
        packed = pack(sequences, segments).to(device)
        rows = torch.tensor(places, dtype=torch.int64, device=device)
        rows = rows + packed.first_tokens[: len(rows)].long()
        with autocast(device, "fp32" if device.type == "cpu" else self.mode):
            found = self.predictor.model(packed, rows)
        pairs = None if found.nsp_logits is None else found.nsp_logits.float().cpu()
        return PretrainingOutput(found.mlm_logits.float().cpu(), pairs)


class FillMask:
    """The operation that predicts masked tokens."""

    def __init__(self, network: Network, most_tokens: int) -> None:
        self.network, self.predictor, self.most_tokens = network, network.predictor, most_tokens

    def prepare(self, asked: Sequence[Masked]) -> PreparedRequest:
        """Cut a window of tokens around every mask.

        Raises:
            RefusedError: `top` exceeds the vocabulary, the request asks for too many candidates,
                or its windows have too many tokens.
        """
        self._check_size(asked)
        texts = [Masks(self.predictor.mask_windows(one.text), one.top) for one in asked]
        tokens = sum(len(ids) for text in texts for ids, _ in text.windows)
        windowed = sum(len(text.windows) > 1 for text in texts)
        return PreparedRequest(texts, tokens, len(texts), windowed)

    def _check_size(self, asked: Sequence[Masked]) -> None:
        guesses = tokens = 0
        vocabulary, room = self.predictor.tokenizer.size, self.predictor.max_length - 2
        for number, given in enumerate(asked):
            if given.top > vocabulary:
                field = f"inputs.{number}.top"
                message = f"{field}: the vocabulary has {vocabulary:,} tokens, not {given.top:,}"
                raise RefusedError(422, message, field)
            masks = given.text.count(MASK)
            guesses += masks * given.top
            tokens += masks * (2 + min(room, len(given.text) // CHARACTERS_OF_TOKEN))
        if tokens > self.most_tokens:
            raise too_many(tokens, self.most_tokens)
        if guesses > MOST_GUESSES:
            message = f"{guesses:,} guesses requested, but {MOST_GUESSES:,} are the most at a time"
            raise RefusedError(413, f"{message}; lower top, or send fewer masks")

    def run(self, many: Sequence[list[Masks]]) -> list[list[list[list[MaskCandidate]]]]:
        """Return the most probable tokens for each request, text and mask, best first."""
        asked = [(w, text.top) for texts in many for text in texts for w in text.windows]
        guesses: Iterator[list[MaskCandidate]] = iter(self._guess(asked))
        return [[[next(guesses) for _ in text.windows] for text in texts] for texts in many]

    def _guess(
        self, asked: Sequence[tuple[tuple[list[int], int], int]]
    ) -> list[list[MaskCandidate]]:
        vocabulary = self.predictor.tokenizer.vocabulary
        found: list[list[MaskCandidate]] = []
        for group in groups([ids for (ids, _), _ in asked]):
            sequences, places = zip(*[asked[i][0] for i in group], strict=True)
            logits = self.network(sequences, None, places).mlm_logits[:, : len(vocabulary)]
            for row, i in zip(logits.softmax(-1), group, strict=True):
                best = row.topk(asked[i][1])
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                found.append([MaskCandidate(vocabulary[token], chance) for token, chance in pairs])
        return found


class NextSentence:
    """The operation that predicts whether one text follows another."""

    def __init__(self, network: Network) -> None:
        self.network, self.predictor = network, network.predictor

    def prepare(self, asked: Sequence[Following]) -> PreparedRequest:
        """Encode pairs; a long pair is cut to the tokens around its joint (`Predictor.joint`).

        Raises:
            BertkitError: a text has no tokens.
        """
        made = [self._pair(i, given) for i, given in enumerate(asked)]
        lost = sum(cut for _, cut in made)
        return PreparedRequest(
            [pair for pair, _ in made],
            sum(len(pair.ids) for pair, _ in made),
            len(made),
            cut={"pairs cut to the tokens around their joint": lost} if lost else {},
        )

    def _pair(self, number: int, given: Following) -> tuple[EncodedPairs, bool]:
        """Return the sequence of a pair and whether it was cut."""
        first, second = self.predictor.tokenizer.encode_batch([given.text, given.following])
        for field, ids in (("text", first), ("following", second)):
            if not ids:
                raise BertkitError(f"inputs.{number}.{field}: the text has no tokens; send words")
        pair = EncodedPairs(*self.predictor.joint(first, second))
        return pair, len(pair.ids) < len(first) + len(second) + 3

    def run(self, many: Sequence[list[EncodedPairs]]) -> list[list[float]]:
        """Return, for each request and pair, the probability that the second text follows."""
        pairs = [pair for texts in many for pair in texts]
        found: list[float] = []
        for group in groups([pair.ids for pair in pairs]):
            sequences, segments = zip(*[pairs[i] for i in group], strict=True)
            logits: Any = self.network(sequences, segments, []).nsp_logits
            found += logits.softmax(-1)[:, 0].tolist()
        chances = iter(found)
        return [[next(chances) for _ in texts] for texts in many]


def groups(sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Yield the indices of neighbouring sequences that form a batch."""
    group: list[int] = []
    tokens = 0
    for number, ids in enumerate(sequences):
        if group and (tokens + len(ids) > PREDICTION_TOKENS or len(group) == MOST_ROWS):
            yield group
            group, tokens = [], 0
        group.append(number)
        tokens += len(ids)
    if group:
        yield group
