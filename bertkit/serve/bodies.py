"""What goes into each route, as pydantic models; with `answers.py` the source of /openapi.json.

Values are not converted: 1 is no text, "3" no number. A field that is unknown is refused by name.
Lists end at the first thing that is wrong: a body may have a million of them.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from bertkit.serve.limits import MOST_INPUTS, MOST_PIECES

MOST_FIELDS = 32


class Body(BaseModel):
    """A part of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def check_size(cls, given: Any) -> Any:
        """Refuse a great number of fields at once; of a few each unknown one is named."""
        if isinstance(given, dict) and len(given) > MOST_FIELDS:
            raise ValueError(f"has {len(given):,} fields; it takes {', '.join(cls.model_fields)}")
        return given


def whole(text: str) -> str:
    """The same text.

    Raises:
        ValueError: it holds half a surrogate pair, which JSON can write and UTF-8 cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("holds half a surrogate pair, which is no character") from None
    return text


Input = TypeVar("Input", bound=Body)
Plain = Annotated[str, AfterValidator(whole)]
"""A text, blank or not."""
Filled = Annotated[Plain, Field(pattern=r"\S")]
"""A text that is not blank."""


class Asked(Body, Generic[Input]):
    """A request for predictions."""

    model: str | None = Field(
        None, description="A name of /v1/models; may be left out where one model serves the route."
    )
    inputs: list[Input] = Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)


class Text(Body):
    """A text, or a pair of texts."""

    text: Plain
    pair: Plain | None = None


class Choices(Body):
    """A text and ways to go on."""

    text: Plain
    choices: list[Plain] = Field(min_length=1, max_length=256, fail_fast=True)


class Words(Body):
    """Running text, or its words: one of both."""

    text: Plain | None = None
    words: Annotated[list[Plain], Field(max_length=MOST_PIECES, fail_fast=True)] | None = None
    document: Annotated[int, Field(ge=0, lt=1 << 31)] | None = Field(
        None,
        description="Neighbouring inputs with the same number are read as one document, by models "
        "that were trained so; others read each input by itself.",
    )

    @property
    def given(self) -> str | list[str]:
        """The text, or the words."""
        return self.words or [] if self.text is None else self.text


class Question(Body):
    """A question about a context of any length."""

    question: Filled
    context: Filled


class Masked(Body):
    """A text with masks."""

    text: Plain = Field(pattern=r"\[MASK\]", description="With at least one [MASK].")
    top: int = Field(5, ge=1, le=1000, description="Guesses for each mask.")


class Following(Body):
    """A text, and one that may or may not follow it."""

    text: Filled
    following: Filled


Many = Field(min_length=1, max_length=MOST_INPUTS, fail_fast=True)
Id = Annotated[int, Field(ge=0, lt=1 << 31)]
Ids = Annotated[list[Id], Field(min_length=1, max_length=MOST_PIECES, fail_fast=True)]


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


class PiecesRequest(Body):
    """A text, or a pair, to cut into pieces."""

    model: str | None = None
    text: Plain
    pair: Plain | None = None


class AttentionRequest(PiecesRequest):
    """One head of one layer; both count from 1."""

    layer: int = Field(1, ge=1)
    head: int = Field(1, ge=1)
