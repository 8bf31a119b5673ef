"""`bertkit features`: write the hidden states of texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.cli.options import AnyModel, Column, Device, VectorFormat
from bertkit.config import FLATTEN
from bertkit.outputs import TEXT, VECTORS
from bertkit.predict.features import WHOLE, Extraction
from bertkit.predict.text_vectors import extract_file


def features_command(
    model: AnyModel,
    file: Annotated[str, TEXT],
    *,
    out: Annotated[Path, VECTORS],
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
