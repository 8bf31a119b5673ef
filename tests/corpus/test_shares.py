"""Several machines prepare shares of one store: the bytes of a single one, after any failure."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.cli.app import application
from bertkit.config import parse
from bertkit.corpus import build as module
from bertkit.corpus.build import PrepareOptions, prepare, prepare_share
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import exclusive_lock
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import make_document
from tests.corpus.test_prepare import digests
from tests.markdown import ROOT, commands, section

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
    """Digests of everything in a store but torn leftovers."""
    return {name: value for name, value in digests(folder).items() if ".tmp-" not in name}


def make_share(
    texts: list[str], tokenizer: Tokenizer, folder: Path, share: str
) -> TokenStore | None:
    return prepare_share(texts, tokenizer, folder, OPTIONS, share=share)


@pytest.mark.parametrize("order", [("1/1",), ("2/2", "1/2"), ("3/3", "1/3", "2/3"), ("6/6",
    "5/6", "4/6", "3/6", "2/6", "1/6")])  # fmt: skip
def test_the_store_equals_that_of_one_machine(
    texts: list[str],
    tokenizer: Tokenizer,
    tmp_path: Path,
    local: dict[str, str],
    order: tuple[str, ...],
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "store"
    for number, share in enumerate(order[:-1], start=1):
        assert make_share(texts, tokenizer, folder, share) is None
        [named] = re.findall(r"--share (\S+)", capfd.readouterr().err)
        assert named in order[number:], "it names a share that is missing"
        with pytest.raises(BertkitError, match="unfinished token store"):
            TokenStore(folder)
    assert isinstance(make_share(texts, tokenizer, folder, order[-1]), TokenStore)
    assert content(folder) == local


def test_complete_parts_are_kept_and_damaged_ones_made_again(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path, local: dict[str, str]
) -> None:
    folder = tmp_path / "store"

    def run(share: str) -> list[str]:
        """Make a share, and return the files that were written again."""
        before = {path: path.stat().st_ino for path in folder.glob("t*.npy")}
        assert make_share(texts, tokenizer, folder, share) is not None
        assert content(folder) == local
        return sorted({path.name[:11] for path in folder.glob("t*.npy")
                       if before.get(path) != path.stat().st_ino})  # fmt: skip

    assert len(run("1/1")) == FILES
    assert run("1/2") == run("2/2") == []
    (folder / "train-00001-001.tokens.npy").unlink()
    assert run("2/2") == ["train-00001"]
    victim = folder / "train-00002-000.tokens.npy"
    damaged = bytearray(victim.read_bytes())
    damaged[-1] ^= 1  # of the same size: only its checksum tells, when the parts are merged
    victim.write_bytes(damaged)
    with pytest.raises(BertkitError, match=r"part 3 of 4 .* --share 1/2"):
        run("2/2")
    assert "train-00002" in run("1/2")
    (folder / "parts" / "00003.json").write_text("[")
    assert make_share(texts, tokenizer, folder, "1/2") is None
    run("2/2")


def test_a_share_and_one_machine_take_over_from_each_other(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path, local: dict[str, str]
) -> None:
    folder = tmp_path / "store"
    assert make_share(texts, tokenizer, folder, "4/4") is None
    before = (folder / "train-00003-000.tokens.npy").stat().st_ino
    prepare(texts, tokenizer, folder, OPTIONS)
    assert content(folder) == local
    assert (folder / "train-00003-000.tokens.npy").stat().st_ino == before
    assert make_share(texts, tokenizer, folder, "2/3") is not None
    assert content(folder) == local


@pytest.mark.parametrize("share", ["0/4", "5/4", "2", "1/0", "-1/4", "a/b", "1/4/2", "²/3", ""])
def test_impossible_shares_are_refused(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path, share: str
) -> None:
    with pytest.raises(BertkitError) as caught:
        make_share(texts, tokenizer, tmp_path / "store", share)
    assert caught.value.code == "number"
    assert not (tmp_path / "store").exists()


def test_other_settings_are_refused(texts: list[str], tokenizer: Tokenizer, tmp_path: Path) -> None:
    make_share(texts, tokenizer, tmp_path / "store", "1/2")
    with pytest.raises(BertkitError, match="other held_out"):
        prepare_share(texts, tokenizer, tmp_path / "store", SmallShards(held_out=0.1), share="2/2")


def test_other_machines_are_waited_for(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "store"
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.15)
    with exclusive_lock(folder), pytest.raises(BertkitError, match="another process is working"):
        make_share(texts[-1:], tokenizer, folder, "1/1")
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
    assert make_share(texts[-1:], tokenizer, folder, "1/1") is not None
    assert time.monotonic() - started >= 0.3
    holder.communicate()


def test_a_machine_that_ends_while_another_merges_leaves_it_to_that(
    texts: list[str], tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, made = tmp_path / "store", module.prepare_parts
    locks = []

    def slow(*arguments: Any) -> Any:
        results = made(*arguments)
        lock = exclusive_lock(folder)
        lock.__enter__()
        locks.append(lock)
        return results

    monkeypatch.setattr(module, "WAIT_SECONDS", 0.15)
    monkeypatch.setattr(module, "prepare_parts", slow)
    assert make_share(texts[-1:], tokenizer, folder, "1/1") is None
    locks[0].__exit__(None, None, None)


def test_remote_stores_are_refused(texts: list[str], tokenizer: Tokenizer) -> None:
    with pytest.raises(BertkitError, match=r"s3:/bucket/store is remote.* then copy it"):
        prepare(texts, tokenizer, Path("s3://bucket/store"), OPTIONS)


def wait_for(folder: Path, pattern: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while not list(folder.glob(pattern)) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_killed_machine_resumes_while_another_works(
    larger: list[str], tokenizer: Tokenizer, tmp_path: Path, larger_local: dict[str, str]
) -> None:
    folder = tmp_path / "store"
    tokenizer.save(tmp_path / "tokenizer")
    command = [
        sys.executable, "-m", "bertkit", "prepare", *larger, "--out", str(folder),
        "--tokenizer", str(tmp_path / "tokenizer"), "--held-out", "0.05", "--shard-megabytes", "1",
        "--processes", "1", "--share",
    ]  # fmt: skip
    first, second = (
        subprocess.Popen([*command, share], stderr=subprocess.PIPE) for share in ("1/2", "2/2")
    )
    wait_for(folder, "parts/*-*.json", first)
    first.kill()
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    second.communicate(timeout=120)
    assert second.returncode == 0
    assert not (folder / "manifest.json").exists()
    done = subprocess.run([*command, "1/2"], check=True, stderr=subprocess.PIPE, timeout=120)
    assert b"documents" in done.stderr
    assert content(folder) == larger_local


@pytest.mark.slow
def test_the_commands_of_the_page(
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
    machines = commands(section(page, "Several machines that share a folder"))
    assert len(machines) == 2
    same = ["--shard-megabytes", "1", "--processes", "1"]
    for words, said in zip(machines, ("2 of 4 parts are complete", "STORE: "), strict=True):
        parse(application(), [*words[1:], *same])
        assert said in capsys.readouterr().err
    parse(application(), [*machines[0][1 : machines[0].index("--out")], "--out", "LOCAL", *same])
    assert content(Path("STORE")) == digests(Path("LOCAL"))
