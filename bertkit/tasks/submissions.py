"""The official file of each data set (paper section 4): what its server or its script reads.

The GLUE server (https://gluebenchmark.com/faq) takes eleven files in one archive. Each file holds a
running number and a prediction for every row of a test set, in the server's spelling.
"""

from __future__ import annotations

import io
import math
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bertkit.datasets.conll import write_conll
from bertkit.datasets.examples import ChoiceExample, QuestionExample, TextExample, WordsExample
from bertkit.datasets.glue import GLUE, GlueTask, glue_task
from bertkit.datasets.swag import write_swag_predictions
from bertkit.errors import BertkitError, nearest
from bertkit.files import write_atomic, write_json, write_text
from bertkit.tasks.data import Writer, no_official_files
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.spans import Span
from bertkit.tasks.task import Task

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


KIND_OF = {
    "squad-1.1": "question-answering",
    "squad-2.0": "question-answering",
    "swag": "multiple-choice",
    "conll-2003": "token-classification",
}
"""Official set -> its kind, GLUE aside."""


def official_writer(name: str) -> Writer:
    """What writes the official files of a set or a kind."""
    if name in GLUE:
        return lambda folder, split, *rest: write_glue(name, folder, split, *rest)
    if name == "swag":
        return write_choices
    writers: dict[str, Writer] = {
        "question-answering": write_answers,
        "token-classification": write_tags,
    }
    return writers.get(KIND_OF.get(name, name), no_official_files)


def write_glue(
    name: str,
    folder: Path,
    split: str,
    inputs: Sequence[TextExample],
    predictions: Sequence[Any],
    task: Task[Any, Any],
) -> list[Path]:
    """The file of glue.zip, for a test split."""
    if split not in GLUE[name].submissions:
        return []
    path = folder / GLUE[name].submissions[split][0]
    found = [p.value if task.task_type == "regression" else p.label for p in predictions]
    write_submission(name, split, [given.id for given in inputs], found, path)
    return [path]


def write_answers(
    folder: Path,
    split: str,
    inputs: Sequence[QuestionExample],
    predictions: Sequence[Any],
    task: Task[Any, Any],
) -> list[Path]:
    """predictions.json, nbest_predictions.json and, for 2.0, null_odds.json."""
    assert isinstance(task, QuestionAnswering)
    pairs = list(zip(inputs, predictions, strict=True))
    return write_predictions(
        folder / split,
        {given.id: task.text_of(found) for given, found in pairs},
        {given.id: found.null_odds for given, found in pairs} if task.null else None,
        {given.id: found.nbest for given, found in pairs},
    )


def write_choices(
    folder: Path,
    split: str,
    inputs: Sequence[ChoiceExample],
    predictions: Sequence[Any],
    task: Task[Any, Any],
) -> list[Path]:
    """SWAG's file: one index a line."""
    path = folder / f"{split}.csv"
    write_swag_predictions(path, [i.id for i in inputs], [p.choice for p in predictions])
    return [path]


def write_tags(
    folder: Path,
    split: str,
    inputs: Sequence[WordsExample],
    predictions: Sequence[Any],
    task: Task[Any, Any],
) -> list[Path]:
    """What the conlleval script reads."""
    path = folder / f"{split}.txt"
    write_conll(path, inputs, [prediction.tags for prediction in predictions])
    return [path]


def write_predictions(
    folder: Path,
    predictions: Mapping[str, str],
    null_odds: Mapping[str, float] | None,
    nbest: Mapping[str, Sequence[Span]],
) -> list[Path]:
    """Write predictions.json, nbest_predictions.json and, unless None, null_odds.json.

    predictions.json and null_odds.json are what the official programs read. The best spans are
    objects with the fields of `Span`.

    Returns:
        The files.

    Raises:
        BertkitError: the folder cannot be written.
    """
    spans = {question_id: [span._asdict() for span in own] for question_id, own in nbest.items()}
    contents: dict[str, Any] = {"nbest_predictions": spans, "predictions": dict(predictions)}
    if null_odds is not None:
        contents["null_odds"] = dict(null_odds)
    for name, content in contents.items():
        write_json(folder / f"{name}.json", content)
    return [folder / f"{name}.json" for name in sorted(contents)]
