"""Features of texts: the hidden states of a model (paper section 5.3).

A text that is longer than the model's maximum length is read through overlapping windows. The
vector of a token comes from the window where it has the most context; those of [CLS] and [SEP],
which are in every window, are averaged over the windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertkit.errors import NOT_FINITE, BertkitError, nearest
from bertkit.model.encoder import Encoder
from bertkit.model.features import check_layers, encoder_features
from bertkit.tasks.data import with_unknown
from bertkit.tasks.task import (
    NOTHING_UNKNOWN,
    Item,
    ItemPart,
    Items,
    Unknown,
    check_outputs,
    make_batch,
    prediction_tokens,
    split_outputs,
    split_parts,
)
from bertkit.tasks.windows import check_stride, check_window_lengths, context_windows, surround
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import autocast
from bertkit.training.memory import in_halves

POOLING = ("tokens", "cls", "mean")
FEATURE_DTYPES = ("float32", "float16")


@dataclass(frozen=True, kw_only=True)
class Extraction:
    """Settings that determine the features of each text."""

    layers: str = "last"
    """embeddings, second-to-last, last, sum, sum-last-four, concat-last-four, or, for a model that
    was fine-tuned with them, weighted-sum or weighted-sum-last-four."""
    pooling: str = "tokens"
    """tokens: a vector for each token, including [CLS] and [SEP]; cls: the vector of [CLS]; mean:
    the mean over all tokens."""
    dtype: str = "float32"
    """float32, or float16 for files of half the size."""
    max_length: int = 0
    """Tokens per window, including [CLS] and [SEP]; 0 for the model's maximum."""
    stride: int = 0
    """Tokens from the start of one window to the next; 0 for 3/4 of the tokens that fit."""

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            BertkitError: a setting is unknown or out of range; the message names it.
        """
        for field, known in (("pooling", POOLING), ("dtype", FEATURE_DTYPES)):
            value = getattr(self, field)
            if value not in known:
                raise BertkitError(f"--{field} cannot be '{value}'{nearest(value, known)}")
        check_window_lengths(self.max_length, self.stride)


class TextFeatures(NamedTuple):
    """The vectors of a text."""

    vectors: np.ndarray
    """(rows, width) float32 or float16: one row per token, or a single row if pooled."""
    tokens: list[str]
    """The tokens: "[CLS]", ..., "[SEP]"; empty if pooled."""
    offsets: list[tuple[int, int]]
    """Each token's half-open character span in the text; (0, 0) for [CLS] and [SEP]."""
    windows: int
    unknown: Unknown = NOTHING_UNKNOWN
    """Counts of tokens that are not in the vocabulary."""


class WindowedText(NamedTuple):
    """A text split into windows that fit the model."""

    pieces: list[str]
    """The tokens of the text, with [CLS] and [SEP]."""
    offsets: list[tuple[int, int]]
    parts: list[ItemPart]
    """The windows; the target of each: indices of the tokens taken from it, and its first token."""
    unknown: Unknown
    """Counts of tokens that are not in the vocabulary."""

    @property
    def tokens(self) -> int:
        """The number of tokens in all windows."""
        return sum(part.tokens for part in self.parts)


WHOLE = Extraction()


