"""`make bench`: the benchmarks that take minutes, one after another, each in its own process.

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
"""The benchmarks that take minutes. Minimal pairs take half an hour
(`python -m benchmarks.minimal_pairs`), and quality takes hours: `python -m benchmarks.reference`,
then `python -m benchmarks.quality`."""


def main() -> None:
    """Run all benchmarks, then bring the tables and charts of the documents up to date."""
    parser = new_parser(__doc__)
    data = data_folder(parser.parse_args().data)
    for name in BENCHMARKS:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--data", str(data)]
        subprocess.run(command, check=True)
    subprocess.run([sys.executable, "-m", "benchmarks.tables"], check=True)


if __name__ == "__main__":
    main()
