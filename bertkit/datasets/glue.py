"""The nine tasks of GLUE and its diagnostic set AX, as one table (BERT section 4.1, appendix B.1).

The official TSV files are read with their quirks. Models are saved with readable label names; the
table also has the spellings of the files, which the GLUE server expects too.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from bertkit.datasets.examples import TextExample
from bertkit.datasets.fields import row_number
from bertkit.datasets.tabular import Fields, numbered_rows, require_all
from bertkit.errors import BertkitError, nearest
from bertkit.text.lines import TextCounts

PLACE = "https://gluebenchmark.com/tasks"
MICROSOFT = "https://www.microsoft.com/en-us/download/details.aspx?id=52398"
DIAGNOSTICS = "https://gluebenchmark.com/diagnostics"
BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
INFERENCE = ("entailment", "neutral", "contradiction")
COLA_COLUMNS = ("source", "label", "author's label", "sentence")
SPLIT_FILES = {split: (f"{split}.tsv",) for split in ("train", "dev", "test")}
"""Split -> possible names of its file."""


class GlueTask(NamedTuple):
    """The files, columns, labels and metrics of one GLUE task."""

    folder: str
    """The name of the official folder."""
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
    submissions: Mapping[str, tuple[str, int]]
    """Split without labels -> (name of its file in glue.zip, number of rows)."""
    files: Mapping[str, tuple[str, ...]] = SPLIT_FILES
    test_id: str = "index"
    """The column of the row number in files without labels."""
    columns: Mapping[str, tuple[str, str, str]] = MappingProxyType({})
    """Split -> (text, pair, label), if its file has other column names."""

    @property
    def task_type(self) -> str:
        """The task type: "classification" or "regression"."""
        return "classification" if self.labels else "regression"

    def of_split(self, split: str) -> GlueTask:
        """Return the same task with the column names of a split's file."""
        text, pair, label = self.columns.get(split, (self.text, self.pair, self.label))
        return self._replace(text=text, pair=pair, label=label)


GLUE: dict[str, GlueTask] = {
    "cola": GlueTask(
        *("CoLA", ("unacceptable", "acceptable"), BINARY, "sentence", "", "label"),
        metrics=("matthews",),
        submissions={"test": ("CoLA.tsv", 1063)},
    ),
    "sst-2": GlueTask(
        *("SST-2", ("negative", "positive"), BINARY, "sentence", "", "label"),
        metrics=("accuracy",),
        submissions={"test": ("SST-2.tsv", 1821)},
    ),
    "mrpc": GlueTask(
        *("MRPC", ("not_equivalent", "equivalent"), BINARY, "#1 String", "#2 String", "Quality"),
        metrics=("f1", "accuracy"),
        submissions={"test": ("MRPC.tsv", 1725)},
    ),
    "sts-b": GlueTask(
        *("STS-B", (), (), "sentence1", "sentence2", "score"),
        metrics=("pearson", "spearman"),
        submissions={"test": ("STS-B.tsv", 1379)},
    ),
    "qqp": GlueTask(
        *("QQP", ("not_duplicate", "duplicate"), BINARY, "question1", "question2"),
        label="is_duplicate",
        metrics=("f1", "accuracy"),
        submissions={"test": ("QQP.tsv", 390965)},
        test_id="id",
    ),
    "mnli": GlueTask(
        *("MNLI", INFERENCE, INFERENCE, "sentence1", "sentence2", "gold_label"),
        metrics=("accuracy",),
        submissions={"test": ("MNLI-m.tsv", 9796), "test-mismatched": ("MNLI-mm.tsv", 9847)},
        files={
            "train": ("train.tsv",),
            "dev": ("dev_matched.tsv",),
            "dev-mismatched": ("dev_mismatched.tsv",),
            "test": ("test_matched.tsv",),
            "test-mismatched": ("test_mismatched.tsv",),
        },
    ),
    "qnli": GlueTask(
        *("QNLI", ENTAILMENT, ENTAILMENT, "question", "sentence", "label"),
        metrics=("accuracy",),
        submissions={"test": ("QNLI.tsv", 5463)},
    ),
    "rte": GlueTask(
        *("RTE", ENTAILMENT, ENTAILMENT, "sentence1", "sentence2", "label"),
        metrics=("accuracy",),
        submissions={"test": ("RTE.tsv", 3000)},
    ),
    "wnli": GlueTask(
        *("WNLI", ("not_entailment", "entailment"), BINARY, "sentence1", "sentence2", "label"),
        metrics=("accuracy",),
        submissions={"test": ("WNLI.tsv", 146)},
    ),
    "ax": GlueTask(
        *("diagnostic", INFERENCE, INFERENCE, "sentence1", "sentence2", ""),
        metrics=("matthews",),
        submissions={"test": ("AX.tsv", 1104)},
        files={"dev": ("diagnostic-full.tsv",), "test": ("diagnostic.tsv", "AX.tsv")},
        columns={"dev": ("Premise", "Hypothesis", "Label")},
    ),
}


