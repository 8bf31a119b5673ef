"""The libraries of the inference benchmark, each in a process of its own.

`python -m benchmarks.peers FD` is such a process. It answers the requests that come over a pipe and
imports nothing heavy but the library that it measures, so its memory is that of the library. Every
library computes the logits of the same model directory:

- transformers: its own BERT with `sdpa` attention.
- onnxruntime: a session of an exported graph.
- ctranslate2: its encoder of a converted model; the head is a product in numpy, since the
  converter keeps none.
- openvino: a compiled graph with as many streams as callers, and the hint that belongs to it.
- bertkit: its engine, which chooses batches and threads itself.

Peers get batches of sequences that are sorted by length and padded to their longest. Several
callers compute batches at the same time, each with its own share of the threads.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

INPUTS = ("input_ids", "attention_mask", "token_type_ids")

Arrays = dict[str, np.ndarray]
"""A padded batch; each array is (sequences, longest) int64."""
Encoded = tuple[np.ndarray, int]
"""The ids of a sequence, and how many of them are in segment 0 (`bertkit.tasks.task.Encoded`)."""
Forward = Callable[[Arrays], np.ndarray]
"""Maps a padded batch to logits: (sequences, classes), or (sequences, longest, 2) of an answer."""


class Setting(NamedTuple):
    """The way in which a contestant is run, which is tuned for it."""

    graph: str = ""
    """The name of an exported file; "" if there is only one."""
    batch: int = 32
    callers: int = 1
    """The number of batches that are computed at the same time."""
    threads: int = 1
    """The number of threads of each caller."""

    def __str__(self) -> str:
        """Return the setting in words."""
        callers = "1 caller" if self.callers == 1 else f"{self.callers} callers"
        threads = "1 thread" if self.threads == 1 else f"{self.threads} threads"
        sizes = {0: "its own batches and callers", 1: "1 text at a time"}
        batch = sizes.get(self.batch, f"batches of {self.batch}")
        shared = threads if self.batch == 0 else f"{callers} with {threads}"
        return ", ".join((*((self.graph,) if self.graph else ()), batch, shared))


class Model(NamedTuple):
    """A model, and how a library loads it."""

    directory: Path
    """The model directory in the format of Hugging Face."""
    head: str
    """The head: "classification" or "question-answering"."""
    precision: str
    """The precision: "fp32", "bf16", or one that begins with "int8"."""
    path: Path
    """The exported file; the directory itself if nothing is exported."""
    options: Mapping[str, Any] = {}
    """The options that the library loads the file with."""


def padded(sequences: Sequence[Encoded]) -> Arrays:
    """Return a batch as padded models take it."""
    shape = len(sequences), max(len(ids) for ids, _ in sequences)
    arrays = {name: np.zeros(shape, np.int64) for name in INPUTS}
    for row, (ids, first) in enumerate(sequences):
        arrays["input_ids"][row, : len(ids)] = ids
        arrays["attention_mask"][row, : len(ids)] = 1
        arrays["token_type_ids"][row, first : len(ids)] = 1
    return arrays


def longest_first(sequences: Sequence[Encoded]) -> list[int]:
    """Return the indices of sequences, sorted by length, the longest first."""
    return sorted(range(len(sequences)), key=lambda i: -len(sequences[i][0]))


class Padded:
    """A library that computes padded batches; several threads call `forward` at once."""

    def __init__(self, forward: Forward, setting: Setting) -> None:
        self.forward, self.setting = forward, setting
        self.pool = ThreadPoolExecutor(setting.callers) if setting.callers > 1 else None

    def run(self, sequences: Sequence[Encoded]) -> list[np.ndarray]:
        """Return the logits of each sequence: (classes,), or (tokens, 2) of an answer."""
        order, size = longest_first(sequences), self.setting.batch
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        outputs: list[np.ndarray] = [np.empty(0)] * len(sequences)

        def compute(rows: Sequence[int]) -> None:
            results = self.forward(padded([sequences[i] for i in rows]))
            for row, output in zip(rows, results, strict=True):
                outputs[row] = output if output.ndim == 1 else output[: len(sequences[row][0])]

        for _ in self.pool.map(compute, batches) if self.pool else map(compute, batches):
            pass
        return outputs


def with_transformers(model: Model, setting: Setting) -> Padded:
    """Prepare transformers, in fp32 or with weights in bf16."""
    import torch

    from benchmarks.exports import logits_of, their_model

    network = their_model(model.directory, model.head, model.precision, attention="sdpa")

    @torch.inference_mode()
    def forward(arrays: Arrays) -> np.ndarray:
        if torch.get_num_threads() != setting.threads:  # the number belongs to the calling thread
            torch.set_num_threads(setting.threads)
        inputs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        return logits_of(network(**inputs)).float().numpy()

    return Padded(forward, setting)


def with_onnxruntime(model: Model, setting: Setting) -> Padded:
    """Prepare onnxruntime; callers share a session, whose calls each compute with `threads`."""
    import onnxruntime  # type: ignore[import-untyped]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = setting.threads, 1
    options.log_severity_level = 3  # only errors
    session = onnxruntime.InferenceSession(
        str(model.path), options, providers=["CPUExecutionProvider"]
    )
    return Padded(lambda arrays: session.run(None, arrays)[0], setting)


def with_ctranslate2(model: Model, setting: Setting) -> Padded:
    """Prepare ctranslate2 with `callers` copies of its workers, of `threads` threads each."""
    import ctranslate2  # type: ignore[import-not-found]
    from safetensors.numpy import load_file

    encoder = ctranslate2.Encoder(
        str(model.path),
        device="cpu",
        inter_threads=setting.callers,
        intra_threads=setting.threads,
        **model.options,
    )
    layer = "classifier" if model.head == "classification" else "qa_outputs"
    weights = load_file(model.directory / "model.safetensors")
    weight, bias = weights[f"{layer}.weight"].T.copy(), weights[f"{layer}.bias"]
    hidden = "pooler_output" if model.head == "classification" else "last_hidden_state"

    def forward(arrays: Arrays) -> np.ndarray:
        lengths = arrays["attention_mask"].sum(1)

        def lists(name: str) -> list[list[int]]:
            return [row[:n].tolist() for row, n in zip(arrays[name], lengths, strict=True)]

        encoded = encoder.forward_batch(lists("input_ids"), token_type_ids=lists("token_type_ids"))
        output = getattr(encoded, hidden).to(ctranslate2.DataType.float32)
        return np.array(output) @ weight + bias

    return Padded(forward, setting)


def with_openvino(model: Model, setting: Setting) -> Padded:
    """Prepare OpenVINO with a stream for each caller."""
    import openvino  # type: ignore[import-not-found]

    compiled = openvino.Core().compile_model(
        str(model.path),
        "CPU",
        {
            "PERFORMANCE_HINT": "LATENCY" if setting.callers == 1 else "THROUGHPUT",
            "NUM_STREAMS": setting.callers,
            "INFERENCE_NUM_THREADS": setting.callers * setting.threads,
            **model.options,
        },
    )
    local = threading.local()  # requests of different threads run in different streams

    def forward(arrays: Arrays) -> np.ndarray:
        if not hasattr(local, "request"):
            local.request = compiled.create_infer_request()
        return local.request.infer(arrays)[0].copy()

    return Padded(forward, setting)


class Bertkit:
    """bertkit's inference; nothing else here knows how it is called."""

    def __init__(self, model: Model, setting: Setting) -> None:
        import torch

        from benchmarks.exports import build_head
        from bertkit.checkpoints.pretrained import load_model
        from bertkit.tasks.sequences import prepare_network

        torch.set_num_threads(setting.callers * setting.threads)
        self.head = model.head
        loaded = load_model(model.directory, lambda config: build_head(self.head, config))
        self.model = loaded.model.eval()
        self.device = torch.device("cpu")
        self.threads = prepare_network(self.device, self.model.encoder, model.precision)

    def run(self, sequences: Sequence[Encoded]) -> list[np.ndarray]:
        """Return the logits of each sequence; see `Padded.run`."""
        from bertkit.tasks.sequences import run_model
        from bertkit.tasks.task import Encoded, ItemPart

        per_token = self.head != "classification"
        outputs = run_model(
            lambda batch: self.model(batch.packed),
            [ItemPart((Encoded(*sequence),)) for sequence in sequences],
            self.device,
            per_token=per_token,
            threads=self.threads,
        )
        return outputs if per_token else [logits[0] for logits in outputs]


