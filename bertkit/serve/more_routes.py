"""The other routes: embeddings as OpenAI's, pieces, attention, models, health, metrics."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Response

from bertkit.serve.answers import (
    Attention,
    AttentionMaps,
    EmbeddingAnswer,
    ErrorAnswer,
    ModelCard,
    ModelList,
    Pieces,
    State,
)
from bertkit.serve.attention import MOST_PIECES, piece_rows, pieces_of
from bertkit.serve.bodies import AttentionRequest, EmbeddingRequest, PiecesRequest
from bertkit.serve.limits import CHARACTERS_OF_TOKEN, RefusedError, too_many
from bertkit.serve.routes import REFUSALS
from bertkit.serve.serving import Serving, as_response, size_of

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def embedding_routes(serving: Serving) -> APIRouter:
    """/v1/embeddings."""
    routes = APIRouter(prefix="/v1", tags=["embeddings"], responses=REFUSALS)

    @routes.post(
        "/embeddings", summary="Vectors of texts, as OpenAI's API", response_model=EmbeddingAnswer
    )
    async def embeddings(asked: EmbeddingRequest) -> Response:
        texts = texts_of(asked.input)
        size = sum(len(one) * (1 if isinstance(one, str) else CHARACTERS_OF_TOKEN) for one in texts)
        model = serving.find(asked.model, "embeddings")
        width = model.works["embeddings"].embedder.width
        if asked.dimensions not in {None, width}:
            raise RefusedError(
                422,
                f"dimensions: '{model.name}' gives {width:,} numbers and was not trained to be "
                "shortened; leave the field out",
                "dimensions",
            )
        found = await serving.predict("embeddings", model.name, texts, size)
        as_base64 = asked.encoding_format == "base64"
        numbers = len(texts) if as_base64 else found.result.size
        tokens = found.prepared.tokens
        return await as_response(
            numbers, embedding_body, model.name, found.result, tokens, as_base64
        )

    return routes


def texts_of(given: Any) -> list[Any]:
    """One text, or the ids of one, as a list of one."""
    alone = isinstance(given, str) or isinstance(given[0], int)
    return [given] if alone else given


def embedding_body(model: str, vectors: np.ndarray, tokens: int, as_base64: bool) -> dict[str, Any]:
    """The body of an answer.

    Args:
        model: its name.
        vectors: (texts, width) float32.
        tokens: of all texts.
        as_base64: little-endian float32 in base64, or numbers.
    """
    coded: list[Any]
    if as_base64:
        coded = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    else:
        coded = vectors.tolist()
    data = [
        {"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(coded)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def inside_routes(serving: Serving) -> APIRouter:
    """Pieces and attention."""
    routes = APIRouter(prefix="/v1", tags=["inside"], responses=REFUSALS)

    @routes.post("/pieces", summary="The pieces of a text or a pair", response_model=Pieces)
    async def pieces(asked: PiecesRequest) -> Response:
        model = serving.find(asked.model, "pieces")
        size = size_of((asked.text, asked.pair))
        if size > CHARACTERS_OF_TOKEN * MOST_PIECES:
            raise too_many(size // CHARACTERS_OF_TOKEN, MOST_PIECES)
        encode = model.works["attention"].encode
        encoded = await serving.cut(size, encode, asked, MOST_PIECES, "pieces are given up to")

        def body() -> dict[str, Any]:
            return {"model": model.name, "pieces": piece_rows(model.tokenizer, encoded)}

        return await as_response(6 * len(encoded.ids), body)

    @routes.post("/attention", summary="What one head of one layer takes from where")
    async def attention(asked: AttentionRequest) -> Attention:
        size = size_of((asked.text, asked.pair))
        found = await serving.predict("attention", asked.model, asked, size)
        model, encoded = found.model, found.prepared.content.encoded
        return Attention(
            model=model.name,
            pieces=pieces_of(model.tokenizer, encoded),
            layer=asked.layer,
            head=asked.head,
            layers=model.config.num_hidden_layers,
            heads=model.config.num_attention_heads,
            weights=found.result.tolist(),
        )

    @routes.post("/attention-maps", summary="All heads of all layers, a byte a weight")
    async def attention_maps(asked: PiecesRequest) -> AttentionMaps:
        size = size_of((asked.text, asked.pair))
        found = await serving.predict("attention-maps", asked.model, asked, size)
        model, weights = found.model, found.result
        coded = await asyncio.to_thread(base64.b64encode, weights)
        return AttentionMaps(
            model=model.name,
            pieces=pieces_of(model.tokenizer, found.prepared.content),
            layers=model.config.num_hidden_layers,
            heads=model.config.num_attention_heads,
            weights=coded.decode(),
        )

    return routes


def model_routes(serving: Serving) -> APIRouter:
    """Which models there are."""
    routes = APIRouter(prefix="/v1", tags=["models"], responses={401: REFUSALS[401]})

    @routes.get("/models", summary="All models")
    async def models() -> ModelList:
        return ModelList(object="list", data=[model.card for model in serving.models.values()])

    @routes.get("/models/{name}", summary="One model", responses={404: REFUSALS[404]})
    async def model(name: str) -> ModelCard:
        return serving.find(name, "pieces").card

    return routes


def state_routes(serving: Serving) -> APIRouter:
    """Health, readiness and metrics."""
    routes = APIRouter(tags=["server"])

    @routes.get("/health", summary="The process answers")
    async def health() -> State:
        return State(status="ok")

    @routes.get(
        "/ready",
        summary="Requests are taken",
        responses={503: {"model": ErrorAnswer, "description": "They are not."}},
    )
    async def ready() -> State:
        if not serving.ready:
            raise RefusedError(503, "the server takes no requests", retry_after=1)
        return State(status="ready")

    @routes.get(
        "/metrics",
        summary="For Prometheus",
        response_class=Response,
        responses={200: {"content": {METRICS_TYPE: {}}}, 401: REFUSALS[401]},
    )
    async def metrics() -> Response:
        return Response(serving.metrics.text(), media_type=METRICS_TYPE)

    return routes
