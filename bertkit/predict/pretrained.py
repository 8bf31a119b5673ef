"""Predictions of pre-trained models: masked tokens, next sentences and hidden states.

`load_pretrained` takes any directory that `bertkit.checkpoints.huggingface` can read: a bertkit
run's `model/`, or a Hugging Face BERT.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, overload

import torch

from bertkit.checkpoints.huggingface import load_pretraining_model
from bertkit.checkpoints.pretrained import model_folder, pair_objective, read_details
from bertkit.errors import BertkitError, InputTypeError, checked_texts, is_ordered, short_repr
from bertkit.model.encoder import ONE_SEGMENT
from bertkit.model.heads import PretrainingModel, PretrainingOutput
from bertkit.predict.embeddings import text_chunks
from bertkit.predict.engine import choose_mode, warn_caller
from bertkit.predict.likelihood import SentenceScore, SentenceScorer, choose_method
from bertkit.pretraining_data.batch import pack
from bertkit.tasks.task import check_outputs, prediction_tokens, split_parts
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import autocast, choose_device
from bertkit.training.memory import in_halves

MASK = "[MASK]"
MIN_TOKENS = 64
"""A shorter sequence counts as this many tokens: a mask needs a row as wide as the vocabulary."""


class MaskCandidate(NamedTuple):
    """A predicted token for a mask, and its probability."""

    token: str
    probability: float


class MaskedText(NamedTuple):
    """A text with masks, prepared for prediction."""

    windows: list[tuple[list[int], int]]
    """For each mask, its window's token ids with [CLS] and [SEP], and the mask's index there."""
    top: int
    """The number of candidates for each mask."""


class PairSequence(NamedTuple):
    """A pair of texts as one sequence."""

    ids: list[int]
    segments: list[int]
    cut: bool
    """Whether only the tokens next to the boundary are there."""


class Predictor:
    """A pre-trained model with its tokenizer; the model can no longer be trained.

    Args:
        model: the model with its pre-training heads in fp32; its encoder is changed on a CPU.
        tokenizer: the tokenizer with which the model was trained.
        device: the device to compute on.
        precision: "fp32", "bf16", "int8" or "auto"; see `bertkit.predict.engine.choose_mode`.
        order: whether the sentence-pair head was trained for sentence-order prediction.

    Raises:
        BertkitError: the tokenizer has more tokens than the model, or the precision is unknown.
    """

    def __init__(
        self,
        model: PretrainingModel,
        tokenizer: Tokenizer,
        device: torch.device,
        precision: str = "auto",
        *,
        order: bool = False,
    ) -> None:
        self.precision = choose_mode(precision, device)
        self.scorer = SentenceScorer(model, tokenizer, device, self.precision)
        self.model, self.tokenizer, self.device = self.scorer.model, tokenizer, device
        self.order = order and model.nsp is not None

    @property
    def max_length(self) -> int:
        """The model's maximum sequence length in tokens."""
        return self.model.config.max_position_embeddings

    @overload
    def fill_mask(self, text: str, top: int = 5) -> list[list[MaskCandidate]]: ...
    @overload
    def fill_mask(self, text: Iterable[Any], top: int = 5) -> list[list[list[MaskCandidate]]]: ...
    def fill_mask(self, text: Any, top: int = 5) -> Any:
        """Predict the token at each `[MASK]` of a text, or of every text of a list.

        In a text longer than `max_length`, each mask is read in a window around it.

        Args:
            text: a text with at least one `[MASK]`, or an iterable of such texts.
            top: the number of candidates for each mask.

        Returns:
            For each mask of a text, its most probable tokens, most probable first.

        Raises:
            InputTypeError: the argument is neither a text nor an iterable of texts.
            BertkitError: the model is not bidirectional, there is no mask in a text, or `top` is
                not between 1 and the vocabulary size.
        """
        if self.model.config.direction != "bidirectional":
            raise BertkitError(
                f"this model reads {self.model.config.direction.replace('_', ' ')}: it predicts "
                "adjacent tokens and was not trained on masks; use a masked language model"
            )
        if not 1 <= top <= self.tokenizer.size:
            raise BertkitError(f"top must be between 1 and {self.tokenizer.size:,}, got {top}")
        one = isinstance(text, str)
        found: list[list[list[MaskCandidate]]] = []
        for chunk in text_chunks([text] if one else text):
            masked = [self.mask_windows(given, top) for given in chunk]
            for given, prepared in zip(chunk, masked, strict=True):
                if not prepared.windows:
                    raise BertkitError(
                        f"there is no {MASK} in the text {given[:60]!r}; put one where a token is "
                        "missing"
                    )
            found += self.mask_candidates(masked)
        return found[0] if one else found

    @overload
    def next_sentence(self, text: str, following: str) -> float: ...
    @overload
    def next_sentence(self, text: Iterable[tuple[str, str]]) -> list[float]: ...
    def next_sentence(self, text: Any, following: Any = None) -> Any:
        """Return the probability that a text really follows another (paper, task 2).

        If together they exceed `max_length`, the model reads the tokens next to the boundary: the
        end of the first text and the start of the second.

        Args:
            text: the first text, or a list of (text, following text) tuples, which gives a list.
            following: the text that may follow it, if the first argument is one text.

        Raises:
            InputTypeError: the arguments are neither two texts nor a list of pairs of texts.
            BertkitError: the model has no next-sentence head, or a text has no tokens.
        """
        if self.model.nsp is None or self.order:
            learned = "which of two texts comes first" if self.order else "nothing about pairs"
            raise BertkitError(
                f"this model has learned {learned}, not whether a text follows another; use one "
                "that was pre-trained with next-sentence prediction"
            )
        if following is not None:
            return self.next_sentence([(text, following)])[0]
        given: list[Any] = list(text) if is_ordered(text) else [None]
        if not all(
            isinstance(pair, tuple | list) and [*map(type, pair)] == [str, str] for pair in given
        ):
            raise InputTypeError(
                f"next_sentence() takes two texts, or a list of pairs of texts, not "
                f"{short_repr(text)}"
            )
        pairs = []
        for pair in given:
            first, second = self.tokenizer.encode_batch(pair)
            if not first or not second:
                raise BertkitError("next-sentence needs two texts, but one of them has no tokens")
            pairs.append(self.pair_sequence(first, second))
        if lost := sum(pair.cut for pair in pairs):
            warn_caller(f"pairs cut to the tokens around their boundary: {lost:,}")
        return self.next_probabilities(pairs)

    def mask_windows(self, text: str, top: int) -> MaskedText:
        """Cut a window of token ids around every `[MASK]` of a text."""
        first, *rest = self.tokenizer.encode_batch(text.split(MASK))
        ids, masks = list(first), []
        for part in rest:
            masks.append(len(ids))
            ids += [self.tokenizer.mask_id, *part]
        found = [window_around(ids, mask, self.max_length - 2) for mask in masks]
        return MaskedText([(self._surround(window), place + 1) for window, place in found], top)

    def mask_candidates(self, texts: Sequence[MaskedText]) -> list[list[list[MaskCandidate]]]:
        """Return the most probable tokens for each text and mask, best first."""
        asked = [(*window, text.top) for text in texts for window in text.windows]
        vocabulary, found = self.tokenizer.vocabulary, []

        def compute(group: Sequence[int]) -> torch.Tensor:
            sequences, places, _ = zip(*[asked[i] for i in group], strict=True)
            return self._compute(sequences, places=places).mlm_logits

        for group in batches([ids for ids, _, _ in asked], self.device):
            logits = torch.cat(in_halves(compute, group, lambda one: len(asked[one][0])))
            named = logits.softmax(-1)[:, : len(vocabulary)]  # embeddings may be padded with rows
            for row, number in zip(named, group, strict=True):
                best = row.topk(asked[number][2])
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                found.append([MaskCandidate(vocabulary[token], chance) for token, chance in pairs])
        candidates = iter(found)
        return [[next(candidates) for _ in text.windows] for text in texts]

    def pair_sequence(self, first: Sequence[int], second: Sequence[int]) -> PairSequence:
        """Return a pair as one sequence; a long one keeps the tokens next to its boundary.

        Raises:
            BertkitError: the model has only one segment.
        """
        if self.model.config.type_vocab_size == 1:
            raise BertkitError(ONE_SEGMENT)
        room = self.max_length - 3
        cut = len(first) + len(second) > room
        if cut:
            size = min(len(second), max(room // 2, room - len(first)))
            first, second = first[-(room - size) :], second[:size]
        ids = [*self._surround(first), *second, self.tokenizer.sep_id]
        return PairSequence(ids, [0] * (len(first) + 2) + [1] * (len(second) + 1), cut)

    def next_probabilities(self, pairs: Sequence[PairSequence]) -> list[float]:
        """Return, for each pair, the probability that the second text follows the first."""
        found: list[float] = []

        def compute(group: Sequence[int]) -> torch.Tensor:
            chosen = [pairs[i] for i in group]
            made = self._compute([pair.ids for pair in chosen], [pair.segments for pair in chosen])
            assert made.nsp_logits is not None
            return made.nsp_logits

        for group in batches([pair.ids for pair in pairs], self.device):
            for logits in in_halves(compute, group, lambda one: len(pairs[one].ids)):
                found += logits.softmax(-1)[:, 0].tolist()
        return found

    @torch.inference_mode()
    def _compute(
        self,
        sequences: Sequence[Sequence[int]],
        segments: Sequence[Sequence[int]] | None = None,
        places: Sequence[int] = (),
    ) -> PretrainingOutput:
        """Return the logits of both heads in fp32, on the CPU.

        Args:
            sequences: the token ids of each sequence, with special tokens.
            segments: the segment, 0 or 1, of each token; None for all 0.
            places: the index of the mask in each sequence; empty to compute no mask.

        Raises:
            BertkitError: an output is NaN or infinite.
        """
        packed = pack(sequences, segments).to(self.device)
        rows = torch.tensor(places, dtype=torch.int64, device=self.device)
        rows = rows + packed.first_tokens[: len(rows)].long()
        with autocast(self.device, "fp32"):  # whatever the caller's is
            found = self.model(packed, rows)
        tokens = found.mlm_logits.float().cpu()
        pairs = None if found.nsp_logits is None else found.nsp_logits.float().cpu()
        check_outputs(tokens.numpy(), *([] if pairs is None else [pairs.numpy()]))
        return PretrainingOutput(tokens, pairs)

    @torch.inference_mode()
    def hidden(self, texts: Iterable[str]) -> list[torch.Tensor]:
        """Return each text's last hidden states, (tokens, width), including [CLS] and [SEP].

        Raises:
            InputTypeError: the argument is one text, or an item is not a text.
            BertkitError: a text is longer than `max_length`.
        """
        found: list[torch.Tensor] = []
        for chunk in text_chunks(texts):
            ids = [self._surround(one) for one in self.tokenizer.encode_batch(chunk)]
            for group in batches(ids, self.device):
                sequences = [ids[i] for i in group]
                for states in in_halves(self._last_states, sequences, len):
                    found += states
        return found

    def _last_states(self, sequences: Sequence[Sequence[int]]) -> Sequence[torch.Tensor]:
        packed = pack(sequences)
        with autocast(self.device, "fp32"):
            states = self.model.encoder(packed.to(self.device)).float().cpu()
        check_outputs(states.numpy())
        return states.split(packed.lengths)

    def score(self, texts: Iterable[str], *, method: str = "auto") -> list[SentenceScore]:
        """Return the (pseudo-)log-likelihood of sentences, for example to choose among hypotheses.

        They are computed in the predictor's precision; load the model in fp32 to compare sentences
        that are almost equally likely.

        Args:
            texts: a list of sentences.
            method: "within-word-l2r", "pll" or "causal" (see `bertkit.predict.likelihood`); "auto"
                is within-word-l2r for a masked language model, else causal.

        Returns:
            For each sentence its tokens and their log-probabilities in nats; `score` is their sum.

        Raises:
            InputTypeError: the argument is one text, or an item is not a text.
            BertkitError: the method does not fit the model, or a sentence is longer than
                `max_length`.
        """
        method = choose_method(method, self.model.config)
        ids = self.scorer.encode(list(checked_texts(texts)))
        for number, one in enumerate(ids):
            if len(one) > self.scorer.max_tokens:
                raise BertkitError(
                    f"sentence {number} has {len(one):,} tokens, and the model reads at most "
                    f"{self.scorer.max_tokens:,}; split it",
                    code="too-long",
                )
        vocabulary = self.tokenizer.vocabulary
        return [
            SentenceScore([vocabulary[i] for i in one], numbers.tolist())
            for one, numbers in zip(ids, self.scorer.score(ids, method), strict=True)
        ]

    def _surround(self, ids: Sequence[int]) -> list[int]:
        return [self.tokenizer.cls_id, *ids, self.tokenizer.sep_id]


def window_around(ids: Sequence[int], place: int, size: int) -> tuple[Sequence[int], int]:
    """Return at most `size` ids around a position, and the position within them."""
    start = max(0, min(place - size // 2, len(ids) - size))
    return ids[start : start + size], place - start


def batches(sequences: Sequence[Sequence[int]], device: torch.device) -> Iterator[list[int]]:
    """Yield the indices of neighbouring sequences that form a batch of the device's size."""

    def size(number: int) -> int:
        return max(len(sequences[number]), MIN_TOKENS)

    return split_parts(range(len(sequences)), prediction_tokens(device), size)


def load_pretrained(
    directory: Path | str, *, device: str = "auto", precision: str = "auto"
) -> Predictor:
    """Load a pre-trained model for prediction.

    Args:
        directory: the model or run directory, or a model of the hub.
        device: the device to compute on: "auto", "cpu", "cuda", ...
        precision: "fp32", "bf16", "int8" (CPUs only), or "auto": bf16 if the device computes it
            fast, else fp32.

    Raises:
        BertkitError: the directory has no BERT with a masked-language head, or it is damaged.
    """
    directory = model_folder(Path(directory))
    model = load_pretraining_model(directory)
    order = pair_objective(read_details(directory), model.config) == "sop"
    where = choose_device(device)
    return Predictor(model, Tokenizer.load(directory), where, precision, order=order)
