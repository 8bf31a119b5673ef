"""Data sets by name: the nine tasks of GLUE and AX, SQuAD 1.1 and 2.0, SWAG, CoNLL-2003.

They are those of paper sections 4 and 5.3.

Any other name is a kind of task with the user's own data; see `own.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bertkit.datasets.conll import CONLL_SITE, REUTERS, conll_sentences
from bertkit.datasets.examples import QuestionExample
from bertkit.datasets.glue import GLUE, find_file, read_glue
from bertkit.datasets.squad import SQUAD_FILES, SQUAD_SITE, read_squad
from bertkit.datasets.swag import SWAG_SITE, read_swag
from bertkit.datasets.tabular import has_columns
from bertkit.datasets.user_files import Columns, read_user_file
from bertkit.errors import BertkitError, nearest
from bertkit.tasks.classification import Classification
from bertkit.tasks.data import TaskData
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import Regression
from bertkit.tasks.submissions import KIND_OF, official_writer
from bertkit.tasks.task import Task
from bertkit.tasks.user_data import (
    KINDS,
    DataFiles,
    WindowLengths,
    note_unique,
    refuse_columns,
    refuse_lengths,
    task_for,
    user_task_data,
)
from bertkit.text.lines import TextCounts

OFFICIAL = (*GLUE, "squad-1.1", "squad-2.0", "swag", "conll-2003")


def load_dataset(
    name: str, files: DataFiles, columns: Columns, lengths: WindowLengths, positions: int
) -> TaskData:
    """Read a data set.

    Args:
        name: one of `OFFICIAL` or `KINDS`.
        files: where it is.
        columns: of own data.
        lengths: of windows.
        positions: the longest sequence of the model, in tokens.

    Raises:
        BertkitError: a file is absent (official ones: where to get them), damaged, or lacks a
            column.
    """
    key = name.lower()
    refuse_unused_flags(key, files, columns)
    if (kind := benchmark_task_type(key)) in KINDS:
        refuse_lengths(kind, lengths)
    if key in GLUE:
        return glue_dataset(key, files, lengths, positions)
    if key in KINDS:
        if not files.train:
            raise BertkitError(f"{key} takes your own data: give --train FILE (and --dev, --test)")
        return user_task_data(key, files, columns, lengths, positions)
    if key in OFFICIAL:
        return set_dataset(key, files, lengths, positions)
    raise no_task(name)


def no_task(name: str) -> BertkitError:
    """The error for a name that is neither of a set nor of a kind."""
    return BertkitError(f"no task is called '{name}'{nearest(name.lower(), (*OFFICIAL, *KINDS))}")


def benchmark_task_type(key: str) -> str:
    """The kind of a set, or the kind itself."""
    return GLUE[key].kind if key in GLUE else KIND_OF.get(key, key)


def refuse_unused_flags(name: str, files: DataFiles, columns: Columns) -> None:
    """Refuse what would have no effect.

    Official sets have columns of their own, GLUE's files names of their own; a kind reads no
    official folder, and not all columns.

    Raises:
        BertkitError: a flag would have no effect.
    """
    if name in OFFICIAL and columns != Columns():
        raise BertkitError(f"{name} knows its columns; for other files choose a kind: {KINDS}")
    if name in GLUE and (files.train or files.dev or files.test):
        raise BertkitError(
            f"{name} is read from --data FOLDER; for other files choose {GLUE[name].kind}"
        )
    if name in KINDS:
        refuse_columns(name, columns)
    if name in KINDS and files.data is not None:
        raise BertkitError(
            f"{name} takes your own data, by --train, --dev and --test; --data is the folder of an "
            f"official set: {', '.join(OFFICIAL)}"
        )
    if files.dev_share != DataFiles.dev_share and (files.dev or name in OFFICIAL):
        raise BertkitError(
            "--dev-share sets training data apart where there is no other for dev, and here there "
            "is; leave it out" + " or --dev" * (name in KINDS)
        )


def benchmark_folder(files: DataFiles, name: str) -> Path:
    """The folder of an official set."""
    if files.data is None:
        raise BertkitError(f"{name} is read from its official files: give --data FOLDER")
    return files.data


def glue_dataset(name: str, files: DataFiles, lengths: WindowLengths, positions: int) -> TaskData:
    """One of GLUE's tasks from its official folder."""
    official = GLUE[name]
    folder, counts = benchmark_folder(files, name), TextCounts()
    max_length = lengths.window(official.kind, positions)
    task: Task[Any, Any]
    if official.kind == "regression":
        task = Regression(max_length, lengths.stride)
    else:
        task = Classification(official.labels, official.metrics, max_length, lengths.stride)
    if "train" not in official.files:
        raise BertkitError(
            f"{name} has no training data: tune on mnli, then "
            f"bertkit evaluate {name} --model RUN --data {folder} --split test (or dev)"
        )
    splits = {split: read_glue(name, folder, split, counts) for split in labelled(official.files)}
    tests = []
    for split in official.submissions:
        try:
            find_file(name, official, folder, split)
        except BertkitError:
            counts.note(f"{split} file is absent: nothing to submit", str(folder))
        else:
            tests.append((split, read_glue(name, folder, split, counts)))
    train = splits.pop("train")
    return TaskData(
        *(name, task, train, list(splits.items()), tests, counts, {"data": str(folder)}),
        write=official_writer(name),
    )


