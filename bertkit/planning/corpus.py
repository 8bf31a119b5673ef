"""What the batches of a corpus will hold: how long its examples are, measured or assumed.

Examples are cut as in paper section A.2 (`pretraining_data/pairs.py`): most are full, the rest of
each document is shorter, and about half take their second sentence from elsewhere.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

import numpy as np

from bertkit.corpus.build import PrepareOptions, TooFewDocumentsError, prepare
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.pretraining_data.pairs import SPECIALS, PairOptions, plan_block
from bertkit.text.sources import DAMAGE, DECOMPRESSORS, Source, find_sources, one_line, open_binary
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.recipe import Phases, PretrainRecipe

DOCUMENT_TOKENS = 520
"""Assumed length of a document where there is no text to measure; about Wikipedia's."""
EPOCH_TOKENS = 1.25
"""Assumed tokens seen in an epoch for each token of the corpus: about half of the examples read a
random next sentence besides their own text."""
SAMPLE = 1000
"""Examples whose lengths stand for all."""
SAMPLE_SHARDS = 4
"""Of a store, those that the sample is taken from."""
SAMPLE_BYTES = 4_000_000
"""Text that is tokenized to know the rest."""
SAMPLE_FILES = 4
"""Files that the sample is taken from, at their beginnings."""
EXPANDED_BYTES = 16_000_000
"""Text that is decompressed to know how much the rest of such files holds."""
BYTES_PER_TOKEN = 4.7
"""Assumed where there is no tokenizer; about English with a vocabulary of 30,522 tokens."""
SIZED = ("text", "wikiextractor", "jsonl", "csv", "tsv")
"""Formats whose size says how much text they hold."""


@dataclass(frozen=True, kw_only=True)
class LengthSample:
    """A sample of the examples of one maximum length."""

    lengths: tuple[int, ...]
    """(examples,) tokens of each, ascending."""
    epoch_tokens: float
    """Tokens seen in an epoch for each token of the corpus."""

    def draw(self, sequences: int, seed: int) -> list[int]:
        """Draw the lengths of a batch, longest first."""
        drawn = np.random.default_rng(seed).choice(self.lengths, sequences)
        return sorted(drawn.tolist(), reverse=True)


@dataclass(frozen=True, kw_only=True)
class CorpusEstimate:
    """The size of a corpus and the lengths of its examples."""

    title: str
    tokens: float
    vocabulary_size: int
    examples: dict[int, LengthSample]
    """By length."""
    assumed: tuple[str, ...] = ()
    """The assumptions, in words."""


def planned_lengths(recipe: PretrainRecipe) -> list[int]:
    """Lengths of the recipe's phases and of the paper's."""
    return list(dict.fromkeys([*recipe.phases.lengths, *Phases().lengths]))


def assumed_examples(length: int, epoch_tokens: float) -> LengthSample:
    """Examples cut from documents of `DOCUMENT_TOKENS`: full ones, and an even rest of each."""
    full = round(SAMPLE / (1 + length / DOCUMENT_TOKENS))
    rest = np.linspace(SPECIALS + 2, length, SAMPLE - full).round().astype(int).tolist()
    return LengthSample(lengths=(*rest, *[length] * full), epoch_tokens=epoch_tokens)


def assumed_corpus(
    title: str, tokens: float, vocabulary: int, lengths: Sequence[int], pair: str = "nsp"
) -> CorpusEstimate:
    """A corpus of which only the size is known; `pair` as in `PairOptions`.

    Raises:
        BertkitError: it has no tokens.
    """
    if tokens < 1:
        raise BertkitError(f"a corpus has at least 1 token, not {tokens:,.0f}; see --tokens")
    assumed = f"documents of about {DOCUMENT_TOKENS} tokens, which decides how full examples are"
    drawn = pair in ("nsp", "none")
    repeated = (
        f"an epoch reads {EPOCH_TOKENS} tokens for each of the corpus (random next sentences)"
    )
    seen = EPOCH_TOKENS if drawn else 1.0
    return CorpusEstimate(
        title=title,
        tokens=tokens,
        vocabulary_size=vocabulary,
        examples={length: assumed_examples(length, seen) for length in lengths},
        assumed=(assumed, repeated) if drawn else (assumed,),
    )


