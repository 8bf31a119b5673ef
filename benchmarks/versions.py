"""Two versions of bertkit against each other: is what a user waits for as fast as before?

Each workload is this script in a process of its own, with one of the two source trees. The trees
take turns, and a ratio is between the two runs of a pair. A run warms up, repeats its loop, and
reports the fastest repetition, which other programs disturb least.

    python -m benchmarks.versions --data FOLDER --before TREE --after TREE [--only WORKLOAD ...]
    python -m benchmarks.versions --data FOLDER --neighbour [--before TREE]

results/versions.json has the medians and their spread. With --neighbour trees are measured alone
and beside a busy core, with OpenMP's threads spinning and asleep: results/contention.json.
"""

from __future__ import annotations

import argparse
import csv
import json
import lzma
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.record import start_model, summary, write_result

RECIPE = """
model = { hidden_size = 256, num_hidden_layers = 4, num_attention_heads = 4 }
phases = { lengths = [128], steps = [16], batch_sizes = [16], max_predictions = [20] }
training = { warmup_steps = 2, precision = "fp32" }
[logging]
log_every = 4
evaluate_every = 1000
held_out_sequences = 64
checkpoint_every = 1000
"""
WARM_UPDATES, UPDATES = 4, 16
POLICIES = {"spin": {"GOMP_SPINCOUNT": "300000"}, "sleep": {"OMP_WAIT_POLICY": "PASSIVE"}}
"""How OpenMP's threads wait -> what makes them: for 3 ms, as by default, and as `bertkit` does."""
CONTENDED = ("inference fp32", "serving, 8 clients", "fine-tuning")
Result = dict[str, float]


class Folders(NamedTuple):
    """The folder of data sets, and the folder where a tree keeps what it has prepared."""

    data: Path
    work: Path

    def wikipedia(self, megabytes: float) -> str:
        """Return about so many megabytes of Wikipedia with its document marks."""
        with lzma.open(self.data / "wikipedia" / "wiki_AA.txt.xz", "rt", encoding="utf-8") as file:
            return file.read(int(megabytes * 1e6))

    def mixed(self, count: int) -> list[str]:
        """Return texts of one to about 300 tokens: lines without the marks, cut."""
        wikipedia = self.wikipedia(2).splitlines()
        lines = [line for line in wikipedia if line.strip("\n ")[:1] not in "<"]
        return [line[: 40 + 97 * number % 1200] for number, line in enumerate(lines[:count])]

    def examples(self, count: int) -> list[dict[str, str]]:
        """Return sentences of MRPC with labels, as rows for `finetune`."""
        path = self.data / "glue" / "MRPC" / "train.tsv"
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))[:count]
        return [{"text": row["#1 String"], "label": row["Quality"]} for row in rows]

    def classifier(self) -> Path:
        """Return a classifier, which is tuned for a moment if it is missing."""
        folder = self.work / "classifier"
        if not (folder / "model").is_dir():
            tune(self.examples(48), folder)
        return folder


def fastest(work: Callable[[Path], object], repeats: int = 3) -> Result:
    """Run once to warm up, then several times; return the least wall time, and its CPU time.

    The work gets a new path, where it may write.
    """
    times = []
    for _ in range(1 + repeats):
        with tempfile.TemporaryDirectory() as new:
            began, busy = time.perf_counter(), sum(os.times()[:4])
            work(Path(new) / "out")
            times.append((time.perf_counter() - began, sum(os.times()[:4]) - busy))
    (seconds, cpu), typical = min(times[1:]), statistics.median(seconds for seconds, _ in times[1:])
    return {"seconds": seconds, "cpu_seconds": cpu, "typical_seconds": typical}


def store(folders: Folders, processes: int) -> Result:
    """Prepare stores of Wikipedia's text."""
    from bertkit import prepare

    text, vocabulary = folders.work / "text.txt", start_model() / "vocab.txt"
    text.write_text(folders.wikipedia(16), encoding="utf-8")
    return fastest(lambda out: prepare([text], vocabulary, out, processes=processes), 2)


