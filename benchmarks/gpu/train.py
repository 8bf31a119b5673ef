"""`benchmarks.gpu train`: pre-training updates, stage by stage, beside padded transformers.

Each contestant is set up once, then computes any batches. Those of bertkit differ in what is
compiled and in the precision, so that each stage of the CUDA path has a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.setup import (
    Both,
    Case,
    Found,
    Padded,
    Setup,
    in_one_line,
    make_batches,
    needed,
)
from benchmarks.record import summary
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.training.device import autocast
from bertkit.training.optimizer import build_optimizer
from bertkit.training.recipe import Objectives
from bertkit.training.step import LoopSettings, compile_training, train_steps

Work = Callable[[Sequence[Both]], None]
"""Queues the work for some batches, one after the other; it copies them to the device."""

RATE = 1e-4


class Own(NamedTuple):
    """One way in which bertkit trains."""

    compiled: bool
    """Whether to compile what `bertkit pretrain --compile` compiles."""
    precision: str = "bf16"
    """A precision of `LoopSettings`."""


STAGES = {
    "compiled": Own(compiled=True),
    "compiled, bf16 residual": Own(compiled=True, precision="bf16-residual"),
    "eager": Own(compiled=False),
}


def backend(setup: Setup) -> str:
    """Return the compiler; in a dry run one that traces and generates no code."""
    return "eager" if setup.dry else "inductor"


def own_training(setup: Setup, config: ModelConfig, stage: Own) -> Work:
    """Set up updates through bertkit's own loop."""
    with setup.device:
        model = PretrainingModel(config).train()
    loss = Objectives().function()
    if stage.compiled:
        loss = partial(loss, cross_entropy=compile_training(model, setup.device))
    optimizer = build_optimizer(model, learning_rate=RATE)
    settings = LoopSettings(
        device=setup.device, precision=stage.precision, seed=0, max_gradient_norm=1.0,
        learning_rate=lambda step: RATE,
    )  # fmt: skip

    def work(batches: Sequence[Both]) -> None:
        steps = (([batch.packed], None) for batch in batches)
        for _ in train_steps(model, optimizer, loss, steps, settings):
            pass

    return work


def their_config(config: ModelConfig) -> Any:
    """Return the same sizes for transformers, with its fastest attention."""
    from transformers import BertConfig

    fields = {name: value for name, value in vars(config).items() if name != "hidden_act"}
    kind: Any = BertConfig
    return kind(**fields, hidden_act="gelu", attn_implementation="sdpa")


def moved(part: Padded, device: torch.device) -> Padded:
    """Copy a padded batch to the device."""
    return {name: value.to(device, non_blocking=True) for name, value in part.items()}


def their_training(setup: Setup, config: ModelConfig, *, compiled: bool) -> Work:
    """Set up updates of transformers' model on padded batches, in its users' loop."""
    from transformers import BertForPreTraining

    with setup.device:
        model: Any = BertForPreTraining(their_config(config)).train()
    if compiled:
        for module in (*model.bert.encoder.layer, model.cls):
            module.compile(dynamic=False, backend=backend(setup))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, fused=True)

    def work(batches: Sequence[Both]) -> None:
        for batch in batches:
            for part in batch.padded:
                with autocast(setup.device, "bf16"):
                    loss = model(**moved(part, setup.device)).loss
                (loss / len(batch.padded)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return work


def own_inference(setup: Setup, config: ModelConfig, *, compiled: bool) -> Work:
    """Set up bertkit's encoder in bf16: all hidden states of packed batches."""
    with setup.device:
        encoder = Encoder(config).to(torch.bfloat16).eval()
    if compiled and not setup.dry:
        for layer in encoder.layers:
            layer.compile(dynamic=True)

    @torch.inference_mode()
    def work(batches: Sequence[Both]) -> None:
        for batch in batches:
            encoder(batch.packed.packed.to(setup.device))

    return work


def their_inference(setup: Setup, config: ModelConfig, *, compiled: bool) -> Work:
    """Set up transformers' BertModel in bf16: all hidden states of padded batches."""
    from transformers import BertModel

    with setup.device:
        model: Any = BertModel(their_config(config))
    model = model.to(torch.bfloat16).eval()
    if compiled:
        for layer in model.encoder.layer:
            layer.compile(dynamic=False, backend=backend(setup))

    @torch.inference_mode()
    def work(batches: Sequence[Both]) -> None:
        for part in (part for batch in batches for part in batch.padded):
            arguments = moved(part, setup.device)
            names = ("input_ids", "token_type_ids", "attention_mask")
            model(**{name: arguments[name] for name in names})

    return work


def pinned(setup: Setup, batches: list[Both]) -> list[Both]:
    """Put padded batches into pinned memory, from which a copy does not keep the host waiting.

    Packed batches pass through pinned memory on their way to the device, in the time that counts.
    """
    if setup.dry:
        return batches
    return [
        Both(
            batch.packed,
            [{name: value.pin_memory() for name, value in part.items()} for part in batch.padded],
        )
        for batch in batches
    ]


def step_memory(setup: Setup, work: Callable[[], None]) -> float:
    """Return the GiB that some work takes beyond what is in use before it; 0 on a CPU."""
    if setup.dry:
        work()
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats(setup.device)
    before = torch.cuda.memory_allocated(setup.device)
    work()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated(setup.device) - before) / 2**30


