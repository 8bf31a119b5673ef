"""How fast a machine trains: measured by short updates of a shallow network, or from a table.

Measured: real updates (`train_steps`) of networks of one and of four layers, of the wanted width
and vocabulary, on random ids. The seconds of an update are then fitted by

    (a + b (micro-batches - 1) + c tokens) + (a' + b' (micro-batches - 1) + c' tokens) (layers - 1)

where the first bracket is embeddings, the last layer, heads and their share of the optimizer, and
the second is one more layer. No coefficient is negative.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from bertkit.errors import BertkitError, nearest
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.objectives import pretraining_objective
from bertkit.planning.corpus import LengthSample
from bertkit.pretraining_data.batch import from_arrays
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.training.device import (
    choose_precision,
    cpu_model,
    matmul_peak,
    memory_gib,
    synchronize,
)
from bertkit.training.optimizer import build_optimizer
from bertkit.training.recipe import PretrainRecipe
from bertkit.training.step import LoopSettings, train_steps

GIB = 2**30
HERE = "here"
CONTEXT_BYTES = 0.6 * GIB
"""Assumed for the libraries on a GPU, or where the system does not tell."""
DEEP = 4
"""Layers of the deeper network. With two, noise would be multiplied by the number of layers."""
ROUND = 12.0
"""Seconds of a stretch over those of one large update of the deeper network, for 5 or 6 rounds."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What one device can do."""

    title: str
    device: str
    """cpu, cuda or mps."""
    memory: float
    """Bytes."""
    peak: Mapping[str, float]
    """FLOP/s of matrix products, by precision; one that it lacks is absent."""
    mfu: Mapping[str, float]
    """Assumed share of the peak, by precision; empty where it is measured."""
    program: float = CONTEXT_BYTES
    """Bytes taken by interpreter and libraries."""

    def precision(self, name: str) -> str:
        """The precision called `name`; "auto" is bf16 where the machine is made for it."""
        if name != "auto":
            return name
        return "bf16" if "bf16" in self.peak else "fp32"


def card(title: str, gib: int, *, bf16: float | None, fp32: float, mfu: float = 0.3) -> Machine:
    """A GPU by its data sheet; TFLOP/s of dense bf16 matrix units and of plain fp32."""
    peak = {"fp32": fp32 * 1e12} | ({} if bf16 is None else {"bf16": bf16 * 1e12})
    shares = {"bf16": mfu, "fp32": 0.6}
    return Machine(title=title, device="cuda", memory=gib * GIB, peak=peak, mfu=shares)


MACHINES = {
    "t4": card("NVIDIA T4", 15, bf16=None, fp32=8.1),
    "v100": card("NVIDIA V100 SXM2 16 GB", 16, bf16=None, fp32=15.7),
    "a10": card("NVIDIA A10", 22, bf16=125, fp32=31.2, mfu=0.4),
    "l4": card("NVIDIA L4", 22, bf16=121, fp32=30.3, mfu=0.4),
    "rtx-4090": card("NVIDIA RTX 4090", 24, bf16=165, fp32=82.6, mfu=0.35),
    "a100-40": card("NVIDIA A100 SXM 40 GB", 40, bf16=312, fp32=19.5),
    "a100-80": card("NVIDIA A100 SXM 80 GB", 79, bf16=312, fp32=19.5),
    "h100": card("NVIDIA H100 SXM", 79, bf16=989, fp32=66.9, mfu=0.25),
    "h200": card("NVIDIA H200 SXM", 139, bf16=989, fp32=66.9, mfu=0.25),
}
"""GPUs by name. Peaks are the makers'; every MFU is an assumption, none measured with bertkit."""


def find_machine(name: str, precision: str, mfu: float | None = None) -> Machine:
    """A machine of the table, with another MFU where one is given.

    Raises:
        BertkitError: no machine has that name, it lacks the precision, or the MFU is impossible.
    """
    if mfu is not None and not 0 < mfu <= 1:
        raise BertkitError(f"--mfu is a share of the peak, above 0 and at most 1, not {mfu}")
    if name not in MACHINES:
        raise BertkitError(f"no machine is called '{name}'{nearest(name, (*MACHINES, HERE))}")
    machine = MACHINES[name]
    precision = machine.precision(precision)
    if precision not in machine.peak:
        raise BertkitError(
            f"{machine.title} does not compute in {precision}; add --training.precision fp32"
        )
    return machine if mfu is None else replace(machine, mfu={precision: mfu})


def this_machine(device: torch.device, recipe: PretrainRecipe) -> Machine:
    """The machine that runs this, its peak measured in about half a second.

    Raises:
        BertkitError: the system does not tell how much memory there is.
    """
    memory, precision = memory_gib(device), choose_precision(recipe.training.precision, device)
    if memory is None:
        raise BertkitError("the system does not tell its memory; name a --machine instead")
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else cpu_model()
    peak = matmul_peak(device, precision, seconds=0.5)
    tiny = ModelConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=1,
        intermediate_size=128,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[device] if cuda else []):
        trial = Trial(tiny, recipe, device, layers=1)  # loads what every training process loads
        trial.seconds(synthetic_batch(tiny, [8, 6], recipe, 1).to(device))
    program = resident_bytes()
    return Machine(
        title=name if cuda else f"{name}, {torch.get_num_threads()} threads",
        device=device.type,
        memory=memory * GIB,
        peak={precision: peak},
        mfu={},
        program=CONTEXT_BYTES if cuda or program is None else program,
    )


def resident_bytes(field: str = "VmRSS") -> float | None:
    """Memory that this process holds (VmRSS) or held at most (VmHWM); None where none tells."""
    try:
        with open("/proc/self/status", encoding="ascii") as lines:  # noqa: PTH123
            found = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    except OSError:
        return None
    return float(found[0]) * 1024 if found else None


