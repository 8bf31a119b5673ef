"""The task types by name (paper section 4): their options, data sets and fine-tuned models.

A data set is an official one by name, or the user's files for a task type. A model's task is in
`bertkit.json`; in directories of transformers, `config.json` names the class and the labels.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, cast, get_type_hints

import torch

from bertkit.checkpoints.names import heads_of_class
from bertkit.checkpoints.pretrained import (
    load_model,
    model_folder,
    read_details,
    require_all_weights,
)
from bertkit.errors import BertkitError, flag, nearest, short_repr
from bertkit.files import as_json, from_home, matches_type, read_optional
from bertkit.model.encoder import check_vocabulary
from bertkit.model.outputs import ClassificationModel
from bertkit.tasks.classification import Classification, LabelTask, MultiLabelClassification
from bertkit.tasks.columns import Columns, MemoryRows, Purpose, as_source
from bertkit.tasks.multiple_choice import MultipleChoice
from bertkit.tasks.official import OFFICIAL, official_file
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import Regression
from bertkit.tasks.sequences import WindowLengths
from bertkit.tasks.splits import USUAL_SHARE, Split, hold_out, note_equal_inputs
from bertkit.tasks.task import Task, TrainingData
from bertkit.tasks.token_classification import TokenClassification
from bertkit.text.documents import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer

TASKS: dict[str, type[Task]] = {
    task.task_type: task
    for task in (
        Classification,
        MultiLabelClassification,
        Regression,
        MultipleChoice,
        TokenClassification,
        QuestionAnswering,
    )
}
"""Task type -> its class."""
MAX_SETTING = 1 << 30  # the largest value of a number among a task's settings


def task_class(name: str) -> type[Task]:
    """Return the class of a task type, or of the task type of an official set."""
    key = name.lower()
    key = OFFICIAL[key].task_type if key in OFFICIAL else key
    if key not in TASKS:
        raise BertkitError(f"no task is called '{name}'{nearest(key, (*OFFICIAL, *TASKS))}")
    return TASKS[key]


def make_options(task: type[Task], kind: Any, options: Mapping[str, Any]) -> Any:
    """Make the columns or windows (`kind`) of a task type from options by name."""
    known, values = get_type_hints(kind), {}
    for name, value in options.items():
        if name not in (names := [field.name for field in fields(kind)]):
            raise BertkitError(
                f"{task.task_type} does not accept {flag(name)}; it accepts "
                f"{', '.join(map(flag, names))}"
            )
        several = isinstance(value, list | tuple)
        if several and len(value) != 1 and not matches_type(tuple(value), known[name]):
            raise BertkitError(
                f"{task.task_type} takes one value for {flag(name)}, not {short_repr(value)}"
            )
        values[name] = (value[0] if len(value) == 1 else tuple(value)) if several else value
    return kind(**values)


def model_columns(
    task: type[Task], options: Mapping[str, Any], details: Mapping[str, Any]
) -> Columns:
    """Return columns with the caller's options; the others are from the model's `bertkit.json`."""
    columns: Columns = make_options(task, task.columns, options)
    saved, left_out = details.get("columns") or {}, {*columns.file_options, *options}
    names = get_type_hints(task.columns).keys() - left_out
    known = {name: saved[name] for name in saved if name in names}
    source = "the columns in the model's bertkit.json"
    return replace(columns, **saved_values(task.columns, known, source, least=-MAX_SETTING))


def saved_values(
    kind: Any, values: Mapping[str, Any], source: str, *, least: int = 0
) -> dict[str, Any]:
    """Return the values of a dataclass's fields in a `bertkit.json`, each of the right type."""
    types = get_type_hints(kind)
    for name, value in values.items():
        wanted = types.get(name)
        lowest = -MAX_SETTING if wanted is float else least
        absurd = type(value) is int and not lowest <= value <= MAX_SETTING
        if wanted is None or absurd or not matches_type(value, wanted):
            raise BertkitError(f"{source}: the setting '{name}' cannot be {value!r:.40}")
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


