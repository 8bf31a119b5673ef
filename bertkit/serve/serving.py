"""From a request's body to its predictions: find the model, cut the text, wait for the batch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from starlette.responses import Response

from bertkit.errors import BertkitError, nearest
from bertkit.serve.answers import Usage
from bertkit.serve.batching import Prepared
from bertkit.serve.limits import CHARACTERS_OF_TOKEN, Limits, RefusedError
from bertkit.serve.metrics import Metrics
from bertkit.serve.served import Served

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

    model: Served
    result: Any
    prepared: Prepared

    @property
    def usage(self) -> Usage:
        """What it took."""
        done = self.prepared
        return Usage(
            inputs=done.inputs, tokens=done.tokens, windowed=done.windowed, cut=done.cut or {}
        )


class Serving:
    """All models of a server, and whether it takes requests.

    Args:
        models: by name.
        limits: what it takes on.
        metrics: are told of everything.
    """

    def __init__(self, models: Mapping[str, Served], limits: Limits, metrics: Metrics) -> None:
        self.models, self.limits, self.metrics = dict(models), limits, metrics
        self.cutting = ThreadPoolExecutor(CUTTING_THREADS, thread_name_prefix="cutting")
        self.being_cut: list[tuple[Future[Any], int]] = []
        """With their characters; some are done, and some are waited for no more."""
        self.draining = False
        """Whether only what was accepted is answered."""
        self.in_flight = 0
        """Requests that are at work or wait."""

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        alive = all(model.worker.alive for model in self.models.values())
        return alive and not self.draining

    def find(self, name: str | None, route: str) -> Served:
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
            raise RefusedError(404, f"model: no model is called '{shortened(name)}'{hint}", "model")
        if not offers(model, route):
            own = ", ".join(f"/v1/{one}" for one in model.card.routes)
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
        most = CHARACTERS_OF_TOKEN * self.limits.max_queue
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
        work = model.works[route]

        def prepare() -> Prepared:
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

    def close(self) -> None:
        """Answer what was accepted, and end all threads."""
        self.draining = True
        for model in self.models.values():
            model.worker.close()
        self.cutting.shutdown()


async def as_response(size: int, make: Callable[..., dict[str, Any]], *arguments: Any) -> Response:
    """An answer that may be long; other requests are taken while it is made.

    Args:
        size: about how many numbers and texts it has.
        make: gives its body.
        arguments: of `make`.
    """

    def written() -> bytes:
        return json.dumps(make(*arguments), separators=(",", ":"), ensure_ascii=False).encode()

    body = written() if size <= SHORT_ANSWER else await asyncio.to_thread(written)
    return Response(body, media_type="application/json")


def offers(model: Served, route: str) -> bool:
    """Whether a model serves a route; all tell of their pieces."""
    return route == "pieces" or route in model.works


def shortened(text: str, most: int = 60) -> str:
    """A client's text for a message: short, and on one line."""
    return text[:most].encode("unicode_escape").decode()


def size_of(texts: Iterable[str | None]) -> int:
    """Characters of some texts."""
    return sum(len(text) for text in texts if text)


def as_problem(error: BertkitError) -> RefusedError:
    """A refusal by the package itself; its message begins with the input's place where known."""
    first = str(error).partition(":")[0]
    return RefusedError(422, str(error), first if first.startswith("inputs.") else None)
