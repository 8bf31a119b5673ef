"""A run on three hosts that loses one of them goes on with the others, to the same model."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from bertkit.corpus.store import TokenStore
from bertkit.training.journal import read_journal
from bertkit.training.pretrain import pretrain
from tests.hosts import network
from tests.hosts.network import Host, hosts, pids

RECIPE = """
[model]
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 32
[phases]
lengths = [32]
steps = [{steps}]
batch_sizes = [12]
max_predictions = [5]
[training]
learning_rate = 1e-3
warmup_steps = 5
accumulate = 6
precision = "fp32"
[logging]
log_every = 10
evaluate_every = 10000
held_out_sequences = 16
checkpoint_every = 10
"""
STEPS = 60


@pytest.fixture(scope="module")
def three_hosts() -> Iterator[list[Host]]:
    if reason := network.missing():
        pytest.skip(reason)
    with hosts(3) as made:
        yield made


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "toy.toml"
    path.write_text(RECIPE.format(steps=STEPS))
    return path


@pytest.fixture(scope="module")
def alone(recipe: Path, store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("alone") / "run"
    assert pretrain(str(recipe), store.folder, out) is None
    return out


def launch(host: Host, first: Host, recipe: Path, store: TokenStore, out: Path) -> list[str]:
    """What docs/scaling.md says to start on every host."""
    return [
        sys.executable, "-m", "bertkit", "launch",
        "--nnodes", "2:3", "--nproc-per-node", "1", "--max-restarts", "3",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{first.address}:29400",
        "--rdzv-id", out.name,
        "--rdzv-conf", f"last_call_timeout=2,is_host={int(host is first)}",
        "--local-addr", host.address,
        "pretrain", str(recipe), "--store", str(store.folder), "--out", str(out),
        "--timeout", "8",
    ]  # fmt: skip


@pytest.mark.slow
def test_a_lost_host_is_done_without(
    three_hosts: list[Host], alone: Path, recipe: Path, store: TokenStore, tmp_path: Path
) -> None:
    """It is cut off, which is the harder case: the others are not told."""
    out = tmp_path / "run"
    logs = [tmp_path / f"host-{host.number}.log" for host in three_hosts]
    running = [
        host.start(launch(host, three_hosts[0], recipe, store, out), log)
        for host, log in zip(three_hosts, logs, strict=True)
    ]
    started = time.monotonic()

    def seen() -> str:
        return "\n".join(f"{log.name}:\n{log.read_text()[-3000:]}" for log in logs)

    def wait_for(condition: Callable[[], object], what: str) -> None:
        while not condition():
            assert time.monotonic() - started < 240, f"{what} did not come\n{seen()}"
            time.sleep(0.05)

    wait_for(lambda: len(checkpoints(out)) >= 2, "the second checkpoint")
    lost = three_hosts[2]
    lost.cut_off()
    wait_for(lambda: all(process.poll() is not None for process in running[:2]), "the end")
    lost.plug_in()
    for pid in pids(lost):
        os.kill(pid, signal.SIGKILL)
    running[2].wait(timeout=30)
    assert [process.returncode for process in running[:2]] == [0, 0], seen()
    log = logs[0].read_text() + logs[1].read_text()
    assert "resuming from" in log, "the run was at its end before the host was lost"
    records = read_journal(out / "journal.jsonl")
    assert records[-1]["reason"] == "finished"
    assert sum(r["sequences"] for r in records if r["kind"] == "step") == STEPS * 12
    mine, theirs = (load_file(folder / "model" / "model.safetensors") for folder in (alone, out))
    for name in [name for name in mine if not name.endswith("key.bias")]:  # its gradient is 0
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-4, msg=name)


def checkpoints(out: Path) -> list[Path]:
    return sorted(out.glob("checkpoints/step-*/progress.json"))
