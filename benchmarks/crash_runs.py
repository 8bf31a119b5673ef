"""Commands that are made to crash, each in a fork of one warm process, so a run takes a second.

A moment is either a time, or the n-th thing that a command does with the file system below a folder
(opening, renaming, removing, making a folder), which Python's audit events tell. The latter are the
moments at which a crash can leave something half done, and they can be repeated exactly.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

EVENTS = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree"}
"""What counts as a moment; `os.rename` is also what `Path.replace` tells."""


@dataclass(frozen=True)
class Moment:
    """When something happens to a command: after some seconds, or at the n-th event of a folder."""

    seconds: float = 0.0
    event: int = 0
    below: str = ""
    """A folder inside the command's; "" for all of it."""
    signal: int = signal.SIGKILL
    action: Callable[[], object] | None = None
    """At an event, instead of the signal: called inside the command, which goes on."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    """The exit status; minus the number of the signal that killed it."""
    shown: str
    """What it printed."""
    seconds: float


def warm() -> None:
    """Import what the commands import, once, and leave out their reports, which take longer."""
    import scipy.stats  # noqa: F401
    import seqeval.metrics  # noqa: F401
    import sklearn.metrics  # noqa: F401
    import torch._dynamo
    import torch.utils.tensorboard

    import bertkit.verbs.finetune
    import bertkit.verbs.prepare
    import bertkit.verbs.pretrain

    torch.set_num_threads(1)
    for verb in (bertkit.verbs.pretrain, bertkit.verbs.finetune):
        vars(verb)["write_report"] = lambda out: out / "report.html"


def run(arguments: Sequence[str], out: Path, log: Path, moment: Moment | None = None) -> Ended:
    """Run `bertkit ARGUMENTS` in a fork, with a signal or an action at a moment."""
    began = time.perf_counter()
    with log.open("wb") as file:
        child = os.fork()
        if child == 0:
            os.setsid()  # so that what it leaves behind can be found
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
            os._exit(inside(arguments, out, moment))
    status = None
    if moment and moment.seconds:
        status = wait_for(child, moment.seconds)
        if status is None:
            os.kill(child, moment.signal)
    if status is None:
        _, status = os.waitpid(child, 0)
    if moment and moment.signal == signal.SIGKILL:
        end_group(child)
    seconds = time.perf_counter() - began
    shown = log.read_text(encoding="utf-8", errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), shown, seconds)


def inside(arguments: Sequence[str], out: Path, moment: Moment | None) -> int:
    """What the child does; its exit status."""
    import torch

    from bertkit.cli import main

    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    torch.set_num_threads(1)
    if moment and moment.event:
        sys.addaudithook(at_event(str(out / moment.below), moment))
    try:
        main(arguments)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 1
    except BaseException:  # what a user would see as a traceback
        traceback.print_exc()
        return 1
    return 0


def at_event(below: str, moment: Moment) -> Callable[[str, tuple[Any, ...]], None]:
    """An audit hook that acts, or sends this process a signal, at the n-th event of a folder."""
    seen = 0

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal seen
        if name in EVENTS and any(
            isinstance(given, str | os.PathLike) and os.fspath(given).startswith(below)
            for given in arguments[:2]
        ):
            seen += 1
            if seen == moment.event and moment.action:
                moment.action()
            elif seen == moment.event:
                os.kill(os.getpid(), moment.signal)

    return hook


def wait_for(child: int, seconds: float) -> int | None:
    """The status of a child that ends in time."""
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return status
        time.sleep(0.002)
    return None


def end_group(leader: int) -> None:
    """Kill the worker processes that a killed command has left."""
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        return


def count_events(arguments: Sequence[str], out: Path, log: Path, below: str = "") -> int:
    """How many moments a command has: it runs once, undisturbed."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        with log.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        seen = 0
        prefix = str(out / below)

        def hook(name: str, given: tuple[Any, ...]) -> None:
            nonlocal seen
            paths = [os.fspath(p) for p in given[:2] if isinstance(p, str | os.PathLike)]
            seen += name in EVENTS and any(str(path).startswith(prefix) for path in paths)

        sys.addaudithook(hook)
        status = inside(arguments, out, None)
        os.write(write, str(seen).encode())
        os._exit(status)
    os.close(write)
    _, status = os.waitpid(child, 0)
    with os.fdopen(read) as pipe:
        counted = int(pipe.read() or 0)
    if status:
        raise RuntimeError(f"{' '.join(arguments)} failed undisturbed:\n{log.read_text()}")
    return counted


def remove(folder: Path) -> None:
    """Make room for the next run."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def small_disk(place: Path, kilobytes: int) -> Iterator[Callable[[int], None]]:
    """A file system in memory; gives what changes its size."""
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
    """Why small disks cannot be made here; "" where they can."""
    if os.geteuid() or not shutil.which("mount"):
        return "mounting needs root"
    try:
        with small_disk(home / "disk", 100):
            return ""
    except (OSError, subprocess.CalledProcessError) as error:
        return f"mounting failed: {error}"