def pretraining(folders: Folders) -> Result:
    """Pre-train a small network; the time is that of the updates after the first ones."""
    from bertkit import prepare, pretrain

    recipe, text = folders.work / "recipe.toml", folders.work / "small.txt"
    recipe.write_text(RECIPE)
    if not (folders.work / "store" / "manifest.json").is_file():
        text.write_text(folders.wikipedia(2), encoding="utf-8")
        prepare([text], start_model() / "vocab.txt", folders.work / "store", processes=1)
    times: dict[int, tuple[float, float]] = {}

    def note(record: dict[str, Any]) -> None:
        if record["kind"] == "step":
            times[record["step"]] = time.perf_counter(), time.process_time()

    with tempfile.TemporaryDirectory() as new:
        out = Path(new) / "run"
        pretrain(recipe, folders.work / "store", out, device="cpu", on_record=note)
    (began, busy), (end, end_busy) = times[WARM_UPDATES], times[UPDATES]
    return {"seconds": end - began, "cpu_seconds": end_busy - busy}


def tune(rows: list[dict[str, str]], out: Path) -> None:
    """Fine-tune a classifier for an epoch, from its data to its directory."""
    from bertkit import FinetuneSettings, Grid, TrainingSettings, finetune

    settings = FinetuneSettings(
        grid=Grid(batch_size=(32,), learning_rate=(1e-4,), epochs=(1,)),
        training=TrainingSettings(precision="fp32"),
        device="cpu",
    )
    train, dev = rows[16:], rows[:16]
    finetune("classification", start_model(), out, train=train, dev=dev, settings=settings)


def finetuning(folders: Folders) -> Result:
    """Fine-tune on 128 texts."""
    rows = folders.examples(144)
    return fastest(lambda out: tune(rows, out), 2)


def inference(folders: Folders, precision: str) -> Result:
    """Classify 160 texts of mixed length."""
    from bertkit import load

    classify: Any = load(folders.classifier(), device="cpu", precision=precision)
    texts = folders.mixed(160)
    return fastest(lambda _: classify(texts))


def one_at_a_time(folders: Folders) -> Result:
    """Classify one text after the other; the time is the median of a call."""
    from bertkit import load

    classify: Any = load(folders.classifier(), device="cpu", precision="fp32")
    times = []
    for row in folders.examples(400):
        began = time.perf_counter()
        classify(row["text"])
        times.append(time.perf_counter() - began)
    return {"seconds": statistics.median(times[50:])}


