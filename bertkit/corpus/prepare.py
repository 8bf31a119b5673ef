"""Text → token store, as a stream: memory does not grow with the corpus.

The work is cut into parts (one large file, or several small ones), a part into shards, the text of
a shard into blocks of documents. `tokenize_block` is a pure function of a block, so blocks go to
worker processes and come back in order; the bytes written do not depend on the number of processes.
Every finished shard has a small JSON file beside it; a run that was stopped skips those shards.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertkit.corpus.store import (
    DocumentArrays,
    ShardInfo,
    TokenStore,
    check_shard,
    token_type,
    write_manifest,
    write_shard,
)
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.text.documents import TextCounts, read_documents
from bertkit.text.sentences import check_language, split_sentences
from bertkit.text.sources import Source, find_sources
from bertkit.tokens.tokenizer import Tokenizer

BLOCK_CHARACTERS = 250_000
LONGEST_SENTENCE = 512
"""Tokens; a longer sentence is cut in pieces, counted, and no token is lost."""
LONGEST_STRING = 50_000
"""Characters given to the tokenizer at once, which bounds its memory."""


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


class Block(NamedTuple):
    """Tokenised documents of both splits."""

    splits: dict[str, DocumentArrays]
    text_bytes: int
    counts: Counter[str]


class Part(NamedTuple):
    """Sources that are read one after another into shards of their own."""

    number: int
    sources: tuple[Source, ...]


def is_held_out(document: str, share: float) -> bool:
    """Whether a document is held out: decided by a hash of its text, so copies go together."""
    digest = hashlib.blake2b(document.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def cut_strings(sentences: Iterable[str]) -> Iterator[str]:
    """Sentences; those of more than LONGEST_STRING characters are cut, if possible at a space."""
    for sentence in sentences:
        rest = sentence
        while len(rest) > LONGEST_STRING:
            space = rest.rfind(" ", LONGEST_STRING // 2, LONGEST_STRING)
            end = space if space > 0 else LONGEST_STRING
            yield rest[:end]
            rest = rest[end:].lstrip()
        yield rest


def tokenize_block(
    documents: Sequence[str], tokenizer: Tokenizer, language: str, held_out: float
) -> Block:
    """Sentences and ids of some documents: the pure step that every executor runs.

    Args:
        documents: texts; a newline always ends a sentence.
        tokenizer: text → ids.
        language: see `split_sentences`.
        held_out: share of documents for evaluation.
    """
    counts: Counter[str] = Counter()
    sentences: list[str] = []
    owners: list[int] = []
    for index, document in enumerate(documents):
        pieces = list(cut_strings(split_sentences(document, language)))
        sentences.extend(pieces)
        owners.extend([index] * len(pieces))
    ids: dict[str, list[list[int]]] = {"train": [], "held_out": []}
    document_lengths: dict[str, list[int]] = {"train": [], "held_out": []}
    split_of = ["held_out" if is_held_out(text, held_out) else "train" for text in documents]
    last_owner = -1
    with_tokens = 0
    for owner, sentence in zip(owners, tokenizer.encode_batch(sentences), strict=True):
        if not sentence:
            counts["sentence without any token"] += 1
            continue
        split = split_of[owner]
        if owner != last_owner:
            document_lengths[split].append(0)
            last_owner = owner
            with_tokens += 1
        if len(sentence) > LONGEST_SENTENCE:
            counts["sentence cut in pieces (nothing lost)"] += 1
        for start in range(0, len(sentence), LONGEST_SENTENCE):
            ids[split].append(sentence[start : start + LONGEST_SENTENCE])
            document_lengths[split][-1] += 1
    if with_tokens < len(documents):
        counts["document without any token"] += len(documents) - with_tokens
    splits = {
        split: to_arrays(ids[split], document_lengths[split], tokenizer.size)
        for split in ids
        if document_lengths[split]
    }
    text_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in documents)
    return Block(splits, text_bytes, counts)


def to_arrays(
    ids: Sequence[Sequence[int]], document_lengths: Sequence[int], vocabulary_size: int
) -> DocumentArrays:
    """Lists of ids by sentence → flat arrays."""
    lengths = np.fromiter((len(sentence) for sentence in ids), dtype=np.int64, count=len(ids))
    tokens = np.fromiter(
        (token for sentence in ids for token in sentence),
        dtype=token_type(vocabulary_size),
        count=int(lengths.sum()),
    )
    return DocumentArrays(tokens, lengths, np.asarray(document_lengths, dtype=np.int64))


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


class BlockPool:
    """Runs `tokenize_block` on worker processes (or here, for one), results in order."""

    def __init__(self, tokenizer: Tokenizer, folder: Path, options: PrepareOptions, processes: int):
        self.arguments = (options.language, options.held_out)
        self.tokenizer = tokenizer
        self.processes = processes
        self.executor = None
        if processes > 1:
            self.executor = ProcessPoolExecutor(
                processes,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_start_worker,
                initargs=(folder / "tokenizer",),
            )

    def __enter__(self) -> BlockPool:
        return self

    def __exit__(self, *_: object) -> None:
        if self.executor is not None:
            self.executor.shutdown(wait=True, cancel_futures=True)

    def run(self, blocks: Iterable[list[str]]) -> Iterator[tuple[list[str], Block]]:
        """Yield (documents, block) in the order of `blocks`; few are in flight at a time."""
        if self.executor is None:
            for documents in blocks:
                yield documents, tokenize_block(documents, self.tokenizer, *self.arguments)
            return
        waiting: deque[tuple[list[str], Future[Block]]] = deque()
        try:
            for documents in blocks:
                future = self.executor.submit(_tokenize_in_worker, documents, *self.arguments)
                waiting.append((documents, future))
                if len(waiting) > 2 * self.processes:
                    first, future = waiting.popleft()
                    yield first, future.result()
            for first, future in waiting:
                yield first, future.result()
        except BrokenProcessPool:
            raise BertkitError(
                "a worker process of `prepare` died (killed, or out of memory); run the same "
                "command again: finished shards are kept. Fewer --processes need less memory"
            ) from None


_worker_tokenizer: list[Tokenizer] = []


def _start_worker(folder: Path) -> None:
    _worker_tokenizer.append(Tokenizer.load(folder))


def _tokenize_in_worker(documents: list[str], language: str, held_out: float) -> Block:
    return tokenize_block(documents, _worker_tokenizer[0], language, held_out)


def cut_blocks(documents: Iterable[str]) -> Iterator[list[str]]:
    """Documents in lists of about BLOCK_CHARACTERS characters."""
    block: list[str] = []
    characters = 0
    for document in documents:
        block.append(document)
        characters += len(document)
        if characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block


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
            record = read_json(path)
            shards = [ShardInfo(**entry) for entry in record["shards"]]
            try:
                for shard in shards:
                    check_shard(self.folder, shard)
            except BertkitError:
                return
            self.shards += shards
            self.counts.update(record["counts"])
            self.documents_done = record["documents_read"]
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
    for texts, block in pool.run(cut_blocks(documents)):
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
    if options.shard_megabytes < 1:
        raise BertkitError(f"shard_megabytes must be at least 1, got {options.shard_megabytes}")
    sources = find_sources(paths, format=options.format)
    _check_settings(folder, tokenizer, options, sources)
    (folder / "manifest.json").unlink(missing_ok=True)
    tokenizer.save(folder / "tokenizer")
    text_counts = TextCounts()
    skipped: Counter[str] = Counter()
    shards: list[ShardInfo] = []
    with BlockPool(tokenizer, folder, options, processes) as pool:
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
        "sources": [asdict(source) for source in sources],
    }
    path = folder / "settings.json"
    if path.is_file():
        begun = read_json(path)
        changed = [key for key in settings if begun.get(key) != settings[key]]
        if changed:
            raise BertkitError(
                f"store {folder} was begun with other {', '.join(changed)}; choose another folder, "
                "or remove this one"
            )
    elif folder.is_dir() and any(folder.iterdir()):
        raise BertkitError(f"{folder} is not empty and holds no token store; choose another folder")
    write_json(path, settings)
