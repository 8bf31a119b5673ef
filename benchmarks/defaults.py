"""Whether the settings that `finetune` chooses are near the best of a grid.

    python -m benchmarks.defaults --data FOLDER [--model NAME=FOLDER ...] [--tasks ...]

Every task is trained with the learning rate that bertkit chooses, with half of it and with twice as
much, and always with the same batch size and number of epochs; every score is the mean of some
seeds, fewer for the large tasks. Finished runs in the work folder are not repeated, and the results
file keeps the rows of other models and tasks.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from bertkit.finetuning.grid import all_results

from benchmarks.quality_data import dataset
from benchmarks.record import ROOT, data_folder, new_parser, start_model, write_result
from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.files import read_json
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.settings import FinetuneSettings, Grid
from bertkit.tasks.data import TaskData

ROWS = {
    "sst-2, 100 rows": 100,
    "sst-2, 400 rows": 400,
    "sst-2, 2,000 rows": 2000,
    "mrpc": None,
    "cola": None,
    "mnli-10k": None,
    "qqp-10k": None,
    "conll-2003, 2,000 sentences": 2000,
}
"""Task -> the number of training inputs, drawn at random; None for all."""
MOST_DEV = 1000
FACTORS = (0.5, 1.0, 2.0)
"""The learning rates of the grid, as multiples of the chosen one."""
SEEDS = {"cola": 2, "mrpc": 2, "mnli-10k": 1, "qqp-10k": 1}
"""Task -> the number of seeds of each learning rate; three for the other tasks."""


def sample(data: TaskData, rows: int | None, most_dev: int = MOST_DEV) -> TaskData:
    """Return a data set with fewer rows, always the same ones."""

    def some(inputs: Any, number: int | None) -> Any:
        if number is None or len(inputs) <= number:
            return inputs
        return [inputs[i] for i in sorted(random.Random(0).sample(range(len(inputs)), number))]

    dev = tuple((name, some(inputs, most_dev)) for name, inputs in data.dev[:1])
    return replace(data, train=some(data.train, rows), dev=dev, test=())


def task_data(task: str, data: Path, positions: int, most_dev: int = MOST_DEV) -> TaskData:
    """Return the rows of one of `ROWS` that are used, for a model of so many positions."""
    whole = dataset(task.partition(",")[0], data, data / "glue", positions)
    return sample(whole, ROWS[task], most_dev)


def folder_name(name: str, task: str) -> str:
    """Return the name of the folder of a model's runs on one of `ROWS`."""
    return f"{name}-{task.replace(',', '').replace(' ', '-')}"


def tuned_scores(
    used: TaskData, start: PretrainedWeights, out: Path, settings: FinetuneSettings
) -> list[float]:
    """Fine-tune, unless that is done, and return the scores of all runs in percent."""
    finetune(used, start, out, settings=settings)
    return [round(100 * run.metric, 2) for run in all_results(out)]


def measure(name: str, model: Path, task: str, data: Path, work: Path) -> dict[str, Any]:
    """Measure the row of one model and task."""
    start = read_pretrained(model)
    used = task_data(task, data, start.config.max_position_embeddings)
    out = work / folder_name(name, task)
    [chosen] = Grid().chosen(start.config.hidden_size, len(used.train), used.task.task_type).runs()
    grid = Grid(
        batch_size=(chosen.batch_size,),
        learning_rate=tuple(factor * chosen.learning_rate for factor in FACTORS),
        epochs=(chosen.epochs,),
        seeds=SEEDS.get(task, 3),
    )
    finetune(used, start, out, settings=FinetuneSettings(grid=grid, track=()))
    names = {run.name for run in grid.runs()}
    scores: dict[float, list[float]] = {}
    for result in all_results(out):
        if result.name in names:
            scores.setdefault(result.settings["learning_rate"], []).append(100 * result.metric)
    means = {rate: statistics.fmean(values) for rate, values in sorted(scores.items())}
    best = max(means, key=lambda rate: means[rate])
    return {
        "metric": used.task.metric,
        "inputs": len(used.train),
        "epochs": chosen.epochs,
        "batch": chosen.batch_size,
        "learning_rate": chosen.learning_rate,
        "score": round(means[chosen.learning_rate], 2),
        "lowest": round(min(scores[chosen.learning_rate]), 2),
        "highest": round(max(scores[chosen.learning_rate]), 2),
        "best": round(means[best], 2),
        "best_learning_rate": best,
        "below_best": round(means[best] - means[chosen.learning_rate], 2),
        "seeds": grid.seeds,
    }


def main() -> None:
    """Measure, and write results/defaults.json after every row."""
    parser = new_parser(__doc__, work="runs/defaults")
    parser.add_argument("--model", nargs="*", default=[], help="NAME=FOLDER; MiniLM by default")
    parser.add_argument("--tasks", nargs="*", choices=ROWS, default=list(ROWS))
    options = parser.parse_args()
    models = dict(one.split("=", 1) for one in options.model) or {"MiniLM": str(start_model())}
    path = ROOT / "results" / "defaults.json"
    rows = read_json(path)["rows"] if path.is_file() else {}
    for name, folder in models.items():
        for task in options.tasks:
            data = data_folder(options.data)
            rows[f"{name}, {task}"] = measure(name, Path(folder), task, data, options.work)
            write_result("defaults", rows)


if __name__ == "__main__":
    main()
