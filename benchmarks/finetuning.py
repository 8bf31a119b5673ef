"""Speed and memory of fine-tuning against transformers' Trainer, side by side in one run.

Every contestant tunes the same encoder for one epoch on the same examples: pairs of MRPC, sentences
of CoNLL-2003, and windows of SQuAD 1.1. The Trainer pads each batch to its longest example; it
draws batches at random, as it does by default, or of similar lengths. Each measurement is a process
of its own, which warms up on two batches first; the contestants take turns. The time includes
building the optimizer, and bertkit's also its network. Scores are compared by `benchmarks.quality`.

    python -m benchmarks.finetuning --data FOLDER
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.exports import processor_name
from benchmarks.quality import SETTINGS, dataset, make_slices
from benchmarks.record import (
    child_result,
    data_folder,
    new_parser,
    precisions,
    start_model,
    summary,
    timed,
    write_result,
)
from benchmarks.reference import build
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.finetuning.runs import RunSettings, TrainingSettings
from bertkit.finetuning.train import TaskTraining
from bertkit.tasks.task import Items

INPUTS = {"mrpc": 512, "conll-2003": 1024, "squad-1.1": 128}
"""Task -> the number of the first inputs of its training data that are used."""
SAMPLING = {"random": "Trainer", "group_by_length": "Trainer by length"}
"""The Trainer's way to draw batches -> its name in the table."""
WARM_UP = 2
"""The number of batches of the warm-up."""
Epoch = Callable[[], object]


def own(
    task: str, precision: str, data: Path, slices: Path, inputs: int
) -> tuple[Epoch, Epoch, Items]:
    """Return functions that make a warm-up and an epoch of bertkit, and its examples."""
    start = read_pretrained(start_model())
    read = dataset(task, data, slices, start.config.max_position_embeddings)
    items = read.task.items(read.train[:inputs], start.tokenizer)
    setting = SETTINGS[task]
    run = RunSettings(
        batch_size=setting.batch, learning_rate=setting.learning_rate, epochs=1, seed=1
    )

    def epoch(some: Items = items) -> None:
        training = TaskTraining(
            *(start, read.task, some, run, TrainingSettings()),
            device=torch.device("cpu"),
            precision=precision,
            keep_head=False,
        )
        with training:
            for _ in training.updates():
                pass
            training.finish()

    few = replace(items, items=items.items[: WARM_UP * setting.batch])
    return lambda: epoch(few), epoch, items


def theirs(
    task: str, precision: str, sampling: str, data: Path, slices: Path, examples: int
) -> tuple[Epoch, Epoch]:
    """Return functions that make a warm-up and an epoch of the Trainer."""
    from transformers import AutoTokenizer, Trainer, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(start_model())
    tokenizer.model_max_length = 512
    setting, parts = SETTINGS[task], build(task, data, slices, start_model(), tokenizer)

    def epoch(number: int = examples) -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, use_cpu=True, bf16=precision == "bf16", report_to=[],
                learning_rate=setting.learning_rate, per_device_train_batch_size=setting.batch,
                num_train_epochs=1, weight_decay=0.01, warmup_steps=0.1, save_strategy="no",
                disable_tqdm=True, logging_strategy="no", remove_unused_columns=False,
                train_sampling_strategy=sampling,
            )  # fmt: skip
            Trainer(
                model=parts.model,
                args=arguments,
                train_dataset=parts.train[:number],
                data_collator=parts.collate,
            ).train()

    return lambda: epoch(WARM_UP * setting.batch), epoch


def measure_one(arguments: list[str]) -> None:
    """Print the seconds of one epoch, the peak memory in GB and, of bertkit, the sizes."""
    task, precision, sampling, data, slices, count = arguments
    result: dict[str, Any] = {}
    if sampling:
        warm_up, epoch = theirs(task, precision, sampling, Path(data), Path(slices), int(count))
    else:
        warm_up, epoch, items = own(task, precision, Path(data), Path(slices), int(count))
        parts = sum(len(item.parts) for item in items.items)
        result = {"examples": parts, "tokens": items.tokens}
    warm_up()
    result["seconds"] = timed(epoch)[1]
    result["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
    print(json.dumps(result))


def table(task: str, measured: dict[tuple[str, str], list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the rows of a task; keys are (the Trainer's way to draw batches or "", precision)."""
    rows = {}
    examples, tokens = (measured["", precisions()[0]][0][name] for name in ("examples", "tokens"))
    for (sampling, precision), runs in measured.items():
        row: dict[str, Any] = {
            "samples_per_second": summary([examples / run["seconds"] for run in runs]),
            "real_tokens_per_second": summary([tokens / run["seconds"] for run in runs]),
        }
        for other in precisions():
            peers = zip(*(measured[name, other] for name in SAMPLING), strict=True)
            best = [min(run["seconds"] for run in turn) for turn in peers]
            ratios = [b / run["seconds"] for run, b in zip(runs, best, strict=True)]
            row[f"over_faster_trainer_{other}"] = summary(ratios)
        row["peak_memory_gigabytes"] = round(max(run["memory"] for run in runs), 2)
        rows[f"{task}, {SAMPLING.get(sampling, 'bertkit')} {precision}"] = row
    return rows


def main() -> None:
    """Measure all contestants in turn on every task."""
    if sys.argv[1:2] == ["--child"]:
        measure_one(sys.argv[2:])
        return
    parser = new_parser(__doc__, work="runs/finetuning-speed")
    parser.add_argument("--tasks", nargs="+", choices=INPUTS, default=[*INPUTS])
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    data, slices = data_folder(options.data), options.work / "slices"
    make_slices(data, slices)
    rows: dict[str, Any] = {}
    details: dict[str, Any] = {"repeats": options.repeats}
    for task in options.tasks:
        measured: dict[tuple[str, str], list[dict[str, Any]]] = {}
        examples = 0
        for _ in range(options.repeats):
            for precision in precisions():
                for sampling in ("", *SAMPLING):
                    count = examples if sampling else INPUTS[task]
                    result = child_result(task, precision, sampling, data, slices, count)
                    examples = result.get("examples", examples)
                    measured.setdefault((sampling, precision), []).append(result)
                    print(task, sampling or "bertkit", precision, result, flush=True)
        rows |= table(task, measured)
        tokens = measured["", precision][0]["tokens"]
        details[task] = {
            "examples": examples,
            "mean_tokens": round(tokens / examples, 1),
            "batch": SETTINGS[task].batch,
        }
    print(write_result(processor_name("finetuning"), rows, details, options.out))


if __name__ == "__main__":
    main()
