"""Text → token store, as a stream: memory does not grow with the corpus.

The work is cut into parts (one large file, or several small ones), a part into shards, the text of
a shard into blocks of documents. Blocks go to worker processes and come back in order; the bytes
written do not depend on the number of processes. Every finished shard has a small JSON file beside
it; a run that was stopped skips those shards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from bertkit.corpus.blocks import BLOCK_CHARACTERS, Block, BlockPool
from bertkit.corpus.store import ShardInfo, TokenStore, check_shard, write_manifest, write_shard
from bertkit.errors import BertkitError
from bertkit.files import only_process, read_json, write_json
from bertkit.text.documents import TextCounts, read_documents
from bertkit.text.lines import cut_blocks
from bertkit.text.sentences import check_language
from bertkit.text.sources import Source, find_sources
from bertkit.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """What decides the content of a store, besides the text and the tokenizer."""

    format: str = "auto"
    """text, wikiextractor, jsonl, csv, tsv, parquet; auto looks at names and first lines."""
    column: str = "text"
    """The column that holds the text, in formats that have columns."""
    language: str = "en"
    """Language code for the sentence splitter; `lines` takes each line as one sentence."""
    held_out: float = 0.01
    """Share of documents kept for evaluation, chosen by a hash of their text."""
    shard_megabytes: int = 64
    """Text per shard, in units of 1,000,000 bytes."""


class Part(NamedTuple):
    """Sources that are read one after another into shards of their own."""

    number: int
    sources: tuple[Source, ...]


def plan_parts(sources: Sequence[Source], shard_bytes: int) -> list[Part]:
    """Group neighbouring sources until a group holds about one shard of bytes."""
    groups: list[list[Source]] = []
    filled = shard_bytes
    for source in sources:
        if filled >= shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(source)
        filled += source.bytes
    return [Part(index, tuple(group)) for index, group in enumerate(groups)]


class PartWriter:
    """Collects the blocks of one part and writes a shard of each split whenever enough came."""

    def __init__(self, folder: Path, part: Part, shard_bytes: int) -> None:
        self.folder = folder
        self.part = part
        self.shard_bytes = shard_bytes
        self.shards: list[ShardInfo] = []
        self.counts: Counter[str] = Counter()
        self.written = 0
        self.documents_done = 0
        self._blocks: list[Block] = []
        self._documents = 0
        self._bytes = 0

    def record_path(self, index: int) -> Path:
        """The file that says that shard `index` of this part is whole."""
        return self.folder / "parts" / f"{self.part.number:05d}-{index:03d}.json"

    def resume(self) -> None:
        """Take over the whole shards of an earlier run; a damaged one is remade from there on."""
        while (path := self.record_path(self.written)).is_file():
            try:
                record = read_json(path)
                shards = [ShardInfo(**entry) for entry in record["shards"]]
                counts, documents = Counter(record["counts"]), int(record["documents_read"])
                for shard in shards:
                    check_shard(self.folder, shard)
            except (BertkitError, KeyError, TypeError, ValueError):
                return
            self.shards += shards
            self.counts += counts
            self.documents_done = documents
            self.written += 1

    def append(self, documents: int, block: Block) -> None:
        """Add one block made of `documents` documents; may write a shard."""
        self._blocks.append(block)
        self._documents += documents
        self._bytes += block.text_bytes
        if self._bytes >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Write what was collected as the next shard."""
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


def _documents_of(part: Part, counts: TextCounts, column: str) -> Iterator[str]:
    for source in part.sources:
        yield from read_documents(source, counts, column=column)


def prepare_part(
    part: Part,
    folder: Path,
    pool: BlockPool,
    options: PrepareOptions,
    text_counts: TextCounts,
    progress: Callable[[TextCounts], None],
) -> tuple[list[ShardInfo], Counter[str]]:
    """Write the shards of one part; whole shards of an earlier run are skipped."""
    writer = PartWriter(folder, part, options.shard_megabytes * 1_000_000)
    writer.resume()
    documents = _documents_of(part, text_counts, options.column)
    for _ in range(writer.documents_done):
        if next(documents, None) is None:
            raise BertkitError(
                f"{part.sources[0].path} has fewer documents than when {folder} was begun; "
                "remove the store and prepare it again"
            )
    for texts, block in pool.run(cut_blocks(documents, BLOCK_CHARACTERS)):
        writer.append(len(texts), block)
        progress(text_counts)
    writer.flush()
    return writer.shards, writer.counts


