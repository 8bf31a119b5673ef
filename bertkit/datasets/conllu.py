"""CoNLL-U (Universal Dependencies) read as other files with one word a line.

Such files have lines that are no words (https://universaldependencies.org/format.html): comments
before a sentence, ranges such as `1-2` for a token that is written as one and counts as several
words, and empty nodes such as `8.1` for words that are not in the text. In files of other kinds the
same lines are words, so a file is taken for CoNLL-U only by its first line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from bertkit.errors import BertkitError
from bertkit.text.lines import TextCounts, text_lines
from bertkit.text.sources import Source

DOCUMENT = "-DOCSTART-"
SPACES = re.compile(" +")
COMMENT = re.compile(r"# *(?:(?:newdoc|newpar)\b|id +\S|(?:sent_id|text) *=|[^\s=]+ += )")
"""What CoNLL-U, and others after it, say of a file or a sentence: `# sent_id = 1`, `# newpar`."""
NEW_DOCUMENT = re.compile(r"# *newdoc\b")
NO_WORD = re.compile(r"\d+([-.])\d+")
REASONS = {"-": "range of words (CoNLL-U), its words kept", ".": "empty node (CoNLL-U)"}
CONLLU = (True, 10)
"""Ten columns between tabs."""


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
