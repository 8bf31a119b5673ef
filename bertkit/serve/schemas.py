"""What goes into each route and what comes out, as pydantic models: the source of /openapi.json.

Values are not converted: 1 is not a text, and "3" is not a number. An unknown field is refused by
name. Validation of a list stops at the first problem, since a body may have a million of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from bertkit.serve.limits import MAX_INPUTS, MAX_TOKENS

MOST_FIELDS = 32


class RequestBody(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def check_size(cls, given: Any) -> Any:
        """Refuse a great number of fields at once; of a few each unknown one is named."""
        if isinstance(given, dict) and len(given) > MOST_FIELDS:
            raise ValueError(f"has {len(given):,} fields; it takes {', '.join(cls.model_fields)}")
        return given


def check_surrogates(text: str) -> str:
    """The same text.

    Raises:
        ValueError: it holds half a surrogate pair, which JSON can write and UTF-8 cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    return text


Input = TypeVar("Input", bound=RequestBody)
Plain = Annotated[str, AfterValidator(check_surrogates)]
"""A text, blank or not."""
Filled = Annotated[Plain, Field(pattern=r"\S")]
"""A text that is not blank."""


class PredictionRequest(RequestBody, Generic[Input]):
    """A request for predictions."""

    model: str | None = Field(
        None, description="A name of /v1/models; may be left out where one model serves the route."
    )
    inputs: list[Input] = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)


class Text(RequestBody):
    """A text, or a pair of texts."""

    text: Plain
    pair: Plain | None = None


class Choices(RequestBody):
    """A text and ways to go on."""

    text: Plain
    choices: list[Plain] = Field(min_length=1, max_length=256, fail_fast=True)


class Words(RequestBody):
    """Running text, or its words: one of both."""

    text: Plain | None = None
    words: Annotated[list[Plain], Field(max_length=MAX_TOKENS, fail_fast=True)] | None = None
    document: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None,
        description="Neighbouring inputs with the same number are read as one document, by models "
        "that were trained so; others read each input by itself.",
    )

    @property
    def given(self) -> str | list[str]:
        """The text, or the words."""
        return self.words or [] if self.text is None else self.text


class Question(RequestBody):
    """A question about a context of any length."""

    question: Filled
    context: Filled


class Masked(RequestBody):
    """A text with masks."""

    text: Plain = Field(pattern=r"\[MASK\]", description="With at least one [MASK].")
    top: int = Field(5, ge=1, le=1000, description="Guesses for each mask.")


class Following(RequestBody):
    """A text, and one that may or may not follow it."""

    text: Filled
    following: Filled


Many = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]


class EmbeddingRequest(BaseModel):
    """OpenAI's request for embeddings; fields that it does not have are passed over."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    input: Plain | Annotated[list[Plain], Many] | Ids | Annotated[list[Ids], Many] = Field(
        description="A text, texts, or ids of this model's vocabulary without [CLS], [SEP]."
    )
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Only the model's own width is accepted; vectors are not shortened."
    )
    user: str | None = None


class PiecesRequest(RequestBody):
    """A text, or a pair, to cut into pieces."""

    model: str | None = None
    text: Plain
    pair: Plain | None = None


class AttentionRequest(PiecesRequest):
    """One head of one layer; both count from 1."""

    layer: int = Field(1, ge=1)
    head: int = Field(1, ge=1)


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


class LabelAnswer(BaseModel):
    """The most probable class, and the probability of every one."""

    label: str
    probability: float
    probabilities: dict[str, float]


class Labels(BaseModel):
    """The classes above a half, most probable first, and the probability of every one."""

    labels: list[str]
    probabilities: dict[str, float]


class NumberAnswer(BaseModel):
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


class EntityAnswer(BaseModel):
    """A tagged stretch, `text[start:end]`, and its words, `words[word_start:word_end]`."""

    type: str
    start: int
    end: int
    text: str
    word_start: int
    word_end: int


class Tagging(BaseModel):
    """The tags of the words, and the entities that they make.

    Offsets are of the text; of given words, of the words joined by spaces.
    """

    words: list[Word]
    entities: list[EntityAnswer]


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
    task_type: str
    """What it was tuned for; "pretrained" or "encoder" where for nothing."""
    routes: list[str]
    labels: list[str]
    precision: str
    max_length: int
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
