"""`bertkit serve` beside other servers of the same classifier, under load.

The others are the plainest ones, with transformers or onnxruntime, and, if OpenVINO is installed,
one that combines waiting requests into batches (`serving_peers.py`). Contestants are processes of
their own, all of them up all the time, and take turns. The clients are one process more: each sends
a request, waits for the answer, and sends the next one, over a plain socket, since they share the
machine with the server. Every contestant gets the same texts, one per request.

    python -m benchmarks.serving --data FOLDER
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.exports import (
    CALIBRATION,
    OPENVINO_TYPES,
    export_openvino,
    fast_modes,
    processor_name,
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
from benchmarks.tokenization import read_sentences
from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.tasks.classification import Classification

TASK = Classification(("no", "yes"))
SECONDS_TO_START = 120
CLIENTS = (1, 4, 32)
TEXTS = 512
LONGEST = 1600
"""The maximum number of characters of a text, so that no contestant truncates one."""

Row = dict[str, Any]


class Contestant(NamedTuple):
    """A running server."""

    process: int
    port: int
    path: str
    batched: bool
    """Whether a request is a list of inputs."""

    def body(self, text: str) -> bytes:
        """Return the body of a request with one text."""
        example: Any = {"text": text}
        return json.dumps({"inputs": [example]} if self.batched else example).encode()


# Servers ------------------------------------------------------------------------------------------


def commands(folder: Path) -> dict[str, list[str]]:
    """Return the command of each contestant without the port."""
    python, model = [sys.executable, "-m"], str(folder / "model")
    kinds = ["transformers", "onnxruntime", *openvino_kinds()]
    lines = {kind: [*python, "benchmarks.serving_peers", kind, model] for kind in kinds}
    for precision in fast_modes():
        options = ["--precision", precision, "--no-log-requests", "--port"]
        lines[f"bertkit {precision}"] = [*python, "bertkit", "serve", model, *options]
    return lines


def openvino_kinds() -> list[str]:
    """Return the kinds of OpenVINO, if it is installed: bf16 (or fp32 without it), and int8."""
    if not (installed("openvino") and installed("nncf")):
        return []
    return [f"openvino {precisions()[-1]}", "openvino int8 static"]


def write_models(folder: Path, start: PretrainedWeights, texts: Sequence[str]) -> None:
    """Write the classifier and its graphs; some of the texts calibrate the one in 8 bits."""
    torch.manual_seed(0)
    details = {"task": TASK.task_type, "labels": list(TASK.labels), "settings": TASK.settings()}
    tokenizer, plain = start.tokenizer, folder / "plain.onnx"
    save_model(folder / "model", start.build(TASK.build, keep_head=False).model, tokenizer, details)
    with silence():
        write_plain(folder / "model", "classification", plain)
        write_fused(folder / "model", plain, folder / "model.onnx")
    if not openvino_kinds():
        return
    inputs = []
    for ids in tokenizer.encode_batch(texts[:CALIBRATION]):
        text = np.array([tokenizer.cls_id, *ids, tokenizer.sep_id])
        inputs.append(padded([(text, len(text))]))
    paths = export_openvino(plain, folder, "serving", inputs)
    hint = {"INFERENCE_PRECISION_HINT": OPENVINO_TYPES[precisions()[-1]]}
    graphs = {precisions()[-1]: paths["fp32"], "int8 static": paths["int8 static"]}
    settings = {name: (str(path), hint) for name, path in graphs.items()}
    (folder / "openvino.json").write_text(json.dumps(settings))


@contextmanager
def running(name: str, command: Sequence[str], log: Path) -> Iterator[Contestant]:
    """Run a server for the duration of the block, which begins when it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    batched = name.startswith("bertkit")
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
        contestant.body("a text"),
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


def resident(process: int) -> float:
    """Return the resident memory of a process in MiB."""
    status = Path(f"/proc/{process}/status").read_text(encoding="ascii").splitlines()
    [size] = [line.split()[1] for line in status if line.startswith("VmRSS:")]
    return int(size) / 1024


# Clients ------------------------------------------------------------------------------------------


