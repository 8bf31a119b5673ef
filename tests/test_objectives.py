"""The pre-training losses by hand; that 1 x N equals N x 1 is in training/test_loop.py too."""

from __future__ import annotations

import math

import pytest
import torch

from bertkit.examples.packed import pack
from bertkit.examples.stream import PretrainingBatch
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel, PretrainingOutput
from bertkit.objectives import Sum, pretraining_objective, right, total_loss


def batch_of(
    sequences: list[list[int]], places: list[int], ids: list[int], labels: list[int]
) -> PretrainingBatch:
    return PretrainingBatch(
        packed=pack(sequences),
        target_positions=torch.tensor(places, dtype=torch.int64),
        target_ids=torch.tensor(ids, dtype=torch.int64),
        next_labels=torch.tensor(labels),
    )


class Fixed(PretrainingModel):
    """A network that gives the logits it was made with."""

    def __init__(self, mlm_logits: torch.Tensor, nsp_logits: torch.Tensor) -> None:
        super().__init__(ModelConfig(vocab_size=8, hidden_size=2, num_attention_heads=1))
        self.output = PretrainingOutput(mlm_logits, nsp_logits)

    def forward(self, *_: object) -> PretrainingOutput:
        return self.output


def test_losses_by_hand() -> None:
    model = Fixed(
        torch.tensor([[0.0, 0.0, 0.0], [math.log(2), 0.0, 0.0]]),
        torch.tensor([[math.log(3), 0.0]]),
    )
    batch = batch_of([[5, 6, 7]], [0, 1], [2, 0], [0])
    sums = pretraining_objective(model, batch)
    assert float(sums["mlm_loss"].value) == pytest.approx(math.log(3) + math.log(2))
    assert float(sums["nsp_loss"].value) == pytest.approx(math.log(4 / 3))
    assert float(sums["mlm_accuracy"].value) == 1  # of equal logits the first one counts
    assert float(sums["nsp_accuracy"].value) == 1
    loss = total_loss(sums, {"targets": 2, "sequences": 1})
    assert float(loss) == pytest.approx(math.log(6) / 2 + math.log(4 / 3))
    wrong = pretraining_objective(model, batch_of([[5, 6, 7]], [0, 1], [1, 1], [1]))
    assert float(wrong["mlm_accuracy"].value) == float(wrong["nsp_accuracy"].value) == 0


def test_sums_are_fp32_even_from_bf16_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4000, 30, generator=generator).bfloat16()
    ids = torch.randint(0, 30, (4000,), generator=generator)
    batch = batch_of([[5]] * 5, [0] * 4000, ids.tolist(), [0] * 5)
    sums = pretraining_objective(Fixed(logits, logits[:5, :2]), batch)
    assert {found.value.dtype for found in sums.values()} == {torch.float32}
    exact = -logits.double().log_softmax(-1)[torch.arange(4000), ids].sum()
    assert float(sums["mlm_loss"].value) == pytest.approx(float(exact), rel=1e-5)


def test_no_targets_is_no_loss_and_no_nan() -> None:
    model = Fixed(torch.zeros(0, 30), torch.zeros(1, 2))
    sums = pretraining_objective(model, batch_of([[5]], [], [], [0]))
    assert float(total_loss(sums, {"targets": 0, "sequences": 1})) == pytest.approx(math.log(2))


def test_only_losses_are_minimised() -> None:
    sums = {"a_loss": Sum(torch.tensor(6.0), "n"), "a_accuracy": Sum(torch.tensor(9.0), "n")}
    assert float(total_loss(sums, {"n": 3})) == 2.0


def test_right_counts_rows() -> None:
    logits = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert float(right(logits, torch.tensor([1, 1, 1]))) == 2


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
        batch = batch_of(
            [sequences[row] for row in rows],
            positions,
            [index for row in rows for index in ids[row]],
            [labels[row] for row in rows],
        )
        sums = pretraining_objective(model, batch)
        total_loss(sums, {"targets": 5, "sequences": 3}).backward()

    backward([0, 1, 2])
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    backward([0])
    backward([1, 2])
    for expected, parameter in zip(whole, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=1e-4, atol=1e-6)