# Data sets ---------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The data of each split (as for `finetune`), or the folder of an official set."""

    data: Path | None = None
    """The folder of an official data set."""
    train: Any = ""
    """Your training data; it also replaces an official file of SQuAD, SWAG or CoNLL."""
    dev: Any = ""
    """Labelled data for choosing the best run; without it, a share of the training data is held
    out."""
    test: Any = ""
    """Data to predict at the end, with or without labels."""
    dev_share: float | None = None
    """The share of the training data that is held out if there is no --dev; by default 0.1."""

    def source(self, split: str) -> str | MemoryRows:
        """Return the data of a split, "" if none was given."""
        data = getattr(self, split, "")
        return "" if data is None else as_source(data, split)


@dataclass(frozen=True)
class TaskData:
    """A task and its examples."""

    name: str  # the name of the data set, or the task type for the user's data
    task: Task
    train: Sequence[Any]
    dev: Sequence[Split]  # the dev splits; runs are compared on the first
    test: Sequence[Split] = ()  # the test splits, with or without labels
    counts: TextCounts = field(default_factory=TextCounts)  # what was skipped while reading
    files: Mapping[str, str] = field(default_factory=dict)  # split -> path, for the results
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The column names of the user's data, which are the defaults when predicting for a file."""

    @property
    def has_pairs(self) -> bool:
        """Whether some training example is a pair of texts."""
        return any(getattr(example, "pair", None) is not None for example in self.train)


def load_dataset(
    name: str,
    files: DataFiles,
    columns: Columns | Mapping[str, Any] | None = None,
    windows: WindowLengths | Mapping[str, Any] | None = None,
    positions: int = 512,
    *,
    whole: bool = False,
) -> TaskData:
    """Read an official set, or the user's data for a task type; `whole` holds nothing out."""
    key, kind = name.lower(), task_class(name)
    sources: dict[str, Any] = {split: files.source(split) for split in ("train", "dev", "test")}
    files = replace(files, **sources)
    check_files(key, files, has_columns=bool(columns), whole=whole)
    if isinstance(columns, Mapping | None):
        columns = cast("Columns", make_options(kind, kind.columns, columns or {}))
    if isinstance(windows, Mapping | None):
        windows = cast("WindowLengths", make_options(kind, kind.windows, windows or {}))
    counts, length = TextCounts(), windows.length(positions)
    if key in OFFICIAL:
        return official_dataset(key, files, windows, length, counts)
    columns = columns.fitted(files.source("train"))
    train: Sequence[Any] = list(columns.read(files.source("train"), counts))
    columns.check(train)
    task = kind.from_data(TrainingData(train, columns, windows, length, counts))
    recorded = {s: str(files.source(s)) for s in ("train", "dev", "test") if files.source(s)}
    held_out: dict[Purpose, Sequence[Any]] = {
        split: list(columns.read(files.source(split), counts, split))
        for split in ("dev", "test")
        if files.source(split)
    }
    note_equal_inputs(task, train, held_out, counts)
    if "dev" not in held_out and not whole:
        share = USUAL_SHARE if files.dev_share is None else files.dev_share
        train, held_out["dev"] = hold_out(kind, train, share, counts)
        recorded["dev"] = f"{share:g} of train"
    dev, test = ([(s, held_out[s])] if s in held_out else [] for s in ("dev", "test"))
    return TaskData(key, task, train, dev, test, counts, recorded, as_json(columns))


def official_dataset(
    name: str, files: DataFiles, windows: WindowLengths, length: int, counts: TextCounts
) -> TaskData:
    """Read an official set; a test file that is absent leaves nothing to predict."""
    official, kind = OFFICIAL[name], task_class(name)
    examples = {
        split: read_official(name, split, files, counts, cast("Purpose", split.split("-")[0]))
        for split in official.files
        if not split.startswith("test")
        or files.source(split)
        or (files.data and official_file(name, split, files.data))
    }
    train = examples.pop("train")
    if official.settings:
        made = {"max_length": length, "stride": windows.stride}
        task: Task = kind(**made, **official.settings)
    else:
        task = kind.from_data(TrainingData(train, kind.columns(), windows, length, counts))
    dev = [(split, inputs) for split, inputs in examples.items() if split.startswith("dev")]
    test = [(split, inputs) for split, inputs in examples.items() if split.startswith("test")]
    return TaskData(name, task, train, dev, test, counts, {"data": str(files.data or "")})