def glue_columns(name: str, path: str, columns: Columns) -> Columns:
    """What a file's texts are called, for a model of GLUE: as usual, or as in the files of its set.

    Raises:
        BertkitError: the file has neither.
    """
    task = GLUE[name]
    own = [column for column in (task.text, task.pair) if column]

    def has(*names: str) -> bool:
        return has_columns(path, names, columns.format, header=columns.header)

    if has(columns.text):
        return columns
    if has(*own):
        return replace(columns, text=task.text, pair=task.pair)
    flags = "--text A --pair B" if task.pair else "--text A"
    shown = " and ".join(map(repr, own))
    raise BertkitError(
        f"{path} has neither a column '{columns.text}' nor {shown} as {name}; "
        f"name its own: {flags}; official files are predicted with: bertkit evaluate {name} "
        "--model MODEL --data FOLDER --split SPLIT --out OUT"
    )


def labelled(files: Any) -> list[str]:
    """The splits of a GLUE task that have labels."""
    return [split for split in files if not split.startswith("test")]


def set_dataset(name: str, files: DataFiles, lengths: WindowLengths, positions: int) -> TaskData:
    """SQuAD, SWAG or CoNLL-2003 from official files."""
    counts = TextCounts()
    paths = official_paths(name, files)
    train = read_official(name, paths["train"], counts, scoring=False)
    scored = {
        split: read_official(name, paths[split], counts, scoring=True)
        for split in ("dev", "test")
        if split in paths
    }
    tests = [("test", scored["test"])] if "test" in scored else []
    task = task_for(KIND_OF[name], train, Columns(), lengths, positions, counts)
    if name == "squad-2.0" and isinstance(task, QuestionAnswering) and not task.null:
        raise BertkitError(f"{paths['train']} has only answerable questions; it is no SQuAD 2.0")
    dev = ("dev", scored["dev"])
    note_unique([dev, *tests], lengths.context, counts)
    return TaskData(
        *(name, task, train, [dev], tests, counts, dict(paths)), write=official_writer(name)
    )


def official_paths(name: str, files: DataFiles) -> dict[str, str]:
    """The files of an official set, in its folder or as overruled; test only where it is there."""
    paths = {split: official_path(name, split, files) for split in ("train", "dev")}
    if files.test or (files.data is not None and "test" in OFFICIAL_FILES[name]):
        test = official_path(name, "test", files)
        if files.test or Path(test).is_file():  # a missing one leaves nothing to predict
            paths["test"] = test
    return paths


def official_path(name: str, split: str, files: DataFiles) -> str:
    """The file of one split of an official set, in its folder or as overruled.

    Raises:
        BertkitError: there is no such split, or nothing says where it is.
    """
    if given := split_path(files, split):
        return given
    if split not in OFFICIAL_FILES[name]:
        raise BertkitError(f"{name} has no official {split} file; give one of yours: --test FILE")
    if files.data is None:
        raise BertkitError(
            f"{name} is read from its official files: give --data FOLDER, or --{split} FILE"
        )
    file = OFFICIAL_FILES[name][split]
    paths = [files.data / one for one in (*OTHER_NAMES.get(file, ()), file)]
    return str(next((path for path in paths if path.is_file()), paths[-1]))


