"""Add words to the vocabulary of a model, each as one token.

A word that the tokenizer splits into several tokens becomes one token at the end of the vocabulary.
Its embedding and its decoder bias are initialised with the means of those of its previous tokens,
so that the model treats it like these from the start. Nothing else changes.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertkit.checkpoints.names import FAMILIES, file_tensors
from bertkit.checkpoints.pretrained import PretrainedWeights, model_folder, read_pretrained
from bertkit.checkpoints.save import check_free, config_fields, write_tensors
from bertkit.checkpoints.sentence_transformers import tokenizer_limit
from bertkit.errors import BertkitError
from bertkit.files import from_home, new_folder, read_object, write_json
from bertkit.model.encoder import Encoder
from bertkit.model.heads import PretrainingModel
from bertkit.progress import Console, console_or_new
from bertkit.text.documents import TextCounts, describe_skipped, plain_lines
from bertkit.text.sources import one_source
from bertkit.tokenizer.files import MAX_WORD_CHARACTERS, split_words
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer

GROWING = ("encoder.word_embeddings.weight", "mlm.bias")
"""The tensors with a row for each token; the decoder's matrix is the embeddings."""
REWRITTEN = ("*.safetensors", "*.bin", "*.index.json", "*.h5", "*.onnx", "onnx", "openvino", ".*")
"""Files that are not copied from a directory of sentence-transformers."""


def extend_vocabulary(
    model: Path | str,
    words: Sequence[str] | str | Path,
    out: Path | str,
    *,
    console: Console | None = None,
) -> list[str]:
    """Write a copy of a model with words added to its vocabulary, each as one token.

    Args:
        model: a model directory, a run, a Google checkpoint or a model of the hub.
        words: the words, or a file with one word per line.
        out: the folder to write the complete extended model to.
        console: the console for messages; None for a new one.

    Returns:
        The new tokens, in the order of their ids.

    Raises:
        BertkitError: no word is new, or `out` holds something other than a model.
    """
    out, counts = Path(from_home(out)), TextCounts()
    start = read_pretrained(model)
    if out.resolve() in (model_folder(start.path).resolve(), start.path.resolve()):
        raise BertkitError(f"--out {out} is the model itself; choose another folder")
    check_free(out)
    if isinstance(words, str | Path):
        lines = plain_lines(one_source(str(words)), counts)
        wanted = [(line.strip(), f"{words}:{number}") for number, line in lines if line.strip()]
    else:
        wanted = [(word, f"words[{index}]") for index, word in enumerate(words)]
    new = new_tokens(start.tokenizer, wanted, counts)
    write_extended(start, new, out)
    with console_or_new(console) as shown:
        shown.say(*describe_skipped(counts.skipped, counts.examples))
        shown.say(f"{out}: {start.tokenizer.size + len(new):,} tokens, {len(new):,} of them new")
    return new


def new_tokens(
    tokenizer: Tokenizer, words: Sequence[tuple[str, str]], counts: TextCounts
) -> list[str]:
    """Return each (word, location) that becomes a new token, normalised; count the others."""
    known, new = set(tokenizer.vocabulary), dict[str, str]()
    rules = {"lowercase": tokenizer.lowercase, "strip_accents": tokenizer.strip_accents}
    for text, location in words:
        parts = split_words(text, **rules)
        if len(parts) != 1 or len(parts[0]) > MAX_WORD_CHARACTERS:
            counts.note("text that is not one word after normalisation, or too long", location)
        elif parts[0] in known or parts[0] in new:
            counts.note("word that is one token already, or listed twice", location)
        else:
            new[parts[0]] = location
    trial = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *new], **rules)
    for token, location in list(new.items()):  # rules for rare characters differ
        if trial.encode(token).tokens != [token]:
            counts.note("word that the model's own tokenizer reads differently", location)
            del new[token]
    if not new:
        why = "; ".join(f"{reason}: {times:,}" for reason, times in sorted(counts.skipped.items()))
        raise BertkitError(f"there is nothing to add: no word is new to the vocabulary ({why})")
    return list(new)


def extended_tensors(start: PretrainedWeights, new: Sequence[str]) -> dict[str, Tensor]:
    """Return a model's tensors with rows for the new tokens; unchanged tensors are not copied."""
    extended, first = dict(start.tensors), start.tokenizer.size
    before = start.tokenizer.encode_batch(list(new))
    for name in GROWING:
        if name in extended:
            old = extended[name]
            grown = old.new_zeros(max(len(old), first + len(new)), *old.shape[1:])
            grown[: len(old)] = old
            for index, ids in enumerate(before, first):
                grown[index] = old[ids].mean(dim=0)
            extended[name] = grown
    return extended


def write_extended(start: PretrainedWeights, new: Sequence[str], out: Path) -> None:
    """Write a model directory with the new tokens; an existing model directory is replaced."""
    source, old = model_folder(start.path), start.tokenizer
    tokenizer = Tokenizer.from_vocabulary(
        [*old.vocabulary, *new], lowercase=old.lowercase, strip_accents=old.strip_accents
    )
    tensors = extended_tensors(start, new)
    config = source_config(start, source) | {"vocab_size": len(tensors[GROWING[0]])}
    made = {"made_by": "bertkit vocab extend", "from": start.digest, "words": list(new)}
    details = {**start.details, "extended": [*start.details.get("extended", ()), made]}
    if start.hub:
        details["start"] = start.hub
    with new_folder(out) as folder:
        home = folder
        if (start.path / "modules.json").is_file():  # of sentence-transformers
            ignored = shutil.ignore_patterns(*REWRITTEN)
            shutil.copytree(start.path, folder, ignore=ignored, dirs_exist_ok=True)
            home = folder / source.relative_to(start.path)
        write_json(home / "config.json", config)
        [architecture, *_] = config.get("architectures") or [""]
        bare = all(name.startswith("encoder.") for name in tensors)
        family = FAMILIES[config.get("model_type", "bert")]
        named = file_tensors(tensors, family, str(architecture), bare=bare)
        write_tensors(home / "model.safetensors", named, format="pt")
        positions = start.config.max_position_embeddings
        tokenizer.save(home, min(tokenizer_limit(source) or positions, positions))
        write_json(home / "bertkit.json", details)


def source_config(start: PretrainedWeights, source: Path) -> dict[str, Any]:
    """Return a model's `config.json`, or an equivalent one for a Google checkpoint."""
    if (source / "config.json").is_file():
        config = read_object(source / "config.json")
        changed = {name: "float32" for name in ("dtype", "torch_dtype") if name in config}
        return config | changed  # all weights are written in fp32
    with torch.device("meta"):
        network = PretrainingModel if "mlm.bias" in start.tensors else Encoder
        return config_fields(network(start.config), {}, start.tokenizer.pad_id)
