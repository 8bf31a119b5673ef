"""Predictions of pre-trained models: masked tokens, next sentences and hidden states.

`load_pretrained` takes any directory that `bertkit.checkpoints.huggingface` can read: a bertkit
run's `model/`, or a Hugging Face BERT.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch

from bertkit.checkpoints.huggingface import load_pretraining_model
from bertkit.checkpoints.pretrained import model_folder, read_details
from bertkit.errors import BertkitError, InputTypeError
from bertkit.model.encoder import ONE_SEGMENT, check_vocabulary
from bertkit.model.heads import PretrainingModel
from bertkit.predict.embeddings import text_chunks
from bertkit.predict.engine import check_outputs
from bertkit.predict.likelihood import SentenceScore, SentenceScorer, choose_method
from bertkit.pretraining_data.batch import Packed, pack
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import choose_device

MASK = "[MASK]"


class MaskCandidate(NamedTuple):
    """A predicted token for a mask, and its probability."""

    token: str
    probability: float


class Predictor:
    """A pre-trained model with its tokenizer, in evaluation mode.

    Args:
        model: the model with its pre-training heads.
        tokenizer: the tokenizer with which the model was trained.
        device: the device to compute on.
        order: whether the sentence-pair head was trained for sentence-order prediction.
    """

    def __init__(
        self,
        model: PretrainingModel,
        tokenizer: Tokenizer,
        device: torch.device,
        *,
        order: bool = False,
    ) -> None:
        check_vocabulary(model.config, tokenizer.size)
        self.order = order
        self.model = model.to(device).eval()
        self.tokenizer = tokenizer
        self.device = device

    @property
    def max_length(self) -> int:
        """The model's maximum sequence length in tokens."""
        return self.model.config.max_position_embeddings

    @torch.inference_mode()
    def fill_mask(self, text: str, top: int = 5) -> list[list[MaskCandidate]]:
        """Predict the token at each `[MASK]` of a text.

        In a text longer than `max_length`, each mask is read in a window around it.

        Args:
            text: a text with at least one `[MASK]`.
            top: the number of candidates for each mask.

        Returns:
            For each mask, its most probable tokens, most probable first.

        Raises:
            InputTypeError: the argument is not one text.
            BertkitError: the model is not bidirectional, there is no mask in the text, or `top` is
                not between 1 and the vocabulary size.
        """
        if not isinstance(text, str):
            raise InputTypeError(f"fill_mask() takes one text, not {text!r:.40}")
        if self.model.config.direction != "bidirectional":
            raise BertkitError(
                f"this model reads {self.model.config.direction.replace('_', ' ')}: it predicts "
                "adjacent tokens and was not trained on masks; use a masked language model"
            )
        if not 1 <= top <= self.tokenizer.size:
            raise BertkitError(f"top must be between 1 and {self.tokenizer.size:,}, got {top}")
        windows = self.mask_windows(text)
        if not windows:
            raise BertkitError(
                f"there is no {MASK} in the text {text[:60]!r}; put one where a token is missing"
            )
        batch = self._pack([window for window, _ in windows])
        starts = batch.cu_seqlens[:-1].long()
        inside = torch.tensor([place for _, place in windows], device=self.device)
        logits = self.model(batch, starts + inside).mlm_logits[:, : self.tokenizer.size]
        check_outputs(logits.float().cpu().numpy())
        best = logits.float().softmax(-1).topk(top)
        vocabulary = self.tokenizer.vocabulary
        return [
            [MaskCandidate(vocabulary[i], p) for i, p in zip(row_ids, row, strict=True)]
            for row_ids, row in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    @torch.inference_mode()
    def next_sentence(self, text: str, following: str) -> float:
        """Return the probability that `following` really follows `text` (paper, task 2).

        If together they exceed `max_length`, the model reads the tokens next to the boundary: the
        end of the first text and the start of the second.

        Raises:
            BertkitError: the model has no next-sentence head, or a text has no tokens.
        """
        if self.model.nsp is None or self.order:
            learned = "which of two texts comes first" if self.order else "nothing about pairs"
            raise BertkitError(
                f"this model has learned {learned}, not whether a text follows another; use one "
                "that was pre-trained with next-sentence prediction"
            )
        first, second = self.tokenizer.encode(text).ids, self.tokenizer.encode(following).ids
        if not first or not second:
            raise BertkitError("next-sentence needs two texts, but one of them has no tokens")
        ids, segments = self.joint(first, second)
        batch = self._pack([ids], [segments])
        none = torch.zeros(0, dtype=torch.int64, device=self.device)
        logits = self.model(batch, none).nsp_logits
        check_outputs(logits.float().cpu().numpy())
        return float(logits.float().softmax(-1)[0, 0])

    def mask_windows(self, text: str) -> list[tuple[list[int], int]]:
        """Return, for each `[MASK]`, the ids around it with [CLS] and [SEP], and its position."""
        first, *rest = self.tokenizer.encode_batch(text.split(MASK))
        ids, masks = list(first), []
        for part in rest:
            masks.append(len(ids))
            ids += [self.tokenizer.mask_id, *part]
        found = [window_around(ids, mask, self.max_length - 2) for mask in masks]
        return [(self._surround(window), place + 1) for window, place in found]

    def joint(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the ids and segments of a pair; a long one keeps the tokens next to its boundary.

        Raises:
            BertkitError: the model has only one segment.
        """
        if self.model.config.type_vocab_size == 1:
            raise BertkitError(ONE_SEGMENT)
        room = self.max_length - 3
        if len(first) + len(second) > room:
            size = min(len(second), max(room // 2, room - len(first)))
            first, second = first[-(room - size) :], second[:size]
        ids = [*self._surround(first), *second, self.tokenizer.sep_id]
        return ids, [0] * (len(first) + 2) + [1] * (len(second) + 1)

    @torch.inference_mode()
    def hidden(self, texts: Iterable[str]) -> list[torch.Tensor]:
        """Return each text's last hidden states, (tokens, width), including [CLS] and [SEP].

        Args:
            texts: a list of texts.

        Raises:
            InputTypeError: the argument is one text, or an item is not a text.
            BertkitError: a text is longer than `max_length`.
        """
        texts = [text for chunk in text_chunks(texts) for text in chunk]
        batch = self._pack([self._surround(self.tokenizer.encode(text).ids) for text in texts])
        return list(self.model.encoder(batch).float().cpu().split(batch.lengths))

    def score(self, texts: Iterable[str], *, method: str = "auto") -> list[SentenceScore]:
        """Return the (pseudo-)log-likelihood of sentences, for example to choose among hypotheses.

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
        sentences = [text for chunk in text_chunks(texts) for text in chunk]
        ids = self._scorer.encode(sentences)
        for number, one in enumerate(ids):
            if len(one) > self._scorer.max_tokens:
                raise BertkitError(
                    f"sentence {number} has {len(one):,} tokens, and the model reads at most "
                    f"{self._scorer.max_tokens:,}; split it",
                    code="too-long",
                )
        vocabulary = self.tokenizer.vocabulary
        return [
            SentenceScore([vocabulary[i] for i in one], numbers.tolist())
            for one, numbers in zip(ids, self._scorer.score(ids, method), strict=True)
        ]

    @cached_property
    def _scorer(self) -> SentenceScorer:
        """A copy of the model, prepared for scoring sentences in fp32."""
        return SentenceScorer(copy.deepcopy(self.model), self.tokenizer, self.device, "fp32")

    def _surround(self, ids: Sequence[int]) -> list[int]:
        return [self.tokenizer.cls_id, *ids, self.tokenizer.sep_id]

    def _pack(
        self, sequences: Sequence[Sequence[int]], segments: Sequence[Sequence[int]] | None = None
    ) -> Packed:
        return pack(sequences, segments).to(self.device)


def window_around(ids: Sequence[int], place: int, size: int) -> tuple[Sequence[int], int]:
    """Return at most `size` ids around a position, and the position within them."""
    start = max(0, min(place - size // 2, len(ids) - size))
    return ids[start : start + size], place - start


def load_pretrained(directory: Path | str, *, device: str = "auto") -> Predictor:
    """Load a pre-trained model for prediction.

    Args:
        directory: the model or run directory.
        device: the device to compute on: "auto", "cpu", "cuda", ...

    Raises:
        BertkitError: the directory has no BERT with a masked-language head, or it is damaged.
    """
    directory = model_folder(Path(directory))
    model = load_pretraining_model(directory)
    recipe = read_details(directory).get("recipe")
    objectives = recipe.get("objectives") if isinstance(recipe, dict) else None
    albert = "sop" if model.config.share_layers else "nsp"  # if nothing is recorded
    known = objectives if isinstance(objectives, dict) else {}
    order = known.get("pair", albert) == "sop"
    return Predictor(model, Tokenizer.load(directory), choose_device(device), order=order)