LIBRARIES: dict[str, Callable[[Model, Setting], Padded | Bertkit]] = {
    "transformers": with_transformers,
    "onnxruntime": with_onnxruntime,
    "ctranslate2": with_ctranslate2,
    "openvino": with_openvino,
    "bertkit": Bertkit,
}


class Server:
    """Answers the requests of `benchmarks.contestants.Worker`; each method answers one kind."""

    def __init__(self, library: str) -> None:
        self.make = LIBRARIES[library]
        self.sequences: list[Encoded] = []
        self.contestant: Padded | Bertkit

    def give(self, sequences: list[Encoded]) -> None:
        """Keep the sequences that later requests name by index."""
        self.sequences = sequences

    def load(self, model: Model, setting: Setting) -> None:
        """Make the contestant, and let it answer once."""
        self.contestant = self.make(model, setting)
        self.contestant.run(self.sequences[:1])

    def run(self, chosen: Sequence[int] | None = None) -> tuple[float, list[np.ndarray]]:
        """Compute all or chosen sequences; return seconds and outputs."""
        sequences = self.sequences if chosen is None else [self.sequences[i] for i in chosen]
        began = time.perf_counter()
        outputs = self.contestant.run(sequences)
        return time.perf_counter() - began, outputs

    def calls(self, first: int, count: int) -> list[float]:
        """Return the seconds of calls with one sequence each; the sequences take turns."""
        taken = []
        for call in range(first, first + count):
            batch = [self.sequences[call % len(self.sequences)]]
            began = time.perf_counter()
            self.contestant.run(batch)
            taken.append(time.perf_counter() - began)
        return taken

    def peak_mebibytes(self) -> float:
        """Return the peak memory of this process in MiB."""
        status = Path("/proc/self/status").read_text(encoding="ascii")
        [peak] = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(peak) / 1024


def serve(connection: Connection) -> None:
    """Answer (method, arguments) with (result, "") or (None, error) until the other side closes."""
    server: Server | None = None
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            if server is None:
                if arguments == ("ctranslate2",):  # its converters import these two if they can
                    sys.modules["torch"] = sys.modules["transformers"] = None  # type: ignore[assignment]
                server = Server(*arguments)
                result: Any = None
            else:
                result = getattr(server, method)(*arguments)
            connection.send((result, ""))
        except Exception as error:
            connection.send((None, f"{type(error).__name__}: {error}"))


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
