"""What several processes cost: the same recipe and cores as one process and as two (DDP).

The processes are started by torchrun, and the ways take turns. The file also has the share of a
run that waits for its checkpoints.

    python -m benchmarks.scaling --data FOLDER
"""

from __future__ import annotations

import os
import statistics
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


def run_once(store: Path, folder: Path, updates: int, way: str) -> dict[str, float]:
    """Make a run by the command line; return its rate after the warm-up and checkpoint waits."""
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
    saves = [r["seconds"] for r in records if r["kind"] == "checkpoint"]
    training = sum(record["seconds"] for record in steps)
    return {
        "tokens_per_second": sum(record["tokens"] for record in steps) / training,
        "checkpoint_seconds": statistics.median(saves),
        "update_seconds": training / (updates - WARM_UP),
    }


def measure(store: Path, repeats: int, updates: int) -> dict[str, dict[str, Any]]:
    """Measure both ways in turn."""
    runs: dict[str, list[dict[str, float]]] = {ALONE: [], BOTH: []}
    for _ in range(repeats):
        for way, results in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                results.append(run_once(store, Path(folder), updates, way))
    rows = {}
    for way, results in runs.items():
        rates = [run["tokens_per_second"] for run in results]
        base = [run["tokens_per_second"] for run in runs[ALONE]]
        waits = [run["checkpoint_seconds"] / (1000 * run["update_seconds"]) for run in results]
        rows[way] = {
            "repeats": repeats,
            "real_tokens_per_second": summary(rates),
            "over_one_process": summary([a / b for a, b in zip(rates, base, strict=True)]),
            "seconds_waited_for_a_checkpoint": summary(
                [run["checkpoint_seconds"] for run in results]
            ),
            "wait_as_share_of_1000_updates": summary(waits),
        }
    return rows


def main() -> None:
    """Measure, and write the results file."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--text", type=Path, help="a file instead of Wikipedia")
    options = parser.parse_args()
    data = data_folder(options.data)
    with tempfile.TemporaryDirectory() as folder:
        store, text = Path(folder) / "store", options.text or data / "wikipedia" / "wiki_AA.txt.xz"
        prepare([text], data / "vocab" / "bert-base-uncased-vocab.txt", store, processes=0)
        rows = measure(store, options.repeats, options.updates)
    for name, row in rows.items():
        print(name, row)
    print(write_result("scaling", rows, folder=options.out))


if __name__ == "__main__":
    main()
