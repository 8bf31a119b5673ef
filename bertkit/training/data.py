"""The examples of a run, those it is evaluated on, and input-independent baselines."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import numpy as np

from bertkit.config import as_json
from bertkit.corpus.store import TokenStore
from bertkit.pretraining_data.loader import (
    BatchBuilder,
    PretrainingBatch,
    StreamStep,
    stream_steps,
)
from bertkit.pretraining_data.masking import MaskingOptions
from bertkit.pretraining_data.pairs import PairOptions, PairStatistics, measure_pairs
from bertkit.pretraining_data.sampler import AnyPosition, ExampleSampler, ExampleSource
from bertkit.training.distributed import Ranks
from bertkit.training.recipe import PretrainRecipe, mixture_record

Examples = tuple[ExampleSource, BatchBuilder]
"""Examples in their order of use, and what makes batches of them."""

HELD_OUT_BATCH = 64
"""Sequences in a batch of the evaluation."""


def phase_seed(seed: int, phase: int) -> int:
    """The seed of a phase, so that each phase draws its own examples and masks."""
    return seed + (phase << 32)


def phase_examples(
    recipe: PretrainRecipe, store: TokenStore, phase: int, masking: MaskingOptions, seed: int
) -> Examples:
    """The examples of a phase in their order, and the builder that makes batches of them."""
    phases, seed, wanted = recipe.phases, phase_seed(seed, phase), recipe.objectives
    options = PairOptions(max_length=phases.lengths[phase], pair=wanted.pair)
    table: ExampleSource
    if mixture := mixture_record(store):
        from bertkit.pretraining_data.mixture import MixtureSampler

        table = MixtureSampler(mixture, options, seed)
    else:
        table = ExampleSampler(store, options, seed)
    return table, BatchBuilder(store, masking, phases.max_predictions[phase], seed, wanted.token)


def training_examples(recipe: PretrainRecipe, store: TokenStore, phase: int) -> Examples:
    """The examples that a phase trains on."""
    return phase_examples(recipe, store, phase, recipe.masking, recipe.training.seed)


class TrainingData:
    """The examples of one phase after the other.

    Args:
        recipe: what is trained.
        store: the training split.
    """

    def __init__(self, recipe: PretrainRecipe, store: TokenStore) -> None:
        self.recipe, self.store = recipe, store
        self._opened: tuple[int, Examples] | None = None

    def open(self, phase: int) -> Examples:
        """The examples of a phase; those of the phase before are closed."""
        if self._opened is None or self._opened[0] != phase:
            self.close()
            self._opened = (phase, training_examples(self.recipe, self.store, phase))
        return self._opened[1]

    def stream(
        self, phase: int, made: int, position: AnyPosition, ranks: Ranks, workers: int
    ) -> Generator[StreamStep, None, None]:
        """The micro-batches of this rank, for the rest of a phase of which `made` updates are made.

        Raises:
            BertkitError: the batch cannot be shared by the ranks, or `workers` is negative.
        """
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
        """Cancel the window that is planned ahead; calling it again does nothing."""
        if self._opened is not None:
            self._opened[1][0].close()
            self._opened = None


class HeldOut:
    """The held-out examples of a run: opened and verified once, planned once for each phase.

    Their seed is 0 and their masks are 15 %, 80/10/10, whatever the recipe says, so that runs with
    other seeds and masks can be compared.

    Args:
        recipe: what is trained.
        store: the training split. A mixture is evaluated on its stores that have two held-out
            documents, in the proportions of training.
    """

    def __init__(self, recipe: PretrainRecipe, store: TokenStore) -> None:
        self.recipe = recipe
        self.store: TokenStore | None
        """The held-out split, if it has the two documents that an evaluation needs."""
        if mixture := mixture_record(store):
            self.store = mixture.held_out
        else:
            held_out = TokenStore(store.folder, "held_out")
            self.store = held_out if held_out.documents > 1 else None
        self._rows: dict[int, np.ndarray] = {}

    def _examples(self, phase: int) -> Examples:
        assert self.store is not None, "there are too few held-out documents"
        return phase_examples(self.recipe, self.store, phase, MaskingOptions(), seed=0)

    def rows(self, phase: int) -> np.ndarray:
        """The examples that a phase is evaluated on."""
        if phase not in self._rows:
            rows = self._examples(phase)[0].first(self.recipe.logging.held_out_sequences)
            self._rows[phase] = rows.copy()  # without the rest of the window
        return self._rows[phase]

    def batches(self, phase: int) -> Iterator[PretrainingBatch]:
        """The examples of a phase, with the same masks at every evaluation."""
        rows, builder = self.rows(phase), self._examples(phase)[1]
        for start in range(0, len(rows), HELD_OUT_BATCH):
            yield builder[rows[start : start + HELD_OUT_BATCH]]

    def majority(self, phase: int) -> float:
        """The share of the pairs' commoner label: the accuracy of a constant answer."""
        share = measure_pairs(self.rows(phase), self.recipe.phases.lengths[phase]).random_share
        return max(share, 1 - share)


