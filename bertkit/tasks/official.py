"""Data sets by name: GLUE and its diagnostic set AX, SQuAD 1.1 and 2.0, SWAG and CoNLL-2003.

These are the data sets of paper sections 4 and 5.3. Official files are read with their quirks.
Models are saved with readable label names; the table of GLUE also has the spellings of its files,
which its server expects too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bertkit.errors import BertkitError, nearest
from bertkit.files import write_text
from bertkit.tasks.entities import conll_sentences
from bertkit.tasks.multiple_choice import ChoiceExample
from bertkit.tasks.regression import read_number
from bertkit.tasks.rows import Fields, column_names, read_rows, require_all
from bertkit.tasks.squad import read_questions
from bertkit.tasks.texts import TextExample
from bertkit.text.documents import TextCounts

GLUE_SITE = "https://gluebenchmark.com/tasks"
BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
INFERENCE = ("entailment", "neutral", "contradiction")
COLA_COLUMNS = ("source", "label", "author's label", "sentence")


@dataclass(frozen=True)
class OfficialSet:
    """The task type, files and reader of a data set."""

    task_type: str
    files: Mapping[str, tuple[str, ...]]
    """Split -> the possible names of its file."""
    read: Callable[..., Sequence[Any]]
    """(path, split, counts, scoring=whether the file is only scored) -> examples."""
    where: str
    """Where to get the files."""
    settings: Mapping[str, Any]
    """The settings of its task that are not read from the training data."""
    folder: str = ""
    """The name of its official folder."""


# GLUE ---------------------------------------------------------------------------------------------


class GlueTask(NamedTuple):
    """The files, columns, labels and metrics of a task of GLUE."""

    folder: str
    labels: tuple[str, ...]
    """The label names in the order of the outputs; () for STS-B, whose label is a number 0-5."""
    file_labels: tuple[str, ...]
    """The same labels as the files and the server spell them."""
    text: str
    """The column of sentence A."""
    pair: str
    """The column of sentence B; "" if there is none."""
    label: str
    """The column of the label in train and dev."""
    metrics: tuple[str, ...]
    """The metrics that GLUE reports, the main one first."""
    submission: str = ""
    """The name of the server's file, if it is not that of the folder."""
    test_id: str = "index"
    """The column of the row number in files without labels."""


SPLITS = {split: (f"{split}.tsv",) for split in ("train", "dev", "test")}
GLUE: dict[str, GlueTask] = {
    "cola": GlueTask(
        *("CoLA", ("unacceptable", "acceptable"), BINARY, "sentence", "", "label", ("matthews",))
    ),
    "sst-2": GlueTask(
        *("SST-2", ("negative", "positive"), BINARY, "sentence", "", "label", ("accuracy",))
    ),
    "mrpc": GlueTask(
        *("MRPC", ("not_equivalent", "equivalent"), BINARY, "#1 String", "#2 String", "Quality"),
        metrics=("f1", "accuracy"),
    ),
    "sts-b": GlueTask(
        *("STS-B", (), (), "sentence1", "sentence2", "score", ("pearson", "spearman"))
    ),
    "qqp": GlueTask(
        *("QQP", ("not_duplicate", "duplicate"), BINARY, "question1", "question2"),
        *("is_duplicate", ("f1", "accuracy")),
        test_id="id",
    ),
    "mnli": GlueTask(
        *("MNLI", INFERENCE, INFERENCE, "sentence1", "sentence2", "gold_label", ("accuracy",)),
        submission="MNLI-m",
    ),
    "qnli": GlueTask(
        *("QNLI", ENTAILMENT, ENTAILMENT, "question", "sentence", "label", ("accuracy",))
    ),
    "rte": GlueTask(
        *("RTE", ENTAILMENT, ENTAILMENT, "sentence1", "sentence2", "label", ("accuracy",))
    ),
    "wnli": GlueTask(
        *("WNLI", ("not_entailment", "entailment"), BINARY, "sentence1", "sentence2", "label"),
        metrics=("accuracy",),
    ),
    "ax": GlueTask(
        *("diagnostic", INFERENCE, INFERENCE, "sentence1", "sentence2", "", ("matthews",)),
        submission="AX",
    ),
}
GLUE_FILES: dict[str, dict[str, tuple[str, ...]]] = {
    "mnli": {
        "train": ("train.tsv",),
        "dev": ("dev_matched.tsv",),
        "dev-mismatched": ("dev_mismatched.tsv",),
        "test": ("test_matched.tsv",),
        "test-mismatched": ("test_mismatched.tsv",),
    },
    "ax": {"dev": ("diagnostic-full.tsv",), "test": ("diagnostic.tsv", "AX.tsv")},
}


