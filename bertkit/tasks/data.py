"""Data sets: an official one by name, or the user's files for a task type, as examples by split."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from bertkit.checkpoints.pretrained import PretrainedWeights, model_folder
from bertkit.errors import BertkitError
from bertkit.files import as_json, from_home, write_json_lines
from bertkit.pretraining_data.examples import DATA_SPLIT, keyed_rng
from bertkit.tasks.classification import TextExample
from bertkit.tasks.columns import Columns, MemoryRows, Purpose, as_source
from bertkit.tasks.official import OFFICIAL, official_file
from bertkit.tasks.task import Task, TrainingData, label_counts
from bertkit.tasks.types import TASKS, make_options, task_class, task_details
from bertkit.tasks.windows import WindowLengths
from bertkit.text.documents import TextCounts

Split = tuple[str, Sequence[Any]]  # A name, such as dev-mismatched, and the examples


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The files of a data set: an official folder, or one file for each split.

    In Python, a split may also be a DataFrame, a `datasets.Dataset` or a list of dicts or tuples.
    """

    data: Path | None = None
    """The folder of an official data set."""
    train: Any = ""
    """Your training data; it also replaces an official file of SQuAD, SWAG or CoNLL."""
    dev: Any = ""
    """Labelled data for choosing the best run; without it, a share of the training data is held
    out."""
    test: Any = ""
    """Data to predict at the end, with or without labels."""
    dev_share: float = 0.1
    """The share of the training data that is held out if there is no --dev."""

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
) -> TaskData:
    """Read a data set: an official set (`OFFICIAL`), or the user's data for a task type (`TASKS`).

    `columns` and `windows` are options by name, such as {"text": "body"}; the others have the
    defaults of the task type. `positions` is the model's maximum sequence length in tokens.
    """
    key, kind = name.lower(), task_class(name)
    check_files(key, files, has_columns=bool(columns))
    if isinstance(columns, Mapping | None):
        columns = cast("Columns", make_options(kind, kind.columns, columns or {}))
    if isinstance(windows, Mapping | None):
        windows = cast("WindowLengths", make_options(kind, kind.windows, windows or {}))
    counts, length = TextCounts(), windows.length(positions)
    if key in OFFICIAL:
        return official_dataset(key, files, windows, length, counts)
    train: Sequence[Any] = list(columns.read(files.source("train"), counts))
    task = kind.from_data(TrainingData(train, columns, windows, length, counts))
    recorded = {s: str(files.source(s)) for s in ("train", "dev", "test") if files.source(s)}
    if files.source("dev"):
        dev: Sequence[Any] = list(columns.read(files.source("dev"), counts, "dev"))
    else:
        train, dev = hold_out(kind, train, files.dev_share, counts)
        recorded["dev"] = f"{files.dev_share:g} of train"
    test = columns.read(files.source("test"), counts, "test") if files.source("test") else None
    tests = [] if test is None else [("test", list(test))]
    names = as_json(columns)
    return TaskData(key, task, train, [("dev", dev)], tests, counts, recorded, names)


def official_dataset(
    name: str, files: DataFiles, windows: WindowLengths, length: int, counts: TextCounts
) -> TaskData:
    """Read an official set; a test file that is absent leaves nothing to predict."""
    official, kind = OFFICIAL[name], task_class(name)
    examples = {
        split: read_official(name, split, files, counts, purpose_of(split))
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


def purpose_of(split: str) -> Purpose:
    """Return what a split, such as dev-mismatched, is read for."""
    purposes: dict[str, Purpose] = {"train": "train", "dev": "dev", "test": "test"}
    return purposes[split.partition("-")[0]]


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
    name: str, files: DataFiles, *, has_columns: bool = False, training: bool = True
) -> None:
    """Reject flags that would have no effect, and missing ones."""
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


def hold_out(
    kind: type[Task], inputs: Sequence[Any], share: float, counts: TextCounts
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split inputs into training data and a random share for dev.

    Sentences of a document, or questions on a context, stay on the same side. An input with a label
    that training would otherwise lack is not held out; this is counted.
    """
    if not 0 < share < 1:
        raise BertkitError(f"--dev-share must be between 0 and 1, got {share}; or give --dev")
    groups: dict[Any, list[Any]] = {}
    for number, example in enumerate(inputs):
        key = getattr(example, kind.group_by) if kind.group_by else number
        groups.setdefault(key, []).append(example)
    order = keyed_rng(0, DATA_SPLIT).permutation(len(groups)).tolist()
    held_out = set(order[: max(1, round(share * len(groups)))])
    left = label_counts(inputs if kind.has_labels else ())
    sides: tuple[list[Any], list[Any]] = ([], [])
    for number, group in enumerate(groups.values()):
        labels, out = label_counts(group if kind.has_labels else ()), number in held_out
        if out and any(left[label] <= count for label, count in labels.items()):
            counts.note("label of too few inputs to hold one out, kept", group[0].location)
            out = False
        left -= labels if out else Counter()
        sides[out].extend(group)
    if not (sides[0] and sides[1]):
        raise BertkitError(
            f"{len(inputs)} inputs in {len(groups)} groups are too few to hold some out for dev; "
            "check the columns, or give --dev"
        )
    return sides


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


# Results ------------------------------------------------------------------------------------------


def write_results(
    task: Task, name: str, split: str, folder: Path, inputs: Sequence[Any], results: Sequence[Any]
) -> list[Path]:
    """Write results: one JSON object per line and input, and the official files of the set."""
    path = folder / f"{split}.jsonl"
    rows = []
    for example, result in zip(inputs, results, strict=True):
        rows.append({"id": example.id, **result.to_dict()})
        if isinstance(example, TextExample):  # readers want the texts next to a prediction
            rows[-1] |= {"gold": example.label, "text": example.text, "pair": example.pair}
    write_json_lines(path, rows)
    return [path, *task.official_files(name, split, folder, inputs, results)]


def labelled_part(
    inputs: Sequence[Any], results: Sequence[Any]
) -> tuple[list[Any], list[Any], str]:
    """Return the labelled inputs, their results, and a note on how many have no label."""
    known = [number for number, example in enumerate(inputs) if example.gold is not None]
    lost = len(inputs) - len(known)
    note = f"{lost:,} of {len(inputs):,} inputs have no label and are not scored" if lost else ""
    return [inputs[i] for i in known], [results[i] for i in known], note


# What a model keeps of its data -------------------------------------------------------------------


def tuned_details(data: TaskData, task: Task) -> dict[str, Any]:
    """Return what `bertkit.json` says of a model that was fine-tuned on a data set."""
    return {
        "task": task.task_type,
        "head": task.head,
        "labels": list(task.labels),
        "settings": task.settings(),
        "data": data.name,
        "columns": dict(data.columns),
        "pairs": data.has_pairs,
        "made_by": "bertkit finetune",
    }


def label_order(data: TaskData, start: PretrainedWeights) -> tuple[Task, bool]:
    """Return the task of a data set for a start, and whether the start's head is for the same task.

    If the start was fine-tuned for the same labels, they get its order. Only those of the user's
    data do, since the metrics of an official set depend on the order.
    """
    task, details = data.task, dict(start.details)
    if "task" not in details:  # the task may be in the config.json of transformers
        with suppress(BertkitError):
            details = task_details(model_folder(start.path))
    if details.get("task") != task.task_type:
        return task, False
    labels = tuple(details.get("labels") or ())
    if task.has_labels and data.name in TASKS and sorted(labels) == sorted(task.labels):
        task = replace(task, labels=labels)  # type: ignore[type-var]
    return task, not task.has_labels or labels == task.labels
