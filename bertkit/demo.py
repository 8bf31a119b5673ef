"""`bertkit demo`: the whole workflow on text that every installation contains, without downloads.

The text consists of short sentences from reference topics and docstrings, which are read without
importing their modules. The task is to tell a sentence from the same sentence with two words
exchanged. It is tested on sentences of modules that neither pre-training nor fine-tuning has seen,
and that occur in no other module.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import re
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from bertkit.checkpoints.pretrained import PretrainedWeights, load_pretraining_model
from bertkit.corpus.prepare import store_from_text
from bertkit.errors import BertkitError
from bertkit.files import write_json, write_text
from bertkit.finetuning.runs import RunSettings, TrainingSettings
from bertkit.finetuning.train import TaskTraining
from bertkit.model.heads import PretrainingModel
from bertkit.predict.pretrained import Predictor
from bertkit.processes import DATA_SPLIT, keyed_rng
from bertkit.progress import JOURNAL, Console, read_journal
from bertkit.report.findings import run_findings
from bertkit.report.pretraining import write_report
from bertkit.tasks.multiple_choice import ChoiceExample, MultipleChoice
from bertkit.tasks.sequences import run_task
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import choose_device
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import PretrainRecipe, read_recipe

TEXT_LIBRARIES = (
    *("torch", "sympy", "networkx", "numpy", "scipy", "sklearn", "matplotlib", "fontTools"),
    *("huggingface_hub", "fsspec", "jinja2", "joblib", "rich", "cyclopts"),
)
"""Packages that are installed with bertkit; those that are absent are left out."""
LARGEST_SOURCE = 400_000
"""The maximum size of a source file in bytes; larger ones are generated tables."""


class DemoText(NamedTuple):
    """Short sentences from docstrings."""

    documents: list[str]
    """One sentence per line; the first document is about topics, each other one from a module."""
    apart: list[str]
    """Sentences of the modules that training never sees, none of which is in `documents`."""


def source_files() -> Iterator[tuple[str, Path]]:
    """Yield (module name, source file) of the standard library and of bertkit's dependencies."""
    roots = [(Path(sysconfig.get_paths()["stdlib"]), "")]
    for library in TEXT_LIBRARIES:
        spec = importlib.util.find_spec(library)
        if spec is not None and spec.origin:
            roots.append((Path(spec.origin).parent, library))
    skipped = {"test", "tests", "idle_test", "site-packages", "lib2to3", "testing", "__pycache__"}
    for root, prefix in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            small = path.is_file() and path.stat().st_size <= LARGEST_SOURCE  # not a broken link
            if small and skipped.isdisjoint(parts):
                yield ".".join((prefix, *parts) if prefix else parts), path


QUOTES = re.compile(r'"""|\'\'\'')


def find_docstrings(source: str) -> Iterator[str]:
    """Yield the triple-quoted strings that begin a line, which is faster than parsing."""
    end = 0
    while opening := QUOTES.search(source, end):
        start, close = opening.end(), source.find(opening[0], opening.end())
        if close < 0:
            return
        before = source[source.rfind("\n", 0, opening.start()) + 1 : opening.start()]
        if before.strip() in {"", "r", "R"}:
            yield inspect.cleandoc(source[start:close])
        end = close + 3


def clean_docstring(docstring: str) -> str:
    """Return a docstring's prose, one paragraph per line, without examples or parameter tables."""
    paragraphs = re.split(r"\n\s*\n", docstring)
    prose = [" ".join(p.split()) for p in paragraphs if not re.search(r">>>|----|::|^\s*\.\. ", p)]
    return "\n".join(p for p in prose if len(p.split()) >= 4)


def short_sentences(prose: str) -> Iterator[str]:
    """Yield the sentences of 4 to 13 words that contain no code."""
    for sentence in re.split(r"\n|(?<=[.!?]) +(?=[A-Z])", prose):
        if 4 <= len(sentence.split()) <= 13 and re.fullmatch(
            r"[A-Z][^()\[\]{}=_/\\*|<>`]*\.", sentence
        ):
            yield sentence


