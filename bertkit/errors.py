"""The one error a user can cause.

Every message is one line that says what was wrong, where, and what to do. The command line prints
it after `error:` and exits with status 2; a library caller catches `BertkitError`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

BREAKS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""Control characters, the two others that end a line, and bytes of file names that are no text."""


class BertkitError(Exception):
    """Bad input, a damaged file or an impossible request; the message is for the user.

    Names in it may be those of a stranger's file: what would break the line or move the terminal's
    cursor is shown as Python writes it.

    Args:
        message: one line.
        code: a short, stable name of what is wrong, for programs; messages may change.
    """

    code = "error"

    def __init__(self, message: str, *, code: str | None = None) -> None:
        super().__init__(escape_line_breaks(message))
        self.code = code or self.code


def escape_line_breaks(text: str) -> str:
    """A text on one line, with what would break it or cannot be printed as Python writes it."""
    return BREAKS.sub(lambda found: repr(found[0])[1:-1], text)


class HeldError(BertkitError):
    """Another process works in a folder."""

    code = "held"


class DivergedError(BertkitError):
    """The loss or the gradient is no longer a number."""

    code = "diverged"


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelt name: `; did you mean 'x'?`, or the list of what is known.

    Args:
        name: what the user wrote.
        known: the names that would have been accepted.
    """
    candidates = sorted(known)
    close = difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(candidates)}" if candidates else ""
