"""Where raw text is: files, folders, globs and Hugging Face data sets.

`find_sources` expands the user's paths into a fixed list of files; `open_binary` opens a file as a
stream of decompressed bytes. `documents.py` reads what the files contain.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import lzma
import os
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from bertkit.errors import BertkitError, InputTypeError, check_known, short_repr
from bertkit.files import from_home, is_remote

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

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
OPENERS: dict[str, Any] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open, ".zst": zstd.open}
COMPRESSIONS = tuple(OPENERS)
DAMAGE = (EOFError, OSError, lzma.LZMAError, zlib.error, zstd.ZstdError)
"""The exceptions that reading a missing, truncated or corrupt file raises."""
HEAD_BYTES = 1 << 16


@dataclass(frozen=True)
class TextSource:
    """Text that a command reads: where it is and how it is read."""

    paths: tuple[str, ...]
    """Files, folders, globs, and Hugging Face data sets as `hf:NAME`; see `find_sources`."""
    format: str = "auto"
    """One of `FORMATS`, or "auto" to use extensions and first lines."""
    column: str = "text"
    """The column that holds the text, in formats that have columns."""
    language: str = "en"
    """The code of the language for the sentence splitter; "lines" makes each line a sentence."""

    @classmethod
    def of(cls, text: TextSource | Sequence[str | Path]) -> TextSource:
        """Return a source, or make one of a list of paths."""
        if isinstance(text, TextSource):
            return text
        if isinstance(text, str | bytes | os.PathLike):
            raise InputTypeError(f"give a list of paths, not {short_repr(text)}; use brackets")
        return cls(tuple(str(path) for path in text))

    def files(self) -> list[Source]:
        """Return the files and data sets of all paths; see `find_sources`."""
        return find_sources(self.paths, format=self.format)


@dataclass(frozen=True)
class Source:
    """A file or data set to read documents from."""

    path: str
    """A path, or `hf:NAME:CONFIG:SPLIT`."""
    format: str
    """One of `FORMATS`, or "unknown" for a file in a folder that is only counted as skipped."""
    bytes: int
    """The stored size in bytes (if compressed, the compressed size); 0 if unknown."""


def find_sources(
    paths: Sequence[str | Path],
    *,
    format: str = "auto",  # noqa: A002
) -> list[Source]:
    """Expand the user's paths into sources, in their order and sorted within each path.

    Paths are files, folders (read recursively; hidden files are left out), globs (`**` too), and
    data sets as `hf:NAME`, `hf:NAME:CONFIG` or `hf:NAME:CONFIG:SPLIT` (by default "train"). With
    the format "auto", the extension before .gz, .bz2, .xz or .zst and a first `<doc ` decide. A
    file with another extension is an error if it was named, and else of the format "unknown".
    """
    check_known("format", format, (*FORMATS, "auto"))
    if not paths:
        raise BertkitError("no input was named; give files, folders, globs or hf:NAME data sets")
    sources: list[Source] = []
    for path in map(str, paths):
        if format == "huggingface" or (path.startswith("hf:") and not path.startswith("hf://")):
            name, config, split, *rest = [*path.removeprefix("hf:").split(":"), "", ""]
            if not name or any(rest):
                raise BertkitError(f"'{path}' is not a data set; write hf:NAME:CONFIG:SPLIT")
            sources.append(Source(f"hf:{name}:{config}:{split or 'train'}", "huggingface", 0))
            continue
        files = local_files(from_home(path))
        of_path = [Source(name, source_format(name, format), size) for name, size in files]
        if all(source.format == "unknown" for source in of_path):
            known = ", ".join(extension for extension in EXTENSIONS if extension)
            raise BertkitError(
                f"{path} has no file with a known extension ({known}); rename it, or name its "
                "format if the command has an option for it"
            )
        sources += of_path
    return sources


def one_source(path: str | Path) -> Source:
    """Return the only file at a path, folder or glob, whatever its extension."""
    [source, *more] = find_sources([str(path)], format="text")
    if more:
        raise BertkitError(f"{path} is {1 + len(more)} files; name one of them")
    return source


def local_files(path: str) -> list[tuple[str, int]]:
    """Return (name, size) of every file that a local path names."""
    if is_remote(path):
        raise BertkitError(f"{path} is remote; download it, or mount it, and give the local path")
    exists = bool(path) and Path(path).exists()
    if exists and not Path(path).is_file() and not Path(path).is_dir():
        raise BertkitError(f"{path} is a pipe or a device, and text is read twice; save a file")
    if not exists and not glob.has_magic(path):
        raise BertkitError(f"'{path}' does not exist; check the path")
    matches = [path] if exists else sorted(glob.glob(path, recursive=True))  # noqa: PTH207
    names = {
        name: None
        for match in matches
        for name in (folder_files(match) if Path(match).is_dir() else [str(Path(match))])
    }
    if not names:
        raise BertkitError(f"{path} has no file; check the path, or the pattern and its quotes")
    files = list(names) if exists else sorted(names)
    return [(name, Path(name).stat().st_size if Path(name).is_file() else 0) for name in files]


def folder_files(folder: str) -> list[str]:
    """Return every file below a folder, sorted by path, without hidden files and folders."""

    def unreadable(error: OSError) -> None:  # os.walk would leave the folder out without a word
        raise BertkitError(f"the folder {error.filename} cannot be read ({error.strerror})")

    names, visited = [], set()
    for parent, folders, files in os.walk(folder, onerror=unreadable, followlinks=True):
        if (real := os.path.realpath(parent)) in visited:  # a link may lead back to a parent
            folders.clear()
            continue
        visited.add(real)
        folders[:] = [name for name in folders if name[0] != "."]
        names += [str(Path(parent, name)) for name in files if name[0] != "."]
    return sorted(names)


def extension(path: str) -> str:
    """Return the extension of a file in lower case, without that of its compression."""
    name = Path(path)
    uncompressed = name.with_suffix("") if name.suffix.lower() in COMPRESSIONS else name
    return uncompressed.suffix.lower()


def source_format(path: str, wanted: str) -> str:
    """Return the format of a file: `wanted`, or else by its extension and first characters."""
    if not Path(path).is_file():
        return "unknown"  # a pipe in a folder: opening it might block for ever
    known = EXTENSIONS.get(extension(path), "unknown") if wanted == "auto" else wanted
    if wanted != "auto" or known != "text":
        return known
    try:
        with open_binary(path) as stream:
            head = stream.read(HEAD_BYTES).removeprefix(b"\xef\xbb\xbf").lstrip()
    except DAMAGE:
        return "text"  # reading it will report what is wrong
    return "wikiextractor" if head.startswith(b"<doc ") else "text"


def open_binary(path: str, *, decompress: bool = True) -> BinaryIO:
    """Open a file for reading; decompress it according to its extension."""
    opener = OPENERS.get(Path(path).suffix.lower()) if decompress else None
    return opener(path) if opener else Path(path).open("rb")


def one_line(error: BaseException) -> str:
    """Return the first line of another library's message, for use in a message of ours."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
