"""Golden outputs: what every command computes, recorded before a refactoring and compared after it.

    python -m tests.tools.golden record runs/golden.json
    python -m tests.tools.golden compare runs/golden.json

The numbers depend on the processor and on the versions of the libraries, so the record belongs to
one machine and is not committed. Everything runs through the command line, with one thread.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from tests.conftest import WORDS, make_document

ROOT = Path(__file__).resolve().parents[2]
SMALL = [
    *("--model.hidden-size", "32", "--model.num-hidden-layers", "2"),
    *("--model.num-attention-heads", "2", "--model.max-position-embeddings", "64"),
    *("--phases.lengths", "32", "64", "--phases.steps", "12", "8", "--phases.batch-sizes", "8"),
    *("4", "--phases.max-predictions", "5", "10", "--training.warmup-steps", "2"),
    *("--training.learning-rate", "1e-3", "--training.precision", "fp32"),
    *("--logging.checkpoint-every", "5", "--logging.evaluate-every", "10"),
    *("--logging.held-out-sequences", "16", "--logging.log-every", "5"),
]
PRETRAINED = {
    "bert": [],
    "electra": ["--objectives.token", "rtd", "--objectives.pair", "single-segment"],
    "albert": [
        *("--model.share-layers", "--model.embedding-size", "16"),
        *("--objectives.pair", "sop"),
    ],
    "left-to-right": ["--objectives.token", "clm", "--objectives.pair", "none"],
}
"""The flags of each pre-trained network."""

TUNED: dict[str, list[str]] = {
    "classify": [
        *("classification", "--train", "labels.csv", "--dev", "labels.csv"),
        *("--test", "labels.csv"),
    ],
    "multi-label": [
        *("multi-label-classification", "--train", "many.csv", "--dev", "many.csv"),
        *("--label", "labels"),
    ],
    "regress": ["regression", "--train", "pairs.csv", "--dev", "pairs.csv", "--pair", "pair"],
    "choose": [
        *("multiple-choice", "--train", "choices.csv", "--dev", "choices.csv"),
        *("--choices", "a", "b", "c"),
    ],
    "tag": ["token-classification", "--train", "tags.txt", "--dev", "tags.txt"],
    "answer": ["question-answering", "--train", "questions.json", "--dev", "questions.json"],
}
"""Name -> the task type and the flags of a short run."""

ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "classify": ("classification", {"inputs": ["river stone bridge", {"text": "winter"}]}),
    "multi-label": ("multi-label-classification", {"inputs": ["silver meadow"]}),
    "regress": ("regression", {"inputs": [["river stone", "stone river"]]}),
    "choose": ("multiple-choice", {"inputs": [["river", ["stone", "kettle", "cotton"]]]}),
    "tag": ("token-classification", {"inputs": ["Sailor singing quickly."]}),
    "answer": (
        "question-answering",
        {"inputs": [["winter garden", "river winter garden letter " * 20]]},
    ),
    "bert": ("fill-mask", {"inputs": [{"text": "river [MASK] bridge", "top": 3}]}),
}
"""Model -> the route, and a request."""
OF_BERT: dict[str, dict[str, Any]] = {
    "next-sentence": {"inputs": [{"text": "River stone.", "following": "Bridge lantern."}]},
    "embeddings": {"input": ["river stone bridge", "winter"]},
    "tokens": {"text": "River stone, bridge."},
    "attention-maps": {"text": "river stone bridge"},
}
"""Route -> a request that the pre-trained network answers, too."""


def bertkit(folder: Path, *words: str, check: bool = True) -> str:
    """Run one command in a folder; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "bertkit", *words],
        cwd=folder,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if check and done.returncode:
        raise RuntimeError(f"bertkit {' '.join(words)}\n{done.stdout}{done.stderr}")
    return done.stdout


def environment() -> dict[str, str]:
    """Return variables for one thread and this checkout's package."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def digest(content: bytes) -> str:
    """Return a short checksum."""
    return hashlib.sha256(content).hexdigest()[:16]


def weights(folder: Path) -> str:
    """Return a checksum of the names, types, shapes and values of a model's weights."""
    whole = hashlib.sha256()
    for name, value in sorted(load_file(folder / "model.safetensors").items()):
        whole.update(f"{name} {value.dtype} {value.shape}".encode())
        whole.update(np.ascontiguousarray(value).tobytes())
    return whole.hexdigest()[:16]


