"""Words with tags in columns, as CoNLL-2003 has them (BERT section 5.3), and the score of entities.

What an entity is follows the `conlleval` script of that shared task in every scheme: IOB1 (the
original files), IOB2, IOBES and BILOU.

CoNLL-U (Universal Dependencies) is read as other files with one word a line. Such files have lines
that are no words (https://universaldependencies.org/format.html): comments before a sentence,
ranges such as `1-2` for a token that is written as one and counts as several words, and empty nodes
such as `8.1` for words that are not in the text. In files of other kinds the same lines are words,
so a file is taken for CoNLL-U only by its first line.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from bertkit.datasets.examples import WordsExample
from bertkit.datasets.tabular import one_source
from bertkit.errors import BertkitError
from bertkit.files import write_text
from bertkit.text.lines import TextCounts, text_lines
from bertkit.text.sources import DAMAGE, Source, one_line

CONLL_SITE = "https://www.clips.uantwerpen.be/conll2003/ner/"
REUTERS = "https://trec.nist.gov/data/reuters/reuters.html"
TAG = re.compile(r"(?![BIESLU]-$)\S+")
DOCUMENT = "-DOCSTART-"
SPACES = re.compile(" +")
COMMENT = re.compile(r"# *(?:(?:newdoc|newpar)\b|id +\S|(?:sent_id|text) *=|[^\s=]+ += )")
"""What CoNLL-U, and others after it, say of a file or a sentence: `# sent_id = 1`, `# newpar`."""
NEW_DOCUMENT = re.compile(r"# *newdoc\b")
NO_WORD = re.compile(r"\d+([-.])\d+")
REASONS = {"-": "range of words (CoNLL-U), its words kept", ".": "empty node (CoNLL-U)"}
CONLLU = (True, 10)
"""Ten columns between tabs."""
UNREAD = "columns beside that of the word, not read (running text to be tagged: --format text)"
ENTITY_TAG = re.compile(r"O|[BIESLU](-.+)?")
"""Also without a type, where all entities are of one."""


NO_TAGS = {"[PAD]", "[CLS]", "[SEP]", "[MASK]", "[UNK]", "<PAD>", "PAD", "X"}
"""Labels that some code gives to padding, to special tokens and to pieces but the first."""


def entity_tags(labels: Iterable[str]) -> list[str]:
    """The labels that words can have: without those of padding and the like."""
    return [label for label in labels if label not in NO_TAGS]


def are_entity_tags(tags: Collection[str]) -> bool:
    """Whether tags are those of entities: O and B-X, I-X and the like.

    B, I, E and S of every word, without O, are of word segmentation.
    """
    marked = "O" in tags or any("-" in tag for tag in tags)
    return marked and all(ENTITY_TAG.fullmatch(tag) for tag in tags)


# Lines -------------------------------------------------------------------------------------------


def conllu_fields(line: str) -> list[str]:
    """The columns of a line."""
    return line.split("\t") if "\t" in line else SPACES.split(line.strip(" "))


def conll_lines(source: Source, counts: TextCounts, word_column: int) -> Iterator[tuple[int, str]]:
    """Number and text of every line; in CoNLL-U of those only that are words or end a sentence.

    Comments stand before the first word of a sentence, begin with # and have other columns than
    words, so that a word # stays one. `# newdoc` becomes `-DOCSTART-`. Ranges and empty nodes are
    known by the first of ten columns.

    Args:
        source: the file.
        counts: is told of invalid UTF-8 and of every line left out.
        word_column: where the words are.

    Raises:
        BertkitError: it is CoNLL-U, and the words are said to be where it has their numbers.
    """
    words, commented = conllu_shape(source)
    if words is None:
        yield from text_lines(source, counts)
        return
    if words == CONLLU and word_column == 0:
        raise BertkitError(
            f"{source.path} is CoNLL-U, whose first column has numbers; give --word-column 1 and "
            f"the column of the tags, such as --tag-column 3"
        )
    inside = False
    for number, line in text_lines(source, counts):
        may_comment = commented and not inside and line.startswith("#")
        if may_comment and (COMMENT.match(line) or conllu_line_shape(line) != words):
            if NEW_DOCUMENT.match(line):
                yield number, DOCUMENT
            else:
                counts.note("comment (CoNLL-U)", f"{source.path}:{number}")
            continue
        no_word = NO_WORD.fullmatch(conllu_fields(line)[0]) if words == CONLLU else None
        if no_word:
            counts.note(REASONS[no_word[1]], f"{source.path}:{number}")
            continue
        inside = bool(line.strip(" \t"))
        yield number, line


def conllu_shape(source: Source) -> tuple[tuple[bool, int] | None, bool]:
    """The shape of the words' lines and whether there are comments; None for another kind of file.

    It is CoNLL-U if its first line is a comment, or has ten columns and number 1.
    """
    lines = (line for _, line in text_lines(source, TextCounts()) if line.strip(" \t"))
    first = next(lines, "")
    if COMMENT.match(first):
        return conllu_line_shape(next((line for line in lines if line[0] != "#"), "")), True
    numbered = conllu_line_shape(first) == CONLLU and conllu_fields(first)[0] in ("1", "1-2")
    return (CONLLU if numbered else None), False


def conllu_line_shape(line: str) -> tuple[bool, int]:
    """Whether tabs divide a line, and into how many columns."""
    return "\t" in line, len(conllu_fields(line))


# Files --------------------------------------------------------------------------------------------


def conll_sentences(
    path: str | Path,
    counts: TextCounts,
    *,
    word_column: int = 0,
    tag_column: int | None = -1,
    untagged_ok: bool = False,
) -> Iterator[WordsExample]:
    """The sentences of a file with one word a line and a blank line after each, as they are read.

    Columns stand between tabs where a line has one, else between spaces. Nothing else separates: a
    word of other whitespace or of zero-width characters stays a word. A `-DOCSTART-` line (CoNLL-U:
    `# newdoc`) begins a document; in a file without any, every sentence is a document of its own:
    the file is looked through for the first such line before it is read. The ID is the number of
    the sentence, from 0. Tags stay in the file's scheme; see `to_iob2`.

    Args:
        path: a local file or URL, compressed or not.
        counts: is told at the end of invalid UTF-8, and of lines left out (see `conll_lines`).
        word_column: from 0, or -1 for the last.
        tag_column: the same; None for a file without tags.
        untagged_ok: whether a file with one column only may be read, as words without tags.

    Raises:
        BertkitError: the file is absent or holds no sentence, a line has another number of columns
            than the first, or a tag is none; the message names the line.
    """
    source = one_source(path)
    found = TextCounts(files=1)
    used = document = 0
    last, line = -1, 0
    try:
        marked = marks_documents(source, word_column)
        for line, rows in sentence_rows(source, found, word_column, tag_column, untagged_ok):
            if rows:
                words = tuple(row.word for row in rows)
                tags = tuple(row.tag for row in rows if row.tag is not None)
                last = document if marked else used
                yield WordsExample(str(used), words, tags or None, last, f"{source.path}:{line}")
                used += 1
            else:
                document += last == document  # a document without sentences has no number
    except DAMAGE as error:
        after = f" after line {line}" if line else ""
        raise BertkitError(
            f"{path} cannot be read{after} ({one_line(error)}); restore it"
        ) from error
    if not used:
        raise BertkitError(f"{path} holds no sentence; write one word a line with its tag")
    counts += found


def marks_documents(source: Source, word_column: int) -> bool:
    """Whether a line begins a document; looks no further than the first that does."""
    lines = conll_lines(source, TextCounts(), word_column)
    return any(DOCUMENT in line and conllu_fields(line)[0] == DOCUMENT for _, line in lines)


class WordRow(NamedTuple):
    """What is read of a line."""

    word: str
    tag: str | None


def sentence_rows(
    source: Source,
    counts: TextCounts,
    word_column: int,
    tag_column: int | None,
    untagged_ok: bool,
) -> Iterator[tuple[int, list[WordRow]]]:
    """First line and rows of every sentence; no rows for the line that begins a document."""
    rows: list[WordRow] = []
    start = columns = 0
    for number, line in conll_lines(source, counts, word_column):
        fields = conllu_fields(line)
        opens = fields[0] == DOCUMENT
        if opens or not line.strip(" \t"):
            if rows:
                yield start, rows
                rows = []
            if opens:
                yield number, []
            continue
        place = f"{source.path}:{number}"
        columns = columns or len(fields)
        if len(fields) != columns:
            remedy = "correct the line, since leaving it out would shift the tags"
            if tag_column is None:
                remedy = "correct the line, or give --format text for running text"
            raise BertkitError(
                f"{place}: {len(fields)} columns where the first line has {columns}; {remedy}"
            )
        if columns == 1 and untagged_ok:
            tag_column = None
        if columns > 1 and tag_column is None:
            counts.note(UNREAD, place)
        start = start if rows else number
        rows.append(word_row(fields, word_column, tag_column, place))
        if not rows[-1].word:
            counts.note("line without a word, kept", place)
    if rows:
        yield start, rows


def word_row(
    fields: Sequence[str], word_column: int, tag_column: int | None, place: str
) -> WordRow:
    """The word and the tag of a line."""
    count = len(fields)
    wanted = [word_column] if tag_column is None else [word_column, tag_column]
    chosen = {column % count for column in wanted if -count <= column < count}
    if len(chosen) < len(wanted):
        raise BertkitError(
            f"{place}: {count} column{'s' * (count > 1)}, so there are none for word "
            f"({word_column}) and tag ({tag_column}); correct the line or name other columns"
        )
    if tag_column is None:
        return WordRow(fields[word_column], None)
    tag = fields[tag_column].strip(" ")
    if not TAG.fullmatch(tag):
        raise BertkitError(
            f"{place}: '{tag[:40]}' in column {tag_column} is not a tag such as O, B-PER or NOUN; "
            f"correct it or name the column of the tags"
        )
    return WordRow(fields[word_column], tag)


def write_conll(
    path: Path, inputs: Sequence[WordsExample], predicted: Sequence[Sequence[str]]
) -> None:
    """Write the lines "word gold predicted" that the conlleval script reads.

    Whitespace inside a word becomes "_", since spaces separate the columns. Tags of entities are
    written as IOB2 on both sides, since the script knows no U- and L- (BILOU); others as they are.

    Args:
        path: the file to write.
        inputs: sentences; the gold tag is O where they have none.
        predicted: the tags of each.

    Raises:
        BertkitError: a sentence has another number of words than of predicted tags.
    """
    every = [*(given.tags or () for given in inputs), *predicted]
    entity_tags = are_entity_tags({tag for tags in every for tag in tags})
    written: Callable[[Sequence[str]], Sequence[str]] = to_iob2 if entity_tags else list
    lines: list[str] = []
    for given, tags in zip(inputs, predicted, strict=True):
        if len(tags) != len(given.words):
            raise BertkitError(
                f"{given.place}: {len(tags)} predicted tags for {len(given.words)} words; predict "
                f"one a word"
            )
        gold = given.tags or ["O"] * len(tags)
        words = [re.sub(r"\s", "_", word) or "_" for word in given.words]
        rows = zip(words, written(gold), written(tags), strict=True)
        lines += (" ".join(row) for row in rows)
        lines.append("")
    write_text(path, "".join(f"{line}\n" for line in lines))


# Entities ----------------------------------------------------------------------------------------


def find_entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """(type, first word, word after the last) of every entity, by conlleval's rule.

    B and S begin an entity; so does I or E after O, after E or S, or after another type. An entity
    ends where the next begins or at O.
    """
    found: list[tuple[str, int, int]] = []
    start, before, type_before = 0, "O", ""
    for i, tag in enumerate([*tags, "O"]):
        prefix, _, kind = tag.partition("-")
        begins = prefix != "O" and (
            prefix in "BS" or before in ("O", "E", "S") or kind != type_before
        )
        if before != "O" and (begins or prefix == "O"):
            found.append((type_before, start, i))
        start = i if begins else start
        before, type_before = prefix, kind
    return found


def conll_scheme(tags: Sequence[str]) -> list[str]:
    """Tags with L- (last) and U- (unit), of the BILOU scheme, as E- and S-; others unchanged."""
    same = {"L-": "E-", "U-": "S-", "L": "E", "U": "S"}
    return [same.get(tag[:2], tag[:2]) + tag[2:] for tag in tags]


def to_iob2(tags: Sequence[str]) -> list[str]:
    """The same entities with B- on the first word of each and I- on the others.

    Args:
        tags: IOB1, IOB2, IOBES or BILOU.
    """
    converted = ["O"] * len(tags)
    for kind, start, end in find_entities(conll_scheme(tags)):
        first, other = (f"B-{kind}", f"I-{kind}") if kind else ("B", "I")
        converted[start:end] = [first, *[other] * (end - start - 1)]
    return converted


def entity_scores(
    gold: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]
) -> dict[str, float]:
    """Precision, recall and F1 of entities, right only with both borders and the type.

    Args:
        gold: the tags of every sentence.
        predicted: the same, with as many tags in each.

    Returns:
        "precision", "recall" and "f1" over all entities, and "f1/PER" and the like for every type
        of either side, as fractions of 1; a share of nothing is 0.

    Raises:
        BertkitError: the numbers of sentences or tags differ.
    """
    if [len(tags) for tags in gold] != [len(tags) for tags in predicted]:
        raise BertkitError("gold and predicted tags differ in number; score the same sentences")
    right: Counter[str] = Counter()
    given: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    for gold_tags, predicted_tags in zip(gold, predicted, strict=True):
        gold_entities, own = set(find_entities(gold_tags)), set(find_entities(predicted_tags))
        wanted.update(kind for kind, _, _ in gold_entities)
        given.update(kind for kind, _, _ in own)
        right.update(kind for kind, _, _ in gold_entities & own)
    scores = precision_recall_f1(right.total(), given.total(), wanted.total(), "")
    for kind in sorted((wanted | given).keys() - {""}):
        scores |= precision_recall_f1(right[kind], given[kind], wanted[kind], f"/{kind}")
    return scores


def precision_recall_f1(right: int, given: int, wanted: int, suffix: str) -> dict[str, float]:
    """Precision, recall and F1 of counts, under names with a suffix."""
    return {
        f"precision{suffix}": right / given if given else 0.0,
        f"recall{suffix}": right / wanted if wanted else 0.0,
        f"f1{suffix}": 2 * right / (given + wanted) if given + wanted else 0.0,
    }
