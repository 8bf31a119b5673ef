"""`bertkit vocab`: add words to a model's vocabulary, and measure how a vocabulary fits a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import rich.console
from cyclopts import App
from rich.markup import escape
from rich.table import Table

from bertkit.checkpoints.extend import (
    POSITIONS,
    STARTS,
    Extension,
    check_choice,
    check_out,
    extend_model,
    extend_vocabulary,
)
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.cli.learn import LEARN_DEFAULTS, LearnOptions, count_sources, documents
from bertkit.errors import BertkitError
from bertkit.files import write_json
from bertkit.outputs import FILE, REPLACED, TEXT
from bertkit.text.documents import TextCounts
from bertkit.text.lines import describe_skipped, plain_lines
from bertkit.text.sources import find_sources
from bertkit.tokenizer.train import choose_domain_words, measure_vocabulary
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.journal import Console

SHOWN_WORDS = 12
MIN_OCCURRENCES = 2
"""The minimum number of occurrences of a word that is chosen from text."""


def extend_command(
    model: Path,
    *,
    out: Annotated[Path, REPLACED],
    words: Annotated[str | None, TEXT] = None,
    text: Annotated[tuple[str, ...], TEXT] = (),
    count: int | None = None,
    place: str = "append",
    init: str = "mean",
    processes: int = 0,
    format: str = "auto",  # noqa: A002 - the flag's natural name
    column: str = "text",
) -> None:
    """Add words to the vocabulary of an existing model, each as one token.

    Parameters
    ----------
    model
        A model directory, a run directory or a Google checkpoint, which is not changed.
    out
        The folder to write the complete extended model to.
    words
        A file with one word per line (instead of --text); "##ing" is a token inside words.
    text
        Text of the domain: files, folders, globs, URLs, hf:NAME. The words that save the most
        tokens by becoming one token are added.
    count
        The number of words to take from --text.
    place
        append: after the existing tokens; unused: in place of [unused] entries.
    init
        The new embeddings: mean of the tokens that the word had, or random.
    processes
        Processes that count the words of --text; 0 uses one for each core.
    format
        Format of --text; auto detects it from file names and first lines.
    column
        Column of --text that holds the text, in formats that have columns.
    """
    if (words is None) == (not text) or (count is None) == bool(text):
        raise BertkitError("say what to add: either --words FILE or --text PATHS with --count")
    check_choice("--place", place, POSITIONS)
    check_choice("--init", init, STARTS)
    if count is not None and count < 1:
        raise BertkitError(f"--count must be at least 1, got {count}")
    counts = TextCounts()
    start = read_pretrained(model)
    check_out(start.path, out)  # before hours of counting
    with Console() as console:
        if words is not None:
            wanted = list(listed_words(words, counts))
        else:
            assert count is not None
            cased = not start.tokenizer.lowercase
            options = replace(
                LEARN_DEFAULTS, cased=cased, processes=processes, format=format, column=column
            )
            wanted = words_from_text(text, count, start.tokenizer, options, console)
        extension = extend_vocabulary(start.tokenizer, wanted, counts, place=place)
        extend_model(start, extension, out, place=place, init=init)
        for line in describe_skipped(counts.skipped, counts.examples):
            console.say(line)
        console.say(describe_words(extension, out))


def listed_words(file: str, counts: TextCounts) -> Iterator[tuple[str, str]]:
    """Yield the words of a file, each with its location ("file:line")."""
    source, *more = find_sources([file], format="text")
    if more:
        raise BertkitError(f"--words {file} names {1 + len(more)} files; choose one")
    lines = list(plain_lines(source, counts))
    if lines and not lines[-1][1]:
        lines.pop()  # the empty text after the last newline
    for number, line in lines:
        yield line.strip(), f"{source.path}:{number}"


def words_from_text(
    paths: tuple[str, ...],
    number: int,
    tokenizer: Tokenizer,
    options: LearnOptions,
    console: Console,
) -> list[tuple[str, str]]:
    """Return the words of a text that the vocabulary splits, most saved tokens first."""
    skipped = TextCounts().skipped
    counts, _ = count_sources(paths, console, options, skipped, tokenizer.strip_accents)
    for line in describe_skipped(skipped, {}):
        console.say(line)
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


def measure_command(
    tokenizer: Path,
    *paths: Annotated[str, TEXT],
    max_documents: int | None = None,
    json: Annotated[Path | None, FILE] = None,
    format: str = "auto",  # noqa: A002 - the flag's natural name
    column: str = "text",
) -> None:
    """Measure how well a vocabulary fits a text: fertility, [UNK], characters per token.

    Parameters
    ----------
    tokenizer
        A folder made by `bertkit learn`, a model directory, or a vocab.txt.
    paths
        The text to measure, preferably not the text that the vocabulary was learned from.
    max_documents
        The maximum number of documents to measure, from the first on.
    json
        A file to write the report to.
    format
        Format of the files; auto detects it from file names and first lines.
    column
        The column that holds the text, in formats that have columns.
    """
    if max_documents is not None and max_documents < 1:
        raise BertkitError(f"--max-documents must be at least 1, got {max_documents}")
    counts = TextCounts()
    loaded = Tokenizer.load(tokenizer)
    with Console() as console:
        console.start(max_documents, title="measuring", unit="documents")

        def told() -> Iterator[str]:
            for number, text in enumerate(documents(paths, format, column, counts), start=1):
                console.update({"done": number, "bytes": counts.bytes})
                yield text

        report = measure_vocabulary(loaded, islice(told(), max_documents)).as_dict()
        console.close()
        for line in describe_skipped(counts.skipped, counts.examples):
            console.say(line)
    report = {"documents": counts.documents, "vocabulary": loaded.size, **report}
    if json is not None:
        write_json(json, {"tokenizer": str(tokenizer), "paths": list(paths), **report})
    print_report(report, str(tokenizer))


def print_report(report: dict[str, Any], title: str) -> None:
    """Print the report as a table."""
    unknown = ", ".join(f"{word} ({times:,})" for word, times in report["unknown_words"])
    rows = [
        ("documents", f"{report['documents']:,}"),
        ("words", f"{report['words']:,}"),
        ("tokens", f"{report['tokens']:,}"),
        ("tokens per word (fertility)", f"{report['fertility']:.4f}"),
        ("characters per token", f"{report['characters_per_token']:.4f}"),
        ("words that are [UNK]", f"{report['unknown_share']:.4%}"),
        ("most frequent [UNK]", escape(unknown) or "none"),
        ("tokens never used", f"{report['unused_tokens']:,} of {report['vocabulary']:,}"),
    ]
    table = Table("measure", "value", title=escape(title))
    for name, value in rows:
        table.add_row(escape(name), value)
    rich.console.Console().print(table)


vocab_application = App(name="vocab", help="Extend or measure a vocabulary.")
vocab_application.command(extend_command, name="extend")
vocab_application.command(measure_command, name="measure")
