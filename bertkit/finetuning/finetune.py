"""Fine-tuning: trains every run of a grid on labelled data and keeps the best model.

The procedure is that of paper section A.3.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.checkpoints.save import known_elsewhere
from bertkit.config import SIGNS, as_json, claim_settings
from bertkit.console import Console, console_or_new
from bertkit.datasets.benchmarks import FILES, DataFiles
from bertkit.datasets.readers import Columns
from bertkit.errors import DivergedError, InputTypeError, short_repr
from bertkit.files import exclusive_lock, from_home, read_optional, write_json
from bertkit.finetuning.best import LatestRun, is_complete, write_best
from bertkit.finetuning.card import TunedCards
from bertkit.finetuning.evaluation import Metric, RunEvaluation, Scorer, Scores
from bertkit.finetuning.grid import (
    RunResult,
    all_results,
    best_run,
    keep_models,
    model_digest,
    model_problem,
    ranked,
    scores_text,
    shown_scores,
)
from bertkit.finetuning.heads import (
    build_with,
    reordered_labels,
    same_task,
    save_tuned,
    tuned_details,
)
from bertkit.finetuning.run import class_weights, train_task
from bertkit.finetuning.settings import SETTINGS, USUAL, FinetuneSettings, RunSettings
from bertkit.model.task_heads import TaskModel
from bertkit.processes import busy_note
from bertkit.tasks.data import (
    TaskData,
    check_labelled,
    describe_items,
    digest_inputs,
    encode,
    load_dataset,
)
from bertkit.tasks.task import Task, check_segments
from bertkit.tasks.windows import WindowLengths
from bertkit.text.lines import describe_skipped
from bertkit.training.device import (
    choose_device,
    choose_precision,
    device_notes,
    environment,
    keep_environment,
)
from bertkit.training.journal import JOURNAL, Journal, OnRecord, RunLog
from bertkit.training.trackers import check_trackers


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
    metrics: Mapping[str, Metric] | None = None,
    on_record: OnRecord | None = None,
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
        metrics: your own metrics by name, which are added to the scores of dev and test. Each is
            called with the gold labels and the predictions of a whole split, as two lists of plain
            values, and returns a number, higher if better; `settings.metric` may name one. Runs
            that are done are not scored again with another function of the same name.
        on_record: a function that receives each new record of the runs' journals as a dict, with
            the name of the run as "run". An exception that it raises ends the call; the same call
            resumes the run.

    Returns:
        The best run; its model is in `out`/model.

    Raises:
        InputTypeError: the settings are of another type.
        BertkitError: the data or the model is missing or damaged, the folder has other settings,
            every run diverged, a metric is not a finite number, a tracker is not installed, or the
            disk is full.
    """
    if not isinstance(settings, FinetuneSettings):
        raise InputTypeError(f"settings must be FinetuneSettings, not {short_repr(settings)}")
    start = model if isinstance(model, PretrainedWeights) else read_pretrained(Path(model))
    given = {"train": train, "dev": dev, "test": test}
    files = dataclasses.replace(files, **{k: v for k, v in given.items() if v is not None})
    if isinstance(task, str):
        positions = start.config.max_position_embeddings
        task = load_dataset(task, files, columns, windows, positions)
    check_trackers(settings.track)
    with console_or_new(console) as shown:
        return FinetuningRun(
            task, start, Path(from_home(out)), settings, shown, metrics or {}, on_record
        ).run()


