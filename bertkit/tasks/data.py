"""Data sets: an official one by name, or the user's files for a task type, as examples by split."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertkit.config import as_json
from bertkit.errors import BertkitError
from bertkit.files import from_home, write_json_lines
from bertkit.pretraining_data.rng import DATA_SPLIT, keyed_rng
from bertkit.tasks.columns import Columns
from bertkit.tasks.official import OFFICIAL, official_file
from bertkit.tasks.rows import MemoryRows, as_source
from bertkit.tasks.task import Task, TrainingData
from bertkit.tasks.texts import TextExample, label_counts
from bertkit.tasks.token_classification import TokenClassification, lacks_documents
from bertkit.tasks.types import task_class
from bertkit.tasks.windows import WindowLengths
from bertkit.text.documents import TextCounts

Split = tuple[str, Sequence[Any]]
"""A name, such as dev-mismatched, and the examples."""


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

    name: str
    """The name of the data set, or the task type for the user's data."""
    task: Task
    train: Sequence[Any]
    dev: Sequence[Split]
    """The dev splits; runs are compared on the first."""
    test: Sequence[Split] = ()
    """The test splits, with or without labels."""
    counts: TextCounts = field(default_factory=TextCounts)
    """What was skipped while reading."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Split -> path, for the results."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The column names of the user's data, which are the defaults when predicting for a file."""

    @property
    def has_pairs(self) -> bool:
        """Whether some training example is a pair of texts."""
        return any(getattr(example, "pair", None) is not None for example in self.train)


def load_dataset(
    name: str,
    files: DataFiles,
    columns: Columns | None = None,
    windows: WindowLengths | None = None,
    positions: int = 512,
) -> TaskData:
    """Read a data set.

    Args:
        name: an official set (`OFFICIAL`), or a task type (`TASKS`) for the user's data.
        files: the files of the data set.
        columns: the column names of the user's data; None for the default names.
        windows: the window lengths; None for the defaults of the task type.
        positions: the model's maximum sequence length in tokens.

    Raises:
        BertkitError: a file is missing (for official ones the message says where to get it),
            damaged, or lacks a column; or an option would have no effect.
    """
    key, kind = name.lower(), task_class(name)
    check_files(key, files, columns is not None)
    columns, windows = columns or kind.columns(), windows or kind.windows()
    for wanted, options in ((kind.columns, columns), (kind.windows, windows)):
        if type(options) is not wanted:
            raise BertkitError(
                f"{name} takes {wanted.__name__}, not {type(options).__name__}; give it those"
            )
    counts, length = TextCounts(), windows.length(positions)
    if key in OFFICIAL:
        return official_dataset(key, files, windows, length, counts)
    train = columns.read_labelled(files.source("train"), counts)
    data = TrainingData(train, columns, windows, length, counts)
    task = kind.from_data(data)
    recorded = {s: str(files.source(s)) for s in ("train", "dev", "test") if files.source(s)}
    if files.source("dev"):
        held_out = columns.read_labelled(files.source("dev"), counts, scoring=True)
    else:
        train, held_out = hold_out(kind, train, files.dev_share, counts)
        recorded["dev"] = f"{files.dev_share:g} of train"
    tests = []
    if files.source("test"):
        test = columns.read_labelled(files.source("test"), counts, scoring=True, test=True)
        tests.append(("test", test))
    note_lone_sentences([("dev", held_out), *tests], task, counts)
    names = as_json(columns)
    return TaskData(key, task, train, [("dev", held_out)], tests, counts, recorded, names)


def official_dataset(
    name: str, files: DataFiles, windows: WindowLengths, length: int, counts: TextCounts
) -> TaskData:
    """Read an official set; a test file that is absent leaves nothing to predict."""
    official, kind = OFFICIAL[name], task_class(name)
    if "train" not in official.files:
        raise BertkitError(
            f"{name} has no training data: fine-tune on mnli, then bertkit evaluate RUN --task "
            f"{name} --data {files.data} --split test (or dev)"
        )
    train = read_official(name, "train", files, counts, scoring=False)
    dev, tests = [], []
    for split in official.files:
        if split.startswith("dev"):
            dev.append((split, read_official(name, split, files, counts, scoring=True)))
        elif split.startswith("test") and (files.test or has_file(name, split, files)):
            tests.append((split, read_official(name, split, files, counts, scoring=True)))
    if name.startswith("squad") and files.test:
        tests.append(("test", official.read(str(files.test), "test", counts, scoring=True)))
    if official.settings:
        made = {"max_length": length, "stride": windows.stride}
        task: Task = kind(**made, **official.settings)
    else:
        task = kind.from_data(TrainingData(train, kind.columns(), windows, length, counts))
    note_lone_sentences([*dev, *tests], task, counts)
    return TaskData(name, task, train, dev, tests, counts, {"data": str(files.data or "")})


def has_file(name: str, split: str, files: DataFiles) -> bool:
    """Return whether the official file of a split is there."""
    return files.data is not None and bool(official_file(name, split, files.data, optional=True))


def read_official(
    name: str, split: str, files: DataFiles, counts: TextCounts, *, scoring: bool
) -> Sequence[Any]:
    """Read a split of an official set: the file given for it, or the one in its folder."""
    path = files.source(split)
    if isinstance(path, MemoryRows):
        raise BertkitError(
            f"{name} is read from its official files; data in memory goes with the task type "
            f"{OFFICIAL[name].task_type}"
        )
    if not path:
        if files.data is None:
            raise BertkitError(f"{name} is read from its official files: give --data FOLDER")
        path = official_file(name, split, Path(from_home(files.data)))
    elif not Path(from_home(path)).exists():
        raise BertkitError(f"{path} does not exist; {OFFICIAL[name].where}")
    return OFFICIAL[name].read(from_home(path), split, counts, scoring=scoring)


