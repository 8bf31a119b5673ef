"""One fine-tuning run, which trains a checkpoint on a task's items (paper sections 4 and A.3).

Only the word embeddings that the training data uses are trained, with the same result as training
all. A token that never occurs has a zero gradient in every step, so its Adam moments stay 0 and its
row only shrinks by weight decay, each step by the factor 1 - learning rate x decay. So the rows
that occur are fine-tuned in a small matrix, and the others are shrunk once at the end. On small
data sets with a vocabulary of 30,522 this saves most of the optimizer's work: half of the
parameters of a small BERT are word embeddings.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.console import Console
from bertkit.errors import BertkitError, DivergedError, nearest
from bertkit.finetuning.settings import BALANCED, ClassWeights, RunSettings, TrainingSettings
from bertkit.model.encoder import Encoder
from bertkit.model.task_heads import TaskModel
from bertkit.pretraining_data.rng import FINE_TUNING, keyed_rng
from bertkit.tasks.task import Items, Task, TaskBatch, make_batch, split_parts
from bertkit.training.checkpoint import CheckpointWriter
from bertkit.training.distributed import ALONE, own_random_numbers
from bertkit.training.journal import RunLog
from bertkit.training.optimizer import AdamW, build_optimizer
from bertkit.training.recipe import learning_rate
from bertkit.training.step import LoopSettings, MetricWindow, StepRecord, train_steps

if TYPE_CHECKING:
    from bertkit.finetuning.evaluation import RunEvaluation


class CompactEmbeddings:
    """A small word embedding matrix of the used rows, which replaces that of an encoder."""

    def __init__(self, encoder: Encoder, items: Items) -> None:
        self.encoder = encoder
        self.whole = encoder.word_embeddings
        seen = np.zeros(self.whole.num_embeddings, dtype=bool)
        for item in items.items:
            for part in item.parts:
                for sequence in part.sequences:
                    seen[sequence.ids] = True
        self.used = torch.from_numpy(np.flatnonzero(seen)).to(self.whole.weight.device)
        self.table = np.cumsum(seen) - 1
        """(vocabulary,) id -> row of the small matrix, for `make_batch`."""
        rows = self.whole.weight.detach()[self.used].clone()
        encoder.word_embeddings = nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows)

    @torch.no_grad()
    def restore(self, shrinkage: float) -> None:
        """Write the trained rows back and multiply all others by `shrinkage`, the total decay."""
        tuned = self.encoder.word_embeddings.weight
        self.whole.weight.mul_(shrinkage)
        self.whole.weight[self.used] = tuned.to(self.whole.weight.dtype)
        self.encoder.word_embeddings = self.whole

    @contextmanager
    def expanded(self, shrinkage: float) -> Iterator[None]:
        """Give the encoder the matrix that `restore` would leave, within a block."""
        compact = self.encoder.word_embeddings
        rows = self.whole.weight.detach() * shrinkage
        rows[self.used] = compact.weight.detach().to(rows.dtype)
        self.encoder.word_embeddings = nn.Embedding(rows.shape[0], rows.shape[1], _weight=rows)
        try:
            yield
        finally:
            self.encoder.word_embeddings = compact


LOG_EVERY = 20
"""The number of updates between two lines of the journal."""


def micro_batches(
    task: Task,
    items: Items,
    run: RunSettings,
    max_tokens: int,
    table: Any,
    weights: Tensor | None = None,
    done: int = 0,
) -> Iterator[tuple[list[TaskBatch], None]]:
    """Yield the micro-batches of every update after the first `done`.

    The order of an epoch depends on nothing but the seed and the epoch.
    """

    def targets(*parts: Any) -> tuple[dict[str, Tensor], dict[str, int]]:
        tensors, counts = task.targets(*parts)
        return tensors if weights is None else {**tensors, "class_weights": weights}, counts

    updates = updates_per_epoch(run, items)
    for epoch in range(done // updates, run.epochs):
        order = keyed_rng(run.seed, FINE_TUNING, epoch=epoch).permutation(len(items.items))
        for update in range(max(0, done - epoch * updates), updates):
            first = update * run.batch_size
            drawn = [items.items[i] for i in order[first : first + run.batch_size]]
            parts = [part for item in drawn for part in item.parts]
            yield (
                [make_batch(group, targets, table) for group in split_parts(parts, max_tokens)],
                None,
            )


def updates_per_epoch(run: RunSettings, items: Items) -> int:
    """Return the number of updates in an epoch."""
    return math.ceil(len(items.items) / run.batch_size)


class Schedule:
    """The updates of a run and their learning rates."""

    def __init__(self, run: RunSettings, tuning: TrainingSettings, items: Items) -> None:
        self.run, self.weight_decay = run, tuning.weight_decay
        self.each_epoch = updates_per_epoch(run, items)
        self.total = self.each_epoch * run.epochs
        self.warmup = min(round(tuning.warmup * self.total), self.total - 1)
        self.eval_every = tuning.eval_every or self.each_epoch

    def rate(self, step: int) -> float:
        """Return the learning rate of the update after `step` updates."""
        return learning_rate(
            step, peak=self.run.learning_rate, warmup_steps=self.warmup, total_steps=self.total
        )

    def shrinkage(self, step: int) -> float:
        """Return the factor by which `step` updates decay a weight that has no gradient."""
        return math.prod(1 - self.rate(made) * self.weight_decay for made in range(step))


@dataclass(frozen=True)
class TaskNetwork:
    """A network in training."""

    model: TaskModel
    compact: CompactEmbeddings | None
    """The word embeddings in use; None if all are trained, or none."""
    optimizer: AdamW


def silent_log(done: int) -> RunLog:
    """Return a log that writes nothing."""
    return RunLog(None, Console(stream=io.StringIO()))


def train_task(
    start: PretrainedWeights,
    task: Task,
    items: Items,
    run: RunSettings,
    tuning: TrainingSettings,
    *,
    device: torch.device,
    precision: str,
    keep_head: bool,
    build: Callable[..., TaskModel] | None = None,
    evaluation: RunEvaluation | None = None,
    checkpoints: Path | None = None,
    open_log: Callable[[int], RunLog] = silent_log,
    title: str = "",
) -> TaskModel:
    """Train once over all epochs, or until the evaluation stops the run.

    Args:
        start: the weights to initialise from; they are not changed.
        task: the task, which defines the objective.
        items: the labelled items.
        run: batch size, learning rate, epochs, seed (of the new head, the order and the dropout).
        tuning: the settings that all runs share.
        device: the device to train on.
        precision: "fp32", "bf16" or "bf16-residual".
        keep_head: whether to initialise the head from the checkpoint too.
        build: the function that builds the network; None for the task's `build`.
        evaluation: what is called every `tuning.eval_every` updates and at the end.
        checkpoints: the folder for a checkpoint after each evaluation, from which a stopped run is
            resumed; None for no checkpoints.
        open_log: a function that opens the log, given the number of updates made before.
        title: the title of the progress on the console.

    Returns:
        The model after the last update, on the device, in training mode.

    Raises:
        BertkitError: the loss became NaN or infinite, a checkpoint is damaged, or the disk is full.
    """
    schedule = Schedule(run, tuning, items)
    settings = LoopSettings(
        device=device,
        precision=precision,
        seed=run.seed,
        max_gradient_norm=tuning.max_gradient_norm,
        learning_rate=schedule.rate,
        advice_if_too_large=smaller_task_batch,
    )
    weights = class_weights(task, items, tuning.class_weights)
    made, notes = 0, list[str]()
    with ExitStack() as stack:
        stack.enter_context(own_random_numbers(device))
        network = build_task_network(start, task, items, run, tuning, device, keep_head, build)
        writer = None
        if checkpoints is not None:
            writer = CheckpointWriter(checkpoints, network.model, network.optimizer, ALONE, keep=1)
            stack.callback(writer.close)
            if (found := writer.resume(notes.append)) is not None:  # the run was stopped
                made = found.step
                if evaluation is not None:
                    evaluation.state = found.progress["evaluation"]
        log = stack.enter_context(open_log(made))
        log.console.say(*notes)
        known = {"inputs": items.inputs, "steps_total": schedule.total, "precision": precision}
        log.write({"kind": "start", "step": made, **asdict(run), "tuning": asdict(tuning), **known})
        log.console.start(schedule.total, made, title=title)
        table = None if network.compact is None else network.compact.table
        batches = micro_batches(task, items, run, tuning.max_tokens, table, weights, made)
        updates = train_steps(
            network.model, network.optimizer, task.objective, batches, settings, done=made
        )
        try:
            made = follow_updates(updates, network, schedule, evaluation, writer, log)
        except DivergedError as error:
            log.write({"kind": "end", "step": error.step, "reason": "diverged"})
            raise
        reason = "finished" if made == schedule.total else "stopped early"
        log.write({"kind": "end", "step": made, "reason": reason})
    if network.compact is not None:
        network.compact.restore(schedule.shrinkage(made))
    return network.model


def smaller_task_batch(lengths: Sequence[int]) -> str:
    """Return advice for a batch, of these lengths, that does not fit into memory."""
    longest, half = max(lengths), sum(lengths) // 2
    if half < longest:
        return f"try --max-length {longest // 2}, or a smaller model"
    return f"try --max-tokens {half} in a new --out, or a shorter --max-length"


def build_task_network(
    start: PretrainedWeights,
    task: Task,
    items: Items,
    run: RunSettings,
    tuning: TrainingSettings,
    device: torch.device,
    keep_head: bool,
    build: Callable[..., TaskModel] | None,
) -> TaskNetwork:
    """Build the network of a run before its first update; see `train_task`."""
    torch.manual_seed(run.seed)
    built = start.build(build or task.build, keep_head=keep_head).model
    model = task.prepare_network(built, keep_head=keep_head).to(device).train()
    trained = model.encoder.word_embeddings.weight.requires_grad
    whole = task.predicts_tokens or not trained
    compact = None if whole else CompactEmbeddings(model.encoder, items)
    optimizer = build_optimizer(
        model,
        learning_rate=run.learning_rate,
        weight_decay=tuning.weight_decay,
        bias_correction=tuning.bias_correction,
    )
    return TaskNetwork(model, compact, optimizer)


def follow_updates(
    updates: Iterator[StepRecord[None]],
    network: TaskNetwork,
    schedule: Schedule,
    evaluation: RunEvaluation | None,
    writer: CheckpointWriter | None,
    log: RunLog,
) -> int:
    """Log, evaluate and save between updates; return the number of updates made in all.

    Raises:
        DivergedError: the loss became NaN or infinite.
        BertkitError: the disk is full.
    """
    window, step = MetricWindow(), 0
    for update in updates:
        step = update.step
        window.add(update)
        last = step == schedule.total
        evaluating = evaluation is not None and (last or step % schedule.eval_every == 0)
        if evaluating or last or step % LOG_EVERY == 0:
            log.write(window.close(), show=True)
        if evaluation is None or not evaluating:
            continue
        compact = network.compact
        with compact.expanded(schedule.shrinkage(step)) if compact else nullcontext():
            scores, stop = evaluation(network.model, step, last=last)
        network.model.train()
        log.write(
            {**scores, "kind": "evaluation", "step": step, "epoch": step / schedule.each_epoch}
        )
        if last or stop:
            break
        if writer is not None:
            writer.save_async(step, {"position": [step], "evaluation": evaluation.state})
            if saved := writer.poll(wait=True):
                log.write(saved)
        window.restart()
    return step


def class_weights(task: Task, items: Items, given: ClassWeights) -> Tensor | None:
    """Return the weights of a task's classes in the loss, (classes,), or None without weights.

    `items` are the labelled training items, and `given` is `TrainingSettings.class_weights`.

    Raises:
        BertkitError: the task has no classes, or no such one.
    """
    if not given:
        return None
    balanced = task.balanced_weights(items)
    if tuple(given) == (BALANCED,):
        return torch.from_numpy(balanced).float()
    weights = dict.fromkeys(task.labels, 1.0)
    for label, _, weight in (str(one).rpartition("=") for one in given):
        if label not in weights:
            raise BertkitError(
                f"class_weights names the label '{label}', which the task does not have"
                f"{nearest(label, weights)}",
                code="class-weights",
            )
        weights[label] = float(weight)
    return torch.tensor(list(weights.values()))
