"""Reading remote files: every failure is one line, and one of the network is tried again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import fsspec

from bertkit.errors import BertkitError
from bertkit.text.sources import missing_package, one_line

BLOCK_BYTES = 1 << 20
PAUSES = (1.0, 5.0)
"""Seconds before a second and a third attempt."""


class UnreachableError(BertkitError):
    """A remote place does not answer, or stopped to."""


@contextmanager
def opened(url: str) -> Iterator[Callable[[int], bytes]]:
    """Give a block what reads the next bytes of a remote file.

    Raises:
        FileNotFoundError: nothing is there.
        BertkitError: the address cannot be reached; the message is one line.
    """
    try:
        system, path = fsspec.url_to_fs(url)
        # A web server is asked once, for all of it: not for the size first, nor block by block.
        web = {"block_size": 0, "size": 1} if url.startswith("http") else {}
        with system.open(path, "rb", **web) as stream:
            yield stream.read
    except (FileNotFoundError, BertkitError):
        raise
    except ImportError as error:
        raise missing_package(url, error) from error
    except Exception as error:  # every file system raises errors of its own
        raise UnreachableError(
            f"cannot read {url}: {one_line(error)}; check the address and the network"
        ) from error


def fetched(url: str) -> bytes:
    """The content of a small remote file; see `opened`."""
    with opened(url) as stream:
        return b"".join(iter(lambda: stream(BLOCK_BYTES), b""))


def patiently(attempt: Callable[[], tuple[int, str]]) -> tuple[int, str]:
    """Some attempts at what the network may prevent."""
    for pause in PAUSES:
        with suppress(UnreachableError):
            return attempt()
        time.sleep(pause)
    return attempt()
