"""The settings of fine-tuning: those of a grid (paper section A.3), and those that runs share."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Integral

from bertkit.errors import BertkitError

BALANCED = "balanced"
ClassWeights = tuple[str, ...] | str | Mapping[str, float]
"""`BALANCED`, or label -> weight; as strings, LABEL=WEIGHT."""


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings that differ between the runs of a grid."""

    batch_size: int
    learning_rate: float
    epochs: int
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"b{self.batch_size}-lr{self.learning_rate:.12g}-e{self.epochs}-s{self.seed}"


@dataclass(frozen=True, kw_only=True)
class TrainingSettings:
    """The settings that all runs of a grid share."""

    warmup: float = 0.1
    """The share of the updates over which the learning rate rises; it then falls to 0."""
    weight_decay: float = 0.01
    """The weight decay, which does not apply to biases and LayerNorm."""
    max_gradient_norm: float = 1.0
    """The maximum gradient norm, to which gradients are clipped."""
    dropout: float | None = None
    """The dropout of the encoder and the head; by default that of the pre-trained model."""
    bias_correction: bool = True
    """False for the paper's variant of Adam, with which runs on small data often learn nothing."""
    precision: str = "auto"
    """fp32, bf16, bf16-residual (hidden states between layers, too), or auto: bf16 if the device
    computes it fast."""
    max_tokens: int = 16384
    """The maximum tokens per forward pass; larger batches are split, with the same result except
    for rounding and dropout."""
    eval_every: int = 0
    """Updates between evaluations on dev; 0 for one in each epoch. A stopped run resumes from its
    last evaluation."""
    early_stopping: int = 0
    """Stop a run after this many evaluations without a better score, and keep the model of its best
    evaluation; 0 trains to the end and keeps the last model."""
    class_weights: ClassWeights = ()
    """balanced, or LABEL=WEIGHT ...: factors of the classes' losses; classes that are not named
    have 1."""

    def __post_init__(self) -> None:
        """Check each value."""
        if not 0 <= self.warmup < 1:
            raise BertkitError(f"warmup is a share from 0 to below 1, not {self.warmup}")
        if not 0 <= (self.dropout or 0) < 1:
            raise BertkitError(f"dropout is a share from 0 to below 1, not {self.dropout}")
        if not 0 <= self.weight_decay < 1:
            raise BertkitError(f"weight_decay is from 0 to below 1, not {self.weight_decay}")
        if not 0 < self.max_gradient_norm < math.inf:
            raise BertkitError("max_gradient_norm must be above 0 and finite (1e9 clips nothing)")
        if self.max_tokens < 1:
            raise BertkitError("max_tokens must be above 0")
        if self.eval_every < 0 or self.early_stopping < 0:
            raise BertkitError("eval_every and early_stopping must be 0 or more")
        object.__setattr__(self, "class_weights", weight_settings(self.class_weights))


def weight_settings(given: ClassWeights) -> tuple[str, ...]:
    """Return class weights as they are recorded: "balanced", or LABEL=WEIGHT for each label."""
    if isinstance(given, Mapping):
        given = tuple(f"{label}={weight}" for label, weight in given.items())
    elif isinstance(given, str) or not isinstance(given, Iterable):
        given = () if given is None else (given,)
    listed = tuple(map(str, given))
    for one in () if listed == (BALANCED,) else listed:
        _, equals, weight = one.rpartition("=")
        try:
            usable = bool(equals) and 0 < float(weight) < math.inf
        except ValueError:
            usable = False
        if not usable:
            raise BertkitError(
                f"class_weights takes {BALANCED}, or LABEL=WEIGHT with a weight above 0, not "
                f"{one!r:.60}",
                code="class-weights",
            )
    return listed


