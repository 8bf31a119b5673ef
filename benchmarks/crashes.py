"""Crashes: commands are killed, starved of disk and have their files damaged; then they go on.

python -m benchmarks.crashes [--kills 100] [--quick]

Pre-training, a grid of fine-tunings and preparation are killed with SIGKILL, half of the times at a
random time, half at a random thing that they do with their files; get SIGTERM in the middle of a
save; run on a disk that is full; and find their files cut short, with a flipped bit, or gone. Each
time the same command runs again, and the files in the end must be, byte for byte, those of a run
that nobody disturbed. Where it cannot go on, it must say so in one line that names the file.

`results/crashes.json` holds the counts and the seed; every failure is listed with its moment.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.crash_bench import Bench
from benchmarks.crash_runs import (
    Moment,
    count_events,
    remove,
    run,
    small_disk,
    warm,
    why_no_disk,
)
from benchmarks.crash_subjects import Subject, make_inputs, subjects

AT_ONE_RUN = 4
"""Kills that one run suffers before it may end; a run that is killed for ever proves nothing."""
DAMAGES = ("cut short", "a bit flipped", "removed")


def kill(bench: Bench, subject: Subject, kills: int) -> None:
    """Kill a command again and again; after a few kills it may end."""
    row, done = f"{subject.name}, killed", 0
    out = bench.home / "killed"
    while done < kills:
        remove(out)
        moments: list[str] = []
        while len(moments) < AT_ONE_RUN and done < kills:
            moment = bench.moment(subject)
            if bench.go(subject, out, moment).status != -signal.SIGKILL:
                break  # it ended before
            moments.append(f"{moment.seconds:.2f} s" if moment.seconds else f"#{moment.event}")
            done += 1
        bench.count(row, "kills", len(moments))
        bench.count(row, "runs")
        bench.finish(row, subject, out, f"kills at {', '.join(moments) or 'none'}")


def terminate(bench: Bench, subject: Subject, times: int) -> None:
    """SIGTERM at an event below `checkpoints`: while a checkpoint is written or removed."""
    row, out = f"{subject.name}, SIGTERM in a save", bench.home / "stopped"
    remove(out)
    saves = count_events(subject.arguments(out), out, bench.home / "log", "checkpoints")
    for _ in range(times):
        remove(out)
        moment = Moment(
            event=bench.rng.randint(1, saves), below="checkpoints", signal=signal.SIGTERM
        )
        ended = bench.go(subject, out, moment)
        bench.count(row, "signals")
        if ended.status == 128 + signal.SIGTERM:
            bench.count(row, "said how to go on", "run the same command to go on" in ended.shown)
        elif ended.status:
            bench.failures.append(f"{row}: #{moment.event} ended with {ended.status}")
        bench.finish(row, subject, out, f"SIGTERM at #{moment.event}")


def damage(bench: Bench, path: Path) -> str:
    """Damage one file, at random, in one of three ways; returns which."""
    kind = bench.rng.choice(DAMAGES)
    size = path.stat().st_size
    if kind == "removed" or not size:
        path.unlink()
        return "removed"
    with path.open("r+b") as file:
        if kind == "cut short":
            file.truncate(bench.rng.randrange(size))
        else:
            place = bench.rng.randrange(size)
            file.seek(place)
            byte = file.read(1)[0] ^ (1 << bench.rng.randrange(8))
            file.seek(place)
            file.write(bytes([byte]))
    return kind


def damage_checkpoints(bench: Bench, subject: Subject, times: int) -> None:
    """Damage a file of a killed run's newest checkpoint: it is named, and the one before used."""
    row, out = f"{subject.name}, checkpoint damaged", bench.home / "damaged"
    for _ in bench.until(row, "damages", times):
        remove(out)
        bench.go(subject, out, Moment(event=bench.rng.randint(140, bench.events[subject.name])))
        found = sorted((out / "checkpoints").glob("step-*"))
        if len(found) < 2:
            continue
        path = bench.rng.choice(sorted(found[-1].iterdir()))
        kind = damage(bench, path)
        bench.count(row, "damages")
        ended = bench.finish(row, subject, out, f"{path.name} of the newest checkpoint {kind}")
        named = found[-1].name in ended.shown and "passed over" in ended.shown
        bench.count(row, "damage named", named)
        if not named:
            bench.failures.append(f"{row}: {path.name} {kind}, and nothing was said")


