"""From raw text to a token store: MB/s, and memory as text grows.

The text is compressed by xz, but for one row, because decompression takes time, too.

Each preparation runs in a process of its own; its peak memory is the largest sum, seen every tenth
of a second, of what it and its worker processes held.

    python -m benchmarks.prepare --data FOLDER
"""

from __future__ import annotations

import json
import lzma
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from benchmarks.record import child_result, data_folder, new_parser, summary, timed, write_result

PARTS = ("wiki_AA.txt.xz", "wiki_AB.txt.xz")


def prepare_once(arguments: list[str]) -> None:
    """Prepare in a child process, then print what it took as one JSON line."""
    from bertkit import prepare

    processes, out, vocabulary, *texts = arguments
    finished, seen = threading.Event(), [0.0]

    def watch() -> None:
        while not finished.wait(0.1):
            seen.append(resident_megabytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        store, seconds = timed(lambda: prepare(texts, vocabulary, out, processes=int(processes)))
    finally:
        finished.set()
        watcher.join()
    counts = {"bytes": store.manifest["text"]["bytes"], "tokens": store.tokens}
    print(json.dumps({"seconds": seconds, "peak_megabytes": max(seen), **counts}))


def resident_megabytes() -> float:
    """Return the memory of this process and its children, from /proc."""
    process, total = os.getpid(), 0
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
        except (OSError, ValueError):  # it has just ended
            continue
        if process in (int(lines["Pid"]), int(lines["PPid"])):
            total += int(lines.get("VmRSS", "0 kB").split()[0])
    return total / 1024


def measure(processes: int, vocabulary: Path, texts: list[Path], repeats: int) -> dict[str, Any]:
    """Measure median rates over some repeats."""
    runs = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            runs.append(child_result(processes, Path(folder) / "store", vocabulary, *texts))
    return {
        "processes": processes,
        "text_megabytes": round(runs[0]["bytes"] / 1e6, 1),
        "tokens": runs[0]["tokens"],
        "repeats": repeats,
        "megabytes_per_second": summary([run["bytes"] / 1e6 / run["seconds"] for run in runs]),
        "peak_megabytes_of_all_processes": summary([run["peak_megabytes"] for run in runs]),
    }


def main() -> None:
    """Measure one and two parts on one and two processes."""
    if sys.argv[1:2] == ["--child"]:
        prepare_once(sys.argv[2:])
        return
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    data = data_folder(options.data)
    vocabulary = data / "vocab" / "bert-base-uncased-vocab.txt"
    texts = [data / "wikipedia" / part for part in PARTS]
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / texts[0].stem
        with lzma.open(texts[0]) as packed, plain.open("wb") as file:
            shutil.copyfileobj(packed, file)
        for name, processes, chosen in (
            ("prepare, one part, uncompressed, 1 process", 1, [plain]),
            ("prepare, one part, 1 process", 1, texts[:1]),
            ("prepare, one part, 2 processes", 2, texts[:1]),
            ("prepare, two parts, 2 processes", 2, texts),
            ("prepare, both parts three times, 2 processes", 2, 3 * texts),
        ):
            rows[name] = measure(processes, vocabulary, chosen, options.repeats)
            print(name, rows[name], flush=True)
    print(write_result("prepare", rows, folder=options.out))


if __name__ == "__main__":
    main()
