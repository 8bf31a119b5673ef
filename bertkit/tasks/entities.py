"""Entity tags (paper section 5.3): schemes, entities and their scores, and files of tagged words.

Entities are extracted as in the `conlleval` script of CoNLL-2003, whatever the tagging scheme: IOB1
(the original files), IOB2, IOBES or BILOU.

CoNLL-U (Universal Dependencies) is read like other files with one word per line. It also has lines
that are not words (https://universaldependencies.org/format.html): comments before a sentence,
ranges such as `1-2` for a written token that counts as several words, and empty nodes such as
`8.1`. In other formats the same lines are words, so a file is recognized as CoNLL-U only by its
first lines.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bertkit.errors import BertkitError
from bertkit.files import write_text
from bertkit.text.documents import TextCounts, plain_lines
from bertkit.text.sources import Source, one_source

TAG = re.compile(r"(?![BIESLU]-$)\S+")
ENTITY_TAG = re.compile(r"O|[BIESLU](-.+)?")
"""An entity tag; it has no type if all entities are of one type."""
NO_TAGS = {"[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "<PAD>", "PAD", "X"}
"""Labels that some code gives to padding, special tokens and the later tokens of a word."""

DOCUMENT = "-DOCSTART-"
SPACES = re.compile(" +")
COMMENT = re.compile(r"# *(?:(?:newdoc|newpar)\b|id +\S|(?:sent_id|text) *=|[^\s=]+ += )")
"""Comments of CoNLL-U and similar formats, such as `# sent_id = 1` and `# newpar`."""
NEW_DOCUMENT = re.compile(r"# *newdoc\b")
NO_WORD = re.compile(r"\d+([-.])\d+")
REASONS = {"-": "range of words (CoNLL-U), its words kept", ".": "empty node (CoNLL-U)"}
CONLLU = (True, 10)
"""The line shape of CoNLL-U: ten columns separated by tabs."""


class WordsExample(NamedTuple):
    """A sentence as words, each with its tag."""

    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None
    document: str
    """What names the document; its sentences are adjacent and share this name."""
    location: str
    text: str = ""
    """The running text that was split into words; "" if words were given."""
    spans: tuple[tuple[int, int], ...] = ()
    """The half-open character span of each word in `text`."""

    @property
    def gold(self) -> tuple[str, ...] | None:
        """The tags, or None if the file has none."""
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

    Returns:
        "precision", "recall" and "f1" over all entities, and "f1/PER" and so on for each gold or
        predicted type, as fractions of 1; a score without any entity to divide by is 0.
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


# Files --------------------------------------------------------------------------------------------


def conll_sentences(
    path: str | Path,
    counts: TextCounts,
    *,
    word_column: int = 0,
    tag_column: int | None = -1,
    untagged_ok: bool = False,
) -> Iterator[WordsExample]:
    """Yield the sentences of a file with one word per line and a blank line after each sentence.

    Columns are separated by tabs if a line has one, else by spaces, and by nothing else: a word of
    other whitespace or of zero-width characters is kept. A `-DOCSTART-` line (CoNLL-U: `# newdoc`)
    starts a document; in a file without any, each sentence is a document. The ID of a sentence is
    its number, from 0. Tags stay in the file's scheme; see `to_iob2`.

    Args:
        path: a local file or URL, compressed or not.
        counts: collects, at the end, invalid UTF-8 and lines left out.
        word_column: the column of the words, from 0, or -1 for the last.
        tag_column: the column of the tags, counted likewise; None to read no tags.
        untagged_ok: whether a file with only one column may be read, as words without tags.

    Raises:
        BertkitError: the file is missing or holds no sentence, a line has a different number of
            columns than the first, or a tag is not valid; the message names the line.
    """
    source, read = one_source(path), TextCounts(files=1)
    lines = (text for _, text in conll_lines(source, TextCounts(), word_column))
    marked = any(DOCUMENT in text and line_fields(text)[0] == DOCUMENT for text in lines)
    used = document = 0
    for line, rows in sentence_rows(source, read, word_column, tag_column, untagged_ok):
        if not rows:
            document += 1
            continue
        words = tuple(word for word, _ in rows)
        tags = tuple(tag for _, tag in rows if tag is not None)
        name = f"{source.path}#{document if marked else used}"
        yield WordsExample(str(used), words, tags or None, name, f"{source.path}:{line}")
        used += 1
    if not used:
        raise BertkitError(f"{path} holds no sentence; write one word a line with its tag")
    counts += read


def sentence_rows(
    source: Source, counts: TextCounts, word_column: int, tag_column: int | None, untagged_ok: bool
) -> Iterator[tuple[int, list[tuple[str, str | None]]]]:
    """Yield the first line and the (word, tag) rows of sentences; no rows start a document."""
    rows: list[tuple[str, str | None]] = []
    start = columns = 0
    for number, line in conll_lines(source, counts, word_column):
        fields = line_fields(line)
        starts_document = fields[0] == DOCUMENT
        if starts_document or not line.strip(" \t"):
            if rows:
                yield start, rows
                rows = []
            if starts_document:
                yield number, []
            continue
        location = f"{source.path}:{number}"
        columns = columns or len(fields)
        if len(fields) != columns:
            raise BertkitError(
                f"{location}: {columns} columns in the first line, and {len(fields)} here; correct "
                "the line, since leaving it out would shift the tags (or give --format text for "
                "running text)"
            )
        if columns == 1 and untagged_ok:
            tag_column = None
        start = start if rows else number
        rows.append(word_row(fields, word_column, tag_column, location))
        if not fields[word_column]:
            counts.note("line without a word, kept", location)
    if rows:
        yield start, rows


def word_row(
    fields: Sequence[str], word_column: int, tag_column: int | None, location: str
) -> tuple[str, str | None]:
    """Return the word and the tag of a line."""
    count = len(fields)
    wanted = [word_column] if tag_column is None else [word_column, tag_column]
    chosen = {column % count for column in wanted if -count <= column < count}
    if len(chosen) < len(wanted):
        tag = "" if tag_column is None else f" and another, {tag_column}, for the tag"
        raise BertkitError(
            f"{location}: {count} column{'s' * (count > 1)}, but the options name column "
            f"{word_column} for the word{tag}; correct the line or name other columns"
        )
    if tag_column is None:
        return fields[word_column], None
    tag = fields[tag_column].strip(" ")
    if not TAG.fullmatch(tag):
        raise BertkitError(
            f"{location}: '{tag[:40]}' in column {tag_column} is not a tag such as O, B-PER or "
            "NOUN; correct it or name the column of the tags"
        )
    return fields[word_column], tag


def conll_lines(source: Source, counts: TextCounts, word_column: int) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) for each line; for CoNLL-U only words and ends of sentences.

    Comments precede the first word of a sentence, begin with # and have other columns than word
    lines, so that the word # is kept. `# newdoc` becomes `-DOCSTART-`. Ranges and empty nodes are
    recognized by the first of ten columns.
    """
    shape, commented, numbered = conllu_shape(source)
    if shape is None:
        yield from plain_lines(source, counts)
        return
    if (shape == CONLLU or numbered) and word_column == 0:
        raise BertkitError(
            f"{source.path} is CoNLL-U, whose first column has numbers; give --word-column 1 and "
            "the column of the tags, such as --tag-column 3"
        )
    inside = False
    for number, line in plain_lines(source, counts):
        may_comment = commented and not inside and line.startswith("#")
        if may_comment and (COMMENT.match(line) or line_shape(line) != shape):
            if NEW_DOCUMENT.match(line):
                yield number, DOCUMENT
            else:
                counts.note("comment (CoNLL-U)", f"{source.path}:{number}")
            continue
        no_word = NO_WORD.fullmatch(line_fields(line)[0]) if shape == CONLLU else None
        if no_word:
            counts.note(REASONS[no_word[1]], f"{source.path}:{number}")
            continue
        inside = bool(line.strip(" \t"))
        yield number, line


