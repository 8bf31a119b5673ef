"""`bertkit serve`: serve models over HTTP."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from socket import gethostname
from typing import Annotated

from bertkit.cli.options import FLATTEN, Device, Precision, Top
from bertkit.errors import BertkitError
from bertkit.serve.admission import DEFAULT_LIMITS, Limits, check_token

TOKEN_VARIABLE = "BERTKIT_TOKEN"  # noqa: S105 - a variable's name


def serve_command(
    *models: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    precision: Precision = "auto",
    device: Device = "auto",
    top: Top = None,
    token_file: Path | None = None,
    allowed_hosts: tuple[str, ...] = (),
    log_requests: bool = True,
    limits: Annotated[Limits, FLATTEN] = DEFAULT_LIMITS,
) -> None:
    """Serve models over HTTP, with routes for every task and for embeddings.

    A model is named after its folder if no NAME is given. /docs describes the routes, /v1/models
    lists the models, /metrics is for Prometheus. The log contains no texts.

    Args:
        models: Model directories, run directories or models of the hub, each as FOLDER or
            NAME=FOLDER: fine-tuned, pre-trained or sentence-transformers models.
        host: The address to listen on; 0.0.0.0 for all addresses of this machine.
        port: The port; 0 for any free port.
        token_file: A file with the token that clients must send (Authorization: Bearer ...). The
            environment variable BERTKIT_TOKEN can hold the token instead.
        allowed_hosts: Host names that clients may use, in addition to IP addresses, localhost and
            this machine's name; * for any. With a token, the default is any.
        log_requests: Whether to log every request.
    """
    token = read_token(token_file)
    from bertkit.serve.app import open_socket, serve, serving_app, socket_url

    with open_socket(host, port) as listening:
        hosts = host_names(host, allowed_hosts, token)
        app = serving_app(
            *models,
            precision=precision,
            device=device,
            top=top,
            token=token,
            hosts=hosts,
            limits=limits,
        )
        for card in (model.card for model in app.state.service.models.values()):
            routes = ", ".join(card["routes"])
            print(f"{card['id']}: {card['task_type']} in {card['precision']}: {routes}")
        address = socket_url(listening)
        print(f"serving at {address}, documented at {address}/docs", flush=True)
        serve(app, listening, log_requests=log_requests)


def host_names(host: str, allowed: Collection[str], token: str) -> set[str]:
    """Return the host names that are accepted in addition to IP addresses; empty for any.

    Without a token, a page of another site could send requests under its own host name if that name
    resolves to this machine.
    """
    if "*" in allowed or (token and not allowed):
        return set()
    return {"localhost", host, gethostname(), *allowed}


def read_token(file: Path | None) -> str:
    """Return the token from the file or the environment; "" if there is none."""
    token = os.environ.get(TOKEN_VARIABLE)
    source = TOKEN_VARIABLE
    if file is not None:
        source = f"--token-file {file}"
        try:
            token = file.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise BertkitError(f"{source} cannot be read: {error}") from error
    if token is not None and not token.strip():
        raise BertkitError(f"{source} is blank; write the token into it")
    token = (token or "").strip()
    check_token(token)
    return token
