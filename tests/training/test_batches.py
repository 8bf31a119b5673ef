"""Whose masks a phase trains with, and what a guesser reaches who looks at nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from bertkit.corpus.store import TokenStore
from bertkit.pretraining_data.examples import MaskingOptions
from bertkit.pretraining_data.loader import START
from bertkit.training.recipe import ModelSize, Objectives, Phases, PretrainRecipe, Training
from bertkit.training.start import HeldOut, phase_examples, start_record

RECIPE = PretrainRecipe(
    model=ModelSize(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=1, max_position_embeddings=32
    ),
    phases=Phases(lengths=(32,), steps=(1,), batch_sizes=(4,), max_predictions=(5,)),
    training=Training(warmup_steps=0),
)


@pytest.mark.parametrize("pair", ["none", "single-segment"])
def test_special_tokens_are_targets_of_one_sided_models(store: TokenStore, pair: str) -> None:
    recipe = replace(RECIPE, objectives=Objectives(token="clm", pair=pair))
    table, builder = phase_examples(recipe, store, 0)
    targets = builder[table.window_rows(0, 0)].target_ids.numpy()
    shares = np.bincount(targets) / len(targets)
    specials = {store.tokenizer.cls_id, store.tokenizer.sep_id}
    found = start_record(recipe, store, table)["baselines"]
    plain = start_record(RECIPE, store, phase_examples(RECIPE, store, 0)[0])["baselines"]
    assert plain.keys() - found.keys() == {"nsp_majority"}, "this run answers no pairs"
    own = shares[sorted(specials)]
    expected = max(*own, (1 - sum(own)) * plain["most_frequent_accuracy"])
    assert found["most_frequent_accuracy"] == pytest.approx(expected, abs=1e-3)
    assert found["unigram_entropy"] < plain["unigram_entropy"] + 0.3


def test_training_masks_as_the_recipe_says(store: TokenStore) -> None:
    recipe = replace(
        RECIPE,
        phases=Phases(lengths=(32, 32), steps=(1, 1), batch_sizes=(4, 4), max_predictions=(3, 9)),
        masking=MaskingOptions(probability=0.5, mask_share=1.0, random_share=0.0),
    )
    for phase, most in enumerate(recipe.phases.max_predictions):
        table, builder = phase_examples(recipe, store, phase)
        rows, _ = table.take(START, 200)
        batch = builder[rows]
        assert (batch.packed.ids[batch.target_positions] == store.tokenizer.mask_id).all()
        ends = batch.packed.cu_seqlens[1:]
        counts = torch.bincount(torch.searchsorted(ends, batch.target_positions, right=True))
        wanted = [min(most, round(length / 2)) for length in batch.packed.lengths]
        assert counts.tolist() == wanted
        assert max(wanted) == most


def test_held_out_examples_are_masked_alike_whatever_the_recipe_says(store: TokenStore) -> None:
    other = replace(
        RECIPE,
        masking=MaskingOptions(probability=0.5, mask_share=0.0, random_share=1.0),
        training=replace(RECIPE.training, seed=5),
    )
    first, second = (next(HeldOut(recipe, store).batches(0)) for recipe in (RECIPE, other))
    assert torch.equal(first.packed.ids, second.packed.ids)
    assert torch.equal(first.target_positions, second.target_positions)
    shown = first.packed.ids[first.target_positions]
    assert (shown == store.tokenizer.mask_id).double().mean() > 0.5
