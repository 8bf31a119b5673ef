"""Preparation by datatrove's executors: the bytes of the local path, after any failure."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bertkit.cli.app import application
from bertkit.cli.prepare import prepare_command as prepare_verb
from bertkit.config import parse
from bertkit.corpus import cluster as module
from bertkit.corpus.build import PrepareOptions, prepare
from bertkit.corpus.cluster import ClusterOptions, prepare_on_cluster
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import exclusive_lock
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import make_document
from tests.corpus.test_prepare import digests
from tests.markdown import ROOT, commands, section

pytest.importorskip("datatrove", reason="needs datatrove: the extra 'prepare'")

ON_HOSTS = ClusterOptions(executor="datatrove")
FILES = 4


class SmallShards(PrepareOptions):
    """Shards of less text than the smallest that the command line offers."""

    shard_bytes = property(lambda self: 100_000)  # type: ignore[assignment]


OPTIONS = SmallShards(held_out=0.05)
LARGER = PrepareOptions(held_out=0.05, shard_megabytes=1)


def make_texts(folder: Path, documents: int) -> list[str]:
    """Four files, each of more text than a shard but the last, of which lines are skipped."""
    rng = np.random.default_rng(5)
    for number in range(FILES - 1):
        made = [make_document(rng, int(rng.integers(20, 200))) for _ in range(documents)]
        (folder / f"{number}.txt").write_text("\n\n".join(made))
    rows = [f'{{"text": "The river, {number}."}}' for number in range(20)]
    (folder / "z.jsonl").write_text("\n".join([*rows, "no JSON", '{"other": 1}', '{"text": " "}']))
    return [str(path) for path in sorted(folder.iterdir())]


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """For `OPTIONS`."""
    return make_texts(tmp_path_factory.mktemp("texts"), 50)


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """For `LARGER`."""
    return make_texts(tmp_path_factory.mktemp("larger"), 170)


def local_digests(
    texts: list[str], tokenizer: Tokenizer, options: PrepareOptions, folder: Path
) -> dict[str, str]:
    store = prepare(texts, tokenizer, folder, options)
    assert len(store.shards) > FILES
    assert len(store.manifest["text"]["skipped"]) == 3
    return digests(folder)


@pytest.fixture(scope="module")
def local(
    texts: list[str], tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Digests of the store that `prepare` writes."""
    return local_digests(texts, tokenizer, OPTIONS, tmp_path_factory.mktemp("local") / "store")


@pytest.fixture(scope="module")
def larger_local(
    larger: list[str], tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """The same for the larger texts."""
    return local_digests(larger, tokenizer, LARGER, tmp_path_factory.mktemp("local") / "store")


def content(folder: Path) -> dict[str, str]:
    """Digests of everything in a store but datatrove's marks and logs, and torn leftovers."""
    return {
        name: digest
        for name, digest in digests(folder).items()
        if not name.startswith("tasks") and ".tmp-" not in name
    }


def marks(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "tasks").glob("*/completions/*"))


@pytest.mark.parametrize("tasks", [0, 3])
def test_the_store_equals_the_local_one(
    texts: list[str],
    tokenizer: Tokenizer,
    tmp_path: Path,
    local: dict[str, str],
    tasks: int,
    capfd: pytest.CaptureFixture[str],
) -> None:
    seen = []
    cluster = ClusterOptions(executor="datatrove", tasks=tasks)
    store = prepare_on_cluster(
        texts,
        tokenizer,
        tmp_path / "store",
        OPTIONS,
        cluster,
        progress=lambda done, of: seen.append((done, of)),
    )
    assert isinstance(store, TokenStore)
    assert content(tmp_path / "store") == local
    count = tasks or FILES
    assert marks(tmp_path / "store") == [f"{task:05d}" for task in range(count)]
    assert seen[0] == (0, count)
    assert seen[-1] == (count, count)
    assert capfd.readouterr() == ("", ""), "datatrove is kept quiet"