def damage_store(bench: Bench, subject: Subject, reader: Subject, times: int) -> None:
    """Damage a shard: who reads it names it and stops; preparation remakes it."""
    row, out = f"{subject.name}, shard damaged", bench.home / "damaged"
    remove(out)
    whole = bench.home / "whole" / subject.name
    for _ in range(times):
        if not out.is_dir():
            shutil.copytree(whole, out)
        path = bench.rng.choice(sorted(out.glob("train-*.npy")))
        kind = damage(bench, path)
        bench.count(row, "damages")
        arguments = reader.arguments(bench.home / "reader")
        arguments[arguments.index("--store") + 1] = str(out)
        ended = run(arguments, bench.home / "reader", bench.home / "log")
        remove(bench.home / "reader")
        lines = [line for line in ended.shown.splitlines() if line.startswith("error: ")]
        named = ended.status == 2 and len(lines) == 1 and path.name in lines[0]
        bench.count(row, "damage named", named)
        if not named:
            bench.failures.append(f"{row}: {path.name} {kind}; its reader: {ended.shown[-200:]!r}")
        bench.finish(row, subject, out, f"{path.name} {kind}")


def damage_runs(bench: Bench, subject: Subject, times: int) -> None:
    """Damage the record of a finished run of a grid, or its model: named, or the run made again."""
    row, out = f"{subject.name}, run damaged", bench.home / "tuning"
    for _ in bench.until(row, "damages", times):
        remove(out)
        bench.go(subject, out, Moment(event=bench.rng.randint(150, bench.events[subject.name])))
        done = sorted((out / "runs").glob("*/run.json"))
        done += sorted((out / "runs").glob("*/model/model.safetensors"))
        if not done:
            continue
        path = bench.rng.choice(done)
        kind = damage(bench, path)
        bench.count(row, "damages")
        ended = bench.go(subject, out)
        if ended.status == 2 and str(path.parent) in ended.shown:
            bench.count(row, "damage named")
            path.unlink(missing_ok=True)  # as the message says
        elif ended.status:
            bench.failures.append(f"{row}: {path.name} {kind}, not named: {ended.shown[-200:]!r}")
        place = path.relative_to(out)
        bench.finish(row, subject, out, f"{place} {kind}")


def remove_one(bench: Bench, out: Path) -> None:
    """Inside a command: remove its newest checkpoint, its journal, or a file of its store."""
    found = sorted((out / "checkpoints").glob("step-*"))[-1:]
    found += [out / "journal.jsonl", bench.rng.choice(sorted((bench.home / "store").glob("*.npy")))]
    path = bench.rng.choice([path for path in found if path.exists()])
    (bench.home / "gone").write_text(str(path))
    remove(path)
    path.unlink(missing_ok=True)


