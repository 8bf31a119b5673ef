"""The sources of raw text: files, folders, globs, remote objects and Hugging Face data sets.

`find_sources` expands the user's input into a fixed list of sources; `open_binary` opens one of
them as a stream of decompressed bytes. `documents.py` reads what the sources contain.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import zstandard

from bertkit.errors import BertkitError, InputTypeError, check_known, short_repr
from bertkit.files import from_home

HEAD_BYTES = 1 << 16
COMPRESSED_BYTES, DECOMPRESSED_BYTES = 1 << 10, 1 << 20
"""The bytes of a file that are decompressed at once, which zstandard can make 32,768 times as many,
and the most that the other decompressors return at once."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FORMATS = ("text", "wikiextractor", "jsonl", "csv", "tsv", "parquet", "huggingface")
EXTENSIONS = {
    "": "text",  # WikiExtractor names its files wiki_00, wiki_01, ...
    ".txt": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
REMOTE = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)
"""The start of a URL, also after `Path` removed one slash; a Windows drive has a single letter."""
SILENT_SECONDS = 20.0
"""How long a web server may be silent while it is asked or while it sends."""
DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error, zstandard.ZstdError)
"""The exceptions that reading a missing, truncated or corrupt file raises."""


@dataclass(frozen=True)
class Source:
    """One file or data set to read documents from."""

    path: str
    """A local path, an fsspec URL, or `hf:NAME:CONFIG:SPLIT`."""
    format: str
    """One of `FORMATS`, or "unknown" for a file in a folder that is only counted as skipped."""
    bytes: int
    """The stored size in bytes (if compressed, the compressed size); 0 if unknown."""


def text_paths(paths: Sequence[str | Path]) -> list[str]:
    """Return the names of several inputs as text; a single name is an InputTypeError."""
    if isinstance(paths, str | bytes | os.PathLike):
        raise InputTypeError(f"paths must be a list, not {short_repr(paths)}; put it in brackets")
    return [os.fspath(path) for path in paths]


def find_sources(
    paths: Sequence[str | Path],
    *,
    format: str = "auto",  # noqa: A002
) -> list[Source]:
    """Expand the user's input into sources, in the order given and sorted within each path.

    Args:
        paths: files, folders (read recursively; hidden files are left out), globs (`**` too),
            fsspec URLs of any of these (`s3://...`), and Hugging Face data sets as `hf:NAME`,
            `hf:NAME:CONFIG` or `hf:NAME:CONFIG:SPLIT` (split "train" unless given).
        format: one of `FORMATS` for every file, or "auto" to use the extension before .gz, .bz2,
            .xz or .zst. With "auto", a text file that starts with `<doc ` has WikiExtractor's
            format, and one without an extension that starts with a JSON object is JSON lines. A
            file with an unknown extension becomes a source of format "unknown" if a folder or a
            glob contained it, and is an error if it was named.

    Raises:
        BertkitError: a path is missing, a folder or glob holds nothing to read, the format is
            unknown, or a remote address cannot be reached.
    """
    check_known("format", format, (*FORMATS, "auto"))
    if not paths:
        raise BertkitError("no input was named; give files, folders, globs or hf:NAME data sets")
    sources: list[Source] = []
    for path in text_paths(paths):
        if not path:
            raise BertkitError("an input's name is empty; give a path, or '.' for this folder")
        if format == "huggingface" or (path.startswith("hf:") and not path.startswith("hf://")):
            sources.append(huggingface_source(path))
            continue
        files, named = files_at(path)
        found = [Source(name, source_format(name, format), size) for name, size in files]
        if not any(source.format != "unknown" for source in found):
            known = ", ".join(extension for extension in EXTENSIONS if extension)
            what = "has an unknown extension" if named else "holds no file with a known extension"
            raise BertkitError(
                f"{path} {what} ({known}); rename it, or give its format if "
                "the command has an option for it"
            )
        sources.extend(found)
    return sources


def one_source(path: str | Path) -> Source:
    """Return the only file at a path, folder, glob or URL, whatever its extension.

    Raises:
        BertkitError: there is no file, or there are several.
    """
    [source, *more] = find_sources([str(path)], format="text")
    if more:
        raise BertkitError(f"{path} is {1 + len(more)} files; name one of them")
    return source


