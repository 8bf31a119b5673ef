"""The bench on which commands are made to crash: counts of what came of it, and comparisons."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.tools.crashes.runs import Ended, Moment, remove, run
from tests.tools.crashes.subjects import Subject

NOISE = ("Traceback", "Exception ignored", "leaked")
"""What no user should see, however a command ends."""


@dataclass
class Bench:
    """The folder where everything happens, and what came of it."""

    home: Path
    seed: int
    rng: random.Random = field(init=False)
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    whole: dict[str, dict[str, str]] = field(default_factory=dict)
    """Subject → what an undisturbed run leaves."""
    events: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)

    def count(self, row: str, what: str, number: int = 1) -> None:
        """Add to a number of the results."""
        self.counts.setdefault(row, Counter())[what] += number

    def fail(self, row: str, what: str) -> None:
        """Note a promise that was broken."""
        self.failures.append(f"{row}: {what}")

    def until(self, row: str, what: str, times: int) -> Iterator[None]:
        """Yield turns until something is counted often enough; note a failure if it never is."""
        for _ in range(5 * times):
            if self.counts.get(row, Counter())[what] >= times:
                return
            yield
        if (found := self.counts.get(row, Counter())[what]) < times:
            self.fail(row, f"{found} {what} instead of {times}; nothing is proven")

    def place(self, name: str) -> Path:
        """Return an empty folder."""
        place = self.home / name
        remove(place)
        place.mkdir(parents=True)
        return place

    def go(self, subject: Subject, place: Path, moment: Moment | None = None) -> Ended:
        """Run a subject's command once."""
        return run(subject.arguments(place), place, self.home / "log", moment)

    def measure(self, subject: Subject) -> None:
        """Run a command undisturbed; record its outcome, its number of events and its seconds."""
        place = self.place(f"whole/{subject.name}")
        ended = self.go(subject, place)
        if ended.status:
            raise RuntimeError(f"{subject.name} failed undisturbed:\n{ended.shown}")
        self.events[subject.name], self.seconds[subject.name] = ended.events, ended.seconds
        self.whole[subject.name] = subject.outcome(place)

    def moment(self, subject: Subject) -> Moment:
        """Return a random time or a random event."""
        if self.rng.random() < 0.5:
            return Moment(seconds=self.rng.uniform(0.01, self.seconds[subject.name]))
        return Moment(event=self.rng.randint(1, self.events[subject.name]))

    def check_words(self, row: str, ended: Ended, how: str) -> None:
        """Note a failure if a command printed what no user should see."""
        if found := [line for line in ended.shown.splitlines() if any(w in line for w in NOISE)]:
            self.count(row, "noise")
            last = ended.shown.strip().splitlines()[-1]
            self.fail(row, f"after {how} it printed {found[0]!r} ... {last!r}")

    def compare(
        self, row: str, subject: Subject, place: Path, how: str, lost: tuple[str, ...] = ()
    ) -> None:
        """Count whether a run that has ended left what an undisturbed one leaves, and no more.

        Args:
            row: the row of the results.
            subject: the command.
            place: the folder of the command.
            how: what happened to it.
            lost: the beginnings of the names that are not compared.
        """
        try:
            found = subject.outcome(place)
        except (OSError, ValueError) as error:
            found = {"outcome": str(error)}
        wanted = self.whole[subject.name]
        names = sorted(k for k in {*wanted, *found} if not k.startswith(lost))
        left = [name for name in names if name not in wanted]
        wrong = [name for name in names if name in wanted and wanted[name] != found.get(name)]
        self.count(row, "other bytes" if wrong else "equal bytes")
        if wrong:
            self.fail(row, f"after {how} these differ: {', '.join(wrong[:5])}")
        if left:
            self.count(row, "leftovers")
            self.fail(row, f"after {how} these were left: {', '.join(left[:5])}")

    def finish(
        self, row: str, subject: Subject, place: Path, how: str, lost: tuple[str, ...] = ()
    ) -> Ended:
        """Run the same command to its end and compare; it may refuse to write what is there."""
        ended = self.go(subject, place)
        self.check_words(row, ended, f"{how} and the same command again")
        if ended.status and f"{subject.out} exists already" not in ended.shown:
            self.count(row, "stuck")
            last = ended.shown.strip().splitlines()[-1:]
            self.fail(row, f"after {how} it ended with {ended.status}: {last}")
        else:
            self.compare(row, subject, place, how, lost)
        return ended
