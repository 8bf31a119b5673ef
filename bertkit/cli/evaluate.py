"""The command `bertkit evaluate`, which scores fine-tuned models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.cli.options import Device, NullThreshold, Precision, TunedModel, flag_group
from bertkit.cli.task_flags import NO_COLUMNS, ColumnFlags, set_flags
from bertkit.console import Console
from bertkit.files import check_output
from bertkit.finetuning.results import scores_text
from bertkit.predict.evaluate import evaluate


def evaluate_command(
    model: TunedModel,
    file: str = "",
    *,
    data: Path | None = None,
    split: str = "",
    task: str = "",
    ensemble: tuple[Path, ...] = (),
    out: Path | None = None,
    precision: Precision = "auto",
    null_threshold: NullThreshold = None,
    device: Device = "auto",
    columns: Annotated[ColumnFlags, flag_group("Columns of your data")] = NO_COLUMNS,
) -> None:
    """Score a fine-tuned model on a file or an official data set, or predict for its server.

    Parameters
    ----------
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
        The folder for predictions, official files and scores.
    """
    models = [model, *ensemble]
    out = out and check_output(out, [file], folder=True)
    with Console() as console:
        evaluation = evaluate(
            models,
            file or None,
            task=task,
            data=data,
            split=split,
            columns=set_flags(columns),
            precision=precision,
            unlabelled_ok=out is not None,
            null_threshold=null_threshold,
            device=device,
            console=console,
        )
        if evaluation.scores:
            name = file or f"{evaluation.name} {evaluation.split}"
            print(f"{name}: {scores_text(evaluation.scores)}")  # noqa: T201
        if out is not None:
            files = evaluation.save(out, models)
            console.say(f"predictions: {', '.join(map(str, files))}")
