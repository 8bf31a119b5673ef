"""`bertkit evaluate`: tuned models on labelled or unlabelled data → scores and official files."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from bertkit.cli.predict import input_columns, is_swag
from bertkit.config import FLATTEN
from bertkit.datasets.glue import GLUE
from bertkit.datasets.user_files import Columns
from bertkit.errors import BertkitError
from bertkit.files import write_json
from bertkit.finetuning.grid import shown_scores
from bertkit.outputs import DATA, RESULTS, TEXT
from bertkit.predict.engine import check_change
from bertkit.predict.predictors import TaskPredictor
from bertkit.tasks.benchmarks import OFFICIAL, benchmark_task_type, no_task, read_split, split_file
from bertkit.tasks.classification import Classification
from bertkit.tasks.data import (
    TaskData,
    describe_items,
    is_labelled,
    labelled_part,
    write_results,
)
from bertkit.tasks.submissions import official_writer
from bertkit.tasks.task import Items, Task
from bertkit.tasks.user_data import KINDS, DataFiles, note_unique
from bertkit.text.lines import TextCounts, describe_skipped
from bertkit.training.device import environment
from bertkit.training.journal import Console


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Where the data is; the part that --split names is read."""

    data: Annotated[Path | None, DATA] = None
    """The folder of an official data set."""
    train: Annotated[str, TEXT] = ""
    """Own data for --split train."""
    dev: Annotated[str, TEXT] = ""
    """Own data for --split dev; also overrules an official file of SQuAD, SWAG or CoNLL."""
    test: Annotated[str, TEXT] = ""
    """Own data for --split test, with or without labels."""


FILES, COLUMNS = Scored(), Columns()
IMPOSSIBLE = "tune it on such questions; if transformers did so, give --null-threshold 0"


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
    files: Annotated[Scored, FLATTEN] = FILES,
    columns: Annotated[Columns, FLATTEN] = COLUMNS,
) -> None:
    """Score tuned models on a data set, or write the file that its server waits for.

    Parameters
    ----------
    task
        The name of a data set, or a task type, as in `bertkit finetune`.
    model
        A tuned model; of several the outputs are averaged (an ensemble).
    split
        dev, test, or another of the set, such as dev-mismatched.
    out
        A folder for predictions, the official file, scores, and how they were made.
    precision
        fp32, bf16, int8 (CPUs only), or auto: bf16 where the device is made for it. The scores of
        int8 are shown beside those of fp32.
    bound
        The most that the deciding score may fall below that of fp32, in points of 100; beyond it,
        the precision is refused.
    null_threshold
        Of models that answer: there is no answer where the odds of none are above it. The model's
        own where not given; one of transformers has none, and gives an answer to everything.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    """
    if bound is not None and not math.isfinite(bound):
        raise BertkitError(f"--bound must be a finite number, not {bound}", code="number")
    counts = TextCounts()
    settings: dict[str, Any] = {"device": device, "null_threshold": null_threshold}
    key, kind = task.lower(), require_known_task(task)
    predictor = TaskPredictor.load(model, precision=precision, **settings)
    if predictor.task.task_type != kind:
        raise BertkitError(
            f"{model[0]} was tuned to {predictor.task.task_type}, not to {kind}; "
            "choose another model"
        )
    details = predictor.loaded[0].details
    named = input_columns(columns, details) if key in KINDS else columns
    where = DataFiles(**vars(files))
    inputs = read_split(task, split, where, named, counts)
    note_unique([(split, inputs)], getattr(predictor.task, "context", ""), counts)
    if key == "multiple-choice":
        check_not_swag(details, split_file(task, split, where), named)
    labelled = any(is_labelled([given]) for given in inputs)
    if not labelled and out is None:
        raise BertkitError(f"{split} has no labels to score by; give --out for the predictions")
    if not labelled and bound is not None:
        raise BertkitError(f"{split} has no labels; --bound compares scores and needs them")
    with Console() as console:
        for line in (
            *describe_skipped(counts.skipped, counts.examples),
            *(f"{line}; {IMPOSSIBLE}" for line in predictor.task.remarks(inputs)),
        ):
            console.say(line)
        bar = windows_bar(console)
        predictions, items = predictor.run(inputs, bar)
        console.say(describe_items(split, items))
        known, found, unscored = labelled_part(inputs, predictions)
        if labelled:
            scores = official_scores(key, predictor.task, known, found)
            print(f"{task} {split}: {shown_scores(scores)}")  # noqa: T201
            if unscored:
                console.say(f"{split}: {unscored}")
            if bound is not None or predictor.precision == "int8":
                exact = TaskPredictor.load(model, precision="fp32", **settings)
                _, found, _ = labelled_part(inputs, exact.run_items(inputs, items, bar))
                before = official_scores(key, exact.task, known, found)
                print(f"{task} {split} in fp32: {shown_scores(before)}")  # noqa: T201
                if bound is not None:
                    own = predictor.task.metric
                    metric = own if own in scores else next(iter(scores))
                    check_change(metric, before, scores, bound / 100, predictor.precision)
            if out is not None:
                write_json(out / f"{split}-scores.json", scores)
        if out is not None:
            record = {"task": task, "split": split, "models": list(map(str, model))}
            write_json(out / f"{split}-run.json", record | run_facts(predictor, items, len(known)))
            data = TaskData(task, predictor.task, (), (), write=official_writer(task.lower()))
            written = write_results(data, predictor.task, out, split, inputs, predictions)
            console.say(f"{split} predictions: {', '.join(map(str, written))}")


def check_not_swag(details: Mapping[str, Any], file: str, columns: Columns) -> None:
    """Stop where a model of SWAG would be scored on SWAG's rows without their second sentences.

    Raises:
        BertkitError: names the command that reads them.
    """
    if is_swag(details, file, columns):
        raise BertkitError(
            f"{file} has SWAG's columns, whose rows are more than a text and choices; "
            f"score it as bertkit evaluate swag --dev {file}"
        )


def require_known_task(name: str) -> str:
    """The kind of a data set, or a kind itself.

    Raises:
        BertkitError: no task has this name.
    """
    key = name.lower()
    if key not in (*OFFICIAL, *KINDS):
        raise no_task(name)
    return benchmark_task_type(key)


def run_facts(predictor: TaskPredictor, items: Items, scored: int) -> dict[str, Any]:
    """What stands beside scores so that they can be judged: of what, in which way, and where."""
    return {
        "inputs": items.inputs,
        "scored": scored,
        "windowed": items.windowed,
        "cut": items.cut,
        "unknown": items.unknown._asdict(),
        "precision": predictor.precision,
        "device": str(predictor.device),
        "environment": environment(),
    }


def official_scores(
    name: str, task: Task[Any, Any], inputs: Sequence[Any], predictions: Sequence[Any]
) -> dict[str, float]:
    """The metrics of a set of GLUE, whatever those of the model are; else the model's."""
    if name not in GLUE or not isinstance(task, Classification):
        return task.score(inputs, predictions)
    official = replace(task, labels=GLUE[name].labels, metrics=GLUE[name].metrics)
    return official.score(inputs, predictions)


def windows_bar(console: Console) -> Callable[[int, int], None]:
    """A bar over the windows of a run, to be given to `TaskPredictor.run`."""

    def show(done: int, total: int) -> None:
        if done:
            console.update({"done": done})
        else:
            console.start(total, title="predicting", unit="windows")
        if done == total:
            console.close()

    return show
