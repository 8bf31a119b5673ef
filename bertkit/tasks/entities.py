"""Words and their tags (paper section 5.3): entities, their scores, files, and words of raw text.

Entities are extracted as in the `conlleval` script of CoNLL-2003, whatever the tagging scheme: IOB1
(the original files), IOB2, IOBES, BILOU, BMES, or IO, whose tags are the types alone.
"""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple, Self

from bertkit.errors import BertkitError, short_repr
from bertkit.tasks.columns import (
    Columns,
    Fields,
    MemoryRows,
    Purpose,
    from_json,
    read_rows,
    require_texts,
    row_texts,
    was_rejected,
)
from bertkit.text.documents import (
    TextCounts,
    plain_lines,
    require_columns,
    valid_text,
    value_name,
)
from bertkit.text.sources import extension, one_source
from bertkit.tokenizer.files import IDEOGRAPHS

TAG = re.compile(r"(?![BIESLU]-$)\S+")
MARK = "(?P<mark>[BIESLUM])"
STANDARD = re.compile(f"{MARK}(?:-(?P<kind>.+))?")
"""An entity tag such as B-PER; it has no type if all entities are of one type."""
MARKED = (
    STANDARD,
    re.compile(f"{MARK}[_:/](?P<kind>.+)"),
    re.compile(f"(?P<kind>.+)[-_:/]{MARK}"),
)
UNMARKED = re.compile("(?:(?P<mark>[BI])-)?(?P<kind>.+)")
"""A type alone (IO): adjacent words of one type are one entity, as in transformers' pipeline."""

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


def tag_pattern(tags: Collection[str]) -> re.Pattern[str] | None:
    """Return the pattern of entity tags other than O; None for tags that form no entities."""
    # B_PER and PER-B need both B and I, and types alone need O; word segmentation has B and I alone
    names = {*tags} - {"O"}
    for pattern in MARKED:
        matches = [pattern.fullmatch(name) for name in names]
        marks = {match["mark"] for match in matches if match}
        usual = any("-" in name for name in names) or ("O" in tags and not marks.isdisjoint("BI"))
        if all(matches) and (usual if pattern is STANDARD else marks >= {"B", "I"}):
            return pattern
    return UNMARKED if "O" in tags else None


def standard_tag(tag: str, pattern: re.Pattern[str] | None) -> str:
    """Return an entity tag of any scheme in IOBES as B-PER; other tags unchanged."""
    match = pattern.fullmatch(tag) if pattern and tag != "O" else None
    if match is None:
        return tag
    mark = {None: "I", "L": "E", "U": "S", "M": "I"}.get(match["mark"], match["mark"])
    return f"{mark}-{match['kind']}" if match["kind"] else mark


def find_entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Return (type, first word, one after the last) of each entity in IOBES by conlleval's rule."""
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


def to_iob2(tags: Sequence[str]) -> list[str]:
    """Convert the tags of a sentence, as of `standard_tag`, to IOB2."""
    converted = ["O"] * len(tags)
    for kind, start, end in find_entities(tags):
        first, other = (f"B-{kind}", f"I-{kind}") if kind else ("B", "I")
        converted[start:end] = [first, *[other] * (end - start - 1)]
    return converted


