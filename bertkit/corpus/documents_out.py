"""Documents → files of JSON lines, compressed by their names, whole or absent."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import zstandard

from bertkit.errors import BertkitError
from bertkit.files import disk_errors, new_file, new_folder, remove_leftovers
from bertkit.text.sources import is_remote

PART_BYTES = 64_000_000
"""Text in a file of a folder: about a shard, so that preparation can deal the files to tasks."""
COMPRESSORS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda file: gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0),
    ".bz2": lambda file: bz2.BZ2File(file, "wb"),
    ".xz": lambda file: lzma.LZMAFile(file, "wb", preset=1),  # noqa: SIM115 (closed by JsonLines)
    ".zst": lambda file: zstandard.ZstdCompressor(level=3).stream_writer(file, closefd=False),
}


@contextmanager
def new_documents(out: Path) -> Iterator[Callable[[str], int]]:
    """Give a block what writes one document and returns its bytes; all appear when it ends well.

    Args:
        out: a file NAME.jsonl, with .gz, .bz2, .xz or .zst after it or not; or a name without a
            dot for a folder of files part-00000.jsonl.zst, part-00001.jsonl.zst, ...

    Raises:
        BertkitError: another name, a remote one, a file or a folder with something in it that is
            there already, a full disk.
    """
    if is_remote(out):
        raise BertkitError(f"{out} is remote; write to a local or mounted folder, then copy")
    if not out.name:
        raise BertkitError(f"--out {out} has no name of its own; give the name of a new folder")
    names = out.suffixes[-2:] if out.suffix in COMPRESSORS else [out.suffix]
    with disk_errors(out):
        is_free = not (out.is_symlink() or out.exists())
    if names[0] == ".jsonl":
        if not is_free:  # it may be the very text that is read
            raise BertkitError(f"{out} is there already; choose another --out, or remove it")
        remove_leftovers(out)
        with new_file(out) as temporary, JsonLines(temporary, out) as lines:
            yield lines.write
    elif "." in out.name:
        raise BertkitError(
            f"{out} is no name for JSON lines; use NAME.jsonl, NAME.jsonl.zst or, for a folder of "
            "files, a name without a dot"
        )
    else:
        if not is_free and (not out.is_dir() or any(out.iterdir())):
            raise BertkitError(f"{out} is there already; choose another --out, or remove it")
        with new_folder(out) as folder, Parts(folder, out) as parts:
            yield parts.write


class JsonLines:
    """A file of objects {"text": document}, compressed as a name says.

    Args:
        path: where it is written.
        name: what it will be called; named in errors, too.
    """

    def __init__(self, path: Path, name: Path) -> None:
        self.path = path
        self.name = name

    def __enter__(self) -> JsonLines:
        with disk_errors(self.name):
            self._raw = self.path.open("wb")
            compressor = COMPRESSORS.get(self.name.suffix)
            self._file = compressor(self._raw) if compressor else self._raw
        return self

    def write(self, document: str) -> int:
        """Write one document; returns its bytes."""
        line = json.dumps({"text": document}, ensure_ascii=False) + "\n"
        with disk_errors(self.name):
            self._file.write(line.encode())
        return len(document.encode())

    def __exit__(self, *_: object) -> None:
        with disk_errors(self.name):
            try:
                if self._file is not self._raw:
                    self._file.close()
            finally:
                self._raw.close()


class Parts:
    """Files of JSON lines in a folder, each of about PART_BYTES of text."""

    def __init__(self, folder: Path, name: Path) -> None:
        self.folder = folder
        self.name = name
        self.number = self.filled = 0
        self._open = ExitStack()

    def __enter__(self) -> Parts:
        return self

    def write(self, document: str) -> int:
        """Write one document; returns its bytes."""
        if self.filled >= PART_BYTES or not self.number:
            self._open.close()
            name = f"part-{self.number:05d}.jsonl.zst"
            self._lines = self._open.enter_context(JsonLines(self.folder / name, self.name / name))
            self.number, self.filled = self.number + 1, 0
        size = self._lines.write(document)
        self.filled += size
        return size

    def __exit__(self, *_: object) -> None:
        self._open.close()