RATES = ((1024, 2e-5), (768, 5e-5), (384, 1e-4), (256, 4e-4), (0, 5e-4))
"""(width, learning rate): the default rate for models of at least this width."""
FULL_WIDTH, TAGGING = 768, 2
"""For token classification, the factor of the rates of models that are narrower than BERT-base
(benchmarks/defaults.py)."""
NARROW_WIDTH, MANY_INPUTS = 384, 3_000
"""Models narrower than `NARROW_WIDTH` get half of the rate from `MANY_INPUTS` inputs on, which was
better on MRPC and on CoLA: at the whole rate one of two runs of CoLA learned nothing."""
BATCHES = ((5000, 32), (500, 16), (50, 8), (0, 4))
"""(training inputs, batch size): the default batch size for at least so many inputs."""
DEFAULT_EPOCHS, MAX_EPOCHS = 3, 20
MAX_RUNS = 100_000
MIN_UPDATES = 200
"""The default number of epochs grows from `DEFAULT_EPOCHS` to `MAX_EPOCHS` to make as many updates:
few inputs need more epochs (Mosbach et al. 2021, section 6)."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """A grid of settings, of which every combination is trained with every seed."""

    batch_size: tuple[int, ...] = ()
    """Inputs per update; by default 32, or fewer if there are fewer than 5,000 inputs. The paper
    tries 16 and 32."""
    learning_rate: tuple[float, ...] = ()
    """The peak learning rate; by default it is chosen by the model's width, from 2e-5 for 1024 and
    5e-5 for 768 to 5e-4 below 256, twice as much for tags below 768, and below 384 half as much for
    3,000 inputs or more. The paper tries 5e-5, 3e-5 and 2e-5."""
    epochs: tuple[int, ...] = ()
    """Passes over the training data; by default 3, or more (up to 20) until there are 200 updates.
    The paper tries 2, 3 and 4."""
    seeds: int = 1
    """The number of runs of each setting, with seeds 1, 2, ..."""

    def __post_init__(self) -> None:
        """Check each value."""
        for name in ("batch_size", "learning_rate", "epochs"):
            values = getattr(self, name)
            if getattr(values, "ndim", 0) == 1:  # an array of NumPy
                values = values.tolist()
            if not isinstance(values, Sequence):
                raise BertkitError(f"{name} takes several values: ({values!r},), not {values!r}")
            if any(isinstance(value, str) for value in values):
                raise BertkitError(f"{name} takes numbers, got {values}")
            if not all(0 < value < math.inf for value in values):
                raise BertkitError(f"{name} must be a finite number above 0, got {values}")
            if len({f"{value:.12g}" for value in values}) < len(values):
                raise BertkitError(f"{name} has a value twice; give each value once")
            kind = float if name == "learning_rate" else int
            if not all(value == kind(value) for value in values):
                raise BertkitError(f"{name} takes whole numbers, got {values}")
            object.__setattr__(self, name, tuple(kind(value) for value in values))
        if not isinstance(self.seeds, Integral) or isinstance(self.seeds, bool) or self.seeds < 1:
            raise BertkitError(f"seeds is a number of runs, at least 1, got {self.seeds!r}")
        object.__setattr__(self, "seeds", int(self.seeds))
        sizes = (self.batch_size, self.learning_rate, self.epochs)
        if self.seeds * math.prod(len(values) or 1 for values in sizes) > MAX_RUNS:
            raise BertkitError(f"a grid has at most {MAX_RUNS:,} runs; give fewer values or seeds")

    def chosen(self, width: int, inputs: int, task_type: str) -> Grid:
        """Return the grid with values for the fields that were not given.

        They depend on the hidden size of the model and on the number of training inputs, from many
        of which narrow models learn at a lower rate; and small models learn tags at a higher rate.
        """
        batch = self.batch_size or (next(batch for least, batch in BATCHES if inputs >= least),)
        own = next(rate for least, rate in RATES if width >= least)
        if task_type == "token-classification" and width < FULL_WIDTH:
            own *= TAGGING
        if width < NARROW_WIDTH and inputs >= MANY_INPUTS:
            own /= 2
        rate = self.learning_rate or (own,)
        needed = math.ceil(MIN_UPDATES / math.ceil(inputs / max(batch)))
        epochs = self.epochs or (min(MAX_EPOCHS, max(DEFAULT_EPOCHS, needed)),)
        return replace(self, batch_size=batch, learning_rate=rate, epochs=epochs)

    def reasons(self, width: int, inputs: int, task_type: str) -> list[str]:
        """Return a line that says what `chosen` fills in and why, or [] if it fills in nothing."""
        chosen, said = self.chosen(width, inputs, task_type), []
        if not self.learning_rate:
            fit = f"{task_type}, {inputs:,} inputs and a model of width {width}"
            said.append(f"learning rate {chosen.learning_rate[0]:g} for {fit}")
        if not self.batch_size:
            said.append(f"batch size {chosen.batch_size[0]} for {inputs:,} inputs")
        if not self.epochs:
            said.append(f"{chosen.epochs[0]} epochs")
        return [f"chosen: {', '.join(said)}"] if said else []

    def runs(self) -> list[RunSettings]:
        """Return all runs of a `chosen` grid: first each setting with seed 1, then with seed 2."""
        settings = itertools.product(
            range(1, self.seeds + 1), self.batch_size, self.learning_rate, self.epochs
        )
        return [
            RunSettings(seed=seed, batch_size=batch, learning_rate=rate, epochs=epochs)
            for seed, batch, rate, epochs in settings
        ]


ONE_RUN, USUAL = Grid(), TrainingSettings()


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """The runs to train and their settings."""

    grid: Grid = ONE_RUN
    """The grid of runs; a single run by default."""
    training: TrainingSettings = USUAL
    """The settings that all runs share."""
    new_head: bool = False
    """Initialise the head randomly even if the model has one for the same task and labels."""
    metric: str = ""
    """The dev score by which runs are compared and stopped early, such as macro_f1; by default the
    task's first."""
    device: str = "auto"
    """auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps."""
    track: tuple[str, ...] = ("tensorboard",)
    """Trackers that receive the records of every run: tensorboard (if it is installed), wandb,
    mlflow."""


SETTINGS = FinetuneSettings()
