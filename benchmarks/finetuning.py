"""Speed of fine-tuning against transformers' Trainer on MRPC, side by side in one run.

Every contestant tunes the same encoder on the same pairs for one epoch, in turn, several times:
the Trainer with dynamic padding in fp32 and under bf16 autocast, bertkit in both. Within
its time each builds its optimizer, and bertkit its network too. Scores are compared by
`benchmarks.quality`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import (
    data_folder,
    new_parser,
    precisions,
    start_model,
    summary,
    timed,
    write_result,
)
from benchmarks.reference import glue
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.datasets.glue import GLUE, read_glue
from bertkit.finetuning.run import train_task
from bertkit.finetuning.settings import RunSettings, TrainingSettings
from bertkit.tasks.classification import Classification
from bertkit.text.lines import TextCounts

BATCH = 32


def own(precision: str, data: Path, examples: int) -> tuple[Callable[[], None], int]:
    """Bertkit's epoch, and the tokens in it."""
    start = read_pretrained(start_model())
    task = Classification(GLUE["mrpc"].labels)
    inputs = read_glue("mrpc", data / "glue", "train", TextCounts())[:examples]
    items = task.items(inputs, start.tokenizer)
    run = RunSettings(batch_size=BATCH, learning_rate=1e-4, epochs=1, seed=1)

    def epoch() -> None:
        train_task(
            *(start, task, items, run, TrainingSettings()),
            device=torch.device("cpu"),
            precision=precision,
            keep_head=False,
        )

    return epoch, items.tokens


def theirs(precision: str, data: Path, examples: int) -> Callable[[], None]:
    """The Trainer's epoch."""
    from transformers import AutoTokenizer, Trainer, TrainingArguments
    from transformers.utils import logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(start_model())
    parts = glue("mrpc", data / "glue" / "MRPC", tokenizer)

    def epoch() -> None:
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                output_dir=folder, use_cpu=True, bf16=precision == "bf16", report_to=[],
                learning_rate=1e-4, per_device_train_batch_size=BATCH, num_train_epochs=1,
                weight_decay=0.01, warmup_steps=0.1, save_strategy="no", disable_tqdm=True,
                logging_strategy="no", remove_unused_columns=False,
            )  # fmt: skip
            trainer = Trainer(
                model=parts.model,
                args=arguments,
                train_dataset=parts.train[:examples],
                data_collator=parts.collate,
            )
            trainer.train()

    return epoch


def main() -> None:
    """Measure all four in turn."""
    parser = new_parser(__doc__)
    parser.add_argument("--examples", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    data, count = data_folder(arguments.data), arguments.examples
    contestants: dict[str, Callable[[], None]] = {}
    tokens = 0
    for precision in precisions():
        contestants[f"Trainer {precision}"] = theirs(precision, data, count)
        contestants[f"bertkit {precision}"], tokens = own(precision, data, count)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(arguments.repeats):
        for name, epoch in contestants.items():
            seconds[name].append(timed(epoch)[1])
            print(name, f"{seconds[name][-1]:.1f} s", flush=True)
    rows: dict[str, Any] = {}
    for name, own_seconds in seconds.items():

        def over(other: str, times: list[float] = own_seconds) -> dict[str, float]:
            return summary([b / a for a, b in zip(times, seconds[other], strict=True)])

        rows[name] = {
            "samples_per_second": summary([count / s for s in own_seconds]),
            "real_tokens_per_second": summary([tokens / s for s in own_seconds]),
            **{f"over_trainer_{p}": over(f"Trainer {p}") for p in precisions()},
        }
    details = {"examples": count, "mean_tokens": round(tokens / count, 1), "batch": BATCH,
               "repeats": arguments.repeats}  # fmt: skip
    print(write_result("finetuning", rows, details))


if __name__ == "__main__":
    main()
