"""Clients of a server, in a process of their own.

They each send a request, wait for the answer, and send the next one. They use plain sockets: they
share the machine with the server, so they must cost little. The process reads a JSON object from
its standard input and writes one:

    {"port": ..., "path": ..., "bodies": [...], "clients": 32, "seconds": 5}
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
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


async def client(number: int, asked: dict[str, Any], until: float, answers: list[Any]) -> None:
    """Send requests until a time, beginning with a different body than the neighbouring clients."""
    bodies = [request(asked["path"], body.encode()) for body in asked["bodies"]]
    reader, writer = await asyncio.open_connection("127.0.0.1", asked["port"])
    turn = number * len(bodies) // asked["clients"]
    while (started := time.perf_counter()) < until:
        status, _ = await exchange(reader, writer, bodies[turn % len(bodies)])
        answers.append((started, time.perf_counter(), status))
        turn += 1
    writer.close()


async def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Run all clients for some seconds.

    Returns:
        The number of requests answered with 200 in time, the milliseconds of all that were answered
        with 200, and the number of the others.
    """
    answers: list[tuple[float, float, int]] = []
    begin = time.perf_counter()
    until = begin + asked["seconds"]
    await asyncio.gather(*(client(i, asked, until, answers) for i in range(asked["clients"])))
    return {
        "seconds": asked["seconds"],
        "requests": sum(end <= until for _, end, status in answers if status == 200),
        "milliseconds": [
            round(1000 * (end - start), 3) for start, end, status in answers if status == 200
        ],
        "failed": sum(status != 200 for _, _, status in answers),
    }


def resident(process: int) -> float:
    """Return the resident memory of a process in MiB."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"process {process} has no memory")


if __name__ == "__main__":
    json.dump(asyncio.run(run(json.load(sys.stdin))), sys.stdout)
