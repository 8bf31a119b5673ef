"""Evaluation of fine-tuned models on a data set, with the metrics of its official program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertkit.errors import BertkitError
from bertkit.files import write_json
from bertkit.finetuning.runs import labelled_part, score_remarks, write_results
from bertkit.predict.load import TaskPredictor, load_predictor
from bertkit.progress import Console, console_or_new, counted
from bertkit.tasks.classification import Classification, TextColumns
from bertkit.tasks.columns import as_source, column_names
from bertkit.tasks.official import OFFICIAL
from bertkit.tasks.task import Items, Task
from bertkit.tasks.types import DataFiles, read_split, task_class
from bertkit.text.documents import TextCounts, describe_skipped
from bertkit.training.device import environment


@dataclass(frozen=True)
class Evaluation:
    """The results of a model for a split, and their scores."""

    predictor: TaskPredictor
    name: str
    """The name of the data set, or the task type."""
    split: str
    """The split of the data set, or the name of the file without its ending."""
    inputs: Sequence[Any]
    results: Sequence[Any]
    items: Items
    scored: int
    """The number of inputs with a label."""
    scores: dict[str, float]
    """Metric -> score as a fraction of 1; {} if no input has a label."""

    def save(self, out: Path) -> list[Path]:
        """Write predictions, official files, and a record with the scores; return the files."""
        files = write_results(self.name, self.split, out, self.inputs, self.results)
        files.append(out / f"{self.split}-scores.json")
        record = {
            "task": self.name,
            "split": self.split,
            "model": str(self.predictor.folder),
            "scores": self.scores,
            "scored": self.scored,
            **self.items.counts(),
            "precision": self.predictor.precision,
            "device": str(self.predictor.device),
            "environment": environment(),
        }
        write_json(files[-1], record)
        return files


def evaluate(
    model: Path | str,
    file: Any = None,
    *,
    task: str = "",
    data: Path | str | None = None,
    split: str = "",
    columns: Mapping[str, Any] | None = None,
    precision: str = "auto",
    null_threshold: float | None = None,
    device: str = "auto",
    console: Console | None = None,
) -> Evaluation:
    """Score a fine-tuned model on labelled data, or predict for an official set's test data.

    Args:
        model: a model directory, a run or a model of the hub.
        file: the data: a file, a DataFrame, a `datasets.Dataset`, or a list of dicts or tuples.
        task: the official data set whose rules apply, such as "squad-2.0". The default is the
            model's task type for `file`, and the set that the model was fine-tuned on for `data`.
        data: the folder of an official data set, of which `split` is read.
        split: "train", "dev", "test", or another split of an official set, such as
            "dev-mismatched"; data named "test" may lack labels. The default is "dev", and the
            results for a file are named like it.
        columns: the column options of the user's data, by name; the others are those that the model
            was fine-tuned with.
        precision: "fp32", "bf16", "int8" (CPUs only) or "auto".
        null_threshold: see `load`.
        device: "auto", "cpu", "cuda", ...
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: the model or the data is missing or damaged, the model is for another task
            type, or there is no label.
    """
    if file is None and data is None:
        raise BertkitError("there is nothing to score; give a file, or --data FOLDER of a data set")
    part, split = split or ("dev" if file is None else data_name(file)), split or "dev"
    with console_or_new(console) as shown:
        predictor = load_predictor(
            model, device=device, precision=precision, null_threshold=null_threshold
        )
        counts, task_type = TextCounts(), predictor.task.task_type
        name = (task or (task_type if data is None else str(predictor.details.get("data")))).lower()
        if data is not None and name not in OFFICIAL:
            raise BertkitError(
                "the model was not fine-tuned on an official data set; say with --task which one "
                f"{data} holds",
                code="task",
            )
        check_model(predictor.task, name)
        files = DataFiles(data=None if data is None else Path(data))
        options = dict(columns or {})
        reader = predictor.columns_with(options)
        if file is not None:
            source = as_source(file, part)
            named: dict[str, Any] = {split if split in ("train", "test") else "dev": source}
            files = replace(files, **named)
            if isinstance(reader, TextColumns):
                names = column_names(source, reader.format, header=reader.header)
                reader = predictor.columns_among(names, options)
        inputs = read_split(name, split, files, reader, counts)
        if data is None and all(example.gold is None for example in inputs):
            raise BertkitError(f"{part} has no labels to score by; bertkit predict needs none")
        shown.say(*describe_skipped(counts.skipped, counts.examples))
        shown.start(None, title="predicting", unit="windows")
        results, items = predictor.run(inputs, lambda done, total: shown.update({"done": done}))
        shown.close()
        shown.say(f"{part}: {counted(items.inputs, 'inputs')}, {items.described()}")
        known, scored, note = labelled_part(inputs, results)
        task_of_set = official_task(predictor.task, name)
        scores = task_of_set.score(known, scored) if known else {}
        if known:
            notes = [f"{part}: {line}" for line in note]
            shown.say(*notes, *score_remarks(task_of_set, part, known, scored, scores))
        return Evaluation(predictor, name, part, inputs, results, items, len(known), scores)


def data_name(data: Any) -> str:
    """Return a name for data, which a file may have: that of its file, without ending."""
    path = Path(data).name if isinstance(data, str | Path) else ""
    return re.sub(r"[^\w-]+", "-", path.partition(".")[0]).strip("-") or "data"


def check_model(task: Task, name: str) -> None:
    """Check that a data set has the task type and the labels of the model."""
    kind = task_class(name)
    if kind is not type(task):
        raise BertkitError(
            f"the model is fine-tuned for {task.task_type}, not for {kind.task_type}; choose "
            "another model",
            code="task",
        )
    labels = OFFICIAL[name].settings.get("labels") if name in OFFICIAL else None
    if labels and {*labels} != {*task.labels}:
        raise BertkitError(
            f"{name} has the labels {', '.join(labels)}, not the model's "
            f"{', '.join(task.labels):.80}; choose another model",
            code="label",
        )


def official_task(task: Task, name: str) -> Task:
    """Return the task whose metrics are those of a data set."""
    if name in OFFICIAL and isinstance(task, Classification):
        return replace(task, **OFFICIAL[name].settings)
    return task
