"""Prepare one part of a corpus: a part is made by one command at a time.

The corpus is divided into parts (one large file, or several small ones), a part into shards. Every
finished shard and every finished part has a small JSON record: an interrupted run, on this machine
or another, keeps what is complete and makes the rest. The bytes written depend only on the part,
the tokenizer and the settings, so two machines that happen to work on the same part write the same
bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bertkit.corpus.blocks import TOKENIZE_CHARACTERS, TokenizedBlock
from bertkit.corpus.store import ShardInfo, check_shard
from bertkit.corpus.writers import write_shard
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.processes import Workers
from bertkit.text.documents import TextCounts, read_documents
from bertkit.text.lines import cut_blocks
from bertkit.text.sources import Source


class CorpusPart(NamedTuple):
    """Sources that are read one after another into shards that hold nothing else."""

    number: int
    sources: tuple[Source, ...]


def plan_parts(sources: Sequence[Source], shard_bytes: int) -> list[CorpusPart]:
    """Group adjacent sources into parts of at least `shard_bytes` stored bytes, except the last."""
    groups: list[list[Source]] = []
    filled = shard_bytes
    for source in sources:
        if filled >= shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(source)
        filled += source.bytes
    return [CorpusPart(index, tuple(group)) for index, group in enumerate(groups)]


class PartResult(NamedTuple):
    """The result of a finished part, which the manifest includes."""

    shards: list[ShardInfo]
    tokenization: Counter[str]
    """What was counted while tokenising."""
    text: TextCounts
    """What was counted while reading."""


class PartWriter:
    """A writer that collects the blocks of one part and writes shards when it has enough text."""

    def __init__(self, folder: Path, part: CorpusPart, shard_bytes: int) -> None:
        self.folder = folder
        self.part = part
        self.shard_bytes = shard_bytes
        self.shards: list[ShardInfo] = []
        self.counts: Counter[str] = Counter()
        self._blocks: list[TokenizedBlock] = []
        self.written = self.documents_done = self._documents = self._bytes = 0

    def record_path(self, index: int) -> Path:
        """Return the record that marks shard `index` of this part as complete."""
        return self.folder / "parts" / f"{self.part.number:05d}-{index:03d}.json"

    @property
    def end_path(self) -> Path:
        """The record that marks this part as complete."""
        return self.folder / "parts" / f"{self.part.number:05d}.json"

    def resume(self, *, checksums: bool = True) -> None:
        """Keep the complete shards of an earlier run up to the first damaged or missing one."""
        while (path := self.record_path(self.written)).is_file():
            try:
                record = read_json(path)
                shards = [ShardInfo(**entry) for entry in record["shards"]]
                counts, documents = Counter(record["counts"]), int(record["documents_read"])
                for shard in shards:
                    check_shard(self.folder, shard, checksums=checksums)
            except (BertkitError, KeyError, TypeError, ValueError):
                return
            self.shards += shards
            self.counts += counts
            self.documents_done = documents
            self.written += 1

    def append(self, documents: int, block: TokenizedBlock) -> None:
        """Add one block made from `documents` documents, and write a shard if there is enough."""
        self._blocks.append(block)
        self._documents += documents
        self._bytes += block.text_bytes
        if self._bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write the collected blocks as the next shard of each split, and its record."""
        if not self._blocks:
            return
        shards = []
        for split in ("train", "held_out"):
            arrays = [block.splits[split] for block in self._blocks if split in block.splits]
            if arrays:
                name = f"{split}-{self.part.number:05d}-{self.written:03d}"
                shards.append(write_shard(self.folder, name, split, arrays))
        counts: Counter[str] = sum((block.counts for block in self._blocks), Counter())
        self.shards += shards
        self.counts += counts
        self.documents_done += self._documents
        record = {
            "documents_read": self.documents_done,
            "counts": counts,
            "shards": [asdict(shard) for shard in shards],
        }
        write_json(self.record_path(self.written), record)
        self.written += 1
        self._blocks, self._documents, self._bytes = [], 0, 0

    def finish(self, text: TextCounts) -> PartResult:
        """Write the last shard and the record that marks the part as complete."""
        self.flush()
        write_json(self.end_path, {"shards_written": self.written, "text": text.as_dict()})
        return PartResult(self.shards, self.counts, text)

    def finished(self) -> PartResult | None:
        """Return an earlier run's result if, after `resume`, all of its shards are complete."""
        if not self.end_path.is_file():
            return None
        try:
            end = read_json(self.end_path)
            written, text = end["shards_written"], TextCounts(**end["text"])
            text.skipped = Counter(text.skipped)
        except (BertkitError, KeyError, TypeError, ValueError):
            return None
        return PartResult(self.shards, self.counts, text) if written == self.written else None


def finished_part(part: CorpusPart, folder: Path, *, checksums: bool = True) -> PartResult | None:
    """Return the result of a part that is complete on disk, else None."""
    writer = PartWriter(folder, part, 0)
    writer.resume(checksums=checksums)
    return writer.finished()


def prepare_part(
    part: CorpusPart,
    folder: Path,
    workers: Workers[list[str], TokenizedBlock],
    *,
    column: str,
    shard_bytes: int,
    progress: Callable[[TextCounts], None],
) -> PartResult:
    """Write the shards of one part, keeping the complete shards of an earlier run.

    The workers run `tokenize_block`. `progress` is called after every block with what has been read
    so far.
    """
    writer = PartWriter(folder, part, shard_bytes)
    writer.resume()
    if (earlier := writer.finished()) is not None:
        progress(earlier.text)
        return earlier
    counts = TextCounts()
    documents = chain.from_iterable(
        read_documents(source, counts, column=column) for source in part.sources
    )
    for _ in range(writer.documents_done):
        if next(documents, None) is None:
            raise BertkitError(
                f"{part.sources[0].path} has fewer documents than when {folder} was started; "
                "remove the store and prepare it again"
            )
    for texts, block in workers.run(cut_blocks(documents, TOKENIZE_CHARACTERS)):
        writer.append(len(texts), block)
        progress(counts)
    return writer.finish(counts)
