"""The entry point of the command line: `python -m bertkit` and the command `bertkit`."""

from __future__ import annotations

import os
import signal


def program() -> None:
    """Run the command line; until it is imported, Ctrl-C ends the process at once."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # background jobs ignore it
        signal.signal(signal.SIGINT, lambda number, _: os._exit(128 + number))
    from bertkit.cli.app import run_program

    run_program()


if __name__ == "__main__":
    program()
