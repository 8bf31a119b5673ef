"""Fine-tuning: trains one run, or each run of a grid, and keeps the best model (section A.3).

A single run leaves `model/`, `results.json`, `journal.jsonl` and `predictions/` in its folder. The
runs of a grid have a folder each, `runs/NAME/`; `model/` is that of the best one. With folds, each
is a run of the grid, and the best setting is then trained on all inputs. A run that was stopped
resumes from its last checkpoint, and finished runs are not repeated.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError, DivergedError, check_known
from bertkit.files import (
    as_json,
    check_output,
    claim,
    exclusive_lock,
    from_home,
    new_folder,
    sha256_file,
    write_json,
)
from bertkit.finetuning.runs import (
    SETTINGS,
    FinetuneResult,
    FinetuneSettings,
    RunResult,
    RunSettings,
    Scores,
    best_run,
    finished_text,
    fold_means,
    grid_summary,
    is_finished,
    labelled_part,
    main_interval,
    read_results,
    read_run,
    run_text,
    score_remarks,
    scores_text,
    setting_text,
    unfinished_parts,
    write_results,
)
from bertkit.finetuning.train import TaskTraining, label_order, tuned_details
from bertkit.progress import JOURNAL, Console, Journal, console_or_new, counted
from bertkit.tasks.columns import Columns
from bertkit.tasks.sequences import WindowLengths, run_task
from bertkit.tasks.splits import fold_numbers
from bertkit.tasks.task import Items, Task, encode
from bertkit.tasks.types import (
    DataFiles,
    TaskData,
    check_labelled,
    digest_inputs,
    load_dataset,
    load_task_model,
    saved_task,
    task_details,
)
from bertkit.text.documents import describe_skipped
from bertkit.training.device import (
    choose_device,
    choose_precision,
    device_notes,
    environment,
)
from bertkit.training.step import MetricWindow

LOG_EVERY = 20  # the number of updates between two lines of the journal
SHOWN_WINDOWS = 256  # fewer take a moment
MODEL_FILES = {".json", ".txt", ".safetensors", ".bin"}
"""The endings of the files that a model directory may consist of."""
NOT_BETTER = "is no better than an answer that ignores the input"
JUDGED_INPUTS = 10
"""The number of dev inputs from which a run may be said to have learned nothing."""
CONVERGED_LOSS = 0.01
"""The mean cross entropy of an epoch below which further epochs change little."""

Metric = Callable[[list[Any], list[Any]], float]
"""(gold labels, predictions) of a whole split -> a score; higher is better. Both are plain values:
labels, sorted tuples of labels, tuples of tags (of entities in IOB2), numbers, indices of choices,
or for question answering the tuple of accepted answers and the text of the predicted one."""


def finetune(
    task: str | TaskData,
    model: Path | str | PretrainedWeights,
    out: Path | str,
    *,
    train: Any = None,
    dev: Any = None,
    test: Any = None,
    files: DataFiles | None = None,
    columns: Columns | Mapping[str, Any] | None = None,
    windows: WindowLengths | Mapping[str, Any] | None = None,
    settings: FinetuneSettings = SETTINGS,
    console: Console | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> FinetuneResult:
    """Fine-tune a model on a data set.

    Args:
        task: the name of an official set or a task type (see `load_dataset`), or a data set.
        model: the weights to initialise from: a model directory, a run, the name of a model on the
            hub, or a Google checkpoint.
        out: the output folder; the same call resumes what was stopped.
        train: labelled data: a path, a pandas DataFrame, a `datasets.Dataset`, or a list or
            generator of dicts or tuples.
        dev: labelled data to choose the best run by; without it a share of `train` is held out.
        test: data to predict at the end, with or without labels.
        files: the files of the data set, if they are not given by `train`, `dev` and `test`.
        columns: the options of the user's data by name, which are the flags of the command, such as
            {"text": "body", "label": "team"}.
        windows: the options of windows by name, such as {"max_length": 256, "stride": 64}.
        settings: the grid of runs and their settings.
        console: the console for progress; None for a new one.
        metrics: your own metrics by name, which are added to the scores of dev and test; the name
            may be `settings.metric`.

    Returns:
        The best run, all runs, and the content of `results.json`.

    Raises:
        BertkitError: the data or the model is missing or damaged, the folder has other settings,
            each run diverged, a metric is not a finite number, or the disk is full.
    """
    start = model if isinstance(model, PretrainedWeights) else read_pretrained(model)
    splits = {"train": train, "dev": dev, "test": test}
    files = replace(files or DataFiles(), **{k: v for k, v in splits.items() if v is not None})
    inputs = [f for f in (files.train, files.dev, files.test) if isinstance(f, str | Path)]
    # before the data is read, so that a later change of it is noticed
    digests = {} if is_finished(Path(from_home(out))) else file_digests(inputs, start.path)
    if isinstance(task, str):
        positions = start.config.max_position_embeddings
        whole = settings.grid.folds > 0
        task = load_dataset(task, files, columns, windows, positions, whole=whole)
    out = check_output(out, inputs, folder=True)
    with console_or_new(console) as shown:
        setup = prepare(task, start, settings, metrics or {}, shown)
        with exclusive_lock(out):
            shared = setup.described()
            ignored = ["files", "start"]  # paths may change as long as the digests do not
            claim(out, "fine-tuning", shared, may_change=ignored)
            if is_finished(out):
                result = read_results(out)
                shown.say(finished_text(result))
            else:
                result = train_all(setup, out, shared | {"digests": digests})
            for folder in unfinished_parts(out):
                shutil.rmtree(folder, ignore_errors=True)
            return result


def file_digests(inputs: Sequence[Path | str], model: Path) -> dict[str, str]:
    """Return path -> SHA-256 of each file that is read; {} if not all of them are local files."""
    data = [Path(from_home(path)) for path in inputs if path]
    files = [p for p in (*model.glob("*"), *model.glob("*/*")) if p.suffix in MODEL_FILES]
    local = data and files and all(path.is_file() for path in (*data, *files))
    return {str(path): sha256_file(path) for path in (*data, *files)} if local else {}


@dataclass(frozen=True)
class Setup:
    """What all runs of a folder share: the encoded data, the start, the device, the settings."""

    data: TaskData
    task: Task  # the task of the data, with labels in the order of the network's outputs
    start: PretrainedWeights
    settings: FinetuneSettings
    console: Console
    metrics: Mapping[str, Metric]
    metric: str  # the score by which runs are compared, on the first dev split
    device: torch.device
    precision: str
    keep_head: bool
    until_converged: bool  # whether runs end once the training loss is below `CONVERGED_LOSS`
    items: Mapping[str, Items]  # split -> sequences, of train, dev and test
    baselines: Scores  # dev split -> the best scores of an answer that ignores the input

    def described(self) -> dict[str, Any]:
        """Return what must be the same when a run is resumed."""
        data, settings = self.data, self.settings
        return {
            "data": data.name,
            "files": dict(data.files),
            "inputs_digest": digest_inputs(
                [data.train, *(dev for _, dev in (*data.dev, *data.test))]
            ),
            "start": self.start.origin,
            "start_digest": self.start.digest,
            "task_type": self.task.task_type,
            "labels": list(self.task.labels),
            "task": self.task.settings(),
            "metric": self.metric,
            "metrics": sorted(self.metrics),
            "grid": as_json(settings.grid),
            "training": as_json(replace(settings.training, precision=self.precision)),
            "new_head": settings.new_head,
            "random_init": settings.random_init,
            "until_converged": self.until_converged,
        }

    def with_fold(self, numbers: Sequence[int], fold: int) -> Setup:
        """Return the setup of a run for which the inputs of a fold are dev."""
        train, dev = (
            [e for e, n in zip(self.data.train, numbers, strict=True) if (n == fold) == held_out]
            for held_out in (False, True)
        )
        items = {
            name: encode(self.task, inputs, self.start.tokenizer, self.start.config)
            for name, inputs in (("train", train), ("dev", dev))
        }
        data = replace(self.data, train=train, dev=[("dev", dev)])
        return replace(self, data=data, items=items, baselines={"dev": self.task.baseline(dev)})

    def predict(self, model: Any, split: str, inputs: Sequence[Any], *, show: bool) -> list[Any]:
        """Return the results for a split; `show` is whether to show the progress of much work."""
        items = self.items[split]
        total = sum(len(item.parts) for item in items.items)
        show = show and total > SHOWN_WINDOWS
        if show:
            self.console.start(total, title=split, unit="windows")
        outputs = run_task(
            model,
            items,
            self.device,
            precision=self.precision,
            progress=lambda done, _: self.console.update({"done": done}) if show else None,
        )
        if show:
            self.console.close()
        return self.task.decode(inputs, items, outputs)

    def score(self, task: Task, inputs: Sequence[Any], results: Sequence[Any]) -> dict[str, float]:
        """Return the scores of labelled inputs, with those of the user's metrics."""
        scores = task.score(inputs, results)
        gold = [task.gold_value(example) for example in inputs]
        answers = [task.answer_value(result) for result in results]
        for name, function in self.metrics.items():
            scores[name] = float(function(list(gold), list(answers)))
            if not math.isfinite(scores[name]):
                raise BertkitError(f"the metric '{name}' is {scores[name]}, not a finite number")
        return scores


