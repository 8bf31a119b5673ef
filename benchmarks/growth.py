"""How the cost of an update and of inference grows with length, batch, width and layers.

One of the four varies at a time; for lengths the number of tokens stays the same. Sequences of a
batch have equal lengths. Theory is the number of needed floating-point operations: linear in
layers, batch and tokens, with parts that are quadratic in length (attention) and width (matrices).
`over_theory` is growth in time over growth in operations, both since the first row: 1 is as theory
says, less is better.

What does not grow with the operations (the optimizer's pass over the weights, Python, small
batches) shows in `growth-fit`: seconds = fixed + operations / rate, fitted to each table but that
of lengths, whose operations differ too little.

    python -m benchmarks.growth
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.pretraining import own_update
from benchmarks.record import summary, timed, write_result
from benchmarks.workloads import forward_flops
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.pretraining_data.batch import from_arrays
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.pretraining_data.masking import count_targets
from bertkit.training.device import autocast

CPU = torch.device("cpu")
VOCABULARY = 30522
KINDS = ("training", "inference")

Row = dict[str, Any]


class Case(NamedTuple):
    """The sizes of a network and of its batch."""

    length: int = 128
    batch: int = 16
    width: int = 256
    layers: int = 4

    @property
    def config(self) -> ModelConfig:
        """The sizes of the network, whose heads have width 64."""
        return ModelConfig(
            vocab_size=VOCABULARY,
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=max(1, self.width // 64),
            intermediate_size=4 * self.width,
        )

    @property
    def targets(self) -> int:
        """The number of masked tokens of each sequence: 15 %."""
        return count_targets(self.length, 0.15, self.length)

    def flops(self, kind: str) -> float:
        """Return the needed operations of an update, or of the last hidden states of all tokens.

        Training needs only the part of the last layer that leads to targets and [CLS].
        """
        lengths = [self.length] * self.batch
        if kind == "inference":
            return forward_flops(self.config, lengths)
        targets = self.batch * self.targets
        return 3 * forward_flops(
            self.config, lengths, targets=targets, pooled=True, rows=targets + self.batch
        )


TOKENS = 4096
"""The number of tokens of a batch where the length varies."""
VARIABLES: dict[str, list[Case]] = {
    "length": [Case(n, TOKENS // n) for n in (16, 32, 64, 128, 256, 512)],
    "batch": [Case(batch=n) for n in (1, 4, 16, 64)],
    "width": [Case(width=n) for n in (128, 256, 384, 512, 768)],
    "layers": [Case(layers=n) for n in (1, 2, 4, 8, 12)],
}
QUICK: dict[str, list[Case]] = {
    "length": [Case(n, 64 // n, 64, 1) for n in (16, 32)],
    "layers": [Case(16, 2, 64, n) for n in (1, 2)],
}


def make_batch(case: Case) -> PretrainingBatch:
    """Return a batch of random ids and evenly spaced targets."""
    generator = np.random.Generator(np.random.Philox(key=0))
    tokens = case.length * case.batch
    ids = generator.integers(1000, VOCABULARY, tokens)
    segments = np.tile(np.arange(case.length) >= case.length // 2, case.batch).astype(np.int64)
    starts = np.arange(case.batch)[:, None] * case.length
    places = np.linspace(1, case.length - 2, case.targets).astype(np.int64)
    positions = (starts + places).ravel()
    return PretrainingBatch(
        packed=from_arrays(ids, segments, np.full(case.batch, case.length)),
        target_positions=torch.from_numpy(positions),
        target_ids=torch.from_numpy(ids[positions]),
        next_labels=torch.from_numpy(generator.integers(0, 2, case.batch)),
    )


def prepare(case: Case, precision: str) -> dict[str, Callable[[], object]]:
    """Return functions that do both kinds of work on one network."""
    torch.manual_seed(0)
    model = PretrainingModel(case.config).train()
    update, batch = own_update(model, precision), make_batch(case)

    def train() -> None:
        model.train()
        update(batch)

    @torch.inference_mode()
    def infer() -> torch.Tensor:
        model.eval()
        with autocast(CPU, precision):
            return model.encoder(batch.packed)

    return {"training": train, "inference": infer}


def measure(
    cases: Sequence[Case], precision: str, repeats: int
) -> dict[Case, dict[str, list[float]]]:
    """Measure the seconds of every repeat; the cases of a table take turns."""
    works = {case: prepare(case, precision) for case in cases}
    taken: dict[Case, dict[str, list[float]]] = {
        case: {kind: [] for kind in KINDS} for case in cases
    }
    for repeat in range(repeats + 1):
        for case, kinds in works.items():
            for kind in KINDS:
                _, seconds = timed(kinds[kind])
                if repeat:  # the first one warms up
                    taken[case][kind].append(seconds)
    return taken


def table(variable: str, taken: dict[Case, dict[str, list[float]]]) -> dict[str, Row]:
    """Return a row for each case."""
    first = next(iter(taken))
    rows = {}
    for case, kinds in taken.items():
        row: Row = {"tokens": case.length * case.batch}
        for kind, seconds in kinds.items():
            work, first_work = case.flops(kind), first.flops(kind)
            growth = statistics.median(seconds) / statistics.median(taken[first][kind])
            row[kind] = {
                "milliseconds": summary([1000 * s for s in seconds]),
                "picoseconds_per_needed_flop": summary([1e12 * s / work for s in seconds]),
                "time_growth": round(growth, 2),
                "theory": round(work / first_work, 2),
                "over_theory": round(growth * first_work / work, 2),
            }
        rows[f"{variable} {getattr(case, variable)}"] = row
    return rows


def fits(variable: str, taken: dict[Case, dict[str, list[float]]]) -> Iterator[tuple[str, Row]]:
    """Yield a line through time over operations, with least relative errors, by kind of work."""
    for kind in KINDS:
        work = np.array([case.flops(kind) for case in taken])
        times = np.array([statistics.median(kinds[kind]) for kinds in taken.values()])
        terms = np.stack([np.ones_like(work), work], axis=1)
        scaled = terms / times[:, None]
        fixed, slope = np.linalg.lstsq(scaled, np.ones_like(times))[0]
        off = np.abs(terms @ [fixed, slope] / times - 1)
        yield (
            f"{variable}, {kind}",
            {
                "fixed_milliseconds": round(1000 * float(fixed), 2),
                "gigaflop_per_second": round(1e-9 / float(slope), 1),
                "largest_share_off": round(float(off.max()), 3),
            },
        )


def run(
    variables: dict[str, list[Case]], precision: str, repeats: int
) -> dict[str, dict[str, Row]]:
    """Return a table for each variable, and the fits as "fit"."""
    tables: dict[str, dict[str, Row]] = {}
    fitted: dict[str, Row] = {}
    for variable, cases in variables.items():
        taken = measure(cases, precision, repeats)
        tables[variable] = table(variable, taken)
        if variable != "length":
            fitted |= dict(fits(variable, taken))
        for name, row in tables[variable].items():
            print(name, {kind: row[kind]["over_theory"] for kind in KINDS}, flush=True)
    return {**tables, "fit": fitted}


def write_tables(tables: dict[str, dict[str, Row]], details: Row) -> None:
    """Write each table to a file of its own."""
    for variable, found in tables.items():
        print(write_result(f"growth-{variable}", found, details))


def main() -> None:
    """Measure the growth with all four variables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="is not needed; taken as the other benchmarks take it")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="tiny sizes; writes no results")
    arguments = parser.parse_args()
    variables = QUICK if arguments.quick else VARIABLES
    tables = run(variables, arguments.precision, arguments.repeats)
    if arguments.quick:
        return
    base = Case()._asdict()
    details = {"precision": arguments.precision, "repeats": arguments.repeats, "otherwise": base,
               "tokens_where_length_varies": TOKENS}  # fmt: skip
    write_tables(tables, details)


if __name__ == "__main__":
    main()
