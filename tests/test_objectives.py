"""The pre-training losses by hand, and the promise that 1 x N equals N x 1."""

from __future__ import annotations

import math

import pytest
import torch

from bertkit.examples.packed import pack
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel, PretrainingOutput
from bertkit.objectives import pretraining_loss, pretraining_sums


def test_losses_by_hand() -> None:
    output = PretrainingOutput(
        mlm_logits=torch.tensor([[0.0, 0.0, 0.0], [math.log(2), 0.0, 0.0]]),
        nsp_logits=torch.tensor([[math.log(3), 0.0]]),
    )
    sums = pretraining_sums(output, torch.tensor([2, 0]), torch.tensor([0]))
    assert float(sums.mlm_loss_sum) == pytest.approx(math.log(3) + math.log(2))
    assert float(sums.nsp_loss_sum) == pytest.approx(math.log(4 / 3))
    assert (float(sums.mlm_correct), float(sums.nsp_correct)) == (1, 1)
    loss = pretraining_loss(sums, targets=2, sequences=1)
    assert float(loss.mlm) == pytest.approx(math.log(6) / 2)
    assert float(loss.total) == pytest.approx(math.log(6) / 2 + math.log(4 / 3))
    wrong = pretraining_sums(output, torch.tensor([1, 1]), torch.tensor([1]))
    assert (float(wrong.mlm_correct), float(wrong.nsp_correct)) == (0, 0)


def test_sums_are_fp32_even_from_bf16_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 30, generator=generator).bfloat16()
    output = PretrainingOutput(mlm_logits=logits, nsp_logits=logits[:5, :2])
    ids = torch.randint(0, 30, (4000,), generator=generator, dtype=torch.int32)
    sums = pretraining_sums(output, ids, torch.zeros(5, dtype=torch.int32))
    assert {value.dtype for value in sums} == {torch.float32}
    rows = torch.arange(4000)
    exact = -logits.double().log_softmax(-1)[rows, ids.long()].sum()
    assert float(sums.mlm_loss_sum) == pytest.approx(float(exact), rel=1e-5)


def test_no_targets_is_no_loss_and_no_nan() -> None:
    output = PretrainingOutput(mlm_logits=torch.zeros(0, 30), nsp_logits=torch.zeros(1, 2))
    empty = torch.zeros(0, dtype=torch.long)
    sums = pretraining_sums(output, empty, torch.zeros(1, dtype=torch.long))
    loss = pretraining_loss(sums, targets=0, sequences=1)
    assert float(loss.mlm) == 0.0
    assert float(loss.total) == pytest.approx(math.log(2))


def test_micro_batches_with_unequal_targets_give_the_gradient_of_the_whole() -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=30,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=8,
    )
    model = PretrainingModel(config).eval()
    sequences = [[1, 2, 3, 4, 5], [6, 7, 8], [9, 10, 11, 12]]
    places, ids, labels = [[1, 2, 4], [0], [3]], [[7, 8, 9], [1], [2]], [0, 1, 1]

    def backward(rows: list[int]) -> None:
        first, positions = 0, []
        for row in rows:
            positions += [first + place for place in places[row]]
            first += len(sequences[row])
        output = model(pack([sequences[row] for row in rows]), torch.tensor(positions))
        targets = torch.tensor([index for row in rows for index in ids[row]])
        sums = pretraining_sums(output, targets, torch.tensor([labels[row] for row in rows]))
        pretraining_loss(sums, targets=5, sequences=3).total.backward()

    backward([0, 1, 2])
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    backward([0])
    backward([1, 2])
    for parameter, gradient in zip(model.parameters(), whole, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-6, rtol=1e-5)
