"""How much a server takes on, and how it says no.

A refusal is a `RefusedError`: one status, one line that says what to change, and the field of the
body that it is about. The routes answer with it as JSON, in the form that OpenAI's client reads.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from bertkit.errors import BertkitError

LOG = logging.getLogger("bertkit.serve")
MAX_INPUTS = 2048
"""Inputs of one request; OpenAI's limit for embeddings."""
MAX_TOKENS = 65_536
"""Words, or ids, of one input."""
CHARACTERS_OF_TOKEN = 6
"""Running text has fewer, so its tokens are at least its characters divided by this. So much is
known before a text is cut."""

BYTES_OF_NUMBER = 8
"""Of an answer, with its comma; most have more."""

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "too_large_error",
    421: "invalid_request_error",
    422: "invalid_request_error",
    429: "overloaded_error",
    500: "server_error",
    503: "unavailable_error",
}
"""Status -> the `type` of an error."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server takes on."""

    max_queue_tokens: int = 65_536
    """Tokens that may wait for each model; a request beyond that is answered with 429."""
    max_batch_tokens: int = 8192
    """Tokens that a thread computes at once, and each model has up to two; a larger request stands
    alone."""
    deadline: float = 30.0
    """Seconds in which a request's body must come (else 408), and from then on seconds until the
    request is answered with 503 instead. A connection whose client takes longer to send a request's
    head, or to read an answer, is closed."""
    max_bytes: int = 2 << 20
    """Of a request's body; a larger one is answered with 413."""
    max_answer: int = 32 << 20
    """Bytes of an answer's body; a request with a larger one is answered with 413. Of answers that
    clients have not read, twice as many are held; requests beyond that are answered with 503."""
    max_connections: int = 512
    """Connections at a time, or fewer where the process may open fewer files. Beyond that the one
    that has been idle longest is closed; where none is idle, only /health and /ready are answered
    on new ones."""
    max_delay: float = 2.0
    """Most milliseconds that a model waits for the clients of the batch before, once it had
    several; a request to an idle server never waits."""
    grace: float = 1.0
    """Seconds after SIGTERM in which new requests are still answered, with 503."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            BertkitError: one is out of range.
        """
        above_zero = ("max_queue_tokens", "max_batch_tokens", "deadline", "max_bytes", "max_answer")
        for name in (*above_zero, "max_connections"):
            if not 0 < getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise BertkitError(f"--{flag} must be above 0, got {getattr(self, name)}")
        for name in ("max_delay", "grace"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BertkitError(
                    f"--{name.replace('_', '-')} must be 0 or more, got {getattr(self, name)}"
                )

    @property
    def max_unread(self) -> int:
        """Bytes of answers that clients have not read."""
        return 2 * self.max_answer

    def check_answer(self, numbers: int) -> None:
        """Refuse an answer before it is made, where it would be too large for certain.

        Args:
            numbers: that it has, or texts.

        Raises:
            RefusedError: 413.
        """
        if numbers * BYTES_OF_NUMBER > self.max_answer:
            raise answer_too_large(self.max_answer)


class RefusedError(Exception):
    """Why a request is not answered.

    Args:
        status: of the answer.
        message: one line.
        param: the field of the body that is meant, as in "inputs.0.text".
        retry_after: seconds after which it makes sense to ask again.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param = status, message, param
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}
        if status == 401:
            self.headers["www-authenticate"] = "Bearer"

    def closing(self) -> RefusedError:
        """The same, with the end of the connection."""
        self.headers["connection"] = "close"
        return self

    def body(self) -> dict[str, Any]:
        """What the client gets."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param}}


def too_many(tokens: int, most: int) -> RefusedError:
    """A request that could never be taken.

    Args:
        tokens: that it has, or has at least.
        most: `Limits.max_queue`.
    """
    return RefusedError(
        413,
        f"the request has about {tokens:,} tokens and the server takes {most:,} at a time; send "
        "fewer or shorter inputs",
    )


def answer_too_large(most: int) -> RefusedError:
    """An answer beyond the limit."""
    return RefusedError(
        413,
        f"the answer would be larger than {most:,} bytes; send fewer or shorter inputs, or ask for "
        "embeddings in base64",
    )


def not_finite() -> RefusedError:
    """An answer that no client could use."""
    return RefusedError(
        500, "the model computed a number that is not finite; its weights are damaged"
    )
