"""Devices, FLOP counts against the published yardsticks, and seeds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from bertkit.errors import BertkitError
from bertkit.training.device import (
    autocast,
    choose_device,
    environment,
    matmul_peak,
    training_flops,
)
from bertkit.training.step import step_seed
from tests.tools import fake_cuda

CPU = torch.device("cpu")
HAS_AVX2 = bool(torch.cpu.get_capabilities().get("avx2"))


@dataclass(frozen=True)
class Size:
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    vocab_size: int

    @property
    def embedding_width(self) -> int:
        return self.hidden_size


BASE = Size(768, 12, 3072, 30522)
LARGE = Size(1024, 24, 4096, 30522)


def test_auto_takes_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert choose_device() == CPU
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert choose_device().type == "mps"
    assert choose_device("mps").type == choose_device(torch.device("mps", 0)).type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device().type == "cuda"
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert choose_device("cpu") == choose_device(CPU) == CPU
    assert choose_device(torch.device("cuda", 1)) == torch.device("cuda", 1)
    with pytest.raises(BertkitError, match=r"'cuda:2': this machine has 2 CUDA devices") as caught:
        choose_device("cuda:2")
    assert caught.value.code == "no-device"


@pytest.mark.parametrize("name", ["cdua", "gpu", "", "cuda:x", "cuda:-1", "cpu:0", "auto:1"])
def test_names_that_are_no_device(name: str) -> None:
    with pytest.raises(BertkitError, match=f"no device is called '{name}'") as caught:
        choose_device(name)
    assert caught.value.code == "device"


def init_fails(monkeypatch: pytest.MonkeyPatch, message: str) -> None:
    """A CUDA build of torch that finds no device, and warns of it as torch does."""

    def fail() -> None:
        raise RuntimeError(message)

    def is_available() -> bool:
        warnings.warn(f"CUDA initialization: {message}", stacklevel=2)
        return False

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", is_available)
    monkeypatch.setattr(torch.cuda, "init", fail)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)


TOO_OLD = "The NVIDIA driver on your system is too old (found version 11040).\nPlease update it"


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[int, int]], torch.device]:
    """Pretend that there is a CUDA device of some compute capability; its tensors have no data."""

    def make(capability: tuple[int, int]) -> torch.device:
        real = torch.empty
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some card")
        monkeypatch.setattr(
            torch.cuda, "is_bf16_supported", lambda including_emulation=True: capability >= (8, 0)
        )
        device = torch.device("cuda", 0)

        def empty(*size: int, **options: Any) -> torch.Tensor:
            return FakeTensor(
                FakeTensorMode(), real(*size, dtype=options["dtype"], device="meta"), device
            )

        monkeypatch.setattr(torch, "empty", empty)
        return device

    return make


@pytest.mark.slow
def test_no_step_and_no_prediction_waits_for_a_gpu_or_mixes_devices() -> None:
    lines: list[str] = []
    failed = fake_cuda.run_cases(lines.append, ["bf16"])
    assert not failed, "\n".join(line for line in lines if line.startswith("FAIL"))
    kernels = {line.rpartition(",")[2] for line in lines}
    assert len(kernels) > 1, "the flash kernel, and the padded one"
    with torch.device("meta"):  # as before, which transformers relies on
        assert torch.tensor(0).is_meta


@pytest.mark.parametrize(
    "read",
    [
        lambda tensor: tensor.sum().item(),
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor[tensor > 0],
        lambda tensor: float(tensor[0]),
        lambda tensor: tensor + torch.ones(3),
    ],
)
def test_the_check_without_a_gpu_finds_what_waits_for_one(
    read: Callable[[torch.Tensor], object],
) -> None:
    with fake_cuda.fake_gpu() as (_, machine):
        tensor = torch.zeros(3, device=fake_cuda.CUDA)
        with pytest.raises(RuntimeError):
            read(tensor)
        assert not machine.copies_back
        assert tensor.cpu().device == CPU
        assert machine.copies_back == 1


def test_autocast_is_on_for_bf16_and_off_for_fp32_even_inside_another() -> None:
    a = torch.ones(2, 2)
    with autocast(CPU, "bf16"):
        assert (a @ a).dtype == torch.bfloat16
        with autocast(CPU, "fp32"):
            assert (a @ a).dtype == torch.float32


def flops_per_token(size: Size, length: int) -> float:
    sequences = 1000
    tokens = sequences * length
    work = training_flops(
        size,
        tokens=tokens,
        targets=round(0.15 * tokens),
        sequences=sequences,
        sum_squared_lengths=sequences * length**2,
    )
    return work / tokens


def test_flops_equal_the_yardsticks() -> None:
    assert flops_per_token(BASE, 128) == pytest.approx(0.545e9, rel=2e-3)
    assert flops_per_token(BASE, 512) == pytest.approx(0.588e9, rel=2e-3)
    assert flops_per_token(LARGE, 128) == pytest.approx(1.88e9, rel=3e-3)
    assert flops_per_token(LARGE, 512) == pytest.approx(1.99e9, rel=3e-3)


def test_flops_equal_torchs_count_of_the_same_products() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    size, length, targets = Size(8, 3, 20, 50), 7, 2
    x, layer = torch.ones(length, 8), [(8, 8)] * 4 + [(8, 20), (20, 8)]
    with FlopCounterMode(display=False) as counter:
        for _ in range(size.num_hidden_layers):
            for rows, columns in layer:
                torch.ones(length, rows) @ torch.ones(rows, columns)
            (x @ x.T) @ x  # scores, weighted values
        torch.ones(targets, 8) @ torch.ones(8, 8) @ torch.ones(8, 50)
        torch.ones(1, 8) @ torch.ones(8, 8) @ torch.ones(8, 2)
    work = training_flops(
        size, tokens=length, targets=targets, sequences=1, sum_squared_lengths=length**2
    )
    assert work == 3 * counter.get_total_flops()


def test_environment_is_json_and_names_the_versions() -> None:
    found = environment()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["versions"]["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["cores"] >= 1
    assert found["cpu"]


def test_step_seeds_never_change() -> None:
    # changing these numbers would change the dropout of every run that is resumed
    assert step_seed(0, 0, 0) == 1958073202195523056
    assert step_seed(7, 1_000_000, 3) == 4324851481645365885


@given(st.integers(), st.integers(0), st.integers(0))
@settings(max_examples=20, deadline=None)
def test_torch_takes_every_step_seed(seed: int, step: int, rank: int) -> None:
    generator = torch.Generator()
    generator.manual_seed(step_seed(seed, step, rank))
    first = torch.rand(4, generator=generator)
    generator.manual_seed(step_seed(seed, step, rank))
    assert torch.equal(first, torch.rand(4, generator=generator))


def test_measuring_the_peak_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    matmul_peak(CPU, "bf16", seconds=0.01)
    assert torch.equal(before, torch.get_rng_state())
