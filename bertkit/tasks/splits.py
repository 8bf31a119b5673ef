"""Labelled inputs that are held out, or scored in folds: equal ones stay together.

A model that was trained on an input knows its label, so that scores on equal inputs say nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from operator import attrgetter
from typing import Any

from bertkit.errors import BertkitError
from bertkit.processes import DATA_SPLIT, keyed_rng
from bertkit.tasks.task import Task, label_counts
from bertkit.text.documents import TextCounts

USUAL_SHARE = 0.1
"""The share of the training data that is held out by default."""

Split = tuple[str, Sequence[Any]]  # A name, such as dev-mismatched, and the examples


def folded(value: Any) -> Any:
    """Return a digest of each text that ignores case and white space, in tuples, too."""
    if isinstance(value, tuple):
        return tuple(map(folded, value))
    if not isinstance(value, str):
        return value
    text = " ".join(value.split()).casefold()
    return blake2b(text.encode(errors="surrogatepass"), digest_size=16).digest()


def note_equal_inputs(
    task: Task, train: Sequence[Any], others: Mapping[Any, Sequence[Any]], counts: TextCounts
) -> None:
    """Count equal inputs with different labels, and inputs of other files that training has."""
    key, golds = attrgetter(*task.input_fields), dict[Any, Any]()
    for example in train:
        gold = task.gold_value(example)
        if golds.setdefault(folded(key(example)), gold) != gold:
            counts.note("equal inputs with different labels, kept", example.location)
    for split, inputs in others.items():
        for example in inputs:
            if folded(key(example)) in golds:
                counts.note(f"{split} input that training has, too, kept", example.location)


def group_inputs(
    kind: type[Task], inputs: Sequence[Any]
) -> tuple[list[list[int]], list[set[str]], list[int]]:
    """Return groups of inputs that stay together, their labels, and a random order of groups."""
    key, owner = attrgetter(*kind.input_fields), dict[Any, Any]()
    groups: dict[Any, list[int]] = {}
    for number, example in enumerate(inputs):
        # a sentence that several documents have is with the first of them
        text = folded(key(example))
        named = folded(getattr(example, kind.group_by)) if kind.group_by else text
        groups.setdefault(owner.setdefault(text, named), []).append(number)
    labels = [
        {*label_counts(inputs[i] for i in group)} if kind.has_labels else set()
        for group in groups.values()
    ]
    return list(groups.values()), labels, keyed_rng(0, DATA_SPLIT).permutation(len(groups)).tolist()


def rarest_labels(labels: Sequence[set[str]]) -> list[str]:
    """Return the label of each group that the fewest groups have, "" for a group without any."""
    counts = Counter(chain.from_iterable(labels))
    return [min(names, key=lambda name: (counts[name], name), default="") for names in labels]


def fold_numbers(kind: type[Task], inputs: Sequence[Any], folds: int) -> list[int]:
    """Return the fold of each input, from 1; all folds have about as many groups of each label."""
    groups, labels, order = group_inputs(kind, inputs)
    if len(groups) < folds:
        raise BertkitError(f"only {len(groups)} groups of equal inputs, too few for {folds} folds")
    numbers, strata = [0] * len(inputs), rarest_labels(labels)
    for position, group in enumerate(sorted(order, key=strata.__getitem__)):
        for i in groups[group]:
            numbers[i] = 1 + position % folds
    return numbers


def hold_out(
    kind: type[Task], inputs: Sequence[Any], share: float, counts: TextCounts
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split inputs into training data and a share of the groups of each label for dev, rounded up.

    If that were more than a quarter of all, as with thousands of labels, rare labels share a share.
    Training has every label; those that dev lacks, because of too few inputs, are counted.
    """
    if not 0 < share < 1:
        raise BertkitError(f"--dev-share must be between 0 and 1, got {share}; or give --dev")
    groups, labels, order = group_inputs(kind, inputs)
    left, strata = Counter(chain.from_iterable(labels)), rarest_labels(labels)
    sizes = Counter(strata)
    most = max(1 / 4, share) * len(groups) + 1
    if sum(min(math.ceil(share * size), size - 1) for size in sizes.values()) > most:
        strata = [name if share * sizes[name] >= 1 else "" for name in strata]
        sizes = Counter(strata)
    seen, held, out = Counter[str](), Counter[str](), set[int]()
    for group in order:
        name = strata[group]
        seen[name] += 1
        due = held[name] < math.ceil(round(share * seen[name], 9)) and seen[name] < sizes[name]
        if due and all(left[label] > 1 for label in labels[group]):
            held[name] += 1
            left -= Counter(labels[group])
            out.update(groups[group])
    train = [example for i, example in enumerate(inputs) if i not in out]
    dev = [inputs[i] for i in sorted(out)]
    for label in sorted(left.keys() - label_counts(dev).keys()) if kind.has_labels else ():
        counts.note("label with too few inputs to hold one out, kept", f"label {label!r}")
    if not dev:
        raise BertkitError(
            f"only {len(inputs)} inputs in {len(groups)} groups of equal ones or of one document, "
            "too few to hold some out for dev; check the columns, or give --dev"
        )
    return train, dev
