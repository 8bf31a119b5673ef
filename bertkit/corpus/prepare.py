"""Prepare a token store from text, as a stream: memory does not grow with the corpus.

The text is cut into shards, and the text of a shard into blocks of documents. Workers turn blocks
into token ids, which come back in order, so the bytes written do not depend on the number of
workers. Every finished shard has a small JSON record: a run that was interrupted keeps the shards
that are complete and makes the rest.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import asdict, dataclass, field
from functools import partial
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
from bertkit.files import (
    check_output,
    claim,
    exclusive_lock,
    from_home,
    known_fields,
    read_json,
    read_optional,
    write_json,
)
from bertkit.processes import map_in_order, open_executor
from bertkit.progress import Console, console_or_new
from bertkit.text.documents import TextCounts, cut_blocks, describe_skipped, read_documents
from bertkit.text.sentences import language_code, split_sentences
from bertkit.text.sources import Source, TextSource
from bertkit.tokenizer.wordpiece import Tokenizer

BLOCK_CHARACTERS = 250_000


def prepare(
    text: TextSource | Sequence[str | Path],
    tokenizer: Tokenizer | Path | str,
    folder: Path | str,
    *,
    held_out: float = 0.01,
    shard_megabytes: int = 64,
    processes: int = 1,
    executor: Executor | None = None,
    console: Console | None = None,
) -> TokenStore:
    """Make a token store, or finish one that was interrupted; show progress and what was skipped.

    Args:
        text: the text, or only its paths.
        tokenizer: the tokenizer that converts text to ids, or its path (see `Tokenizer.load`); a
            copy is saved in the store.
        folder: the store's folder; an interrupted run resumes after its last complete shard.
        held_out: the share of documents kept for evaluation, chosen by a hash of their text.
        shard_megabytes: the text of a shard, in units of 1,000,000 bytes.
        processes: the number of worker processes, 0 for one per core; the result is the same for
            any number.
        executor: workers instead, which see `folder` under the same name; see `map_in_order`.
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: there is no text, the language is unknown, there are fewer than two training
            documents, the store has other settings, a worker died, or the disk is full.
    """
    text, folder = TextSource.of(text), Path(from_home(folder))
    check_options(text, folder, held_out, shard_megabytes)
    sources = text.files()
    loaded = tokenizer if isinstance(tokenizer, Tokenizer) else Tokenizer.load(tokenizer)
    settings = {
        "column": text.column,
        "format": text.format,
        "language": text.language,
        "held_out": held_out,
        "shard_megabytes": shard_megabytes,
    }
    with exclusive_lock(folder), console_or_new(console) as shown:
        claim_store(folder, settings, loaded, sources)
        if loaded.strip_accents:
            from bertkit.tokenizer.learn import describe_marks, mark_share

            fate = "dropped by the tokenizer; one of `bertkit learn --keep-accents` keeps them"
            shown.say(*describe_marks(mark_share(text), fate))
        shown.start(None, title="preparing", unit="documents")
        work = partial(
            tokenize_block,
            tokenizer=loaded,
            language=text.language,
            held_out=held_out,
        )
        writer = ShardWriter(folder, sources, text.column, shard_megabytes * 1_000_000)
        with open_executor(processes, executor) as pool:
            writer.write(work, pool, shown)
        check_training_documents(writer.shards, sources)
        write_manifest(folder, loaded, writer.shards, writer.details(settings))
        store = TokenStore(folder)
        shown.close()
        shown.say(*describe_store(store))
    return store


def check_options(text: TextSource, folder: Path, held_out: float, shard_megabytes: int) -> None:
    """Check the arguments of `prepare`."""
    language_code(text.language)
    if not 0 <= held_out < 1:
        raise BertkitError(f"held_out must be at least 0 and below 1, got {held_out}")
    if not 1 <= shard_megabytes <= 1000:
        raise BertkitError(f"shard_megabytes must be 1 to 1000, got {shard_megabytes}")
    check_output(folder, text.paths, folder=True)


def claim_store(
    folder: Path, settings: dict[str, Any], tokenizer: Tokenizer, sources: Sequence[Source]
) -> None:
    """Record a store's settings, or compare them with the record if there are shards."""
    path = folder / "settings.json"
    made = [*folder.glob("manifest.json"), *folder.glob("shards/*.json")]
    if not made and "tokenizer_hash" in read_optional(path):
        path.unlink()
    identity = {"tokenizer_hash": tokenizer.content_hash, "sources": source_records(sources)}
    claim(folder, "token store", settings | identity)
    tokenizer.save(folder / "tokenizer")


