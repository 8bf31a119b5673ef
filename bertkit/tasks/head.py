"""What stands on the encoder: the task's own linear layer, or one that reads a frozen encoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bertkit.errors import BertkitError
from bertkit.model.directory import save_model
from bertkit.model.encoder import ModelConfig
from bertkit.model.features import FeatureModel, check_layers, save_feature_model
from bertkit.model.start import Start
from bertkit.model.task_heads import TaskModel
from bertkit.tasks.task import Task
from bertkit.tokens.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Head:
    """What stands on the encoder, where it is not the task's own linear layer."""

    frozen: bool = False
    """Leave the encoder as it is and train only what stands on it (paper section 5.3)."""
    layers: str = "last"
    """Which of the frozen layers are read; `bertkit features --help` lists them."""
    new_head: bool = False
    """Draw the head anew even where the start was tuned for the same task and labels."""
    head: str = "linear"
    """linear, or bilstm: the paper's two layers of 768 units in each direction."""


def same_task(start: Start, task: Task[Any, Any]) -> bool:
    """Whether the start was tuned for the same kind of task with the same labels."""
    return (
        start.details.get("task") == task.kind
        and not start.details.get("head")  # of a frozen model, which lies beside the encoder
        and tuple(start.details.get("labels") or ()) == task.labels
    )


def build_with(head: Head, task: Task[Any, Any], config: ModelConfig) -> Callable[..., Any] | None:
    """What makes the network where it is not the task's own way.

    Raises:
        BertkitError: layers or a head were named without `frozen`, or the task has no such head.
    """
    if not head.frozen:
        if head != Head(new_head=head.new_head):
            raise BertkitError("--layers and --head go with --frozen; add it or leave them out")
        return None
    if task.kind != "tag":
        raise BertkitError(f"--frozen is for tagging (paper section 5.3), not for {task.kind}")
    check_layers(head.layers, config)
    return lambda sizes: FeatureModel(sizes, len(task.labels), head.layers, head.head)


def save_tuned(
    folder: Path, model: TaskModel | FeatureModel, tokenizer: Tokenizer, details: dict[str, Any]
) -> None:
    """Write a tuned model of either kind.

    Raises:
        BertkitError: the folder holds something else or cannot be written.
    """
    if isinstance(model, FeatureModel):
        save_feature_model(folder, model, tokenizer, details)
    else:
        save_model(folder, model, tokenizer, details)
