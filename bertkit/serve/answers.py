"""What comes out of each route; with `bodies.py` the source of /openapi.json."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from pydantic import BaseModel

Prediction = TypeVar("Prediction")


class Usage(BaseModel):
    """What a request took, and what of it was lost."""

    inputs: int
    tokens: int
    """Computed, with [CLS] and [SEP] and the overlap of windows."""
    windowed: int
    """Inputs that took more than one window."""
    cut: dict[str, int]
    """What was lost -> of how many inputs."""


class Predictions(BaseModel, Generic[Prediction]):
    """One prediction for each input, in order."""

    model: str
    predictions: list[Prediction]
    usage: Usage


class Label(BaseModel):
    """The most probable class, and the probability of every one."""

    label: str
    probability: float
    probabilities: dict[str, float]


class Labels(BaseModel):
    """The classes above a half, most probable first, and the probability of every one."""

    labels: list[str]
    probabilities: dict[str, float]


class Value(BaseModel):
    """A number."""

    value: float


class Choice(BaseModel):
    """The most probable choice, counted from 0."""

    choice: int
    text: str
    probability: float
    probabilities: list[float]


class Word(BaseModel):
    """A word, `text[start:end]`, and its tag."""

    word: str
    tag: str
    probability: float
    start: int
    end: int


class Entity(BaseModel):
    """A tagged stretch, `text[start:end]`."""

    type: str
    start: int
    end: int
    text: str


class Tagging(BaseModel):
    """The tags of the words, and the entities that they make.

    Offsets are of the text; of given words, of the words joined by spaces.
    """

    words: list[Word]
    entities: list[Entity]


class Answer(BaseModel):
    """The answer, `context[start:end]`; "", null and null where there is none."""

    answer: str
    start: int | None
    end: int | None
    probability: float
    """Of this answer, be it ""."""
    no_answer_probability: float
    null_odds: float


class Candidate(BaseModel):
    """A guess at a mask."""

    piece: str
    probability: float


class Follows(BaseModel):
    """Whether the second text follows the first."""

    probability: float


class EmbeddingItem(BaseModel):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""


class EmbeddingUsage(BaseModel):
    """Tokens of the texts, with [CLS] and [SEP]."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(BaseModel):
    """OpenAI's answer with embeddings."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class Piece(BaseModel):
    """A piece, `text[start:end]` of the text (0) or the pair (1); special ones are of neither."""

    piece: str
    id: int
    segment: int
    """0 up to the first [SEP], 1 after it."""
    start: int
    end: int
    part: int | None


class Pieces(BaseModel):
    """The sequence that the model reads."""

    model: str
    pieces: list[Piece]


class Attention(Pieces):
    """What each piece (row) takes from each piece (column); rows add up to 1."""

    layer: int
    head: int
    layers: int
    heads: int
    weights: list[list[float]]


class AttentionMaps(Pieces):
    """What each piece (row) takes from each piece (column) in every head of every layer."""

    layers: int
    heads: int
    weights: str
    """base64 of a byte for each layer, head, row and column, in this order: 255 times the square
    root of the weight, so that small ones stay apart."""


class ModelCard(BaseModel):
    """A served model; the first four fields are OpenAI's."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    kind: str
    """What it was tuned for; "pretrained" or "encoder" where for nothing."""
    routes: list[str]
    labels: list[str]
    precision: str
    longest: int
    """Tokens of a window."""
    layers: int
    heads: int


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class State(BaseModel):
    """Whether the server is well."""

    status: str


class ErrorDetail(BaseModel):
    """What was wrong, and in which field."""

    message: str
    type: str
    param: str | None


class ErrorAnswer(BaseModel):
    """Every answer that is none."""

    error: ErrorDetail
