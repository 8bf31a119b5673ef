"""The same classifier behind a FastAPI application, with another library.

With transformers and onnxruntime it is what a tutorial shows: a request has one text, which goes
through tokenizer, network and softmax in the event loop. With OpenVINO it is what an expert would
write: requests that wait are combined into batches of similar lengths.

    python -m benchmarks.serving_peers transformers MODEL PORT
    python -m benchmarks.serving_peers "openvino bf16" MODEL PORT
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.peers import Model, Setting, padded, with_onnxruntime, with_openvino

MOST_TOKENS = 1024
"""The maximum number of tokens of a batch, with padding."""
WAIT = 0.002
"""The seconds that the next batch waits for more requests, if the last ones came together."""


class Text(BaseModel):
    """A request with one text."""

    text: str


class Found(BaseModel):
    """The answer to a request."""

    label: str
    probability: float


Classify = Callable[[Sequence[str]], list[Found]]


def with_transformers(folder: Path) -> Classify:
    """Return a classifier that computes with transformers' model, in fp32."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    @torch.inference_mode()
    def classify(texts: Sequence[str]) -> list[Found]:
        inputs = tokenizer(list(texts), truncation=True, max_length=512, return_tensors="pt")
        return [most_probable(row.numpy(), model.config.id2label) for row in model(**inputs).logits]

    return classify


def with_graph(folder: Path, kind: str) -> Classify:
    """Return a classifier of a graph beside the model directory (`serving.write_models`)."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(512)
    config = json.loads((folder / "config.json").read_text())
    labels = {int(number): label for number, label in config["id2label"].items()}
    setting = Setting(threads=os.cpu_count() or 1)
    library, _, precision = kind.partition(" ")
    if library == "openvino":
        path, options = json.loads((folder.parent / "openvino.json").read_text())[precision]
        model = Model(folder, "classification", precision, Path(path), options)
        forward = with_openvino(model, setting).forward
    else:
        path = folder.with_suffix(".onnx")
        forward = with_onnxruntime(Model(folder, "classification", "fp32", path), setting).forward

    def classify(texts: Sequence[str]) -> list[Found]:
        ids = [np.array(encoding.ids) for encoding in tokenizer.encode_batch(list(texts))]
        answers: dict[int, Found] = {}
        for batch in similar_lengths(ids):
            logits = forward(padded([(ids[i], len(ids[i])) for i in batch]))
            answers |= {i: most_probable(row, labels) for i, row in zip(batch, logits, strict=True)}
        return [answers[i] for i in range(len(texts))]

    return classify


def most_probable(logits: np.ndarray, labels: dict[int, str]) -> Found:
    """Return the label with the highest probability."""
    chances = np.exp(logits - logits.max())
    chances /= chances.sum()
    best = int(chances.argmax())
    return Found(label=labels[best], probability=float(chances[best]))


def similar_lengths(ids: Sequence[np.ndarray]) -> Iterator[list[int]]:
    """Yield batches of indices, sorted by length, of at most `MOST_TOKENS` tokens with padding."""
    batch: list[int] = []
    for i in sorted(range(len(ids)), key=lambda i: len(ids[i])):
        if batch and (1 + len(batch)) * len(ids[i]) > MOST_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


class Batches:
    """A thread that computes all waiting requests together, as soon as it is free."""

    def __init__(self, classify: Classify) -> None:
        self.compute = classify
        self.waiting: SimpleQueue[tuple[str, asyncio.Future[Found]]] = SimpleQueue()
        Thread(target=self.work, daemon=True).start()

    async def classify(self, text: str) -> Found:
        """Return the answer to a request, once its batch is computed."""
        future: asyncio.Future[Found] = asyncio.get_running_loop().create_future()
        self.waiting.put((text, future))
        return await future

    def work(self) -> None:
        """Compute waiting requests forever."""
        together = False
        while True:
            taken = [self.waiting.get()]
            if together:
                time.sleep(WAIT)
            try:
                while True:
                    taken.append(self.waiting.get_nowait())
            except Empty:
                together = len(taken) > 1
            answers = self.compute([text for text, _ in taken])
            futures = [future for _, future in taken]
            futures[0].get_loop().call_soon_threadsafe(answer_all, futures, answers)


def answer_all(futures: list[asyncio.Future[Found]], answers: list[Found]) -> None:
    """Give every request that still waits its answer."""
    for future, answer in zip(futures, answers, strict=True):
        if not future.done():
            future.set_result(answer)


def make_app(kind: str, folder: Path) -> FastAPI:
    """Make the application."""
    app = FastAPI()
    compute = with_transformers(folder) if kind == "transformers" else with_graph(folder, kind)
    batches = Batches(compute) if kind.startswith("openvino") else None

    @app.post("/classify")
    async def classify(asked: Text) -> Found:
        return await batches.classify(asked.text) if batches else compute([asked.text])[0]

    return app


def main() -> None:
    """Serve until stopped."""
    import uvicorn

    kind, folder, port = sys.argv[1:]
    app = make_app(kind, Path(folder))
    uvicorn.run(app, port=int(port), log_level="warning", access_log=False, timeout_keep_alive=75)


if __name__ == "__main__":
    main()
