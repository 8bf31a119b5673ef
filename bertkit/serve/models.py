"""Load the models to serve: each has a name, its operations by route, and a worker."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from bertkit.checkpoints.hub import parse_hub_name
from bertkit.checkpoints.pretrained import (
    PretrainedWeights,
    model_folder,
    model_name,
    read_pretrained,
    resolve_model,
)
from bertkit.checkpoints.sentence_transformers import TextPooling, is_embedder, read_pooling
from bertkit.errors import BertkitError
from bertkit.files import from_home
from bertkit.model.encoder import ModelConfig
from bertkit.predict.embeddings import Embedder, load_embedder
from bertkit.predict.load import is_tuned, load_predictor
from bertkit.predict.predictors import TaskPredictor
from bertkit.predict.pretrained import Predictor, load_pretrained
from bertkit.serve.attention import AttentionOperation
from bertkit.serve.batching import Worker, compute_thread
from bertkit.serve.limits import Limits
from bertkit.serve.metrics import Metrics
from bertkit.serve.operations import EmbeddingOperation, FillMask, NextSentence, TaskOperation
from bertkit.serve.schemas import Choices, Following, Masked, Question, Text, Words
from bertkit.tasks.spec import SPECS
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import choose_device

NAME = re.compile(r"[\w.:-]+")
ROUTES = {
    "classification": "classify",
    "multi-label-classification": "classify",
    "regression": "regress",
    "multiple-choice": "choose",
    "token-classification": "tag",
    "question-answering": "answer",
}
"""Task type of a fine-tuned model -> the route that it serves."""

SAMPLES: dict[str, Any] = {
    "classify": [Text(text="a")],
    "regress": [Text(text="a")],
    "choose": [Choices(text="a", choices=["b", "c"])],
    "tag": [Words(words=["a"], document=None)],
    "answer": [Question(question="a", context="a")],
    "fill-mask": [Masked(text="[MASK]", top=1)],
    "next-sentence": [Following(text="a", following="a")],
    "embeddings": ["a"],
}
"""Route -> a request that every model of this route can answer, unless it reads pairs of texts."""
PAIR = [Text(text="a", pair="a")]


@dataclass(frozen=True)
class ServedModel:
    """A loaded model and its running worker."""

    name: str
    task_type: str
    config: ModelConfig
    tokenizer: Tokenizer
    precision: str
    max_length: int
    labels: tuple[str, ...]
    operations: dict[str, Any]
    """Route -> its operation."""
    worker: Worker
    load_again: Callable[[], ServedModel]
    """Loads the model's folder again."""
    loaded: int = field(default_factory=lambda: int(time.time()))
    """The time of loading, in seconds since 1970."""

    @cached_property
    def routes(self) -> list[str]:
        """The routes that the model serves, sorted; every model serves "tokens"."""
        return sorted([*self.operations, "tokens"])

    @property
    def card(self) -> dict[str, Any]:
        """The model's entry in /v1/models; see `bertkit.serve.schemas.ModelCard`."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.loaded,
            "owned_by": "bertkit",
            "task_type": self.task_type,
            "routes": self.routes,
            "labels": list(self.labels),
            "precision": self.precision,
            "max_length": self.max_length,
            "layers": self.config.num_hidden_layers,
            "heads": self.config.num_attention_heads,
        }


def load_models(
    models: Sequence[str],
    limits: Limits,
    metrics: Metrics,
    *,
    precision: str = "auto",
    device: str = "auto",
) -> dict[str, ServedModel]:
    """Load models and start their workers.

    Args:
        models: folders or names on the hub, each as FOLDER or NAME=FOLDER.
        limits: the server's limits, among them those of each model's queue.
        metrics: the metrics that the workers update.
        precision: "fp32", "bf16", "int8" or "auto".
        device: "auto", "cpu", "cuda", ...

    Raises:
        BertkitError: no model is given, a name is invalid or used twice, or a model cannot be
            loaded.
    """
    if not models:
        raise BertkitError("there is no model to serve; give at least one folder")
    named: dict[str, Path] = {}
    for given in models:
        name, path = split_name(given)
        if name in named:
            raise BertkitError(
                f"two models are called '{name}', {named[name]} and {path}; give one a different "
                f"name, as in {name}-2={path}"
            )
        named[name] = path
    served: dict[str, ServedModel] = {}
    try:
        for name, path in named.items():
            load_this = partial(load_served_model, name, path, limits, metrics, precision, device)
            loading = compute_thread().compute(load_this)
            served[name] = load_this() if loading is None else loading.result()
    except BaseException:
        for model in served.values():
            model.worker.close(0)
        raise
    return served


def split_name(given: str) -> tuple[str, Path]:
    """Split NAME=FOLDER into both; for a bare FOLDER, the name is the folder's or the run's."""
    name, equals, path = given.partition("=")
    if Path(given).exists():  # as in runs/lr=3e-5
        equals = ""
    folder = Path(path if equals else given)
    if not equals:
        hub_name = None if folder.exists() else parse_hub_name(str(folder))
        whole = Path(os.path.abspath(folder))  # noqa: PTH100 (unlike absolute(), without "..")
        name = hub_name.repo.rpartition("/")[2] if hub_name else model_name(whole)
    if not NAME.fullmatch(name):
        raise BertkitError(
            f"'{name}' cannot be a model's name; use letters, digits and ._:- as in mine={folder}"
        )
    return name, folder


def load_served_model(
    name: str, given: Path, limits: Limits, metrics: Metrics, precision: str, device: str
) -> ServedModel:
    """Load one model and start its worker; the arguments are those of `load_models`."""
    path = resolve_model(given)
    if path == Path(from_home(given)):  # loaded again, it is never taken from the hub
        given = path.absolute()
    embeds = is_embedder(path)
    home = read_pooling(path)[0] if embeds else model_folder(path)
    start = read_pretrained(home)
    operations: dict[str, Any]
    if not embeds and is_tuned(home):
        predictor = load_predictor([home], device=device, precision=precision)
        config, tokenizer = predictor.loaded[0].model.config, predictor.tokenizer
        task_type = predictor.task.task_type
        labels = predictor.task.labels if SPECS[task_type].has_labels else ()
        max_length = getattr(predictor.task, "max_length", config.max_position_embeddings)
        operations = {ROUTES[task_type]: TaskOperation(predictor)}
        mode = predictor.precision
    else:
        if not embeds and has_masks(start):
            pretrained = load_pretrained(home, device=device, precision=precision)
            task_type, operations = "pretrained", pretrained_operations(pretrained, limits)
            embedder = shared_embedder(pretrained)
        else:
            task_type, operations = "encoder", {}
            embedder = load_embedder(path, device=device, precision=precision)
        operations["embeddings"] = EmbeddingOperation(embedder)
        config, tokenizer, labels = embedder.encoder.config, embedder.tokenizer, ()
        max_length, mode = embedder.max_length, embedder.mode
    operations["attention-maps"] = AttentionOperation(start)
    threads = 2 if choose_device(device).type == "cpu" and torch.get_num_threads() > 1 else 1
    worker = Worker(name, limits, metrics, threads)
    again = partial(load_served_model, name, given, limits, metrics, precision, device)
    return ServedModel(
        name, task_type, config, tokenizer, mode, max_length, labels, operations, worker, again
    )


def load_and_try(old: ServedModel) -> ServedModel:
    """Load a model's folder again and check that the new model answers a request for each head."""
    new = old.load_again()
    try:
        for route, sample in SAMPLES.items():
            if (operation := new.operations.get(route)) is not None:
                tuned = isinstance(operation, TaskOperation)
                asked = task_sample(operation.predictor, sample) if tuned else sample
                prepared = operation.prepare(asked)
                operation.run([prepared.content])
    except Exception as error:
        new.worker.close(0)
        raise BertkitError(f"{new.name} does not answer: {error}") from error
    return new


def task_sample(predictor: TaskPredictor, sample: Any) -> Any:
    """Return a sample with a second text if the model reads one with every text."""
    return PAIR if predictor.pairs else sample


def has_masks(start: PretrainedWeights) -> bool:
    """Whether the weights have a head for masked tokens; only bidirectional models qualify."""
    masked = any(name.startswith("mlm.") for name in start.tensors)
    return masked and start.config.direction == "bidirectional"


def shared_embedder(predictor: Predictor) -> Embedder:
    """Return an embedder that computes with the encoder of a pre-trained model, not with a copy."""
    encoder, tokenizer = predictor.model.encoder, predictor.tokenizer
    return Embedder(encoder, tokenizer, TextPooling(), predictor.device, predictor.precision)


def pretrained_operations(predictor: Predictor, limits: Limits) -> dict[str, Any]:
    """Return route -> operation for the heads of a pre-trained model."""
    operations: dict[str, Any] = {"fill-mask": FillMask(predictor, limits.max_queue_tokens)}
    if predictor.model.nsp is not None and not predictor.order:
        operations["next-sentence"] = NextSentence(predictor)
    return operations
