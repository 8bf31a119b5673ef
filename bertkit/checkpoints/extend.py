"""Add words to the vocabulary of a model: those of a list, or those that a text calls for.

A word that the tokenizer splits into several tokens becomes one token at the end of the vocabulary.
Its embedding and its decoder bias are initialised with the means of those of its previous tokens,
so that the model treats it like these from the start. Nothing else changes.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertkit.checkpoints.card import derived_card, origin_text, write_card
from bertkit.checkpoints.names import FAMILIES, file_tensors
from bertkit.checkpoints.names.bert import BERT
from bertkit.checkpoints.pretrained import (
    PretrainedWeights,
    model_folder,
    read_pretrained,
)
from bertkit.checkpoints.save import check_free, model_details
from bertkit.checkpoints.sentence_transformers import (
    read_max_length,
    read_modules,
    read_pooling,
    write_pooling,
)
from bertkit.checkpoints.weights import write_tensors
from bertkit.console import Console, console_or_new
from bertkit.errors import BertkitError
from bertkit.files import from_home, new_folder, read_object, write_json
from bertkit.model.encoder import Encoder
from bertkit.model.heads import PretrainingModel
from bertkit.processes import open_executor
from bertkit.text.lines import TextCounts, describe_skipped, plain_lines
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


@dataclass(frozen=True)
class Extension:
    """An extended vocabulary, and how the old one tokenized its new tokens."""

    tokenizer: Tokenizer
    """The tokenizer with the new tokens at its end."""
    before: Sequence[Sequence[int]]
    """For each new token, the ids that the old tokenizer gives it; they may be [UNK]'s."""

    @property
    def words(self) -> Sequence[str]:
        """The new tokens, in the order of their ids."""
        return self.tokenizer.vocabulary[self.tokenizer.size - len(self.before) :]


def extend_vocabulary(
    model: Path | str,
    out: Path | str,
    *,
    words: Sequence[str] | str | Path | None = None,
    text: TextSource | Sequence[str] | None = None,
    count: int | None = None,
    processes: int = 0,
    console: Console | None = None,
) -> Extension:
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

    Raises:
        BertkitError: there is nothing to add, an option is impossible, or `out` holds something
            other than a model.
    """
    out = Path(from_home(out))
    if (words is None) == (not text) or (count is None) == bool(text):
        raise BertkitError("say what to add: either --words FILE or --text PATHS with --count")
    counts = TextCounts()
    start = read_pretrained(Path(model))
    if out.resolve() in (model_folder(start.path).resolve(), start.path.resolve()):
        raise BertkitError(f"--out {out} is the model itself; choose another folder")
    check_free(out)  # before hours of counting
    with console_or_new(console) as shown:
        if count is not None:
            source = TextSource.of(text or ())
            wanted = words_from_text(source, count, start.tokenizer, processes, shown)
        elif isinstance(words, str | Path):
            wanted = list(listed_words(str(words), counts))
        else:
            wanted = [(word, f"words[{index}]") for index, word in enumerate(words or ())]
        extension = extend_tokenizer(start.tokenizer, wanted, counts)
        write_extended(start, extension, out)
        shown.say(*describe_skipped(counts.skipped, counts.examples))
        added = extension.words
        more = ", ..." if len(added) > SHOWN_WORDS else ""
        shown.say(
            f"{out}: {extension.tokenizer.size:,} tokens, {len(added):,} of them new: "
            f"{', '.join(added[:SHOWN_WORDS])}{more}"
        )
    return extension


def listed_words(file: str, counts: TextCounts) -> Iterator[tuple[str, str]]:
    """Yield the words of a file, each with its location ("file:line")."""
    source = one_source(file)
    for number, line in plain_lines(source, counts):
        if line.strip():
            yield line.strip(), f"{source.path}:{number}"


def words_from_text(
    text: TextSource, number: int, tokenizer: Tokenizer, processes: int, console: Console
) -> list[tuple[str, str]]:
    """Return the words of a text that the vocabulary splits, most saved tokens first."""
    skipped = TextCounts().skipped
    options = LearnOptions(cased=not tokenizer.lowercase)
    accents = tokenizer.strip_accents
    with open_executor(processes) as pool:
        counts, _ = count_sources(text, options, skipped, console, pool, accents)
    console.say(*describe_skipped(skipped, {}))
    frequent = {word: times for word, times in counts.items() if times >= MIN_OCCURRENCES}
    chosen = choose_domain_words(tokenizer, frequent, number)
    console.say(
        f"{counts.total():,} words; {len(chosen):,} words with at least {MIN_OCCURRENCES} "
        f"occurrences would save {sum(saved for _, saved in chosen):,} tokens"
    )
    if len(chosen) < number:
        console.say(f"the text has only {len(chosen):,} of the {number:,} requested words")
    return [(word, "--text") for word, _ in chosen]


def extend_tokenizer(
    tokenizer: Tokenizer, words: Iterable[tuple[str, str]], counts: TextCounts
) -> Extension:
    """Return a vocabulary in which each word is one token.

    Words come with their locations and are normalised by the tokenizer's rules. A word that starts
    with "##" becomes a continuation token. Words that cannot become tokens, or are tokens already,
    are skipped and added to `counts`.

    Raises:
        BertkitError: no word is new.
    """
    new = list(choose_new_tokens(tokenizer, words, counts))
    if not new:
        why = "; ".join(f"{reason}: {times:,}" for reason, times in sorted(counts.skipped.items()))
        raise BertkitError(f"there is nothing to add: no word is new to the vocabulary ({why})")
    extended = with_vocabulary(tokenizer, [*tokenizer.vocabulary, *new])
    return Extension(extended, [cut_into_tokens(token, tokenizer) for token in new])


def with_vocabulary(tokenizer: Tokenizer, vocabulary: Sequence[str]) -> Tokenizer:
    """Return a tokenizer with another vocabulary and the same rules."""
    return Tokenizer.from_vocabulary(
        vocabulary,
        lowercase=tokenizer.lowercase,
        strip_accents=tokenizer.strip_accents,
    )


def choose_new_tokens(
    tokenizer: Tokenizer, words: Iterable[tuple[str, str]], counts: TextCounts
) -> Iterator[str]:
    """Yield each word that becomes a new token once, and count the others."""
    known, new = set(tokenizer.vocabulary), dict[str, str]()
    for text, location in words:
        prefix = CONTINUATION if text.startswith(CONTINUATION) else ""
        rules = {"lowercase": tokenizer.lowercase, "strip_accents": tokenizer.strip_accents}
        parts = split_words(text.removeprefix(CONTINUATION), **rules)
        if len(parts) != 1:
            counts.note("text that is not one word after normalisation", location)
        elif len(parts[0]) > MAX_WORD_CHARACTERS:
            counts.note(f"word of more than {MAX_WORD_CHARACTERS} characters", location)
        elif prefix + parts[0] in known or prefix + parts[0] in new:
            counts.note("word that is one token already, or listed twice", location)
        else:
            new[prefix + parts[0]] = location
    trial = with_vocabulary(tokenizer, [*SPECIAL_TOKENS, *new])
    for token, location in new.items():
        if token.startswith(CONTINUATION) or trial.encode(token).tokens == [token]:
            yield token
        else:  # rules for rare characters differ
            counts.note("word that the model's own tokenizer reads differently", location)


def cut_into_tokens(token: str, tokenizer: Tokenizer) -> list[int]:
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


def extend_tensors(tensors: Mapping[str, Tensor], extension: Extension) -> dict[str, Tensor]:
    """Return a model's tensors with rows for the new tokens; unchanged tensors are not copied."""
    extended = dict(tensors)
    first = extension.tokenizer.size - len(extension.before)
    for name in GROWING:
        if name in tensors:
            old = tensors[name]
            new = old.new_zeros(max(len(old), extension.tokenizer.size), *old.shape[1:])
            new[: len(old)] = old
            for index, before in enumerate(extension.before, first):
                new[index] = old[list(before)].mean(dim=0)
            extended[name] = new
    return extended


