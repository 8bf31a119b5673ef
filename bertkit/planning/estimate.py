"""What a pre-training run will take, by arithmetic: time and cost of a schedule, or of a budget.

The network's sizes give its parameters (`count_parameters`), the operations of an update
(`training_flops`) and its memory (`memory.py`). How fast the operations go is measured or assumed:
see `calibration.py`. The schedule is that of paper section A.2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch

from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import count_parameters
from bertkit.planning.corpus import CorpusEstimate, LengthSample, typical_batch
from bertkit.planning.measure import Machine, Speed, calibrate
from bertkit.planning.memory import USABLE, Fit, fit_memory
from bertkit.pretraining_data.pairs import SPECIALS
from bertkit.training.device import training_flops
from bertkit.training.recipe import Phases, PretrainRecipe


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """One phase of a schedule on one machine."""

    length: int
    steps: int
    sequences: int
    """In an update."""
    fit: Fit
    tokens: float
    """In an update, on average."""
    corpus_tokens: float
    """Tokens of the corpus that an update goes through: an epoch reads some twice."""
    seconds: float
    """Of an update."""
    tokens_per_second: float
    mfu: float


def plan_phase(
    config: ModelConfig,
    recipe: PretrainRecipe,
    phase: int,
    examples: LengthSample,
    machine: Machine,
    fit: Fit,
    speed: Speed | None = None,
) -> PhasePlan:
    """What an update of a phase takes; `speed` is measured, None for the machine's assumed MFU."""
    precision = machine.precision(recipe.training.precision)
    length = recipe.phases.lengths[phase]
    sequences = recipe.phases.batch_sizes[phase]
    batch = typical_batch(examples, sequences, recipe, phase)
    work = training_flops(
        config,
        tokens=round(batch.tokens),
        targets=round(batch.targets),
        sequences=sequences,
        sum_squared_lengths=round(batch.squares),
    )
    peak = machine.peak[precision]
    if speed is None:
        seconds = work / (peak * machine.mfu[precision])
    else:
        seconds = speed(length, config.num_hidden_layers, fit.micro_batches, batch.tokens)
    return PhasePlan(
        length=length,
        steps=recipe.phases.steps[phase],
        sequences=sequences,
        fit=fit,
        tokens=batch.tokens,
        corpus_tokens=(batch.tokens - SPECIALS * sequences) / examples.epoch_tokens,
        seconds=seconds,
        tokens_per_second=batch.tokens / seconds,
        mfu=work / seconds / peak,
    )


