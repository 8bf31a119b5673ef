"""Which examples a run trains on, which it is measured on, and what a blind guesser reaches."""

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
    """Each phase draws examples and masks of its own."""
    return seed + (phase << 32)


def phase_examples(
    recipe: PretrainRecipe, store: TokenStore, phase: int, masking: MaskingOptions, seed: int
) -> Examples:
    """The examples of a phase in their order, and what makes batches of them."""
    phases, seed, wanted = recipe.phases, phase_seed(seed, phase), recipe.objectives
    options = PairOptions(max_length=phases.lengths[phase], sentences=wanted.sentences)
    table: ExampleSource
    if mixture := mixture_record(store):
        from bertkit.pretraining_data.mixture import MixtureSampler

        table = MixtureSampler(mixture, options, seed)
    else:
        table = ExampleSampler(store, options, seed)
    return table, BatchBuilder(store, masking, phases.max_predictions[phase], seed, wanted.words)


def training_examples(recipe: PretrainRecipe, store: TokenStore, phase: int) -> Examples:
    """The examples that a phase trains on."""
    return phase_examples(recipe, store, phase, recipe.masking, recipe.training.seed)


def held_out_store(store: TokenStore) -> TokenStore | None:
    """The held-out documents, if there are the two that an evaluation needs.

    A mixture is evaluated on its stores that have two, in the proportions of training.
    """
    if mixture := mixture_record(store):
        return mixture.held_out
    held_out = TokenStore(store.folder, "held_out")
    return held_out if held_out.documents > 1 else None


def held_out_rows(recipe: PretrainRecipe, held_out: TokenStore, phase: int) -> np.ndarray:
    """The held-out examples that a phase is evaluated on."""
    examples, _ = phase_examples(recipe, held_out, phase, MaskingOptions(), seed=0)
    return examples.first(recipe.logging.held_out_sequences).copy()  # without the window's rest


def commoner_label(recipe: PretrainRecipe, rows: np.ndarray, phase: int) -> float:
    """The share of the pairs' commoner label: what saying always the same gets right."""
    share = measure_pairs(rows, recipe.phases.lengths[phase]).random_share
    return max(share, 1 - share)


def held_out_batches(
    recipe: PretrainRecipe, held_out: TokenStore, phase: int, rows: np.ndarray
) -> Iterator[PretrainingBatch]:
    """The `held_out_rows`, with the same masks at every evaluation of a phase.

    Their seed is 0 and their masks are 15 %, 80/10/10, whatever the recipe says, so that runs with
    other seeds and masks can be compared.
    """
    _, builder = phase_examples(recipe, held_out, phase, MaskingOptions(), seed=0)
    for start in range(0, len(rows), HELD_OUT_BATCH):
        yield builder[rows[start : start + HELD_OUT_BATCH]]


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
        self, phase: int, *, steps: int, position: AnyPosition, ranks: Ranks, workers: int
    ) -> Generator[StreamStep, None, None]:
        """The micro-batches of this rank, for so many updates of a phase from a position on.

        Raises:
            BertkitError: the batch cannot be shared by the ranks, or `workers` is negative.
        """
        examples, builder = self.open(phase)
        return stream_steps(
            examples,
            builder,
            batch_size=self.recipe.phases.batch_sizes[phase],
            steps=steps,
            position=position,
            micro_batches=ranks.micro_batches(self.recipe.training.accumulate),
            rank=ranks.rank,
            world=ranks.world,
            workers=workers,
        )

    def close(self) -> None:
        """Give up what is planned ahead; calling it again does nothing."""
        if self._opened is not None:
            self._opened[1][0].close()
            self._opened = None


