"""Clients that each send a request, wait for the answer, and send the next one.

Plain sockets: the clients share the machine with the server, so they must cost little. The process
reads a JSON object from its standard input and writes one:

    {"port": ..., "path": ..., "bodies": [...], "clients": 32, "seconds": 5}
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any


def request(path: str, body: bytes, method: str = "POST") -> bytes:
    """A request as bytes."""
    return (
        f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    ).encode() + body


async def exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, sent: bytes
) -> tuple[int, bytes]:
    """Status and body of the answer."""
    writer.write(sent)
    head = (await reader.readuntil(b"\r\n\r\n")).lower()
    length = int(head.split(b"content-length:")[1].split(b"\r\n")[0])
    return int(head.split(b" ", 2)[1]), await reader.readexactly(length)


async def client(number: int, asked: dict[str, Any], until: float, found: list[Any]) -> None:
    """One client; begins at another body than its neighbours."""
    bodies = [request(asked["path"], body.encode()) for body in asked["bodies"]]
    reader, writer = await asyncio.open_connection("127.0.0.1", asked["port"])
    turn = number * len(bodies) // asked["clients"]
    while (started := time.perf_counter()) < until:
        status, _ = await exchange(reader, writer, bodies[turn % len(bodies)])
        found.append((started, time.perf_counter(), status))
        turn += 1
    writer.close()


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    """All clients for some seconds.

    Returns: requests that were answered with 200 within them, their milliseconds; others.
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


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
