"""`bertkit demo`: the whole workflow on text that comes with bertkit, without downloads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bertkit.checkpoints.pretrained import load_pretraining_model
from bertkit.config import read_recipe
from bertkit.console import Console
from bertkit.corpus.prepare import prepare
from bertkit.corpus.store import TokenStore
from bertkit.demo.data import (
    CHANGED,
    LabelledTask,
    gather_corpus,
    labelled_task,
    score_word_counts,
    tune_and_test,
)
from bertkit.files import write_json, write_text
from bertkit.model.heads import PretrainingModel
from bertkit.predict.pretrained import Predictor
from bertkit.report.pretraining import write_report
from bertkit.tokenizer.learn import learn_vocabulary
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import choose_device
from bertkit.training.journal import read_journal
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import PretrainRecipe

VOCABULARY = 2500
HELD_OUT_SHARE = 0.05
SEEDS = (1, 2, 3)
COUNTING = "TF-IDF (word 1-2-grams) + logistic regression"
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
    """Return the test accuracy of the baseline, and of each seed for both initial weights."""
    found = {COUNTING: [score_word_counts(task)], "random initial weights": [], "pre-trained": []}
    console.start(2 * len(SEEDS), title="fine-tuning", unit="runs")
    for seed in SEEDS:
        torch.manual_seed(seed)
        untrained = PretrainingModel(model.config)
        for name, start in (("random initial weights", untrained), ("pre-trained", model)):
            found[name].append(tune_and_test(start, tokenizer, task, seed))
            console.update({"done": sum(map(len, found.values())) - 1})
    console.close()
    return found


def sections(
    accuracies: dict[str, list[float]], task: LabelledTask, predictor: Predictor
) -> list[dict[str, Any]]:
    """Return the demo's sections of the report."""
    shown = task.test[0]
    genuine, damaged = shown.choices if shown.label == 0 else reversed(shown.choices)
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
                f"the other, {CHANGED} words are replaced by words that are about as frequent.",
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
    """Run the whole demo in the folder `out`, or resume one that was stopped.

    Returns:
        None if the demo is complete, else the number of the signal that stopped pre-training.
    """
    gathered = gather_corpus(console)
    documents = gathered.documents
    text = "\n\n".join(documents)
    path = out / "text" / "docstrings.txt"
    if not path.is_file() or path.read_text(encoding="utf-8") != text:
        write_text(path, text)  # an unfinished store refuses a file that was written again
    console.say(
        f"text: {len(text.splitlines()):,} lines, {len(text) / 1e6:.1f} MB of short sentences"
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
    task = labelled_task(gathered, tokenizer)
    accuracies = compare_starts(model, tokenizer, task, console)
    parts = sections(accuracies, task, Predictor(model, tokenizer, choose_device("cpu")))
    write_json(out / "demo.json", {"sections": parts, "accuracies": accuracies})
    console.say(*demo_summary(out, parts))
    console.say(f"report: {write_report(out)}")
    return None


def demo_store(out: Path, documents: Sequence[str], console: Console) -> TokenStore:
    """Learn the vocabulary and prepare the store, unless an earlier call finished it."""
    if (out / "store" / "manifest.json").is_file():
        return TokenStore(out / "store")
    vocabulary = learn_vocabulary(documents, VOCABULARY)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    tokenizer.save(out / "tokenizer")
    console.say(f"vocabulary: {tokenizer.size:,} tokens")
    text = str(out / "text" / "docstrings.txt")
    folder = out / "store"
    return prepare([text], tokenizer, folder, held_out=HELD_OUT_SHARE, console=console)


def demo_summary(out: Path, parts: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the lines that sum up the demo's results in the terminal."""
    records = read_journal(out / "journal.jsonl")
    start = next(record for record in records if record["kind"] == "start")
    last = [record for record in records if record["kind"] == "evaluation"][-1]
    yield (
        f"held out: MLM loss {last['mlm_loss']:.2f} (unigram entropy "
        f"{start['baselines']['unigram_entropy']:.2f}), MLM accuracy {last['mlm_accuracy']:.1%} "
        f"(most frequent token {start['baselines']['most_frequent_accuracy']:.1%})"
    )
    for part in parts:
        yield part["title"]
        yield from part["paragraphs"]
        for row in part["table"]["rows"]:
            yield "  " + "   ".join(row)
