"""The task types by name (paper section 4), their options, and the loader of fine-tuned models.

bertkit's model directories describe their task in `bertkit.json`. In others, `config.json` names
the class (BertForSequenceClassification, ...) and the labels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from bertkit.checkpoints.names import heads_of_class
from bertkit.checkpoints.pretrained import (
    load_model,
    model_folder,
    read_details,
    require_all_weights,
)
from bertkit.errors import BertkitError, flag, nearest
from bertkit.files import matches_type, read_optional
from bertkit.model.encoder import check_vocabulary
from bertkit.model.outputs import ClassificationModel
from bertkit.tasks.classification import Classification, MultiLabelClassification
from bertkit.tasks.columns import Columns
from bertkit.tasks.multiple_choice import MultipleChoice
from bertkit.tasks.official import OFFICIAL
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import Regression
from bertkit.tasks.task import Task
from bertkit.tasks.token_classification import TokenClassification
from bertkit.tokenizer.wordpiece import Tokenizer

TASKS: dict[str, type[Task]] = {
    task.task_type: task
    for task in (
        Classification,
        MultiLabelClassification,
        Regression,
        MultipleChoice,
        TokenClassification,
        QuestionAnswering,
    )
}
"""Task type -> its class."""
MAX_SETTING = 1 << 30  # the largest value of a number among a task's settings


def task_class(name: str) -> type[Task]:
    """Return the class of a task type, or of the task type of an official set."""
    key = name.lower()
    key = OFFICIAL[key].task_type if key in OFFICIAL else key
    if key not in TASKS:
        raise BertkitError(f"no task is called '{name}'{nearest(key, (*OFFICIAL, *TASKS))}")
    return TASKS[key]


def make_options(task: type[Task], kind: Any, options: Mapping[str, Any]) -> Any:
    """Make the columns or windows (`kind`) of a task type from options by name."""
    known = [field.name for field in fields(kind)]
    for name in options:
        if name not in known:
            raise BertkitError(
                f"{task.task_type} does not accept {flag(name)}; it accepts "
                f"{', '.join(map(flag, known))}"
            )
    return kind(**options)


def model_columns(
    task: type[Task], options: Mapping[str, Any], details: Mapping[str, Any]
) -> Columns:
    """Return columns with the caller's options; the others are from the model's `bertkit.json`."""
    columns: Columns = make_options(task, task.columns, options)
    saved, types = details.get("columns") or {}, get_type_hints(task.columns)
    left_out = {*columns.file_options, *options}
    remembered = {name: saved[name] for name in saved if name in types and name not in left_out}
    for name, value in remembered.items():
        if not matches_type(value, types[name]):
            raise BertkitError(f"the model's bertkit.json has {value!r:.40} for the option {name}")
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in remembered.items()
    }
    return replace(columns, **values)


# Fine-tuned models --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedTask:
    """A fine-tuned model with everything needed to use it."""

    model: Any  # the network on the device, in evaluation mode
    task: Task
    tokenizer: Tokenizer
    details: dict[str, Any]
    """The content of `bertkit.json`; for a model of transformers, the same from its config."""


def load_task_model(
    path: Path, device: torch.device, null_threshold: float | None = None
) -> LoadedTask:
    """Load a fine-tuned model from a model directory, or a run directory that holds `model/`.

    `null_threshold` replaces the model's threshold; see `bertkit.predict.load.load`.
    """
    folder = model_folder(path)
    details = task_details(folder)
    task = saved_task(details, folder)
    if null_threshold is not None:
        task = with_null_threshold(task, details, null_threshold)
    loaded = load_model(folder, task.build, trainable=False)
    pooler = isinstance(loaded.model, ClassificationModel)
    model = require_all_weights(loaded, folder, pooler=pooler)
    tokenizer = Tokenizer.load(folder)
    check_vocabulary(model.config, tokenizer.size)
    return LoadedTask(model.to(device).eval(), task, tokenizer, details)


def with_null_threshold(task: Task, details: Mapping[str, Any], threshold: float) -> Task:
    """Return a question answering task with another null threshold (SQuAD 2.0)."""
    if not isinstance(task, QuestionAnswering):
        raise BertkitError(f"a null threshold is for models that answer, not for {task.task_type}")
    if not task.null and "null" in (details.get("settings") or {}):
        raise BertkitError(
            "the model was fine-tuned on questions that all have an answer, so it cannot tell if "
            "there is none; fine-tune it on data with unanswerable questions"
        )
    return replace(task, null=True, threshold=threshold)


def is_tuned(folder: Path) -> bool:
    """Return whether a model directory contains a fine-tuned model."""
    if str(read_details(folder).get("task")) in TASKS:
        return True
    named = read_optional(folder / "config.json").get("architectures")
    heads = {task.head for task in TASKS.values()}
    return isinstance(named, list) and any(heads & heads_of_class(str(name)) for name in named)


def task_details(folder: Path) -> dict[str, Any]:
    """Return the task, labels and settings of a fine-tuned model, as in `bertkit.json`."""
    details, config = read_details(folder), read_optional(folder / "config.json")
    if str(details.get("task")) in TASKS:
        return details
    task = transformers_task(config, folder)
    if task is None:
        what = details.get("task") or (config.get("architectures") or ["none"])[0]
        raise BertkitError(
            f"{folder} was not fine-tuned for a task ({what}); run bertkit finetune, or use "
            "bertkit predict embed or bertkit predict fill-mask"
        )
    labels = label_names(config, folder)
    settings = task.from_transformers(config.get("max_position_embeddings", 512), labels)
    # for tasks without label names, transformers writes LABEL_0, LABEL_1
    names = labels if task.has_labels else list(task.labels)
    return {"task": task.task_type, "labels": names, "settings": settings}


def transformers_task(config: Mapping[str, Any], folder: Path) -> type[Task] | None:
    """Return the task type of a model of transformers by its class, labels and problem type."""
    heads = heads_of_class(str((config.get("architectures") or [""])[0]))
    if config.get("is_decoder") and heads & {"sequence", "choice"}:
        raise BertkitError(
            f"{folder} is left to right and was fine-tuned on its first token, which sees no "
            "other; fine-tune it again with bertkit finetune, which reads the last one"
        )
    problem = str(config.get("problem_type") or "").removeprefix("single_label_classification")
    fitting = [task for task in TASKS.values() if task.head in heads]
    task = next((task for task in fitting if task.problem_type == problem), None)
    count = len(label_names(config, folder)) if task else 0
    if task is Classification and count == 1:
        return Regression
    if task is Regression and count > 1:
        raise BertkitError(f"{folder} predicts {count} numbers for each text; one can be read")
    return task


def label_names(config: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the names of `id2label` in order; without it, as many as transformers makes up."""
    labels = config.get("id2label")
    if not labels:
        count = min(int(config.get("num_labels", 2)), 1 << 20)
        return [f"LABEL_{number}" for number in range(count)]
    try:
        names = {int(number): str(name) for number, name in labels.items()}
        return [names[number] for number in range(len(names))]
    except (AttributeError, KeyError, ValueError):
        raise BertkitError(
            f"{folder / 'config.json'}: id2label is {labels!r:.40}; it must map each number from 0 "
            "to a name"
        ) from None


def saved_task(details: Mapping[str, Any], source: Path) -> Task:
    """Make the task that `bertkit.json` describes; each setting is checked."""
    labels, path = details.get("labels"), source / "bertkit.json"
    task, settings = TASKS[str(details["task"])], details.get("settings") or {}
    named = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    if not isinstance(settings, dict) or (task.has_labels and not (named and labels)):
        raise BertkitError(f"{path}: labels must be a list of names, and settings an object")
    if task.has_labels and len(set(labels or ())) < len(labels or ()):
        raise BertkitError(f"{source}: two labels have one name; give each its own (id2label)")
    types = get_type_hints(task)
    for setting, value in settings.items():
        wanted = types.get(setting)
        absurd = type(value) is int and not -MAX_SETTING * (wanted is float) <= value <= MAX_SETTING
        if wanted is None or absurd or not matches_type(value, wanted):
            raise BertkitError(f"{path}: the setting '{setting}' cannot be {value!r:.40}")
    values = {n: tuple(v) if isinstance(v, list) else v for n, v in settings.items()}
    return task(**values, **({"labels": tuple(labels or ())} if task.has_labels else {}))
