"""DDP and FSDP2 as bertkit uses them, in a process group of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.pretraining_data.batch import pack
from bertkit.training import parallel
from bertkit.training.device import autocast
from bertkit.training.optimizer import clip_gradients
from bertkit.training.parallel import (
    apply_ddp,
    apply_fsdp,
    gather_full,
    gradient_sync,
    layer_policy,
    shard_like,
)
from tests.tools import fake_cuda

CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=32, max_position_embeddings=16,
)  # fmt: skip


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1
    )
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_gradients_are_exchanged_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    exchanged: list[int] = []
    real = parallel.add_gradients

    def counted(bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:
        exchanged.append(bucket.buffer().numel())
        return real(bucket)

    monkeypatch.setattr(parallel, "add_gradients", counted)
    network = nn.Linear(3, 2)
    model = apply_ddp(network, CPU)
    exchanged.clear()
    for number in range(3):
        with gradient_sync(model, number == 2):
            model(torch.ones(1, 3)).sum().backward()
        assert sum(exchanged) == (0 if number < 2 else 3 * 2 + 2)
    assert network.weight.grad is not None
    torch.testing.assert_close(network.weight.grad, torch.full((2, 3), 3.0))


@pytest.mark.usefixtures("group")
def test_a_shared_out_model_has_the_same_names_and_values() -> None:
    torch.manual_seed(0)
    encoder = Encoder(CONFIG)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    apply_fsdp(encoder, CPU, "fp32")
    gathered = gather_full(encoder.state_dict())
    assert gathered.keys() == before.keys()
    for name, value in before.items():
        assert torch.equal(gathered[name], value), name
    own = encoder.state_dict()["word_embeddings.weight"]
    again = shard_like(before["word_embeddings.weight"], own)
    assert torch.equal(again.full_tensor(), before["word_embeddings.weight"])  # type: ignore[attr-defined]
    for parameter in encoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    count = sum(value.numel() for value in before.values())
    assert float(clip_gradients(encoder, 1.0)) == pytest.approx(count**0.5, rel=1e-5)


class Exchanged(TorchDispatchMode):
    """Records what is sent: the operation's name, dtype and the number of values of all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype, int]] = []

    def __torch_dispatch__(
        self, operator: Any, types: Any, given: Any = (), named: Any = None
    ) -> Any:
        result = operator(*given, **(named or {}))
        if operator.namespace == "c10d":
            sent = [one for one in tree_leaves((given, named)) if isinstance(one, torch.Tensor)]
            largest = max(sent, key=torch.Tensor.numel)
            name = operator.overloadpacket.__name__.strip("_").split("_")[0]
            self.seen.append((name, largest.dtype, largest.numel()))
        return result


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """The first of four processes, whose messages go nowhere."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    distributed.destroy_process_group()


def as_cuda_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shard on a CPU as for CUDA; LayerNorm in fp32, as CUDA's autocast computes it."""
    for_cuda = layer_policy(torch.device("cuda"), "bf16")
    monkeypatch.setattr(parallel, "layer_policy", lambda device, precision: for_cuda)
    real = F.layer_norm

    def layer_norm(x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> torch.Tensor:
        return real(x.float(), shape, weight.float(), bias.float(), eps)

    monkeypatch.setattr(F, "layer_norm", layer_norm)


def gradients(model: nn.Module, precision: str, micro_batches: int = 1) -> dict[str, torch.Tensor]:
    packed = pack([[2, 5, 6, 7, 3], [2, 9, 3], [2, 8, 8, 3]])
    for number in range(micro_batches):
        with gradient_sync(model, number == micro_batches - 1), autocast(CPU, precision):
            model(packed).float().square().sum().backward()
    return gather_full({n: p.grad for n, p in model.named_parameters() if p.grad is not None})


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_layers_are_sent_in_bf16_on_cuda_and_gradients_in_fp32_once_a_step(
    precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if precision == "bf16":
        as_cuda_autocast(monkeypatch)
    model = Encoder(CONFIG).train()
    layer = sum(weights.numel() for weights in model.layers[0].parameters())
    apply_fsdp(model, CPU, precision)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    packed = pack([[2, 5, 6, 7, 3], [2, 9, 3]])
    for last in (False, True):
        with Exchanged() as exchanged, gradient_sync(model, last), autocast(CPU, precision):
            model(packed).float().square().sum().backward()
        gathered = {(d, n) for name, d, n in exchanged.seen if name == "allgather"}
        reduced = [(d, n) for name, d, n in exchanged.seen if name == "reduce"]
        assert (dtype, layer) in gathered
        assert {d for d, n in gathered if n != layer} == {torch.float32}, "embeddings and the rest"
        assert len(reduced) == (3 if last else 0), "two layers and the rest"
        assert {d for d, _ in reduced} <= {torch.float32}
    assert {weights.dtype for weights in model.parameters()} == {torch.float32}


@pytest.mark.usefixtures("group")
def test_layers_gathered_in_bf16_have_the_gradients_of_autocast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    config = replace(CONFIG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    whole = Encoder(config).train()
    for module in whole.modules():
        if isinstance(module, nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.1)
    sharded = copy.deepcopy(whole)
    expected = gradients(whole, "bf16", 2)
    as_cuda_autocast(monkeypatch)
    apply_fsdp(sharded, CPU, "bf16")
    found = gradients(sharded, "bf16", 2)
    assert found.keys() == expected.keys()
    both = [torch.cat([one[name].ravel() for name in expected]) for one in (found, expected)]
    assert both[0].dtype == torch.float32
    difference = float((both[0] - both[1]).norm() / both[1].norm())
    assert 0 < difference < 0.03, "LayerNorm's weights alone are rounded in addition"


def test_everything_is_sent_in_fp32_except_in_bf16_on_cuda() -> None:
    for device, precision in ((CPU, "bf16"), (CPU, "fp32"), (torch.device("cuda"), "fp32")):
        assert layer_policy(device, precision) == MixedPrecisionPolicy()
    for precision in ("bf16", "bf16-residual"):
        policy = layer_policy(torch.device("cuda"), precision)
        assert (policy.param_dtype, policy.reduce_dtype) == (torch.bfloat16, torch.float32)
        assert not policy.cast_forward_inputs, "hidden states keep their dtype"


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch, but no GPU")
@pytest.mark.usefixtures("four_ranks")
def test_a_sharded_model_runs_on_gpus_without_values() -> None:
    with fake_cuda.fake_gpu() as gpu:
        model = fake_cuda.on_gpu(lambda: Encoder(CONFIG), gpu).train()
        apply_fsdp(model, fake_cuda.CUDA, "bf16")
        with autocast(fake_cuda.CUDA, "bf16"):
            found = model(pack([[2, 5, 6, 7, 3], [2, 9, 3]]).to(fake_cuda.CUDA))
        assert (found.device, found.shape) == (fake_cuda.CUDA, (8, CONFIG.hidden_size))
