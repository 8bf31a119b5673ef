"""Damage to files, which are cut short, changed or removed before or while a command runs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.tools.crashes.bench import Bench
from tests.tools.crashes.runs import Ended, Moment, remove, run
from tests.tools.crashes.subjects import Subject

DAMAGES = ("cut short", "a bit flipped", "removed")


def errors_of(ended: Ended) -> list[str]:
    """Return the lines in which a command says why it ended."""
    return [line for line in ended.shown.splitlines() if line.startswith("error: ")]


def damage(bench: Bench, path: Path, kinds: Sequence[str] = DAMAGES) -> str:
    """Damage one file, at random, in one of several ways; return which."""
    kind = bench.rng.choice(kinds)
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


def killed_late(bench: Bench, subject: Subject, place: Path, first: int) -> Path:
    """Kill a command at an event from the first one on; return what it writes to."""
    remove(place)
    place.mkdir()
    bench.go(subject, place, Moment(event=bench.rng.randint(first, bench.events[subject.name])))
    return place / subject.out


def damage_checkpoints(bench: Bench, subject: Subject, times: int) -> None:
    """Damage a file of a killed run's last checkpoint: it is named, and the one before is used."""
    row, place = f"{subject.name}, checkpoint damaged", bench.place("damaged")
    for _ in bench.until(row, "damages", times):
        found = sorted((killed_late(bench, subject, place, 140) / "checkpoints").glob("step-*"))
        if len(found) < 2:
            continue
        path = bench.rng.choice(sorted(found[-1].iterdir()))
        kind = damage(bench, path)
        bench.count(row, "damages")
        ended = bench.finish(row, subject, place, f"{path.name} of the newest checkpoint {kind}")
        named = found[-1].name in ended.shown and "skipping" in ended.shown
        bench.count(row, "damage named", named)
        if not named:
            bench.fail(row, f"{path.name} {kind}, and nothing was said")


def damage_store(bench: Bench, subject: Subject, reader: Subject, times: int) -> None:
    """Damage a shard: what reads it must name it and stop, and preparation must remake it."""
    row, place = f"{subject.name}, shard damaged", bench.home / "damaged"
    remove(place)
    shutil.copytree(bench.home / "whole" / subject.name, place)
    for _ in range(times):
        path = bench.rng.choice(sorted((place / subject.out).glob("train-*.npy")))
        kind = damage(bench, path)
        bench.count(row, "damages")
        reading = bench.place("reader")
        arguments = reader.arguments(reading)
        arguments[arguments.index("--store") + 1] = str(place / subject.out)
        ended = run(arguments, reading, bench.home / "log")
        lines = errors_of(ended)
        named = ended.status == 2 and len(lines) == 1 and path.name in lines[0]
        bench.count(row, "damage named", named)
        if not named:
            bench.fail(row, f"{path.name} {kind}; its reader: {ended.shown[-200:]!r}")
        bench.finish(row, subject, place, f"{path.name} {kind}")


def damage_runs(bench: Bench, subject: Subject, times: int) -> None:
    """Cut or remove the record of a grid's finished run: it is named, or the run made again."""
    row, place = f"{subject.name}, run damaged", bench.place("damaged")
    for _ in bench.until(row, "damages", times):
        runs = killed_late(bench, subject, place, 150) / "runs"
        records = sorted(runs.glob("*/run.json"))
        if not records:
            continue
        path = bench.rng.choice(records)
        kind = damage(bench, path, DAMAGES[::2])
        bench.count(row, "damages")
        how = f"{path.parent.name}/{path.name} {kind}"
        ended = bench.go(subject, place)
        if ended.status:  # a damaged record is refused; without it the run is made again
            named = ended.status == 2 and path.parent.name in ended.shown
            bench.count(row, "damage named", named)
            if not named:
                bench.fail(row, f"{how}; it ended with {ended.status}: {ended.shown[-200:]!r}")
            path.unlink(missing_ok=True)
        bench.finish(row, subject, place, how)


def remove_one(bench: Bench, out: Path) -> None:
    """Remove, inside a command, its newest checkpoint, its journal, or a file of its store."""
    found = sorted((out / "checkpoints").glob("step-*"))[-1:]
    found += [out / "journal.jsonl", bench.rng.choice(sorted((bench.home / "store").glob("*.npy")))]
    path = bench.rng.choice([path for path in found if path.exists()])
    (bench.home / "gone").write_text(str(path))
    remove(path)
    path.unlink(missing_ok=True)


def remove_in_use(bench: Bench, subject: Subject, times: int) -> None:
    """Remove what a running command has open or will need: it must go on, or name it in one line.

    The command resumes after a kill, so it needs its checkpoint, too. What is removed is not
    compared in the end, but all else must be equal.
    """
    row, place = f"{subject.name}, file in use removed", bench.place("removed")
    store, spare, gone = (bench.home / name for name in ("store", "spare", "gone"))
    shutil.copytree(store, spare)
    for _ in bench.until(row, "removals", times):
        out = killed_late(bench, subject, place, 140)
        gone.unlink(missing_ok=True)
        event = bench.rng.randint(1, 150)
        moment = Moment(event=event, action=lambda out=out: remove_one(bench, out))
        ended = bench.go(subject, place, moment)
        if not gone.is_file():
            continue  # it ended before the event
        bench.count(row, "removals")
        path = Path(gone.read_text())
        how = f"the removal of {path.name} at event {event}"
        lines = errors_of(ended)
        if not ended.status:
            bench.count(row, "went on")
        elif ended.status == 2 and len(lines) == 1 and str(bench.home) in lines[0]:
            bench.count(row, "said in one line")
        else:
            bench.fail(row, f"after {how} it ended with {ended.status}: {ended.shown[-200:]!r}")
        shutil.copytree(spare, store, dirs_exist_ok=True)
        of_journal = ("updates", "out/journal.jsonl")
        lost = of_journal if path.name == "journal.jsonl" else (f"out/checkpoints/{path.name}/",)
        bench.finish(row, subject, place, how, lost)