def read_official(
    name: str, split: str, files: DataFiles, counts: TextCounts, purpose: Purpose
) -> Sequence[Any]:
    """Read a split of an official set: the file that replaces it, or the one in its folder."""
    official, path = OFFICIAL[name], files.source(split)
    if isinstance(path, MemoryRows) or not (path or files.data):
        raise BertkitError(
            f"{name} is read from its official files: give --data FOLDER; data in memory goes with "
            f"the task type {official.task_type}"
        )
    path = path or official_file(name, split, Path(from_home(str(files.data))))
    if not path or not Path(from_home(path)).exists():
        wanted = path or f"{' or '.join(official.files[split])} in {files.data}"
        raise BertkitError(f"no {wanted}; {official.where}")
    return official.read(from_home(path), counts, purpose)


def read_split(
    name: str, split: str, files: DataFiles, columns: Columns, counts: TextCounts
) -> Sequence[Any]:
    """Read the examples of a split, for scoring; data named "test" may lack labels."""
    key = name.lower()
    purpose: Purpose = "test" if split.startswith("test") else "dev"
    check_files(key, files, training=False)
    if key in OFFICIAL:
        return read_official(key, split, files, counts, purpose)
    source = files.source(split) if split in ("train", "dev", "test") else ""
    if not source:
        raise BertkitError(f"there is no {split} data; give the file, and --split train, dev, test")
    return list(columns.read(source, counts, purpose))


def check_files(
    name: str,
    files: DataFiles,
    *,
    has_columns: bool = False,
    training: bool = True,
    whole: bool = False,
) -> None:
    """Reject flags that would have no effect, and missing ones."""
    if files.dev_share is not None and (whole or files.source("dev") or name in OFFICIAL):
        raise BertkitError("--dev-share is of data without --dev and without --folds; leave it out")
    if name in OFFICIAL:
        own_files = any(files.source(split) for split in ("train", "dev", "test"))
        if has_columns or (own_files and OFFICIAL[name].folder):
            raise BertkitError(
                f"{name} is read from --data FOLDER and knows its columns; for other files choose "
                f"{OFFICIAL[name].task_type}"
            )
    elif files.data is not None:
        raise BertkitError(
            f"{name} takes your own data, by --train, --dev and --test; --data is the folder of an "
            f"official set: {', '.join(OFFICIAL)}"
        )
    elif training and not files.source("train"):
        raise BertkitError(f"{name} takes your own data: give --train FILE (and --dev, --test)")


def check_labelled(split: str, inputs: Sequence[Any]) -> None:
    """Check that there are inputs, and that each has a label."""
    missing = next((example.location for example in inputs if example.gold is None), "")
    if missing or not inputs:
        raise BertkitError(f"the {split} data needs a label for each input; {missing} has none")


def digest_inputs(splits: Sequence[Sequence[Any]]) -> str:
    """Return the hex SHA-256 of all inputs, which does not depend on the paths of their files."""
    digest = hashlib.sha256()
    for example in (example for inputs in splits for example in inputs):
        fields = {**example._asdict(), "location": "", "document": ""}  # they may hold the path
        digest.update(repr(fields).encode(errors="surrogatepass"))
    return digest.hexdigest()


# Fine-tuned models --------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedTask:
    """A fine-tuned model with everything needed to use it."""

    model: Any  # the network on the device, in evaluation mode
    task: Task
    tokenizer: Tokenizer
    details: dict[str, Any]
    """The content of `bertkit.json`; for a model of transformers, the same from its config."""


def load_task_model(
    path: Path, device: torch.device, null_threshold: float | None = None, top: int | None = None
) -> LoadedTask:
    """Load a fine-tuned model from a model or run directory; see `bertkit.load` for the options."""
    folder = model_folder(path)
    details = task_details(folder)
    task = saved_task(details, folder)
    if null_threshold is not None:
        task = with_null_threshold(task, details, null_threshold)
    if top is not None:
        task = with_top(task, top)
    loaded = load_model(folder, task.build, trainable=False)
    pooler = isinstance(loaded.model, ClassificationModel)
    model = require_all_weights(loaded, folder, pooler=pooler)
    tokenizer = Tokenizer.load(folder)
    check_vocabulary(model.config, tokenizer.size)
    return LoadedTask(model.to(device).eval(), task, tokenizer, details)


def with_null_threshold(task: Task, details: Mapping[str, Any], threshold: float) -> Task:
    """Return a question answering task with another null threshold (SQuAD 2.0)."""
    if not isinstance(task, QuestionAnswering):
        raise BertkitError(f"a null threshold is for models that answer, not for {task.task_type}")
    if not task.null and "null" in (details.get("settings") or {}):
        raise BertkitError(
            "the model was fine-tuned only on answerable questions, so it cannot recognize others; "
            "fine-tune it on data with unanswerable questions"
        )
    return replace(task, null=True, threshold=threshold)


