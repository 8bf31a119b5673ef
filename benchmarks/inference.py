"""Speed of inference beside onnxruntime and transformers, on the same model and texts in one run.

Rounds go through all contestants in turn; transformers with texts padded as they come takes part
in the first one only. Rates count sequences and real tokens; ratios are between runs of one round.
Work is counted in two ways, and both are set against the matrix products that were measured in the
same round:

- `share_of_matmul_peak` takes every layer as whole, as the field counts;
- `share_of_matmul_peak_needed` leaves out what a head on [CLS] does not need of the last layer,
  which bertkit does not compute either: this is how busy the machine was kept.

Outputs are compared with those of transformers in fp32, by the cosine of each sequence's logits.

    python -m benchmarks.inference --data FOLDER
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contestants import AS_GIVEN, REFERENCE, Field, make_field, prepare
from benchmarks.peers import BATCHES, write_model
from benchmarks.record import data_folder, summary, write_result
from benchmarks.settings import start_model
from benchmarks.workloads import SIZES, Workload, forward_flops, read_workload
from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.training.device import matmul_peak

CPU = torch.device("cpu")
TEXTS = 50
"""Short texts of about the mean length that take turns in the latency test."""

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How long to measure."""

    repeats: int = 3
    sizes: Mapping[str, int]
    batches: Sequence[int] = BATCHES
    peak_seconds: float = 0.5
    calls: int = 300
    """Of the latency test."""
    block: int = 50
    """Calls in a row of one contestant."""


QUICK = Settings(
    repeats=1, sizes=dict.fromkeys(SIZES, 4), batches=(2,), peak_seconds=0.02, calls=4, block=2
)


def int8_peak(seconds: float, size: int = 1024) -> float:
    """The most operations per second of an int8 matrix product with int32 sums here."""
    generator = torch.Generator().manual_seed(0)
    draw = {"dtype": torch.int8, "generator": generator}
    left, right = (torch.randint(-127, 128, (size, size), **draw) for _ in range(2))  # type: ignore[call-overload]
    torch._int_mm(left, right)
    best, end = 0.0, time.perf_counter() + seconds
    while not best or time.perf_counter() < end:
        started = time.perf_counter()
        torch._int_mm(left, right)
        best = max(best, 2 * size**3 / (time.perf_counter() - started))
    return best


def measure_peaks(seconds: float) -> dict[str, float]:
    """Operations per second of matrix products, by precision."""
    peaks = {precision: matmul_peak(CPU, precision, seconds) for precision in ("fp32", "bf16")}
    return {**peaks, "int8": int8_peak(seconds)}


def precision_of(name: str) -> str:
    """The precision in a contestant's name."""
    return next(word for word in ("fp32", "bf16", "int8") if word in name)


