"""Recipes against the clock: time to a held-out loss, and a BabyLM run on ten million words.

Every recipe in `benchmarks/speedruns` reads the same text with the same vocabulary of 16,000
tokens and is then evaluated on the same held-out examples: pairs of at most 64 tokens, cut and
masked as the paper does, whatever the recipe trains on. A recipe counts if its run ends at or below
the target. Its time is that of its updates, without evaluations, and is compared with that of the
recipe `two-cores`. BLiMP's dev split is shown beside it. Settings are chosen on the held-out loss
alone.

`--babylm` makes a run by BabyLM's rules instead: at most 10 million words, 10 epochs, and 6 hours
on two cores. The text is the first 7 million words of one part of English Wikipedia, in whole
documents, and the 3 million words of BabyLM's training sample: spoken English, talk with children,
books, subtitles and Simple Wikipedia. The recipe is `overnight` with six tenths of its updates; all
of BLiMP, which decided about no setting, is evaluated at the end.

    python -m benchmarks.speedrun --data FOLDER [--recipes NAME ...] [--seeds 0 1 2]
    python -m benchmarks.speedrun --data FOLDER --babylm

A finished run is not repeated, and one that was stopped is resumed. The speedrun's file is written
after each run and keeps the runs that it has; processors with AMX have a file of their own. The
SHA-256 of the weights is kept: a replay on the same machine ends with the same bytes.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.exports import processor_name
from benchmarks.record import ROOT, data_folder, made, new_parser, write_result
from bertkit import TextSource, TokenStore, load, pretrain
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.corpus.prepare import store_from_text
from bertkit.files import read_json, sha256_file, write_json, write_text
from bertkit.progress import read_journal
from bertkit.text.documents import TextCounts, read_documents
from bertkit.text.sentences import split_sentences
from bertkit.training.recipe import PretrainRecipe, read_recipe
from bertkit.training.start import HeldOut
from bertkit.training.step import LoopSettings, evaluate_batches, mean_losses
from experiments.blimp import evaluate, read_pairs

RECIPES = ROOT / "benchmarks" / "speedruns"
BASELINE = "two-cores"
"""The recipe whose time the others are compared with, and whose held-out examples all have."""
TARGET = 4.35
"""The MLM loss to reach, in nats per masked token: where `two-cores` of bertkit 0.1 ended."""

WIKIPEDIA_WORDS, MOST_WORDS, MOST_EPOCHS, MOST_HOURS = 7_000_000, 10_000_000, 10, 6
PARTS = ("bnc_spoken", "childes", "gutenberg", "open_subtitles", "simple_wiki")
STEPS = (2_400, 6_900, 900)
"""The updates of the three phases of `overnight` here."""
DOCUMENT_SENTENCES = 40
"""The sentences of a document, where the source does not say where one ends."""
HEADING = re.compile(r"= = = [^=]+ = = =")
SPEAKER = re.compile(r"(?:^|\s)\*[A-Z]{3}:\s")

Runs = dict[str, dict[str, dict[str, Any]]]
"""Recipe -> seed -> measurements."""


def recipe_of(name: str, **overrides: Any) -> PretrainRecipe:
    """Return a recipe of the speedrun."""
    return read_recipe(RECIPES / f"{name}.toml", overrides)


def evaluate_held_out(run: Path, store: TokenStore) -> dict[str, Any]:
    """Evaluate the model of a run on the held-out examples of the baseline's first phase."""
    recipe = recipe_of(BASELINE)
    model = read_pretrained(run).build(recipe.objectives.model, keep_head=True).model
    settings = LoopSettings(
        device=torch.device("cpu"),
        precision="fp32",
        seed=0,
        max_gradient_norm=1.0,
        learning_rate=lambda step: 0.0,
    )
    batches = HeldOut(recipe, store).batches(0)
    sums, counts = evaluate_batches(model, recipe.objectives.function(), batches, settings)
    loss = mean_losses(sums, counts)["mlm_loss"]
    return {"targets": counts["targets"], "mlm_loss": round(loss, 4)}