def with_top(task: Task, top: int) -> Task:
    """Return a task of labels whose results have the probabilities of the `top` best ones."""
    if not isinstance(task, LabelTask) or top < 1:
        raise BertkitError(
            f"top is the number of labels to show, 1 or more, for classification; not {top} for "
            f"{task.task_type}"
        )
    return replace(task, top=top)


def is_tuned(folder: Path) -> bool:
    """Return whether a model directory contains a fine-tuned model."""
    if str(read_details(folder).get("task")) in TASKS:
        return True
    named = read_optional(folder / "config.json").get("architectures")
    heads = {task.head for task in TASKS.values()}
    return isinstance(named, list) and any(heads & heads_of_class(str(name)) for name in named)


def task_details(folder: Path) -> dict[str, Any]:
    """Return the task, labels and settings of a fine-tuned model, as in `bertkit.json`."""
    details, config = read_details(folder), read_optional(folder / "config.json")
    if known := TASKS.get(str(details.get("task"))):
        return {"head": known.head, "problem_type": known.problem_type, **details}
    task = transformers_task(config, folder)
    if task is None:
        what = details.get("task") or (config.get("architectures") or ["none"])[0]
        raise BertkitError(
            f"{folder} was not fine-tuned for a task ({what}); run bertkit finetune, or use "
            "bertkit predict embed or bertkit predict fill-mask"
        )
    labels = label_names(config, folder)
    settings = task.from_transformers(config.get("max_position_embeddings", 512))
    # for tasks without label names, transformers writes LABEL_0, LABEL_1
    names = labels if task.has_labels else list(task.labels)
    kind = {"task": task.task_type, "head": task.head, "problem_type": task.problem_type}
    return {**kind, "labels": names, "settings": settings}


def transformers_task(config: Mapping[str, Any], folder: Path) -> type[Task] | None:
    """Return the task type of a model of transformers by its class, labels and problem type."""
    heads = heads_of_class(str((config.get("architectures") or [""])[0]))
    if config.get("is_decoder") and heads & {"sequence", "choice"}:
        raise BertkitError(
            f"{folder} is left to right and was fine-tuned on its first token, which sees no "
            "other; fine-tune it again with bertkit finetune, which reads the last one"
        )
    problem = str(config.get("problem_type") or "").removeprefix("single_label_classification")
    fitting = [task for task in TASKS.values() if task.head in heads]
    task = next((task for task in fitting if task.problem_type == problem), None)
    count = len(label_names(config, folder)) if task else 0
    if task is Classification and count == 1:
        return Regression
    if task is Regression and count > 1:
        raise BertkitError(f"{folder} predicts {count} numbers for each text; one can be read")
    return task


def label_names(config: Mapping[str, Any], folder: Path) -> list[str]:
    """Return the names of `id2label` in order; without it, as many as transformers makes up."""
    labels = config.get("id2label")
    if not labels:
        count = min(int(config.get("num_labels", 2)), 1 << 20)
        return [f"LABEL_{number}" for number in range(count)]
    try:
        names = {int(number): str(name) for number, name in labels.items()}
        return [names[number] for number in range(len(names))]
    except (AttributeError, KeyError, ValueError):
        raise BertkitError(
            f"{folder / 'config.json'}: id2label is {labels!r:.40}; it must map each number from 0 "
            "to a name"
        ) from None


def saved_task(details: Mapping[str, Any], source: Path) -> Task:
    """Make the task that `bertkit.json` describes; each setting is checked."""
    labels, path = details.get("labels"), source / "bertkit.json"
    task, settings = TASKS[str(details["task"])], details.get("settings") or {}
    named = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    if not isinstance(settings, dict) or (task.has_labels and not (named and labels)):
        raise BertkitError(f"{path}: labels must be a list of names, and settings an object")
    if task.has_labels and len(set(labels or ())) < len(labels or ()):
        raise BertkitError(f"{source}: two labels have one name; give each its own (id2label)")
    values = saved_values(task, settings, str(path))
    return task(**values, **({"labels": tuple(labels or ())} if task.has_labels else {}))
