"""The start of a pre-training run: its folder, its network, and where it left off."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import as_json, claim, differences, exclusive_lock, read_optional, write_json
from bertkit.model.encoder import ModelConfig
from bertkit.pretraining_data.examples import PairStatistics, measure_pairs
from bertkit.pretraining_data.loader import START, DataPosition, ExampleSampler
from bertkit.processes import usable_cores
from bertkit.progress import Console, Journal
from bertkit.training.device import device_notes, environment, matmul_peak
from bertkit.training.distributed import Ranks
from bertkit.training.optimizer import (
    AdamW,
    build_optimizer,
    load_checkpoint,
    load_latest,
    restore_training,
    trainable_parameters,
)
from bertkit.training.recipe import ModelSize, PretrainRecipe
from bertkit.training.step import compile_training

if TYPE_CHECKING:
    from bertkit.checkpoints.pretrained import PretrainedWeights
    from bertkit.tokenizer.wordpiece import Tokenizer

GPU_WORKERS = 4
"""The default number of loader processes of a rank that trains on a GPU."""
ENVIRONMENT = "environment.json"


@dataclass(kw_only=True)
class Run:
    """A run on one rank: its settings, and the network in training with its progress."""

    recipe: PretrainRecipe
    recipe_name: str
    store: TokenStore
    folder: Path
    ranks: Ranks
    device: torch.device
    precision: str
    workers: int
    save_models_at: frozenset[int]
    console: Console
    initial: PretrainedWeights | None
    model: Any = None
    optimizer: AdamW | Any = None
    loss_fn: Callable[..., Any] | Any = None
    """(model, batch) → sums; compiled if that was requested, and only for training."""
    step: int = 0
    """The number of updates made."""
    position: DataPosition = START
    """The position of the next example of the phase."""

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a global batch, over all ranks."""
        return self.ranks.micro_batches(self.recipe.training.accumulate)

    @property
    def rounding_settings(self) -> dict[str, Any]:
        """The settings that affect how an update is rounded."""
        return {"micro_batches": self.micro_batches, "precision": self.precision}

    @cached_property
    def matmul_peak(self) -> float:
        """FLOP/s of matrix products on this device, against which the MFU is measured."""
        return matmul_peak(self.device, self.precision, seconds=0.3)

    def smaller_micro_batches(self, lengths: Sequence[int]) -> str:
        """Return advice for a micro-batch, of these lengths, that does not fit into memory."""
        if len(lengths) == 1:
            return "try shorter sequences or a smaller network"
        return (
            f"try training.accumulate = {2 * self.micro_batches} in a new --out (micro-batches of "
            f"{-(-len(lengths) // 2)} sequences)"
        )


def default_workers(device: torch.device) -> int:
    """Return the number of loader processes: 0 on a CPU, and on a GPU what the cores allow."""
    if device.type == "cpu":
        return 0
    each = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(0, min(GPU_WORKERS, each - 1))


def check_initial_model(
    initial: PretrainedWeights, recipe: PretrainRecipe, tokenizer: Tokenizer
) -> None:
    """Raise a BertkitError unless a run can begin with the weights of a model."""
    path, config, objectives = initial.path, initial.config, recipe.objectives
    if config.type_vocab_size == 1 and objectives.pair != "single-segment":
        raise BertkitError(
            f"{path} has one segment (type_vocab_size 1), and training examples have two; give "
            "--objectives.pair single-segment"
        )
    if initial.tokenizer.content_hash != tokenizer.content_hash:
        home = path / "model" if (path / "model").is_dir() else path  # of a run
        raise BertkitError(
            f"{path} has another tokenizer than the store; prepare the text with --tokenizer {home}"
        )
    if config.direction != objectives.direction:
        raise BertkitError(
            f"{path} is {config.direction} and the recipe's objectives.token = {objectives.token} "
            f"trains a {objectives.direction} model; choose the same direction"
        )
    if (longest := max(recipe.phases.lengths)) > (positions := config.max_position_embeddings):
        raise BertkitError(
            f"{path} has {positions} positions, and phases.lengths has {longest}; give lengths of "
            f"at most {positions} (--phases.lengths)",
            code="number",
        )


def with_sizes(recipe: PretrainRecipe, config: ModelConfig) -> PretrainRecipe:
    """Return a recipe with the sizes of a network; dropout stays that of the recipe."""
    names = [name for name in ModelSize.__dataclass_fields__ if name != "dropout"]
    sizes = {name: getattr(config, name) for name in names}
    return replace(recipe, model=replace(recipe.model, **sizes))


