"""The pre-training recipe: every field of the TOML file, and the reading of such files.

The defaults are those of the paper's BERT-base (section 3.1 and appendix A.2). Every field is also
a flag of the command line.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_origin, get_type_hints

from bertkit.errors import BertkitError, check_known, nearest
from bertkit.files import dotted_values, matches_type
from bertkit.pretraining_data.examples import (
    PAIR_OBJECTIVES,
    TOKEN_OBJECTIVES,
    MaskingOptions,
    PairOptions,
)

if TYPE_CHECKING:
    from torch import nn

    from bertkit.model.encoder import ModelConfig
    from bertkit.model.heads import Sums


OPTIMIZERS = ("adamw", "muon")
SCHEDULES = ("linear", "original", "constant")


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The size of the network; its vocabulary comes from the store's tokenizer."""

    hidden_size: int = 768
    """Width of a hidden state (H in the paper)."""
    num_hidden_layers: int = 12
    """Layers (L in the paper)."""
    num_attention_heads: int = 12
    """Attention heads (A in the paper)."""
    max_position_embeddings: int = 512
    """Maximum sequence length of the model, in tokens."""
    dropout: float = 0.1
    """Dropout of hidden states and of attention weights."""
    initializer_range: float = 0.02
    """Standard deviation of new weights, truncated at two. 0.02 suits widths of 768 and 1024; in
    narrow networks it keeps attention nearly uniform for a long time."""
    embedding_size: int = 0
    """Width of the embeddings if it differs from that of hidden states (ALBERT), else 0."""
    share_layers: bool = False
    """Whether all layers share their weights (ALBERT)."""

    def config(self, vocabulary_size: int, *, direction: str = "bidirectional") -> ModelConfig:
        """Return the model configuration; feed-forward layers have four times the hidden size."""
        from bertkit.model.encoder import ModelConfig

        same = {name: value for name, value in vars(self).items() if name != "dropout"}
        return ModelConfig(
            vocab_size=vocabulary_size,
            intermediate_size=4 * self.hidden_size,
            hidden_dropout_prob=self.dropout,
            attention_probs_dropout_prob=self.dropout,
            direction=direction,
            **same,
        )


