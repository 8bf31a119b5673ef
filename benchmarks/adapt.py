"""What it gains to continue from a model on the text of a task before it is fine-tuned.

Three models of one size are fine-tuned on 100 labelled rows, on more, and on all of them, each with
several seeds: the published encoder; the same one after the recipe `adapt` on the sentences of the
task's training set, without their labels; and random weights after the same recipe. Fine-tuning has
the default settings, which depend on the number of rows. Finished steps are not repeated, and the
results file keeps the rows that it has, so that tasks and models may be measured on different days.

    python -m benchmarks.adapt --data FOLDER --work FOLDER [--tasks sst-2 conll-2003] [--seeds 3]
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bertkit.finetuning.grid import all_results

from benchmarks.quality_data import dataset, make_slices
from benchmarks.record import (
    ROOT,
    data_folder,
    made,
    new_parser,
    start_model,
    summary,
    write_result,
)
from benchmarks.speedrun import finish_run
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.config import read_recipe
from bertkit.console import Console
from bertkit.corpus.from_text import TextOptions, store_from_text
from bertkit.files import read_json, write_text
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.settings import FinetuneSettings, Grid
from bertkit.tasks.data import TaskData
from bertkit.training.device import choose_precision
from bertkit.training.recipe import PretrainRecipe

METRICS = {"sst-2": "accuracy", "conll-2003": "f1"}
ROWS = (100, 300, 1_000, 3_000, 0)
"""The numbers of labelled rows; 0 for all."""
MODELS = ("published encoder", "adapted to the task's text", "trained on the task's text alone")
SENTENCES_OF_A_DOCUMENT = 100


def write_corpus(found: TaskData, path: Path) -> None:
    """Write the training sentences without labels, one a line, in documents of a hundred.

    Those of the dev set are not read.
    """
    texts = [" ".join(one.words) if hasattr(one, "words") else one.text for one in found.train]
    starts = range(0, len(texts), SENTENCES_OF_A_DOCUMENT)
    documents = ["\n".join(texts[at : at + SENTENCES_OF_A_DOCUMENT]) for at in starts]
    write_text(path, "\n\n".join(documents) + "\n")


def adapted(corpus: Path, work: Path, *, scratch: bool) -> Path:
    """Continue from the encoder, or begin with random weights of its size, on a text."""
    start = read_pretrained(start_model())
    out = work / ("scratch" if scratch else "adapted")
    text = TextOptions(text=(str(corpus),), tokenizer=start_model(), language="lines")
    recipe = read_recipe(PretrainRecipe, "adapt")
    if scratch:
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
        sizes = {name: getattr(start.config, name) for name in names}
        recipe = replace(recipe, model=replace(recipe.model, **sizes))
    store = store_from_text(text, work / "corpus")
    init_from = None if scratch else start_model()
    finish_run(recipe, store, out, "adapt", init_from)
    return out / "model"


def scores(
    found: TaskData, model: Path, rows: int, seeds: int, out: Path, metric: str
) -> list[float]:
    """Fine-tune on a fixed random choice of rows, and return the dev score of each seed."""
    train: Sequence[Any] = found.train
    if rows and rows < len(train):
        train = random.Random(0).sample(list(train), rows)
    data = replace(found, train=train)
    with Console(interval=60) as console:
        finetune(
            data, model, out, settings=FinetuneSettings(grid=Grid(seeds=seeds)), console=console
        )
    return [round(100 * one.scores["dev"].get(metric, 0.0), 2) for one in all_results(out)]


def measure(
    task: str, data: Path, work: Path, seeds: int, limit: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Fine-tune each model on each number of labelled rows; yield a name and what was found."""
    make_slices(data, work / "slices")
    found = dataset(task, data, work / "slices", 512)
    home, metric = work / task, METRICS[task]
    write_corpus(found, home / "text.txt")
    for number, name in enumerate(MODELS):
        model = start_model()
        if number:
            model = adapted(home / "text.txt", home, scratch=number == 2)
        for rows in [n for n in ROWS if not limit or 0 < n <= limit]:
            found_scores = scores(found, model, rows, seeds, home / f"{rows}-{number}", metric)
            print(task, rows, name, found_scores, flush=True)
            case = f"{task}, {rows or len(found.train):,} rows, {name}"
            yield case, {"seeds": len(found_scores), metric: summary(found_scores)}


def place(case: tuple[str, Any]) -> tuple[int, int, int]:
    """Return the key by which the results file's rows are sorted: task, model, labelled rows."""
    task, rows, model = re.fullmatch(r"(\S+), ([\d,]+) rows, (.+)", case[0]).groups()  # type: ignore[union-attr]
    return [*METRICS].index(task), MODELS.index(model), int(rows.replace(",", ""))


def main() -> None:
    """Measure every task, and write each number into the results file as soon as it is known."""
    parser = new_parser(__doc__, work="runs/adapt")
    parser.add_argument("--tasks", nargs="+", choices=METRICS, default=[*METRICS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=int, default=0, help="the maximum number of labelled rows")
    arguments = parser.parse_args()
    data, stored = data_folder(arguments.data), ROOT / "results" / "adapt.json"
    how = made(choose_precision("auto", torch.device("cpu")))
    for task in arguments.tasks:
        cases = measure(task, data, arguments.work, arguments.seeds, arguments.limit)
        for case, row in cases:
            before = read_json(stored) if stored.is_file() else {"rows": {}, "made": []}
            rows = dict(sorted((before["rows"] | {case: row}).items(), key=place))
            write_result("adapt", rows, {"made": sorted({*before["made"], how})})


if __name__ == "__main__":
    main()
