"""Predictors of fine-tuned models, which `load(folder)` returns.

    classify = load("runs/mrpc/model")
    classify("He sold it.", "It was sold.").label
    classify([("He sold it.", "It was sold."), ("He sold it.", "It rained.")])

Several folders make an ensemble, which averages the outputs of its models (paper, table 2).
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.errors import BertkitError, InputTypeError, is_ordered, short_repr
from bertkit.tasks.classification import TextColumns, TextExample
from bertkit.tasks.columns import Columns, MemoryRows, as_source
from bertkit.tasks.inference import choose_mode, prepare_network, run_task
from bertkit.tasks.official import GLUE, SWAG_COLUMNS
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.task import NOTHING_READ, Items, encode
from bertkit.tasks.token_classification import TokenClassification
from bertkit.tasks.types import LoadedTask, load_task_model, model_columns
from bertkit.training.device import choose_device

CHUNK_INPUTS = 2048
"""The number of inputs that are tokenised and run together."""


class TaskPredictor:
    """A fine-tuned model, or an ensemble of models for the same task, on a device.

    The task and the tokenizer are those of the first model. It pickles by the folders of its
    models, so that Ray, Spark or `datasets.map` can run it.
    """

    def __init__(
        self,
        folders: Sequence[Path],
        *,
        device: str = "auto",
        precision: str = "auto",
        null_threshold: float | None = None,
    ) -> None:
        self.arguments = {
            "device": device,
            "precision": precision,
            "null_threshold": null_threshold,
        }
        self.folders, self.device = list(folders), choose_device(device)
        self.precision = choose_mode(precision, self.device)
        self.loaded = [load_task_model(path, self.device, null_threshold) for path in folders]
        self.task, self.tokenizer = self.loaded[0].task, self.loaded[0].tokenizer
        check_ensemble(self.loaded)
        pairs = {one.details.get("pairs") for one in self.loaded} - {None}
        self.pairs: bool | None = pairs.pop() if len(pairs) == 1 else None
        """Whether the models were fine-tuned on pairs of texts; None if it is not recorded."""
        if isinstance(self.task, QuestionAnswering):  # thresholds are averaged like outputs
            thresholds = [one.task.threshold for one in self.loaded]  # type: ignore[attr-defined]
            self.task = replace(self.task, threshold=sum(thresholds) / len(thresholds))
        self.threads = [
            prepare_network(self.device, one.model.encoder, self.precision) for one in self.loaded
        ]

    def __reduce__(self) -> Any:
        return load_again, (self.folders, self.arguments)

    @property
    def details(self) -> dict[str, Any]:
        """The content of the first model's `bertkit.json`."""
        return self.loaded[0].details

    @cached_property
    def columns(self) -> Columns:
        """The columns of inputs: those that the model was fine-tuned with."""
        return self.columns_with({})

    def columns_with(self, options: dict[str, Any]) -> Columns:
        """Return the columns of the model's inputs, some of which are replaced."""
        data, saved = str(self.details.get("data")), dict[str, Any]()
        if data in GLUE:
            saved = {"text": GLUE[data].text, "pair": GLUE[data].pair}
        columns = model_columns(type(self.task), options, {"columns": saved, **self.details})
        if data in GLUE and not options.keys() & {"text", "pair"}:
            columns = replace(columns, **saved)
        return columns

    def __call__(self, inputs: Any, *more: Any) -> Any:
        """Return the result for an input, or a list of results for a list of inputs.

        Args:
            inputs: a text; or many inputs: a list, a DataFrame or a `datasets.Dataset`. An input is
                a text, a tuple (text and second text, question and context, text and list of
                choices), a list of words, or a dict with the columns of the training data.
            more: what follows the first text in a single input: the second text, the context, or
                the choices.

        Raises:
            InputTypeError: an input is of another type; the message gives its number.
            BertkitError: an input lacks a column or is of the wrong kind, such as a single text for
                a model of pairs.
        """
        if isinstance(inputs, str):
            value = (inputs, *more) if more else inputs
            return self.predict([self.columns.from_value(value, "input", "0")])[0]
        if more:
            raise InputTypeError(
                f"the first of several arguments must be a text, not {short_repr(inputs)}; give "
                f"many inputs as one list of {self.columns.wanted}"
            )
        return self.predict(self.examples(inputs))

    def examples(self, inputs: Any) -> Iterator[Any]:
        """Yield the examples of many inputs in memory."""
        if not is_ordered(inputs) and not hasattr(inputs, "columns"):  # a DataFrame has columns
            raise InputTypeError(f"give a list of {self.columns.wanted}, not {short_repr(inputs)}")
        source = as_source(inputs, "inputs")
        assert isinstance(source, MemoryRows)
        columns, rows = self.columns, source.rows
        if rows and isinstance(rows[0], dict) and isinstance(columns, TextColumns):
            columns = text_columns_of(columns, list(rows[0]), self.pairs)
        for number, value in enumerate(rows):
            yield columns.from_value(value, f"inputs[{number}]", str(number))

    def predict(self, examples: Iterable[Any]) -> list[Any]:
        """Return the results for examples, and warn if a part of an input was not read."""
        results: list[Any] = []
        cut: Counter[str] = Counter()
        for chunk in self.chunks(examples):
            found, items = self.run(chunk)
            results += found
            cut.update(items.cut)
        del cut[NOTHING_READ]  # blank texts are valid inputs
        if lost := [f"{what}: {count:,}" for what, count in cut.items() if count]:
            warn_caller("; ".join(lost))
        return results

    def chunks(self, examples: Iterable[Any]) -> Iterator[list[Any]]:
        """Yield chunks of `CHUNK_INPUTS` examples; a document of tagged words stays in one."""
        whole = isinstance(self.task, TokenClassification) and self.task.context == "document"
        chunk: list[Any] = []
        for example in examples:
            full = len(chunk) >= CHUNK_INPUTS
            if full and not (whole and chunk[-1].document == example.document):
                yield chunk
                chunk = []
            chunk.append(example)
        if chunk:
            yield chunk

    def run(
        self, inputs: Sequence[Any], progress: Callable[[int, int], None] = lambda done, total: None
    ) -> tuple[list[Any], Items]:
        """Return the results for examples, in order, and their sequences.

        `progress` is called with the number of windows done and their total.
        """
        items = self.items(inputs)
        return self.run_items(inputs, items, progress), items

    def run_items(
        self,
        inputs: Sequence[Any],
        items: Items,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[Any]:
        """Return the results for encoded inputs."""
        windows = sum(len(item.parts) for item in items.items)
        total = windows * len(self.loaded)
        outputs = []
        for number, (loaded, threads) in enumerate(zip(self.loaded, self.threads, strict=True)):
            before = number * windows
            outputs.append(
                run_task(
                    loaded.model,
                    items,
                    self.device,
                    threads=threads,
                    progress=lambda done, before=before: progress(before + done, total),  # type: ignore[misc]
                )
            )
        mean = outputs[0]
        if len(outputs) > 1:
            mean = [
                [np.mean(parts, axis=0) for parts in zip(*models, strict=True)]
                for models in zip(*outputs, strict=True)
            ]
        return self.task.decode(inputs, items, mean)

    def items(self, inputs: Sequence[Any]) -> Items:
        """Encode examples as sequences; a text for a model of pairs is an error, or vice versa."""
        for example in inputs if self.pairs is not None else ():
            if isinstance(example, TextExample) and (example.pair is not None) != self.pairs:
                kinds = "pairs of texts", "single texts"
                trained, other = kinds if self.pairs else kinds[::-1]
                raise BertkitError(
                    f"{example.location}: the model was fine-tuned on {trained}, and here are "
                    f"{other}",
                    code="pairs",
                )
        return encode(self.task, inputs, self.tokenizer, self.loaded[0].model.config)


def load_again(folders: Sequence[Path], arguments: dict[str, Any]) -> TaskPredictor:
    """Load a predictor that was pickled."""
    return TaskPredictor(folders, **arguments)


def check_ensemble(loaded: Sequence[LoadedTask]) -> None:
    """Check that models have the same task, labels, window lengths and tokenizer."""

    def settings(one: LoadedTask) -> dict[str, Any]:
        values = {name: v for name, v in one.task.settings().items() if name != "threshold"}
        return {**values, "task": one.task.task_type, "labels": one.task.labels}

    first = loaded[0]
    for other in loaded[1:]:
        same_tokens = other.tokenizer.content_hash == first.tokenizer.content_hash
        if settings(other) != settings(first) or not same_tokens:
            raise BertkitError(
                "the models of an ensemble must have the same task, labels, settings and tokenizer"
            )


def text_columns_of(columns: TextColumns, names: Sequence[str], pairs: bool | None) -> TextColumns:
    """Return the columns of texts that are there: the model's, or text and pair."""
    if all(name in names for name in columns.inputs):
        # a model that does not record it may read pairs
        unknown = pairs is None and not columns.pair and "pair" in names
        return replace(columns, pair="pair") if unknown else columns
    return replace(columns, text="text", pair="pair" if pairs or "pair" in names else "")


def is_swag(predictor: TaskPredictor, names: Sequence[str]) -> bool:
    """Return whether the model was fine-tuned on SWAG and a file has SWAG's columns."""
    return predictor.details.get("data") == "swag" and {*SWAG_COLUMNS} <= {*names}


def warn_caller(message: str) -> None:
    """Warn, and name the line of the user's code that called bertkit."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").startswith("bertkit."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
