"""Signals and standard streams of the command line.

A signal that ends a command lets it clean up, and the exit status is 128 + n. Standard output and
error take any character; a full disk or a closed reader ends the command without a traceback.
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
"""A signal that comes again so soon is the same one: `timeout` sends it to its group, too."""
CHECK_SECONDS = 0.5
"""How soon it is noticed that an exception came to nothing; see `end_by_exception`."""


class EndedError(KeyboardInterrupt):
    """A signal asks the process to end; whoever lets Ctrl-C pass lets it pass, too.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        Signals.raised = weakref.ref(self)


class Signals:
    """What came last."""

    number = 0
    when = -math.inf
    raised: Callable[[], EndedError | None] = staticmethod(lambda: None)
    """The exception, while it is on its way."""


def end_by_exception() -> None:
    """Let the signals that end a process raise `EndedError`, for `finally` clauses to run.

    An exception that Python cannot pass on, such as one raised while a weak reference calls back,
    would come to nothing. So it is looked after until `stop_looking`: while it lives, it is on its
    way; else it is raised again. Signals that are ignored, as `nohup` makes them, stay so.
    """
    sys.unraisablehook = quiet_hook
    for number in [getattr(signal, name) for name in ENDING if hasattr(signal, name)]:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)
    if hasattr(signal, "SIGALRM"):
        signal.signal(signal.SIGALRM, end_again)


def end(number: int, _: object) -> None:
    """A signal that ends the process came."""
    before, Signals.when = Signals.when, time.monotonic()
    if Signals.when - before > AGAIN_SECONDS:
        Signals.number = number
        if hasattr(signal, "setitimer"):
            signal.setitimer(signal.ITIMER_REAL, CHECK_SECONDS, CHECK_SECONDS)
        raise EndedError(number)


def end_again(*_: object) -> None:
    """The time to look whether the exception is still on its way."""
    if Signals.raised() is None:
        raise EndedError(Signals.number)


def stop_looking() -> None:
    """The exception has arrived."""
    if hasattr(signal, "setitimer"):
        signal.setitimer(signal.ITIMER_REAL, 0)


def quiet_hook(unraisable: Any) -> None:
    """Python's hook for exceptions that it cannot pass on, without ours: they are raised again."""
    if not isinstance(unraisable.exc_value, EndedError):
        sys.__unraisablehook__(unraisable)


ESCAPED = "bertkit-escaped"


def escape(error: UnicodeError) -> tuple[str, int]:
    """What a stream's encoding lacks, as JSON writes it, so that lines of JSON stay what they are.

    Args:
        error: raised by the encoder.
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    units = error.object[error.start : error.end].encode("utf-16-be", "surrogatepass")
    pairs = zip(units[::2], units[1::2], strict=True)
    return "".join(f"\\u{high:02x}{low:02x}" for high, low in pairs), error.end


class Stream(io.TextIOWrapper):
    """A standard stream; what cannot be written to the error stream is lost without an error.

    Args:
        descriptor: 1 or 2.
        encoding: of the stream that it takes the place of.
    """

    def __init__(self, descriptor: int, encoding: str) -> None:
        file = open(descriptor, "wb", closefd=False)  # noqa: SIM115
        at_once = file.isatty() or descriptor == 2
        super().__init__(file, encoding=encoding, errors=ESCAPED, line_buffering=at_once)
        self.descriptor = descriptor

    def write(self, text: str, /) -> int:
        """Write text.

        Raises:
            BertkitError: the standard output cannot be written.
            BrokenPipeError: nobody reads it any more.
        """
        try:
            return super().write(text)
        except OSError as error:
            self.give_up(error)
        return len(text)

    def flush(self) -> None:
        """Hand everything to the operating system; see `write`."""
        try:
            super().flush()
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """Send this and all that follows nowhere, and say so where it was wanted."""
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
    """Put a `Stream` in the place of both; those that are closed are opened first.

    Files that are opened later would otherwise get their numbers, and be printed into.
    """
    codecs.register_error(ESCAPED, escape)
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # what is opened takes the lowest free number: this one
            os.open(os.devnull, os.O_WRONLY if descriptor == 2 else os.O_RDONLY)
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        before = getattr(sys, name)
        with suppress(OSError, AttributeError):
            before.flush()
        setattr(sys, name, Stream(descriptor, getattr(before, "encoding", None) or "utf-8"))
