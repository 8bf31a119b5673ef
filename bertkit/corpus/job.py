"""Preparation as one job of many tasks: what each task does, and the last step.

A task makes some parts of the corpus (`parts.py`), each by itself in one process; the merge writes
the manifest once every part is whole. Tasks are pure in the sense that whoever runs one, wherever
and how often, leaves the same files, so any engine may run them (`cluster.py` has some).
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
    """Everything a task needs; pickled and carried to other machines."""

    folder: Path
    options: PrepareOptions
    sources: tuple[Source, ...]
    tasks: int

    @cached_property
    def parts(self) -> list[CorpusPart]:
        """All parts of the corpus."""
        return plan_parts(self.sources, self.options.shard_bytes)

    def parts_of(self, task: int) -> list[CorpusPart]:
        """Neighbouring parts go to different tasks, as sources of a kind are often neighbours."""
        return self.parts[task :: self.tasks]

    @property
    def marks(self) -> Path:
        """Where datatrove keeps marks and logs; another number of tasks deals the parts anew."""
        return self.folder / "tasks" / f"of-{self.tasks:05d}"

    def __repr__(self) -> str:
        return f"Job({self.folder}, {self.tasks} tasks)"  # without thousands of sources


@dataclass(frozen=True, repr=False)
class MakeParts:
    """A pipeline step of datatrove's kind: make the parts of one task."""

    job: Job

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        """Called for task `rank`; what was finished before is kept."""
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
    """The last step as a job of its own, where no process waits for the tasks."""

    job: Job

    def __call__(self, data: object, rank: int, world_size: int) -> None:
        """Called once."""
        merge_parts(self.job)

    def __repr__(self) -> str:
        return f"merge {self.job}"


def merge_parts(job: Job) -> TokenStore:
    """Write the manifest, once every part is whole; checksums are compared.

    Raises:
        HeldError: another process holds the store.
        BertkitError: parts are missing or damaged; the same command makes them again.
    """
    results, missing = [], []
    with exclusive_lock(job.folder, WAIT_SECONDS):  # machines may end at the same moment
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
    """Take away the marks of tasks of which a part is not whole."""
    for mark in sorted((job.marks / "completions").glob("[0-9]*")):
        if any(
            finished_part(part, job.folder, checksums=False) is None
            for part in job.parts_of(int(mark.name))
        ):
            mark.unlink(missing_ok=True)
