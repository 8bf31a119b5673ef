"""`bertkit serve` beside other servers of the same classifier, under load.

The others are the plainest ones, with transformers or onnxruntime, and, if OpenVINO is installed,
one that combines waiting requests into batches (`serving_peers.py`). Contestants are processes of
their own, all of them up all the time, and take turns; the clients are one process more
(`serving_clients.py`). Every contestant gets the same texts, one per request.

    python -m benchmarks.serving --data FOLDER
"""

from __future__ import annotations

import json
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.exports import (
    CALIBRATION,
    OPENVINO_TYPES,
    export_openvino,
    silence,
    write_fused,
    write_plain,
)
from benchmarks.peers import padded
from benchmarks.record import (
    data_folder,
    installed,
    new_parser,
    precisions,
    start_model,
    summary,
    write_result,
)
from benchmarks.serving_clients import resident
from benchmarks.tokenization import read_sentences
from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.model.native import possible_modes
from bertkit.tasks.classification import Classification

TASK = Classification(("no", "yes"))
SECONDS_TO_START = 120
PEERS = ("transformers", "onnxruntime", "openvino fp32", "openvino bf16", "openvino int8 static")
LONGEST = 480
"""The maximum number of tokens of a text, so that no contestant truncates one."""

Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """The extent of the measurement."""

    repeats: int = 3
    seconds: float = 5.0
    clients: Sequence[int] = (1, 4, 32)
    texts: int = 512


QUICK = Settings(repeats=1, seconds=1.0, clients=(1, 32), texts=64)


@dataclass(frozen=True)
class Contestant:
    """A running server."""

    process: int
    port: int
    path: str
    batched: bool
    """Whether a request is a list of inputs."""

    def body(self, text: str) -> str:
        """Return the body of a request with one text."""
        return json.dumps({"inputs": [{"text": text}]} if self.batched else {"text": text})


def commands(folder: Path) -> dict[str, tuple[list[str], bool]]:
    """Return name -> (command without the port, whether it is bertkit's)."""
    python = [sys.executable, "-m"]
    found: dict[str, tuple[list[str], bool]] = {}
    for kind in ("transformers", "onnxruntime"):
        for style in ("def", "async def"):
            command = [*python, "benchmarks.serving_peers", kind, style, str(folder / "model")]
            found[f"FastAPI + {kind} fp32, {style}"] = (command, False)
    for kind in openvino_kinds():
        for style in ("1 caller", "2 callers"):
            command = [*python, "benchmarks.serving_peers", kind, style, str(folder / "model")]
            found[f"FastAPI + {kind}, {style}"] = (command, False)
    for precision in [*precisions(), *(["int8"] if "int8" in possible_modes() else [])]:
        options = ["--precision", precision, "--no-log-requests", "--port"]
        command = [*python, "bertkit", "serve", str(folder / "model"), *options]
        found[f"bertkit serve {precision}"] = (command, True)
    return found


def openvino_kinds() -> list[str]:
    """Return the kinds of OpenVINO, if it is installed: bf16 (or fp32 without it), and int8."""
    if not (installed("openvino") and installed("nncf")):
        return []
    return [f"openvino {precisions()[-1]}", "openvino int8 static"]


def write_classifier(folder: Path, start: PretrainedWeights) -> None:
    """Write the classifier as a model directory."""
    torch.manual_seed(0)
    details = {"task": TASK.task_type, "labels": list(TASK.labels), "settings": TASK.settings()}
    save_model(
        folder / "model", start.build(TASK.build, keep_head=False).model, start.tokenizer, details
    )


