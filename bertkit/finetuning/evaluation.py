"""The scores of models in fine-tuning: of one on any split, and of a run while it is trained."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bertkit.console import Console
from bertkit.errors import BertkitError, check_known, short_repr
from bertkit.finetuning.grid import shown_scores
from bertkit.model.task_heads import TaskModel
from bertkit.tasks.data import TaskData
from bertkit.tasks.task import Items, Task, run_model

Scores = dict[str, dict[str, float]]
"""Split -> metric -> value."""

Metric = Callable[[list[Any], list[Any]], float]
"""(gold labels, predictions) of a whole split -> a score; higher is better. Both are plain values:
labels, tuples of labels (sorted) or of tags (entity tags in IOB2), numbers, indices of choices, or
for question answering the tuple of accepted answers and the text of the predicted one."""


@dataclass
class Scorer:
    """Predicts the splits of a data set and scores the predictions.

    The labels of the task are in the order of the model's outputs. `items` has the encoded inputs
    of dev and test by split, `metrics` the user's metrics by name, and `metric` is the name of the
    score by which runs are compared, "" for the task's main metric.

    Raises:
        BertkitError: no score is called `metric`, or one of `metrics` has the name of another.
    """

    data: TaskData
    task: Task
    items: Mapping[str, Items]
    metrics: Mapping[str, Metric]
    metric: str
    device: torch.device
    precision: str
    console: Console

    def __post_init__(self) -> None:
        self.baselines = {name: self.task.baseline(inputs) for name, inputs in self.data.dev}
        self.metric = self.metric or self.task.metric
        known = self.baselines[self.data.dev[0][0]]
        if twice := sorted(known.keys() & self.metrics.keys()):
            raise BertkitError(f"{self.task.task_type} has a metric '{twice[0]}'; rename your own")
        for name, function in self.metrics.items():
            if not callable(function):
                raise BertkitError(
                    f"the metric '{name}' is {short_repr(function)}, not a function of the "
                    "labels and the predictions",
                    code="metric",
                )
        check_known("metric", self.metric, (*known, *self.metrics), code="metric")
        if self.metric in known and self.metric.endswith("error"):
            raise BertkitError(
                f"runs are compared by a score that is better if higher, and {self.metric} is not; "
                f"choose {self.task.metric}",
                code="metric",
            )

    def predict(
        self, model: TaskModel, split: str, inputs: Sequence[Any], *, shown: bool = True
    ) -> list[Any]:
        """Return the predictions for a split; `shown` is whether to show the progress."""
        items = self.items[split]
        if shown:
            total = sum(len(item.parts) for item in items.items)
            self.console.start(total, title=split, unit="windows")
        outputs = run_model(
            model,
            items,
            self.device,
            precision=self.precision,
            progress=lambda done: self.console.update({"done": done}) if shown else None,
        )
        if shown:
            self.console.close()
        return self.task.decode(inputs, items, outputs)

    def score(
        self, task: Task, inputs: Sequence[Any], predictions: Sequence[Any]
    ) -> dict[str, float]:
        """Return the scores of labelled inputs, with those of the user's metrics.

        Raises:
            BertkitError: a metric of the user does not return a finite number.
        """
        scores = task.score(inputs, predictions)
        gold = [task.plain_gold(given) for given in inputs]
        found = [task.plain(prediction) for prediction in predictions]
        for name, function in self.metrics.items():
            given = function(list(gold), list(found))
            try:
                value = float(given)
            except (TypeError, ValueError):  # such as None or a text
                value = math.nan
            if not math.isfinite(value):
                raise BertkitError(
                    f"the metric '{name}' returned {short_repr(given)}; it must return a finite "
                    "number"
                )
            scores[name] = value
        return scores


@dataclass
class RunEvaluation:
    """Evaluates a run on dev while it is trained, and decides when it stops and what it keeps.

    Without early stopping, the model after the last update is kept (as in the paper); otherwise
    that of the best evaluation, the first of equals.

    Args:
        scorer: what predicts and scores; the metric is that of the first dev split.
        patience: the number of evaluations without a better score after which the run stops; 0 to
            train to the end.
        title: how the console names the run.
        keep: called with the model to keep, its task with thresholds, and its scores.
    """

    scorer: Scorer
    patience: int
    title: str
    keep: Callable[[TaskModel, Task, Scores], None]

    def __post_init__(self) -> None:
        self.began = time.perf_counter()
        self.state: dict[str, Any] = {"values": [], "scores": {}, "degenerate": "", "seconds": 0.0}
        """What a checkpoint keeps, as JSON values: the main metric of every evaluation, the scores
        of the kept model, why it is degenerate, and the seconds of earlier processes."""
        self.predictions: dict[str, list[Any]] = {}
        """Split -> the predictions of the kept model; {} if an earlier process made them."""

    @property
    def seconds(self) -> float:
        """The seconds that the run has taken, without those lost by a stop."""
        return float(self.state["seconds"]) + time.perf_counter() - self.began

    def __call__(self, model: TaskModel, step: int, *, last: bool) -> tuple[dict[str, Any], bool]:
        """Evaluate a model after `step` updates.

        Returns:
            The scores of the first dev split for the journal, and whether to stop the run.
        """
        began, scorer = time.perf_counter(), self.scorer
        first, inputs = scorer.data.dev[0]
        predictions = {first: scorer.predict(model, first, inputs, shown=last)}
        task = scorer.task.calibrated(inputs, predictions[first])
        scores = {first: scorer.score(task, inputs, predictions[first])}
        value, before = scores[first][scorer.metric], self.state["values"]
        better = value > max(before, default=-math.inf)
        self.state["values"] = values = [*before, value]
        if better if self.patience else last:
            for name, others in scorer.data.dev[1:]:
                predictions[name] = scorer.predict(model, name, others, shown=last)
                scores[name] = scorer.score(task, others, predictions[name])
            self.state["scores"] = scores
            self.state["degenerate"] = task.degenerate(inputs, predictions[first])
            self.predictions = predictions
            self.keep(model, task, scores)
        worse = len(values) - 1 - values.index(max(values))
        stop = 0 < self.patience <= worse
        if not last:
            stopping = f"; stopped early, {worse} evaluations after the best" if stop else ""
            found = shown_scores(scores[first], self.scorer.metric)
            self.scorer.console.say(f"{self.title}, update {step:,}: {first} {found}{stopping}")
        self.state["seconds"], self.began = self.seconds, time.perf_counter()
        return {"split": first, **scores[first], "seconds": time.perf_counter() - began}, stop
