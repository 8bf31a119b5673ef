"""A server of models and a real browser at its page: for pictures of it, and for its tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bertkit.serve.app import make_app
from bertkit.serve.limits import Limits
from bertkit.serve.metrics import Metrics
from bertkit.serve.models import load_models
from bertkit.serve.server import make_server, open_socket, socket_url
from bertkit.serve.service import Service

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = Path("/usr/bin/chromium")
"""Debian's; Playwright's own needs a download."""
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def served(models: Sequence[str], limits: Limits | None = None, token: str = "") -> Iterator[str]:
    """A server of models in a thread of this process.

    Args:
        models: as `bertkit serve` takes them.
        limits: of the server.
        token: that it asks for.

    Returns: its address.
    """
    limits, metrics = limits or Limits(), Metrics()
    loaded = load_models(models, limits, metrics, precision="fp32", device="cpu")
    serving = Service(loaded, limits, metrics)
    server = make_server(make_app(serving, token=token), serving)
    listening = open_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.02)
        yield socket_url(listening)
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()


@contextmanager
def browser() -> Iterator[Browser]:
    """Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        yield found
        found.close()
