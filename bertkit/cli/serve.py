"""`bertkit serve`: serve models over HTTP."""

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
from bertkit.serve.limits import DEFAULT_LIMITS, Limits, check_token

MAX_TOKEN = 65_536
"""The largest number of characters of a token."""
TOKEN_VARIABLE = "BERTKIT_TOKEN"  # noqa: S105 - a variable's name


def serve_command(
    *models: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    precision: Precision = "auto",
    device: Device = "auto",
    token_file: Path | None = None,
    allowed_hosts: tuple[str, ...] = (),
    log_requests: bool = True,
    limits: Annotated[Limits, FLATTEN] = DEFAULT_LIMITS,
) -> int:
    """Serve models over HTTP, with routes for every head and for embeddings.

    A model is named after its folder if no NAME is given. /docs describes the routes, /v1/models
    lists the models, /metrics is for Prometheus. The log on standard error is JSON lines and
    contains no texts.

    Parameters
    ----------
    models
        Model directories, run directories or models of the hub, each as FOLDER or NAME=FOLDER:
        fine-tuned, pre-trained or sentence-transformers models.
    host
        The address to listen on; 0.0.0.0 for all addresses of this machine.
    port
        The port; 0 for any free port.
    token_file
        A file with the token that clients must send (Authorization: Bearer ...). The environment
        variable BERTKIT_TOKEN can hold the token instead.
    allowed_hosts
        Host names that clients may use, in addition to IP addresses, localhost and this machine's
        name; * for any. With a token, the default is any.
    log_requests
        Whether to log every request.
    """
    token = read_token(token_file)
    try:
        from bertkit.serve.app import make_app
        from bertkit.serve.metrics import Metrics
        from bertkit.serve.models import load_models
        from bertkit.serve.server import open_socket, serve_until_stopped, socket_url, write_log
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
    address = socket_url(listening)
    app = make_app(serving, token=token, hosts=host_names(host, allowed_hosts, token))
    for model in served.values():
        routes = ", ".join(model.routes)
        print(f"{model.name}: {model.task_type} in {model.precision}: {routes}")  # noqa: T201
    if not (token or ip_address(listening.getsockname()[0]).is_loopback):
        print(f"no token is required: anyone who can reach {address} can use it")  # noqa: T201
    print(f"serving at {address}, documented at {address}/docs", flush=True)  # noqa: T201
    try:
        serve_until_stopped(app, serving, listening)
    except KeyboardInterrupt:
        return 130
    return 0


def host_names(host: str, given: Collection[str], token: str) -> set[str]:
    """Return the host names that are accepted in addition to IP addresses; empty for any.

    Without a token, a page of another site could send requests under its own host name if that name
    resolves to this machine.
    """
    if "*" in given or (token and not given):
        return set()
    return {"localhost", host, gethostname(), *given}


def read_token(file: Path | None) -> str:
    """Return the token from the file or the environment; "" if there is none."""
    token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if file is None and not token and TOKEN_VARIABLE in os.environ:
        raise BertkitError(f"{TOKEN_VARIABLE} is set but blank; set it to the token, or unset it")
    if file is not None:
        try:
            with file.open("rb") as opened:  # a pipe is fine, an endless device is not read whole
                token = opened.read(MAX_TOKEN + 1).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise BertkitError(f"--token-file {file} cannot be read: {error}") from error
        if not token:
            raise BertkitError(f"--token-file {file} is empty; write the token into it")
    check_token(token)
    if len(token) > MAX_TOKEN:
        raise BertkitError(
            f"the token has more than {MAX_TOKEN:,} characters; choose a shorter one"
        )
    return token