@dataclass(frozen=True, kw_only=True)
class Phases:
    """The phases of training (A.2): each list has one entry for each phase."""

    lengths: tuple[int, ...] = (128, 512)
    """Maximum length of an example in each phase, in tokens."""
    steps: tuple[int, ...] = (900_000, 100_000)
    """Updates in each phase."""
    batch_sizes: tuple[int, ...] = (256, 256)
    """Sequences per update in each phase."""
    max_predictions: tuple[int, ...] = (20, 77)
    """Maximum number of masked tokens per sequence in each phase."""
    copy_positions: bool = True
    """Whether the positions that a longer phase adds begin as copies of earlier ones, which are
    trained, instead of random vectors (not with --init-from)."""

    def __post_init__(self) -> None:
        lists = (self.lengths, self.steps, self.batch_sizes, self.max_predictions)
        if len({len(values) for values in lists}) != 1 or not self.lengths:
            raise BertkitError(
                "phases: lengths, steps, batch_sizes and max_predictions need one entry for each "
                f"phase, got {', '.join(str(len(values)) for values in lists)} entries"
            )
        if min(min(values) for values in lists) < 1:
            raise BertkitError("phases: all values must be at least 1")

    @property
    def total_steps(self) -> int:
        """The number of updates over all phases."""
        return sum(self.steps)

    def locate(self, done: int) -> tuple[int, int]:
        """Return (phase, updates made within it) after `done` updates in total."""
        for phase, steps in enumerate(self.steps):
            if done < steps:
                return phase, done
            done -= steps
        return len(self.steps), 0


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """The pre-training objectives (paper sections 3.1 and 5.1).

    | `token` | model         | a target is                                      |
    |---------|---------------|--------------------------------------------------|
    | mlm     | bidirectional | the token that was masked (task 1)               |
    | clm     | left to right | the next token (section 5.1)                     |
    | rtd     | bidirectional | whether the token was replaced (`model.heads`) |

    | `pair`         | B                                              | loss          |
    |----------------|------------------------------------------------|---------------|
    | nsp            | what follows A, or half the time a random text | NSP, task 2   |
    | sop            | what follows A, or the two swapped (ALBERT)    | SOP           |
    | none           | as with nsp                                    | none          |
    | single-segment | empty: A is as many sentences as fit           | none          |
    """

    token: str = "mlm"
    """Token objective: mlm, clm (left to right) or rtd (ELECTRA)."""
    pair: str = "nsp"
    """Pair objective: nsp, sop, none or single-segment."""
    generator_share: float = 1 / 3
    """For rtd: width of the generator as a fraction of the model's width."""

    def __post_init__(self) -> None:
        for name, known in (("token", TOKEN_OBJECTIVES), ("pair", PAIR_OBJECTIVES)):
            value = getattr(self, name)
            if value not in known:
                raise BertkitError(
                    f"objectives.{name} cannot be {value!r}{nearest(str(value), known)}"
                )
        if self.token == "rtd" and self.has_pairs:
            raise BertkitError(
                "objectives.token = rtd needs objectives.pair = none or single-segment"
            )
        if not 0 < self.generator_share <= 1:
            raise BertkitError(
                f"objectives.generator_share must be above 0, at most 1, not {self.generator_share}"
            )

    @property
    def has_pairs(self) -> bool:
        """Whether sentence pairs contribute a loss."""
        return self.pair in ("nsp", "sop")

    @property
    def direction(self) -> str:
        """The direction of the model's attention: one of `DIRECTIONS`."""
        return "left_to_right" if self.token == "clm" else "bidirectional"

    def model(self, config: ModelConfig) -> nn.Module:
        """Return a new network for these objectives, initialized by torch's random generator."""
        if self.token == "rtd":
            from bertkit.model.heads import ReplacedTokenModel

            return ReplacedTokenModel(config, self.generator_share)
        from bertkit.model.heads import PretrainingModel

        return PretrainingModel(config, pairs=self.has_pairs)

    def function(self) -> Callable[..., Sums]:
        """Return the loss function of these objectives: (model, batch) → sums."""
        from bertkit.model.heads import pretraining_objective, replaced_objective

        if self.token == "rtd":
            return replaced_objective
        token = "mlm" if self.direction == "bidirectional" else "lm"
        return partial(
            pretraining_objective, token=token, pair="sop" if self.pair == "sop" else "nsp"
        )


@dataclass(frozen=True, kw_only=True)
class Training:
    """The optimizer and the learning-rate schedule (A.2)."""

    optimizer: str = "adamw"
    """adamw, or muon (Jordan et al. 2024), which learns faster: it orthogonalizes the updates of
    the layers' weight matrices and leaves the other parameters to adamw."""
    learning_rate: float = 1e-4
    """Peak learning rate, reached at the end of the warm-up."""
    warmup_steps: int = 10_000
    """Updates until the peak."""
    schedule: str = "linear"
    """linear (decays to 0 from the peak), original (as in Google's code) or constant."""
    weight_decay: float = 0.01
    """Weight decay, which excludes biases and LayerNorm."""
    bias_correction: bool = True
    """Whether Adam corrects the bias of its averages; Google's code does not."""
    max_gradient_norm: float = 1.0
    """Maximum gradient norm; larger gradients are scaled down to it."""
    accumulate: int = 1
    """Micro-batches per update: less memory for the same gradients, except for dropout masks."""
    precision: str = "auto"
    """fp32, bf16 (autocast), bf16-residual (hidden states between layers, too, which is faster on
    a GPU), or auto: bf16 if the device has instructions for it."""
    seed: int = 0
    """Random seed of the weights, examples, masks and dropout."""

    def __post_init__(self) -> None:
        limits = {
            "optimizer": (self.optimizer in OPTIMIZERS, " or ".join(OPTIMIZERS)),
            "learning_rate": (0 < self.learning_rate < math.inf, "above 0"),
            "max_gradient_norm": (
                0 < self.max_gradient_norm < math.inf,
                "above 0 and finite (1e9 clips nothing)",
            ),
            "weight_decay": (0 <= self.weight_decay < 1, "from 0 to below 1"),
            "accumulate": (self.accumulate >= 1, "at least 1"),
            "warmup_steps": (self.warmup_steps >= 0, "at least 0"),
            "seed": (0 <= self.seed < 1 << 31, "from 0 to below 2^31"),
        }
        for name, (good, wanted) in limits.items():
            if not good:
                raise BertkitError(f"training.{name} must be {wanted}, not {getattr(self, name)!r}")


