"""`bertkit learn`: text → WordPiece vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

from bertkit.files import write_json
from bertkit.text.documents import TextCounts, read_documents
from bertkit.text.lines import describe_skipped
from bertkit.text.sources import find_sources
from bertkit.tokens.learn import learn_vocabulary, measure_vocabulary
from bertkit.tokens.tokenizer import Tokenizer
from bertkit.training.journal import Console

MEASURED_DOCUMENTS = 1000


def learn(
    *paths: str,
    out: Path,
    size: int = 30522,
    cased: bool = False,
    minimum_frequency: int = 2,
    alphabet_limit: int = 1000,
    compat: str = "google",
    format: str = "auto",  # noqa: A002 - the flag's natural name
    column: str = "text",
) -> None:
    """Learn a WordPiece vocabulary from text.

    Parameters
    ----------
    paths
        Files, folders, globs, URLs, or Hugging Face data sets as hf:NAME.
    out
        The folder for vocab.txt, tokenizer.json, tokenizer_config.json and vocabulary.json.
    size
        Pieces, the five special ones included.
    cased
        Keep upper case and accents.
    minimum_frequency
        Rarer pairs are not joined.
    alphabet_limit
        Most single characters kept; text with others becomes [UNK].
    compat
        google: the normalisation of google-research/bert; hf: that of the tokenizers library.
    format
        Of the files; auto looks at names and first lines.
    column
        The column that holds the text, in formats that have columns.
    """
    with Console() as console:
        tokenizer = learn_tokenizer(
            list(paths),
            size,
            console,
            cased=cased,
            minimum_frequency=minimum_frequency,
            alphabet_limit=alphabet_limit,
            compat=compat,
            format=format,
            column=column,
        )
        tokenizer.save(out)
        report = measure_vocabulary(
            tokenizer, islice(documents(paths, format, column, TextCounts()), MEASURED_DOCUMENTS)
        ).as_dict()
        write_json(out / "vocabulary.json", report)
        console.say(
            f"{out}: {tokenizer.size:,} pieces; on the first {MEASURED_DOCUMENTS:,} documents "
            f"{report['fertility']:.3f} pieces a word, {report['unknown_share']:.4%} of words [UNK]"
        )


def documents(
    paths: Sequence[str],
    format: str,  # noqa: A002
    column: str,
    counts: TextCounts,
) -> Iterator[str]:
    """Every document of some sources."""
    for source in find_sources(paths, format=format):
        yield from read_documents(source, counts, column=column)


def learn_tokenizer(
    paths: Sequence[str],
    size: int,
    console: Console,
    *,
    cased: bool = False,
    minimum_frequency: int = 2,
    alphabet_limit: int = 1000,
    compat: str = "google",
    format: str = "auto",  # noqa: A002
    column: str = "text",
) -> Tokenizer:
    """Learn with progress shown; says when the text has too few pieces for the size."""
    counts = TextCounts()

    def show(done: int) -> None:
        console.update({"done": done, "bytes": counts.bytes})

    console.start(None, title="learning", unit="documents")
    vocabulary = learn_vocabulary(
        documents(paths, format, column, counts),
        size,
        lowercase=not cased,
        minimum_frequency=minimum_frequency,
        alphabet_limit=alphabet_limit,
        progress=show,
    )
    console.close()
    for line in describe_skipped(counts.skipped, counts.examples):
        console.say(line)
    if len(vocabulary) < size:
        console.say(
            f"the text yields only {len(vocabulary):,} of the {size:,} pieces asked for; "
            "more text or a lower minimum_frequency gives more"
        )
    return Tokenizer.from_vocabulary(vocabulary, lowercase=not cased, compat=compat)
