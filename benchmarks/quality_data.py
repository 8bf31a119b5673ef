"""The data and the starts of bertkit's runs in the quality benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.settings import SETTINGS, Setting, start_model
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.datasets.benchmarks import DataFiles
from bertkit.datasets.columns import ChoiceColumns, TextColumns
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.settings import FinetuneSettings, Grid, TrainingSettings
from bertkit.tasks.data import TaskData, load_dataset
from bertkit.tasks.windows import WindowLengths, WordWindows

ARC = ChoiceColumns(text="0", choices=("1", "2", "3", "4"), label="5", header=False)
ARC_FILES = ("arc_easy_train2251.csv", "arc_easy_dev570.csv")
SAMPLES = {
    "mnli-10k": ("MNLI-10k", TextColumns(text="premise", pair="hypothesis")),
    "qqp-10k": ("QQP-10k", TextColumns(text="question1", pair="question2")),
}
"""Samples of GLUE's large sets as JSON lines: folder and columns."""


def dataset(task: str, data: Path, slices: Path, positions: int) -> TaskData:
    """The data of a task, as `bertkit finetune` reads it."""
    glue = {"sst-2": slices}
    lengths = WindowLengths()
    if task == "arc-easy":
        train, dev = (str(data / "arc-easy" / name) for name in ARC_FILES)
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
        train = str(slices / "squad" / "train.json")
        files = DataFiles(train=train, dev=str(data / "squad" / "dev-v1.1.json"))
    elif task == "squad-2.0":
        files = DataFiles(train=f"{slices}/squad2/train.json", dev=f"{slices}/squad2/dev.json")
    else:
        files = DataFiles(data=glue.get(task, data / "glue"))
    return load_dataset(task, files, None, lengths, positions)


def grid_values(setting: Setting) -> dict[str, Any]:
    """The fields of a `Grid` that a setting fixes."""
    return {
        "batch_size": (setting.batch,),
        "learning_rate": (setting.learning_rate,),
        "epochs": (setting.epochs,),
    }


def start_folder(setting: Setting, data: Path, work: Path, precision: str) -> Path:
    """The model directory that both sides begin with; one tuned on another task is made here."""
    if not setting.start:
        return start_model()
    out = work / "starts" / setting.start
    if (out / "results.json").is_file():  # it is done
        return out / "model"
    start, grid = read_pretrained(start_model()), Grid(**grid_values(SETTINGS[setting.start]))
    found = dataset(setting.start, data, work / "slices", start.config.max_position_embeddings)
    training = TrainingSettings(precision=precision)
    finetune(found, start, out, settings=FinetuneSettings(grid=grid, training=training))
    return out / "model"
