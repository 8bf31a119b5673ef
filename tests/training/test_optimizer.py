"""Optimizer traces against NumPy written from the paper's formulas, groups, schedules, clipping."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bertkit.errors import BertkitError
from bertkit.training.optimizer import (
    AdamW,
    build_optimizer,
    clip_gradients,
    orthogonalize,
    parameter_groups,
)
from bertkit.training.recipe import ModelSize, Objectives, learning_rate


class Toy(nn.Module):
    """Everything that decides about decay: embedding, tied decoder, LayerNorm, biases."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.norm = nn.LayerNorm(6)
        self.dense = nn.Linear(6, 6)
        self.decoder = nn.Linear(6, 11, bias=False)
        self.decoder.weight = self.words.weight
        self.output_bias = nn.Parameter(torch.zeros(11))

    def forward(self, ids: Tensor) -> Tensor:
        return self.decoder(self.dense(self.norm(self.words(ids)))) + self.output_bias


def toy(seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    model = Toy()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def numpy_adam(
    value: np.ndarray, gradients: list[np.ndarray], rates: list[float], decay: float, correct: bool
) -> np.ndarray:
    """Adam with decoupled decay in float64, one parameter, every step written out."""
    beta1, beta2, epsilon = 0.9, 0.999, 1e-6
    average, square = np.zeros_like(value), np.zeros_like(value)
    for count, (gradient, rate) in enumerate(zip(gradients, rates, strict=True), start=1):
        average = beta1 * average + (1 - beta1) * gradient
        square = beta2 * square + (1 - beta2) * gradient**2
        first = average / (1 - beta1**count) if correct else average
        second = square / (1 - beta2**count) if correct else square
        value = value - rate * (first / (np.sqrt(second) + epsilon) + decay * value)
    return value


@pytest.mark.parametrize("bias_correction", [True, False])
def test_twelve_updates_equal_numpy(bias_correction: bool) -> None:
    model = toy()
    start = {name: value.detach().double().numpy() for name, value in model.named_parameters()}
    optimizer = build_optimizer(model, learning_rate=9.9, bias_correction=bias_correction)
    rates = [0.01 * (i + 1) for i in range(12)]
    random = np.random.default_rng(0)
    gradients = {
        name: [random.normal(size=value.shape) * 10.0 ** random.integers(-6, 2) for _ in rates]
        for name, value in start.items()
    }
    for i, rate in enumerate(rates):
        for name, value in model.named_parameters():
            value.grad = torch.tensor(gradients[name][i], dtype=torch.float32)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    decayed = {"words.weight": 0.01, "dense.weight": 0.01}
    for name, value in model.named_parameters():
        expected = numpy_adam(
            start[name], gradients[name], rates, decayed.get(name, 0.0), bias_correction
        )
        np.testing.assert_allclose(value.detach().numpy(), expected, rtol=2e-5, atol=2e-6)


def test_updates_are_those_of_torch_to_the_bit() -> None:
    traces = []
    for own in (True, False):
        model = toy()
        optimizer: AdamW | torch.optim.AdamW
        if own:
            optimizer = build_optimizer(model, learning_rate=0.01, weight_decay=0.1)
        else:
            groups = parameter_groups(model, 0.1)
            optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-6, fused=True)
        for seed in range(5):
            ids = torch.randint(11, (4, 3), generator=torch.Generator().manual_seed(seed))
            loss = model(ids).logsumexp(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        traces.append({name: value.detach().clone() for name, value in model.named_parameters()})
    for name, value in traces[0].items():
        assert torch.equal(value, traces[1][name]), name


STEP = """
import sys, torch
from bertkit.training.optimizer import build_optimizer, clip_gradients
model = torch.nn.Linear(2, 2)
optimizer = build_optimizer(model, learning_rate=0.1)
model(torch.ones(1, 2)).sum().backward()
clip_gradients(model, 1.0)
optimizer.step()
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_an_update_does_not_import_the_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", STEP], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def small_bert() -> nn.Module:
    torch.manual_seed(0)
    size = ModelSize(hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    return Objectives().model(size.config(60))


def test_muon_updates_the_matrices_of_layers_as_torch_does() -> None:
    """torch computes in bf16, and knows nothing of a query, key and value in one parameter."""
    model, rates = small_bert(), [0.01, 0.02, 0.03]
    optimizer = build_optimizer(model, learning_rate=9.9, weight_decay=0.1, optimizer="muon")
    named = dict(model.named_parameters())
    matrices = {
        name: [part.detach().clone().requires_grad_() for part in weight.chunk(parts)]
        for name, weight in named.items()
        for parts in [3 if "query_key_value" in name else 1]
        if weight.ndim == 2 and (".layers." in name or name == "mlm.dense.weight")
    }
    assert len(matrices) == 2 * 4 + 1
    expected = torch.optim.Muon(
        [part for parts in matrices.values() for part in parts],
        weight_decay=0.1,
        adjust_lr_fn="match_rms_adamw",
    )
    for rate in rates:
        for name, weight in named.items():
            weight.grad = torch.randn_like(weight)
            parts = matrices.get(name, [])
            for own, part in zip(parts, weight.grad.chunk(max(1, len(parts))), strict=bool(parts)):
                own.grad = part.clone()
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        expected.param_groups[0]["lr"] = rate
        expected.step()
    for name, parts in matrices.items():
        torch.testing.assert_close(named[name], torch.cat(parts), rtol=0.02, atol=3e-3)


def test_muon_leaves_all_other_parameters_to_adamw() -> None:
    ends = []
    for kind in ("adamw", "muon"):
        model = small_bert()
        optimizer = build_optimizer(model, learning_rate=0.01, optimizer=kind)
        for weight in model.parameters():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        ends.append({name: weight.detach() for name, weight in model.named_parameters()})
    differing = {name for name, weight in ends[0].items() if not torch.equal(weight, ends[1][name])}
    assert differing == {
        *(f"encoder.layers.{i}.{name}.weight" for i in range(2) for name in LAYER_MATRICES),
        "mlm.dense.weight",
    }


LAYER_MATRICES = ("query_key_value", "attention_output", "intermediate", "output")


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 24, 8), (2, 8, 24)])
def test_orthogonalizing_keeps_directions_and_levels_singular_values(
    shape: tuple[int, int, int],
) -> None:
    torch.manual_seed(1)
    given = torch.randn(shape)
    found = orthogonalize(given)
    left, _, right = torch.linalg.svd(given, full_matrices=False)
    levels = left.mT @ found @ right.mT
    diagonal = levels.diagonal(dim1=-2, dim2=-1)
    torch.testing.assert_close(levels, torch.diag_embed(diagonal), rtol=0, atol=1e-4)
    assert diagonal.max() < 1.3
    assert diagonal.min() > 0.3


def test_a_parameter_without_gradient_is_left_alone() -> None:
    model = toy()
    optimizer = build_optimizer(model, learning_rate=0.1, bias_correction=False)
    before = model.dense.weight.detach().clone()
    model.output_bias.grad = torch.ones(11)
    optimizer.step()
    assert torch.equal(model.dense.weight, before)
    assert not torch.equal(model.output_bias, torch.zeros(11))


def check_every_parameter_once(model: nn.Module) -> list[dict[str, Any]]:
    groups = parameter_groups(model, 0.01)
    by_name = dict(model.named_parameters())
    names = [name for group in groups for name in group["names"]]
    assert sorted(names) == sorted(by_name)
    for group in groups:
        assert [id(by_name[name]) for name in group["names"]] == [id(p) for p in group["params"]]
    return groups


def test_every_parameter_is_in_exactly_one_group() -> None:
    check_every_parameter_once(toy())


def test_groups_of_a_real_bert() -> None:
    from bertkit.model.encoder import ModelConfig
    from bertkit.model.heads import PretrainingModel

    size = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = PretrainingModel(ModelConfig(vocab_size=31, intermediate_size=16, **size))
    decay, exempt = check_every_parameter_once(model)
    shapes = dict(model.named_parameters())
    # in BERT the rule comes down to this: matrices decay, vectors do not
    assert all(shapes[name].dim() == 2 for name in decay["names"])
    assert all(shapes[name].dim() == 1 for name in exempt["names"])


def test_frozen_parameters_are_in_no_group() -> None:
    model = toy()
    model.dense.requires_grad_(False)
    names = [name for group in parameter_groups(model, 0.01) for name in group["names"]]
    assert not [name for name in names if name.startswith("dense")]
    model.requires_grad_(False)
    with pytest.raises(BertkitError, match="no parameter to train"):
        build_optimizer(model, learning_rate=1.0)


def test_linear_schedule_by_hand() -> None:
    rates = [learning_rate(s, peak=1.0, warmup_steps=4, total_steps=8) for s in range(10)]
    assert rates == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]


def test_original_schedule_by_hand_jumps_at_the_end_of_warm_up() -> None:
    rates = [
        learning_rate(s, peak=1.0, warmup_steps=4, total_steps=8, schedule="original")
        for s in range(10)
    ]
    assert rates == [0.0, 0.25, 0.5, 0.75, 0.5, 0.375, 0.25, 0.125, 0.0, 0.0]
    # the paper's: 1e-4, 10,000 of 1,000,000 steps; the jump is to 99 % of the peak
    paper = {"peak": 1e-4, "warmup_steps": 10_000, "total_steps": 1_000_000}
    assert learning_rate(9_999, **paper, schedule="original") == pytest.approx(0.9999e-4)
    assert learning_rate(10_000, **paper, schedule="original") == pytest.approx(0.99e-4)


@given(
    total=st.integers(2, 400),
    share=st.floats(0, 0.99),
    schedule=st.sampled_from(["linear", "original", "constant"]),
)
@settings(max_examples=40, deadline=None)
def test_schedules_rise_then_never_rise_and_stay_within_the_peak(
    total: int, share: float, schedule: str
) -> None:
    warmup = int(share * total)
    rates = [
        learning_rate(s, peak=3.0, warmup_steps=warmup, total_steps=total, schedule=schedule)
        for s in range(total)
    ]
    assert all(0 <= rate <= 3.0 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    assert rates[-1] > 0  # no update is wasted at the end


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(BertkitError, match="did you mean 'linear'"):
        learning_rate(0, peak=1.0, warmup_steps=0, total_steps=4, schedule="liner")
    with pytest.raises(BertkitError, match="warm-up of 4 steps must end before the 4 steps"):
        learning_rate(0, peak=1.0, warmup_steps=4, total_steps=4)


def test_clipping_scales_all_gradients_together() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = torch.tensor([[3.0, 0.0]])
    model.bias.grad = torch.tensor([4.0])
    norm = clip_gradients(model, 1.0)
    assert norm.item() == pytest.approx(5.0)
    torch.testing.assert_close(model.weight.grad, torch.tensor([[0.6, 0.0]]))
    torch.testing.assert_close(model.bias.grad, torch.tensor([0.8]))
    assert clip_gradients(model, 100.0).item() == pytest.approx(1.0, rel=1e-5)
    torch.testing.assert_close(model.bias.grad, torch.tensor([0.8]))  # below: unchanged


def test_clipping_reports_a_gradient_that_is_not_finite() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = torch.tensor([[math.inf, 0.0]])
    assert not math.isfinite(clip_gradients(model, 1.0).item())
