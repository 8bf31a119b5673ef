"""The token store: a corpus as memory-mapped shards of token ids, with a JSON manifest.

A store is a folder:

    manifest.json                    settings, sources, counts, one entry a shard with checksums
    tokenizer/                       the tokenizer whose ids these are
    unigrams.npy                     (vocabulary,) int64: counts of each id in the training text
    train-00000-000.tokens.npy       (tokens,) uint16, or uint32 for vocabularies above 65,536
    train-00000-000.sentences.npy    (sentences + 1,) uint32: the first token of each sentence
    train-00000-000.documents.npy    (documents + 1,) uint32: the first sentence of each document

Documents of the `held_out` split lie in shards of their own. The arrays are plain `.npy` files, so
any tool can read them. Checksums are verified when a shard is first opened.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bertkit.errors import BertkitError
from bertkit.files import read_json, sha256_file, write_array, write_json
from bertkit.tokens.tokenizer import Tokenizer

FORMAT = 1
SPLITS = ("train", "held_out")
ARRAYS = ("tokens", "sentences", "documents")


@dataclass(frozen=True)
class ShardInfo:
    """A shard's entry in the manifest."""

    name: str
    split: str
    documents: int
    sentences: int
    tokens: int
    bytes: dict[str, int]
    """Size of each array's file."""
    sha256: dict[str, str]
    """Checksum of each array's file."""


class ShardArrays(NamedTuple):
    """A shard's memory-mapped arrays (shapes in the module's docstring)."""

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray


class DocumentArrays(NamedTuple):
    """Documents in memory on their way into a shard."""

    tokens: np.ndarray
    """(tokens,) ids."""
    sentence_lengths: np.ndarray
    """(sentences,) tokens in each sentence, at least 1."""
    document_lengths: np.ndarray
    """(documents,) sentences in each document, at least 1."""


def offsets(lengths: np.ndarray) -> np.ndarray:
    """(n,) lengths → (n + 1,) uint32 offsets that begin with 0; the sum must be below 2^32."""
    if int(lengths.sum()) >= 1 << 32:
        raise BertkitError("a shard would hold 2^32 tokens or more; lower shard_megabytes")
    result = np.zeros(len(lengths) + 1, dtype=np.uint32)
    np.cumsum(lengths, out=result[1:])
    return result


def token_type(vocabulary_size: int) -> type[np.unsignedinteger[Any]]:
    """The smallest of uint16 and uint32 that holds every id."""
    return np.uint16 if vocabulary_size <= 1 << 16 else np.uint32


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


def check_shard(folder: Path, shard: ShardInfo, *, checksums: bool = True) -> None:
    """Compare a shard's files with the manifest.

    Raises:
        BertkitError: a file is missing, of another size (torn), or of another checksum (corrupt).
    """
    repair = "run the same `bertkit prepare` again: it remakes what is damaged"
    for kind in ARRAYS:
        path = folder / f"{shard.name}.{kind}.npy"
        if not path.is_file():
            raise BertkitError(f"shard {path} is missing; {repair}")
        size = path.stat().st_size
        if size != shard.bytes[kind]:
            raise BertkitError(
                f"shard {path} is torn: {size:,} bytes instead of {shard.bytes[kind]:,}; {repair}"
            )
        if checksums and sha256_file(path) != shard.sha256[kind]:
            raise BertkitError(f"shard {path} is corrupt (its checksum is wrong); {repair}")


