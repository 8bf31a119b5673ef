"""Training and inference on one GPU: padded against packed, eager against compiled, and the stream.

One command does everything in less than nine minutes. Each case runs in a process of its own, so
that a case that fails, hangs or breaks the device costs no other: what failed stands in the results
file with its error, and so does what there was no time for.

    python -m benchmarks.gpu                            writes results/gpu.json
    python -m benchmarks.gpu --cpu-dry-run --out FILE   the same with a tiny network on the CPU

Rates count real tokens, and MFU is what these need over the matrix products' peak, measured
by the same process.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu_batches import AREA, Both, make_batches, needed
from benchmarks.gpu_cases import (
    SIZES,
    Builders,
    Update,
    inference_contestants,
    own_loop,
    training_contestants,
)
from benchmarks.gpu_stream import stream_case
from benchmarks.record import circumstances, summary, write_result
from bertkit.files import write_json
from bertkit.training.device import environment, matmul_peak, synchronize

CASES = (
    "training base 128",
    "training large 512",
    "inference base 128",
    "stream base 128",
    "training base 512",
    "inference large 512",
    "short base 128",
    "training large 128",
    "inference base 512",
    "inference large 128",
)
"""Kind, size, longest length, the most telling ones first; "short" is inference of 8 sequences."""
DRY_CASES = ("training tiny 64", "inference tiny 64", "stream tiny 64")
MINUTES = 8.5
SLOWEST_CASE = 150.0
"""Seconds after which a case is stopped; what it had measured by then is kept."""
REPEATS = 10


def run_case(case: str, repeats: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Measure one case.

    Yields:
        `rows` by contestant and `failed` with their errors: first without those that are compiled,
        in case compiling takes too long, then all side by side.
    """
    kind, size, max_length = case.split()
    config, length = SIZES[size], int(max_length)
    sequences = 8 if kind == "short" else AREA[size] // length
    if kind == "stream":
        rows, failed = stream_case(
            own_loop(config, device), config.vocab_size, length, sequences, device, repeats
        )
        yield {"rows": rows, "failed": failed}
        return
    training = kind == "training"
    peak = matmul_peak(device, "bf16", seconds=0.5)
    batches = make_batches(config, sequences, length, repeats)
    tokens = [len(batch.packed.packed.ids) for batch in batches]
    work = [needed(batch.packed, config, training=training) for batch in batches]
    choose = training_contestants if training else inference_contestants
    eager, compiled = choose(config, device)
    for builders in (eager, eager | compiled):
        measured, failed = race(builders, batches, device)
        rows = {}
        for name, own in measured.items():
            seconds = own.pop("seconds")
            rates = [count / taken for count, taken in zip(tokens, seconds, strict=True)]
            rows[name] = {
                "sequences": sequences,
                "mean_length": round(sum(tokens) / len(batches) / sequences, 1),
                "repeats": len(batches),
                "tokens_per_second": summary(rates),
                "mfu": round(sum(work) / sum(seconds) / peak, 4),
                **own,
                "matmul_peak_tflops": round(peak / 1e12, 2),
            }
            if "padded" in measured:
                rows[name]["over_padded"] = over(rates, rows, name)
            rows[name]["rates"] = [round(rate, 1) for rate in rates]
        yield {"rows": rows, "failed": failed}


def over(rates: list[float], rows: dict[str, Any], name: str) -> dict[str, float]:
    """How many times as fast as the padded contestant, batch by batch."""
    padded_rates = rates if name == "padded" else rows["padded"]["rates"]
    return summary([own / other for own, other in zip(rates, padded_rates, strict=True)])


