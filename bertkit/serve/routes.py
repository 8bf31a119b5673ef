"""The routes of the server.

One for each task type, masks and next sentences, embeddings in OpenAI's format, tokens, attention,
models, health and metrics.
"""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Response

from bertkit.predict.predictors import tagged_text
from bertkit.predict.word_splitter import split_words_with_offsets
from bertkit.serve import schemas as answers
from bertkit.serve import schemas as bodies
from bertkit.serve.attention import MOST_PIECES, token_rows
from bertkit.serve.limits import CHARACTERS_OF_TOKEN, RefusedError, not_finite, too_many
from bertkit.serve.operations import (
    choice_examples,
    question_examples,
    text_examples,
    words_examples,
)
from bertkit.serve.schemas import (
    Attention,
    AttentionMaps,
    AttentionRequest,
    EmbeddingAnswer,
    EmbeddingRequest,
    ErrorAnswer,
    ModelCard,
    ModelList,
    Pieces,
    PiecesRequest,
    PredictionRequest,
    Predictions,
    State,
)
from bertkit.serve.service import Predicted, Service, request_size
from bertkit.tokenizer.wordpiece import PairEncoding

REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text}
    for status, text in {
        400: "The body is no JSON.",
        401: "The token is missing or wrong.",
        404: "There is no such model.",
        408: "The body did not come in time.",
        413: "The request is larger than the server takes.",
        422: "A field is missing, unknown or wrong; `param` names it.",
        429: "Too much waits for this model; `Retry-After` says when to come back.",
        503: "The deadline has passed, or the server is shutting down.",
    }.items()
}
"""What every route may answer instead."""


def run_route(found: Predicted, rows: list[Any]) -> dict[str, Any]:
    """The body of an answer."""
    return {
        "model": found.model.name,
        "predictions": rows,
        "usage": found.usage.model_dump(),
    }


def tuple_response(found: Predicted) -> dict[str, Any]:
    """The body of an answer whose predictions are tuples of names and values."""
    return run_route(found, [one._asdict() for one in found.result])


def task_routes(serving: Service) -> APIRouter:
    """Routes of tuned models."""
    routes = APIRouter(prefix="/v1", tags=["tasks"], responses=REFUSALS)

    @routes.post(
        "/classify",
        summary="Labels of texts or pairs of texts",
        response_model=Predictions[answers.LabelAnswer] | Predictions[answers.Labels],
    )
    async def classify(asked: PredictionRequest[bodies.Text]) -> Response:
        size = request_size(text for given in asked.inputs for text in (given.text, given.pair))
        found = await serving.predict("classify", asked.model, asked.inputs, size, text_examples)
        numbers = (1 + len(found.model.labels)) * len(asked.inputs)
        return await serving.respond(numbers, tuple_response, found)

    @routes.post(
        "/regress",
        summary="A number for texts or pairs of texts",
        response_model=Predictions[answers.NumberAnswer],
    )
    async def regress(asked: PredictionRequest[bodies.Text]) -> Response:
        size = request_size(text for given in asked.inputs for text in (given.text, given.pair))
        found = await serving.predict("regress", asked.model, asked.inputs, size, text_examples)
        return await serving.respond(len(asked.inputs), tuple_response, found)

    @routes.post(
        "/choose",
        summary="One of several ways to go on",
        response_model=Predictions[answers.Choice],
    )
    async def choose(asked: PredictionRequest[bodies.Choices]) -> Response:
        least = 3 * CHARACTERS_OF_TOKEN  # of each choice: [CLS] and twice [SEP]
        size = sum(
            request_size(one.choices) + len(one.choices) * (least + len(one.text))
            for one in asked.inputs
        )
        found = await serving.predict("choose", asked.model, asked.inputs, size, choice_examples)
        numbers = sum(2 + len(one.choices) for one in asked.inputs)
        return await serving.respond(numbers, tuple_response, found)

    @routes.post(
        "/tag", summary="Tags of words, and entities", response_model=Predictions[answers.Tagging]
    )
    async def tag(asked: PredictionRequest[bodies.Words]) -> Response:
        size = request_size(one.text for one in asked.inputs)
        size += sum(  # a word is at least a token
            max(CHARACTERS_OF_TOKEN, len(word)) for one in asked.inputs for word in one.words or ()
        )
        found = await serving.predict("tag", asked.model, asked.inputs, size, words_examples)
        words = sum(len(one.tags) for one in found.result)
        return await serving.respond(5 * words, tagging_body, found, asked)

    @routes.post(
        "/answer",
        summary="Answers to questions, found in contexts of any length",
        response_model=Predictions[answers.Answer],
    )
    async def answer_questions(asked: PredictionRequest[bodies.Question]) -> Response:
        size = request_size(text for one in asked.inputs for text in (one.question, one.context))
        found = await serving.predict("answer", asked.model, asked.inputs, size, question_examples)
        task = found.model.operations["answer"].predictor.task
        inputs, _ = found.prepared.content
        whole = [task.row(given, one) for given, one in zip(inputs, found.result, strict=True)]
        rows = [{name: row[name] for name in answers.Answer.model_fields} for row in whole]
        return await serving.respond(6 * len(rows), run_route, found, rows)

    return routes


