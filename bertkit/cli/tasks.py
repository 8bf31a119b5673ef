"""Commands of labelled data: finetune and evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bertkit.cli.options import (
    AUTO,
    FLATTEN,
    Compute,
    Device,
    NullThreshold,
    TunedModel,
    flag_group,
    set_flags,
    task_flags,
)
from bertkit.files import check_output
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.runs import (
    ONE_RUN,
    USUAL,
    FinetuneSettings,
    Grid,
    TrainingSettings,
    scores_text,
)
from bertkit.predict.evaluate import evaluate
from bertkit.progress import Console
from bertkit.report.pretraining import write_report
from bertkit.tasks.types import DataFiles

if TYPE_CHECKING:
    ColumnFlags = Any
    WindowFlags = Any
else:
    ColumnFlags = task_flags("columns", "ColumnFlags")
    WindowFlags = task_flags("windows", "WindowFlags")
NO_COLUMNS, NO_WINDOWS = ColumnFlags(), WindowFlags()


def finetune_command(
    task: str,
    *,
    model: str,
    out: Path,
    data: Path | None = None,
    train: str = "",
    dev: str = "",
    test: str = "",
    dev_share: float | None = None,
    metric: str = "",
    new_head: bool = False,
    random_init: bool = False,
    device: Device = "auto",
    columns: Annotated[ColumnFlags, flag_group("Columns of your data")] = NO_COLUMNS,
    windows: Annotated[WindowFlags, flag_group("Lengths")] = NO_WINDOWS,
    grid: Annotated[Grid, flag_group("Grid of runs")] = ONE_RUN,
    training: Annotated[TrainingSettings, flag_group("Training")] = USUAL,
) -> None:
    """Fine-tune a model on labelled data: one run, or a grid of settings and seeds.

    Name an official data set and give --data FOLDER: cola, sst-2, mrpc, sts-b, qqp, mnli, qnli,
    rte, wnli, squad-1.1, squad-2.0, swag, conll-2003. Or name a task type and give your data with
    --train FILE: classification, multi-label-classification, regression, multiple-choice,
    token-classification, question-answering.

    Several values for --batch-size, --learning-rate or --epochs, and --seeds N, make a grid. A
    command that was stopped resumes when it is repeated. Examples for the task types, each after
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

    Args:
        task: The name of a data set, or a task type.
        model: The model to initialise from: a model directory, a run, a model of the hub, or a
            Google checkpoint.
        out: The folder for the model and its results.
        data: The folder of an official data set.
        train: Your training data; it also replaces an official file of SQuAD, SWAG or CoNLL.
        dev: Labelled data for choosing the best run; without it, a share of the training data is
            held out.
        test: Data to predict at the end, with or without labels.
        dev_share: The share of the training data that is held out if there is no --dev; by default
            0.1.
        metric: The dev score by which runs are compared and stopped early, such as macro_f1; by
            default the task's first.
        new_head: Initialise the head randomly even if the model has one for the same task and
            labels.
        random_init: Initialise all weights randomly, for a baseline; only the sizes and the
            tokenizer are the model's.
    """
    with Console() as console:
        finetune(
            task,
            model,
            out,
            files=DataFiles(data=data, train=train, dev=dev, test=test, dev_share=dev_share),
            columns=set_flags(columns),
            windows=set_flags(windows),
            settings=FinetuneSettings(
                grid=grid,
                training=training,
                metric=metric,
                new_head=new_head,
                random_init=random_init,
                device=device,
            ),
            console=console,
        )
        console.say(f"report: {write_report(out)}")


def evaluate_command(
    model: TunedModel,
    file: str = "",
    *,
    data: Path | None = None,
    split: str = "",
    task: str = "",
    out: Path | None = None,
    null_threshold: NullThreshold = None,
    compute: Annotated[Compute, FLATTEN] = AUTO,
    columns: Annotated[ColumnFlags, flag_group("Columns of your data")] = NO_COLUMNS,
) -> None:
    """Score a fine-tuned model on a file or an official data set, or predict for its server.

    Args:
        file: Your labelled data; its columns are those that the model was fine-tuned with.
        data: The folder of an official data set, of which --split is read.
        split: dev, test, or another split of the set, such as dev-mismatched; a file read as test
            may lack labels.
        task: The official data set, if it is not the one that the model was fine-tuned on.
        out: The folder for predictions, official files and scores.
    """
    out = out and check_output(out, [file], folder=True)
    with Console() as console:
        evaluation = evaluate(
            model,
            file or None,
            task=task,
            data=data,
            split=split,
            columns=set_flags(columns),
            null_threshold=null_threshold,
            console=console,
            **vars(compute),
        )
        if evaluation.scores:
            name = file or f"{evaluation.name} {evaluation.split}"
            print(f"{name}: {scores_text(evaluation.scores)}")
        if out is not None:
            files = evaluation.save(out)
            console.say(f"predictions: {', '.join(map(str, files))}")