def source_records(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return what a store records of its sources, from which a changed text is recognised."""
    records = []
    for source in sources:
        path = Path(source.path)
        modified = path.stat().st_mtime_ns if path.is_file() else None
        records.append({**asdict(source), "modified": modified})
    return records


class Position(NamedTuple):
    """A position in the text: so many documents of a source, and all sources before it."""

    source: int = 0
    documents: int = 0


@dataclass
class ShardWriter:
    """Reads the text, writes shards of it, and keeps the complete shards of an earlier run."""

    folder: Path
    sources: Sequence[Source]
    column: str
    shard_bytes: int
    shards: list[ShardInfo] = field(default_factory=list)
    position: Position = field(default_factory=Position)
    """Where the text of the last shard ends."""
    records: int = 0
    """The number of complete shards, each of one or both splits."""
    tokenization: Counter[str] = field(default_factory=Counter)
    """What was counted while tokenizing the text of these shards."""
    text: TextCounts = field(default_factory=TextCounts)
    """What was counted while reading the sources before `position`."""
    reading: dict[int, TextCounts] = field(default_factory=dict)
    """What was counted while reading each of the other sources, also ahead of `position`."""

    def write(
        self,
        work: Callable[[list[str]], TokenizedBlock],
        executor: Executor | None,
        console: Console,
    ) -> None:
        """Write the shards that are missing; `work` is `tokenize_block` with its settings."""
        self.resume()
        ends: deque[Position] = deque()

        def texts() -> Iterator[list[str]]:
            blocks = cut_blocks(self.documents(), BLOCK_CHARACTERS, lambda pair: len(pair[1]))
            for block in blocks:
                ends.append(block[-1][0])
                yield [document for _, document in block]

        blocks: list[TokenizedBlock] = []
        filled, end = 0, self.position
        for block in map_in_order(work, texts(), executor):
            blocks.append(block)
            filled += block.text_bytes
            end = ends.popleft()
            if filled >= self.shard_bytes:
                self.flush(blocks, end)
                blocks, filled = [], 0
            counts = [self.text, *self.reading.values()]
            done = {"done": sum(count.documents for count in counts)}
            console.update({**done, "bytes": sum(count.bytes for count in counts)})
        if blocks:
            self.flush(blocks, end)
        self.finish_sources(len(self.sources))

    def documents(self) -> Iterator[tuple[Position, str]]:
        """Yield the documents after `position`, each with the position of its end."""
        begin, skipped = self.position
        for index in range(begin, len(self.sources)):
            counts = self.reading[index] = TextCounts()
            number = 0
            documents = read_documents(self.sources[index], counts, column=self.column)
            for number, document in enumerate(documents, 1):
                if index > begin or number > skipped:
                    yield Position(index, number), document
            if index == begin and number < skipped:
                raise BertkitError(
                    f"{self.sources[index].path} has fewer documents than when {self.folder} was "
                    "begun; remove the store and prepare it again"
                )

    def finish_sources(self, end: int) -> None:
        """Add up what was counted in the sources before `end`, which were read whole."""
        for index in [index for index in self.reading if index < end]:
            self.text += self.reading.pop(index)

    @property
    def next_record(self) -> Path:
        """The record that marks the next shard as complete."""
        return self.folder / "shards" / f"{self.records:05d}.json"

    def flush(self, blocks: Sequence[TokenizedBlock], end: Position) -> None:
        """Write blocks as the next shard of each split, and its record."""
        written = []
        for split in ("train", "held_out"):
            arrays = [block.splits[split] for block in blocks if split in block.splits]
            if arrays:
                name = f"{split}-{self.records:05d}"
                written.append(write_shard(self.folder, name, split, arrays))
        self.shards += written
        for block in blocks:
            self.tokenization += block.counts
        self.position = end
        self.finish_sources(end.source)
        record = {
            "position": end,
            "tokenization": self.tokenization,
            "text": self.text.to_dict(),
            "shards": [asdict(shard) for shard in written],
        }
        write_json(self.next_record, record)
        self.records += 1

    def resume(self) -> None:
        """Keep the complete shards of an earlier run up to the first damaged or missing one."""
        while (path := self.next_record).is_file():
            try:
                record = read_json(path)
                shards = [known_fields(ShardInfo, entry) for entry in record["shards"]]
                text = known_fields(TextCounts, record["text"])
                text.skipped = Counter(text.skipped)
                position, counted = Position(*record["position"]), Counter(record["tokenization"])
                for shard in shards:
                    check_shard(self.folder, shard)
            except (BertkitError, KeyError, TypeError, ValueError):
                return
            self.shards += shards
            self.position, self.tokenization, self.text = position, counted, text
            self.records += 1

    def details(self, settings: dict[str, Any]) -> dict[str, Any]:
        """Return the manifest's fields other than the shards."""
        return {
            "settings": settings,
            "sources": [asdict(source) for source in self.sources],
            "text": self.text.to_dict(),
            "tokenization": dict(self.tokenization),
        }


def check_training_documents(shards: Sequence[ShardInfo], sources: Sequence[Source]) -> None:
    """Refuse a store with fewer than the two documents that sentence pairs need."""
    documents = sum(shard.documents for shard in shards if shard.split == "train")
    if documents < 2:
        raise BertkitError(
            f"{sources[0].path}: the text has {documents} training document(s), and at least 2 are "
            "needed. In plain text a blank line ends a document; is there one?"
        )


def describe_store(store: TokenStore) -> list[str]:
    """Summarize a store, and what was skipped, in a few lines."""
    held_out = TokenStore(store.folder, "held_out")
    unknown = store.unigrams[store.tokenizer.unk_id] / max(1, store.tokens)
    line = (
        f"{store.folder}: {store.documents:,} documents, {store.sentences:,} sentences, "
        f"{store.tokens:,} tokens for training; {held_out.documents:,} documents, "
        f"{held_out.tokens:,} tokens held out; [UNK] is {unknown:.3%} of tokens"
    )
    text = store.manifest.get("text", {})
    skipped = {**text.get("skipped", {}), **store.manifest.get("tokenization", {})}
    return [line, *describe_skipped(skipped, text.get("examples", {}))]


# Blocks -------------------------------------------------------------------------------------------

MAX_SENTENCE_TOKENS = 512
"""The longest sentence in tokens; a longer one is split and counted, and no token is lost."""
MAX_STRING = 50_000
"""The maximum number of characters that are tokenized at once, which bounds the memory."""


class TokenizedBlock(NamedTuple):
    """The tokenized documents of both splits, with the size of their text and what was counted."""

    splits: dict[str, DocumentArrays]
    text_bytes: int
    counts: Counter[str]


def tokenize_block(
    documents: Sequence[str], tokenizer: Tokenizer, language: str, held_out: float
) -> TokenizedBlock:
    """Split documents into sentences and token ids: the work of the workers."""
    counts: Counter[str] = Counter()
    sentences: list[str] = []
    owned: list[int] = []
    for document in documents:
        pieces = split_sentences(document, language)
        if len(document) > MAX_STRING:
            pieces = list(cut_strings(pieces))
        sentences += pieces
        owned.append(len(pieces))
    ids, lengths = tokenizer.encode_arrays(sentences)
    owners = np.repeat(np.arange(len(documents)), owned)
    counts["sentence without any token"] = int((lengths == 0).sum())
    counts["sentence cut in pieces (nothing lost)"] = int((lengths > MAX_SENTENCE_TOKENS).sum())
    cuts = -(-lengths // MAX_SENTENCE_TOKENS)  # the pieces of each sentence, none if it is empty
    last = np.cumsum(cuts)[cuts > 0] - 1
    sizes = np.full(cuts.sum(), MAX_SENTENCE_TOKENS)
    sizes[last] = (lengths - (cuts - 1) * MAX_SENTENCE_TOKENS)[cuts > 0]
    documents_of = np.repeat(owners, cuts)
    document_lengths = np.bincount(documents_of, minlength=len(documents))
    counts["document without any token"] = int((document_lengths == 0).sum())
    apart = np.array([is_held_out(document, held_out) for document in documents], dtype=bool)
    splits = {}
    for split, chosen in (("train", ~apart), ("held_out", apart)):
        of_sentences = chosen[documents_of]
        if of_sentences.any():
            splits[split] = DocumentArrays(
                ids[np.repeat(of_sentences, sizes)].astype(token_type(tokenizer.size)),
                sizes[of_sentences],
                document_lengths[chosen & (document_lengths > 0)],
            )
    text_bytes = sum(len(document.encode()) for document in documents)
    return TokenizedBlock(splits, text_bytes, +counts)


def is_held_out(document: str, share: float) -> bool:
    """Return whether a document is held out, by a hash of its text, so that copies agree."""
    digest = hashlib.blake2b(document.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < share * 2**64


def cut_strings(sentences: Iterable[str]) -> Iterator[str]:
    """Yield sentences, splitting those above MAX_STRING characters, if possible at a space."""
    for sentence in sentences:
        start = 0
        while len(sentence) - start > MAX_STRING:
            limit = start + MAX_STRING
            space = sentence.rfind(" ", start + MAX_STRING // 2, limit)
            end = space if space > 0 else limit
            yield sentence[start:end]
            start = end
            while start < len(sentence) and sentence[start].isspace():
                start += 1
        yield sentence[start:]


# Inside a run -------------------------------------------------------------------------------------


def store_from_text(
    text: TextSource | Sequence[str | Path],
    out: Path | str,
    *,
    tokenizer: Path | str | None = None,
    vocabulary_size: int = 30522,
    cased: bool = False,
    keep_accents: bool | None = None,
    processes: int = 0,
    executor: Executor | None = None,
    console: Console | None = None,
) -> TokenStore:
    """Learn a vocabulary (unless there is a tokenizer) and prepare a store in a run directory."""
    from bertkit.tokenizer.learn import LearnOptions, learn_from_files

    text, out = TextSource.of(text), Path(from_home(out))
    learned = {"vocabulary_size": vocabulary_size, "cased": cased, "keep_accents": keep_accents}
    if tokenizer is not None and list(learned.values()) != [30522, False, None]:
        raise BertkitError(
            f"{', '.join(learned)} are for a vocabulary that is learned; leave them out, or leave "
            "out the tokenizer (that of a model to start from, too)"
        )
    folder = out / "store"
    with (
        exclusive_lock(out),
        console_or_new(console) as shown,
        open_executor(processes, executor) as pool,
    ):
        complete = (folder / "manifest.json").is_file()
        begun = complete or any(folder.glob("shards/*.json"))
        if not begun:
            (out / "corpus.json").unlink(missing_ok=True)
        claim(out, "corpus", learned if tokenizer is None else {})
        if tokenizer is not None:
            loaded = Tokenizer.load(tokenizer)
        elif begun:
            loaded = Tokenizer.load(out / "tokenizer")
        else:  # the vocabulary of a run that was stopped before may be of another text
            options = LearnOptions(cased=cased, keep_accents=keep_accents)
            check_options(text, folder, 0.01, 64)
            loaded, _ = learn_from_files(text, vocabulary_size, options, shown, pool)
            loaded.save(out / "tokenizer")
        if not complete:
            return prepare(text, loaded, folder, executor=pool, console=shown)
        store = TokenStore(folder)
        store.check_tokenizer(loaded, str(tokenizer or out / "tokenizer"))
        return store
