"""Trained models for use: `load` returns a predictor, and `model_info` says what a model is.

classify = load("runs/mrpc/model")
classify("He sold it.", "It was sold.").label
classify([("He sold it.", "It was sold."), ("He sold it.", "It rained.")])
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from bertkit.checkpoints.pretrained import model_folder, read_pretrained, resolve_model
from bertkit.checkpoints.sentence_transformers import is_embedder
from bertkit.errors import BertkitError, InputTypeError, is_ordered, short_repr
from bertkit.files import read_optional
from bertkit.predict.embeddings import Embedder, load_embedder
from bertkit.predict.pretrained import Predictor, load_pretrained
from bertkit.tasks.classification import TextColumns, TextExample
from bertkit.tasks.columns import Columns, MemoryRows, as_source
from bertkit.tasks.official import GLUE
from bertkit.tasks.sequences import Progress, choose_mode, no_progress, prepare_network, run_task
from bertkit.tasks.task import NOTHING_READ, Items, encode
from bertkit.tasks.token_classification import TokenClassification
from bertkit.tasks.types import (
    is_tuned,
    load_task_model,
    model_columns,
    task_details,
)
from bertkit.text.documents import TextCounts
from bertkit.training.device import choose_device

CHUNK_INPUTS = 2048
"""The number of inputs that are tokenised and run together."""


class TaskPredictor:
    """A fine-tuned model on a device.

    It pickles by the folder of the model, so that Ray, Spark or `datasets.map` can run it.
    """

    def __init__(
        self,
        folder: Path,
        *,
        device: str = "auto",
        precision: str = "auto",
        null_threshold: float | None = None,
        top: int | None = None,
    ) -> None:
        self.arguments: dict[str, Any] = {
            "device": device,
            "precision": precision,
            "null_threshold": null_threshold,
            "top": top,
        }
        self.folder, self.device = folder, choose_device(device)
        self.precision = choose_mode(precision, self.device)
        loaded = load_task_model(folder, self.device, null_threshold, top)
        self.model, self.task, self.tokenizer = loaded.model, loaded.task, loaded.tokenizer
        self.details = loaded.details
        """The content of the model's `bertkit.json`."""
        self.pairs: bool | None = self.details.get("pairs")
        """Whether the model was fine-tuned on pairs of texts; None if it is not recorded."""
        prepare_network(self.device, self.model.encoder, self.precision)

    def __reduce__(self) -> Any:
        return partial(TaskPredictor, self.folder, **self.arguments), ()

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

    def columns_among(self, names: Sequence[str], options: dict[str, Any]) -> Columns:
        """Return `columns_with`, or for texts without those columns, "text" and "pair"."""
        columns = self.columns_with(options) if options else self.columns
        if not isinstance(columns, TextColumns) or options.keys() & {"text", "pair"}:
            return columns
        if {*columns.inputs} <= {*names}:
            # a model that does not record it may read pairs
            unknown = self.pairs is None and not columns.pair and "pair" in names
            return replace(columns, pair="pair") if unknown else columns
        usual = replace(columns, text="text", pair="pair" if self.pairs or "pair" in names else "")
        return usual if {*usual.inputs} <= {*names} else columns

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
        if rows and isinstance(rows[0], dict):
            columns = self.columns_among(list(rows[0]), {})
            if getattr(columns, "sentence", None) in rows[0]:  # one word a row
                yield from columns.read(source, TextCounts(), "predict")
                return
        for number, value in enumerate(rows):
            yield columns.from_value(value, f"inputs[{number}]", str(number))

    def predict(self, examples: Iterable[Any]) -> list[Any]:
        """Return the results for examples, and warn if a part of an input was not read."""
        results: list[Any] = []
        cut: Counter[str] = Counter()
        for chunk in self.chunks(examples):
            chunk_results, items = self.run(chunk)
            results += chunk_results
            cut.update(items.cut)
        del cut[NOTHING_READ]  # blank texts are valid inputs
        if lost := [f"{what}: {count:,}" for what, count in cut.items() if count]:
            warnings.warn("; ".join(lost), stacklevel=3)
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
        self, inputs: Sequence[Any], progress: Progress = no_progress
    ) -> tuple[list[Any], Items]:
        """Return the results for examples, in order, and their sequences.

        `progress` is called with the number of windows done and their total.
        """
        items = self.items(inputs)
        return self.run_items(inputs, items, progress), items

    def run_items(
        self, inputs: Sequence[Any], items: Items, progress: Progress = no_progress
    ) -> list[Any]:
        """Return the results for encoded inputs."""
        outputs = run_task(self.model, items, self.device, prepared=True, progress=progress)
        return self.task.decode(inputs, items, outputs)

    def items(self, inputs: Sequence[Any]) -> Items:
        """Encode examples as sequences; a text for a model of pairs is an error, or vice versa."""
        for example in inputs if self.pairs is not None else ():
            if isinstance(example, TextExample) and (example.pair is not None) != self.pairs:
                kinds = "pairs of texts", "single texts"
                trained, other = kinds if self.pairs else kinds[::-1]
                raise BertkitError(
                    f"{example.location}: the model was fine-tuned on {trained}, and here are "
                    f"{other}; give {'both texts of a pair' if self.pairs else 'one text'}",
                    code="pairs",
                )
        return encode(self.task, inputs, self.tokenizer, self.model.config)


