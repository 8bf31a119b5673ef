"""`benchmarks.gpu train`: pre-training updates, stage by stage, beside padded transformers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.gpu.batches import Both, make_batches, needed
from benchmarks.gpu.contestants import (
    STAGES,
    Own,
    Work,
    kernel_of,
    own_training,
    pinned,
    step_memory,
    their_training,
)
from benchmarks.gpu.setup import LARGE, NO_TIME, Case, Found, Setup, in_one_line
from benchmarks.record import summary
from bertkit.model.encoder import ModelConfig
from bertkit.training.device import matmul_peak

BATCHES = 4
"""The number of batches, of different sizes, that a contestant computes before the host waits."""
ROUNDS = 4
"""The number of rounds in which the contestants take turns."""

ORDER = (
    *("compiled", "compiled, bf16 residual", "transformers", "transformers, compiled", "eager"),
    "compiled, torch's flash attention",
)
"""All contestants, the ones that matter most first, in case time runs out."""


class Contestant(NamedTuple):
    """One contestant of a race."""

    build: Callable[[], Work]
    known: Mapping[str, Any] = MappingProxyType({})
    """The columns of its row besides those that are measured."""


class Race:
    """Contestants on the same batches: each alone at first, then all in turn.

    Args:
        setup: the device and the time.
        config: the sizes of the network.
        batches: the batches in both forms.
        training: whether the work needed is that of an update.
    """

    def __init__(
        self, setup: Setup, config: ModelConfig, batches: list[Both], *, training: bool
    ) -> None:
        self.setup, self.batches = setup, pinned(setup, batches)
        packed = [batch.packed for batch in batches]
        self.tokens = sum(len(batch.packed.ids) for batch in packed)
        self.padded = sum(part["input_ids"].numel() for batch in batches for part in batch.padded)
        self.work = sum(needed(batch, config, training=training) for batch in packed)
        self.peak = matmul_peak(setup.device, "bf16", seconds=0.02 if setup.dry else 0.5)
        self.rows: dict[str, dict[str, Any]] = {}
        self.rates: dict[str, list[float]] = {}
        self.entered: dict[str, Work] = {}

    def run(self, contestants: dict[str, Contestant]) -> Iterator[Found]:
        """Yield a row after every contestant, and again after the rounds, which replace it."""
        for name, contestant in contestants.items():
            yield self.setup.attempt(name, partial(self.enter, name, contestant))
        for _ in range(self.setup.count(ROUNDS)):
            for name, work in list(self.entered.items()):
                if self.setup.late():
                    break
                try:
                    rate = self.tokens / self.setup.seconds_of_one(partial(work, self.batches))
                except Exception as error:
                    del self.entered[name]
                    yield name, in_one_line(error)
                    continue
                self.rates[name].append(rate)
        for name in self.entered:
            yield name, self.row(name)

    def enter(self, name: str, contestant: Contestant) -> dict[str, Any]:
        """Set a contestant up, compute all batches to warm up, and time them once."""
        graphs = compiled_graphs()
        work = contestant.build()
        first = self.setup.seconds_of_one(partial(work, self.batches[:1]))
        memory = step_memory(self.setup, partial(work, self.batches))
        seconds = self.setup.seconds_of_one(partial(work, self.batches))
        self.rows[name] = {
            **contestant.known,
            "step_memory_gib": round(memory, 3),
            "first_call_seconds": round(first, 2),
            "graphs": compiled_graphs() - graphs,
        }
        self.entered[name], self.rates[name] = work, [self.tokens / seconds]
        return self.row(name)

    def row(self, name: str) -> dict[str, Any]:
        """Return what is known of a contestant by now; the first round only warms up.

        An MFU counts the work that real tokens need, relative to the matrix products' peak in this
        process, and to the card's data sheet.
        """
        rates = self.rates[name][1:] or self.rates[name]
        flops = summary(rates)["median"] / self.tokens * self.work
        sheet = self.setup.data_sheet()
        theirs = self.rates.get("transformers", [])[1:] or self.rates.get("transformers", [])
        return {
            "tokens_per_second": summary(rates),
            "over_transformers": (
                summary([own / other for own, other in zip(rates, theirs, strict=False)])
                if theirs
                else None
            ),
            "mfu": round(flops / self.peak, 4),
            "mfu_of_data_sheet": sheet and round(flops / sheet, 4),
            **self.rows[name],
            "matmul_peak_tflops": round(self.peak / 1e12, 3),
            "data_sheet_tflops": sheet and round(sheet / 1e12),
            "tokens_per_batch": round(self.tokens / len(self.batches)),
            "padded_tokens_per_batch": round(self.padded / len(self.batches)),
            "rounds": len(rates),
        }


def compiled_graphs() -> int:
    """Return how many graphs torch has compiled in this process."""
    dynamo = sys.modules.get("torch._dynamo")
    return dynamo.utils.counters["stats"]["unique_graphs"] if dynamo else 0


def own_contestants(
    setup: Setup, config: ModelConfig, stages: dict[str, Own]
) -> dict[str, Contestant]:
    """Return bertkit's ways of training by name."""
    return {
        name: Contestant(
            partial(own_training, setup, config, own),
            {"attention": kernel_of(setup, own), "precision": own.precision},
        )
        for name, own in stages.items()
    }


