"""The errors that a user can cause: `BertkitError` and its subclasses.

Every message is one line that says what is wrong, where, and what to do. The command line prints it
after `error:` and exits with status 2; a library caller catches `BertkitError`.
"""

from __future__ import annotations

import difflib
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any

BREAKS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, Unicode line separators, marks that reverse what follows them on a terminal,
and surrogates (undecodable bytes of file names)."""


class BertkitError(Exception):
    """Bad input, a damaged file or an impossible request; the message is one line for the user.

    The `code` is a short, stable identifier for programs; messages may change. A message may quote
    names from untrusted files, so characters that would break the line are escaped.
    """

    code = "error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(escape_line_breaks(message))
        self.code = code or self.code


def escape_line_breaks(text: str) -> str:
    """Return a text on one line: line breaks and unprintable characters become Python escapes."""
    return BREAKS.sub(lambda match: repr(match[0])[1:-1], text)


class InputTypeError(BertkitError, TypeError):
    """A Python argument is of the wrong type, such as a text where a list of texts is needed."""

    code = "type"


class HeldError(BertkitError):
    """Another process is working in the same folder."""

    code = "held"


class DivergedError(BertkitError):
    """The loss or the gradient became NaN or infinite."""

    code = "diverged"
    step = 0
    """The update in which it happened, if it is known."""


NOT_FINITE = "not-finite"
"""The code of the error for results that are NaN or infinite, from which nothing can be said."""


def short_repr(value: object) -> str:
    """Return the `repr` of a value for a message, shortened, however large or deep the value is."""
    return reprlib.repr(value)[:60]


def is_ordered(value: Any) -> bool:
    """Return whether a value is a list or the like: not text, and not a DataFrame of columns."""
    unordered = isinstance(value, str | bytes | Mapping | Set) or hasattr(value, "columns")
    return isinstance(value, Iterable) and not unordered and getattr(value, "ndim", 1) > 0


def checked_texts(texts: Any) -> Iterator[str]:
    """Yield texts; raise an InputTypeError if there is no list of them, or for an item like NaN."""
    if not is_ordered(texts):
        raise InputTypeError(
            f"give a list of texts, or the column of a table that has them, not "
            f"{short_repr(texts)}; put one text in brackets"
        )
    for number, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputTypeError(f"text number {number} is {short_repr(text)}, which is not a text")
        yield text


def flag(name: str) -> str:
    """Return the command-line flag of a field."""
    return f"--{name.replace('_', '-')}"


def check_known(what: str, name: object, known: Iterable[str], code: str | None = None) -> None:
    """Raise a BertkitError with a hint if a name is not among the known ones."""
    if name not in (names := list(known)):
        raise BertkitError(f"no {what} is called '{name}'{nearest(str(name), names)}", code=code)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for a misspelt name: `; did you mean 'x'?`, or the list of known names."""
    candidates = sorted(known)
    close = difflib.get_close_matches(str(name), candidates, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(candidates)}" if candidates else ""