def prepare(
    data: TaskData,
    start: PretrainedWeights,
    settings: FinetuneSettings,
    metrics: Mapping[str, Metric],
    console: Console,
) -> Setup:
    """Check and encode the data once for all runs, and say what is worth knowing about it."""
    if settings.grid.folds and (data.dev or settings.training.early_stopping):
        raise BertkitError(
            "folds score the training data, and nothing can stop the model that is trained on all "
            "of it; leave out --dev and --early-stopping"
        )
    console.say(*describe_skipped(data.counts.skipped, data.counts.examples))
    for name, inputs in (("train", data.train), *data.dev):
        check_labelled(name, inputs)
    if settings.training.dropout is not None:
        start = start.with_dropout(settings.training.dropout)
    task, same_task = label_order(data, start)
    size = start.config.hidden_size, len(data.train), task.task_type
    console.say(*settings.grid.reasons(*size))
    until_converged = not (settings.grid.epochs or task.problem_type)  # the loss: a cross entropy
    settings = replace(settings, grid=settings.grid.chosen(*size))
    dev = data.dev or [("dev", data.train)]  # all of it is held out in one fold or another
    baselines = {name: task.baseline(inputs) for name, inputs in dev}
    metric = checked_metric(settings.metric or task.metric, task, baselines[dev[0][0]], metrics)
    items = {}
    for name, inputs in (("train", data.train), *data.dev, *data.test):
        if not inputs:
            continue
        items[name] = encoded = encode(task, inputs, start.tokenizer, start.config)
        mean = encoded.tokens / max(1, encoded.inputs)
        about = f"{counted(encoded.inputs, 'inputs')}, {mean:.1f} tokens each"
        console.say(f"{name}: {about}, {encoded.described()}")
    for name, scores in baselines.items():
        console.say(f"{name}, input-independent baseline: {scores_text(scores, metric)}")
    device = choose_device(settings.device)
    precision = choose_precision(settings.training.precision, device)
    keep_head = same_task and not (settings.new_head or settings.random_init)
    if keep_head:
        console.say("reusing the checkpoint's task head")
    console.say(*device_notes(device, precision))
    return Setup(
        data, task, start, settings, console, metrics, metric, device, precision, keep_head,
        until_converged, items, baselines,
    )  # fmt: skip


