"""What several processes cost: the same recipe and cores as one process and as two (DDP).

The processes are started by torchrun, and the ways take turns.

    python -m benchmarks.scaling --data FOLDER
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.record import data_folder, new_parser, summary, write_result
from bertkit import prepare
from bertkit.progress import read_journal

ALONE, BOTH = "one process, 2 threads", "2 processes, 1 thread each, ddp"
WARM_UP = 10
"""The number of the first updates, which are not timed."""


def run_once(store: Path, folder: Path, updates: int, way: str) -> float:
    """Make a run by the command line; return its tokens per second after the warm-up."""
    flags = [
        "--model.num-hidden-layers", "4", "--model.hidden-size", "256",
        "--model.num-attention-heads", "4", "--phases.lengths", "128",
        "--phases.steps", str(updates), "--phases.batch-sizes", "64",
        "--phases.max-predictions", "20", "--training.warmup-steps", "5",
        "--training.accumulate", "2", "--logging.log-every", str(WARM_UP),
        "--logging.held-out-sequences", "64", "--logging.checkpoint-every", str(updates // 2),
    ]  # fmt: skip
    start = [sys.executable, "-m"]
    if way == BOTH:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    out = folder / "run"
    command = [*start, "bertkit", "pretrain", "small", "--store", str(store), "--out", str(out)]
    threads = {"OMP_NUM_THREADS": "1" if way == BOTH else "2"}
    environment = {**os.environ, **threads}
    subprocess.run([*command, *flags], check=True, capture_output=True, env=environment)
    records = read_journal(out / "journal.jsonl")
    steps = [r for r in records if r["kind"] == "step" and r["step"] > WARM_UP]
    return sum(step["tokens"] for step in steps) / sum(step["seconds"] for step in steps)


def measure(store: Path, repeats: int, updates: int) -> dict[str, dict[str, Any]]:
    """Measure both ways in turn."""
    rates: dict[str, list[float]] = {ALONE: [], BOTH: []}
    for _ in range(repeats):
        for way, measured in rates.items():
            with tempfile.TemporaryDirectory() as folder:
                measured.append(run_once(store, Path(folder), updates, way))
    return {
        way: {
            "repeats": repeats,
            "real_tokens_per_second": summary(measured),
            "over_one_process": summary(
                [a / b for a, b in zip(measured, rates[ALONE], strict=True)]
            ),
        }
        for way, measured in rates.items()
    }


def main() -> None:
    """Measure, and write the results file."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=60)
    options = parser.parse_args()
    data = data_folder(options.data)
    with tempfile.TemporaryDirectory() as folder:
        store, text = Path(folder) / "store", data / "wikipedia" / "wiki_AA.txt.xz"
        prepare([text], data / "vocab" / "bert-base-uncased-vocab.txt", store, processes=0)
        rows = measure(store, options.repeats, options.updates)
    for name, row in rows.items():
        print(name, row)
    print(write_result("scaling", rows, folder=options.out))


if __name__ == "__main__":
    main()
