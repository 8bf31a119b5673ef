"""Learn a WordPiece vocabulary from text, and measure how well a vocabulary fits a text.

The criterion decides which pair of neighbouring tokens is merged next:

- *frequency*: the most frequent pair, as in byte-pair encoding. The trainer is that of the
  `tokenizers` library, which calls it WordPiece although it is not.
- *likelihood*: the pair that raises the likelihood of the text most (Schuster and Nakajima 2012),
  see `likelihood.py`. The BERT paper's vocabulary (section 3) was learned this way, with code that
  was never published.

The library alone gives another vocabulary at each run, because it numbers the "##" characters in
hash order and breaks ties by number. Here they are numbered beforehand, so that equal texts give
equal vocabularies.

`choose_domain_words` finds the words that a vocabulary splits and that an extension should add.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain, islice, pairwise, repeat
from typing import Any

from tokenizers import Tokenizer as Pipeline
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import WordPieceTrainer

from bertkit.errors import BertkitError, check_known, checked_texts
from bertkit.processes import interruptible
from bertkit.tokenizer.count import count_words
from bertkit.tokenizer.files import CONTINUATION, SPECIAL_TOKENS
from bertkit.tokenizer.likelihood import merge_by_likelihood
from bertkit.tokenizer.normalize import is_cjk, is_punctuation, split_words
from bertkit.tokenizer.wordpiece import Tokenizer

CRITERIA = ("frequency", "likelihood")
BLOCK_WORDS = 10_000
LARGEST = 10_000_000  # tokens; the trainer allocates memory for all of them at once


def learn_vocabulary(
    texts: Iterable[str],
    size: int,
    *,
    lowercase: bool = True,
    min_frequency: int = 2,
    max_alphabet: int = 1000,
    criterion: str = "frequency",
    processes: int = 1,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Learn `size` tokens: special tokens, single characters, "##" characters, merged tokens.

    The texts are read once. Memory holds the distinct words and their counts, not the texts. Words
    are split by Google's normalisation, so the result fits a `compat="google"` tokenizer.
    Characters that are always words by themselves (punctuation, ideographs) get no "##" form.

    Args:
        texts: sentences, lines or documents, in any order.
        size: the number of tokens; text with too few repeated pairs gives fewer.
        lowercase: whether to learn an uncased vocabulary.
        min_frequency: the fewest occurrences of a pair that is merged.
        max_alphabet: the most characters kept; words with rarer ones are not learned from and
            become [UNK].
        criterion: which pair is merged next, "frequency" or "likelihood".
        processes: the number of processes that count words; it does not change the vocabulary.
        progress: called with the number of texts read so far, every 1,000 texts and at the end.

    Raises:
        BertkitError: the texts hold no words, or `size` is too small for the alphabet; the message
            gives the minimum.
    """
    check_settings(size, min_frequency, max_alphabet, criterion)
    counts = count_words(texts, lowercase=lowercase, progress=progress, processes=processes)
    return learn_from_counts(
        counts, size, min_frequency=min_frequency, max_alphabet=max_alphabet, criterion=criterion
    )


def check_settings(size: int, min_frequency: int, max_alphabet: int, criterion: str) -> None:
    """Refuse settings with which no vocabulary can be learned, before any text is read."""
    if not 1 <= size <= LARGEST or max_alphabet < 1 or min_frequency < 1:
        raise BertkitError(
            f"a vocabulary needs a size of 1 to {LARGEST:,} tokens, and max_alphabet and "
            f"min_frequency of at least 1; got {size:,}, {max_alphabet}, {min_frequency}"
        )
    check_known("criterion", criterion, CRITERIA)