def checked_metric(
    metric: str, task: Task, known: Mapping[str, float], metrics: Mapping[str, Metric]
) -> str:
    """Return the metric by which runs are compared, which is a known one or the user's."""
    if twice := sorted(known.keys() & metrics.keys()):
        raise BertkitError(f"{task.task_type} has a metric '{twice[0]}'; rename your own")
    check_known("metric", metric, (*known, *metrics), code="metric")
    if metric in known and metric.endswith("error"):
        raise BertkitError(
            f"runs are compared by a score that is better if higher, and {metric} is not; choose "
            f"{task.metric}",
            code="metric",
        )
    return metric


def train_all(setup: Setup, out: Path, described: Mapping[str, Any]) -> FinetuneResult:
    """Train the runs that are missing, then write the best model and `results.json`."""
    runs, console = setup.settings.grid.runs(), setup.console
    single, folds = len(runs) == 1, setup.settings.grid.folds
    results: list[RunResult] = []
    predictions: dict[str, dict[str, list[Any]]] = {}  # the best run -> split -> its results
    numbers = fold_numbers(type(setup.task), setup.data.train, folds) if folds else []
    for number, run in enumerate(runs, 1):
        folder = out if single else out / "runs" / run.name
        if not single and (folder / "run.json").is_file():
            results.append(read_run(folder / "run.json"))
            continue
        title = run.name if single else f"run {number} of {len(runs)}, {run.name}"
        part = setup.with_fold(numbers, run.fold) if folds else setup
        result, made = train_run(part, run, folder, title)
        results.append(result)
        if not single:
            write_json(folder / "run.json", asdict(result))
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)
            keep_best_model(out, results)
            console.say(f"run {number} of {len(runs)}, {run_text(result, setup.metric)}")
        if best_run_name(results) == run.name:
            predictions = {run.name: made}
    rows, best = grid_summary(results), best_run(results)
    if folds:
        means = fold_means(results, setup.metric)
        best = train_whole(setup, means, out / "runs" / means.name)
        results.append(best)
    if not single:
        source = out / "runs" / best.name / "model"
        if not source.is_dir():
            raise BertkitError(f"{source} is gone; delete {source.parent} to train the run again")
        with new_folder(out / "model") as folder:
            shutil.copytree(source, folder, dirs_exist_ok=True)
    predicted = predict_splits(setup, out, predictions.get(best.name, {}))
    scores = {name: values["scores"] for name, values in predicted.items() if values["scores"]}
    values = {
        **described,
        "best": best.name,
        "scores": (best.scores if folds else {}) | scores,
        "predicted": predicted,
        "baseline": setup.baselines,
        "inputs": {name: items.counts() for name, items in setup.items.items()},
        "settings": rows,
        "runs": [asdict(result) for result in results],
        "environment": environment(),
    }
    write_json(out / "results.json", values)
    if not single:
        console.say(*(setting_text(row, setup.metric) for row in rows))
    say_best(setup, out, best)
    return FinetuneResult(out, best, tuple(results), values)


