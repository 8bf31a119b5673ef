"""What a pre-training run will take, measured by running it for some seconds.

The recipe's network makes updates in the training loop with batches of the recipe's sizes: those of
a store, or random ids in examples of full length, which are the slowest and largest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.model.heads import count_parameters
from bertkit.pretraining_data.batch import from_arrays
from bertkit.pretraining_data.examples import count_targets
from bertkit.pretraining_data.loader import START, PretrainingBatch
from bertkit.processes import resident_bytes
from bertkit.training.device import (
    choose_device,
    choose_precision,
    matmul_peak,
    own_random_numbers,
    synchronize,
)
from bertkit.training.distributed import ALONE
from bertkit.training.optimizer import build_optimizer
from bertkit.training.pretrain import TrainingData
from bertkit.training.recipe import PretrainRecipe, read_recipe
from bertkit.training.step import LoopSettings, PretrainMetrics, train_steps

MAX_UPDATES = 1000
IMPOSSIBLE = 1.2
"""The MFU above which a measurement is refused: nothing is faster than its matrix products, whose
speed is measured to some percent."""

Steps = Iterator[tuple[list[PretrainingBatch], Any]]


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """The measured speed of one phase, and the time that its updates will take."""

    length: int
    batch_size: int
    steps: int
    tokens_per_second: float
    mfu: float
    """Floating-point operations per second, as a share of the device's peak."""
    seconds_per_update: float
    hours: float


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a recipe takes on this machine."""

    parameters: int
    device: str
    precision: str
    memory_bytes: float
    """The most memory of the GPU, or of this process on a CPU; 0 if the system does not say."""
    hours: float
    """The time of all updates; evaluations and checkpoints are not included."""
    phases: tuple[PhasePlan, ...]


def plan(
    recipe: PretrainRecipe | Path | str,
    store: TokenStore | Path | str | None = None,
    *,
    vocabulary_size: int = 30522,
    device: str = "auto",
    seconds: float = 20.0,
) -> Plan:
    """Train with a recipe for some seconds, and say what the whole run takes.

    The recipe is one, or its path or name. Without a store, `vocabulary_size` ids are drawn at
    random, in examples of full length. The seconds are divided among the phases; each makes two
    updates at least, however long they take.
    """
    recipe = recipe if isinstance(recipe, PretrainRecipe) else read_recipe(recipe)
    if not 0 < seconds < 1e6:
        raise BertkitError(f"seconds must be above 0, not {seconds:g}", code="number")
    store = TokenStore(store) if isinstance(store, str | Path) else store
    on = choose_device(device)
    precision = choose_precision(recipe.training.precision, on)
    config = recipe.config(store.tokenizer.size if store else vocabulary_size)
    settings = LoopSettings(
        device=on,
        precision=precision,
        seed=recipe.training.seed,
        max_gradient_norm=recipe.training.max_gradient_norm,
        learning_rate=lambda step: 1e-6,
        advice_if_too_large=lambda lengths: "raise training.accumulate",
    )
    peak = matmul_peak(on, precision, seconds=0.5)
    share = seconds / len(recipe.phases.steps)
    phases = []
    with own_random_numbers(on):
        model = recipe.objectives.model(config).to(on).train()
        optimizer = build_optimizer(model, learning_rate=1e-6, optimizer=recipe.training.optimizer)
        if on.type == "cuda":
            torch.cuda.reset_peak_memory_stats(on)
        for phase, count in enumerate(recipe.phases.steps):
            batches = (
                store_steps(recipe, store, phase)
                if store
                else random_steps(recipe, phase, config.vocab_size)
            )
            objective = recipe.objectives.function()
            with closing(batches):  # type: ignore[type-var]
                updates = train_steps(model, optimizer, objective, batches, settings)
                next(updates)  # the first one also loads libraries and allocates
                window, began = PretrainMetrics(model, peak, phase), time.perf_counter()
                for update in updates:
                    window.add(update)
                    synchronize(on)
                    if time.perf_counter() - began >= share:
                        break
                made, record = window.updates, window.close()
            phases.append(phase_plan(recipe, phase, count, record, made))
    memory = torch.cuda.max_memory_reserved(on) if on.type == "cuda" else resident_bytes("VmHWM")
    return Plan(
        parameters=count_parameters(config, heads=True),
        device=torch.cuda.get_device_name(on) if on.type == "cuda" else str(on),
        precision=precision,
        memory_bytes=float(memory or 0),
        hours=sum(part.hours for part in phases),
        phases=tuple(phases),
    )


def phase_plan(
    recipe: PretrainRecipe, phase: int, steps: int, record: dict[str, Any], made: int
) -> PhasePlan:
    """Extrapolate a record of `made` updates, after checking that such a speed is possible."""
    if not 0 < record["mfu"] < IMPOSSIBLE:
        raise BertkitError(
            f"the measurement is impossible: {record['mfu']:.2g} of the peak speed of this device; "
            "its clock was changed or other programs slowed the comparison. Run it again",
            code="measurement",
        )
    each = record["seconds"] / made
    return PhasePlan(
        length=recipe.phases.lengths[phase],
        batch_size=recipe.phases.batch_sizes[phase],
        steps=steps,
        tokens_per_second=record["tokens_per_second"],
        mfu=record["mfu"],
        seconds_per_update=each,
        hours=steps * each / 3600,
    )


def store_steps(recipe: PretrainRecipe, store: TokenStore, phase: int) -> Steps:
    """Yield the first batches of a phase."""
    with closing(TrainingData(recipe, store)) as data:
        yield from data.stream(phase, 0, START, ALONE, workers=0)


def random_steps(recipe: PretrainRecipe, phase: int, vocabulary_size: int) -> Steps:
    """Yield batches of random ids in examples of a phase's full length."""
    phases, parts = recipe.phases, recipe.training.accumulate
    size, length = phases.batch_sizes[phase], phases.lengths[phase]
    for number in range(MAX_UPDATES):
        sizes = [size // parts + (part < size % parts) for part in range(parts)]
        rng = np.random.default_rng(number)
        yield (
            [
                random_batch(recipe, n, length, phases.max_predictions[phase], vocabulary_size, rng)
                for n in sizes
            ],
            None,
        )


def random_batch(
    recipe: PretrainRecipe,
    sequences: int,
    length: int,
    max_predictions: int,
    vocabulary_size: int,
    rng: np.random.Generator,
) -> PretrainingBatch:
    """Build a batch of random ids and targets, in examples of the same length."""
    targets = count_targets(length, recipe.masking.probability, max_predictions)
    if recipe.objectives.token == "clm":
        targets = length - 1
    chosen = rng.permuted(np.tile(np.arange(length), (sequences, 1)), axis=1)[:, :targets]
    positions = torch.from_numpy((np.arange(sequences)[:, None] * length + chosen).ravel())
    ids = rng.integers(0, vocabulary_size, sequences * length)
    segments = np.tile(np.arange(length) * 2 >= length, sequences).astype(np.int64)
    packed = from_arrays(ids, segments, np.full(sequences, length))
    labels = torch.from_numpy(rng.integers(0, 2, sequences))
    return PretrainingBatch(packed, positions, packed.ids[positions], labels)
