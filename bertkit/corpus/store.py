"""The token store: a corpus as memory-mapped shards of token ids, with a JSON manifest.

A store is a folder:

    manifest.json                    settings, sources, counts, one entry a shard with checksums
    tokenizer/                       the tokenizer that made the ids
    unigrams.npy                     (vocabulary,) int64: counts of each id in the training text
    train-00000.tokens.npy           (tokens,) uint16, or uint32 for vocabularies above 65,536
    train-00000.sentences.npy        (sentences + 1,) uint32: the first token of each sentence
    train-00000.documents.npy        (documents + 1,) uint32: the first sentence of each document

Documents of the `held_out` split are in separate shards. The arrays are plain `.npy` files, so
any tool can read them. Checksums are verified when a shard is first opened.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from bertkit.errors import BertkitError, check_known
from bertkit.files import (
    from_home,
    known_fields,
    map_array,
    read_json,
    sha256_file,
    write_atomic,
    write_json,
)
from bertkit.tokenizer.wordpiece import Tokenizer

SPLITS = ("train", "held_out")
ARRAYS = ("tokens", "sentences", "documents")
REPAIR = "remove its manifest.json and run what made the store again; the rest is kept"


@dataclass(frozen=True)
class ShardInfo:
    """A shard's entry in the manifest."""

    name: str
    split: str
    documents: int
    sentences: int
    tokens: int
    bytes: dict[str, int]
    """The size in bytes of each array's file."""
    sha256: dict[str, str]
    """The SHA-256 of each array's file, as hex."""

    def __post_init__(self) -> None:
        """Check every field, as a manifest may be damaged or untrusted and names become paths."""
        if not isinstance(self.name, str) or not re.fullmatch(r"[\w-]+", self.name):
            raise ValueError(f"{self.name!r:.40} is not a valid shard name")
        if self.split not in SPLITS:
            raise ValueError(f"shard {self.name} has the split {self.split!r:.40}")
        for counts in (vars(self), self.bytes):
            for field in ("documents", "sentences", "tokens"):
                count = counts[field] if isinstance(counts, dict) else None
                if type(count) is not int or not 0 <= count < 1 << 48:
                    raise ValueError(f"shard {self.name}: {field} is {count!r:.40}")
        if not all(re.fullmatch("[0-9a-f]{64}", str(self.sha256[kind])) for kind in ARRAYS):
            raise ValueError(f"shard {self.name}: its checksums are not SHA-256")


class ShardArrays(NamedTuple):
    """A shard's memory-mapped arrays (`bertkit.corpus.store` gives their shapes)."""

    tokens: np.ndarray
    sentences: np.ndarray
    documents: np.ndarray


def token_type(vocabulary_size: int) -> type[np.unsignedinteger[Any]]:
    """Return the smaller of uint16 and uint32 that can hold every id."""
    return np.uint16 if vocabulary_size <= 1 << 16 else np.uint32


def check_shard(folder: Path, shard: ShardInfo, *, checksums: bool = True) -> None:
    """Compare a shard's files with the manifest."""
    for kind in ARRAYS:
        path = folder / f"{shard.name}.{kind}.npy"
        if not path.is_file():
            raise BertkitError(f"shard {path} is missing; {REPAIR}")
        size = path.stat().st_size
        if size != shard.bytes[kind]:
            raise BertkitError(
                f"shard {path} is torn: {size:,} bytes instead of {shard.bytes[kind]:,}; {REPAIR}"
            )
        if checksums and sha256_file(path) != shard.sha256[kind]:
            raise BertkitError(f"shard {path} is corrupt (its checksum is wrong); {REPAIR}")


def open_shard(
    folder: Path, shard: ShardInfo, vocabulary_size: int, *, contents: bool = True
) -> ShardArrays:
    """Map a shard's arrays into memory and check them against the manifest."""
    paths = [folder / f"{shard.name}.{kind}.npy" for kind in ARRAYS]
    arrays = ShardArrays(*(map_array(path) for path in paths))
    kinds = (np.dtype(token_type(vocabulary_size)), np.dtype(np.uint32), np.dtype(np.uint32))
    sizes = (shard.tokens, shard.sentences + 1, shard.documents + 1)
    for path, array, kind, size in zip(paths, arrays, kinds, sizes, strict=True):
        if array.dtype != kind or array.shape != (size,):
            raise BertkitError(
                f"{path} holds {array.dtype} {array.shape} instead of {kind} ({size},); "
                "prepare the store again"
            )
    if not contents:
        return arrays
    ends = ((arrays.sentences, shard.tokens), (arrays.documents, shard.sentences))
    if not all(o[0] == 0 and o[-1] == end and bool((o[1:] > o[:-1]).all()) for o, end in ends):
        wrong = "has inconsistent offsets"
    elif (largest := int(arrays.tokens.max(initial=0))) >= vocabulary_size:
        wrong = f"has id {largest:,}, outside of the {vocabulary_size:,} tokens of the manifest"
    else:
        return arrays
    raise BertkitError(f"shard {folder / shard.name} {wrong}; prepare the store again")


FORMAT = 1
KEPT_MAPS = 256
"""Shards that a store keeps mapped: three maps each; a process can have about 65,000 maps."""


