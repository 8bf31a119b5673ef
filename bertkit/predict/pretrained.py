"""Pre-trained models: masked tokens, next sentences, hidden states, and likelihoods of sentences.

A masked language model has no likelihood of a sentence; its pseudo-log-likelihood (Salazar et al.
2020, "Masked Language Model Scoring", section 2.2) is the sum over tokens of the log-probability of
the token if it is masked, for which a sentence of n tokens makes n masked copies. The later tokens
of the same word are masked, too (Kauf and Ivanova 2023, "A Better Way to Do Masked Language Model
Scoring"): they would betray it, and rare words would score too high. A model that reads in one
direction (the ablation in section 5.1 of the BERT paper) has a likelihood, which takes one pass.
[CLS] and [SEP] are read but not scored.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
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
from bertkit.errors import (
    BertkitError,
    InputTypeError,
    checked_texts,
    is_ordered,
    short_repr,
)
from bertkit.model.encoder import ONE_SEGMENT, check_vocabulary
from bertkit.model.heads import PretrainingModel
from bertkit.predict.embeddings import text_chunks
from bertkit.tasks.sequences import choose_mode, prepare_network, run_model
from bertkit.tasks.task import Encoded, ItemPart, TaskBatch, split_parts
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import choose_device

MASK = "[MASK]"
CUT_PAIRS = "pairs cut to the tokens around their boundary"
SCORED_TOKENS = 1 << 20
"""The number of tokens in the masked copies that are in memory at a time."""
HEAD_ROWS = 256
"""The number of positions whose logits over the vocabulary are in memory at a time in a thread."""


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


class SentenceScore(NamedTuple):
    """The log-probability of each token of a sentence, in nats."""

    tokens: list[str]
    log_probabilities: list[float]

    @property
    def score(self) -> float:
        """The sum over all tokens: the sentence's (pseudo-)log-likelihood."""
        return sum(self.log_probabilities)