def remove_in_use(bench: Bench, subject: Subject, times: int) -> None:
    """Remove what a running command has open or will need: it goes on, or names it in one line.

    The command goes on after a kill, so it needs its checkpoint, too. What is removed is not asked
    for in the end, but all else must be equal.
    """
    row, out = f"{subject.name}, file in use removed", bench.home / "removed"
    store, spare, gone = (bench.home / name for name in ("store", "spare", "gone"))
    shutil.copytree(store, spare)
    for _ in bench.until(row, "removals", times):
        remove(out)
        bench.go(subject, out, Moment(event=bench.rng.randint(140, bench.events[subject.name])))
        gone.unlink(missing_ok=True)
        event = bench.rng.randint(1, 150)
        ended = bench.go(subject, out, Moment(event=event, action=lambda: remove_one(bench, out)))
        if not gone.is_file():
            continue  # it ended before
        bench.count(row, "removals")
        path = Path(gone.read_text())
        how = f"{path.name} was removed under it at #{event}"
        lines = [line for line in ended.shown.splitlines() if line.startswith("error: ")]
        if not ended.status:
            bench.count(row, "went on")
        elif ended.status == 2 and len(lines) == 1 and str(bench.home) in lines[0]:
            bench.count(row, "said in one line")
        else:
            tail = ended.shown[-200:]
            bench.failures.append(f"{row}: {how}; it ended with {ended.status}: {tail!r}")
        shutil.copytree(spare, store, dirs_exist_ok=True)
        lost = "updates" if path.name == "journal.jsonl" else f"checkpoints/{path.name}/"
        bench.finish(row, subject, out, how, lost)


def fill_disk(bench: Bench, subject: Subject, times: int) -> None:
    """Run on a disk that is too small, then on the same disk made larger."""
    row, place = f"{subject.name}, disk full", bench.home / "disk"
    whole = bench.home / "whole" / subject.name
    needed = sum(p.stat().st_size for p in whole.rglob("*") if p.is_file()) // 1024 + 1
    for _ in range(times):
        size = int(needed * bench.rng.uniform(0.05, 0.95)) + 4
        with small_disk(place, size) as resize:
            out = place / "out"
            ended = bench.go(subject, out)
            bench.count(row, "disks")
            lines = [line for line in ended.shown.splitlines() if line.startswith("error: ")]
            clear = ended.status == 2 and len(lines) == 1 and "the disk is full" in lines[0]
            bench.count(row, "said in one line", clear)
            if not clear:
                tail = ended.shown[-300:]
                bench.failures.append(f"{row}: {size} kB of {needed}, {ended.status}: {tail!r}")
            resize(4 * needed + 4096)
            bench.finish(row, subject, out, f"a disk of {size} kB")


def run_all(bench: Bench, kills: int, others: int) -> str:
    """Every crash; returns why there was no full disk, or ""."""
    make_inputs(bench.home)
    pretrain, finetune, prepare = known = subjects(bench.home)
    for number, subject in enumerate(known):
        bench.measure(subject)
        kill(bench, subject, kills // 3 + (number < kills % 3))
    terminate(bench, pretrain, others)
    damage_checkpoints(bench, pretrain, others)
    damage_store(bench, prepare, pretrain, others)
    damage_runs(bench, finetune, others)
    remove_in_use(bench, pretrain, others)
    why = why_no_disk(bench.home)
    for subject in known if not why else []:
        fill_disk(bench, subject, others)
    return why


def rows_of(bench: Bench) -> dict[str, Any]:
    """A row for each kind of crash."""
    return {row: dict(counter) for row, counter in bench.counts.items()}


def main() -> None:
    """Run all and write the results; the status is 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100, help="SIGKILLs in all")
    parser.add_argument("--others", type=int, default=10, help="of every other kind of crash")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="6 kills, 1 of each other; no file")
    given = parser.parse_args()
    kills, others = (6, 1) if given.quick else (given.kills, given.others)
    warm()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), given.seed)
        why = run_all(bench, kills, others)
    for row, counts in rows_of(bench).items():
        print(f"{row}: {', '.join(f'{number} {what}' for what, number in counts.items())}")
    print(*bench.failures, f"no full disk: {why}" if why else "", sep="\n")
    if not given.quick:
        from benchmarks.record import write_result

        details = {"seed": given.seed, "failures": bench.failures, "no_full_disk": why}
        print(write_result("crashes", rows_of(bench), details))
    sys.exit(bool(bench.failures))


if __name__ == "__main__":
    main()
