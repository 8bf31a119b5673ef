"""One GPU measured in two commands of at most eight minutes each.

    python -m benchmarks.gpu train --out DIR    pre-training by stages, beside transformers
    python -m benchmarks.gpu rest --out DIR     inference, a store, fine-tuning, resuming, large

Each writes DIR/gpu-COMMAND.json anew with every row, so that nothing is lost if it is killed. What
the file has of other cases stays there. Each case runs in a process of its own with a time limit,
and what failed stands in the file with its error, as does what there was no time for. With
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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.rest import OTHERS
from benchmarks.gpu.setup import NO_TIME, Case, Found, Setup, in_one_line
from benchmarks.gpu.train import TRAININGS
from benchmarks.record import ROOT, circumstances
from bertkit.files import read_json, write_json
from bertkit.training.device import environment

COMMANDS: dict[str, dict[str, Case]] = {"train": TRAININGS, "rest": OTHERS}
"""The cases of each command, the most telling ones first."""
MINUTES = 8.0
LONGEST_CASE = 0.45
"""The share of all minutes after which a case is stopped."""
LEAST_SECONDS = 15.0
"""The seconds that a case needs at least to start, and has to finish after its time is over."""


class Options(NamedTuple):
    """The options of the command line."""

    command: str
    out: Path
    minutes: float
    dry: bool

    def setup(self, seconds: float) -> Setup:
        """Return what a case is given that has so many seconds."""
        device = torch.device("cpu" if self.dry else "cuda")
        return Setup(device, self.out, time.monotonic() + seconds)


def chosen_cases(options: Options) -> list[str]:
    """Return the names of the cases; in a dry run, one for each function."""
    cases, first = COMMANDS[options.command], dict[Any, str]()
    for name, case in cases.items():
        first.setdefault(getattr(case, "func", case), name)
    return list(first.values() if options.dry else cases)


def run_case(case: str, options: Options, seconds: float) -> Iterator[Found]:
    """Run a case in this process; an error that it does not catch ends it."""
    try:
        yield from COMMANDS[options.command][case](options.setup(seconds))
    except Exception as error:
        yield "case", in_one_line(error)


def in_own_process(case: str, options: Options, seconds: float) -> Iterator[Found]:
    """Run a case in a new process, which is stopped with its children if it takes too long.

    It writes what it finds into a file, as pipes stay open while any of its children lives.
    """
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.jsonl"
        found.touch()
        command = [sys.executable, "-m", "benchmarks.gpu", options.command]
        command += ["--out", str(options.out), "--minutes", str(seconds / 60)]
        command += ["--case", case, "--into", str(found)] + ["--dry-run"] * options.dry
        process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
        end = time.monotonic() + seconds + LEAST_SECONDS
        with found.open(encoding="utf-8") as lines:
            while (status := process.poll()) is None and time.monotonic() < end:
                time.sleep(0.1)
                yield from complete(lines)
            if status is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            yield from complete(lines)
        if status is None:
            yield "case", f"stopped after {seconds + LEAST_SECONDS:.0f} s"
        elif status:
            yield "case", f"ended with status {status}"


def complete(lines: Any) -> Iterator[Found]:
    """Yield what has been written meanwhile, whole lines only."""
    while True:
        before = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(before)
            return
        name, content = json.loads(line)
        yield name, content


def run_command(options: Options, cases: Sequence[str]) -> dict[str, Any]:
    """Run cases one after the other, and write the results file whenever one has found a row.

    Returns: the content of the file.
    """
    known = environment()
    result: dict[str, Any] = {
        "name": f"gpu-{options.command}",
        **circumstances(),
        "script": f"python -m benchmarks.gpu {options.command}",
        "devices": known["devices"] or ["a dry run: no result"],
        "cuda": known["cuda"],
        "rows": {},
        "failed": {},
        "seconds": {},
    }
    path = options.out / f"{result['name']}.json"
    if path.is_file():
        keep_other_cases(result, read_json(path), cases)
    end = time.monotonic() + 60 * options.minutes
    for case in cases:
        began = time.monotonic()
        seconds = min(end - began - LEAST_SECONDS, 60 * options.minutes * LONGEST_CASE)
        late = iter([("case", NO_TIME)])
        enough = seconds >= LEAST_SECONDS
        for name, found in in_own_process(case, options, seconds) if enough else late:
            failed = isinstance(found, str)
            result["failed" if failed else "rows"][f"{case}, {name}"] = found
            print(f"{case}, {name}: {'failed, ' + found if failed else shown(found)}", flush=True)
            write_json(path, result)
        result["seconds"][case] = round(time.monotonic() - began, 1)
        write_json(path, result)
    return result


def keep_other_cases(result: dict[str, Any], before: dict[str, Any], cases: Sequence[str]) -> None:
    """Take what an earlier results file has of other cases, and say which code measured what."""
    others = [case for case in before["seconds"] if case not in cases]
    if not others:
        return
    made = {"cells": list(before["seconds"]), "date": before["date"], "commit": before["commit"]}
    parts = [
        {**part, "cells": [case for case in part["cells"] if case in others]}
        for part in before.get("parts", [made])
    ]
    own = {"cells": list(cases), "date": result["date"], "commit": result["commit"]}
    result["parts"] = [*(part for part in parts if part["cells"]), own]
    for kind in ("rows", "failed"):
        kept = {key: row for key, row in before[kind].items() if key.split(", ")[0] in others}
        result[kind] |= kept
    result["seconds"] |= {case: before["seconds"][case] for case in others}


def shown(row: dict[str, Any]) -> str:
    """Return a row as one line for the terminal."""
    parts = {key: value for key, value in row.items() if not isinstance(value, list)}
    medians = {k: v["median"] if isinstance(v, dict) else v for k, v in parts.items()}
    return ", ".join(f"{key} {value}" for key, value in medians.items() if value is not None)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; or, with --case, write what one case finds into a file."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--out", type=Path, help="the folder for results; by default results/")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all cases together")
    parser.add_argument("--dry-run", action="store_true", help="a tiny network on the CPU")
    parser.add_argument("--case", help="only the cases whose name contains this")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if not given.dry_run and not torch.cuda.is_available():
        sys.exit("error: torch finds no CUDA device; --dry-run tries the command on the CPU")
    if given.dry_run and not given.out:
        sys.exit("error: give --out; what a dry run measures is no result")
    out = (given.out or ROOT / "results").resolve()
    out.mkdir(parents=True, exist_ok=True)
    options = Options(given.command, out, given.minutes, given.dry_run)
    if given.into:
        with given.into.open("a", encoding="utf-8") as lines:
            for found in run_case(given.case, options, 60 * given.minutes):
                print(json.dumps(found), file=lines, flush=True)
        return
    run_command(options, [case for case in chosen_cases(options) if (given.case or "") in case])
    print(out / f"gpu-{given.command}.json")


if __name__ == "__main__":
    main()
