"""The contestants of training and inference: each is set up once, then computes any batches.

Bertkit's differ in the attention kernel, in what is compiled, and in the precision, so that each
stage of the CUDA path is a row of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from bertkit.training.state import build_train_state

from benchmarks.gpu.batches import Both, Padded
from benchmarks.gpu.setup import Setup
from bertkit.model import attention
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.training.device import autocast
from bertkit.training.recipe import PretrainRecipe
from bertkit.training.step import LoopSettings, StepRecord, train_steps

Work = Callable[[Sequence[Both]], None]
"""Queues the work for some batches, one after the other; it copies them to the device."""

RATE = 1e-4


class Own(NamedTuple):
    """One way in which bertkit trains."""

    kernel: str = "auto"
    """The attention kernel; "auto" is what bertkit chooses."""
    compiled: bool = False
    """Whether to compile what `bertkit pretrain --compile` compiles."""
    precision: str = "bf16"
    """A precision of `LoopSettings`."""


STAGES = {
    "compiled": Own(compiled=True),
    "compiled, bf16 residual": Own(compiled=True, precision="bf16-residual"),
    "compiled, torch's flash attention": Own("flash", compiled=True),
    "eager": Own(),
}


@contextmanager
def chosen_kernel(kernel: str) -> Iterator[None]:
    """Make every attention of a block that leaves the choice to bertkit use one kernel."""
    own_choice = attention.choose_kernel
    if kernel != "auto":
        attention.choose_kernel = always(kernel)
    try:
        yield
    finally:
        attention.choose_kernel = own_choice


@functools.cache
def always(kernel: str) -> Callable[[Any], str]:
    """Return one and the same choice whenever it is asked for: another would be compiled anew."""
    return lambda query: kernel


def kernel_of(setup: Setup, own: Own) -> str:
    """Return the name of the attention kernel that training with dropout uses."""
    if own.kernel != "auto":
        return own.kernel
    dtype = torch.float32 if setup.dry else torch.bfloat16
    return attention.choose_kernel(torch.empty(8, 2, 64, device=setup.device, dtype=dtype))


Loop = Callable[[Iterable[Any]], Iterator[StepRecord[Any]]]


def own_loop(setup: Setup, config: ModelConfig, own: Own) -> Loop:
    """Set up bertkit's training: a function of steps that yields a record after each."""
    with setup.device:
        model = PretrainingModel(config).train()
    state = build_train_state(PretrainRecipe(), model, setup.device, compiled=own.compiled)
    settings = LoopSettings(
        device=setup.device, precision=own.precision, seed=0, max_gradient_norm=1.0,
        learning_rate=lambda step: RATE,
    )  # fmt: skip
    return lambda steps: train_steps(model, state.optimizer, state.loss_fn, steps, settings)


def backend(setup: Setup) -> str:
    """Return the compiler; in a dry run one that traces and generates no code."""
    return "eager" if setup.dry else "inductor"


def own_training(setup: Setup, config: ModelConfig, own: Own) -> Work:
    """Set up updates through bertkit's own loop."""
    loop = own_loop(setup, config, own)

    def work(batches: Sequence[Both]) -> None:
        with chosen_kernel(own.kernel):
            for _ in loop(([batch.packed], None) for batch in batches):
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
    if compiled:
        for layer in encoder.layers:
            layer.compile(dynamic=True, backend=backend(setup))

    @torch.inference_mode()
    def work(batches: Sequence[Both]) -> None:
        with chosen_kernel("padded" if setup.dry and compiled else "auto"):
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
            given = moved(part, setup.device)
            names = ("input_ids", "token_type_ids", "attention_mask")
            model(**{name: given[name] for name in names})

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
