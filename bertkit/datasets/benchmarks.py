"""Data sets by name: the nine tasks of GLUE and AX, SQuAD 1.1 and 2.0, SWAG, CoNLL-2003.

These are the data sets of paper sections 4 and 5.3. This module knows where their files are and how
to read them. The user's files are read here too, by the names of their columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from bertkit.datasets.columns import TextColumns
from bertkit.datasets.conll import CONLL_SITE, REUTERS, conll_sentences
from bertkit.datasets.glue import GLUE, read_glue
from bertkit.datasets.readers import Columns
from bertkit.datasets.records import Records, as_source
from bertkit.datasets.squad import SQUAD_FILES, SQUAD_SITE, read_squad
from bertkit.datasets.swag import SWAG_SITE, read_swag
from bertkit.datasets.tabular import has_columns
from bertkit.errors import BertkitError, nearest
from bertkit.files import from_home
from bertkit.outputs import DATA, TEXT
from bertkit.text.lines import TextCounts


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """The files of a data set: an official folder, or one file for each split."""

    data: Annotated[Path | None, DATA] = None
    """The folder of an official data set."""
    train: Annotated[str, TEXT] = ""
    """Your training data; it also replaces an official file of SQuAD, SWAG or CoNLL."""
    dev: Annotated[str, TEXT] = ""
    """Labelled data for choosing the best run; without it, a share of the training data is held
    out."""
    test: Annotated[str, TEXT] = ""
    """Data to predict at the end, with or without labels."""
    dev_share: float = 0.1
    """The share of the training data that is held out if there is no --dev."""

    def __post_init__(self) -> None:
        """Convert what Python callers may pass: paths, and data in memory."""
        if self.data is not None:
            object.__setattr__(self, "data", Path(from_home(self.data)))
        for name in ("train", "dev", "test"):
            given = getattr(self, name)
            source = "" if given is None else as_source(given, name)
            object.__setattr__(self, name, source)


FILES = DataFiles()


class Benchmark(NamedTuple):
    """The task type, files and reader of an official set that has one file for each split."""

    task_type: str
    files: Mapping[str, str]
    """Split -> file name."""
    read: Callable[..., Sequence[Any]]
    """(path, counts, scoring=whether the file is only scored) -> examples."""
    where: str
    """Where to get the files; ends an error message."""


BENCHMARKS = {
    **{
        f"squad-{version}": Benchmark(
            "question-answering",
            SQUAD_FILES[version],
            partial(read_squad, version=version),
            f"the official files are at {SQUAD_SITE}",
        )
        for version in ("1.1", "2.0")
    },
    "swag": Benchmark(
        "multiple-choice",
        {"train": "train.csv", "dev": "val.csv", "test": "test.csv"},
        lambda path, counts, *, scoring: read_swag(path, counts, labelled=not scoring or None),
        f"get train.csv, val.csv and test.csv of SWAG from {SWAG_SITE}",
    ),
    "conll-2003": Benchmark(
        "token-classification",
        {"train": "train.txt", "dev": "valid.txt", "test": "test.txt"},
        lambda path, counts, *, scoring: list(conll_sentences(path, counts, untagged_ok=scoring)),
        f"get the tags from {CONLL_SITE} and their text, the Reuters corpus, from NIST ({REUTERS})",
    ),
}
OFFICIAL = (*GLUE, *BENCHMARKS)

OTHER_NAMES = {
    "train.txt": ("eng.train",),
    "valid.txt": ("eng.testa", "dev.txt"),
    "test.txt": ("eng.testb",),
}
"""Other names of CoNLL-2003's files, such as those that its own script gives them."""


def benchmark_task_type(name: str) -> str:
    """Return the task type of an official set, or any other name unchanged."""
    key = name.lower()
    if key in GLUE:
        return GLUE[key].task_type
    return BENCHMARKS[key].task_type if key in BENCHMARKS else key


def check_sources(name: str, files: DataFiles, columns: Columns | Mapping[str, Any] | None) -> None:
    """Reject flags that would have no effect.

    Official sets have fixed columns, GLUE also has fixed file names, and a task type reads no
    official folder.

    Raises:
        BertkitError: a flag would have no effect; the message names it.
    """
    if name in OFFICIAL and columns:
        raise BertkitError(
            f"{name} knows its columns; for other files choose {benchmark_task_type(name)}"
        )
    if name in GLUE and (files.train or files.dev or files.test):
        raise BertkitError(
            f"{name} is read from --data FOLDER; for other files choose {GLUE[name].task_type}"
        )
    if name not in OFFICIAL and files.data is not None:
        raise BertkitError(
            f"{name} takes your own data, by --train, --dev and --test; --data is the folder of an "
            f"official set: {', '.join(OFFICIAL)}"
        )
    if files.dev_share != DataFiles.dev_share and (files.dev or name in OFFICIAL):
        raise BertkitError(
            "--dev-share has no effect, because the data has a dev split of its own; leave it out"
            + " or --dev" * (name not in OFFICIAL)
        )


