"""`bertkit vocab`: add words to a model's vocabulary, and measure how a vocabulary fits a text."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import rich.console
from cyclopts import App
from rich.markup import escape
from rich.table import Table

from bertkit.checkpoints.extend import extend_vocabulary
from bertkit.cli.options import AnyModel, Column, Format
from bertkit.console import Console
from bertkit.errors import BertkitError
from bertkit.files import check_output, write_json
from bertkit.text.lines import TextCounts, describe_skipped
from bertkit.text.sources import TextSource
from bertkit.tokenizer.learn import documents, measure_vocabulary
from bertkit.tokenizer.wordpiece import Tokenizer


def extend_command(
    model: AnyModel,
    *,
    out: Path,
    words: str | None = None,
    text: tuple[str, ...] = (),
    count: int | None = None,
    processes: int = 0,
    format: Format = "auto",  # noqa: A002 - the flag's natural name
    column: Column = "text",
) -> None:
    """Add words to the vocabulary of an existing model, each as one token.

    Parameters
    ----------
    out
        The folder to write the complete extended model to.
    words
        A file with one word per line (instead of --text); "##ing" is a token inside words.
    text
        Text of the domain: files, folders, globs, URLs, hf:NAME. The words that save the most
        tokens by becoming one token are added.
    count
        The number of words to take from --text.
    processes
        Processes that count the words of --text; 0 uses one for each core.
    """
    extend_vocabulary(
        *(model, out),
        words=words,
        text=TextSource(text, format, column) if text else None,
        count=count,
        processes=processes,
    )


def measure_command(
    tokenizer: Path,
    *paths: str,
    max_documents: int | None = None,
    json: Path | None = None,
    format: Format = "auto",  # noqa: A002 - the flag's natural name
    column: Column = "text",
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
    """
    if max_documents is not None and max_documents < 1:
        raise BertkitError(f"--max-documents must be at least 1, got {max_documents}")
    json = json and check_output(json, paths)
    counts = TextCounts()
    loaded = Tokenizer.load(tokenizer)
    texts = islice(documents(TextSource(paths, format, column), counts), max_documents)
    report = measure_vocabulary(loaded, texts).to_dict()
    with Console() as console:
        console.say(*describe_skipped(counts.skipped, counts.examples))
    report = {"documents": counts.documents, "vocabulary": loaded.size, **report}
    if json is not None:
        write_json(json, {"tokenizer": str(tokenizer), "paths": list(paths), **report})
    unknown = ", ".join(f"{word} ({times:,})" for word, times in report["unknown_words"])
    shown = {
        "documents": f"{report['documents']:,}",
        "words": f"{report['words']:,}",
        "tokens": f"{report['tokens']:,}",
        "tokens per word (fertility)": f"{report['fertility']:.4f}",
        "characters per token": f"{report['characters_per_token']:.4f}",
        "words that are [UNK]": f"{report['unknown_share']:.4%}",
        "most frequent [UNK]": unknown or "none",
        "tokens never used": f"{report['unused_tokens']:,} of {loaded.size:,}",
    }
    table = Table("measure", "value", title=escape(str(tokenizer)))
    for name, value in shown.items():
        table.add_row(escape(name), escape(value))
    rich.console.Console().print(table)


vocab_application = App(name="vocab", help="Extend or measure a vocabulary.")
vocab_application.command(extend_command, name="extend")
vocab_application.command(measure_command, name="measure")