def write_graphs(folder: Path, start: PretrainedWeights, texts: Sequence[str]) -> None:
    """Export the graphs of the classifier; some of the texts calibrate the one in 8 bits."""
    plain = folder / "plain.onnx"
    with silence():
        write_plain(folder / "model", "classification", plain)
        write_fused(folder / "model", plain, folder / "model.onnx")
    if not openvino_kinds():
        return
    tokenizer = start.tokenizer
    inputs = []
    for ids in tokenizer.encode_batch(texts[:CALIBRATION]):
        own = np.array([tokenizer.cls_id, *ids, tokenizer.sep_id])
        inputs.append(padded([(own, len(own))]))
    paths = export_openvino(plain, folder, "serving", inputs)
    hint = {"INFERENCE_PRECISION_HINT": OPENVINO_TYPES[precisions()[-1]]}
    graphs = {precisions()[-1]: paths["fp32"], "int8 static": paths["int8 static"]}
    found = {name: (str(path), hint) for name, path in graphs.items()}
    (folder / "openvino.json").write_text(json.dumps(found))


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def running(command: Sequence[str], batched: bool, log: Path) -> Iterator[Contestant]:
    """Run a server for the duration of the block."""
    port = free_port()
    path = "/v1/classification" if batched else "/classify"
    with log.open("w") as out:
        process = subprocess.Popen([*command, str(port)], stdout=out, stderr=out)
    contestant = Contestant(process.pid, port, path, batched)
    try:
        wait_for(contestant, process, log)
        yield contestant
    finally:
        process.terminate()
        process.wait(60)


