"""`python -m bertkit` and the command `bertkit` are the command line."""

from __future__ import annotations

import os
import signal


def program() -> None:
    """Run the command line; Ctrl-C ends the process at once while it is being imported."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a background job ignores it
        signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    from bertkit.cli.app import run_program

    run_program()


if __name__ == "__main__":
    program()
