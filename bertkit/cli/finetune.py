"""The command `bertkit finetune`, which fine-tunes a pre-trained model on labelled data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import bertkit
from bertkit.cli.options import NO_COLUMNS, NO_WINDOWS, ColumnFlags, WindowFlags, given
from bertkit.config import FLATTEN, flag_group
from bertkit.console import Console
from bertkit.datasets.benchmarks import FILES, OFFICIAL, DataFiles, check_sources
from bertkit.finetuning.settings import SETTINGS, FinetuneSettings
from bertkit.outputs import FOLDER


def finetune_command(
    task: str,
    *,
    model: Path,
    out: Annotated[Path, FOLDER],
    files: Annotated[DataFiles, flag_group("Data")] = FILES,
    columns: Annotated[ColumnFlags, flag_group("Columns of your data")] = NO_COLUMNS,
    windows: Annotated[WindowFlags, flag_group("Lengths")] = NO_WINDOWS,
    settings: Annotated[FinetuneSettings, FLATTEN] = SETTINGS,
) -> None:
    """Fine-tune a model on labelled data: one run, or a grid of settings and seeds.

    Name an official data set and give --data FOLDER: cola, sst-2, mrpc, sts-b, qqp, mnli, qnli,
    rte, wnli, squad-1.1, squad-2.0, swag, conll-2003. Or name a task type and give your data with
    --train FILE: classification, multi-label-classification, regression, multiple-choice,
    token-classification, question-answering.

    Several values for --batch-size, --learning-rate or --epochs, and --seeds N, make a grid. If you
    repeat the command, it trains only the missing runs. Examples for the task types, each after
    `bertkit finetune --model MODEL --out OUT`:

    ```
    classification --train topics.csv --text title --label topic
    multi-label-classification --train tags.csv --label tags --separator ";"
    regression --train pairs.tsv --text first --pair second --label score
    multiple-choice --train quiz.jsonl --text stem --choices a b c d
    token-classification --train entities.txt
    question-answering --train squad.json
    mrpc --data GLUE --learning-rate 5e-5 3e-5 2e-5 --seeds 3
    ```

    Parameters
    ----------
    task
        The name of a data set, or a task type.
    model
        The model to initialise from: a model directory, a run, a model of the hub, or a Google
        checkpoint.
    out
        The folder for runs, the best model and its results.
    """
    from bertkit.tasks.spec import spec_for

    spec, named = spec_for(task), given(columns)
    check_sources(task.lower(), files, named)
    with Console() as console:
        bertkit.finetune(
            task,
            model,
            out,
            files=files,
            columns=None if task.lower() in OFFICIAL else spec.make_columns(named),
            windows=spec.make_windows(given(windows)),
            settings=settings,
            console=console,
        )
        console.say(f"report: {bertkit.write_report(out)}")
