"""What needs a CUDA device; `tests/training/test_compiled.py` has what a CPU can tell.

The tests marked `gpu` may run on a machine with little else than torch (docs/gpu.md has the
command), where warnings are no errors. Compiled code is tried in a process of its own, without the
shape checks of the tests, which torch.compile does not follow: `python -m tests.test_gpu CASE ...`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bertkit.training.state import build_train_state

from benchmarks.gpu.batches import make_batches
from bertkit.corpus.store import TokenStore
from bertkit.model import attention as attention_module
from bertkit.model.encoder import Layer, ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.objectives import pretraining_objective
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.training.device import autocast
from bertkit.training.journal import read_journal
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import Logging, ModelSize, Phases, PretrainRecipe, Training

pytestmark = pytest.mark.filterwarnings("default")

ROOT = Path(__file__).resolve().parents[1]
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CONFIG = ModelConfig(
    vocab_size=500,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=512,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    max_position_embeddings=128,
)
TOY = PretrainRecipe(
    model=ModelSize(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    ),
    phases=Phases(lengths=(32, 64), steps=(20, 10), batch_sizes=(16, 8), max_predictions=(5, 9)),
    training=Training(learning_rate=1e-3, warmup_steps=5, accumulate=2),
    logging=Logging(log_every=10, evaluate_every=15, held_out_sequences=16, checkpoint_every=30),
)


def gpu(test: Callable[..., None]) -> Any:
    """Marks a test that needs a CUDA device."""
    absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.gpu(absent(test))


def batches(count: int, tokens: int = 700) -> list[PretrainingBatch]:
    """Random pre-training batches of ragged lengths up to 128."""
    return [both.packed for both in make_batches(CONFIG, tokens, 128, count)]


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||: below 1e-5 in fp32, 1e-2 in bf16."""
    wanted = wanted.detach().double().cpu()
    return float((got.detach().double().cpu() - wanted).norm() / wanted.norm())


def learn(
    model: Any, batch: PretrainingBatch, precision: str, objective: Any
) -> dict[str, torch.Tensor]:
    """The losses of a batch and all gradients, by name."""
    device = model.mlm.bias.device
    model.zero_grad()
    with autocast(device, precision):
        sums = objective(model, batch.to(device))
    (sums["mlm_loss"].value + sums["nsp_loss"].value).backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
    return {
        name: value.value.detach() for name, value in sums.items() if "loss" in name
    } | gradients


@gpu
def test_the_network_equals_the_cpus() -> None:
    torch.manual_seed(0)
    model = PretrainingModel(CONFIG)
    [batch] = batches(1)
    wanted = learn(model, batch, "fp32", pretraining_objective)
    got = learn(model.to("cuda"), batch, "fp32", pretraining_objective)
    for name in wanted:
        if "query_key_value.bias" not in name:  # the key's part is 0 but for rounding
            assert distance(got[name], wanted[name]) < 1e-4, name


def compare_compiled(kernel: str) -> dict[str, Any]:
    """Losses and gradients with compiled code against those without.

    Returns:
        The largest distance by name of the worst, the graphs compiled, and the graph breaks.
    """
    from torch._dynamo.utils import counters

    if kernel != "auto":
        attention_module.choose_kernel = lambda query: kernel
    torch.manual_seed(0)
    model = PretrainingModel(CONFIG).to(CUDA).train()
    several = batches(6)
    wanted = [learn(model, batch, "bf16", pretraining_objective) for batch in several]
    objective = build_train_state(PretrainRecipe(), model, CUDA, compiled=True).loss_fn
    got = [learn(model, batch, "bf16", objective) for batch in several]
    skipped = "query_key_value.bias"  # the key's part is 0 but for rounding
    distances = {
        name: max(distance(own[name], other[name]) for own, other in zip(got, wanted, strict=True))
        for name in wanted[0]
        if skipped not in name
    }
    worst = max(distances, key=lambda name: distances[name])
    graphs = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        model.eval()(several[0].packed.to(CUDA), several[0].target_positions.to(CUDA))
    return {
        "worst": worst,
        "distance": distances[worst],
        "graphs": graphs,
        "graphs_after_evaluation": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
    }


def compare_dropout() -> dict[str, Any]:
    """A compiled layer's output and gradients in fp32 against those of the same masks uncompiled.

    Returns:
        The largest distance, and the shares of dropped elements in both masks.
    """
    from bertkit.model.native.triton_kernels import dropout_mask

    torch.manual_seed(0)
    layer = Layer(replace(CONFIG, hidden_dropout_prob=0.25)).to(CUDA).train()
    packed = batches(1)[0].packed.to(CUDA)
    hidden = torch.randn(len(packed.ids), CONFIG.hidden_size, device=CUDA)
    torch.manual_seed(1)
    masks = [dropout_mask(hidden, 0.25) for _ in range(2)]

    def learn_layer(run: Any) -> list[torch.Tensor]:
        layer.zero_grad()
        own = hidden.clone().requires_grad_()
        torch.manual_seed(1)
        output = run(own, packed)
        torch.autograd.backward((output * hidden.cos()).sum())
        trained = [p.grad for n, p in layer.named_parameters() if n != "query_key_value.bias"]
        return [output.detach(), own.grad, *trained]  # type: ignore[list-item]

    got = learn_layer(torch.compile(layer, dynamic=True, fullgraph=True))
    left = iter(masks)
    layer.dropout.forward = lambda x: x * next(left) / 0.75
    wanted = learn_layer(layer)
    return {
        "distance": max(map(distance, got, wanted)),
        "dropped": [1 - float(mask.float().mean()) for mask in masks],
        "equal": float((masks[0] == masks[1]).float().mean()),
    }


def alone(*arguments: str) -> Any:
    """Run this file with some arguments in a process without shape checks; what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "BERTKIT_CHECK_SHAPES"}
    command = [sys.executable, "-m", "tests.test_gpu", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@gpu
@pytest.mark.slow
def test_dropout_in_compiled_layers_is_the_same_forward_and_backward() -> None:
    found = alone("dropout")
    assert found["distance"] < 1e-4, found
    assert found["dropped"] == pytest.approx([0.25, 0.25], abs=0.01)
    assert found["equal"] == pytest.approx(0.25**2 + 0.75**2, abs=0.01)


@gpu
def test_pretraining_from_a_store(store: TokenStore, tmp_path: Path) -> None:
    """With the paper's dropout, accumulation, two phases and loader processes."""
    assert pretrain(TOY, store, tmp_path / "run", device="cuda", workers=2) is None
    check_run(tmp_path / "run")


@gpu
@pytest.mark.slow
def test_pretraining_with_compiled_layers(store: TokenStore, tmp_path: Path) -> None:
    alone("pretrain", str(store.folder), str(tmp_path / "run"))
    check_run(tmp_path / "run")


def check_run(folder: Path) -> None:
    """The run is finished and has learnt."""
    records = read_journal(folder / "journal.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert records[-1]["reason"] == "finished"
    assert steps[-1]["mlm_loss"] < steps[0]["mlm_loss"]
    assert len(evaluations) == 2
    assert 0 < steps[-1]["mfu"] < 1
    assert (folder / "model" / "model.safetensors").is_file()


if __name__ == "__main__":
    if sys.argv[1] == "pretrain":
        pretrain(TOY, sys.argv[2], sys.argv[3], device="cuda", compiled=True)
        print("{}")
    elif sys.argv[1] == "dropout":
        print(json.dumps(compare_dropout()))
    else:
        print(json.dumps(compare_compiled(sys.argv[2])))
