"""The training examples of a run, its held-out examples, and input-independent baselines."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np
import torch
from torch import nn

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import as_json
from bertkit.pretraining_data.examples import (
    MaskingOptions,
    PairOptions,
    PairStatistics,
    measure_pairs,
)
from bertkit.pretraining_data.loader import (
    BatchBuilder,
    DataPosition,
    ExampleSampler,
    PretrainingBatch,
    StreamStep,
    stream_steps,
)
from bertkit.training.device import OUT_OF_MEMORY
from bertkit.training.distributed import ALONE, Ranks
from bertkit.training.recipe import PretrainRecipe
from bertkit.training.step import LoopSettings, evaluate_batches, mean_losses

Examples = tuple[ExampleSampler, BatchBuilder]
"""The examples in their order of use, and the builder that makes batches of them."""

HELD_OUT_BATCH = 64
"""The number of sequences in an evaluation batch, if the device has enough memory for them."""


def phase_examples(
    recipe: PretrainRecipe, store: TokenStore, phase: int, masking: MaskingOptions, seed: int
) -> Examples:
    """Return the examples of a phase in order, and the builder that makes batches of them."""
    phases, objectives = recipe.phases, recipe.objectives
    seed += phase << 32  # each phase draws its own examples and masks
    options = PairOptions(max_length=phases.lengths[phase], pair=objectives.pair)
    builder = BatchBuilder(store, masking, phases.max_predictions[phase], seed, objectives.token)
    return ExampleSampler(store, options, seed), builder


class TrainingData:
    """The training examples of a run, one phase at a time."""

    def __init__(self, recipe: PretrainRecipe, store: TokenStore) -> None:
        self.recipe, self.store = recipe, store
        self._opened: tuple[int, Examples] | None = None

    def open(self, phase: int) -> Examples:
        """Return the examples of a phase, and close those of the previous one."""
        if self._opened is None or self._opened[0] != phase:
            self.close()
            masking, seed = self.recipe.masking, self.recipe.training.seed
            self._opened = phase, phase_examples(self.recipe, self.store, phase, masking, seed)
        return self._opened[1]

    def stream(
        self, phase: int, made: int, position: DataPosition, ranks: Ranks, workers: int
    ) -> Generator[StreamStep, None, None]:
        """Yield this rank's micro-batches of a phase after its first `made` updates."""
        examples, builder = self.open(phase)
        return stream_steps(
            examples,
            builder,
            batch_size=self.recipe.phases.batch_sizes[phase],
            steps=self.recipe.phases.steps[phase] - made,
            position=position,
            micro_batches=ranks.micro_batches(self.recipe.training.accumulate),
            rank=ranks.rank,
            world=ranks.world,
            workers=workers,
        )

    def close(self) -> None:
        """Cancel the planning of the next window; calling this again does nothing."""
        if self._opened is not None:
            self._opened[1][0].close()
            self._opened = None


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

    def evaluate(self, model: nn.Module, phase: int, settings: LoopSettings) -> dict[str, Any]:
        """Return the fields of an evaluation record; if memory is short, measure in parts."""
        ranks = settings.ranks if len(self.rows(phase)) >= settings.ranks.world else ALONE
        loss_fn = self.recipe.objectives.function()
        while True:
            torch.manual_seed(0)  # so that ELECTRA's generator, too, samples the same every time
            try:
                batches = self.batches(phase, ranks)
                sums, counted = evaluate_batches(model, loss_fn, batches, settings)
                break
            except BertkitError as error:
                if error.code != OUT_OF_MEMORY or self.batch_size == 1:
                    raise
            self.batch_size //= 2
        counts = ranks.all_reduce_counts(counted)()
        values = ranks.all_reduce_scalars({name: kept.value for name, kept in sums.items()})
        means = mean_losses({n: s._replace(value=values[n]) for n, s in sums.items()}, counts)
        token = "mlm" if "mlm_loss" in means else "lm"
        perplexity = math.exp(min(means[f"{token}_loss"], 700.0))
        record = {"phase": phase, **means, f"{token}_perplexity": perplexity, **counts}
        if self.recipe.objectives.has_pairs:
            share = measure_pairs(self.rows(phase)).random_share
            record["nsp_majority"] = max(share, 1 - share)  # the accuracy of a constant answer
        return record


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
