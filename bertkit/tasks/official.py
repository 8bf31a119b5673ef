"""Data sets by name: GLUE, SQuAD 1.1 and 2.0, SWAG and CoNLL-2003.

These are the data sets of paper sections 4 and 5.3. Official files are read with their quirks.
Models are saved with readable label names; the table of GLUE also has the spellings of its files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from bertkit.errors import BertkitError, nearest
from bertkit.files import write_json, write_text
from bertkit.tasks.classification import TextExample
from bertkit.tasks.columns import Purpose, read_rows, require_all
from bertkit.tasks.entities import conll_sentences
from bertkit.tasks.multiple_choice import ChoiceExample
from bertkit.tasks.regression import read_number
from bertkit.tasks.squad import read_questions
from bertkit.text.documents import TextCounts

GLUE_SITE = "https://gluebenchmark.com/tasks"


@dataclass(frozen=True)
class OfficialSet:
    """An official data set: its files, how to read them, and the settings of its task."""

    task_type: str
    files: Mapping[str, tuple[str, ...]]  # split -> the possible names of its file
    read: Callable[..., Sequence[Any]]  # (path, counts, purpose) -> examples
    where: str  # where to get the files
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The settings of its task that are not read from the training data."""
    folder: str = ""


# GLUE ---------------------------------------------------------------------------------------------


SPLITS = {"train": "train.tsv", "dev": "dev.tsv", "test": "test.tsv"}


class GlueTask(NamedTuple):
    """The files, columns, labels and metrics of a task of GLUE."""

    folder: str
    labels: tuple[str, ...]  # in the order of the outputs; () for STS-B, which has numbers 0-5
    file_labels: tuple[str, ...]  # the same labels as the files and the server spell them
    text: str  # the column of sentence A
    pair: str  # the column of sentence B; "" if there is none
    label: str  # the column of the label in train and dev
    metrics: tuple[str, ...]  # the metrics that GLUE reports, the main one first
    splits: Mapping[str, str] = SPLITS
    """Split -> the name of its file."""


BINARY, YES_NO = ("0", "1"), ("entailment", "not_entailment")
NLI = ("entailment", "neutral", "contradiction")
SINGLE, PAIR = ("sentence", "", "label"), ("sentence1", "sentence2", "label")
ACCURACY = ("accuracy",)
# fmt: off
MNLI_SPLITS = {"train": "train.tsv",
               "dev": "dev_matched.tsv", "dev-mismatched": "dev_mismatched.tsv",
               "test": "test_matched.tsv", "test-mismatched": "test_mismatched.tsv"}
GLUE = {
    "cola": GlueTask("CoLA", ("unacceptable", "acceptable"), BINARY, *SINGLE, ("matthews",)),
    "sst-2": GlueTask("SST-2", ("negative", "positive"), BINARY, *SINGLE, ACCURACY),
    "mrpc": GlueTask("MRPC", ("not_equivalent", "equivalent"), BINARY, "#1 String", "#2 String",
                     "Quality", ("f1", "accuracy")),
    "sts-b": GlueTask("STS-B", (), (), "sentence1", "sentence2", "score", ("pearson", "spearman")),
    "qqp": GlueTask("QQP", ("not_duplicate", "duplicate"), BINARY, "question1", "question2",
                    "is_duplicate", ("f1", "accuracy")),
    "mnli": GlueTask("MNLI", NLI, NLI, "sentence1", "sentence2", "gold_label", ACCURACY,
                     splits=MNLI_SPLITS),
    "qnli": GlueTask("QNLI", YES_NO, YES_NO, "question", "sentence", "label", ACCURACY),
    "rte": GlueTask("RTE", YES_NO, YES_NO, *PAIR, ACCURACY),
    "wnli": GlueTask("WNLI", ("not_entailment", "entailment"), BINARY, *PAIR, ACCURACY),
}
# fmt: on
COLA_COLUMNS = ("source", "label", "author's label", "sentence")


def read_glue(name: str, path: str, counts: TextCounts, purpose: Purpose) -> list[TextExample]:
    """Read a split with its empty texts, without ragged rows (QQP) and MNLI's without agreement."""
    task, labelled = GLUE[name], purpose != "test"
    columns = [task.text, task.pair, task.label if labelled else ""]
    header = COLA_COLUMNS if name == "cola" and labelled else True
    read, inputs = TextCounts(), []
    for number, location, row in read_rows(
        path, read, "tsv", header=header, columns=[column for column in columns if column]
    ):
        text, pair = row[task.text], row[task.pair] if task.pair else None
        if not text.strip() or (pair is not None and not pair.strip()):
            read.note("empty text, kept", location)
        value = row[task.label].strip() if labelled else ""
        if value == "-":  # MNLI's annotators did not agree
            read.note("row without a majority label", location)
            continue
        if not labelled:
            label: str | float | None = None
        elif not task.labels:
            label = read_number(value, task.label, location)
        elif value in task.file_labels:
            label = task.labels[task.file_labels.index(value)]
        else:
            raise BertkitError(
                f"{location}: '{value[:40]}' is not a label of {task.folder} "
                f"({', '.join(task.file_labels)}); get the file again from {GLUE_SITE}"
            )
        inputs.append(TextExample(str(number), text, pair, label, location))
    if not inputs:
        raise BertkitError(f"{path} has no rows; get it again from {GLUE_SITE}")
    if not labelled:
        require_all(read, f"every row of a test set is needed; get it again from {GLUE_SITE}")
    counts += read
    return inputs


