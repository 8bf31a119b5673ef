"""The training path of CUDA as far as a CPU can tell: compiled code, its graphs and its formulas.

torch.compile does not follow the shape checks of the tests, so compiled code runs in a process of
its own without them: `python -m tests.training.test_compiled`. On the meta device shapes are
computed and nothing runs; the backend "aot_eager" traces the backward pass and generates no code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit import objectives
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.model import attention as attention_module
from bertkit.model.encoder import Encoder, Layer, ModelConfig
from bertkit.model.heads import (
    LanguageHead,
    PretrainingModel,
    ReplacedTokenModel,
    aligned_linear,
)
from bertkit.model.native.attention import HAS_FLASH, WINDOWS, flash
from bertkit.objectives import pretraining_objective, replaced_objective, total_loss
from bertkit.pretraining_data.batch import pack
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.training.device import autocast
from bertkit.training.optimizer import build_optimizer
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import ModelSize, Phases, PretrainRecipe, Training
from bertkit.training.step import LoopSettings, compile_in_training, train_steps
from tests.conftest import tiny_config

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
CONFIG = tiny_config(
    500, hidden_size=64, num_hidden_layers=3, intermediate_size=256, max_position_embeddings=128
)
NO_DROPOUT = replace(CONFIG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def ragged_batch(rng: np.random.Generator, vocabulary: int = 500) -> PretrainingBatch:
    """Return random examples whose number, lengths and targets differ from batch to batch."""
    lengths = -np.sort(-rng.integers(8, 129, int(rng.integers(4, 40))))
    ids = rng.integers(5, vocabulary, int(lengths.sum()))
    targets = np.flatnonzero(rng.random(len(ids)) < 0.15)
    sequences = np.split(ids, np.cumsum(lengths)[:-1])
    segments = [np.arange(length) > 4 for length in lengths]
    return PretrainingBatch(
        pack([row.tolist() for row in sequences], [row.astype(int).tolist() for row in segments]),
        torch.from_numpy(targets),
        torch.from_numpy(ids[targets]),
        torch.from_numpy(rng.integers(0, 2, len(lengths))),
    )


def compile_all(model: torch.nn.Module, backend: Any) -> Any:
    """Compile what `compile_training` does, with another backend."""
    for module in model.modules():
        if isinstance(module, Layer | LanguageHead):
            compile_in_training(module, backend=backend, fullgraph=True)
    return torch.compile(
        objectives.cross_entropy_sums, dynamic=True, fullgraph=True, backend=backend
    )


def learn(model: Any, objective: Any, batch: PretrainingBatch) -> dict[str, torch.Tensor]:
    """Return all sums and gradients of a batch by name."""
    model.zero_grad()
    sums = objective(model, batch)
    total_loss(sums, batch.counts).backward()  # type: ignore[no-untyped-call]
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {name: one.value.detach() for name, one in sums.items()} | gradients


def count_graphs(kernel: str, electra: bool) -> dict[str, Any]:
    """Run 50 ragged batches, forward and backward, on the meta device; return what was compiled."""
    from torch._dynamo.testing import CompileCounter
    from torch._dynamo.utils import counters

    counters.clear()
    attention_module.choose_kernel = lambda query: kernel
    counter, rng = CompileCounter(), np.random.default_rng(0)
    with torch.device("meta"):
        model: Any = ReplacedTokenModel(CONFIG, 0.5) if electra else PretrainingModel(CONFIG)
    model = model.bfloat16().train()
    objective = replaced_objective if electra else pretraining_objective
    compiled = compile_all(model, counter)
    for _ in range(50):
        batch = ragged_batch(rng).to("meta")
        sums = objective(model, batch, cross_entropy=compiled)
        total_loss(sums, batch.counts).backward()  # type: ignore[no-untyped-call]
    trained = [p for p in model.parameters() if p.requires_grad]
    with torch.no_grad():
        objective(model.eval(), ragged_batch(rng).to("meta"))
    return {
        "graphs": counter.frame_count,
        "breaks": dict(counters["graph_break"]),
        "without_gradient": sum(p.grad is None for p in trained),
    }


def compare_compiled() -> dict[str, float]:
    """Return how far losses and gradients of compiled code are from those of uncompiled code."""
    attention_module.choose_kernel = lambda query: "padded"
    rng = np.random.default_rng(0)
    torch.manual_seed(0)
    model = PretrainingModel(NO_DROPOUT).train()
    batches = [ragged_batch(rng) for _ in range(3)]
    wanted = [learn(model, pretraining_objective, batch) for batch in batches]
    compiled = compile_all(model, "aot_eager")
    objective = lambda *given: pretraining_objective(*given, cross_entropy=compiled)  # noqa: E731
    got = [learn(model, objective, batch) for batch in batches]
    return {
        name: max(distance(a[name], b[name]) for a, b in zip(got, wanted, strict=True))
        for name in wanted[0]
        if not name.endswith("accuracy") and "query_key_value.bias" not in name  # the key's is 0
    }


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return ||got - wanted|| / ||wanted||."""
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.slow
def test_fifty_ragged_batches_are_compiled_once_and_compute_the_same() -> None:
    """Middle layers, the last layer (it computes chosen rows), the head, and two losses.

    ELECTRA has such a generator with one loss, and the discriminator's layers. All cases share the
    process without shape checks, because tracing starts slowly.
    """
    environment = {k: v for k, v in os.environ.items() if k != "BERTKIT_CHECK_SHAPES"}
    command = [sys.executable, "-m", "tests.training.test_compiled"]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    for case in ("flash", "flash electra"):
        assert found[case] == {"graphs": 5, "breaks": {}, "without_gradient": 0}
    for name, far in found["compare"].items():
        assert far < 1e-4, name


