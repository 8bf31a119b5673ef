"""Words and their tags (paper section 5.3): entities, their scores, files, and words of raw text.

Entities are extracted as in the `conlleval` script of CoNLL-2003, whatever the tagging scheme: IOB1
(the original files), IOB2, IOBES or BILOU.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple

from bertkit.errors import BertkitError
from bertkit.tasks.columns import Columns, Fields, Purpose, from_json, require_texts
from bertkit.text.documents import TextCounts, plain_lines, valid_text, value_name
from bertkit.text.sources import extension, one_source
from bertkit.tokenizer.files import IDEOGRAPHS

TAG = re.compile(r"(?![BIESLU]-$)\S+")
ENTITY_TAG = re.compile(r"O|[BIESLU](-.+)?")
"""An entity tag; it has no type if all entities are of one type."""
NO_TAGS = {"[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "<PAD>", "PAD", "X"}
"""Labels that some code gives to padding, special tokens and the later tokens of a word."""

ROW_ENDINGS = {".csv", ".jsonl", ".ndjson", ".json", ".parquet"}
"""Files with one tagged sentence per row; the others have one word per line."""
DOCUMENT = "-DOCSTART-"
SPACES = re.compile(" +")
NO_WORD = re.compile(r"\d+[-.]\d+")
"""The first of the ten columns of CoNLL-U in a line for a range of words or an empty node."""


class WordsExample(NamedTuple):
    """A sentence as words, each with its tag."""

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    document: str  # what names the document; its sentences are adjacent and share this name
    location: str
    text: str = ""  # the running text that was split into words; "" if words were given
    spans: tuple[tuple[int, int], ...] = ()  # the half-open character span of each word in `text`

    @property
    def gold(self) -> tuple[str, ...] | None:
        return self.tags


# Tags ---------------------------------------------------------------------------------------------


def are_entity_tags(tags: Collection[str]) -> bool:
    """Return whether tags are entity tags: O, B-X, I-X and so on.

    Tags B, I, E and S without any O belong to word segmentation instead.
    """
    marked = "O" in tags or any("-" in tag for tag in tags)
    return marked and all(ENTITY_TAG.fullmatch(tag) for tag in tags)


def find_entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (type, first word, one after the last word) of each entity, by conlleval's rule.

    B and S start an entity; so does I or E after O, after E or S, or after another type. An entity
    ends where the next one starts or at O. The tags of BILOU go through `conll_scheme` first.
    """
    entities: list[tuple[str, int, int]] = []
    start, before, type_before = 0, "O", ""
    for i, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        begins = prefix != "O" and (
            prefix in "BS" or before in ("O", "E", "S") or kind != type_before
        )
        if before != "O" and (begins or prefix == "O"):
            entities.append((type_before, start, i))
        start = i if begins else start
        before, type_before = prefix, kind
    return entities


def conll_scheme(tags: Sequence[str]) -> list[str]:
    """Replace the L- (last) and U- (unit) of BILOU by E- and S-; leave other tags unchanged."""
    same = {"L-": "E-", "U-": "S-", "L": "E", "U": "S"}
    return [same.get(tag[:2], tag[:2]) + tag[2:] for tag in tags]


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Convert a sentence's entity tags in IOB1, IOB2, IOBES or BILOU to IOB2."""
    converted = ["O"] * len(tags)
    for kind, start, end in find_entities(conll_scheme(tags)):
        first, other = (f"B-{kind}", f"I-{kind}") if kind else ("B", "I")
        converted[start:end] = [first, *[other] * (end - start - 1)]
    return converted


