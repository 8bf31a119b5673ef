"""What the GLUE server takes (section 4.1): predictions for each test set, packed into glue.zip."""

from __future__ import annotations

import math
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bertkit.datasets.glue import GLUE, GlueTask, glue_task
from bertkit.errors import BertkitError, nearest
from bertkit.files import disk_errors, new_file, write_text

HEADER = "index\tprediction"

ZIPPED = {name: (task, rows) for task, t in GLUE.items() for name, rows in t.submissions.values()}
"""File in glue.zip -> (task, number of predictions)."""
SCORE = re.compile(r"[0-4](\.\d+)?|5(\.0+)?", re.ASCII)
"""A prediction for STS-B."""


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

    See `write_submission` for IDs and predictions. Returns the written files.
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


def write_glue_zip(files: Mapping[str, Path], out: Path) -> list[str]:
    """Check the eleven files of a submission and pack them into one archive.

    The same files give the same bytes. A missing WNLI.tsv is filled with 0 (no entailment), the
    majority class: the paper leaves WNLI out, since its dev labels contradict the training set's.

    Args:
        files: official name ("CoLA.tsv") -> file, as `write_submission` wrote it.
        out: the archive to write, `glue.zip`.

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
    if "WNLI.tsv" not in texts:
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
    with (
        new_file(out) as temporary,
        disk_errors(out),
        zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        for name in ZIPPED:
            entry = zipfile.ZipInfo(name)  # its date is always 1980
            entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, texts[name])
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
            if not (value in task.file_labels if task.labels else SCORE.fullmatch(value)):
                yield f"{name}:{number + 2}: prediction '{value[:40]}' is not allowed"
                return