def split_path(files: DataFiles, split: str) -> str:
    """The file that was given for a split, "" for none.

    Raises:
        BertkitError: there is no such split.
    """
    given = {"train": files.train, "dev": files.dev, "test": files.test}
    if split not in given:
        raise BertkitError(f"there is no split '{split}'{nearest(split, given)}")
    return given[split]


OFFICIAL_FILES: dict[str, dict[str, str]] = {
    "squad-1.1": SQUAD_FILES["1.1"],
    "squad-2.0": SQUAD_FILES["2.0"],
    "swag": {"train": "train.csv", "dev": "val.csv", "test": "test.csv"},
    "conll-2003": {"train": "train.txt", "dev": "valid.txt", "test": "test.txt"},
}


OTHER_NAMES = {
    "train.txt": ("eng.train",),
    "valid.txt": ("eng.testa", "dev.txt"),
    "test.txt": ("eng.testb",),
}
"""What CoNLL-2003's files are called where its own script has made them."""


def read_version(
    version: str, path: str, counts: TextCounts, scoring: bool
) -> Sequence[QuestionExample]:
    """Questions that are scored by the rules of a version, whatever their file says."""
    return read_squad(path, counts, scoring=scoring, version=version)


BENCHMARK_READERS: dict[str, Callable[[str, TextCounts, bool], Sequence[Any]]] = {
    "squad-1.1": partial(read_version, "1.1"),
    "squad-2.0": partial(read_version, "2.0"),
    "swag": lambda path, counts, scoring: read_swag(path, counts, labelled=not scoring or None),
    "conll-2003": lambda path, counts, scoring: list(
        conll_sentences(path, counts, untagged_ok=scoring)
    ),
}
"""Name -> (path, counts, whether it is only scored) -> inputs."""

SITES = {
    "squad-1.1": f"the official files are at {SQUAD_SITE}",
    "squad-2.0": f"the official files are at {SQUAD_SITE}",
    "swag": f"get train.csv, val.csv and test.csv of SWAG from {SWAG_SITE}",
    "conll-2003": f"get the tags from {CONLL_SITE} and their text, the Reuters corpus, from NIST "
    f"({REUTERS})",
}


def read_official(name: str, path: str, counts: TextCounts, *, scoring: bool) -> Sequence[Any]:
    """The inputs of a file of SQuAD, SWAG or CoNLL-2003.

    Raises:
        BertkitError: it is absent (the message says where to get it) or damaged.
    """
    if "://" not in path and not Path(path).expanduser().exists():
        raise BertkitError(f"{path} does not exist; {SITES[name]}")
    return BENCHMARK_READERS[name](path, counts, scoring)


def split_file(name: str, split: str, files: DataFiles) -> str:
    """The file that `read_split` reads.

    Raises:
        BertkitError: there is no such split or file.
    """
    key = name.lower()
    if key in GLUE:
        return str(find_file(key, GLUE[key], benchmark_folder(files, key), split))
    return official_path(key, split, files) if key in KIND_OF else split_path(files, split)


def read_split(
    name: str, split: str, files: DataFiles, columns: Columns, counts: TextCounts
) -> Sequence[Any]:
    """The inputs of one split of a data set, for scoring or predicting.

    Args:
        name: one of `OFFICIAL` or a kind; for a kind, the file is `files`' one of that split.
        split: train, dev, test, or another of an official set.
        files: where it is.
        columns: of own data.
        counts: of what is skipped.

    Raises:
        BertkitError: there is no such set, split or file; or files or columns of one's own are
            named for an official set.
    """
    key = name.lower()
    refuse_unused_flags(key, files, columns)
    if key in GLUE:
        return read_glue(key, benchmark_folder(files, key), split, counts)
    if key in KIND_OF:
        return read_official(key, official_path(key, split, files), counts, scoring=True)
    if key in KINDS:
        path = split_path(files, split)
        if not path:
            raise BertkitError(f"give the file as --{split} FILE, and --split {split}")
        return read_user_file(key, path, columns, counts, scoring=True, test=split == "test")
    raise no_task(name)
