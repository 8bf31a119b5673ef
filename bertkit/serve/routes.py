"""The server's routes, with the bodies of their requests.

Values are not converted: 1 is not a text, and "3" is not a number. Validation of a list stops at
the first problem, since a body may have a million of them.
"""

from __future__ import annotations

import base64
from typing import Annotated, Any, Generic, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from bertkit.serve.admission import MAX_INPUTS, RefusedError
from bertkit.serve.models import Service
from bertkit.tasks.types import TASKS

Input = TypeVar("Input")


def check_input(value: Any) -> Any:
    """Check that an input is of a kind that `bertkit.load(...)(...)` can take."""
    if not isinstance(value, str | list | dict):
        raise ValueError("must be a text, a list or an object")
    return value


def check_texts(value: Any) -> list[str]:
    """Return a text, or a list of at most `MAX_INPUTS` texts, as a list."""
    texts = [value] if isinstance(value, str) else value
    right = isinstance(texts, list) and 1 <= len(texts) <= MAX_INPUTS
    if not right or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"must be a text or a list of 1 to {MAX_INPUTS:,} texts")
    return list(texts)


TaskInput = Annotated[
    Any,
    AfterValidator(check_input),
    Field(
        description="A text, a list such as [text, pair] or [question, context], or an object with "
        "the fields of the training data."
    ),
]


class Body(BaseModel):
    """A body, or a part of it, whose fields are all known."""

    model_config = ConfigDict(extra="forbid", strict=True)


class PredictionRequest(Body, Generic[Input]):
    """A request for predictions: one for each input."""

    model: str | None = Field(
        None, description="A name from /v1/models; optional if only one model serves the route."
    )
    inputs: list[Input] = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)


class Masked(Body):
    """A text with one or more masks."""

    text: str = Field(pattern=r"\[MASK\]", description="A text with at least one [MASK].")
    top: int = Field(5, ge=1, le=1000, description="The number of candidates for each mask.")


class Following(Body):
    """A text, and a second text that may or may not follow it."""

    text: str
    following: str


class TextRequest(Body):
    """A text or a pair of texts; `pair` is the second text."""

    model: str | None = None
    text: str
    pair: str | None = None