@dataclass
class FinetuningRun:
    """All fine-tuning runs of one output folder; see `finetune` for the arguments.

    Raises:
        BertkitError: an input has no label or an unknown one, the head does not fit the task, or
            there is no such metric.
    """

    data: TaskData
    start: PretrainedWeights
    out: Path
    settings: FinetuneSettings
    console: Console
    metrics: Mapping[str, Metric]
    on_record: OnRecord | None

    def __post_init__(self) -> None:
        settings = self.settings
        if settings.training.dropout is not None:
            self.start = self.start.with_dropout(settings.training.dropout)
        fit = self.start.config.hidden_size, len(self.data.train), self.data.task.task_type
        self.console.say(*settings.grid.reasons(*fit))
        self.settings = dataclasses.replace(settings, grid=settings.grid.chosen(*fit))
        self.task: Task = reordered_labels(self.start, self.data).initialised_from(self.start)
        self.device = choose_device(settings.device)
        self.precision = choose_precision(settings.training.precision, self.device)
        self.build = build_with(settings.head, self.task, self.start)
        plain = self.build is None and not settings.head.new_head
        self.keep_head = plain and same_task(self.start, self.task)
        self.latest: LatestRun = ("", {})
        self._encode()
        self.cards = TunedCards(
            start=self.start,
            scorer=self.scorer,
            train=self.train,
            training=settings.training,
            head=settings.head,
        )

    def shared(self) -> dict[str, Any]:
        """Return what all runs in the folder share, the content of `finetune.json`."""
        data, head = self.data, self.settings.head
        own = {"beside_digest": read_pretrained(Path(head.beside)).digest} if head.beside else {}
        # the resolved precision, not "auto"
        training = dataclasses.replace(self.settings.training, precision=self.precision)
        return own | {
            "data": data.name,
            "files": dict(data.files),
            "inputs": {"train": len(data.train), **{name: len(dev) for name, dev in data.dev}},
            "inputs_digest": digest_inputs([data.train, *(dev for _, dev in data.dev)]),
            "start": self.start.origin,
            "start_digest": self.start.digest,
            "task_type": self.task.task_type,
            "labels": list(self.task.labels),
            "task": self.task.settings(),
            "metric": self.scorer.metric,
            "metrics": sorted(self.metrics),
            "tuning": as_json(training),
            "head": as_json(dataclasses.replace(head, beside="")),
            "beside": head.beside,
        }

    def _encode(self) -> None:
        """Tokenise every split once, and print a description of it."""
        self.console.say(*describe_skipped(self.data.counts.skipped, self.data.counts.examples))
        for name, inputs in (("train", self.data.train), *self.data.dev):
            check_labelled(name, inputs)
        tokenizer = self.start.tokenizer
        self.train = encode(self.task, self.data.train, tokenizer, "train")
        check_segments(self.train, self.start.config)
        splits = [*self.data.dev, *self.data.test]
        encoded = {
            name: encode(self.task, inputs, tokenizer, name) for name, inputs in splits if inputs
        }
        for name, items in (("train", self.train), *encoded.items()):
            self.console.say(describe_items(name, items))
        for number, (name, inputs) in enumerate((*self.data.dev, *self.data.test)):
            for line in self.task.remarks(inputs, choosing=not number):
                self.console.say(f"{name}: {line}")
        self.scorer = Scorer(
            self.data,
            self.task,
            encoded,
            metrics=self.metrics,
            metric=self.settings.metric,
            device=self.device,
            precision=self.precision,
            console=self.console,
        )
        for name, found in self.scorer.baselines.items():
            self.console.say(
                f"{name}, input-independent baseline: {shown_scores(found, self.scorer.metric)}"
            )
        weights = class_weights(self.task, self.train, self.settings.training.class_weights)
        if weights is not None:
            pairs = zip(self.task.labels, weights.tolist(), strict=True)
            named = ", ".join(f"{label} {weight:.3g}" for label, weight in pairs)
            self.console.say(f"class weights: {named}")
        self.console.say(
            "reusing the checkpoint's task head" if self.keep_head else "the task head is new"
        )
        if "bert.pooler.dense.weight" not in self.start.tensors:
            self.console.say("the checkpoint has no pooler: it is new")
        known = known_elsewhere(self.start.config, self.task.task_type)
        if self.build is None and (self.task.reads_images or not known):
            self.console.say("transformers has no class for this network with this head")
        if not (self.start.config.hidden_dropout_prob or self.settings.head.frozen):
            self.console.say(
                "there is no dropout, as in the checkpoint; BERT has 0.1 (--dropout 0.1)"
            )
        notes = device_notes(self.device, self.precision, self.start.config)
        self.console.say(*notes, *busy_note())

    def run(self) -> RunResult:
        """Train all missing runs, then write the model and results of the best one.

        Raises:
            BertkitError: the folder has other settings or is in use by another process, every run
                diverged, or the disk is full.
        """
        with exclusive_lock(self.out):
            # Paths may change as long as the digests do not.
            ignored = ["files", "start", "beside"]
            if not self.settings.training.early_stopping:
                ignored.append("tuning.eval_every")  # which changes only what is printed
            claim_settings(
                *(self.out / "finetune.json", self.shared(), "a fine-tuning"),
                ignored=ignored,
                foreign=("recipe.json", *SIGNS),
                defaults={"tuning": as_json(USUAL)},
            )
            for line in keep_environment(self.out):
                self.console.say(f"different from when this folder was created: {line}")
            write_json(self.out / "grid.json", as_json(self.settings.grid))
            self.make_missing(self.settings.grid.runs())
            results = self.with_models()
            best = best_run(results)
            if is_complete(self.out, self.scorer, best, results):
                found = scores_text(best, self.scorer.metric)
                self.console.say(f"{self.out} is finished; nothing to do. Best: {found}")
            else:
                write_best(self.out, self.scorer, self.cards, results, self.latest)
        if best.degenerate:
            rate = best.settings["learning_rate"]
            self.console.say(
                f"even the best run learned nothing: it {best.degenerate}. Try a learning rate of "
                f"{3 * rate:g} or {rate / 3:g}, more epochs, or more seeds"
            )
        return best

    def make_missing(self, runs: Sequence[RunSettings]) -> None:
        """Train the runs of the grid that are not done."""
        every = {result.name for result in all_results(self.out)}
        done = every & {run.name for run in runs}
        if done:
            self.console.say(f"{len(done)} of {len(runs)} runs were done before")
        if earlier := len(every - done):
            self.console.say(f"runs of earlier grids in {self.out} that compete: {earlier}")
        for number, run in enumerate(runs, 1):
            if run.name not in done:
                result = self.make(run, f"run {number} of {len(runs)}")
                keep_models(self.out, all_results(self.out), self.settings.keep)
                self.console.say(
                    f"run {number} of {len(runs)}, {scores_text(result, self.scorer.metric)}"
                )

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
                    self.console.say(f"again, {scores_text(again, self.scorer.metric)}")
                    break
            else:
                # also those of a run stopped meanwhile
                keep_models(self.out, results, self.settings.keep)
                return results

    def make(self, run: RunSettings, title: str) -> RunResult:
        """Train one run, or the rest of it, keep its model and write `run.json` last."""
        folder = self.out / "runs" / run.name
        write_json(folder / "environment.json", environment())

        training = self.settings.training

        def keep(model: TaskModel, task: Task, scores: Scores) -> None:
            details = tuned_details(self.data, task, run, training, self.precision, scores)
            card = self.cards.card(run, scores)
            save_tuned(folder / "model", model, self.start.tokenizer, details, card)

        named = f"{title}, {run.name}"
        evaluation = RunEvaluation(self.scorer, training.early_stopping, named, keep)
        diverged = ""
        try:
            train_task(
                self.start,
                self.task,
                self.train,
                run,
                training,
                device=self.device,
                precision=self.precision,
                keep_head=self.keep_head,
                build=self.build,
                evaluation=evaluation,
                checkpoints=folder / "checkpoints",
                open_log=partial(self.open_log, run, folder),
                title=named,
            )
        except DivergedError as error:
            diverged = f"diverged: {error}"
        finally:
            self.console.close()
        scores: Scores = {} if diverged else evaluation.state["scores"]
        earlier = scores and not evaluation.predictions  # another process kept the model
        if earlier and read_optional(folder / "model" / "bertkit.json").get("scores") != scores:
            # it was stopped when it had kept a better one, and this process resumed before that
            shutil.rmtree(folder / "checkpoints")
            return self.make(run, title)
        if scores:
            self.latest = run.name, evaluation.predictions
        result = RunResult(
            run.name,
            dataclasses.asdict(run),
            scores,
            next(iter(scores.values()), {}).get(self.scorer.metric, float("-inf")),
            diverged or evaluation.state["degenerate"],
            round(evaluation.seconds, 1),
            "" if diverged else model_digest(folder / "model"),
        )
        write_json(folder / "run.json", result.as_json())
        return result

    def open_log(self, run: RunSettings, folder: Path, done: int) -> RunLog:
        """Open the journal of a run that has made `done` updates."""

        def tell(record: dict[str, Any]) -> None:
            if self.on_record is not None:
                self.on_record({"run": run.name, **record})

        if not done:
            (folder / JOURNAL).unlink(missing_ok=True)  # of a run that is made again
        track = self.settings.track
        return RunLog(Journal(folder, resume_step=done, track=track, on_record=tell), self.console)
