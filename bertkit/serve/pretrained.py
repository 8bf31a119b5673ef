"""Masks and next sentences (paper, section 3.1) of many requests in one run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bertkit.errors import BertkitError
from bertkit.examples.packed import pack
from bertkit.model.heads import PretrainingOutput
from bertkit.model.inference import prepare_encoder
from bertkit.predict.engine import choose_mode
from bertkit.predict.predictor import MASK, Candidate, Predictor
from bertkit.serve.batching import Prepared
from bertkit.serve.bodies import Following, Masked
from bertkit.serve.limits import CHARACTERS_OF_TOKEN, RefusedError, too_many
from bertkit.tasks.task import PREDICTION_TOKENS
from bertkit.training.devices import autocast

MOST_ROWS = 128
"""Sequences in a batch: each mask needs a row as wide as the vocabulary."""
MOST_GUESSES = 50_000
"""Of an answer, which has about 50 bytes for each."""


class Masks(NamedTuple):
    """The masks of one text."""

    windows: list[tuple[list[int], int]]
    """Of each mask: ids with [CLS] and [SEP], and where the mask is."""
    top: int


class Pairs(NamedTuple):
    """Two texts as one sequence."""

    ids: list[int]
    segments: list[int]


class Network:
    """A pre-trained network, prepared for prediction.

    Args:
        predictor: its encoder is changed.
        precision: see `bertkit.predict.engine.choose_mode`.
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
        """Both heads' logits, in fp32 and on the CPU.

        Args:
            sequences: ids, with special tokens.
            segments: 0 or 1 for each of them; all 0 where absent.
            places: of masks, one for each sequence; or none.
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
    """Guesses at masks.

    Args:
        network: that guesses.
        most_tokens: of all windows of a request; each mask has one.
    """

    def __init__(self, network: Network, most_tokens: int) -> None:
        self.network, self.predictor, self.most_tokens = network, network.predictor, most_tokens

    def prepare(self, asked: Sequence[Masked]) -> Prepared:
        """A window around every mask.

        Raises:
            RefusedError: more guesses are asked for than there are pieces, or than are given; or
                the windows have too many tokens.
        """
        self._check_size(asked)
        texts = [Masks(self.predictor.mask_windows(one.text), one.top) for one in asked]
        tokens = sum(len(ids) for text in texts for ids, _ in text.windows)
        windowed = sum(len(text.windows) > 1 for text in texts)
        return Prepared(texts, tokens, len(texts), windowed)

    def _check_size(self, asked: Sequence[Masked]) -> None:
        guesses = tokens = 0
        vocabulary, room = self.predictor.tokenizer.size, self.predictor.longest - 2
        for number, given in enumerate(asked):
            if given.top > vocabulary:
                field = f"inputs.{number}.top"
                message = f"{field}: the vocabulary has {vocabulary:,} pieces, not {given.top:,}"
                raise RefusedError(422, message, field)
            masks = given.text.count(MASK)
            guesses += masks * given.top
            tokens += masks * (2 + min(room, len(given.text) // CHARACTERS_OF_TOKEN))
        if tokens > self.most_tokens:
            raise too_many(tokens, self.most_tokens)
        if guesses > MOST_GUESSES:
            message = f"{guesses:,} guesses are asked for, and {MOST_GUESSES:,} are given at a time"
            raise RefusedError(413, f"{message}; take a lower top, or send fewer masks")

    def run(self, many: Sequence[list[Masks]]) -> list[list[list[list[Candidate]]]]:
        """For each request, text and mask: the most probable pieces, best first."""
        asked = [(w, text.top) for texts in many for text in texts for w in text.windows]
        guesses: Iterator[list[Candidate]] = iter(self._guess(asked))
        return [[[next(guesses) for _ in text.windows] for text in texts] for texts in many]

    def _guess(self, asked: Sequence[tuple[tuple[list[int], int], int]]) -> list[list[Candidate]]:
        vocabulary = self.predictor.tokenizer.vocabulary
        found: list[list[Candidate]] = []
        for group in groups([ids for (ids, _), _ in asked]):
            sequences, places = zip(*[asked[i][0] for i in group], strict=True)
            logits = self.network(sequences, None, places).mlm_logits[:, : len(vocabulary)]
            for row, i in zip(logits.softmax(-1), group, strict=True):
                best = row.topk(asked[i][1])
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                found.append([Candidate(vocabulary[piece], chance) for piece, chance in pairs])
        return found


class NextSentence:
    """Whether texts follow each other."""

    def __init__(self, network: Network) -> None:
        self.network, self.predictor = network, network.predictor

    def prepare(self, asked: Sequence[Following]) -> Prepared:
        """Pairs as sequences; of long ones what stands at the joint, see `Predictor`.

        Raises:
            BertkitError: a text has no token.
        """
        made = [self._pair(i, given) for i, given in enumerate(asked)]
        lost = sum(cut for _, cut in made)
        return Prepared(
            [pair for pair, _ in made],
            sum(len(pair.ids) for pair, _ in made),
            len(made),
            cut={"pairs cut to the tokens around their joint": lost} if lost else {},
        )

    def _pair(self, number: int, given: Following) -> tuple[Pairs, bool]:
        """The sequence, and whether it was cut."""
        first, second = self.predictor.tokenizer.encode_batch([given.text, given.following])
        for field, ids in (("text", first), ("following", second)):
            if not ids:
                raise BertkitError(f"inputs.{number}.{field}: the text has no token; give words")
        pair = Pairs(*self.predictor.joint(first, second))
        return pair, len(pair.ids) < len(first) + len(second) + 3

    def run(self, many: Sequence[list[Pairs]]) -> list[list[float]]:
        """For each request and pair: the probability."""
        pairs = [pair for texts in many for pair in texts]
        found: list[float] = []
        for group in groups([pair.ids for pair in pairs]):
            sequences, segments = zip(*[pairs[i] for i in group], strict=True)
            logits: Any = self.network(sequences, segments, []).nsp_logits
            found += logits.softmax(-1)[:, 0].tolist()
        chances = iter(found)
        return [[next(chances) for _ in texts] for texts in many]


def groups(sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Numbers of neighbouring sequences that make a batch."""
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
