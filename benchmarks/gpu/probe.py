"""`benchmarks.gpu probe`: what the card can do at BERT's shapes, and where training waits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.batches import draw_lengths, make_batches
from benchmarks.gpu.contestants import STAGES, Own, own_training, pinned
from benchmarks.gpu.setup import BASE, LARGE, Case, Found, Setup
from benchmarks.record import summary
from bertkit.model.native.attention import KERNELS, self_attention
from bertkit.pretraining_data.batch import Packed, from_arrays
from bertkit.training.device import matmul_peak, synchronize

TOKENS = 65536
ALIGNED = 64
"""The columns of the vocabulary product are rounded up to a multiple of this."""

Timing = dict[str, Any]


def timing(seconds: list[float], *, flops: float = 0.0, moved: float = 0.0) -> Timing:
    """Return a row: milliseconds, and the rates of the FLOPs and bytes that take them."""
    found: Timing = {"milliseconds": summary([1e3 * one for one in seconds])}
    if flops:
        found["tflops"] = summary([flops / one / 1e12 for one in seconds])
    if moved:
        found["gb_per_second"] = summary([moved / one / 1e9 for one in seconds])
    return found


def ceilings(setup: Setup) -> Iterator[Found]:
    """Measure copies on the card and from pinned memory, and square matrix products."""
    size = 1 << (20 if setup.dry else 31)

    def copy() -> Timing:
        source = torch.ones(size, dtype=torch.uint8, device=setup.device)
        target = torch.empty_like(source)
        return timing(setup.seconds_of(lambda: target.copy_(source)), moved=2.0 * size)

    def upload() -> Timing:
        source = torch.ones(size // 8, dtype=torch.uint8, pin_memory=not setup.dry)
        target = torch.empty_like(source, device=setup.device)
        seconds = setup.seconds_of(lambda: target.copy_(source, non_blocking=True))
        return timing(seconds, moved=size / 8)

    def peak() -> Timing:
        found = matmul_peak(setup.device, "bf16", seconds=0.02 if setup.dry else 2.0)
        sheet = setup.data_sheet()
        return {
            "tflops": round(found / 1e12, 3),
            "share_of_data_sheet": sheet and round(found / sheet, 4),
        }

    yield setup.attempt("copy on the device", copy)
    yield setup.attempt("copy from pinned memory", upload)
    yield setup.attempt("square matrix products", peak)


def products(setup: Setup) -> Iterator[Found]:
    """Measure the matrix products of a training step, forward and backward, in bf16."""
    for name, size in (("base", BASE), ("large", LARGE)):
        config = setup.config(size)
        rows, h, f = setup.tokens(TOKENS), config.hidden_size, config.intermediate_size
        aligned = -(-config.vocab_size // ALIGNED) * ALIGNED
        even = -(-config.vocab_size // 8) * 8
        targets = round(0.15 * rows)
        shapes = {
            "query, key, value": (rows, h, 3 * h),
            "output": (rows, h, h),
            "feed-forward in": (rows, h, f),
            "feed-forward out": (rows, f, h),
            f"vocabulary of {config.vocab_size}": (targets, h, config.vocab_size),
            f"vocabulary of {even}": (targets, h, even),
            f"vocabulary of {aligned}": (targets, h, aligned),
        }
        for what, shape in shapes.items():
            for way in ("forward", "input gradient", "weight gradient"):
                yield setup.attempt(f"{name}, {what}, {way}", partial(product, setup, shape, way))


def product(setup: Setup, shape: tuple[int, int, int], way: str) -> Timing:
    """Time one product of random matrices (m, k) and (n, k), laid out as in a linear layer."""
    m, k, n = shape
    options: Any = {"device": setup.device, "dtype": torch.bfloat16}
    hidden, weight = torch.randn(m, k, **options), torch.randn(n, k, **options)
    gradient = torch.randn(m, n, **options)
    work: dict[str, Callable[[], torch.Tensor]] = {
        "forward": lambda: hidden @ weight.T,
        "input gradient": lambda: gradient @ weight,
        "weight gradient": lambda: gradient.T @ hidden,
    }
    return timing(setup.seconds_of(work[way]), flops=2.0 * m * k * n)


def attentions(setup: Setup) -> Iterator[Found]:
    """Measure attention of base, forward and backward, with dropout and without."""
    config, generator = setup.config(), np.random.default_rng(0)
    for length in (128, 512):
        for layout in ("full", "ragged"):
            tokens = setup.tokens(TOKENS)
            lengths = draw_lengths(tokens, length, layout == "ragged", generator)
            ids = np.zeros(int(lengths.sum()), dtype=np.int64)
            packed = from_arrays(ids, ids, lengths).to(setup.device)
            flops = 3 * 4.0 * config.hidden_size * float((lengths**2).sum())
            for name, kernel in WAYS.items():
                for dropout in (0.1, 0.0):
                    measure = partial(attention, setup, kernel, packed, dropout, flops)
                    yield setup.attempt(f"{length} {layout}, {name}, dropout {dropout}", measure)


def attention(setup: Setup, kernel: Any, packed: Packed, dropout: float, flops: float) -> Timing:
    """Time one kernel; the FLOPs are those of real pairs of tokens."""
    config = setup.config()
    rows, run = kernel(packed, dropout)
    size = (rows, 3, config.num_attention_heads, config.hidden_size // config.num_attention_heads)
    qkv = torch.randn(size, device=setup.device, dtype=torch.bfloat16, requires_grad=True)
    upstream = torch.randn_like(run(qkv.detach()))

    def work() -> None:
        run(qkv).backward(upstream)
        qkv.grad = None

    found = timing(setup.seconds_of(work), flops=flops)
    rate = round(1e3 * len(packed.ids) / found["milliseconds"]["median"])
    return {**found, "tokens_per_second": rate}


Kernel = tuple[int, Callable[..., torch.Tensor]]
"""The rows of queries, keys and values, and the function of all, (rows, 3, heads, width)."""


def own(packed: Packed, dropout: float) -> Kernel:
    """Return the kernel that bertkit chooses: its own in Triton."""
    run = partial(self_attention, packed=packed, direction="bidirectional", dropout=dropout)
    return len(packed.ids), run


def flash(packed: Packed, dropout: float) -> Kernel:
    """Return flash attention on packed tokens, by torch's own operator."""
    run = partial(KERNELS["flash"], packed=packed, direction="bidirectional", dropout=dropout)
    return len(packed.ids), run