def conllu_shape(source: Source) -> tuple[tuple[bool, int] | None, bool, bool]:
    """Return the shape of the word lines, or None if not CoNLL-U, and two facts about the file.

    They are whether it has comments, and whether its first column numbers the words. A file is
    CoNLL-U if its first line is a comment, or has ten columns and the number 1 or 1-2.
    """
    lines = (line for _, line in plain_lines(source, TextCounts()) if line.strip(" \t"))
    first = next(lines, "")
    if COMMENT.match(first):
        words = (line for line in lines if line[0] != "#")
        first, second = next(words, ""), next(words, "")
        numbers = line_fields(first)[0], line_fields(second)[0]
        return line_shape(first), True, numbers in {("1", "2"), ("1", "1"), ("1-2", "1")}
    numbered = line_shape(first) == CONLLU and line_fields(first)[0] in ("1", "1-2")
    return (CONLLU if numbered else None), False, numbered


def line_fields(line: str) -> list[str]:
    """Split a line into its columns, at tabs if it has any, else at spaces."""
    return line.split("\t") if "\t" in line else SPACES.split(line.strip(" "))


def line_shape(line: str) -> tuple[bool, int]:
    """Return whether a line is split at tabs, and its number of columns."""
    return "\t" in line, len(line_fields(line))


def write_conll(
    path: Path, inputs: Sequence[WordsExample], predicted: Sequence[Sequence[str]]
) -> None:
    """Write the lines "word gold predicted" that the conlleval script reads.

    Whitespace inside a word becomes "_". Entity tags are written as IOB2, since the script does not
    know the U- and L- of BILOU. The gold tag is O if a sentence has no tags.
    """
    tags_used = {tag for example in inputs for tag in example.tags or ()}
    entity_tags = are_entity_tags(tags_used.union(*predicted))
    lines: list[str] = []
    for example, tags in zip(inputs, predicted, strict=True):
        gold: Sequence[str] = example.tags or ["O"] * len(tags)
        shown = to_iob2(tags) if entity_tags else tags
        gold = to_iob2(gold) if entity_tags else gold
        words = [re.sub(r"\s", "_", word) or "_" for word in example.words]
        lines += (" ".join(row) for row in zip(words, gold, shown, strict=True))
        lines.append("")
    write_text(path, "".join(f"{line}\n" for line in lines))
