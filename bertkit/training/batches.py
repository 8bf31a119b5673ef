"""Which examples a run trains on, and which it is measured on."""

from __future__ import annotations

from collections.abc import Iterator

from bertkit.corpus.store import TokenStore
from bertkit.examples.masking import MaskingOptions
from bertkit.examples.pairs import PairOptions
from bertkit.examples.stream import START, BatchBuilder, ExampleTable, PretrainingBatch
from bertkit.training.recipe import PretrainRecipe

HELD_OUT_BATCH = 64
"""Sequences in a batch of the evaluation."""


def phase_seed(seed: int, phase: int) -> int:
    """Each phase draws examples and masks of its own."""
    return seed + (phase << 32)


def examples(
    recipe: PretrainRecipe, store: TokenStore, phase: int, masking: MaskingOptions, seed: int
) -> tuple[ExampleTable, BatchBuilder]:
    """The examples of a phase in their order, and what makes batches of them."""
    phases, seed = recipe.phases, phase_seed(seed, phase)
    table = ExampleTable(store, PairOptions(max_length=phases.lengths[phase]), seed)
    return table, BatchBuilder(store, masking, phases.max_predictions[phase], seed)


def training_examples(
    recipe: PretrainRecipe, store: TokenStore, phase: int
) -> tuple[ExampleTable, BatchBuilder]:
    """The examples that a phase trains on."""
    return examples(recipe, store, phase, recipe.masking, recipe.training.seed)


def has_held_out(store: TokenStore) -> bool:
    """Whether a store has the two held-out documents that an evaluation needs."""
    return TokenStore(store.folder, "held_out").documents > 1


def held_out_batches(
    recipe: PretrainRecipe, store: TokenStore, phase: int
) -> Iterator[PretrainingBatch]:
    """The same examples with the same masks at every evaluation of a phase.

    Their seed is 0 and their masks are 15 %, 80/10/10, whatever the recipe says, so that runs with
    other seeds and masks can be compared.
    """
    held_out = TokenStore(store.folder, "held_out")
    table, builder = examples(recipe, held_out, phase, MaskingOptions(), seed=0)
    count = min(recipe.watching.held_out_sequences, len(table.rows_of(0, 0)))
    rows, _ = table.take(START, count)
    for start in range(0, count, HELD_OUT_BATCH):
        yield builder[rows[start : start + HELD_OUT_BATCH]]
