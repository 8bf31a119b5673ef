"""Many processes: what they cost here, measured; what they should cost elsewhere, by arithmetic.

results/scaling.json is measured. It compares the same recipe with the same cores as one process, as
two with the whole model each (DDP) and as two with half of it each (FSDP2), in turn. It also has
the share of a step that waits for the next batch, and of a run that waits for its checkpoints.

results/scaling-plan.json is calculated: what a step of BERT-base and BERT-large sends between GPUs,
and how much of a step that is. `explain_step` holds the whole calculation. Beside it stand the
sequences per second that NVIDIA published for BERT-large on 8 and on 256 A100.

    python -m benchmarks.scaling --data FOLDER
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from bertkit.training.data import training_examples

from benchmarks.plan import recipe_of, wikipedia_store
from benchmarks.record import data_folder, new_parser, summary, write_result
from bertkit.corpus.store import TokenStore
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel, count_parameters, pretraining_objective
from bertkit.pretraining_data.loader import stream_steps
from bertkit.progress import read_journal
from bertkit.training.device import choose_precision, training_flops
from bertkit.training.optimizer import build_optimizer
from bertkit.training.step import LoopSettings, train_steps

BATCH = 64
WAYS = {
    "one process, 2 threads": (),
    "2 processes, 1 thread each, ddp": ("--strategy", "ddp"),
    "2 processes, 1 thread each, fsdp": ("--strategy", "fsdp"),
}

PEAK = 312e12
"""Dense bf16 operations per second of an A100 (its data sheet)."""
MFU = 0.4
"""The MFU that is assumed of one GPU by itself."""
INSIDE, BETWEEN = 300e9, 25e9
"""Bytes per second and direction of a GPU: NVLink in a host of 8, and its 200 Gb/s adapter."""
GPUS_OF_A_HOST = 8
BACKWARD = 2 / 3
"""The share of a step's computation beside which gradients can be sent."""
PUBLISHED = {"8": {128: 4591, 512: 1657}, "256": {128: 138_294, 512: 49_663}}
"""A100 GPUs -> length -> sequences per second of BERT-large, by NVIDIA: on 1 host, and on 32."""


