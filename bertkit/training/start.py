"""The start of a pre-training run: its folder, its network, its data, and where it left off."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import as_json, claim, differences, exclusive_lock, read_optional, write_json
from bertkit.model.encoder import ModelConfig
from bertkit.pretraining_data.examples import (
    MaskingOptions,
    PairOptions,
    PairStatistics,
    measure_pairs,
)
from bertkit.pretraining_data.loader import (
    START,
    BatchBuilder,
    DataPosition,
    ExampleSampler,
    PretrainingBatch,
)
from bertkit.progress import JOURNAL, Console, Journal, read_journal
from bertkit.training.device import OUT_OF_MEMORY, device_notes, environment
from bertkit.training.distributed import ALONE, Ranks
from bertkit.training.optimizer import (
    AdamW,
    build_optimizer,
    load_checkpoint,
    load_latest,
    restore_training,
    trainable_parameters,
)
from bertkit.training.recipe import ModelSize, PretrainRecipe
from bertkit.training.step import LoopSettings, compile_training, evaluate_batches, mean_losses

if TYPE_CHECKING:
    from bertkit.checkpoints.pretrained import PretrainedWeights
    from bertkit.tokenizer.wordpiece import Tokenizer

RECIPE, ENVIRONMENT = "recipe.json", "environment.json"

Examples = tuple[ExampleSampler, BatchBuilder]
"""The examples in their order of use, and the builder that makes batches of them."""

HELD_OUT_BATCH = 64
"""The number of sequences in an evaluation batch, if the device has enough memory for them."""


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
    evaluated: int = 0
    """The number of updates before the last evaluation."""
    budget: dict[str, Any] | None = None
    """The minutes to train for, and the updates and the warm-up that were scaled to them."""

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a global batch, over all ranks."""
        return self.ranks.micro_batches(self.recipe.training.accumulate)

    @property
    def rounding_settings(self) -> dict[str, Any]:
        """The settings that affect how an update is rounded."""
        return {"micro_batches": self.micro_batches, "precision": self.precision}

    def smaller_micro_batches(self, lengths: Sequence[int]) -> str:
        """Return advice for a micro-batch, of these lengths, that does not fit into memory."""
        if len(lengths) == 1:
            return "try shorter sequences or a smaller network"
        return (
            f"try training.accumulate = {2 * self.micro_batches} in a new --out (micro-batches of "
            f"{-(-len(lengths) // 2)} sequences)"
        )


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


def lock_folder(run: Run, held: ExitStack) -> None:
    """Check that all ranks have the same settings, and lock the folder until `held` is closed."""
    ranks = run.ranks
    if ranks.world > 1:
        settings, versions = run_settings(run), environment()["versions"]
        same = {name: settings[name] for name in settings if name not in ("store", "recipe_name")}
        ranks.check_equal(json.dumps([same, versions["bertkit"], versions["torch"]]))
    # of several ranks, one that was replaced after it lost its connection may still be saving
    wait = ranks.timeout / 2 if ranks.world > 1 else 0.0
    ranks.on_rank0(lambda: held.enter_context(exclusive_lock(run.folder, wait)))


def run_settings(run: Run) -> dict[str, Any]:
    """Return what `recipe.json` records of a run."""
    return {
        "recipe": as_json(run.recipe),
        "recipe_name": run.recipe_name,
        "store": str(run.store.folder),
        "tokenizer_hash": run.store.tokenizer_hash,
        "corpus": run.store.content_hash,
        **({"init_from": run.initial.digest} if run.initial else {}),
        **({"budget": run.budget} if run.budget else {}),
    }


