"""The same classifier behind the plainest FastAPI application, with transformers or onnxruntime.

What a tutorial shows: one text a request, tokenizer, network, softmax. With `def` FastAPI calls it
in one of its threads, with `async def` in the event loop, one request after the other.

    python -m benchmarks.serving_peers transformers def MODEL PORT
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fastapi import FastAPI
from pydantic import BaseModel


class Text(BaseModel):
    """A request."""

    text: str


class Found(BaseModel):
    """An answer."""

    label: str
    probability: float


def with_transformers(folder: Path) -> Callable[[str], Found]:
    """Their model, in fp32."""
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
    """The graph `model.onnx` beside the model directory, in fp32, fused by onnxruntime's tool."""
    import json

    from transformers import AutoTokenizer

    from benchmarks.exports import open_session

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    session = open_session(folder.with_suffix(".onnx"))
    config = json.loads((folder / "config.json").read_text())
    labels = {int(number): label for number, label in config["id2label"].items()}
    names = [given.name for given in session.get_inputs()]

    def classify(text: str) -> Found:
        inputs = tokenizer(text, truncation=True, max_length=512, return_tensors="np")
        feed = {name: inputs[name].astype(np.int64) for name in names}
        logits = session.run(None, feed)[0][0]
        chances = np.exp(logits - logits.max())
        chances /= chances.sum()
        best = int(chances.argmax())
        return Found(label=labels[best], probability=float(chances[best]))

    return classify


KINDS = {"transformers": with_transformers, "onnxruntime": with_onnxruntime}


def make_app(kind: str, style: str, folder: Path) -> FastAPI:
    """The application."""
    classify = KINDS[kind](folder)
    app = FastAPI()

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
