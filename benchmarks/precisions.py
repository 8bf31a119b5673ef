"""How bf16 and int8 change the scores of tuned models, on whole dev sets.

The models of bertkit's own table are those of `benchmarks.quality`, read from its work folder.
`peer_scores` compares the contestants of `benchmarks.inference` on two models that it tunes itself.

    python -m benchmarks.precisions --data FOLDER
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bertkit.datasets.examples import TextExample
from bertkit.datasets.glue import GLUE, read_glue
from bertkit.finetuning.run import train_task
from scipy.special import softmax

from benchmarks.contestants import (
    Entry,
    Failed,
    fast_modes,
    make_field,
    reference_outputs,
    worker_of,
)
from benchmarks.quality import METRICS
from benchmarks.quality_data import dataset, make_slices
from benchmarks.record import data_folder, new_parser, write_result
from benchmarks.workloads import Workload, flat
from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.checkpoints.save import save_model
from bertkit.finetuning.settings import RunSettings, TrainingSettings
from bertkit.predict.load import load_predictor
from bertkit.tasks.classification import Classification, LabelPrediction
from bertkit.tasks.task import Encoded
from bertkit.text.lines import TextCounts

POSITIONS = 512
TUNED = RunSettings(batch_size=32, learning_rate=1e-4, epochs=2, seed=1)
"""The settings of the models on whose scores the peers are compared."""


def scores(model: Path, found: Any, precision: str) -> dict[str, float]:
    """Return the dev scores of a tuned model in one precision."""
    predictor = load_predictor([model], device="cpu", precision=precision)
    [(_, inputs)] = found.dev
    return predictor.task.score(inputs, predictor.many(inputs))


def tuned_model(
    name: str, data: Path, folder: Path, start: PretrainedWeights, rows: int
) -> tuple[Path, Classification, list[Encoded]]:
    """Return a model that bertkit tunes in fp32, its task, and its training sequences."""
    task = Classification(GLUE[name].labels, GLUE[name].metrics)
    items = task.items(
        read_glue(name, data / "glue", "train", TextCounts())[:rows], start.tokenizer
    )
    path = folder / "model"
    if not (path / "model.safetensors").is_file():
        print(f"tuning {name} on {len(items.items)} rows", flush=True)
        model = train_task(
            *(start, task, items, TUNED, TrainingSettings()),
            device=torch.device("cpu"),
            precision="fp32",
            keep_head=False,
        )
        save_model(path, model, start.tokenizer, {"task": "classification"})
    return path, task, flat(items)


def outputs_of(
    entry: Entry, graph: str, sequences: Sequence[Encoded], skipped: dict[str, str]
) -> list[np.ndarray]:
    """Return the logits of one graph; [] if it fails, with the reason in `skipped`."""
    setting = next(one for one in entry.shapes() if one.graph == graph)
    try:
        with worker_of(entry, sequences) as worker:
            worker.ask("load", entry.model(setting), setting)
            return worker.ask("run")[2]
    except Failed as failure:
        skipped[f"{entry.name} {graph}".strip()] = str(failure)
        return []


def scored(
    task: Classification,
    name: str,
    inputs: Sequence[TextExample],
    outputs: Sequence[np.ndarray],
    expected: Sequence[np.ndarray],
) -> dict[str, float]:
    """Return the columns of one task: scores of some logits, and changes from the reference's."""
    labels = [task.labels[int(logits.argmax())] for logits in outputs]
    found = task.score(inputs, [LabelPrediction(one, 1.0, {}) for one in labels])
    pairs = zip(outputs, expected, strict=True)
    change = np.abs(softmax(outputs, axis=1) - softmax(expected, axis=1))
    return {
        **{f"{name} {metric}": round(100 * found[metric], 2) for metric in task.metrics},
        f"{name} other labels": sum(int(a.argmax() != b.argmax()) for a, b in pairs),
        f"{name} largest change of a probability": round(float(change.max()), 4),
    }


def peer_scores(
    data: Path, folder: Path, start: PretrainedWeights, training_rows: int, dev_rows: int | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the dev scores in percent of every contestant and graph, and who is left out.

    Args:
        data: the folder of data sets.
        folder: the folder of the tuned models and their exports.
        start: the encoder.
        training_rows: the number of training rows of each task.
        dev_rows: the number of dev rows of each task; None for all.
    """
    rows: dict[str, Any] = {}
    skipped: dict[str, str] = {}
    for name in ("sst-2", "mrpc"):
        own = folder / "scores" / f"{name}-{training_rows}"
        model, task, calibration = tuned_model(name, data, own, start, training_rows)
        inputs = read_glue(name, data / "glue", "dev", TextCounts())[:dev_rows]
        sequences = flat(task.items(inputs, start.tokenizer))
        known = Workload(f"{name}-training", "classification", calibration)
        entries, absent = make_field(
            *(model, own / "exported", known, torch.get_num_threads()), classes=len(task.labels)
        )
        skipped |= absent
        expected = reference_outputs(entries[0], sequences)
        for entry in entries:
            for graph in entry.graphs:
                if outputs := outputs_of(entry, graph, sequences, skipped):
                    row = rows.setdefault(f"{entry.name}{', ' * bool(graph)}{graph}", {})
                    row |= scored(task, name, inputs, outputs, expected)
                    print(entry.name, graph, row, flush=True)
    return rows, {"skipped": skipped, "tuned": vars(TUNED), "training_rows": training_rows}


def main() -> None:
    """Score every tuned model in every precision."""
    parser = new_parser(__doc__, work="runs/quality")
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
