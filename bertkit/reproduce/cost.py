"""Estimate the cost of a reproduction before it starts, from its operations and machine speed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from bertkit.checkpoints.huggingface import read_model_config
from bertkit.checkpoints.pretrained import model_folder
from bertkit.model.encoder import ModelConfig
from bertkit.reproduce.experiments import TaskRun
from bertkit.reproduce.paper import Scale
from bertkit.reproduce.run import Reproduction, ReproductionStep
from bertkit.training.device import choose_device, choose_precision, matmul_peak, training_flops
from bertkit.training.recipe import PretrainRecipe

ASSUMED_MFU = 0.3
"""The share of the matrix-product peak that training reaches, assumed until a run measures it."""

SIZES = {
    "mnli": (392_702, 40),
    "qqp": (363_846, 31),
    "qnli": (104_743, 51),
    "sst-2": (67_349, 13),
    "cola": (8_551, 11),
    "sts-b": (5_749, 31),
    "mrpc": (3_668, 53),
    "rte": (2_490, 70),
    "squad-1.1": (87_599, 170),
    "squad-2.0": (130_319, 170),
    "swag": (73_546, 120),
    "conll-2003": (14_041, 21),
    "squad-sentences": (85_000, 45),
}
"""Task -> the number of training inputs in the official data, and their approximate token count."""


def describe_cost(work: Reproduction, steps: Sequence[ReproductionStep]) -> list[str]:
    """Return sentences that say what is left to do and about how long it takes."""
    left = [step for step in steps if not work.is_done(step)]
    networks = [step for step in steps if step.job is None]
    tunings = [step for step in steps if step.job is not None]
    lines = [
        f"{work.scale.title}: {len(networks)} networks to pre-train "
        f"({sum(step in left for step in networks)} left), {len(tunings)} fine-tuning jobs with "
        f"{work.scale.seeds} seeds each ({sum(step in left for step in tunings)} left)"
    ]
    if left:
        peak, mfu = machine_speed(work)
        seconds = {step.name: operations(work, step) / (peak * mfu) for step in left}
        total = sum(seconds.values())
        pretraining = sum(seconds[step.name] for step in left if step.job is None)
        lines.append(
            f"about {duration_text(total)} on this machine, {pretraining / total:.0%} of it for "
            f"pre-training; estimated from operations at {mfu:.0%} of {peak / 1e9:,.0f} GFLOP/s"
        )
    return lines


def machine_speed(work: Reproduction) -> tuple[float, float]:
    """Return the peak of matrix products here in FLOP/s, and the share that training reaches."""
    device = choose_device(work.device)
    precision = choose_precision(work.recipe(()).training.precision, device)
    peak = matmul_peak(device, precision, seconds=0.3)
    shares = [
        float(str(record["mfu"]))
        for folder in sorted((work.out / "networks").glob("*"))
        for record in work.journal(folder.name)
        if record["kind"] == "step" and "mfu" in record
    ]
    return peak, statistics.median(shares) if shares else ASSUMED_MFU


def operations(work: Reproduction, step: ReproductionStep) -> float:
    """Return the number of floating-point operations of a step."""
    recipe = work.recipe(step.flags)
    config = recipe.config(work.scale.vocabulary_size)
    if step.job is None:
        return pretraining_operations(recipe, config)
    given = work.given(step.variant, step.job.at)
    return tuning_operations(work.scale, step.job, network_config(given) if given else config)


def network_config(model: Path) -> ModelConfig:
    """Read the configuration of a given model, which may be a Google checkpoint."""
    folder = model_folder(model)
    files = (
        folder / "config.json",
        folder / "bert_config.json",
        folder.parent / "bert_config.json",
    )
    return read_model_config(next((file for file in files if file.is_file()), files[0]))


def pretraining_operations(recipe: PretrainRecipe, config: ModelConfig) -> float:
    """Return the operations of all pre-training phases if every example has the full length."""
    total = 0.0
    phases = zip(
        recipe.phases.lengths,
        recipe.phases.steps,
        recipe.phases.batch_sizes,
        recipe.phases.max_predictions,
        strict=True,
    )
    for length, steps, sequences, most in phases:
        targets = recipe.num_targets(length, most)
        total += steps * training_flops(
            config,
            tokens=sequences * length,
            targets=sequences * targets,
            sequences=sequences,
            sum_squared_lengths=sequences * length**2,
        )
    return total


def tuning_operations(scale: Scale, job: TaskRun, config: ModelConfig) -> float:
    """Return the operations of fine-tuning over all seeds and epochs.

    A frozen encoder has only a forward pass, which is a third of the operations.
    """
    task, (inputs, length) = scale.task(job.task), SIZES.get(job.task, (10_000, 50))
    inputs = min(inputs, task.train or inputs)
    passes = scale.seeds * task.epochs
    flops = training_flops(
        config,
        tokens=inputs * length,
        targets=0,
        sequences=inputs,
        sum_squared_lengths=inputs * length**2,
    )
    return passes * flops * (1 / 3 if job.head.frozen else 1)


def duration_text(seconds: float) -> str:
    """Format a duration in a suitable unit."""
    for unit, size in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if seconds >= 1.5 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:.0f} seconds"
