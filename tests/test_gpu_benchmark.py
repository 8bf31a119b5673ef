"""The benchmark of GPUs, as far as a CPU can run it: all but speed and CUDA's kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.gpu import __main__ as benchmark
from benchmarks.gpu.batches import draw_lengths, make_batches
from benchmarks.gpu.setup import NO_TIME, Setup
from benchmarks.gpu.train import Contestant, Race
from bertkit.model.encoder import ModelConfig
from tests.conftest import python

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ModelConfig(
    vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    max_position_embeddings=96, initializer_range=0.2,
)  # fmt: skip


def setup_for(folder: Path, seconds: float = 60.0) -> Setup:
    return Setup(torch.device("cpu"), folder, time.monotonic() + seconds)


def test_a_contestant_that_fails_costs_no_other(tmp_path: Path) -> None:
    calls = 0

    def breaks_later(batches: Sequence[Any]) -> None:
        nonlocal calls
        calls += 1
        if calls > 3:
            raise RuntimeError("the device\nis gone")

    def no_setup() -> Any:
        raise ImportError("absent")

    race = Race(setup_for(tmp_path), CONFIG, make_batches(CONFIG, 90, 32, 2), training=True)
    found = list(
        race.run(
            {
                "good": Contestant(lambda: lambda batches: None),
                "late": Contestant(lambda: breaks_later),
                "never": Contestant(no_setup),
            }
        )
    )
    names = [name for name, _ in found]
    assert names == ["good", "late", "never", "late", "good"], "each at once, then after the rounds"
    errors = [(name, row) for name, row in found if isinstance(row, str)]
    assert errors == [
        ("never", "ImportError: absent"),
        ("late", "RuntimeError: the device is gone"),
    ]
    last = found[-1][1]
    assert isinstance(last, dict)
    assert last["rounds"] == 2


def test_what_there_is_no_time_for_is_named(tmp_path: Path) -> None:
    options = benchmark.Options("train", tmp_path, 0.0, True)
    found = benchmark.run_command(options, list(benchmark.COMMANDS["train"]))
    assert found["rows"] == {}
    assert found["failed"] == {f"{case}, case": NO_TIME for case in benchmark.COMMANDS["train"]}
    assert json.loads((tmp_path / "gpu-train.json").read_text()) == found
    race = Race(setup_for(tmp_path, 0.0), CONFIG, make_batches(CONFIG, 90, 32, 1), training=True)
    late = Contestant(lambda: lambda batches: None)
    assert list(race.run({"late": late})) == [("late", NO_TIME)]


def test_cases_that_are_not_measured_again_stay_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rate = 0

    def found(case: str, *_: object) -> Any:
        yield "row", {"rate": rate}
        yield "other", "failed"

    monkeypatch.setattr(benchmark, "in_own_process", found)
    options = benchmark.Options("train", tmp_path, 1.0, True)
    first, second, third, *_ = benchmark.COMMANDS["train"]
    for rate, cases in ((1, [first, second]), (2, [second, third]), (3, [third])):  # noqa: B007
        benchmark.run_command(options, cases)
    result = json.loads((tmp_path / "gpu-train.json").read_text())
    rates = {name: row["rate"] for name, row in result["rows"].items()}
    assert rates == {f"{first}, row": 1, f"{second}, row": 2, f"{third}, row": 3}
    assert set(result["failed"]) == {f"{case}, other" for case in (first, second, third)}
    assert [part["cells"] for part in result["parts"]] == [[first], [second], [third]]


def test_a_case_that_hangs_is_stopped_and_its_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "case.py"
    script.write_text(
        "import sys, time\n"
        "with open(sys.argv[sys.argv.index('--into') + 1], 'a') as lines:\n"
        '    print(\'["first", {"rate": 1}]\', file=lines, flush=True)\n'
        "    print('[\"sec', end='', file=lines, flush=True)\n"
        "    time.sleep(600)\n"
    )
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda command, **_: start([sys.executable, script, *command],
        start_new_session=True),
    )  # fmt: skip
    monkeypatch.setattr(benchmark, "LEAST_SECONDS", 0.5)
    options = benchmark.Options("probe", tmp_path, 1.0, True)
    found = list(benchmark.in_own_process("ceiling", options, 0.5))
    assert found == [("first", {"rate": 1}), ("case", "stopped after 1 s")]


IN_ONE = """
import sys
from benchmarks.gpu import __main__ as benchmark
benchmark.in_own_process = benchmark.run_case
for command in benchmark.COMMANDS:
    benchmark.main([command, *sys.argv[1:]])