def test_finished_tasks_are_skipped_and_damaged_ones_made_again(
    texts: list[str],
    tokenizer: Tokenizer,
    tmp_path: Path,
    local: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = tmp_path / "store"
    made: list[int] = []
    real = module.prepare_part

    def watched(part, *arguments, **options):  # type: ignore[no-untyped-def]
        made.append(part.number)
        return real(part, *arguments, **options)

    monkeypatch.setattr(module, "prepare_part", watched)

    def run() -> list[int]:
        made.clear()
        prepare_on_cluster(texts, tokenizer, folder, OPTIONS, ON_HOSTS)
        assert content(folder) == local
        return made

    assert run() == list(range(FILES))
    assert run() == []
    (folder / "train-00001-001.tokens.npy").unlink()
    assert run() == [1]
    victim = folder / "train-00002-000.tokens.npy"
    damaged = bytearray(victim.read_bytes())
    damaged[-1] ^= 1  # of the same size: only its checksum tells, when the parts are merged
    victim.write_bytes(damaged)
    with pytest.raises(BertkitError, match=r"1 of 4 parts .* \(first: 2\); run the same"):
        run()
    assert run() == [2]
    (folder / "parts" / "00003.json").write_text("[")
    assert run() == [3]


def test_hosts_share_a_folder(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path, local: dict[str, str]
) -> None:
    folder = tmp_path / "store"

    def host(first: int, count: int) -> TokenStore | str:
        cluster = ClusterOptions(executor="datatrove", first_task=first, local_tasks=count)
        return prepare_on_cluster(texts, tokenizer, folder, OPTIONS, cluster)

    answer = host(2, 0)
    assert isinstance(answer, str)
    assert answer.startswith("2 of 4 parts are complete")
    # On NFS, names come late: hosts that end together may each miss the other's last part.
    assert answer.endswith("if none is running, run this one again")
    with pytest.raises(BertkitError, match="unfinished token store"):
        TokenStore(folder)
    assert isinstance(host(0, 2), TokenStore)
    assert content(folder) == local
    for first, count in ((4, 0), (-1, 1), (2, 3)):
        with pytest.raises(BertkitError, match="do not fit 4 tasks, which are numbered from 0"):
            host(first, count)


def test_any_order_of_tasks_and_a_local_run_fit_together(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path, local: dict[str, str]
) -> None:
    """What one way has made, the other takes over."""
    folder = tmp_path / "store"
    cluster = ClusterOptions(executor="datatrove", first_task=3)
    prepare_on_cluster(texts, tokenizer, folder, OPTIONS, cluster)
    before = (folder / "train-00003-000.tokens.npy").stat().st_ino
    prepare(texts, tokenizer, folder, OPTIONS)
    assert content(folder) == local
    assert (folder / "train-00003-000.tokens.npy").stat().st_ino == before
    store = prepare_on_cluster(texts, tokenizer, folder, OPTIONS, ON_HOSTS)
    assert isinstance(store, TokenStore)
    assert content(folder) == local


def test_an_error_in_a_task_is_one_line(
    tokenizer: Tokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("river.\n\nstone.\n")
    (tmp_path / "b.txt.gz").write_bytes(b"\x1f\x8b torn")
    texts = [str(tmp_path / "a.txt"), str(tmp_path / "b.txt.gz")]
    with pytest.raises(BertkitError, match=r"b\.txt\.gz cannot be read") as caught:
        prepare_on_cluster(texts, tokenizer, tmp_path / "store", OPTIONS, ON_HOSTS)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_other_machines_are_waited_for(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.15)
    with exclusive_lock(folder), pytest.raises(BertkitError, match="another process is working"):
        prepare_on_cluster(texts[-1:], tokenizer, folder, OPTIONS, ON_HOSTS)
    started = time.monotonic()
    monkeypatch.setattr(module, "WAIT_SECONDS", 30)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys, fcntl, time; f = open(sys.argv[1], 'w'); "
         "fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); time.sleep(0.5)",
         str(folder / ".lock")],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None
    holder.stdout.readline()
    store = prepare_on_cluster(texts[-1:], tokenizer, folder, OPTIONS, ON_HOSTS)
    assert isinstance(store, TokenStore)
    assert time.monotonic() - started >= 0.3
    holder.communicate()


def test_what_is_missing_is_said(
    texts: list[str],
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run(executor: str, **flags: object) -> None:
        cluster = ClusterOptions(executor=executor, **flags)  # type: ignore[arg-type]
        prepare_on_cluster(texts, tokenizer, tmp_path / "store", OPTIONS, cluster)

    with pytest.raises(BertkitError, match="slurm needs --partition"):
        run("slurm")
    with pytest.raises(BertkitError, match="--sbatch takes KEY=VALUE"):
        run("slurm", partition="cpu", sbatch=("requeue",))
    for executor in ("slurm", "datatrove"):
        with pytest.raises(BertkitError, match="--tasks must be 0 or more, got -3"):
            run(executor, partition="cpu", tasks=-3)
    with pytest.raises(BertkitError, match="--memory-gigabytes must be 1 or more, got 0"):
        run("slurm", partition="cpu", memory_gigabytes=0)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BertkitError, match="sbatch is not installed"):
        run("slurm", partition="cpu")
    saved, out = tmp_path / "tokenizer", tmp_path / "other"
    tokenizer.save(saved)
    with pytest.raises(BertkitError, match="--first-task needs --executor datatrove"):
        prepare_verb(texts[0], tokenizer=saved, out=out, cluster=ClusterOptions(first_task=1))
    for flags in (ClusterOptions(executor="slurm", partition="cpu", local_tasks=1),
                  ClusterOptions(executor="datatrove", partition="cpu")):  # fmt: skip
        with pytest.raises(BertkitError, match=r"--(local-tasks|partition) needs --executor"):
            prepare_verb(texts[0], tokenizer=saved, out=out, cluster=flags)
    monkeypatch.setitem(sys.modules, "datatrove.executor.local", None)
    with pytest.raises(BertkitError, match="the extra 'prepare'"):
        run("datatrove")


def test_remote_stores_are_refused(texts: list[str], tokenizer: Tokenizer) -> None:
    with pytest.raises(BertkitError, match=r"s3:/bucket/store is remote.* then copy it"):
        prepare(texts, tokenizer, Path("s3://bucket/store"), OPTIONS)


def command(texts: list[str], folder: Path, *flags: str) -> list[str]:
    return [
        sys.executable, "-m", "bertkit", "prepare", *texts, "--out", str(folder / "store"),
        "--tokenizer", str(folder / "tokenizer"), "--held-out", "0.05", "--shard-megabytes", "1",
        "--executor", "datatrove", "--processes", "2", *flags,
    ]  # fmt: skip


def children(process: int) -> list[int]:
    """The worker processes of a command."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
            words = (status.parent / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if int(lines["PPid"]) == process and b"spawn_main" in words:
            found.append(int(status.parent.name))
    return found


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not list(folder.glob(pattern)) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_worker_is_replaced_and_a_killed_host_resumes(
    larger: list[str], tokenizer: Tokenizer, tmp_path: Path, larger_local: dict[str, str]
) -> None:
    folder = tmp_path / "store"
    tokenizer.save(tmp_path / "tokenizer")
    host = subprocess.Popen(
        command(larger, tmp_path), stderr=subprocess.DEVNULL, start_new_session=True
    )
    wait_for(folder, "parts/*-*.json", host)
    workers = children(host.pid)
    host.kill()
    host.wait()
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{worker}/stat").exists() for worker in workers):
        assert time.monotonic() < deadline, "workers outlive a killed command"
        time.sleep(0.05)
    assert not (folder / "manifest.json").exists()

    again = subprocess.Popen(command(larger, tmp_path), stderr=subprocess.PIPE)
    wait_for(folder, "tasks/*/completions/*", again)
    for worker in children(again.pid)[:1]:
        os.kill(worker, signal.SIGKILL)
    _, messages = again.communicate(timeout=120)
    assert again.returncode == 0, messages.decode()
    assert content(folder) == larger_local


@pytest.mark.slow
def test_the_commands_of_the_page_for_hosts_by_hand(
    larger: list[str],
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer.save(Path("TOKENIZER"))
    Path("CORPUS").symlink_to(Path(larger[0]).parent)
    page = (ROOT / "docs" / "preparing.md").read_text()
    hosts = commands(section(page, "Several machines that share a folder"))
    assert len(hosts) == 3
    same = ["--shard-megabytes", "1", "--processes", "1"]
    told = []
    for words in hosts:
        parse(application(), [*words[1:], *same])
        told.append(capsys.readouterr().err)
    assert "2 of 4 parts are complete" in told[0]
    assert "STORE: " in told[1]
    assert told[1].splitlines()[-4:] == told[2].splitlines()[-4:]
    parse(application(), [*hosts[0][1 : hosts[0].index("--out")], "--out", "LOCAL", *same])
    assert content(Path("STORE")) == digests(Path("LOCAL"))


SBATCH = """#!/bin/bash
script="${@: -1}"
cat "$script" >> LOG
if grep -q merge_stats "$script"; then echo not run; exit; fi
for word in "$@"; do
    case "$word" in --export=ALL,*) export "${word#--export=ALL,}";; esac
    case "$word" in --dependency=*) echo "$word" >> LOG;; esac
