"""Extension of an existing model's vocabulary by domain words, each with its own embedding.

A word that the tokenizer splits into several tokens becomes one token, either at the end of the
vocabulary ("append") or in place of an [unused] entry, which Google's vocabularies reserve for this
purpose. Its embedding and its decoder bias are initialised with the means of those of its previous
tokens, so that the model treats it like these from the start. Nothing else changes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.checkpoints.card import Card, derived_card, origin_text, write_card
from bertkit.checkpoints.families import family_names
from bertkit.checkpoints.hub import hub_commit
from bertkit.checkpoints.pretrained import PretrainedWeights, model_folder, model_name
from bertkit.checkpoints.save import check_free, model_details
from bertkit.checkpoints.weights import write_tensors
from bertkit.errors import BertkitError, check_known
from bertkit.files import new_folder, read_object, write_json
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.features import HEAD_FILE
from bertkit.model.heads import PretrainingModel
from bertkit.model.pooling import read_max_length, read_modules, read_pooling, write_pooling
from bertkit.text.lines import TextCounts
from bertkit.tokenizer.files import CONTINUATION
from bertkit.tokenizer.normalize import split_words
from bertkit.tokenizer.train import stands_alone
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer

POSITIONS = ("append", "unused")
STARTS = ("mean", "random")
UNUSED = re.compile(r"\[unused\d+\]")
EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
DECODER_BIAS = "cls.predictions.bias"
"""BERT's names of the two tensors that grow; the decoder's matrix is the embeddings."""


@dataclass(frozen=True)
class Extension:
    """An extended vocabulary, and how the old one tokenized its new tokens."""

    tokenizer: Tokenizer
    """The tokenizer with the new tokens."""
    ids: Sequence[int]
    """The ids of the new tokens, in the order of the words."""
    before: Sequence[Sequence[int]]
    """For each new token, the ids that the old tokenizer gives it; they may be [UNK]'s."""

    @property
    def words(self) -> list[str]:
        """The new tokens, in the order of `ids`."""
        return [self.tokenizer.vocabulary[index] for index in self.ids]


def extend_tokenizer(
    tokenizer: Tokenizer,
    words: Iterable[tuple[str, str]],
    counts: TextCounts,
    *,
    place: str = "append",
) -> Extension:
    """Return a vocabulary in which each word is one token.

    Words, which are given with their locations ("file:line"), are normalised by the tokenizer's
    rules. A word that starts with "##" becomes a continuation token. Words that cannot become
    tokens, or are tokens already, are skipped and added to `counts`. With `place` "unused", the new
    tokens replace [unused] entries, in their order.

    Raises:
        BertkitError: no word is new, or there are fewer [unused] entries than new words.
    """
    check_known("placement", place, POSITIONS)
    new = list(choose_new_tokens(tokenizer, words, counts))
    if not new:
        why = "; ".join(f"{reason}: {times:,}" for reason, times in sorted(counts.skipped.items()))
        raise BertkitError(
            "there is nothing to add: no word is new to the vocabulary"
            + (f" ({why})" if why else "")
        )
    vocabulary = list(tokenizer.vocabulary)
    ids = list(range(tokenizer.size, tokenizer.size + len(new)))
    if place == "unused":
        slots = [index for index, token in enumerate(vocabulary) if UNUSED.fullmatch(token)]
        if len(slots) < len(new):
            raise BertkitError(
                f"the vocabulary has {len(slots)} [unused] entries for {len(new)} new words; "
                "give fewer words, or --place append"
            )
        ids = slots[: len(new)]
        for index, token in zip(ids, new, strict=True):
            vocabulary[index] = token
    else:
        vocabulary += new
    extended = with_vocabulary(tokenizer, vocabulary)
    return Extension(extended, ids, [cut_into_tokens(token, tokenizer) for token in new])