def run_once(store: Path, folder: Path, updates: int, way: str) -> dict[str, float]:
    """Make a run by the command line; return its rate after 10 updates and checkpoint waits."""
    flags = [
        "--model.num-hidden-layers", "4", "--model.hidden-size", "256",
        "--model.num-attention-heads", "4", "--phases.lengths", "128",
        "--phases.steps", str(updates), "--phases.batch-sizes", str(BATCH),
        "--phases.max-predictions", "20", "--training.warmup-steps", "5",
        "--training.accumulate", "2", "--logging.log-every", "10",
        "--logging.held-out-sequences", "64", "--logging.checkpoint-every", str(updates // 2),
    ]  # fmt: skip
    several = way.startswith("2")
    start = [sys.executable, "-m", "bertkit", *(["launch", "--nproc-per-node", "2"] * several)]
    out = folder / "run"
    command = [*start, "pretrain", "small", "--store", str(store), "--out", str(out)]
    threads = {"OMP_NUM_THREADS": "1" if several else "2"}
    subprocess.run(
        [*command, *flags, *WAYS[way]], check=True, capture_output=True,
        env={**os.environ, **threads},
    )  # fmt: skip
    records = read_journal(out / "journal.jsonl")
    steps = [record for record in records if record["kind"] == "step" and record["step"] > 10]
    saves = [record for record in records if record["kind"] == "checkpoint"]
    training = sum(record["seconds"] for record in steps)
    return {
        "tokens_per_second": sum(record["tokens"] for record in steps) / training,
        "seconds_waited_for_a_checkpoint": statistics.median(r["seconds"] for r in saves),
        "update_seconds": training / (updates - 10),
    }


def measured(store: Path, repeats: int, updates: int) -> dict[str, dict[str, Any]]:
    """Measure all ways in turn."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(repeats):
        for way, runs in found.items():
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run_once(store, Path(folder), updates, way))
    [alone, *_] = found.values()
    rows = {}
    for way, runs in found.items():
        ratios = [
            run["tokens_per_second"] / one["tokens_per_second"]
            for run, one in zip(runs, alone, strict=True)
        ]
        rows[way] = {
            "repeats": repeats,
            "real_tokens_per_second": summary([run["tokens_per_second"] for run in runs]),
            "over_one_process": summary(ratios),
            "seconds_waited_for_a_checkpoint": summary(
                [run["seconds_waited_for_a_checkpoint"] for run in runs]
            ),
            "wait_as_share_of_1000_updates": summary(
                [
                    run["seconds_waited_for_a_checkpoint"] / (1000 * run["update_seconds"])
                    for run in runs
                ]
            ),
        }
    return rows


def loader_share(store: Path, updates: int, workers: int) -> dict[str, Any]:
    """Measure how much of an update in one process is waiting for its batch."""
    recipe, opened = recipe_of(4, 256, BATCH, updates), TokenStore(store)
    cpu = torch.device("cpu")
    torch.manual_seed(0)
    model = PretrainingModel(recipe.config(opened.vocabulary_size)).train()
    optimizer = build_optimizer(model, learning_rate=1e-4)
    settings = LoopSettings(
        device=cpu, precision=choose_precision(recipe.training.precision, cpu), seed=0,
        max_gradient_norm=1.0, learning_rate=lambda step: 1e-4,
    )  # fmt: skip
    table, builder = training_examples(recipe, opened, 0)
    waited: list[float] = []

    def timed(steps: Any) -> Any:
        steps = iter(steps)
        for _ in range(updates):
            started = time.perf_counter()
            step = next(steps)
            waited.append(time.perf_counter() - started)
            yield step

    steps = stream_steps(table, builder, batch_size=BATCH, steps=updates, workers=workers)
    ends = [
        time.perf_counter()
        for _ in train_steps(model, optimizer, pretraining_objective, timed(steps), settings)
    ]
    taken = [after - before for before, after in pairwise(ends)]
    shares = [wait / whole for wait, whole in zip(waited[1:], taken, strict=True)]
    return {"batches_built_in": f"{workers} processes beside" if workers else "the same process",
            "waiting_share_of_an_update": summary(shares[2:])}  # fmt: skip


def explain_step(name: str, length: int, batch: int, gpus: int) -> dict[str, Any]:
    """Calculate one step of a global batch, shared by so many GPUs.

    With P parameters, gradients in fp32 and N processes, a ring all-reduce sends and receives
    2 (N - 1) / N * 4 P bytes on every GPU. Within a host of 8 that goes over NVLink; between hosts
    each GPU reduces and sends an eighth of it over its adapter. Computation is the needed
    operations over MFU times the peak. What is sent while the backward pass computes costs
    nothing. The rest is waited for, and at least the gradient of the embeddings: it is complete
    only when the backward pass ends.
    """
    sizes = {"base": (12, 768, 12), "large": (24, 1024, 16)}[name]
    layers, width, heads = sizes
    config = ModelConfig(
        vocab_size=30522, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        intermediate_size=4 * width,
    )  # fmt: skip
    parameters = count_parameters(config, heads=True)
    own = batch / gpus
    work = training_flops(
        config,
        tokens=round(own * length),
        targets=round(own * length * 0.15),
        sequences=round(own) or 1,
        sum_squared_lengths=round(own * length * length),
    )
    compute = work / (MFU * PEAK)
    inside, hosts = min(gpus, GPUS_OF_A_HOST), max(1, gpus // GPUS_OF_A_HOST)
    gradient = 4.0 * parameters
    within = 2 * (inside - 1) / inside / INSIDE
    across = 2 * (hosts - 1) / hosts / inside / BETWEEN
    sending = (within + across) * gradient
    last = (within + across) * 4.0 * config.vocab_size * width
    waited = max(last, sending - BACKWARD * compute)
    return {
        "model": name,
        "length": length,
        "global_batch": batch,
        "gpus": gpus,
        "parameters": parameters,
        "sent_by_each_gpu_megabytes": round(
            (2 * (gpus - 1) / gpus if gpus > 1 else 0) * gradient / 1e6
        ),
        "compute_milliseconds": round(1e3 * compute, 2),
        "sending_milliseconds": round(1e3 * sending, 2),
        "waited_milliseconds": round(1e3 * waited, 2),
        "expected_efficiency_share": round(compute / (compute + waited), 3),
    }


def plan_rows() -> list[dict[str, Any]]:
    """Return rows of base and large, at the paper's batch and at large ones, on 8 to 256 GPUs."""
    rows = []
    for name in ("base", "large"):
        for length, batch, gpus in CASES:
            row, host = (explain_step(name, length, batch, number) for number in (gpus, 8))
            share = "expected_efficiency_share"
            row["expected_over_one_host"] = round(row[share] / host[share] * gpus / 8, 1)
            known = name == "large" and gpus == 256
            row["published_over_one_host"] = published(length) if known else None
            rows.append(row)
    return rows


CASES = (
    (128, 256, 8), (128, 256, 64),
    (128, 8192, 8), (128, 8192, 64), (128, 8192, 256), (512, 4096, 256),
)  # fmt: skip
"""The (length, global batch, GPUs) of each case."""


def published(length: int) -> float:
    """Return how many times one host's rate NVIDIA's BERT-large reached on 32."""
    return round(PUBLISHED["256"][length] / PUBLISHED["8"][length], 1)


def main() -> None:
    """Measure, calculate, and write both files."""
    parser = new_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--plan-only", action="store_true", help="the arithmetic alone")
    parser.add_argument("--quick", action="store_true", help="few updates; writes no results file")
    arguments = parser.parse_args()
    if not arguments.quick:
        write_result("scaling-plan", plan_rows(), {"assumed": assumptions()})
    if arguments.plan_only:
        return
    updates = 20 if arguments.quick else 60
    with tempfile.TemporaryDirectory() as folder:
        store = wikipedia_store(data_folder(arguments.data), Path(folder))
        rows = measured(store, 1 if arguments.quick else arguments.repeats, updates)
        for workers in (0, 1):
            rows[f"loader, {workers} workers"] = loader_share(store, updates // 2, workers)
    if arguments.quick:
        print(rows)
    else:
        write_result("scaling", rows)


def assumptions() -> dict[str, float]:
    """Return the assumptions of the calculation."""
    return {
        "peak_teraflop_per_second": PEAK / 1e12,
        "mfu": MFU,
        "gigabytes_per_second_inside_a_host": INSIDE / 1e9,
        "gigabytes_per_second_between_hosts": BETWEEN / 1e9,
        "share_of_a_step_beside_which_gradients_are_sent": round(BACKWARD, 3),
    }


if __name__ == "__main__":
    main()
