"""Quality of fine-tuning against transformers' Trainer: same start, data and hyper-parameters.

`python -m benchmarks.reference` makes the Trainer's runs, this module bertkit's; both skip what is
done in the work folder. Sets that are not used as a whole are fixed slices in their official
formats, which both sides read (`make_slices`). The table has medians, spreads, and whether
bertkit's median is within one standard deviation of the reference or better.

The results file keeps the scores of each run by seed. A run takes up to an hour, so tasks need not
be measured on one day: those that are not named keep their scores.

    python -m benchmarks.quality --data FOLDER [--tasks NAME ...]
"""

from __future__ import annotations

import csv
import io
import json
import random
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.record import (
    ROOT,
    data_folder,
    made,
    new_parser,
    start_model,
    summary,
    write_result,
)
from bertkit import FinetuneSettings, Grid, TrainingSettings, finetune
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.files import read_json, write_json, write_text
from bertkit.predict.load import load_predictor
from bertkit.progress import Console
from bertkit.tasks.types import DataFiles, TaskData, load_dataset
from bertkit.training.device import choose_precision


class Setting(NamedTuple):
    """The settings of a run; all warm up for 10 %, decay linearly, and have weight decay 0.01."""

    batch: int
    learning_rate: float
    epochs: int
    metrics: tuple[str, ...] = ("accuracy",)
    """The metrics that are compared."""
    start: str = ""
    """The task whose model, of bertkit's first seed, both sides begin with; "" for the encoder."""

    @property
    def grid(self) -> dict[str, Any]:
        """The fields of a `Grid` that the setting fixes."""
        return {
            "batch_size": (self.batch,),
            "learning_rate": (self.learning_rate,),
            "epochs": (self.epochs,),
        }


ANSWER_METRICS = ("exact_match", "f1")
SETTINGS = {
    "mrpc": Setting(32, 1e-4, 3, ("accuracy", "f1")),
    "cola": Setting(32, 1e-4, 3, ("matthews",)),
    "rte": Setting(32, 1e-4, 3),
    "sts-b": Setting(32, 1e-4, 3, ("pearson", "spearman")),
    "sst-2": Setting(32, 1e-4, 1),
    "mnli-10k": Setting(32, 1e-4, 2),
    "qqp-10k": Setting(32, 1e-4, 2),
    "arc-easy": Setting(16, 1e-4, 2),
    "conll-2003": Setting(32, 1e-4, 2, ("f1",)),
    "squad-1.1": Setting(16, 1e-4, 1, ANSWER_METRICS),
    "squad-2.0": Setting(16, 1e-4, 1, ANSWER_METRICS, "squad-1.1"),
}

SAMPLES = {
    "mnli-10k": ("MNLI-10k", {"text": "premise", "pair": "hypothesis"}),
    "qqp-10k": ("QQP-10k", {"text": "question1", "pair": "question2"}),
}
"""Task -> the folder and the columns of a sample of one of GLUE's large sets, as JSON lines."""

SST_TRAIN, SQUAD_TRAIN, SQUAD2_TRAIN = 20_000, 8_000, 4_000
SQUAD2_DEV_SHARE = 0.3


# Data and starts ----------------------------------------------------------------------------------


def dataset(task: str, data: Path, slices: Path, positions: int = 512) -> TaskData:
    """Return the data of a task, as `bertkit finetune` reads it."""
    columns: dict[str, Any] | None = None
    if task == "arc-easy":
        columns = {"text": "0", "choices": ("1", "2", "3", "4"), "label": "5", "header": False}
        kind, files = "multiple-choice", split_files(slices / "arc-easy", "csv")
    elif task in SAMPLES:
        folder, columns = SAMPLES[task]
        kind, files = "classification", split_files(data / "glue" / folder, "jsonl")
    elif task == "conll-2003":
        kind, files = task, DataFiles(data=data / "conll2003")
    elif task == "squad-1.1":
        train = str(slices / "squad" / "train.json")
        kind, files = task, DataFiles(train=train, dev=str(data / "squad" / "dev-v1.1.json"))
    elif task == "squad-2.0":
        kind, files = task, split_files(slices / "squad2", "json")
    else:
        kind, files = task, DataFiles(data=slices if task == "sst-2" else data / "glue")
    return load_dataset(kind, files, columns, positions=positions)


