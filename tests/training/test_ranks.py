"""Several processes that train one model, started as users start them: by torchrun."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from bertkit import pretrain
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.progress import read_journal
from bertkit.training.distributed import ALONE, Ranks

CPU = torch.device("cpu")

RECIPE = """
[model]
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 64
[phases]
lengths = [32, 64]
steps = [{first}, 10]
batch_sizes = [8, 8]
max_predictions = [5, 9]
[training]
learning_rate = 1e-3
warmup_steps = 5
accumulate = 4
precision = "fp32"
[logging]
log_every = 5
evaluate_every = 20
held_out_sequences = 16
checkpoint_every = {every}
"""


def write_recipe(folder: Path, *, first: int = 30, every: int = 16) -> Path:
    path = folder / f"toy-{first}-{every}.toml"
    path.write_text(RECIPE.format(first=first, every=every))
    return path


def command(
    recipe: Path, store: TokenStore, out: Path, *options: str, processes: int = 2
) -> list[str]:
    start = [sys.executable, "-m", "bertkit"]
    if processes > 1:
        start = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        start += ["--nproc-per-node", str(processes)]
        while options and options[0].startswith("--max-restarts"):
            start.append(options[0])
            options = options[1:]
        start += ["-m", "bertkit"]
    return [
        *start, "pretrain", str(recipe), "--store", str(store.folder), "--out", str(out), *options
    ]  # fmt: skip


def run_ranks(*words: str, world: int = 2) -> list[tuple[int, str]]:
    """Status and errors of the processes of one program, as torchrun starts them, without it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    known = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = [
        subprocess.Popen(
            [sys.executable, *words],
            env={**os.environ, "OMP_NUM_THREADS": "1", **known, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]
    shown = [process.communicate(timeout=120)[1] for process in started]
    return [(process.returncode, text) for process, text in zip(started, shown, strict=True)]


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def assert_same_model(one: Path, other: Path) -> None:
    """Equal to rounding; but the gradient of a key's bias is 0, and Adam scales up its rounding."""
    mine, theirs = weights(one), weights(other)
    assert mine.keys() == theirs.keys()
    for name in mine.keys() - {name for name in mine if name.endswith("key.bias")}:
        torch.testing.assert_close(mine[name], theirs[name], rtol=0, atol=1e-5, msg=name)


def losses(folder: Path, kind: str = "step") -> list[float]:
    return [r["loss"] for r in read_journal(folder / "journal.jsonl") if r["kind"] == kind]


@pytest.fixture(scope="module")
def alone(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process with which the others are compared."""
    folder = tmp_path_factory.mktemp("alone")
    torch.set_num_threads(1)
    assert pretrain(str(write_recipe(folder)), store.folder, folder / "run") is None
    return folder / "run"


@pytest.fixture(scope="module")
def replicated(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run by two processes, one of which is killed; torchrun starts both again."""
    folder = tmp_path_factory.mktemp("replicated")
    out = folder / "run"
    running = subprocess.Popen(
        command(write_recipe(folder), store, out, "--max-restarts=1"),
        env={**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for_checkpoint(out, running)
    os.kill(workers_of(running.pid)[1], signal.SIGKILL)
    _, errors = running.communicate(timeout=120)
    assert running.returncode == 0, errors
    assert "resuming from" in errors
    assert errors.count("finished: the model is in") == 1, "only one process speaks"
    return out


@pytest.mark.slow
def test_processes_train_as_one_also_after_one_was_killed(alone: Path, replicated: Path) -> None:
    assert_same_run(alone, replicated)


def assert_same_run(alone: Path, several: Path) -> None:
    assert_same_model(alone, several)
    assert losses(several) == pytest.approx(losses(alone), abs=1e-4)
    evaluated = losses(several, "evaluation")
    assert evaluated == pytest.approx(losses(alone, "evaluation"), abs=1e-4)
    mine, theirs = (read_journal(folder / "journal.jsonl") for folder in (several, alone))
    for name in ("tokens", "targets", "sequences"):
        counts = [[r[name] for r in records if r["kind"] == "step"] for records in (mine, theirs)]
        assert counts[0] == counts[1], f"{name} of all ranks are counted"
    saved = [r for r in mine if r["kind"] == "checkpoint"]
    assert [r["step"] for r in saved][-2:] == [32, 40]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_run_resumes_with_any_number_of_processes(
    replicated: Path, store: TokenStore, tmp_path: Path, processes: int
) -> None:
    """Byte for byte with as many processes as before."""
    out = tmp_path / "run"
    shutil.copytree(replicated, out)
    # as if it had been killed after its second checkpoint
    shutil.rmtree(out / "model")
    shutil.rmtree(out / "checkpoints" / "step-00000040")
    words = command(write_recipe(tmp_path), store, out, processes=1)[1:]
    ended = run_ranks(*words, world=processes)
    assert {status for status, _ in ended} == {0}, ended
    assert "(32 updates made)" in "".join(said for _, said in ended)
    if processes == 2:
        first, second = (folder / "model" / "model.safetensors" for folder in (replicated, out))
        assert first.read_bytes() == second.read_bytes()
    assert_same_model(replicated, out)


@pytest.mark.slow
def test_a_signal_saves_and_all_stop_after_the_same_update(
    store: TokenStore, tmp_path: Path
) -> None:
    recipe = write_recipe(tmp_path, first=3000, every=1000)
    out = tmp_path / "run"
    running = subprocess.Popen(
        command(recipe, store, out),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: losses_written(out), running)
    running.send_signal(signal.SIGTERM)  # to torchrun, which sends it on
    _, errors = running.communicate(timeout=120)
    assert running.returncode, errors
    assert "stopped by SIGTERM, saved after" in errors
    records = read_journal(out / "journal.jsonl")
    assert records[-1]["reason"] == "interrupted"
    step = records[-1]["step"]
    assert (out / "checkpoints" / f"step-{step:08d}" / "progress.json").is_file()


@pytest.mark.slow
def test_the_first_process_decides_what_fits_into_the_minutes(
    store: TokenStore, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = command(write_recipe(tmp_path), store, out, "--minutes", "0.1", processes=1)[1:]
    ended = run_ranks(*words)
    said = "".join(text for _, text in ended)
    assert {status for status, _ in ended} == {0}, said
    assert said.count("0.1 minutes of training are") == 1
    steps = json.loads((out / "recipe.json").read_text())["recipe"]["phases"]["steps"]
    assert read_journal(out / "journal.jsonl")[-1]["step"] == sum(steps)


@pytest.mark.slow
def test_processes_that_disagree_are_told_so_once(store: TokenStore, tmp_path: Path) -> None:
    """A host with another recipe would train something that nobody asked for."""
    recipe = write_recipe(tmp_path)
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(recipe.read_text().replace("1e-3", "2e-3"))
    starter = tmp_path / "starter.py"
    starter.write_text(
        "import os, sys\n"
        "from bertkit.cli.app import main\n"
        f"recipe = {str(recipe)!r} if os.environ['RANK'] == '0' else {str(wrong)!r}\n"
        f"main(['pretrain', recipe, '--store', {str(store.folder)!r}, '--out', sys.argv[1]])\n"
    )
    (first, said), (second, other) = run_ranks(str(starter), str(tmp_path / "run"))
    assert first == second == 2
    message = "error: 1 of 2 processes have another recipe"
    assert (said + other).count(message) == 1
    assert "Traceback" not in said + other
    assert not (tmp_path / "run" / "recipe.json").exists(), "nothing was begun"


@pytest.mark.slow
def test_whatever_fails_on_the_first_rank_ends_the_others(tmp_path: Path) -> None:
    """Nobody else ends them here: outside of torchrun they would wait for `--timeout` seconds."""
    fail = "def fail():\n    raise KeyboardInterrupt('on the first rank')"
    (first, shown), (second, others) = two_ranks(tmp_path, fail, "ranks.on_rank0(fail)")
    assert "KeyboardInterrupt: on the first rank" in shown
    assert first
    assert second == 2, others


@pytest.mark.slow
def test_a_lost_process_is_said_in_one_line(tmp_path: Path) -> None:
    leave = "ranks.rank == 0 or os.kill(os.getpid(), signal.SIGKILL)"
    (first, shown), (second, _) = two_ranks(
        tmp_path, "", f"{leave}\n    ranks.all_reduce_counts({{'a': 1}})()"
    )
    assert (first, second) == (1, -signal.SIGKILL)
    last = shown.strip().splitlines()[-1]
    assert "bertkit.errors.BertkitError: the connection to another process" in last, shown
    assert "pair.cc" not in last, "not where in gloo"


def two_ranks(folder: Path, before: str, inside: str) -> list[tuple[int, str]]:
    """Status and errors of two processes that join, without torchrun, and do something."""
    script = folder / "script.py"
    script.write_text(
        "import os, signal, torch\n"
        "from bertkit.errors import BertkitError\n"
        "from bertkit.training.distributed import init_distributed\n"
        f"{before}\n"
        "with init_distributed(torch.device('cpu'), 300.0) as ranks:\n"
        f"    {inside}\n"
    )
    return run_ranks(str(script))


def losses_written(folder: Path) -> bool:
    journal = folder / "journal.jsonl"
    return journal.is_file() and '"kind": "step"' in journal.read_text()


def wait_for(condition: Any, running: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert running.poll() is None, running.communicate()[1]
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.02)


def wait_for_checkpoint(folder: Path, running: subprocess.Popen[str]) -> None:
    wait_for(lambda: list(folder.glob("checkpoints/step-*/progress.json")), running)


def workers_of(agent: int) -> list[int]:
    """Process numbers of torchrun's workers, by rank."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            values = (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ranks = [value for value in values if value.startswith(b"RANK=")]
        if parent == agent and ranks:
            found[int(ranks[0].removeprefix(b"RANK="))] = int(folder.name)
    return [found[rank] for rank in sorted(found)]


def test_micro_batches_are_shared_evenly() -> None:
    assert ALONE.micro_batches(3) == 3
    assert Ranks(1, 4).micro_batches(1) == 4
    assert Ranks(1, 4).micro_batches(8) == 8
    with pytest.raises(BertkitError, match=r"accumulate = 6 .* 4 processes; choose 8"):
        Ranks(0, 4).micro_batches(6)
