"""The same classifier behind a FastAPI application, with another library.

With transformers and onnxruntime it is what a tutorial shows: a request has one text, which goes
through tokenizer, network and softmax. With `def`, FastAPI calls it in one of its threads; with
`async def`, in the event loop, one request after another. With OpenVINO it is what an expert would
write: requests that wait are combined into batches of similar lengths, which one or two callers
compute.

    python -m benchmarks.serving_peers transformers def MODEL PORT
    python -m benchmarks.serving_peers "openvino bf16" "2 callers" MODEL PORT
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel

from benchmarks.peers import padded


class Text(BaseModel):
    """A request with one text."""

    text: str


class Found(BaseModel):
    """The answer to a request."""

    label: str
    probability: float


def with_transformers(folder: Path) -> Callable[[str], Found]:
    """Return a classifier that computes with transformers' model, in fp32."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()

    @torch.inference_mode()
    def classify(text: str) -> Found:
        inputs = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
        chances = model(**inputs).logits.softmax(-1)[0]
        best = int(chances.argmax())
        return Found(label=model.config.id2label[best], probability=float(chances[best]))

    return classify


def with_onnxruntime(folder: Path) -> Callable[[str], Found]:
    """Return a classifier of the fused fp32 graph `model.onnx` beside the model directory."""
    from transformers import AutoTokenizer

    from benchmarks.exports import open_session

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    session = open_session(folder.with_suffix(".onnx"))
    labels = labels_of(folder)
    names = [given.name for given in session.get_inputs()]

    def classify(text: str) -> Found:
        inputs = tokenizer(text, truncation=True, max_length=512, return_tensors="np")
        feed = {name: inputs[name].astype(np.int64) for name in names}
        return most_probable(session.run(None, feed)[0][0], labels)

    return classify


def labels_of(folder: Path) -> dict[int, str]:
    """Return the label of each class."""
    config = json.loads((folder / "config.json").read_text())
    return {int(number): label for number, label in config["id2label"].items()}


def most_probable(logits: np.ndarray, labels: dict[int, str]) -> Found:
    """Return the label with the highest probability."""
    chances = np.exp(logits - logits.max())
    chances /= chances.sum()
    best = int(chances.argmax())
    return Found(label=labels[best], probability=float(chances[best]))


MOST_TOKENS = 1024
"""The maximum number of tokens of a batch, with padding."""
WAIT = 0.002
"""The seconds that a caller waits for more requests, if the last ones came together."""


class OpenVinoBatches:
    """Threads that each take their share of the waiting requests, as soon as they are free.

    They compute them in batches of similar lengths.

    Args:
        folder: the model directory; the graph is beside it (`benchmarks.serving.write_graphs`).
        kind: "openvino" and the precision.
        callers: the number of batches computed at the same time; they share the cores.
    """

    def __init__(self, folder: Path, kind: str, callers: int) -> None:
        from tokenizers import Tokenizer

        from benchmarks.peers import Model, Setting, with_openvino

        precision = kind.removeprefix("openvino ")
        path, options = json.loads((folder.parent / "openvino.json").read_text())[precision]
        model = Model(folder, "classification", precision, Path(path), options)
        threads = max(1, (os.cpu_count() or 1) // callers)
        self.forward = with_openvino(model, Setting(callers=callers, threads=threads)).forward
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.enable_truncation(512)
        self.labels, self.callers = labels_of(folder), callers
        self.waiting: SimpleQueue[tuple[str, asyncio.Future[Found]]] = SimpleQueue()
        for _ in range(callers):
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
            share = -(-(1 + self.waiting.qsize()) // self.callers)
            with suppress(Empty):  # another caller took the rest
                while len(taken) < share:
                    taken.append(self.waiting.get_nowait())
            together = len(taken) > 1
            futures = [future for _, future in taken]
            try:
                answers: list[Found] | Exception = self.answers([text for text, _ in taken])
            except Exception as error:
                answers = error
            futures[0].get_loop().call_soon_threadsafe(answer_all, futures, answers)

    def answers(self, texts: list[str]) -> list[Found]:
        """Return the answers to some texts."""
        ids = [np.array(one.ids) for one in self.tokenizer.encode_batch(texts)]
        found: list[Found | None] = [None] * len(texts)
        for batch in similar_lengths(ids):
            logits = self.forward(padded([(ids[i], len(ids[i])) for i in batch]))
            for i, one in zip(batch, logits, strict=True):
                found[i] = most_probable(one, self.labels)
        return [one for one in found if one is not None]


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


def answer_all(futures: list[asyncio.Future[Found]], answers: list[Found] | Exception) -> None:
    """Give every request that still waits its answer."""
    for number, future in enumerate(futures):
        if future.done():
            continue
        if isinstance(answers, Exception):
            future.set_exception(answers)
        else:
            future.set_result(answers[number])


KINDS = {"transformers": with_transformers, "onnxruntime": with_onnxruntime}


def make_app(kind: str, style: str, folder: Path) -> FastAPI:
    """Make the application."""
    app = FastAPI()
    if kind.startswith("openvino"):
        batches = OpenVinoBatches(folder, kind, int(style.split(maxsplit=1)[0]))

        @app.post("/classify")
        async def in_a_batch(asked: Text) -> Found:
            return await batches.classify(asked.text)

        return app

    classify = KINDS[kind](folder)
    if style == "def":

        @app.post("/classify")
        def in_a_thread(asked: Text) -> Found:
            return classify(asked.text)

    else:

        @app.post("/classify")
        async def in_the_loop(asked: Text) -> Found:
            return classify(asked.text)

    return app


def main() -> None:
    """Serve until stopped."""
    import uvicorn

    kind, style, folder, port = sys.argv[1:]
    app = make_app(kind, style, Path(folder))
    uvicorn.run(app, port=int(port), log_level="warning", access_log=False, timeout_keep_alive=75)


if __name__ == "__main__":
    main()
