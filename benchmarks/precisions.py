"""What bf16 and int8 do to the scores of tuned models, on whole dev sets.

The models are those of `benchmarks.quality`, read from its work folder.

    python -m benchmarks.precisions --data FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.contestants import fast_modes
from benchmarks.quality import METRICS, dataset
from benchmarks.record import data_folder, write_result
from benchmarks.slices import make_slices
from bertkit.predict.load import load_predictor

POSITIONS = 512


def scores(model: Path, found: Any, precision: str) -> dict[str, float]:
    """Dev scores of a tuned model in one precision."""
    predictor = load_predictor([model], device="cpu", precision=precision)
    [(_, inputs)] = found.dev
    return predictor.task.score(inputs, predictor.many(inputs))


def main() -> None:
    """Score every tuned model in every precision."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--work", type=Path, default=Path("runs/quality"))
    arguments = parser.parse_args()
    data, work = data_folder(arguments.data), arguments.work
    make_slices(data, work / "slices")
    rows: dict[str, Any] = {}
    for task, metrics in METRICS.items():
        model = work / "bertkit" / task / "model"
        if not model.is_dir():
            print(f"{task}: no model in {model}; run benchmarks.quality first")
            continue
        found = dataset(task, data, work / "slices", POSITIONS)
        by_mode = {mode: scores(model, found, mode) for mode in fast_modes()}
        for metric in metrics:
            row = {mode: round(100 * by_mode[mode][metric], 2) for mode in by_mode}
            if "int8" in row:
                row["int8_minus_fp32"] = round(row["int8"] - row["fp32"], 2)
            rows[f"{task}, {metric}"] = {"inputs": len(found.dev[0][1]), **row}
            print(task, metric, row, flush=True)
    print(write_result("precisions", rows))


if __name__ == "__main__":
    main()