class TokenStore:
    """One split of a prepared corpus.

    Args:
        folder: the store's folder.
        split: "train" or "held_out".

    Raises:
        BertkitError: no store there, an unfinished one, an unknown split or a newer format.
    """

    def __init__(self, folder: Path | str, split: str = "train") -> None:
        self.folder = Path(folder)
        self.split = split
        manifest = self.folder / "manifest.json"
        if not manifest.is_file():
            unfinished = (self.folder / "settings.json").is_file()
            raise BertkitError(
                f"{self.folder} holds an unfinished token store; run `bertkit prepare` again"
                if unfinished
                else f"{self.folder} is no token store (no manifest.json); see `bertkit prepare`"
            )
        self.manifest: dict[str, Any] = read_json(manifest)
        if not isinstance(self.manifest, dict) or "format" not in self.manifest:
            raise BertkitError(f"{manifest} is damaged; run the same `bertkit prepare` again")
        if self.manifest["format"] != FORMAT:
            raise BertkitError(
                f"{manifest} has format {self.manifest['format']}, this version reads "
                f"{FORMAT}; prepare the store again"
            )
        if split not in SPLITS:
            raise BertkitError(f"no split '{split}'; known: {', '.join(SPLITS)}")
        try:
            everything = [ShardInfo(**entry) for entry in self.manifest["shards"]]
            self.vocabulary_size = int(self.manifest["vocabulary_size"])
            """Number of pieces of the tokenizer that made the store."""
            self.tokenizer_hash = str(self.manifest["tokenizer_hash"])
            """`Tokenizer.content_hash` of the tokenizer that made the store."""
        except (KeyError, TypeError, ValueError) as error:
            raise BertkitError(
                f"{manifest} is damaged ({type(error).__name__}: {error}); "
                "run the same `bertkit prepare` again"
            ) from None
        self.shards = [shard for shard in everything if shard.split == split]
        self._arrays: dict[int, ShardArrays] = {}

    @property
    def documents(self) -> int:
        """Documents of this split."""
        return sum(shard.documents for shard in self.shards)

    @property
    def sentences(self) -> int:
        """Sentences of this split."""
        return sum(shard.sentences for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens of this split."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def content_hash(self) -> str:
        """Names the content of the split by its shards' checksums."""
        sums = "".join(shard.sha256[kind] for shard in self.shards for kind in ARRAYS)
        return hashlib.sha256(sums.encode()).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the store, checked against the manifest's hash."""
        tokenizer = Tokenizer.load(self.folder / "tokenizer")
        if tokenizer.content_hash != self.tokenizer_hash:
            raise BertkitError(
                f"{self.folder / 'tokenizer'} is not the tokenizer that made this store (its hash "
                "differs); restore it, or prepare the store again"
            )
        return tokenizer

    @cached_property
    def unigrams(self) -> np.ndarray:
        """(vocabulary,) int64 count of each id in the training text."""
        path = self.folder / "unigrams.npy"
        if not path.is_file() or sha256_file(path) != self.manifest.get("unigrams_sha256"):
            raise BertkitError(
                f"{path} is missing or corrupt; run the same `bertkit prepare` again"
            )
        return np.load(path, allow_pickle=False)

    def check_tokenizer(self, tokenizer: Tokenizer, whose: str) -> None:
        """Refuse a tokenizer other than the one whose ids the store holds.

        Raises:
            BertkitError: the hashes differ; the message says in what.
        """
        if tokenizer.content_hash == self.tokenizer_hash:
            return
        mine, theirs = self.tokenizer, tokenizer
        if mine.vocabulary != theirs.vocabulary:
            difference = f"vocabularies of {mine.size:,} and {theirs.size:,} pieces"
        else:
            difference = "same vocabulary, other settings (lower-casing or compatibility)"
        raise BertkitError(
            f"store {self.folder} was made with another tokenizer than {whose} ({difference}); "
            "prepare the text again with that tokenizer"
        )

    def arrays(self, index: int) -> ShardArrays:
        """The memory-mapped arrays of one shard; its checksums are verified at the first call.

        Raises:
            BertkitError: the shard is missing, torn or corrupt.
        """
        if index not in self._arrays:
            shard = self.shards[index]
            check_shard(self.folder, shard)
            self._arrays[index] = ShardArrays(
                *(
                    np.load(self.folder / f"{shard.name}.{kind}.npy", mmap_mode="r")
                    for kind in ARRAYS
                )
            )
        return self._arrays[index]

    def __getstate__(self) -> dict[str, Any]:
        """Pickled for loader processes, which open the maps themselves."""
        state = {key: value for key, value in self.__dict__.items() if key != "tokenizer"}
        return {**state, "_arrays": {}}


def write_manifest(
    folder: Path, tokenizer: Tokenizer, shards: Sequence[ShardInfo], details: dict[str, Any]
) -> None:
    """Finish a store: count the training unigrams, then write the manifest, which makes it valid.

    Args:
        folder: the store's folder, all shards in place.
        tokenizer: made the ids; already saved under `tokenizer/`.
        shards: every shard in reading order.
        details: settings, sources and counts to keep beside them.
    """
    unigrams = np.zeros(tokenizer.size, dtype=np.int64)
    for shard in shards:
        if shard.split == "train":
            tokens = np.load(folder / f"{shard.name}.tokens.npy", mmap_mode="r")
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
