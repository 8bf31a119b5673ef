"""The server's limits, and the errors with which it refuses requests.

A refusal is a `RefusedError`: an HTTP status, one line that says what to change, and the field of
the body that is meant. The routes return it as JSON, in the form that OpenAI's client reads.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from typing import Any

from bertkit.errors import BertkitError, flag

LOG = logging.getLogger("bertkit.serve")
MAX_INPUTS = 2048
"""The maximum number of inputs of one request; the same as OpenAI's limit for embeddings."""
MAX_TOKENS = 65_536
"""The maximum number of words or token ids of one input."""
CHARACTERS_OF_TOKEN = 6
"""An upper bound on characters per token in running text. A text's length divided by it gives the
fewest tokens that the text can have, before it is tokenized."""

MAX_WAIT = 1e9
"""The largest value of a limit on time, in the unit of that limit."""
BYTES_OF_NUMBER = 8
"""The bytes that a number and its comma take in a response; most numbers take more."""

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
"""HTTP status -> the error's `type`."""


def check_token(token: str) -> None:
    """Check that a client can send a token in a header.

    Raises:
        BertkitError: the token has other characters than visible ASCII.
    """
    if not isinstance(token, str) or not (token.isascii() and token.isprintable()) or " " in token:
        raise BertkitError("the token must be ASCII letters, digits and signs, without spaces")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server."""

    max_queue_tokens: int = 65_536
    """The maximum number of tokens that may wait for each model; a request beyond that is answered
    with 429."""
    max_batch_tokens: int = 8192
    """The maximum number of tokens in a batch; each model computes up to two batches at a time, and
    a larger request forms a batch by itself."""
    deadline: float = 30.0
    """The seconds within which a request's body must arrive (else 408) and, from then on, within
    which the request must be computed (else 503). A connection whose client takes longer to send a
    request's head, or to read a response, is closed."""
    max_bytes: int = 2 << 20
    """The maximum number of bytes of a request's body; a larger one is answered with 413."""
    max_answer: int = 32 << 20
    """The maximum number of bytes of a response's body; a larger one is replaced by 413. Up to
    twice as many bytes are held for clients that have not read them; beyond that, requests get
    503."""
    max_connections: int = 512
    """The maximum number of open connections, or fewer if the limit on open files requires it.
    Beyond that, the connection that has been idle longest is closed; if none is idle, only /health
    and /ready are answered on new connections."""
    max_delay: float = 2.0
    """The maximum batching delay in milliseconds. After a batch of several requests, a model waits
    up to this long for their clients' next ones; a request to an idle server never waits."""
    grace: float = 1.0
    """The seconds after SIGTERM for which new requests are still answered, with 503."""

    def __post_init__(self) -> None:
        """Check that every limit is in range."""
        for name, value in vars(self).items():
            may_be_0 = name in ("max_delay", "grace")
            if not (value >= 0 if may_be_0 else value > 0) or value == math.inf:
                range_ = "0 or more" if may_be_0 else "above 0"
                raise BertkitError(f"{flag(name)} must be {range_}, got {value}")
            if name in ("max_delay", "grace", "deadline") and value > MAX_WAIT:
                raise BertkitError(f"{flag(name)} must be at most {MAX_WAIT:,.0f}")

    @property
    def max_unread(self) -> int:
        """The maximum number of bytes of responses that are held until clients read them."""
        return 2 * self.max_answer

    def check_answer(self, numbers: int) -> None:
        """Raise before a response is made if it would certainly be too large."""
        if numbers * BYTES_OF_NUMBER > self.max_answer:
            raise answer_too_large(self.max_answer)


DEFAULT_LIMITS = Limits()


class RefusedError(Exception):
    """The reason why a request is refused, as an HTTP error.

    Args:
        status: the HTTP status of the response.
        message: one line that says what is wrong and what to do.
        param: the field of the body that is meant, as in "inputs.0.text"; None for no field.
        retry_after: the seconds after which the client should try again; None for no advice.
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
        """Add the header that closes the connection, and return this error."""
        self.headers["connection"] = "close"
        return self

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param}}


def too_many(tokens: int, maximum: int) -> RefusedError:
    """Return the error for a request with more tokens than the whole queue."""
    return RefusedError(
        413,
        f"the request has about {tokens:,} tokens, but the server accepts {maximum:,} at a time; "
        "send fewer or shorter inputs",
    )


def answer_too_large(maximum: int) -> RefusedError:
    """Return the error for a response with more than `maximum` bytes."""
    return RefusedError(
        413,
        f"the response would be larger than {maximum:,} bytes; send fewer or shorter inputs, or "
        "ask for embeddings in base64",
    )


def not_finite() -> RefusedError:
    """Return the error for results that contain NaN or infinity."""
    return RefusedError(
        500, "the model computed a number that is not finite; its weights are damaged"
    )
