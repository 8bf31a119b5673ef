"""From raw text to a token store: MB/s, and memory as text grows.

The text is compressed by xz. Each preparation runs in a process of its own; its peak memory is that
of this process and, for each of its workers, that of the largest one.

    python -m benchmarks.prepare --data FOLDER
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

from benchmarks.record import child_result, data_folder, new_parser, summary, timed, write_result

PARTS = ("wiki_AA.txt.xz", "wiki_AB.txt.xz")


def prepare_once(arguments: list[str]) -> None:
    """Prepare in a child process, then print what it took as one JSON line."""
    from bertkit import prepare

    processes, out, vocabulary, *texts = arguments
    store, seconds = timed(lambda: prepare(texts, vocabulary, out, processes=int(processes)))
    main, worker = (getrusage(who).ru_maxrss / 1024 for who in (RUSAGE_SELF, RUSAGE_CHILDREN))
    peak = main + worker * (int(processes) if int(processes) > 1 else 0)
    counts = {"bytes": store.manifest["text"]["bytes"], "tokens": store.tokens}
    print(json.dumps({"seconds": seconds, "peak_megabytes": peak, **counts}))


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
    for name, processes, chosen in (
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
