"""The size of a corpus and the lengths of its examples, measured or assumed.

Examples are cut as in paper section A.2 (`pretraining_data/pairs.py`): most are full, the rest of
each document is shorter, and about half take their second sentence from another document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import PurePosixPath

import fsspec
import fsspec.compression
import numpy as np

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.pretraining_data.pairs import SPECIALS, PairOptions, plan_block
from bertkit.text.documents import read_documents
from bertkit.text.lines import TextCounts
from bertkit.text.sources import COMPRESSIONS, DAMAGE, Source, find_sources, one_line, open_binary
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.recipe import PretrainRecipe

DOCUMENT_TOKENS = 520
"""The assumed tokens per document if there is no text to measure, about those of Wikipedia."""
EPOCH_TOKENS = 1.25
"""The assumed tokens seen in an epoch per token of the corpus: about half of the examples contain
a random next sentence in addition to their own text."""
SAMPLE = 1000
"""The number of examples whose lengths represent all examples."""
SAMPLE_SHARDS = 4
"""The number of a store's shards that the sample is taken from."""
SAMPLE_BYTES = 1_000_000
"""The bytes of text that are tokenized to extrapolate to the rest."""
SAMPLE_FILES = 4
"""The number of files from whose beginnings the sample is taken."""
EXPANDED_BYTES = 16_000_000
"""The bytes of text that are decompressed to estimate the compression ratio."""
BYTES_PER_TOKEN = 4.7
"""Assumed without a tokenizer; about that of English with a vocabulary of 30,522 tokens."""
SIZED = ("text", "wikiextractor", "jsonl", "csv", "tsv")
"""The formats in which the file size tells the amount of text."""


@dataclass(frozen=True, kw_only=True)
class LengthSample:
    """A sample of the lengths of examples with one maximum length."""

    lengths: tuple[int, ...]
    """(examples,) the tokens of each example, ascending."""
    epoch_tokens: float
    """The tokens seen in an epoch per token of the corpus."""

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
    """The sampled examples by maximum length."""
    assumed: tuple[str, ...] = ()
    """The assumptions behind the estimate, as text."""


def assumed_examples(length: int, epoch_tokens: float) -> LengthSample:
    """Assume documents of `DOCUMENT_TOKENS`: full examples, and remainders of uniform length."""
    full = round(SAMPLE / (1 + length / DOCUMENT_TOKENS))
    rest = np.linspace(SPECIALS + 2, length, SAMPLE - full).round().astype(int).tolist()
    return LengthSample(lengths=(*rest, *[length] * full), epoch_tokens=epoch_tokens)


def assumed_corpus(
    title: str, tokens: float, vocabulary: int, lengths: Sequence[int], pair: str = "nsp"
) -> CorpusEstimate:
    """Estimate a corpus of which only the size is known; `pair` is as in `PairOptions`."""
    if tokens < 1:
        raise BertkitError(f"a corpus needs at least 1 token, not {tokens:,.0f}; see --tokens")
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
    """Estimate a token store by the examples of its first shards; `pair` is as in `PairOptions`."""
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
    vocabulary: int,
    lengths: Sequence[int],
    *,
    pair: str = "nsp",
    format: str = "auto",  # noqa: A002
    column: str = "text",
) -> CorpusEstimate:
    """Estimate text files by their size, and by a sample of them if there is a tokenizer."""
    sources, unknown = sized_sources(paths, format)
    kinds = {compression(source): source for source in sorted(sources, key=lambda s: s.bytes)}
    ratios = {kind: expansion(largest) for kind, largest in kinds.items()}
    total = sum(source.bytes * ratios[compression(source)] for source in sources)
    title = f"{len(sources):,} files, about {total / 1e6:,.1f} MB"
    title += f" ({unknown:,} of unknown type left out)" if unknown else ""
    per_token, note = BYTES_PER_TOKEN, "bytes of a file per token; --tokenizer measures it"
    if tokenizer is not None:
        per_token, vocabulary = bytes_per_token(sources, tokenizer, column), tokenizer.size
        note = "bytes per token, as in a sample, and files that hold little but text"
    found = assumed_corpus(title, total / per_token, vocabulary, lengths, pair)
    return replace(found, assumed=(f"{per_token:.2g} {note}", *found.assumed))


