"""`bertkit finetune`: a pre-trained model and labelled data → a tuned model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.config import FLATTEN
from bertkit.datasets.user_files import Columns
from bertkit.finetuning.finetune import COLUMNS, FILES, LENGTHS, ONE_RUN, OWN_HEAD, USUAL
from bertkit.finetuning.finetune import finetune as run_grid
from bertkit.finetuning.grid import Grid
from bertkit.finetuning.heads import HeadSettings
from bertkit.finetuning.run import TrainingSettings
from bertkit.outputs import FOLDER
from bertkit.report.pretraining import write_report
from bertkit.tasks.user_data import DataFiles, WindowLengths
from bertkit.training.journal import Console


def finetune_command(
    task: str,
    *,
    model: Path,
    out: Annotated[Path, FOLDER],
    keep: int = 1,
    device: str = "auto",
    files: Annotated[DataFiles, FLATTEN] = FILES,
    columns: Annotated[Columns, FLATTEN] = COLUMNS,
    lengths: Annotated[WindowLengths, FLATTEN] = LENGTHS,
    grid: Annotated[Grid, FLATTEN] = ONE_RUN,
    tuning: Annotated[TrainingSettings, FLATTEN] = USUAL,
    head: Annotated[HeadSettings, FLATTEN] = OWN_HEAD,
) -> None:
    """Tune a model on labelled data: one run, or a grid of settings and seeds.

    Official data by name, with --data FOLDER: cola, sst-2, mrpc, sts-b, qqp, mnli, qnli, rte, wnli,
    squad-1.1, squad-2.0, swag, conll-2003. Your own data by task type, with --train FILE:
    classification, multi-label-classification, regression, multiple-choice, token-classification,
    question-answering.

    Several values for --batch-size, --learning-rate or --epochs, and --seeds N, make a grid. The
    same command again makes only the runs that are missing.

    Parameters
    ----------
    task
        The name of a data set, or a task type.
    model
        What to begin with: a model directory, a run directory, or a Google checkpoint.
    out
        The folder for runs, the best model and its results.
    keep
        How many of the best runs keep their model, for ensembles.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    """
    with Console() as console:
        run_grid(
            task,
            model,
            out,
            files=files,
            columns=columns,
            lengths=lengths,
            grid=grid,
            tuning=tuning,
            head=head,
            keep=keep,
            device=device,
            console=console,
        )
        console.say(f"report: {write_report(out)}")