def race(
    builders: Builders, batches: Sequence[Both], device: torch.device
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """All contestants in turn on each batch, after a first call and two more to warm up.

    Returns:
        By contestant: the `seconds` of each batch; `step_memory_gib`, the most that one took beyond
        the memory in use before it; `first_call_seconds`, which include compiling. And errors by
        contestant: one that fails is out, the others go on.
    """
    updates: dict[str, Update] = {}
    measured: dict[str, dict[str, Any]] = {}
    failed: dict[str, str] = {}
    for name, build in builders.items():
        try:
            updates[name] = build()
            first, _ = timed(updates[name], batches[0], device)
            for batch in batches[-2:]:
                timed(updates[name], batch, device)
        except Exception as error:  # whatever it is, it must not cost the others
            updates.pop(name, None)
            failed[name] = in_one_line(error)
        else:
            measured[name] = {
                "seconds": [], "step_memory_gib": 0.0, "first_call_seconds": round(first, 2),
            }  # fmt: skip
    for batch in batches:
        for name, update in list(updates.items()):
            try:
                seconds, memory = timed(update, batch, device)
            except Exception as error:
                del updates[name], measured[name]
                failed[name] = in_one_line(error)
                continue
            own = measured[name]
            own["seconds"].append(seconds)
            own["step_memory_gib"] = max(own["step_memory_gib"], round(memory / 2**30, 3))
    return measured, failed


def in_one_line(error: Exception) -> str:
    """Its kind and the beginning of its message."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"


def timed(update: Update, batch: Both, device: torch.device) -> tuple[float, int]:
    """Seconds of one update, and the most bytes it took beyond those in use; 0 on a CPU."""
    cuda = device.type == "cuda"
    synchronize(device)
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else 0
    started = time.perf_counter()
    update(batch)
    synchronize(device)
    seconds = time.perf_counter() - started
    return seconds, torch.cuda.max_memory_allocated(device) - before if cuda else 0


def in_own_process(case: str, options: Sequence[str], seconds: float) -> dict[str, Any]:
    """`run_case` in a new process, which is stopped with its children after some seconds."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--case", case, *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    found: dict[str, Any] = {"rows": {}, "failed": {}}
    try:
        printed, _ = process.communicate(timeout=seconds)
        if process.returncode:
            found["failed"]["case"] = f"ended with status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        found["failed"]["case"] = f"stopped after {seconds:.0f} s"
    for line in printed.splitlines():
        if line.startswith('{"rows"') and line.endswith("}"):
            for key, content in json.loads(line).items():
                found[key] |= content
    return found


def all_cases(cases: Sequence[str], options: Sequence[str], minutes: float) -> dict[str, Any]:
    """What every case found, and what failed; a case without time left has failed, too."""
    end = time.monotonic() + 60 * minutes
    rows: dict[str, Any] = {}
    failed: dict[str, str] = {}
    seconds: dict[str, float] = {}
    for case in cases:
        began = time.monotonic()
        if end - began < 15:
            failed[case] = "there was no time left"
            continue
        found = in_own_process(case, options, min(end - began, SLOWEST_CASE))
        seconds[case] = round(time.monotonic() - began, 1)
        rows |= {f"{case}, {name}": row for name, row in found["rows"].items()}
        failed |= {f"{case}, {name}": error for name, error in found["failed"].items()}
        for name, row in found["rows"].items():
            print(f"{case}, {name}: {row['tokens_per_second']['median']:,.0f} tokens/s", flush=True)
        for name, error in found["failed"].items():
            print(f"{case}, {name}: failed, {error}", flush=True)
    return {"rows": rows, "failed": failed, "seconds": seconds}


def main() -> None:
    """Measure every case and write the results file; or, with --case, print what one finds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="a results file elsewhere than results/gpu.json")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--cpu-dry-run", action="store_true")
    parser.add_argument("--case", choices=(*CASES, *DRY_CASES), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    dry = arguments.cpu_dry_run
    if not dry and not torch.cuda.is_available():
        sys.exit("error: this machine has no CUDA device; --cpu-dry-run tries the script without")
    if dry and not arguments.out:
        sys.exit("error: give --out; what a dry run measures is no result")
    if arguments.case:
        device = torch.device("cpu" if dry else "cuda")
        for found in run_case(arguments.case, arguments.repeats, device):
            print(json.dumps(found), flush=True)
        return
    options = ["--repeats", str(arguments.repeats)]
    options += ["--cpu-dry-run", "--out", str(arguments.out)] if dry else []
    details = all_cases(DRY_CASES if dry else CASES, options, arguments.minutes)
    rows = details.pop("rows")
    known = environment()
    details |= {"devices": known["devices"], "cuda": known["cuda"]}
    if arguments.out:
        write_json(arguments.out, {"name": "gpu", **circumstances(), "rows": rows, **details})
        print(arguments.out)
    else:
        print(write_result("gpu", rows, details))


if __name__ == "__main__":
    main()
