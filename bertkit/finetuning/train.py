"""One fine-tuning run, which trains a checkpoint on a task's items (paper sections 4 and A.3).

Only the word embeddings that the training data uses are trained, with the same result as training
all: the row of a token that never occurs has no gradient and only shrinks by weight decay, each
step by the factor 1 - learning rate x decay. So the rows that occur are fine-tuned in a small
matrix, and the others are shrunk once at the end, which saves most of the optimizer's work on small
data: half of the parameters of a small BERT are word embeddings.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.checkpoints.pretrained import PretrainedWeights, model_folder
from bertkit.errors import BertkitError, nearest
from bertkit.finetuning.runs import BALANCED, RunSettings, TrainingSettings
from bertkit.model.encoder import Encoder
from bertkit.model.heads import total_loss
from bertkit.processes import FINE_TUNING, keyed_rng
from bertkit.tasks.task import Items, Task, TaskBatch, make_batch, split_parts
from bertkit.tasks.types import TASKS, TaskData, task_details
from bertkit.training.device import own_random_numbers
from bertkit.training.optimizer import build_optimizer, load_latest, restore_training, save_training
from bertkit.training.recipe import learning_rate
from bertkit.training.step import LoopSettings, StepRecord, train_steps

CHECKPOINT_SECONDS, CHECKPOINT_SHARE = 30.0, 0.05
"""The least time between two checkpoints, and the largest share of a run that they may take."""
EVALUATION_SHARE = 0.1  # of the time of training


class TaskTraining:
    """A run in progress: use it in a `with` block and iterate over `updates`.

    The weights of `start` are not changed; `keep_head` initialises the head from them too, and
    `random_init` nothing. A stopped run is resumed from the folder `checkpoints`; None saves none.
    """

    def __init__(
        self,
        start: PretrainedWeights,
        task: Task,
        items: Items,
        run: RunSettings,
        training: TrainingSettings,
        *,
        device: torch.device,
        precision: str,
        keep_head: bool,
        random_init: bool = False,
        checkpoints: Path | None = None,
    ) -> None:
        self.task, self.items, self.run, self.training = task, items, run, training
        self.updates_per_epoch = math.ceil(len(items.items) / run.batch_size)
        self.total = self.updates_per_epoch * run.epochs
        self.warmup = min(round(training.warmup * self.total), self.total - 1)
        self.device, self.precision = device, precision
        self.weights = class_weights(task, items, training.class_weights)
        self.step = 0  # the number of updates made, also by earlier processes
        self.progress: dict[str, Any] = {}  # what the checkpoint of a resumed run kept
        self.summed_loss: Tensor | float = 0.0  # of the updates of this epoch
        self.notes: list[str] = []  # what was said about the checkpoint
        self.stack = ExitStack()
        self.stack.enter_context(own_random_numbers(device))
        try:
            torch.manual_seed(run.seed)
            built = (
                task.build(start.config)
                if random_init
                else start.build(task.build, keep_head=keep_head).model
            )
            self.model = task.prepare_network(built, keep_head=keep_head).to(device).train()
            self.compact = CompactEmbeddings(self.model.encoder, items)
            self.optimizer = build_optimizer(
                self.model,
                learning_rate=run.learning_rate,
                weight_decay=training.weight_decay,
                bias_correction=training.bias_correction,
            )
            self.checkpoints = checkpoints
            if checkpoints is not None:
                latest = load_latest(checkpoints, self.notes.append, keep=1)
                if latest is not None:
                    restore_training(latest, self.model, self.optimizer)
                    self.step, self.progress = latest.step, latest.progress
                    self.summed_loss = self.progress.get("summed_loss", 0.0)
                    self.notes.append(f"resuming after {self.step:,} of {self.total:,} steps")
            self.next_save = monotonic() + CHECKPOINT_SECONDS
        except BaseException:
            self.stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.close()

    def updates(self) -> Iterator[StepRecord[None]]:
        """Make the remaining updates one by one.

        Raises:
            DivergedError: the loss became NaN or infinite.
            BertkitError: a batch does not fit into the device's memory.
        """
        settings = LoopSettings(
            device=self.device,
            precision=self.precision,
            seed=self.run.seed,
            max_gradient_norm=self.training.max_gradient_norm,
            learning_rate=self.rate,
            advice_if_too_large=smaller_batch_advice,
        )
        steps = train_steps(
            self.model, self.optimizer, self.task.loss, self.batches(), settings, done=self.step
        )
        for update in steps:
            if self.step % self.updates_per_epoch == 0:
                self.summed_loss = 0.0
            self.summed_loss += total_loss(update.sums, update.counts)
            self.step = update.step
            yield update

    def epoch_loss(self) -> float:
        """Return the mean loss of the updates of an epoch that has just ended."""
        return float(self.summed_loss) / self.updates_per_epoch

    def batches(self) -> Iterator[tuple[list[TaskBatch], None]]:
        """Yield the micro-batches of each remaining update, in an order of seed and epoch alone."""

        def targets(*parts: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
            tensors, counts = self.task.targets(*parts)
            if self.weights is not None:
                tensors = {**tensors, "class_weights": self.weights}
            return tensors, counts

        made, size, items = self.step, self.run.batch_size, self.items.items
        for epoch in range(made // self.updates_per_epoch, self.run.epochs):
            order = keyed_rng(self.run.seed, FINE_TUNING, epoch=epoch).permutation(len(items))
            first = max(0, made - epoch * self.updates_per_epoch)
            for update in range(first, self.updates_per_epoch):
                drawn = [items[i] for i in order[update * size : (update + 1) * size]]
                parts = [part for item in drawn for part in item.parts]
                groups = split_parts(parts, self.training.max_tokens)
                yield [make_batch(group, targets, self.compact.table) for group in groups], None

    def rate(self, step: int) -> float:
        """Return the learning rate of the update after `step` updates."""
        return learning_rate(
            step, peak=self.run.learning_rate, warmup_steps=self.warmup, total_steps=self.total
        )

    def shrinkage(self) -> float:
        """Return the factor by which the updates made decayed a weight that has no gradient."""
        decay = self.training.weight_decay
        return math.prod(1 - self.rate(made) * decay for made in range(self.step))

    def evaluation_interval(self, dev: Items) -> int:
        """Return the number of updates between evaluations: as set, or some whole epochs.

        Evaluating then takes at most a tenth of training. This is counted in tokens and not by a
        clock, so that it is the same everywhere: an evaluation takes a third of the time of updates
        on as many tokens, and at least that of one update.
        """
        training, epoch = self.training, self.updates_per_epoch
        if training.eval_every or training.early_stopping:
            return training.eval_every or epoch
        cost = max(1.0, dev.tokens / self.items.tokens * epoch / 3)
        return math.ceil(cost / (EVALUATION_SHARE * epoch)) * epoch

    @contextmanager
    def whole_model(self) -> Iterator[Any]:
        """Provide the model as it is now, with all word embeddings, to evaluate or save it."""
        with self.compact.expanded(self.shrinkage()):
            yield self.model
        self.model.train()

    def save(self, progress: dict[str, Any]) -> dict[str, Any] | None:
        """Write a checkpoint with JSON values for `self.progress` and return its record, if due."""
        if self.checkpoints is None or monotonic() < self.next_save:
            return None
        progress = {**progress, "summed_loss": float(self.summed_loss)}
        record = save_training(
            self.checkpoints, self.step, self.model, self.optimizer, progress, keep=1
        )
        pause = max(CHECKPOINT_SECONDS, record["seconds"] / CHECKPOINT_SHARE)
        self.next_save = monotonic() + pause
        return record

    def finish(self) -> Any:
        """Return the trained model with all word embeddings, in training mode."""
        self.compact.restore(self.shrinkage())
        return self.model


class CompactEmbeddings:
    """A small word embedding matrix of the used rows, which replaces that of an encoder."""

    def __init__(self, encoder: Encoder, items: Items) -> None:
        self.encoder = encoder
        self.whole = encoder.word_embeddings
        seen = np.zeros(self.whole.num_embeddings, dtype=bool)
        for sequence in items.sequences():
            seen[sequence.ids] = True
        self.used = torch.from_numpy(np.flatnonzero(seen)).to(self.whole.weight.device)
        self.table = np.cumsum(seen) - 1
        """(vocabulary,) id -> row of the small matrix, for `make_batch`."""
        rows = self.whole.weight.detach()[self.used].clone()
        encoder.word_embeddings = nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows)

    @torch.no_grad()
    def restore(self, shrinkage: float) -> None:
        """Write the trained rows back and multiply all others by `shrinkage`, the total decay."""
        self.whole.weight.mul_(shrinkage)
        self.whole.weight[self.used] = self.encoder.word_embeddings.weight
        self.encoder.word_embeddings = self.whole

    @contextmanager
    def expanded(self, shrinkage: float) -> Iterator[None]:
        """Give the encoder the matrix that `restore` would leave, within a block."""
        compact = self.encoder.word_embeddings
        rows = self.whole.weight.detach() * shrinkage
        rows[self.used] = compact.weight.detach()
        self.encoder.word_embeddings = nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows)
        try:
            yield
        finally:
            self.encoder.word_embeddings = compact


def smaller_batch_advice(lengths: Sequence[int]) -> str:
    """Return advice for a batch, of these lengths, that does not fit into memory."""
    longest, half = max(lengths), sum(lengths) // 2
    if half < longest:
        return f"try --max-length {longest // 2}, or a smaller model"
    return f"try --max-tokens {half} in a new --out, or a shorter --max-length"


def class_weights(task: Task, items: Items, weights: Any) -> Tensor | None:
    """Return the weights of a task's classes in the loss of labelled items, (classes,), or None."""
    if not weights:
        return None
    balanced = task.balanced_weights(items)
    if tuple(weights) == (BALANCED,):
        return torch.from_numpy(balanced).float()
    by_label = dict.fromkeys(task.labels, 1.0)
    for text in map(str, weights):
        label, _, weight = text.rpartition("=")
        try:
            by_label[label] = float(weight) if label in by_label else math.nan
        except ValueError:
            by_label[label] = math.nan
        if not 0 < by_label[label] < math.inf:
            raise BertkitError(
                f"class_weights takes {BALANCED}, or LABEL=WEIGHT with a label of the task and a "
                f"weight above 0, not '{text:.60}'{nearest(label, task.labels)}",
                code="class-weights",
            )
    return torch.tensor(list(by_label.values()))


def tuned_details(data: TaskData, task: Task) -> dict[str, Any]:
    """Return what `bertkit.json` says of a model that was fine-tuned on a data set."""
    return {
        "task": task.task_type,
        "head": task.head,
        "problem_type": task.problem_type,
        "labels": list(task.labels),
        "settings": task.settings(),
        "data": data.name,
        "columns": dict(data.columns),
        "pairs": data.has_pairs,
        "made_by": "bertkit finetune",
    }


def label_order(data: TaskData, start: PretrainedWeights) -> tuple[Task, bool]:
    """Return the task of a data set for a start, and whether the start's head is for the same task.

    Labels of the user's data get the order of a start that was fine-tuned for the same ones.
    """
    task, details = data.task, dict(start.details)
    if "task" not in details:  # the task may be in the config.json of transformers
        with suppress(BertkitError):
            details = task_details(model_folder(start.path))
    if details.get("task") != task.task_type:
        return task, False
    labels = tuple(details.get("labels") or ())
    if task.has_labels and data.name in TASKS and sorted(labels) == sorted(task.labels):
        task = replace(task, labels=labels)  # type: ignore[type-var]
    return task, not task.has_labels or labels == task.labels
