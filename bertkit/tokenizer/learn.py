"""Learn a WordPiece vocabulary from text, and measure how well a vocabulary fits a text.

Google did not publish its program. The pair of neighbouring tokens that is merged next is the most
frequent one, as in byte-pair encoding; the trainer is that of the `tokenizers` library. The library
alone gives another vocabulary at each run, because it numbers the "##" characters in hash order and
breaks ties by number. Here they are numbered beforehand, so that equal texts give equal
vocabularies.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import chain, islice, pairwise, repeat
from pathlib import Path
from typing import Any
from unicodedata import category, name, normalize

from tokenizers import Tokenizer as Pipeline
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import WordPieceTrainer

from bertkit.errors import BertkitError, checked_texts
from bertkit.files import check_output, sign_of_work, write_json
from bertkit.processes import interruptible, map_in_order, open_executor
from bertkit.progress import Console, console_or_new
from bertkit.text.documents import TextCounts, cut_blocks, describe_skipped, read_documents
from bertkit.text.sources import TextSource
from bertkit.tokenizer.files import (
    CONTINUATION,
    IDEOGRAPHS,
    MAX_WORD_CHARACTERS,
    SPECIAL_TOKENS,
    WHITESPACE,
    split_words,
    stands_alone,
)
from bertkit.tokenizer.wordpiece import Tokenizer

MEASURED_DOCUMENTS = PROGRESS_DOCUMENTS = 1000
MARKED_DOCUMENTS, MARKED_CHARACTERS = 100, 2_000
BLOCK_WORDS = 10_000
LARGEST = 10_000_000  # tokens; the trainer allocates memory for all of them at once
LARGEST_PAIR_COUNT = 1 << 30
"""The largest count of a pair that is safe; the trainer of `tokenizers` counts in signed 32-bit
integers."""


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """The settings with which a vocabulary is learned, in addition to its text and size."""

    cased: bool = False
    """Keep upper case and accents."""
    keep_accents: bool | None = None
    """Keep accents, vowel signs and tone marks, also without --cased; by default if at least 1 % of
    the characters are marks of other scripts than Latin, Greek and Cyrillic."""
    min_frequency: int = 2
    """The minimum frequency of a pair to be merged."""
    max_alphabet: int = 1000
    """The maximum number of single characters to keep; words with other characters become [UNK]."""


LEARN_DEFAULTS = LearnOptions()


def learn_tokenizer(
    text: TextSource | Sequence[str | Path],
    out: Path | str,
    size: int = 30522,
    options: LearnOptions = LEARN_DEFAULTS,
    *,
    processes: int = 1,
    executor: Executor | None = None,
    console: Console | None = None,
) -> Tokenizer:
    """Learn a tokenizer from text, save it, and record how well it fits the text.

    Args:
        text: the text, or only its paths.
        out: the folder for vocab.txt, tokenizer.json, tokenizer_config.json and vocabulary.json.
        size: the number of tokens, including the five special tokens.
        options: see `LearnOptions`.
        processes: the number of counting processes, 0 for one per core; the vocabulary is the same
            for any number.
        executor: workers instead; see `bertkit.processes.map_in_order`.
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: there is no text, an option is impossible, the folder holds something else
            than a tokenizer, a worker died, or the disk is full.
    """
    text = TextSource.of(text)
    out = check_output(out, text.paths, folder=True)
    if sign := sign_of_work(out, ignored=("vocab.txt",)):
        raise BertkitError(
            f"--out {out} contains {sign}, so it holds more than a vocabulary; choose another "
            "folder",
            code="foreign-folder",
        )
    with console_or_new(console) as shown, open_executor(processes, executor) as pool:
        tokenizer, made = learn_from_files(text, size, options, shown, pool)
        counts = TextCounts()
        measured = islice(documents(text, counts), MEASURED_DOCUMENTS)
        report = measure_vocabulary(tokenizer, measured)
        tokenizer.save(out)
        write_json(out / "vocabulary.json", report | made)
        if tokenizer.strip_accents:
            shown.say(*describe_marks(made["mark_share"], "dropped; --keep-accents keeps them"))
        shown.say(
            f"{out}: {tokenizer.size:,} tokens in the vocabulary; on the first "
            f"{counts.documents:,} documents {report['fertility']:.3f} tokens per word, "
            f"{report['unknown_share']:.4%} of words are [UNK]"
        )
    return tokenizer


def learn_from_files(
    text: TextSource,
    size: int,
    options: LearnOptions,
    console: Console,
    executor: Executor | None = None,
) -> tuple[Tokenizer, dict[str, Any]]:
    """Return a learned tokenizer and how it was learned; see `learn_tokenizer`."""
    check_settings(size, options)
    share, keep = 0.0 if options.cased else mark_share(text), options.keep_accents
    if keep is None and share >= KEPT_MARKS:
        console.say(*describe_marks(share, "kept, and with them accents (--no-keep-accents)"))
    keep = options.cased or share >= KEPT_MARKS if keep is None else keep
    rules: dict[str, Any] = {"lowercase": not options.cased, "strip_accents": not keep}
    counts, read = count_source(text, rules, console, executor)
    vocabulary = learn_from_counts(
        counts, size, min_frequency=options.min_frequency, max_alphabet=options.max_alphabet
    )
    if len(vocabulary) < size:
        console.say(
            f"the text yields only {len(vocabulary):,} of the {size:,} tokens requested; "
            "add more text or lower --min-frequency to get more"
        )
    settings = {"size": size, **asdict(options), "format": text.format, "column": text.column}
    settings["keep_accents"] = keep
    source = {"paths": list(text.paths), "words": counts.total()}
    made = {"settings": settings, "sources": [source], "distinct_words": len(counts)}
    tokenizer = Tokenizer.from_vocabulary(vocabulary, **rules)
    return tokenizer, made | {"mark_share": share, "skipped": dict(read.skipped)}


def count_source(
    text: TextSource, rules: Mapping[str, bool], console: Console, executor: Executor | None
) -> tuple[Counter[str], TextCounts]:
    """Count the words of a text, and what was read and skipped; show progress."""
    counts = TextCounts()

    def shown() -> Iterator[str]:
        for document in documents(text, counts):
            yield document
            if counts.documents % PROGRESS_DOCUMENTS == 0:
                console.update({"done": counts.documents, "bytes": counts.bytes})
        console.update({"done": counts.documents, "bytes": counts.bytes})

    console.start(None, title="counting words", unit="documents")
    words = count_words(shown(), **rules, skipped=counts.skipped, executor=executor)
    console.close()
    console.say(*describe_skipped(counts.skipped, counts.examples))
    return words, counts


def documents(text: TextSource, counts: TextCounts) -> Iterator[str]:
    """Yield every document of a text; skipped ones are added to `counts`."""
    for source in text.files():
        yield from read_documents(source, counts, column=text.column)


def check_settings(size: int, options: LearnOptions) -> None:
    """Refuse settings with which no vocabulary can be learned, before any text is read."""
    if not 1 <= size <= LARGEST or min(options.max_alphabet, options.min_frequency) < 1:
        raise BertkitError(
            f"a vocabulary needs a size of 1 to {LARGEST:,} tokens, and --max-alphabet and "
            "--min-frequency of at least 1"
        )


def learn_from_counts(
    counts: Counter[str], size: int, *, min_frequency: int = 2, max_alphabet: int = 1000
) -> list[str]:
    """Learn tokens from counted words: special tokens, characters, "##" characters, merged tokens.

    Characters that are always words by themselves (punctuation, ideographs) get no "##" form.
    """
    alphabet = find_alphabet(counts, max_alphabet)
    continuing = [CONTINUATION + letter for letter in alphabet if not stands_alone(letter)]
    if not alphabet:
        raise BertkitError("cannot learn a vocabulary: the texts hold no words; check the files")
    minimum = len(SPECIAL_TOKENS) + len(alphabet) + len(continuing)
    if size < minimum:
        raise BertkitError(
            f"a vocabulary of {size} tokens has no room for its {len(alphabet)} characters: ask for"
            f" at least {minimum}, or set max_alphabet (now {max_alphabet}) lower"
        )
    letters = set(alphabet)
    spelled = {word: count for word, count in counts.items() if letters.issuperset(word)}
    merged = merge_pairs(spelled, alphabet, continuing, size, min_frequency)
    return [*SPECIAL_TOKENS, *alphabet, *continuing, *merged]


def find_alphabet(counts: Counter[str], limit: int) -> list[str]:
    """Return the `limit` most frequent characters, sorted; ties go to the lower code point."""
    frequency: Counter[str] = Counter()
    for word, count in counts.items():
        for letter in word:
            frequency[letter] += count
    usable = [letter for letter in frequency if not "\ud800" <= letter <= "\udfff"]
    return sorted(sorted(usable, key=lambda letter: (-frequency[letter], letter))[:limit])


def merge_pairs(
    counts: dict[str, int],
    alphabet: list[str],
    continuing: list[str],
    size: int,
    min_frequency: int,
) -> list[str]:
    """Return the tokens that the trainer merges, in order; `size` counts the other ones, too."""
    first = {*SPECIAL_TOKENS, *continuing, *alphabet}
    counts, min_frequency = counts_in_range(counts, min_frequency)
    trainer = WordPieceTrainer(
        vocab_size=size,
        min_frequency=min_frequency,
        special_tokens=[*SPECIAL_TOKENS, *continuing],  # numbers "##" characters beforehand,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet),
        show_progress=False,
    )
    pipeline = Pipeline(WordPiece(unk_token=SPECIAL_TOKENS[1]))
    pipeline.pre_tokenizer = WhitespaceSplit()
    words = chain.from_iterable(repeat(word, count) for word, count in counts.items())
    blocks = iter(lambda: " ".join(islice(words, BLOCK_WORDS)), "")
    interruptible(lambda: pipeline.train_from_iterator(blocks, trainer))
    ids = pipeline.get_vocab()
    return sorted(ids.keys() - first, key=ids.__getitem__)


def counts_in_range(counts: dict[str, int], min_frequency: int) -> tuple[dict[str, int], int]:
    """Divide counts and the smallest frequency by one number, if some pair is too frequent."""
    if sum(count * len(word) for word, count in counts.items()) <= LARGEST_PAIR_COUNT:
        return counts, min_frequency
    pairs: Counter[tuple[str, str]] = Counter()
    for word, count in counts.items():
        for pair in pairwise(word):
            pairs[pair] += count
    divisor = -(-max(pairs.values(), default=1) // LARGEST_PAIR_COUNT)
    smaller = {word: max(1, round(count / divisor)) for word, count in counts.items()}
    return smaller, -(-min_frequency // divisor)


def measure_vocabulary(tokenizer: Tokenizer, texts: Iterable[str]) -> dict[str, Any]:
    """Encode texts and return how well the vocabulary fits them.

    "fertility" is the mean number of tokens per word.
    """
    words = tokens = 0
    unknown: Counter[str] = Counter()
    for text in checked_texts(texts):
        encoding = tokenizer.encode(text)
        tokens += len(encoding.tokens)
        words += sum(not token.startswith(CONTINUATION) for token in encoding.tokens)
        for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True):
            if token == SPECIAL_TOKENS[1]:
                unknown[text[start:end]] += 1
    return {
        "words": words,
        "tokens": tokens,
        "fertility": tokens / words if words else 0.0,
        "unknown_share": unknown.total() / words if words else 0.0,
        "unknown_words": sorted(unknown.items(), key=lambda item: (-item[1], item[0]))[:20],
    }


# Counting words ---------------------------------------------------------------------------------

BLOCK_CHARACTERS = 1_000_000
BETWEEN_WORDS = re.compile(f"[{WHITESPACE}{IDEOGRAPHS}]")
TOO_LONG = f"word of more than {MAX_WORD_CHARACTERS} characters"


def count_words(
    texts: Iterable[str],
    *,
    lowercase: bool,
    strip_accents: bool | None = None,
    skipped: Counter[str] | None = None,
    executor: Executor | None = None,
) -> Counter[str]:
    """Count each normalised word; words that are too long for a tokenizer are left out.

    Texts are dealt out in blocks, whose counts are added in order, so that any number of workers
    gives the same table. The number of words that were left out is added to `skipped`.
    """
    counts: Counter[str] = Counter()
    parts = (cut_text(text, BLOCK_CHARACTERS) for text in checked_texts(texts))
    blocks = cut_blocks(chain.from_iterable(parts), BLOCK_CHARACTERS)
    strip = lowercase if strip_accents is None else strip_accents
    work = partial(count_block, lowercase=lowercase, strip_accents=strip)
    for counted, long_words in map_in_order(work, blocks, executor):
        counts.update(counted)
        if long_words and skipped is not None:
            skipped[TOO_LONG] += long_words
    return counts


def cut_text(text: str, characters: int) -> Iterator[str]:
    """Yield a text in parts of slightly more than `characters` characters, cut between words."""
    start = 0
    while cut := BETWEEN_WORDS.search(text, start + characters):
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:]


def count_block(
    texts: Sequence[str], lowercase: bool, strip_accents: bool
) -> tuple[Counter[str], int]:
    """Return the counts of the words of some texts, and the number of words that were too long."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(split_words(text, lowercase=lowercase, strip_accents=strip_accents))
    too_long = [word for word in counts if len(word) > MAX_WORD_CHARACTERS]
    return counts, sum(counts.pop(word) for word in too_long)