def huggingface_source(path: str) -> Source:
    """Return the source for `hf:NAME[:CONFIG[:SPLIT]]` with every part filled in; loads nothing."""
    name, config, split, *rest = [*path.removeprefix("hf:").split(":"), "", ""]
    if not name or any(rest):
        raise BertkitError(f"'{path}' is not a data set name; write hf:NAME:CONFIG:SPLIT")
    return Source(f"hf:{name}:{config}:{split or 'train'}", "huggingface", 0)


def files_at(path: str) -> tuple[list[tuple[str, int]], bool]:
    """Return (name, size) of every file that a path or URL names, and whether it is one file."""
    if "://" not in path:
        return local_files(path)
    from bertkit.text.remote import remote_files

    return remote_files(path)


def local_files(path: str) -> tuple[list[tuple[str, int]], bool]:
    """Return (name, size) of every file that a local path names, and whether it is one file."""
    path = from_home(path)
    if Path(path).is_dir():
        names = folder_files(path)
    elif is_pipe(path):
        raise BertkitError(f"{path} is a pipe or a device, and text is read twice; make it a file")
    elif Path(path).exists():
        return [(path, Path(path).stat().st_size)], True
    elif glob.has_magic(path):
        found: set[str] = set()
        for match in glob.glob(path, recursive=True):  # noqa: PTH207 (absolute patterns)
            found.update(folder_files(match) if Path(match).is_dir() else [str(Path(match))])
        names = sorted(found)
        if not names:
            raise BertkitError(f"no file matches {path}; check the pattern and its quotes")
    else:
        raise BertkitError(f"{path} does not exist; check the path")
    if not names:
        raise BertkitError(f"the folder {path} is empty; name one that holds text")
    return [
        (name, Path(name).stat().st_size if Path(name).exists() else 0) for name in names
    ], False


def folder_files(folder: str) -> list[str]:
    """Return every file below a folder, sorted by path, without hidden files and folders."""
    files: list[str] = []
    visited: set[str] = set()
    for parent, folders, names in os.walk(folder, onerror=unreadable_source, followlinks=True):
        real = os.path.realpath(parent)
        if real in visited:  # a link may lead back to a parent
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [name for name in folders if name[0] != "."]
        files += [f"{parent}/{name}" for name in names if name[0] != "."]
    return sorted(files)


def unreadable_source(error: OSError) -> None:
    """Raise an error for a folder that cannot be listed, which os.walk would silently leave out."""
    raise BertkitError(
        f"the folder {error.filename} cannot be read ({error.strerror}); change its permissions or "
        "move it elsewhere"
    ) from error


def is_remote(path: Path | str) -> bool:
    """Return whether a path was meant as a URL, such as `s3://bucket/folder`."""
    return REMOTE.match(str(path)) is not None


def source_format(path: str, wanted: str) -> str:
    """Return the format of one file: `wanted`, or else by its extension and first characters."""
    if "://" not in path and is_pipe(path):
        return "unknown"  # in a folder: opening it might block for ever
    if wanted != "auto":
        return wanted
    found = EXTENSIONS.get(extension(path), "unknown")
    return first_line_format(path) if found == "text" else found


def extension(path: str) -> str:
    """Return the extension of a file in lower case, without that of its compression."""
    return uncompressed_name(path).suffix.lower()


def uncompressed_name(path: str) -> PurePosixPath:
    """Return the path of a file without the extension of its compression."""
    name = file_name(path)
    return name.with_suffix("") if name.suffix.lower() in DECOMPRESSORS else name


def file_name(path: str) -> PurePosixPath:
    """Return the path of a file, and that of a web address without a query behind the name."""
    path = next((link for link in path.split("::") if "://" in link), path)  # zip://NAME::a.zip
    if path.startswith(("http://", "https://")):
        name = PurePosixPath(path.partition("?")[0])
        if name.suffix and name.suffix.lower() in {*EXTENSIONS, *DECOMPRESSORS}:
            return name  # otherwise the query may be what names the file
    return PurePosixPath(path.replace(os.sep, "/"))


def is_pipe(path: str) -> bool:
    """Return whether a local path is a pipe, a socket or a device, whose bytes come only once."""
    return Path(path).exists() and not (Path(path).is_file() or Path(path).is_dir())


JSON_OBJECT = re.compile(rb'\{[ \t]*"[^"\n]*"[ \t]*:')