done
last=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for task in $(seq 0 "$last"); do
    SLURM_ARRAY_TASK_ID=$task SLURM_NODELIST=here bash "$script" >> LOG 2>&1 || echo failed >> LOG
done
echo Submitted batch job 7
"""
"""Runs the tasks of an array at once, one after the other."""


@pytest.mark.slow
def test_slurm_scripts_make_the_same_store(
    texts: list[str],
    tokenizer: Tokenizer,
    tmp_path: Path,
    local: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = tmp_path / "log"
    programs = {
        "sbatch": SBATCH.replace("LOG", shlex.quote(str(log))),
        "srun": '#!/bin/bash\nshift 3\nexec "$@"\n',
        "scontrol": "#!/bin/bash\necho here\n",
    }
    for name, text in programs.items():
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    cluster = ClusterOptions(
        executor="slurm", tasks=2, partition="long", time="1:00:00", sbatch=("account=me",)
    )
    answer = prepare_on_cluster(texts, tokenizer, tmp_path / "store", OPTIONS, cluster, processes=0)
    assert answer == "2 tasks and a final one, which writes the manifest, are queued in Slurm"
    written = log.read_text()
    for line in ("partition=long", "time=1:00:00", "account=me", "array=0-1", "mem-per-cpu=4G"):
        assert f"#SBATCH --{line}\n" in written
    assert "--dependency=afterok:7" in written
    assert content(tmp_path / "store") == local, written
