"""The contestants of the inference benchmark, and how the settings of each are chosen.

Every contestant runs in a process of its own (`benchmarks.peers`) and has the same number of
threads in all. A peer is tuned on a slice of the workload before anything is measured: first its
graph, and whether all threads share a batch or each computes its own; then, with the best of
these, the batch size. A setting whose lowest cosine is below 0.9 is chosen only if all are.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.exports import (
    CALIBRATION,
    OPENVINO_TYPES,
    export,
    export_ctranslate2,
    export_openvino,
    fast_modes,
)
from benchmarks.peers import Encoded, Model, Setting, longest_first, padded
from benchmarks.record import ROOT, installed, precisions
from benchmarks.workloads import Workload

BATCHES = (4, 8, 16, 32)
FIRST_BATCH = 8
"""The batch size with which graphs and numbers of callers are compared."""
WRONG = 0.9
"""Outputs whose lowest cosine is below this are not those of the model."""

Row = dict[str, Any]


class Failed(Exception):  # noqa: N818 - what happened to a contestant
    """The process of a contestant gave no answer."""


class Worker:
    """The process of one contestant; `benchmarks.peers.Server` defines its requests."""

    def __init__(self, library: str) -> None:
        self.connection, theirs = Pipe()
        number = theirs.fileno()
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.peers", str(number)]
        self.process = subprocess.Popen(
            command, pass_fds=[number], cwd=ROOT, stdout=subprocess.DEVNULL
        )
        theirs.close()
        self.ask("import", library)

    def ask(self, method: str, *arguments: object) -> Any:
        """Send a request to the process, and return the answer."""
        try:
            self.connection.send((method, arguments))
            answer, error = self.connection.recv()
        except (EOFError, OSError):
            raise Failed(f"its process ended with {self.process.wait()}") from None
        if error:
            raise Failed(error)
        return answer

    def close(self) -> None:
        """End the process."""
        self.connection.close()
        self.process.wait()


@contextmanager
def worker_of(entry: Entry, sequences: Sequence[Encoded]) -> Iterator[Worker]:
    """Yield a process that has the sequences and ends with the block."""
    worker = Worker(entry.library)
    try:
        worker.ask("give", [tuple(sequence) for sequence in sequences])
        yield worker
    finally:
        worker.close()


class Graph(NamedTuple):
    """A file that a library loads, and the options that it loads the file with."""

    path: Path
    options: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Entry:
    """A library in one precision; `threads` is the number of threads of all callers together."""

    library: str
    precision: str
    directory: Path
    head: str
    graphs: Mapping[str, Graph]
    threads: int

    @property
    def name(self) -> str:
        """The name of the contestant in tables."""
        return f"{self.library} {self.precision}"

    def model(self, setting: Setting) -> Model:
        """Return what the library loads for a setting."""
        path, options = self.graphs[setting.graph]
        return Model(self.directory, self.head, self.precision, path, options)

    def shapes(self) -> list[Setting]:
        """Return settings of every graph, with all threads on one batch or a thread per batch."""
        if self.library == "bertkit":  # it chooses batches and threads itself
            return [Setting("", 0, 1, self.threads)]
        callers = dict.fromkeys((1, self.threads))
        return [
            Setting(graph, FIRST_BATCH, many, self.threads // many)
            for graph in self.graphs
            for many in callers
        ]

    def alone(self) -> list[Setting]:
        """Return settings for every graph with one text at a time, on one thread and on all."""
        counts = dict.fromkeys((1, self.threads))
        return [Setting(graph, 1, 1, count) for graph in self.graphs for count in counts]


def make_field(
    model: Path, folder: Path, workload: Workload, threads: int
) -> tuple[list[Entry], dict[str, str]]:
    """Return all contestants, the reference first, and why others do not take part.

    Args:
        model: the model directory.
        folder: the folder of exported files.
        workload: its head, and the sequences of which 64 calibrate the static quantization; they
            are those that are measured, which can only help it.
        threads: the number of threads of each contestant.
    """
    by_library = {"transformers": {precision: {"": Graph(model)} for precision in precisions()}}
    skipped: dict[str, str] = {}
    peers = {
        ("onnxruntime", "onnx"): onnx_graphs,
        ("ctranslate2",): ctranslate2_graphs,
        ("openvino", "nncf", "onnx"): openvino_graphs,
    }
    for packages, make in peers.items():
        if missing := [package for package in packages if not installed(package)]:
            skipped[packages[0]] = f"{' and '.join(missing)} not installed"
        else:
            by_library[packages[0]] = make(model, folder, workload)
    by_library["bertkit"] = {mode: {"": Graph(model)} for mode in fast_modes()}
    entries = [
        Entry(library, precision, model, workload.head, graphs, threads)
        for library, by_precision in by_library.items()
        for precision, graphs in by_precision.items()
    ]
    return entries, skipped


def onnx_graphs(model: Path, folder: Path, workload: Workload) -> dict[str, dict[str, Graph]]:
    """Export the graphs of onnxruntime by precision: fp32 and int8."""
    graphs: dict[str, dict[str, Graph]] = {"fp32": {}, "int8": {}}
    for name, path in export(model, workload.head, folder).items():
        kind, precision = name.split()
        graphs[precision][kind] = Graph(path)
    return graphs


def ctranslate2_graphs(model: Path, folder: Path, _: Workload) -> dict[str, dict[str, Graph]]:
    """Return the types of computation for each precision that this processor supports."""
    import ctranslate2  # type: ignore[import-not-found]

    path = export_ctranslate2(model, folder)
    wanted = {"fp32": ["float32"], "bf16": ["bfloat16"], "int8": ["int8_float32", "int8_bfloat16"]}
    possible = set(ctranslate2.get_supported_compute_types("cpu"))
    return {
        precision: {kind: Graph(path, {"compute_type": kind}) for kind in kinds if kind in possible}
        for precision, kinds in wanted.items()
        if possible & set(kinds)
    }


def openvino_graphs(model: Path, folder: Path, workload: Workload) -> dict[str, dict[str, Graph]]:
    """Export OpenVINO's graphs by precision; int8 computes the rest in bf16 if possible."""
    step = max(1, len(workload.sequences) // CALIBRATION)
    inputs = [padded([sequence]) for sequence in workload.sequences[::step][:CALIBRATION]]
    plain = export(model, workload.head, folder)["plain fp32"]
    paths = export_openvino(plain, folder, workload.name, inputs)
    modes = {precision: ("fp32", precision) for precision in precisions()}
    modes["int8 static"] = ("int8 static", precisions()[-1])
    return {
        name: {"": Graph(paths[kind], {"INFERENCE_PRECISION_HINT": OPENVINO_TYPES[precision]})}
        for name, (kind, precision) in modes.items()
    }


def cosines(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> list[float]:
    """Return one cosine for each sequence, over all its logits."""
    values = []
    for a, b in zip(ours, theirs, strict=True):
        x, y = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
        values.append(float(x @ y / np.sqrt((x @ x) * (y @ y))))
    return values


def sample(sequences: Sequence[Encoded], batch: int, least: int) -> list[int]:
    """Return the indices of the sequences of every 8th batch, but of `least` batches if possible.

    If these sequences alone are run, they form the same batches again.
    """
    order = longest_first(sequences)
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    step = max(1, min(8, len(batches) // least))
    # the sample begins in the middle of a stride: the first batch has the longest sequences
    return [i for rows in batches[min(step // 2, (len(batches) - 1) // 2) :: step] for i in rows]


@dataclass
class Trials:
    """The settings that were tried for a contestant."""

    rates: dict[Setting, float] = field(default_factory=dict)
    """Setting -> real tokens per second, or calls per second."""
    lowest_cosines: dict[Setting, float] = field(default_factory=dict)

    @property
    def best(self) -> Setting:
        """The fastest setting, among those whose outputs are right if there are any."""
        right = [setting for setting, low in self.lowest_cosines.items() if low >= WRONG]
        return max(right or self.rates, key=self.rates.__getitem__)

    def described(self) -> Row:
        """Return the trials as the results file has them."""
        tried = {str(setting): round(rate, 1) for setting, rate in self.rates.items()}
        return {"chosen": str(self.best), "rates": tried}


def tune(entry: Entry, sequences: Sequence[Encoded], expected: Sequence[np.ndarray]) -> Trials:
    """Try graphs and callers, then batch sizes, by real tokens per second of the faster run."""
    trials = Trials()
    with worker_of(entry, sequences) as worker:

        def attempt(setting: Setting) -> None:
            chosen = sample(sequences, setting.batch or FIRST_BATCH, 2 * setting.callers)
            tokens = sum(len(sequences[i][0]) for i in chosen)
            worker.ask("load", entry.model(setting), setting)
            runs = [worker.ask("run", chosen) for _ in range(2)]  # the first one also warms up
            same = cosines(runs[-1][1], [expected[i] for i in chosen])
            trials.rates[setting] = tokens / min(seconds for seconds, _ in runs)
            trials.lowest_cosines[setting] = min(same)

        for setting in entry.shapes():
            attempt(setting)
        best = trials.best
        if best.batch:
            for batch in BATCHES:
                if batch != best.batch:
                    attempt(best._replace(batch=batch))
    return trials


def tune_alone(entry: Entry, texts: Sequence[Encoded], expected: Sequence[np.ndarray]) -> Trials:
    """Try graphs and threads for one text at a time, by calls per second at the median time."""
    trials = Trials()
    with worker_of(entry, texts) as worker:
        for setting in entry.alone():
            worker.ask("load", entry.model(setting), setting)
            _, outputs = worker.ask("run")
            trials.rates[setting] = 1 / statistics.median(worker.ask("calls", 0, 30))
            trials.lowest_cosines[setting] = min(cosines(outputs, expected))
    return trials


def reference_outputs(entry: Entry, sequences: Sequence[Encoded]) -> list[np.ndarray]:
    """Return the outputs that every contestant should compute."""
    with worker_of(entry, sequences) as worker:
        setting = Setting("", 32, 1, entry.threads)
        worker.ask("load", entry.model(setting), setting)
        return worker.ask("run")[1]
