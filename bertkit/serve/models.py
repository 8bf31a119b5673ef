"""Served models: load them, answer requests with them, and replace them while the server runs."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from starlette.responses import Response

from bertkit.checkpoints.pretrained import (
    PretrainedWeights,
    model_folder,
    read_pretrained,
    resolve_model,
)
from bertkit.checkpoints.sentence_transformers import TextPooling, is_embedder, read_pooling
from bertkit.errors import NOT_FINITE, BertkitError, nearest
from bertkit.files import from_home
from bertkit.predict.embeddings import Embedder, load_embedder
from bertkit.predict.load import load_predictor
from bertkit.predict.pretrained import load_pretrained
from bertkit.serve.admission import Limits, Metrics, RefusedError, not_finite, shorten
from bertkit.serve.batching import PreparedRequest, Worker, all_cores
from bertkit.serve.operations import (
    AttentionMaps,
    EmbeddingOperation,
    FillMask,
    NextSentence,
    TaskOperation,
    Tokens,
    refusal_of,
)
from bertkit.tasks.types import is_tuned, with_top
from bertkit.training.device import OUT_OF_MEMORY, choose_device

T = TypeVar("T")
NAME = re.compile(r"[\w.:-]+")
SHORT_TOKENS = 680
"""The estimated number of tokens up to which a request is tokenized in the event loop's thread.
Handing a longer one over to another thread takes about as long as tokenizing this many."""
SHORT_INPUTS = 16
"""The number of inputs up to which a response is encoded in the event loop's thread."""


@dataclass(frozen=True)
class ServedModel:
    """A loaded model and its running worker."""

    name: str
    operations: Mapping[str, Any]
    """Route -> its operation."""
    worker: Worker
    load_again: Callable[[], ServedModel]
    """Loads the model's folder again."""
    details: Mapping[str, Any]
    """The task type, labels, precision and sizes, as /v1/models shows them."""
    loaded: int = field(default_factory=lambda: int(time.time()))
    """The time of loading, in seconds since 1970."""

    @property
    def card(self) -> dict[str, Any]:
        """The model's entry in /v1/models; the first four fields are those of OpenAI's API."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.loaded,
            "owned_by": "bertkit",
            "routes": sorted(self.operations),
            **self.details,
        }


def load_models(
    models: Sequence[str],
    limits: Limits,
    metrics: Metrics,
    **options: Any,
) -> dict[str, ServedModel]:
    """Load models, each given as FOLDER or NAME=FOLDER, and start their workers."""
    if not models:
        raise BertkitError("there is no model to serve; give at least one folder")
    named: dict[str, str] = {}
    for name, path in map(split_name, models):
        if name in named:
            raise BertkitError(
                f"two models are called '{name}', {named[name]} and {path}; give one a different "
                f"name, as in {name}-2={path}"
            )
        named[name] = path
    served: dict[str, ServedModel] = {}
    try:
        for name, path in named.items():
            load_this = partial(load_served_model, name, path, limits, metrics, **options)
            loading = all_cores().compute(load_this)
            served[name] = load_this() if loading is None else loading.result()
    except BaseException:
        for model in served.values():
            model.worker.close(0)
        raise
    return served


def split_name(argument: str) -> tuple[str, str]:
    """Split NAME=FOLDER into both; for a bare FOLDER, the name is the folder's or the run's."""
    name, equals, path = argument.partition("=")
    if not equals or Path(argument).exists():  # as in runs/lr=3e-5
        path = argument
        folder = Path(os.path.abspath(path))  # noqa: PTH100 (without "..")
        name = folder.parent.name if folder.name == "model" else folder.name
    if not NAME.fullmatch(name):
        raise BertkitError(
            f"'{name}' cannot be a model's name; use letters, digits and ._:- as in mine={path}"
        )
    return name, path


def load_served_model(
    name: str,
    source: str,
    limits: Limits,
    metrics: Metrics,
    precision: str = "auto",
    device: str = "auto",
    top: int | None = None,
) -> ServedModel:
    """Load one model and start its worker; see `load_predictor` for the options."""
    path = resolve_model(source)
    if path == Path(from_home(source)):  # loaded again, it is never taken from the hub
        source = str(path.absolute())
    home = read_pooling(path)[0] if is_embedder(path) else model_folder(path)
    start = read_pretrained(home)
    if is_embedder(path) or not is_tuned(home):
        operations, details = text_operations(path, start, precision, device)
    else:
        operations, details = task_operations(home, start, precision, device, top)
    operations |= {"tokens": Tokens(start), "attention-maps": AttentionMaps(start)}
    details["layers"] = start.config.num_hidden_layers
    details["heads"] = start.config.num_attention_heads
    threads = 2 if choose_device(device).type == "cpu" and torch.get_num_threads() > 1 else 1
    worker = Worker(name, limits, metrics, threads)
    again = partial(load_served_model, name, source, limits, metrics, precision, device, top)
    return ServedModel(name, operations, worker, again, details)


def task_operations(
    home: Path, start: PretrainedWeights, precision: str, device: str, top: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a fine-tuned model; return the operation of its task, and its details."""
    predictor = load_predictor(home, device=device, precision=precision)
    if top is not None and hasattr(predictor.task, "top"):
        predictor.task = with_top(predictor.task, top)
    task = predictor.task
    return {task.task_type: TaskOperation(predictor)}, {
        "task_type": task.task_type,
        "labels": list(task.labels),
        "precision": predictor.precision,
        "max_length": getattr(task, "max_length", start.config.max_position_embeddings),
    }


