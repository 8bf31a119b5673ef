"""The data and the starts of bertkit's runs in the quality benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.settings import SETTINGS, Setting, start_model
from bertkit.model.start import read_start
from bertkit.tasks.dataset import Dataset
from bertkit.tasks.finetune import finetune
from bertkit.tasks.grid import Grid
from bertkit.tasks.own import Files, Lengths
from bertkit.tasks.own_files import Columns
from bertkit.tasks.sets import load_dataset
from bertkit.tasks.tune import Tuning

ARC = Columns(text="0", choices=("1", "2", "3", "4"), label="5", header=False)
ARC_FILES = ("arc_easy_train2251.csv", "arc_easy_dev570.csv")


def dataset(task: str, data: Path, slices: Path, positions: int) -> Dataset:
    """The data of a task, as `bertkit finetune` reads it."""
    glue = {"sst-2": slices}
    lengths = Lengths()
    if task == "arc-easy":
        train, dev = (str(data / "arc-easy" / name) for name in ARC_FILES)
        return load_dataset("choose", Files(train=train, dev=dev), ARC, lengths, positions)
    if task in ("conll-2003", "conll-2003-documents"):
        context = "document" if task == "conll-2003-documents" else "sentence"
        task, lengths = "conll-2003", Lengths(context=context)
        files = Files(data=data / "conll2003")
    elif task == "squad-1.1":
        train = str(slices / "squad" / "train.json")
        files = Files(train=train, dev=str(data / "squad" / "dev-v1.1.json"))
    elif task == "squad-2.0":
        files = Files(train=f"{slices}/squad2/train.json", dev=f"{slices}/squad2/dev.json")
    else:
        files = Files(data=glue.get(task, data / "glue"))
    return load_dataset(task, files, Columns(), lengths, positions)


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
    start, grid = read_start(start_model()), Grid(**grid_values(SETTINGS[setting.start]))
    found = dataset(setting.start, data, work / "slices", start.config.max_position_embeddings)
    finetune(found, start, out, grid=grid, tuning=Tuning(precision=precision))
    return out / "model"