def baselines(
    store: TokenStore, random_share: float, specials: Sequence[float] = ()
) -> dict[str, float]:
    """Input-independent baselines.

    Args:
        store: gives the unigram counts.
        random_share: measured share of NSP examples with a random second sentence.
        specials: shares of [CLS] and [SEP] among the targets, where they are targets.

    Returns:
        unigram_entropy in nats: MLM loss of predicting the frequency of each token.
        most_frequent_accuracy: MLM accuracy of always predicting the commonest token.
        nsp_majority: NSP accuracy of always predicting the commoner label.
    """
    shares = store.unigrams[store.unigrams > 0] / store.unigrams.sum()
    shares = np.concatenate([shares * (1 - sum(specials)), specials])
    return {
        "unigram_entropy": float(-(shares * np.log(shares)).sum()),
        "most_frequent_accuracy": float(shares.max()),
        "nsp_majority": max(random_share, 1 - random_share),
    }


def special_shares(recipe: PretrainRecipe, pairs: PairStatistics) -> list[float]:
    """Shares of special tokens among the targets of causal models, each a token of its own."""
    if recipe.objectives.direction == "bidirectional":
        return []
    seps = 1 if recipe.objectives.pair == "single-segment" else 2
    counts = [seps] if recipe.objectives.direction == "left_to_right" else [1, seps - 1]
    return [count / (pairs.mean_tokens - 1) for count in counts if count]


def start_record(
    recipe: PretrainRecipe, store: TokenStore, table: ExampleSource | None = None
) -> dict[str, Any]:
    """The journal's first record, from the data alone: baselines and the real label balance.

    Args:
        recipe: what will be trained.
        store: the training split.
        table: the examples of the first phase, where they are there already.

    Returns:
        The record of kind "start", without what only the run knows.
    """
    phases = recipe.phases
    table = table or training_examples(recipe, store, 0)[0]
    pairs = measure_pairs(table.first(), phases.lengths[0])
    mixture = mixture_record(store)
    return {
        "kind": "start",
        "baselines": baselines(store, pairs.random_share, special_shares(recipe, pairs)),
        "pairs": as_json(pairs),
        "tokens_total": store.tokens,
        "steps_total": phases.total_steps,
        "phases": [
            {"length": length, "steps": steps, "batch_size": size}
            for length, steps, size in zip(
                phases.lengths, phases.steps, phases.batch_sizes, strict=True
            )
        ],
        **({"mixture": mixture.describe()} if mixture else {}),
    }


def opening_lines(start: dict[str, Any], recipe: PretrainRecipe, store: TokenStore) -> list[str]:
    """The lines that a run shows before the first update.

    Args:
        start: the `start_record`, with "parameters" and "precision".
        recipe: what will be trained.
        store: the training split.
    """
    known, pairs, wanted = start["baselines"], start["pairs"], recipe.objectives
    label_1 = "A and B swapped" if wanted.pair == "sop" else "a random next sentence"
    share = f"{pairs['random_share']:.1%} with {label_1}, " if wanted.has_pairs else ""
    commoner = f", commoner label of pairs {known['nsp_majority']:.1%}" if wanted.has_pairs else ""
    return [
        f"{start['parameters']:,} parameters, {start['precision']}; {store.tokens:,} training "
        f"tokens in {store.documents:,} documents; first window: {pairs['examples']:,} examples of "
        f"{pairs['mean_tokens']:.1f} tokens, {share}{pairs['cut_share']:.1%} of tokens cut",
        f"baselines: unigram entropy {known['unigram_entropy']:.3f} nats, commonest token "
        f"{known['most_frequent_accuracy']:.1%}{commoner}",
        *(
            f"{member['store']}: {member['tokens']:,} tokens, {member['token_share']:.2%} of "
            f"all; {member['share']:.2%} of the examples"
            for member in start.get("mixture", [])
        ),
    ]


def missing_evaluations(start: dict[str, Any], held_out: TokenStore | None) -> list[str]:
    """Notes about stores that have too few held-out documents to be evaluated."""
    missing = []
    if held_out is None:
        missing.append("the store has fewer than two held-out documents: no evaluation is made")
    few = [one["store"] for one in start.get("mixture", []) if one["held_out_documents"] < 2]
    if few:
        missing.append(f"fewer than two held-out documents, no evaluation on: {', '.join(few)}")
    return missing