def with_vocabulary(tokenizer: Tokenizer, vocabulary: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with another vocabulary and the same rules."""
    return Tokenizer.from_vocabulary(
        vocabulary,
        lowercase=tokenizer.lowercase,
        compat=tokenizer.compat,
        max_word_characters=tokenizer.max_word_characters,
        strip_accents=tokenizer.strip_accents,
    )


def choose_new_tokens(
    tokenizer: Tokenizer, words: Iterable[tuple[str, str]], counts: TextCounts
) -> Iterator[str]:
    """Yield each word that becomes a new token once, and count the others."""
    known, found = set(tokenizer.vocabulary), dict[str, str]()
    for text, source in words:
        token, reason = as_new_token(text, tokenizer)
        if token in known or token in found:
            reason = "word that is one token already, or listed twice"
        if reason:
            counts.note(reason, source)
        else:
            found[token] = source
    trial = with_vocabulary(tokenizer, [*SPECIAL_TOKENS, *found])
    for token, source in found.items():
        if token.startswith(CONTINUATION) or trial.encode(token).tokens == [token]:
            yield token
        else:  # tokenizers in mode "hf" treat rare characters differently
            counts.note("word that the model's own tokenizer reads differently", source)


def as_new_token(text: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return a word as a token, and the reason why it cannot be one ("" if it can)."""
    prefix = CONTINUATION if text.startswith(CONTINUATION) else ""
    rules = {"lowercase": tokenizer.lowercase, "strip_accents": tokenizer.strip_accents}
    found = split_words(text.removeprefix(CONTINUATION), **rules)
    if not found:
        return "", "blank line"
    if len(found) > 1:
        return "", "text that normalisation splits into several words"
    if prefix and stands_alone(found[0][0]):
        return "", "continuation token that is always a word by itself"
    if len(found[0]) > tokenizer.max_word_characters:
        return "", f"word of more than {tokenizer.max_word_characters} characters"
    return prefix + found[0], ""


def cut_into_tokens(token: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids into which a token is split by greedy longest match, as in WordPiece."""
    if not token.startswith(CONTINUATION):
        return tokenizer.encode_batch([token])[0]
    ids = {known: index for index, known in enumerate(tokenizer.vocabulary)}
    rest, found = token.removeprefix(CONTINUATION), []
    while rest:
        ends = range(len(rest), 0, -1)
        end = next((end for end in ends if CONTINUATION + rest[:end] in ids), None)
        if end is None:
            return [tokenizer.unk_id]
        found.append(ids[CONTINUATION + rest[:end]])
        rest = rest[end:]
    return found


def extend_tensors(
    tensors: Mapping[str, Tensor], extension: Extension, config: ModelConfig, *, init: str = "mean"
) -> dict[str, Tensor]:
    """Return a model's tensors with rows for the new tokens; unchanged tensors are not copied.

    The tensors have BERT's names, and the masked-language head may be absent. The new rows are the
    "mean" of those of the previous tokens, or "random": drawn from a truncated normal distribution
    with the model's `initializer_range` and seed 0, with biases of 0.

    Raises:
        BertkitError: `init` is unknown.
    """
    check_known("initialisation", init, STARTS)
    generator = torch.Generator().manual_seed(0)
    extended = dict(tensors)
    for name in (EMBEDDINGS, DECODER_BIAS):
        if name not in tensors:
            continue
        old = tensors[name]
        rows = max(len(old), extension.tokenizer.size)
        new = old.new_zeros(rows, *old.shape[1:])
        new[: len(old)] = old
        if init == "mean":
            for index, before in zip(extension.ids, extension.before, strict=True):
                new[index] = old[list(before)].mean(dim=0)
        else:
            new[list(extension.ids)] = 0
            if name == EMBEDDINGS:
                drawn = torch.empty(len(extension.ids), old.shape[1])
                deviation = config.initializer_range
                nn.init.trunc_normal_(
                    drawn, 0, deviation, -2 * deviation, 2 * deviation, generator=generator
                )
                new[list(extension.ids)] = drawn.to(new.dtype)
        extended[name] = new
    return extended


def write_extended(
    start: PretrainedWeights,
    extension: Extension,
    out: Path,
    *,
    place: str = "append",
    init: str = "mean",
) -> None:
    """Write a model directory with the new tokens; the original one is not changed.

    An existing model directory is replaced. The arguments of `extend_tokenizer` and
    `extend_tensors`, `place` and `init`, are recorded in `bertkit.json`.

    Raises:
        BertkitError: `out` holds something other than a model, is the model itself or cannot be
            written, or the model has a second encoder.
    """
    check_out(start.path, out)
    source = model_folder(start.path)
    if (source / "beside").is_dir():
        raise BertkitError(
            f"{start.path} has a second encoder, which would keep the old vocabulary; extend the "
            "two pre-trained models instead, and fine-tune them again"
        )
    tensors = extend_tensors(start.tensors, extension, start.config, init=init)
    config = foreign_config(start, source) | {"vocab_size": len(tensors[EMBEDDINGS])}
    made = {
        "made_by": "bertkit vocab extend",
        "from": hub_commit(start.path) or model_name(start.path.resolve()),
        "weights_and_vocabulary": start.digest,
        "place": place,
        "init": init,
        "words": extension.words,
    }
    details = dict(start.details)
    details["extended"] = [*details.get("extended", ()), made]
    with new_folder(out) as folder:
        write_json(folder / "config.json", config)
        only_encoder = all(name.startswith("bert.") for name in tensors)
        family = str(config.get("model_type", "bert"))
        [architecture, *_] = config.get("architectures") or [""]
        named = family_names(tensors, family, str(architecture), bare=only_encoder)
        write_tensors(folder / "model.safetensors", named, format="pt")
        limit, positions = read_max_length(source, {}), start.config.max_position_embeddings
        extension.tokenizer.save(folder, min(limit or positions, positions))
        write_json(folder / "bertkit.json", details)
        if (source / HEAD_FILE).is_file():
            shutil.copyfile(source / HEAD_FILE, folder / HEAD_FILE)
        if source != start.path and (start.path / "modules.json").is_file():
            write_pooling(folder, read_pooling(start.path)[1], start.config)
        elif (source / "modules.json").is_file():
            copy_modules(source, folder)
        write_card(folder, extended_card(start, source, extension), replaced=out)


def extended_card(start: PretrainedWeights, source: Path, extension: Extension) -> Card:
    """Return the card of the original, without scores, which were measured before the extension."""
    card = derived_card(start.path, source, start.config, start.tokenizer)
    left = ("model-index", "metrics")
    metadata = {name: value for name, value in card.metadata.items() if name not in left}
    measured = ("Scores", "Export")
    sections = {name: body for name, body in card.sections.items() if name not in measured}
    added = (
        f"`bertkit vocab extend` added {len(extension.words):,} words to the vocabulary of "
        f"{origin_text(start.path)}. Their embeddings have not been trained yet."
    )
    return replace(card, metadata=metadata, sections={**sections, "Vocabulary": added})


def copy_modules(source: Path, folder: Path) -> None:
    """Copy sentence-transformers' files about modules of any kind, prompts and lengths."""
    folders = dict.fromkeys(place for _, place in read_modules(source, encoder_alone=True))
    named = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
    for name in (*named, *folders):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
        elif name and (source / name).is_dir():
            shutil.copytree(source / name, folder / name)


def check_out(model: Path, out: Path) -> None:
    """Raise a BertkitError if `out` is the model itself or holds something other than a model."""
    if out.resolve() in (model_folder(model).resolve(), model.resolve()):
        raise BertkitError(f"--out {out} is the model itself; choose another folder")
    check_free(out)


def foreign_config(start: PretrainedWeights, source: Path) -> dict[str, Any]:
    """Return a model's `config.json`, or an equivalent one for a Google checkpoint."""
    if (source / "config.json").is_file():
        config = read_object(source / "config.json")
        changed = {name: "float32" for name in ("dtype", "torch_dtype") if name in config}
        return config | changed  # all weights are written in fp32
    with torch.device("meta"):
        network = PretrainingModel if DECODER_BIAS in start.tensors else Encoder
        return model_details(network(start.config), start.config, {}, start.tokenizer.pad_id)
