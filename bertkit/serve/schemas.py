"""The request and response bodies of all routes as pydantic models: the source of /openapi.json.

Values are not converted: 1 is not a text, and "3" is not a number. An error names an unknown field.
Validation of a list stops at the first problem, since a body may have a million of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from bertkit.datasets.examples import ChoiceExample, QuestionExample, TextExample, WordsExample
from bertkit.errors import BertkitError
from bertkit.predict.word_splitter import words_example
from bertkit.serve.limits import CHARACTERS_OF_TOKEN, MAX_INPUTS, MAX_TOKENS, RefusedError
from bertkit.tasks.predictions import Entity, WordTag

MAX_FIELDS = 32


class RequestBody(BaseModel):
    """The base class of request bodies and their parts."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def check_size(cls, given: Any) -> Any:
        """Reject very many fields at once; among a few, pydantic names each unknown one."""
        if isinstance(given, dict) and len(given) > MAX_FIELDS:
            raise ValueError(f"has {len(given):,} fields; it accepts {', '.join(cls.model_fields)}")
        return given


def check_surrogates(text: str) -> str:
    """Return the text unchanged if UTF-8 can encode it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("contains half a surrogate pair, which is not a character") from None
    return text


Plain = Annotated[str, AfterValidator(check_surrogates)]
"""A text, which may be blank."""
Filled = Annotated[Plain, Field(pattern=r"\S")]
"""A text that is not blank."""


class InputBody(RequestBody):
    """The base class of the inputs of predictions."""

    @property
    def size(self) -> int:
        """A lower bound on the characters to tokenize, counted for every repetition."""
        return sum(len(value) for value in vars(self).values() if isinstance(value, str))


Input = TypeVar("Input", bound=InputBody)


class PredictionRequest(RequestBody, Generic[Input]):
    """A request for predictions: one for each input."""

    model: str | None = Field(
        None, description="A name from /v1/models; optional if only one model serves the route."
    )
    inputs: list[Input] = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)


class Text(InputBody):
    """A text, or a pair of texts (`pair` is the second)."""

    text: Plain
    pair: Plain | None = None

    def example(self, number: int) -> TextExample:
        """Return the input of the task."""
        return TextExample(str(number), self.text, self.pair, None, f"inputs.{number}")


class Choices(InputBody):
    """A text and the choices among which the model selects one."""

    text: Plain
    choices: list[Plain] = Field(min_length=1, max_length=256, fail_fast=True)

    @property
    def size(self) -> int:
        """See `InputBody`; the text is repeated for every choice."""
        special = 3 * CHARACTERS_OF_TOKEN  # each choice adds [CLS] and two [SEP]
        repeated = special + len(self.text)
        return sum(repeated + len(choice) for choice in self.choices)

    def example(self, number: int) -> ChoiceExample:
        """Return the input of the task."""
        place, choices = f"inputs.{number}", tuple(self.choices)
        return ChoiceExample(str(number), self.text, choices, None, place)


class Words(InputBody):
    """Either a running text or a list of words."""

    text: Plain | None = None
    words: Annotated[list[Plain], Field(max_length=MAX_TOKENS, fail_fast=True)] | None = None
    document: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None,
        description="Models trained on whole documents read neighbouring inputs with the same "
        "number as one document. Other models read each input by itself.",
    )

    @property
    def size(self) -> int:
        """See `InputBody`; every word has at least one token."""
        words = sum(max(CHARACTERS_OF_TOKEN, len(word)) for word in self.words or ())
        return len(self.text or "") + words

    def example(self, number: int) -> WordsExample:
        """Return the input of the task.

        Raises:
            RefusedError: there are both a text and words, or neither.
        """
        place = f"inputs.{number}"
        if (self.text is None) == (self.words is None):
            both = "both" if self.words is not None else "neither"
            raise RefusedError(
                422, f"{place} has {both} of text and words; send one of them", place
            )
        given = self.words or [] if self.text is None else self.text
        document = -1 - number if self.document is None else self.document
        return words_example(str(number), given, document, place)


class Question(InputBody):
    """A question and the context, of any length, in which to find the answer."""

    question: Filled
    context: Filled

    def example(self, number: int) -> QuestionExample:
        """Return the input of the task.

        Raises:
            BertkitError: the question or the context is blank.
        """
        place = f"inputs.{number}"
        for field, text in (("question", self.question), ("context", self.context)):
            if not text.strip():
                raise BertkitError(f"{place}.{field}: the text is blank; send a text with words")
        return QuestionExample(str(number), self.question, self.context, None, place)


class Masked(InputBody):
    """A text with one or more masks."""

    text: Plain = Field(pattern=r"\[MASK\]", description="A text with at least one [MASK].")
    top: int = Field(5, ge=1, le=1000, description="The number of candidates for each mask.")


class Following(InputBody):
    """A text, and a second text that may or may not follow it."""

    text: Filled
    following: Filled


Many = Field(min_length=1, max_length=MAX_INPUTS, fail_fast=True)
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(min_length=1, max_length=MAX_TOKENS, fail_fast=True)]


class EmbeddingRequest(BaseModel):
    """A request for embeddings, as in OpenAI's API; unknown fields are ignored."""

    model_config = ConfigDict(strict=True)
    model: str | None = None
    input: Plain | Annotated[list[Plain], Many] | Ids | Annotated[list[Ids], Many] = Field(
        description="A text, a list of texts, or token ids of this model without [CLS] and [SEP]."
    )
    encoding_format: Literal["float", "base64"] | None = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Must be the width of the model's vectors: they are not shortened."
    )
    user: str | None = None


