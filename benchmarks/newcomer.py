"""A newcomer in an empty folder follows README, overview and how-tos, word by word.

    python -m benchmarks.newcomer                          a new environment, a wheel, every page
    python -m benchmarks.newcomer --python .venv/bin/python --demo FOLDER --pages docs/start.md

The first makes a virtual environment in an empty folder, installs a wheel of this repository with
the versions of constraints.txt, and runs every command and Python block of the pages with small
made-up data. It stops at the first surprise, with page and line: a status that is not 0, a warning,
or output unlike the page's. Then it writes results/newcomer.json. The second uses an environment
and a demo that are there and writes nothing. `newcomer_pages` says what a page's steps are, and
makes the data.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.newcomer_pages import STAND_INS, Step, missing_output, placeholders_of, steps_of
from benchmarks.record import ROOT, write_result

START = "docs/start.md"
"""The page that makes the environment and the demo that the others use."""
SKIPPED = {
    "README.md": {
        "python3 -m venv": "docs/start.md makes the environment",
        ". .venv/": "docs/start.md makes the environment",
        "pip install torch": "an option for another index",
        "pip install -c": "docs/start.md installs bertkit",
        "bertkit demo": "docs/start.md runs the same demo",
    },
    "docs/index.md": {
        "bertkit push": "needs an account on the hub",
        "bertkit launch": "asks for eight processes and BERT-base",
        "bertkit submit": "wants the predictions for all of GLUE",
        "bertkit reproduce all": "takes hours",
        "bertkit reproduce table-2": "takes a large GPU",
    },
}
"""Page → beginning of a command → why it is not run."""
INSTALLING = ("python3 -m venv", ". .venv/", "pip install")
STATUSES = {"bertkit doctor": (0, 1)}
"""Beginning of a command → the statuses that it may end with; the doctor's 1 means that it found
something."""
UNEXPECTED = re.compile(r"Traceback \(most recent|\w*Warning: ")
PREDICTING = ("bertkit predict", "bertkit evaluate")
PATIENCE = 120
"""The seconds that a server has to become ready, and to end."""


class SurpriseError(Exception):
    """Something is not as the page says."""


@dataclass
class Newcomer:
    """The folder, the programs and the demo with which the pages are followed."""

    folder: Path
    programs: Path
    """The folder of the environment's programs; they come first in PATH."""
    wheel: Path | None
    """The wheel that BERTKIT stands for; None if the environment is given and nothing installed."""
    demo: Path | None = None
    """A finished demo; None while there is none."""
    left_out: list[dict[str, Any]] = field(default_factory=list)

    def follow(self, name: str, text: str) -> dict[str, Any]:
        """Take all steps of a page in a folder of its own.

        Returns:
            What was done, and the seconds that it took.

        Raises:
            SurpriseError: something is not as the page says; the message has page and line.
        """
        steps = steps_of(text)
        visit = Visit(self, name, self.folder / Path(name).stem)
        visit.furnish(placeholders_of(steps))
        begun = time.monotonic()
        try:
            for step in steps:
                visit.take(step)
                if visit.predicted and "first_result_seconds" not in visit.row:
                    visit.row["first_result_seconds"] = round(time.monotonic() - begun, 1)
            visit.end_server()
        finally:
            visit.abandon_server()
        visit.row["seconds"] = round(time.monotonic() - begun, 1)
        return visit.row