def read_glue(
    name: str, path: str, split: str, counts: TextCounts, *, scoring: bool = False
) -> list[TextExample]:
    """Read the file of a split.

    In a test set the ID is the number in the file; elsewhere it is the number of the row, from 0.
    Empty texts of the official files are kept, so that scores stay comparable; ragged rows (QQP has
    some) and MNLI's without agreement are left out.
    """
    task, labelled = GLUE[name], not split.startswith("test")
    if name == "ax" and labelled:
        task = task._replace(text="Premise", pair="Hypothesis", label="Label")
    columns = [task.text, task.pair, task.label if labelled else task.test_id]
    header = COLA_COLUMNS if name == "cola" and labelled else True
    read, inputs = TextCounts(), []
    for number, location, row in read_rows(
        path, read, "tsv", header=header, columns=[column for column in columns if column]
    ):
        if labelled and row[task.label] == "-":  # MNLI's annotators did not agree
            read.note("row without a majority label", location)
        else:
            inputs.append(glue_example(task, str(number), row, labelled, location, read))
    if not inputs:
        raise BertkitError(f"{path} has no rows; get it again from {GLUE_SITE}")
    if not labelled:
        require_all(read, f"every row of a test set is needed; get it again from {GLUE_SITE}")
    counts += read
    return inputs


def glue_example(
    task: GlueTask, number: str, row: Fields, labelled: bool, location: str, counts: TextCounts
) -> TextExample:
    """Make an example of a row; a label must be one of the task's."""
    text, pair = str(row[task.text]), str(row[task.pair]) if task.pair else None
    if not text.strip() or (pair is not None and not pair.strip()):
        counts.note("empty text, kept", location)
    if not labelled:
        return TextExample(str(row[task.test_id]).strip(), text, pair, None, location)
    value = str(row[task.label]).strip()
    if not task.labels:
        label: str | float = read_number(value, task.label, location)
    elif value in task.file_labels:
        label = task.labels[task.file_labels.index(value)]
    else:
        raise BertkitError(
            f"{location}: '{value[:40]}' is not a label of {task.folder} "
            f"({', '.join(task.file_labels)}); get the file again from {GLUE_SITE}"
        )
    return TextExample(number, text, pair, label, location)


def write_glue(
    name: str, split: str, folder: Path, ids: Sequence[str], answers: Sequence[str | float]
) -> list[Path]:
    """Write the file that the GLUE server takes for a test split; nothing for other data.

    It has the columns `index` and `prediction`, in the server's spelling; numbers of STS-B are
    clipped to 0 to 5.
    """
    if name not in GLUE or not split.startswith("test"):
        return []
    task = GLUE[name]
    if sorted(ids, key=int) != [str(number) for number in range(len(ids))]:
        raise BertkitError(
            f"IDs of a {task.folder} submission are 0 to {len(ids) - 1}; predict the whole test "
            "file"
        )
    lines = {}
    for number, answer in zip(ids, answers, strict=True):
        if task.labels:
            lines[int(number)] = task.file_labels[task.labels.index(str(answer))]
        elif not math.isfinite(float(answer)):
            raise BertkitError(f"a prediction for {task.folder} is {answer}, not a finite number")
        else:
            lines[int(number)] = f"{min(max(float(answer), 0.0), 5.0):.3f}"
    rows = "".join(f"{number}\t{lines[number]}\n" for number in sorted(lines))
    file = "MNLI-mm" if split == "test-mismatched" else task.submission or task.folder
    path = folder / f"{file}.tsv"
    write_text(path, f"index\tprediction\n{rows}")
    return [path]


# SWAG ---------------------------------------------------------------------------------------------

ENDINGS = ("ending0", "ending1", "ending2", "ending3")
SWAG_COLUMNS = ("sent1", "sent2", *ENDINGS)


