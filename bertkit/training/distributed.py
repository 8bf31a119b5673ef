"""The processes of one training run: their ranks, what they exchange, and how they stop.

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
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from bertkit.errors import BertkitError
from bertkit.processes import is_alone
from bertkit.training.device import has_cuda

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process and the number of processes in the run."""

    rank: int = 0
    world: int = 1
    timeout: float = 600.0
    """The number of seconds to wait for the other processes before giving up."""

    def micro_batches(self, wanted: int) -> int:
        """Return the number of micro-batches of a batch over all ranks, at least `wanted`."""
        count = max(wanted, self.world)
        if count % self.world:
            near = self.world * -(-count // self.world)
            raise BertkitError(
                f"training.accumulate = {wanted} micro-batches cannot be divided evenly among "
                f"{self.world} processes; choose {near}, or another number of processes"
            )
        return count

    def all_reduce_counts(self, counts: Mapping[str, int]) -> Callable[[], dict[str, int]]:
        """Start to sum counts over all ranks, and return a function that waits for the sums."""
        if self.world == 1:
            return lambda: dict(counts)
        numbers = torch.tensor(list(counts.values()), dtype=torch.int64)
        work = torch.distributed.all_reduce(numbers, async_op=True)

        def wait() -> dict[str, int]:
            assert work is not None
            work.wait()
            return dict(zip(counts, numbers.tolist(), strict=True))

        return wait

    def all_reduce_scalars(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Sum scalars over all ranks; with several ranks, in fp64 on the CPU."""
        if self.world == 1:
            return dict(values)
        numbers = torch.stack([value.detach().cpu().double() for value in values.values()])
        torch.distributed.all_reduce(numbers)
        return dict(zip(values, numbers, strict=True))

    def on_rank0(self, work: Callable[[], T]) -> T | None:
        """Run a function on rank 0 while the other ranks wait; they return None.

        An exception is raised on rank 0, the only rank to report it; the other ranks exit with
        status 2 instead of waiting in vain.
        """
        if self.world == 1:
            return work()
        result, failure = None, None
        if self.rank == 0:
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

    def broadcast(self, number: int | None) -> int:
        """Return the whole number of rank 0 on all ranks; the others pass None."""
        return self.all_reduce_counts({"number": number or 0})()["number"]

    def check_equal(self, text: str) -> None:
        """Raise a BertkitError on rank 0 unless all ranks pass the same text."""
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "little")
        first = self.broadcast(digest if self.rank == 0 else None)
        different = self.all_reduce_counts({"different": int(digest != first)})()["different"]
        if different and self.rank:  # rank 0 reports it
            raise SystemExit(2)
        if different:
            raise BertkitError(
                f"{different} of {self.world} processes have another recipe, store, initial model "
                "or version of bertkit than rank 0; start all with the same command and files"
            )


ALONE = Ranks()


@contextmanager
def init_distributed(device: torch.device, timeout: float = 600.0) -> Iterator[Ranks]:
    """Join the process group of this run for the length of a block, and yield this process's ranks.

    An existing process group is used and left as it is. gloo connects CPUs, NCCL connects GPUs, and
    a GPU becomes torch's current device.
    """
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        yield Ranks(distributed.get_rank(), distributed.get_world_size(), timeout)
        return
    if not 0 < timeout <= 1e9:
        raise BertkitError(f"--timeout must be a number of seconds above 0, not {timeout:g}")
    if is_alone():
        yield ALONE
        return
    if missing := [n for n in ("RANK", "MASTER_ADDR", "MASTER_PORT") if n not in os.environ]:
        raise BertkitError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, but {', '.join(missing)} is not set; start "
            "with torchrun, or unset WORLD_SIZE"
        )
    backend, bound = "gloo", None
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        backend, bound = "cpu:gloo,cuda:nccl", torch.device("cuda", index)
        torch.cuda.set_device(bound)
    try:  # with the device, NCCL connects now, not in the first update, and need not guess it
        distributed.init_process_group(backend, timeout=timedelta(seconds=timeout), device_id=bound)
    except (distributed.DistError, ValueError) as error:
        address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        cause = str(error).strip().rpartition("\n")[2]  # the last line of NCCL's errors
        raise BertkitError(
            f"cannot reach the other processes through {address} ({cause}); check that rank 0 "
            "runs there, that --timeout is long enough and that each process has its own GPU"
        ) from None
    try:
        yield Ranks(distributed.get_rank(), distributed.get_world_size(), timeout)
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


def local_device(name: str) -> str:
    """Return the name of this process's device; each process of a host takes its own GPU."""
    local = os.environ.get("LOCAL_RANK")
    if is_alone() or local is None or name not in ("auto", "cuda"):
        return name
    # gloo, which connects several processes, does not support tensors on Apple's GPU
    return f"cuda:{local}" if name == "cuda" or has_cuda() else "cpu"


def replicate(model: nn.Module, device: torch.device) -> nn.Module:
    """Wrap a model in DDP, whose backward pass sums gradients over the ranks.

    torch's default is the mean, but every rank has already divided its losses by the counts of the
    whole global batch. All ranks start with the weights of rank 0.
    """
    from torch.nn.parallel import DistributedDataParallel

    ids = [device] if device.type == "cuda" else None
    wrapped = DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, lambda state, bucket: sum_gradients(bucket))
    # DDP arranges its buckets by its first backward pass, and that decides how sums are rounded:
    # the pass is made here, so that the first update of a resumed run is like any other
    named = sorted(model.named_parameters(), key=lambda pair: not pair[0].startswith("generator."))
    wrapped.reducer.prepare_for_backward([])
    torch.autograd.backward(torch.stack([part.sum() for _, part in named]).sum())  # in reverse
    wrapped.zero_grad()
    return wrapped


def sum_gradients(bucket: Any) -> torch.futures.Future[Tensor]:
    """Sum one bucket of gradients over the ranks, as DDP's communication hook."""
    work = torch.distributed.all_reduce(bucket.buffer(), async_op=True)
    assert work is not None
    return work.get_future().then(lambda done: done.value()[0])


def gradient_sync(model: nn.Module, *, wanted: bool) -> AbstractContextManager[None]:
    """Set whether the backward pass in a block exchanges gradients, as only the last one should."""
    if wanted or not hasattr(model, "no_sync"):
        return nullcontext()
    return model.no_sync()  # type: ignore[operator]


class GracefulStop:
    """A request by Ctrl-C or SIGTERM to save after the current update and stop.

    If it is `patient`, a second signal is ignored: torchrun forwards a signal that the terminal has
    already sent to every process, and kills processes that take too long.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.patient = patient
        self.received: int | None = None

    @property
    def asked(self) -> bool:
        """Whether this process has received a signal."""
        return self.received is not None

    @contextmanager
    def install(self) -> Iterator[GracefulStop]:
        """Catch SIGINT, SIGTERM and SIGHUP inside the block, unless they are ignored.

        A second signal acts as usual, unless this is `patient`.
        """
        # a closed terminal sends SIGHUP; nohup ignores it, and a script's background job SIGINT
        known = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, n)]
        before = {number: signal.getsignal(number) for number in known}
        before = {n: old for n, old in before.items() if old not in (signal.SIG_IGN, None)}

        def remember(number: int, frame: Any) -> None:
            self.received = number
            if not self.patient:
                signal.signal(number, before[signal.Signals(number)])

        try:
            for number in before:
                signal.signal(number, remember)
        except ValueError:  # not the main thread: the caller handles signals
            before = {}
        try:
            yield self
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
