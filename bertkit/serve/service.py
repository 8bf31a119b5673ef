"""From a request's body to its predictions: find the model, cut the text, wait for the batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
from starlette.responses import Response

from bertkit.errors import BertkitError, nearest
from bertkit.serve.batching import PreparedRequest, compute_thread
from bertkit.serve.connections import Connections
from bertkit.serve.limits import CHARACTERS_OF_TOKEN, LOG, Limits, RefusedError, not_finite
from bertkit.serve.metrics import Metrics
from bertkit.serve.models import ServedModel, load_and_try
from bertkit.serve.schemas import Usage

Result = TypeVar("Result")


SHORT = 4096
"""Characters that are cut into pieces at once; a longer request goes to another thread. Handing
over takes about as long as cutting that many."""
SHORT_ANSWER = 256
"""Numbers and texts of an answer that is written at once."""
CUTTING_THREADS = 2

notes: ContextVar[dict[str, Any]] = ContextVar("notes")
"""What the log line of the request at work says besides time and status."""


class Predicted(NamedTuple):
    """The outcome of a request."""

    model: ServedModel
    result: Any
    prepared: PreparedRequest

    @property
    def usage(self) -> Usage:
        """What it took."""
        done = self.prepared
        return Usage(
            inputs=done.inputs, tokens=done.tokens, windowed=done.windowed, cut=done.cut or {}
        )


class Service:
    """All models of a server, and whether it takes requests.

    Args:
        models: by name.
        limits: what it takes on.
        metrics: are told of everything.
    """

    def __init__(self, models: Mapping[str, ServedModel], limits: Limits, metrics: Metrics) -> None:
        self.models, self.limits, self.metrics = dict(models), limits, metrics
        self.cutting = ThreadPoolExecutor(CUTTING_THREADS, thread_name_prefix="cutting")
        self.loading: dict[str, asyncio.Task[ServedModel]] = {}
        """Models that are read again, by name."""
        self.retiring: set[asyncio.Task[None]] = set()
        """Workers of models that were replaced, and still answer."""
        self.being_cut: list[tuple[Future[Any], int]] = []
        """With their characters; some are done, and some are waited for no more."""
        self.making = asyncio.Lock()
        """Held while a long answer is made."""
        self.connections = Connections(limits)
        self.unread = 0
        """Bytes of answers that are being sent."""
        self.draining = False
        """Whether only what was accepted is answered."""
        self.in_flight = 0
        """Requests that are at work or wait."""

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        alive = all(model.worker.alive for model in self.models.values())
        return alive and not self.draining

    def find(self, name: str | None, route: str) -> ServedModel:
        """The model that a request means.

        Args:
            name: as in the request.
            route: that it must serve.

        Raises:
            RefusedError: there is none, it serves other routes, or several could be meant.
        """
        able = [model.name for model in self.models.values() if offers(model, route)]
        if name is None:
            if len(able) == 1:
                return self.models[able[0]]
            which = f"one of {', '.join(sorted(able))}" if able else "no served model does this"
            raise RefusedError(422, f"model: say which; {which}", "model")
        model = self.models.get(name)
        if model is None:
            hint = nearest(name, self.models)
            raise RefusedError(
                404, f"model: no model is called '{shorten_client_text(name)}'{hint}", "model"
            )
        if not offers(model, route):
            own = ", ".join(f"/v1/{one}" for one in model.routes)
            raise RefusedError(
                422,
                f"model: '{name}' cannot do /v1/{route}, it serves {own}; models that can: "
                f"{', '.join(sorted(able)) or 'none'}",
                "model",
            )
        return model

    async def cut(
        self, characters: int, function: Callable[..., Result], *arguments: Any
    ) -> Result:
        """Call a function that cuts texts, in another thread if that is worth it.

        Raises:
            RefusedError: 429 where too many characters are being cut already.
        """
        if characters <= SHORT:
            return function(*arguments)
        self.being_cut = [(one, size) for one, size in self.being_cut if not one.done()]
        most = CHARACTERS_OF_TOKEN * self.limits.max_queue_tokens
        if self.being_cut and characters + sum(size for _, size in self.being_cut) > most:
            raise RefusedError(
                429, "other long texts are being cut; try again later", retry_after=1
            )
        future = self.cutting.submit(function, *arguments)
        self.being_cut.append((future, characters))
        return await asyncio.wrap_future(future)

    async def predict(
        self,
        route: str,
        name: str | None,
        asked: Any,
        characters: int,
        convert: Callable[[Any], Any] = lambda asked: asked,
    ) -> Predicted:
        """The predictions for a request.

        Args:
            route: under /v1/.
            name: of the model.
            asked: the request's inputs.
            characters: at least as many are cut; what is cut several times counts as often.
            convert: makes of them what the work's `prepare` takes.

        Raises:
            RefusedError: see `find`, `cut`, `Worker.ask` and `Worker.deadline`; or the package
                cannot read the inputs.
        """
        model = self.find(name, route)
        # before work is put into a request that is to be refused
        model.worker.check_room(max(1, characters // CHARACTERS_OF_TOKEN))
        work = model.operations[route]

        def prepare() -> PreparedRequest:
            try:
                return work.prepare(convert(asked))
            except BertkitError as error:
                raise as_problem(error) from error

        async with model.worker.deadline():
            prepared = await self.cut(characters, prepare)
            notes.get({}).update(model=model.name, inputs=prepared.inputs, tokens=prepared.tokens)
            result = await model.worker.ask(work, prepared)
        self.metrics.inputs.labels(model.name).inc(prepared.inputs)
        return Predicted(model, result, prepared)

    async def reload(self, name: str) -> ServedModel:
        """Read a model's folder again; the old model answers until the new one has been tried.

        It is done whether or not the client waits for it.

        Raises:
            RefusedError: 404 where there is no such model, 409 where it is being loaded already, or
                cannot be.
        """
        old = self.find(name, "pieces")
        if name in self.loading:
            raise RefusedError(409, f"'{name}' is being loaded already; ask again later")
        self.loading[name] = loading = asyncio.create_task(self._replace(old))
        loading.add_done_callback(lambda _: self.loading.pop(name))
        return await asyncio.shield(loading)

    async def _replace(self, old: ServedModel) -> ServedModel:
        while (future := compute_thread().compute(partial(load_and_try, old))) is None:
            await asyncio.sleep(0.01)
        try:
            new = await asyncio.wrap_future(future)
        except (BertkitError, OSError, MemoryError) as error:
            reason = str(error) or "there is too little memory for two of it"
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
        """An answer that may be long; other requests are taken while it is made.

        Long ones are made one at a time, since that takes several times their bytes.

        Args:
            size: about how many numbers and texts it has.
            make: gives its body.
            arguments: of `make`.

        Raises:
            RefusedError: 413 where it would be too large, 500 where a number in it is not finite.
        """
        self.limits.check_answer(size)
        if size <= SHORT_ANSWER:
            body = as_bytes(make(*arguments))
        else:
            async with self.making:
                body = await asyncio.to_thread(lambda: as_bytes(make(*arguments)))
        return Response(body, media_type="application/json")

    def close(self) -> None:
        """Answer what was accepted, and end all threads."""
        self.draining = True
        for model in self.models.values():
            model.worker.close()
        self.cutting.shutdown()


def as_bytes(body: dict[str, Any]) -> bytes:
    """JSON in UTF-8; half a surrogate pair, in a label say, is written as JSON escapes it.

    Arrays become lists one after the other, since lists of numbers take several times their memory.

    Raises:
        RefusedError: 500 where a number is not finite, which JSON does not have.
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


def offers(model: ServedModel, route: str) -> bool:
    """Whether a model serves a route; all tell of their pieces."""
    return route == "pieces" or route in model.operations


def shorten_client_text(text: str, most: int = 60) -> str:
    """A client's text for a message: short, and on one line."""
    return text[:most].encode("unicode_escape").decode()


def request_size(texts: Iterable[str | None]) -> int:
    """Characters of some texts."""
    return sum(len(text) for text in texts if text)


def as_problem(error: BertkitError) -> RefusedError:
    """A refusal by the package itself; its message begins with the input's place where known."""
    first = str(error).partition(":")[0]
    return RefusedError(422, str(error), first if first.startswith("inputs.") else None)