def entity_scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Compute precision, recall and F1 over all entities and, as "f1/PER", for each type."""
    counters = right, tagged, wanted = Counter[str](), Counter[str](), Counter[str]()
    for gold_tags, predicted_tags in zip(gold, predicted, strict=True):
        gold_entities, entities = set(find_entities(gold_tags)), set(find_entities(predicted_tags))
        sets = gold_entities & entities, entities, gold_entities
        for counter, counted in zip(counters, sets, strict=True):
            counter.update(kind for kind, _, _ in counted)
    right[""], tagged[""], wanted[""] = (counter.total() for counter in counters)
    scores = {}
    for kind in sorted(wanted.keys() | tagged.keys()):
        both, ours, theirs = (counter[kind] for counter in counters)
        suffix = f"/{kind}" if kind else ""
        scores[f"f1{suffix}"] = 2 * both / (ours + theirs) if ours + theirs else 0.0
        scores[f"precision{suffix}"] = both / ours if ours else 0.0
        scores[f"recall{suffix}"] = both / theirs if theirs else 0.0
    return scores


# Columns -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class WordColumns(Columns):
    """Columns of tagged sentences: a sentence, a text or a word per row, or CoNLL's files."""

    words: str = "tokens"
    """The column of the words, a list or separated by spaces, in rows."""
    text: str = ""
    """The column of running text, in rows, instead of words."""
    tags: str = "ner_tags"
    """The column of the tags, in rows; for running text, of spans [start, end, type] or objects."""
    sentence: str = ""
    """The column of the sentence in tables of one word a row; only its first row needs a value."""
    word_column: int = 0
    """The column of the word in files with one word per line, from 0; -1 is the last."""
    tag_column: int = -1
    """The column of the tag in files with one word per line."""
    input_options = ("words", "text")
    target_option = "tags"
    wanted = "texts or lists of words"

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.text or self.words,)

    def fitted(self, data: str | MemoryRows) -> Self:
        """Read rows as running text if the tags are spans, whose columns may have usual names."""
        if self.text or self.sentence or (isinstance(data, str) and not self.in_rows(data)):
            return self
        text, tags = self.words, self.tags
        both, counts = [text, tags], TextCounts()
        read = read_rows(data, counts, self.format, self.header, both, both, whole=True)
        rows = ((location, row) for _, location, row in read if not was_rejected(row))
        location, row = next(rows, ("", {}))
        if (text, tags) == (WordColumns.words, WordColumns.tags) and not {*both} <= {*row}:
            tags = next((name for name in SPAN_COLUMNS if name in row), "")
            return replace(self, text="text", tags=tags) if tags and "text" in row else self
        while row and row.get(tags) in (None, ""):
            location, row = next(rows, ("", {}))
        spans = character_spans(row.get(tags), location) if isinstance(row.get(text), str) else None
        return self if spans is None else replace(self, text=text, tags=tags)

    def read(
        self,
        data: str | Path | MemoryRows,
        counts: TextCounts,
        purpose: Purpose = "train",
        rows: dict[str, Fields] | None = None,
    ) -> Iterator[WordsExample]:
        """Join rows of one word to sentences by `sentence`; labelled words need their sentences."""
        in_rows = isinstance(data, MemoryRows) or self.in_rows(data)
        if in_rows and self.sentence and not self.text:
            columns = self.words, self.sentence
            words = read_rows(data, counts, self.format, self.header, columns, whole=True)
            data = MemoryRows(
                getattr(data, "name", str(data)), sentence_rows(words, *columns, counts)
            )
        single, number = purpose != "predict" and not self.text, 0
        for example in super().read(data, counts, purpose, rows):
            single, number = single and len(example.words) == 1, number + 1
            yield example
        if single and number > 1:
            raise BertkitError(
                f"{data}: each sentence has one word; a blank line ends a sentence, and in tables "
                "of one word a row, name the column of the sentence: --sentence COLUMN"
            )

    def in_rows(self, path: str | Path) -> bool:
        if self.format != "auto":
            return self.format != "text"
        endings = ROW_ENDINGS | ({".tsv"} if self.sentence or self.text else set())
        many = str(path).startswith("hf:") or Path(path).is_dir()
        return many or extension(str(path)) in endings

    def read_own_format(
        self, path: str | Path, counts: TextCounts, purpose: Purpose
    ) -> Iterator[WordsExample]:
        return conll_sentences(path, counts, purpose, self.word_column, self.tag_column)

    def example(self, row: Fields, location: str, counts: TextCounts, purpose: Purpose) -> Any:
        """Each word needs a tag, and a row without words is left out."""
        value = None if purpose == "predict" else row.get(self.tags)
        if self.text:
            texts = row_texts(row, self.inputs, location, counts)
            example = words_example("", texts[0], location, location) if texts else None
            if example is None or value is None or value == "":
                return example
            if (spans := character_spans(value, location)) is None:
                what = f"{short_repr(value)} in column {self.tags} is no list of spans"
                raise BertkitError(f"{location}: {what} [start, end, type]; name another column")
            return example._replace(tags=span_tags(example, spans, counts))
        words, tags = self.words_in(row[self.words], location), self.tags_in(value, location)
        if not words:
            counts.note(f"empty '{self.words}'", location)
            return None
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
        tags = tuple(map(value_name, listed(value, self.tags, location)))
        if not any(tags):
            return None
        return tuple(checked_tag(tag, self.tags, location) for tag in tags)

    def from_values(self, values: Sequence[Any], location: str, id: str) -> WordsExample:  # noqa: A002
        """A text is split into words, and a list of words is taken as it is."""
        [value] = values
        require_texts(location, value if isinstance(value, tuple | list) else values)
        return words_example(id, value, location, location)

    def from_value(self, value: Any, location: str, id: str) -> WordsExample:  # noqa: A002
        if isinstance(value, Mapping):
            first = self.inputs[0]
            running = {"words": False, "text": True} | {first: bool(self.text)}
            column = next((name for name in (first, *running) if name in value), first)
            require_columns(location, [column], list(map(str, value)))
            value = value[column] if running[column] else self.words_in(value[column], location)
        whole = isinstance(value, tuple | list)  # and not an item for each column
        return super().from_value([value] if whole else value, location, id)

    def from_line(self, line: str, location: str, id: str, document: int) -> WordsExample:  # noqa: A002
        return words_example(id, line, f"{location.rpartition(':')[0]}#{document}", location)


