"""Split documents into sentences, the unit of BERT's sentence pairs (section 3.1, task 2).

A line end always ends a sentence, as in the input format of the BERT release. Within a line,
Wikimedia's sentencex finds the boundaries. It fails on wide spaces next to an initial ("Vitamin
B<no-break space>. C"), and its time grows with the square of the length of a line that is not
ASCII (400,000 Chinese characters: 22 s), so long lines are split in windows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import sentencex

from bertkit.errors import BertkitError

WINDOW = 4000
"""The length in characters; 5 of 337,000 lines of English Wikipedia are longer."""
WINDOW_STEPS = 8
"""The maximum number of windows that read a character, such as of "A.A.A." without sentences."""
CODE = re.compile(r"[a-z]{2,3}(-[a-z0-9]+)*")
REGION = re.compile(r"(?!nds-nl$)([a-z]{2,3})(-[a-z]{4})?-([a-z]{2}|[0-9]{3})")
"""A code with a region, and perhaps a script before it; nds-nl is a language."""
WIDE_SPACES = "\xa0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""Unicode's white space beyond ASCII, except line ends."""


def split_sentences(document: str, language: str = "en") -> list[str]:
    """Return the sentences of a document in order, stripped and not empty.

    Only white space is lost. `language` is a code such as "en" or "pt-BR"; one without rules has
    those of a related language, or of English. "lines" makes each line a sentence.
    """
    code = language_code(language)
    if code == "lines":
        return [line for piece in document.splitlines() if (line := piece.strip())]
    if not document.isascii():  # faster than a regular expression
        for space in WIDE_SPACES:
            document = document.replace(space, " ")
    sentences: list[str] = []
    try:
        for line in document.splitlines():
            long = len(line) > WINDOW
            pieces = segment_windows(code, line) if long else sentencex.segment(code, line)
            sentences += [sentence for piece in pieces if (sentence := piece.strip())]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a Rust panic is not an Exception and would kill a worker
        raise BertkitError(
            f"sentencex cannot split the document that starts {document[:40]!r} ({error}); "
            f"put one sentence on each line and choose the language 'lines'"
        ) from error
    return sentences


@lru_cache(maxsize=16)
def language_code(language: str) -> str:
    """Return the code as sentencex spells it; "DE" and "de_AT" would silently get English rules."""
    if language == "lines":
        return language
    code = language.replace("_", "-").lower()
    if with_region := REGION.fullmatch(code):
        code = with_region[1]
    if not CODE.fullmatch(code):
        raise BertkitError(
            f"'{language}' is not a language code; use one such as 'en', 'de' or 'zh', "
            f"or 'lines' for text with one sentence on each line"
        )
    return code


def segment_windows(code: str, line: str) -> Iterator[str]:
    """Yield the segments of a long line from windows that each start at a boundary.

    The next window starts with the last segment, which may be incomplete. A window without a
    boundary, or with one only near its start, is joined to what follows.
    """
    start = 0
    unfinished: list[str] = []
    while start + WINDOW < len(line):
        pieces = sentencex.segment(code, line[start : start + WINDOW])
        if len(pieces) > 1:
            last = pieces.pop()
            yield "".join([*unfinished, pieces[0]])
            yield from pieces[1:]
            unfinished.clear()
            if len(last) > WINDOW - WINDOW // WINDOW_STEPS:
                pieces.append(last)
                unfinished.append(last)
        else:
            unfinished += pieces
        start += sum(map(len, pieces))
    first, *pieces = sentencex.segment(code, line[start:])
    yield "".join([*unfinished, first])
    yield from pieces
