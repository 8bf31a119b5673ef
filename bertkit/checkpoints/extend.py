"""Domain words for an existing model: new pieces, and rows of its matrices for them.

A word that the vocabulary breaks into pieces becomes a piece of its own, either behind the others
("append") or in the place of an [unused] entry, of which Google's vocabularies keep some for this
purpose. Its embedding and its decoder bias begin as the means of those of the pieces it had before,
so that the model reads and predicts it at once as something like them. Nothing else changes.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.checkpoints.families import family_names
from bertkit.checkpoints.pretrained import PretrainedWeights, model_folder
from bertkit.checkpoints.save import check_free, model_details
from bertkit.checkpoints.weights import write_tensors
from bertkit.errors import BertkitError, nearest
from bertkit.files import new_folder, read_object, write_json
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.features import HEAD_FILE
from bertkit.model.heads import PretrainingModel
from bertkit.model.pooling import read_modules
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
"""Both under BERT's names; the decoder's matrix is the embeddings."""


@dataclass(frozen=True)
class Extension:
    """A vocabulary with new pieces, and what they were before."""

    tokenizer: Tokenizer
    """With the new pieces."""
    ids: Sequence[int]
    """Of the new pieces, in the order of the words."""
    before: Sequence[Sequence[int]]
    """For each new piece, the ids it had: of its pieces, or of [UNK]."""

    @property
    def words(self) -> list[str]:
        """The new pieces."""
        return [self.tokenizer.vocabulary[index] for index in self.ids]


def extend_vocabulary(
    tokenizer: Tokenizer,
    words: Iterable[tuple[str, str]],
    counts: TextCounts,
    *,
    place: str = "append",
) -> Extension:
    """A vocabulary in which each word is one piece.

    A word is normalised as the tokenizer would. "##" before it makes a piece for the inside of
    words. What cannot become a piece, or is one already, is left out and counted.

    Args:
        tokenizer: the vocabulary as it is.
        words: each with the place it comes from, for the counts.
        counts: is brought up to date with what was left out.
        place: "append", or "unused" to take the place of [unused] entries, in their order.

    Raises:
        BertkitError: no word is new, or there are fewer [unused] entries than words.
    """
    check_choice("--place", place, POSITIONS)
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
        slots = [index for index, piece in enumerate(vocabulary) if UNUSED.fullmatch(piece)]
        if len(slots) < len(new):
            raise BertkitError(
                f"the vocabulary has {len(slots)} [unused] entries for {len(new)} new words; "
                "give fewer words, or --place append"
            )
        ids = slots[: len(new)]
        for index, piece in zip(ids, new, strict=True):
            vocabulary[index] = piece
    else:
        vocabulary += new
    extended = with_vocabulary(tokenizer, vocabulary)
    return Extension(extended, ids, [cut_into_tokens(piece, tokenizer) for piece in new])


def with_vocabulary(tokenizer: Tokenizer, vocabulary: Sequence[str]) -> Tokenizer:
    """Other pieces under the same rules."""
    return Tokenizer.from_vocabulary(
        vocabulary,
        lowercase=tokenizer.lowercase,
        compat=tokenizer.compat,
        max_word_characters=tokenizer.max_word_characters,
        strip_accents=tokenizer.strip_accents,
    )


def check_choice(flag: str, value: str, known: Sequence[str]) -> None:
    """Refuse a value that is not known."""
    if value not in known:
        raise BertkitError(f"unknown {flag} '{value}'{nearest(value, known)}")


def choose_new_tokens(
    tokenizer: Tokenizer, words: Iterable[tuple[str, str]], counts: TextCounts
) -> Iterator[str]:
    """The words that become pieces, each once; the others are counted."""
    known, found = set(tokenizer.vocabulary), dict[str, str]()
    for text, source in words:
        piece, reason = as_new_token(text, tokenizer)
        if piece in known or piece in found:
            reason = "word that is one piece already, or listed twice"
        if reason:
            counts.note(reason, source)
        else:
            found[piece] = source
    trial = with_vocabulary(tokenizer, [*SPECIAL_TOKENS, *found])
    for piece, source in found.items():
        if piece.startswith(CONTINUATION) or trial.encode(piece).pieces == [piece]:
            yield piece
        else:  # "hf" has other rules on rare characters
            counts.note("word that the model's own tokenizer reads otherwise", source)


def as_new_token(text: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """A word as a piece, and why it cannot be one ("" if it can)."""
    prefix = CONTINUATION if text.startswith(CONTINUATION) else ""
    rules = {"lowercase": tokenizer.lowercase, "strip_accents": tokenizer.strip_accents}
    found = split_words(text.removeprefix(CONTINUATION), **rules)
    if not found:
        return "", "blank line"
    if len(found) > 1:
        return "", "text that normalisation makes several words of"
    if prefix and stands_alone(found[0][0]):
        return "", "piece for the inside of words that always stands alone"
    if len(found[0]) > tokenizer.max_word_characters:
        return "", f"word of more than {tokenizer.max_word_characters} characters"
    return prefix + found[0], ""


def cut_into_tokens(piece: str, tokenizer: Tokenizer) -> list[int]:
    """The ids that a piece is cut into: the longest fitting piece first, as WordPiece does."""
    if not piece.startswith(CONTINUATION):
        return tokenizer.encode_batch([piece])[0]
    ids = {known: index for index, known in enumerate(tokenizer.vocabulary)}
    rest, found = piece.removeprefix(CONTINUATION), []
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
    """The tensors of a model with the rows of the new pieces; all others are the same objects.

    Args:
        tensors: under BERT's names, as `read_start` gives them; the masked-language head may be
            absent.
        extension: from `extend_vocabulary`.
        config: the sizes of the model as it is.
        init: "mean" of the pieces before, or "random": truncated normal with the deviation of
            the model's initialisation, seed 0, biases 0.

    Raises:
        BertkitError: `init` is unknown.
    """
    check_choice("--init", init, STARTS)
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


def extend_model(
    start: PretrainedWeights,
    extension: Extension,
    out: Path,
    *,
    place: str = "append",
    init: str = "mean",
) -> None:
    """Write the model directory with the new pieces; the one it comes from stays as it is.

    Args:
        start: the model as it is, with whatever heads it has.
        extension: from `extend_vocabulary` with the model's tokenizer.
        out: made, or replaced where it is a model directory already.
        place: how the extension was made, for `bertkit.json`.
        init: see `extend_tensors`.

    Raises:
        BertkitError: the directory holds something else, is the model's own, or cannot be written,
            or the model has a second encoder.
    """
    check_out(start.path, out)
    source = model_folder(start.path)
    if (source / "beside").is_dir():
        raise BertkitError(
            f"{start.path} has a second encoder beside it, which would keep the old vocabulary; "
            "extend both models that it was made of, and tune them again"
        )
    tensors = extend_tensors(start.tensors, extension, start.config, init=init)
    config = foreign_config(start, source) | {"vocab_size": len(tensors[EMBEDDINGS])}
    made = {
        "made_by": "bertkit vocab extend",
        "from": str(start.path),
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
        named = family_names(tensors, family, bare=only_encoder)
        write_tensors(folder / "model.safetensors", named, format="pt")
        extension.tokenizer.save(folder)
        write_json(folder / "bertkit.json", details)
        if (source / HEAD_FILE).is_file():
            shutil.copyfile(source / HEAD_FILE, folder / HEAD_FILE)
        copy_modules(source, folder)


def copy_modules(source: Path, folder: Path) -> None:
    """What a directory of sentence-transformers says of pooling, prompts and lengths."""
    if not (source / "modules.json").is_file():
        return
    named = ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json")
    for name in (*named, *read_modules(source).values()):
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
        elif name and (source / name).is_dir():
            shutil.copytree(source / name, folder / name)


def check_out(model: Path, out: Path) -> None:
    """Refuse a folder that holds something else than a model, or the model itself."""
    if out.resolve() in (model_folder(model).resolve(), model.resolve()):
        raise BertkitError(f"--out {out} is the model itself; choose another folder")
    check_free(out)


def foreign_config(start: PretrainedWeights, source: Path) -> dict[str, Any]:
    """The `config.json` of a model, or what it would be for one of Google's checkpoints."""
    if (source / "config.json").is_file():
        config = read_object(source / "config.json")
        changed = {name: "float32" for name in ("dtype", "torch_dtype") if name in config}
        return config | changed  # all weights are written in fp32
    with torch.device("meta"):
        network = PretrainingModel if DECODER_BIAS in start.tensors else Encoder
        return model_details(network(start.config), start.config, {})
