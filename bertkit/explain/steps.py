"""The steps of an explanation: from text to tokens, to masks, to what the encoder computes.

Tokenization (paper section 3): the steps of `bertkit/tokenizer/normalize.py` one by one, and the
greedy matching of WordPiece (Wu et al. 2016) with everything that it tried. A test compares them
with the tokenizer, which does all of this at once.

Masking (paper A.1): the draws are those of `bertkit/pretraining_data/masking.py`, with the random
number generator of pre-training.

Attention: the kernels of `bertkit/model/attention.py` never hold the weights, so they are computed
here from the query and key of each layer (Vaswani et al. 2017, section 3.2.1). The rest of the
layer is computed from them, and the result is compared with the encoder's own.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
from torch import Tensor

from bertkit.checkpoints.pretrained import recorded_recipe
from bertkit.config import matches_type
from bertkit.model.encoder import Encoder, Layer, activation
from bertkit.predict.pretrained import MASK
from bertkit.pretraining_data.batch import Packed
from bertkit.pretraining_data.masking import MaskingOptions, draw_masks
from bertkit.pretraining_data.rng import MASKS, keyed_rng
from bertkit.shapes import Hidden
from bertkit.tokenizer.files import CONTINUATION
from bertkit.tokenizer.normalize import CLEAN, SPLIT, align_words, clean_text, decompose, is_cjk
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Encoding, Tokenizer

UNCHANGED = "nothing to do"
"""The remark of a step that changes nothing."""


class Stage(NamedTuple):
    """A text after one step of normalisation."""

    name: str
    text: str
    remark: str
    """What the step did, or why it did nothing."""


class Match(NamedTuple):
    """One token of a word, and the longer candidates that were tried before it."""

    token: str
    """"" where no candidate is in the vocabulary."""
    tried: tuple[str, ...]


class TokenizedWord(NamedTuple):
    """A normalised word and its tokens."""

    word: str
    start: int
    """Its half-open span of characters in the raw text."""
    end: int
    tokens: tuple[str, ...]
    """The tokens that the tokenizer gives."""
    matches: tuple[Match, ...]
    """How the tokens were found; empty where the word is longer than the tokenizer takes."""


def normalize(text: str, tokenizer: Tokenizer) -> list[Stage]:
    """Return a text after each step of `normalize.py`; after the last, spaces separate words."""
    cleaned = "".join(char if is_cjk(char) else clean_text(char) or "" for char in text)
    stages = [Stage("raw", text, f"{len(text):,} characters")]

    def step(name: str, new: str, unused: str = "") -> None:
        old = stages[-1].text
        stages.append(Stage(name, new, unused or ("changed" if new != old else UNCHANGED)))

    step("cleaned", cleaned)
    step("ideographs split", cleaned.translate(CLEAN))
    current = stages[-1].text
    if tokenizer.lowercase:
        step("lower-cased", current.lower())
    else:
        step("lower-cased", current, "skipped: the model is cased")
    current = stages[-1].text
    if tokenizer.strip_accents:
        decomposed = decompose(current)
        step("accents stripped", "".join(c for c in decomposed if unicodedata.category(c) != "Mn"))
    else:
        step("accents stripped", current, "skipped: the model keeps accents")
    words = stages[-1].text.translate(SPLIT).split()
    remark = f"{len(words):,} words"
    if tokenizer.compat == "hf":
        remark += " (this model uses transformers' rules, which differ on rare characters)"
    stages.append(Stage("split", " ".join(words), remark))
    return stages


def tokenize_words(text: str, encoding: Encoding, tokenizer: Tokenizer) -> list[TokenizedWord]:
    """Return the words of an encoded text, each with its tokens and how they were found."""
    known = set(tokenizer.vocabulary)
    aligned = align_words(
        text, lowercase=tokenizer.lowercase, strip_accents=tokenizer.strip_accents
    )
    words = {(word.starts[0], word.ends[-1]): word.text for word in aligned}
    groups: list[list[int]] = []
    for index, token in enumerate(encoding.tokens):
        if groups and token.startswith(CONTINUATION) and token != CONTINUATION:
            groups[-1].append(index)
        else:
            groups.append([index])
    found = []
    for group in groups:
        tokens = tuple(encoding.tokens[index] for index in group)
        span = encoding.offsets[group[0]][0], encoding.offsets[group[-1]][1]
        unknown = tokens == (SPECIAL_TOKENS[1],)
        joined = tokens[0] + "".join(token.removeprefix(CONTINUATION) for token in tokens[1:])
        word = words.get(span, text[slice(*span)]) if unknown else joined
        whole = tokens[0] in SPECIAL_TOKENS and not unknown  # "hf" keeps "[SEP]" in a text whole
        matches = () if whole else match(word, known, tokenizer.max_word_characters)
        found.append(TokenizedWord(word, *span, tokens, matches))
    return found


def match(word: str, vocabulary: Collection[str], max_length: int) -> tuple[Match, ...]:
    """Match greedily, longest candidate first; the last match is empty if the word is unknown.

    A normalised word of more than `max_length` characters is not tried at all.
    """
    matches: list[Match] = []
    begin = 0
    while begin < len(word) <= max_length:
        prefix, tried = CONTINUATION if begin else "", []
        for end in range(len(word), begin, -1):
            candidate = prefix + word[begin:end]
            if candidate in vocabulary:
                break
            tried.append(candidate)
        else:
            return (*matches, Match("", tuple(tried)))
        matches.append(Match(candidate, tuple(tried)))
        begin = end
    return tuple(matches)


def printable(text: str) -> str:
    r"""Escape characters that cannot be seen or printed, such as \\n, \\xa0 or \\u200b."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


