"""The end of a process: signals, full disks, closed streams."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bertkit.training.distributed import GracefulStop
from tests.conftest import python

WORK = """
import os, signal, sys, time
from pathlib import Path
from bertkit.cli import app as cli
from bertkit.files import new_file, new_folder

_, home, name = sys.argv
sys.argv[1:] = ["report"]

def send():
    os.kill(os.getpid(), getattr(signal, name))

def work(*_, **__):
    with new_folder(Path(home) / "folder"), new_file(Path(home) / "file") as temporary:
        temporary.write_text("half")
        {act}
        time.sleep(60)

cli.application = lambda *_: work
cli.run_program()
"""
LOST = """
        class Lost:
            def __del__(self):
                send()
        Lost()
"""
CATCHES = """
        try:
            send()
            time.sleep(60)
        except Exception:
            pass
"""
IMPORTING = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path, target=None):
        if name == {name!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Finder())
sys.argv = ["bertkit", "report", "nowhere"]
from bertkit.__main__ import program
program()
"""


@pytest.mark.parametrize(
    ("name", "act"),
    [
        *(("SIGTERM", act) for act in ("send()", "send(); send()", CATCHES, LOST)),
        ("SIGINT", "send()"),
        ("SIGHUP", "send()"),
    ],
)
def test_a_signal_leaves_nothing_behind(act: str, name: str, tmp_path: Path) -> None:
    """Not even one that comes twice, or at a moment from which Python passes no exception on."""
    usual = f"import signal; signal.signal(signal.{name}, signal.SIG_DFL)\n"  # nohup ignores SIGHUP
    done = python("-c", usual + WORK.replace("{act}", act.strip()), str(tmp_path), name)
    assert done.returncode == 128 + getattr(signal, name)
    assert done.stderr.splitlines() == ["stopped; run the same command again"]
    assert list(tmp_path.iterdir()) == []


def test_a_signal_that_is_ignored_stays_so(tmp_path: Path) -> None:
    script = WORK.replace("{act}", "send()").replace("time.sleep(60)", "pass")
    begin = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
    assert python("-c", begin + script, str(tmp_path), "SIGHUP").returncode == 0
    assert (tmp_path / "file").is_file()


@pytest.mark.parametrize("name", ["SIGINT", "SIGHUP"])
def test_training_does_not_catch_a_signal_that_is_ignored(name: str) -> None:
    """As a background job of a script ignores Ctrl-C, and nohup a closed terminal."""
    number = getattr(signal, name)
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with GracefulStop().install() as stop:
            signal.raise_signal(number)
            assert stop.received is None
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_training_notes_a_signal(number: int) -> None:
    before = signal.signal(number, signal.SIG_DFL)  # ignored, as nohup does, it would not be noted
    try:
        with GracefulStop().install() as stop:
            signal.raise_signal(number)
            assert stop.received == number
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("name", ["bertkit.cli.app", "cyclopts", "bertkit.cli.training"])
def test_ctrl_c_while_modules_are_imported(name: str) -> None:
    done = python("-c", IMPORTING.format(name=name))
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("group", [False, True])
def test_sigterm_of_a_command_with_processes(
    corpus_text: str, tmp_path: Path, *, group: bool
) -> None:
    (tmp_path / "in.txt").write_text("\n\n".join([corpus_text] * 100))
    words = ["clean", "in.txt", "--near", "--processes", "2", "--out", "out.jsonl.zst"]
    command = [sys.executable, "-m", "bertkit", *words]
    running = subprocess.Popen(
        command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while not list(tmp_path.glob(".out.jsonl.zst.tmp-*")):
        assert running.poll() is None
        time.sleep(0.01)
    (os.killpg if group else os.kill)(running.pid, signal.SIGTERM)
    _, told = running.communicate(timeout=50)
    assert running.returncode == 143, told
    assert "Traceback" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["in.txt"]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a disk that is always full")
def test_a_full_disk_of_the_standard_output_is_said() -> None:
    with Path("/dev/full").open("w") as full:
        for words in (["--version"], ["--help"]):
            done = python("-m", "bertkit", *words, capture_output=False, stdout=full, stderr=-1)
            assert done.returncode == 2
            [line] = done.stderr.splitlines()
            assert line.startswith("error: ")
            assert "No space left" in line


@pytest.mark.slow
@pytest.mark.parametrize(
    ("closed", "version", "doctor"), [("<&-", 0, 2), (">&-", 0, 2), ("2>&-", 0, 2)]
)
def test_closed_streams(closed: str, version: int, doctor: int, tmp_path: Path) -> None:
    """What is opened later does not get the number of a closed one: it would be printed into."""
    for words, status in (("--version", version), ("report nowhere", doctor)):
        command = f"{sys.executable} -m bertkit {words} {closed}"
        done = subprocess.run(
            ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == status
        assert "Traceback" not in done.stderr
        if status and closed != "2>&-":
            assert len(done.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_output_is_utf_8_in_any_locale(encoding: str) -> None:
    """A line of JSON stays one, also with a name of a file that is not UTF-8."""
    script = """
import json, sys
from bertkit.cli import app as cli
def work(*_, **__):
    print(json.dumps(TEXT, ensure_ascii=False))
    print(TEXT, file=sys.stderr)
cli.application = lambda *_: work
cli.run_program()
"""
    text = "Zoë מודל 王 👩 \udc80"
    done = python(
        "-c",
        script.replace("TEXT", ascii(text)),
        text=False,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert done.returncode == 0
    assert json.loads(done.stdout.decode()) == text
    assert b"Traceback" not in done.stderr