def pretraining_routes(serving: Service) -> APIRouter:
    """Routes of models as they were pre-trained."""
    routes = APIRouter(prefix="/v1", tags=["pre-training"], responses=REFUSALS)

    @routes.post(
        "/fill-mask",
        summary="Guesses at each [MASK]",
        response_model=Predictions[list[list[answers.Candidate]]],
    )
    async def fill_mask(asked: PredictionRequest[bodies.Masked]) -> Response:
        size = request_size(given.text for given in asked.inputs)
        found = await serving.predict("fill-mask", asked.model, asked.inputs, size)
        guesses = sum(len(mask) for masks in found.result for mask in masks)
        return await serving.respond(2 * guesses, guesses_body, found)

    @routes.post(
        "/next-sentence",
        summary="Whether a text follows another",
        response_model=Predictions[answers.Follows],
    )
    async def next_sentence(asked: PredictionRequest[bodies.Following]) -> Response:
        size = request_size(text for one in asked.inputs for text in (one.text, one.following))
        found = await serving.predict("next-sentence", asked.model, asked.inputs, size)
        rows = [{"probability": one} for one in found.result]
        return await serving.respond(len(rows), run_route, found, rows)

    return routes


def tagging_body(found: Predicted, asked: PredictionRequest[bodies.Words]) -> dict[str, Any]:
    """The body of an answer with tags."""
    rows = []
    for one, given in zip(found.result, asked.inputs, strict=True):
        words, entities = tagged_text(one, *split_words_with_offsets(given.given))
        rows.append(
            {
                "words": [word._asdict() for word in words],
                "entities": [entity._asdict() for entity in entities],
            }
        )
    return run_route(found, rows)