def listed(value: Any, column: str, location: str) -> Sequence[Any]:
    """Return the items of a list, of a list written as JSON, or of a text split at spaces."""
    value = from_json(value, location)
    if value is None or isinstance(value, str):
        # split only at spaces, as in CoNLL's files: other white space may be a word
        return [item for item in SPACES.split(value or "") if item]
    if not isinstance(value, list | tuple):
        raise BertkitError(
            f"{location}: '{column}' is {value!r:.40}, neither a list nor text; name another column"
        )
    return value


def sentence_rows(
    rows: Iterable[tuple[int, str, Fields]], words: str, sentence: str, counts: TextCounts
) -> list[dict[str, Any]]:
    """Join consecutive rows of a sentence, with one value or none after the first, to lists."""
    sentences: list[dict[str, Any]] = []
    name = ""
    for _, location, row in rows:
        name = value_name(row[sentence]) or name
        if row[words] in (None, ""):
            counts.note(f"empty '{words}'", location)
            continue
        if not sentences or name != sentences[-1][sentence]:
            sentences.append({column: [] for column in row} | {sentence: name})
        for column in row.keys() - {sentence}:
            sentences[-1].setdefault(column, []).append(row[column])
    return sentences


# Spans of characters ------------------------------------------------------------------------------

SPAN_COLUMNS = ("entities", "spans", "labels", "label")
"""Where tools for annotation, such as doccano, Label Studio and Prodigy, write the spans."""
SPAN_FIELDS = (
    ("start", "start_offset", "begin"),
    ("end", "end_offset"),
    ("label", "labels", "type"),
)


def character_spans(value: Any, location: str) -> list[tuple[int, int, str]] | None:
    """Return the (start, end, type) of spans, as annotation tools write them; None without any."""
    value, spans = from_json(value, location), []
    value = value.get("entities") if isinstance(value, Mapping) else value
    for item in value if isinstance(value, list | tuple) else [None]:
        if isinstance(item, Mapping):
            item = [next((item[n] for n in names if n in item), None) for names in SPAN_FIELDS]  # noqa: PLW2901
        if not isinstance(item, list | tuple) or len(item) != 3:
            return None
        start, end, kind = item
        kind = kind[0] if isinstance(kind, list) and len(kind) == 1 else kind  # Label Studio
        if not (type(start) is type(end) is int and isinstance(kind, str) and kind.strip()):
            return None
        spans.append((start, end, kind.strip()))
    return spans


