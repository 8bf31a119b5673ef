"""Speed of inference beside transformers, onnxruntime, ctranslate2 and OpenVINO.

All compute the same model on the same texts, each in a process of its own, with equally many
threads and the setting that was fastest for it (`benchmarks.contestants`). Rounds go through all
contestants in turn. Rates count sequences and real tokens; ratios are between runs of one round, to
the best peer of the same precision and to the fastest peer of any.
Outputs are compared with those of transformers in fp32, by the cosine of each sequence's logits.

    python -m benchmarks.inference --data FOLDER

Each workload writes a results file, whose name ends in `-amx` on a processor with AMX, and in
`-avx2` on one without AVX512-VNNI. `latency` measures one short text at a time.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.contestants import (
    WRONG,
    Entry,
    Failed,
    Trials,
    Worker,
    cosines,
    make_field,
    reference_outputs,
    tune,
    tune_alone,
    worker_of,
)
from benchmarks.exports import processor_name, write_model
from benchmarks.peers import LIBRARIES, longest_first
from benchmarks.record import data_folder, installed, new_parser, start_model, summary, write_result
from benchmarks.workloads import SIZES, Workload, read_workload
from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained

TEXTS = 50
"""The number of short texts, of about the mean length, that take turns in the latency test."""
CALLS, BLOCK = 300, 50
"""The calls of each contestant in the latency test, and how many of them come in a row."""
TABLES = (*SIZES, "latency")

Row = dict[str, Any]


@dataclass
class Contest:
    """The contestants of a workload, ready to run."""

    entries: list[Entry]
    skipped: dict[str, str]
    """Contestant -> why it does not take part."""
    expected: list[np.ndarray]
    """The outputs of the reference."""
    trials: dict[str, Trials]

    def start(self, stack: ExitStack, sequences: Sequence[Any]) -> dict[str, Worker]:
        """Start each with its best setting; return the processes."""
        workers = {}
        for entry in self.entries:
            if entry.name in self.trials:
                setting = self.trials[entry.name].best
                workers[entry.name] = stack.enter_context(worker_of(entry, sequences))
                workers[entry.name].ask("load", entry.model(setting), setting)
        return workers


def tuned_contest(workload: Workload, model: Path, folder: Path) -> Contest:
    """Tune all contestants; return them with the settings that are fastest for them here."""
    sequences, trials = workload.sequences, {}
    entries, skipped = make_field(model, folder, workload, torch.get_num_threads())
    expected = reference_outputs(entries[0], sequences)
    for entry in entries:
        try:
            tuned = tune_alone if workload.name == "latency" else tune
            trials[entry.name] = tuned(entry, sequences, expected)
            print(workload.name, entry.name, "tuned:", trials[entry.name].best, flush=True)
        except Failed as failure:
            if entry.library in ("transformers", "bertkit"):
                raise
            skipped[entry.name] = str(failure)
            print(workload.name, entry.name, failure, flush=True)
    return Contest(entries, skipped, expected, trials)


def measure(workload: Workload, contest: Contest, repeats: int) -> Row:
    """Measure a workload; return a row for each contestant."""
    sequences = workload.sequences
    outputs: dict[str, list[np.ndarray]] = {}
    with ExitStack() as stack:
        workers = contest.start(stack, sequences)
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for worker in workers.values():
            worker.ask("run", longest_first(sequences)[::8])
        for _ in range(repeats):
            for name, worker in workers.items():
                taken, outputs[name] = worker.ask("run")
                seconds[name].append(taken)
                print(workload.name, name, f"{taken:.2f} s", flush=True)
        memory = {name: worker.ask("peak_mebibytes") for name, worker in workers.items()}
    best = best_peers(seconds, outputs, contest.expected)
    return {
        name: {
            "setting": str(contest.trials[name].best),
            "threads": torch.get_num_threads(),
            **rates(workload, name, seconds, best),
            **compared(outputs[name], contest.expected),
            "peak_mebibytes": round(memory[name]),
        }
        for name in seconds
    }


def precision_of(name: str) -> str:
    """Return the precision in a contestant's name."""
    return next(word for word in ("fp32", "bf16", "int8") if word in name)


