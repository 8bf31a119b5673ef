"""Estimates of a pre-training run: the time and cost of a schedule, or the reach of a budget.

This machine is measured by real updates (`train_steps`) of networks of one and of four layers, of
the planned width and vocabulary, on random ids. The time of an update is modelled as a constant
plus a time per token. The shallow network has embeddings, heads and one layer with their optimizer;
the deeper one shows the cost of another layer. A machine from the table is assumed to reach a given
share of its peak.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel, count_parameters
from bertkit.objectives import pretraining_objective
from bertkit.planning import GIB
from bertkit.planning.corpus import CorpusEstimate, LengthSample, typical_batch
from bertkit.planning.machine import CONTEXT_BYTES, USABLE, Fit, Machine, fit_memory
from bertkit.pretraining_data.batch import from_arrays
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.pretraining_data.pairs import SPECIALS
from bertkit.processes import resident_bytes
from bertkit.training.device import (
    choose_precision,
    cpu_model,
    matmul_peak,
    memory_gib,
    synchronize,
    training_flops,
)
from bertkit.training.distributed import own_random_numbers
from bertkit.training.optimizer import build_optimizer
from bertkit.training.recipe import Phases, PretrainRecipe
from bertkit.training.step import LoopSettings, train_steps

DEEP = 4
"""Layers of the deeper network. With two, noise would be multiplied by the number of layers."""
ROUND = 12.0
"""How many times the duration of one large update of the deeper network is measured for: five or
six rounds."""


Speed = Callable[[int, int, float], float]
"""(length, number of layers, tokens) → seconds of an update."""


def this_machine(device: torch.device, recipe: PretrainRecipe) -> Machine:
    """Describe this machine, and measure its peak in about half a second."""
    memory, precision = memory_gib(device), choose_precision(recipe.training.precision, device)
    if memory is None:
        raise BertkitError("the system does not report its memory; name a --machine instead")
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else cpu_model()
    peak = matmul_peak(device, precision, seconds=0.5)
    tiny = ModelConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=128,
    )  # fmt: skip
    with own_random_numbers(device):
        trial = Trial(tiny, recipe, device, layers=1)  # loads the libraries that training loads
        trial.seconds(trial.batch([8, 6], 1))
    program = resident_bytes()
    return Machine(
        title=name if cuda else f"{name}, {torch.get_num_threads()} threads",
        device=device.type,
        memory=memory * GIB,
        peak={precision: peak},
        mfu={},
        program=CONTEXT_BYTES if cuda or program is None else program,
    )


def synthetic_batch(
    config: ModelConfig, lengths: Sequence[int], recipe: PretrainRecipe, max_predictions: int
) -> PretrainingBatch:
    """Build a pre-training batch of random ids and targets, in examples of the given lengths."""
    rng = np.random.default_rng(len(lengths))
    counts = [recipe.num_targets(n, max_predictions) for n in lengths]
    starts = np.cumsum([0, *lengths[:-1]])
    places = [
        start + rng.choice(length, min(count, length), replace=False)
        for start, length, count in zip(starts, lengths, counts, strict=True)
    ]
    positions = torch.from_numpy(np.concatenate(places))
    ids = rng.integers(0, config.vocab_size, sum(lengths))
    segments = np.concatenate([np.arange(n) * 2 >= n for n in lengths]).astype(np.int64)
    packed = from_arrays(ids, segments, np.asarray(lengths))
    labels = torch.from_numpy(rng.integers(0, 2, len(lengths)))
    return PretrainingBatch(packed, positions, packed.ids[positions], labels)


class Trial:
    """A network with few layers whose updates are timed."""

    def __init__(
        self, config: ModelConfig, recipe: PretrainRecipe, device: torch.device, layers: int
    ) -> None:
        training, self.layers, self.recipe = recipe.training, layers, recipe
        shallow = replace(config, num_hidden_layers=layers)
        self.model = PretrainingModel(shallow).to(device).train()
        self.optimizer = build_optimizer(
            self.model,
            learning_rate=1e-6,
            bias_correction=training.bias_correction,
            optimizer=training.optimizer,
        )
        self.settings = LoopSettings(
            device=device,
            precision=choose_precision(training.precision, device),
            seed=training.seed,
            max_gradient_norm=training.max_gradient_norm,
            learning_rate=lambda step: 1e-6,
        )

    def batch(self, lengths: Sequence[int], max_predictions: int) -> PretrainingBatch:
        """Build a batch of random ids, on the device."""
        drawn = synthetic_batch(self.model.config, lengths, self.recipe, max_predictions)
        return drawn.to(self.settings.device)

    def seconds(self, batch: PretrainingBatch) -> float:
        """Make one update and return its time in seconds."""
        synchronize(self.settings.device)
        started = time.perf_counter()
        for _ in train_steps(
            self.model, self.optimizer, pretraining_objective, [([batch], None)], self.settings
        ):
            synchronize(self.settings.device)
        return time.perf_counter() - started


def calibrate(
    config: ModelConfig,
    recipe: PretrainRecipe,
    wanted: Mapping[int, tuple[LengthSample, int, int]],
    device: torch.device,
    seconds: float,
    progress: Callable[[str], object] = lambda text: None,
) -> Speed:
    """Measure for some seconds, and extrapolate to any number of layers and tokens.

    `wanted` maps a length to (examples, sequences of a micro-batch, max_predictions).
    """
    deep = max(2, min(DEEP, config.num_hidden_layers))
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
    with own_random_numbers(device):  # the two networks serve all lengths
        trials = [Trial(config, recipe, device, layers) for layers in (1, deep)]
        for length, (examples, sequences, predictions) in wanted.items():
            progress(f"calibrating: updates at length {length}")
            share = seconds / len(wanted)
            first, last = measure_length(trials, examples, sequences, predictions, share)
            found[length] = first, np.maximum(0.0, last - first) / (deep - 1)

    def speed(length: int, layers: int, tokens: float) -> float:
        first, each = found[length]
        fixed, per_token = first + (layers - 1) * each
        return float(fixed + per_token * tokens)

    return speed


def measure_length(
    trials: Sequence[Trial],
    examples: LengthSample,
    sequences: int,
    max_predictions: int,
    seconds: float,
) -> list[np.ndarray]:
    """Fit the seconds of each network's updates: a constant, and a slope per token.

    Batches have the wanted size, or the largest that the time allows, and a quarter of it. Their
    updates alternate, so that a busy machine slows all of them. Every update has a new batch: as in
    training, nearly every batch has a different number of tokens.
    """

    def update(trial: Trial, count: int, seed: int) -> tuple[int, float]:
        batch = trial.batch(examples.draw(count, seed), max_predictions)
        return len(batch.packed.ids), trial.seconds(batch)

    end, small = time.perf_counter() + seconds, min(sequences, 4)
    update(trials[-1], small, 0)  # creates the optimizer's state
    affordable = int(small * seconds / ROUND / update(trials[-1], small, 1)[1])
    large = max(min(sequences, 2), min(sequences, affordable))
    points: list[list[tuple[int, float]]] = [[] for _ in trials]
    seed = 1
    while seed < 3 or time.perf_counter() < end:
        seed += 1
        for trial, seen in zip(trials, points, strict=True):
            seen += [update(trial, size, seed) for size in (large, max(1, large // 4))]
    return [fit_line(seen[2:]) for seen in points]  # without the first round, a warm-up


def fit_line(points: Sequence[tuple[int, float]]) -> np.ndarray:
    """Fit a constant and a slope, neither negative, to (tokens, seconds) by least squares.

    The fit is to the mean, not to the best or the median, because a run has disturbances, too.
    """
    tokens, seconds = np.asarray(points, dtype=np.float64).T
    slope, fixed = np.polyfit(tokens, seconds, 1) if np.ptp(tokens) else (0.0, -1.0)
    if fixed < 0:
        return np.array([0.0, seconds.sum() / tokens.sum()])
    return np.array([fixed, slope] if slope > 0 else [seconds.mean(), 0.0])


@dataclass(frozen=True, kw_only=True)
class PhasePlan:
    """One phase of a schedule on one machine."""

    length: int
    steps: int
    sequences: int
    """The number of sequences in an update."""
    fit: Fit
    tokens: float
    """The mean number of tokens in an update."""
    corpus_tokens: float
    """The tokens of the corpus that an update consumes; fewer than seen, as some are seen twice."""
    seconds: float
    """The seconds of an update."""
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
    """Plan one phase; `speed` is a measurement, or None to assume the machine's MFU."""
    precision = machine.precision(recipe.training.precision)
    length, sequences = recipe.phases.lengths[phase], recipe.phases.batch_sizes[phase]
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
        seconds = speed(length, config.num_hidden_layers, batch.tokens)
    specials = SPECIALS - (recipe.objectives.pair == "single-segment")
    return PhasePlan(
        length=length,
        steps=recipe.phases.steps[phase],
        sequences=sequences,
        fit=fit,
        tokens=batch.tokens,
        corpus_tokens=(batch.tokens - specials * sequences) / examples.epoch_tokens,
        seconds=seconds,
        tokens_per_second=batch.tokens / seconds,
        mfu=work / seconds / peak,
    )


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A schedule with its time, tokens, epochs and cost."""

    title: str
    steps: tuple[int, ...]
    """The number of updates in each phase."""
    seconds: float
    """The seconds of the updates alone, without evaluation, checkpoints and loading."""
    tokens: float
    epochs: float
    """The number of passes over the corpus."""
    cost: float | None
    """The cost in the currency of the price, or None without a price."""


def estimate_steps(
    title: str,
    phases: Sequence[PhasePlan],
    steps: Sequence[int],
    corpus_tokens: float,
    price: float | None,
) -> Estimate:
    """Estimate the given numbers of updates in each phase; `price` is that of an hour."""
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
    """Return the updates of each phase that fit into a budget, in the recipe's proportions."""
    share = hours * 3600 / sum(phase.steps * phase.seconds for phase in phases)
    steps = tuple(int(share * phase.steps) for phase in phases)
    if min(steps) == 0:
        least = max(1 / phase.steps for phase in phases) / share * hours
        raise BertkitError(
            f"--hours {hours:g} is too short for one update of each phase in the recipe's "
            f"proportion; that takes {least:.2g} hours"
        )
    return steps


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Everything that `bertkit plan` reports."""

    model: ModelConfig
    parameters: int
    """The number of parameters, including both heads."""
    precision: str
    machine: Machine
    corpus: str
    corpus_tokens: float
    phases: tuple[PhasePlan, ...]
    """The phases of the recipe."""
    answers: tuple[Estimate, ...]
    flags: tuple[str, ...] = ()
    """Flags for `bertkit pretrain` if the recipe would not fit or a budget was given."""
    assumed: tuple[str, ...] = ()


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
    """Plan a recipe and a budget of hours."""
    if recipe.objectives.token == "rtd":
        raise BertkitError(
            "a plan is for one network, and objectives.token = rtd trains two; plan the "
            "discriminator as a masked language model, and add a tenth to a third for the generator"
        )
    config, phases = recipe.config(corpus.vocabulary_size), recipe.phases
    fits = [
        fit_memory(config, recipe, phase, machine, corpus.tokens)
        for phase in range(len(phases.lengths))
    ]
    speed = None
    if device is not None:
        wanted: dict[int, tuple[LengthSample, int, int]] = {}
        for length, most, fit in zip(phases.lengths, phases.max_predictions, fits, strict=True):
            wanted.setdefault(length, (corpus.examples[length], fit.micro_batch, most))
        speed = calibrate(config, recipe, wanted, device, seconds, progress)
    planned = [
        plan_phase(config, recipe, phase, corpus.examples[length], machine, fit, speed)
        for phase, (length, fit) in enumerate(zip(phases.lengths, fits, strict=True))
    ]
    answers, flags = answer(recipe, planned, corpus.tokens, hours, price)
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
        phases=tuple(planned),
        answers=tuple(answers),
        flags=tuple(flags),
        assumed=tuple(assumed),
    )


def answer(
    recipe: PretrainRecipe,
    phases: Sequence[PhasePlan],
    tokens: float,
    hours: float | None,
    price: float | None,
) -> tuple[list[Estimate], list[str]]:
    """Return the estimates of the recipe and of the budget, and flags for `bertkit pretrain`."""
    title = "the recipe" + ", as in the paper" * (recipe.phases == Phases())
    answers = [estimate_steps(title, phases, recipe.phases.steps, tokens, price)]
    cut = max(phase.fit.micro_batches for phase in phases)
    if cut > (least := min(recipe.phases.batch_sizes)):
        raise BertkitError(
            f"the largest batch needs {cut} micro-batches, but the smallest has only {least} "
            "sequences; make phases.batch_sizes more alike"
        )
    flags = [f"--training.accumulate {cut}"] if cut > recipe.training.accumulate else []
    if hours is not None:
        steps = budget_steps(phases, hours)
        warmup = recipe.training.warmup_steps * sum(steps) // recipe.phases.total_steps
        answers.append(estimate_steps(f"{hours:g} hours", phases, steps, tokens, price))
        flags.append(f"--phases.steps {' '.join(map(str, steps))}")
        flags.append(f"--training.warmup-steps {warmup}")
    return answers, flags