def load(
    path: Path | str,
    *,
    device: str = "auto",
    precision: str = "auto",
    null_threshold: float | None = None,
    top: int | None = None,
) -> Predictor | TaskPredictor | Embedder:
    """Load a trained model for use.

    Args:
        path: a model directory, a run directory or a model of the hub.
        device: "auto", "cpu", "cuda", ... On a CPU, as many threads compute as
            `torch.get_num_threads()` says when the model is used.
        precision: "fp32", "bf16", "int8" (CPUs only), or "auto": bf16 if the device computes it
            fast, else fp32.
        null_threshold: the null odds (score of no answer minus score of the best span) above which
            a question answering model gives no answer. The default is the threshold saved with the
            model; a model fine-tuned with transformers has none and answers every question.
        top: for classification: the number of labels whose probabilities a result has, the most
            probable ones; by default all of up to 100 labels, and 10 of more.

    Returns:
        A `TaskPredictor` for a fine-tuned model; an `Embedder` for a model of
        sentence-transformers; a `Predictor` for any other pre-trained model.

    Raises:
        BertkitError: there is no model, or it is damaged.
    """
    folder = resolve_model(path)
    if is_embedder(folder) or not is_tuned(model_folder(folder)):
        if null_threshold is not None or top is not None:
            raise BertkitError(f"{folder} was not fine-tuned: it has no threshold and no labels")
        if is_embedder(folder):
            return load_embedder(folder, device=device, precision=precision)
        return load_pretrained(folder, device=device, precision=precision)
    return TaskPredictor(
        folder, device=device, precision=precision, null_threshold=null_threshold, top=top
    )


def load_predictor(path: Path | str, **options: Any) -> TaskPredictor:
    """Load a fine-tuned model; any other model is an error."""
    return TaskPredictor(resolve_model(path), **options)


def model_info(model: Path | str) -> dict[str, Any]:
    """Return what a model's files say about it.

    Args:
        model: a model directory, a run directory, a model of the hub or a Google checkpoint.

    Returns:
        JSON values by name: `task` ("pre-training", "encoder", "embedding" or a task type),
        `labels`, `network` (its sizes), `vocabulary`, `parameters`, `bytes`, and the data, columns
        and settings with which bertkit trained the model.

    Raises:
        BertkitError: there is no model, or a file is missing or damaged.
    """
    start = read_pretrained(model)
    folder, config = model_folder(start.path), start.config
    heads = any(name.startswith(("mlm.", "nsp.", "rtd.")) for name in start.tensors)
    details, task = dict(start.details), "pre-training" if heads else "encoder"
    if folder.is_dir() and is_tuned(folder):
        details = task_details(folder)
        task = str(details["task"])
    elif is_embedder(start.path):
        task = "embedding"
    family = read_optional(folder / "config.json") if folder.is_dir() else {}
    return {
        "model": start.origin,
        "task": task,
        "labels": details.get("labels") or [],
        "data": details.get("data", ""),
        "columns": details.get("columns") or {},
        "settings": details.get("settings") or {},
        "type": family.get("model_type", "bert"),
        "network": {
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "heads": config.num_attention_heads,
            "intermediate_size": config.intermediate_size,
            "max_length": config.max_position_embeddings,
            "segments": config.type_vocab_size,
            "direction": config.direction,
        },
        "vocabulary": {
            "tokens": start.tokenizer.size,
            "case": "lowercased" if start.tokenizer.lowercase else "cased",
        },
        "parameters": sum(tensor.numel() for tensor in start.tensors.values()),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in start.tensors.values()),
    }
