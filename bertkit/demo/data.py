"""The demo's text and its labelled task, made from files that every Python installation contains.

The text consists of reference topics and docstrings, which are read without importing their
modules. The task is to predict which package a docstring is from. It is tested on docstrings of
modules that neither pre-training nor fine-tuning has seen, and that occur in no other module.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.checkpoints.save import foreign_tensors
from bertkit.console import Console
from bertkit.datasets.examples import TextExample
from bertkit.errors import BertkitError
from bertkit.finetuning.run import train_task
from bertkit.finetuning.settings import RunSettings, TrainingSettings
from bertkit.model.heads import PretrainingModel
from bertkit.pretraining_data.rng import DATA_SPLIT, keyed_rng
from bertkit.tasks.classification import Classification
from bertkit.tasks.task import run_model
from bertkit.tokenizer.wordpiece import Tokenizer

DOCUMENTED_LIBRARIES = ("numpy", "torch", "matplotlib", "rich", "fsspec")
LARGEST_SOURCE = 400_000
"""The maximum size of a source file in bytes; larger ones are generated tables."""


class Docstring(NamedTuple):
    """A docstring with its module and its family, which is the top-level package."""

    module: str
    family: str
    text: str


def source_files() -> Iterator[tuple[str, Path]]:
    """Yield (module name, source file) of the standard library and of some dependencies."""
    roots = [(Path(sysconfig.get_paths()["stdlib"]), "")]
    for library in DOCUMENTED_LIBRARIES:
        found = importlib.util.find_spec(library)
        if found is not None and found.origin:
            roots.append((Path(found.origin).parent, library))
    skipped = {"test", "tests", "idle_test", "site-packages", "lib2to3", "testing", "__pycache__"}
    for root, prefix in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if skipped.isdisjoint(parts) and path.stat().st_size <= LARGEST_SOURCE:
                yield ".".join((prefix, *parts) if prefix else parts), path


def clean_docstring(docstring: str) -> str:
    """Return a docstring's prose, one paragraph per line, without examples or parameter tables."""
    paragraphs = re.split(r"\n\s*\n", docstring)
    prose = [" ".join(p.split()) for p in paragraphs if not re.search(r">>>|----|::|^\s*\.\. ", p)]
    return "\n".join(p for p in prose if len(p.split()) >= 4)


def read_docstrings(module: str, path: Path) -> list[Docstring]:
    """Return the prose of every docstring of a module, or [] if the source does not parse."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := clean_docstring(ast.get_docstring(node) or "")):
            found.append(Docstring(module, module.partition(".")[0], text))
    return found


def is_apart(module: str) -> bool:
    """Return whether a module belongs to the fifth of all modules that training never sees."""
    return hashlib.blake2b(module.encode(), digest_size=1).digest()[0] < 256 // 5


def gather_corpus(console: Console) -> tuple[list[str], list[Docstring]]:
    """Return (documents to pre-train on, all docstrings)."""
    from pydoc_data.topics import topics

    console.start(None, title="reading docstrings", unit="modules")
    by_module: dict[str, list[Docstring]] = {}
    for number, (module, path) in enumerate(source_files(), start=1):
        by_module[module] = read_docstrings(module, path)
        if number % 100 == 0:
            console.update({"done": number})
    console.close()
    documents = [clean_docstring(text) for text in topics.values()]
    for module, docstrings in by_module.items():
        if not is_apart(module) and len(docstrings) > 1:
            documents.append("\n".join(docstring.text for docstring in docstrings))
    everything = [docstring for found in by_module.values() for docstring in found]
    return [text for text in dict.fromkeys(documents) if text], everything


MODULE_FAMILIES = 8
LABELLED_ROWS = 400
"""The number of labelled docstrings for fine-tuning, which is small, as in practice."""
TESTED = 1000
EPOCHS = 8
BATCH = 16
PEAK = 5e-4


class LabelledTask(NamedTuple):
    """The task of predicting which package a docstring is from."""

    families: list[str]
    train: list[TextExample]
    """Docstrings of the modules used in training, labelled with their family."""
    test: list[TextExample]
    """Labelled docstrings of the modules that training never sees."""


def labelled_task(
    docstrings: Sequence[Docstring], tokenizer: Tokenizer, max_length: int
) -> LabelledTask:
    """Choose the families with the most docstrings and draw up to the same number from each.

    Docstrings are left out if they have fewer than 12 tokens or do not fit in `max_length`, are
    repeated, or occur both in modules for training and in modules for testing.

    Raises:
        BertkitError: fewer than two families have enough docstrings.
    """
    sides: dict[str, set[bool]] = defaultdict(set)
    for docstring in docstrings:
        sides[docstring.text].add(is_apart(docstring.module))
    encoded = {d.text: d for d in docstrings if len(sides[d.text]) == 1}
    ids = dict(zip(encoded, tokenizer.encode_batch(list(encoded)), strict=True))
    usable: dict[tuple[str, bool], list[str]] = defaultdict(list)
    for text, docstring in encoded.items():
        if 12 <= len(ids[text]) <= max_length - 2:
            usable[docstring.family, is_apart(docstring.module)].append(text)
    sizes = Counter(
        {
            family: min(len(usable[family, False]), len(usable[family, True]))
            for family, _ in list(usable)
        }
    )
    families = sorted(family for family, size in sizes.most_common(MODULE_FAMILIES) if size >= 10)
    if len(families) < 2:
        raise BertkitError("this Python has too few docstrings for the demo's labelled task")
    rng = keyed_rng(0, DATA_SPLIT)
    drawn: dict[bool, list[TextExample]] = {False: [], True: []}
    for family in families:
        for apart, wanted in ((False, LABELLED_ROWS), (True, TESTED)):
            pool = usable[family, apart]
            order = rng.permutation(len(pool))[: wanted // len(families)]
            drawn[apart] += [
                TextExample(f"{family}-{i}", pool[i], None, family, family) for i in order
            ]
    return LabelledTask(families, drawn[False], drawn[True])


def pretrained_start(model: PretrainingModel, tokenizer: Tokenizer) -> PretrainedWeights:
    """Return the weights of a network in memory as the start of fine-tuning."""
    return PretrainedWeights(
        Path("memory"), model.config, foreign_tensors(model, "bert"), tokenizer, {}
    )


def tune_and_test(
    model: PretrainingModel, tokenizer: Tokenizer, task: LabelledTask, seed: int
) -> float:
    """Fine-tune a model on the task and return its accuracy on the test docstrings.

    Args:
        model: the model, which may be pre-trained or have random weights.
        tokenizer: the model's tokenizer.
        task: the labelled docstrings.
        seed: the seed of the head's initial weights and of the order of examples.
    """
    kind = Classification(tuple(task.families), max_length=model.config.max_position_embeddings)
    train, test = (kind.items(side, tokenizer) for side in (task.train, task.test))
    tuned = train_task(
        *(pretrained_start(model, tokenizer), kind, train),
        RunSettings(batch_size=BATCH, learning_rate=PEAK, epochs=EPOCHS, seed=seed),
        TrainingSettings(),
        device=torch.device("cpu"),
        precision="fp32",
        keep_head=False,
    )
    predictions = kind.decode(task.test, test, run_model(tuned, test, torch.device("cpu")))
    return kind.score(task.test, predictions)["accuracy"]