def write_inputs(folder: Path) -> None:
    """Write text, and labelled data of every task type, all drawn from one seed."""
    rng = np.random.default_rng(1)
    documents = [make_document(rng, int(rng.integers(1, 30))) for _ in range(80)]
    (folder / "corpus.txt").write_text("\n\n".join(documents) + "\n")

    def words(least: int = 3, most: int = 9) -> list[str]:
        return [str(word) for word in rng.choice(WORDS, int(rng.integers(least, most)))]

    def table(name: str, header: str, row: Callable[[], list[str]], rows: int = 40) -> None:
        lines = [header, *(",".join(row()) for _ in range(rows))]
        (folder / name).write_text("\n".join(lines) + "\n")

    def labelled() -> list[str]:
        text = words()
        return [" ".join(text), "long" if len(text) > 5 else "short"]

    def several() -> list[str]:
        text = words()
        return [" ".join(text), "|".join(sorted({word[0] for word in text} & set("rswb")))]

    def scored() -> list[str]:
        one, other = words(), words()
        return [" ".join(one), " ".join(other), str(round(len(one) / len(other), 2))]

    table("labels.csv", "text,label", labelled)
    table("many.csv", "text,labels", several)
    table("pairs.csv", "text,pair,label", scored)
    table("choices.csv", "text,a,b,c,label", lambda: [*words(4, 5), str(rng.integers(0, 3))])
    tagged = [
        "\n".join(f"{word} {'B-X' if word in WORDS[:9] else 'O'}" for word in words())
        for _ in range(40)
    ]
    (folder / "tags.txt").write_text("\n\n".join(tagged) + "\n")
    (folder / "questions.json").write_text(json.dumps(squad([words(5, 50) for _ in range(40)])))


def squad(contexts: list[list[str]]) -> dict[str, Any]:
    """Return questions that repeat two words of their context; every fourth has no answer."""
    paragraphs = []
    for number, words in enumerate(contexts):
        text = " ".join(words)
        answer = {"text": words[-1], "answer_start": text.rindex(words[-1])}
        question = {
            "id": str(number),
            "question": " ".join(words[:2]),
            "is_impossible": number % 4 == 0,
            "answers": [] if number % 4 == 0 else [answer],
        }
        paragraphs.append({"context": text, "qas": [question]})
    return {"version": "v2.0", "data": [{"title": "t", "paragraphs": paragraphs}]}