class TokenStore:
    """One split of a prepared corpus, "train" or "held_out".

    Raises:
        BertkitError: there is no store in the folder, or it is unfinished or of another format.
    """

    def __init__(self, folder: Path | str, split: str = "train") -> None:
        check_known("split", split, SPLITS)
        self.folder = Path(from_home(folder))
        self.split = split
        self.manifest = read_manifest(self.folder)
        try:
            self.vocabulary_size: int = self.manifest["vocabulary_size"]
            """The size of the vocabulary of the tokenizer that made the store."""
            self.tokenizer_hash = str(self.manifest["tokenizer_hash"])
            """The `Tokenizer.content_hash` of the tokenizer that made the store."""
            if type(self.vocabulary_size) is not int or self.vocabulary_size < 1:
                raise ValueError(f"vocabulary_size is {self.vocabulary_size!r:.40}")
            entries = self.manifest.pop("shards")
            everything = [known_fields(ShardInfo, entry) for entry in entries]
            self.shards: Sequence[ShardInfo] = [s for s in everything if s.split == split]
        except (KeyError, TypeError, ValueError) as error:
            raise BertkitError(
                f"the manifest of {self.folder} is damaged ({type(error).__name__}: {error}); "
                f"{REPAIR}"
            ) from None
        self._nothing_open(trusting=False)

    @property
    def held_out(self) -> TokenStore | None:
        """The held-out split, or None if it lacks the two documents that an evaluation needs."""
        held_out = TokenStore(self.folder, "held_out")
        return held_out if held_out.documents > 1 else None

    @property
    def documents(self) -> int:
        """The number of documents of this split."""
        return sum(shard.documents for shard in self.shards)

    @property
    def sentences(self) -> int:
        """The number of sentences of this split."""
        return sum(shard.sentences for shard in self.shards)

    @property
    def tokens(self) -> int:
        """The number of tokens of this split."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def content_hash(self) -> str:
        """The SHA-256, as hex, of all checksums of the split, which identifies its content."""
        checksums = "".join(shard.sha256[kind] for shard in self.shards for kind in ARRAYS)
        return hashlib.sha256(checksums.encode()).hexdigest()

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the store, checked against the manifest's hash."""
        tokenizer = Tokenizer.load(self.folder / "tokenizer")
        if not tokenizer.made(self.tokenizer_hash) or tokenizer.size != self.vocabulary_size:
            raise BertkitError(
                f"{self.folder / 'tokenizer'} is not the tokenizer that made this store (its hash "
                "differs); restore it, or prepare the store again"
            )
        return tokenizer

    @cached_property
    def unigrams(self) -> np.ndarray:
        """(vocabulary,) int64: the count of each id in the training text."""
        path = self.folder / "unigrams.npy"
        if not path.is_file() or sha256_file(path) != self.manifest.get("unigrams_sha256"):
            raise BertkitError(f"{path} of a store is missing or corrupt; {REPAIR}")
        counts = map_array(path)
        if counts.shape != (self.vocabulary_size,) or counts.dtype != np.int64:
            raise BertkitError(f"{path} must have one count per token; prepare the store again")
        return np.array(counts)

    def check_tokenizer(self, tokenizer: Tokenizer, whose: str) -> None:
        """Refuse a tokenizer other than the one that made the store's ids."""
        if not tokenizer.made(self.tokenizer_hash):
            raise BertkitError(
                f"store {self.folder} was made with another tokenizer than {whose} (its tokens, "
                "casing or accents); prepare the text again with that tokenizer"
            )

    def arrays(self, index: int) -> ShardArrays:
        """Return the memory-mapped arrays of one shard; the first call verifies its checksums."""
        if opened := self._arrays.get(index):
            return opened
        with self._opening:  # another thread plans the next window at the same time
            if index not in self._arrays:
                shard, new = self.shards[index], not self._trusting and index not in self._checked
                check_shard(self.folder, shard, checksums=new)
                opened = open_shard(self.folder, shard, self.vocabulary_size, contents=new)
                self._checked.add(index)
                while len(self._arrays) >= KEPT_MAPS:
                    del self._arrays[next(iter(self._arrays))]
                self._arrays[index] = opened
            return self._arrays[index]

    def _nothing_open(self, *, trusting: bool) -> None:
        self._arrays: dict[int, ShardArrays] = {}
        self._checked: set[int] = set()
        self._trusting = trusting
        self._opening = Lock()

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for loader processes, whose rows come from shards checked before."""
        left = {"tokenizer", "_arrays", "_checked", "_trusting", "_opening"}
        return {key: value for key, value in self.__dict__.items() if key not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._nothing_open(trusting=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read the manifest of a store and check its format."""
    path = folder / "manifest.json"
    if not path.is_file():
        unfinished = (folder / "settings.json").is_file()
        raise BertkitError(
            f"{folder} holds an unfinished token store; run `bertkit prepare` again"
            if unfinished
            else f"{folder} is not a token store (no manifest.json); see `bertkit prepare`"
        )
    manifest = read_json(path)
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BertkitError(f"{path} does not have format {FORMAT}; prepare the store again")
    return manifest


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
        raise BertkitError("a shard would hold 2^32 tokens or more; lower --shard-megabytes")
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