def write_extended(start: PretrainedWeights, extension: Extension, out: Path) -> None:
    """Write a model directory with the new tokens; an existing model directory is replaced."""
    source = model_folder(start.path)
    tensors = extend_tensors(start.tensors, extension)
    config = source_config(start, source) | {"vocab_size": len(tensors[GROWING[0]])}
    made = {
        "made_by": "bertkit vocab extend",
        "from": start.origin,
        "weights_and_vocabulary": start.digest,
        "words": list(extension.words),
    }
    details = {**start.details, "extended": [*start.details.get("extended", ()), made]}
    card = derived_card(start.path, source, start.config, start.tokenizer)
    summary = (
        f"This is {origin_text(start.path)} with {len(extension.words):,} words added to its "
        "vocabulary, whose embeddings have not been trained yet."
    )
    with new_folder(out) as folder:
        write_json(folder / "config.json", config)
        family = FAMILIES.get(str(config.get("model_type")), BERT)
        [architecture, *_] = config.get("architectures") or [""]
        bare = all(name.startswith("encoder.") for name in tensors)
        named = file_tensors(tensors, family, str(architecture), bare=bare)
        write_tensors(folder / "model.safetensors", named, format="pt")
        limit, positions = read_max_length(source, {}), start.config.max_position_embeddings
        extension.tokenizer.save(folder, min(limit or positions, positions))
        write_json(folder / "bertkit.json", details)
        if source != start.path and (start.path / "modules.json").is_file():
            write_pooling(folder, read_pooling(start.path)[1], start.config)
        elif (source / "modules.json").is_file():
            copy_modules(source, folder)
        write_card(folder, replace(card, summary=summary), replaced=out)


def copy_modules(source: Path, folder: Path) -> None:
    """Copy sentence-transformers' files about modules of any kind, prompts and lengths."""
    named = ["modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"]
    for name in named:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    for _, inside in read_modules(source, encoder_alone=True):
        if inside:
            shutil.copytree(source / inside, folder / inside, dirs_exist_ok=True)


def source_config(start: PretrainedWeights, source: Path) -> dict[str, Any]:
    """Return a model's `config.json`, or an equivalent one for a Google checkpoint."""
    if (source / "config.json").is_file():
        config = read_object(source / "config.json")
        changed = {name: "float32" for name in ("dtype", "torch_dtype") if name in config}
        return config | changed  # all weights are written in fp32
    with torch.device("meta"):
        network = PretrainingModel if "mlm.bias" in start.tensors else Encoder
        return model_details(network(start.config), start.config, {}, start.tokenizer.pad_id)
