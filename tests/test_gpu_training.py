"""Updates, predictions and resuming on a CUDA device: nothing waits, nothing is lost.

Like `tests.test_gpu`, this may run on a machine with little else than torch.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bertkit.finetuning.run import build_task_network, micro_batches
from bertkit.predict.engine import Engine

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.checkpoints.save import foreign_tensors
from bertkit.corpus.store import TokenStore
from bertkit.finetuning.settings import RunSettings, TrainingSettings
from bertkit.model.heads import PretrainingModel
from bertkit.model.task_heads import ClassificationModel
from bertkit.objectives import pretraining_objective
from bertkit.tasks.classification import Classification
from bertkit.tasks.task import Encoded, Item, ItemPart, Items
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from bertkit.training.journal import read_journal
from bertkit.training.optimizer import build_optimizer
from bertkit.training.pretrain import pretrain
from bertkit.training.step import LoopSettings, train_steps
from tests.test_gpu import CONFIG, CPU, CUDA, TOY, batches, check_run, distance, gpu

pytestmark = pytest.mark.filterwarnings("default")


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make every call fail by which the host waits for the device."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def loop_settings() -> LoopSettings:
    """Of training in bf16 on the GPU."""
    return LoopSettings(
        device=CUDA, precision="bf16", seed=0, max_gradient_norm=1.0,
        learning_rate=lambda step: 1e-4,
    )  # fmt: skip


WITH_DROPOUT = replace(CONFIG, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)


def check_updates_do_not_wait(updates: Iterator[Any]) -> None:
    """The first two updates choose kernels and find memory; the others do not wait."""
    for _ in range(2):
        next(updates)
    with no_waiting():
        records = list(updates)
    assert len(records) >= 3
    assert all(bool(record.gradient_norm.isfinite()) for record in records)


@gpu
def test_waiting_would_be_noticed() -> None:
    with pytest.raises(RuntimeError, match="synchroniz"), no_waiting():
        torch.ones(1, device="cuda").item()


@gpu
def test_updates_of_pretraining_do_not_wait_for_the_device() -> None:
    model = PretrainingModel(WITH_DROPOUT).to("cuda").train()
    optimizer = build_optimizer(model, learning_rate=1e-4)
    several = batches(12)
    steps = [(several[i : i + 2], None) for i in range(0, 12, 2)]
    check_updates_do_not_wait(
        train_steps(model, optimizer, pretraining_objective, steps, loop_settings())
    )


def task_items(count: int) -> Items:
    """Labelled pairs of random tokens, of 3 to 128 of them."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(3, 129, count).tolist()
    parts = [
        ItemPart((Encoded(rng.integers(5, 500, n, dtype=np.int32), n // 2),), n % 2)
        for n in lengths
    ]
    return Items([Item(i, [part]) for i, part in enumerate(parts)], count, 0, {})


@gpu
def test_updates_of_fine_tuning_do_not_wait_for_the_device() -> None:
    words = [f"w{number}" for number in range(500 - len(SPECIAL_TOKENS))]
    tokenizer = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *words], lowercase=True)
    tensors = foreign_tensors(PretrainingModel(WITH_DROPOUT), "bert")
    start = PretrainedWeights(Path(), WITH_DROPOUT, tensors, tokenizer, {})
    task, items = Classification(("a", "b")), task_items(96)
    run = RunSettings(batch_size=16, learning_rate=1e-4, epochs=1, seed=0)
    tuning = TrainingSettings()
    network = build_task_network(start, task, items, run, tuning, CUDA, False, None)
    table = None if network.compact is None else network.compact.table
    steps = list(micro_batches(task, items, run, 800, table))
    check_updates_do_not_wait(
        train_steps(network.model, network.optimizer, task.objective, steps, loop_settings())
    )


@gpu
def test_predictions_in_bf16_are_near_to_fp32_on_the_cpu_and_in_order() -> None:
    torch.manual_seed(0)
    model = ClassificationModel(replace(CONFIG, initializer_range=0.1), 3)
    items = task_items(300)
    wanted = Engine(copy.deepcopy(model), CPU, "fp32").run(items)
    got = Engine(model, CUDA, "bf16").run(items)
    ours, theirs = (
        torch.from_numpy(np.concatenate([part for parts in outputs for part in parts]))
        for outputs in (got, wanted)
    )
    assert ours.shape == theirs.shape == (300, 3)
    assert distance(ours, theirs) < 0.05
    assert distance(ours.roll(1, 0), theirs) > 0.2


class Stopped(Exception):  # noqa: N818
    """What stops a run from outside."""


@gpu
def test_a_run_resumes_on_the_gpu(store: TokenStore, tmp_path: Path) -> None:
    """The same data as without a stop, and nearly the same losses."""
    recipe = replace(TOY, logging=replace(TOY.logging, log_every=5, checkpoint_every=5))

    def stop(record: dict[str, Any]) -> None:
        if record["kind"] == "step" and record["step"] == 15:
            raise Stopped

    with pytest.raises(Stopped):
        pretrain(recipe, store, tmp_path / "run", device="cuda", workers=1, on_record=stop)
    assert read_journal(tmp_path / "run" / "journal.jsonl")[-1]["step"] == 15
    pretrain(recipe, store, tmp_path / "run", device="cuda", workers=1)
    pretrain(recipe, store, tmp_path / "whole", device="cuda", workers=1)
    check_run(tmp_path / "run")
    resumed, whole = (
        [one for one in read_journal(tmp_path / name / "journal.jsonl") if one["kind"] == "step"]
        for name in ("run", "whole")
    )
    assert [one["step"] for one in resumed] == [one["step"] for one in whole] == [*range(5, 31, 5)]
    for one, other in zip(resumed, whole, strict=True):
        assert [one["tokens"], one["targets"]] == [other["tokens"], other["targets"]]
        assert one["mlm_loss"] == pytest.approx(other["mlm_loss"], abs=0.05)
