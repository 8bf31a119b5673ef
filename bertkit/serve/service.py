"""From a request to its predictions: find the model, tokenize the texts, wait for the batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from starlette.responses import Response

from bertkit.errors import NOT_FINITE, BertkitError, nearest
from bertkit.serve.batching import PreparedRequest, compute_thread
from bertkit.serve.connections import Connections
from bertkit.serve.limits import CHARACTERS_OF_TOKEN, LOG, Limits, RefusedError, not_finite
from bertkit.serve.metrics import Metrics
from bertkit.serve.models import ServedModel, load_and_try
from bertkit.training.memory import OUT_OF_MEMORY

Result = TypeVar("Result")
SHORT_TEXT = 4096
"""The maximum number of characters that are tokenized in the event loop's thread. A longer request
goes to another thread; handing it over takes about as long as tokenizing this many characters."""
SHORT_ANSWER = 256
"""The maximum count of numbers and texts of a response that is encoded in the event loop's
thread."""
TOKENIZING_THREADS = 2

notes: ContextVar[dict[str, Any]] = ContextVar("notes")
"""Fields that the current request adds to its log line."""


class Predicted(NamedTuple):
    """The predictions for a request."""

    model: ServedModel
    result: Any
    prepared: PreparedRequest


class Preparation:
    """Threads that convert requests to sequences, and the jobs that they have."""

    def __init__(self, threads: int, name: str) -> None:
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self.jobs: list[tuple[Future[Any], int]] = []
        """Jobs and their sizes in characters; some are done or no longer awaited."""

    async def run(
        self, size: int, most: int, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Call a function, unless other jobs leave too little room.

        Raises:
            RefusedError: all jobs together would be larger than `most`.
        """
        self.jobs = [(job, one) for job, one in self.jobs if not job.done()]
        if self.jobs and size + sum(one for _, one in self.jobs) > most:
            raise RefusedError(
                429, "other long texts are being read; try again later", retry_after=1
            )
        job = self.pool.submit(function, *arguments)
        self.jobs.append((job, size))
        return await asyncio.wrap_future(job)