def say_best(setup: Setup, out: Path, best: RunResult) -> None:
    """Say which run is the best, where its model is, and what to try if it learned nothing."""
    folds, console = setup.settings.grid.folds, setup.console
    how = f", trained on all inputs; scores are means of {folds} folds" if folds else ""
    console.say(f"best: {run_text(best, setup.metric)}{how}; the model is in {out / 'model'}")
    if best.degenerate:
        rate = best.settings["learning_rate"]
        console.say(
            f"even the best run learned nothing: it {best.degenerate}. Try a learning rate of "
            f"{3 * rate:.3g} or {rate / 3:.3g}, more epochs, or more seeds"
        )


def train_whole(setup: Setup, means: RunResult, folder: Path) -> RunResult:
    """Train the best setting of the folds on all inputs; its scores are the means of the folds."""
    if (folder / "model").is_dir():
        return means
    if means.threshold is not None:
        setup = replace(setup, task=replace(setup.task, threshold=means.threshold))  # type: ignore[type-var]
    trained, _ = train_run(setup, RunSettings(**means.settings), folder, "all inputs")
    if trained.degenerate:
        raise DivergedError(f"the run on all inputs {trained.degenerate}")
    return replace(means, seconds=trained.seconds)


def best_run_name(results: Sequence[RunResult]) -> str:
    """Return the name of the best run so far; "" if all diverged."""
    return best_run(results).name if any(r.metric is not None for r in results) else ""


def keep_best_model(out: Path, results: Sequence[RunResult]) -> None:
    """Delete the models of all runs of a grid but the best."""
    best = best_run_name(results)
    for result in results:
        if result.name != best:
            shutil.rmtree(out / "runs" / result.name / "model", ignore_errors=True)


def train_run(
    setup: Setup, run: RunSettings, folder: Path, title: str
) -> tuple[RunResult, dict[str, list[Any]]]:
    """Train the rest of a run, and return its result and the predictions of the kept model."""
    training = setup.settings.training
    began, diverged = time.perf_counter(), ""
    with TaskTraining(
        setup.start,
        setup.task,
        setup.items["train"],
        run,
        training,
        device=setup.device,
        precision=setup.precision,
        keep_head=setup.keep_head,
        random_init=setup.settings.random_init,
        checkpoints=folder / "checkpoints",
    ) as loop:
        state: dict[str, Any] = {"values": [], "scores": {}, "degenerate": "", "seconds": 0.0}
        state |= loop.progress.get("evaluation", {})
        earlier = state["seconds"]
        if not loop.step:
            (folder / JOURNAL).unlink(missing_ok=True)
        predictions: dict[str, list[Any]] = {}
        with Journal(folder, setup.console, resume_step=loop.step) as log:
            setup.console.say(*loop.notes)
            log.write(
                {"kind": "start", "step": loop.step, **asdict(run), "steps_total": loop.total}
            )
            setup.console.start(loop.total, loop.step, title=title)
            window, reason = MetricWindow(), "finished"
            first = setup.data.dev[0][0] if setup.data.dev else ""
            every = loop.evaluation_interval(setup.items[first]) if first else loop.total
            try:
                for update in loop.updates():
                    window.add(update)
                    reason = reason_to_end(setup, loop)
                    evaluating = reason or loop.step % every == 0
                    if not (evaluating or loop.step % LOG_EVERY == 0):
                        continue
                    log.write(window.close(), show=True)
                    if evaluating:
                        with loop.whole_model() as model:
                            made = evaluate_run(setup, run, model, state, folder, last=bool(reason))
                        predictions = made or predictions
                    if evaluating and first:
                        values = state["values"]
                        log.write({"kind": "evaluation", "step": loop.step, "split": first,
                                   setup.metric: values[-1]})  # fmt: skip
                        worse = len(values) - 1 - values.index(max(values))
                        if 0 < training.early_stopping <= worse:
                            reason = f"stopped early, {worse} evaluations after the best"
                    if reason:
                        break
                    state["seconds"] = earlier + time.perf_counter() - began
                    if saved := loop.save({"evaluation": state}):
                        log.write(saved)
                    window.restart()
            except DivergedError as error:
                diverged = reason = f"diverged: {error}"
            log.write({"kind": "end", "step": loop.step, "reason": reason})
        if reason != "finished" and not diverged:
            setup.console.say(f"{title}, step {loop.step} of {loop.total}: {reason}")
    seconds = round(earlier + time.perf_counter() - began, 1)
    scores: Scores = {} if diverged else state["scores"]
    metric = scores[first][setup.metric] if scores else None
    degenerate, threshold = diverged or state["degenerate"], state.get("threshold")
    return (
        RunResult(run.name, asdict(run), scores, metric, degenerate, seconds, threshold),
        predictions,
    )


