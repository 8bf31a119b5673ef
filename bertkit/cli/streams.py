"""Handle signals and the standard streams of the command line.

A command that is ended by signal n can clean up first, and its exit status is 128 + n. Standard
output and error accept any character; a full disk or a closed reader ends the command without a
traceback.
"""

from __future__ import annotations

import codecs
import io
import math
import os
import signal
import sys
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from bertkit.errors import BertkitError

ENDING = ("SIGINT", "SIGTERM", "SIGHUP")
AGAIN_SECONDS = 1.0
"""The time within which a repeated signal is ignored: `timeout` also signals its whole group."""
CHECK_SECONDS = 0.5
"""The interval of checks for whether an exception was lost; see `end_by_exception`."""


class EndedError(KeyboardInterrupt):
    """A signal has asked the process to end; code that does not catch Ctrl-C does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        Signals.raised = weakref.ref(self)


class Signals:
    """The last signal that asked the process to end."""

    number = 0
    when = -math.inf
    raised: Callable[[], EndedError | None] = staticmethod(lambda: None)
    """Returns the exception for as long as it is alive, which means that it propagates."""


def end_by_exception() -> None:
    """Make the signals that end a process raise `EndedError`, so that `finally` clauses run.

    Python drops an exception that it cannot propagate, such as one raised in the callback of a weak
    reference. A timer therefore checks until `stop_looking` whether the exception is still alive,
    and raises it again if it is not. Ignored signals, as under `nohup`, stay ignored.
    """
    sys.unraisablehook = quiet_hook
    for number in [getattr(signal, name) for name in ENDING if hasattr(signal, name)]:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, end_again)


def end(number: int, _: object) -> None:
    """Handle a signal that ends the process: start the checks and raise `EndedError`."""
    before, Signals.when = Signals.when, time.monotonic()
    if Signals.when - before > AGAIN_SECONDS:
        Signals.number = number
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, CHECK_SECONDS, CHECK_SECONDS)
        raise EndedError(number)


def end_again(*_: object) -> None:
    """Handle the timer's signal: raise the exception again if it was lost."""
    if Signals.raised() is None:
        raise EndedError(Signals.number)


def stop_looking() -> None:
    """Stop the checks, because the exception has arrived."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)


def quiet_hook(unraisable: Any) -> None:
    """Report exceptions that Python cannot propagate, except ours, which is raised again."""
    if not isinstance(unraisable.exc_value, EndedError):
        sys.__unraisablehook__(unraisable)


ESCAPED = "bertkit-escaped"


def escape(error: UnicodeError) -> tuple[str, int]:
    """Escape characters that a stream cannot encode as in JSON, so that JSON lines stay valid."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = zip(units[::2], units[1::2], strict=True)
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in pairs), error.end


class Stream(io.TextIOWrapper):
    """A standard stream; a failed write to standard error is dropped without an exception.

    Args:
        descriptor: the file descriptor, 1 or 2.
        encoding: the encoding of the stream that this one replaces.
    """

    def __init__(self, descriptor: int, encoding: str) -> None:
        file = open(descriptor, "wb", closefd=False)  # noqa: SIM115
        at_once = file.isatty() or descriptor == 2
        super().__init__(file, encoding=encoding, errors=ESCAPED, line_buffering=at_once)
        self.descriptor = descriptor

    def write(self, text: str, /) -> int:
        """Write text.

        Raises:
            BertkitError: standard output cannot be written.
            BrokenPipeError: the reader of standard output has closed it.
        """
        try:
            return super().write(text)
        except OSError as error:
            self.give_up(error)
        return len(text)

    def flush(self) -> None:
        """Flush to the operating system; raises the same errors as `write`."""
        try:
            super().flush()
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """Redirect the stream to the null device; raise an error if it is standard output."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.descriptor)
        os.close(nowhere)
        super().flush()
        if isinstance(error, BrokenPipeError) and self.descriptor == 1:
            raise error
        if self.descriptor == 1:
            raise BertkitError(
                f"cannot write to the standard output: {error.strerror}", code="output"
            ) from None


def take_streams() -> None:
    """Replace standard output and error by a `Stream`, after opening closed standard descriptors.

    Otherwise a file opened later could get the number of a closed descriptor and be printed into.
    """
    codecs.register_error(ESCAPED, escape)
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # the next file to be opened gets the lowest free number, which is this one
            os.open(os.devnull, os.O_WRONLY if descriptor == 2 else os.O_RDONLY)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        with suppress(OSError, AttributeError):
            before.flush()
        setattr(sys, name, Stream(descriptor, getattr(before, "encoding", None) or "utf-8"))
