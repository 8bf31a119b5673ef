"""`bertkit demo`: the whole story on text that every Python carries, without a download.

The text is the reference topics of `pydoc_data` and the docstrings of the standard library and of
bertkit's own dependencies, read from their source files without importing them. A fifth of the
modules is set apart: the labelled task (which package does a docstring come from?) is tested on
docstrings of those modules, which neither pre-training nor tuning has seen.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sysconfig
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from bertkit.config import read_recipe
from bertkit.corpus.prepare import PrepareOptions, prepare
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.examples.generator import MASKS, generator
from bertkit.examples.packed import Packed, pack
from bertkit.files import write_json, write_text
from bertkit.model.directory import load_pretraining_model
from bertkit.model.heads import ClassificationModel, PretrainingModel
from bertkit.predict.predictor import Predictor
from bertkit.report import write_report
from bertkit.tokens.learn import learn_vocabulary
from bertkit.tokens.tokenizer import Tokenizer
from bertkit.training.devices import choose_device
from bertkit.training.journal import Console, read_journal
from bertkit.training.loop import LoopSettings, Sum, Sums, evaluate, train_steps
from bertkit.training.optimizer import build_optimizer, learning_rate
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import PretrainRecipe

LIBRARIES = ("numpy", "torch", "matplotlib", "rich", "fsspec")
LARGEST_SOURCE = 400_000
"""Bytes; larger source files are generated tables."""
VOCABULARY = 6000
HELD_OUT = 0.05
FAMILIES = 8
LABELLED = 400
"""Labelled docstrings that tuning sees: few, as in practice."""
TESTED = 1000
EPOCHS = 8
SEEDS = (1, 2, 3)
MASKED_SENTENCES = (
    "Return a copy of the [MASK] with all leading whitespace removed.",
    "Raise a ValueError if the [MASK] is not found.",
    "If the file does not [MASK], an exception is raised.",
)


class Docstring(NamedTuple):
    """One docstring and where it is from."""

    module: str
    family: str
    text: str


def source_files() -> Iterator[tuple[str, Path]]:
    """(module name, source file) of the standard library and of some dependencies, sorted."""
    roots = [(Path(sysconfig.get_paths()["stdlib"]), "")]
    for library in LIBRARIES:
        found = importlib.util.find_spec(library)
        if found is not None and found.origin:
            roots.append((Path(found.origin).parent, library))
    skipped = {"test", "tests", "idle_test", "site-packages", "lib2to3", "testing", "__pycache__"}
    for root, prefix in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            if skipped.isdisjoint(parts) and path.stat().st_size <= LARGEST_SOURCE:
                yield ".".join((prefix, *parts) if prefix else parts), path


def clean(docstring: str) -> str:
    """A docstring's prose: no examples, no parameter tables, one paragraph a line."""
    paragraphs = re.split(r"\n\s*\n", docstring)
    prose = [" ".join(p.split()) for p in paragraphs if not re.search(r">>>|----|::|^\s*\.\. ", p)]
    return "\n".join(p for p in prose if len(p.split()) >= 4)


