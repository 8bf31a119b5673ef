"""Who takes part in the inference benchmark: the peers and bertkit, on one model directory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.exports import export, fused_operators
from benchmarks.peers import Contestant, OnnxPeer, TransformersPeer, build_head, tune
from benchmarks.record import precisions
from benchmarks.workloads import Workload
from bertkit.checkpoints.huggingface import load_model
from bertkit.model.inference import possible_modes
from bertkit.predict.engine import Engine
from bertkit.tasks.task import Encoded, Item, ItemPart, Items

REFERENCE = "transformers fp32, sorted"
AS_GIVEN = "transformers fp32, padded as given"

Row = dict[str, Any]


def fast_modes() -> list[str]:
    """Of bertkit, those that this processor has instructions for."""
    return [mode for mode in possible_modes() if mode == "int8" or mode in precisions()]


class Bertkit:
    """Bertkit's inference as a contestant: the one place that knows how it is called."""

    def __init__(self, folder: Path, head: str, mode: str) -> None:
        self.head = head
        model = load_model(folder, lambda config: build_head(head, config)).model
        self.engine = Engine(model, torch.device("cpu"), mode)

    def run(self, sequences: Sequence[Encoded]) -> list[np.ndarray]:
        """See `Contestant`."""
        items = Items(
            [Item(i, [ItemPart((sequence,))]) for i, sequence in enumerate(sequences)],
            *(len(sequences), 0, {}),
        )
        outputs = self.engine.run(items)
        return [parts[0][0] if self.head == "classification" else parts[0] for parts in outputs]


@dataclass(frozen=True)
class Field:
    """The contestants of one head, each as a function that builds it."""

    makers: dict[str, Callable[[], Contestant]]
    details: Row
    """What the peers were given."""


def make_field(
    model: Path, onnx: Path, workload: Workload, batches: Sequence[int], every: int = 8
) -> Field:
    """All contestants, onnxruntime's with the graph and batch size that are fastest here."""
    head = workload.head
    makers: dict[str, Callable[[], Contestant]] = {}
    for name, precision, by_length in (
        (AS_GIVEN, "fp32", False),
        *((f"transformers {precision}, sorted", precision, True) for precision in precisions()),
    ):
        makers[name] = partial(
            TransformersPeer, model, head, precision=precision, by_length=by_length
        )
    graphs, details = export(model, head, onnx), {}
    for precision in ("fp32", "int8"):
        paths = {name: path for name, path in graphs.items() if name.endswith(precision)}
        name, batch, rates = tune(paths, workload.sequences, batches=batches, every=every)
        makers[f"onnxruntime {precision}"] = partial(OnnxPeer, paths[name], batch)
        details[f"onnxruntime {precision}"] = {
            "graph": name,
            "batch": batch,
            "fused_operators": {name: fused_operators(path) for name, path in paths.items()},
            "tokens_per_second_by_graph_and_batch": rates,
        }
    for mode in fast_modes():
        makers[f"bertkit {mode}"] = partial(Bertkit, model, head, mode)
    return Field(makers, details)


def prepare(
    field: Field, sequences: Sequence[Encoded]
) -> tuple[dict[str, Contestant], dict[str, float]]:
    """Build each contestant; the seconds from its files to its answer to the first text."""
    import transformers.models.bert.modeling_bert  # noqa: F401 (loading libraries does not count)

    contestants, seconds = {}, {}
    for name, make in field.makers.items():
        started = time.perf_counter()
        contestants[name] = make()
        contestants[name].run(sequences[:1])
        seconds[name] = time.perf_counter() - started
    return contestants, seconds