class EmbeddingRequest(BaseModel):
    """A request for embeddings, as in OpenAI's API; unknown fields are ignored."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    input: Annotated[Any, AfterValidator(check_texts)] = Field(
        description="A text or a list of texts; token ids are not accepted."
    )
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Must be the width of the model's vectors: they are not shortened."
    )


class Predictions(BaseModel):
    """One prediction for each input, in the order of the inputs.

    In `usage`, `tokens` counts the computed tokens with [CLS], [SEP] and overlaps of windows,
    `windowed` the inputs that needed several windows, and `cut` the inputs that lost something.
    """

    model: str
    predictions: list[Any]
    usage: dict[str, int | dict[str, int]]


class ErrorResponse(BaseModel):
    """The form of every error response; `param` is the field of the request that is meant."""

    error: dict[Literal["message", "type", "param"], str | None]


REFUSALS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorResponse, "description": "The request is refused; see `message`."},
    503: {"model": ErrorResponse, "description": "Try again after `Retry-After` seconds."},
}


def prediction_routes(service: Service) -> APIRouter:
    """Return a route for each task type, and those of pre-trained models."""
    routes = APIRouter(prefix="/v1", tags=["predictions"], responses=REFUSALS)
    bodies: dict[str, Any] = dict.fromkeys(TASKS, TaskInput)
    bodies |= {"fill-mask": Masked, "next-sentence": Following}

    def add(route: str, body: Any) -> None:
        async def predict(asked: Any) -> Response:
            inputs = [vars(item) if isinstance(item, Body) else item for item in asked.inputs]
            model, prepared, result = await service.predict(route, asked.model, inputs)

            def make() -> dict[str, Any]:
                usage = {
                    "inputs": prepared.inputs,
                    "tokens": prepared.tokens,
                    "windowed": prepared.windowed,
                    "cut": prepared.cut or {},
                }
                rows = model.operations[route].rows(prepared.content, result)
                return {"model": model.name, "predictions": rows, "usage": usage}

            return await service.respond(make, prepared.inputs)

        predict.__annotations__["asked"] = PredictionRequest[body]
        routes.post(f"/{route}", response_model=Predictions, name=route)(predict)

    for route, body in bodies.items():
        add(route, body)
    return routes


def embedding_routes(service: Service) -> APIRouter:
    """Return the route /v1/embeddings."""
    routes = APIRouter(prefix="/v1", tags=["embeddings"], responses=REFUSALS)

    @routes.post("/embeddings", summary="Embed texts, as in OpenAI's API")
    async def embeddings(asked: EmbeddingRequest) -> Response:
        model = service.find(asked.model, "embeddings")
        width = model.operations["embeddings"].embedder.width
        if asked.dimensions not in {None, width}:
            raise RefusedError(
                422,
                f"dimensions: '{model.name}' returns vectors of {width:,} numbers, which cannot "
                "be shortened; leave the field out",
                "dimensions",
            )
        _, prepared, vectors = await service.predict("embeddings", model.name, asked.input)

        def make() -> dict[str, Any]:
            coded = map(as_base64, vectors) if asked.encoding_format == "base64" else vectors
            return {
                "object": "list",
                "data": [
                    {"object": "embedding", "index": index, "embedding": vector}
                    for index, vector in enumerate(coded)
                ],
                "model": model.name,
                "usage": {"prompt_tokens": prepared.tokens, "total_tokens": prepared.tokens},
            }

        return await service.respond(make, prepared.inputs)

    return routes


def as_base64(vector: np.ndarray) -> str:
    """Return a vector as base64 of little-endian float32."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def inspection_routes(service: Service) -> APIRouter:
    """Return the routes for the tokens of a text or a pair, and for the attention of all heads."""
    routes = APIRouter(prefix="/v1", tags=["inspection"], responses=REFUSALS)

    def add(route: str) -> None:
        @routes.post(f"/{route}", name=route)
        async def inspect(asked: TextRequest) -> Response:
            inputs = [{"text": asked.text, "pair": asked.pair}]
            model, prepared, result = await service.predict(route, asked.model, inputs)

            def make() -> dict[str, Any]:
                [row] = model.operations[route].rows(prepared.content, result)
                return {"model": model.name, **row}

            return await service.respond(make, prepared.tokens)

    add("tokens")
    add("attention-maps")
    return routes


def model_routes(service: Service, *, reloading: bool) -> APIRouter:
    """Return the routes that list models and reload them."""
    routes = APIRouter(prefix="/v1", tags=["models"], responses=REFUSALS)

    @routes.get("/models", summary="List the models")
    async def models() -> Response:
        data = [model.card for model in service.models.values()]
        return await service.respond(lambda: {"object": "list", "data": data}, len(data))

    @routes.get("/models/{name}", summary="Describe one model")
    async def model(name: str) -> Response:
        return await service.respond(lambda: service.find(name, "tokens").card, 1)

    @routes.post(
        "/models/{name}/reload",
        summary="Reload a model from its folder; the old one answers until then",
    )
    async def reload(name: str) -> Response:
        if not reloading:
            raise RefusedError(
                403, "models can be reloaded only if the server has a token; see --token-file"
            )
        new = await service.reload(name)
        return await service.respond(lambda: new.card, 1)

    return routes


def state_routes(service: Service) -> APIRouter:
    """Return the routes for health, readiness and metrics."""
    routes = APIRouter(tags=["server"], responses=REFUSALS)

    @routes.get("/health", summary="Check that the process responds")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @routes.get("/ready", summary="Check that requests are accepted")
    async def ready() -> dict[str, str]:
        if not service.ready:
            raise RefusedError(503, "the server accepts no requests", retry_after=1)
        return {"status": "ready"}

    @routes.get("/metrics", summary="Return metrics for Prometheus", response_class=Response)
    async def metrics() -> Response:
        return Response(service.metrics_text(), media_type=CONTENT_TYPE_LATEST)

    return routes