def write_official(
    name: str, split: str, folder: Path, ids: Sequence[str], results: Sequence[Any]
) -> list[Path]:
    """Write what official programs read: GLUE's table of a test split, or SQuAD's JSON files."""
    if name in GLUE and split.startswith("test"):
        return [write_glue(name, split, folder, ids, results)]
    if not results or not hasattr(results[0], "null_odds"):
        return []
    paths, fields = [], {"predictions": "answer", "null_odds": "null_odds"}
    if name == "squad-1.1":  # every question has an answer
        del fields["null_odds"]
    for file, attribute in fields.items():
        paths.append(folder / split / f"{file}.json")
        values = [getattr(result, attribute) for result in results]
        write_json(paths[-1], dict(zip(ids, values, strict=True)))
    return paths


def write_glue(
    name: str, split: str, folder: Path, ids: Sequence[str], results: Sequence[Any]
) -> Path:
    """Write the file that the GLUE server takes for a test split."""
    task = GLUE[name]
    rows = sorted((int(number), result) for number, result in zip(ids, results, strict=True))
    if [number for number, _ in rows] != list(range(len(rows))):
        raise BertkitError(
            f"a {task.folder} submission needs the IDs 0 to {len(ids) - 1}; predict the whole test "
            "file"
        )
    spelling = dict(zip(task.labels, task.file_labels, strict=True))
    lines = ["index\tprediction"]
    for number, result in rows:
        answer = spelling[result.label] if spelling else f"{min(max(result.value, 0.0), 5.0):.3f}"
        lines.append(f"{number}\t{answer}")
    files = {("mnli", "test"): "MNLI-m", ("mnli", "test-mismatched"): "MNLI-mm"}
    path = folder / f"{files.get((name, split), task.folder)}.tsv"
    write_text(path, "\n".join(lines) + "\n")
    return path


# SWAG ---------------------------------------------------------------------------------------------

ENDINGS = ("ending0", "ending1", "ending2", "ending3")
SWAG_COLUMNS = ("sent1", "sent2", *ENDINGS)


def read_swag(path: str, counts: TextCounts, purpose: Purpose) -> list[ChoiceExample]:
    """Read a split; sentence B of a choice is `sent2` and an ending, the ID is the row's number."""
    read, inputs = TextCounts(), []
    columns = (*SWAG_COLUMNS, "label")
    for number, location, row in read_rows(path, read, columns=columns, optional=("label",)):
        first, second, *endings = (str(row[name] or "").strip() for name in SWAG_COLUMNS)
        if not first or not all(endings):
            read.note("empty text, kept", location)
        choices = tuple(f"{second} {ending}".strip() for ending in endings)
        label = int(row["label"]) if row.get("label") else None
        inputs.append(ChoiceExample(str(number), first, choices, label, location))
    require_all(read, "every row needs its prediction; get the file again")
    counts += read
    return inputs


# All sets -----------------------------------------------------------------------------------------

OFFICIAL: dict[str, OfficialSet] = {
    name: OfficialSet(
        "classification" if task.labels else "regression",
        {split: (file,) for split, file in task.splits.items()},
        partial(read_glue, name),
        f"get {task.folder} from {GLUE_SITE}",
        {"labels": task.labels, "metrics": task.metrics} if task.labels else {},
        task.folder,
    )
    for name, task in GLUE.items()
}
OFFICIAL |= {
    f"squad-{version}": OfficialSet(
        "question-answering",
        {"train": (f"train-v{version}.json",), "dev": (f"dev-v{version}.json",)},
        partial(read_questions, version=version),
        "the official files are at https://rajpurkar.github.io/SQuAD-explorer/",
    )
    for version in ("1.1", "2.0")
}
OFFICIAL["swag"] = OfficialSet(
    "multiple-choice",
    {"train": ("train.csv",), "dev": ("val.csv",), "test": ("test.csv",)},
    read_swag,
    "get train.csv, val.csv and test.csv from https://github.com/rowanz/swagaf",
)
OFFICIAL["conll-2003"] = OfficialSet(
    "token-classification",
    {
        "train": ("eng.train", "train.txt"),
        "dev": ("eng.testa", "valid.txt", "dev.txt"),
        "test": ("eng.testb", "test.txt"),
    },
    lambda path, counts, purpose: list(conll_sentences(path, counts, purpose)),
    "get the tags from https://www.clips.uantwerpen.be/conll2003/ner/ and their text, the Reuters "
    "corpus, from NIST",
)
"""Name -> data set."""


def official_file(name: str, split: str, folder: Path) -> str:
    """Find the file of a split, in a folder or the set's folder inside it; "" if there is none."""
    official = OFFICIAL[name]
    if split not in official.files:
        raise BertkitError(f"{name} has no split '{split}'{nearest(split, official.files)}")
    for parent in (folder, folder / official.folder):
        for file in official.files[split]:
            if (parent / file).is_file():
                return str(parent / file)
    return ""
