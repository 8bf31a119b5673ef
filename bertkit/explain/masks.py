"""The input sequence of one example and what pre-training would ask of it (paper A.1).

The draws are those of `bertkit/examples/masking.py`, with the generator of pre-training.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np

from bertkit.examples.generator import MASKS, generator
from bertkit.examples.masking import MaskingOptions, draw_masks
from bertkit.predict.predictor import MASK
from bertkit.tokens.tokenizer import Tokenizer


class Token(NamedTuple):
    """A place of the input sequence."""

    piece: str
    id: int
    segment: int
    text: int
    """0 of the first text, 1 of the second, -1 of neither: [CLS] or [SEP]."""
    start: int
    """Its half-open span of characters in that text."""
    end: int
    seen: str
    """The piece that the network reads here."""


class Target(NamedTuple):
    """A place that pre-training asks about."""

    position: int
    piece: str
    shown: str
    """The piece in its place."""
    kind: str
    """"[MASK]", "random" or "kept"."""


def masking_of(details: Mapping[str, Any]) -> MaskingOptions:
    """How the model was pre-trained, where `bertkit.json` says so; else the paper's way."""
    given = (details.get("recipe") or {}).get("masking") or {}
    known = {field.name for field in fields(MaskingOptions)}
    return MaskingOptions(**{name: value for name, value in given.items() if name in known})


def mask(
    tokenizer: Tokenizer,
    texts: tuple[str, ...],
    options: MaskingOptions,
    seed: int,
    *,
    masked: bool,
) -> tuple[list[Token], list[Target]]:
    """The input sequence and its targets, drawn as for an example of pre-training.

    Recipes also have a greatest number of targets, made so that it does not bind; it is left out.

    Args:
        tokenizer: of the model.
        texts: one or two.
        options: how to mask.
        seed: of the draw.
        masked: whether the network reads what is shown at the targets.
    """
    encoded = tokenizer.encode_pair(*texts)
    ids, vocabulary = np.array(encoded.ids), tokenizer.vocabulary
    rng = generator(seed, MASKS)
    candidates = np.flatnonzero(np.array(encoded.text_index) >= 0)
    continuation, mask_id = tokenizer.continuation, tokenizer.mask_id
    chosen, shown = draw_masks(ids, candidates, continuation, len(ids), options, mask_id, rng)
    targets = []
    for position, new in zip(chosen.tolist(), shown.tolist(), strict=True):
        old = encoded.ids[position]
        kind = MASK if new == tokenizer.mask_id else "kept" if new == old else "random"
        targets.append(Target(position, vocabulary[old], vocabulary[new], kind))
    read = {target.position: target.shown for target in targets} if masked else {}
    spans = zip(encoded.ids, encoded.segment_ids, encoded.text_index, encoded.offsets, strict=True)
    tokens = [
        Token(vocabulary[i], i, segment, text, *span, read.get(position, vocabulary[i]))
        for position, (i, segment, text, span) in enumerate(spans)
    ]
    return tokens, targets


def ids_of(tokens: list[Token], tokenizer: Tokenizer) -> list[int]:
    """The ids that the network reads."""
    ids = {piece: index for index, piece in enumerate(tokenizer.vocabulary)}
    return [ids[token.seen] for token in tokens]