def bytes_per_token(sources: Sequence[Source], tokenizer: Tokenizer, column: str) -> float:
    """Measure the bytes of UTF-8 per token in the first documents of some files."""
    chosen = sources[:: max(1, len(sources) // SAMPLE_FILES)][:SAMPLE_FILES]
    size = tokens = 0
    for source in chosen:
        counts = TextCounts()
        for document in read_documents(source, counts, column=column):
            tokens += len(tokenizer.encode_batch([document])[0])
            if counts.bytes >= SAMPLE_BYTES // len(chosen):
                break
        size += counts.bytes
    return size / max(1, tokens)


def sized_sources(paths: Sequence[str], format: str) -> tuple[list[Source], int]:  # noqa: A002
    """Return the files that paths name, and the number of files left out for an unknown format."""
    everything = find_sources(paths, format=format)
    known = [source for source in everything if source.format != "unknown"]
    for source in known:
        if source.format not in SIZED:
            raise BertkitError(
                f"{source.path}: the size of a {source.format} file does not tell its amount of "
                "text; run `bertkit prepare` and give --store, or give --tokens"
            )
    sized = [source for source in known if source.bytes]
    if not sized:
        raise BertkitError(f"{' '.join(paths)}: there is no text in it; choose another file")
    return sized, len(everything) - len(known)


def compression(source: Source) -> str:
    """Return the suffix of a compressed file in lower case; "" for other files."""
    ending = PurePosixPath(source.path).suffix.lower()
    return ending if ending in COMPRESSIONS else ""


def expansion(source: Source) -> float:
    """Estimate the bytes of text per stored byte from the beginning of a file."""
    if not compression(source):
        return 1.0
    try:
        with (
            open_binary(source.path, decompress=False) as raw,
            fsspec.compression.compr[fsspec.utils.infer_compression(source.path)](raw) as stream,
        ):
            text = sum(len(stream.read(1 << 20)) for _ in range(EXPANDED_BYTES >> 20))
            return text / max(1, raw.tell())
    except DAMAGE as error:
        raise BertkitError(
            f"{source.path} cannot be read ({one_line(error)}); restore it or leave it out"
        ) from error


def store_examples(store: TokenStore, length: int, pair: str) -> LengthSample:
    """Sample the lengths of the examples of a store's first shards."""
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
    """The size of a batch, or the mean size of several batches."""

    sequences: int
    tokens: float
    targets: float
    squares: float
    """The sum of the squared lengths."""
    mixed: bool = True
    """Whether lengths differ, so that attention pads or makes several calls."""


def typical_batch(
    examples: LengthSample, sequences: int, recipe: PretrainRecipe, phase: int
) -> BatchSize:
    """Return the mean size of a phase's batch with the given number of sequences."""
    most, share = recipe.phases.max_predictions[phase], sequences / len(examples.lengths)
    return BatchSize(
        sequences=sequences,
        tokens=share * sum(examples.lengths),
        targets=share * sum(recipe.num_targets(n, most) for n in examples.lengths),
        squares=share * sum(n * n for n in examples.lengths),
    )


def largest_batch(sequences: int, recipe: PretrainRecipe, phase: int) -> BatchSize:
    """Return the largest size of a phase's batch, in which all sequences have full length."""
    length, most = recipe.phases.lengths[phase], recipe.phases.max_predictions[phase]
    return BatchSize(
        sequences=sequences,
        tokens=sequences * length,
        targets=sequences * recipe.num_targets(length, most),
        squares=sequences * length**2,
        mixed=False,
    )