def request(path: str, body: bytes) -> bytes:
    """Return a request as bytes."""
    return (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def client(port: int, bodies: Sequence[bytes], turn: int, until: float) -> list[Any]:
    """Send requests until a time; return when each was sent and answered, and the status."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answers = []
    while (started := time.perf_counter()) < until:
        writer.write(bodies[turn % len(bodies)])
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        answers.append((started, time.perf_counter(), int(head.split(b" ", 2)[1])))
        turn += 1
    writer.close()
    return answers


async def clients_of(port: int, bodies: Sequence[bytes], count: int, seconds: float) -> Row:
    """Run clients; return requests answered in time, milliseconds of answers, and failures."""
    until = time.perf_counter() + seconds
    turns = [number * len(bodies) // count for number in range(count)]
    by_client = await asyncio.gather(*(client(port, bodies, turn, until) for turn in turns))
    answers = [answer for answers in by_client for answer in answers]
    good = [(start, end) for start, end, status in answers if status == 200]
    return {
        "rate": sum(end <= until for _, end in good) / seconds,
        "milliseconds": [1000 * (end - start) for start, end in good],
        "failed": len(answers) - len(good),
    }


def load(contestant: Contestant, texts: Sequence[str], clients: int, seconds: float) -> Row:
    """Put a server under the load of some clients; this runs in the process of the clients."""
    bodies = [request(contestant.path, contestant.body(text)) for text in texts]
    return asyncio.run(clients_of(contestant.port, bodies, clients, seconds))


# Measurement --------------------------------------------------------------------------------------


def read_texts(data: Path) -> dict[str, list[str]]:
    """Return texts by workload: "short" sentences, and "mixed", of which every fourth is longer."""
    texts = read_sentences(data / "wikipedia" / "wiki_AA.txt.xz", 2.0)
    sentences = [sentence for sentence in texts if 40 <= len(sentence) <= 250]
    longer = [" ".join(sentences[n : n + 4 + n % 11])[:LONGEST] for n in range(0, TEXTS, 4)]
    mixed = [longer[n // 4] if n % 4 == 0 else sentences[n] for n in range(TEXTS)]
    return {"short": sentences[:TEXTS], "mixed": mixed}


def measure(
    contestants: Mapping[str, Contestant],
    texts: Mapping[str, Sequence[str]],
    repeats: int,
    seconds: float,
) -> dict[str, Row]:
    """Measure all loads; return rows by workload and clients, such as "short, 32 clients"."""
    runs: dict[str, dict[str, list[Row]]] = {}
    with get_context("spawn").Pool(1) as pool:
        for repeat in range(-1, repeats):  # the first round warms up
            for workload, chosen in texts.items():
                for clients in CLIENTS:
                    for name, contestant in contestants.items():
                        long = seconds if repeat >= 0 else seconds / 4
                        row = pool.apply(load, (contestant, chosen, clients, long))
                        print(workload, clients, name, row["rate"], flush=True)
                        if repeat >= 0:
                            rows = runs.setdefault(f"{workload}, {clients} clients", {})
                            rows.setdefault(name, []).append(row)
    return {load_name: compared(rows) for load_name, rows in runs.items()}


def compared(runs: Mapping[str, Sequence[Row]]) -> Row:
    """Return the row of a load: rates and latencies, and bertkit's rates over those of peers."""
    rates = {name: [run["rate"] for run in rows] for name, rows in runs.items()}
    row: Row = {"failed": sum(run["failed"] for rows in runs.values() for run in rows)}
    for name, rows in runs.items():
        taken = [value for run in rows for value in run["milliseconds"]]
        column = name.replace(" ", "_")
        row[f"{column}_requests_per_second"] = summary(rates[name])
        row[f"{column}_p99_milliseconds"] = round(float(np.percentile(taken, 99)), 2)
    for mode in fast_modes():
        for name, other in rates.items():
            if name.startswith(("transformers", "onnxruntime", f"openvino {mode}")):
                pairs = zip(rates[f"bertkit {mode}"], other, strict=True)
                ratios = [ours / theirs for ours, theirs in pairs]
                row[f"{mode}_over_{name.replace(' ', '_')}"] = summary(ratios)
    return row


def main() -> None:
    """Measure and write two results files: the loads and the memory."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    start, texts = read_pretrained(start_model()), read_texts(data_folder(options.data))
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        write_models(folder, start, texts["mixed"])
        contestants = {
            name: stack.enter_context(running(name, command, folder / f"{name}.log"))
            for name, command in commands(folder).items()
        }
        rows = measure(contestants, texts, options.repeats, options.seconds)
        memory = {
            name: {"resident_mebibytes": round(resident(contestant.process))}
            for name, contestant in contestants.items()
        }
    details = {"seconds_of_a_run": options.seconds}
    print(write_result(processor_name("serving"), rows, details, options.out))
    print(write_result("serving-memory", memory, folder=options.out))


if __name__ == "__main__":
    main()
