"""Pre-trained models: masked tokens, next sentences, scores of sentences, hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertkit.checkpoints.pretrained import (
    load_pretraining_model,
    model_folder,
    pair_objective,
    read_details,
)
from bertkit.errors import BertkitError, InputTypeError, checked_texts, is_ordered, short_repr
from bertkit.model.encoder import ONE_SEGMENT
from bertkit.model.heads import PretrainingModel
from bertkit.predict.embeddings import text_chunks
from bertkit.predict.predictor import warn_caller
from bertkit.predict.scoring import SentenceScore, SentenceScorer, choose_method
from bertkit.tasks.inference import choose_mode, run_model
from bertkit.tasks.task import Encoded, ItemPart, TaskBatch
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import choose_device

MASK = "[MASK]"


class MaskCandidate(NamedTuple):
    """A predicted token for a mask, and its probability."""

    token: str
    probability: float


class MaskedText(NamedTuple):
    """A text with masks, prepared for prediction."""

    windows: list[ItemPart]
    """A window for each mask; its target is the index of the mask."""
    top: int
    """The number of candidates for each mask."""


class PairSequence(NamedTuple):
    """A pair of texts as one sequence."""

    part: ItemPart
    cut: bool
    """Whether only the tokens next to the boundary are there."""


class Predictor:
    """A pre-trained model with its tokenizer; the model can no longer be trained.

    Args:
        model: the model with its pre-training heads in fp32; its encoder is changed on a CPU.
        tokenizer: the tokenizer with which the model was trained.
        device: the device to compute on.
        precision: "fp32", "bf16", "int8" or "auto".
        order: whether the sentence-pair head was trained for sentence-order prediction.
        source: the arguments of `load_pretrained`, by which it pickles.
    """

    def __init__(
        self,
        model: PretrainingModel,
        tokenizer: Tokenizer,
        device: torch.device,
        precision: str = "auto",
        *,
        order: bool = False,
        source: tuple[Any, ...] = (),
    ) -> None:
        self.precision = choose_mode(precision, device)
        self.scorer = SentenceScorer(model, tokenizer, device, self.precision)
        self.model, self.tokenizer, self.device = self.scorer.model, tokenizer, device
        self.order, self.source = order and model.nsp is not None, source

    def __reduce__(self) -> Any:
        return load_again, self.source

    @property
    def max_length(self) -> int:
        """The model's maximum sequence length in tokens."""
        return self.model.config.max_position_embeddings

    def fill_mask(self, text: str | Iterable[str], top: int = 5) -> list[Any]:
        """Predict the token at each `[MASK]` of a text, or of each text of a list.

        In a text longer than `max_length`, each mask is read in a window around it.

        Args:
            text: a text with at least one `[MASK]`, or an iterable of such texts.
            top: the number of candidates for each mask.

        Returns:
            For each mask of a text, its most probable tokens (`MaskCandidate`), most probable
            first; for a list of texts, a list of these.

        Raises:
            InputTypeError: the argument is neither a text nor an iterable of texts.
            BertkitError: the model is not bidirectional, there is no mask in a text, or `top` is
                not between 1 and the vocabulary size.
        """
        if isinstance(text, str):
            return list(self.fill_mask([text], top)[0])
        if self.model.config.direction != "bidirectional":
            raise BertkitError(
                "this model reads left to right: it predicts the next token and was not trained on "
                "masks; use a masked language model"
            )
        if not 1 <= top <= self.tokenizer.size:
            raise BertkitError(f"top must be between 1 and {self.tokenizer.size:,}, got {top}")
        candidates: list[Any] = []
        for chunk in text_chunks(text):
            masked = [self.mask_windows(one, top) for one in chunk]
            for original, prepared in zip(chunk, masked, strict=True):
                if not prepared.windows:
                    raise BertkitError(
                        f"there is no {MASK} in the text {original[:60]!r}; put one where a token "
                        "is missing"
                    )
            candidates += self.mask_candidates(masked)
        return candidates

    def mask_windows(self, text: str, top: int) -> MaskedText:
        """Cut a window of token ids around each `[MASK]` of a text."""
        first, *rest = self.tokenizer.encode_batch(text.split(MASK))
        ids, masks = list(first), []
        for part in rest:
            masks.append(len(ids))
            ids += [self.tokenizer.mask_id, *part]
        room, windows = self.max_length - 2, []
        for mask in masks:
            start = max(0, min(mask - room // 2, len(ids) - room))
            window = self.sequence(ids[start : start + room])
            windows.append(ItemPart((window,), 1 + mask - start))
        return MaskedText(windows, top)

    def mask_candidates(self, texts: Sequence[MaskedText]) -> list[list[list[MaskCandidate]]]:
        """Return the most probable tokens for each text and mask, best first."""
        top, vocabulary = max((text.top for text in texts), default=1), self.tokenizer.vocabulary

        def forward(batch: TaskBatch) -> Tensor:
            logits = self.model(batch.packed, batch.tensors["rows"]).mlm_logits.float()
            # embeddings may be padded with rows
            best = logits.softmax(-1)[:, : len(vocabulary)].topk(top)
            return torch.stack([best.indices.float(), best.values], dim=1)

        def mask_rows(
            parts: Sequence[ItemPart], packed_index: np.ndarray, starts: np.ndarray
        ) -> tuple[dict[str, Tensor], dict[str, int]]:
            rows = starts + [part.target for part in parts]
            return {"rows": torch.from_numpy(rows[np.argsort(packed_index)])}, {}

        windows = [window for text in texts for window in text.windows]
        outputs = iter(self.run(forward, windows, mask_rows))
        return [
            [
                [
                    MaskCandidate(vocabulary[int(token)], float(chance))
                    for token, chance in next(outputs)[0].T[: text.top]
                ]
                for _ in text.windows
            ]
            for text in texts
        ]

    def next_sentence(self, text: Any, following: str | None = None) -> Any:
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
        pairs: list[Any] = list(text) if is_ordered(text) else [None]
        if not all(
            isinstance(pair, tuple | list) and [*map(type, pair)] == [str, str] for pair in pairs
        ):
            raise InputTypeError(
                "next_sentence() takes two texts, or a list of pairs of texts, not "
                f"{short_repr(text)}"
            )
        sequences = []
        for pair in pairs:
            first, second = self.tokenizer.encode_batch(pair)
            if not first or not second:
                raise BertkitError("next-sentence needs two texts, but one of them has no tokens")
            sequences.append(self.pair_sequence(first, second))
        if lost := sum(pair.cut for pair in sequences):
            warn_caller(f"pairs cut to the tokens around their boundary: {lost:,}")
        return self.next_probabilities(sequences)

    def pair_sequence(self, first: Sequence[int], second: Sequence[int]) -> PairSequence:
        """Return a pair as one sequence; a long one keeps the tokens next to its boundary."""
        if self.model.config.type_vocab_size == 1:
            raise BertkitError(ONE_SEGMENT)
        room = self.max_length - 3
        cut = len(first) + len(second) > room
        if cut:
            size = min(len(second), max(room // 2, room - len(first)))
            first, second = first[-(room - size) :], second[:size]
        return PairSequence(ItemPart((self.sequence(first, second),)), cut)

    def next_probabilities(self, pairs: Sequence[PairSequence]) -> list[float]:
        """Return, for each pair, the probability that the second text follows the first."""

        def forward(batch: TaskBatch) -> Tensor:
            logits = self.model(batch.packed, batch.packed.first_tokens[:0].long()).nsp_logits
            assert logits is not None
            return logits.float().softmax(-1)[:, :1]

        return [float(row[0, 0]) for row in self.run(forward, [pair.part for pair in pairs])]

    def hidden(self, texts: Iterable[str]) -> list[Tensor]:
        """Return each text's last hidden states, (tokens, width), including [CLS] and [SEP].

        Raises:
            InputTypeError: the argument is one text, or an item is not a text.
            BertkitError: a text is longer than `max_length`.
        """
        states: list[Tensor] = []
        for chunk in text_chunks(texts):
            parts = [ItemPart((self.sequence(ids),)) for ids in self.tokenizer.encode_batch(chunk)]
            rows = self.run(lambda batch: self.model.encoder(batch.packed), parts, per_token=True)
            states += map(torch.from_numpy, rows)
        return states

    def score(self, texts: Iterable[str], *, method: str = "auto") -> list[SentenceScore]:
        """Return the (pseudo-)log-likelihood of sentences, for example to choose among hypotheses.

        They are computed in the predictor's precision; load the model in fp32 to compare sentences
        that are almost equally likely.

        Args:
            texts: a list of sentences.
            method: "within-word-l2r", "pll" or "causal" (see `bertkit.predict.scoring`); "auto" is
                within-word-l2r for a masked language model, else causal.

        Returns:
            For each sentence its tokens and their log-probabilities in nats; `score` is their sum.

        Raises:
            InputTypeError: the argument is one text, or an item is not a text.
            BertkitError: the method does not fit the model, or a sentence is longer than
                `max_length`.
        """
        method = choose_method(method, self.model.config)
        ids = self.scorer.encode(list(checked_texts(texts)))
        for number, sentence in enumerate(ids):
            if len(sentence) > self.scorer.max_tokens:
                raise BertkitError(
                    f"sentence {number} has {len(sentence):,} tokens, and the model reads at most "
                    f"{self.scorer.max_tokens:,}; split it",
                    code="too-long",
                )
        vocabulary = self.tokenizer.vocabulary
        return [
            SentenceScore([vocabulary[i] for i in sentence], numbers.tolist())
            for sentence, numbers in zip(ids, self.scorer.score(ids, method), strict=True)
        ]

    def sequence(self, first: Sequence[int], second: Sequence[int] | None = None) -> Encoded:
        """Return token ids with special tokens as a sequence."""
        ids = [self.tokenizer.cls_id, *first, self.tokenizer.sep_id]
        more = [] if second is None else [*second, self.tokenizer.sep_id]
        return Encoded(np.array([*ids, *more], dtype=np.int32), len(ids))

    def run(
        self,
        forward: Any,
        parts: Sequence[ItemPart],
        targets: Any = None,
        *,
        per_token: bool = False,
    ) -> list[np.ndarray]:
        """Return the outputs of `run_model` for sequences."""
        threads = self.scorer.threads
        return run_model(
            forward, parts, self.device, per_token=per_token, threads=threads, targets=targets
        )


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
    folder = model_folder(Path(directory))
    model = load_pretraining_model(folder)
    order = pair_objective(read_details(folder), model.config) == "sop"
    where, source = choose_device(device), (directory, device, precision)
    tokenizer = Tokenizer.load(folder)
    return Predictor(model, tokenizer, where, precision, order=order, source=source)


def load_again(directory: Path | str, device: str, precision: str) -> Predictor:
    """Load a predictor that was pickled."""
    return load_pretrained(directory, device=device, precision=precision)
