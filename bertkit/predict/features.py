"""Files of vectors: hidden states of tokens (paper section 5.3), or embeddings of texts.

A text that is longer than the model's maximum length is read through overlapping windows. The
vector of a token comes from the window where it has the most context; those of [CLS] and [SEP],
which are in every window, are averaged over the windows.

A Parquet file of states has a row per token: text, position, token, start, end, vector. One of
embeddings has a row per text: text, vector. A .npy file has them as one array, (texts, width).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.errors import BertkitError
from bertkit.files import check_output, disk_errors, new_file
from bertkit.model.encoder import Encoder
from bertkit.model.outputs import check_layers, encoder_features
from bertkit.predict.embeddings import load_embedder, text_chunks
from bertkit.progress import Console
from bertkit.tasks.columns import read_rows, require_all
from bertkit.tasks.sequences import (
    Progress,
    WindowLengths,
    no_progress,
    plan_windows,
    run_model,
    surround,
)
from bertkit.tasks.task import ItemPart, split_parts
from bertkit.text.documents import (
    TextCounts,
    describe_skipped,
    optional_library,
    plain_lines,
    read_documents,
)
from bertkit.text.sources import find_sources
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import choose_device, choose_precision

HEADER_BYTES = 128  # of a .npy file, whatever the number of rows
GROUP_TOKENS = 65_536
"""The number of tokens whose states are in memory at a time."""


@dataclass(frozen=True, kw_only=True)
class Extraction(WindowLengths):
    """The layers and the window lengths of features."""

    layers: str = "last"
    """embeddings, second-to-last, last, sum, sum-last-four, or concat-last-four."""


class TextFeatures(NamedTuple):
    """The vectors of a text."""

    vectors: np.ndarray
    """(rows, width) float32: one row per token, or the embedding of the text."""
    tokens: list[str]
    """The tokens: "[CLS]", ..., "[SEP]"; empty for an embedding."""
    offsets: list[tuple[int, int]]
    """Each token's half-open character span in the text; (0, 0) for [CLS] and [SEP]."""
    windows: int


class WindowedText(NamedTuple):
    """A text split into windows that fit the model."""

    names: list[str]
    """The tokens of the text, with [CLS] and [SEP]."""
    offsets: list[tuple[int, int]]
    parts: list[ItemPart]
    """The windows; the target of each: the tokens that it owns, and its first token."""

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)


WHOLE = Extraction()


def extract(
    encoder: Encoder,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    extraction: Extraction = WHOLE,
    *,
    device: torch.device | str = "cpu",
    precision: str = "fp32",
    part: Callable[[int], Progress] = lambda texts: no_progress,
) -> Iterator[TextFeatures]:
    """Yield the features of each text; `part` returns what shows the progress of the next texts."""
    device = torch.device(device)
    check_layers(extraction.layers, encoder.config)
    max_length = extraction.length(encoder.config.max_position_embeddings)
    if max_length < 3:
        raise BertkitError(f"windows of {max_length} tokens have no room for text; give 3 or more")
    encoder.eval()
    windowed = (split_text(text, tokenizer, max_length, extraction.stride) for text in texts)
    for group in split_parts(windowed, GROUP_TOKENS):
        rows = run_model(
            lambda batch: encoder_features(encoder, batch.packed, extraction.layers),
            [part for text in group for part in text.parts],
            device,
            per_token=True,
            precision=precision,
            progress=part(len(group)),
        )
        states = iter(rows)
        for text in group:
            vectors = join_windows(text, [next(states) for _ in text.parts])
            yield TextFeatures(vectors, text.names, text.offsets, len(text.parts))


def split_text(text: str, tokenizer: Tokenizer, max_length: int, stride: int) -> WindowedText:
    """Return `[CLS] text [SEP]`, split into as many windows as needed; an empty text needs one."""
    encoding = tokenizer.encode(text)
    ids = np.array(encoding.ids, dtype=np.int32)
    parts = []
    for first, end, owned in plan_windows(np.ones_like(ids), max_length - 2, stride):
        window = surround(ids[first:end], None, tokenizer)
        parts.append(ItemPart((window,), (owned, first)))
    vocabulary = tokenizer.vocabulary
    tokens = [vocabulary[tokenizer.cls_id], *encoding.tokens, vocabulary[tokenizer.sep_id]]
    return WindowedText(tokens, [(0, 0), *encoding.offsets, (0, 0)], parts)


def join_windows(text: WindowedText, outputs: Sequence[np.ndarray]) -> np.ndarray:
    """Combine the outputs of a text's windows into one array, (tokens, width)."""
    if len(outputs) == 1:
        return outputs[0]
    vectors = np.empty((len(text.names), outputs[0].shape[1]), dtype=np.float32)
    for part, rows in zip(text.parts, outputs, strict=True):
        owned, first = part.target
        vectors[1 + owned] = rows[1 + owned - first]
    vectors[0] = np.mean([rows[0] for rows in outputs], axis=0)
    vectors[-1] = np.mean([rows[-1] for rows in outputs], axis=0)
    return vectors


# Files --------------------------------------------------------------------------------------------


def extract_file(
    model: Path | str,
    file: Path | str,
    out: Path | str,
    extraction: Extraction = WHOLE,
    *,
    column: str = "text",
    precision: str = "fp32",
    device: str = "auto",
) -> None:
    """Write a model's hidden states for the texts of a file (`read_lines`), in order."""
    out = check_out(out, file, ".parquet")
    start, where = read_pretrained(model), choose_device(device)
    encoder = start.build(Encoder, keep_head=False).model.to(where)
    options: Any = {"device": where, "precision": choose_precision(precision, where)}

    def features(texts: Iterator[str], console: Console) -> Iterator[TextFeatures]:
        return extract(encoder, start.tokenizer, texts, extraction, part=console.part, **options)

    write_features(out, file, column, features, "features")