def extract(
    encoder: Encoder,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    extraction: Extraction = WHOLE,
    *,
    mix: Tensor | None = None,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
) -> Iterator[TextFeatures]:
    """Return the features of each text, in order; memory depends on a batch and the longest text.

    Args:
        encoder: the encoder, on the device; it is put into evaluation mode.
        tokenizer: the encoder's tokenizer.
        texts: the texts, which may have any length or be empty.
        extraction: the layers, the pooling and the window lengths.
        mix: the weights of a weighted sum; see `combine`.
        device: the device to compute on.
        precision: "fp32" or "bf16".

    Raises:
        BertkitError: the layers are unknown, the model lacks them or their weights are missing, or
            the pooling or windows do not fit the model.
    """
    device = torch.device(device)
    layers, positions = extraction.layers, encoder.config.max_position_embeddings
    check_layers(layers, encoder.config)
    if extraction.pooling == "cls" and encoder.config.direction == "left_to_right":
        raise BertkitError(
            "in a left-to-right model [CLS] attends to no other token; choose --pooling mean"
        )
    max_length = extraction.max_length or positions
    if not 3 <= max_length <= positions:
        raise BertkitError(
            f"windows of {max_length} tokens do not fit the model's {positions} positions; choose "
            f"3 to {positions}"
        )
    check_stride(extraction.stride, max_length)
    encoder.eval()

    @torch.inference_mode()
    def states(parts: Sequence[ItemPart]) -> list[np.ndarray]:
        batch = make_batch(parts).to(device)
        with autocast(device, precision):
            vectors = encoder_features(encoder, batch.packed, layers, mix)
        rows = vectors.float().cpu().numpy()
        return list(split_outputs(rows, batch, parts, pooled=False))

    def states_that_fit(parts: Sequence[ItemPart]) -> list[np.ndarray]:
        groups = split_parts(parts, prediction_tokens(device))
        return [rows for group in groups for piece in in_halves(states, group) for rows in piece]

    windowed = (split_text(text, tokenizer, max_length, extraction.stride) for text in texts)
    groups = split_parts(windowed, prediction_tokens(device))
    return chain.from_iterable(compute(group, states_that_fit, extraction) for group in groups)


def split_text(text: str, tokenizer: Tokenizer, max_length: int, stride: int) -> WindowedText:
    """Return `[CLS] text [SEP]`, split into as many windows as needed; an empty text needs one."""
    encoding = tokenizer.encode(text)
    ids = np.array(encoding.ids, dtype=np.int32)
    parts = []
    for first, end, answered in context_windows(np.ones_like(ids), max_length - 2, stride):
        window = surround(ids[first:end], None, tokenizer)
        parts.append(ItemPart((window,), (answered, first)))
    vocabulary = tokenizer.vocabulary
    tokens = [vocabulary[tokenizer.cls_id], *encoding.tokens, vocabulary[tokenizer.sep_id]]
    unknown = unknown_of_text(parts, tokenizer.unk_id)
    return WindowedText(tokens, [(0, 0), *encoding.offsets, (0, 0)], parts, unknown)


def unknown_of_text(parts: list[ItemPart], unknown: int) -> Unknown:
    """Count the tokens with the id `unknown` in the windows of one text."""
    return with_unknown(Items([Item(0, parts)], 1, 0, {}), unknown).unknown


def compute(
    texts: Sequence[WindowedText],
    states: Callable[[Sequence[ItemPart]], list[np.ndarray]],
    extraction: Extraction,
) -> Iterator[TextFeatures]:
    """Yield the features of a group of texts, in order."""
    parts = [part for text in texts for part in text.parts]
    outputs = iter(states(parts))
    for text in texts:
        vectors = join_windows(text, [next(outputs) for _ in text.parts])
        if extraction.pooling == "tokens":
            tokens, offsets = text.pieces, text.offsets
        else:
            tokens, offsets = [], []
            pooled = vectors[0] if extraction.pooling == "cls" else vectors.mean(axis=0)
            vectors = pooled[None]
        check_outputs(vectors)
        with np.errstate(over="ignore"):
            rows = vectors.astype(extraction.dtype)
        if not np.isfinite(rows).all():
            raise BertkitError(
                f"a hidden state is larger than {np.finfo(rows.dtype).max:,.0f}, which "
                f"{extraction.dtype} cannot hold; choose --dtype float32",
                code=NOT_FINITE,
            )
        yield TextFeatures(rows, tokens, offsets, len(text.parts), text.unknown)


def join_windows(text: WindowedText, outputs: Sequence[np.ndarray]) -> np.ndarray:
    """Combine the outputs of a text's windows into one array, (tokens, width)."""
    if len(outputs) == 1:
        return outputs[0]
    vectors = np.empty((len(text.pieces), outputs[0].shape[1]), dtype=np.float32)
    for part, rows in zip(text.parts, outputs, strict=True):
        answered, first = part.target
        vectors[1 + answered] = rows[1 + answered - first]
    vectors[0] = np.mean([rows[0] for rows in outputs], axis=0)
    vectors[-1] = np.mean([rows[-1] for rows in outputs], axis=0)
    return vectors
