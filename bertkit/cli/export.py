"""`bertkit export`: write a model for other libraries and compare outputs with bertkit's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import bertkit
from bertkit.cli.options import NO_COLUMNS, AnyModel, ColumnFlags, given
from bertkit.config import flag_group
from bertkit.outputs import REPLACED, TEXT


def export_command(
    model: AnyModel,
    *,
    to: str,
    out: Annotated[Path, REPLACED],
    head: str = "auto",
    pooling: str = "auto",
    normalize: bool | None = None,
    inputs: Annotated[str, TEXT] = "",
    dev: Annotated[str, TEXT] = "",
    max_error: float | None = None,
    bound: float = 1.0,
    columns: Annotated[ColumnFlags, flag_group("Columns of your data")] = NO_COLUMNS,
) -> None:
    """Write a model for other libraries, and check the files.

    The files are run on real inputs and compared with bertkit; export.json, next to them, records
    the differences. If a difference exceeds its bound, nothing is written.

    Parameters
    ----------
    to
        onnx, onnx-int8 (8-bit weights), huggingface (for transformers; embedding models for
        sentence-transformers), tensorflow (Google's checkpoints) or torch-export (.pt2).
    out
        The folder to write.
    head
        auto for the head that the model was trained with; encoder works for any model,
        and embedding for any model directory.
    pooling
        The pooling of embeddings: cls, mean, pooler, mean-last-four, or auto.
    normalize
        Whether to scale embeddings to unit norm.
    inputs
        A file of inputs, as for predict, to compare outputs on (the first 200); if not given,
        built-in sentences are used.
    dev
        A labelled file on which to measure the change of the metric; for a model fine-tuned on an
        official set, also the set's folder (as --data in finetune).
    max_error
        The largest allowed difference in an output; if the output's largest value is above 1, the
        limit is multiplied by it. By default 0.0001, and unlimited for onnx-int8.
    bound
        The largest allowed drop of the task's main metric on --dev, in percentage points.
    """
    bertkit.export_model(
        *(model, out, to),
        head=head,
        pooling=pooling,
        normalize=normalize,
        inputs=inputs,
        dev=dev,
        columns=given(columns),
        max_error=max_error,
        bound=bound,
    )
