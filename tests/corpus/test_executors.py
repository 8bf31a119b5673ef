"""Work on other executors, such as dask.distributed: the same bytes, also when a worker dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor
from pathlib import Path
from typing import Any

import pytest

from bertkit.corpus.clean import CleanOptions, clean
from bertkit.corpus.prepare import prepare
from bertkit.progress import Console
from bertkit.tokenizer.learn import learn_tokenizer
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.corpus.test_prepare import SMALL_SHARDS, digests, texts, whole

__all__ = ["texts", "whole"]

pytestmark = pytest.mark.filterwarnings("ignore")  # of dask and tornado


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """A cluster of two worker processes on this machine."""
    distributed = pytest.importorskip("distributed")
    made = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    )
    with made as cluster, distributed.Client(cluster) as client:
        yield client


@pytest.fixture
def executor(cluster: Any) -> Iterator[Executor]:
    with cluster.get_executor() as executor:
        yield executor


class Killing(Console):
    """Kills a process in the middle of the work."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.pid, self.updates = pid, 0

    def update(self, record: dict[str, Any]) -> None:
        self.updates += 1
        if self.updates == 3:
            os.kill(self.pid, signal.SIGKILL)


@pytest.mark.slow
def test_prepare_survives_a_dead_worker_of_a_cluster(
    cluster: Any, executor: Executor, whole: Path, texts: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    cluster.wait_for_workers(2)
    console = Killing(min(cluster.run(os.getpid).values()))
    folder = tmp_path / "store"
    prepare([texts], tokenizer, folder, executor=executor, console=console, **SMALL_SHARDS)
    assert console.updates > 3
    assert digests(folder) == digests(whole)


@pytest.mark.slow
def test_learn_and_clean_on_a_cluster(executor: Executor, texts: Path, tmp_path: Path) -> None:
    near = CleanOptions(near=True)
    for name, options in (("one", {}), ("many", {"executor": executor})):
        learn_tokenizer([texts], tmp_path / name, 200, **options)  # type: ignore[arg-type]
        clean([texts], tmp_path / f"{name}.jsonl", near, **options)  # type: ignore[arg-type]
    assert digests(tmp_path / "one") == digests(tmp_path / "many")
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "many.jsonl").read_bytes()
