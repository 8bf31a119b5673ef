"""What the GLUE server takes (https://gluebenchmark.com/faq): eleven files in one archive.

Paper section 4.1.

Each holds a running number and a prediction for every row of a test set, in the server's spelling.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bertkit.errors import BertkitError, nearest
from bertkit.files import write_atomic, write_text
from bertkit.tasks.glue import GLUE, GlueTask, glue_task

HEADER = "index\tprediction"

ZIPPED = {name: (task, rows) for task, t in GLUE.items() for name, rows in t.submissions.values()}
"""File of glue.zip -> task and number of predictions."""


def write_submission(
    name: str, split: str, ids: Sequence[str], predictions: Sequence[str | float], path: Path
) -> None:
    """Write one file of glue.zip: `index` and `prediction`, in the server's spelling.

    Args:
        name: one of `GLUE`.
        split: one without labels.
        ids: of `read_glue`: 0 to n-1 in any order.
        predictions: label names; for STS-B numbers, which are brought into 0 to 5.
        path: the file to write; `GLUE[name].submissions[split]` has its official name.

    Raises:
        BertkitError: the IDs are not 0 to n-1, or a prediction is no label or not finite.
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


def spelt(task: GlueTask, prediction: str | float) -> str:
    """A prediction as the server wants it."""
    if task.labels:
        if prediction not in task.labels:
            known = nearest(str(prediction), task.labels)
            raise BertkitError(f"'{prediction}' is not a label of {task.folder}{known}")
        return task.file_labels[task.labels.index(str(prediction))]
    if not math.isfinite(float(prediction)):
        raise BertkitError(f"a prediction for {task.folder} is {prediction}, not a finite number")
    return f"{min(max(float(prediction), 0.0), 5.0):.3f}"


def write_glue_zip(files: Mapping[str, Path], out: Path, *, fill_wnli: bool = True) -> list[str]:
    """Check the eleven files of a submission and put them into one archive.

    The same files give the same bytes.

    Args:
        files: official name ("CoLA.tsv") -> file, as `write_submission` wrote it.
        out: the archive to write, `glue.zip`.
        fill_wnli: where WNLI.tsv is absent, say 0 (no entailment) throughout, the majority class.
            The paper leaves WNLI out, since its dev set's labels contradict the training set's.

    Returns:
        Remarks for the user: what was filled in.

    Raises:
        BertkitError: files are missing, or one is not what the server takes; all in one line.
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
    problems += [problem for name in texts for problem in problems_of(name, texts[name])]
    if problems:
        raise BertkitError(
            f"{out} was not written: {'; '.join(problems)}; predict these test sets anew"
        )
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ZIPPED:
            entry = zipfile.ZipInfo(name)  # dated 1980
            entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, texts[name])
    write_atomic(out, lambda temporary: temporary.write_bytes(content.getvalue()))
    return remarks


def submission_text(path: Path) -> str:
    """The text of a file to submit."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BertkitError(f"cannot read {path} ({error}); predict this test set anew") from None


def problems_of(name: str, text: str) -> Iterator[str]:
    """The first thing in a file that the server would not take."""
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
    """Whether it is a number from 0 to 5."""
    try:
        return 0 <= float(value) <= 5
    except ValueError:
        return False