class Token(NamedTuple):
    """One position of the input sequence."""

    token: str
    id: int
    segment: int
    text_index: int
    """0 for the first text, 1 for the second, -1 for [CLS] and [SEP]."""
    start: int
    """The half-open span of characters in that text."""
    end: int
    shown: str
    """The token that the network reads here."""


class Target(NamedTuple):
    """A position that pre-training asks about."""

    position: int
    token: str
    """The true token."""
    shown: str
    """The token in its place."""
    kind: str
    """"[MASK]", "random" or "kept"."""


def recorded_masking(details: Mapping[str, Any]) -> MaskingOptions:
    """Return the masking of the model's recipe, or the paper's where `bertkit.json` has none."""
    given = recorded_recipe(details, "masking")
    known = get_type_hints(MaskingOptions)
    return MaskingOptions(
        **{
            name: value
            for name, value in given.items()
            if name in known and matches_type(value, known[name])
        }
    )


def mask(
    tokenizer: Tokenizer,
    texts: tuple[str, ...],
    options: MaskingOptions,
    seed: int,
    *,
    masked: bool,
) -> tuple[list[Token], list[Target]]:
    """Return the input sequence and its targets, drawn as for a pre-training example.

    The maximum number of targets in a recipe is chosen so that it does not bind; it is left out.
    With `masked`, the network reads what is shown at the targets.
    """
    encoded = tokenizer.encode_pair(*texts)
    ids, vocabulary = np.array(encoded.ids), tokenizer.vocabulary
    rng = keyed_rng(seed, MASKS)
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


EMBEDDING_PARTS = ("token", "position", "segment", "sum", "after LayerNorm")
"""The vectors of an embedding, in the order of `Inside.embeddings`."""


@dataclass(frozen=True)
class Inside:
    """The inner state of an encoder for one sequence."""

    embeddings: np.ndarray
    """(tokens, 5) norms of the vectors of `EMBEDDING_PARTS`."""
    attention: np.ndarray
    """(layers, heads, tokens, tokens) the weight of each token (last) for each token."""
    norms: np.ndarray
    """(layers + 1, tokens) norms of the hidden states, those after the embeddings first."""
    last: Tensor
    """(tokens, width) the last hidden states."""
    difference: float
    """The largest difference of hidden states by these weights from the encoder's own."""

    @cached_property
    def entropy(self) -> np.ndarray:
        """(layers, heads, tokens) of each token's weights, in nats."""
        weights = self.attention
        return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


@torch.inference_mode()
def look_inside(encoder: Encoder, packed: Packed) -> Inside:
    """Run one sequence without dropout and keep the intermediate results.

    Raises:
        BertkitError: the sequence is longer than the model has positions.
    """
    states = encoder.layers_of(packed)
    weights, difference = [], 0.0
    for layer, (before, after) in zip(encoder.stack, pairwise(states), strict=True):
        assert isinstance(layer, Layer)
        own_weights, value = attention_weights(layer, before)
        again = finish(layer, before, own_weights, value)
        difference = max(difference, float((again - after).abs().max()))
        weights.append(own_weights)
    parts = [
        encoder.word_embeddings(packed.ids),
        encoder.position_embeddings(packed.position_ids),
        encoder.segment_embeddings(packed.segment_ids),
    ]
    parts += [torch.stack(parts).sum(0), encoder.embeddings(packed)]
    return Inside(
        embeddings=torch.stack([part.norm(dim=-1) for part in parts], dim=1).numpy(),
        attention=torch.stack(weights).numpy(),
        norms=torch.stack(states).norm(dim=-1).numpy(),
        last=states[-1],
        difference=difference,
    )


def attention_weights(layer: Layer, hidden: Hidden) -> tuple[Tensor, Tensor]:
    """Return the attention weights of one sequence, and the values that they weigh.

    Args:
        layer: a layer in evaluation mode.
        hidden: (tokens, width) the layer's input.

    Returns:
        Weights (heads, tokens, tokens) and values (tokens, heads, head width).
    """
    config = layer.config
    projected = layer.query_key_value(hidden).unflatten(-1, (3, config.num_attention_heads, -1))
    query, key, value = projected.unbind(1)
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    seen = torch.ones(len(hidden), len(hidden), dtype=torch.bool)
    if config.direction == "left_to_right":
        seen = seen.tril()
    return scores.masked_fill(~seen, -math.inf).softmax(dim=-1), value


def finish(layer: Layer, hidden: Hidden, weights: Tensor, value: Tensor) -> Hidden:
    """Compute the layer's output, (tokens, width), from attention weights."""
    attended = torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
    hidden = layer.attention_norm(layer.attention_output(attended) + hidden)
    expanded = activation(layer.intermediate(hidden), layer.config)
    return layer.output_norm(layer.output(expanded) + hidden)