def read_swag(
    path: str, split: str, counts: TextCounts, *, scoring: bool = False
) -> list[ChoiceExample]:
    """Read the rows of train.csv, val.csv or test.csv; in test.csv every label is None.

    Sentence A is `sent1`; sentence B of a choice is `sent2` followed by an ending. The ID is the
    number of the row, from 0: `video-id` and `fold-ind` are not unique.
    """
    labelled = "label" in column_names(path)
    if not labelled and not scoring:
        raise BertkitError(f"{path} has no column 'label', like test.csv of SWAG")
    read, inputs = TextCounts(), []
    columns = [*SWAG_COLUMNS, *(["label"] if labelled else [])]
    for number, location, row in read_rows(path, read, columns=columns):
        fields = {name: str(row[name] or "").strip() for name in columns}
        if not all((fields["sent1"], *(fields[name] for name in ENDINGS))):
            read.note("empty text, kept", location)
        if labelled and fields["label"] not in ("0", "1", "2", "3"):
            raise BertkitError(f"{location}: the label is '{fields['label']}', not 0, 1, 2 or 3")
        choices = tuple(f"{fields['sent2']} {fields[name]}".strip() for name in ENDINGS)
        label = int(fields["label"]) if labelled else None
        inputs.append(ChoiceExample(str(number), fields["sent1"], choices, label, location))
    require_all(read, "every row needs its prediction; get the file again")
    counts += read
    return inputs


def write_swag(
    name: str, split: str, folder: Path, inputs: Sequence[ChoiceExample], choices: Sequence[int]
) -> list[Path]:
    """Write the leaderboard's file for SWAG: a CSV with the header `pred`; nothing for others."""
    if name != "swag":
        return []
    if [example.id for example in inputs] != [str(number) for number in range(len(inputs))]:
        raise BertkitError("a submission to SWAG needs every row of the file, in its order")
    path = folder / f"{split}.csv"
    write_text(path, "pred\n" + "".join(f"{int(choice)}\n" for choice in choices))
    return [path]


# All sets -----------------------------------------------------------------------------------------


def read_conll(path: str, split: str, counts: TextCounts, *, scoring: bool = False) -> list[Any]:
    """Read a file of CoNLL-2003."""
    return list(conll_sentences(path, counts, untagged_ok=scoring))


def read_squad(
    path: str, split: str, counts: TextCounts, *, scoring: bool = False, version: str = ""
) -> list[Any]:
    """Read a file of SQuAD."""
    return read_questions(path, counts, scoring=scoring, version=version)


OFFICIAL: dict[str, OfficialSet] = {
    **{
        name: OfficialSet(
            "classification" if task.labels else "regression",
            GLUE_FILES.get(name, SPLITS),
            partial(read_glue, name),
            f"get {task.folder} from {GLUE_SITE}",
            {"labels": task.labels, "metrics": task.metrics} if task.labels else {},
            task.folder,
        )
        for name, task in GLUE.items()
    },
    **{
        f"squad-{version}": OfficialSet(
            "question-answering",
            {"train": (f"train-v{version}.json",), "dev": (f"dev-v{version}.json",)},
            partial(read_squad, version=version),
            "the official files are at https://rajpurkar.github.io/SQuAD-explorer/",
            {},
        )
        for version in ("1.1", "2.0")
    },
    "swag": OfficialSet(
        "multiple-choice",
        {"train": ("train.csv",), "dev": ("val.csv",), "test": ("test.csv",)},
        read_swag,
        "get train.csv, val.csv and test.csv from https://github.com/rowanz/swagaf",
        {},
    ),
    "conll-2003": OfficialSet(
        "token-classification",
        {
            "train": ("eng.train", "train.txt"),
            "dev": ("eng.testa", "valid.txt", "dev.txt"),
            "test": ("eng.testb", "test.txt"),
        },
        read_conll,
        "get the tags from https://www.clips.uantwerpen.be/conll2003/ner/ and their text, the "
        "Reuters corpus, from NIST",
        {},
    ),
}
"""Name -> data set."""


def official_file(name: str, split: str, folder: Path, *, optional: bool = False) -> str:
    """Find the file of a split, in a folder or the set's folder inside it; "" if optional."""
    official = OFFICIAL[name]
    if split not in official.files:
        raise BertkitError(f"{name} has no split '{split}'{nearest(split, official.files)}")
    names = {plain_name(name), plain_name(official.folder)}
    below = sorted(folder.iterdir()) if folder.is_dir() else []
    for parent in [folder, *(path for path in below if plain_name(path.name) in names)]:
        for file in official.files[split]:
            if (parent / file).is_file():
                return str(parent / file)
    if optional:
        return ""
    wanted = " or ".join(official.files[split])
    raise BertkitError(f"no {wanted} of {name} in {folder}; {official.where}")


def plain_name(name: str) -> str:
    """Normalize a folder name, so that SST-2, sst2 and SST_2 are equal."""
    return name.lower().replace("-", "").replace("_", "")