def spelling(sentence: str) -> str:
    """Return what two sentences have in common if they differ in case, digits and signs only."""
    return " ".join(re.findall(r"[a-z]+", sentence.lower()))


def gather_corpus(console: Console) -> DemoText:
    """Read the sentences of all docstrings; a repeated sentence is kept where it is first."""
    from pydoc_data.topics import topics

    console.start(None, title="reading docstrings", unit="modules")
    texts = {False: ["\n".join(map(clean_docstring, topics.values()))], True: []}
    for number, (module, path) in enumerate(source_files(), start=1):
        docstrings = find_docstrings(path.read_text(encoding="utf-8", errors="ignore"))
        digest = hashlib.blake2b(module.encode(), digest_size=1).digest()[0]
        never_seen = digest < 256 // 5  # training never sees a fifth of all modules
        texts[never_seen].append("\n".join(map(clean_docstring, docstrings)))
        if number % 100 == 0:
            console.update({"done": number})
    console.close()
    seen: dict[str, str] = {}
    documents = [list(new_sentences(text, seen)) for text in texts[False]]
    apart = [sentence for text in texts[True] for sentence in new_sentences(text, seen)]
    return DemoText(["\n".join(docstrings) for docstrings in documents if docstrings], apart)


def new_sentences(text: str, seen: dict[str, str]) -> Iterator[str]:
    """Yield the short sentences that are not in `seen`, and add them."""
    for sentence in short_sentences(text):
        if seen.setdefault(spelling(sentence), sentence) is sentence:
            yield sentence


LABELLED, TESTED = 2000, 1000
FITTING = 14
"""The maximum length of a sentence in tokens, as pre-training mostly sees such."""


class LabelledTask(NamedTuple):
    """The task of choosing the genuine one of two sentences."""

    train: list[ChoiceExample]
    """Sentences of the text to pre-train on, each with a version that has two words exchanged."""
    test: list[ChoiceExample]
    """The same for sentences of the modules that training never sees."""


def labelled_task(text: DemoText, tokenizer: Tokenizer) -> LabelledTask:
    """Make the examples of the task from the demo's text."""
    known = [sentence for document in text.documents for sentence in document.splitlines()]
    sides = []
    for row, (sentences, wanted) in enumerate(((known, LABELLED), (text.apart, TESTED))):
        lengths = map(len, tokenizer.encode_batch(sentences))
        short = [s for s, length in zip(sentences, lengths, strict=True) if length <= FITTING]
        sides.append(damaged_pairs(short, wanted, keyed_rng(0, DATA_SPLIT, row=row)))
    if min(map(len, sides)) < 20:
        raise BertkitError("this Python has too few docstrings for the demo's labelled task")
    return LabelledTask(*sides)


def damaged_pairs(
    sentences: Sequence[str], wanted: int, rng: np.random.Generator
) -> list[ChoiceExample]:
    """Pair up to `wanted` sentences with a version in which two words are exchanged."""
    pairs: list[ChoiceExample] = []
    for number in rng.permutation(len(sentences))[:wanted].tolist():
        genuine = sentences[number]
        words = genuine.removesuffix(".").split()
        first, second = rng.choice(np.arange(1, len(words)), 2, replace=False)
        words[first], words[second] = words[second], words[first]
        damaged = f"{' '.join(words)}."
        label = len(pairs) % 2
        choices = (damaged, genuine) if label else (genuine, damaged)
        if damaged != genuine:
            pairs.append(ChoiceExample(str(number), "", choices, label, f"sentence {number}"))
    return pairs


def tune_and_test(
    model: PretrainingModel, tokenizer: Tokenizer, task: LabelledTask, seed: int
) -> float:
    """Fine-tune a model on the task and return its accuracy on the test sentences."""
    weights = dict(model.state_dict())
    start = PretrainedWeights(Path("memory"), model.config, weights, tokenizer, {})
    kind = MultipleChoice(max_length=model.config.max_position_embeddings)
    train, test = (kind.items(side, tokenizer) for side in task)
    run = RunSettings(batch_size=32, learning_rate=1e-3, epochs=2, seed=seed)
    cpu = torch.device("cpu")
    with TaskTraining(
        start, kind, train, run, TrainingSettings(), device=cpu, precision="fp32", keep_head=False
    ) as loop:
        for _ in loop.updates():
            pass
        tuned = loop.finish()
    results = kind.decode(task.test, test, run_task(tuned, test, cpu))
    return kind.score(task.test, results)["accuracy"]


