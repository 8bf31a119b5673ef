"""The command `bertkit evaluate`, which scores fine-tuned models or writes official files."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import bertkit
from bertkit.cli.options import (
    NO_COLUMNS,
    ColumnFlags,
    Device,
    NullThreshold,
    Precision,
    given,
)
from bertkit.config import flag_group
from bertkit.console import Console
from bertkit.errors import BertkitError
from bertkit.outputs import DATA, RESULTS, TEXT


def evaluate_command(
    model: Path,
    file: Annotated[str, TEXT] = "",
    *,
    data: Annotated[Path | None, DATA] = None,
    split: str = "dev",
    task: str = "",
    ensemble: tuple[Path, ...] = (),
    out: Annotated[Path | None, RESULTS] = None,
    precision: Precision = "auto",
    bound: float | None = None,
    null_threshold: NullThreshold = None,
    device: Device = "auto",
    columns: Annotated[ColumnFlags, flag_group("Columns of your data")] = NO_COLUMNS,
) -> None:
    """Score a fine-tuned model on a file or an official data set, or predict for its server.

    Parameters
    ----------
    model
        A fine-tuned model: a model directory, a run, or a model of the hub.
    file
        Your labelled data; its columns are those that the model was fine-tuned with.
    data
        The folder of an official data set, of which --split is read.
    split
        dev, test, or another split of the set, such as dev-mismatched; a file read as test may lack
        labels.
    task
        The official data set, if it is not the one that the model was fine-tuned on.
    ensemble
        More models of the same task; the outputs of all are averaged.
    out
        The folder for predictions, official files, scores, and a record of the evaluation.
    precision
        fp32, bf16, int8 (CPUs only), or auto: bf16 if the device computes it fast. With int8, the
        scores of fp32 are shown too.
    bound
        The maximum drop of the main score below that of fp32, in percentage points; a larger drop
        is an error.
    """
    from bertkit.finetuning.grid import shown_scores
    from bertkit.predict.engine import check_change

    if bound is not None and not math.isfinite(bound):
        raise BertkitError(f"--bound must be a finite number, not {bound}", code="number")
    with Console() as console:
        found = bertkit.evaluate(
            [model, *ensemble],
            file or None,
            task=task,
            data=data,
            split=split,
            columns=given(columns),
            precision=precision,
            compare_fp32=bound is not None,
            unlabelled_ok=out is not None,
            null_threshold=null_threshold,
            device=device,
            console=console,
        )
        for scores, how in ((found.scores, ""), (found.exact_scores, " in fp32")):
            if scores:
                print(f"{found.done.name} {split}{how}: {shown_scores(scores)}")  # noqa: T201
        if bound is not None:
            precision = found.predictor.precision
            check_change(found.metric, found.exact_scores, found.scores, bound / 100, precision)
        if out is not None:
            written = found.save(out, [model, *ensemble])
            console.say(f"{split} predictions: {', '.join(map(str, written))}")