def compared(outputs: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> Row:
    """Return the lowest cosine, and a remark if it says that the outputs are not the model's."""
    lowest = min(cosines(outputs, expected))
    remark = {"remark": f"not the same outputs: cosine below {WRONG}"} if lowest < WRONG else {}
    return {"lowest_cosine": round(lowest, 6), **remark}


def best_peers(
    times: Mapping[str, Sequence[float]],
    outputs: Mapping[str, Sequence[np.ndarray]],
    expected: Sequence[np.ndarray],
) -> dict[str, str]:
    """Return the fastest peer by precision, and of all as "any"; wrong outputs do not count."""
    fastest: dict[str, str] = {}
    for name in sorted(times, key=lambda name: statistics.median(times[name])):
        if not name.startswith("bertkit") and min(cosines(outputs[name], expected)) >= WRONG:
            fastest.setdefault("any", name)
            fastest.setdefault(precision_of(name), name)
    return fastest


def rates(
    workload: Workload, name: str, seconds: Mapping[str, list[float]], best: Mapping[str, str]
) -> Row:
    """Return sequences and real tokens per second, and their ratios to those of the best peers."""

    def over(other: str) -> dict[str, float]:
        pairs = zip(seconds[name], seconds[other], strict=True)
        return summary([theirs / mine for mine, theirs in pairs])

    count, tokens = len(workload.sequences), workload.tokens
    peer = best.get(precision_of(name))
    return {
        "runs": len(seconds[name]),
        "sequences_per_second": summary([count / s for s in seconds[name]]),
        "real_tokens_per_second": summary([tokens / s for s in seconds[name]]),
        **({"over_best_peer": over(peer)} if peer else {}),
        "over_fastest_peer": over(best["any"]),
    }


def alone(workload: Workload) -> Workload:
    """Return the workload of the texts of about the mean length, for one at a time."""
    mean = workload.tokens / len(workload.sequences)
    texts = sorted(workload.sequences, key=lambda text: abs(len(text.ids) - mean))[:TEXTS]
    return replace(workload, name="latency", sequences=texts)


def measure_latency(workload: Workload, contest: Contest) -> Row:
    """Measure milliseconds of one short text at a time; the contestants take turns in blocks."""
    texts = workload.sequences
    with ExitStack() as stack:
        workers = contest.start(stack, texts)
        taken: dict[str, list[float]] = {name: [] for name in workers}
        outputs = {name: worker.ask("run")[1] for name, worker in workers.items()}
        for begin in range(-BLOCK, CALLS, BLOCK):
            for name, worker in workers.items():
                milliseconds = worker.ask("calls", max(begin, 0), BLOCK)
                if begin >= 0:  # the first block warms up
                    taken[name] += [1000 * seconds for seconds in milliseconds]
    medians = {name: statistics.median(milliseconds) for name, milliseconds in taken.items()}
    best = best_peers(taken, outputs, contest.expected)
    return {
        name: {
            "setting": str(contest.trials[name].best),
            "calls": len(milliseconds),
            "mean_tokens": round(statistics.mean(len(text.ids) for text in texts), 1),
            "p50_milliseconds": round(medians[name], 3),
            "p99_milliseconds": round(float(np.percentile(milliseconds, 99)), 3),
            **{
                f"p50_over_{title}_peer": round(medians[name] / medians[best[key]], 3)
                for title, key in (("best", precision_of(name)), ("fastest", "any"))
                if key in best
            },
            **compared(outputs[name], contest.expected),
        }
        for name, milliseconds in taken.items()
    }


def compete(
    name: str, data: Path, folder: Path, start: PretrainedWeights, repeats: int
) -> tuple[Row, Row]:
    """Return the table of a workload or of the latency, and its details."""
    is_latency = name == "latency"
    workload = read_workload("short" if is_latency else name, data, start.tokenizer)
    workload = alone(workload) if is_latency else workload
    model = write_model(folder, start, workload.head)
    contest = tuned_contest(workload, model, folder / "exported")
    if is_latency:
        table = measure_latency(workload, contest)
    else:
        table = measure(workload, contest, repeats)
    return table, {
        "repeats": repeats,
        "workloads": workload.described(),
        "skipped": contest.skipped,
        "peers": {peer: trial.described() for peer, trial in contest.trials.items()},
    }


def main() -> None:
    """Measure the workloads and the latency."""
    parser = new_parser(__doc__)
    parser.add_argument("--work", type=Path, help="keeps models and exports for the next time")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=TABLES, default=list(TABLES))
    options = parser.parse_args()
    data, start = data_folder(options.data), read_pretrained(start_model())
    versions = {library: installed(library) for library in (*LIBRARIES, "nncf")}
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        for name in options.workloads:
            table, details = compete(name, data, work, start, options.repeats)
            for contestant, row in table.items():
                print(name, contestant, row)
            file = processor_name(f"inference-{name}")
            print(write_result(file, table, {"libraries": versions, **details}, options.out))


if __name__ == "__main__":
    main()
