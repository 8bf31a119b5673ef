"""The official file of each data set (paper section 4): what its server or script reads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.tasks.answer import Answer
from bertkit.tasks.conll import write_conll
from bertkit.tasks.dataset import Writer, no_official_files
from bertkit.tasks.glue import GLUE
from bertkit.tasks.glue_submission import write_submission
from bertkit.tasks.inputs import ChoiceInput, QuestionInput, TextInput, WordsInput
from bertkit.tasks.squad import write_predictions
from bertkit.tasks.swag import write_swag_predictions
from bertkit.tasks.task import Task

KIND_OF = {"squad-1.1": "answer", "squad-2.0": "answer", "swag": "choose", "conll-2003": "tag"}
"""Official set -> its kind, GLUE aside."""


def official_writer(name: str) -> Writer:
    """What writes the official files of a set or a kind."""
    if name in GLUE:
        return lambda folder, split, *rest: write_glue(name, folder, split, *rest)
    if name == "swag":
        return write_choices
    writers: dict[str, Writer] = {"answer": write_answers, "tag": write_tags}
    return writers.get(KIND_OF.get(name, name), no_official_files)


def write_glue(
    name: str,
    folder: Path,
    split: str,
    inputs: Sequence[TextInput],
    predictions: Sequence[Any],
    task: Task[Any, Any],
) -> list[Path]:
    """The file of glue.zip, for a test split."""
    if split not in GLUE[name].submissions:
        return []
    path = folder / GLUE[name].submissions[split][0]
    found = [p.value if task.kind == "regress" else p.label for p in predictions]
    write_submission(name, split, [given.id for given in inputs], found, path)
    return [path]


def write_answers(
    folder: Path,
    split: str,
    inputs: Sequence[QuestionInput],
    predictions: Sequence[Any],
    task: Task[Any, Any],
) -> list[Path]:
    """predictions.json, nbest_predictions.json and, for 2.0, null_odds.json."""
    assert isinstance(task, Answer)
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
    inputs: Sequence[ChoiceInput],
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
    inputs: Sequence[WordsInput],
    predictions: Sequence[Any],
    task: Task[Any, Any],
) -> list[Path]:
    """What the conlleval script reads."""
    path = folder / f"{split}.txt"
    write_conll(path, inputs, [prediction.tags for prediction in predictions])
    return [path]
