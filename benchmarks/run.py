"""`make bench`: every benchmark, one after the other, each in a process of its own.

python -m benchmarks.run --data FOLDER
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.record import data_folder, new_parser

BENCHMARKS = (
    "tokenization",
    "prepare",
    "stream",
    "reading",
    "pretraining",
    "finetuning",
    "inference",
    "growth",
    "plan",
    "embeddings",
    "short_runs",
)
"""Minimal pairs take half an hour (`python -m benchmarks.minimal_pairs`), and quality takes hours:
`python -m benchmarks.reference`, then `python -m benchmarks.quality`."""


def main() -> None:
    """Run all, then bring README's tables up to date."""
    parser = new_parser(__doc__)
    data = data_folder(parser.parse_args().data)
    for name in BENCHMARKS:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--data", str(data)]
        subprocess.run(command, check=True)
    subprocess.run([sys.executable, "-m", "benchmarks.tables"], check=True)


if __name__ == "__main__":
    main()
