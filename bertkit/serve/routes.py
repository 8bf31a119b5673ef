"""The server's routes.

They cover each task type, masks and next sentences, embeddings in OpenAI's format, tokens,
attention, models, health and metrics.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from typing import Any

import numpy as np
from fastapi import APIRouter, Response

from bertkit.serve import schemas
from bertkit.serve.attention import MAX_TOKEN_ROWS, token_rows
from bertkit.serve.limits import CHARACTERS_OF_TOKEN, RefusedError, too_many
from bertkit.serve.schemas import PredictionRequest, Predictions
from bertkit.serve.service import Predicted, Service
from bertkit.tasks.classification import LabelPrediction, LabelSetPrediction
from bertkit.tasks.multiple_choice import ChoicePrediction
from bertkit.tasks.predictions import tagged_text
from bertkit.tasks.regression import ValuePrediction

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.ErrorAnswer, "description": text}
    for status, text in {
        400: "The body is not valid JSON.",
        401: "The token is missing or wrong.",
        404: "There is no such model.",
        408: "The body did not arrive in time.",
        413: "The request or its response is larger than the server allows.",
        422: "A field is missing, unknown or invalid; `param` names it.",
        429: "Too many tokens wait for this model; `Retry-After` says when to try again.",
        503: "The deadline has passed, or the server is shutting down.",
    }.items()
}
"""The error responses that every route may return."""


async def predictions(serving: Service, route: str, asked: PredictionRequest[Any]) -> Predicted:
    """Return the predictions for the inputs of a request."""
    size = sum(given.size for given in asked.inputs)
    return await serving.predict(route, asked.model, asked.inputs, size)


def predictions_body(found: Predicted, rows: Iterable[Any]) -> dict[str, Any]:
    """Return the body of a response with predictions, one row for each input."""
    done = found.prepared
    usage = {
        "inputs": done.inputs,
        "tokens": done.tokens,
        "windowed": done.windowed,
        "cut": done.cut or {},
    }
    return {"model": found.model.name, "predictions": list(rows), "usage": usage}


def task_routes(serving: Service) -> APIRouter:
    """Return the routes of fine-tuned models."""
    routes = APIRouter(prefix="/v1", tags=["tasks"], responses=REFUSALS)

    @routes.post(
        "/classify",
        summary="Classify texts or pairs of texts",
        response_model=Predictions[LabelPrediction] | Predictions[LabelSetPrediction],
    )
    async def classify(asked: PredictionRequest[schemas.Text]) -> Response:
        found = await predictions(serving, "classify", asked)
        numbers = (1 + len(found.model.labels)) * len(asked.inputs)
        rows = (one.to_dict() for one in found.result)
        return await serving.respond(numbers, predictions_body, found, rows)

    @routes.post(
        "/regress",
        summary="Predict a number for texts or pairs of texts",
        response_model=Predictions[ValuePrediction],
    )
    async def regress(asked: PredictionRequest[schemas.Text]) -> Response:
        found = await predictions(serving, "regress", asked)
        rows = (one.to_dict() for one in found.result)
        return await serving.respond(len(asked.inputs), predictions_body, found, rows)

    @routes.post(
        "/choose",
        summary="Choose the best of several choices",
        response_model=Predictions[ChoicePrediction],
    )
    async def choose(asked: PredictionRequest[schemas.Choices]) -> Response:
        found = await predictions(serving, "choose", asked)
        numbers = sum(2 + len(one.choices) for one in asked.inputs)
        rows = (one.to_dict() for one in found.result)
        return await serving.respond(numbers, predictions_body, found, rows)

    @routes.post(
        "/tag", summary="Tag words and find entities", response_model=Predictions[schemas.Tagging]
    )
    async def tag(asked: PredictionRequest[schemas.Words]) -> Response:
        found = await predictions(serving, "tag", asked)
        words, (inputs, _) = sum(len(one.tags) for one in found.result), found.prepared.content
        pairs = zip(found.result, inputs, strict=True)
        rows = (tagged_text(one, i.text, i.spans).to_dict() for one, i in pairs)
        return await serving.respond(5 * words, predictions_body, found, rows)

    @routes.post(
        "/answer",
        summary="Answer questions from contexts of any length",
        response_model=Predictions[schemas.Answer],
    )
    async def answer_questions(asked: PredictionRequest[schemas.Question]) -> Response:
        found = await predictions(serving, "answer", asked)
        task = found.model.operations["answer"].predictor.task
        inputs, _ = found.prepared.content
        whole = (task.row(given, one) for given, one in zip(inputs, found.result, strict=True))
        rows = ({name: row[name] for name in schemas.Answer.model_fields} for row in whole)
        return await serving.respond(6 * len(inputs), predictions_body, found, rows)

    return routes


def pretraining_routes(serving: Service) -> APIRouter:
    """Return the routes of pre-trained models that are not fine-tuned."""
    routes = APIRouter(prefix="/v1", tags=["pre-training"], responses=REFUSALS)

    @routes.post(
        "/fill-mask",
        summary="Predict the token behind each [MASK]",
        response_model=Predictions[list[list[schemas.Candidate]]],
    )
    async def fill_mask(asked: PredictionRequest[schemas.Masked]) -> Response:
        found = await predictions(serving, "fill-mask", asked)
        candidates = sum(len(mask) for masks in found.result for mask in masks)
        rows = ([[guess._asdict() for guess in mask] for mask in masks] for masks in found.result)
        return await serving.respond(2 * candidates, predictions_body, found, rows)

    @routes.post(
        "/next-sentence",
        summary="Predict whether one text follows another",
        response_model=Predictions[schemas.Follows],
    )
    async def next_sentence(asked: PredictionRequest[schemas.Following]) -> Response:
        found = await predictions(serving, "next-sentence", asked)
        rows = ({"probability": one} for one in found.result)
        return await serving.respond(len(asked.inputs), predictions_body, found, rows)

    return routes


def embedding_routes(serving: Service) -> APIRouter:
    """Return the route /v1/embeddings."""
    routes = APIRouter(prefix="/v1", tags=["embeddings"], responses=REFUSALS)

    @routes.post(
        "/embeddings",
        summary="Embed texts, as in OpenAI's API",
        response_model=schemas.EmbeddingAnswer,
    )
    async def embeddings(asked: schemas.EmbeddingRequest) -> Response:
        given: Any = asked.input  # one text or one list of ids is a list of one
        texts = [given] if isinstance(given, str) or isinstance(given[0], int) else given
        size = sum(len(one) * (1 if isinstance(one, str) else CHARACTERS_OF_TOKEN) for one in texts)
        model = serving.find(asked.model, "embeddings")
        width = model.operations["embeddings"].embedder.width
        if asked.dimensions not in {None, width}:
            raise RefusedError(
                422,
                f"dimensions: '{model.name}' returns vectors of {width:,} numbers, which cannot "
                "be shortened; leave the field out",
                "dimensions",
            )
        as_base64 = asked.encoding_format == "base64"
        serving.limits.check_answer(len(texts) * width // (2 if as_base64 else 1))
        found = await serving.predict("embeddings", model.name, texts, size)
        numbers = len(texts) if as_base64 else found.result.size
        tokens = found.prepared.tokens
        return await serving.respond(
            numbers, embedding_body, model.name, found.result, tokens, as_base64
        )

    return routes


def embedding_body(model: str, vectors: np.ndarray, tokens: int, as_base64: bool) -> dict[str, Any]:
    """Return the body of a response with embeddings."""
    coded: list[Any]
    if as_base64:
        coded = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors]
    else:
        coded = list(vectors)
    data = [
        {"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(coded)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def inspection_routes(serving: Service) -> APIRouter:
    """Return the routes for tokens and attention."""
    routes = APIRouter(prefix="/v1", tags=["inspection"], responses=REFUSALS)

    @routes.post("/tokens", summary="Tokenize a text or a pair", response_model=schemas.Tokens)
    async def tokens(asked: schemas.TokenizeRequest) -> Response:
        model = serving.find(asked.model, "tokens")
        size = len(asked.text) + len(asked.pair or "")
        if size > CHARACTERS_OF_TOKEN * MAX_TOKEN_ROWS:
            raise too_many(size // CHARACTERS_OF_TOKEN, MAX_TOKEN_ROWS)
        encode = model.operations["attention-maps"].encode
        encoded = await serving.tokenize(size, encode, asked, MAX_TOKEN_ROWS, "the limit is")

        def body() -> dict[str, Any]:
            return {"model": model.name, "tokens": token_rows(model.tokenizer, encoded)}

        return await serving.respond(6 * len(encoded.ids), body)

    @routes.post(
        "/attention-maps",
        summary="Compute the attention weights of all heads, one byte each",
        response_model=schemas.AttentionMaps,
    )
    async def attention_maps(asked: schemas.TokenizeRequest) -> Response:
        size = len(asked.text) + len(asked.pair or "")
        found = await serving.predict("attention-maps", asked.model, asked, size)

        def body() -> dict[str, Any]:
            coded = base64.b64encode(found.result).decode()
            return {
                "model": found.model.name,
                "tokens": token_rows(found.model.tokenizer, found.prepared.content),
                "layers": found.model.config.num_hidden_layers,
                "heads": found.model.config.num_attention_heads,
                "weights": coded,
            }

        return await serving.respond(len(found.result) // 6, body)

    return routes


def model_routes(serving: Service, *, reloading: bool) -> APIRouter:
    """Return the routes that list models and reload them."""
    routes = APIRouter(prefix="/v1", tags=["models"], responses={401: REFUSALS[401]})

    @routes.get("/models", summary="List the models", response_model=schemas.ModelList)
    async def models() -> Response:
        data = [model.card for model in serving.models.values()]
        return await serving.respond(len(data), dict, {"object": "list", "data": data})

    @routes.get(
        "/models/{name}",
        summary="Describe one model",
        response_model=schemas.ModelCard,
        responses={404: REFUSALS[404]},
    )
    async def model(name: str) -> Response:
        return await serving.respond(1, dict, serving.find(name, "tokens").card)

    @routes.post(
        "/models/{name}/reload",
        summary="Reload a model from its folder; the old one answers until then",
        response_model=schemas.ModelCard,
        responses={
            403: {
                "model": schemas.ErrorAnswer,
                "description": "The server was started without a token.",
            },
            404: REFUSALS[404],
            409: {"model": schemas.ErrorAnswer, "description": "The old model stays in use."},
        },
    )
    async def reload(name: str) -> Response:
        if not reloading:
            raise RefusedError(
                403, "models can be reloaded only if the server has a token; see --token-file"
            )
        return await serving.respond(1, dict, (await serving.reload(name)).card)

    return routes


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def state_routes(serving: Service) -> APIRouter:
    """Return the routes for health, readiness and metrics."""
    routes = APIRouter(tags=["server"])

    @routes.get("/health", summary="Check that the process responds")
    async def health() -> schemas.State:
        return schemas.State(status="ok")

    @routes.get(
        "/ready",
        summary="Check that requests are accepted",
        responses={
            503: {"model": schemas.ErrorAnswer, "description": "Requests are not accepted."}
        },
    )
    async def ready() -> schemas.State:
        if not serving.ready:
            raise RefusedError(503, "the server accepts no requests", retry_after=1)
        return schemas.State(status="ready")

    @routes.get(
        "/metrics",
        summary="Return metrics for Prometheus",
        response_class=Response,
        responses={200: {"content": {METRICS_TYPE: {}}}, 401: REFUSALS[401]},
    )
    async def metrics() -> Response:
        return Response(serving.metrics.text(), media_type=METRICS_TYPE)

    return routes