def claim_folder(run: Run) -> list[str]:
    """Write down what is run in the folder.

    Returns:
        The changes of logging settings, software and hardware since the run was started, on rank 0.
    """
    folder, settings = run.folder, run_settings(run)

    def work() -> list[str]:
        may_change = {"store", "recipe_name", "recipe.logging"}
        begun = claim(folder, "pre-training run", settings, may_change=may_change)
        changes = differences(begun["recipe"]["logging"], settings["recipe"]["logging"], "logging.")
        if changes:
            write_json(folder / RECIPE, settings)
        here = environment()
        recorded = read_optional(folder / ENVIRONMENT)
        if not recorded:
            write_json(folder / ENVIRONMENT, here)
        return changes + differences(recorded or here, here, ignored={"command"})

    return run.ranks.on_rank0(work) or []


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
    run.evaluated = ranks.broadcast(ranks.on_rank0(lambda: last_evaluation(run)))
    run.console.say(f"resuming from {checkpoint.path} ({run.step:,} updates made)")
    return [
        f"{name.replace('_', '-')} of an update {before} -> {now}"
        for name, now in run.rounding_settings.items()
        if (before := progress.get(name, now)) != now
    ]


def last_evaluation(run: Run) -> int:
    """Return the number of updates before the last evaluation in the journal, up to this one."""
    journal = run.folder / JOURNAL
    records = read_journal(journal) if journal.exists() else []
    steps = [record["step"] for record in records if record.get("kind") == "evaluation"]
    return max((step for step in steps if step <= run.step), default=0)


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
        "precision": run.precision,
        "parameters": sum(weights.numel() for _, weights in trainable_parameters(run.model)),
    }
    log.write(start)
    run.console.say(*opening_lines(start, run.recipe, run.store))
    for line in (*device_notes(run.device, run.precision), *notes):
        log.note(run.step, line)


def baselines(
    store: TokenStore, random_share: float | None, specials: Sequence[float] = ()
) -> dict[str, float]:
    """Return what is reached without looking at the input: from the frequencies of tokens.

    The entropy is in nats; it is the loss of predicting each token's frequency. `random_share` is
    that of pairs with a random second sentence, None if pairs have no loss, and `specials` are the
    shares of [CLS] and [SEP] among the targets, if they are targets.
    """
    shares = store.unigrams[store.unigrams > 0] / store.unigrams.sum()
    shares = np.concatenate([shares * (1 - sum(specials)), specials])
    known = {
        "unigram_entropy": float(-(shares * np.log(shares)).sum()),
        "most_frequent_accuracy": float(shares.max()),
    }
    if random_share is not None:
        known["nsp_majority"] = max(random_share, 1 - random_share)
    return known


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
    random_share = pairs.random_share if recipe.objectives.has_pairs else None
    sizes = zip(phases.lengths, phases.steps, phases.batch_sizes, strict=True)
    return {
        "kind": "start",
        "baselines": baselines(store, random_share, special_shares(recipe, pairs)),
        "pairs": as_json(pairs),
        "tokens_total": store.tokens,
        "steps_total": phases.total_steps,
        "phases": [{"length": n, "steps": steps, "batch_size": size} for n, steps, size in sizes],
    }


def opening_lines(start: dict[str, Any], recipe: PretrainRecipe, store: TokenStore) -> list[str]:
    """Return the lines that a run prints before the first update, from its start record."""
    known, pairs, objectives = start["baselines"], start["pairs"], recipe.objectives
    label_1 = "A and B swapped" if objectives.pair == "sop" else "a random next sentence"
    share = label = ""
    if objectives.has_pairs:
        share = f"{pairs['random_share']:.1%} with {label_1}, "
        label = f", majority label of pairs {known['nsp_majority']:.1%}"
    return [
        f"{start['parameters']:,} parameters, {start['precision']}; {store.tokens:,} training "
        f"tokens in {store.documents:,} documents; first window: {pairs['examples']:,} examples of "
        f"{pairs['mean_tokens']:.1f} tokens, {share}{pairs['cut_share']:.1%} of tokens cut, as "
        f"the examples of the first phase have at most {recipe.phases.lengths[0]} tokens",
        f"baselines: unigram entropy {known['unigram_entropy']:.3f} nats, top token "
        f"{known['most_frequent_accuracy']:.1%}{label}",
    ]


# Data ---------------------------------------------------------------------------------------------


