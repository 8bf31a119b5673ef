"""The `bertkit prepare` command: tokenize text into a token store."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.config import FLATTEN
from bertkit.console import Console
from bertkit.corpus.build import PrepareOptions, describe_store
from bertkit.corpus.build import prepare as prepare_store
from bertkit.corpus.cluster import ClusterOptions, prepare_on_cluster
from bertkit.errors import BertkitError
from bertkit.outputs import FOLDER, TEXT
from bertkit.processes import worker_count
from bertkit.tokenizer.wordpiece import Tokenizer

PREPARE_DEFAULTS = PrepareOptions()
LOCAL = ClusterOptions()
EXECUTORS = {
    "tasks": ("datatrove", "slurm"),
    "first_task": ("datatrove",),
    "local_tasks": ("datatrove",),
    "memory_gigabytes": ("slurm",),
    "partition": ("slurm",),
    "time": ("slurm",),
    "sbatch": ("slurm",),
}
"""Field of `ClusterOptions` -> the executors that it applies to."""


def prepare_command(
    *paths: Annotated[str, TEXT],
    tokenizer: Path,
    out: Annotated[Path, FOLDER],
    processes: int = 0,
    options: Annotated[PrepareOptions, FLATTEN] = PREPARE_DEFAULTS,
    cluster: Annotated[ClusterOptions, FLATTEN] = LOCAL,
) -> None:
    """Tokenize text into a token store.

    Parameters
    ----------
    paths
        Files, folders, globs, URLs, or Hugging Face data sets as hf:NAME. Formats: plain text (a
        blank line ends a document), WikiExtractor, JSONL, CSV, TSV and Parquet, which may be
        compressed as .gz, .bz2, .xz or .zst.
    tokenizer
        A folder made by `bertkit learn`, a model directory, or a vocab.txt file.
    out
        The store's folder. The same command resumes a stopped run.
    processes
        The number of worker processes; 0 means one per core (with Slurm: as many tasks at a time as
        the cluster runs). It does not affect the store.
    """
    loaded = Tokenizer.load(tokenizer)
    refuse_cluster_flags(cluster)
    if cluster.executor == "local":
        prepare_store(list(paths), loaded, out, options, processes=processes)
    else:
        make_share(list(paths), loaded, out, options, cluster, processes)


def refuse_cluster_flags(cluster: ClusterOptions) -> None:
    """Refuse flags that the chosen executor would ignore."""
    for flag, executors in EXECUTORS.items():
        given = getattr(cluster, flag) != getattr(LOCAL, flag)
        if given and cluster.executor not in executors:
            shown = " or ".join(executors)
            raise BertkitError(f"--{flag.replace('_', '-')} needs --executor {shown}")


def make_share(
    paths: list[str],
    tokenizer: Tokenizer,
    out: Path,
    options: PrepareOptions,
    cluster: ClusterOptions,
    processes: int,
) -> None:
    """Run this machine's part of the preparation on a cluster, and print the state of the store."""
    workers = worker_count(processes)
    if cluster.executor == "datatrove":
        processes = workers
    with Console() as console:

        def show(done: int, tasks: int) -> None:
            if console.total is None:
                console.start(tasks, done, title="preparing", unit="tasks")
            console.update({"done": done})

        made = prepare_on_cluster(
            paths, tokenizer, out, options, cluster, processes=processes, progress=show
        )
        console.close()
        for line in [f"{out}: {made}"] if isinstance(made, str) else describe_store(made):
            console.say(line)