def store_corpus(store: TokenStore, lengths: Sequence[int], pair: str = "nsp") -> CorpusEstimate:
    """A token store; its first shards show how long examples are; `pair` as in `PairOptions`.

    Raises:
        BertkitError: the store has too few documents to make examples of, or is damaged.
    """
    if not store.shards:
        raise BertkitError(f"store {store.folder} has no training documents; add more text")
    return CorpusEstimate(
        title=f"{store.folder}: {store.documents:,} documents",
        tokens=store.tokens,
        vocabulary_size=store.vocabulary_size,
        examples={length: store_examples(store, length, pair) for length in lengths},
    )


def text_corpus(
    paths: Sequence[str],
    tokenizer: Tokenizer | None,
    options: PrepareOptions,
    vocabulary: int,
    lengths: Sequence[int],
    pair: str = "nsp",
) -> CorpusEstimate:
    """Text files: their size, and a sample of them that is prepared as a store.

    Args:
        paths: files, folders, globs.
        tokenizer: without it, the bytes of a token are assumed.
        options: how the text is read.
        vocabulary: its size, where there is no tokenizer.
        lengths: of the examples.
        pair: as in `PairOptions`.

    Raises:
        BertkitError: a path does not exist, is damaged, or does not say how much text it holds.
    """
    sources, unknown = sized_sources(paths, options.format)
    kinds = {compression(source): source for source in sorted(sources, key=lambda s: s.bytes)}
    ratios = {kind: expansion(largest) for kind, largest in kinds.items()}
    total = sum(source.bytes * ratios[compression(source)] for source in sources)
    title = f"{len(sources):,} files, about {total / 1e6:,.1f} MB"
    title += f" ({unknown:,} of unknown type left out)" if unknown else ""

    def blind(text_bytes: float, vocabulary: int, note: str) -> CorpusEstimate:
        tokens = text_bytes / BYTES_PER_TOKEN
        found = assumed_corpus(title, tokens, vocabulary, lengths, pair)
        return replace(found, assumed=(f"{BYTES_PER_TOKEN} bytes {note}", *found.assumed))

    if tokenizer is None:
        return blind(total, vocabulary, "of a file a token; --tokenizer measures it")
    with tempfile.TemporaryDirectory() as folder:
        copies, read = write_sample(sources, Path(folder))
        try:
            store = prepare(list(copies), tokenizer, Path(folder) / "store", options)
            found = store_corpus(store, lengths, pair)
        except TooFewDocumentsError:  # of a single document no pairs can be made
            found = blind(read, tokenizer.size, "a token, as the sample is of one document")
        except BertkitError as error:
            message = str(error)
            for copy, source in copies.items():
                message = message.replace(copy, source.path)
            raise BertkitError(message) from error
    rest = max(1.0, total / read)
    note = f"text like the {read / 1e6:.1f} MB of it that were tokenized"
    assumed = (*found.assumed, note) if rest > 1 else found.assumed
    return replace(found, title=title, tokens=found.tokens * rest, assumed=assumed)


def sized_sources(paths: Sequence[str], format: str) -> tuple[list[Source], int]:  # noqa: A002
    """The files that paths stand for, and how many of unknown kind are left out.

    Raises:
        BertkitError: one does not exist, none holds text, or a size does not say how much.
    """
    everything = find_sources(paths, format=format)
    known = [source for source in everything if source.format != "unknown"]
    for source in known:
        if source.format not in SIZED:
            raise BertkitError(
                f"{source.path}: how much text is in {source.format} shows only when it is read; "
                "run `bertkit prepare` and give --store, or give --tokens"
            )
    sized = [source for source in known if source.bytes]
    if not sized:
        raise BertkitError(f"{' '.join(paths)}: there is no text in it; name another file")
    return sized, len(everything) - len(known)