# Races --------------------------------------------------------------------------------------------

BATCHES = 4
"""The number of batches, of different sizes, that a contestant computes before the host waits."""
ROUNDS = 4
"""The number of rounds in which the contestants take turns."""


class Race:
    """Contestants on the same batches: each alone at first, then all in turn.

    `training` tells whether the work that is needed is that of an update.
    """

    def __init__(
        self, setup: Setup, config: ModelConfig, batches: list[Both], *, training: bool
    ) -> None:
        self.setup, self.batches = setup, pinned(setup, batches)
        packed = [batch.packed for batch in batches]
        self.tokens = sum(len(batch.packed.ids) for batch in packed)
        self.padded = sum(part["input_ids"].numel() for batch in batches for part in batch.padded)
        self.work = sum(needed(batch, config, training=training) for batch in packed)
        self.peak = 1 / min(map(self.seconds_per_flop, (256,) if setup.dry else (4096, 8192)))
        self.rows: dict[str, dict[str, Any]] = {}
        self.rates: dict[str, list[float]] = {}
        self.entered: dict[str, Work] = {}

    def seconds_per_flop(self, size: int) -> float:
        """Return the least of some measurements of square matrix products."""
        left, right = torch.randn(2, size, size, device=self.setup.device).bfloat16()
        product = partial(torch.mm, left, right)
        return min(self.setup.seconds_of_one(product, 8) for _ in range(8)) / (2 * size**3)

    def run(self, contestants: dict[str, Callable[[], Work]]) -> Iterator[Found]:
        """Yield a row after every contestant, and again after the rounds, which replace it."""
        for name, build in contestants.items():
            yield self.setup.attempt(name, partial(self.enter, name, build))
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

    def enter(self, name: str, build: Callable[[], Work]) -> dict[str, Any]:
        """Set a contestant up, compute all batches to warm up, and time them once."""
        work = build()
        first = self.setup.seconds_of_one(partial(work, self.batches[:1]))
        memory = step_memory(self.setup, partial(work, self.batches))
        seconds = self.setup.seconds_of_one(partial(work, self.batches))
        self.rows[name] = {
            "step_memory_gib": round(memory, 3),
            "first_call_seconds": round(first, 2),
        }
        self.entered[name], self.rates[name] = work, [self.tokens / seconds]
        return self.row(name)

    def row(self, name: str) -> dict[str, Any]:
        """Return what is known of a contestant by now; the first round only warms up.

        An MFU counts the work that real tokens need, relative to the matrix products' peak in this
        process.
        """
        rates = self.rates[name][1:] or self.rates[name]
        flops = summary(rates)["median"] / self.tokens * self.work
        theirs = self.rates.get("transformers", [])[1:] or self.rates.get("transformers", [])
        return {
            "tokens_per_second": summary(rates),
            "over_transformers": (
                summary([rate / other for rate, other in zip(rates, theirs, strict=False)])
                if theirs
                else None
            ),
            "mfu": round(flops / self.peak, 4),
            **self.rows[name],
            "matmul_peak_tflops": round(self.peak / 1e12, 3),
            "tokens_per_batch": round(self.tokens / len(self.batches)),
            "padded_tokens_per_batch": round(self.padded / len(self.batches)),
            "rounds": len(rates),
        }


def stages_case(setup: Setup, *, length: int, ragged: bool) -> Iterator[Found]:
    """Measure each stage at one length, the rows that matter most first."""
    config = setup.config()
    batches = make_batches(config, setup.tokens(65536), length, setup.count(BATCHES), ragged=ragged)
    ours = {name: partial(own_training, setup, config, stage) for name, stage in STAGES.items()}
    theirs = partial(their_training, setup, config)
    race = Race(setup, config, batches, training=True)
    yield from race.run(
        {
            "compiled": ours["compiled"],
            "compiled, bf16 residual": ours["compiled, bf16 residual"],
            "transformers": partial(theirs, compiled=False),
            "transformers, compiled": partial(theirs, compiled=True),
            "eager": ours["eager"],
        }
    )


TRAININGS: dict[str, Case] = {
    "base 128 ragged": partial(stages_case, length=128, ragged=True),
    "base 512 ragged": partial(stages_case, length=512, ragged=True),
    "base 128 full": partial(stages_case, length=128, ragged=False),
    "base 512 full": partial(stages_case, length=512, ragged=False),
}