def finish_run(recipe: PretrainRecipe, store: TokenStore, out: Path, name: str) -> dict[str, Any]:
    """Make or finish a run and return its sizes; end the program if a signal stops it."""
    if pretrain(recipe, store, out, recipe_name=name) is not None:
        raise SystemExit("stopped; the same command goes on")
    records = read_journal(out / "journal.jsonl")
    steps = {record["step"]: record for record in records if record["kind"] == "step"}
    start = next(record for record in records if record["kind"] == "start")
    return {
        "made": [made(start["precision"])],
        "parameters": start["parameters"],
        "updates": max(steps),
        "training_tokens": sum(record["tokens"] for record in steps.values()),
        "seconds": round(sum(record["seconds"] for record in steps.values()), 2),
        "held_out_losses": [r["mlm_loss"] for r in records if r["kind"] == "evaluation"],
    }


def blimp(run: Path, data: Path, split: str) -> dict[str, Any]:
    """Return the accuracies of a run's model on BLiMP."""
    predictor = load(run, precision="fp32", device="cpu")
    return evaluate(predictor, read_pairs(data / "blimp", split))


def run_once(name: str, seed: int, store: TokenStore, data: Path, work: Path) -> dict[str, Any]:
    """Make or finish one run, and return its measurements."""
    out = work / f"{name}-{seed}"
    run = finish_run(recipe_of(name, **{"training.seed": seed}), store, out, name)
    del run["held_out_losses"]
    return {
        **run,
        "tokens_per_second": round(run["training_tokens"] / run["seconds"]),
        **evaluate_held_out(out, store),
        "blimp_dev_accuracy": round(blimp(out, data, "dev")["accuracy"], 4),
        "weights_sha256": sha256_file(out / "model" / "model.safetensors"),
    }


def rows_of(runs: Runs) -> dict[str, Any]:
    """Return a row for each recipe: medians over its seeds, and its time beside the baseline's."""

    def median(name: str, key: str) -> Any:
        return statistics.median(run[key] for run in runs[name].values())

    rows: dict[str, Any] = {}
    for name, seeds in runs.items():
        losses = [run["mlm_loss"] for run in seeds.values()]
        rows[name] = {
            "seeds": len(seeds),
            "parameters": median(name, "parameters"),
            "training_tokens": round(median(name, "training_tokens")),
            "minutes": round(median(name, "seconds") / 60, 1),
            "mlm_loss": round(median(name, "mlm_loss"), 3),
            "worst_mlm_loss": round(max(losses), 3),
            "seeds_at_the_target": sum(loss <= TARGET for loss in losses),
            "blimp_dev_accuracy": round(median(name, "blimp_dev_accuracy"), 4),
        }
        if BASELINE in runs:
            share = median(name, "seconds") / median(BASELINE, "seconds")
            rows[name]["share_of_baseline_time"] = round(share, 3)
    return rows


def speedrun(recipes: list[str], seeds: list[int], data: Path, work: Path, folder: Path) -> None:
    """Make the runs that are missing, and write the table after each."""
    text = data / "wikipedia" / "wiki_AA.txt.xz"
    store = store_from_text([text], work / "corpus", vocabulary_size=16_000)
    results = processor_name("speedrun")
    path = folder / f"{results}.json"
    runs: Runs = read_json(path)["runs"] if path.is_file() else {}
    for seed in seeds:
        for name in recipes:
            run = run_once(name, seed, store, data, work)
            print(name, seed, run, flush=True)
            runs.setdefault(name, {})[str(seed)] = run
            ordered = {known: runs[known] for known in recipe_names() if known in runs}
            details = {"target": TARGET, "corpus": store.content_hash, "runs": ordered}
            print(write_result(results, rows_of(ordered), details, folder), flush=True)