def glue_task(name: str) -> GlueTask:
    """Return the task of a name in any case; raise if GLUE has no such task."""
    if name.lower() not in GLUE:
        raise BertkitError(f"GLUE has no task '{name}'{nearest(name.lower(), GLUE)}")
    return GLUE[name.lower()]


def read_glue(name: str, folder: str | Path, split: str, counts: TextCounts) -> list[TextExample]:
    """Read one split of a task.

    In a test set the ID is the number in the file; elsewhere it is the number of the row, from 0.
    Empty texts of the official files are kept, so that scores stay comparable.

    Args:
        name: one of `GLUE`.
        folder: the folder of the task, or its parent.
        split: "train", "dev" or "test"; for mnli also "dev-mismatched" and "test-mismatched". For
            ax, "dev" is the whole set with labels.
        counts: collects the rows left out: ragged ones (QQP has some) and MNLI's without agreement.

    Raises:
        BertkitError: the task or split is unknown, the file is missing (the message says where to
            get it) or a different one, a label is unknown, or a row of a test set is unusable.
    """
    task = glue_task(name).of_split(split)
    path = find_file(name, task, Path(folder), split)
    labelled = split not in task.submissions
    columns = (task.text, task.pair, task.label if labelled else task.test_id)
    header = COLA_COLUMNS if task.folder == "CoLA" and labelled else True
    found, inputs = TextCounts(), []
    for number, place, row in numbered_rows(
        path, found, "tsv", header=header, columns=[column for column in columns if column]
    ):
        if labelled and row.get(task.label) == "-":  # MNLI's annotators did not agree
            found.note("row without a majority label", place)
        else:
            inputs.append(glue_example(task, str(number), row, labelled, place, found))
    if not inputs:
        raise BertkitError(f"{path} has no rows; get it again from {PLACE}")
    if not labelled:
        require_all(found, f"every row of a test set is needed; get it again from {PLACE}")
    counts += found
    return inputs


def glue_example(
    task: GlueTask, number: str, row: Fields, labelled: bool, place: str, counts: TextCounts
) -> TextExample:
    """Make an example of a row; a label must be one of the task's."""
    text, pair = str(row[task.text]), str(row[task.pair]) if task.pair else None
    if not text.strip() or (pair is not None and not pair.strip()):
        counts.note("empty text, kept", place)
    if not labelled:
        return TextExample(str(row[task.test_id]).strip(), text, pair, None, place)
    value = str(row[task.label]).strip()
    if not task.labels:
        return TextExample(number, text, pair, row_number(value, task.label, place), place)
    if value not in task.file_labels:
        raise BertkitError(
            f"{place}: '{value[:40]}' is not a label of {task.folder} "
            f"({', '.join(task.file_labels)}); get the file again from {PLACE}"
        )
    return TextExample(number, text, pair, task.labels[task.file_labels.index(value)], place)


def find_file(name: str, task: GlueTask, folder: Path, split: str) -> Path:
    """Find the file of a split, in a folder or in the task's folder inside it.

    Raises:
        BertkitError: the task has no such split, or its file is missing.
    """
    if split not in task.files:
        raise BertkitError(f"{task.folder} has no split '{split}'{nearest(split, task.files)}")
    names = {comparable_name(name), comparable_name(task.folder)}
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    for place in [folder, *(path for path in inside if comparable_name(path.name) in names)]:
        for file in task.files[split]:
            if (place / file).is_file():
                return place / file
    wanted = " or ".join(task.files[split])
    own = folder if comparable_name(folder.name) in names else folder / task.folder
    extra = ""
    if task.folder == "MRPC":
        extra = (
            f"; Microsoft has the same rows ({MICROSOFT}): msr_paraphrase_train.txt is train.tsv "
            f"with dev.tsv, msr_paraphrase_test.txt is test.tsv with labels"
        )
    if split in task.columns:
        extra = f"; the file with labels is at {DIAGNOSTICS}"
    raise BertkitError(
        f"no {wanted} of {task.folder} in {folder}; get {task.folder} from {PLACE} and unpack it "
        f"so that {own / task.files[split][0]} exists{extra}"
    )


def comparable_name(name: str) -> str:
    """Normalize a folder name, so that SST-2, sst2 and SST_2 are equal."""
    return name.lower().replace("-", "").replace("_", "")