def phase_examples(
    recipe: PretrainRecipe,
    store: TokenStore,
    phase: int,
    masking: MaskingOptions | None = None,
    seed: int | None = None,
) -> Examples:
    """Return the examples of a phase in order, and the builder that makes batches of them.

    Masking and seed are by default those of the recipe.
    """
    phases, objectives = recipe.phases, recipe.objectives
    masking, seed = masking or recipe.masking, recipe.training.seed if seed is None else seed
    seed += phase << 32  # each phase draws its own examples and masks
    options = PairOptions(max_length=phases.lengths[phase], pair=objectives.pair)
    builder = BatchBuilder(store, masking, phases.max_predictions[phase], seed, objectives.token)
    return ExampleSampler(store, options, seed), builder


class HeldOut:
    """The held-out examples of a run: opened and verified once, planned once for each phase.

    Their seed is 0 and their masking is 15 %, 80/10/10, whatever the recipe says, so that runs with
    different seeds and masking can be compared.
    """

    def __init__(self, recipe: PretrainRecipe, store: TokenStore) -> None:
        self.recipe = recipe
        self.store = store.held_out
        """The held-out split, or None if it lacks the two documents that an evaluation needs."""
        self.batch_size = HELD_OUT_BATCH
        """The number of sequences in a batch; lower it if the device has too little memory."""
        self._rows: dict[int, np.ndarray] = {}

    def _examples(self, phase: int) -> Examples:
        assert self.store is not None, "there are too few held-out documents"
        return phase_examples(self.recipe, self.store, phase, MaskingOptions(), seed=0)

    def rows(self, phase: int) -> np.ndarray:
        """Return the examples that a phase is evaluated on."""
        if phase not in self._rows:
            with closing(self._examples(phase)[0]) as examples:
                rows = examples.first(self.recipe.logging.held_out_sequences)
            self._rows[phase] = rows.copy()  # a view would keep the whole window in memory
        return self._rows[phase]

    def batches(self, phase: int, ranks: Ranks = ALONE) -> Iterator[PretrainingBatch]:
        """Yield a rank's batches of a phase, with the same masks at every evaluation."""
        share, builder = self.rows(phase)[ranks.rank :: ranks.world], self._examples(phase)[1]
        for start in range(0, len(share), self.batch_size):
            yield builder[share[start : start + self.batch_size]]

    def evaluate(
        self, model: nn.Module, phase: int, settings: LoopSettings
    ) -> dict[str, Any] | None:
        """Return the fields of an evaluation record; None if a rank was asked to stop meanwhile."""
        ranks = settings.ranks if len(self.rows(phase)) >= settings.ranks.world else ALONE
        loss_fn = self.recipe.objectives.function()
        while True:
            torch.manual_seed(0)  # so that ELECTRA's generator, too, samples the same every time
            try:
                batches = self.batches(phase, ranks)
                batches = takewhile(lambda _: not settings.asked_to_stop(), batches)
                sums, counted = evaluate_batches(model, loss_fn, batches, settings)
                break
            except BertkitError as error:
                if error.code != OUT_OF_MEMORY or self.batch_size == 1:
                    raise
            self.batch_size //= 2
        if settings.ranks.all_reduce_counts({"stop": int(settings.asked_to_stop())})()["stop"]:
            return None
        counts = ranks.all_reduce_counts(counted)()
        values = ranks.all_reduce_scalars({name: total.value for name, total in sums.items()})
        means = mean_losses({n: s._replace(value=values[n]) for n, s in sums.items()}, counts)
        token = "mlm" if "mlm_loss" in means else "lm"
        perplexity = math.exp(min(means[f"{token}_loss"], 700.0))
        record = {"phase": phase, **means, f"{token}_perplexity": perplexity, **counts}
        if self.recipe.objectives.has_pairs:
            share = measure_pairs(self.rows(phase)).random_share
            record["nsp_majority"] = max(share, 1 - share)  # the accuracy of a constant answer
        return record