def compression(source: Source) -> str:
    """The suffix of a compressed file in lower case; "" for other files."""
    ending = PurePosixPath(source.path).suffix.lower()
    return ending if ending in DECOMPRESSORS else ""


def expansion(source: Source) -> float:
    """Bytes of text for each stored byte, by the beginning of a file.

    Raises:
        BertkitError: the file is damaged.
    """
    if not compression(source):
        return 1.0
    try:
        with (
            open_binary(source.path, decompress=False) as raw,
            DECOMPRESSORS[compression(source)](raw) as stream,
        ):
            text = sum(len(stream.read(1 << 20)) for _ in range(EXPANDED_BYTES >> 20))
            return text / max(1, raw.tell())
    except DAMAGE as error:
        raise unreadable_text(source, error) from error


def unreadable_text(source: Source, error: Exception) -> BertkitError:
    """The error for a damaged file."""
    return BertkitError(
        f"{source.path} cannot be read ({one_line(error)}); restore it or leave it out"
    )


def write_sample(sources: Sequence[Source], folder: Path) -> tuple[dict[str, Source], int]:
    """Copy the beginnings of some files; returns the copies' names and their bytes in all.

    Raises:
        BertkitError: a file is damaged.
    """
    chosen = sources[:: max(1, len(sources) // SAMPLE_FILES)][:SAMPLE_FILES]
    copies, read = {}, 0
    for number, source in enumerate(chosen):
        try:
            with open_binary(source.path) as stream:
                head = stream.read(SAMPLE_BYTES // len(chosen))
                if stream.read(1):  # the last line is not whole
                    head = head[: head.rfind(b"\n") + 1] or head
                    while source.format == "csv" and head.count(b'"') % 2:  # nor the last row
                        head = head[: head[:-1].rfind(b"\n") + 1]
        except DAMAGE as error:
            raise unreadable_text(source, error) from error
        plain = source.format in {"text", "wikiextractor"}
        path = folder / f"{number}.{'txt' if plain else source.format}"
        path.write_bytes(head)
        copies[str(path)] = source
        read += len(head)
    return copies, read


def store_examples(store: TokenStore, length: int, pair: str) -> LengthSample:
    """A sample of the examples of a store's first shards."""
    shards = list(range(min(SAMPLE_SHARDS, len(store.shards))))
    options = PairOptions(max_length=length, pair=pair)
    rows = plan_block(store, shards, options, 0, 0, 0)
    tokens = rows["a_length"].astype(np.int64) + rows["b_length"]
    places = (np.arange(SAMPLE) + 0.5) / SAMPLE * len(tokens)
    specials = length - options.room
    return LengthSample(
        lengths=tuple((np.sort(tokens)[places.astype(int)] + specials).tolist()),
        epoch_tokens=float(tokens.sum() / sum(store.shards[shard].tokens for shard in shards)),
    )


@dataclass(frozen=True, kw_only=True)
class BatchSize:
    """The size of a batch, or the mean size of batches."""

    sequences: int
    tokens: float
    targets: float
    squares: float
    """Sum of the squared lengths."""
    mixed: bool = True
    """Whether lengths differ, so that attention pads or takes several calls."""


def typical_batch(
    examples: LengthSample, sequences: int, recipe: PretrainRecipe, phase: int
) -> BatchSize:
    """The mean size of a batch of so many sequences of a phase."""
    most, share = recipe.phases.max_predictions[phase], sequences / len(examples.lengths)
    return BatchSize(
        sequences=sequences,
        tokens=share * sum(examples.lengths),
        targets=share * sum(recipe.num_targets(n, most) for n in examples.lengths),
        squares=share * sum(n * n for n in examples.lengths),
    )


def largest_batch(sequences: int, recipe: PretrainRecipe, phase: int) -> BatchSize:
    """The largest size of a batch of so many sequences: all of full length."""
    length, most = recipe.phases.lengths[phase], recipe.phases.max_predictions[phase]
    return BatchSize(
        sequences=sequences,
        tokens=sequences * length,
        targets=sequences * recipe.num_targets(length, most),
        squares=sequences * length**2,
    )
