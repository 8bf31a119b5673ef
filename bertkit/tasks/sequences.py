"""Sequences: windows for inputs longer than the model, and one function that runs any network.

- One text becomes windows of the maximum length, each `stride` tokens after the previous one.
- Of a pair, the shorter text stays whole if it takes at most half of the room. Otherwise both are
  windowed in half of the room each, and those at the same relative position make pairs.
- A word or a context token is predicted only in the window that gives it the most context on its
  shorter side, hence exactly once.

`run_model` packs sequences of similar lengths by a token budget. On a CPU, each thread computes
batches of its own if there are enough; on a GPU, a batch is read back after the next is launched.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertkit.errors import NOT_FINITE, BertkitError
from bertkit.model.encoder import Encoder
from bertkit.model.native import PreparedLayers, check_mode, prepare_encoder
from bertkit.model.outputs import ClassificationModel
from bertkit.tasks.task import Encoded, ItemPart, Items, TaskBatch, make_batch, split_parts
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import autocast, choose_precision, in_halves

OVERLAP = 4  # without a stride, neighbouring windows share 1 / OVERLAP of their room


@dataclass(frozen=True, kw_only=True)
class WindowLengths:
    """The length of sequences; longer inputs become several windows."""

    max_length: int = 0
    """Maximum tokens of a window; 0 for the model's maximum (384 in question answering)."""
    stride: int = 0
    """Tokens from one window to the next; 0 for 3/4 of the room (at most 128 in question
    answering)."""
    usual_length: ClassVar[int | None] = None

    def __post_init__(self) -> None:
        if min(self.max_length, self.stride) < 0:
            raise BertkitError("--max-length and --stride must be above 0, or 0 for the default")

    def length(self, positions: int) -> int:
        """Return the maximum tokens of a window for a model with this number of positions."""
        max_length = self.max_length or min(self.usual_length or positions, positions)
        if max_length > positions or self.stride >= max_length:
            raise BertkitError(
                f"windows of {max_length} tokens with a stride of {self.stride} must fit the "
                f"model's {positions} positions and overlap; lower --max-length or --stride"
            )
        return max_length


class Window(NamedTuple):
    """Consecutive units of text (tokens or whole words): `units[first:end]`."""

    first: int
    end: int
    owned: np.ndarray
    """The ascending indices of the units that have the most context in this window."""