def cosines(own: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> list[float]:
    """One for each sequence, of all its logits."""
    found = []
    for a, b in zip(own, theirs, strict=True):
        x, y = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
        found.append(float(x @ y / np.sqrt((x @ x) * (y @ y))))
    return found


def measure(
    workload: Workload, field: Field, start: PretrainedWeights, settings: Settings
) -> dict[str, Row]:
    """Rows of one workload, by contestant."""
    sequences = workload.sequences
    contestants, first_calls = prepare(field, sequences)
    by_length = sorted(sequences, key=lambda sequence: -len(sequence.ids))
    for contestant in contestants.values():
        contestant.run(by_length[::8])
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    peaks: dict[str, list[float]] = {"fp32": [], "bf16": [], "int8": []}
    outputs: dict[str, list[np.ndarray]] = {}
    for repeat in range(settings.repeats):
        for precision, peak in measure_peaks(settings.peak_seconds).items():
            peaks[precision].append(peak)
        for name, contestant in contestants.items():
            if repeat and name == AS_GIVEN:  # by far the slowest, and there for scale only
                continue
            began = time.perf_counter()
            outputs[name] = contestant.run(sequences)
            seconds[name].append(time.perf_counter() - began)
            print(workload.name, name, f"{seconds[name][-1]:.2f} s", flush=True)
    rows = {}
    for name in contestants:
        same = cosines(outputs[name], outputs[REFERENCE])
        rows[name] = {
            **rates(workload, name, seconds),
            "cosine": round(statistics.mean(same), 6),
            "lowest_cosine": round(min(same), 6),
            **shares(workload, start, seconds[name], peaks[precision_of(name)]),
            "first_call_seconds": round(first_calls[name], 3),
        }
    return rows


def rates(workload: Workload, name: str, seconds: Mapping[str, list[float]]) -> Row:
    """Sequences and real tokens per second, and how often that of onnxruntime."""

    def over(other: str) -> dict[str, float]:
        pairs = zip(seconds[name], seconds[other], strict=False)  # some run in the first round only
        return summary([theirs / own for own, theirs in pairs])

    count, tokens = len(workload.sequences), workload.tokens
    return {
        "runs": len(seconds[name]),
        "sequences_per_second": summary([count / s for s in seconds[name]]),
        "real_tokens_per_second": summary([tokens / s for s in seconds[name]]),
        "over_onnxruntime_fp32": over("onnxruntime fp32"),
        "over_onnxruntime_int8": over("onnxruntime int8"),
    }


def shares(
    workload: Workload, start: PretrainedWeights, seconds: Sequence[float], peaks: Sequence[float]
) -> Row:
    """Work per second over that of matrix products of the same round."""
    rows = len(workload.sequences) if workload.head == "classification" else None
    work = {
        "share_of_matmul_peak": forward_flops(start.config, workload.lengths),
        "share_of_matmul_peak_needed": forward_flops(start.config, workload.lengths, rows=rows),
    }
    return {
        name: summary([flops / s / peak for s, peak in zip(seconds, peaks, strict=False)])
        for name, flops in work.items()
    }


def measure_latency(
    workload: Workload, model: Path, onnx: Path, settings: Settings
) -> dict[str, Row]:
    """Milliseconds of one short text at a time, by contestant; they take turns in blocks."""
    mean = workload.tokens / len(workload.sequences)
    texts = sorted(workload.sequences, key=lambda text: abs(len(text.ids) - mean))[:TEXTS]
    alone = replace(workload, name="latency", sequences=texts)
    field = make_field(model, onnx, alone, batches=(1,), every=1)
    del field.makers[AS_GIVEN]  # alone, no text is padded
    contestants, _ = prepare(field, texts)
    taken: dict[str, list[float]] = {name: [] for name in contestants}
    for begin in range(-settings.block, settings.calls, settings.block):
        for name, contestant in contestants.items():
            for call in range(settings.block):
                started = time.perf_counter()
                contestant.run([texts[call % len(texts)]])
                if begin >= 0:  # the first block warms up
                    taken[name].append(1000 * (time.perf_counter() - started))
    medians = {name: statistics.median(found) for name, found in taken.items()}
    return {
        name: {
            "calls": len(found),
            "mean_tokens": round(statistics.mean(len(text.ids) for text in texts), 1),
            "p50_milliseconds": round(medians[name], 3),
            "p99_milliseconds": round(float(np.percentile(found, 99)), 3),
            "p50_over_onnxruntime_fp32": round(medians[name] / medians["onnxruntime fp32"], 3),
            "p50_over_onnxruntime_int8": round(medians[name] / medians["onnxruntime int8"], 3),
        }
        for name, found in taken.items()
    }


def run(
    data: Path, folder: Path, start: PretrainedWeights, settings: Settings
) -> tuple[dict[str, Any], Row]:
    """All tables by name, the workloads' and "latency"; and the details that belong to them.

    Args:
        data: the folder of data sets.
        folder: for models and exported graphs; what is there is used again.
        start: the encoder.
        settings: see `Settings`.
    """
    tables: dict[str, Any] = {}
    details: Row = {"repeats": settings.repeats, "workloads": {}, "peers": {}}
    for name, count in settings.sizes.items():
        workload = read_workload(name, data, start.tokenizer, count)
        model = write_model(folder, start, workload.head)
        field = make_field(model, folder / "onnx", workload, settings.batches)
        details["workloads"][name] = workload.described()
        details["peers"][name] = field.details
        tables[name] = measure(workload, field, start, settings)
        if name == "short":
            tables["latency"] = measure_latency(workload, model, folder / "onnx", settings)
    return tables, details


def write_tables(tables: Mapping[str, Any], details: Row) -> None:
    """A file of its own for each table."""
    for name, table in tables.items():
        described = {part: details[part].get(name, {}) for part in ("workloads", "peers")}
        print(
            write_result(f"inference-{name}", table, {"repeats": details["repeats"], **described})
        )


def main() -> None:
    """Measure every workload and the latency."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, help="keeps exported graphs for the next time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--quick", action="store_true", help="a few texts; writes no results")
    arguments = parser.parse_args()
    sizes = {name: SIZES[name] for name in arguments.workloads}
    settings = QUICK if arguments.quick else Settings(repeats=arguments.repeats, sizes=sizes)
    data, start = data_folder(arguments.data), read_pretrained(start_model())
    with tempfile.TemporaryDirectory() as temporary:
        tables, details = run(data, arguments.work or Path(temporary), start, settings)
    for name, table in tables.items():
        for contestant, row in table.items():
            print(name, contestant, row)
    if not arguments.quick:
        write_tables(tables, details)


if __name__ == "__main__":
    main()