def paper_schedule(recipe: PretrainRecipe) -> PretrainRecipe:
    """A recipe's network with the schedule of paper section A.2: a million updates of 256."""
    positions = max(recipe.model.max_position_embeddings, *Phases().lengths)
    return replace(
        recipe,
        model=replace(recipe.model, max_position_embeddings=positions),
        phases=Phases(),
        training=replace(recipe.training, warmup_steps=10_000),
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A schedule and what it takes."""

    title: str
    steps: tuple[int, ...]
    """Updates of each phase."""
    seconds: float
    """Of the updates alone: evaluation, checkpoints and loading come on top."""
    tokens: float
    epochs: float
    """How often the corpus is gone through."""
    cost: float | None
    """In the currency of the price."""


def estimate_steps(
    title: str,
    phases: Sequence[PhasePlan],
    steps: Sequence[int],
    corpus_tokens: float,
    price: float | None,
) -> Estimate:
    """What so many updates of each phase take; the price is that of an hour."""
    seconds = sum(count * phase.seconds for count, phase in zip(steps, phases, strict=True))
    used = sum(count * phase.corpus_tokens for count, phase in zip(steps, phases, strict=True))
    return Estimate(
        title=title,
        steps=tuple(steps),
        seconds=seconds,
        tokens=sum(count * phase.tokens for count, phase in zip(steps, phases, strict=True)),
        epochs=used / corpus_tokens,
        cost=None if price is None else price * seconds / 3600,
    )


def budget_steps(phases: Sequence[PhasePlan], hours: float) -> tuple[int, ...]:
    """The updates of each phase that a budget reaches, in the proportion of the recipe's.

    Raises:
        BertkitError: the hours are not positive, or too short for one update of each phase.
    """
    if not 0 < hours < float("inf"):
        raise BertkitError(f"--hours must be above 0, not {hours}")
    share = hours * 3600 / sum(phase.steps * phase.seconds for phase in phases)
    steps = tuple(int(share * phase.steps) for phase in phases)
    if min(steps) == 0:
        least = max(1 / phase.steps for phase in phases) / share * hours
        raise BertkitError(
            f"--hours {hours:g} do not reach one update of each phase in the recipe's proportion; "
            f"that takes {least:.2g} hours"
        )
    return steps


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that `bertkit plan` says."""

    model: ModelConfig
    parameters: int
    """With both heads."""
    precision: str
    machine: Machine
    corpus: str
    corpus_tokens: float
    phases: tuple[PhasePlan, ...]
    """Of the recipe."""
    paper: tuple[PhasePlan, ...]
    """Of the paper's schedule with the recipe's network."""
    answers: tuple[Estimate, ...]
    flags: tuple[str, ...] = ()
    """For `bertkit pretrain`, where the recipe would not fit or a budget was given."""
    assumed: tuple[str, ...] = field(default=())


def make_plan(
    recipe: PretrainRecipe,
    corpus: CorpusEstimate,
    machine: Machine,
    device: torch.device | None,
    *,
    hours: float | None = None,
    price: float | None = None,
    seconds: float = 20.0,
    progress: Callable[[str], object] = lambda text: None,
) -> Plan:
    """Plan a recipe, a budget and the paper's schedule.

    Args:
        recipe: network, schedule and precision.
        corpus: with examples of the `planned_lengths`.
        machine: where.
        device: is calibrated; None for the machine's assumed MFU.
        hours: a budget.
        price: of an hour.
        seconds: of calibration.
        progress: is told what is being measured.

    Raises:
        BertkitError: the network does not fit, the budget is too short, or the recipe trains two
            networks.
    """
    if recipe.objectives.token == "rtd":
        raise BertkitError(
            "a plan knows one network, and objectives.token = rtd trains two; plan the "
            "discriminator as a masked language model, and add a tenth to a third for the generator"
        )
    schedules = (recipe, paper_schedule(recipe))
    configs = [schedule.config(corpus.vocabulary_size) for schedule in schedules]
    fits = [
        [
            fit_memory(config, schedule, phase, machine, corpus.tokens)
            for phase in range(len(schedule.phases.lengths))
        ]
        for config, schedule in zip(configs, schedules, strict=True)
    ]
    speed = None
    if device is not None:
        wanted: dict[int, tuple[LengthSample, int, int, int]] = {}
        for schedule, found in zip(schedules, fits, strict=True):
            phases = schedule.phases
            for length, most, fit in zip(
                phases.lengths, phases.max_predictions, found, strict=True
            ):
                known = wanted.get(length, (None, fit.micro_batch, 1, most))
                count = max(known[2], fit.micro_batches)
                wanted[length] = (corpus.examples[length], known[1], count, known[3])
        speed = calibrate(configs[1], recipe, wanted, device, seconds, progress)
    own, paper = (
        [
            plan_phase(config, schedule, phase, corpus.examples[length], machine, fit, speed)
            for phase, (length, fit) in enumerate(zip(schedule.phases.lengths, found, strict=True))
        ]
        for config, schedule, found in zip(configs, schedules, fits, strict=True)
    )
    return summarize(recipe, configs[0], corpus, machine, own, paper, hours, price)


def summarize(
    recipe: PretrainRecipe,
    config: ModelConfig,
    corpus: CorpusEstimate,
    machine: Machine,
    own: Sequence[PhasePlan],
    paper: Sequence[PhasePlan],
    hours: float | None,
    price: float | None,
) -> Plan:
    """The answers to every question, from the phases."""
    flags: list[str] = []
    cut = max(phase.fit.micro_batches for phase in own)
    if cut > recipe.training.accumulate:
        flags.append(f"--training.accumulate {cut}")

    def asked(title: str, phases: Sequence[PhasePlan], steps: Sequence[int]) -> Estimate:
        return estimate_steps(title, phases, steps, corpus.tokens, price)

    same = recipe.phases == Phases()
    answers = [asked("the recipe" + ", as in the paper" * same, own, recipe.phases.steps)]
    if hours is not None:
        steps = budget_steps(own, hours)
        warmup = recipe.training.warmup_steps * sum(steps) / recipe.phases.total_steps
        answers.append(asked(f"{hours:g} hours", own, steps))
        flags.append(f"--phases.steps {' '.join(map(str, steps))}")
        flags.append(f"--training.warmup-steps {round(warmup)}")
    if not same:
        answers.append(asked("the paper's schedule", paper, Phases().steps))
    precision = machine.precision(recipe.training.precision)
    assumed = [*corpus.assumed, f"{1 - USABLE:.0%} of the memory is left to the allocator"]
    if machine.mfu:
        peak = machine.peak[precision] / 1e12
        assumed.append(
            f"an MFU of {machine.mfu[precision]:.0%} of {peak:,.1f} TFLOP/s, not measured"
        )
    return Plan(
        model=config,
        parameters=count_parameters(config, heads=True),
        precision=precision,
        machine=machine,
        corpus=corpus.title,
        corpus_tokens=corpus.tokens,
        phases=tuple(own),
        paper=tuple(paper),
        answers=tuple(answers),
        flags=tuple(flags),
        assumed=tuple(assumed),
    )