class Service:
    """All models of a server and its state."""

    def __init__(self, models: Mapping[str, ServedModel], limits: Limits, metrics: Metrics) -> None:
        self.models, self.limits, self.metrics = dict(models), limits, metrics
        self.tokenizing = Preparation(TOKENIZING_THREADS, "tokenizing")
        self.loading: dict[str, asyncio.Task[ServedModel]] = {}
        """Name -> the task that reloads the model."""
        self.retiring: set[asyncio.Task[None]] = set()
        """Tasks that close the workers of replaced models after their last requests."""
        self.making = asyncio.Lock()
        """Held while a long response is encoded."""
        self.connections = Connections(limits)
        self.unread = 0
        """The number of bytes in the responses that are being sent."""
        self.draining = False
        """Whether the server is shutting down and answers only accepted requests."""
        self.in_flight = 0
        """The number of requests in progress or waiting."""

    @property
    def ready(self) -> bool:
        """Whether requests are accepted."""
        alive = all(model.worker.alive for model in self.models.values())
        return alive and not self.draining

    def find(self, name: str | None, route: str) -> ServedModel:
        """Return the model for a request."""
        able = [model.name for model in self.models.values() if route in model.routes]
        if name is None:
            if len(able) == 1:
                return self.models[able[0]]
            which = (
                f"send one of {', '.join(sorted(able))}" if able else "no model serves this route"
            )
            raise RefusedError(422, f"model: no name was given; {which}", "model")
        model = self.models.get(name)
        if model is None:
            hint = nearest(shorten_client_text(name), self.models)
            raise RefusedError(
                404, f"model: no model is called '{shorten_client_text(name)}'{hint}", "model"
            )
        if route not in model.routes:
            own = ", ".join(f"/v1/{one}" for one in model.routes)
            raise RefusedError(
                422,
                f"model: '{name}' does not serve /v1/{route}, only {own}; models that do: "
                f"{', '.join(sorted(able)) or 'none'}",
                "model",
            )
        return model

    async def tokenize(
        self, characters: int, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Call a function that tokenizes texts, in another thread for long texts."""
        if characters <= SHORT_TEXT:
            return function(*arguments)
        maximum = CHARACTERS_OF_TOKEN * self.limits.max_queue_tokens
        return await self.tokenizing.run(characters, maximum, function, *arguments)

    async def predict(
        self,
        route: str,
        name: str | None,
        asked: Any,
        characters: int,
    ) -> Predicted:
        """Return the predictions for a request.

        Args:
            route: the route's name without /v1/.
            name: the model's name; None if the request leaves it out.
            asked: the request's inputs.
            characters: a lower bound on the characters to tokenize, counted for every repetition.
        """
        model = self.find(name, route)
        # check early, before a request that will be refused costs work
        model.worker.check_room(max(1, characters // CHARACTERS_OF_TOKEN))
        work = model.operations[route]

        def prepare() -> PreparedRequest:
            try:
                return work.prepare(asked)
            except BertkitError as error:
                first = str(error).partition(":")[0]  # the input, if the message names one
                param = first if first.startswith("inputs.") else None
                raise RefusedError(422, str(error), param) from error

        async with model.worker.deadline():
            prepared = await self.tokenize(characters, prepare)
            notes.get({}).update(model=model.name, inputs=prepared.inputs, tokens=prepared.tokens)
            try:
                result = await model.worker.ask(work, prepared)
            except BertkitError as error:
                if error.code == NOT_FINITE:
                    raise not_finite() from error
                if error.code != OUT_OF_MEMORY:
                    raise
                raise RefusedError(503, str(error), retry_after=1) from error
        self.metrics.inputs.labels(model.name).inc(prepared.inputs)
        return Predicted(model, result, prepared)

    async def reload(self, name: str) -> ServedModel:
        """Reload a model from its folder; the old model answers until the new one has been tested.

        The reload continues even if the client disconnects.
        """
        old = self.find(name, "tokens")
        if name in self.loading:
            raise RefusedError(409, f"'{name}' is already being loaded; try again later")
        self.loading[name] = loading = asyncio.create_task(self._replace(old))
        loading.add_done_callback(lambda _: self.loading.pop(name))
        return await asyncio.shield(loading)

    async def _replace(self, old: ServedModel) -> ServedModel:
        while (future := compute_thread().compute(partial(load_and_try, old))) is None:
            await asyncio.sleep(0.01)
        try:
            new = await asyncio.wrap_future(future)
        except (BertkitError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            reason = str(error) or "there is too little memory for a second copy"
            LOG.warning("model not loaded", extra={"fields": {"model": old.name, "error": reason}})
            raise RefusedError(
                409, f"'{old.name}' stays as it was, since its folder cannot be loaded: {reason}"
            ) from error
        self.models[old.name] = new
        LOG.info("model loaded", extra={"fields": {"model": old.name}})
        retiring = asyncio.create_task(old.worker.retire())
        self.retiring.add(retiring)
        retiring.add_done_callback(self.retiring.discard)
        return new

    async def respond(
        self, size: int, make: Callable[..., dict[str, Any]], *arguments: Any
    ) -> Response:
        """Return a JSON response; a long one is encoded in another thread.

        Long responses are encoded one at a time, since that takes several times their bytes.
        """
        self.limits.check_answer(size)
        if size <= SHORT_ANSWER:
            body = as_bytes(make(*arguments))
        else:
            await self.making.acquire()
            encoding = asyncio.ensure_future(asyncio.to_thread(lambda: as_bytes(make(*arguments))))
            encoding.add_done_callback(self._encoded)
            body = await asyncio.shield(encoding)  # the thread goes on even if the client is gone
        return Response(body, media_type="application/json")

    def _encoded(self, encoding: asyncio.Future[bytes]) -> None:
        """Let the next long response be encoded."""
        self.making.release()
        if not encoding.cancelled():
            encoding.exception()  # asyncio would log the error of one that nobody awaits

    def close(self) -> None:
        """Answer the accepted requests, and stop all threads."""
        self.draining = True
        for model in self.models.values():
            model.worker.close()
        self.tokenizing.pool.shutdown()


def as_bytes(body: dict[str, Any]) -> bytes:
    """Return a body as JSON in UTF-8; half a surrogate pair, as in a label, is written escaped.

    Arrays become lists one at a time, since lists of numbers take several times their memory.
    """
    try:
        text = json.dumps(
            body,
            separators=(",", ":"),
            ensure_ascii=False,
            allow_nan=False,
            default=np.ndarray.tolist,
        )
    except ValueError:
        raise not_finite() from None
    return text.encode(errors="backslashreplace")


def shorten_client_text(text: str) -> str:
    """Return a client's text shortened and escaped to one line, for use in a message."""
    return text[:60].encode("unicode_escape").decode()
