"""The nine tasks of GLUE and its diagnostic set AX, as one table (BERT section 4.1, appendix B.1).

The official TSV files are read with their quirks. Models are saved with readable label names; the
table also has the spellings of the files, which the GLUE server expects too.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from bertkit.datasets.examples import TextExample
from bertkit.datasets.fields import row_number
from bertkit.datasets.tabular import Fields, numbered_rows, require_all
from bertkit.errors import BertkitError, nearest
from bertkit.files import write_atomic, write_text
from bertkit.text.lines import TextCounts

PLACE = "https://gluebenchmark.com/tasks"
MICROSOFT = "https://www.microsoft.com/en-us/download/details.aspx?id=52398"
DIAGNOSTICS = "https://gluebenchmark.com/diagnostics"
BINARY = ("0", "1")
ENTAILMENT = ("entailment", "not_entailment")
INFERENCE = ("entailment", "neutral", "contradiction")
COLA_COLUMNS = ("source", "label", "author's label", "sentence")
SPLIT_FILES: Mapping[str, tuple[str, ...]] = {
    "train": ("train.tsv",),
    "dev": ("dev.tsv",),
    "test": ("test.tsv",),
}
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
    found = TextCounts()
    inputs = [
        glue_example(task, str(number), row, labelled, place, found)
        for number, place, row in numbered_rows(
            path, found, "tsv", header=header, columns=[column for column in columns if column]
        )
        if not (labelled and without_agreement(row.get(task.label), place, found))
    ]
    if not inputs:
        raise BertkitError(f"{path} has no rows; get it again from {PLACE}")
    if not labelled:
        require_all(found, f"every row of a test set is needed; get it again from {PLACE}")
    counts += found
    return inputs


def without_agreement(label: object, place: str, counts: TextCounts) -> bool:
    """Return whether MNLI's annotators did not agree on a label; `counts` records such a row."""
    if label == "-":
        counts.note("row without a majority label", place)
    return label == "-"


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


# What the server takes ----------------------------------------------------------------------------

HEADER = "index\tprediction"

ZIPPED = {name: (task, rows) for task, t in GLUE.items() for name, rows in t.submissions.values()}
"""File in glue.zip -> (task, number of predictions)."""


def write_submission(
    name: str, split: str, ids: Sequence[str], predictions: Sequence[str | float], path: Path
) -> None:
    """Write one file of glue.zip: `index` and `prediction`, in the server's spelling.

    Args:
        name: one of `GLUE`.
        split: a split without labels.
        ids: the IDs from `read_glue`: 0 to n-1 in any order.
        predictions: label names; for STS-B numbers, which are clipped to 0 to 5.
        path: the file to write; `GLUE[name].submissions[split]` has its official name.

    Raises:
        BertkitError: the IDs are not 0 to n-1, or a prediction is not a label or not finite.
    """
    task = glue_task(name)
    if split not in task.submissions:
        raise BertkitError(
            f"the server takes no '{split}' of {task.folder}{nearest(split, task.submissions)}"
        )
    if len(ids) != len(predictions):
        raise BertkitError(f"{len(predictions)} predictions for {len(ids)} IDs of {task.folder}")
    lines: dict[str, str] = dict(zip(ids, (spelt(task, p) for p in predictions), strict=True))
    numbers = {str(number): None for number in range(len(ids))}
    if lines.keys() != numbers.keys():
        wrong = next((f"'{name}'" for name in ids if name not in numbers), "one of them twice")
        raise BertkitError(
            f"IDs of a {task.folder} submission are 0 to {len(ids) - 1}, not {wrong}; predict the "
            f"whole test file"
        )
    rows = "".join(f"{number}\t{lines[number]}\n" for number in numbers)
    write_text(path, f"{HEADER}\n{rows}")


