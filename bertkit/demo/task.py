"""The demo's labelled task: which package is a docstring from?

It is tested on docstrings of modules that neither pre-training nor tuning has seen, and that stand
in no other module either.
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bertkit.demo.docstrings import Docstring, is_apart
from bertkit.errors import BertkitError
from bertkit.examples.generator import SPLIT, generator
from bertkit.model.heads import PretrainingModel
from bertkit.model.saving import foreign_tensors
from bertkit.model.start import Start
from bertkit.tasks.classify import Classify
from bertkit.tasks.inputs import TextInput
from bertkit.tasks.task import run_model
from bertkit.tasks.tune import RunSettings, Tuning, tune
from bertkit.tokens.tokenizer import Tokenizer
from bertkit.training.journal import Journal

CPU = torch.device("cpu")
FAMILIES = 8
LABELLED = 400
"""Labelled docstrings that tuning sees: few, as in practice."""
TESTED = 1000
EPOCHS = 8
BATCH = 16
PEAK = 5e-4


class LabelledTask(NamedTuple):
    """Which package is a docstring from?"""

    families: list[str]
    train: list[TextInput]
    """Docstrings of known modules, labelled with their family."""
    test: list[TextInput]
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
    usable: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for text, docstring in encoded.items():
        if 12 <= len(ids[text]) <= longest - 2:
            usable[docstring.family, is_apart(docstring.module)].append(text)
    sizes = Counter(
        {
            family: min(len(usable[family, False]), len(usable[family, True]))
            for family, _ in list(usable)
        }
    )
    families = sorted(family for family, size in sizes.most_common(FAMILIES) if size >= 10)
    if len(families) < 2:
        raise BertkitError("this Python has too few docstrings for the demo's labelled task")
    rng = generator(0, SPLIT)
    drawn: dict[bool, list[TextInput]] = {False: [], True: []}
    for family in families:
        for apart, wanted in ((False, LABELLED), (True, TESTED)):
            pool = usable[family, apart]
            order = rng.permutation(len(pool))[: wanted // len(families)]
            drawn[apart] += [
                TextInput(f"{family}-{i}", pool[i], None, family, family) for i in order
            ]
    return LabelledTask(families, drawn[False], drawn[True])


def start_from(model: PretrainingModel, tokenizer: Tokenizer) -> Start:
    """The weights of a network in memory as a start for tuning."""
    return Start(Path("memory"), model.config, foreign_tensors(model, "bert"), tokenizer, {})


def tune_and_test(
    model: PretrainingModel, tokenizer: Tokenizer, task: LabelledTask, seed: int
) -> float:
    """Accuracy on the test docstrings after tuning.

    Args:
        model: pre-trained, or with random weights.
        tokenizer: the model's.
        task: the labelled docstrings.
        seed: of the head and of the order of examples.
    """
    kind = Classify(tuple(task.families), longest=model.config.max_position_embeddings)
    train, test = (kind.items(side, tokenizer) for side in (task.train, task.test))
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder), tensorboard=False)
        tuned = tune(
            *(start_from(model, tokenizer), kind, train),
            RunSettings(batch_size=BATCH, learning_rate=PEAK, epochs=EPOCHS, seed=seed),
            Tuning(),
            device=CPU,
            precision="fp32",
            keep_head=False,
            journal=journal,
            progress=lambda record: None,
        )
        journal.close()
    predictions = kind.decode(task.test, test, run_model(tuned, test, CPU))
    return kind.score(task.test, predictions)["accuracy"]