def plan_windows(
    lengths: np.ndarray,
    room: int,
    stride: int = 0,
    *,
    reach_end: bool = True,
    length_bonus: float = 0.0,
) -> list[Window]:
    """Plan overlapping windows of whole units, each owned by the window with most context for it.

    `lengths` (units,) and `room` count tokens, and `stride` is 0 for 3/4 of the room. A window
    takes as many units as fit, and the next one shares its last `room - stride` tokens or more. The
    context of a unit is the number of tokens on its shorter side; of equal ones the first counts.
    SQuAD's last window is as short as the rest (not `reach_end`), and its `length_bonus` is 0.01.
    """
    count = len(lengths)
    ends = np.cumsum(lengths)
    if count == 0 or ends[-1] <= room:
        return [Window(0, count, np.arange(count))]
    starts = ends - lengths
    spans: list[tuple[int, int]] = []
    first = 0
    shared = max(0, room - stride) if stride else min(room - 1, room // OVERLAP)
    while not spans or spans[-1][1] < count:
        end = int(np.searchsorted(ends, starts[first] + room, side="right"))
        spans.append((first, end))
        if end < count:
            sharing = np.searchsorted(starts, ends[end - 1] - shared, side="right") - 1
            first = int(max(sharing, np.searchsorted(starts, ends[end] - room)))
            if reach_end:
                first = min(first, int(np.searchsorted(starts, ends[-1] - room)))
    best, owner = np.full(count, -1.0), np.zeros(count, dtype=np.int64)
    for number, (first, end) in enumerate(spans):
        left, right = starts[first:end] - starts[first], ends[end - 1] - ends[first:end]
        context = np.minimum(left, right) + length_bonus * (ends[end - 1] - starts[first])
        better = first + np.nonzero(context > best[first:end])[0]
        best[better] = context[better - first]
        owner[better] = number
    return [
        Window(first, end, first + np.nonzero(owner[first:end] == number)[0])
        for number, (first, end) in enumerate(spans)
    ]


def cut_ids(ids: Sequence[int], room: int, stride: int) -> list[Sequence[int]]:
    """Cut token ids into the parts of `plan_windows`."""
    if len(ids) <= room:
        return [ids]
    windows = plan_windows(np.ones(len(ids), dtype=np.int64), room, min(stride, room))
    return [ids[window.first : window.end] for window in windows]


def text_windows(
    text: Sequence[int],
    pair: Sequence[int] = (),
    *,
    tokenizer: Tokenizer,
    length: int,
    stride: int = 0,
) -> list[Encoded]:
    """Make the windows `[CLS] text [SEP]`, and then `pair [SEP]` if it has tokens."""
    room = length - (3 if pair else 2)
    if room < 2:
        raise BertkitError(f"a length of {length} leaves no room for text; raise --max-length")
    shorter = min(len(text), len(pair))
    windows: list[tuple[Any, ...]]
    if shorter > room // 2:
        halves = room // 2, room - room // 2
        windows = aligned([cut_ids(text, halves[0], stride), cut_ids(pair, halves[1], stride)])
    elif len(text) > len(pair):
        windows = [(window, pair) for window in cut_ids(text, room - shorter, stride)]
    else:
        windows = [(text, window) for window in cut_ids(pair, room - shorter, stride)]
    return [surround(first, second or None, tokenizer) for first, second in windows]


def aligned(sequences: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]:
    """Return the windows of several sequences that are at the same relative position."""
    count = max(map(len, sequences))
    return [
        tuple(windows[round(i * (len(windows) - 1) / max(1, count - 1))] for windows in sequences)
        for i in range(count)
    ]


def aligned_parts(windows: Sequence[Sequence[Encoded]], target: Any) -> list[ItemPart]:
    """Return the parts of an input: aligned windows of its sequences, which share its target."""
    sets = aligned(windows)
    return [ItemPart(part, target, 1 / len(sets), n == 0) for n, part in enumerate(sets)]


def surround(
    text: Sequence[int] | np.ndarray, pair: Sequence[int] | None, tokenizer: Tokenizer
) -> Encoded:
    """Add the special tokens to the texts of a window."""
    ids = [tokenizer.cls_id, *text, tokenizer.sep_id]
    first = len(ids)
    if pair is not None:
        ids += [*pair, tokenizer.sep_id]
    return Encoded(np.array(ids, dtype=np.int32), first)


# Inference ---------------------------------------------------------------------------------------

CPU_TOKENS, GPU_TOKENS = 2048, 65_536
"""The maximum tokens of a batch without gradients; only large batches keep a GPU busy."""
BATCHES_PER_THREAD = 4
"""The desired number of batches per thread, so that all threads finish at about the same time."""
LEAST_TOKENS = 400  # the minimum tokens of a batch for which a separate thread pays off

Progress = Callable[[int, int], object]
"""What is called after each batch with the number of parts done, and of all."""


def no_progress(done: int, total: int) -> None:
    """Show nothing."""


def run_model(
    forward: Callable[[TaskBatch], Tensor],
    parts: Sequence[ItemPart],
    device: torch.device,
    *,
    per_token: bool = False,
    precision: str = "fp32",
    prepared: bool = False,
    targets: Callable[..., Any] | None = None,
    progress: Progress = no_progress,
) -> list[np.ndarray]:
    """Return a network's outputs for every part, in the order of the parts: fp32 arrays.

    `forward` returns rows of a batch: (sequences, ...) or, `per_token`, (tokens, ...) of parts with
    one sequence each. `precision` is for networks that `prepare_network` has not `prepared`.
    `targets` makes the tensors that `forward` needs besides the batch. On a CPU the calling
    thread's number of threads is used, as it is now.
    """
    order = sorted(range(len(parts)), key=lambda n: -len(parts[n].sequences[0].ids))
    threads = torch.get_num_threads() if prepared and device.type == "cpu" else 1
    workers, tokens = shares(sum(part.tokens for part in parts), threads)
    tokens = tokens or (CPU_TOKENS if device.type == "cpu" else GPU_TOKENS)

    @torch.inference_mode()
    def launch(group: list[ItemPart]) -> tuple[HostCopy, TaskBatch, list[ItemPart]]:
        batch = make_batch(group, targets).to(device)
        with autocast(device, precision):
            rows = forward(batch)
        return HostCopy(rows.float()), batch, group

    outputs: list[Any] = [None] * len(parts)
    done = 0
    groups = split_parts([parts[n] for n in order], tokens)
    with batch_map(workers) as each:
        launched = chain.from_iterable(each(partial(in_halves, launch), groups))
        for copy, batch, group in one_ahead(launched, device):
            rows = copy.numpy()
            if not np.isfinite(rows).all():
                raise BertkitError(
                    "the model's output is NaN or infinite: its weights are damaged or so large "
                    "that they overflow; use another checkpoint of the model, or train it again",
                    code=NOT_FINITE,
                )
            for output in split_rows(rows, batch, group, per_token):
                outputs[order[done]] = output
                done += 1
            progress(done, len(parts))
    return outputs


def run_task(
    model: Any,
    items: Items,
    device: torch.device,
    *,
    precision: str = "fp32",
    prepared: bool = False,
    progress: Progress = no_progress,
) -> list[list[np.ndarray]]:
    """Return a task network's outputs for every item and part; it is left in evaluation mode."""
    if model.training:  # visiting every module takes as long as a layer for a short text
        model.eval()
    rows = iter(
        run_model(
            lambda batch: model(batch.packed),
            list(items.parts()),
            device,
            per_token=not isinstance(model, ClassificationModel),
            precision=precision,
            prepared=prepared,
            progress=progress,
        )
    )
    return [[next(rows) for _ in item.parts] for item in items.items]


def split_rows(
    rows: np.ndarray, batch: TaskBatch, parts: Sequence[ItemPart], per_token: bool
) -> Iterator[np.ndarray]:
    """Yield the rows of each part: one per token, or one per sequence."""
    boundaries = np.cumsum([0, *batch.packed.lengths])
    first = 0
    for part in parts:
        indices = batch.packed_index[first : first + len(part.sequences)]
        first += len(part.sequences)
        yield rows[slice(*boundaries[indices[0] : indices[0] + 2])] if per_token else rows[indices]


class HostCopy:
    """A tensor on its way from its device to the host, which need not wait for it."""

    def __init__(self, tensor: Tensor) -> None:
        self.host = tensor.to("cpu", non_blocking=tensor.is_cuda)  # into page-locked memory
        self.done: Any = torch.cuda.Event() if tensor.is_cuda else None  # type: ignore[no-untyped-call]
        if self.done is not None:
            self.done.record()

    def numpy(self) -> np.ndarray:
        """Return the values, after waiting for the copy."""
        if self.done is not None:
            self.done.synchronize()
        return self.host.numpy()


def one_ahead(launched: Iterable[Any], device: torch.device) -> Iterator[Any]:
    """Yield launched batches; on a GPU each one only after the next is launched."""
    waiting: list[Any] = []
    for batch in launched:
        waiting.append(batch)
        if device.type == "cpu" or len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


# Devices and threads ------------------------------------------------------------------------------


def choose_mode(name: str, device: torch.device) -> str:
    """Check a precision, and resolve "auto" to bf16 if the device has it, else to fp32."""
    name = name.removesuffix("-residual")
    if device.type == "cpu" and name != "auto":
        check_mode(name)
        return name
    if name == "int8":
        raise BertkitError(f"int8 is for CPUs; choose bf16 or fp32 for {device}")
    return choose_precision(name, device)


def prepare_network(device: torch.device, encoder: Encoder, mode: str) -> None:
    """Prepare an encoder for inference on its device, after which it can no longer be trained."""
    if device.type != "cpu":
        encoder.to(torch.bfloat16 if mode == "bf16" else torch.float32)
        return
    if not isinstance(encoder.layers, PreparedLayers):
        prepare_encoder(encoder, mode)
    survive_forks()


@cache
def survive_forks() -> None:
    """Make forked processes compute with one thread; OpenMP's other threads do not exist there."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=partial(torch.set_num_threads, 1))


def shares(tokens: int, threads: int) -> tuple[int, int]:
    """Return the threads that compute separate batches, if that is faster, and a batch's tokens."""
    if threads == 1 or tokens < threads * LEAST_TOKENS:
        return 1, 0
    share = tokens // (threads * BATCHES_PER_THREAD)
    return threads, min(CPU_TOKENS, max(LEAST_TOKENS, share))


@contextmanager
def batch_map(workers: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """Provide a version of `map` over batches: with several workers, each has one torch thread."""
    # threads that work on the same batch would wait for each other after every operation
    if workers == 1:
        yield map
        return
    try:
        with ThreadPoolExecutor(workers, initializer=set_threads, initargs=(1,)) as pool:
            yield pool.map
    finally:
        set_threads(workers)  # new threads would inherit the workers' setting


def set_threads(threads: int) -> None:
    """Set the number of threads that torch uses for operations of the calling thread."""
    torch.get_num_threads()  # its first call in a thread adopts the last setting of any thread
    torch.set_num_threads(threads)
