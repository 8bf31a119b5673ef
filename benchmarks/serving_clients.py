"""Clients of a server: many that each send texts, and a few that send requests of every sort.

Run as a program, the clients each send a request, wait for the answer, and send the next one. They
use plain sockets: they share the machine with the server, so they must cost little. The process
reads a JSON object from its standard input and writes one:

    {"port": ..., "path": ..., "bodies": [...], "clients": 32, "seconds": 5}

`stress` sends many requests, malformed ones among them, and says what is answered, and the server's
memory meanwhile.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def request(path: str, body: bytes, method: str = "POST") -> bytes:
    """Return a request as bytes."""
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes
) -> tuple[int, bytes]:
    """Send a request; return status and body of the answer."""
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


async def client(number: int, asked: dict[str, Any], until: float, found: list[Any]) -> None:
    """Send requests until a time, beginning with a different body than the neighbouring clients."""
    bodies = [request(asked["path"], body.encode()) for body in asked["bodies"]]
    reader, writer = await asyncio.open_connection("127.0.0.1", asked["port"])
    turn = number * len(bodies) // asked["clients"]
    while (started := time.perf_counter()) < until:
        status, _ = await exchange(reader, writer, bodies[turn % len(bodies)])
        found.append((started, time.perf_counter(), status))
        turn += 1
    writer.close()


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Run all clients for some seconds.

    Returns:
        The number of requests answered with 200 in time, the milliseconds of all that were answered
        with 200, and the number of the others.
    """
    found: list[tuple[float, float, int]] = []
    begin = time.perf_counter()
    until = begin + asked["seconds"]
    await asyncio.gather(*(client(i, asked, until, found) for i in range(asked["clients"])))
    return {
        "seconds": asked["seconds"],
        "requests": sum(end <= until for _, end, status in found if status == 200),
        "milliseconds": [
            round(1000 * (end - start), 3) for start, end, status in found if status == 200
        ],
        "failed": sum(status != 200 for _, _, status in found),
    }


WELL_FORMED = 0.7
"""The share of well-formed requests."""
TORN = 0.02
"""The share of requests whose client leaves in the middle of the request."""
CLIENTS = 16
PARTS = 10
"""The number of times that the memory is read."""


def malformed(text: str) -> list[bytes]:
    """Return requests that are wrong in many ways."""
    good = json.dumps({"inputs": [{"text": text}]})

    def classify(body: str) -> bytes:
        return request("/v1/classify", body.encode())

    return [
        classify(good[:-2]),
        classify(""),
        classify("[" * 5000),
        classify('{"inputs": ' + "9" * 5000 + "}"),
        classify('{"inputs": []}'),
        classify('{"inputs": [{"text": 5}]}'),
        classify('{"inputs": [{"text": "\\ud800"}]}'),
        classify('{"inputs": [{"txet": "a"}]}'),
        classify('{"inputs": [{"text": "a", "pair": NaN}]}'),
        classify('{"inputs": [{"text": "a"}], "model": "nobody"}'),
        classify(json.dumps({"inputs": [{"text": "a"}] * 3000})),
        classify(json.dumps({"inputs": [{"text": "word " * 100_000}]})),
        classify("x" * (3 << 20)),
        request("/v1/answer", good.encode()),
        request("/v1/nothing", good.encode()),
        request("/v1/classify", good.encode(), "PUT"),
        request("/v1/embeddings", b'{"input": [1, 2], "dimensions": 3}'),
        request("/v1/attention-maps", json.dumps({"text": text * 99}).encode()),
    ]


def resident(process: int) -> float:
    """Return the resident memory of a process in MiB."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {process} has no memory")


def inputs_of(route: str, texts: Sequence[str]) -> dict[str, Any]:
    """Return a well-formed body, but without the model."""
    first = texts[0] or "a text"
    if route == "embeddings":
        return {"input": list(texts)}
    if route in {"tokens", "attention-maps"}:
        return {"text": first[:20]}
    fields: dict[str, dict[str, Any]] = {
        "choose": {"choices": [first, "nothing"]},
        "next-sentence": {"following": first},
    }
    more = fields.get(route, {})
    if route == "answer":
        return {"inputs": [{"question": "what is it?", "context": f"a {text}"} for text in texts]}
    mask = " [MASK]" if route == "fill-mask" else ""
    return {"inputs": [{"text": f"a {text}{mask}", **more} for text in texts]}


async def sorts(port: int, texts: Sequence[str]) -> tuple[list[bytes], list[bytes]]:
    """Return well-formed requests to all routes of all models, and malformed ones."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    _, listed = await exchange(reader, writer, request("/v1/models", b"", "GET"))
    writer.close()
    pairs = [(card["id"], route) for card in json.loads(listed)["data"] for route in card["routes"]]
    good = []
    for i, text in enumerate(texts):
        some = [text] if i % 4 else texts[i : i + 5]
        for model, route in pairs:
            body = json.dumps({"model": model, **inputs_of(route, some)})
            good.append(request(f"/v1/{route}", body.encode()))
    return good, malformed(texts[0])


async def one_client(port: int, turns: Sequence[tuple[bytes, bool]]) -> Counter[str]:
    """Send requests and count the statuses; a connection that the server closes is opened anew."""
    statuses: Counter[str] = Counter()
    reader = writer = None
    for sent, torn in turns:
        if writer is None or writer.is_closing():
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        assert reader is not None
        if torn:
            writer.write(sent[: len(sent) // 2])
            writer.close()
            statuses["torn by the client"] += 1
            continue
        try:
            status, _ = await exchange(reader, writer, sent)
            statuses[str(status)] += 1
        except (asyncio.IncompleteReadError, ConnectionError):
            statuses["connection lost"] += 1
            status = 0
        if status in {0, 400, 413}:  # the server may close after these
            writer.close()
    if writer is not None:
        writer.close()
    return statuses


async def stress(port: int, process: int, texts: Sequence[str], count: int) -> dict[str, Any]:
    """Send `count` requests; return statuses, and the server's memory after each tenth of them."""
    good, bad = await sorts(port, texts)
    turns = []
    for number in range(count):
        wrong = number % 10 >= 10 * WELL_FORMED
        kind = bad[(number // 3) % len(bad)] if wrong else good[number % len(good)]
        turns.append((kind, number % round(1 / TORN) == 0))
    statuses: Counter[str] = Counter()
    memory = []
    for part in range(PARTS):
        own = turns[part * count // PARTS : (part + 1) * count // PARTS]
        clients = [one_client(port, own[i::CLIENTS]) for i in range(CLIENTS)]
        for found in await asyncio.gather(*clients):
            statuses += found
        memory.append(round(resident(process), 1))
    return {
        "requests": count,
        "clients": CLIENTS,
        "statuses": dict(sorted(statuses.items())),
        "resident_mebibytes": memory,
        "growth_after_the_first_tenth_mebibytes": round(memory[-1] - memory[0], 1),
    }


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