def write_glue(
    name: str, folder: Path, split: str, ids: Sequence[str], predictions: Sequence[str | float]
) -> list[Path]:
    """Write the file of glue.zip for a test split of a GLUE task; write nothing for other data.

    Args:
        name: the name of the data set or task type.
        folder: the folder for the file.
        split: the predicted split.
        ids: see `write_submission`.
        predictions: see `write_submission`.

    Returns:
        The written files.
    """
    if name not in GLUE or split not in GLUE[name].submissions:
        return []
    path = folder / GLUE[name].submissions[split][0]
    write_submission(name, split, ids, predictions, path)
    return [path]


def spelt(task: GlueTask, prediction: str | float) -> str:
    """Return a prediction in the server's spelling.

    Raises:
        BertkitError: the prediction is not a label of the task, or not a finite number.
    """
    if task.labels:
        if prediction not in task.labels:
            known = nearest(str(prediction), task.labels)
            raise BertkitError(f"'{prediction}' is not a label of {task.folder}{known}")
        return task.file_labels[task.labels.index(str(prediction))]
    if not math.isfinite(float(prediction)):
        raise BertkitError(f"a prediction for {task.folder} is {prediction}, not a finite number")
    return f"{min(max(float(prediction), 0.0), 5.0):.3f}"


def write_glue_zip(files: Mapping[str, Path], out: Path, *, fill_wnli: bool = True) -> list[str]:
    """Check the eleven files of a submission and pack them into one archive.

    The same files give the same bytes.

    Args:
        files: official name ("CoLA.tsv") -> file, as `write_submission` wrote it.
        out: the archive to write, `glue.zip`.
        fill_wnli: whether to fill a missing WNLI.tsv with 0 (no entailment), the majority class.
            The paper leaves WNLI out, since its dev set's labels contradict the training set's.

    Returns:
        Notes for the user on what was filled in.

    Raises:
        BertkitError: files are missing, or the server would reject one; the message names them all.
    """
    for name in files:
        if name not in ZIPPED:
            raise BertkitError(f"glue.zip has no file '{name}'{nearest(name, ZIPPED)}")
    texts = {name: submission_text(path) for name, path in files.items()}
    remarks = []
    if fill_wnli and "WNLI.tsv" not in texts:
        rows = ZIPPED["WNLI.tsv"][1]
        texts["WNLI.tsv"] = HEADER + "\n" + "".join(f"{number}\t0\n" for number in range(rows))
        remarks.append("WNLI.tsv was filled with 0, the majority class, as no file was given")
    missing = [name for name in ZIPPED if name not in texts]
    problems = [f"missing: {', '.join(missing)}"] if missing else []
    problems += [problem for name in texts for problem in submission_problems(name, texts[name])]
    if problems:
        raise BertkitError(
            f"{out} was not written: {'; '.join(problems)}; predict these test sets anew"
        )
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ZIPPED:
            entry = zipfile.ZipInfo(name)  # its date is always 1980
            entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, texts[name])
    write_atomic(out, lambda temporary: temporary.write_bytes(content.getvalue()))
    return remarks


def submission_text(path: Path) -> str:
    """Read the text of a file to submit."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BertkitError(f"cannot read {path} ({error}); predict this test set anew") from None


def submission_problems(name: str, text: str) -> Iterator[str]:
    """Yield the first problem for which the server would reject a file, if there is one."""
    task, rows = GLUE[ZIPPED[name][0]], ZIPPED[name][1]
    header, *lines = text.removesuffix("\n").split("\n")
    if header != HEADER:
        yield f"{name}:1: the header is not index and prediction"
    elif len(lines) != rows:
        yield f"{name}: {len(lines)} predictions instead of {rows}"
    else:
        for number, line in enumerate(lines):
            index, _, value = line.partition("\t")
            if index != str(number):
                yield f"{name}:{number + 2}: index '{index}' instead of {number}"
                return
            if not (value in task.file_labels if task.labels else is_score(value)):
                yield f"{name}:{number + 2}: prediction '{value[:40]}' is not allowed"
                return


def is_score(value: str) -> bool:
    """Return whether a text is a number from 0 to 5."""
    try:
        return 0 <= float(value) <= 5
    except ValueError:
        return False
