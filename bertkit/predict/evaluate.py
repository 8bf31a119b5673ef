"""Evaluation of fine-tuned models on a data set, with the metrics of its official program."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertkit.datasets.benchmarks import OFFICIAL, DataFiles, check_sources, read_split, split_file
from bertkit.datasets.glue import GLUE
from bertkit.errors import BertkitError
from bertkit.files import write_json
from bertkit.predict.files import Given, is_swag, merged_columns
from bertkit.predict.predictors import TaskPredictor
from bertkit.tasks.classification import Classification
from bertkit.tasks.data import (
    describe_items,
    is_labelled,
    labelled_part,
    note_unique,
    write_results,
)
from bertkit.tasks.spec import spec_for
from bertkit.tasks.task import Items, PredictedSplit, Task
from bertkit.text.lines import TextCounts, describe_skipped
from bertkit.training.device import environment
from bertkit.training.journal import Console

IMPOSSIBLE = "fine-tune it on such questions; if transformers did so, give --null-threshold 0"


@dataclass(frozen=True)
class Evaluation:
    """The predictions of models for a split, and their scores."""

    predictor: TaskPredictor
    done: PredictedSplit
    items: Items
    scored: int
    """The number of inputs with a label."""
    scores: dict[str, float]
    """Metric -> score as a fraction of 1; {} if no input has a label."""
    exact_scores: dict[str, float]
    """The scores in fp32, if they were requested or the precision is int8, else {}."""

    @property
    def metric(self) -> str:
        """The main metric: that of the task, or the first of the official program."""
        own = self.predictor.task.metric
        return own if own in self.scores else next(iter(self.scores))

    def save(self, out: Path, models: Sequence[Path | str]) -> list[Path]:
        """Write predictions, official files, scores and a record of the evaluation to a folder.

        Returns:
            The files with predictions.

        Raises:
            BertkitError: the folder cannot be written.
        """
        split = self.done.split
        if self.scores:
            write_json(out / f"{split}-scores.json", self.scores)
        record: dict[str, Any] = {
            "task": self.done.name,
            "split": split,
            "models": list(map(str, models)),
        }
        record |= {
            "inputs": self.items.inputs,
            "scored": self.scored,
            "windowed": self.items.windowed,
            "cut": self.items.cut,
            "unknown": self.items.unknown._asdict(),
            "precision": self.predictor.precision,
            "device": str(self.predictor.device),
            "environment": environment(),
        }
        write_json(out / f"{split}-run.json", record)
        done = self.done._replace(name=self.done.name.lower())
        return write_results(self.predictor.task, out, done)


def evaluate(
    task: str,
    models: Sequence[Path | str],
    files: DataFiles,
    *,
    split: str = "dev",
    columns: Given | None = None,
    precision: str = "auto",
    compare_fp32: bool = False,
    unlabelled_ok: bool = False,
    null_threshold: float | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> Evaluation:
    """Score fine-tuned models on one split of a data set.

    Args:
        task: an official set, or a task type for the user's data.
        models: the model directories; the outputs of several are averaged (an ensemble).
        files: the files of the data set; only the split is read.
        split: "train", "dev", "test", or another split of the set, such as "dev-mismatched".
        columns: the column options of the user's data, by name; the others are those that the model
            was fine-tuned with.
        precision: "fp32", "bf16", "int8" (CPUs only) or "auto".
        compare_fp32: whether to compute the scores in fp32 too; with int8 they always are.
        unlabelled_ok: whether data without any label is predicted instead of being an error.
        null_threshold: see `bertkit.predict.load.load`.
        device: "auto", "cpu", "cuda", ...
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: models or data are missing or damaged, the models are for another task type,
            or there is no label.
    """
    with nullcontext(console) if console else Console() as shown:
        spec, key, counts = spec_for(task), task.lower(), TextCounts()
        settings: dict[str, Any] = {"device": device, "null_threshold": null_threshold}
        predictor = TaskPredictor.load(models, precision=precision, **settings)
        if predictor.task.task_type != spec.name:
            raise BertkitError(
                f"{models[0]} is fine-tuned for {predictor.task.task_type}, not for {spec.name}; "
                "choose another model"
            )
        inputs = scored_inputs(key, split, files, columns or {}, predictor, counts)
        labelled = any(is_labelled([given]) for given in inputs)
        if not labelled and not unlabelled_ok:
            raise BertkitError(f"{split} has no labels to score by; give --out for the predictions")
        if not labelled and compare_fp32:
            raise BertkitError(f"{split} has no labels; --bound compares scores and needs them")
        for line in (
            *describe_skipped(counts.skipped, counts.examples),
            *(f"{line}; {IMPOSSIBLE}" for line in predictor.task.remarks(inputs)),
        ):
            shown.say(line)
        bar = windows_bar(shown)
        predictions, items = predictor.run(inputs, bar)
        shown.say(describe_items(split, items))
        known, found, unscored = labelled_part(inputs, predictions)
        scores = official_scores(key, predictor.task, known, found) if labelled else {}
        if labelled and unscored:
            shown.say(f"{split}: {unscored}")
        exact_scores: dict[str, float] = {}
        if labelled and (compare_fp32 or predictor.precision == "int8"):
            exact = TaskPredictor.load(models, precision="fp32", **settings)
            _, found, _ = labelled_part(inputs, exact.run_items(inputs, items, bar))
            exact_scores = official_scores(key, exact.task, known, found)
        done = PredictedSplit(task, split, inputs, predictions)
        return Evaluation(predictor, done, items, len(known), scores, exact_scores)


def scored_inputs(
    name: str,
    split: str,
    files: DataFiles,
    given: Given,
    predictor: TaskPredictor,
    counts: TextCounts,
) -> Sequence[Any]:
    """Read the inputs of a split; the default columns are those the model was fine-tuned with.

    Raises:
        BertkitError: a model of SWAG would be scored on SWAG's rows without their second sentences.
    """
    if name in OFFICIAL:
        check_sources(name, files, given)
        inputs = read_split(name, split, files, None, counts)
    else:
        details = predictor.loaded[0].details
        columns = merged_columns(spec_for(name), given, details)
        inputs = read_split(name, split, files, columns, counts)
        file = split_file(name, split, files)
        if is_swag(details, file, columns):
            raise BertkitError(
                f"{file} has SWAG's columns, whose rows are more than a text and choices; "
                f"score it as bertkit evaluate swag --dev {file}"
            )
    note_unique([(split, inputs)], predictor.task, counts)
    return inputs


def official_scores(
    name: str, task: Task, inputs: Sequence[Any], predictions: Sequence[Any]
) -> dict[str, float]:
    """Return the official metrics of a GLUE classification task; otherwise the model's metrics."""
    if name not in GLUE or not isinstance(task, Classification):
        return task.score(inputs, predictions)
    official = replace(task, labels=GLUE[name].labels, metrics=GLUE[name].metrics)
    return official.score(inputs, predictions)


def windows_bar(console: Console) -> Callable[[int, int], None]:
    """Return a `progress` function for `TaskPredictor.run` that shows a bar over windows."""

    def show(done: int, total: int) -> None:
        if done:
            console.update({"done": done})
        else:
            console.start(total, title="predicting", unit="windows")
        if done == total:
            console.close()

    return show
