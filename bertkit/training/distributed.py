"""The processes of one training run: their ranks, collective operations and graceful stop.

torchrun starts the processes and gives each its rank (`RANK`), the number of processes
(`WORLD_SIZE`) and its rank on its host (`LOCAL_RANK`). A single process is a run of one rank, for
which these operations do nothing. Ranks exchange tensors here, not pickled objects.

A global batch is cut into micro-batches, and rank r takes micro-batches r, r + world, ...; losses
are divided by the counts of the whole global batch, and gradients are summed. So up to rounding,
the weights do not depend on the number of processes, as long as it is at most the number of
micro-batches (paper section 3.1: batches of 256 sequences, wherever they are computed).
"""

from __future__ import annotations

import hashlib
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import RLock
from typing import Any, TypeVar

import torch
from torch import Tensor

import bertkit
from bertkit.errors import BertkitError
from bertkit.files import write_text
from bertkit.processes import is_alone
from bertkit.training.device import has_cuda

RankResult = TypeVar("RankResult")
RANDOM_NUMBERS = RLock()
"""Held by the thread that trains; another one that is to train waits for it."""


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of processes in the run."""

    rank: int = 0
    """The number of this process, counted from 0; rank 0 writes the run directory."""
    world: int = 1
    """The number of processes."""
    timeout: float = 600.0
    """The number of seconds to wait for the other processes before giving up."""

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes and prints for all ranks."""
        return self.rank == 0

    def micro_batches(self, wanted: int) -> int:
        """Return the number of micro-batches that a global batch is cut into, over all ranks.

        It is at least `wanted`, the recipe's `training.accumulate`.

        Raises:
            BertkitError: the number is not a multiple of the number of processes.
        """
        count = max(wanted, self.world)
        if count % self.world:
            near = self.world * -(-count // self.world)
            raise BertkitError(
                f"training.accumulate = {wanted} micro-batches cannot be divided evenly among "
                f"{self.world} processes; choose {near}, or another number of processes"
            )
        return count

    def all_reduce_counts(self, counts: Mapping[str, int]) -> Callable[[], dict[str, int]]:
        """Start to sum counts over all ranks, and return a function that waits for the sums.

        Every rank has to pass the same names. A rank may compute between the two calls.
        """
        if self.world == 1:
            return lambda: dict(counts)
        from torch import distributed

        numbers = torch.tensor(list(counts.values()), dtype=torch.int64)
        work = distributed.all_reduce(numbers, async_op=True)

        def wait() -> dict[str, int]:
            assert work is not None
            work.wait()
            return dict(zip(counts, numbers.tolist(), strict=True))

        return wait

    def all_reduce_scalars(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum scalars over all ranks; with several ranks, in fp64 on the CPU."""
        if self.world == 1:
            return dict(values)
        from torch import distributed

        numbers = torch.stack([value.detach().cpu().double() for value in values.values()])
        distributed.all_reduce(numbers)
        return dict(zip(values, numbers, strict=True))

    def on_rank0(self, work: Callable[[], RankResult]) -> RankResult | None:
        """Run a function on rank 0 while the other ranks wait; they return None.

        An exception is raised on rank 0, the only rank to report it; the other ranks exit with
        status 2 instead of waiting in vain.
        """
        if self.world == 1:
            return work()
        result, failure = None, None
        if self.is_first:
            try:
                result = work()
            except BaseException as error:
                failure = error
        try:
            failed = self.all_reduce_counts({"failed": int(failure is not None)})()["failed"]
        except Exception:  # another rank is gone, perhaps because of the failure here
            if failure is None:
                raise
        if failure is not None:
            raise failure
        if failed:
            raise SystemExit(2)
        return result

    def broadcast_bool(self, question: Callable[[], bool]) -> bool:
        """Evaluate a condition on rank 0 and return the result on all ranks; see `on_rank0`."""
        found = self.on_rank0(question)
        return bool(self.all_reduce_counts({"yes": int(bool(found))})()["yes"])

    def assert_same_on_all_ranks(self, facts: Mapping[str, str]) -> None:
        """Check that some values, by their names in messages, are the same on all ranks.

        Raises:
            BertkitError: a value differs; raised on rank 0, with the value's name and the ranks.
        """
        if self.world == 1:
            return
        from torch import distributed

        own = torch.tensor(
            [list(hashlib.sha256(value.encode()).digest()) for value in facts.values()],
            dtype=torch.uint8,
        )
        found = [torch.empty_like(own) for _ in range(self.world)]
        distributed.all_gather(found, own)
        self.on_rank0(lambda: check_equal(list(facts), found))


def check_equal(names: list[str], found: list[Tensor]) -> None:
    """Raise a BertkitError unless all ranks have the same digests (facts, 32)."""
    for row, name in enumerate(names):
        others = [
            str(rank) for rank, own in enumerate(found) if not torch.equal(own[row], found[0][row])
        ]
        if others:
            some = ", ".join(others[:8]) + (", ..." if len(others) > 8 else "")
            raise BertkitError(
                f"the processes disagree about {name}: rank {some} differs from rank 0; start "
                "all with the same bertkit, command and files"
            )


ALONE = Ranks()

MAX_TIMEOUT = 1_000_000_000
STRATEGIES = ("ddp", "fsdp")


def check_timeout(timeout: float) -> None:
    """Raise a BertkitError unless a timeout is a number of seconds that torch can count."""
    if not 0 < timeout <= MAX_TIMEOUT:
        raise BertkitError(
            f"--timeout must be a number of seconds above 0 and at most {MAX_TIMEOUT:,}, got "
            f"{timeout:g}"
        )


@contextmanager
def init_distributed(device: torch.device, timeout: float = 600.0) -> Iterator[Ranks]:
    """Join the process group of this run for the length of a block, and yield this process's ranks.

    An existing process group is used and left as it is. gloo connects CPUs, NCCL connects GPUs, and
    a GPU becomes torch's current device. `timeout` is the number of seconds to wait for the other
    processes before giving up.

    Raises:
        BertkitError: torchrun's variables are incomplete, or another process is lost.
    """
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        yield Ranks(distributed.get_rank(), distributed.get_world_size(), timeout)
        return
    check_timeout(timeout)
    given = os.environ.get("WORLD_SIZE", "1")
    if not given.isdecimal() or int(given) < 1:
        raise BertkitError(f"WORLD_SIZE is {given!r}, not a number of processes; unset it")
    world = int(given)
    if world == 1:
        yield ALONE
        return
    needed = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if missing := [name for name in needed if name not in os.environ]:
        raise BertkitError(
            f"WORLD_SIZE is {world}, but {', '.join(missing)} is not set; start with "
            "`bertkit launch` or torchrun, or unset WORLD_SIZE"
        )
    backend, own = "gloo", None
    if device.type == "cuda":
        backend, own = "cpu:gloo,cuda:nccl", device
        if own.index is None:  # each process sees its own GPU only
            own = torch.device("cuda", torch.cuda.current_device())
        torch.cuda.set_device(own)
    waiting = timedelta(seconds=timeout)
    try:  # with the device, NCCL connects now, not in the first update, and need not guess it
        distributed.init_process_group(backend, timeout=waiting, device_id=own)
    except (distributed.DistError, ValueError) as error:
        place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        cause = str(error).strip().rpartition("\n")[2]  # the last line of NCCL's errors
        raise BertkitError(
            f"cannot reach the other processes through {place} ({cause}); check that "
            "rank 0 runs there, that --timeout is long enough and that each process has its own GPU"
        ) from None
    try:
        yield Ranks(distributed.get_rank(), world, timeout)
    except RuntimeError as error:
        if not isinstance(error, distributed.DistError) and "gloo" not in str(error):
            raise
        reason = str(error).partition("] ")[2].partition(". ")[0] or str(error)
        raise BertkitError(
            f"the connection to another process of this run is lost ({reason}); that process ended "
            "or did not answer within --timeout seconds. Read its messages, and run the same "
            "command again"
        ) from error
    finally:
        distributed.destroy_process_group()


class GracefulStop:
    """A request by Ctrl-C or SIGTERM to save after the current update and stop.

    Args:
        patient: whether to ignore a second signal. torchrun forwards a signal that the terminal has
            already sent to every process, and kills processes that take too long.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.patient = patient
        self.received: int | None = None
        self.signal: int | None = None
        """The signal that ends the run, once all ranks have agreed to stop."""

    @property
    def asked(self) -> bool:
        """Whether this process has received a signal."""
        return self.received is not None

    def should_stop(self, all_ranks: bool, ranks: Ranks) -> bool:
        """Whether the run stops now; all ranks stop after the same update.

        Args:
            all_ranks: whether any rank was asked to stop, as exchanged among all ranks.
            ranks: the ranks of the run; a single rank need not wait for the next update.
        """
        if all_ranks or (ranks.world == 1 and self.asked):
            self.signal = self.received or signal.SIGTERM
        return self.signal is not None

    @contextmanager
    def install(self) -> Iterator[GracefulStop]:
        """Catch SIGINT, SIGTERM and SIGHUP inside the block, unless they are ignored.

        A second signal acts as usual, unless this is `patient`.
        """
        # a closed terminal sends SIGHUP; nohup ignores it, and a script's background job SIGINT
        known = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
        before = {name: signal.getsignal(name) for name in known}
        before = {n: old for n, old in before.items() if old not in (signal.SIG_IGN, None)}

        def remember(number: int, frame: Any) -> None:
            self.received = number
            if not self.patient:
                signal.signal(number, before[signal.Signals(number)])

        try:
            for name in before:
                signal.signal(name, remember)
        except ValueError:  # not the main thread: the caller handles signals
            before = {}
        try:
            yield self
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)


RANKS_MARK = ".ranks"


def mark_of_first(folder: Path, ranks: Ranks) -> str:
    """Write a mark into a folder on rank 0, and return what this rank reads there, or "none".

    Once all ranks have read it, delete it: network file systems may show old content to the next
    run.
    """
    path, mark = folder / RANKS_MARK, secrets.token_hex(8)
    ranks.on_rank0(lambda: write_text(path, mark))
    for _ in range(10):
        if path.is_file():
            return path.read_text()
        time.sleep(0.5)  # a shared folder may show new files late
    return "none"


def local_device(name: str) -> str:
    """Return the name of this process's device; each process of a host takes its own GPU."""
    local = os.environ.get("LOCAL_RANK")
    if is_alone() or local is None or name not in ("auto", "cuda"):
        return name
    # gloo, which connects several processes, does not support tensors on Apple's GPU
    return f"cuda:{local}" if name == "cuda" or has_cuda() else "cpu"


def code_digest() -> str:
    """Return the SHA-256 of this package's source files."""
    folder = Path(bertkit.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


@contextmanager
def own_random_numbers(device: torch.device) -> Iterator[None]:
    """Lend torch's random numbers, which all threads share, to a block; restore them after it."""
    with RANDOM_NUMBERS, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
