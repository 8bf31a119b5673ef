"""Where commands are made to crash, the counts of what came of it, and what is compared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.crash_runs import Ended, Moment, count_events, remove, run
from benchmarks.crash_subjects import Subject


@dataclass
class Bench:
    """Where everything happens, and what came of it."""

    home: Path
    seed: int
    rng: random.Random = field(init=False)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    whole: dict[str, dict[str, str]] = field(default_factory=dict)
    """Subject -> what an undisturbed run leaves."""
    events: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def count(self, row: str, what: str, number: int = 1) -> None:
        """Add to a number of the results."""
        self.counts.setdefault(row, Counter())[what] += number

    def until(self, row: str, what: str, times: int) -> Iterator[None]:
        """Turns, until something is counted often enough; a failure if it never is."""
        for _ in range(5 * times):
            if self.counts.get(row, Counter())[what] >= times:
                return
            yield
        if (found := self.counts.get(row, Counter())[what]) < times:
            self.failures.append(f"{row}: {found} {what} instead of {times}; nothing is proven")

    def go(self, subject: Subject, out: Path, moment: Moment | None = None) -> Ended:
        """Run a subject's command once."""
        return run(subject.arguments(out), out, self.home / "log", moment)

    def measure(self, subject: Subject) -> None:
        """An undisturbed run: its outcome, its moments, its seconds."""
        out = self.home / "whole" / subject.name
        self.events[subject.name] = count_events(subject.arguments(out), out, self.home / "log")
        self.whole[subject.name] = subject.outcome(out)
        again = self.home / "again"
        self.seconds[subject.name] = self.go(subject, again).seconds
        self.compare(f"{subject.name}, killed", subject, again, "a second undisturbed run")
        remove(again)

    def compare(self, row: str, subject: Subject, out: Path, how: str, lost: str = "") -> None:
        """Count whether a run that has ended left what an undisturbed one leaves.

        Args:
            row: of the results.
            subject: the command.
            out: its folder.
            how: what happened to it.
            lost: how the names begin that are not compared; "" compares all.
        """
        try:
            found = subject.outcome(out)
        except (OSError, ValueError) as error:
            found = {"outcome": str(error)}
        wanted = self.whole[subject.name]
        names = [k for k in {*wanted, *found} if not lost or not k.startswith(lost)]
        wrong = sorted(k for k in names if wanted.get(k) != found.get(k))
        self.count(row, "other bytes" if wrong else "equal bytes")
        if wrong:
            self.failures.append(f"{row}: after {how} these differ: {', '.join(wrong[:5])}")

    def finish(self, row: str, subject: Subject, out: Path, how: str, lost: str = "") -> Ended:
        """Run the same command to its end and compare."""
        ended = self.go(subject, out)
        if ended.status:
            self.count(row, "stuck")
            last = ended.shown.strip().splitlines()[-1:]
            self.failures.append(f"{row}: after {how} it ended with {ended.status}: {last}")
        else:
            self.compare(row, subject, out, how, lost)
        return ended

    def moment(self, subject: Subject) -> Moment:
        """A random time, or a random event; early ones a little more often than they come."""
        if self.rng.random() < 0.5:
            return Moment(seconds=self.rng.uniform(0.01, self.seconds[subject.name]))
        return Moment(event=self.rng.randint(1, self.events[subject.name]))