def reason_to_end(setup: Setup, loop: TaskTraining) -> str:
    """Return why training ends after this update; "" if it goes on."""
    if loop.step == loop.total:
        return "finished"
    ends_epoch = loop.step % loop.updates_per_epoch == 0
    if setup.until_converged and ends_epoch and loop.epoch_loss() < CONVERGED_LOSS:
        return f"ended at a training loss below {CONVERGED_LOSS}"
    return ""


def evaluate_run(
    setup: Setup, run: RunSettings, model: Any, state: dict[str, Any], folder: Path, *, last: bool
) -> dict[str, list[Any]]:
    """Score a model on dev; save it if it is kept, and then return its results, else {}."""
    task, scores, predictions = setup.task, Scores(), dict[str, list[Any]]()
    for name, inputs in setup.data.dev:
        results = setup.predict(model, name, inputs, show=last)
        task = task if scores else task.calibrated(inputs, results)
        predictions[name] = task.decided(results)
        scores[name] = setup.score(task, inputs, predictions[name])
        if len(scores) == 1:
            value = scores[name][setup.metric]
            better = value > max(state["values"], default=-math.inf)
            state["values"].append(value)
            if not (better if setup.settings.training.early_stopping else last):
                return {}
            baseline = setup.baselines[name].get(setup.metric, -math.inf)
            judged = len(inputs) >= JUDGED_INPUTS and value <= baseline < 1
            state["degenerate"] = NOT_BETTER if judged else ""
    state["scores"], state["threshold"] = scores, getattr(task, "threshold", None)
    details = tuned_details(setup.data, task) | {
        "run": asdict(run),
        "training": as_json(setup.settings.training),
        "precision": setup.precision,
        "scores": scores,
        "start": setup.start.hub * (not setup.settings.random_init),  # no path: it may be published
    }
    save_model(folder / "model", model, setup.start.tokenizer, details)
    return predictions


def predict_splits(
    setup: Setup, out: Path, made: Mapping[str, list[Any]]
) -> dict[str, dict[str, Any]]:
    """Write the results of the best model; return split -> its scores and their intervals."""
    home, loaded = out / "model", None
    task = saved_task(task_details(home), home)
    predicted = {}
    for name, inputs in (*setup.data.dev, *setup.data.test):
        if not inputs:
            continue
        results = made.get(name)
        if results is None:
            loaded = loaded or load_task_model(home, setup.device)
            results = task.decided(setup.predict(loaded.model, name, inputs, show=True))
        write_results(setup.data.name, name, out / "predictions", inputs, results)
        known, scored, note = labelled_part(inputs, results)
        scores = setup.score(task, known, scored) if known else {}
        if known:
            if name not in setup.baselines:  # those of dev are shown with the best run
                setup.console.say(f"{name}: {scores_text(scores, setup.metric)}")
            setup.console.say(*note, *score_remarks(task, name, known, scored, scores))
        intervals = {task.metric: ends} if (ends := main_interval(task, scores, len(known))) else {}
        predicted[name] = {"scored": len(known), "scores": scores, "intervals": intervals}
    return predicted
