"""Preparation as one job of many tasks: what each task does, and the final step.

A task makes some parts of the corpus (`steps.py`), independently and in one process; the merge
writes the manifest when every part is complete. A task leaves the same files no matter who runs it,
where and how often, so any engine may run the tasks (`cluster.py` has some).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from bertkit.corpus.blocks import BlockPool
from bertkit.corpus.build import PrepareOptions, finish_store
from bertkit.corpus.steps import CorpusPart, finished_part, forget_part, plan_parts, prepare_part
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import WAIT_SECONDS, exclusive_lock
from bertkit.text.sources import Source
from bertkit.tokenizer.wordpiece import Tokenizer


@dataclass(frozen=True)
class Job:
    """Everything that a task needs; it is pickled and sent to other machines."""

    folder: Path
    options: PrepareOptions
    sources: tuple[Source, ...]
    tasks: int

    @cached_property
    def parts(self) -> list[CorpusPart]:
        """All parts of the corpus."""
        return plan_parts(self.sources, self.options.shard_bytes)

    def parts_of(self, task: int) -> list[CorpusPart]:
        """Return a task's parts; adjacent ones, often similar, go to different tasks."""
        return self.parts[task :: self.tasks]

    @property
    def marks(self) -> Path:
        """The folder of datatrove's marks and logs, one for each number of tasks."""
        return self.folder / "tasks" / f"of-{self.tasks:05d}"

    def __repr__(self) -> str:
        return f"Job({self.folder}, {self.tasks} tasks)"  # omits what may be thousands of sources


@dataclass(frozen=True, repr=False)
class MakeParts:
    """A datatrove pipeline step that makes the parts of one task."""

    job: Job

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        """Make the parts of task `rank`, keeping what was finished before."""
        job, options = self.job, self.job.options
        tokenizer = Tokenizer.load(job.folder / "tokenizer")
        with BlockPool(tokenizer, job.folder, 1, options.language, options.held_out) as pool:
            for part in job.parts_of(rank):
                prepare_part(
                    part,
                    job.folder,
                    pool,
                    column=options.column,
                    shard_bytes=options.shard_bytes,
                )

    def __repr__(self) -> str:
        return f"make parts of {self.job}"


@dataclass(frozen=True, repr=False)
class Merge:
    """The final step as a separate job, for executors with no process that waits for the tasks."""

    job: Job

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        """Merge the parts; datatrove calls this once."""
        merge_parts(self.job)

    def __repr__(self) -> str:
        return f"merge {self.job}"


def merge_parts(job: Job) -> TokenStore:
    """Write the manifest if every part is complete and its checksums are right.

    Raises:
        HeldError: another process holds the lock of the store.
        BertkitError: parts are missing or damaged; the same command makes them again.
    """
    results, missing = [], []
    with exclusive_lock(job.folder, WAIT_SECONDS):  # machines may finish at the same moment
        for part in job.parts:
            result = finished_part(part, job.folder)
            if result is None:
                missing.append(part.number)
                forget_part(part, job.folder)
            else:
                results.append(result)
        if missing:
            raise BertkitError(
                f"{len(missing)} of {len(job.parts)} parts of {job.folder} are missing or damaged "
                f"(first: {missing[0]}); run the same `bertkit prepare` again"
            )
        tokenizer = Tokenizer.load(job.folder / "tokenizer")
        return finish_store(job.folder, tokenizer, job.options, job.sources, results)


def unmark_damaged(job: Job) -> None:
    """Remove the marks of tasks with a part that is missing or damaged."""
    for mark in sorted((job.marks / "completions").glob("[0-9]*")):
        if any(
            finished_part(part, job.folder, checksums=False) is None
            for part in job.parts_of(int(mark.name))
        ):
            mark.unlink(missing_ok=True)
