"""How fast /health and /ready answer on new connections while 200 clients keep the server busy.

The clients keep their connections and send one text after the other. Meanwhile, this process opens
a new connection for each probe, as a load balancer does. It takes about a minute.

    python -m benchmarks.serving_connections --data FOLDER
"""

from __future__ import annotations

import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import data_folder, new_parser, start_model, write_result
from benchmarks.serving import Contestant, load, read_texts, running, write_classifier
from bertkit.checkpoints.pretrained import read_pretrained

CLIENTS = 200
TEXTS = 512
SECONDS = 20.0
PATHS = ("/health", "/ready")
PAUSE = 0.05
"""The seconds between two probes."""
TIMEOUT = 60.0


def probe(port: int, path: str) -> tuple[float, int]:
    """Open a connection and ask once; return the milliseconds until the response, and its status.

    The status is 0 if no response came.
    """
    began = time.perf_counter()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        response.read()
        status = response.status
    except (OSError, http.client.HTTPException):
        status = 0
    finally:
        connection.close()
    return 1000 * (time.perf_counter() - began), status


def probes(port: int, busy: Callable[[], bool]) -> dict[str, list[tuple[float, int]]]:
    """Probe each path in turn while the server is busy."""
    found: dict[str, list[tuple[float, int]]] = {path: [] for path in PATHS}
    while busy():
        for path in PATHS:
            found[path].append(probe(port, path))
            time.sleep(PAUSE)
    return found


def row(milliseconds: Sequence[float], failed: int) -> dict[str, Any]:
    """Return the number of responses and their times."""
    return {
        "responses": len(milliseconds),
        "failed": failed,
        "p50_milliseconds": round(statistics.median(milliseconds), 1),
        "p99_milliseconds": round(float(np.percentile(milliseconds, 99)), 1),
        "highest_milliseconds": round(max(milliseconds), 1),
    }


def under_load(
    server: Contestant, texts: Sequence[str], clients: int, seconds: float
) -> dict[str, dict[str, Any]]:
    """Return rows of the probes and the clients' requests, after a warm-up with a few clients."""
    load(server, texts, 8, seconds / 4)
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(load, server, texts, clients, seconds)
        found = probes(server.port, lambda: not loaded.done())
        sent = loaded.result()
    rows = {
        f"{path}, new connections": row([one for one, _ in own], sum(s != 200 for _, s in own))
        for path, own in found.items()
    }
    return {**rows, f"/v1/classify, {clients} clients": row(sent["milliseconds"], sent["failed"])}


def main() -> None:
    """Measure and write `results/serving-connections.json`."""
    parser = new_parser(__doc__)
    parser.add_argument("--clients", type=int, default=CLIENTS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--quick", action="store_true", help="two seconds; writes no results")
    given = parser.parse_args()
    seconds = 2.0 if given.quick else given.seconds
    start = read_pretrained(start_model())
    with tempfile.TemporaryDirectory() as folder:
        write_classifier(Path(folder), start)
        texts = read_texts(data_folder(given.data), start, TEXTS)["short"]
        command = [sys.executable, "-m", "bertkit", "serve", f"{folder}/model"]
        options = ["--no-log-requests", "--port"]
        with running([*command, *options], True, Path(folder) / "log") as server:
            rows = under_load(server, texts, given.clients, seconds)
    if given.quick:
        print(json.dumps(rows, indent=1))
    else:
        print(write_result("serving-connections", rows, {"seconds": seconds}))


if __name__ == "__main__":
    main()
