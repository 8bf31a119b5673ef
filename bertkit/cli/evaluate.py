"""The command `bertkit evaluate`, which scores fine-tuned models or writes official files."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bertkit.cli.options import NO_COLUMNS, ColumnFlags, given
from bertkit.config import FLATTEN
from bertkit.datasets.benchmarks import DataFiles
from bertkit.errors import BertkitError
from bertkit.finetuning.grid import shown_scores
from bertkit.outputs import DATA, RESULTS, TEXT
from bertkit.predict.engine import check_change
from bertkit.predict.evaluate import evaluate
from bertkit.training.journal import Console


@dataclass(frozen=True, kw_only=True)
class Scored:
    """The files of a data set; only the split that --split names is read."""

    data: Annotated[Path | None, DATA] = None
    """The folder of an official data set."""
    train: Annotated[str, TEXT] = ""
    """Your data for --split train."""
    dev: Annotated[str, TEXT] = ""
    """Your data for --split dev; it also replaces an official file of SQuAD, SWAG or CoNLL."""
    test: Annotated[str, TEXT] = ""
    """Your data for --split test, with or without labels."""


SCORED = Scored()


def evaluate_command(
    task: str,
    *,
    model: list[Path],
    split: str = "dev",
    out: Annotated[Path | None, RESULTS] = None,
    precision: str = "auto",
    bound: float | None = None,
    null_threshold: float | None = None,
    device: str = "auto",
    files: Annotated[Scored, FLATTEN] = SCORED,
    columns: Annotated[ColumnFlags, FLATTEN] = NO_COLUMNS,
) -> None:
    """Score fine-tuned models on a data set, or write predictions for its server.

    Parameters
    ----------
    task
        The name of a data set, or a task type, as in `bertkit finetune`.
    model
        A fine-tuned model; the outputs of several are averaged (an ensemble).
    split
        dev, test, or another split of the set, such as dev-mismatched.
    out
        The folder for predictions, official files, scores, and a record of the evaluation.
    precision
        fp32, bf16, int8 (CPUs only), or auto: bf16 if the device computes it fast. With int8, the
        scores of fp32 are shown too.
    bound
        The maximum drop of the main score below that of fp32, in percentage points; a larger drop
        is an error.
    null_threshold
        For question answering: the null odds above which a question gets no answer. The default is
        saved with the model; a model of transformers has none and answers every question.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    """
    if bound is not None and not math.isfinite(bound):
        raise BertkitError(f"--bound must be a finite number, not {bound}", code="number")
    with Console() as console:
        found = evaluate(
            task,
            model,
            DataFiles(**vars(files)),
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
                print(f"{task} {split}{how}: {shown_scores(scores)}")  # noqa: T201
        if bound is not None:
            precision = found.predictor.precision
            check_change(found.metric, found.exact_scores, found.scores, bound / 100, precision)
        if out is not None:
            written = found.save(out, model)
            console.say(f"{split} predictions: {', '.join(map(str, written))}")
