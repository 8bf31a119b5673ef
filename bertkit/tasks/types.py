"""The task types by name (paper section 4), and the options that belong to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, get_type_hints

from bertkit.config import matches_type
from bertkit.errors import BertkitError, flag, nearest
from bertkit.tasks.classification import Classification, MultiLabelClassification
from bertkit.tasks.columns import Columns
from bertkit.tasks.multiple_choice import MultipleChoice
from bertkit.tasks.official import OFFICIAL
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import Regression
from bertkit.tasks.task import Task
from bertkit.tasks.token_classification import TokenClassification

TASKS: dict[str, type[Task]] = {
    task.task_type: task
    for task in (
        Classification,
        MultiLabelClassification,
        Regression,
        MultipleChoice,
        TokenClassification,
        QuestionAnswering,
    )
}
"""Task type -> its class."""


def task_class(name: str) -> type[Task]:
    """Return the class of a task type, or of the task type of an official set."""
    key = name.lower()
    key = OFFICIAL[key].task_type if key in OFFICIAL else key
    if key not in TASKS:
        raise BertkitError(f"no task is called '{name}'{nearest(key, (*OFFICIAL, *TASKS))}")
    return TASKS[key]


def make_options(task: type[Task], kind: Any, options: Mapping[str, Any]) -> Any:
    """Make the columns or windows of a task type from options by name.

    Raises:
        BertkitError: the task type does not have one of the options.
    """
    known = [field.name for field in fields(kind)]
    for name in options:
        if name not in known:
            raise BertkitError(
                f"{task.task_type} does not accept {flag(name)}; it accepts "
                f"{', '.join(map(flag, known))}"
            )
    return kind(**options)


def model_columns(
    task: type[Task], options: Mapping[str, Any], details: Mapping[str, Any]
) -> Columns:
    """Return columns with the caller's options; the others are from the model's `bertkit.json`."""
    columns: Columns = make_options(task, task.columns, options)
    saved = details.get("columns")
    types = get_type_hints(task.columns)
    remembered: dict[str, Any] = {}
    for name, value in (saved if isinstance(saved, dict) else {}).items():
        if name in types and name not in columns.file_options and name not in options:
            if not matches_type(value, types[name]):
                raise BertkitError(
                    f"the model's bertkit.json holds {value!r:.40} for the option {name}; restore "
                    "or remake the model"
                )
            remembered[name] = tuple(value) if isinstance(value, list) else value
    return replace(columns, **remembered)