def first_line_format(path: str) -> str:
    """Return the format that the first line of a text file shows.

    WikiExtractor writes `<doc ...>` or, with --json, JSON lines, and gives its files no extension.
    """
    try:
        with open_binary(path) as stream:
            head = stream.read(HEAD_BYTES).removeprefix(BYTE_ORDER_MARK)
    except TimeoutError as error:  # reading it would time out again
        raise BertkitError(f"cannot read {path}: {one_line(error)}") from error
    except DAMAGE:
        return "text"  # reading it will report what is wrong
    if is_remote(path) and re.match(rb"\s*<(!doctype )?html[\s>]", head, re.IGNORECASE):
        raise BertkitError(
            f"{path} is an HTML page; check the address (that of a folder ends in /)"
        )
    if head.lstrip().startswith(b"<doc "):
        return "wikiextractor"
    return "jsonl" if not extension(path) and JSON_OBJECT.match(head.lstrip()) else "text"


@contextmanager
def open_binary(path: str, *, decompress: bool = True) -> Iterator[BinaryIO]:
    """Open a local file or an fsspec URL for reading; decompress it according to its extension."""
    with ExitStack() as stack:
        if "://" in path:
            from bertkit.text.remote import open_url

            stream: BinaryIO = stack.enter_context(open_url(path))
        else:
            stream = stack.enter_context(Path(path).open("rb"))
        opener = DECOMPRESSORS.get(file_name(path).suffix.lower())
        if decompress and opener:
            stream = stack.enter_context(opener(stream))
        yield stream


class DecompressedStream(io.RawIOBase):
    """The decompressed bytes of a file that holds any number of compressed streams in a row.

    The readers of bz2 and lzma end without a word where a later stream is damaged, and that of
    zstandard where the file is cut; this one raises an exception of `DAMAGE`. `new_stream` returns
    a decompressor of one stream, such as `bz2.BZ2Decompressor`.
    """

    def __init__(self, file: BinaryIO, new_stream: Callable[[], Any]) -> None:
        self.file = file
        self.new_stream = new_stream
        self.stream: Any = None
        self.pieces: Iterator[bytes] = iter(())
        self.ready = memoryview(b"")

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer` with the next bytes and return their number, 0 at the end."""
        while not self.ready:
            piece = next(self.pieces, None)
            if piece is not None:
                self.ready = memoryview(piece)
            elif block := self.file.read(COMPRESSED_BYTES):
                self.pieces = self.decompress(block)
            elif self.stream:
                raise EOFError("the compressed file ends before its end mark")
            else:
                return 0
        count = min(len(buffer), len(self.ready))
        buffer[:count] = self.ready[:count]
        self.ready = self.ready[count:]
        return count

    def decompress(self, block: bytes) -> Iterator[bytes]:
        """Yield the decompressed bytes of a block of the file, stream by stream."""
        while self.stream or (block := block.lstrip(b"\0")):  # zeros may pad a stream's end
            self.stream = stream = self.stream or self.new_stream()
            if isinstance(stream, bz2.BZ2Decompressor | lzma.LZMADecompressor):
                yield stream.decompress(block, DECOMPRESSED_BYTES)
                while not (stream.eof or stream.needs_input):
                    yield stream.decompress(b"", DECOMPRESSED_BYTES)
            else:
                yield stream.decompress(block)
            if not stream.eof:
                return
            self.stream, block = None, stream.unused_data


def decompressor(new_stream: Callable[[], Any]) -> Callable[[BinaryIO], BinaryIO]:
    """Return a function that opens a compressed file; see `DecompressedStream`."""
    return lambda file: io.BufferedReader(DecompressedStream(file, new_stream), DECOMPRESSED_BYTES)


DECOMPRESSORS: dict[str, Callable[[BinaryIO], Any]] = {
    ".gz": gzip.open,
    ".bz2": decompressor(bz2.BZ2Decompressor),
    ".xz": decompressor(lzma.LZMADecompressor),
    ".zst": decompressor(  # of the largest window, as `zstd --long=31` writes it
        lambda: zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
    ),
}


def one_line(error: BaseException) -> str:
    """Return the first line of another library's message, for use in a message of ours."""
    if isinstance(error, TimeoutError):
        return f"no answer for {SILENT_SECONDS:g} seconds"
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
