"""Prepare a token store with many processes on many machines, by datatrove's executors.

A task makes some parts of the corpus (`steps.py`), independently and in one process; the merge
writes the manifest when every part is complete. The store has the same bytes as one that `prepare`
writes, whatever the number of tasks, processes and machines. After a failure, the same command
continues:

- datatrove marks each finished task with a file, and the task is skipped;
- every finished shard and part has a record, so an unfinished task resumes after its last complete
  shard;
- if a part of a finished task is missing or damaged, the task's mark is removed and it runs again.

All code that uses datatrove (its interface is not yet stable) is in this module.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

from bertkit.corpus.blocks import BlockPool
from bertkit.corpus.build import PrepareOptions, check_inputs, claim_store_folder, finish_store
from bertkit.corpus.steps import CorpusPart, finished_part, forget_part, plan_parts, prepare_part
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError, HeldError
from bertkit.files import WAIT_SECONDS, exclusive_lock
from bertkit.processes import start_worker
from bertkit.text.sources import Source
from bertkit.tokenizer.wordpiece import Tokenizer


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The settings of where preparation runs; the store does not depend on any of them."""

    executor: Literal["local", "datatrove", "slurm"] = "local"
    """local: here, without datatrove; datatrove: tasks on this machine, or on several that share
    the folder; slurm: submit an array of jobs."""
    tasks: int = 0
    """The number of tasks that share the parts; 0 makes one task of each part."""
    first_task: int = 0
    """With datatrove: the index of this machine's first task, from 0."""
    local_tasks: int = 0
    """With datatrove: the number of tasks of this machine; 0 takes all that follow."""
    memory_gigabytes: int = 4
    """With Slurm: the memory of a task in gigabytes."""
    partition: str = ""
    """With Slurm: the partition."""
    time: str = "24:00:00"
    """With Slurm: the time limit of a task."""
    sbatch: tuple[str, ...] = ()
    """With Slurm: further sbatch options as KEY=VALUE, such as account=NAME."""


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

    def task_parts(self, task: int) -> list[CorpusPart]:
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
            for part in job.task_parts(rank):
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
    """Write the manifest if every part is complete and its checksums are right."""
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
            for part in job.task_parts(int(mark.name))
        ):
            mark.unlink(missing_ok=True)


def prepare_on_cluster(
    paths: Sequence[str],
    tokenizer: Tokenizer,
    folder: Path,
    options: PrepareOptions,
    cluster: ClusterOptions,
    *,
    processes: int = 1,
    progress: Callable[[int, int], None] = lambda done, tasks: None,
) -> TokenStore | str:
    """Run this machine's tasks, and write the manifest if they complete the store.

    Args:
        paths: as for `prepare`; every machine must see the same files under the same names.
        tokenizer: the tokenizer that converts text to ids; a copy is saved in the store.
        folder: the store's folder, on a file system that all machines share.
        options: the settings that determine the content of the store.
        cluster: the settings that determine where the tasks run.
        processes: the tasks run at a time; with Slurm in the whole cluster, 0 for no limit.
        progress: called with the number of finished tasks and of all tasks of this machine.

    Returns:
        The store, or, while parts are missing, a sentence that says what is still to be done.

    Raises:
        BertkitError: as for `prepare`, or datatrove is not installed, or a task failed.
    """
    check_cluster(cluster)
    quiet_logger()
    sources = check_inputs(paths, folder, options)
    with exclusive_lock(folder, WAIT_SECONDS):  # machines may start at the same moment
        claim_store_folder(folder, tokenizer, options, sources)
        tokenizer.save(folder / "tokenizer")
    parts = len(plan_parts(sources, options.shard_bytes))
    job = Job(folder.resolve(), options, tuple(sources), cluster.tasks or parts)
    unmark_damaged(job)
    if cluster.executor == "slurm":
        submit_to_slurm(job, cluster, processes)
        return f"{job.tasks} tasks and a final one, which writes the manifest, are queued in Slurm"
    _run_here(job, cluster, max(1, processes), progress)
    missing = sum(finished_part(part, job.folder, checksums=False) is None for part in job.parts)
    if missing:
        return (
            f"{parts - missing} of {parts} parts are complete; the command that finishes the last "
            "one writes the manifest; if none is running, run this one again"
        )
    try:
        return merge_parts(job)
    except HeldError:
        return "every part is complete; another process is writing the manifest"


def check_cluster(cluster: ClusterOptions) -> None:
    """Refuse impossible cluster settings before anything is written."""
    if cluster.executor == "slurm" and not cluster.partition:
        raise BertkitError("--executor slurm needs --partition; `sinfo` lists them")
    for name, lowest in (("tasks", 0), ("memory_gigabytes", 1)):
        if (value := getattr(cluster, name)) < lowest:
            raise BertkitError(f"--{name.replace('_', '-')} must be {lowest} or more, got {value}")


