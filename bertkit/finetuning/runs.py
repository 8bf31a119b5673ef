"""Runs of fine-tuning: their settings, alone or in a grid (paper section A.3), and results."""

from __future__ import annotations

import itertools
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertkit.errors import BertkitError, DivergedError
from bertkit.files import known_fields, read_object, sha256_file, write_json_lines
from bertkit.progress import counted

if TYPE_CHECKING:
    from bertkit.tasks.task import Task

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
    fold: int = 0
    """The fold that is held out, from 1; 0 if it is not one of several."""

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        setting = f"b{self.batch_size}-lr{self.learning_rate:.12g}-e{self.epochs}-s{self.seed}"
        return f"{setting}-f{self.fold}" if self.fold else setting


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
    """Updates between evaluations on dev; 0 for one in each epoch, or in several epochs if
    evaluating would take more than a tenth of training and nothing is stopped early."""
    early_stopping: int = 0
    """Stop a run after this many evaluations without a better score, and keep the model of its best
    evaluation; 0 trains to the end and keeps the last model."""
    class_weights: ClassWeights = ()
    """balanced, or LABEL=WEIGHT ...: factors of the classes' losses; classes that are not named
    have 1."""

    def __post_init__(self) -> None:
        shares = {
            "warmup": self.warmup,
            "dropout": self.dropout or 0,
            "weight_decay": self.weight_decay,
        }
        for name, value in shares.items():
            if not 0 <= value < 1:
                raise BertkitError(f"{name} is a share from 0 to below 1, not {value}")
        if not 0 < self.max_gradient_norm < math.inf or self.max_tokens < 1:
            raise BertkitError("max_gradient_norm and max_tokens must be above 0 and finite")
        if self.eval_every < 0 or self.early_stopping < 0:
            raise BertkitError("eval_every and early_stopping must be 0 or more")
        weights = self.class_weights
        if isinstance(weights, Mapping):
            weights = tuple(f"{label}={weight}" for label, weight in weights.items())
        listed = (weights,) if isinstance(weights, str) else tuple(map(str, weights or ()))
        object.__setattr__(self, "class_weights", listed)


