"""Fine-tuning: trains every run of a grid on labelled data and keeps the best model.

The procedure is that of paper section A.3.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.checkpoints.save import known_elsewhere
from bertkit.config import SIGNS, as_json, claim_settings
from bertkit.datasets.benchmarks import OFFICIAL, DataFiles
from bertkit.datasets.readers import Columns
from bertkit.errors import BertkitError, DivergedError
from bertkit.files import exclusive_lock, read_json, write_json
from bertkit.finetuning.grid import (
    FinetuneSettings,
    RunResult,
    all_results,
    best_run,
    copy_model,
    grid_summary,
    keep_models,
    model_digest,
    model_problem,
    ranked,
    scores_text,
    setting_text,
    shown_scores,
)
from bertkit.finetuning.heads import build_with, reordered_labels, same_task, save_tuned
from bertkit.finetuning.run import RunSettings, train_task
from bertkit.model.task_heads import TaskModel
from bertkit.tasks.data import (
    TaskData,
    check_labelled,
    describe_cut,
    describe_items,
    digest_inputs,
    encode,
    labelled_part,
    load_dataset,
    write_results,
)
from bertkit.tasks.saved import load_task_model
from bertkit.tasks.task import Items, PredictedSplit, Task, check_segments, run_model
from bertkit.tasks.windows import WindowLengths
from bertkit.text.lines import describe_skipped
from bertkit.training.device import (
    choose_device,
    choose_precision,
    environment,
    keep_environment,
    slow_precision,
)
from bertkit.training.journal import Console, Journal

FILES, SETTINGS = DataFiles(), FinetuneSettings()


def finetune(
    task: str | TaskData,
    model: Path | str | PretrainedWeights,
    out: Path | str,
    *,
    train: Any = None,
    dev: Any = None,
    test: Any = None,
    files: DataFiles = FILES,
    columns: Columns | None = None,
    windows: WindowLengths | None = None,
    settings: FinetuneSettings = SETTINGS,
    console: Console | None = None,
) -> RunResult:
    """Fine-tune a model on a data set.

    Args:
        task: the name of an official set or a task type (see `load_dataset`), or a data set.
        model: the weights to initialise from: a model directory, a run, or a Google checkpoint.
        out: the output folder; runs that it already contains are not repeated.
        train: labelled data: a path, a pandas or polars DataFrame, a `datasets.Dataset`, or a list
            of dicts or tuples.
        dev: labelled data to choose the best run by; without it a share of `train` is set apart.
        test: data to predict at the end, with or without labels.
        files: the files of the data set, if they are not given by `train`, `dev` and `test`.
        columns: the column names of the user's data; see `load_dataset`.
        windows: the window lengths; see `load_dataset`.
        settings: the grid of runs and their settings.
        console: the console for progress; None for a new one.

    Returns:
        The best run; its model is in `out`/model.

    Raises:
        BertkitError: the data or the model is missing or damaged, the folder has other settings,
            every run diverged, or the disk is full.
    """
    start = model if isinstance(model, PretrainedWeights) else read_pretrained(Path(model))
    given = {"train": train, "dev": dev, "test": test}
    files = dataclasses.replace(files, **{k: v for k, v in given.items() if v is not None})
    if isinstance(task, str):
        if task.lower() in OFFICIAL and any(
            not isinstance(v, str | Path | None) for v in given.values()
        ):
            raise BertkitError(
                f"{task} reads its official files; data in memory goes with a task type, such as "
                "classification"
            )
        positions = start.config.max_position_embeddings
        task = load_dataset(task, files, columns, windows, positions)
    return FinetuningRun(task, start, Path(out), settings, console or Console()).run()


class FinetuningRun:
    """All fine-tuning runs of one output folder.

    Args:
        data: the task and its inputs.
        start: the weights to initialise from.
        out: the output folder; runs that it already contains are not repeated.
        settings: the grid of runs and their settings.
        console: the console for progress.

    Raises:
        BertkitError: an input has no label or an unknown one, or the head does not fit the task.
    """

    def __init__(
        self,
        data: TaskData,
        start: PretrainedWeights,
        out: Path,
        settings: FinetuneSettings,
        console: Console,
    ) -> None:
        if settings.training.dropout is not None:
            start = start.with_dropout(settings.training.dropout)
        self.data, self.start, self.out, self.console = data, start, out, console
        self.settings = settings
        self.task: Task = reordered_labels(start, data)
        self.device = choose_device(settings.device)
        self.precision = choose_precision(settings.training.precision, self.device)
        self.build = build_with(settings.head, self.task, start)
        plain = self.build is None and not settings.head.new_head
        self.keep_head = plain and same_task(start, self.task)
        self.latest: tuple[str, dict[str, list[Any]]] = ("", {})
        self._encode()

    def shared(self) -> dict[str, Any]:
        """Return what all runs in the folder share, the content of `finetune.json`."""
        data, head = self.data, self.settings.head
        digests = (
            {"beside_digest": read_pretrained(Path(head.beside)).digest} if head.beside else {}
        )
        training = dataclasses.replace(
            self.settings.training, precision=self.precision
        )  # the resolved precision, not "auto"
        return digests | {
            "data": data.name,
            "files": dict(data.files),
            "inputs": {"train": len(data.train), **{name: len(dev) for name, dev in data.dev}},
            "inputs_digest": digest_inputs([data.train, *(dev for _, dev in data.dev)]),
            "start": self.start.origin,
            "start_digest": self.start.digest,
            "task_type": self.task.task_type,
            "labels": list(self.task.labels),
            "task": self.task.settings(),
            "tuning": as_json(training),
            "head": as_json(dataclasses.replace(head, beside="")),
            "beside": head.beside,
        }

    def _encode(self) -> None:
        """Tokenise every split once, and print a description of it."""
        for line in describe_skipped(self.data.counts.skipped, self.data.counts.examples):
            self.console.say(line)
        for name, inputs in (("train", self.data.train), *self.data.dev):
            check_labelled(name, inputs)
        tokenizer = self.start.tokenizer
        self.train = encode(self.task, self.data.train, tokenizer, "train")
        check_segments(self.train, self.start.config)
        splits = [*self.data.dev, *self.data.test]
        self.items = {
            name: encode(self.task, inputs, tokenizer, name) for name, inputs in splits if inputs
        }
        for name, items in (("train", self.train), *self.items.items()):
            self.console.say(describe_items(name, items))
        for number, (name, inputs) in enumerate((*self.data.dev, *self.data.test)):
            for line in self.task.remarks(inputs, choosing=not number):
                self.console.say(f"{name}: {line}")
        self.baselines = {name: self.task.baseline(inputs) for name, inputs in self.data.dev}
        for name, found in self.baselines.items():
            self.console.say(f"{name}, input-independent baseline: {shown_scores(found)}")
        self.console.say(
            "reusing the checkpoint's task head" if self.keep_head else "the task head is new"
        )
        if "bert.pooler.dense.weight" not in self.start.tensors:
            self.console.say("the checkpoint has no pooler: it is new")
        if self.build is None and not known_elsewhere(self.start.config, self.task.task_type):
            self.console.say("transformers has no class for this network with this head")
        if not (self.start.config.hidden_dropout_prob or self.settings.head.frozen):
            self.console.say(
                "there is no dropout, as in the checkpoint; BERT has 0.1 (--dropout 0.1)"
            )
        if slow := slow_precision(self.precision, self.device):
            self.console.say(slow)

    def run(self) -> RunResult:
        """Train all missing runs, then write the model and results of the best one.

        Raises:
            BertkitError: the folder has other settings or is in use by another process, every run
                diverged, or the disk is full.
        """
        with exclusive_lock(self.out):
            # Paths may change as long as the digests do not.
            ignored = ("files", "start", "beside")
            others = ("recipe.json", *SIGNS)
            path, shared = self.out / "finetune.json", self.shared()
            claim_settings(path, shared, "a fine-tuning", ignored=ignored, foreign=others)
            for line in keep_environment(self.out):
                self.console.say(f"different from when this folder was created: {line}")
            write_json(self.out / "grid.json", as_json(self.settings.grid))
            self.make_missing(self.settings.grid.runs())
            results = self.with_models()
            best = best_run(results)
            if self.is_finished(best, results):
                self.console.say(
                    f"{self.out} is finished; nothing to do. Best: {scores_text(best)}"
                )
            else:
                self.finish(best, results)
        return best

    def make_missing(self, runs: Sequence[RunSettings]) -> None:
        """Train the runs of the grid that are not done."""
        every = {result.name for result in all_results(self.out)}
        done = every & {run.name for run in runs}
        if done:
            self.console.say(f"{len(done)} of {len(runs)} runs are done already")
        if earlier := len(every - done):
            self.console.say(f"{earlier} earlier runs of {self.out} are compared with them")
        for number, run in enumerate(runs, 1):
            if run.name not in done:
                result = self.make(run, f"run {number} of {len(runs)}")
                keep_models(self.out, all_results(self.out), self.settings.keep)
                self.console.say(f"run {number} of {len(runs)}, {scores_text(result)}")

    def with_models(self) -> list[RunResult]:
        """Return all results, once the best `keep` runs have the models that they saved.

        A run whose model is gone or damaged is repeated. On another machine this may change its
        scores and the ranking.
        """
        while True:
            results = all_results(self.out)
            for result in ranked(results)[: self.settings.keep]:
                if problem := model_problem(self.out / "runs" / result.name / "model", result):
                    self.console.say(f"{result.name} {problem}: it is made again")
                    again = self.make(RunSettings(**result.settings), "again")
                    self.console.say(f"again, {scores_text(again)}")
                    break
            else:
                keep_models(
                    self.out, results, self.settings.keep
                )  # also those of a run stopped meanwhile
                return results

    def is_finished(self, best: RunResult, results: Sequence[RunResult]) -> bool:
        """Return whether `finish` is done for these runs, and the model is intact."""
        found = self.written()
        for name, inputs in self.data.test:
            own = found.get("predicted", {}).get(name, {})
            if name in self.items and own.get("digest") != digest_inputs([inputs]):
                return False
        if found.get("best") != best.name or model_problem(self.out / "model", best):
            return False
        seals = {run["name"]: run.get("sha256") for run in found.get("runs", [])}
        return seals == {result.name: result.as_json()["sha256"] for result in results}

    def written(self) -> dict[str, Any]:
        """Return the content of `results.json`, or {} if there is none."""
        path = self.out / "results.json"
        return read_json(path) if path.is_file() else {}

    def make(self, run: RunSettings, title: str) -> RunResult:
        """Train one run, score it on dev, save its model and write `run.json` last."""
        folder = self.out / "runs" / run.name
        (folder / "journal.jsonl").unlink(missing_ok=True)  # left by a killed run
        journal = Journal(folder, tensorboard=False)
        write_json(folder / "environment.json", environment())
        began = time.perf_counter()
        total = -(-len(self.train.items) // run.batch_size) * run.epochs
        self.console.start(total, title=f"{title}, {run.name}")
        scores: dict[str, dict[str, float]] = {}
        degenerate = ""
        try:
            model = train_task(
                self.start,
                self.task,
                self.train,
                run,
                self.settings.training,
                device=self.device,
                precision=self.precision,
                keep_head=self.keep_head,
                journal=journal,
                progress=self.console.update,
                build=self.build,
            )
        except DivergedError as error:
            degenerate = f"diverged: {error}"
        else:
            task, predictions = self.evaluate(model)
            splits = dict(self.data.dev)
            scores = {name: task.score(splits[name], own) for name, own in predictions.items()}
            first_split, first_inputs = self.data.dev[0]
            degenerate = task.degenerate(first_inputs, predictions[first_split])
            self.save(folder / "model", model, task, run, scores)
            self.latest = run.name, predictions
        finally:
            self.console.close()
            journal.close()
        first = next(iter(scores.values()), {})
        result = RunResult(
            run.name,
            dataclasses.asdict(run),
            scores,
            first.get(self.task.metric, float("-inf")),
            degenerate,
            round(time.perf_counter() - began, 1),
            "" if not scores else model_digest(folder / "model"),
        )
        write_json(folder / "run.json", result.as_json())
        return result

    def evaluate(self, model: TaskModel) -> tuple[Task, dict[str, list[Any]]]:
        """Return the task with thresholds chosen on dev, and the predictions per dev split."""
        predictions = {name: self.predict(model, name, inputs) for name, inputs in self.data.dev}
        first, inputs = self.data.dev[0]
        return self.task.calibrated(inputs, predictions[first]), predictions

    def predict(self, model: TaskModel, split: str, inputs: Any) -> list[Any]:
        """Return the predictions for a split, with a progress bar."""
        items: Items = self.items[split]
        self.console.start(sum(len(i.parts) for i in items.items), title=split, unit="windows")
        outputs = run_model(
            model,
            items,
            self.device,
            precision=self.precision,
            progress=lambda done: self.console.update({"done": done}),
        )
        self.console.close()
        return self.task.decode(inputs, items, outputs)

    def save(
        self,
        folder: Path,
        model: TaskModel,
        task: Task,
        run: RunSettings,
        scores: dict[str, dict[str, float]],
    ) -> None:
        """Save the model of a run with everything needed to use it."""
        details = {
            "task": task.task_type,
            "labels": list(task.labels),
            "settings": task.settings(),
            "data": self.data.name,
            "columns": dict(self.data.columns),
            "pairs": any(getattr(given, "pair", None) is not None for given in self.data.train),
            "made_by": "bertkit finetune",
            "run": dataclasses.asdict(run),
            "tuning": as_json(self.settings.training),
            "precision": self.precision,
            "scores": scores,
        }
        save_tuned(folder, model, self.start.tokenizer, details)

    def finish(self, best: RunResult, results: list[RunResult]) -> None:
        """Write the best model, its predictions on dev and test, and `results.json`."""
        copy_model(self.out / "runs" / best.name / "model", self.out / "model")
        predicted = {**self.earlier_splits(best), **self.predict_splits(best)}
        rows = grid_summary(results)
        every = {"train": self.train, **self.items}
        windowed = {name: items.windowed for name, items in every.items()}
        cut = {name: items.cut for name, items in every.items()}
        results_json = {
            "data": self.data.name,
            "metric": self.task.metric,
            "best": best.name,
            "model": best.model,
            "scores": {name: own["scores"] for name, own in predicted.items() if own["scores"]},
            "predicted": predicted,
            "baseline": self.baselines,
            "windowed": windowed,
            "cut": cut,
            "unknown": {name: items.unknown._asdict() for name, items in every.items()},
            "settings": rows,
            "runs": [result.as_json() for result in results],
        }
        write_json(self.out / "results.json", results_json)
        for row in rows:
            self.console.say(setting_text(row))
        counted = ", ".join(f"{name} {count:,}" for name, count in windowed.items())
        lost = sum((Counter(own) for own in cut.values()), Counter[str]())
        named = describe_cut(lost) or "cut: 0"
        self.console.say(f"inputs in several windows: {counted}; {named}")
        self.console.say(f"best: {scores_text(best)}; the model is in {self.out / 'model'}")

    def predict_splits(self, best: RunResult) -> dict[str, dict[str, Any]]:
        """Write the predictions of the best model; return split -> its scores, counts and files."""
        loaded = load_task_model(self.out / "model", self.device)
        predicted = {}
        for name, inputs in (*self.data.dev, *self.data.test):
            if name not in self.items:
                continue
            run, made = self.latest
            predictions = made.get(name) if run == best.name else None
            if predictions is None:
                predictions = self.predict(loaded.model, name, inputs)
            folder = self.out / "results"
            done = PredictedSplit(self.data.name, name, inputs, predictions)
            written = write_results(loaded.task, folder, done)
            known, found, unscored = labelled_part(inputs, predictions)
            scores = loaded.task.score(known, found) if known else {}
            if known:
                self.console.say(f"{name}: {shown_scores(scores)}")
                if unscored:
                    self.console.say(f"{name}: {unscored}")
            self.console.say(f"{name} predictions: {', '.join(map(str, written))}")
            predicted[name] = {
                "scores": scores,
                "inputs": len(inputs),
                "scored": len(known),
                "files": [path.relative_to(folder).as_posix() for path in written],
                "digest": digest_inputs([inputs]),
            }
        return predicted

    def earlier_splits(self, best: RunResult) -> dict[str, dict[str, Any]]:
        """Return splits that only an earlier call predicted, as when `--test` is now left out.

        Predictions of another model are deleted, since `results/` belongs to the current `model/`.
        """
        before = self.written()
        earlier = {
            name: own for name, own in before.get("predicted", {}).items() if name not in self.items
        }
        if before.get("model") == best.model:
            return earlier
        for name, own in earlier.items():
            for file in own["files"]:
                (self.out / "results" / file).unlink(missing_ok=True)
            self.console.say(
                f"{name} predictions of {before['best']}, the best run before, are deleted; "
                "give the file again for those of this one"
            )
        return {}
