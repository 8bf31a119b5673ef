"""The head on the encoder: the task's own layer, one of two variants, or one on a frozen encoder.

See paper sections 4.2 (fine-tuned on other questions first), 5.1 (BiLSTM) and 5.3 (frozen).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bertkit.checkpoints.card import Card
from bertkit.checkpoints.pretrained import PretrainedWeights, model_folder, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.config import as_json
from bertkit.errors import BertkitError, check_known
from bertkit.finetuning.settings import HeadSettings, RunSettings, TrainingSettings
from bertkit.model.encoder import Encoder
from bertkit.model.features import HEADS, FeatureModel, check_layers, save_with_head
from bertkit.model.task_heads import TaskModel, add_bilstm, add_conditional_end, extra_head
from bertkit.tasks.data import TaskData
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.saved import task_details
from bertkit.tasks.spec import SPECS
from bertkit.tasks.task import Task
from bertkit.tasks.token_classification import TokenClassification
from bertkit.tokenizer.wordpiece import Tokenizer


def previous_tuning(start: PretrainedWeights) -> Mapping[str, Any]:
    """Return the task, labels and settings of a fine-tuned checkpoint; others have no "task"."""
    if "task" not in start.details:  # the task may be in the config.json of transformers
        with suppress(BertkitError):
            return task_details(model_folder(start.path))
    return start.details


def known_labels(details: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the label names of a checkpoint; () if it has none, or other values."""
    found = details.get("labels")
    names = found if isinstance(found, list | tuple) else ()
    return tuple(names) if all(isinstance(one, str) for one in names) else ()


def reordered_labels(start: PretrainedWeights, data: TaskData) -> Task:
    """Return the task, with labels in the order of a checkpoint fine-tuned for the same labels.

    Only the user's data is reordered, since the metrics of an official set depend on the order.
    """
    task, details = data.task, previous_tuning(start)
    names = known_labels(details)
    same = SPECS[task.task_type].has_labels and details.get("task") == task.task_type
    if data.name in SPECS and same and sorted(names) == sorted(task.labels):
        return type(task)(**{**vars(task), "labels": names})
    return task


def same_task(start: PretrainedWeights, task: Task) -> bool:
    """Return whether the checkpoint was fine-tuned for the same task type, labels and scale."""
    details = previous_tuning(start)
    labels = known_labels(details)  # transformers makes some up for task types without names
    return (
        details.get("task") == task.task_type
        and not details.get("head")  # a separate head, as of a frozen model
        and (not SPECS[task.task_type].has_labels or labels == task.labels)
        and task.fits_head(start.tensors)
    )


def build_with(
    head: HeadSettings, task: Task, start: PretrainedWeights
) -> Callable[..., Any] | None:
    """Return the function that builds the network, or None to use the task's `build`.

    Raises:
        BertkitError: an option needs another one, the task has no such head, or the second model
            does not fit.
    """
    check_known("head", head.head, (*HEADS, "conditional"))
    conditional = head.head == "conditional"
    if conditional and (head.frozen or not isinstance(task, QuestionAnswering)):
        raise BertkitError(
            "--head conditional is for question-answering with an encoder that is fine-tuned, not "
            f"for {'--frozen' if head.frozen else task.task_type}"
        )
    if head.units < 0 or (head.units and head.head != "bilstm"):
        raise BertkitError("--units must be above 0 and needs --head bilstm")
    if task.reads_images and (head.frozen or head.head != "linear"):
        raise BertkitError(
            "--frozen and --head bilstm are for texts alone; leave them out", code="image-head"
        )
    if not head.frozen:
        if head.layers != "last" or head.beside:
            raise BertkitError("--layers and --beside go with --frozen; add it or leave them out")
        if head.head == "linear":
            return None
        if conditional:
            return lambda sizes: add_conditional_end(task.build(sizes))
        return lambda sizes: add_bilstm(task.build(sizes), head.units)
    if not isinstance(task, TokenClassification):
        raise BertkitError(
            f"--frozen is for token-classification (paper section 5.3), not for {task.task_type}"
        )
    check_layers(head.layers, start.config)
    beside = None
    if head.beside:
        second = read_pretrained(Path(head.beside))
        if second.tokenizer.content_hash != start.tokenizer.content_hash:
            raise BertkitError(f"--beside {head.beside} has another tokenizer than {start.path}")
        room, max_length = second.config.max_position_embeddings, task.settings()["max_length"]
        if max_length > room:
            raise BertkitError(
                f"--beside {head.beside} has {room} positions, and windows have up to {max_length} "
                f"tokens; give --max-length {room}"
            )
        beside = second.build(Encoder, keep_head=False).model
    return lambda sizes: FeatureModel(
        sizes, len(task.labels), head.layers, head.head, beside, head.units
    )


def save_tuned(
    folder: Path,
    model: TaskModel | FeatureModel,
    tokenizer: Tokenizer,
    details: dict[str, Any],
    card: Card | None = None,
) -> None:
    """Save a fine-tuned model of any head.

    Raises:
        BertkitError: the folder holds something else or cannot be written.
    """
    if isinstance(model, FeatureModel):
        save_with_head(folder, model, tokenizer, details, card)
    elif name := extra_head(model):
        details = {**details, "head": name, "frozen": False}
        save_with_head(folder, model, tokenizer, details, card)
    else:
        save_model(folder, model, tokenizer, details, card=card)


def tuned_details(
    data: TaskData,
    task: Task,
    run: RunSettings,
    training: TrainingSettings,
    precision: str,
    scores: Mapping[str, Mapping[str, float]],
) -> dict[str, Any]:
    """Return the content of `bertkit.json` for a model that was fine-tuned on `data`."""
    return {
        "task": task.task_type,
        "labels": list(task.labels),
        "settings": task.settings(),
        "data": data.name,
        "columns": dict(data.columns),
        "pairs": data.has_pairs,
        "made_by": "bertkit finetune",
        "run": asdict(run),
        "tuning": as_json(training),
        "precision": precision,
        "scores": dict(scores),
    }
