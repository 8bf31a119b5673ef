"""`finetune`: any BERT and labelled data → the best model of a grid (paper section A.3)."""

from __future__ import annotations

from pathlib import Path

from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.datasets.user_files import Columns
from bertkit.finetuning.folder import FinetuningRun
from bertkit.finetuning.grid import Grid, RunResult
from bertkit.finetuning.heads import HeadSettings
from bertkit.finetuning.run import TrainingSettings
from bertkit.tasks.benchmarks import load_dataset
from bertkit.tasks.data import TaskData
from bertkit.tasks.user_data import DataFiles, WindowLengths
from bertkit.training.journal import Console

FILES, COLUMNS, LENGTHS = DataFiles(), Columns(), WindowLengths()
ONE_RUN, USUAL, OWN_HEAD = Grid(), TrainingSettings(), HeadSettings()


def finetune(
    task: str | TaskData,
    model: Path | str | PretrainedWeights,
    out: Path | str,
    *,
    files: DataFiles = FILES,
    columns: Columns = COLUMNS,
    lengths: WindowLengths = LENGTHS,
    grid: Grid = ONE_RUN,
    tuning: TrainingSettings = USUAL,
    head: HeadSettings = OWN_HEAD,
    keep: int = 1,
    device: str = "auto",
    console: Console | None = None,
) -> RunResult:
    """Fine-tune a model on a data set.

    Args:
        task: the name of an official set or of a kind (see `sets.load_dataset`), or a data set.
        model: what to begin with: a model directory, a run, or a Google checkpoint.
        out: the folder; runs that are done in it are not repeated.
        files: where the data is, where `task` is a name.
        columns: of own data.
        lengths: of windows.
        grid: which runs to make; one by default.
        tuning: what they share.
        head: what stands on the encoder.
        keep: how many of the best runs keep their model in `runs/NAME/model`.
        device: "auto", "cpu", "cuda", ...
        console: shows progress; a new one where absent.

    Returns:
        The best run; its model is in `out`/model.

    Raises:
        BertkitError: data or model are missing or damaged, the folder holds other settings, every
            run diverged, or the disk is full.
    """
    start = model if isinstance(model, PretrainedWeights) else read_pretrained(Path(model))
    if isinstance(task, str):
        positions = start.config.max_position_embeddings
        task = load_dataset(task, files, columns, lengths, positions)
    work = FinetuningRun(
        task,
        start,
        Path(out),
        grid=grid,
        tuning=tuning,
        head=head,
        keep=keep,
        device=device,
        console=console or Console(),
    )
    return work.run()
