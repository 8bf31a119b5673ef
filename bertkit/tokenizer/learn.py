"""Learn a WordPiece vocabulary from files, with progress, and weigh languages against each other.

Google did not publish its program. The merges are those of Wu et al. (2016), section 4.1; the
smoothing of languages is that of multilingual BERT.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bertkit.config import as_json
from bertkit.console import Console, console_or_new
from bertkit.errors import BertkitError
from bertkit.files import SIGNS, check_output, write_json
from bertkit.processes import worker_count
from bertkit.text.documents import TextCounts, read_documents
from bertkit.text.lines import describe_skipped
from bertkit.text.sources import find_sources, text_paths
from bertkit.tokenizer.count import count_words, smoothing_weights, weigh_counts
from bertkit.tokenizer.files import check_compat
from bertkit.tokenizer.train import check_settings, learn_from_counts, measure_vocabulary
from bertkit.tokenizer.wordpiece import Tokenizer

MEASURED_DOCUMENTS = 1000


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """The settings with which a vocabulary is learned, in addition to its text and size."""

    criterion: str = "frequency"
    """Which pair to merge next: frequency (the most frequent one) or likelihood (the one that
    increases the likelihood of the text most: WordPiece as published)."""
    smoothing: float = 1.0
    """The exponent S of exponentially smoothed sampling, as for multilingual BERT (0.7): each path
    is one language, and its share p of all words becomes p**S, divided by the sum of all p**S."""
    cased: bool = False
    """Keep upper case and accents."""
    min_frequency: int = 2
    """The minimum frequency of a pair to be merged."""
    max_alphabet: int = 1000
    """The maximum number of single characters to keep; words with other characters become [UNK]."""
    max_distinct_words: int | None = None
    """The maximum number of distinct words in memory; beyond it the rarest ones are dropped."""
    processes: int = 0
    """The number of counting processes; 0 means one per core. It does not affect the result."""
    compat: str = "google"
    """google: the normalisation of google-research/bert; hf: that of the tokenizers library."""
    format: str = "auto"
    """The format of the files; auto detects it from names and first lines."""
    column: str = "text"
    """The column that holds the text, in formats that have columns."""


LEARN_DEFAULTS = LearnOptions()


def learn_tokenizer(
    paths: Sequence[str],
    out: Path | str,
    size: int = 30522,
    options: LearnOptions = LEARN_DEFAULTS,
    *,
    console: Console | None = None,
) -> Tokenizer:
    """Learn a tokenizer from files, save it, and record how well it fits the text.

    Args:
        paths: files, folders, globs, URLs, or Hugging Face data sets as "hf:NAME".
        out: the folder for vocab.txt, tokenizer.json, tokenizer_config.json and vocabulary.json.
        size: the number of tokens, including the five special tokens.
        options: see `LearnOptions`.
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: the paths hold no text, an option is impossible, the folder holds something
            else than a tokenizer, or the disk is full.
    """
    paths = text_paths(paths)
    out = check_output(out, paths, folder=True)
    if signs := [name for name in SIGNS if name != "vocab.txt" and (out / name).exists()]:
        raise BertkitError(
            f"--out {out} contains {signs[0]}, so it holds more than a vocabulary; choose another "
            "folder",
            code="foreign-folder",
        )
    with console_or_new(console) as shown:
        tokenizer, made = learn_from_files(paths, size, options, shown)
        counts = TextCounts()
        measured = documents(paths, options.format, options.column, counts)
        report = measure_vocabulary(tokenizer, islice(measured, MEASURED_DOCUMENTS)).as_dict()
        tokenizer.save(out)
        write_json(out / "vocabulary.json", report | made)
        shown.say(
            f"{out}: {tokenizer.size:,} tokens in the vocabulary; on the first "
            f"{counts.documents:,} documents {report['fertility']:.3f} tokens per word, "
            f"{report['unknown_share']:.4%} of words are [UNK]"
        )
    return tokenizer


def learn_from_files(
    paths: Sequence[str], size: int, options: LearnOptions, console: Console
) -> tuple[Tokenizer, dict[str, Any]]:
    """Return a learned tokenizer and how it was learned; see `learn_tokenizer`.

    Raises:
        BertkitError: the paths hold no text, or an option is impossible.
    """
    check_settings(size, options.min_frequency, options.max_alphabet, options.criterion)
    check_compat(options.compat, "--compat")
    worker_count(options.processes)  # refuses a negative number before anything is read
    skipped: Counter[str] = Counter()
    counts, sources = count_sources(paths, console, options, skipped)

    def show(done: int) -> None:
        console.update({"done": done})

    if options.criterion == "likelihood":
        console.start(size, title="merging", unit="tokens")
    vocabulary = learn_from_counts(
        counts,
        size,
        min_frequency=options.min_frequency,
        max_alphabet=options.max_alphabet,
        criterion=options.criterion,
        progress=show,
    )
    console.close()
    console.say(*describe_skipped(skipped, {}))
    if len(vocabulary) < size:
        console.say(
            f"the text yields only {len(vocabulary):,} of the {size:,} tokens requested; "
            "add more text or lower --min-frequency to get more"
        )
    tokenizer = Tokenizer.from_vocabulary(
        vocabulary, lowercase=not options.cased, compat=options.compat
    )
    settings = {k: v for k, v in as_json(options).items() if k != "processes"}
    criterion = settings.pop("criterion")
    made = {"criterion": criterion, "settings": {"size": size, **settings}, "sources": sources}
    return tokenizer, {**made, "distinct_words": len(counts), "skipped": dict(skipped)}


def count_sources(
    paths: Sequence[str],
    console: Console,
    options: LearnOptions,
    skipped: Counter[str],
    strip_accents: bool | None = None,
) -> tuple[Counter[str], list[dict[str, Any]]]:
    """Count the words of all paths together, weighted by path if smoothing is not 1."""
    smoothing_weights([1] * len(paths), options.smoothing)  # refuses settings before any reading
    if options.smoothing == 1:
        counts = count_paths(paths, console, options, skipped, strip_accents)
        return counts, [{"paths": list(paths), "words": counts.total(), "weight": 1.0}]
    tables = [count_paths([path], console, options, skipped, strip_accents) for path in paths]
    for path, table in zip(paths, tables, strict=True):
        if not table:
            raise BertkitError(f"{path} holds no words to weigh; remove it from the paths")
    words = [table.total() for table in tables]
    weights = smoothing_weights(words, options.smoothing)
    for path, number, weight in zip(paths, words, weights, strict=True):
        share = number / sum(words)
        console.say(
            f"{path}: {number:,} words, {share:.2%} of all words, weighted by {weight:.4g} to "
            f"{share * weight:.2%}"
        )
    sources = [
        {"paths": [path], "words": number, "weight": weight}
        for path, number, weight in zip(paths, words, weights, strict=True)
    ]
    return weigh_counts(tables, weights, skipped), sources


def count_paths(
    paths: Sequence[str],
    console: Console,
    options: LearnOptions,
    skipped: Counter[str],
    strip_accents: bool | None = None,
) -> Counter[str]:
    """Count the words of some paths, showing progress, and print what was skipped."""
    counts = TextCounts()

    def show(done: int) -> None:
        console.update({"done": done, "bytes": counts.bytes})

    console.start(None, title="counting words", unit="documents")
    words = count_words(
        documents(paths, options.format, options.column, counts),
        lowercase=not options.cased,
        strip_accents=strip_accents,
        progress=show,
        processes=options.processes,
        max_distinct_words=options.max_distinct_words,
        skipped=skipped,
    )
    console.close()
    console.say(*describe_skipped(counts.skipped, counts.examples))
    return words


def documents(
    paths: Sequence[str],
    format: str,  # noqa: A002
    column: str,
    counts: TextCounts,
) -> Iterator[str]:
    """Yield every document of some sources; skipped ones are added to `counts`."""
    for source in find_sources(paths, format=format):
        yield from read_documents(source, counts, column=column)
