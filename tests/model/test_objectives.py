"""The pre-training losses by hand; that 1 x N equals N x 1 is in training/test_loop.py too."""

from __future__ import annotations

import math

import pytest
import torch

from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import (
    PretrainingModel,
    PretrainingOutput,
    ReplacedTokenModel,
    cross_entropy_sums,
    num_correct,
    pretraining_objective,
    total_loss,
)
from bertkit.pretraining_data.batch import pack
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.training.recipe import Objectives
from tests.conftest import tiny_config


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
        torch.tensor([[0.0, 0.0, 0.0], [math.log(2), 0.0, 0.0]]), torch.tensor([[math.log(3), 0.0]])
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_in_parts_equal_the_plain_formula(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loss, correct predictions and gradients, with ties for the highest logit among them."""
    # three rows, the last part two
    monkeypatch.setattr(
        "bertkit.model.heads.CACHED_LOGITS", 3 * 40
    )  # three rows, the last part two
    generator = torch.Generator().manual_seed(0)
    given = torch.randint(-4, 5, (11, 40), generator=generator).to(dtype)
    labels = given.argsort(dim=-1, descending=True)[:, 0]
    labels[::4] = torch.randint(40, (3,), generator=generator)
    gradients = []
    for in_parts in (True, False):
        logits = given.clone().requires_grad_()
        if in_parts:
            sums = cross_entropy_sums("mlm", logits, labels, "targets")
            loss, correct = sums["mlm_loss"].value, sums["mlm_accuracy"].value
        else:
            loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
            torch.testing.assert_close(sums["mlm_loss"].value, loss)
            assert correct == num_correct(logits.float(), labels)
            assert 0 < correct < 11
        (loss / 7).backward()
        gradients.append(logits.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0] is not None
    assert gradients[0].dtype == dtype


def test_no_targets_is_no_loss_and_no_nan() -> None:
    model = Fixed(torch.zeros(0, 30), torch.zeros(1, 2))
    sums = pretraining_objective(model, batch_of([[5]], [], [], [0]))
    assert float(total_loss(sums, {"targets": 0, "sequences": 1})) == pytest.approx(math.log(2))


def test_micro_batches_with_unequal_targets_give_the_gradient_of_the_whole() -> None:
    torch.manual_seed(0)
    config = tiny_config(
        30, hidden_size=8, num_hidden_layers=1, intermediate_size=16, max_position_embeddings=8
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


DIRECTIONS = {"mlm": "bidirectional", "clm": "left_to_right"}


@pytest.mark.parametrize("pair", ["nsp", "sop", "none", "single-segment"])
@pytest.mark.parametrize("token", ["mlm", "clm"])
def test_every_pair_of_objectives(token: str, pair: str) -> None:
    """Which network is built, how it looks at the text, and what its losses are called."""
    wanted = Objectives(token=token, pair=pair)
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=8, direction=wanted.direction,
    )  # fmt: skip
    assert config.direction == DIRECTIONS[token]
    model = wanted.model(config)
    assert isinstance(model, PretrainingModel)
    assert (model.nsp is not None) == wanted.has_pairs == (pair in ("nsp", "sop"))
    batch = batch_of([[1, 2, 3, 4], [5, 6, 7]], [1, 5], [2, 3], [0, 1])
    sums = wanted.function()(model, batch)
    names = {"mlm" if token == "mlm" else "lm"}
    names |= {pair} if pair in ("nsp", "sop") else set()
    assert set(sums) == {f"{name}_{end}" for name in names for end in ("loss", "accuracy")}
    total_loss(sums, batch.counts).backward()
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    graded = {n for n, p in model.named_parameters() if p.grad is not None}
    assert trained == graded, "no parameter waits in vain for a gradient"


def test_replaced_builds_two_networks() -> None:
    wanted = Objectives(token="rtd", pair="single-segment", generator_share=0.5)
    with torch.device("meta"):
        model = wanted.model(ModelConfig(vocab_size=30, hidden_size=8, num_attention_heads=2))
    assert isinstance(model, ReplacedTokenModel)
    assert model.generator.config.hidden_size == 4
    assert (wanted.direction, wanted.has_pairs) == ("bidirectional", False)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token": "mml"}, r"objectives\.token cannot be 'mml'; did you mean 'mlm'"),
        ({"pair": "non"}, r"objectives\.pair cannot be 'non'; did you mean 'none'"),
        ({"token": "rtd"}, r"needs objectives\.pair = none or single-segment"),
        ({"token": "rtd", "pair": "sop"}, r"needs objectives\.pair"),
        ({"generator_share": 0.0}, r"objectives\.generator_share must be above 0, at most 1"),
        ({"generator_share": 1.5}, r"at most 1, not 1\.5"),
        ({"generator_share": math.nan}, r"not nan"),
    ],
)
def test_objectives_that_cannot_be(fields: dict[str, float | str], message: str) -> None:
    with pytest.raises(BertkitError, match=message) as error:
        Objectives(**fields)
    assert "\n" not in str(error.value)