# Marks -------------------------------------------------------------------------------------------

KEPT_MARKS, SAID_MARKS = 0.01, 0.001
"""The shares of marks from which accents are kept by default, and from which the share is said."""


@cache
def loses_mark(character: str) -> bool:
    """Return whether stripping accents drops a mark of a script other than those with accents.

    The marks of Latin, Greek and Cyrillic are named COMBINING, as are those of Japanese.
    """
    marks = [name(c, "") for c in normalize("NFD", character) if category(c) == "Mn"]
    return any("KATAKANA" in m or not m.startswith(("COMBINING", "VARIATION")) for m in marks)


def mark_share(text: TextSource) -> float:
    """Return the share of characters that lose such a mark, in the first documents of each file."""
    sources, characters = text.files()[:MARKED_DOCUMENTS], Counter[str]()
    for source in sources:
        read = read_documents(source, TextCounts(), column=text.column)
        for document in islice(read, -(-MARKED_DOCUMENTS // len(sources))):
            characters.update(document[:MARKED_CHARACTERS])
    marks = sum(count for character, count in characters.items() if loses_mark(character))
    return marks / max(1, characters.total())


def describe_marks(share: float, fate: str) -> list[str]:
    """Return a line that says what becomes of the marks, or [] if there are hardly any."""
    marks = "vowel signs or tone marks of scripts other than Latin, Greek and Cyrillic"
    return [f"{share:.1%} of characters are {marks}: {fate}"] if share >= SAID_MARKS else []
