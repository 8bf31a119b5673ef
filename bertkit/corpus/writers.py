"""Writers for the corpus commands: token stores, and files of documents.

The shards of a store are written first, then the manifest, which makes the store valid. Documents
are written to JSON lines, compressed according to the file's name, which appear once complete.
"""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import zstandard

from bertkit.corpus.store import ARRAYS, FORMAT, ShardInfo
from bertkit.errors import BertkitError
from bertkit.files import (
    disk_errors,
    map_array,
    new_file,
    new_folder,
    remove_leftovers,
    sha256_file,
    write_atomic,
    write_json,
)
from bertkit.text.sources import is_remote
from bertkit.tokenizer.wordpiece import Tokenizer


class DocumentArrays(NamedTuple):
    """Documents in memory that will be written to a shard."""

    tokens: np.ndarray
    """(tokens,) token ids."""
    sentence_lengths: np.ndarray
    """(sentences,) the number of tokens in each sentence, at least 1."""
    document_lengths: np.ndarray
    """(documents,) the number of sentences in each document, at least 1."""


def offsets(lengths: np.ndarray) -> np.ndarray:
    """Convert (n,) lengths to (n + 1,) uint32 offsets from 0; the sum must be below 2^32."""
    if int(lengths.sum()) >= 1 << 32:
        raise BertkitError("a shard would hold 2^32 tokens or more; lower shard_megabytes")
    result = np.zeros(len(lengths) + 1, dtype=np.uint32)
    np.cumsum(lengths, out=result[1:])
    return result


def write_array(path: Path, array: np.ndarray) -> None:
    """Write a `.npy` file atomically, without adding an extension to `path`."""

    def save(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.save(file, array, allow_pickle=False)

    write_atomic(path, save)


def write_shard(folder: Path, name: str, split: str, parts: Sequence[DocumentArrays]) -> ShardInfo:
    """Write one shard's three arrays, each atomically, and return its manifest entry."""
    joined = DocumentArrays(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    arrays = {
        "tokens": joined.tokens,
        "sentences": offsets(joined.sentence_lengths),
        "documents": offsets(joined.document_lengths),
    }
    paths = {kind: folder / f"{name}.{kind}.npy" for kind in ARRAYS}
    for kind, path in paths.items():
        write_array(path, arrays[kind])
    return ShardInfo(
        name=name,
        split=split,
        documents=len(joined.document_lengths),
        sentences=len(joined.sentence_lengths),
        tokens=len(joined.tokens),
        bytes={kind: path.stat().st_size for kind, path in paths.items()},
        sha256={kind: sha256_file(path) for kind, path in paths.items()},
    )


def write_manifest(
    folder: Path, tokenizer: Tokenizer, shards: Sequence[ShardInfo], details: dict[str, Any]
) -> None:
    """Count the training unigrams, then write the manifest, which makes the store valid."""
    unigrams = np.zeros(tokenizer.size, dtype=np.int64)
    for shard in shards:
        if shard.split == "train":
            tokens = map_array(folder / f"{shard.name}.tokens.npy")
            unigrams += np.bincount(tokens, minlength=tokenizer.size)
    write_array(folder / "unigrams.npy", unigrams)
    write_json(
        folder / "manifest.json",
        {
            "format": FORMAT,
            "vocabulary_size": tokenizer.size,
            "tokenizer_hash": tokenizer.content_hash,
            "unigrams_sha256": sha256_file(folder / "unigrams.npy"),
            **details,
            "shards": [asdict(shard) for shard in shards],
        },
    )


PART_BYTES = 64_000_000
"""Text per file of a folder: about a shard, so that preparation can assign the files to tasks."""
COMPRESSORS: dict[str, Callable[[Any], Any]] = {
    ".gz": lambda file: gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0),
    ".bz2": lambda file: bz2.BZ2File(file, "wb"),
    ".xz": lambda file: lzma.LZMAFile(file, "wb", preset=1),  # noqa: SIM115 (closed below)
    ".zst": lambda file: zstandard.ZstdCompressor(level=3, write_checksum=True).stream_writer(
        file, closefd=False
    ),
}


@contextmanager
def open_writer(out: Path) -> Iterator[Callable[[str], int]]:
    """Yield a function that writes a document and returns its bytes; files appear on success.

    `out` is a file NAME.jsonl, optionally followed by .gz, .bz2, .xz or .zst; or a name without a
    dot for a folder of files part-00000.jsonl.zst, part-00001.jsonl.zst, ...
    """
    if is_remote(out):
        raise BertkitError(f"{out} is remote; write to a local or mounted folder, then copy")
    if not out.name:
        raise BertkitError(f"--out {out} does not end in a name; give the name of a new folder")
    names = out.suffixes[-2:] if out.suffix in COMPRESSORS else [out.suffix]
    if names[0] == ".jsonl":
        refuse_existing(out)  # it may be one of the inputs
        remove_leftovers(out)
        with new_file(out) as temporary, json_lines_writer(temporary, out) as write:
            yield write
            refuse_existing(out)
    elif "." in out.name:
        raise BertkitError(
            f"{out} is not a name for JSON lines; use NAME.jsonl, NAME.jsonl.zst or, for a folder "
            "of files, a name without a dot"
        )
    else:
        refuse_existing(out, fill=True)
        with new_folder(out) as folder, part_files_writer(folder, out) as write:
            yield write
            refuse_existing(out, fill=True)


def refuse_existing(out: Path, *, fill: bool = False) -> None:
    """Refuse a name that is taken, but not an empty folder that is to be filled."""
    with disk_errors(out):
        fillable = fill and out.is_dir() and not out.is_symlink() and not any(out.iterdir())
        if (out.is_symlink() or out.exists()) and not fillable:
            raise BertkitError(f"{out} is there already; choose another --out, or remove it")


@contextmanager
def json_lines_writer(path: Path, name: Path) -> Iterator[Callable[[str], int]]:
    """Yield a function that writes a document as an object {"text": document} and returns its size.

    The size is in bytes of UTF-8. The file is compressed according to `name`, which errors name.
    """
    with ExitStack() as opened:
        with disk_errors(name):
            file = opened.enter_context(path.open("wb"))
            if compressor := COMPRESSORS.get(name.suffix):
                file = opened.enter_context(compressor(file))

        def write(document: str) -> int:
            line = json.dumps({"text": document}, ensure_ascii=False) + "\n"
            with disk_errors(name):
                file.write(line.encode())
            return len(document.encode())

        try:
            yield write
        finally:
            with disk_errors(name):
                opened.close()


@contextmanager
def part_files_writer(folder: Path, name: Path) -> Iterator[Callable[[str], int]]:
    """Yield a function as `json_lines_writer` does, for files with about PART_BYTES each."""
    write_line, number, filled = None, 0, 0
    with ExitStack() as opened:

        def write(document: str) -> int:
            nonlocal write_line, number, filled
            if write_line is None or filled >= PART_BYTES:
                opened.close()
                part = f"part-{number:05d}.jsonl.zst"
                write_line = opened.enter_context(json_lines_writer(folder / part, name / part))
                number, filled = number + 1, 0
            size = write_line(document)
            filled += size
            return size

        yield write