def claim_folder(run: Run, held: ExitStack) -> list[str]:
    """Lock the run directory until `held` is closed, and write down what is run in it.

    Returns:
        The changes of logging settings, software and hardware since the run was started, on rank 0.
    """
    ranks, folder = run.ranks, run.folder
    settings: dict[str, Any] = {
        "recipe": as_json(run.recipe),
        "recipe_name": run.recipe_name,
        "store": str(run.store.folder),
        "tokenizer_hash": run.store.tokenizer_hash,
        "corpus": run.store.content_hash,
        **({"init_from": run.initial.digest} if run.initial else {}),
    }

    def work() -> list[str]:
        # of several ranks, one that was replaced after it lost its connection may still be saving
        held.enter_context(exclusive_lock(folder, ranks.timeout / 2 if ranks.world > 1 else 0.0))
        may_change = {"store", "recipe_name", "recipe.logging"}
        begun = claim(folder, "pre-training run", settings, may_change=may_change)
        changes = differences(begun["recipe"]["logging"], settings["recipe"]["logging"], "logging.")
        if changes:
            write_json(folder / "recipe.json", settings)
        here = environment()
        recorded = read_optional(folder / ENVIRONMENT, file_names=True)
        if not recorded:
            write_json(folder / ENVIRONMENT, here)
        return changes + differences(recorded or here, here, ignored={"command"})

    same = {name: settings[name] for name in settings if name not in ("store", "recipe_name")}
    if ranks.world > 1:
        versions = environment()["versions"]
        ranks.check_equal(json.dumps([same, versions["bertkit"], versions["torch"]]))
    return ranks.on_rank0(work) or []


def build_network(run: Run, *, compiled: bool) -> None:
    """Build the network, with random or existing weights, its optimizer and its loss."""
    recipe, device = run.recipe, run.device
    torch.manual_seed(recipe.training.seed)
    if run.initial is None:
        model = recipe.objectives.model(recipe.config(run.store.tokenizer.size))
    else:
        model = initial_network(run.initial, recipe, run.console.say)
    run.model = model.to(device)
    run.loss_fn = recipe.objectives.function()
    if compiled:
        run.loss_fn = partial(run.loss_fn, cross_entropy=compile_training(model, device))
    run.optimizer = build_optimizer(
        model,
        learning_rate=recipe.training.learning_rate,
        weight_decay=recipe.training.weight_decay,
        bias_correction=recipe.training.bias_correction,
        optimizer=recipe.training.optimizer,
    )


def initial_network(
    initial: PretrainedWeights, recipe: PretrainRecipe, say: Callable[[str], None]
) -> nn.Module:
    """Build the recipe's network with the weights of a model; `say` reports new and unused ones."""
    start = replace(initial, config=replace(initial.config, pooler_act=ModelConfig.pooler_act))
    tensors = dict(initial.tensors)
    if (initial.pair == "sop") != (recipe.objectives.pair == "sop"):
        tensors = {n: t for n, t in tensors.items() if not n.startswith("nsp.")}
    start = replace(start, tensors=tensors).with_dropout(recipe.model.dropout)
    loaded = start.build(recipe.objectives.model, keep_head=True)
    pairs = recipe.objectives.has_pairs
    unused = [*loaded.unexpected_keys, *(name for name in initial.tensors if name not in tensors)]
    if not pairs:  # nothing would train the pooler, so it is not saved
        unused += [name for name in tensors if "pooler." in name and name not in unused]
    missing = [name for name in loaded.missing_keys if pairs or "pooler." not in name]
    new = f"; new: {', '.join(missing)}" if missing else ""
    left = f"; unused: {', '.join(unused)}" if unused else ""
    say(f"weights loaded from {initial.path}{new}{left}")
    return loaded.model.train()


def resume(run: Run) -> list[str]:
    """Restore the newest complete checkpoint; return what changed in `Run.rounding_settings`."""
    folder, ranks = run.folder / "checkpoints", run.ranks
    latest = ranks.on_rank0(lambda: load_latest(folder, run.console.say))
    step = ranks.broadcast(latest.step + 1 if latest else None) - 1
    if step < 0:
        return []
    checkpoint = latest or load_checkpoint(folder / f"step-{step:08d}", step)
    restore_training(checkpoint, run.model, run.optimizer)
    progress = checkpoint.progress
    run.step, run.position = step, DataPosition(*progress["position"])
    run.console.say(f"resuming from {checkpoint.path} ({run.step:,} updates made)")
    return [
        f"{name.replace('_', '-')} of an update {before} -> {now}"
        for name, now in run.rounding_settings.items()
        if (before := progress.get(name, now)) != now
    ]


