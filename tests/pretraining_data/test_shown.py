"""What the network sees: [MASK], a random piece or the true one at targets, the text elsewhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from bertkit.corpus.store import TokenStore
from bertkit.pretraining_data.loader import BatchBuilder, PretrainingBatch
from bertkit.pretraining_data.masking import MaskingOptions
from bertkit.pretraining_data.pairs import PairOptions
from bertkit.pretraining_data.sampler import START, ExampleSampler


def masked(
    store: TokenStore, masking: MaskingOptions, rows: int = 400
) -> tuple[PretrainingBatch, Tensor]:
    """A batch of examples, and their text as it is."""
    chosen, _ = ExampleSampler(store, PairOptions(max_length=48), 0).take(START, rows)
    plain = BatchBuilder(store, masking, 7, 0, "clm")[chosen]
    return BatchBuilder(store, masking, 7, 0)[chosen], plain.packed.ids


def test_targets_are_shown_as_masks_random_pieces_and_themselves(store: TokenStore) -> None:
    batch, text = masked(store, MaskingOptions(), rows=2000)
    shown = batch.packed.ids[batch.target_positions]
    is_mask = shown == store.tokenizer.mask_id
    is_kept = shown == batch.target_ids
    assert len(shown) > 5000
    assert is_mask.double().mean() == pytest.approx(0.8, abs=0.02)
    assert is_kept.double().mean() == pytest.approx(0.1, abs=0.02)
    assert (~is_mask & ~is_kept).double().mean() == pytest.approx(0.1, abs=0.02)
    assert torch.equal(batch.target_ids, text[batch.target_positions])


def test_no_word_of_a_batch_is_masked_in_part(store: TokenStore) -> None:
    batch, text = masked(store, MaskingOptions(whole_words=True))
    tokenizer = store.tokenizer
    is_target = torch.zeros(len(text), dtype=torch.bool)
    is_target[batch.target_positions] = True
    special = torch.isin(text, torch.tensor([tokenizer.cls_id, tokenizer.sep_id]))
    follows = torch.from_numpy(tokenizer.continuation)[text[1:]] & ~special[:-1]
    assert torch.equal(is_target[1:][follows], is_target[:-1][follows])
    assert is_target[1:][follows].any()
