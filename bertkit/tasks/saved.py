"""The loader of fine-tuned models (network, task and tokenizer) from bertkit or Hugging Face.

bertkit's model directories describe their task in `bertkit.json`. In others, `config.json` names
the class (BertForSequenceClassification, ...) and the labels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch

from bertkit.checkpoints.families import heads_of_class
from bertkit.checkpoints.huggingface import load_config, load_model, require_all_weights
from bertkit.checkpoints.pretrained import model_folder, read_details
from bertkit.checkpoints.save import SAVED_HEADS
from bertkit.config import matches_type
from bertkit.errors import BertkitError, nearest, short_repr
from bertkit.files import read_object, read_optional
from bertkit.model.encoder import check_vocabulary
from bertkit.model.features import load_feature_model
from bertkit.model.task_heads import ClassificationModel, TaskModel, load_with_head
from bertkit.tasks.classification import Classification
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import Regression
from bertkit.tasks.spec import SPECS
from bertkit.tasks.task import Task
from bertkit.tokenizer.wordpiece import Tokenizer

MAX_UNNAMED = 1 << 20
"""The largest number of labels of a model that does not name them."""
MAX_SETTING = 1 << 30
"""The largest value of an integer in a task's settings."""


class LoadedTask(NamedTuple):
    """A fine-tuned model with everything needed to use it."""

    model: TaskModel
    """The network on the device, in evaluation mode."""
    task: Task
    tokenizer: Tokenizer
    details: dict[str, Any]
    """The content of `bertkit.json`; for a foreign model, the same inferred from its config."""


def load_task_model(
    path: Path, device: torch.device, null_threshold: float | None = None
) -> LoadedTask:
    """Load a fine-tuned model from a model directory, or a run directory that holds `model/`.

    `null_threshold` replaces the model's threshold; see `bertkit.predict.load.load`.

    Raises:
        BertkitError: there is no model, it is damaged, it was not fine-tuned for a task, or its
            task has no such threshold.
    """
    folder = model_folder(path)
    details = task_details(folder)
    tokenizer = Tokenizer.load(folder)
    task = saved_task(details, folder)
    if null_threshold is not None:
        task = with_null_threshold(task, details, null_threshold)
    check_no_answer(task, details, folder)
    model: Any
    if details.get("head") and details.get("frozen") is False:
        with torch.device("meta"):
            network = task.build(load_config(folder))
        model = load_with_head(folder, network, str(details["head"]))
    elif details.get("head"):
        model = load_feature_model(folder)
    else:
        loaded = load_model(folder, task.build, trainable=False)
        pooler = isinstance(loaded.model, ClassificationModel)
        model = require_all_weights(loaded, folder, pooler=pooler)
    check_vocabulary(model.config, tokenizer.size)
    return LoadedTask(model.to(device).eval(), task, tokenizer, details)


def check_no_answer(task: Task, details: Mapping[str, Any], folder: Path) -> None:
    """Reject a left-to-right network that scores "no answer" at its first token.

    Raises:
        BertkitError: the model was fine-tuned so, by transformers or an early version of bertkit.
    """
    if not (isinstance(task, QuestionAnswering) and task.null) or details.get("head"):
        return
    own = read_object(folder / "config.json").get("model_type") == "bertkit"
    if not own and load_config(folder).direction == "left_to_right":
        raise BertkitError(
            f"{folder} is left to right and was fine-tuned to score 'no answer' at its first "
            "token, which sees no other; fine-tune it again with bertkit finetune"
        )


def with_null_threshold(task: Task, details: Mapping[str, Any], threshold: float) -> Task:
    """Return a question answering task with another null threshold (SQuAD 2.0).

    Raises:
        BertkitError: it is another task, or the model was fine-tuned only on answerable questions.
    """
    if not isinstance(task, QuestionAnswering):
        raise BertkitError(f"a null threshold is for models that answer, not for {task.task_type}")
    if not task.null and "null" in (details.get("settings") or {}):
        raise BertkitError(
            "the model was fine-tuned on questions that all have an answer, so it cannot tell if "
            "there is none; fine-tune it on data with unanswerable questions"
        )
    return replace(task, null=True, threshold=threshold)