RATES = ((1024, 2e-5), (768, 5e-5), (384, 1e-4), (256, 4e-4), (0, 5e-4))
"""(width, learning rate): the default rate for models of at least this width."""
FULL_WIDTH, TAGGING = 768, 2
"""For token classification, the factor of the rates of models that are narrower than BERT-base."""
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
    """Passes over the training data; by default 3, or more (up to 20) until there are 200 updates,
    and no more once a loss that is a cross entropy is below 0.01. The paper tries 2, 3 and 4."""
    seeds: int = 1
    """The number of runs of each setting, with seeds 1, 2, ..."""
    folds: int = 0
    """Score by cross-validation: a run for each of so many folds of the training data, then a model
    of the best setting that is trained on all of it. 0 for dev data."""

    def __post_init__(self) -> None:
        for name in ("batch_size", "learning_rate", "epochs"):
            values = getattr(self, name)
            if isinstance(values, str) or not hasattr(values, "__len__"):
                raise BertkitError(f"{name} takes several values: ({values!r},), not {values!r}")
            kind = float if name == "learning_rate" else int
            numbers = tuple(kind(value) for value in values)
            if numbers != tuple(values) or not all(0 < number < math.inf for number in numbers):
                raise BertkitError(f"{name} takes finite numbers above 0 ({kind.__name__})")
            if len({f"{number:.12g}" for number in numbers}) < len(numbers):
                raise BertkitError(f"{name} has a value twice; give each value once")
            object.__setattr__(self, name, numbers)
        if self.folds < 0 or self.folds == 1:
            raise BertkitError(f"folds are 2 or more, or 0 for none, not {self.folds}")
        sizes = (self.batch_size, self.learning_rate, self.epochs, range(self.folds))
        if not 0 < self.seeds * math.prod(len(values) or 1 for values in sizes) <= MAX_RUNS:
            raise BertkitError(f"a grid has 1 to {MAX_RUNS:,} runs; give other values or seeds")

    def chosen(self, width: int, inputs: int, task_type: str) -> Grid:
        """Return the grid with values for the fields that were not given.

        They depend on the hidden size of the model and on the number of training inputs, from many
        of which narrow models learn at a lower rate; and small models learn tags at a higher rate.
        """
        batch = self.batch_size or (next(batch for least, batch in BATCHES if inputs >= least),)
        default_rate = next(rate for least, rate in RATES if width >= least)
        if task_type == "token-classification" and width < FULL_WIDTH:
            default_rate *= TAGGING
        if width < NARROW_WIDTH and inputs >= MANY_INPUTS:
            default_rate /= 2
        rate = self.learning_rate or (default_rate,)
        needed = math.ceil(MIN_UPDATES / math.ceil(inputs / max(batch)))
        epochs = self.epochs or (min(MAX_EPOCHS, max(DEFAULT_EPOCHS, needed)),)
        return replace(self, batch_size=batch, learning_rate=rate, epochs=epochs)

    def reasons(self, width: int, inputs: int, task_type: str) -> list[str]:
        """Return a line that says what `chosen` fills in and why, or [] if it fills in nothing."""
        chosen, said = self.chosen(width, inputs, task_type), []
        if not self.learning_rate:
            fit = f"{task_type}, {counted(inputs, 'inputs')} and a model of width {width}"
            said.append(f"learning rate {chosen.learning_rate[0]:.3g} for {fit}")
        if not self.batch_size:
            said.append(f"batch size {chosen.batch_size[0]} for {counted(inputs, 'inputs')}")
        if not self.epochs:
            said.append(f"{chosen.epochs[0]} epochs")
        return [f"chosen: {', '.join(said)}"] if said else []

    def runs(self) -> list[RunSettings]:
        """Return all runs of a `chosen` grid: first each setting with seed 1, then with seed 2."""
        folds = range(1, self.folds + 1) if self.folds else (0,)
        settings = itertools.product(
            range(1, self.seeds + 1), self.batch_size, self.learning_rate, self.epochs, folds
        )
        return [
            RunSettings(seed=seed, batch_size=batch, learning_rate=rate, epochs=epochs, fold=fold)
            for seed, batch, rate, epochs, fold in settings
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
    random_init: bool = False
    """Initialise all weights randomly, for a baseline; only sizes and tokenizer are the model's."""
    metric: str = ""
    """The dev score by which runs are compared and stopped early, such as macro_f1; by default the
    task's first."""
    device: str = "auto"
    """auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps."""


SETTINGS = FinetuneSettings()


# Results -----------------------------------------------------------------------------------------

FRACTION = re.compile(r"(^|_)(accuracy|precision|recall|f1|exact|match|matthews|pearson|spearman)$")
SHOWN_SCORES = 5
FEW_INPUTS = 50
"""Scores of fewer inputs are shown with their uncertainty."""
Scores = dict[str, dict[str, float]]  # split -> metric -> value


@dataclass(frozen=True)
class RunResult:
    """The result of one run."""

    name: str
    settings: dict[str, Any]  # the fields of `RunSettings`
    scores: Scores  # the scores on the dev splits; {} if the run diverged
    metric: float | None  # the score by which runs are compared; None if the run diverged
    degenerate: str = ""  # why the run learned nothing; "" if it learned something
    seconds: float = 0.0
    threshold: float | None = None  # the one that was chosen on dev, of tasks with a threshold

    @property
    def setting(self) -> str:
        """The name of the run without its seed."""
        return self.name.rpartition("-s")[0]


@dataclass(frozen=True)
class FinetuneResult:
    """What `results.json` holds."""

    folder: Path
    best: RunResult
    runs: tuple[RunResult, ...]
    values: dict[str, Any]  # the content of the file

    @property
    def scores(self) -> Scores:
        """The scores of the best run on dev, and on test data with labels."""
        return dict(self.values["scores"])

    @property
    def model(self) -> Path:
        """The directory of the best model."""
        return self.folder / "model"


def read_run(path: Path) -> RunResult:
    """Read the `run.json` of a run of a grid."""
    try:
        return known_fields(RunResult, read_object(path))
    except TypeError:
        raise BertkitError(f"{path} is damaged; delete it to repeat the run") from None


LATER_RESULTS: dict[str, Any] = {"task_type": "", "labels": [], "baseline": {}, "settings": []}
LATER_RESULTS |= {"training": {}, "environment": {"command": ""}}
"""What `results.json` of earlier versions lacks."""


def read_results(folder: Path) -> FinetuneResult:
    """Read the `results.json` of a finished folder."""
    path = folder / "results.json"
    values = LATER_RESULTS | read_object(path)
    try:
        runs = tuple(known_fields(RunResult, run) for run in values["runs"])
        best = next(run for run in runs if run.name == values["best"])
    except (TypeError, KeyError, StopIteration):
        raise BertkitError(f"{path} is damaged; delete it and fine-tune again") from None
    return FinetuneResult(folder, best, runs, values)


def is_finished(folder: Path) -> bool:
    """Return whether the runs of a folder have ended with results and a model."""
    return (folder / "results.json").is_file() and (folder / "model").is_dir()


def unfinished_parts(folder: Path) -> list[Path]:
    """Return the folders in a fine-tuning folder that only unfinished runs need."""
    patterns = ("checkpoints", "runs/*/checkpoints", "runs/*/model")
    return [path for pattern in patterns for path in folder.glob(pattern)]


def finished_result(folder: Path, command: str) -> FinetuneResult | None:
    """Return the result of a folder that this command finished, if no file has changed since."""
    if unfinished_parts(folder) or not is_finished(folder):
        return None
    result = read_results(folder)
    same = result.values["environment"]["command"].partition(" ")[2] == command
    files = {Path(p): digest for p, digest in result.values.get("digests", {}).items()}
    if not (same and files) or any(not p.is_file() or sha256_file(p) != files[p] for p in files):
        return None
    return result


def best_run(results: Sequence[RunResult]) -> RunResult:
    """Return the run with the highest metric, the first of equals; degenerate ones come last."""
    usable = [result for result in results if result.metric is not None]
    if not usable:
        raise DivergedError("every run diverged; lower the learning rate or raise the warm-up")
    return min(usable, key=lambda result: (bool(result.degenerate), -(result.metric or 0.0)))


def grid_summary(results: Sequence[RunResult]) -> list[dict[str, Any]]:
    """Summarize each setting: its runs, how many failed, and the median and spread of scores."""
    rows = []
    for setting in dict.fromkeys(result.setting for result in results):
        runs = [result for result in results if result.setting == setting]
        scored = [result for result in runs if result.scores]
        row: dict[str, Any] = {
            "setting": setting,
            "runs": len(runs),
            "diverged": len(runs) - len(scored),
            "degenerate": sum(bool(result.degenerate) for result in scored),
            "scores": {},
        }
        for split in scored[0].scores if scored else {}:
            for metric in scored[0].scores[split]:
                if all(metric in result.scores[split] for result in scored):  # entity types vary
                    values = [result.scores[split][metric] for result in scored]
                    row["scores"].setdefault(split, {})[metric] = metric_spread(values)
        rows.append(row)
    return rows


def metric_spread(values: Sequence[float]) -> dict[str, float | None]:
    """Return mean, median, range and standard deviation; a single value has no deviation."""
    return {
        "mean": statistics.fmean(values),
        "median": statistics.median(values),
        "lowest": min(values),
        "highest": max(values),
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
    }


def write_results(
    name: str, split: str, folder: Path, inputs: Sequence[Any], results: Sequence[Any]
) -> list[Path]:
    """Write FOLDER/SPLIT.jsonl, an object for each input, and the official files of the set."""
    from bertkit.tasks.official import write_official  # imports torch

    path = folder / f"{split}.jsonl"
    rows = []
    for example, result in zip(inputs, results, strict=True):
        rows.append({"id": example.id, **result.to_dict()})
        if hasattr(example, "pair"):  # readers want the texts next to a prediction
            rows[-1] |= {"gold": example.gold, "text": example.text, "pair": example.pair}
    write_json_lines(path, rows)
    ids = [example.id for example in inputs]
    return [path, *write_official(name, split, folder, ids, results)]


def labelled_part(
    inputs: Sequence[Any], results: Sequence[Any]
) -> tuple[list[Any], list[Any], list[str]]:
    """Return the labelled inputs, their results, and a note if some have no label."""
    known = [number for number, example in enumerate(inputs) if example.gold is not None]
    lost = len(inputs) - len(known)
    note = [f"without a label, so not scored: {lost:,} of {len(inputs):,} inputs"] if lost else []
    return [inputs[i] for i in known], [results[i] for i in known], note


def fold_means(results: Sequence[RunResult], metric: str) -> RunResult:
    """Return the means of the folds of the best setting, as a run of all inputs without a seed."""
    scored = [row for row in grid_summary(results) if row["scores"]]
    best = max(scored, key=lambda row: row["scores"]["dev"][metric]["mean"])
    runs = [result for result in results if result.setting == best["setting"] and result.scores]
    run = RunSettings(**{**runs[0].settings, "fold": 0})
    means = {name: spread["mean"] for name, spread in best["scores"]["dev"].items()}
    degenerate = runs[0].degenerate if all(result.degenerate for result in runs) else ""
    thresholds = [result.threshold for result in runs if result.threshold is not None]
    threshold = statistics.fmean(thresholds) if thresholds else None
    scores, main = {"dev": means}, means[metric]
    return RunResult(run.name, asdict(run), scores, main, degenerate, 0.0, threshold)


# Texts --------------------------------------------------------------------------------------------


def is_fraction(metric: str) -> bool:
    """Return whether a metric, such as "macro_f1" or "f1/PER", is a fraction, shown in percent."""
    return FRACTION.search(metric.partition("/")[0]) is not None


def score_text(metric: str, value: float) -> str:
    """Format a score: fractions in percent, other values as numbers."""
    return f"{value:.1%}" if is_fraction(metric) else f"{value:.4g}"


def scores_text(scores: dict[str, float], main: str = "") -> str:
    """Format the main metric, if there is one, and the first few other scores."""
    overall = (name for name in scores if "/" not in name or name == main)
    names = sorted(overall, key=lambda name: name != main)
    return ", ".join(f"{name} {score_text(name, scores[name])}" for name in names[:SHOWN_SCORES])


def main_interval(task: Task, scores: dict[str, float], inputs: int) -> list[float] | None:
    """Return the 95 % interval (Wilson's, or Fisher's of correlations) of the main score of few."""
    if not 0 < inputs < FEW_INPUTS:
        return None
    value = scores[task.metric]
    if task.metric in ("matthews", "pearson", "spearman"):
        half = 1.96 / max(inputs - 3, 0.1) ** 0.5
        middle = math.atanh(min(max(value, -0.9999), 0.9999))
        return [math.tanh(middle - half), math.tanh(middle + half)]
    squared = 1.96**2 / inputs
    middle, half = value + squared / 2, math.sqrt(squared * (value * (1 - value) + squared / 4))
    return [(middle - half) / (1 + squared), (middle + half) / (1 + squared)]


def score_remarks(
    task: Task, split: str, inputs: Sequence[Any], results: Sequence[Any], scores: dict[str, float]
) -> list[str]:
    """Say how uncertain the main score of few inputs is, and of how many labels macro F1 is."""

    def names(values: Iterable[Any]) -> set[str]:
        return {n for value in values for n in (value if isinstance(value, tuple) else (value,))}

    said, metric, golds = [], task.metric, names(map(task.gold_value, inputs))
    if interval := main_interval(task, scores, len(inputs)):
        low, high = (score_text(metric, end) for end in interval)
        said.append(
            f"{split} has only {counted(len(inputs), 'inputs')}: {metric} is {low} to {high} with "
            "95 % confidence; finetune --folds 5 scores all training data"
        )
    if "macro_f1" in scores and (lacking := {*task.labels} - golds):
        occurring = golds | names(map(task.answer_value, results))
        said.append(
            f"{split} lacks {len(lacking):,} of {len(task.labels):,} labels, such as "
            f"{min(lacking)!r}: macro_f1 is over {len(occurring):,}"
        )
    return said


def run_text(result: RunResult, main: str = "") -> str:
    """Describe a run in one line, beginning with its main metric."""
    flag = f" [degenerate: {result.degenerate}]" if result.degenerate else ""
    scores = "; ".join(f"{split} {scores_text(v, main)}" for split, v in result.scores.items())
    return f"{result.name}: {scores or 'no score'} ({result.seconds:.0f} s){flag}"


def finished_text(result: FinetuneResult) -> str:
    """Say that a folder is finished, with its best run and the scores of all splits."""
    best = replace(result.best, scores=result.best.scores | result.values["scores"])
    return f"{result.folder} is finished; best: {run_text(best, result.values['metric'])}"


def setting_text(row: dict[str, Any], main: str) -> str:
    """Describe a setting in one line, with median and range of its main metric."""
    parts = []
    for split, metrics in row["scores"].items():
        spread = metrics.get(main) or next(iter(metrics.values()))
        kinds = ("mean", "median", "lowest", "highest")
        mean, median, low, high = (score_text(main, spread[kind]) for kind in kinds)
        parts.append(f"{split} {main} mean {mean}, median {median} ({low} to {high})")
    failed = f", {row['degenerate']} degenerate" if row["degenerate"] else ""
    failed += f", {row['diverged']} diverged" if row["diverged"] else ""
    return f"{row['setting']}, n={row['runs']}{failed}: {', '.join(parts)}"
