"""Text behind URLs: fsspec lists and reads the files, with limits on how long it waits."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

import fsspec

from bertkit.errors import BertkitError
from bertkit.text.sources import HEAD_BYTES, SILENT_SECONDS, one_line

GLOB_SIGN = re.compile(r"[*?\[]")
"""The first character of a path that makes it a glob."""


def remote_files(url: str) -> tuple[list[tuple[str, int]], bool]:
    """Return for an fsspec URL what `local_files` returns for a path."""
    try:
        system, root = fsspec.url_to_fs(url, **time_limits(url))
        if time_limits(url):
            answers(system, root)
        folder = url.endswith("/")  # of a web server, every address looks like a file
        if "::" in url or (not folder and system.isfile(root)):  # a chained URL names one member
            return [(url, 0 if "::" in url else system.size(root) or 0)], True
        fixed, *magic = GLOB_SIGN.split(root, maxsplit=1)
        matches = system.glob(root, detail=True) if magic else {root: {"type": "directory"}}
        found = set[str]()
        for name, about in matches.items():  # a folder stands for the files below it
            found.update(system.find(name) if about.get("type") != "file" else [name])
        start = fixed.rpartition("/")[0] if magic else root.rstrip("/")
        hidden = {name for name in found if "/." in name.removeprefix(start)}
        if time_limits(url):  # the same page in another order, as Apache's listings link to it
            hidden |= {name for name in found if name.partition("?")[0].endswith("/")}
        names = sorted(name for name in found if name not in hidden and system.isfile(name))
        files = [(str(system.unstrip_protocol(name)), system.size(name) or 0) for name in names]
    except ImportError as error:
        raise missing_package(url, error) from error
    except Exception as error:  # every file system has its own exceptions
        raise BertkitError(f"cannot reach {url}: {one_line(error)}", code="unreachable") from error
    if not files:
        raise BertkitError(f"{url} does not exist or holds no file; check the address")
    return files, False


def time_limits(url: str) -> dict[str, Any]:
    """Return fsspec options that make a silent web server an error; {} for other URLs.

    Without them, aiohttp gives up after five minutes in total, which is too long for silence and
    too short for a large file.
    """
    protocols = [protocol for protocol in ("http", "https") if f"{protocol}://" in url]
    if not protocols:
        return {}
    from aiohttp import ClientTimeout

    silence = ClientTimeout(total=None, sock_connect=SILENT_SECONDS, sock_read=SILENT_SECONDS)
    return {protocol: {"client_kwargs": {"timeout": silence}} for protocol in protocols}


def answers(system: Any, root: str) -> None:
    """Query a web server once, since fsspec treats a silent one as one without such a file."""
    from aiohttp import ClientResponseError

    with suppress(ClientResponseError):  # it answers; reading will report what is wrong
        system.exists(root, strict=True)


def missing_package(url: str, error: ImportError) -> BertkitError:
    """Return the error for a URL whose protocol needs a package that is not installed."""
    extra = url.partition("://")[0].split("::")[-1].replace("https", "http")
    return BertkitError(
        f"{url} needs a package that is not installed ({one_line(error)}); "
        f"run: pip install 'fsspec[{extra}]'"
    )


@contextmanager
def open_url(url: str) -> Iterator[BinaryIO]:
    """Open a file behind a URL for reading."""
    try:
        opened = fsspec.open(url, "rb", **time_limits(url))
    except ImportError as error:
        raise missing_package(url, error) from error
    with opened as file:
        yield cast("BinaryIO", io.BufferedReader(RemoteStream(file), HEAD_BYTES))


class RemoteStream(io.RawIOBase):
    """An fsspec file that raises OSError for every failure of the library behind it."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def seekable(self) -> bool:
        """Return whether the stream can seek, as reading Parquet requires."""
        return self.file.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset and return the new position."""
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        """Return the current position."""
        return self.file.tell()

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the next bytes and return their number, 0 at the end."""
        try:
            block = self.file.read(len(buffer))
        except (OSError, EOFError):
            raise
        except Exception as error:  # every file system has its own exceptions
            raise OSError(one_line(error)) from error
        buffer[: len(block)] = block
        return len(block)