def span_tags(
    example: WordsExample, spans: Iterable[tuple[int, int, str]], counts: TextCounts
) -> tuple[str, ...]:
    """Return the tags (IOB2) of whole words for spans; of overlapping ones the longest counts."""
    tags = ["O"] * len(example.words)
    starts, ends = [start for start, _ in example.spans], [end for _, end in example.spans]
    for start, end, kind in sorted(spans, key=lambda span: (span[0] - span[1], span[0])):
        first, last = bisect_right(ends, start), bisect_left(starts, end)
        if not 0 <= start < end <= len(example.text) or first >= last:
            counts.note("span without a word, or outside of its text", example.location)
        elif {*tags[first:last]} != {"O"}:
            counts.note("span that overlaps a longer one", example.location)
        else:
            if starts[first] < start or end < ends[last - 1]:
                counts.note("span that cuts a word, widened to the word, kept", example.location)
            tags[first:last] = [f"B-{kind}", *[f"I-{kind}"] * (last - first - 1)]
    return tuple(tags)


# Files --------------------------------------------------------------------------------------------


def conll_sentences(
    path: str | Path,
    counts: TextCounts,
    purpose: Purpose = "train",
    word_column: int = 0,
    tag_column: int = -1,
) -> Iterator[WordsExample]:
    """Yield the sentences of a file with one word per line, columns and blank lines between them.

    A `-DOCSTART-` line starts a document; before the first one, each sentence is a document. The ID
    of a sentence is its number. Except for training, a file may have words only.
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
                first = f"{source.path}:{start}"
                name = f"{source.path}#{document}" if document else first
                yield WordsExample(str(used), words, tags if tagged else None, name, first)
                used, rows = used + 1, []
            document += fields[0] == DOCUMENT
        elif (
            not rows and line.startswith("# ") and "\t" not in line and count != (columns or 2)
        ) or (count == 10 and NO_WORD.fullmatch(fields[0])):
            read.note("comment, range of words or empty node", location)
        else:
            columns, start = columns or count, start if rows else number
            tagged = tagged and (purpose == "train" or columns > 1)
            if count != columns:
                raise BertkitError(
                    f"{location}: {columns} columns in the first line, and {count} here; correct "
                    "the line, or give --format text for running text"
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
    if tag_column is None:
        return fields[word_column], ""
    return fields[word_column], checked_tag(fields[tag_column].strip(" "), tag_column, location)


def checked_tag(tag: str, column: str | int, location: str) -> str:
    """Return a tag; anything else, such as what data for transformers ignores, is an error."""
    if not TAG.fullmatch(tag) or tag == "-100":
        raise BertkitError(
            f"{location}: {tag[:40]!r} in column {column} is not a tag such as O, B-PER or NOUN; "
            "correct it or name the column of the tags"
        )
    return tag


# Words of raw text --------------------------------------------------------------------------------


@cache
def word_pattern() -> re.Pattern[str]:
    """Return the pattern of a word: "U.N.", "3.5", "AT&T" and "part-time", but not "Mara's"."""
    kinds = [(sign, unicodedata.category(sign)) for sign in map(chr, range(0x20000))]
    mark = "".join(sign for sign, kind in kinds if kind.startswith("M"))
    joiners = "\u200c\u200d"  # they occur within words of Persian and of Indian languages
    unseen = "".join(sign for sign, kind in kinds if kind == "Cf" and sign not in joiners)
    letters = rf"(?:[^\W{IDEOGRAPHS}]|[{mark}{joiners}])+"
    symbol = rf"[^\w\s{unseen}]"
    return re.compile(
        rf"(?:[^\W\d_{IDEOGRAPHS}]\.){{2,}}|[{IDEOGRAPHS}][{mark}]*"
        rf"|{letters}(?:(?!['’]s\b)[.,'’&/-]{letters})*|['’]s\b"
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