def test_compiling_is_refused_on_a_cpu(store: TokenStore, tmp_path: Path) -> None:
    recipe = PretrainRecipe(
        model=ModelSize(hidden_size=32, num_hidden_layers=1, num_attention_heads=1),
        phases=Phases(lengths=(32,), steps=(2,), batch_sizes=(4,), max_predictions=(5,)),
        training=Training(warmup_steps=1),
    )
    with pytest.raises(BertkitError, match=r"compiled training needs a CUDA device; .* on cpu"):
        pretrain(recipe, store, tmp_path / "run", device="cpu", compiled=True)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("direction", sorted(WINDOWS))
def test_flash_attention_is_callable_and_differentiable(direction: str) -> None:
    """The private operator takes our arguments, drops weights and has a gradient; see `flash`."""
    assert HAS_FLASH
    assert torch.Tag.nondeterministic_seeded in torch.ops.aten._flash_attention_forward.default.tags
    packed = pack([[1] * 5, [1] * 3]).to("meta")
    together = torch.randn(8, 3, 2, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    output = flash(together, packed, direction, 0.1)
    assert (output.shape, output.dtype) == ((8, 2, 64), torch.bfloat16)
    output.float().sum().backward()
    assert together.grad is not None
    assert together.grad.shape == together.shape


@pytest.mark.parametrize("columns", [1, 64, 500, 30522])
def test_an_aligned_product_equals_the_plain_one(columns: int) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(*size, generator=generator) for size in ((7, 8), (columns, 8), (columns,))]
    found = []
    for product in (aligned_linear, torch.nn.functional.linear):
        x, weight, bias = (part.clone().requires_grad_() for part in parts)
        logits = product(x, weight, bias)
        loss = torch.nn.functional.cross_entropy(logits, torch.arange(7) % columns)
        loss.backward()  # type: ignore[no-untyped-call]
        found.append([logits, loss, x.grad, weight.grad, bias.grad])
    for got, wanted in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted)


def test_moving_a_batch_keeps_the_lengths_that_the_host_knows() -> None:
    batch = ragged_batch(np.random.default_rng(0))
    moved = batch.to("meta")
    assert moved.packed.lengths == batch.packed.lengths  # reading them from meta would raise
    assert moved.packed.ids.device.type == moved.next_labels.device.type == "meta"
    assert moved.counts == batch.counts


@pytest.mark.parametrize("precision", ["bf16", "bf16-residual"])
@pytest.mark.parametrize("config", [NO_DROPOUT, replace(NO_DROPOUT, embedding_size=16)])
def test_the_precision_decides_the_type_of_hidden_states(
    precision: str, config: ModelConfig
) -> None:
    torch.manual_seed(0)
    encoder = Encoder(config)
    packed = ragged_batch(np.random.default_rng(0)).packed
    with torch.no_grad():
        wanted = encoder(packed)
        with autocast(CPU, precision):
            states = encoder.layers_of(packed)
    types = {"bf16": torch.float32, "bf16-residual": torch.bfloat16}
    assert {state.dtype for state in states} == {types[precision]}
    assert distance(states[-1].float(), wanted) < 0.02


@pytest.mark.slow
def test_a_bf16_residual_stream_learns_as_well() -> None:
    """200 updates from the same weights on the same batches, in bf16 emulated on this CPU."""
    losses = {name: last_losses(name) for name in ("fp32", "bf16", "bf16-residual")}
    assert losses["fp32"] < 0.2 * np.log(40), "the network has learned something to lose"
    assert abs(losses["bf16-residual"] - losses["fp32"]) < 0.005
    assert abs(losses["bf16-residual"] - losses["bf16"]) < 0.005


def counted_batch(rng: np.random.Generator) -> PretrainingBatch:
    """Return sequences that count from 5 or from 25, with masked tokens."""
    late = rng.integers(0, 2, (16, 1))
    ids = 5 + 20 * late + np.arange(20)
    masked = rng.random(ids.shape) < 0.15
    masked[:, 0] = True
    targets = np.flatnonzero(masked)
    return PretrainingBatch(
        pack(np.where(masked, 4, ids).tolist()),
        torch.from_numpy(targets),
        torch.from_numpy(ids.reshape(-1)[targets]),
        torch.from_numpy(late[:, 0]),
    )


def last_losses(precision: str) -> float:
    """Return the mean MLM loss of the last 20 of 200 updates."""
    torch.manual_seed(0)
    model = PretrainingModel(replace(CONFIG, vocab_size=45, num_hidden_layers=2)).train()
    rng = np.random.default_rng(1)
    settings = LoopSettings(
        device=CPU,
        precision=precision,
        seed=0,
        max_gradient_norm=1.0,
        learning_rate=lambda step: 2e-3 * min(1.0, (step + 1) / 20),
    )
    steps = (([counted_batch(rng)], None) for _ in range(200))
    optimizer = build_optimizer(model, learning_rate=2e-3)
    losses = [
        float(record.sums["mlm_loss"].value) / record.counts["targets"]
        for record in train_steps(model, optimizer, pretraining_objective, steps, settings)
    ]
    return float(np.mean(losses[-20:]))


def main() -> None:
    """Print what the test of compiled code reads."""
    found = {"compare": compare_compiled()}
    for case in ("flash", "flash electra"):
        torch._dynamo.reset()
        found[case] = count_graphs("flash", electra="electra" in case)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