def learn_from_counts(
    counts: Counter[str],
    size: int,
    *,
    min_frequency: int = 2,
    max_alphabet: int = 1000,
    criterion: str = "frequency",
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """Learn a vocabulary from the words of a text and their counts; see `learn_vocabulary`."""
    check_settings(size, min_frequency, max_alphabet, criterion)
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
    spelt = {word: count for word, count in counts.items() if letters.issuperset(word)}
    given = [*alphabet, *continuing]
    if criterion == "frequency":
        merged = merge_pairs(spelt, alphabet, continuing, size, min_frequency)
    else:
        merged = merge_by_likelihood(spelt, given, size - minimum, min_frequency, progress)
    return [*SPECIAL_TOKENS, *given, *merged]


def find_alphabet(counts: Counter[str], limit: int) -> list[str]:
    """Return the `limit` most frequent characters, sorted; ties go to the lower code point."""
    frequency: Counter[str] = Counter()
    for word, count in counts.items():
        for letter in word:
            frequency[letter] += count
    usable = [letter for letter in frequency if not "\ud800" <= letter <= "\udfff"]
    return sorted(sorted(usable, key=lambda letter: (-frequency[letter], letter))[:limit])


def stands_alone(letter: str) -> bool:
    """Return whether the character is always a word by itself, so that it has no "##" form."""
    return is_cjk(letter) or is_punctuation(letter)


def merge_pairs(
    counts: dict[str, int],
    alphabet: list[str],
    continuing: list[str],
    size: int,
    min_frequency: int,
) -> list[str]:
    """Return the tokens that the trainer merges, in order; `size` also counts the given ones."""
    given = {*SPECIAL_TOKENS, *continuing}
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
    interruptible(lambda: pipeline.train_from_iterator(repeat_words(counts), trainer))
    ids = pipeline.get_vocab()
    return sorted(ids.keys() - given - set(alphabet), key=ids.__getitem__)


LARGEST_PAIR_COUNT = 1 << 30
"""The largest count of a pair that is safe; the trainer of `tokenizers` counts in signed 32-bit
integers."""


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


def repeat_words(counts: dict[str, int]) -> Iterator[str]:
    """Yield each word as often as it was counted, in blocks of text, as the trainer requires."""
    words = chain.from_iterable(repeat(word, count) for word, count in counts.items())
    while block := list(islice(words, BLOCK_WORDS)):
        yield " ".join(block)


@dataclass(frozen=True)
class VocabularyReport:
    """The measured fit of a vocabulary to a text; see `measure_vocabulary`.

    Attributes:
        words, tokens: the numbers of words and of WordPiece tokens in the text.
        fertility: tokens per word; 1 means that every word is one token.
        unknown_share: the share of words that became [UNK].
        unknown_words: the most frequent of these, as written in the text, with their counts.
        characters_per_token: characters per token, not counting white space.
        unused_tokens: the tokens that do not occur in the text, without special tokens.
    """

    words: int
    tokens: int
    fertility: float
    unknown_share: float
    unknown_words: Sequence[tuple[str, int]]
    characters_per_token: float
    unused_tokens: Sequence[str]

    def as_dict(self) -> dict[str, Any]:
        """Return the report for a JSON file, with only the number of the unused tokens."""
        report = asdict(self)
        report["unused_tokens"] = len(self.unused_tokens)
        return report


def measure_vocabulary(
    tokenizer: Tokenizer, texts: Iterable[str], *, most_common: int = 20
) -> VocabularyReport:
    """Encode texts and count words, tokens and what became [UNK].

    Args:
        tokenizer: the tokenizer with the vocabulary to measure.
        texts: the texts, read once; preferably text that the vocabulary was not learned from.
        most_common: the number of unknown words to list.
    """
    words = tokens = characters = 0
    unknown: Counter[str] = Counter()
    used: set[str] = set(SPECIAL_TOKENS)
    for text in checked_texts(texts):
        encoding = tokenizer.encode(text)
        used.update(encoding.tokens)
        tokens += len(encoding.tokens)
        words += sum(not token.startswith(CONTINUATION) for token in encoding.tokens)
        for token, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True):
            characters += end - start
            if token == SPECIAL_TOKENS[1]:
                unknown[text[start:end]] += 1
    ranked = sorted(unknown.items(), key=lambda item: (-item[1], item[0]))
    return VocabularyReport(
        words=words,
        tokens=tokens,
        fertility=tokens / words if words else 0.0,
        unknown_share=unknown.total() / words if words else 0.0,
        unknown_words=ranked[:most_common],
        characters_per_token=characters / tokens if tokens else 0.0,
        unused_tokens=[token for token in tokenizer.vocabulary if token not in used],
    )


def choose_domain_words(
    tokenizer: Tokenizer, counts: Mapping[str, int], number: int
) -> list[tuple[str, int]]:
    """Return the words that would save most tokens as single tokens, with the number saved.

    A word of p tokens that occurs n times saves n (p - 1). Ties are ordered by text. Words that are
    one token already, and words that become [UNK], are left out.
    """
    if number < 1:
        raise BertkitError(f"--count must be at least 1, got {number}")
    words = list(counts)
    broken = [
        (word, counts[word] * (len(ids) - 1))
        for word, ids in zip(words, tokenizer.encode_batch(words), strict=True)
        if len(ids) > 1 and is_one_word(word, tokenizer)
    ]
    return sorted(broken, key=lambda item: (-item[1], item[0]))[:number]


def is_one_word(text: str, tokenizer: Tokenizer) -> bool:
    """Return whether normalisation leaves a text unchanged and as a single word."""
    rules = {"lowercase": tokenizer.lowercase, "strip_accents": tokenizer.strip_accents}
    return split_words(text, **rules) == [text] and len(text) <= tokenizer.max_word_characters