def split_files(folder: Path, ending: str) -> DataFiles:
    """Return the training and dev files of a folder."""
    return DataFiles(train=str(folder / f"train.{ending}"), dev=str(folder / f"dev.{ending}"))


def start_folder(setting: Setting, data: Path, work: Path, precision: str) -> Path:
    """Return the model that both sides begin with; one tuned on another task is made here."""
    if not setting.start:
        return start_model()
    grid = Grid(**SETTINGS[setting.start].grid)
    training = TrainingSettings(precision=precision)
    result = finetune(
        dataset(setting.start, data, work / "slices"),
        start_model(),
        work / "starts" / setting.start,
        settings=FinetuneSettings(grid=grid, training=training),
    )
    return result.model


def make_slices(data: Path, out: Path) -> None:
    """Write the slices of sets that are not used as a whole; they are the same every time."""
    if not (out / "SST-2" / "train.tsv").is_file():
        sst(data / "glue" / "SST-2", out / "SST-2")
    if not (out / "arc-easy" / "dev.csv").is_file():
        arc(data / "arc-easy", out / "arc-easy")
    if not (out / "squad" / "train.json").is_file():
        squad(data / "squad", out / "squad")
    if not (out / "squad2" / "dev.json").is_file():
        squad2(data / "squad", out / "squad2")


def sst(source: Path, out: Path) -> None:
    """Write 20,000 random training sentences and the whole dev file."""
    header, *rows = (source / "train.tsv").read_text(encoding="utf-8").splitlines()
    sample = sorted(random.Random(0).sample(range(len(rows)), SST_TRAIN))
    write_text(out / "train.tsv", "\n".join([header, *(rows[i] for i in sample)]) + "\n")
    write_text(out / "dev.tsv", (source / "dev.tsv").read_text(encoding="utf-8"))


def arc(source: Path, out: Path) -> None:
    """Write the questions with four choices; the Trainer's model reads no others."""
    for split, name in (("train", "train2251"), ("dev", "dev570")):
        with (source / f"arc_easy_{name}.csv").open(encoding="utf-8", newline="") as file:
            rows = [row for row in csv.reader(file) if row[-1] in set("ABCD") and all(row)]
        text = io.StringIO(newline="")
        csv.writer(text).writerows(rows)
        write_text(out / f"{split}.csv", text.getvalue())


def squad(source: Path, out: Path) -> None:
    """Write 8,000 random training questions whose answer's place is certain."""
    articles = read_articles(source / "train-v1.1.json")
    ambiguous = set(json.loads((source / "train-v1.1.ambiguous-ids.json").read_text()))
    certain = [q["id"] for q in questions(articles) if q["id"] not in ambiguous]
    sample = set(random.Random(0).sample(certain, SQUAD_TRAIN))
    write_json(out / "train.json", {"version": "1.1", "data": [only(a, sample) for a in articles]})


def squad2(source: Path, out: Path) -> None:
    """Divide the articles of the dev file of 2.0 into two parts: there is no training file here.

    Training takes 4,000 random questions of its part.
    """
    articles = read_articles(source / "dev-v2.0.json")
    random.Random(0).shuffle(articles)
    total = len(questions(articles))
    dev: list[Any] = []
    while len(questions(dev)) < SQUAD2_DEV_SHARE * total:
        dev.append(articles.pop())
    ids = [q["id"] for q in questions(articles)]
    sample = set(random.Random(0).sample(ids, SQUAD2_TRAIN))
    write_json(out / "train.json", {"version": "v2.0", "data": [only(a, sample) for a in articles]})
    write_json(out / "dev.json", {"version": "v2.0", "data": dev})


def read_articles(path: Path) -> list[Any]:
    """Read the articles of a SQuAD file."""
    return json.loads(path.read_text(encoding="utf-8"))["data"]


def questions(articles: list[Any]) -> list[Any]:
    """Return all questions of some articles."""
    return [q for article in articles for p in article["paragraphs"] for q in p["qas"]]


def only(article: Any, ids: set[str]) -> Any:
    """Return an article with only the kept questions, and only the paragraphs that have one."""
    paragraphs = [
        {**p, "qas": [q for q in p["qas"] if q["id"] in ids]} for p in article["paragraphs"]
    ]
    return {**article, "paragraphs": [p for p in paragraphs if p["qas"]]}


# Runs ---------------------------------------------------------------------------------------------

Runs = dict[str, Any]
"""The runs of one side: "seeds", "made", and for each metric as many values in percent."""