VOCABULARY = 2500
SEEDS = (1, 2, 3)
MASKED_SENTENCES = (
    "Return a list [MASK] strings that describe the options.",
    "Returns True [MASK] the object is a valid name.",
    "This method must [MASK] called before the model is trained.",
    "Return the number of [MASK] in the graph.",
    "Compute the eigenvalues of a square [MASK].",
    "If the file does not [MASK], an exception is raised.",
    "Close the [MASK] when all the data has been read.",
)


def compare_starts(
    model: PretrainingModel, tokenizer: Tokenizer, task: LabelledTask, console: Console
) -> dict[str, list[float]]:
    """Return the test accuracy of each seed for both initial weights."""
    accuracies: dict[str, list[float]] = {"random initial weights": [], "pre-trained": []}
    console.start(2 * len(SEEDS), title="fine-tuning", unit="runs")
    for seed in SEEDS:
        torch.manual_seed(seed)
        untrained = PretrainingModel(model.config)
        for name, start in (("random initial weights", untrained), ("pre-trained", model)):
            accuracies[name].append(tune_and_test(start, tokenizer, task, seed))
            console.update({"done": sum(map(len, accuracies.values()))})
    console.close()
    return accuracies


def sections(
    accuracies: dict[str, list[float]], task: LabelledTask, predictor: Predictor
) -> list[dict[str, Any]]:
    """Return the demo's sections of the report."""
    shown = task.test[0]
    genuine, damaged = shown.choices if shown.gold == 0 else reversed(shown.choices)
    guesses = []
    for sentence in MASKED_SENTENCES:
        best = predictor.fill_mask(sentence)[0]
        guesses.append([sentence, ", ".join(f"{c.token} {c.probability:.0%}" for c in best)])
    rows = [
        [name, f"{median(values):.1%}", f"{min(values):.1%} to {max(values):.1%}", str(len(values))]
        for name, values in accuracies.items()
    ]
    return [
        {
            "title": "Does pre-training help?",
            "paragraphs": [
                "The task is proofreading: of two versions of a sentence, which one is genuine? In "
                "the other, two words are exchanged.",
                f"Genuine: {genuine}",
                f"Damaged: {damaged}",
                f"Each model learns from {len(task.train):,} pairs and is tested on "
                f"{len(task.test):,} from modules that training never saw. Guessing gives 50%.",
            ],
            "table": {"columns": ["model", "median accuracy", "range", "runs"], "rows": rows},
        },
        {
            "title": "Filling masks",
            "paragraphs": ["The model's most probable tokens for each [MASK]."],
            "table": {"columns": ["text", "predictions"], "rows": guesses},
        },
    ]


def run_demo(out: Path, console: Console, recipe: PretrainRecipe | None = None) -> int | None:
    """Run or resume the demo in a folder; return the signal that stopped it, None if complete."""
    gathered = gather_corpus(console)
    text, path = "\n\n".join(gathered.documents), out / "text" / "docstrings.txt"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)  # an unfinished store refuses a file that was written again
    store = store_from_text([path], out, vocabulary_size=VOCABULARY, console=console)
    recipe = recipe or read_recipe("demo")
    if stopped := pretrain(recipe, store, out, recipe_name="demo", console=console):
        return stopped
    model, tokenizer = load_pretraining_model(out / "model"), store.tokenizer
    task = labelled_task(gathered, tokenizer)
    accuracies = compare_starts(model, tokenizer, task, console)
    parts = sections(accuracies, task, Predictor(model, tokenizer, choose_device("cpu")))
    write_json(out / "demo.json", {"sections": parts, "accuracies": accuracies})
    for part in parts:
        console.say(part["title"], *("  " + "   ".join(row) for row in part["table"]["rows"]))
    console.say(*run_findings(out, read_journal(out / JOURNAL)), f"report: {write_report(out)}")
    return None