def synthetic_batch(
    config: ModelConfig, lengths: Sequence[int], recipe: PretrainRecipe, max_predictions: int
) -> PretrainingBatch:
    """A pre-training batch of random ids and targets, in examples of the given lengths."""
    rng = np.random.default_rng(len(lengths))
    counts = [recipe.targets_of(n, max_predictions) for n in lengths]
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
    """A shallow network and the time of its updates.

    Args:
        config: of the network.
        recipe: decides optimizer and precision.
        device: where.
        layers: of this network, in place of the config's.
    """

    def __init__(
        self, config: ModelConfig, recipe: PretrainRecipe, device: torch.device, layers: int
    ) -> None:
        training, self.layers = recipe.training, layers
        shallow = replace(config, num_hidden_layers=layers)
        self.model = PretrainingModel(shallow).to(device).train()
        self.optimizer = build_optimizer(
            self.model, learning_rate=1e-6, bias_correction=training.bias_correction
        )
        self.settings = LoopSettings(
            device=device,
            precision=choose_precision(training.precision, device),
            seed=training.seed,
            max_gradient_norm=training.max_gradient_norm,
            learning_rate=lambda step: 1e-6,
        )

    def seconds(self, batch: PretrainingBatch, micro_batches: int = 1) -> float:
        """Of one update."""
        synchronize(self.settings.device)
        started = time.perf_counter()
        steps = [([batch] * micro_batches, None)]
        for _ in train_steps(
            self.model, self.optimizer, pretraining_objective, steps, self.settings
        ):
            synchronize(self.settings.device)
        return time.perf_counter() - started


def cost_features(layers: int, micro_batches: int, tokens: float) -> list[float]:
    """What the coefficients of the module's formula are multiplied with, in order."""
    first = [1.0, micro_batches - 1.0, tokens]
    return [*first, *[(layers - 1) * value for value in first]]


def fit(points: Sequence[tuple[list[float], float]]) -> np.ndarray:
    """Coefficients, none negative, for (features, seconds), of least squared relative error.

    It is the mean that is wanted, not the best or the median: a run meets disturbances, too.
    """
    from scipy.optimize import nnls

    rows = np.asarray([values for values, _ in points]) / [[seconds] for _, seconds in points]
    scale = np.maximum(rows.max(axis=0), 1e-30)  # tokens are large and seconds small
    found, _ = nnls(rows / scale, np.ones(len(points)))
    return np.asarray(found / scale)


Speed = Callable[[int, int, int, float], float]
"""(length, layers, micro-batches, tokens in all of them) → seconds of an update."""


def calibrate(
    config: ModelConfig,
    recipe: PretrainRecipe,
    wanted: Mapping[int, tuple[LengthSample, int, int, int]],
    device: torch.device,
    seconds: float,
    progress: Callable[[str], object] = lambda text: None,
) -> Speed:
    """Measure for some seconds, and extrapolate to any number of layers and tokens.

    Args:
        config: the network that is planned.
        recipe: its optimizer, masks and precision.
        wanted: length → examples, sequences of a micro-batch, micro-batches, max_predictions.
        device: what is measured.
        seconds: for all lengths together, besides making the networks.
        progress: is told what is being measured.
    """
    # the global generator is a caller's; the two networks serve all lengths
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        layers = sorted({1, min(DEEP, config.num_hidden_layers)})
        trials = [Trial(config, recipe, device, count) for count in layers]
        found: dict[int, np.ndarray] = {}
        for length, (examples, sequences, micro_batches, predictions) in wanted.items():
            progress(f"calibrating: updates at length {length}")

            def batch(
                count: int, seed: int, sample: LengthSample = examples, most: int = predictions
            ) -> PretrainingBatch:
                return synthetic_batch(config, sample.draw(count, seed), recipe, most).to(device)

            share = seconds / len(wanted)
            found[length] = measure_length(trials, batch, sequences, micro_batches, share)

    def speed(length: int, layers: int, micro_batches: int, tokens: float) -> float:
        return float(found[length] @ cost_features(layers, micro_batches, tokens))

    return speed


def measure_length(
    trials: Sequence[Trial],
    batch: Callable[[int, int], PretrainingBatch],
    sequences: int,
    micro_batches: int,
    seconds: float,
) -> np.ndarray:
    """Coefficients at one length, from updates of the wanted batch or one that the time allows.

    Kinds of updates alternate, so that a busy machine slows all of them. Every update has a batch
    of its own: as in training, nearly each has a new number of tokens.

    Args:
        trials: the networks, the deepest last.
        batch: (sequences, seed) → a batch.
        sequences: of the wanted micro-batch.
        micro_batches: 1, or more if their cost is to be known.
        seconds: about how long to measure.
    """
    end, small = time.perf_counter() + seconds, min(sequences, 4)
    trials[-1].seconds(batch(small, 0))  # the first update makes the optimizer's state
    affordable = int(small * seconds / ROUND / trials[-1].seconds(batch(small, 1)))
    large = max(min(sequences, 2), min(sequences, affordable))
    sizes = sorted({large, max(1, large // 4)}, reverse=True)
    kinds = [(trial, size, 1) for trial in trials for size in sizes]
    if micro_batches > 1:
        kinds += [(trial, sizes[-1], 2) for trial in trials]
    points, seed = [], 1
    while seed < 3 or time.perf_counter() < end:
        seed += 1
        for trial, size, parts in kinds:
            drawn = batch(size, seed)
            row = cost_features(trial.layers, parts, parts * float(len(drawn.packed.ids)))
            points.append((row, trial.seconds(drawn, parts)))
    return fit(points[len(kinds) :])  # the first round chose kernels and made state