def own_runs(task: str, seeds: int, data: Path, work: Path, precision: str) -> Runs:
    """Make bertkit's runs, except for those that are done."""
    setting, folder = SETTINGS[task], work / "bertkit" / task
    start = read_pretrained(start_folder(setting, data, work, precision))
    grid = Grid(**setting.grid, seeds=seeds)
    with Console(interval=60) as console:
        result = finetune(
            dataset(task, data, work / "slices", start.config.max_position_embeddings),
            start,
            folder,
            settings=FinetuneSettings(grid=grid, training=TrainingSettings(precision=precision)),
            console=console,
        )
    noted = folder.with_suffix(".json")  # the code of the first of the runs
    if not noted.is_file():
        write_json(noted, made(precision))
    runs = [(run.settings["seed"], run.scores["dev"]) for run in result.runs]
    return runs_of(task, runs, [read_json(noted)] * len(runs))


def reference_runs(task: str, data: Path, work: Path, precision: str) -> Runs:
    """Return the reference's runs; saved SQuAD models are scored here, once."""
    runs, how = [], []
    for path in sorted((work / "reference").glob(f"{task}-[0-9]*.json")):
        values = read_json(path)
        if not values["scores"]:
            values["scores"] = score_saved(task, path.with_suffix(""), data, work, precision)
            write_json(path, values)
        runs.append((values["seed"], values["scores"]))
        how.append(values["made"])
    return runs_of(task, runs, how)


def runs_of(task: str, runs: Sequence[tuple[int, Mapping[str, float]]], how: list[str]) -> Runs:
    """Return the runs of one side as the results file has them, with metrics in percent."""
    metrics = SETTINGS[task].metrics
    scores = {name: [round(100 * scores[name], 2) for _, scores in runs] for name in metrics}
    return {"seeds": [seed for seed, _ in runs], "made": how, **scores}


def score_saved(
    task: str, folder: Path, data: Path, work: Path, precision: str
) -> dict[str, float]:
    """Score a model that the Trainer saved, with bertkit's windows and decoding."""
    read = dataset(task, data, work / "slices")
    predictor = load_predictor(folder, precision=precision)
    predictor.task = read.task
    [(_, inputs)] = read.dev
    results, _ = predictor.run(inputs)
    return read.task.calibrated(inputs, results).score(inputs, results)


def row(ours: list[float], theirs: list[float]) -> dict[str, Any]:
    """Return medians and spreads of values in percent, and the comparison of both sides.

    A single run of the Trainer has no deviation, and so no verdict.
    """
    measured: dict[str, Any] = {"bertkit": summary(ours), "bertkit_runs": len(ours)}
    if theirs:
        deviation = statistics.stdev(theirs) if len(theirs) > 1 else None
        difference = statistics.median(ours) - statistics.median(theirs)
        measured |= {
            "trainer": summary(theirs),
            "trainer_runs": len(theirs),
            "trainer_deviation": None if deviation is None else round(deviation, 2),
            "bertkit_minus_trainer": round(difference, 2),
            "within_one_deviation": None if deviation is None else difference >= -deviation,
        }
    return measured


def main() -> None:
    """Make bertkit's runs that are missing, then write the table of all tasks with both sides."""
    parser = new_parser(__doc__, work="runs/quality")
    parser.add_argument("--tasks", nargs="*", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=3, help="the number of bertkit's runs")
    parser.add_argument("--precision", default="auto", help="of bertkit's runs: fp32, bf16, auto")
    options = parser.parse_args()
    precision = choose_precision(options.precision, torch.device("cpu"))
    data, work = data_folder(options.data), options.work
    make_slices(data, work / "slices")
    stored = (options.out or ROOT / "results") / "quality.json"
    runs = read_json(stored)["runs"] if stored.is_file() else {}
    for task in options.tasks:
        runs[task] = {
            "bertkit": own_runs(task, options.seeds, data, work, precision),
            "trainer": reference_runs(task, data, work, precision),
        }
    rows = {
        f"{task}, {metric}": row(runs[task]["bertkit"][metric], runs[task]["trainer"][metric])
        for task in SETTINGS
        if task in runs
        for metric in SETTINGS[task].metrics
    }
    for name, values in rows.items():
        print(name, values)
    settings = {task: setting._asdict() for task, setting in SETTINGS.items()}
    print(write_result("quality", rows, {"settings": settings, "runs": runs}, options.out))


if __name__ == "__main__":
    main()
