"""Add words to the vocabulary of a model: those of a list, or those that a text calls for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from bertkit.checkpoints.extend import (
    POSITIONS,
    STARTS,
    Extension,
    check_out,
    extend_tokenizer,
    write_extended,
)
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.console import Console, console_or_new
from bertkit.errors import BertkitError, check_known
from bertkit.files import from_home
from bertkit.text.documents import TextCounts
from bertkit.text.lines import describe_skipped, plain_lines
from bertkit.text.sources import one_source
from bertkit.tokenizer.learn import LEARN_DEFAULTS, LearnOptions, count_sources
from bertkit.tokenizer.train import choose_domain_words
from bertkit.tokenizer.wordpiece import Tokenizer

SHOWN_WORDS = 12
MIN_OCCURRENCES = 2
"""The minimum number of occurrences of a word that is chosen from text."""


def extend_vocabulary(
    model: Path | str,
    out: Path | str,
    *,
    words: Sequence[str] | str | Path | None = None,
    text: Sequence[str] = (),
    count: int | None = None,
    place: str = "append",
    init: str = "mean",
    processes: int = 0,
    format: str = "auto",  # noqa: A002
    column: str = "text",
    console: Console | None = None,
) -> Extension:
    """Write a copy of a model with words added to its vocabulary, each as one token.

    Args:
        model: a model directory, a run, a Google checkpoint or a model of the hub; it is not
            changed.
        out: the folder to write the complete extended model to.
        words: the words, or a file with one word per line; "##ing" is a token inside words.
        text: files, folders, globs, URLs or "hf:NAME", instead of `words`: the words that save the
            most tokens by becoming one token are added.
        count: the number of words to take from `text`.
        place: "append" after the existing tokens, or "unused" to replace [unused] entries.
        init: the new embeddings: "mean" of the tokens that the word had, or "random".
        processes: the number of processes that count the words of `text`; 0 for one per core.
        format: the format of `text`; "auto" detects it from file names and first lines.
        column: the column of `text` that holds the text, in formats that have columns.
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: there is nothing to add, an option is impossible, or `out` holds something
            other than a model.
    """
    out = Path(from_home(out))
    if (words is None) == (not text) or (count is None) == bool(text):
        raise BertkitError("say what to add: either --words FILE or --text PATHS with --count")
    check_known("placement", place, POSITIONS)
    check_known("initialisation", init, STARTS)
    if count is not None and count < 1:
        raise BertkitError(f"--count must be at least 1, got {count}")
    counts = TextCounts()
    start = read_pretrained(Path(model))
    check_out(start.path, out)  # before hours of counting
    with console_or_new(console) as shown:
        if words is None:
            assert count is not None
            cased = not start.tokenizer.lowercase
            options = replace(
                LEARN_DEFAULTS, cased=cased, processes=processes, format=format, column=column
            )
            wanted = words_from_text(text, count, start.tokenizer, options, shown)
        elif isinstance(words, str | Path):
            wanted = list(listed_words(str(words), counts))
        else:
            wanted = [(word, f"words[{index}]") for index, word in enumerate(words)]
        extension = extend_tokenizer(start.tokenizer, wanted, counts, place=place)
        write_extended(start, extension, out, place=place, init=init)
        shown.say(*describe_skipped(counts.skipped, counts.examples))
        shown.say(describe_words(extension, out))
    return extension


def listed_words(file: str, counts: TextCounts) -> Iterator[tuple[str, str]]:
    """Yield the words of a file, each with its location ("file:line")."""
    source = one_source(file)
    lines = list(plain_lines(source, counts))
    if lines and not lines[-1][1]:
        lines.pop()  # the empty text after the last newline
    for number, line in lines:
        yield line.strip(), f"{source.path}:{number}"


def words_from_text(
    paths: Sequence[str], number: int, tokenizer: Tokenizer, options: LearnOptions, console: Console
) -> list[tuple[str, str]]:
    """Return the words of a text that the vocabulary splits, most saved tokens first."""
    skipped = TextCounts().skipped
    counts, _ = count_sources(paths, console, options, skipped, tokenizer.strip_accents)
    console.say(*describe_skipped(skipped, {}))
    frequent = {word: times for word, times in counts.items() if times >= MIN_OCCURRENCES}
    chosen = choose_domain_words(tokenizer, frequent, number)
    encoded = zip(counts.items(), tokenizer.encode_batch(list(counts)), strict=True)
    lengths = [(times, len(ids), ids == [tokenizer.unk_id]) for (_, times), ids in encoded]
    pieces = sum(times * length for times, length, _ in lengths)
    unknown = sum(times for times, _, lost in lengths if lost)
    console.say(
        f"{counts.total():,} words in {pieces:,} tokens, {unknown:,} words [UNK] (not chosen); "
        f"{len(chosen):,} words with at least {MIN_OCCURRENCES} occurrences would save "
        f"{sum(saved for _, saved in chosen):,} tokens"
    )
    if len(chosen) < number:
        console.say(f"the text has only {len(chosen):,} of the {number:,} requested words")
    return [(word, "--text") for word, _ in chosen]


def describe_words(extension: Extension, out: Path) -> str:
    """Describe the number of added words, and the first of them."""
    words = extension.words
    shown = ", ".join(words[:SHOWN_WORDS]) + (", ..." if len(words) > SHOWN_WORDS else "")
    return f"{out}: {extension.tokenizer.size:,} tokens, {len(words):,} of them new: {shown}"
