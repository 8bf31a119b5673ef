"""`bertkit serve`: models over HTTP."""

from __future__ import annotations

import os
from collections.abc import Collection
from ipaddress import ip_address
from pathlib import Path
from socket import gethostname
from typing import Annotated

from bertkit.cli.options import Device, Precision
from bertkit.config import FLATTEN
from bertkit.errors import BertkitError
from bertkit.serve.limits import Limits

TOKEN_VARIABLE = "BERTKIT_TOKEN"  # noqa: S105 - the name of a variable
LIMITS = Limits()


def serve_command(
    *models: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    precision: Precision = "auto",
    device: Device = "auto",
    token_file: Path | None = None,
    allowed_hosts: tuple[str, ...] = (),
    log_requests: bool = True,
    limits: Annotated[Limits, FLATTEN] = LIMITS,
) -> int:
    """Serve models over HTTP, each under its folder's name: every head, and embeddings.

    /docs describes the routes, /v1/models lists the models, /metrics is for Prometheus. The log is
    JSON lines on the standard error and holds no texts.

    Parameters
    ----------
    models
        Model directories or runs, or NAME=FOLDER: tuned, pre-trained, or of sentence-transformers.
    host
        The address to listen at; 0.0.0.0 for all of this machine's.
    port
        The port; 0 for any that is free.
    token_file
        Holds the token that clients must send (Authorization: Bearer ...); the variable
        BERTKIT_TOKEN does the same.
    allowed_hosts
        Names under which clients ask for the server, besides addresses, localhost and this
        machine's name; * for any. Where a token is asked for, any unless given.
    log_requests
        Whether every request gets a line of the log.
    """
    token = read_token(token_file)
    try:
        from bertkit.serve.app import make_app
        from bertkit.serve.metrics import Metrics
        from bertkit.serve.models import load_models
        from bertkit.serve.server import address_of, open_socket, serve_until_stopped, write_log
        from bertkit.serve.service import Service
    except ModuleNotFoundError as error:
        raise BertkitError(
            f"serving needs {error.name}; install bertkit with the extra 'serve'"
        ) from error

    listening = open_socket(host, port)
    metrics = Metrics()
    try:
        served = load_models(list(models), limits, metrics, precision=precision, device=device)
    except BaseException:
        listening.close()
        raise
    serving = Service(served, limits, metrics)
    write_log(requests=log_requests)
    address = address_of(listening)
    app = make_app(serving, token=token, hosts=host_names(host, allowed_hosts, token))
    for model in served.values():
        routes = ", ".join(model.routes)
        print(f"{model.name}: {model.task_type} in {model.precision}: {routes}")  # noqa: T201
    if not (token or ip_address(listening.getsockname()[0]).is_loopback):
        print(f"no token is asked for: whoever reaches {address} may use it")  # noqa: T201
    print(f"serving at {address}, described at {address}/docs", flush=True)  # noqa: T201
    try:
        serve_until_stopped(app, serving, listening)
    except KeyboardInterrupt:
        return 130
    return 0


def host_names(host: str, given: Collection[str], token: str) -> set[str]:
    """Names that the server answers to, besides addresses; empty for any.

    Without a token a page of another site could ask it, under a name of its own that leads here.
    """
    if "*" in given or (token and not given):
        return set()
    return {"localhost", host, gethostname(), *given}


def read_token(file: Path | None) -> str:
    """The token of a file, or of the environment; "" for none.

    Raises:
        BertkitError: the file is absent, it or the variable is blank, or the token cannot stand in
            a header.
    """
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if file is None and not token and TOKEN_VARIABLE in os.environ:
        raise BertkitError(f"{TOKEN_VARIABLE} is set and blank; give it the token, or unset it")
    if file is not None:
        try:
            token = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BertkitError(f"--token-file {file} cannot be read: {error}") from error
        if not token:
            raise BertkitError(f"--token-file {file} is empty; write the token into it")
    if not (token.isascii() and token.isprintable()) or " " in token:
        raise BertkitError("the token must be of ASCII letters, digits and signs, without spaces")
    return token
