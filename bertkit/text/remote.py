"""Text behind URLs: what fsspec finds and reads there, with limits on how long it waits."""

from __future__ import annotations

import glob
import io
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO, cast

import fsspec

from bertkit.errors import BertkitError
from bertkit.text.sources import COMPRESSED_BYTES, SILENT_SECONDS, one_line


def remote_files(url: str) -> tuple[list[tuple[str, int]], bool]:
    """`local_files` for an fsspec URL."""
    try:
        system, root = fsspec.url_to_fs(url, **time_limits(url))
        if time_limits(url):
            answers(system, root)
        if "::" in url or system.isfile(root):  # a chained URL names one member of an archive
            return [(url, 0 if "::" in url else system.size(root) or 0)], True
        found = system.glob(root) if glob.has_magic(root) else system.find(root)
        hidden = {name for name in found if "/." in name.removeprefix(root)}
        names = sorted(name for name in found if name not in hidden and system.isfile(name))
        files = [(str(system.unstrip_protocol(name)), system.size(name) or 0) for name in names]
    except ImportError as error:
        raise missing_package(url, error) from error
    except Exception as error:  # every file system raises errors of its own
        raise BertkitError(f"cannot reach {url}: {one_line(error)}", code="unreachable") from error
    if not files:
        raise BertkitError(f"{url} does not exist or holds no file; check the address")
    return files, False


def time_limits(url: str) -> dict[str, Any]:
    """Options of fsspec by which a web server that falls silent is an error; none for others.

    Its library gives up after five minutes in all, which is too long for silence and too short for
    a large file.

    Raises:
        ImportError: the library is absent.
    """
    protocols = [protocol for protocol in ("http", "https") if f"{protocol}://" in url]
    if not protocols:
        return {}
    from aiohttp import ClientTimeout

    silence = ClientTimeout(total=None, sock_connect=SILENT_SECONDS, sock_read=SILENT_SECONDS)
    return {protocol: {"client_kwargs": {"timeout": silence}} for protocol in protocols}


def answers(system: Any, root: str) -> None:
    """Ask a web server once, since fsspec takes one that is silent for one that has no such file.

    Raises:
        Exception: it cannot be reached, or does not answer.
    """
    from aiohttp import ClientResponseError

    with suppress(ClientResponseError):  # it is there; reading will say what it does not like
        system.exists(root, strict=True)


def missing_package(url: str, error: ImportError) -> BertkitError:
    """What to say where fsspec lacks what it needs for the protocol of an address."""
    protocol = url.partition("://")[0].split("::")[-1]
    return BertkitError(
        f"{url} needs a package that is not installed ({one_line(error)}); "
        f"run: pip install 'fsspec[{protocol}]'"
    )


@contextmanager
def open_url(url: str) -> Iterator[BinaryIO]:
    """Open a file behind a URL for reading."""
    with fsspec.open(url, "rb", **time_limits(url)) as file:
        yield cast("BinaryIO", io.BufferedReader(RemoteStream(file), COMPRESSED_BYTES))


class RemoteStream(io.RawIOBase):
    """A file of fsspec whose failures are OSErrors, whatever its library raises."""

    def __init__(self, file: BinaryIO) -> None:
        self.file = file

    def readable(self) -> bool:
        """True: the stream can be read."""
        return True

    def seekable(self) -> bool:
        """Whether parts can be skipped, as Parquet needs."""
        return self.file.seekable()

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a place."""
        return self.file.seek(offset, whence)

    def tell(self) -> int:
        """The place."""
        return self.file.tell()

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the next bytes; 0 at the end.

        Raises:
            OSError: the connection failed.
        """
        try:
            block = self.file.read(len(buffer))
        except (OSError, EOFError):
            raise
        except Exception as error:  # every file system raises errors of its own
            raise OSError(one_line(error)) from error
        buffer[: len(block)] = block
        return len(block)
