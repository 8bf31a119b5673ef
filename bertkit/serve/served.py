"""A model that is served: its name, what it can do, and its worker."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.pooling import read_pooling
from bertkit.model.start import Start, model_folder, model_name, read_start
from bertkit.predict.embedding import load_embedder
from bertkit.predict.load import is_tuned, load
from bertkit.predict.predictor import load_pretrained
from bertkit.predict.tasks import TaskPredictor
from bertkit.serve.alone import alone
from bertkit.serve.answers import ModelCard
from bertkit.serve.attention import AttentionMapsWork, AttentionWork
from bertkit.serve.batching import Worker
from bertkit.serve.limits import Limits
from bertkit.serve.metrics import Metrics
from bertkit.serve.pretrained import FillMask, Network, NextSentence
from bertkit.serve.works import EmbeddingWork, TaskWork
from bertkit.tokens.tokenizer import Tokenizer
from bertkit.training.devices import choose_device

NAME = re.compile(r"[\w.:-]+")
ROUTES = {
    "classify": "classify",
    "multi-label": "classify",
    "regress": "regress",
    "choose": "choose",
    "tag": "tag",
    "answer": "answer",
}
"""Kind of a tuned model -> the route that it serves."""


@dataclass(frozen=True)
class Served:
    """A model, loaded and at work."""

    name: str
    kind: str
    config: ModelConfig
    tokenizer: Tokenizer
    precision: str
    longest: int
    labels: tuple[str, ...]
    works: dict[str, Any]
    """Route -> what is done there."""
    worker: Worker
    loaded: int = field(default_factory=lambda: int(time.time()))
    """Seconds since 1970."""

    @property
    def card(self) -> ModelCard:
        """What /v1/models says of it."""
        return ModelCard(
            id=self.name,
            object="model",
            created=self.loaded,
            owned_by="bertkit",
            kind=self.kind,
            routes=sorted([*self.works, "pieces"]),
            labels=list(self.labels),
            precision=self.precision,
            longest=self.longest,
            layers=self.config.num_hidden_layers,
            heads=self.config.num_attention_heads,
        )


def load_models(
    models: Sequence[str],
    limits: Limits,
    metrics: Metrics,
    *,
    precision: str = "auto",
    device: str = "auto",
) -> dict[str, Served]:
    """Load models and start their workers.

    Args:
        models: folders, or NAME=FOLDER.
        limits: of each model's queue.
        metrics: are told of every batch.
        precision: "fp32", "bf16", "int8" or "auto".
        device: "auto", "cpu", "cuda", ...

    Raises:
        BertkitError: there is no model, a name is taken or no name, or a model cannot be loaded.
    """
    if not models:
        raise BertkitError("there is no model to serve; name at least one folder")
    named: dict[str, Path] = {}
    for given in models:
        name, path = split_name(given)
        if name in named:
            raise BertkitError(
                f"two models are called '{name}', {named[name]} and {path}; give one another name, "
                f"as in {name}-2={path}"
            )
        named[name] = path
    served: dict[str, Served] = {}
    for name, path in named.items():
        load_this = partial(load_model, name, path, limits, metrics, precision, device)
        loading = alone().compute(load_this)
        served[name] = load_this() if loading is None else loading.result()
    return served


def split_name(given: str) -> tuple[str, Path]:
    """The name and the folder of NAME=FOLDER, or of FOLDER; of a run, that of the run.

    Raises:
        BertkitError: the name has other characters than letters, digits and ._:-
    """
    name, equals, path = given.partition("=")
    if Path(given).exists():  # as in runs/lr=3e-5
        equals = ""
    folder = Path(path if equals else given)
    if not equals:
        name = model_name(folder.absolute())
    if not NAME.fullmatch(name):
        raise BertkitError(
            f"'{name}' cannot be a model's name; take letters, digits and ._:- as in mine={folder}"
        )
    return name, folder


def load_model(
    name: str, path: Path, limits: Limits, metrics: Metrics, precision: str, device: str
) -> Served:
    """Load one model.

    Raises:
        BertkitError: there is none, or it is damaged.
    """
    vectors = (path / "modules.json").is_file()  # a directory of sentence-transformers
    home = read_pooling(path)[0] if vectors else model_folder(path)
    start = read_start(home)
    if not vectors and is_tuned(home):
        predictor = load(home, device=device, precision=precision)
        assert isinstance(predictor, TaskPredictor)
        config, tokenizer = predictor.loaded[0].model.config, predictor.tokenizer
        kind, labels = predictor.task.kind, predictor.task.labels
        longest = getattr(predictor.task, "longest", config.max_position_embeddings)
        works: dict[str, Any] = {ROUTES[kind]: TaskWork(predictor)}
        mode = predictor.precision
        if kind == "answer":
            labels = ()
    else:
        embedder = load_embedder(path, device=device, precision=precision)
        works = {"embeddings": EmbeddingWork(embedder)}
        config, tokenizer, labels = embedder.encoder.config, embedder.tokenizer, ()
        kind, longest, mode = "encoder", embedder.longest, embedder.mode
        if not vectors and has_masks(start):
            kind = "pretrained"
            works |= pretraining_works(home, limits, precision, device)
    works["attention"] = one = AttentionWork(start)
    works["attention-maps"] = AttentionMapsWork(one)
    lanes = 2 if choose_device(device).type == "cpu" and torch.get_num_threads() > 1 else 1
    worker = Worker(name, limits, metrics, lanes)
    return Served(name, kind, config, tokenizer, mode, longest, tuple(labels), works, worker)


def has_masks(start: Start) -> bool:
    """Whether the weights have a head that guesses at masks, and learned to."""
    masked = any(name.startswith("cls.predictions.transform") for name in start.tensors)
    return masked and start.config.direction == "bidirectional"


def pretraining_works(folder: Path, limits: Limits, precision: str, device: str) -> dict[str, Any]:
    """What a pre-trained model's heads do."""
    predictor = load_pretrained(folder, device=device)
    network = Network(predictor, precision)
    works: dict[str, Any] = {"fill-mask": FillMask(network, limits.max_queue)}
    if predictor.model.nsp is not None and not predictor.order:
        works["next-sentence"] = NextSentence(network)
    return works