def guesses_body(found: Predicted) -> dict[str, Any]:
    """The body of an answer with guesses at masks."""
    rows = [[[guess._asdict() for guess in mask] for mask in masks] for masks in found.result]
    return run_route(found, rows)


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def embedding_routes(serving: Service) -> APIRouter:
    """/v1/embeddings."""
    routes = APIRouter(prefix="/v1", tags=["embeddings"], responses=REFUSALS)

    @routes.post(
        "/embeddings", summary="Vectors of texts, as OpenAI's API", response_model=EmbeddingAnswer
    )
    async def embeddings(asked: EmbeddingRequest) -> Response:
        texts = embedding_texts(asked.input)
        size = sum(len(one) * (1 if isinstance(one, str) else CHARACTERS_OF_TOKEN) for one in texts)
        model = serving.find(asked.model, "embeddings")
        width = model.operations["embeddings"].embedder.width
        if asked.dimensions not in {None, width}:
            raise RefusedError(
                422,
                f"dimensions: '{model.name}' gives {width:,} numbers and was not trained to be "
                "shortened; leave the field out",
                "dimensions",
            )
        as_base64 = asked.encoding_format == "base64"
        serving.limits.check_answer(len(texts) * width // (2 if as_base64 else 1))
        found = await serving.predict("embeddings", model.name, texts, size)
        if not np.isfinite(found.result).all():
            raise not_finite()
        numbers = len(texts) if as_base64 else found.result.size
        tokens = found.prepared.tokens
        return await serving.respond(
            numbers, embedding_body, model.name, found.result, tokens, as_base64
        )

    return routes


def embedding_texts(given: Any) -> list[Any]:
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
        coded = list(vectors)
    data = [
        {"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(coded)
    ]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": model, "usage": usage}


def inspection_routes(serving: Service) -> APIRouter:
    """Pieces and attention."""
    routes = APIRouter(prefix="/v1", tags=["inside"], responses=REFUSALS)

    @routes.post("/pieces", summary="The pieces of a text or a pair", response_model=Pieces)
    async def pieces(asked: PiecesRequest) -> Response:
        model = serving.find(asked.model, "pieces")
        size = request_size((asked.text, asked.pair))
        if size > CHARACTERS_OF_TOKEN * MOST_PIECES:
            raise too_many(size // CHARACTERS_OF_TOKEN, MOST_PIECES)
        encode = model.operations["attention"].encode
        encoded = await serving.cut(size, encode, asked, MOST_PIECES, "pieces are given up to")

        def body() -> dict[str, Any]:
            return {"model": model.name, "pieces": token_rows(model.tokenizer, encoded)}

        return await serving.respond(6 * len(encoded.ids), body)

    @routes.post(
        "/attention",
        summary="What one head of one layer takes from where",
        response_model=Attention,
    )
    async def attention(asked: AttentionRequest) -> Response:
        size = request_size((asked.text, asked.pair))
        found = await serving.predict("attention", asked.model, asked, size)
        encoded = found.prepared.content.encoded

        def body() -> dict[str, Any]:
            place = {"layer": asked.layer, "head": asked.head}
            return {**inside_body(found, encoded), **place, "weights": found.result}

        return await serving.respond(found.result.size, body)

    @routes.post(
        "/attention-maps",
        summary="All heads of all layers, a byte a weight",
        response_model=AttentionMaps,
    )
    async def attention_maps(asked: PiecesRequest) -> Response:
        size = request_size((asked.text, asked.pair))
        found = await serving.predict("attention-maps", asked.model, asked, size)

        def body() -> dict[str, Any]:
            coded = base64.b64encode(found.result).decode()
            return {**inside_body(found, found.prepared.content), "weights": coded}

        return await serving.respond(len(found.result) // 6, body)

    return routes


def inside_body(found: Predicted, encoded: PairEncoding) -> dict[str, Any]:
    """What the answers on attention have in common."""
    model = found.model
    return {
        "model": model.name,
        "pieces": token_rows(model.tokenizer, encoded),
        "layers": model.config.num_hidden_layers,
        "heads": model.config.num_attention_heads,
    }


def model_routes(serving: Service, *, reloading: bool) -> APIRouter:
    """Which models there are.

    Args:
        serving: has them.
        reloading: whether clients may have their folders read again.
    """
    routes = APIRouter(prefix="/v1", tags=["models"], responses={401: REFUSALS[401]})

    @routes.get("/models", summary="All models", response_model=ModelList)
    async def models() -> Response:
        data = [model.card for model in serving.models.values()]
        return await serving.respond(len(data), dict, {"object": "list", "data": data})

    @routes.get(
        "/models/{name}",
        summary="One model",
        response_model=ModelCard,
        responses={404: REFUSALS[404]},
    )
    async def model(name: str) -> Response:
        return await serving.respond(1, dict, serving.find(name, "pieces").card)

    @routes.post(
        "/models/{name}/reload",
        summary="Read a model's folder again; the old model answers until the new one is there",
        response_model=ModelCard,
        responses={
            403: {"model": ErrorAnswer, "description": "The server asks for no token."},
            404: REFUSALS[404],
            409: {"model": ErrorAnswer, "description": "The model stays as it was."},
        },
    )
    async def reload(name: str) -> Response:
        if not reloading:
            raise RefusedError(
                403, "models are read again only where a token is asked for; see --token-file"
            )
        return await serving.respond(1, dict, (await serving.reload(name)).card)

    return routes


def state_routes(serving: Service) -> APIRouter:
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
