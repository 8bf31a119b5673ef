"""Commands that are made to crash, each in a fork of one warm process, so a run takes a second.

A moment is either a time, or the n-th thing that a command does with the file system below a folder
(opening, renaming, removing, making a folder), which Python's audit events tell. The latter are the
moments at which a crash can leave something half done, and they can be repeated exactly.
"""

from __future__ import annotations

import gc
import math
import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import bertkit

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
"""The audit events that count as moments; `Path.replace` raises `os.rename`, too."""
BEGUN = b"."


@dataclass(frozen=True)
class Moment:
    """The moment of a signal or action: after some seconds, or at the n-th event of a folder."""

    seconds: float = 0.0
    event: int = 0
    signal: signal.Signals = signal.SIGKILL
    action: Callable[[], object] | None = None
    """Called at an event, instead of the signal, inside the command, which goes on."""

    def __str__(self) -> str:
        when = f"{self.seconds:.3f} s" if self.seconds else f"event {self.event}"
        return f"{self.signal.name} at {when}"


@dataclass(frozen=True)
class Ended:
    """The end of a command."""

    status: int
    """The exit status; minus the number of the signal that killed it."""
    shown: str
    """The text that it printed."""
    seconds: float
    events: int = 0
    """The number of events that it had; 0 if it was killed."""


def warm(*, few: bool = False) -> None:
    """Import what the commands import, once; leave out their reports, which would take longer.

    `few` leaves out what only exports import.
    """
    heavy = () if few else ("torch._dynamo", "transformers")
    modules = [module.name for module in walk_packages(bertkit.__path__, "bertkit.")]
    skipped = ("bertkit.serve", "bertkit.cli.serve", "__main__", "triton_kernels", "libbertkit")
    for name in (*heavy, *(name for name in modules if not any(part in name for part in skipped))):
        import_module(name)
    vars(import_module("bertkit.report.pretraining"))["write_report"] = lambda out: out
    vars(import_module("bertkit.cli.tasks"))["write_report"] = lambda out: out
    often = {"CHECKPOINT_SECONDS": 0.0, "CHECKPOINT_SHARE": math.inf}
    vars(import_module("bertkit.finetuning.train")).update(often)  # at every evaluation
    import torch

    torch.set_num_threads(1)


def run(arguments: Sequence[str], place: Path, log: Path, moment: Moment | None = None) -> Ended:
    """Run `bertkit ARGUMENTS` in a fork, with a signal or an action at a moment.

    Args:
        arguments: the command line.
        place: the folder whose events count.
        log: takes what is printed.
        moment: None leaves the command alone.
    """
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()  # so that what it leaves behind can be found, and Ctrl-C goes to its group
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os._exit(inside(arguments, place, moment, there))
    os.close(there)
    with os.fdopen(here, "rb") as told:
        told.read(len(BEGUN))
        began = time.perf_counter()
        status = None
        if moment and moment.seconds and (status := wait_for(child, moment.seconds)) is None:
            send(child, moment.signal)
        if status is None:
            _, status = os.waitpid(child, 0)
        seconds = time.perf_counter() - began
        events = int(told.read() or 0)
    with suppress(ProcessLookupError):  # worker processes that it has left
        os.killpg(child, signal.SIGKILL)
    shown = log.read_text(encoding="utf-8", errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), shown, seconds, events)


def inside(arguments: Sequence[str], place: Path, moment: Moment | None, told: int) -> int:
    """Run the command in the child, and return its exit status."""
    import torch

    from bertkit.cli.app import run_program

    sys.argv = ["bertkit", *arguments]
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    hook = Hook(str(place), moment or Moment())
    sys.addaudithook(hook)
    status = 0
    os.write(told, BEGUN)
    try:
        run_program()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # what a user would see as a traceback
        traceback.print_exc()
        status = 1
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # from here on, a signal comes too late
    gc.collect()  # as Python does when it ends: it closes generators that an exception has held
    os.write(told, str(hook.seen).encode())
    return status


class Hook:
    """An audit hook that counts the events of a folder, and acts or sends a signal at the n-th."""

    def __init__(self, place: str, moment: Moment) -> None:
        self.place, self.moment, self.seen = place, moment, 0

    def __call__(self, name: str, arguments: tuple[Any, ...]) -> None:
        if name not in EVENTS:
            return
        paths = [
            os.fspath(given) for given in arguments[:2] if isinstance(given, str | os.PathLike)
        ]
        if not any(str(path).startswith(self.place) for path in paths):
            return
        self.seen += 1
        if self.seen == self.moment.event:
            if self.moment.action:
                self.moment.action()
            else:
                send(os.getpid(), self.moment.signal)


def send(process: int, number: signal.Signals) -> None:
    """Send a signal to a command; Ctrl-C reaches its workers, too, as it does in a terminal."""
    (os.killpg if number == signal.SIGINT else os.kill)(process, number)


def wait_for(child: int, seconds: float) -> int | None:
    """Return the status of a child that ends in time, else None."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.002)
    return None


def remove(folder: Path) -> None:
    """Remove a folder to make room for the next run."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def small_disk(place: Path, kilobytes: int) -> Iterator[Callable[[int], None]]:
    """Mount a file system in memory; yield a function that changes its size."""
    place.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(place)]
    subprocess.run(mount, check=True, capture_output=True)

    def resize(new: int) -> None:
        remount = ["mount", "-o", f"remount,size={new}k", str(place)]
        subprocess.run(remount, check=True, capture_output=True)

    try:
        yield resize
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True, capture_output=True)


def why_no_disk(home: Path) -> str:
    """Return why small disks cannot be made here; "" if they can."""
    if os.geteuid() or not shutil.which("mount"):
        return "mounting needs root"
    try:
        with small_disk(home / "disk", 100):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"mounting failed: {error}"