@dataclass(frozen=True, kw_only=True)
class Logging:
    """How often a run logs, evaluates and saves, in updates."""

    log_every: int = 50
    """Updates between records in the journal."""
    evaluate_every: int = 1000
    """Updates between evaluations on held-out documents."""
    held_out_sequences: int = 2048
    """Sequences in each evaluation."""
    checkpoint_every: int = 1000
    """Updates between checkpoints; the newest two are kept."""


@dataclass(frozen=True, kw_only=True)
class PretrainRecipe:
    """Every setting of a pre-training run except its corpus."""

    model: ModelSize = field(default_factory=ModelSize)
    phases: Phases = field(default_factory=Phases)
    objectives: Objectives = field(default_factory=Objectives)
    masking: MaskingOptions = field(default_factory=MaskingOptions)
    training: Training = field(default_factory=Training)
    logging: Logging = field(default_factory=Logging)

    def __post_init__(self) -> None:
        max_length = max(self.phases.lengths)
        if max_length > self.model.max_position_embeddings:
            raise BertkitError(
                f"phases.lengths has {max_length}, but model.max_position_embeddings is only "
                f"{self.model.max_position_embeddings}; raise it or shorten the examples"
            )
        for length in self.phases.lengths:
            PairOptions(max_length=length, pair=self.objectives.pair)
        if min(self.phases.batch_sizes) < self.training.accumulate:
            raise BertkitError(
                f"phases.batch_sizes has {min(self.phases.batch_sizes)} sequences, too few for "
                f"training.accumulate = {self.training.accumulate} micro-batches"
            )
        if self.model != ModelSize():  # the defaults are valid, and `--help` must not import torch
            self.config(vocabulary_size=1)
        self.learning_rate(0)  # rejects an invalid schedule before the run starts
        for name, value in vars(self.logging).items():
            if value < 1:
                raise BertkitError(f"logging.{name} must be at least 1, not {value}")

    def config(self, vocabulary_size: int) -> ModelConfig:
        """Return the network's configuration."""
        return self.model.config(vocabulary_size, direction=self.objectives.direction)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of the update that follows `step` updates."""
        return learning_rate(
            step,
            peak=self.training.learning_rate,
            warmup_steps=self.training.warmup_steps,
            total_steps=self.phases.total_steps,
            schedule=self.training.schedule,
        )


def shipped_recipes() -> dict[str, Path]:
    """Return the recipes that are part of the package, by name."""
    folder = Path(str(resources.files("bertkit"))) / "recipes"
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_recipe(name: str, beside: Path = Path()) -> Path:
    """Return the path of a recipe from its path, or from the name of a shipped recipe."""
    if name.endswith(".toml"):
        if (beside / name).is_file():
            return beside / name
        raise BertkitError(f"there is no recipe file {beside / name}; check the path")
    recipes = shipped_recipes()
    if name not in recipes:
        raise BertkitError(
            f"give the path of a .toml file, or another name; no recipe is called "
            f"'{name}'{nearest(name, recipes)}"
        )
    return recipes[name]


def read_recipe(name: str | Path, overrides: Mapping[str, Any] | None = None) -> PretrainRecipe:
    """Read and validate a recipe: a path that ends in .toml, or the name of a shipped recipe.

    A recipe may say `extends = "base"`, the name of another recipe or a path beside it, whose
    values it changes. `overrides` are values by dotted name, such as {"model.hidden_size": 64}.

    Raises:
        BertkitError: there is no such recipe, a field is unknown, or a value is impossible or of
            the wrong type; the message names the file and the field.
    """
    values: dict[str, tuple[Any, str]] = {}
    path, seen = find_recipe(str(name)), set[Path]()
    while True:
        try:
            content = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise BertkitError(f"cannot read {path}: {error.strerror}") from None
        except (ValueError, RecursionError) as error:  # not UTF-8 or TOML, or too long or deep
            raise BertkitError(f"{path} is not valid TOML: {error}") from None
        base = content.pop("extends", None)
        for field_name, value in dotted_values(content):
            values.setdefault(field_name, (value, str(path)))
        seen.add(path.resolve())
        if base is None:
            break
        path = find_recipe(str(base), path.parent)
        if path.resolve() in seen:
            raise BertkitError(f"{path} extends itself; remove an `extends`")
    values |= {name: (value, "the recipe") for name, value in (overrides or {}).items()}
    return build_recipe(values)


def build_recipe(values: Mapping[str, tuple[Any, str]]) -> PretrainRecipe:
    """Build a recipe from (value, where it stands) by dotted name, after checking all types."""
    groups = get_type_hints(PretrainRecipe)
    types = {f"{g}.{n}": t for g, kind in groups.items() for n, t in get_type_hints(kind).items()}
    fields: dict[str, dict[str, Any]] = {}
    for name, (value, source) in values.items():
        if name not in types:
            raise BertkitError(f"{source}: there is no field '{name}'{nearest(name, types)}")
        hint = types[name]
        if not matches_type(value, hint):
            expected = TYPE_NAMES[get_origin(hint) or hint]
            raise BertkitError(f"{source}: {name} must be {expected}, not {value!r}")
        group, _, field_name = name.partition(".")
        converted = tuple(value) if get_origin(hint) is tuple else value
        converted = float(value) if hint is float else converted
        fields.setdefault(group, {})[field_name] = converted
    return PretrainRecipe(**{group: groups[group](**fields[group]) for group in fields})


TYPE_NAMES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text in quotes",
    tuple: "a list, as in [1, 2]",
}
"""Types of recipe fields, as messages call them."""


def learning_rate(
    step: int, *, peak: float, warmup_steps: int, total_steps: int, schedule: str = "linear"
) -> float:
    """Return the learning rate of one update (paper section A.2).

    `step` is the number of updates already made: 0 for the first, total_steps - 1 for the last.

    - "linear": warm-up peak * (step + 1) / warmup_steps for step < warmup_steps, so that the first
      update is not wasted on a rate of 0 and update number warmup_steps has the peak; then
      peak * (total_steps - step) / (total_steps - warmup_steps), which is the peak at
      step = warmup_steps and would be 0 at step = total_steps.
    - "original": Google's. Warm-up peak * step / warmup_steps, whose first update has rate 0; then
      peak * (1 - step / total_steps), a decay that counts from step 0, so at the end of the
      warm-up the rate drops by peak * warmup_steps / total_steps.
    - "constant": the warm-up of "linear", then the peak.

    From step = total_steps on, "linear" and "original" are 0.
    """
    check_known("schedule", schedule, SCHEDULES)
    if not 0 <= warmup_steps < total_steps:
        raise BertkitError(
            f"the warm-up of {warmup_steps} steps must end before the {total_steps} steps of "
            "training do; shorten the warm-up or train longer"
        )
    if step < warmup_steps:
        return peak * (step if schedule == "original" else step + 1) / warmup_steps
    if schedule == "constant":
        return peak
    remaining = max(0, total_steps - step)
    return peak * remaining / (total_steps - (0 if schedule == "original" else warmup_steps))
