"""One GPU measured in two commands of at most eight minutes each.

    python -m benchmarks.gpu train --out DIR    pre-training by stages, beside transformers
    python -m benchmarks.gpu rest --out DIR     inference and fine-tuning

Each writes DIR/gpu-COMMAND.json after every case. A case runs in a process of its own with a time
limit, and what failed stands in the file with its error, as does what there was no time for. With
--dry-run a tiny network on the CPU tries every line of the two, so of cases that differ in sizes
only the first; what needs CUDA fails there.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.rest import OTHERS
from benchmarks.gpu.setup import NO_TIME, Case, Found, Setup, in_one_line
from benchmarks.gpu.train import TRAININGS
from benchmarks.record import ROOT, circumstances
from bertkit.files import write_json
from bertkit.training.device import environment

COMMANDS: dict[str, dict[str, Case]] = {"train": TRAININGS, "rest": OTHERS}
"""The cases of each command, the most telling ones first."""
LONGEST_CASE = 0.45
"""The share of all minutes after which a case is stopped."""
LEAST_SECONDS = 15.0
"""The seconds that a case needs at least to start, and has to finish after its time is over."""


def run_case(case: Case, setup: Setup, into: Path) -> None:
    """Run a case in this process, and append its rows to a file as JSON lines."""
    with into.open("a", encoding="utf-8") as lines:
        try:
            for result in case(setup):
                print(json.dumps(result), file=lines, flush=True)
        except Exception as error:
            print(json.dumps(("case", in_one_line(error))), file=lines)


def in_own_process(case: str, options: argparse.Namespace, seconds: float) -> list[Found]:
    """Run a case in a new process, which is stopped with its children if it takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        into, limit, error = Path(folder) / "found.jsonl", seconds + LEAST_SECONDS, ""
        into.touch()
        command = [sys.executable, "-m", "benchmarks.gpu", options.command, "--case", case]
        command += ["--minutes", str(seconds / 60), "--into", str(into)]
        command += ["--dry-run"] * options.dry_run
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        try:
            if status := process.wait(limit):
                error = f"ended with status {status}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            error = f"stopped after {limit:.0f} s"
        complete = into.read_text(encoding="utf-8").split("\n")[:-1]
    return [*map(json.loads, complete), *([("case", error)] if error else [])]


def run_command(options: argparse.Namespace, cases: list[str], path: Path) -> None:
    """Run cases one after the other, and write the results file after each."""
    known = environment()
    rows: dict[str, Any] = {}
    failed: dict[str, Any] = {}
    seconds_of: dict[str, float] = {}
    result = {
        "name": path.stem,
        **circumstances(),
        "script": f"python -m benchmarks.gpu {options.command}",
        "devices": known["devices"] or ["a dry run: no result"],
        "cuda": known["cuda"],
        "rows": rows,
        "failed": failed,
        "seconds": seconds_of,
    }
    end = time.monotonic() + 60 * options.minutes
    for case in cases:
        began = time.monotonic()
        seconds = min(end - began - LEAST_SECONDS, 60 * options.minutes * LONGEST_CASE)
        enough = seconds >= LEAST_SECONDS
        results = in_own_process(case, options, seconds) if enough else [("case", NO_TIME)]
        for name, row in results:
            (failed if isinstance(row, str) else rows)[f"{case}, {name}"] = row
            print(f"{case}, {name}: {row}", flush=True)
        seconds_of[case] = round(time.monotonic() - began, 1)
        write_json(path, result)


def main() -> None:
    """Run a command; or, with --into, write the rows of one case into a file."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--out", type=Path, help="the folder for results; by default results/")
    parser.add_argument("--minutes", type=float, default=8.0, help="for all cases together")
    parser.add_argument("--dry-run", action="store_true", help="a tiny network on the CPU")
    parser.add_argument("--case", default="", help="only the cases whose name contains this")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = COMMANDS[options.command]
    if options.into:
        device = torch.device("cpu" if options.dry_run else "cuda")
        setup = Setup(device, time.monotonic() + 60 * options.minutes)
        run_case(cases[options.case], setup, options.into)
        return
    if not options.dry_run and not torch.cuda.is_available():
        sys.exit("error: torch finds no CUDA device; --dry-run tries the command on the CPU")
    if options.dry_run and not options.out:
        sys.exit("error: give --out; what a dry run measures is no result")
    path = (options.out or ROOT / "results") / f"gpu-{options.command}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    first: dict[Any, str] = {}
    for name, case in cases.items():
        first.setdefault(getattr(case, "func", case), name)
    chosen = first.values() if options.dry_run else cases
    run_command(options, [name for name in chosen if options.case in name], path)
    print(path)


if __name__ == "__main__":
    main()