def text_operations(
    path: Path, start: PretrainedWeights, precision: str, device: str
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Load a model that is not tuned; return embeddings, also masks and pairs, and its details."""
    operations: dict[str, Any] = {}
    masked = any(name.startswith("mlm.") for name in start.tensors)
    pretrained = masked and start.config.direction == "bidirectional" and not is_embedder(path)
    if pretrained:
        predictor = load_pretrained(path, device=device, precision=precision)
        operations["fill-mask"] = FillMask(predictor)
        if predictor.model.nsp is not None and not predictor.order:
            operations["next-sentence"] = NextSentence(predictor)
        embedder = Embedder(  # which computes with the same encoder, not with a copy
            *(predictor.model.encoder, predictor.tokenizer, TextPooling()),
            *(predictor.device, predictor.precision),
        )
    else:
        embedder = load_embedder(path, device=device, precision=precision)
    operations["embeddings"] = EmbeddingOperation(embedder)
    return operations, {
        "task_type": "pretrained" if pretrained else "encoder",
        "labels": [],
        "precision": embedder.mode,
        "max_length": embedder.max_length,
    }


class Service:
    """All models of a server."""

    def __init__(self, models: Mapping[str, ServedModel], limits: Limits, metrics: Metrics) -> None:
        self.models, self.limits, self.metrics = dict(models), limits, metrics
        self.pool = ThreadPoolExecutor(2, "texts")
        """Tokenizes long requests and encodes long responses."""
        self.loading: dict[str, asyncio.Task[ServedModel]] = {}
        """Name -> the task that reloads the model."""
        self.retiring: set[asyncio.Task[None]] = set()
        """Tasks that close the workers of replaced models after their last requests."""

    @property
    def ready(self) -> bool:
        """Whether every model can answer requests."""
        return all(model.worker.alive for model in self.models.values())

    def find(self, name: str | None, route: str) -> ServedModel:
        """Return the model for a request; its name may be omitted if only one serves the route."""
        able = sorted(model.name for model in self.models.values() if route in model.operations)
        if name is None:
            if len(able) == 1:
                return self.models[able[0]]
            which = f"send one of {', '.join(able)}" if able else "no model serves this route"
            raise RefusedError(422, f"model: no name was given; {which}", "model")
        if (model := self.models.get(name)) is None:
            message = f"model: no model is called '{shorten(name)}'"
            raise RefusedError(404, message + nearest(shorten(name), self.models), "model")
        if route not in model.operations:
            message = f"model: '{name}' does not serve /v1/{route}"
            raise RefusedError(422, f"{message}; models that do: {', '.join(able)}", "model")
        return model

    async def predict(
        self, route: str, name: str | None, inputs: Sequence[Any]
    ) -> tuple[ServedModel, PreparedRequest, Any]:
        """Return the model for a request, the prepared request, and the results."""
        model = self.find(name, route)
        operation = model.operations[route]
        check_unicode(inputs)
        tokens = operation.size(inputs)

        async def prepare() -> PreparedRequest:
            return await self.run_in_thread(
                partial(operation.prepare, inputs), tokens > SHORT_TOKENS
            )

        try:
            prepared, result = await model.worker.answer(operation, tokens, prepare)
        except BertkitError as error:
            if error.code == NOT_FINITE:
                raise not_finite() from error
            if error.code == OUT_OF_MEMORY:
                raise RefusedError(503, str(error), retry_after=1) from error
            raise refusal_of(error) from error
        self.metrics.inputs.labels(model.name).inc(prepared.inputs)
        return model, prepared, result

    async def respond(self, make: Callable[[], dict[str, Any]], inputs: int) -> Response:
        """Return a response as JSON, encoded in another thread for many inputs."""
        body = await self.run_in_thread(lambda: as_bytes(make()), inputs > SHORT_INPUTS)
        return Response(body, media_type="application/json")

    async def run_in_thread(self, function: Callable[[], T], long: bool) -> T:
        """Call a function, in another thread if it takes long."""
        if not long:
            return function()
        return await asyncio.get_running_loop().run_in_executor(self.pool, function)

    async def reload(self, name: str) -> ServedModel:
        """Reload a model, even if the client leaves; the old one answers until then."""
        old = self.find(name, "tokens")
        if name in self.loading:
            raise RefusedError(409, f"'{name}' is already being loaded; try again later")
        self.loading[name] = loading = asyncio.create_task(self._replace(old))
        loading.add_done_callback(lambda _: self.loading.pop(name))
        return await asyncio.shield(loading)

    async def _replace(self, old: ServedModel) -> ServedModel:
        while (future := all_cores().compute(old.load_again)) is None:
            await asyncio.sleep(0.01)
        try:
            new = await asyncio.wrap_future(future)
        except (BertkitError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            reason = str(error) or "there is too little memory for a second copy"
            raise RefusedError(
                409, f"'{old.name}' stays as it was, since its folder cannot be loaded: {reason}"
            ) from error
        self.models[old.name] = new
        retiring = asyncio.create_task(old.worker.retire())
        self.retiring.add(retiring)
        retiring.add_done_callback(self.retiring.discard)
        return new

    def metrics_text(self) -> bytes:
        """Return all metrics; the sizes of queues are read now, from the models that answer now."""
        for name, model in self.models.items():
            self.metrics.queue_requests.labels(name).set(len(model.worker.waiting))
            self.metrics.queue_tokens.labels(name).set(model.worker.admitted)
        return self.metrics.text()

    def close(self) -> None:
        """Answer the accepted requests, and stop all threads."""
        for model in self.models.values():
            model.worker.close()
        self.pool.shutdown()


def check_unicode(inputs: Sequence[Any]) -> None:
    """Refuse inputs with texts that UTF-8 cannot encode."""
    try:
        json.dumps(inputs, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        message = "a text contains half a surrogate pair, which is not a character"
        raise RefusedError(422, message) from None


def as_bytes(body: dict[str, Any]) -> bytes:
    """Return a body as JSON in UTF-8; half a surrogate pair, as in a label, is written escaped."""
    options: dict[str, Any] = {"ensure_ascii": False, "allow_nan": False}
    try:  # arrays become lists one at a time, since lists take several times their memory
        text = json.dumps(body, separators=(",", ":"), default=np.ndarray.tolist, **options)
    except ValueError:
        raise not_finite() from None
    return text.encode(errors="backslashreplace")