def their_contestants(setup: Setup, config: ModelConfig, *ways: bool) -> dict[str, Contestant]:
    """Return transformers' way of training, as it is and with compiled layers and heads."""
    return {
        f"transformers{', compiled' if compiled else ''}": Contestant(
            partial(their_training, setup, config, compiled=compiled),
            {"attention": "padded", "precision": "bf16"},
        )
        for compiled in ways
    }


def stages_case(setup: Setup, *, length: int, ragged: bool, tokens: int = 65536) -> Iterator[Found]:
    """Measure every stage at one length, bertkit's compiled rows first."""
    config = setup.config()
    batches = make_batches(
        config, setup.tokens(tokens), length, setup.count(BATCHES), ragged=ragged
    )
    every = own_contestants(setup, config, STAGES)
    every |= their_contestants(setup, config, False, True)
    race = Race(setup, config, batches, training=True)
    yield from race.run({name: every[name] for name in ORDER})


def sizes_case(setup: Setup) -> Iterator[Found]:
    """Measure batches of other sizes, of ragged lengths."""
    config = setup.config()
    stages = {"compiled": STAGES["compiled"], "eager": STAGES["eager"]}
    sizes = list(itertools.product((16384, 131072, 32768), (128, 512)))
    for tokens, length in sizes[: setup.count(len(sizes))]:
        case = f"{length} ragged, {tokens // 1024}k tokens"
        if setup.late():
            yield case, NO_TIME
            continue
        batches = make_batches(config, setup.tokens(tokens), length, setup.count(BATCHES))
        race = Race(setup, config, batches, training=True)
        contestants = own_contestants(setup, config, stages)
        contestants |= their_contestants(setup, config, False)
        for name, found in race.run(contestants):
            yield f"{case}, {name}", found


def large_case(setup: Setup) -> Iterator[Found]:
    """Measure BERT-large at length 512."""
    config = setup.config(LARGE)
    batches = make_batches(config, setup.tokens(32768), 512, setup.count(BATCHES))
    contestants = own_contestants(setup, config, {"compiled": STAGES["compiled"]})
    contestants |= their_contestants(setup, config, False)
    race = Race(setup, config, batches, training=True)
    yield from race.run(contestants)


TRAININGS: dict[str, Case] = {
    "base 128 ragged": partial(stages_case, length=128, ragged=True),
    "base 512 ragged": partial(stages_case, length=512, ragged=True),
    "base 128 full": partial(stages_case, length=128, ragged=False),
    "base 512 full": partial(stages_case, length=512, ragged=False),
    "base": sizes_case,
}
