"""One network to pre-train, and one run of fine-tuning on it.

Everything lies in the folder of a study: `text/` (vocabulary and token store), `networks/NAME`
(pre-training runs, which resume), `data/` (reduced data sets) and `runs/NAME.json` (scores).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import bertkit
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.corpus.prepare import store_from_text
from bertkit.errors import DivergedError
from bertkit.finetuning.runs import RunSettings
from bertkit.finetuning.train import TaskTraining
from bertkit.progress import read_journal
from bertkit.tasks.sequences import run_task
from bertkit.tasks.task import encode
from bertkit.tasks.types import DataFiles, TaskData, load_dataset
from bertkit.training.device import choose_device, choose_precision
from bertkit.training.recipe import read_recipe
from experiments.paper.data import MissingDataError, task_folder
from experiments.paper.features import LAYERS, build_with_head
from experiments.paper.tables import PLAIN, Network, Run, Scale, TaskScale, sized


@dataclass(frozen=True)
class Study:
    """A folder of results, what its networks are trained on, and where they are trained."""

    out: Path
    scale: Scale
    text: tuple[str, ...]
    data: Path
    model: Path | None = None
    """A model that stands in for the plain network of the scale."""
    device: str = "auto"

    def result_file(self, run: Run, seed: int) -> Path:
        """Return the file of a run's scores."""
        return self.out / "runs" / f"{run.name}-seed-{seed}.json"

    def stands_in(self, network: Network) -> bool:
        """Return whether the given model replaces a network."""
        sizes = [(s[0], s[1], s[2]) for s in self.scale.resized.values()]
        return bool(self.model) and network in (PLAIN, *(sized(PLAIN, size) for size in sizes))


def do_run(study: Study, run: Run, seed: int) -> dict[str, Any]:
    """Return the scores of a run, which is made unless its result file exists."""
    path = study.result_file(run, seed)
    if not path.exists():
        try:
            scores = measure(study, run, seed)
            result = {"run": run.name, "seed": seed, "scores": scores}
        except DivergedError as error:
            result = {"run": run.name, "seed": seed, "scores": {}, "failed": str(error)}
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".partial")
        draft.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        draft.rename(path)
    results: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return results


def measure(study: Study, run: Run, seed: int) -> dict[str, dict[str, float]]:
    """Return split -> metric -> score of a run."""
    task = study.scale.task(run.task)
    if run.task != "perplexity":  # data that is missing is reported before a network is trained
        folder = task_folder(run.task, study.data, study.out / "data", task.train, task.dev)
    network = pretrained(study, run.network, seed, run.step)
    if run.task == "perplexity":
        records = read_journal(network / "journal.jsonl")
        losses = [record["mlm_loss"] for record in records if record["kind"] == "evaluation"]
        if not losses:
            raise MissingDataError("the text has too few documents to hold some out")
        return {"dev": {"perplexity": math.exp(losses[-1])}}
    return fine_tuned(study, run, seed, network, folder, task)


def pretrained(study: Study, network: Network, seed: int, step: int = 0) -> Path:
    """Return the folder of a network, which is pre-trained first if it is not."""
    if study.model and study.stands_in(network) and not step:
        return study.model
    scale, name = study.scale, network.name
    overrides = {**scale.overrides, **dict(network.overrides)}
    if name in scale.per_seed:
        name = f"{name}-seed-{seed}"
        overrides["training.seed"] = seed
    folder = study.out / "networks" / name
    snapshot = folder / "models" / f"step-{step:08d}" if step else folder
    if (folder / "model").exists():  # it is written last
        return snapshot
    store = store_from_text(
        study.text,
        study.out / "text",
        vocabulary_size=scale.vocabulary_size,
        cased=scale.cased,
    )
    recipe = read_recipe(scale.recipe, overrides)
    saved = scale.steps if network.name in ("bert", "left-to-right") else ()
    stopped = bertkit.pretrain(recipe, store, folder, device=study.device, save_models_at=saved)
    if stopped:
        raise SystemExit(f"stopped by a signal; the same command resumes {folder}")
    return snapshot


def fine_tuned(
    study: Study, run: Run, seed: int, network: Path, folder: Path, scale: TaskScale
) -> dict[str, dict[str, float]]:
    """Fine-tune a network on a task, and return the scores of every dev split."""
    start = read_pretrained(network)
    data = read_data(run.task, folder, scale, start.config.max_position_embeddings)
    task = data.task
    if run.head:
        kind = type(task)
        build = partial(build_with_head, task, run.head, study.scale.units)
        changed = type(kind.__name__, (kind,), {"build": lambda _, config: build(config)})
        task = changed(**vars(task))
    device = choose_device(study.device)
    precision = choose_precision("auto", device)
    frozen = run.head in LAYERS
    rate = (scale.frozen_learning_rate if frozen else 0) or scale.learning_rate
    settings = RunSettings(
        seed=seed, batch_size=scale.batch_size, learning_rate=rate, epochs=scale.epochs
    )
    training = bertkit.TrainingSettings(weight_decay=0.0 if frozen else 0.01)
    items = encode(task, data.train, start.tokenizer, start.config)
    with TaskTraining(
        start, task, items, settings, training, device=device, precision=precision, keep_head=False
    ) as loop:
        for _ in loop.updates():
            pass
        model = loop.finish()
    scores = {}
    for split, inputs in data.dev:
        items = encode(task, inputs, start.tokenizer, start.config)
        results = task.decode(inputs, items, run_task(model, items, device))
        task = task.calibrated(inputs, results)
        scores[split] = task.score(inputs, task.decided(results))
    return scores


def read_data(task: str, folder: Path, scale: TaskScale, positions: int) -> TaskData:
    """Read the reduced data set of a task for a model with so many positions."""
    options: dict[str, Any] = {
        "max_length": min(scale.max_length, positions),
        "stride": scale.stride,
    }
    if scale.context != "sentence":
        options["context"] = scale.context
    if task.startswith("squad") and positions < 128:
        options["max_question_length"] = max(8, positions // 4)
    return load_dataset(task, DataFiles(data=folder), None, options, positions)