def prepare(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    folder: Path,
    options: PrepareOptions | None = None,
    *,
    processes: int = 1,
    progress: Callable[[TextCounts], None] = lambda counts: None,
) -> TokenStore:
    """Make (or finish) a token store.

    Args:
        paths: files, folders, globs, URLs or `hf:` data sets; see `find_sources`.
        tokenizer: text → ids; a copy is kept in the store.
        folder: the store; a run that was stopped goes on where its last whole shard ends.
        options: see `PrepareOptions`.
        processes: worker processes; the result is the same for any number.
        progress: called with the running counts after each block.

    Raises:
        BertkitError: no text, unknown language, fewer than two documents (next-sentence pairs need
            a second one to draw from), a store begun with other settings, a full disk.
    """
    options = options or PrepareOptions()
    check_language(options.language)
    if not 0 <= options.held_out < 1:
        raise BertkitError(f"held_out must be at least 0 and below 1, got {options.held_out}")
    if not 1 <= options.shard_megabytes <= 1000:
        raise BertkitError(f"shard_megabytes must be 1 to 1000, got {options.shard_megabytes}")
    if processes < 1:
        raise BertkitError(f"processes must be at least 1, got {processes}")
    sources = find_sources(paths, format=options.format)
    _check_settings(folder, tokenizer, options, sources)
    with only_process(folder):
        return _prepare(paths, tokenizer, folder, options, sources, processes, progress)


def _prepare(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    folder: Path,
    options: PrepareOptions,
    sources: Sequence[Source],
    processes: int,
    progress: Callable[[TextCounts], None],
) -> TokenStore:
    """The work of `prepare` once everything was checked."""
    (folder / "manifest.json").unlink(missing_ok=True)
    tokenizer.save(folder / "tokenizer")
    text_counts = TextCounts()
    skipped: Counter[str] = Counter()
    shards: list[ShardInfo] = []
    with BlockPool(tokenizer, folder, processes, options.language, options.held_out) as pool:
        for part in plan_parts(sources, options.shard_megabytes * 1_000_000):
            written, counts = prepare_part(part, folder, pool, options, text_counts, progress)
            shards += written
            skipped += counts
    documents = sum(shard.documents for shard in shards if shard.split == "train")
    if documents < 2:
        raise BertkitError(
            f"{', '.join(paths)}: {documents} training document(s) found, at least 2 are needed. "
            "In plain text a blank line ends a document; is there one?"
        )
    details = {
        "settings": asdict(options),
        "sources": [asdict(source) for source in sources],
        "text": text_counts.as_dict(),
        "tokenization": dict(skipped),
    }
    write_manifest(folder, tokenizer, shards, details)
    return TokenStore(folder)


def _check_settings(
    folder: Path, tokenizer: Tokenizer, options: PrepareOptions, sources: Sequence[Source]
) -> None:
    """Refuse to go on with a store that was begun with other settings, text or tokenizer."""
    settings: dict[str, Any] = {
        **asdict(options),
        "tokenizer_hash": tokenizer.content_hash,
        "sources": [{**asdict(source), "modified": modified(source)} for source in sources],
    }
    path = folder / "settings.json"
    if path.is_file():
        begun = read_json(path)
        if not isinstance(begun, dict):
            raise BertkitError(f"{path} is damaged; remove the store and prepare it again")
        changed = [key for key in settings if begun.get(key) != settings[key]]
        if changed:
            raise BertkitError(
                f"store {folder} was begun with other {', '.join(changed)}; choose another folder, "
                "or remove this one"
            )
    elif folder.is_dir() and any(path.name[0] != "." for path in folder.iterdir()):
        raise BertkitError(f"{folder} is not empty and holds no token store; choose another folder")
    write_json(path, settings)


def modified(source: Source) -> int | None:
    """When a local source was last changed, in nanoseconds; an edited file is another text."""
    path = Path(source.path)
    return path.stat().st_mtime_ns if path.is_file() else None