class Predictor:
    """A pre-trained model with its tokenizer; the model, in fp32, can no longer be trained.

    `order` says that its pair head was trained for sentence-order prediction; `source` loads the
    model again, by which it pickles.
    """

    def __init__(
        self,
        model: PretrainingModel,
        tokenizer: Tokenizer,
        device: torch.device,
        precision: str = "auto",
        *,
        order: bool = False,
        source: Callable[[], Predictor] | None = None,
    ) -> None:
        check_vocabulary(model.config, tokenizer.size)
        self.precision = choose_mode(precision, device)
        self.model, self.tokenizer, self.device = model.to(device).eval(), tokenizer, device
        self.order, self.source = order and model.nsp is not None, source
        if device.type != "cpu" and self.precision == "bf16":
            self.model.to(torch.bfloat16)  # the heads, too, whose decoder is the embeddings
        prepare_network(device, self.model.encoder, self.precision)
        self.run = partial(run_model, device=device, prepared=True)

    def __reduce__(self) -> Any:
        return self.source, ()

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
            candidates += self.mask_candidates([self.mask_windows(item, top) for item in chunk])
        return candidates

    def mask_windows(self, text: str, top: int) -> MaskedText:
        """Cut a window of token ids around each `[MASK]` of a text."""
        if MASK not in text:
            raise BertkitError(
                f"there is no {MASK} in the text {text[:60]!r}; put one where a token is missing"
            )
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

        windows = [window for text in texts for window in text.windows]
        outputs = iter(self.run(forward, windows, targets=read_rows))
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
        sequences, cut = [], 0
        for pair in pairs:
            first, second = self.tokenizer.encode_batch(pair)
            if not first or not second:
                raise BertkitError("next-sentence needs two texts, but one of them has no tokens")
            part, is_cut = self.pair_sequence(first, second)
            sequences.append(part)
            cut += is_cut
        if cut:
            warnings.warn(f"{CUT_PAIRS}: {cut:,}", stacklevel=2)
        return self.next_probabilities(sequences)

    def pair_sequence(self, first: Sequence[int], second: Sequence[int]) -> tuple[ItemPart, bool]:
        """Return a pair, cut around its boundary if it is long, and whether it was cut."""
        if self.model.config.type_vocab_size == 1:
            raise BertkitError(ONE_SEGMENT)
        room = self.max_length - 3
        cut = len(first) + len(second) > room
        if cut:
            size = min(len(second), max(room // 2, room - len(first)))
            first, second = first[-(room - size) :], second[:size]
        return ItemPart((self.sequence(first, second),)), cut

    def next_probabilities(self, pairs: Sequence[ItemPart]) -> list[float]:
        """Return, for each pair, the probability that the second text follows the first."""

        def forward(batch: TaskBatch) -> Tensor:
            logits = self.model(batch.packed, batch.packed.first_tokens[:0].long()).nsp_logits
            assert logits is not None
            return logits.float().softmax(-1)[:, :1]

        return [float(row[0, 0]) for row in self.run(forward, pairs)]

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

    def score(self, texts: Iterable[str]) -> list[SentenceScore]:
        """Return the (pseudo-)log-likelihood of sentences, for example to choose among hypotheses.

        They are computed in the predictor's precision; load the model in fp32 to compare sentences
        that are almost equally likely.

        Args:
            texts: a list of sentences.

        Returns:
            For each sentence its tokens and their log-probabilities in nats; `score` is their sum.

        Raises:
            InputTypeError: the argument is one text, or an item is not a text.
            BertkitError: a sentence is longer than `max_length`.
        """
        ids = self.tokenizer.encode_batch(list(checked_texts(texts)))
        most = self.max_length - 2
        for number, sentence in enumerate(ids):
            if len(sentence) > most:
                raise BertkitError(
                    f"sentence {number} has {len(sentence):,} tokens, and the model reads at most "
                    f"{most:,}; split it",
                    code="too-long",
                )
        vocabulary = self.tokenizer.vocabulary
        scores = self.log_probabilities(list({tuple(sentence): None for sentence in ids}))
        return [
            SentenceScore([vocabulary[i] for i in sentence], scores[tuple(sentence)])
            for sentence in ids
        ]

    def log_probabilities(
        self, sentences: Sequence[tuple[int, ...]]
    ) -> dict[tuple[int, ...], list[float]]:
        """Return the log-probability of each token of different sentences."""
        causal = self.model.config.direction != "bidirectional"

        def cost(ids: tuple[int, ...]) -> int:
            return (1 if causal else len(ids)) * (len(ids) + 2)

        def forward(batch: TaskBatch) -> Tensor:
            rows, wanted = (None if causal else batch.tensors["rows"]), batch.tensors["wanted"]
            states = self.model.encoder(batch.packed, rows)
            words, scores = self.model.encoder.word_embeddings, []
            for part, ids in zip(
                *(torch.split(tensor, HEAD_ROWS) for tensor in (states, wanted)), strict=True
            ):
                logits = self.model.mlm(part, words).float()
                scores.append(logits.log_softmax(-1).gather(1, ids[:, None]))
            return torch.cat(scores)

        scores: dict[tuple[int, ...], list[float]] = {}
        for group in split_parts(sentences, SCORED_TOKENS, cost):
            if causal:
                parts = [ItemPart((self.sequence(ids),)) for ids in group]
            else:
                parts = [part for ids in group for part in self.masked_copies(ids)]
            targets = following_ids if causal else masked_ids
            rows = iter(self.run(forward, parts, targets=targets, per_token=causal))
            for ids in group:
                if causal:
                    scores[ids] = next(rows)[: len(ids), 0].tolist()
                else:
                    scores[ids] = [float(next(rows)[0, 0]) for _ in ids]
        return scores

    def masked_copies(self, ids: Sequence[int]) -> list[ItemPart]:
        """Return a copy for each token, masked with the rest of its word; targets: position, id."""
        whole = self.sequence(ids).ids
        continues = [*self.tokenizer.continuation[whole].tolist(), False]
        copies = []
        for position in range(1, len(ids) + 1):
            copy, end = whole.copy(), position + 1
            while continues[end]:
                end += 1
            copy[position:end] = self.tokenizer.mask_id
            copies.append(ItemPart((Encoded(copy, len(copy)),), (position, int(whole[position]))))
        return copies

    def sequence(self, first: Sequence[int], second: Sequence[int] | None = None) -> Encoded:
        """Return token ids with special tokens as a sequence."""
        ids = [self.tokenizer.cls_id, *first, self.tokenizer.sep_id]
        more = [] if second is None else [*second, self.tokenizer.sep_id]
        return Encoded(np.array([*ids, *more], dtype=np.int32), len(ids))


Tensors = tuple[dict[str, Tensor], dict[str, int]]


def read_rows(parts: Sequence[ItemPart], packed_index: np.ndarray, starts: np.ndarray) -> Tensors:
    """Return the packed row of the token that is read in each sequence; see `make_batch`."""
    rows = starts + [part.target for part in parts]
    return {"rows": torch.from_numpy(rows[np.argsort(packed_index)])}, {}


def masked_ids(parts: Sequence[ItemPart], packed_index: np.ndarray, starts: np.ndarray) -> Tensors:
    """Return the packed row of the scored token of each masked copy, and its id."""
    positions, ids = np.array([part.target for part in parts]).T
    order = np.argsort(packed_index)
    rows = torch.from_numpy((starts + positions)[order])
    return {"rows": rows, "wanted": torch.from_numpy(ids[order])}, {}


def following_ids(
    parts: Sequence[ItemPart], packed_index: np.ndarray, starts: np.ndarray
) -> Tensors:
    """Return the id that follows each packed token in its sequence; for the last, any."""
    ids = [parts[i].sequences[0].ids for i in np.argsort(packed_index)]
    following = np.concatenate([np.roll(row, -1) for row in ids]).astype(np.int64)
    return {"wanted": torch.from_numpy(following)}, {}


def load_pretrained(
    directory: Path | str, *, device: str = "auto", precision: str = "auto"
) -> Predictor:
    """Load a pre-trained model for prediction; the arguments are those of `load`."""
    folder = model_folder(directory)
    model = load_pretraining_model(folder)
    order = pair_objective(read_details(folder), model.config) == "sop"
    where = choose_device(device)
    source = partial(load_pretrained, directory, device=device, precision=precision)
    tokenizer = Tokenizer.load(folder)
    return Predictor(model, tokenizer, where, precision, order=order, source=source)