def wait_for(contestant: Contestant, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers."""
    end = time.monotonic() + SECONDS_TO_START
    asked = urllib.request.Request(
        f"http://127.0.0.1:{contestant.port}{contestant.path}",
        contestant.body("a text").encode(),
        {"content-type": "application/json"},
    )
    while True:
        try:
            urllib.request.urlopen(asked, timeout=10).close()
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(f"a server did not start:\n{log.read_text()}") from None
            time.sleep(0.2)
        else:
            return


def read_texts(data: Path, start: PretrainedWeights, count: int) -> dict[str, list[str]]:
    """Return texts by workload: "short" sentences, and "mixed", of which every fourth is longer."""
    sentences = read_sentences(data / "wikipedia" / "wiki_AA.txt.xz", 2.0)
    lengths = [len(ids) + 2 for ids in start.tokenizer.encode_batch(sentences)]
    short = [s for s, n in zip(sentences, lengths, strict=True) if 8 <= n <= 64][:count]
    generator = np.random.Generator(np.random.Philox(key=7))
    mixed, at = [], 0
    for number in range(count):
        wanted = 0 if number % 4 else int(generator.integers(100, LONGEST - 64))
        text, tokens = [sentences[at]], lengths[at]
        at += 1
        while tokens < wanted and tokens + lengths[at] < LONGEST:
            text.append(sentences[at])
            tokens += lengths[at]
            at += 1
        mixed.append(" ".join(text)[: 4 * LONGEST])
    return {"short": short, "mixed": mixed}


def load(contestant: Contestant, texts: Sequence[str], clients: int, seconds: float) -> Row:
    """Put a server under the load of some clients; return what they saw."""
    asked = {
        "port": contestant.port,
        "path": contestant.path,
        "bodies": [contestant.body(text) for text in texts],
        "clients": clients,
        "seconds": seconds,
    }
    found = subprocess.run(
        [sys.executable, "-m", "benchmarks.serving_clients"],
        input=json.dumps(asked).encode(),
        capture_output=True,
        check=True,
    )
    return json.loads(found.stdout)


def measure(
    contestants: Mapping[str, Contestant], texts: Mapping[str, Sequence[str]], settings: Settings
) -> dict[str, Row]:
    """Measure all loads; return rows by workload, clients and contestant ("short, 32 clients")."""
    runs: dict[str, dict[str, list[Row]]] = {}
    for repeat in range(-1, settings.repeats):
        for workload, own in texts.items():
            for clients in settings.clients:
                for name, contestant in contestants.items():
                    seconds = settings.seconds if repeat >= 0 else settings.seconds / 4
                    found = load(contestant, own, clients, seconds)
                    if repeat < 0:  # the first round warms up
                        continue
                    rows = runs.setdefault(f"{workload}, {clients} clients", {})
                    rows.setdefault(name, []).append(found)
                    print(workload, clients, name, found["requests"] / seconds, flush=True)
    return {place: compared(rows) for place, rows in runs.items()}


def compared(runs: Mapping[str, Sequence[Row]]) -> Row:
    """Return rates and latencies, and rates over those of the better of each peer's two styles."""
    rates = {name: [one["requests"] / one["seconds"] for one in own] for name, own in runs.items()}
    rows = {}
    for name, own in runs.items():
        taken = [one for run in own for one in run["milliseconds"]]
        rows[name] = {
            "runs": len(own),
            "requests_per_second": summary(rates[name]),
            "p50_milliseconds": round(statistics.median(taken), 2),
            "p99_milliseconds": round(float(np.percentile(taken, 99)), 2),
            "failed": sum(one["failed"] for one in own),
        }
        for kind in peers(runs):
            best = better_style(kind, {one: statistics.median(own) for one, own in rates.items()})
            pairs = zip(rates[name], rates[best], strict=True)
            rows[name][f"over_{kind}"] = summary([mine / theirs for mine, theirs in pairs])
    return rows


def peers(names: Iterable[str]) -> list[str]:
    """Return the peers among the names of contestants."""
    return [kind for kind in PEERS if any(kind in name for name in names)]


def better_style(kind: str, rates: Mapping[str, float]) -> str:
    """Return the faster of a peer's two styles, by requests per second of every contestant."""
    return max((name for name in rates if kind in name), key=lambda name: rates[name])


def shown(contestants: Mapping[str, Row]) -> Row:
    """Return the row of a table about one load, with the better of the two styles of each peer."""
    row: Row = {}
    for kind in peers(contestants):
        medians = {name: own["requests_per_second"]["median"] for name, own in contestants.items()}
        best = contestants[better_style(kind, medians)]
        for column in ("requests_per_second", "p99_milliseconds"):
            row[f"{kind.replace(' ', '_')}_{column}"] = best[column]
    for mode in (word.split()[-1] for word in contestants if word.startswith("bertkit")):
        own = contestants[f"bertkit serve {mode}"]
        for column in ("requests_per_second", "p99_milliseconds"):
            row[f"bertkit_{mode}_{column}"] = own[column]
        for kind in peers(contestants):
            if kind.startswith(("transformers", "onnxruntime", f"openvino {mode}")):
                row[f"{mode}_over_{kind.replace(' ', '_')}"] = own[f"over_{kind}"]
    return row


def run(data: Path, folder: Path, settings: Settings) -> tuple[dict[str, Row], Row, Row]:
    """Run everything; return rows of the loads and of memory, and details."""
    start = read_pretrained(start_model())
    write_classifier(folder, start)
    texts = read_texts(data, start, settings.texts)
    write_graphs(folder, start, texts["mixed"])
    with ExitStack() as stack:
        contestants = {
            name: stack.enter_context(running(command, own, folder / f"{number}.log"))
            for number, (name, (command, own)) in enumerate(commands(folder).items())
        }
        rows = measure(contestants, texts, settings)
        memory = {
            name: {"resident_mebibytes": round(resident(contestant.process))}
            for name, contestant in contestants.items()
        }
    tokens = {
        name: summary([len(ids) + 2.0 for ids in start.tokenizer.encode_batch(own)])
        for name, own in texts.items()
    }
    return rows, memory, {"seconds_of_a_run": settings.seconds, "tokens_of_texts": tokens}


def main() -> None:
    """Measure and write two results files: the loads and the memory."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=Settings.repeats)
    parser.add_argument("--seconds", type=float, default=Settings.seconds)
    parser.add_argument("--quick", action="store_true", help="a second each, with --out")
    options = parser.parse_args()
    if options.quick and not options.out:
        parser.error("--quick needs --out: what it measures is no result")
    settings = replace(Settings(), repeats=options.repeats, seconds=options.seconds)
    with tempfile.TemporaryDirectory() as folder:
        rows, memory, details = run(
            data_folder(options.data), Path(folder), QUICK if options.quick else settings
        )
    table = {load: shown(contestants) for load, contestants in rows.items()}
    print(write_result("serving", table, {**details, "contestants": rows}, options.out))
    print(write_result("serving-memory", memory, folder=options.out))


if __name__ == "__main__":
    main()
