"""Add words to the vocabulary of a model: those of a list, or those that a text calls for.

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
from bertkit.checkpoints.pretrained import (
    PretrainedWeights,
    hub_commit,
    model_folder,
    read_pretrained,
)
from bertkit.checkpoints.save import check_free, config_fields
from bertkit.checkpoints.sentence_transformers import read_modules, tokenizer_limit
from bertkit.checkpoints.weights import write_tensors
from bertkit.console import Console, console_or_new
from bertkit.errors import BertkitError
from bertkit.files import from_home, new_folder, read_object, write_json
from bertkit.model.encoder import Encoder
from bertkit.model.heads import PretrainingModel
from bertkit.processes import open_executor
from bertkit.text.documents import TextCounts, describe_skipped, plain_lines
from bertkit.text.sources import TextSource, one_source
from bertkit.tokenizer.files import CONTINUATION, MAX_WORD_CHARACTERS
from bertkit.tokenizer.learn import LearnOptions, choose_domain_words, count_sources
from bertkit.tokenizer.normalize import split_words
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer

GROWING = ("encoder.word_embeddings.weight", "mlm.bias")
"""The tensors with a row for each token; the decoder's matrix is the embeddings."""
SHOWN_WORDS = 12
MIN_OCCURRENCES = 2
"""The minimum number of occurrences of a word that is chosen from text."""

LocatedWord = tuple[str, str]
"""A word, and where it stands, such as "words.txt:3"."""


def extend_vocabulary(
    model: Path | str,
    out: Path | str,
    *,
    words: Sequence[str] | str | Path | None = None,
    text: TextSource | Sequence[str] | None = None,
    count: int | None = None,
    processes: int = 0,
    console: Console | None = None,
) -> list[str]:
    """Write a copy of a model with words added to its vocabulary, each as one token.

    Args:
        model: a model directory, a run, a Google checkpoint or a model of the hub; it is not
            changed.
        out: the folder to write the complete extended model to.
        words: the words, or a file with one word per line; "##ing" is a token inside words.
        text: text, or only its paths, instead of `words`: the words that save the most tokens by
            becoming one token are added.
        count: the number of words to take from `text`.
        processes: the number of processes that count the words of `text`; 0 for one per core.
        console: the console for progress; None for a new one.

    Returns:
        The new tokens, in the order of their ids.

    Raises:
        BertkitError: there is nothing to add, an option is impossible, or `out` holds something
            other than a model.
    """
    out = Path(from_home(out))
    if (words is None) == (not text) or (count is None) == bool(text):
        raise BertkitError("say what to add: either --words FILE or --text PATHS with --count")
    start, skipped = read_pretrained(Path(model)), TextCounts()
    if out.resolve() in (model_folder(start.path).resolve(), start.path.resolve()):
        raise BertkitError(f"--out {out} is the model itself; choose another folder")
    check_free(out)  # before hours of counting
    with console_or_new(console) as shown:
        wanted: list[LocatedWord]
        if count is not None:
            source = TextSource.of(text or ())
            wanted = words_from_text(source, count, start.tokenizer, processes, shown)
        elif isinstance(words, str | Path):
            lines = plain_lines(one_source(str(words)), skipped)
            wanted = [(line.strip(), f"{words}:{number}") for number, line in lines if line.strip()]
        else:
            wanted = [(word, f"words[{index}]") for index, word in enumerate(words or ())]
        new = new_tokens(start.tokenizer, wanted, skipped)
        write_extended(start, new, out)
        shown.say(*describe_skipped(skipped.skipped, skipped.examples))
        more = ", ..." if len(new) > SHOWN_WORDS else ""
        shown.say(
            f"{out}: {start.tokenizer.size + len(new):,} tokens, {len(new):,} of them new: "
            f"{', '.join(new[:SHOWN_WORDS])}{more}"
        )
    return new


def words_from_text(
    text: TextSource, number: int, tokenizer: Tokenizer, processes: int, console: Console
) -> list[LocatedWord]:
    """Return the words of a text that the vocabulary splits, most saved tokens first."""
    skipped = TextCounts().skipped
    options = LearnOptions(cased=not tokenizer.lowercase)
    with open_executor(processes) as pool:
        counts, _ = count_sources(text, options, skipped, console, pool, tokenizer.strip_accents)
    console.say(*describe_skipped(skipped, {}))
    frequent = {word: times for word, times in counts.items() if times >= MIN_OCCURRENCES}
    chosen = choose_domain_words(tokenizer, frequent, number)
    console.say(
        f"{counts.total():,} words; {len(chosen):,} of {number:,} words would save "
        f"{sum(saved for _, saved in chosen):,} tokens"
    )
    return [(word, "--text") for word, _ in chosen]