def embed_file(
    model: Path | str,
    file: Path | str,
    out: Path | str,
    *,
    column: str = "text",
    pooling: str = "auto",
    normalize: bool | None = None,
    precision: str = "auto",
    device: str = "auto",
) -> None:
    """Write one vector for each text of a file, in order.

    Args:
        model: a model directory, also sentence-transformers', a run directory, or a hub name.
        file: the texts; see `read_lines`.
        out: the file to write, .npy or .parquet.
        column: the column of the text, in formats that have columns.
        pooling: see `load_embedder`.
        normalize: see `load_embedder`.
        precision: see `load_embedder`.
        device: see `load_embedder`.

    Raises:
        BertkitError: the model, the file or a setting cannot be used; the message says why.
    """
    out = check_out(out, file, ".npy", ".parquet")
    embedder = load_embedder(
        model, device=device, precision=precision, pooling=pooling, normalize=normalize
    )

    def features(texts: Iterator[str], console: Console) -> Iterator[TextFeatures]:
        for chunk in text_chunks(texts):
            encoded = embedder.tokenize(chunk)
            vectors = embedder.vectors(encoded, console.part(len(encoded)))
            for text, vector in zip(encoded, vectors, strict=True):
                yield TextFeatures(vector[None], [], [], len(text.parts))

    write_features(out, file, column, features, "embedding")


def check_out(out: Path | str, file: Path | str, *endings: str) -> Path:
    """Return the path of a file of vectors, whose ending must be that of a fitting format."""
    path = check_output(out, [file])
    if path.suffix not in endings:
        raise BertkitError(f"{path}: the vectors are written as {' or '.join(endings)}")
    return path


def write_features(
    out: Path,
    file: Path | str,
    column: str,
    compute: Callable[[Iterator[str], Console], Iterator[TextFeatures]],
    title: str,
) -> None:
    """Write the vectors of a file's texts one text at a time, as they are computed."""
    counts, texts, rows, windowed, width = TextCounts(), 0, 0, 0, 0
    first = int(find_sources([file])[0].format == "text")  # lines are numbered from 1, rows from 0

    def features() -> Iterator[TextFeatures]:
        nonlocal texts, rows, windowed, width
        for text in compute(read_lines(file, column, counts), console):
            yield text
            texts, rows = texts + 1, rows + len(text.vectors)
            windowed, width = windowed + (text.windows > 1), text.vectors.shape[1]

    with Console() as console:
        console.start(None, title=title, unit="texts")
        with new_file(out) as temporary, disk_errors(out):
            if out.suffix == ".npy":
                write_array(temporary, features())
            else:
                write_parquet(temporary, features(), first)
        console.close()
        console.say(
            f"{out}: {texts:,} texts, {rows:,} vectors of {width:,} numbers, {windowed:,} texts in "
            "several windows",
            *describe_skipped(counts.skipped, counts.examples),
        )


def write_array(path: Path, features: Iterable[TextFeatures]) -> None:
    """Write one array; its header, which has the number of rows, is written last."""
    count, width = 0, 0
    with path.open("wb") as file:
        file.seek(HEADER_BYTES)
        for text in features:
            vectors = np.ascontiguousarray(text.vectors, dtype=np.float32)
            count, width = count + len(vectors), vectors.shape[1]
            file.write(vectors.data)
        file.seek(0)
        header = {"descr": "<f4", "fortran_order": False, "shape": (count, width)}
        np.lib.format.write_array_header_1_0(file, header)
        assert file.tell() == HEADER_BYTES


def write_parquet(path: Path, features: Iterable[TextFeatures], first: int) -> None:
    """Write a row per vector."""
    arrow = optional_library("pyarrow", "Parquet files")
    parquet = optional_library("pyarrow.parquet", "Parquet files")
    writer: Any = None
    try:
        for number, text in enumerate(features, first):
            vectors = arrow.FixedSizeListArray.from_arrays(
                text.vectors.astype(np.float32).reshape(-1), text.vectors.shape[1]
            )
            count = len(text.vectors)
            columns: dict[str, Any] = {"text": arrow.array([number] * count)}
            if text.tokens:
                columns |= {
                    "position": arrow.array(range(count)),
                    "token": arrow.array(text.tokens),
                    "start": arrow.array([start for start, _ in text.offsets]),
                    "end": arrow.array([end for _, end in text.offsets]),
                }
            table = arrow.table({**columns, "vector": vectors})
            writer = writer or parquet.ParquetWriter(path, table.schema)
            writer.write_table(table)
    finally:
        if writer is not None:
            writer.close()


def read_lines(file: Path | str, column: str, counts: TextCounts) -> Iterator[str]:
    """Yield each text of a file, also empty ones: the lines of plain text, or a column of rows."""
    for source in find_sources([file]):
        if source.format == "wikiextractor":
            yield from read_documents(source, counts)
        elif source.format == "text":
            for number, line in plain_lines(source, counts):
                if not line.strip():
                    counts.note("empty text, kept", f"{source.path}:{number}")
                yield line
        elif source.format == "unknown":
            counts.note("file of unknown type", source.path)
        else:
            read = TextCounts()
            for _, location, row in read_rows(source.path, read, source.format, columns=[column]):
                value = row[column]
                if not isinstance(value, str | int | float | None):
                    raise BertkitError(f"{location}: '{column}' holds {str(value)[:40]!r}, no text")
                text = "" if value is None else str(value)
                if not text.strip():
                    read.note("empty text, kept", location)
                yield text
            require_all(read, "correct it, so that the vectors stay those of the rows")
            counts += read