def read_split(
    name: str, split: str, files: DataFiles, columns: Columns, counts: TextCounts
) -> Sequence[Any]:
    """Read the examples of a split, for scoring; data named "test" may lack labels."""
    key = name.lower()
    check_files(key, files, False, training=False)
    if key in OFFICIAL:
        return read_official(key, split, files, counts, scoring=True)
    source = files.source(split) if split in ("train", "dev", "test") else ""
    if not source:
        raise BertkitError(f"there is no {split} data; give the file, and --split train, dev, test")
    return columns.read_labelled(source, counts, scoring=True, test=split == "test")


def check_files(name: str, files: DataFiles, has_columns: bool, *, training: bool = True) -> None:
    """Reject flags that would have no effect, and missing ones."""
    own_files = any(files.source(split) for split in ("train", "dev", "test"))
    if name in OFFICIAL:
        other = OFFICIAL[name].task_type
        if has_columns:
            raise BertkitError(f"{name} knows its columns; for other files choose {other}")
        if own_files and OFFICIAL[name].folder:
            raise BertkitError(f"{name} is read from --data FOLDER; for other files choose {other}")
    elif files.data is not None:
        raise BertkitError(
            f"{name} takes your own data, by --train, --dev and --test; --data is the folder of an "
            f"official set: {', '.join(OFFICIAL)}"
        )
    elif training and not files.source("train"):
        raise BertkitError(f"{name} takes your own data: give --train FILE (and --dev, --test)")
    if files.dev_share != DataFiles.dev_share and (files.source("dev") or name in OFFICIAL):
        raise BertkitError(
            "--dev-share has no effect, because the data has a dev split of its own; leave it out"
        )


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
    labels = [set(label_counts(group if kind.has_labels else ())) for group in groups.values()]
    known = set().union(*(names for n, names in enumerate(labels) if n not in held_out))
    for number in sorted(held_out):
        if lost := sorted(labels[number] - known):
            counts.note("label of too few inputs to hold one out, kept", f"label {lost[0]!r}")
            known |= labels[number]
            held_out.remove(number)
    sides: tuple[list[Any], list[Any]] = ([], [])
    for number, group in enumerate(groups.values()):
        sides[number in held_out].extend(group)
    if not (sides[0] and sides[1]):
        what = (
            f"{len(inputs)} inputs in {len(groups)} groups"
            if kind.group_by
            else (f"{len(inputs)} inputs with {len(known)} labels")
        )
        raise BertkitError(
            f"{what} are too few to hold some out for dev; check the columns, or give --dev"
        )
    return sides


def note_lone_sentences(splits: Sequence[Split], task: Task, counts: TextCounts) -> None:
    """Count sentences read without context although the task's context is the document."""
    if isinstance(task, TokenClassification) and task.context == "document":
        for _, inputs in splits:
            for example in inputs if lacks_documents(inputs) else ():
                counts.note("sentence alone in its document, kept", example.location)


def check_labelled(split: str, inputs: Sequence[Any]) -> None:
    """Check that there are inputs, and that each has a label."""
    if not inputs:
        raise BertkitError(f"the {split} data has no usable input; see what was skipped")
    missing = next((example for example in inputs if example.gold is None), None)
    if missing is not None:
        raise BertkitError(f"{missing.location}: the {split} data has no label here; it needs one")


def digest_inputs(splits: Sequence[Sequence[Any]]) -> str:
    """Return the hex SHA-256 of all inputs, which does not depend on the paths of their files."""
    digest = hashlib.sha256()
    for inputs in splits:
        for example in inputs:
            fields = example._replace(location="")
            if hasattr(fields, "document"):  # it may hold the path
                fields = fields._replace(document="")
            digest.update(repr(tuple(fields)).encode(errors="surrogatepass"))
    return digest.hexdigest()


# Results ------------------------------------------------------------------------------------------


def write_results(
    task: Task, name: str, split: str, folder: Path, inputs: Sequence[Any], results: Sequence[Any]
) -> list[Path]:
    """Write results: one JSON object per line and input, and the official files of the set."""
    path = folder / f"{split}.jsonl"
    pairs = zip(inputs, results, strict=True)
    write_json_lines(path, ({"id": e.id, **r.to_dict(), **input_fields(e)} for e, r in pairs))
    return [path, *task.official_files(name, split, folder, inputs, results)]


def input_fields(example: Any) -> dict[str, Any]:
    """Return the gold label and the texts, which readers want next to a prediction."""
    if not isinstance(example, TextExample):
        return {}
    return {"gold": example.label, "text": example.text, "pair": example.pair}


def labelled_part(
    inputs: Sequence[Any], results: Sequence[Any]
) -> tuple[list[Any], list[Any], str]:
    """Return the labelled inputs, their results, and a note on how many have no label."""
    known = [number for number, example in enumerate(inputs) if example.gold is not None]
    lost = len(inputs) - len(known)
    note = f"{lost:,} of {len(inputs):,} inputs have no label and are not scored" if lost else ""
    return [inputs[i] for i in known], [results[i] for i in known], note
