"""What stands on the encoder: the task's own linear layer, or one that reads a frozen encoder.

Paper sections 4.2 (tuned on other questions first), 5.1 (BiLSTM on top) and 5.3 (frozen).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from bertkit.checkpoints.pretrained import PretrainedWeights, model_folder, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError, nearest
from bertkit.model.encoder import Encoder
from bertkit.model.features import (
    HEADS,
    FeatureModel,
    check_layers,
    save_feature_model,
    save_with_head,
)
from bertkit.model.task_heads import TaskModel, add_bilstm
from bertkit.outputs import OWN
from bertkit.tasks.data import TaskData
from bertkit.tasks.saved import task_details
from bertkit.tasks.spec import SPECS
from bertkit.tasks.task import Task
from bertkit.tasks.token_classification import TokenClassification
from bertkit.tokenizer.wordpiece import Tokenizer


@dataclass(frozen=True, kw_only=True)
class HeadSettings:
    """What stands on the encoder, where it is not the task's own linear layer."""

    frozen: bool = False
    """Leave the encoder as it is and train only what stands on it (paper section 5.3)."""
    layers: str = "last"
    """Which of the frozen layers are read; `bertkit features --help` lists them."""
    beside: Annotated[str, OWN] = ""
    """A second frozen model, whose states are appended: with a model from left to right and one
    from right to left, an ELMo (paper section 5.1)."""
    new_head: bool = False
    """Draw the head anew even where the start was tuned for the same task and labels."""
    head: str = "linear"
    """linear, or bilstm: two layers, on a frozen encoder (paper section 5.3) or on one that is
    tuned (section 5.1)."""
    units: int = 0
    """Of the BiLSTM, in each direction; 0 for the paper's 768 on a frozen encoder, and else for as
    many as the encoder is wide."""


def previous_tuning(start: PretrainedWeights) -> Mapping[str, Any]:
    """What the start was tuned for, by whomever; {} for nothing."""
    if "task" not in start.details:  # transformers' config.json says it
        with suppress(BertkitError):
            return task_details(model_folder(start.path))
    return start.details


def reordered_labels(start: PretrainedWeights, data: TaskData) -> Task:
    """The task of own data, with its labels in the order of a start that was tuned for them.

    The order of own labels is nobody's choice; that of an official set belongs to its metrics.
    """
    task, details = data.task, previous_tuning(start)
    names = tuple(details.get("labels") or ())
    same = SPECS[task.task_type].has_labels and details.get("task") == task.task_type
    if data.name in SPECS and same and sorted(names) == sorted(task.labels):
        return type(task)(**{**vars(task), "labels": names})
    return task


def same_task(start: PretrainedWeights, task: Task) -> bool:
    """Whether the start was tuned, by whomever, for the same task type and labels."""
    details = previous_tuning(start)
    labels = tuple(
        details.get("labels") or ()
    )  # of other task types, names that transformers makes up
    return (
        details.get("task") == task.task_type
        and not details.get("head")  # of a frozen model, which lies beside the encoder
        and (not SPECS[task.task_type].has_labels or labels == task.labels)
    )


def build_with(
    head: HeadSettings, task: Task, start: PretrainedWeights
) -> Callable[..., Any] | None:
    """What makes the network where it is not the task's own way.

    Raises:
        BertkitError: layers were named without `frozen`, the task has no such head, or the model
            beside does not fit.
    """
    if head.head not in HEADS:
        raise BertkitError(f"no head is called '{head.head}'{nearest(head.head, HEADS)}")
    if head.units < 0 or (head.units and head.head == "linear"):
        raise BertkitError("--units is of --head bilstm, and above 0")
    if not head.frozen:
        if head.layers != "last" or head.beside:
            raise BertkitError("--layers and --beside go with --frozen; add it or leave them out")
        if head.head == "linear":
            return None
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
    folder: Path, model: TaskModel | FeatureModel, tokenizer: Tokenizer, details: dict[str, Any]
) -> None:
    """Write a tuned model, frozen or not.

    Raises:
        BertkitError: the folder holds something else or cannot be written.
    """
    if isinstance(model, FeatureModel):
        save_feature_model(folder, model, tokenizer, details)
    elif model.bilstm is not None:
        details = {**details, "head": "bilstm", "frozen": False}
        save_with_head(folder, model, tokenizer, details)
    else:
        save_model(folder, model, tokenizer, details)
