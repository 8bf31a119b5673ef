from __future__ import annotations

import copy
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.model.heads import LossSum, PretrainingModel, pretraining_objective, total_loss
from bertkit.pretraining_data.examples import MaskingOptions, PairOptions
from bertkit.pretraining_data.loader import START, BatchBuilder, ExampleSampler, stream_steps
from bertkit.training.optimizer import build_optimizer
from bertkit.training.start import baselines
from bertkit.training.step import (
    LoopSettings,
    check_finite,
    evaluate_batches,
    mean_losses,
    merge_sums,
    train_steps,
)
from tests.conftest import tiny_config

SETTINGS = LoopSettings(
    device=torch.device("cpu"),
    precision="fp32",
    seed=3,
    max_gradient_norm=1.0,
    learning_rate=lambda step: 1e-3,
)


@pytest.fixture
def model(store: TokenStore) -> PretrainingModel:
    torch.manual_seed(0)
    config = tiny_config(
        store.tokenizer,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return PretrainingModel(config).train()


def steps(store: TokenStore, accumulate: int = 1) -> Iterator[object]:
    table = ExampleSampler(store, PairOptions(max_length=48), 0)
    builder = BatchBuilder(store, MaskingOptions(), 7, 0)
    return stream_steps(table, builder, batch_size=24, steps=30, micro_batches=accumulate)


def train(model: PretrainingModel, store: TokenStore, updates: int, accumulate: int = 1):
    optimizer = build_optimizer(model, learning_rate=1e-3)
    records = train_steps(
        model, optimizer, pretraining_objective, steps(store, accumulate), SETTINGS
    )
    return [record for _, record in zip(range(updates), records, strict=False)]


@pytest.mark.slow
@pytest.mark.parametrize("accumulate", [2, 5, 24])
def test_micro_batches_add_up_to_the_whole_batch(
    model: PretrainingModel, store: TokenStore, accumulate: int
) -> None:
    """1 x 24 equals 24 x 1, although each micro-batch has another number of targets."""
    divided = copy.deepcopy(model)
    whole = train(model, store, 4)
    parts = train(divided, store, 4, accumulate)
    for first, second in zip(whole, parts, strict=True):
        assert first.counts == second.counts
        assert first.tokens == second.tokens
        assert first.after == second.after
        assert float(first.gradient_norm) == pytest.approx(float(second.gradient_norm), rel=1e-4)
        for name, mean in mean_losses(first.sums, first.counts).items():
            assert mean == pytest.approx(mean_losses(second.sums, second.counts)[name], rel=1e-4)
    for one, other in zip(model.parameters(), divided.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-5)


def test_first_loss_and_gradient_by_hand(model: PretrainingModel, store: TokenStore) -> None:
    """The loop's first update against plain autograd and an unfused AdamW."""
    plain = copy.deepcopy(model)
    (record,) = train(model, store, 1)
    batch = next(iter(steps(store))).micro_batches[0]
    output = plain(batch.packed, batch.target_positions)
    mlm = torch.nn.functional.cross_entropy(output.mlm_logits, batch.target_ids)
    nsp = torch.nn.functional.cross_entropy(output.nsp_logits, batch.next_labels)
    (mlm + nsp).backward()
    means = mean_losses(record.sums, record.counts)
    assert means["mlm_loss"] == pytest.approx(mlm.item(), rel=1e-5)
    assert means["nsp_loss"] == pytest.approx(nsp.item(), rel=1e-5)
    assert means["loss"] == pytest.approx((mlm + nsp).item(), rel=1e-5)
    norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    assert float(record.gradient_norm) == pytest.approx(float(norm), rel=1e-4)
    decayed = [p for n, p in plain.named_parameters() if "norm" not in n and "bias" not in n]
    others = [p for n, p in plain.named_parameters() if "norm" in n or "bias" in n]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    torch.optim.AdamW(groups, lr=1e-3, eps=1e-6, foreach=False).step()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_training_learns(model: PretrainingModel, store: TokenStore) -> None:
    records = train(model, store, 30)
    first, last = (mean_losses(records[i].sums, records[i].counts) for i in (0, -1))
    assert last["mlm_loss"] < first["mlm_loss"] - 0.5


def test_dropout_depends_on_seed_and_step_only(model: PretrainingModel, store: TokenStore) -> None:
    for module in model.modules():
        if hasattr(module, "probability"):
            module.probability = 0.1
    other = copy.deepcopy(model)
    train(model, store, 3)
    torch.manual_seed(999)
    torch.rand(17)
    train(other, store, 3)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, two)


def test_evaluation_turns_dropout_off_and_back_on(
    model: PretrainingModel, store: TokenStore
) -> None:
    for module in model.modules():
        if hasattr(module, "probability"):
            module.probability = 0.5
    table = ExampleSampler(store, PairOptions(max_length=48), 0)
    builder = BatchBuilder(store, MaskingOptions(), 7, 0)
    rows, _ = table.take(START, 40)
    whole, counts = evaluate_batches(model, pretraining_objective, [builder[rows]], SETTINGS)
    parts = [builder[rows[start : start + 7]] for start in range(0, 40, 7)]
    halves, same = evaluate_batches(model, pretraining_objective, parts, SETTINGS)
    assert model.training
    assert counts == same
    assert mean_losses(whole, counts) == pytest.approx(mean_losses(halves, same), rel=1e-4)


def test_total_loss_divides_each_loss_by_its_count() -> None:
    sums = {
        "a_loss": LossSum(torch.tensor(6.0), "targets"),
        "b_loss": LossSum(torch.tensor(5.0), "sequences"),
        "accuracy": LossSum(torch.tensor(99.0), "sequences"),
    }
    assert total_loss(sums, {"targets": 3, "sequences": 10}) == pytest.approx(2.5)
    merged = merge_sums(merge_sums(None, sums), sums)
    assert merged["a_loss"].value == 12


@pytest.mark.parametrize("values", [(float("nan"), 1.0), (1.0, float("inf"))])
def test_divergence_is_named(values: tuple[float, float]) -> None:
    with pytest.raises(BertkitError, match=r"diverged.*at step 7 .*learning rate"):
        check_finite(*values, step=7, learning_rate=1e-3)
    check_finite(1.0, 2.0, step=7, learning_rate=1e-3)


def test_baselines_by_hand(store: TokenStore) -> None:
    counts = store.unigrams.astype(float)
    known = baselines(store, 0.6)
    shares = [count / counts.sum() for count in counts if count]
    assert known["unigram_entropy"] == pytest.approx(-sum(p * np.log(p) for p in shares))
    assert known["most_frequent_accuracy"] == pytest.approx(counts.max() / counts.sum())
    assert known["nsp_majority"] == 0.6
    assert baselines(store, 0.3)["nsp_majority"] == 0.7
