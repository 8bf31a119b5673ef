"""The settings, the data and the starting models of the quality benchmark, the same for both sides.

Sets that are not used as a whole are fixed slices in their official formats (`make_slices`), which
both sides read: bertkit and the reference.
"""

from __future__ import annotations

import csv
import io
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

from bertkit.datasets.benchmarks import DataFiles
from bertkit.datasets.columns import ChoiceColumns
from bertkit.reproduce.data import GLUE_SAMPLES

from benchmarks.record import start_model
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.files import write_json, write_text
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.runs import FinetuneSettings, Grid, TrainingSettings
from bertkit.tasks.sequences import QuestionWindows, WindowLengths, WordWindows
from bertkit.tasks.types import TaskData, load_dataset


class Setting(NamedTuple):
    """The settings of a run; all warm up for 10 %, decay linearly, and have weight decay 0.01."""

    batch: int
    learning_rate: float
    epochs: int
    start: str = ""
    """The task whose model, of bertkit's first seed, both sides begin with; "" for the encoder."""


SETTINGS = {
    "mrpc": Setting(32, 1e-4, 3),
    "cola": Setting(32, 1e-4, 3),
    "rte": Setting(32, 1e-4, 3),
    "sts-b": Setting(32, 1e-4, 3),
    "arc-easy": Setting(16, 1e-4, 2),
    "conll-2003": Setting(32, 1e-4, 2),
    "conll-2003-documents": Setting(2, 1e-4, 2),
    "sst-2": Setting(32, 1e-4, 1),
    "mnli-10k": Setting(32, 1e-4, 2),
    "qqp-10k": Setting(32, 1e-4, 2),
    "squad-1.1": Setting(16, 1e-4, 1),
    "squad-2.0": Setting(16, 1e-4, 1, "squad-1.1"),
}


ARC = ChoiceColumns(text="0", choices=("1", "2", "3", "4"), label="5", header=False)
SAMPLES = {f"{task}-10k": sample for task, sample in GLUE_SAMPLES.items()}
"""Task -> the folder and the columns of a sample of one of GLUE's large sets, as JSON lines."""

SST_TRAIN = 20_000
SQUAD_TRAIN = 8_000
SQUAD2_DEV_SHARE = 0.3
SQUAD2_TRAIN = 4_000


def dataset(task: str, data: Path, slices: Path, positions: int) -> TaskData:
    """Return the data of a task, as `bertkit finetune` reads it."""
    glue = {"sst-2": slices}
    lengths: WindowLengths = WindowLengths()
    if task == "arc-easy":
        train, dev = (f"{slices}/arc-easy/{split}.csv" for split in ("train", "dev"))
        return load_dataset(
            "multiple-choice", DataFiles(train=train, dev=dev), ARC, lengths, positions
        )
    if task in SAMPLES:
        folder, columns = SAMPLES[task]
        train, dev = (str(data / "glue" / folder / f"{split}.jsonl") for split in ("train", "dev"))
        return load_dataset(
            "classification", DataFiles(train=train, dev=dev), columns, lengths, positions
        )
    if task in ("conll-2003", "conll-2003-documents"):
        context = "document" if task == "conll-2003-documents" else "sentence"
        task, lengths = "conll-2003", WordWindows(context=context)
        files = DataFiles(data=data / "conll2003")
    elif task == "squad-1.1":
        lengths = QuestionWindows()
        train = str(slices / "squad" / "train.json")
        files = DataFiles(train=train, dev=str(data / "squad" / "dev-v1.1.json"))
    elif task == "squad-2.0":
        lengths = QuestionWindows()
        files = DataFiles(train=f"{slices}/squad2/train.json", dev=f"{slices}/squad2/dev.json")
    else:
        files = DataFiles(data=glue.get(task, data / "glue"))
    return load_dataset(task, files, None, lengths, positions)


def grid_values(setting: Setting) -> dict[str, Any]:
    """Return the fields of a `Grid` that a setting fixes."""
    return {
        "batch_size": (setting.batch,),
        "learning_rate": (setting.learning_rate,),
        "epochs": (setting.epochs,),
    }


def start_folder(setting: Setting, data: Path, work: Path, precision: str) -> Path:
    """Return the model that both sides begin with; one tuned on another task is made here."""
    if not setting.start:
        return start_model()
    out = work / "starts" / setting.start
    if (out / "results.json").is_file():  # it is finished
        return out / "model"
    start, grid = read_pretrained(start_model()), Grid(**grid_values(SETTINGS[setting.start]))
    found = dataset(setting.start, data, work / "slices", start.config.max_position_embeddings)
    training = TrainingSettings(precision=precision)
    finetune(found, start, out, settings=FinetuneSettings(grid=grid, training=training))
    return out / "model"


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
    kept = sorted(random.Random(0).sample(range(len(rows)), SST_TRAIN))
    write_text(out / "train.tsv", "\n".join([header, *(rows[i] for i in kept)]) + "\n")
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
    kept = set(random.Random(0).sample(certain, SQUAD_TRAIN))
    write_json(out / "train.json", {"version": "1.1", "data": [only(a, kept) for a in articles]})


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
    kept = set(random.Random(0).sample(ids, SQUAD2_TRAIN))
    write_json(out / "train.json", {"version": "v2.0", "data": [only(a, kept) for a in articles]})
    write_json(out / "dev.json", {"version": "v2.0", "data": dev})


def read_articles(path: Path) -> list[Any]:
    """Read the articles of a SQuAD file."""
    return json.loads(path.read_text(encoding="utf-8"))["data"]


def questions(articles: list[Any]) -> list[Any]:
    """Return all questions of some articles."""
    return [q for article in articles for p in article["paragraphs"] for q in p["qas"]]


def only(article: Any, kept: set[str]) -> Any:
    """Return an article with only the kept questions, and only the paragraphs that have one."""
    paragraphs = [
        {**p, "qas": [q for q in p["qas"] if q["id"] in kept]} for p in article["paragraphs"]
    ]
    return {**article, "paragraphs": [p for p in paragraphs if p["qas"]]}
