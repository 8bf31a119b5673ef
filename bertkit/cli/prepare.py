"""The `bertkit prepare` command: tokenize text into a token store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from bertkit.config import FLATTEN
from bertkit.corpus.build import PrepareOptions
from bertkit.corpus.build import prepare as prepare_store
from bertkit.corpus.cluster import ClusterOptions, prepare_on_cluster
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.outputs import FOLDER, TEXT
from bertkit.text.documents import TextCounts
from bertkit.text.lines import describe_skipped
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.journal import Console

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
    if processes < 0:
        raise BertkitError(f"--processes must be 0 or more, got {processes}")
    with Console() as console:
        loaded = Tokenizer.load(tokenizer)
        refuse_cluster_flags(cluster)
        if cluster.executor == "local":
            make_store(list(paths), loaded, out, options, processes, console)
        else:
            make_share(list(paths), loaded, out, options, cluster, processes, console)


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
    console: Console,
) -> None:
    """Run this machine's part of the preparation on a cluster, and print the state of the store."""

    def show(done: int, tasks: int) -> None:
        if console.total is None:
            console.start(tasks, done, title="preparing", unit="tasks")
        console.update({"done": done})

    if cluster.executor == "datatrove":
        processes = processes or os.cpu_count() or 1
    made = prepare_on_cluster(
        paths, tokenizer, out, options, cluster, processes=processes, progress=show
    )
    console.close()
    for line in [f"{out}: {made}"] if isinstance(made, str) else describe_store(made):
        console.say(line)


def make_store(
    paths: list[str],
    tokenizer: Tokenizer,
    out: Path,
    options: PrepareOptions,
    processes: int,
    console: Console,
) -> TokenStore:
    """Prepare a store on this machine, showing progress, and print what it holds and skipped."""

    def show(counts: TextCounts) -> None:
        console.update({"done": counts.documents, "bytes": counts.bytes})

    console.start(None, title="preparing", unit="documents")
    store = prepare_store(
        paths, tokenizer, out, options, processes=processes or os.cpu_count() or 1, progress=show
    )
    console.close()
    for line in describe_store(store):
        console.say(line)
    return store


def describe_store(store: TokenStore) -> list[str]:
    """Return lines that say what a store holds and what was skipped."""
    held_out = TokenStore(store.folder, "held_out")
    unknown = store.unigrams[store.tokenizer.unk_id] / max(1, store.tokens)
    lines = [
        f"{store.folder}: {store.documents:,} documents, {store.sentences:,} sentences, "
        f"{store.tokens:,} tokens for training; {held_out.documents:,} documents, "
        f"{held_out.tokens:,} tokens held out; [UNK] is {unknown:.3%} of tokens"
    ]
    text = store.manifest["text"]
    skipped = {**text["skipped"], **store.manifest["tokenization"]}
    return [*lines, *describe_skipped(skipped, text.get("examples", {}))]
