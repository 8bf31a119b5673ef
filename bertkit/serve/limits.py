"""How much a server takes on, and how it says no.

A refusal is a `RefusedError`: one status, one line that says what to change, and the field of the
body that it is about. The routes answer with it as JSON, in the form that OpenAI's client reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from bertkit.errors import BertkitError
from bertkit.tasks.task import PREDICTION_TOKENS

MOST_INPUTS = 2048
"""Inputs of one request; OpenAI's limit for embeddings."""
MOST_PIECES = 65_536
"""Words, or ids, of one input."""
CHARACTERS_OF_TOKEN = 6
"""Running text has fewer, so its tokens are at least its characters divided by this. So much is
known before a text is cut."""

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "too_large_error",
    422: "invalid_request_error",
    429: "overloaded_error",
    500: "server_error",
    503: "unavailable_error",
}
"""Status -> the `type` of an error."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What a server takes on."""

    max_queue: int = 65_536
    """Tokens that may wait for each model; a request beyond that is answered with 429."""
    max_batch: int = PREDICTION_TOKENS
    """Tokens that a thread computes at once, and each model has up to two; a larger request stands
    alone."""
    deadline: float = 30.0
    """Seconds in which a request's body must come (else 408), and from then on seconds until the
    request is answered with 503 instead."""
    max_bytes: int = 2 << 20
    """Of a request's body; a larger one is answered with 413."""
    linger: float = 2.0
    """Most milliseconds that a model waits for the clients of the batch before, once it had
    several; a request to an idle server never waits."""
    grace: float = 1.0
    """Seconds after SIGTERM in which new requests are still answered, with 503."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            BertkitError: one is out of range.
        """
        for name in ("max_queue", "max_batch", "deadline", "max_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                flag = name.replace("_", "-")
                raise BertkitError(f"--{flag} must be above 0, got {getattr(self, name)}")
        for name in ("linger", "grace"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BertkitError(f"--{name} must be 0 or more, got {getattr(self, name)}")


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
