"""The task types (paper section 4): one record each, with all that depends on the task type.

Later packages (predictors, routes) key what they add by the example types or tasks of these
records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar, get_type_hints

from bertkit.config import matches_type
from bertkit.datasets.benchmarks import OFFICIAL, benchmark_task_type
from bertkit.datasets.columns import (
    ChoiceColumns,
    LabelSetColumns,
    NumberColumns,
    QuestionColumns,
    TextColumns,
    WordColumns,
)
from bertkit.datasets.examples import (
    ChoiceExample,
    Example,
    QuestionExample,
    TextExample,
    WordsExample,
)
from bertkit.datasets.readers import Columns
from bertkit.errors import BertkitError, flag, nearest
from bertkit.tasks.classification import Classification, MultiLabelClassification
from bertkit.tasks.multiple_choice import MultipleChoice
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import Regression
from bertkit.tasks.token_classification import TokenClassification
from bertkit.tasks.windows import QuestionWindows, WindowLengths, WordWindows

Options = TypeVar("Options", Columns, WindowLengths)
NOT_REMEMBERED = {"format", "id", "image_features"}
"""Column options that depend on the file and are not taken from the model."""


@dataclass(frozen=True)
class TaskSpec:
    """The classes of one task type."""

    task: Any
    """The task class: head, objective, decoding, scores and official files."""
    example: type[Example]
    """The type of its examples."""
    columns: type[Columns]
    """The reader of its files, with the reader's options."""
    windows: type[WindowLengths] = WindowLengths
    """The options for the length of its sequences."""
    together: str = ""
    """The field whose equal values keep examples together when data is held out; "" if none."""

    @property
    def name(self) -> str:
        """The name on the command line and in `bertkit.json`."""
        return str(self.task.task_type)

    @property
    def has_labels(self) -> bool:
        """Whether its tasks have label names."""
        return any(field.name == "labels" for field in fields(self.task))

    def task_class(self, *, images: bool, alignment: bool = False) -> Any:
        """Return the task class, or that of inputs with an image beside the text.

        With `alignment`, the latter's task is to tell whether image and text belong together.
        """
        if not images:
            return self.task
        if alignment:
            from bertkit.tasks.alignment import Alignment

            return Alignment
        from bertkit.tasks.images import IMAGE_TASKS

        return IMAGE_TASKS.get(self.name, self.task)

    def make_columns(self, given: Mapping[str, Any]) -> Columns:
        """Make the reader of its files from options by field name.

        Raises:
            BertkitError: the task type does not have one of the options.
        """
        return self._options(self.columns, given)

    def make_windows(self, given: Mapping[str, Any]) -> WindowLengths:
        """Make the options for its windows; see `make_columns`."""
        return self._options(self.windows, given)

    def check_options(self, columns: Columns, windows: WindowLengths) -> None:
        """Check that options belong to this task type.

        Raises:
            BertkitError: they belong to another one.
        """
        for own, options in ((self.columns, columns), (self.windows, windows)):
            if type(options) is not own:
                raise BertkitError(
                    f"{self.name} takes {own.__name__}, not {type(options).__name__}; give it those"
                )

    def _options(self, made: type[Options], given: Mapping[str, Any]) -> Options:
        if not isinstance(given, Mapping):
            raise BertkitError(f"options go by name, as in {{'NAME': VALUE}}, not as {given!r:.60}")
        known = [field.name for field in fields(made)]
        strange = [name for name in given if name not in known]
        if strange:
            owners = ", ".join(
                f"{flag(name)} (an option of {' and '.join(task_types_with(name)) or 'nothing'})"
                for name in strange
            )
            raise BertkitError(
                f"{self.name} does not accept {owners}; it accepts {', '.join(map(flag, known))}"
            )
        return made(**given)

    def merged_columns(self, given: Mapping[str, Any], details: Mapping[str, Any]) -> Columns:
        """Return columns with the given options; the others are from the model's `bertkit.json`.

        Raises:
            BertkitError: the task type does not have one of the options, or `bertkit.json` holds a
                value of another type.
        """
        columns = self.make_columns(given)
        known = details.get("columns")
        types = get_type_hints(self.columns)
        remembered: dict[str, Any] = {}
        for name, value in (known if isinstance(known, dict) else {}).items():
            if name not in vars(columns) or name in NOT_REMEMBERED or name in given:
                continue
            if not matches_type(value, types[name]):
                raise BertkitError(
                    f"the model's bertkit.json holds {value!r:.40} for the option {name}; restore "
                    "or remake the model"
                )
            remembered[name] = tuple(value) if isinstance(value, list) else value
        return replace(columns, **remembered)


SPECS: dict[str, TaskSpec] = {
    spec.name: spec
    for spec in (
        TaskSpec(Classification, TextExample, TextColumns),
        TaskSpec(MultiLabelClassification, TextExample, LabelSetColumns),
        TaskSpec(Regression, TextExample, NumberColumns),
        TaskSpec(MultipleChoice, ChoiceExample, ChoiceColumns),
        TaskSpec(TokenClassification, WordsExample, WordColumns, WordWindows, "document"),
        TaskSpec(QuestionAnswering, QuestionExample, QuestionColumns, QuestionWindows, "context"),
    )
}
"""Task type -> its record."""


def spec_for(name: str) -> TaskSpec:
    """Return the record of a task type, or of the task type of an official set.

    Raises:
        BertkitError: the name is neither.
    """
    task_type = benchmark_task_type(name)
    if task_type not in SPECS:
        hint = nearest(name.lower(), (*OFFICIAL, *SPECS))
        raise BertkitError(f"no task is called '{name}'{hint}")
    return SPECS[task_type]


def task_types_with(option: str) -> list[str]:
    """Return the task types that have an option with this field name."""
    return [
        spec.name
        for spec in SPECS.values()
        if any(
            field.name == option for made in (spec.columns, spec.windows) for field in fields(made)
        )
    ]