"""
"""Runs all cases of all commands in one process, which is faster."""


def run(*arguments: str) -> None:
    """Run Python without the shape checks of the tests, which torch.compile does not follow."""
    environment = {k: v for k, v in os.environ.items() if k != "BERTKIT_CHECK_SHAPES"}
    done = python(*arguments, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.slow
def test_the_commands_run_dry(tmp_path: Path) -> None:
    run("-c", IN_ONE, "--dry-run", "--out", str(tmp_path))
    for command in benchmark.COMMANDS:
        check_results(command, tmp_path)
    assert "Self CPU" in (tmp_path / "gpu-profile-eager.txt").read_text()


def check_results(command: str, tmp_path: Path) -> None:
    """Check the results file of a dry run: every case has rows, and only CUDA is missing."""
    result = json.loads((tmp_path / f"gpu-{command}.json").read_text())
    options = benchmark.Options(command, tmp_path, 1.0, True)
    assert list(result["seconds"]) == benchmark.chosen_cases(options)
    for case in result["seconds"]:
        assert any(name.startswith(f"{case}, ") for name in result["rows"]), case
    needs_cuda = ("needs a CUDA device", "Could not run 'aten::_flash_attention_forward'")
    assert {
        name: error
        for name, error in result["failed"].items()
        if not any(reason in error for reason in needs_cuda)
    } == {}
    for row in result["rows"].values():
        if "tokens_per_second" in row:
            rate = row["tokens_per_second"]
            assert (rate["lowest"] if isinstance(rate, dict) else rate) > 0


@pytest.mark.slow
def test_a_case_runs_in_a_process_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("BERTKIT_CHECK_SHAPES")
    benchmark.main(["probe", "--dry-run", "--out", str(tmp_path), "--case", "ceiling"])
    result = json.loads((tmp_path / "gpu-probe.json").read_text())
    assert list(result["seconds"]) == ["ceiling"]
    assert len(result["rows"]) == 3
    assert result["failed"] == {}


def test_batches_are_full_or_ragged_and_padded_ones_hold_the_same() -> None:
    generator = np.random.default_rng(0)
    assert draw_lengths(1024, 128, False, generator).tolist() == [128] * 8
    lengths = draw_lengths(20_000, 128, True, generator).tolist()
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) == 128
    assert 0.9 < sum(lengths) / 20_000 < 1.1
    for both in make_batches(CONFIG, 90_000, 512, 1):
        assert abs(len(both.packed.target_ids) / len(both.packed.packed.ids) - 0.15) < 0.01
        assert len(both.padded) > 1
        assert all(part["input_ids"].numel() <= 1 << 16 for part in both.padded)
        masks = [part["attention_mask"].bool() for part in both.padded]
        ids = torch.cat([p["input_ids"][m] for p, m in zip(both.padded, masks, strict=True)])
        assert torch.equal(ids.sort().values, both.packed.packed.ids.sort().values)
        labels = torch.cat([part["labels"][part["labels"] >= 0] for part in both.padded])
        assert torch.equal(labels.sort().values, both.packed.target_ids.sort().values)


CARRIED = ["cyclopts", "docstring_parser", "rich_rst", "docutils", "sentencex", "zstandard"]
"""What bertkit imports itself: docs/gpu.md says how to take it along to a bare machine."""
ABSENT = [
    *("seqeval", "beartype", "datasets", "fastapi", "uvicorn", "fastapi_offline"),
    *("polars", "onnx", "wandb", "mlflow", "matplotlib", "sklearn", "tensorboard", "transformers"),
]
"""What else such a machine may lack."""


def test_nothing_but_what_is_carried_is_needed_to_import_what_runs_on_a_bare_machine() -> None:
    code = f"""
import importlib, sys
for name in {ABSENT!r}:
    sys.modules[name] = None  # importing it raises ModuleNotFoundError
for name in ("bertkit.training.pretrain", "benchmarks.gpu.__main__", "tests.conftest",
             "tests.test_gpu", "tests.test_gpu_attention", "tests.test_gpu_training"):
    importlib.import_module(name)
print("imported")
"""
    done = python("-c", code, cwd=ROOT)
    assert done.stdout == "imported\n", done.stderr[-1500:]
    page = (ROOT / "docs/gpu.md").read_text()
    assert [name for name in CARRIED if name.replace("_", "-") not in page] == []
