"""Rounded batches: their layout, and that nothing of the real tokens changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.corpus.store import TokenStore
from bertkit.model import attention as attention_module
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.objectives import pretraining_objective
from bertkit.pretraining_data.batch import Packed, pack
from bertkit.pretraining_data.buckets import (
    IGNORED,
    Shape,
    on_rounded_batches,
    round_batch,
    round_packed,
    shape_above,
)
from bertkit.pretraining_data.loader import BatchBuilder, PretrainingBatch, stream_steps
from bertkit.pretraining_data.masking import MaskingOptions
from bertkit.pretraining_data.pairs import PairOptions
from bertkit.pretraining_data.sampler import ExampleSampler
from bertkit.training.optimizer import build_optimizer
from bertkit.training.step import LoopSettings, train_steps

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    max_position_embeddings=96,
    initializer_range=0.2,
)


def packed_of(lengths: list[int]) -> Packed:
    """Random tokens, longest sequence first."""
    generator = torch.Generator().manual_seed(sum(lengths))
    ordered = sorted(lengths, reverse=True)
    rows = [torch.randint(0, 50, (n,), generator=generator).tolist() for n in ordered]
    return pack(rows, [[0] * (n // 2) + [1] * (n - n // 2) for n in ordered])


def batch_of(lengths: list[int]) -> PretrainingBatch:
    """Every fifth token is a target."""
    packed = packed_of(lengths)
    positions = torch.arange(1, len(packed.ids), 5)
    return PretrainingBatch(packed, positions, (positions * 7) % 50, torch.arange(len(lengths)) % 2)


@given(lengths=st.lists(st.integers(1, 600), min_size=1, max_size=90), limit=st.integers(2, 640))
@settings(max_examples=150, deadline=None)
def test_every_batch_fits_the_shape_above_it(lengths: list[int], limit: int) -> None:
    lengths = [min(length, limit) for length in lengths]
    tokens, max_length = sum(lengths), max(lengths)
    shape = shape_above(tokens, len(lengths), max_length, limit)
    assert shape.fits(tokens, len(lengths), max_length)
    assert shape.max_length <= limit
    dummies = shape.sequences - len(lengths)
    assert dummies == -(-len(lengths) // 16)
    assert shape.tokens - tokens < dummies * (shape.max_length // 2 + 2), "at most 1/32 is added"


@given(lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30), extra=st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_dummies_follow_the_real_sequences(lengths: list[int], extra: int) -> None:
    packed = packed_of(lengths)
    tokens = len(packed.ids)
    dummies = 1 + extra // 40
    shape = Shape(tokens + dummies + min(extra, 39 * dummies), len(lengths) + dummies, 40)
    rounded = round_packed(packed, shape)
    assert (len(rounded.ids), len(rounded.cu_seqlens) - 1, rounded.max_seqlen) == shape
    assert rounded.lengths[: len(lengths)] == packed.lengths
    added = rounded.lengths[len(lengths) :]
    assert len(added) == dummies
    assert 1 <= min(added) <= max(added) <= 40
    assert max(added) - min(added) <= 1
    assert sum(run.sequences * run.length for run in rounded.equal_lengths) == shape.tokens
    assert rounded.position_ids.tolist() == [p for n in rounded.lengths for p in range(n)]
    assert rounded.cu_seqlens.dtype == torch.int32
    for name in ("ids", "segment_ids", "position_ids"):
        assert torch.equal(getattr(rounded, name)[:tokens], getattr(packed, name))
    assert not rounded.ids[tokens:].any()


@pytest.mark.parametrize(
    "shape",
    [
        Shape(9, 3, 8),  # no token is left for the dummy
        Shape(12, 2, 8),  # no dummy
        Shape(20, 3, 8),  # the dummy would be longer than 8
        Shape(12, 3, 4),  # a sequence is longer than 4
        Shape(10, 4, 8),  # one of two dummies would be empty
    ],
)
def test_shapes_that_do_not_fit_are_refused(shape: Shape) -> None:
    assert not shape.fits(9, 2, 5)
    with pytest.raises(ValueError, match="2 sequences of at most 5 and in all 9 tokens"):
        round_packed(packed_of([5, 4]), shape)


def run(model: PretrainingModel, batch: PretrainingBatch, rounded: bool) -> list[torch.Tensor]:
    """The sums of the objective and all gradients of their losses."""
    objective = on_rounded_batches(pretraining_objective, 96) if rounded else pretraining_objective
    model.zero_grad()
    sums = objective(model, batch)
    (sums["mlm_loss"].value / 3 + sums["nsp_loss"].value).backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return [*(value.value.detach() for value in sums.values()), *gradients]


@pytest.mark.parametrize("kernel", ["grouped", "padded", "reference"])
@pytest.mark.parametrize("lengths", [[7], [30, 30, 12], [90, 64, 64, 3, 2, 1], [9] * 17 + [1] * 5])
def test_losses_answers_and_gradients_stay(
    kernel: str, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention_module, "choose_kernel", lambda query, dropout: kernel)
    torch.manual_seed(0)
    model = PretrainingModel(CONFIG).double()
    plain, rounded = (run(model, batch_of(lengths), way) for way in (False, True))
    assert len(plain) > 30
    for got, wanted in zip(rounded, plain, strict=True):
        torch.testing.assert_close(got, wanted, atol=1e-10, rtol=1e-10)


def test_added_targets_and_labels_are_ignored_ones() -> None:
    batch = batch_of([90, 64, 64, 3])
    rounded = round_batch(batch, 96)
    targets, sequences = len(batch.target_ids), len(batch.next_labels)
    assert len(rounded.target_ids) % (rounded.packed.max_seqlen // 8) == 0
    assert len(rounded.next_labels) == len(rounded.packed.first_tokens) == 5
    for name, count in (("target_ids", targets), ("next_labels", sequences)):
        labels = getattr(rounded, name)
        assert torch.equal(labels[:count], getattr(batch, name))
        assert (labels[count:] == IGNORED).all()
    assert (rounded.target_positions[targets:] == len(batch.packed.ids)).all()


@pytest.mark.slow
def test_what_a_step_counts_is_real() -> None:
    """The loop reads lengths and counts off the batch as it was, and makes the same update."""
    records, weights = [], []
    for rounded in (False, True):
        torch.manual_seed(1)
        model = PretrainingModel(CONFIG).double().train()
        loop = LoopSettings(
            device=CPU, precision="fp32", seed=0, max_gradient_norm=1.0,
            learning_rate=lambda step: 1e-2,
        )  # fmt: skip
        objective = (
            on_rounded_batches(pretraining_objective, 96) if rounded else pretraining_objective
        )
        optimizer = build_optimizer(model, learning_rate=1e-2)
        steps = [([batch_of([20, 9]), batch_of([31])], None), ([batch_of([5, 5, 4])], None)]
        records.append(list(train_steps(model, optimizer, objective, steps, loop)))
        weights.append(model.state_dict())
    for plain, other in zip(*records, strict=True):
        same = ("step", "counts", "tokens", "sum_squared_lengths", "learning_rate")
        assert [getattr(other, n) for n in same] == [getattr(plain, n) for n in same]
        torch.testing.assert_close(other.gradient_norm, plain.gradient_norm)
    for name, wanted in weights[0].items():
        torch.testing.assert_close(weights[1][name], wanted)


def test_a_phase_of_the_stream_has_few_shapes(store: TokenStore) -> None:
    table = ExampleSampler(store, PairOptions(max_length=48), seed=0)
    builder = BatchBuilder(store, MaskingOptions(), 7, seed=0)
    plain, shapes, added = set(), set(), 0.0
    for step in stream_steps(table, builder, batch_size=64, steps=60):
        [batch] = step.micro_batches
        rounded = round_batch(batch, 48)
        plain.add(len(batch.packed.ids))
        shapes.add((len(rounded.packed.ids), len(rounded.target_ids)))
        added += len(rounded.packed.ids) / len(batch.packed.ids) - 1
        assert len(rounded.next_labels) == 68
        assert rounded.packed.max_seqlen == 48
    assert len(plain) > 50
    assert len(shapes) <= 10
    assert added / 60 < 0.04


def test_no_value_of_a_tensor_is_read() -> None:
    """On the meta device there is none; so a GPU is not waited for, either."""
    batch = round_batch(batch_of([20, 7, 7]).to("meta"), 96)
    assert batch.packed.ids.device.type == "meta"
    wanted = round_batch(batch_of([20, 7, 7]), 96)
    assert batch.packed.ids.shape == wanted.packed.ids.shape
    assert batch.packed.cu_seqlens.dtype == wanted.packed.cu_seqlens.dtype
    assert replace(batch.packed, cu_seqlens=wanted.packed.cu_seqlens).lengths[:3] == [20, 7, 7]
