"""Crashes: commands are killed, stopped, starved of disk and have their files damaged.

python -m tests.tools.crashes [--each 10] [--quick] [--only NAME ...]

Every command that writes is killed with SIGKILL and stopped with SIGTERM and Ctrl-C, half of the
times at a random time, half at a random thing that it does with its files, and runs on a disk that
is full. Pre-training, a grid of fine-tunings and preparation also find their files cut short, with
a flipped bit, or gone. Each time the same command runs again, and its files must be, byte for byte,
those of a run that nobody disturbed, with nothing beside them. Nothing may print a traceback, and
what cannot go on must say so in one line that names the file.

`results/crashes.json` holds the counts and the seed; every failure is listed with its moment.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.tools.crashes.bench import Bench
from tests.tools.crashes.damage import (
    damage_checkpoints,
    damage_runs,
    damage_store,
    errors_of,
    remove_in_use,
)
from tests.tools.crashes.runs import small_disk, warm, why_no_disk
from tests.tools.crashes.subjects import Subject, make_inputs, subjects

AT_ONE_RUN = 4
"""The number of kills before a run may end; a run that is killed forever proves nothing."""
STOPS = (signal.SIGTERM, signal.SIGINT)
PAGE = 4096
"""The bytes of a page; a disk in memory has a whole number of pages."""


def kill(bench: Bench, subject: Subject, times: int) -> None:
    """Kill a command again and again; after a few kills it may end."""
    row = f"{subject.name}, killed"
    while (left := times - bench.counts.get(row, {}).get("kills", 0)) > 0:
        place = bench.place("killed")
        moments: list[str] = []
        while len(moments) < min(AT_ONE_RUN, left):
            moment = bench.moment(subject)
            if bench.go(subject, place, moment).status != -signal.SIGKILL:
                break  # it ended before the moment
            moments.append(str(moment))
        if moments:  # otherwise nothing happened to the run
            bench.count(row, "kills", len(moments))
            bench.finish(row, subject, place, ", ".join(moments))


def stop(bench: Bench, subject: Subject, times: int, *, after_kill: bool = False) -> None:
    """Stop a command by SIGTERM or Ctrl-C, perhaps after it was killed in the same folder.

    It must end quietly, with the right status, and leave nothing half done.
    """
    row = f"{subject.name}, {'killed and ' * after_kill}stopped"
    for turn in range(times):
        number = STOPS[(turn + len(bench.counts)) % len(STOPS)]
        place, moment = bench.place("stopped"), replace(bench.moment(subject), signal=number)
        how, killed = str(moment), set[Path]()
        if after_kill:
            kill = bench.moment(subject)
            bench.go(subject, place, kill)
            how, killed = f"{kill}, {moment}", temporaries(place)
        ended = bench.go(subject, place, moment)
        bench.count(row, number.name)
        bench.check_words(row, ended, how)
        exists = ended.status == 2 and "exists already" in ended.shown  # the kill came too late
        if ended.status not in (0, 128 + number, -number) and not exists:
            bench.count(row, "other status")
            bench.fail(row, f"after {how} it ended with {ended.status}: {ended.shown[-200:]!r}")
        if left := temporaries(place) - killed:  # those of a kill stay until their file is written
            bench.count(row, "temporaries")
            bench.fail(row, f"after {how} it left {min(left).name}")
        bench.finish(row, subject, place, how)


def temporaries(place: Path) -> set[Path]:
    """Return the temporary files and folders below a folder."""
    return {*place.rglob(".*.tmp-*")}


def fill_disk(bench: Bench, subject: Subject, times: int) -> None:
    """Run on a disk that is too small, then on the same disk made larger."""
    row, place = f"{subject.name}, disk full", bench.home / "disk"
    files = [path for path in (bench.home / "whole" / subject.name).rglob("*") if path.is_file()]
    needed = sum(-(-path.stat().st_size // PAGE) for path in files)
    for _ in range(times):
        size = PAGE // 1024 * max(1, int(needed * bench.rng.uniform(0.05, 0.9)))
        with small_disk(place, size) as resize:
            ended = bench.go(subject, place)
            bench.count(row, "disks")
            lines = errors_of(ended)
            clear = ended.status == 2 and len(lines) == 1 and "the disk is full" in lines[0]
            bench.count(row, "said in one line", clear)
            bench.check_words(row, ended, f"a disk of {size} kB")
            if not clear:
                tail = ended.shown[-300:]
                bench.fail(row, f"{size} kB of {needed} pages, {ended.status}: {tail!r}")
            resize(8 * PAGE // 1024 * needed + 4096)
            bench.finish(row, subject, place, f"a disk of {size} kB")


def run_few(bench: Bench) -> str:
    """Kill and stop every quick command once; return why there was no full disk, or ""."""
    make_inputs(bench.home)
    known = {s.name: s for s in subjects(bench.home) if s.name != "export"}  # ten seconds each time
    why = why_no_disk(bench.home)
    for subject in known.values():
        bench.measure(subject)
        stop(bench, subject, 1, after_kill=True)
    for name in () if why else ("pretrain", "prepare"):
        fill_disk(bench, known[name], 1)
    damage_checkpoints(bench, known["pretrain"], 1)
    damage_store(bench, known["prepare"], known["pretrain"], 1)
    damage_runs(bench, known["finetune"], 1)
    remove_in_use(bench, known["pretrain"], 1)
    return why


def run_all(bench: Bench, each: int, only: list[str]) -> str:
    """Make every crash `each` times; return why there was no full disk, or ""."""
    make_inputs(bench.home)
    known = {subject.name: subject for subject in subjects(bench.home)}
    chosen = [known[name] for name in only or known]
    why = why_no_disk(bench.home)
    for subject in chosen:
        bench.measure(subject)
        kill(bench, subject, max(each, 3) if subject.name == "pretrain" else each)
        stop(bench, subject, each)
        if not why:
            fill_disk(bench, subject, -(-each // 2))
    if not only:
        damage_checkpoints(bench, known["pretrain"], each)
        damage_store(bench, known["prepare"], known["pretrain"], each)
        damage_runs(bench, known["finetune"], each)
        remove_in_use(bench, known["pretrain"], each)
    return why


def rows_of(bench: Bench) -> dict[str, Any]:
    """Return a row for each kind of crash."""
    return {row: dict(counter) for row, counter in bench.counts.items()}


def main() -> None:
    """Make all crashes and write the results; the status is 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--each", type=int, default=10, help="of every kind of crash")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="a few of every kind; no file")
    parser.add_argument("--only", nargs="+", default=[], help="these commands; no file")
    given = parser.parse_args()
    warm(few=given.quick)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), given.seed)
        why = run_few(bench) if given.quick else run_all(bench, given.each, given.only)
    for row, counts in rows_of(bench).items():
        print(f"{row}: {', '.join(f'{number} {what}' for what, number in counts.items())}")
    print(*bench.failures, f"no full disk: {why}" if why else "", sep="\n")
    if not (given.quick or given.only):
        from benchmarks.record import write_result

        script = {"script": "python -m tests.tools.crashes", "seed": given.seed}
        details = {**script, "failures": bench.failures, "no_full_disk": why}
        print(write_result("crashes", rows_of(bench), details))
    sys.exit(bool(bench.failures))


if __name__ == "__main__":
    main()