class Visit:
    """One page being followed.

    Args:
        newcomer: who follows it.
        page: the name of the page, for surprises.
        folder: the working folder, which is made here.
    """

    def __init__(self, newcomer: Newcomer, page: str, folder: Path) -> None:
        self.newcomer, self.page, self.folder = newcomer, page, folder
        self.row: dict[str, Any] = {"page": page, "commands": 0, "python_blocks": 0, "skipped": 0}
        self.printed = ""
        """The output of the commands since the last output that was compared."""
        self.was_skipped = False
        """Whether one of these commands was left out."""
        self.predicted = False
        self.server: subprocess.Popen[bytes] | None = None
        self.place = page
        folder.mkdir(parents=True)

    def furnish(self, placeholders: set[str]) -> None:
        """Put what a reader of the page is supposed to have into the folder."""
        shutil.copy(ROOT / "constraints.txt", self.folder)
        for name in placeholders & set(STAND_INS):
            STAND_INS[name](self.folder / name)
        if self.page != START and self.newcomer.demo is not None:
            self.take_demo()
        if "MODEL" in placeholders:
            (self.folder / "MODEL").symlink_to("runs/demo/model")

    def take_demo(self) -> None:
        """Link the finished demo to where `bertkit demo` would have put it."""
        assert self.newcomer.demo is not None
        (self.folder / "runs").mkdir(exist_ok=True)
        if not (self.folder / "runs" / "demo").exists():
            (self.folder / "runs" / "demo").symlink_to(self.newcomer.demo.resolve())

    def take(self, step: Step) -> None:
        """Take one step."""
        self.place = f"{self.page}:{step.line}"
        if step.kind == "file":
            (self.folder / step.name).write_text(step.text, encoding="utf-8")
        elif step.kind == "python":
            self.row["python_blocks"] += 1
            self.run(["python", "-c", step.text])
            self.predicted = True
        elif step.kind == "output":
            missing = missing_output(step.text, self.printed)
            if missing and not self.was_skipped:
                raise SurpriseError(f"{self.place}: not printed: {missing[0]}\n{self.printed}")
            self.printed, self.was_skipped = "", False
        else:
            self.command(step.text)

    def command(self, text: str) -> None:
        """Run a command, begin a server, or note why neither is done."""
        reason = self.reason_to_skip(text)
        if reason:
            print(f"{self.place}: left out, {reason}: {text}", flush=True)
            self.row["skipped"] += 1
            self.was_skipped = True
            left_out = {"place": self.place, "command": text, "reason": reason}
            self.newcomer.left_out.append(left_out)
            return
        print(f"{self.place}: {text}", flush=True)
        self.row["commands"] += 1
        if self.newcomer.wheel is not None:
            text = re.sub(r"BERTKIT|(?<=')bertkit(?=\[)", str(self.newcomer.wheel), text)
        if text.startswith("bertkit serve"):
            self.begin_server(text)
            return
        if not text.startswith("curl"):
            self.end_server()
        self.run(["bash", "-c", text], statuses=status_of(text))
        if text.startswith("bertkit demo"):
            self.newcomer.demo = self.folder / "runs" / "demo"
        self.predicted |= text.startswith(PREDICTING)

    def reason_to_skip(self, text: str) -> str:
        """Return why a command is not run here; empty if it is run."""
        for beginning, reason in SKIPPED.get(self.page, {}).items():
            if text.startswith(beginning):
                return reason
        if self.newcomer.wheel is None and text.startswith(INSTALLING):
            return "the environment is given"
        if text.startswith("bertkit demo") and self.newcomer.demo is not None:
            self.take_demo()
            return "the demo is given"
        return ""

    def run(self, command: list[str], statuses: tuple[int, ...] = (0,)) -> None:
        """Run a program to its end and keep what it prints.

        Raises:
            SurpriseError: it fails or warns.
        """
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.printed += done.stdout + "\n"
        if done.returncode not in statuses:
            raise SurpriseError(f"{self.place}: status {done.returncode}:\n{done.stdout}")
        if found := UNEXPECTED.search(done.stdout):
            raise SurpriseError(f"{self.place}: {found[0]} in what is printed:\n{done.stdout}")

    def environment(self) -> dict[str, str]:
        """Return the variables of a fresh login, in which no other environment is active."""
        path = f"{self.newcomer.programs}{os.pathsep}{os.environ['PATH']}"
        left_out = {"VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "COLUMNS"}
        return {key: value for key, value in os.environ.items() if key not in left_out} | {
            "PATH": path
        }

    def begin_server(self, text: str) -> None:
        """Start a server and wait until it is ready.

        Raises:
            SurpriseError: its port is taken, or it does not come up.
        """
        port = int(re.search(r"--port (\d+)", f"{text} --port 8000")[1])  # type: ignore[index]
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                raise SurpriseError(f"{self.place}: port {port} is in use on this machine")
        with (self.folder / "server.log").open("wb") as log:
            self.server = subprocess.Popen(
                shlex.split(text), cwd=self.folder, env=self.environment(), stdout=log, stderr=log
            )
        until = time.monotonic() + PATIENCE
        while time.monotonic() < until and self.server.poll() is None:
            with suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5)
                return
            time.sleep(0.2)
        raise SurpriseError(f"{self.place}: no server:\n{(self.folder / 'server.log').read_text()}")

    def abandon_server(self) -> None:
        """Leave no process behind after a surprise."""
        if self.server is not None:
            self.server.kill()
            self.server.wait()

    def end_server(self) -> None:
        """Stop the server with Ctrl-C, if there is one.

        Raises:
            SurpriseError: it does not end well.
        """
        server, self.server = self.server, None
        if server is None:
            return
        server.send_signal(signal.SIGINT)
        try:
            status = server.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            server.kill()
            raise SurpriseError(f"{self.place}: the server did not end after Ctrl-C") from None
        if status not in {0, 130, -signal.SIGINT}:
            raise SurpriseError(f"{self.place}: the server ended with status {status}")


def status_of(command: str) -> tuple[int, ...]:
    """Return the statuses that a command may end with."""
    return next((s for text, s in STATUSES.items() if command.startswith(text)), (0,))


PAGES = (
    START,
    "docs/howto-corpus.md",
    "docs/howto-classify.md",
    "docs/howto-entities.md",
    "docs/howto-answers.md",
    "docs/index.md",
    "README.md",
)


def build_wheel(folder: Path) -> Path:
    """Build a wheel of this repository, and return its path."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True)
    [wheel] = folder.glob("bertkit-*.whl")
    return wheel


def main() -> None:
    """Follow the pages, print what was done, and write it where everything was made anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=PAGES, metavar="PAGE")
    parser.add_argument("--python", type=Path, help="of an environment that has bertkit")
    parser.add_argument("--demo", type=Path, help="the folder of a finished bertkit demo")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    given = parser.parse_args()
    pages = [page for page in PAGES if page in given.pages]
    if START not in pages and not (given.python and given.demo):
        pages.insert(0, START)
    folder = Path(tempfile.mkdtemp(prefix="newcomer-"))
    wheel = None if given.python else build_wheel(folder / "wheel")
    own = folder / Path(START).stem / ".venv" / "bin"
    programs = given.python.absolute().parent if given.python else own
    newcomer = Newcomer(folder, programs, wheel, given.demo)
    rows = []
    try:
        for page in pages:
            rows.append(newcomer.follow(page, (ROOT / page).read_text(encoding="utf-8")))
            print(rows[-1], flush=True)
    except SurpriseError as surprise:
        sys.exit(f"surprise at {surprise}\nthe folder is {folder}")
    if wheel is not None and given.demo is None and tuple(pages) == PAGES:
        print(write_result("newcomer", rows, {"left_out": newcomer.left_out}))
    if not given.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
