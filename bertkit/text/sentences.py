"""Documents to sentences, the unit of BERT's sentence pairs (section 3.1, task 2).

A line end always ends a sentence, as in the input format of the BERT release. Within a line,
Wikimedia's sentencex finds the boundaries by rules for some 300 languages. Two of its traits are
dealt with here: it fails on wide spaces next to an initial ("Vitamin B<no-break space>. C"), and
its time grows with the square of a line's length where the line is not ASCII (400,000 Chinese
characters: 22 s), so long lines go through it in windows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache

import sentencex

from bertkit.errors import BertkitError

WINDOW = 4000
"""Characters; 5 of 337,000 lines of English Wikipedia are longer."""
WINDOW_STEPS = 8
"""The most windows that read a character: of "A.A.A." the library ends a sentence at the first dot
alone, and a window that moved on by two characters would read nearly the same again."""
CODE = re.compile(r"[a-z]{2,3}(-[a-z0-9]+)*")
REGION = re.compile(r"(?<=^[a-z]{2})-([a-z]{2}|[0-9]{3})$")
WIDE_SPACES = "\xa0\u1680\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""What Unicode holds for white space beyond ASCII and is no line end."""


def check_language(language: str) -> None:
    """Refuse what cannot be a language.

    Args:
        language: "lines", or a language code: two or three letters, more parts after hyphens.

    Raises:
        BertkitError: it is neither.
    """
    if language != "lines":
        language_code(language)


def split_sentences(document: str, language: str = "en") -> list[str]:
    """The sentences of a document in order, stripped, none empty.

    Nothing but white space is lost: the sentences joined are the document without it. Unicode's
    wide spaces become plain ones.

    Args:
        document: any text; every line end that Unicode knows ends a sentence.
        language: a code such as "en" or "pt-BR" (upper or lower case, a region makes no
            difference). sentencex takes related rules for languages without their own (Bavarian:
            German) and English rules for codes it does not know. "lines" takes each line as one
            sentence, as `google-research/bert` does.

    Raises:
        BertkitError: the language is not a code, or sentencex fails on the text.
    """
    if language == "lines":
        return [line for piece in document.splitlines() if (line := piece.strip())]
    code = language_code(language)
    sentences: list[str] = []
    try:
        for line in plain_spaces(document).splitlines():
            long = len(line) > WINDOW
            pieces = segment_windows(code, line) if long else sentencex.segment(code, line)
            sentences += [sentence for piece in pieces if (sentence := piece.strip())]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception and would end a worker mutely
        raise BertkitError(
            f"sentencex cannot split the document that begins {document[:40]!r} ({error}); "
            f"put one sentence on each line and choose the language 'lines'"
        ) from error
    return sentences


@lru_cache(maxsize=16)
def language_code(language: str) -> str:
    """The code as sentencex spells it; "DE" and "de_AT" would silently get English rules."""
    code = REGION.sub("", language.replace("_", "-").lower())
    if not CODE.fullmatch(code):
        raise BertkitError(
            f"'{language}' is not a language code; use one such as 'en', 'de' or 'zh', "
            f"or 'lines' for text with one sentence on each line"
        )
    return code


def plain_spaces(document: str) -> str:
    """The same text with plain spaces for wide ones, one search for each kind.

    (The searches take less than half the time of one regular expression.)
    """
    if not document.isascii():
        for space in WIDE_SPACES:
            document = document.replace(space, " ")
    return document


def segment_windows(code: str, line: str) -> Iterator[str]:
    """The pieces of a long line, found in windows each of which begins at a boundary.

    The last piece of a window may go on, so the next window begins with it. A window without a
    boundary, or with one at its beginning alone, is joined to what follows: no sentence is cut for
    its length, and no character is read by more than some windows.
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
