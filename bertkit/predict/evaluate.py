"""Evaluation of fine-tuned models on a data set, with the metrics of its official program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertkit.checkpoints.pretrained import resolve_model
from bertkit.console import Console, console_or_new
from bertkit.datasets.benchmarks import OFFICIAL, DataFiles, check_sources, read_split
from bertkit.datasets.glue import GLUE
from bertkit.errors import BertkitError
from bertkit.files import disk_errors, read_object, write_json
from bertkit.outputs import within
from bertkit.predict.engine import count_bar
from bertkit.predict.files import Given, is_swag, usual_columns
from bertkit.predict.load import load_predictor
from bertkit.predict.predictors import TaskPredictor
from bertkit.tasks.classification import Classification
from bertkit.tasks.data import describe_items, labelled_part, note_unique, write_results
from bertkit.tasks.spec import SPECS, spec_for
from bertkit.tasks.task import Items, PredictedSplit, Task
from bertkit.text.lines import TextCounts, describe_skipped
from bertkit.training.device import environment

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
        return own if own in self.scores else next(iter(self.scores), own)

    def save(self, out: Path, models: Sequence[Path | str]) -> list[Path]:
        """Write predictions, official files, scores and a record of the evaluation to a folder.

        The files of an earlier evaluation of this split in the folder are removed.

        Returns:
            The files with predictions.

        Raises:
            BertkitError: the folder cannot be written.
        """
        split = self.done.split
        earlier = begin_anew(out, split)
        files = write_results(self.predictor.task, out, self.done)
        remove_earlier(out, self.done, earlier, files)
        if self.scores:
            write_json(out / f"{split}-scores.json", self.scores)
        record = {
            "task": self.done.name,
            "split": split,
            "models": list(map(str, models)),
            "inputs": self.items.inputs,
            "scored": self.scored,
            "windowed": self.items.windowed,
            "cut": self.items.cut,
            "unknown": self.items.unknown._asdict(),
            "precision": self.predictor.precision,
            "device": str(self.predictor.device),
            "environment": environment(),
            "files": [str(file.relative_to(out)) for file in files],
        }
        write_json(out / f"{split}-run.json", record)
        return files


def begin_anew(out: Path, split: str) -> Mapping[str, Any]:
    """Remove the scores of an earlier evaluation of a split, and return its record.

    The record keeps only the names of its files, so that it never describes predictions of another
    model if writing these fails.
    """
    path, found = out / f"{split}-run.json", dict[str, Any]()
    with suppress(BertkitError):  # there is no record, or it is damaged
        found = read_object(path)
    record: dict[str, Any] = {n: found[n] for n in ("task", "files") if n in found}
    if found:
        write_json(path, {**record, "unfinished": True})
    with disk_errors(out):
        (out / f"{split}-scores.json").unlink(missing_ok=True)
    return record


def remove_earlier(
    out: Path, done: PredictedSplit, record: Mapping[str, Any], written: Sequence[Path]
) -> None:
    """Remove files of an earlier evaluation of a split; those of other sets of GLUE stay."""
    files = record.get("files") if done.name not in GLUE or record.get("task") == done.name else []
    for path in (out / str(name) for name in (files if isinstance(files, list) else ())):
        inside = within(path, out) is not None  # the record may be a stranger's
        if inside and path.is_file() and path not in written:
            with disk_errors(path):
                path.unlink()


def evaluate(
    model: Path | str | Sequence[Path | str],
    file: Any = None,
    *,
    task: str = "",
    data: Path | str | None = None,
    split: str = "dev",
    columns: Given | None = None,
    precision: str = "auto",
    compare_fp32: bool = False,
    unlabelled_ok: bool = False,
    null_threshold: float | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> Evaluation:
    """Score a fine-tuned model on labelled data.

    Args:
        model: a model directory, a run or a model of the hub; the outputs of several are averaged
            (an ensemble).
        file: the data: a file, a DataFrame, a `datasets.Dataset`, or a list of dicts or tuples.
        task: the official data set whose rules apply, such as "squad-2.0". The default is the
            model's task type for `file`, and the set that the model was fine-tuned on for `data`.
        data: the folder of an official data set, of which `split` is read.
        split: "train", "dev", "test", or another split of an official set, such as
            "dev-mismatched"; data named "test" may lack labels.
        columns: the column options of the user's data, by name; the others are those that the model
            was fine-tuned with.
        precision: "fp32", "bf16", "int8" (CPUs only) or "auto".
        compare_fp32: whether to compute the scores in fp32 too; with int8 they always are.
        unlabelled_ok: whether data without any label is predicted instead of being an error.
        null_threshold: see `bertkit.predict.load.load`.
        device: "auto", "cpu", "cuda", ...
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: models or data are missing or damaged, the model is for another task type, or
            there is no label.
    """
    with console_or_new(console) as shown:
        counts = TextCounts()
        if task:
            spec_for(task)  # a misspelt name is refused before the model is read
        settings: dict[str, Any] = {"device": device, "null_threshold": null_threshold}
        models = [model] if isinstance(model, str | Path) else list(model)
        models = [resolve_model(Path(one)) for one in models]
        predictor = load_predictor(models, precision=precision, **settings)
        model_task = predictor.task, predictor.loaded[0].details
        name, inputs = scored_inputs(*model_task, file, task, data, split, columns or {}, counts)
        labelled = any(given.gold is not None for given in inputs)
        if not labelled and not unlabelled_ok:
            raise BertkitError(
                f"{split} has no labels to score by; to predict without scores, give --out on the "
                "command line, or unlabelled_ok=True in Python"
            )
        if not labelled and compare_fp32:
            raise BertkitError(
                f"{split} has no labels, which a comparison with the scores of fp32 needs"
            )
        shown.say(*describe_skipped(counts.skipped, counts.examples))
        shown.say(*(f"{line}; {IMPOSSIBLE}" for line in predictor.task.remarks(inputs)))
        bar = count_bar(shown, "predicting", "windows")
        predictions, items = predictor.run(inputs, bar)
        shown.say(describe_items(split, items))
        known, found, unscored = labelled_part(inputs, predictions)
        scores = official_scores(name, predictor.task, known, found) if labelled else {}
        if labelled and unscored:
            shown.say(f"{split}: {unscored}")
        exact_scores: dict[str, float] = {}
        if labelled and (compare_fp32 or predictor.precision == "int8"):
            exact = load_predictor(models, precision="fp32", **settings)
            _, found, _ = labelled_part(inputs, exact.run_items(inputs, items, bar))
            exact_scores = official_scores(name, exact.task, known, found)
        done = PredictedSplit(name, split, inputs, predictions)
        return Evaluation(predictor, done, items, len(known), scores, exact_scores)


def scored_inputs(
    model: Task,
    details: Mapping[str, Any],
    file: Any,
    task: str,
    data: Path | str | None,
    split: str,
    given: Given,
    counts: TextCounts,
) -> tuple[str, Sequence[Any]]:
    """Return the name of a data set and the inputs of the split; see `evaluate`.

    `model` is the task that the model was fine-tuned on, `details` the content of its
    `bertkit.json`, and `given` the column options of the user's data.

    Raises:
        BertkitError: no data was given, the name of the set is unknown, or the set has another task
            type or other labels than the model.
    """
    own = model.task_type
    if file is None and data is None:
        raise BertkitError("there is nothing to score; give a file, or --data FOLDER of a data set")
    named = {} if file is None else {split if split in ("train", "test") else "dev": file}
    files = DataFiles(data=None if data is None else Path(data), **named)
    columns = SPECS[own].merged_columns(given, details)
    if not task:
        task = own if data is None else str(details.get("data"))
        if isinstance(file, str | Path) and is_swag(details, str(file), columns):
            task = "swag"  # whose rows are more than a text and choices
        if source := files.train or files.dev or files.test:
            columns = usual_columns(details, given, columns, source)
        if data is not None and task not in OFFICIAL:
            raise BertkitError(
                "the model was not fine-tuned on an official data set; say with --task which one "
                f"{data} holds",
                code="task",
            )
    name = task.lower()
    if spec_for(name).name != own:
        raise BertkitError(
            f"the model is fine-tuned for {own}, not for {spec_for(name).name}; choose another "
            "model",
            code="task",
        )
    wanted = GLUE[name].labels if name in GLUE else ()
    if wanted and isinstance(model, Classification) and {*wanted} != {*model.labels}:
        raise BertkitError(
            f"{name} has the labels {', '.join(wanted)}, not the model's "
            f"{', '.join(model.labels):.80}; choose another model",
            code="label",
        )
    check_sources(name, files, given)
    inputs = read_split(name, split, files, None if name in OFFICIAL else columns, counts)
    inputs = model.scored_inputs(inputs)
    note_unique([(split, inputs)], model, counts)
    return name, inputs


def official_scores(
    name: str, task: Task, inputs: Sequence[Any], predictions: Sequence[Any]
) -> dict[str, float]:
    """Return the official metrics of a GLUE classification task; otherwise the model's metrics."""
    if name not in GLUE or not isinstance(task, Classification):
        return task.score(inputs, predictions)
    official = replace(task, labels=GLUE[name].labels, metrics=GLUE[name].metrics)
    return official.score(inputs, predictions)


def check_change(
    metric: str, exact: Mapping[str, float], fast: Mapping[str, float], bound: float, mode: str
) -> None:
    """Check that the precision `mode` does not lower a metric by more than a bound.

    `exact` has the scores in fp32 and `fast` those in the precision, on the same labelled inputs.
    All scores and the bound are fractions of 1.

    Raises:
        BertkitError: the metric falls by more than the bound.
    """
    lost = exact[metric] - fast[metric]
    if lost > bound:
        raise BertkitError(
            f"{mode} lowers {metric} from {100 * exact[metric]:.2f} to {100 * fast[metric]:.2f}, "
            f"and the bound is {100 * bound:.2f} points; choose bf16 or fp32, or another bound"
        )