def new_tokens(tokenizer: Tokenizer, words: Sequence[LocatedWord], counts: TextCounts) -> list[str]:
    """Return each word that becomes a new token, normalised; the others are added to `counts`."""
    known, new = set(tokenizer.vocabulary), dict[str, str]()
    rules = {"lowercase": tokenizer.lowercase, "strip_accents": tokenizer.strip_accents}
    for text, location in words:
        prefix = CONTINUATION if text.startswith(CONTINUATION) else ""
        parts = split_words(text.removeprefix(CONTINUATION), **rules)
        if len(parts) != 1:
            counts.note("text that is not one word after normalisation", location)
        elif len(parts[0]) > MAX_WORD_CHARACTERS:
            counts.note(f"word of more than {MAX_WORD_CHARACTERS} characters", location)
        elif prefix + parts[0] in known or prefix + parts[0] in new:
            counts.note("word that is one token already, or listed twice", location)
        else:
            new[prefix + parts[0]] = location
    trial = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *new], **rules)
    for token, location in list(new.items()):  # rules for rare characters differ
        if not token.startswith(CONTINUATION) and trial.encode(token).tokens != [token]:
            counts.note("word that the model's own tokenizer reads differently", location)
            del new[token]
    if not new:
        why = "; ".join(f"{reason}: {times:,}" for reason, times in sorted(counts.skipped.items()))
        raise BertkitError(f"there is nothing to add: no word is new to the vocabulary ({why})")
    return list(new)


def previous_ids(token: str, tokenizer: Tokenizer) -> list[int]:
    """Return the ids into which a token is split by greedy longest match, as in WordPiece."""
    if not token.startswith(CONTINUATION):
        return tokenizer.encode_batch([token])[0]
    ids = {known: index for index, known in enumerate(tokenizer.vocabulary)}
    rest, pieces = token.removeprefix(CONTINUATION), []
    while rest:
        ends = range(len(rest), 0, -1)
        end = next((end for end in ends if CONTINUATION + rest[:end] in ids), None)
        if end is None:
            return [tokenizer.unk_id]
        pieces.append(ids[CONTINUATION + rest[:end]])
        rest = rest[end:]
    return pieces


def extended_tensors(start: PretrainedWeights, new: Sequence[str]) -> dict[str, Tensor]:
    """Return a model's tensors with rows for the new tokens; unchanged tensors are not copied."""
    extended, first = dict(start.tensors), start.tokenizer.size
    for name in GROWING:
        if name in extended:
            old = extended[name]
            grown = old.new_zeros(max(len(old), first + len(new)), *old.shape[1:])
            grown[: len(old)] = old
            for index, token in enumerate(new, first):
                grown[index] = old[previous_ids(token, start.tokenizer)].mean(dim=0)
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
    made = {
        "made_by": "bertkit vocab extend",
        "weights_and_vocabulary": start.digest,
        "words": list(new),
    }
    details = {**start.details, "extended": [*start.details.get("extended", ()), made]}
    if commit := hub_commit(start.path):
        details["start"] = commit
    with new_folder(out) as folder:
        home = folder
        if (start.path / "modules.json").is_file():
            copy_modules(start.path, folder)
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


def copy_modules(source: Path, folder: Path) -> None:
    """Copy sentence-transformers' files about modules of any kind, prompts and lengths."""
    for path in (source / "modules.json", *source.glob("*sentence*.json")):
        shutil.copyfile(path, folder / path.name)
    for name, inside in read_modules(source, encoder_alone=True):
        if inside and name != "Transformer":
            shutil.copytree(source / inside, folder / inside, dirs_exist_ok=True)
        elif inside:
            (folder / inside).mkdir()
            for path in (source / inside).glob("*sentence*.json"):
                shutil.copyfile(path, folder / inside / path.name)


def source_config(start: PretrainedWeights, source: Path) -> dict[str, Any]:
    """Return a model's `config.json`, or an equivalent one for a Google checkpoint."""
    if (source / "config.json").is_file():
        config = read_object(source / "config.json")
        changed = {name: "float32" for name in ("dtype", "torch_dtype") if name in config}
        return config | changed  # all weights are written in fp32
    with torch.device("meta"):
        network = PretrainingModel if "mlm.bias" in start.tensors else Encoder
        return config_fields(network(start.config), {}, start.tokenizer.pad_id)
