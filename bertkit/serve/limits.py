"""The server's limits, and the errors with which it refuses requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bertkit.errors import BertkitError, flag

MAX_INPUTS = 2048
"""The maximum number of inputs of one request; the same as OpenAI's limit for embeddings."""
CHARACTERS_PER_TOKEN = 6
"""An upper bound for running text: a text's length divided by it estimates its tokens before it is
tokenized."""
MAX_LIMIT = 1e9
"""Python's clocks accept no wait of many more seconds."""
ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "too_large_error",
    429: "overloaded_error",
    500: "server_error",
    503: "unavailable_error",
}
"""HTTP status -> the error's `type`; "invalid_request_error" for any other status."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server."""

    max_queue_tokens: int = 65_536
    """The maximum number of tokens that wait or are computed for each model; a request beyond that
    is answered with 429."""
    max_batch_tokens: int = 8192
    """The maximum number of tokens in a batch; each model computes up to two batches at a time, and
    a larger request forms a batch by itself."""
    deadline: float = 30.0
    """The seconds within which a request's body must arrive (else 408) and, from then on, within
    which the request must be computed (else 503)."""
    max_bytes: int = 2 << 20
    """The maximum number of bytes of a request's body; a larger one is answered with 413."""
    max_connections: int = 512
    """The maximum number of open connections; requests on further ones are answered with 503."""
    max_delay: float = 2.0
    """The maximum batching delay in milliseconds. After a batch of several requests, a model waits
    up to this long for their clients' next ones; a request to an idle server never waits."""

    def __post_init__(self) -> None:
        """Check that every limit is in range."""
        for name, value in vars(self).items():
            enough = value >= 0 if name == "max_delay" else value > 0
            if not enough or value > MAX_LIMIT:
                raise BertkitError(f"{flag(name)} must be above 0, not {value}")


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
        if status == 408:  # the rest of the body would be read as the next request
            self.headers["connection"] = "close"

    def body(self) -> dict[str, Any]:
        """Return the JSON body of the response."""
        kind = ERROR_TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param}}


def check_token(token: str) -> None:
    """Check that a client can send a token in a header."""
    if not isinstance(token, str) or not (token.isascii() and token.isprintable()) or " " in token:
        raise BertkitError("the token must be ASCII letters, digits and signs, without spaces")


def too_many_tokens(tokens: int, maximum: int) -> RefusedError:
    """Return the error for a request with more tokens than a model accepts at a time."""
    return RefusedError(
        413,
        f"the request has about {tokens:,} tokens, but the limit is {maximum:,}; send fewer or "
        "shorter inputs",
    )


def not_finite() -> RefusedError:
    """Return the error for results that contain NaN or infinity."""
    return RefusedError(
        500, "the model computed a number that is not finite; its weights are damaged"
    )


def shorten(text: str) -> str:
    """Return a client's text shortened and escaped to one line, for use in a message."""
    return text[:60].encode("unicode_escape").decode()