def read_docstrings(module: str, path: Path) -> list[Docstring]:
    """Every docstring of a module as prose; none where the source does not parse."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (text := clean(ast.get_docstring(node) or "")):
            found.append(Docstring(module, module.partition(".")[0], text))
    return found


def is_apart(module: str) -> bool:
    """Whether a module belongs to the fifth that training never sees."""
    return hashlib.blake2b(module.encode(), digest_size=1).digest()[0] < 256 // 5


def gather(console: Console) -> tuple[list[str], list[Docstring]]:
    """(documents to pre-train on, all docstrings)."""
    from pydoc_data.topics import topics

    console.start(None, title="reading docstrings", unit="modules")
    by_module: dict[str, list[Docstring]] = {}
    for number, (module, path) in enumerate(source_files(), start=1):
        by_module[module] = read_docstrings(module, path)
        if number % 100 == 0:
            console.update({"done": number})
    console.close()
    documents = [clean(text) for text in topics.values()]
    for module, docstrings in by_module.items():
        if not is_apart(module) and len(docstrings) > 1:
            documents.append("\n".join(docstring.text for docstring in docstrings))
    everything = [docstring for found in by_module.values() for docstring in found]
    return [text for text in dict.fromkeys(documents) if text], everything


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

    Left out: docstrings of fewer than 12 or more than `longest` tokens, and repeated ones.
    """
    encoded: dict[str, Docstring] = {d.text: d for d in docstrings}
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
    correct = (logits.argmax(-1) == batch.labels).sum().float()
    return {"loss": Sum(loss, "sequences"), "accuracy": Sum(correct, "sequences")}


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
    size = 16
    steps = EPOCHS * -(-len(task.train) // size)
    settings = LoopSettings(
        device=torch.device("cpu"),
        precision="fp32",
        seed=seed,
        max_gradient_norm=1.0,
        learning_rate=lambda step: learning_rate(
            step, peak=5e-4, warmup_steps=steps // 10, total_steps=steps
        ),
    )
    optimizer = build_optimizer(model, learning_rate=5e-4)

    def batches() -> Iterator[tuple[list[LabelledBatch], None]]:
        for epoch in range(EPOCHS):
            order = generator(seed, MASKS, epoch=epoch).permutation(len(task.train)).tolist()
            for batch in labelled_batches(task.train, order, size):
                yield [batch], None

    model.train()
    for _ in train_steps(model, optimizer, classification_objective, batches(), settings):
        pass
    tests = labelled_batches(task.test, range(len(task.test)), 64)
    means, _ = evaluate(model, classification_objective, tests, settings)
    return means["accuracy"]


def compare(
    model: PretrainingModel, task: LabelledTask, console: Console
) -> dict[str, list[float]]:
    """Test accuracies from pre-trained and from random weights, one a seed."""
    found: dict[str, list[float]] = {"pre-trained": [], "random": []}
    console.start(2 * len(SEEDS), title="tuning", unit="runs")
    for seed in SEEDS:
        for name, start in (("pre-trained", model), ("random", None)):
            found[name].append(tune(start, model, task, seed))
            console.update({"done": sum(map(len, found.values()))})
    console.close()
    return found


def sections(
    accuracies: dict[str, list[float]], task: LabelledTask, predictor: Predictor
) -> list[dict[str, Any]]:
    """The demo's part of the report."""
    labels = Counter(label for _, label in task.test)
    chance = max(labels.values()) / len(task.test)
    guesses = [
        [
            sentence,
            ", ".join(f"{c.piece} {c.probability:.0%}" for c in predictor.fill_mask(sentence)[0]),
        ]
        for sentence in MASKED_SENTENCES
    ]
    rows = [
        [name, f"{median(values):.1%}", f"{min(values):.1%} to {max(values):.1%}", str(len(values))]
        for name, values in accuracies.items()
    ]
    return [
        {
            "title": "Does pre-training help?",
            "paragraphs": [
                f"Which of {len(task.families)} packages ({', '.join(task.families)}) is a "
                f"docstring from? {len(task.train)} labelled docstrings to learn from, "
                f"{len(task.test)} to test on, of modules that training never saw; always the "
                f"commonest label: {chance:.1%}."
            ],
            "table": {
                "columns": ["weights at the start", "median accuracy", "range", "seeds"],
                "rows": rows,
            },
        },
        {
            "title": "Filling masks",
            "paragraphs": ["The model's best guesses for each [MASK]."],
            "table": {"columns": ["text", "guesses"], "rows": guesses},
        },
    ]


def run_demo(out: Path, console: Console, recipe: PretrainRecipe | None = None) -> int | None:
    """The whole demo in the folder `out`; a stopped one goes on.

    Returns:
        None when all was done, else the number of the signal that stopped pre-training.
    """
    documents, docstrings = gather(console)
    text = "\n\n".join(documents)
    write_text(out / "text" / "docstrings.txt", text)
    console.say(
        f"text: {len(documents):,} documents, {len(text) / 1e6:.1f} MB from this Python itself"
    )
    store = demo_store(out, documents, console)
    stopped = pretrain(
        recipe or read_recipe(PretrainRecipe, "demo"),
        store,
        out,
        recipe_name="demo",
        console=console,
    )
    if stopped is not None:
        return stopped
    model = load_pretraining_model(out / "model")
    tokenizer = store.tokenizer
    task = labelled_task(docstrings, tokenizer, model.config.max_position_embeddings)
    accuracies = compare(model, task, console)
    parts = sections(accuracies, task, Predictor(model, tokenizer, choose_device("cpu")))
    write_json(out / "demo.json", {"sections": parts, "accuracies": accuracies})
    for line in summary(out, parts):
        console.say(line)
    console.say(f"report: {write_report(out)}")
    return None


def demo_store(out: Path, documents: Sequence[str], console: Console) -> TokenStore:
    """Learn the vocabulary and prepare the store, unless an earlier demo did."""
    if (out / "store" / "manifest.json").is_file():
        return TokenStore(out / "store")
    vocabulary = learn_vocabulary(documents, VOCABULARY)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    tokenizer.save(out / "tokenizer")
    console.say(f"vocabulary: {tokenizer.size:,} pieces learnt")
    text = str(out / "text" / "docstrings.txt")
    return prepare([text], tokenizer, out / "store", PrepareOptions(held_out=HELD_OUT))


def summary(out: Path, parts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What the demo found, in lines for the terminal."""
    records = read_journal(out / "journal.jsonl")
    start = next(record for record in records if record["kind"] == "start")
    last = [record for record in records if record["kind"] == "evaluation"][-1]
    yield (
        f"held out: MLM loss {last['mlm_loss']:.2f} (unigram entropy "
        f"{start['baselines']['unigram_entropy']:.2f}), MLM accuracy {last['mlm_accuracy']:.1%} "
        f"(commonest piece {start['baselines']['most_frequent_accuracy']:.1%}), NSP accuracy "
        f"{last['nsp_accuracy']:.1%}"
    )
    for part in parts:
        yield f"{part['title']} {' '.join(part['paragraphs'])}"
        for row in part["table"]["rows"]:
            yield "  " + "   ".join(row)
