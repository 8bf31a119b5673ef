"""The routes of every head: classify, regress, choose, tag, answer, fill-mask, next-sentence."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Response

from bertkit.predict.tasks import tagging
from bertkit.predict.words import words_of
from bertkit.serve import answers, bodies
from bertkit.serve.answers import ErrorAnswer, Predictions
from bertkit.serve.bodies import Asked
from bertkit.serve.limits import CHARACTERS_OF_TOKEN
from bertkit.serve.serving import Predicted, Serving, as_response, size_of
from bertkit.serve.works import choice_inputs, question_inputs, text_inputs, words_inputs

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


def answer(found: Predicted, rows: list[Any]) -> dict[str, Any]:
    """The body of an answer."""
    return {"model": found.model.name, "predictions": rows, "usage": found.usage}


def task_routes(serving: Serving) -> APIRouter:
    """Routes of tuned models."""
    routes = APIRouter(prefix="/v1", tags=["tasks"], responses=REFUSALS)

    @routes.post("/classify", summary="Labels of texts or pairs of texts")
    async def classify(
        asked: Asked[bodies.Text],
    ) -> Predictions[answers.Label] | Predictions[answers.Labels]:
        size = size_of(text for given in asked.inputs for text in (given.text, given.pair))
        found = await serving.predict("classify", asked.model, asked.inputs, size, text_inputs)
        rows = [one._asdict() for one in found.result]
        if found.model.kind == "classify":
            return Predictions[answers.Label](**answer(found, rows))
        rows = [{**row, "labels": list(row["labels"])} for row in rows]
        return Predictions[answers.Labels](**answer(found, rows))

    @routes.post("/regress", summary="A number for texts or pairs of texts")
    async def regress(asked: Asked[bodies.Text]) -> Predictions[answers.Value]:
        size = size_of(text for given in asked.inputs for text in (given.text, given.pair))
        found = await serving.predict("regress", asked.model, asked.inputs, size, text_inputs)
        return Predictions(**answer(found, [one._asdict() for one in found.result]))

    @routes.post("/choose", summary="One of several ways to go on")
    async def choose(asked: Asked[bodies.Choices]) -> Predictions[answers.Choice]:
        least = 3 * CHARACTERS_OF_TOKEN  # of each choice: [CLS] and twice [SEP]
        size = sum(
            size_of(one.choices) + len(one.choices) * (least + len(one.text))
            for one in asked.inputs
        )
        found = await serving.predict("choose", asked.model, asked.inputs, size, choice_inputs)
        rows = [{**one._asdict(), "probabilities": list(one.probabilities)} for one in found.result]
        return Predictions(**answer(found, rows))

    @routes.post(
        "/tag", summary="Tags of words, and entities", response_model=Predictions[answers.Tagging]
    )
    async def tag(asked: Asked[bodies.Words]) -> Response:
        size = size_of(one.text for one in asked.inputs)
        size += sum(  # a word is at least a token
            max(CHARACTERS_OF_TOKEN, len(word)) for one in asked.inputs for word in one.words or ()
        )
        found = await serving.predict("tag", asked.model, asked.inputs, size, words_inputs)
        words = sum(len(one.tags) for one in found.result)
        return await as_response(5 * words, tagging_body, found, asked)

    @routes.post("/answer", summary="Answers to questions, found in contexts of any length")
    async def answer_questions(asked: Asked[bodies.Question]) -> Predictions[answers.Answer]:
        size = size_of(text for one in asked.inputs for text in (one.question, one.context))
        found = await serving.predict("answer", asked.model, asked.inputs, size, question_inputs)
        task = found.model.works["answer"].predictor.task
        inputs, _ = found.prepared.content
        rows = [task.row(given, one) for given, one in zip(inputs, found.result, strict=True)]
        return Predictions(**answer(found, rows))

    return routes


def pretraining_routes(serving: Serving) -> APIRouter:
    """Routes of models as they were pre-trained."""
    routes = APIRouter(prefix="/v1", tags=["pre-training"], responses=REFUSALS)

    @routes.post(
        "/fill-mask",
        summary="Guesses at each [MASK]",
        response_model=Predictions[list[list[answers.Candidate]]],
    )
    async def fill_mask(asked: Asked[bodies.Masked]) -> Response:
        size = size_of(given.text for given in asked.inputs)
        found = await serving.predict("fill-mask", asked.model, asked.inputs, size)
        guesses = sum(len(mask) for masks in found.result for mask in masks)
        return await as_response(2 * guesses, guesses_body, found)

    @routes.post("/next-sentence", summary="Whether a text follows another")
    async def next_sentence(asked: Asked[bodies.Following]) -> Predictions[answers.Follows]:
        size = size_of(text for one in asked.inputs for text in (one.text, one.following))
        found = await serving.predict("next-sentence", asked.model, asked.inputs, size)
        return Predictions(**answer(found, [{"probability": one} for one in found.result]))

    return routes


def tagging_body(found: Predicted, asked: Asked[bodies.Words]) -> dict[str, Any]:
    """The body of an answer with tags."""
    rows = []
    for one, given in zip(found.result, asked.inputs, strict=True):
        words, entities = tagging(one, *words_of(given.given))
        rows.append(
            {
                "words": [word._asdict() for word in words],
                "entities": [entity._asdict() for entity in entities],
            }
        )
    return {**answer(found, rows), "usage": found.usage.model_dump()}


def guesses_body(found: Predicted) -> dict[str, Any]:
    """The body of an answer with guesses at masks."""
    rows = [[[guess._asdict() for guess in mask] for mask in masks] for masks in found.result]
    return {**answer(found, rows), "usage": found.usage.model_dump()}