class TokenizeRequest(RequestBody):
    """A text or a pair of texts to tokenize; `pair` is the second text."""

    model: str | None = None
    text: Plain
    pair: Plain | None = None


Found = TypeVar("Found")


class Usage(BaseModel):
    """The size of a request, and what was lost.

    `tokens` counts the computed tokens with [CLS], [SEP] and overlaps of windows; `windowed` counts
    the inputs that needed several windows. `cut` maps a description of what was lost to the number
    of inputs affected.
    """

    inputs: int
    tokens: int
    windowed: int
    cut: dict[str, int]


class Predictions(BaseModel, Generic[Found]):
    """One prediction for each input, in the order of the inputs."""

    model: str
    predictions: list[Found]
    usage: Usage


class Tagging(BaseModel):
    """The tags of the words, and the entities that they form.

    Character offsets refer to the text or, if words were given, to the words joined by spaces.
    """

    words: list[WordTag]
    entities: list[Entity]


class Answer(BaseModel):
    """The answer, `context[start:end]`; without an answer, it is "", and the offsets are null.

    `probability` is that of the returned answer, also of "". `null_odds` is the score of no answer
    minus the score of the best span.
    """

    answer: str
    start: int | None
    end: int | None
    probability: float
    no_answer_probability: float
    null_odds: float


class Candidate(BaseModel):
    """A candidate token for a mask, and its probability."""

    token: str
    probability: float


class Follows(BaseModel):
    """The probability that the second text follows the first."""

    probability: float


class EmbeddingItem(BaseModel):
    """The vector of the text at position `index`: numbers, or base64 of little-endian float32."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    """The number of tokens in all texts, with [CLS] and [SEP]; both fields are equal."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(BaseModel):
    """A response with embeddings, as in OpenAI's API."""

    object: Literal["list"]
    data: list[EmbeddingItem]
    model: str
    usage: EmbeddingUsage


class TokenInfo(BaseModel):
    """A token: `[start:end]` of the text (`part` 0) or pair (1); special tokens have part null.

    `segment` is 0 up to and including the first [SEP], and 1 after it.
    """

    token: str
    id: int
    segment: int
    start: int
    end: int
    part: int | None


class Tokens(BaseModel):
    """The token sequence that the model reads, with [CLS] and [SEP]."""

    model: str
    tokens: list[TokenInfo]


class AttentionMaps(Tokens):
    """The attention weights from each token (row) to each token, for every head and layer.

    `weights` is base64 of one byte per layer, head, row and column, in this order. A byte is 255
    times the square root of the weight, so that small weights remain distinguishable.
    """

    layers: int
    heads: int
    weights: str


class ModelCard(BaseModel):
    """A served model; the first four fields are those of OpenAI's API.

    `task_type` is the task that the model was fine-tuned for; else it is "pretrained" or "encoder".
    `max_length` is the most tokens in a window.
    """

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    task_type: str
    routes: list[str]
    labels: list[str]
    precision: str
    max_length: int
    layers: int
    heads: int


class ModelList(BaseModel):
    """All served models."""

    object: Literal["list"]
    data: list[ModelCard]


class State(BaseModel):
    """The state of the server."""

    status: str


class ErrorDetail(BaseModel):
    """What was wrong, and `param`, the field of the request that is meant."""

    message: str
    type: str
    param: str | None


class ErrorAnswer(BaseModel):
    """The form of every error response."""

    error: ErrorDetail