def _run_here(
    job: Job, cluster: ClusterOptions, processes: int, progress: Callable[[int, int], None]
) -> None:
    """Run this machine's tasks on worker processes; a killed one is replaced.

    (datatrove's own loop over a `multiprocessing.Pool` would wait for a killed worker forever.)
    """
    local = cluster.local_tasks or job.tasks - cluster.first_task
    if cluster.first_task < 0 or local < 1 or cluster.first_task + local > job.tasks:
        raise BertkitError(
            f"--first-task {cluster.first_task} and --local-tasks {cluster.local_tasks} do not fit "
            f"{job.tasks} tasks, which are numbered from 0"
        )
    mine = range(cluster.first_task, cluster.first_task + local)
    executor = local_executor(job, mine)
    todo = executor.get_incomplete_ranks(mine)
    while todo:
        progress(len(mine) - len(todo), len(mine))
        try:
            _run_tasks(job, todo, processes, lambda done: progress(done, len(mine)), len(mine))
        except BrokenProcessPool:
            left = executor.get_incomplete_ranks(mine)
            if len(left) == len(todo):
                raise BertkitError(
                    "worker processes of `prepare` died (killed, or out of memory) before any task "
                    "ended; run the same command again with fewer --processes"
                ) from None
        todo = executor.get_incomplete_ranks(mine)
    progress(len(mine), len(mine))


def _run_tasks(
    job: Job, todo: Sequence[int], processes: int, progress: Callable[[int], None], mine: int
) -> None:
    """Run the unfinished tasks once; the first error stops the round."""
    if processes == 1:
        for count, task in enumerate(todo, start=1):
            run_task(job, task)
            progress(mine - len(todo) + count)
        return
    with ProcessPoolExecutor(
        min(processes, len(todo)),
        mp_context=multiprocessing.get_context("spawn"),
        initializer=partial(start_worker, interrupted=True),  # complete shards are kept
    ) as pool:
        futures = [pool.submit(run_task, job, task) for task in todo]
        try:
            for count, future in enumerate(as_completed(futures), start=1):
                future.result()
                progress(mine - len(todo) + count)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def run_task(job: Job, task: int) -> None:
    """Run one task in this process, unless it is marked as finished."""
    quiet_logger()
    local_executor(job, range(task, task + 1))._run_for_rank(task, local_rank=1)


def local_executor(job: Job, tasks: range) -> Any:
    """Return datatrove's local executor for some tasks of this machine."""
    from datatrove.executor.local import LocalPipelineExecutor

    return LocalPipelineExecutor(
        pipeline=[MakeParts(job)],
        tasks=job.tasks,
        logging_dir=str(job.marks),
        local_tasks=len(tasks),
        local_rank_offset=tasks.start,
    )


def submit_to_slurm(job: Job, cluster: ClusterOptions, processes: int) -> None:
    """Submit an array job of all tasks, and a job that then writes the manifest."""
    from subprocess import CalledProcessError

    from datatrove.executor.slurm import SlurmPipelineExecutor

    extra = dict(option.split("=", 1) for option in cluster.sbatch if "=" in option)
    if len(extra) < len(cluster.sbatch):
        raise BertkitError("--sbatch takes KEY=VALUE, such as account=NAME")
    same: dict[str, Any] = {
        "time": cluster.time,
        "partition": cluster.partition,
        "mem_per_cpu_gb": cluster.memory_gigabytes,
        "sbatch_args": extra,
        "qos": "",  # sbatch uses the account's default, if there is one
        "env_command": f'export PATH="{Path(sys.executable).parent}:$PATH"',
    }
    making = SlurmPipelineExecutor(
        pipeline=[MakeParts(job)],
        tasks=job.tasks,
        workers=processes or -1,
        job_name="bertkit-prepare",
        logging_dir=str(job.marks),
        **same,
    )
    last = SlurmPipelineExecutor(
        pipeline=[Merge(job)],
        tasks=1,
        job_name="bertkit-merge",
        logging_dir=str(job.marks / "merge"),
        skip_completed=False,
        depends=making,
        **same,
    )
    try:
        last.run()
    except FileNotFoundError as error:
        raise BertkitError(f"{error.filename} is not installed; submit from a login node") from None
    except CalledProcessError as error:
        raise BertkitError(f"sbatch refused the job (status {error.returncode})") from None


def quiet_logger() -> None:
    """Load datatrove and keep its many log messages off the terminal."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    try:
        import datatrove.executor.local  # noqa: F401
        from loguru import logger
    except ImportError:
        raise BertkitError(
            "this executor needs datatrove; install bertkit with the extra 'prepare'"
        ) from None
    logger.disable("datatrove")