class HeldOut:
    """The held-out examples of a run, opened and verified once, and planned once a phase.

    Args:
        recipe: what is trained.
        store: the training split.
    """

    def __init__(self, recipe: PretrainRecipe, store: TokenStore) -> None:
        self.recipe, self.store = recipe, held_out_store(store)
        self._planned: tuple[int, np.ndarray] | None = None

    def rows(self, phase: int) -> np.ndarray:
        """The examples that a phase is evaluated on; the store must have held-out documents."""
        assert self.store is not None
        if self._planned is None or self._planned[0] != phase:
            self._planned = (phase, held_out_rows(self.recipe, self.store, phase))
        return self._planned[1]

    def batches(self, phase: int) -> Iterator[PretrainingBatch]:
        """The batches of the `rows`; see `held_out_batches`."""
        assert self.store is not None
        return held_out_batches(self.recipe, self.store, phase, self.rows(phase))


def baselines(
    store: TokenStore, random_share: float, specials: Sequence[float] = ()
) -> dict[str, float]:
    """What a model that looks at nothing reaches.

    Args:
        store: gives the unigram counts.
        random_share: measured share of NSP examples with a random second sentence.
        specials: shares of [CLS] and [SEP] among the targets, where they are targets.

    Returns:
        unigram_entropy in nats: MLM loss of predicting the frequency of each piece.
        most_frequent_accuracy: MLM accuracy of always the commonest piece.
        nsp_majority: NSP accuracy of always the commoner label.
    """
    shares = store.unigrams[store.unigrams > 0] / store.unigrams.sum()
    shares = np.concatenate([shares * (1 - sum(specials)), specials])
    return {
        "unigram_entropy": float(-(shares * np.log(shares)).sum()),
        "most_frequent_accuracy": float(shares.max()),
        "nsp_majority": max(random_share, 1 - random_share),
    }


def special_shares(recipe: PretrainRecipe, pairs: PairStatistics) -> list[float]:
    """Shares of special tokens among the targets of one-sided models, each its own piece."""
    if recipe.objectives.direction == "bidirectional":
        return []
    seps = 1 if recipe.objectives.sentences == "single" else 2
    counts = [seps] if recipe.objectives.direction == "left_to_right" else [1, seps - 1]
    return [count / (pairs.mean_tokens - 1) for count in counts if count]


def start_record(
    recipe: PretrainRecipe, store: TokenStore, table: ExampleSource | None = None
) -> dict[str, Any]:
    """What the data say before the first update: baselines, and the real label balance.

    Args:
        recipe: what will be trained.
        store: the training split.
        table: the examples of the first phase, where they are there already.

    Returns:
        The journal's record of kind "start", but for what only the run knows.
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
    """What a run tells its user before the first update.

    Args:
        start: the `start_record`, with "parameters" and "precision".
        recipe: what will be trained.
        store: the training split.
    """
    known, pairs, wanted = start["baselines"], start["pairs"], recipe.objectives
    label_1 = "A and B swapped" if wanted.sentences == "order" else "a random next sentence"
    share = f"{pairs['random_share']:.1%} with {label_1}, " if wanted.has_pairs else ""
    commoner = f", commoner label of pairs {known['nsp_majority']:.1%}" if wanted.has_pairs else ""
    return [
        f"{start['parameters']:,} parameters, {start['precision']}; {store.tokens:,} training "
        f"tokens in {store.documents:,} documents; first window: {pairs['examples']:,} examples of "
        f"{pairs['mean_tokens']:.1f} tokens, {share}{pairs['cut_share']:.1%} of tokens cut",
        f"baselines: unigram entropy {known['unigram_entropy']:.3f} nats, commonest piece "
        f"{known['most_frequent_accuracy']:.1%}{commoner}",
        *(
            f"{member['store']}: {member['tokens']:,} tokens, {member['token_share']:.2%} of "
            f"all; {member['share']:.2%} of the examples"
            for member in start.get("mixture", [])
        ),
    ]


def missing_evaluations(start: dict[str, Any], held_out: TokenStore | None) -> list[str]:
    """What is not evaluated, for want of held-out documents."""
    missing = []
    if held_out is None:
        missing.append("the store has fewer than two held-out documents: no evaluation is made")
    few = [one["store"] for one in start.get("mixture", []) if one["held_out_documents"] < 2]
    if few:
        missing.append(f"fewer than two held-out documents, no evaluation on: {', '.join(few)}")
    return missing
