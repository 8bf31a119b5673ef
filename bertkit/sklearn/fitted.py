"""The model of a fitted estimator, held in memory, and the fit that makes it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.checkpoints.save import check_free
from bertkit.console import Console
from bertkit.files import from_home, new_folder
from bertkit.finetuning.evaluation import RunEvaluation, Scorer
from bertkit.finetuning.heads import reordered_labels, same_task, save_tuned, tuned_details
from bertkit.finetuning.run import train_task
from bertkit.finetuning.settings import RunSettings, TrainingSettings
from bertkit.predict.engine import warn_caller
from bertkit.tasks.data import TaskData, describe_cut, describe_items, encode
from bertkit.tasks.task import NOTHING_READ, Items, Task, check_segments
from bertkit.training.device import choose_device, choose_precision
from bertkit.training.journal import RunLog

Loaded = TypeVar("Loaded")
FitMethod = TypeVar("FitMethod", bound=Callable[..., Any])


def whole_fit(fit: FitMethod) -> FitMethod:
    """Let a `fit` that fails leave the estimator as the last one made it."""

    @wraps(fit)
    def fitted(estimator: Any, *arguments: Any, **named: Any) -> Any:
        before = vars(estimator).copy()
        try:
            return fit(estimator, *arguments, **named)
        except BaseException:
            vars(estimator).clear()
            vars(estimator).update(before)
            raise

    return cast("FitMethod", fitted)


class FittedModel:
    """The model of a fitted estimator: a model directory in memory, that which `write` writes."""

    def __init__(self, write: Callable[[Path], object]) -> None:
        with TemporaryDirectory(prefix="bertkit-") as folder:
            home = Path(folder) / "model"
            write(home)
            self.files = {
                path.relative_to(home).as_posix(): path.read_bytes()
                for path in sorted(home.rglob("*"))
                if path.is_file()
            }
            """Name -> content."""
        self._used: tuple[Any, Any] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle or a copy, without the network that is in use."""
        return {"files": self.files, "_used": None}

    def save(self, folder: Path | str) -> None:
        """Write the model directory, for `bertkit.load`, the commands and transformers.

        An existing model directory is replaced.

        Raises:
            BertkitError: the directory holds something other than a model, or it cannot be written.
        """
        home = Path(from_home(folder))
        check_free(home)
        with new_folder(home) as target:
            self._write(target)

    def used_by(self, load: Callable[..., Loaded], *options: str) -> Loaded:
        """Return `load(directory, *options)`, which is kept until the options change."""
        if self._used is None or self._used[0] != options:
            with TemporaryDirectory(prefix="bertkit-") as folder:
                self._write(Path(folder))
                self._used = options, load(Path(folder), *options)
        return self._used[1]

    def _write(self, folder: Path) -> None:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def tuned_model(
    start: PretrainedWeights,
    data: TaskData,
    run: RunSettings,
    training: TrainingSettings,
    *,
    device: str,
    console: Console,
) -> FittedModel:
    """Fine-tune once, as `bertkit.finetune` does, without a folder.

    The data has a dev split only if training is to stop early.

    Raises:
        BertkitError: the run diverged, or a setting does not fit the model or the device.
    """
    where, task = choose_device(device), reordered_labels(start, data)
    precision = choose_precision(training.precision, where)
    items = encode_splits(start, task, data, console)
    train = items.pop("train")
    kept: list[FittedModel] = []

    def keep(model: Any, task: Any, scores: Any) -> None:
        details = tuned_details(data, task, run, training, precision, scores)
        kept[:] = [FittedModel(lambda folder: save_tuned(folder, model, start.tokenizer, details))]

    evaluation = None
    if data.dev:
        usual: dict[str, Any] = {"metrics": {}, "metric": ""}
        scorer = Scorer(
            data, task, items, **usual, device=where, precision=precision, console=console
        )
        evaluation = RunEvaluation(scorer, training.early_stopping, "fit", keep)
    model = train_task(
        start,
        task,
        train,
        run,
        training,
        device=where,
        precision=precision,
        keep_head=same_task(start, task),
        evaluation=evaluation,
        open_log=lambda done: RunLog(None, console),
        title="fit",
    )
    if evaluation is None:
        keep(model, task, {})
    return kept[0]


def encode_splits(
    start: PretrainedWeights, task: Task, data: TaskData, console: Console
) -> dict[str, Items]:
    """Return split -> its encoded examples; warn if a part of one is not read.

    Raises:
        BertkitError: an example does not fit the model.
    """
    found = {}
    for name, examples in (("train", data.train), *data.dev):
        items = found[name] = encode(task, examples, start.tokenizer, name)
        check_segments(items, start.config)
        console.say(describe_items(name, items))
        lost = {what: count for what, count in items.cut.items() if what != NOTHING_READ}
        if any(lost.values()):
            warn_caller(f"{name}: {describe_cut(lost)}")
    return found
