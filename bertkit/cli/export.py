"""`bertkit export`: write a model as an ONNX file and compare its outputs with bertkit's."""

from __future__ import annotations

from pathlib import Path

import bertkit
from bertkit.cli.options import AnyModel


def export_command(
    model: AnyModel,
    *,
    out: Path,
    to: str = "onnx",
    head: str = "auto",
    pooling: str = "auto",
    normalize: bool | None = None,
    max_error: float | None = None,
) -> None:
    """Write a model as an ONNX file with its tokenizer, and check it.

    The file is run on built-in sequences and compared with bertkit; export.json, next to it,
    records the differences. If a difference exceeds its bound, nothing is written.

    Parameters
    ----------
    out
        The folder to write.
    to
        onnx, or onnx-int8 (8-bit weights).
    head
        auto for the head that the model was trained with; encoder works for any model,
        and embedding for any model directory.
    pooling
        The pooling of embeddings: cls, mean, pooler, mean-last-four, or auto.
    normalize
        Whether to scale embeddings to unit norm.
    max_error
        The largest allowed difference in an output; if the output's largest value is above 1, the
        limit is multiplied by it. By default 0.0001, and unlimited for onnx-int8.
    """
    bertkit.export_model(
        *(model, out, to), head=head, pooling=pooling, normalize=normalize, max_error=max_error
    )
