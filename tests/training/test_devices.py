"""Devices, FLOP counts against the published yardsticks, and seeds."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.training.device import (
    autocast,
    choose_device,
    choose_precision,
    environment,
    git_commit,
    matmul_peak,
    slow_precision,
    step_seed,
    training_flops,
)

CPU = torch.device("cpu")


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
    assert choose_device("mps").type == "mps"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device().type == "cuda"
    assert choose_device("cuda:1") == torch.device("cuda", 1)
    assert choose_device("cpu") == CPU
    with pytest.raises(BertkitError, match=r"'cuda:2': this machine has 2 CUDA devices"):
        choose_device("cuda:2")


@pytest.mark.parametrize("name", ["cdua", "gpu", "", "cuda:x", "cuda:-1", "cpu:0", "auto:1"])
def test_names_that_are_no_device(name: str) -> None:
    with pytest.raises(BertkitError, match=f"no device is called '{name}'"):
        choose_device(name)


def test_absent_devices_are_refused_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    for name in ("cuda", "cuda:0", "mps"):
        with pytest.raises(BertkitError, match=rf"device '{name}': .*choose cpu"):
            choose_device(name)
    with pytest.raises(BertkitError, match="did you mean 'cuda'"):
        choose_device("cdua")


def test_precisions(monkeypatch: pytest.MonkeyPatch) -> None:
    for precision in ("fp32", "bf16"):
        assert choose_precision(precision, CPU) == precision
    with pytest.raises(BertkitError, match="no precision is called 'fp16'"):
        choose_precision("fp16", CPU)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Old card")
    with pytest.raises(BertkitError, match=r"Old card does not support bf16; choose .* fp32"):
        choose_precision("bf16", torch.device("cuda"))


@pytest.mark.parametrize(
    ("capabilities", "chosen"),
    [({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"), ({"avx2": True}, "fp32")],
)
def test_the_precision_is_what_the_processor_is_made_for(
    capabilities: dict[str, bool], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: capabilities)
    assert choose_precision("auto", CPU) == chosen
    assert choose_precision("bf16", CPU) == "bf16", "what was asked for is done"
    assert bool(slow_precision("bf16", CPU)) == (chosen == "fp32"), "and said to be slow"
    assert not slow_precision("fp32", CPU)


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


def test_matmul_peak_is_a_plausible_number() -> None:
    assert 1e8 < matmul_peak(CPU, "fp32", seconds=0.1) < 1e14


def test_environment_is_json_and_names_the_versions() -> None:
    found = environment()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["versions"]["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["cores"] >= 1
    assert found["cpu"]


def test_the_commit_is_that_of_the_source_or_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = git_commit()
    assert commit is None or (len(commit) >= 40 and int(commit, 16) >= 0)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert git_commit() is None


def test_step_seeds_never_change() -> None:
    # changing these numbers would change the dropout of every run that is resumed
    assert step_seed(0, 0, 0) == 1958073202195523056
    assert step_seed(7, 1_000_000, 3) == 4324851481645365885


def test_step_seeds_are_63_bits_and_differ() -> None:
    seeds = [
        step_seed(seed, step, rank) for seed in range(5) for step in range(40) for rank in range(5)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert max(seeds) > 2**62
    bits = sum(bin(a ^ b).count("1") for a, b in pairwise(seeds))
    assert bits / len(seeds[1:]) == pytest.approx(31.5, abs=1)  # neighbours share nothing


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