def entity_scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Compute precision, recall and F1 of entities, which must match in boundaries and type.

    They are "precision", "recall" and "f1" over all entities, and "f1/PER" and so on for each type,
    as fractions of 1; a score without any entity to divide by is 0.
    """
    if [len(tags) for tags in gold] != [len(tags) for tags in predicted]:
        raise BertkitError("gold and predicted tags differ in number; score the same sentences")
    right, tagged, wanted = Counter[str](), Counter[str](), Counter[str]()
    for gold_tags, predicted_tags in zip(gold, predicted, strict=True):
        gold_entities, entities = set(find_entities(gold_tags)), set(find_entities(predicted_tags))
        wanted.update(kind for kind, _, _ in gold_entities)
        tagged.update(kind for kind, _, _ in entities)
        right.update(kind for kind, _, _ in gold_entities & entities)
    scores = precision_recall_f1(right.total(), tagged.total(), wanted.total(), "")
    for kind in sorted((wanted | tagged).keys() - {""}):
        scores |= precision_recall_f1(right[kind], tagged[kind], wanted[kind], f"/{kind}")
    return scores


def precision_recall_f1(right: int, tagged: int, wanted: int, suffix: str) -> dict[str, float]:
    """Compute precision, recall and F1 from counts, under names with a suffix."""
    return {
        f"precision{suffix}": right / tagged if tagged else 0.0,
        f"recall{suffix}": right / wanted if wanted else 0.0,
        f"f1{suffix}": 2 * right / (tagged + wanted) if tagged + wanted else 0.0,
    }


# Columns -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WordColumns(Columns):
    """Columns of tagged sentences: one sentence per row, or one word per line as in CoNLL's files.

    In rows, words and tags are lists or are separated by spaces. Class numbers of a Hugging Face
    data set become names; other numbers are kept as tags.
    """

    words: str = "tokens"
    """The column of the words, in rows."""
    tags: str = "ner_tags"
    """The column of the tags, in rows."""
    word_column: int = 0
    """The column of the word in files with one word per line, from 0; -1 is the last."""
    tag_column: int = -1
    """The column of the tag in files with one word per line."""
    input_options = ("words",)
    target_option = "tags"
    wanted = "texts or lists of words"

    def in_rows(self, path: str | Path) -> bool:
        if self.format != "auto":
            return self.format != "text"
        paths = Path(path).rglob("*") if Path(path).is_dir() else [path]
        return str(path).startswith("hf:") or any(extension(str(p)) in ROW_ENDINGS for p in paths)

    def read_own_format(
        self, path: str | Path, counts: TextCounts, purpose: Purpose
    ) -> Iterator[WordsExample]:
        return conll_sentences(path, counts, purpose, self.word_column, self.tag_column)

    def example(self, row: Fields, location: str, counts: TextCounts, purpose: Purpose) -> Any:
        """Each word needs a tag, and a row without words is left out."""
        words = self.words_in(row[self.words], location)
        if not words:
            counts.note(f"empty '{self.words}'", location)
            return None
        tags = None if purpose == "predict" else self.tags_in(row.get(self.tags), location)
        if tags is not None and len(tags) != len(words):
            raise BertkitError(
                f"{location}: {len(words)} words in '{self.words}' and {len(tags)} tags in "
                f"'{self.tags}'; give a tag for each word"
            )
        words = tuple(valid_text(word, location, counts) for word in words)
        return WordsExample("", words, tags, location, location)

    def words_in(self, value: Any, location: str) -> tuple[str, ...]:
        """Return the words in a field; () if it is empty."""
        return tuple(require_texts(location, listed(value, self.words, location)))

    def tags_in(self, value: Any, location: str) -> tuple[str, ...] | None:
        """Return the tags in a field, or None if it is empty or null."""
        if value is None or value == "":
            return None
        tags = tuple(map(value_name, listed(value, self.tags, location)))
        for tag in tags:
            if not TAG.fullmatch(tag) or tag == "-100":  # no tag, in data for transformers
                raise BertkitError(
                    f"{location}: '{self.tags}' holds {tag[:40]!r}, not a tag such as O, B-PER or "
                    "NOUN; correct it or name the column of the tags"
                )
        return tags

    def from_values(self, values: Sequence[Any], location: str, id: str) -> WordsExample:  # noqa: A002
        """A text is split into words, and a list of words is taken as it is."""
        text_or_words = values[0] if len(values) == 1 else values
        several = isinstance(text_or_words, tuple | list)
        require_texts(location, text_or_words if several else [text_or_words])
        return words_example(id, text_or_words, location, location)

    def from_value(self, value: Any, location: str, id: str) -> WordsExample:  # noqa: A002
        if isinstance(value, Mapping) and self.words in value:
            value = self.words_in(value[self.words], location)
        if isinstance(value, tuple | list):
            return self.from_values([value], location, id)
        return super().from_value(value, location, id)

    def from_line(self, line: str, location: str, id: str, document: int) -> WordsExample:  # noqa: A002
        return words_example(id, line, f"{location.rpartition(':')[0]}#{document}", location)


def listed(value: Any, column: str, location: str) -> Sequence[Any]:
    """Return the items of a list, of a list written as JSON, or of a text split at spaces."""
    value = from_json(value)
    if value is None or isinstance(value, str):
        # split only at spaces, as in CoNLL's files: other white space may be a word
        return [item for item in SPACES.split(value or "") if item]
    if not isinstance(value, list | tuple):
        raise BertkitError(
            f"{location}: '{column}' is {value!r:.40}, neither a list nor text; name another column"
        )
    return value


# Files --------------------------------------------------------------------------------------------


def conll_sentences(
    path: str | Path,
    counts: TextCounts,
    purpose: Purpose = "train",
    word_column: int = 0,
    tag_column: int = -1,
) -> Iterator[WordsExample]:
    """Yield the sentences of a file with one word per line and a blank line after each sentence.

    Columns are separated by tabs if a line has one, else by spaces, and by nothing else: a word of
    other whitespace is kept. A `-DOCSTART-` line starts a document; before the first one, each
    sentence is a document. Comments (`# ...` before a sentence) and the lines of CoNLL-U that are
    not words are left out. The ID of a sentence is its number, from 0. Tags stay in the file's
    scheme; see `to_iob2`. Except for training, a file may have words only.
    """
    source, read = one_source(path), TextCounts(files=1)
    tagged = purpose != "predict"
    used = document = columns = start = 0
    rows: list[tuple[str, str]] = []
    for number, line in chain(plain_lines(source, read), [(0, "")]):
        fields = line.split("\t") if "\t" in line else SPACES.split(line.strip(" "))
        location, count = f"{source.path}:{number}", len(fields)
        if fields[0] == DOCUMENT or not line.strip(" \t"):
            if rows:
                words, tags = zip(*rows, strict=True)
                name = f"{source.path}#{document}" if document else f"{source.path}:{start}"
                known = tags if tagged else None
                yield WordsExample(str(used), words, known, name, f"{source.path}:{start}")
                used += 1
                rows = []
            document += fields[0] == DOCUMENT
        elif not rows and line.startswith("# ") and "\t" not in line and count != (columns or 2):
            read.note("comment", location)
        elif count == 10 and NO_WORD.fullmatch(fields[0]):
            read.note("range of words or empty node (CoNLL-U)", location)
        else:
            columns, start = columns or count, start if rows else number
            tagged = tagged and (purpose == "train" or columns > 1)
            if count != columns:
                raise BertkitError(
                    f"{location}: {columns} columns in the first line, and {count} here; correct "
                    "the line, since leaving it out would shift the tags (or give --format text "
                    "for running text)"
                )
            rows.append(word_and_tag(fields, word_column, tag_column if tagged else None, location))
    if not used:
        raise BertkitError(f"{path} holds no sentence; write one word a line with its tag")
    counts += read


def word_and_tag(
    fields: Sequence[str], word_column: int, tag_column: int | None, location: str
) -> tuple[str, str]:
    """Return the word and the tag of a line; the tag is "" without a column for it."""
    count = len(fields)
    wanted = [word_column] if tag_column is None else [word_column, tag_column]
    if len({column % count for column in wanted if -count <= column < count}) < len(wanted):
        raise BertkitError(
            f"{location}: {count} columns, but the word is in column {word_column} and the tag in "
            f"{tag_column}; correct the line, or name other columns: --word-column, --tag-column"
        )
    tag = "" if tag_column is None else fields[tag_column].strip(" ")
    if tag_column is not None and not TAG.fullmatch(tag):
        raise BertkitError(
            f"{location}: '{tag[:40]}' in column {tag_column} is not a tag such as O, B-PER or "
            "NOUN; correct it or name the column of the tags: --tag-column"
        )
    return fields[word_column], tag


# Words of raw text --------------------------------------------------------------------------------


@cache
def word_pattern() -> re.Pattern[str]:
    """Return the pattern of a word: "U.N.", "3.5", "AT&T" and "part-time" are one word each.

    A combining mark stays with its letter, and an ideograph is a word, as in BERT's tokenizer. The
    pattern is compiled on first use, because only taggers need it and Unicode has many marks.
    """
    kinds = [(sign, unicodedata.category(sign)) for sign in map(chr, range(0x20000))]
    mark = "".join(sign for sign, kind in kinds if kind.startswith("M"))
    joiners = "\u200c\u200d"  # they occur within words of Persian and of Indian languages
    unseen = "".join(sign for sign, kind in kinds if kind == "Cf" and sign not in joiners)
    letters = rf"(?:[^\W{IDEOGRAPHS}]|[{mark}{joiners}])+"
    symbol = rf"[^\w\s{unseen}]"
    return re.compile(
        rf"(?:[^\W\d_{IDEOGRAPHS}]\.){{2,}}|[{IDEOGRAPHS}][{mark}]*"
        rf"|{letters}(?:[.,'’&/-]{letters})*"
        rf"|{symbol}(?:[{mark}\U0001f3fb-\U0001f3ff]|\u200d{symbol})*"
    )


def words_example(
    id: str,  # noqa: A002
    text_or_words: str | Sequence[str],
    document: str,
    location: str,
) -> WordsExample:
    """Return the untagged example of a text that is split here, or of words joined by spaces."""
    if isinstance(text_or_words, str):
        text, spans = text_or_words, [m.span() for m in word_pattern().finditer(text_or_words)]
    else:
        text, spans = joined(text_or_words)
    words = tuple(text[start:end] for start, end in spans)
    return WordsExample(id, words, None, document, location, text, tuple(spans))


def joined(words: Sequence[str]) -> tuple[str, list[tuple[int, int]]]:
    """Join words by spaces; return the text and the half-open character span of each word."""
    ends = list(accumulate(len(word) + 1 for word in words))
    spans = [(end - len(word) - 1, end - 1) for word, end in zip(words, ends, strict=True)]
    return " ".join(words), spans
