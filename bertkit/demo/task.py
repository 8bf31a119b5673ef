"""The demo's labelled task: which package is a docstring from?

It is tested on docstrings of modules that neither pre-training nor tuning has seen, and that stand
in no other module either.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bertkit.demo.docstrings import Docstring, is_apart
from bertkit.errors import BertkitError
from bertkit.examples.generator import MASKS, generator
from bertkit.examples.packed import Packed, pack
from bertkit.model.heads import ClassificationModel, PretrainingModel
from bertkit.objectives import Sum, Sums, right
from bertkit.tokens.tokenizer import Tokenizer
from bertkit.training.loop import LoopSettings, evaluate, train_steps
from bertkit.training.optimizer import build_optimizer, learning_rate

FAMILIES = 8
LABELLED = 400
"""Labelled docstrings that tuning sees: few, as in practice."""
TESTED = 1000
EPOCHS = 8
BATCH = 16
PEAK = 5e-4


@dataclass(frozen=True)
class LabelledBatch:
    """Packed docstrings with the index of their family."""

    packed: Packed
    labels: torch.Tensor
    """(sequences,) int64."""

    @property
    def counts(self) -> dict[str, int]:
        """What the loss is divided by."""
        return {"sequences": len(self.labels)}

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> LabelledBatch:
        """The same batch on another device."""
        labels = self.labels.to(device, non_blocking=non_blocking)
        return LabelledBatch(self.packed.to(device, non_blocking=non_blocking), labels)


class LabelledTask(NamedTuple):
    """Which package is a docstring from?"""

    families: list[str]
    train: list[tuple[list[int], int]]
    """(ids, family) of docstrings of known modules."""
    test: list[tuple[list[int], int]]
    """The same, of the modules set apart."""


def labelled_task(
    docstrings: Sequence[Docstring], tokenizer: Tokenizer, longest: int
) -> LabelledTask:
    """Choose the families with the most docstrings and draw the same number of each.

    Left out: docstrings of fewer than 12 or more than `longest` tokens, repeated ones, and those
    that stand in modules on both sides.
    """
    sides: dict[str, set[bool]] = defaultdict(set)
    for docstring in docstrings:
        sides[docstring.text].add(is_apart(docstring.module))
    encoded = {d.text: d for d in docstrings if len(sides[d.text]) == 1}
    ids = dict(zip(encoded, tokenizer.encode_batch(list(encoded)), strict=True))
    usable: dict[tuple[str, bool], list[list[int]]] = defaultdict(list)
    for text, docstring in encoded.items():
        if 12 <= len(ids[text]) <= longest - 2:
            sequence = [tokenizer.cls_id, *ids[text], tokenizer.sep_id]
            usable[docstring.family, is_apart(docstring.module)].append(sequence)
    sizes = Counter(
        {
            family: min(len(usable[family, False]), len(usable[family, True]))
            for family, _ in list(usable)
        }
    )
    families = sorted(family for family, size in sizes.most_common(FAMILIES) if size >= 10)
    if len(families) < 2:
        raise BertkitError("this Python has too few docstrings for the demo's labelled task")
    rng = generator(0, MASKS)
    drawn: dict[bool, list[tuple[list[int], int]]] = {False: [], True: []}
    for label, family in enumerate(families):
        for apart, wanted in ((False, LABELLED), (True, TESTED)):
            pool = usable[family, apart]
            order = rng.permutation(len(pool))[: wanted // len(families)]
            drawn[apart] += [(pool[i], label) for i in order]
    return LabelledTask(families, drawn[False], drawn[True])


def classification_objective(model: ClassificationModel, batch: LabelledBatch) -> Sums:
    """Cross entropy and right answers of a batch."""
    logits = model(batch.packed).float()
    loss = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="sum")
    return {
        "loss": Sum(loss, "sequences"),
        "accuracy": Sum(right(logits, batch.labels), "sequences"),
    }


def labelled_batches(
    examples: Sequence[tuple[list[int], int]], order: Sequence[int], size: int
) -> Iterator[LabelledBatch]:
    """Batches of examples in an order, longest first within a batch."""
    for start in range(0, len(order), size):
        chosen = sorted(
            (examples[i] for i in order[start : start + size]), key=lambda e: -len(e[0])
        )
        labels = torch.tensor([label for _, label in chosen])
        yield LabelledBatch(pack([ids for ids, _ in chosen]), labels)


def tune(
    start: PretrainingModel | None, like: PretrainingModel, task: LabelledTask, seed: int
) -> float:
    """Accuracy on the test docstrings after tuning from pre-trained or random weights.

    Args:
        start: pre-trained, or None for the same network with random weights.
        like: gives the size.
        task: the labelled docstrings.
        seed: of the new weights and of the order of examples.
    """
    torch.manual_seed(seed)
    model = ClassificationModel(like.config, len(task.families))
    if start is not None:
        model.encoder.load_state_dict(start.encoder.state_dict())
    steps = EPOCHS * -(-len(task.train) // BATCH)
    settings = LoopSettings(
        device=torch.device("cpu"),
        precision="fp32",
        seed=seed,
        max_gradient_norm=1.0,
        learning_rate=lambda step: learning_rate(
            step, peak=PEAK, warmup_steps=steps // 10, total_steps=steps
        ),
    )
    optimizer = build_optimizer(model, learning_rate=PEAK)

    def batches() -> Iterator[tuple[list[LabelledBatch], None]]:
        for epoch in range(EPOCHS):
            order = generator(seed, MASKS, epoch=epoch).permutation(len(task.train)).tolist()
            for batch in labelled_batches(task.train, order, BATCH):
                yield [batch], None

    model.train()
    for _ in train_steps(model, optimizer, classification_objective, batches(), settings):
        pass
    tests = labelled_batches(task.test, range(len(task.test)), 64)
    means, _ = evaluate(model, classification_objective, tests, settings)
    return means["accuracy"]