def serving(folders: Folders, clients: int) -> Result:
    """Send requests to `bertkit serve`; the time is that of a thousand answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "bertkit", "serve", str(folders.classifier())]
    command += ["--port", str(port), "--precision", "fp32", "--no-log-requests"]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    bodies = [json.dumps({"inputs": [{"text": row["text"]}]}) for row in folders.examples(64)]
    try:
        for _ in range(600):
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                time.sleep(0.1)
        answer_rate(port, bodies, clients, 1)
        rates = [answer_rate(port, bodies, clients, 2) for _ in range(2)]
        return {"seconds": 1000 / max(rates)}
    finally:
        server.terminate()
        server.wait()


def answer_rate(port: int, bodies: list[str], clients: int, seconds: float) -> float:
    """Send requests by some clients at the same time; return the answers per second."""

    def client(end: float) -> int:
        connection, answers = HTTPConnection("127.0.0.1", port), 0
        headers = {"content-type": "application/json"}
        while time.perf_counter() < end:
            body = bodies[answers % len(bodies)]
            connection.request("POST", "/v1/classification", body, headers)
            response = connection.getresponse()
            response.read()
            assert response.status == 200, response.status
            answers += 1
        return answers

    with ThreadPoolExecutor(clients) as pool:
        began = time.perf_counter()
        answers = sum(pool.map(client, [began + seconds] * clients))
        return answers / (time.perf_counter() - began)


def start_up(_: Folders, arguments: list[str]) -> Result:
    """Start Python with some arguments."""
    command = [sys.executable, *arguments]
    return fastest(lambda _: subprocess.run(command, check=True, stdout=subprocess.DEVNULL), 10)


def workloads() -> dict[str, Callable[[Folders], Result]]:
    """Return the workloads of this processor by name; a time is of the whole loop or of one."""
    import torch

    able = torch.cpu.get_capabilities()
    precisions = ["fp32", *["bf16"] * bool(able.get("amx_bf16") or able.get("avx512_bf16"))]
    precisions += ["int8"] * bool(able.get("avx512_vnni"))
    return {
        "prepare": partial(store, processes=1),
        "prepare, 2 processes": partial(store, processes=2),
        "pre-training": pretraining,
        "fine-tuning": finetuning,
        **{f"inference {name}": partial(inference, precision=name) for name in precisions},
        "one at a time": one_at_a_time,
        "serving, 1 client": partial(serving, clients=1),
        "serving, 8 clients": partial(serving, clients=8),
        "import bertkit": partial(start_up, arguments=["-c", "import bertkit"]),
        "bertkit --help": partial(start_up, arguments=["-m", "bertkit", "--help"]),
    }


def run_once(workload: str, tree: Path, data: Path, work: Path, **variables: str) -> Result:
    """Run a workload of a tree in a process of its own, with some environment variables."""
    work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.versions", "--workload", workload]
    command += ["--data", str(data), "--work", str(work)]
    environment = {**os.environ, "PYTHONPATH": str(tree), "HF_HUB_OFFLINE": "1", **variables}
    done = subprocess.run(
        command, cwd=tree, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"error: {workload} of {tree} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compared(runs: list[list[Result]]) -> dict[str, Any]:
    """Return the row of a workload: the times of both trees, and their ratio pair by pair."""
    row: dict[str, Any] = {"pairs": len(runs)}
    for kind in ("seconds", "cpu_seconds"):
        if all(kind in run for run in runs[0]):
            ratios = [after[kind] / before[kind] for before, after in runs]
            row |= {f"{kind}_{name}": statistics.median(run[number][kind] for run in runs)
                    for number, name in enumerate(("before", "after"))}  # fmt: skip
            row[f"{kind}_after_over_before"] = summary(ratios)
    return row


def beside_neighbour(trees: list[Path], data: Path, work: Path, rounds: int) -> dict[str, Any]:
    """Return the seconds of some workloads alone and beside a busy core, by policy, in turns."""
    seconds: dict[tuple[str, str], dict[str, list[float]]] = {}
    cases = [(f"threads {policy}", trees[-1], env) for policy, env in POLICIES.items()]
    cases += [("before", tree, POLICIES["spin"]) for tree in trees[:-1]]
    for name in rounds * CONTENDED:
        for case, tree, variables in cases:
            for beside in ("alone", "beside_a_busy_core"):
                code = f"while {beside != 'alone'}: pass"
                with subprocess.Popen([sys.executable, "-c", code]) as neighbour:
                    try:
                        run = run_once(name, tree, data, work / tree.name, **variables)
                    finally:
                        neighbour.kill()
                times = seconds.setdefault((name, case), {}).setdefault(beside, [])
                times.append(run.get("typical_seconds", run["seconds"]))
                print(name, case, beside, times[-1], flush=True)
    rows: dict[str, Any] = {}
    for (name, case), times in seconds.items():
        row = {f"seconds_{beside}": summary(values) for beside, values in times.items()}
        alone, busy = (spread["median"] for spread in row.values())
        rows[f"{name}, {case}"] = {**row, "times_slower": round(busy / alone, 2)}
    return rows


def main() -> None:
    """Compare two trees; or, with --workload, run one workload in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=os.environ.get("BERTKIT_DATA"))
    parser.add_argument("--before", type=Path, help="the source tree to compare with")
    parser.add_argument("--after", type=Path, default=Path.cwd())
    parser.add_argument("--neighbour", action="store_true", help="measure beside a busy core")
    parser.add_argument("--only", nargs="+", default=list(workloads()), metavar="WORKLOAD")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--out", type=Path, help="the folder of results; by default results/")
    parser.add_argument("--work", type=Path, help="the folder for what is made once for a tree")
    parser.add_argument("--workload", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.workload:
        folders = Folders(options.data, options.work)
        print(json.dumps(workloads()[options.workload](folders)))
        return
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        work = (options.work or Path(temporary)).resolve()
        trees = [tree.resolve() for tree in (options.before, options.after) if tree]
        if options.neighbour:
            rows = beside_neighbour(trees, options.data, work, options.pairs)
            print(write_result("contention", rows, folder=options.out))
            return
        for name in options.only:
            runs = [
                [run_once(name, tree, options.data, work / tree.name) for tree in trees]
                for _ in range(1 + options.pairs)
            ]
            rows[name] = compared(runs[1:])  # the first pair makes what is made once
            print(name, json.dumps(rows[name]), flush=True)
    print(write_result("versions", rows, folder=options.out))


if __name__ == "__main__":
    main()
