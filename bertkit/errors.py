"""The one error a user can cause.

Every message is one line that says what was wrong, where, and what to do. The command line prints
it after `error:` and exits with status 2; a library caller catches `BertkitError`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class BertkitError(Exception):
    """Bad input, a damaged file or an impossible request; the message is for the user."""


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