def benchmark_folder(files: DataFiles, name: str, instead: str = "") -> Path:
    """Return the folder of an official set; `instead` ends the message if none was given.

    Raises:
        BertkitError: no folder was given.
    """
    if files.data is None:
        raise BertkitError(f"{name} is read from its official files: give --data FOLDER{instead}")
    return files.data


def glue_columns(name: str, path: str | Records, columns: TextColumns) -> TextColumns:
    """Return the text columns of a file for a GLUE model: those given, or those of its GLUE task.

    Raises:
        BertkitError: the file has neither.
    """
    task = GLUE[name]
    own = [column for column in (task.text, task.pair) if column]

    def has(*names: str) -> bool:
        return has_columns(path, names, columns.format, header=columns.header)

    known = [([columns.text], columns), (own, replace(columns, text=task.text, pair=task.pair))]
    if isinstance(path, Records):  # tuples have every column
        known.reverse()
    for names, found in known:
        if has(*names):
            return found
    flags = "--text A --pair B" if task.pair else "--text A"
    shown = " and ".join(map(repr, own))
    raise BertkitError(
        f"{path} has neither a column '{columns.text}' nor {shown} as {name}; "
        f"name its own: {flags}; official files are predicted with: bertkit evaluate MODEL "
        "--data FOLDER --split SPLIT --out OUT"
    )


def official_paths(name: str, files: DataFiles) -> dict[str, str]:
    """Return split -> file of an official set; "test" is absent if its official file is missing."""
    paths = {split: official_path(name, split, files) for split in ("train", "dev")}
    if files.test or (files.data is not None and "test" in BENCHMARKS[name].files):
        test = official_path(name, "test", files)
        if files.test or Path(test).is_file():  # a missing one leaves nothing to predict
            paths["test"] = test
    return paths


def official_path(name: str, split: str, files: DataFiles) -> str:
    """Return the file of one split of an official set: the one given, or the one in its folder.

    Raises:
        BertkitError: there is no such split, or neither a file nor a folder was given.
    """
    if given := split_path(files, split):
        return given
    if split not in BENCHMARKS[name].files:
        raise BertkitError(f"{name} has no official {split} file; give one of yours: --test FILE")
    folder = benchmark_folder(files, name, f", or --{split} FILE")
    file = BENCHMARKS[name].files[split]
    paths = [folder / one for one in (*OTHER_NAMES.get(file, ()), file)]
    return str(next((path for path in paths if path.is_file()), paths[-1]))


def split_path(files: DataFiles, split: str) -> str:
    """Return the file that was given for a split, or "" if none was.

    Raises:
        BertkitError: there is no such split.
    """
    given = {"train": files.train, "dev": files.dev, "test": files.test}
    if split not in given:
        raise BertkitError(f"there is no split '{split}'{nearest(split, given)}")
    return given[split]


def read_official(
    name: str, path: str | Records, counts: TextCounts, *, scoring: bool
) -> Sequence[Any]:
    """Read the examples of a file of SQuAD, SWAG or CoNLL-2003.

    Raises:
        BertkitError: the file is missing (the message says where to get it) or damaged; or the data
            is in memory.
    """
    if isinstance(path, Records):
        raise BertkitError(
            f"{name} is read from its official files; data in memory goes with the task type "
            f"{BENCHMARKS[name].task_type}"
        )
    if "://" not in path and not Path(from_home(path)).exists():
        raise BertkitError(f"{path} does not exist; {BENCHMARKS[name].where}")
    return BENCHMARKS[name].read(path, counts, scoring=scoring)


def read_split(
    name: str, split: str, files: DataFiles, columns: Columns | None, counts: TextCounts
) -> Sequence[Any]:
    """Read the examples of one split of a data set, for scoring or predicting.

    Args:
        name: one of `OFFICIAL`, or a task type, whose file is the one given for the split.
        split: "train", "dev", "test", or another split of an official set.
        files: the files of the data set.
        columns: the columns of the user's data; None for an official set.
        counts: collects what is skipped.

    Raises:
        BertkitError: there is no such split or file, or an official set was given files or columns
            that it does not take.
    """
    key = name.lower()
    check_sources(key, files, columns)
    if key in GLUE:
        return read_glue(key, benchmark_folder(files, key), split, counts)
    if key in BENCHMARKS:
        return read_official(key, official_path(key, split, files), counts, scoring=True)
    path = split_path(files, split)
    if not path:
        raise BertkitError(f"give the file as --{split} FILE, and --split {split}")
    assert columns is not None, "data of a task type needs columns"
    return columns.read_labelled(path, counts, scoring=True, test=split == "test")
