"""The commands `bertkit features`, `predict embed` and `predict similar`: vectors of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import rich.console
from rich.markup import escape
from rich.table import Table

from bertkit.cli.options import Column, Device, Pooling, Precision, VectorFile, VectorFormat
from bertkit.config import FLATTEN
from bertkit.outputs import TEXT
from bertkit.predict.embeddings import load_embedder, nearest_texts
from bertkit.predict.features import WHOLE, Extraction
from bertkit.predict.text_vectors import embed_file, extract_file, read_lines
from bertkit.text.lines import TextCounts, describe_skipped


def features_command(
    model: Path,
    file: Annotated[str, TEXT],
    *,
    out: Annotated[Path, VectorFile],
    format: VectorFormat = "auto",  # noqa: A002
    column: Column = "text",
    precision: str = "fp32",
    device: Device = "auto",
    extraction: Annotated[Extraction, FLATTEN] = WHOLE,
) -> None:
    """Write a model's hidden states for the texts of a file, in order.

    In plain text every line is a text; CSV, TSV, JSON lines, Parquet and hf:NAME have a column of
    texts. No text is dropped or cut: long texts are read through windows.

    Parameters
    ----------
    model
        A model directory, a run directory, or a Google checkpoint.
    file
        The texts.
    out
        The file to write.
    precision
        fp32, bf16, or auto: bf16 if the device computes it fast.
    """
    extract_file(
        model,
        file,
        out,
        extraction,
        format=format,
        column=column,
        precision=precision,
        device=device,
    )


def embed_command(
    model: Path,
    file: Annotated[str, TEXT],
    *,
    out: Annotated[Path, VectorFile],
    format: VectorFormat = "auto",  # noqa: A002
    column: Column = "text",
    pooling: Pooling = "auto",
    normalize: bool | None = None,
    cut: bool = False,
    precision: Precision = "auto",
    device: Device = "auto",
) -> None:
    """Write one vector for every text of a file, in order.

    In plain text every line is a text; CSV, TSV, JSON lines, Parquet and hf:NAME have a column of
    texts. Long texts are read through windows. The file may be larger than memory.

    Parameters
    ----------
    model
        A model directory, also of sentence-transformers, or a run directory.
    file
        The texts.
    out
        The file to write.
    normalize
        Divide vectors by their norm; by default as the model's directory specifies, else yes.
    cut
        Drop the text beyond the model's length, as sentence-transformers does.
    """
    embed_file(
        model,
        file,
        out,
        format=format,
        column=column,
        pooling=pooling,
        normalize=normalize,
        cut=cut,
        precision=precision,
        device=device,
    )


def similar_command(
    model: Path,
    file: Annotated[str, TEXT],
    text: str,
    *,
    top: int = 5,
    column: Column = "text",
    pooling: Pooling = "auto",
    precision: Precision = "auto",
    device: Device = "auto",
) -> None:
    """Find the texts of a file that are most similar to a text, by the cosine of their vectors.

    Parameters
    ----------
    model
        A model directory, also of sentence-transformers, or a run directory.
    file
        The texts; see bertkit predict embed.
    text
        The text to look for.
    top
        The number of texts to show.
    """
    embedder = load_embedder(model, device=device, precision=precision, pooling=pooling)
    counts = TextCounts()
    table = Table("number", "cosine", "text")
    lines = read_lines(file, column, counts)
    for cosine, number, found in nearest_texts(embedder, text, lines, top):
        table.add_row(f"{number + 1:,}", f"{cosine:.4f}", escape(found.strip()))
    rich.console.Console().print(table)
    for line in describe_skipped(counts.skipped, counts.examples):
        rich.console.Console(stderr=True).print(line)