def is_finished(run: Run) -> bool:
    """Whether all updates are made and `model/` holds the final weights."""
    model = run.folder / "model"
    details = read_optional(model / "bertkit.json") if run.step else {}
    if not run.step and (model / "model.safetensors").exists():
        raise BertkitError(
            f"{model} holds a model, but there is no checkpoint to resume from; restore "
            "checkpoints/, choose another --out, or remove the model"
        )
    return details.get("steps") == run.step == run.recipe.phases.total_steps


def announce(run: Run, log: Journal, examples: ExampleSampler, notes: Sequence[str]) -> None:
    """Log a run's model, its data and notes before the first update."""
    start = start_record(run.recipe, run.store, examples)
    start |= {
        "step": run.step,
        "recipe_name": run.recipe_name,
        "recipe": as_json(run.recipe),
        "matmul_peak": run.matmul_peak,
        "precision": run.precision,
        "parameters": sum(weights.numel() for _, weights in trainable_parameters(run.model)),
    }
    log.write(start)
    run.console.say(*opening_lines(start, run.recipe, run.store))
    for line in (*device_notes(run.device, run.precision), *notes):
        log.note(run.step, line)


def baselines(
    store: TokenStore, random_share: float, specials: Sequence[float] = ()
) -> dict[str, float]:
    """Return what is reached without looking at the input: from the frequencies of tokens.

    The entropy is in nats; it is the loss of predicting each token's frequency. `random_share` is
    that of pairs with a random second sentence, and `specials` are the shares of [CLS] and [SEP]
    among the targets, if they are targets.
    """
    shares = store.unigrams[store.unigrams > 0] / store.unigrams.sum()
    shares = np.concatenate([shares * (1 - sum(specials)), specials])
    return {
        "unigram_entropy": float(-(shares * np.log(shares)).sum()),
        "most_frequent_accuracy": float(shares.max()),
        "nsp_majority": max(random_share, 1 - random_share),
    }


def special_shares(recipe: PretrainRecipe, pairs: PairStatistics) -> list[float]:
    """Return the share of [SEP] among a causal model's targets; [] for other models."""
    if recipe.objectives.token != "clm":
        return []
    return [(1 if recipe.objectives.pair == "single-segment" else 2) / (pairs.mean_tokens - 1)]


def start_record(
    recipe: PretrainRecipe, store: TokenStore, examples: ExampleSampler
) -> dict[str, Any]:
    """Return the part of the journal's first record that follows from the data alone.

    `examples` are those of the first phase.
    """
    phases = recipe.phases
    pairs = measure_pairs(examples.first())
    sizes = zip(phases.lengths, phases.steps, phases.batch_sizes, strict=True)
    return {
        "kind": "start",
        "baselines": baselines(store, pairs.random_share, special_shares(recipe, pairs)),
        "pairs": as_json(pairs),
        "tokens_total": store.tokens,
        "steps_total": phases.total_steps,
        "phases": [{"length": n, "steps": steps, "batch_size": size} for n, steps, size in sizes],
    }


def opening_lines(start: dict[str, Any], recipe: PretrainRecipe, store: TokenStore) -> list[str]:
    """Return the lines that a run prints before the first update, from its start record."""
    known, pairs, objectives = start["baselines"], start["pairs"], recipe.objectives
    label_1 = "A and B swapped" if objectives.pair == "sop" else "a random next sentence"
    share = f"{pairs['random_share']:.1%} with {label_1}, " if objectives.has_pairs else ""
    majority = known["nsp_majority"]
    label = f", majority label of pairs {majority:.1%}" if objectives.has_pairs else ""
    return [
        f"{start['parameters']:,} parameters, {start['precision']}; {store.tokens:,} training "
        f"tokens in {store.documents:,} documents; first window: {pairs['examples']:,} examples of "
        f"{pairs['mean_tokens']:.1f} tokens, {share}{pairs['cut_share']:.1%} of tokens cut",
        f"baselines: unigram entropy {known['unigram_entropy']:.3f} nats, top token "
        f"{known['most_frequent_accuracy']:.1%}{label}",
    ]
