"""The command `bertkit finetune`, which fine-tunes a pre-trained model on labelled data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.cli.options import NO_COLUMNS, NO_WINDOWS, ColumnFlags, WindowFlags, given
from bertkit.config import FLATTEN
from bertkit.datasets.benchmarks import OFFICIAL, DataFiles, check_sources
from bertkit.finetuning.finetune import FILES, SETTINGS, finetune
from bertkit.finetuning.grid import FinetuneSettings
from bertkit.outputs import FOLDER
from bertkit.report.pretraining import write_report
from bertkit.tasks.spec import spec_for
from bertkit.training.journal import Console


def finetune_command(
    task: str,
    *,
    model: Path,
    out: Annotated[Path, FOLDER],
    files: Annotated[DataFiles, FLATTEN] = FILES,
    columns: Annotated[ColumnFlags, FLATTEN] = NO_COLUMNS,
    windows: Annotated[WindowFlags, FLATTEN] = NO_WINDOWS,
    settings: Annotated[FinetuneSettings, FLATTEN] = SETTINGS,
) -> None:
    """Fine-tune a model on labelled data: one run, or a grid of settings and seeds.

    Name an official data set and give --data FOLDER: cola, sst-2, mrpc, sts-b, qqp, mnli, qnli,
    rte, wnli, squad-1.1, squad-2.0, swag, conll-2003. Or name a task type and give your data with
    --train FILE: classification, multi-label-classification, regression, multiple-choice,
    token-classification, question-answering.

    Several values for --batch-size, --learning-rate or --epochs, and --seeds N, make a grid. If you
    repeat the command, it trains only the missing runs.

    Parameters
    ----------
    task
        The name of a data set, or a task type.
    model
        The model to initialise from: a model directory, a run directory, or a Google checkpoint.
    out
        The folder for runs, the best model and its results.
    """
    spec, named = spec_for(task), given(columns)
    check_sources(task.lower(), files, named)
    with Console() as console:
        finetune(
            task,
            model,
            out,
            files=files,
            columns=None if task.lower() in OFFICIAL else spec.make_columns(named),
            windows=spec.make_windows(given(windows)),
            settings=settings,
            console=console,
        )
        console.say(f"report: {write_report(out)}")