def task_details(folder: Path) -> dict[str, Any]:
    """Return the task, labels and settings of a fine-tuned model, as in `bertkit.json`.

    Raises:
        BertkitError: the model was not fine-tuned for a task that bertkit knows.
    """
    details = read_details(folder)
    if str(details.get("task")) in SPECS:
        check_label_names(details, folder)
        return details
    if details.keys() & {"labels", "settings"}:
        saved_task(details, folder)  # says that the task is unknown
    config: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        load_config(folder)  # checks the sizes
        config = read_object(folder / "config.json")
    names = config.get("architectures") or ["none"]
    if not isinstance(names, list):
        raise BertkitError(f"{folder / 'config.json'}: architectures is {names!r:.40}, not a list")
    problem = str(config.get("problem_type") or "").removeprefix("single_label_classification")
    labels = ordered_names(config, folder)
    found = [
        name for name, (head, problems) in SAVED_HEADS.items()
        if head in heads_of_class(names[0]) and problems in ("", problem)
    ]  # fmt: skip
    if config.get("is_decoder") and any(SAVED_HEADS[n][0] in ("sequence", "choice") for n in found):
        raise BertkitError(
            f"{folder} is left to right and was fine-tuned on its first token, which sees no "
            "other; fine-tune it again with bertkit finetune, which reads the last one"
        )
    if not found:
        what = details.get("task") or names[0]
        raise BertkitError(
            f"{folder} was not fine-tuned for a task ({what}); run bertkit finetune, or use "
            "bertkit predict embed or bertkit predict fill-mask"
        )
    name = found[-1] if problem else found[0]
    if SPECS[name].task is Classification and len(labels) == 1:
        name = Regression.task_type
    if SPECS[name].task is Regression and len(labels) > 1:
        raise BertkitError(
            f"{folder} predicts {len(labels)} numbers for each text; bertkit reads models that "
            "predict one"
        )
    spec = SPECS[name]
    settings = spec.task.foreign_settings(config.get("max_position_embeddings", 512), labels)
    # for tasks without label names, transformers writes LABEL_0, LABEL_1
    names = labels if spec.has_labels else list(spec.task.labels)
    return {"task": name, "labels": names, "settings": settings}


def check_label_names(details: Mapping[str, Any], folder: Path) -> None:
    """Raise if `bertkit.json` and `config.json`, which other libraries read, differ in labels."""
    config, labels = read_optional(folder / "config.json"), details.get("labels")
    both = isinstance(labels, list) and labels and config.get("id2label")
    if both and labels != (others := ordered_names(config, folder)):
        raise BertkitError(
            f"{folder}: the labels are {short_repr(labels)} in bertkit.json and "
            f"{short_repr(others)} in config.json; restore the file that is not of this model"
        )


def ordered_names(config: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the names of `id2label` in order; without it, `num_labels` or two, as transformers.

    Raises:
        BertkitError: `id2label` does not name the outputs from 0, or `num_labels` is absurd.
    """
    labels = config.get("id2label")
    if not labels:
        count = config.get("num_labels", 2)
        count = count if isinstance(count, int) else 2
        if count > MAX_UNNAMED:
            raise BertkitError(
                f"{folder / 'config.json'}: num_labels is {count}; at most {MAX_UNNAMED:,} labels "
                "can have no names"
            )
        labels = {str(one): f"LABEL_{one}" for one in range(count)}
    try:
        found = {int(number): str(name) for number, name in labels.items()}
    except (AttributeError, ValueError):
        found = {}
    if not found or set(found) != set(range(len(found))):
        raise BertkitError(
            f"{folder / 'config.json'}: id2label is {labels!r:.40}; it must map each number from 0 "
            "to a name"
        )
    return [found[number] for number in range(len(found))]


def saved_task(details: Mapping[str, Any], source: Path) -> Task:
    """Make the task that `bertkit.json` describes.

    Raises:
        BertkitError: the task type is unknown, or its labels or settings are not valid.
    """
    task_type, names = str(details["task"]), details.get("labels")
    if task_type not in SPECS:
        hint = nearest(task_type, SPECS)
        raise BertkitError(f"{source / 'bertkit.json'}: unknown task '{task_type}'{hint}")
    spec = SPECS[task_type]
    given = details.get("settings") or {}
    named = isinstance(names, list) and names and all(isinstance(name, str) for name in names)
    if not isinstance(given, dict) or (spec.has_labels and not named):
        raise BertkitError(
            f"{source / 'bertkit.json'}: labels must be a list of names, and settings an object; "
            "restore or remake the model"
        )
    if spec.has_labels and len(set(names or ())) < len(names or ()):
        [(twice, _)] = Counter(map(str, names or ())).most_common(1)
        raise BertkitError(
            f"{source}: two labels are called {twice!r}; give each its own name (id2label in "
            "config.json, or labels in bertkit.json)"
        )
    task_class = spec.task_class(images="image_width" in given, alignment="masked" in given)
    types = get_type_hints(task_class)
    for name, value in given.items():
        wanted = types.get(name)
        lowest = -MAX_SETTING if wanted is float else 0
        absurd = type(value) is int and not lowest <= value <= MAX_SETTING
        if wanted is not None and (absurd or not matches_type(value, wanted)):
            raise BertkitError(
                f"{source / 'bertkit.json'}: the setting '{name}' cannot be {value!r:.40}; "
                "restore or remake the model"
            )
    labels = {"labels": tuple(names or ())} if spec.has_labels else {}
    settings = {
        name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
    }
    try:
        made: Task = task_class(**labels, **settings)
    except TypeError as error:
        raise BertkitError(f"{source / 'bertkit.json'}: unknown settings ({error})") from None
    return made