def recipe_names() -> list[str]:
    """Return the names of the recipes, the baseline first."""
    names = sorted(path.stem for path in RECIPES.glob("*.toml"))
    return sorted(names, key=lambda name: name != BASELINE)


# BabyLM -------------------------------------------------------------------------------------------


def babylm_documents(path: Path) -> Iterator[str]:
    """Yield the documents of one part of BabyLM's sample, with a sentence on each line."""
    for piece in HEADING.split(path.read_text(encoding="utf-8")):
        lines = [line for turn in SPEAKER.split(piece) for line in split_sentences(turn)]
        for first in range(0, len(lines), DOCUMENT_SENTENCES):
            yield "\n".join(lines[first : first + DOCUMENT_SENTENCES])


def wikipedia_documents(path: Path) -> Iterator[str]:
    """Yield the first documents of a part of Wikipedia, up to `WIKIPEDIA_WORDS` words."""
    words = 0
    [source] = TextSource.of([path]).files()
    for document in read_documents(source, TextCounts()):
        words += len(document.split())
        if words > WIKIPEDIA_WORDS:
            return
        yield "\n".join(line for line in document.splitlines() if line.strip())


def make_corpus(data: Path, folder: Path) -> dict[str, int]:
    """Write the text, unless it is there, and return the number of words of each part."""
    if (folder / "words.json").is_file():
        return dict(read_json(folder / "words.json"))
    parts = {"wikipedia": list(wikipedia_documents(data / "wikipedia" / "wiki_AA.txt.xz"))}
    for name in PARTS:
        parts[name] = list(babylm_documents(data / "babylm" / f"{name}.train"))
    words = {name: sum(len(text.split()) for text in texts) for name, texts in parts.items()}
    assert sum(words.values()) <= MOST_WORDS, words
    folder.mkdir(parents=True, exist_ok=True)
    for name, documents in parts.items():
        write_text(folder / f"{name}.txt", "\n\n".join(documents) + "\n")
    write_json(folder / "words.json", words)
    return words


def babylm(data: Path, work: Path, folder: Path) -> None:
    """Make or finish the run, evaluate it, and write its file."""
    words = make_corpus(data, work / "text")
    text = TextSource(tuple(str(work / "text" / f"{name}.txt") for name in words), format="text")
    store = store_from_text(text, work / "corpus", vocabulary_size=8_000)
    recipe = read_recipe("overnight")
    recipe = replace(recipe, phases=replace(recipe.phases, steps=STEPS))
    run = finish_run(recipe, store, work / "run", "overnight")
    epochs, hours = run["training_tokens"] / store.tokens, run["seconds"] / 3600
    assert epochs <= MOST_EPOCHS, epochs
    assert hours <= MOST_HOURS, hours
    scores = blimp(work / "run", data, "all")
    row = {
        "parameters": run["parameters"],
        "words": sum(words.values()),
        "epochs": round(epochs, 2),
        "hours": round(hours, 2),
        "mlm_loss": round(run["held_out_losses"][-1], 4),
        "blimp_accuracy": round(scores["accuracy"], 4),
        **{f"{name}_accuracy": round(share, 4) for name, share in scores["fields"].items()},
    }
    sets = {name: round(share, 4) for name, share in scores["sets"].items()}
    details = {"words_by_part": words, "sets": sets, "run": run}
    print(write_result("babylm", {"overnight": row}, details, folder))


def main() -> None:
    """Make the runs of the speedrun, or that of BabyLM."""
    parser = new_parser(__doc__, work="runs/speedrun")
    parser.add_argument("--recipes", nargs="+", choices=recipe_names(), default=recipe_names())
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--babylm", action="store_true", help="the run by BabyLM's rules")
    options = parser.parse_args()
    data, work = data_folder(options.data), options.work
    folder = options.out or ROOT / "results"
    if options.babylm:
        babylm(data, work / "babylm", folder)
    else:
        speedrun(options.recipes, options.seeds, data, work, folder)


if __name__ == "__main__":
    main()