def pretrain(folder: Path, name: str, flags: list[str]) -> dict[str, Any]:
    """Make twenty updates, which are killed once a checkpoint is there, and resumed."""
    words = ["pretrain", "tiny", "--store", "store", "--out", name, *SMALL, *flags]
    process = subprocess.Popen(
        [sys.executable, "-m", "bertkit", *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None and not [*folder.glob(f"{name}/checkpoints/step-*")]:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    bertkit(folder, *words)
    records = [json.loads(line) for line in (folder / name / "journal.jsonl").open()]
    losses = [
        {key: value for key, value in record.items() if "loss" in key or "accuracy" in key}
        for record in records
        if record["kind"] == "evaluation"
    ]
    return {"weights": weights(folder / name / "model"), "evaluations": losses}


def text_outputs(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the vocabulary, the clean text and the store."""
    bertkit(folder, "learn", "corpus.txt", "--out", "vocabulary", "--size", "150")
    yield "vocabulary", digest((folder / "vocabulary/vocab.txt").read_bytes())
    bertkit(folder, "clean", "corpus.txt", "--out", "clean.jsonl", "--near")
    yield "clean", digest((folder / "clean.jsonl").read_bytes())
    words = ["prepare", "corpus.txt", "--tokenizer", "vocabulary", "--out", "store"]
    bertkit(folder, *words, "--held-out", "0.2")
    arrays = sorted(folder.glob("store/**/*.npy"))
    yield "store", {str(path.relative_to(folder)): digest(path.read_bytes()) for path in arrays}


def task_outputs(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield weights, predictions and official files of each task type, and what is exported."""
    for name, flags in TUNED.items():
        words = ["finetune", *flags, "--model", "bert", "--out", f"tuned-{name}"]
        words += ["--epochs", "1", "--batch-size", "8", "--learning-rate", "5e-5"]
        bertkit(folder, *words, "--precision", "fp32")
        yield f"{name}: weights", weights(folder / f"tuned-{name}/model")
        source = flags[flags.index("--dev") + 1]
        columns = flags[flags.index("--dev") + 2 :]
        columns = columns[columns.index("--test") + 2 :] if "--test" in columns else columns
        command = ["predict", f"tuned-{name}/model", source, "--precision", "fp32", *columns]
        yield f"{name}: predictions", bertkit(folder, *command).splitlines()[:5]
        bertkit(folder, "export", f"tuned-{name}", "--to", "onnx", "--out", f"onnx-{name}")
        yield f"{name}: ONNX", logits(folder / f"onnx-{name}")
    for kind, file in (("features", "states.parquet"), ("embed", "vectors.npy")):
        options = ["--precision", "fp32", "--out", file]
        bertkit(folder, "predict", kind, "bert", "labels.csv", *options)
        yield kind, digest((folder / file).read_bytes())


def logits(folder: Path) -> dict[str, str]:
    """Return what onnxruntime makes of four tokens."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    inputs = {}
    for entry in session.get_inputs():
        shape = [1, *([3] if len(entry.shape) == 3 else []), 4]
        value = [[2, 7, 8, 3]] if entry.name == "input_ids" else [[1]]
        content = np.broadcast_to(np.array(value, np.int64), shape)
        is_segment = entry.name == "token_type_ids"
        inputs[entry.name] = np.zeros(shape, np.int64) if is_segment else content
    names = [output.name for output in session.get_outputs()]
    found = session.run(names, inputs)
    return {
        name: digest(np.asarray(value).tobytes()) for name, value in zip(names, found, strict=True)
    }


def served_outputs(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the answers of every route."""
    models = [f"bert={folder}/bert", *(f"{name}={folder}/tuned-{name}" for name in TUNED)]
    log = (folder / "server.log").open("w")
    server = subprocess.Popen(
        [sys.executable, "-m", "bertkit", "serve", *models, "--port", "0", "--precision", "fp32"],
        cwd=folder,
        env=environment(),
        stdout=log,
        stderr=subprocess.STDOUT,
    )
    try:
        address = ready(folder / "server.log")
        for model, (route, body) in ROUTES.items():
            yield f"/v1/{route} of {model}", ask(f"{address}/v1/{route}", {"model": model, **body})
        for route, body in OF_BERT.items():
            yield f"/v1/{route}", ask(f"{address}/v1/{route}", {"model": "bert", **body})
        cards = ask(f"{address}/v1/models", None)["data"]
        yield "/v1/models", [card | {"created": 0} for card in cards]
    finally:
        server.terminate()
        server.wait()


def ready(log: Path) -> str:
    """Return the address of a server once it says so."""
    for _ in range(600):
        for word in log.read_text().replace('"', " ").replace(",", " ").split():
            if word.startswith("http://127.0.0.1:"):
                return word.rstrip("/.;")
        time.sleep(0.1)
    raise RuntimeError(log.read_text())


def ask(address: str, body: Any) -> Any:
    """Return the JSON that a route answers; a refusal is an answer, too."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, data, headers), timeout=60
        ) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return json.load(error)


def outputs(folder: Path) -> dict[str, Any]:
    """Return everything by name."""
    write_inputs(folder)
    found: dict[str, Any] = {}

    def take(pairs: Iterator[tuple[str, Any]]) -> None:
        for name, value in pairs:
            found[name] = json.loads(json.dumps(value))
            print(name, flush=True)

    take(text_outputs(folder))
    take((f"pretrain {name}", pretrain(folder, name, flags)) for name, flags in PRETRAINED.items())
    take(task_outputs(folder))
    take(served_outputs(folder))
    return found


def main() -> None:
    """Record the outputs, or compare them and say what differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = outputs(Path(folder))
    if arguments.action == "record":
        arguments.file.parent.mkdir(parents=True, exist_ok=True)
        arguments.file.write_text(json.dumps(found, indent=1))
        return
    recorded = json.loads(arguments.file.read_text())
    differing = sorted(
        name for name in recorded.keys() | found.keys() if recorded.get(name) != found.get(name)
    )
    for name in differing:
        print(f"{name} differs:\n  was {recorded.get(name)}\n  is  {found.get(name)}")
    print(f"{len(found) - len(differing)} of {len(found)} outputs are equal")
    sys.exit(bool(differing))


if __name__ == "__main__":
    main()
