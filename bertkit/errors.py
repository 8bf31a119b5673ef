"""The one error a user can cause.

Every message is one line that says what was wrong, where, and what to do. The command line prints
it after `error:` and exits with status 2; a library caller catches `BertkitError`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

BREAKS = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029]")
"""Control characters, and the two others that end a line."""


class BertkitError(Exception):
    """Bad input, a damaged file or an impossible request; the message is for the user.

    Names in it may be those of a stranger's file: what would break the line or move the terminal's
    cursor is shown as Python writes it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(BREAKS.sub(lambda found: repr(found[0])[1:-1], message))


class HeldError(BertkitError):
    """Another process works in a folder."""


class DivergedError(BertkitError):
    """The loss or the gradient is no longer a number."""


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