def inside_padding(packed: Packed, dropout: float) -> Kernel:
    """Return bertkit's `padded` kernel: it pads, attends under a mask, and removes the padding."""
    run = partial(KERNELS["padded"], packed=packed, direction="bidirectional", dropout=dropout)
    return len(packed.ids), run


def all_padded(packed: Packed, dropout: float) -> Kernel:
    """Return torch's attention on tensors that are padded all the time, as in other libraries."""
    lengths, longest = packed.cu_seqlens.diff(), packed.max_seqlen
    real = torch.arange(longest, device=lengths.device) < lengths[:, None]
    rows = len(lengths) * longest
    mask = None if len(packed.ids) == rows else real[:, None, None, :]

    def run(qkv: torch.Tensor) -> torch.Tensor:
        heads = (part.unflatten(0, (-1, longest)).transpose(1, 2) for part in qkv.unbind(1))
        return scaled_dot_product_attention(*heads, attn_mask=mask, dropout_p=dropout)

    return rows, run


WAYS = {"bertkit": own, "flash": flash, "padded inside": inside_padding, "padded": all_padded}


def waits(setup: Setup) -> Iterator[Found]:
    """Count the calls by which the host waits for the card in a step of training."""
    for name in ("eager", "compiled"):
        yield setup.attempt(f"training, {name}", partial(waits_of, setup, STAGES[name]))


def waits_of(setup: Setup, own: Own) -> dict[str, Any]:
    """Train two steps under torch's check, after two that choose kernels and find memory."""
    batches = pinned(setup, make_batches(setup.config(), setup.tokens(16384), 128, 4))
    work = own_training(setup, setup.config(), own)
    work(batches)
    synchronize(setup.device)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        if not setup.dry:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            work(batches)
        finally:
            if not setup.dry:
                torch.cuda.set_sync_debug_mode("default")
    found = [one for one in heard if "called a synchroniz" in str(one.message)]
    places = sorted({f"{one.filename.rpartition('/')[2]}:{one.lineno}" for one in found})
    return {"steps": len(batches), "waits": len(found), "where": ", ".join(places)}


def profiles(setup: Setup) -> Iterator[Found]:
    """Profile one step of training; the tables are written as text beside the results."""
    for name in ("compiled", "compiled, bf16 residual", "eager"):
        yield setup.attempt(f"training, {name}", partial(profile_of, setup, name))


def profile_of(setup: Setup, name: str) -> dict[str, Any]:
    """Write the profiler's tables of a step, by time on the device and on the host."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    batches = pinned(setup, make_batches(setup.config(), setup.tokens(TOKENS), 128, 2))
    work = own_training(setup, setup.config(), STAGES[name])
    work(batches)
    step = min(setup.seconds_of_one(partial(work, batches[:1])) for _ in range(3))
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not setup.dry)
    with profile(activities=activities) as profiler:
        work(batches[:1])
        synchronize(setup.device)
    averages, side = profiler.key_averages(), "cpu" if setup.dry else "device"
    orders = (f"self_{side}_time_total", "self_cpu_time_total")
    tables = [averages.table(sort_by=o, row_limit=60, max_name_column_width=90) for o in orders]
    path = setup.out / f"gpu-profile-{name.replace(', ', '-').replace(' ', '-')}.txt"
    path.write_text("\n\n".join(tables), encoding="utf-8")
    kernels = [one for one in averages if setup.dry or one.device_type == DeviceType.CUDA]
    busy = sum(getattr(one, f"self_{side}_time_total") for one in kernels)
    return {
        "step_milliseconds": round(1e3 * step, 3),
        "kernel_milliseconds": round(busy / 1e3, 3),
        "kernels": sum(one.count for one in kernels),
        "tokens": len(batches[0].packed.packed.ids),
        "file": path.name,
    }


PROBES: dict[str, Case] = {
    "ceiling": ceilings,
    "attention": attentions,
    "profile": profiles,
    "waits": waits,
    "product": products,
}
