"""The user's own data by naming files and columns, and the task that its labels make.

How files are read is in `own_files.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from bertkit.config import as_json
from bertkit.datasets.examples import TextExample, WordsExample
from bertkit.datasets.user_files import Columns, read_user_file, with_first_choice
from bertkit.errors import BertkitError
from bertkit.outputs import DATA, TEXT
from bertkit.pretraining_data.rng import SPLIT, keyed_rng
from bertkit.tasks.classification import Classification, MultiLabelClassification
from bertkit.tasks.data import Split, TaskData
from bertkit.tasks.multiple_choice import MultipleChoice
from bertkit.tasks.question_answering import QuestionAnswering, usual_question_length
from bertkit.tasks.regression import Regression
from bertkit.tasks.submissions import official_writer
from bertkit.tasks.task import Task
from bertkit.tasks.token_classification import (
    TokenClassification,
    check_context,
    seen_once,
    tag_labels,
)
from bertkit.tasks.windows import check_stride, check_window_lengths
from bertkit.text.lines import TextCounts

KINDS = (
    "classification",
    "multi-label-classification",
    "regression",
    "multiple-choice",
    "token-classification",
    "question-answering",
)
TEXTS = ("text", "pair", "label")
OF_KIND = {
    "classification": TEXTS,
    "multi-label-classification": (*TEXTS, "separator"),
    "regression": TEXTS,
    "multiple-choice": ("text", "choices", "label", "first_choice"),
    "token-classification": ("words", "tags", "document", "word_column", "tag_column"),
    "question-answering": ("question", "passage", "answers"),
}
"""Kind -> what it reads of `Columns` besides what all do."""
OF_ALL = ("id", "format", "header")
LENGTHS_OF = {
    "token-classification": ("context",),
    "question-answering": ("max_question_length", "max_answer_length"),
}
"""Kind -> what it reads of `WindowLengths` besides longest and stride."""
SEEN_ONCE = "label seen once in training, kept"
LONGEST_WINDOW = {"question-answering": 384}
"""Where the paper's windows are shorter than the model allows."""


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """Where the data is."""

    data: Annotated[Path | None, DATA] = None
    """The folder of an official data set."""
    train: Annotated[str, TEXT] = ""
    """Own training data; also overrules an official file of SQuAD, SWAG or CoNLL."""
    dev: Annotated[str, TEXT] = ""
    """Labelled data to choose the best run by; without it a share of the training data is set
    apart."""
    test: Annotated[str, TEXT] = ""
    """Data to predict at the end, with or without labels."""
    dev_share: float = 0.1
    """Share of the training data that is set apart where there is no --dev."""

    def __post_init__(self) -> None:
        """From Python the files may be paths, too."""
        for name in ("train", "dev", "test"):
            object.__setattr__(self, name, str(getattr(self, name) or ""))


@dataclass(frozen=True, kw_only=True)
class WindowLengths:
    """How long sequences are; longer inputs become several windows."""

    max_length: int = 0
    """Tokens of a window; 0 for 384 in question answering and all the model can take elsewhere."""
    stride: int = 0
    """Tokens from one window to the next; 0 for 3/4 of the room, and in question answering for 128
    at most."""
    max_question_length: int = 0
    """Of answer: longer questions are cut here, and counted; 0 for 64 tokens, as in the published
    code, or half of a window where that is less."""
    max_answer_length: int = 30
    """Of answer: the most tokens that an answer has, as in the published code; longer ones in the
    data are counted."""
    context: str = "sentence"
    """Of tag: sentence, or document, where every word sees the sentences around its own, too."""

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            BertkitError: names the field.
        """
        check_window_lengths(self.max_length, self.stride)
        if self.max_question_length < 0:
            raise BertkitError(
                f"--max-question-length must be 0 or more, got {self.max_question_length}"
            )
        if self.max_answer_length < 1:
            raise BertkitError(f"--max-answer-length must be above 0, got {self.max_answer_length}")
        check_context(self.context)

    def window(self, kind: str, positions: int) -> int:
        """Tokens of a window for a model with so many positions.

        Raises:
            BertkitError: the model has fewer positions than were asked for, or the stride is too
                long.
        """
        if self.max_length > positions:
            raise BertkitError(
                f"windows of {self.max_length} tokens do not fit the model's {positions} "
                "positions; lower --max-length"
            )
        max_length = self.max_length or min(LONGEST_WINDOW.get(kind, positions), positions)
        check_stride(self.stride, max_length)
        return max_length


def refuse_columns(kind: str, columns: Columns) -> None:
    """Columns that a kind does not read would be named in vain.

    Raises:
        BertkitError: names them, and those that it reads.
    """
    refuse_unread(kind, columns, (*OF_KIND[kind], *OF_ALL))


def refuse_lengths(kind: str, lengths: WindowLengths) -> None:
    """Lengths that a kind does not read would be given in vain.

    Raises:
        BertkitError: names them, and those that it reads.
    """
    refuse_unread(kind, lengths, ("max_length", "stride", *LENGTHS_OF.get(kind, ())))


def refuse_unread(kind: str, given: Columns | WindowLengths, read: Sequence[str]) -> None:
    """Stop where a field that is not read is not what it is by itself."""
    unread = [
        field.name
        for field in fields(given)
        if field.name not in read and getattr(given, field.name) != field.default
    ]
    if unread:
        raise BertkitError(
            f"{kind} does not read {in_flags(unread)}; leave it out: of these it reads "
            f"{in_flags(read)}"
        )


def in_flags(names: Sequence[str]) -> str:
    """Fields as the command line calls them."""
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def user_task_data(
    kind: str, files: DataFiles, columns: Columns, lengths: WindowLengths, positions: int
) -> TaskData:
    """The user's own files."""
    counts = TextCounts()
    columns = with_first_choice(kind, files.train, columns, counts)
    train = every = read_user_file(kind, files.train, columns, counts)
    recorded = {"train": files.train}
    if files.dev:
        dev: Split = ("dev", read_user_file(kind, files.dev, columns, counts, scoring=True))
        recorded["dev"] = files.dev
    else:
        train, apart = set_apart(kind, train, files.dev_share, counts)
        dev = ("dev", apart)
        recorded["dev"] = f"{files.dev_share:g} of train"
    tests = []
    if files.test:
        tests.append(
            ("test", read_user_file(kind, files.test, columns, counts, scoring=True, test=True))
        )
        recorded["test"] = files.test
    task = task_for(kind, every, columns, lengths, positions, counts)
    note_unique([dev, *tests], lengths.context, counts)
    return TaskData(
        *(kind, task, train, [dev], tests, counts, recorded, as_json(columns)),
        write=official_writer(kind),
    )


def set_apart(
    kind: str, inputs: Sequence[Any], share: float, counts: TextCounts
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Training inputs and a random share for dev; documents and contexts stay on one side.

    What has a label of which training would have none is not set apart, which is counted.

    Raises:
        BertkitError: the share is not between 0 and 1, or a side would be empty.
    """
    if not 0 < share < 1:
        raise BertkitError(f"--dev-share must be between 0 and 1, got {share}; or give --dev")
    keys = {"token-classification": "document", "question-answering": "context"}
    groups: dict[Any, list[Any]] = {}
    for number, given in enumerate(inputs):
        groups.setdefault(getattr(given, keys[kind]) if kind in keys else number, []).append(given)
    order = keyed_rng(0, SPLIT).permutation(len(groups)).tolist()
    apart = set(order[: max(1, round(share * len(groups)))])
    labels = [find_labels(kind, group) for group in groups.values()]
    known = set().union(*(own for number, own in enumerate(labels) if number not in apart))
    for number in sorted(apart):
        if lost := sorted(labels[number] - known):
            counts.note("label of too few inputs to set one apart, kept", f"label {lost[0]!r}")
            known |= labels[number]
            apart.remove(number)
    sides: tuple[list[Any], list[Any]] = ([], [])
    for number, group in enumerate(groups.values()):
        sides[number in apart].extend(group)
    if len(groups) > 1 and not apart:
        raise BertkitError(
            f"no input can be set apart for dev: each one that was drawn has a label that no other "
            f"input has ({len(inputs)} inputs, {len(known)} labels); check the column of the "
            "labels, or give --dev"
        )
    if not (sides[0] and sides[1]):
        what = f"{len(inputs)} inputs"
        if kind in keys:
            what += f" in {len(groups)} {keys[kind]}{'s' * (len(groups) > 1)}, which stay whole,"
        raise BertkitError(f"{what} are too few to set some apart; give --dev")
    return sides


def find_labels(kind: str, inputs: Sequence[Any]) -> set[str]:
    """The labels or tags of some inputs; of kinds that have no such names, none."""
    if kind == "token-classification":
        return {tag for given in inputs for tag in given.tags or ()}
    return (
        set(label_counts(inputs))
        if kind in {"classification", "multi-label-classification"}
        else set()
    )


def task_for(
    kind: str,
    train: Sequence[Any],
    columns: Columns,
    lengths: WindowLengths,
    positions: int,
    counts: TextCounts,
) -> Task[Any, Any]:
    """The task of a kind, with the labels of the training data."""
    max_length, stride = lengths.window(kind, positions), lengths.stride
    if kind == "regression":
        if len({given.label for given in train}) == 1:
            raise BertkitError(
                f"the training data has only the number {train[0].label} in column "
                f"'{columns.label}'; there is nothing to tell apart"
            )
        return Regression(max_length, stride)
    if kind == "multiple-choice":
        return MultipleChoice(max_length, stride)
    if kind == "question-answering":
        null = any(given.answers == () for given in train)
        return QuestionAnswering(
            null=null,
            max_length=max_length,
            stride=stride,
            max_question_length=lengths.max_question_length or usual_question_length(max_length),
            max_answer_length=lengths.max_answer_length,
        )
    if kind == "token-classification":
        labels, entities = tag_labels(train)
        for name in seen_once(train, entities):
            counts.note(SEEN_ONCE, name)
        if lengths.context == "document" and are_all_unique(train):
            raise BertkitError(
                "--context document, and in the training data every sentence is a document of its "
                "own; begin documents by -DOCSTART- lines, name the column that says which one a "
                "row is of (--document), or leave --context out"
            )
        return TokenClassification(labels, max_length, stride, lengths.context, entities)
    seen = label_counts(train)
    for label, count in seen.items():
        if count == 1:
            counts.note(SEEN_ONCE, f"label {label!r}")
    if len(seen) < (1 if kind == "multi-label-classification" else 2):
        raise BertkitError(
            f"the training data has {len(seen)} different labels in column '{columns.label}'; "
            "there is nothing to tell apart"
        )
    names = tuple(sorted(seen))
    if kind == "multi-label-classification":
        return MultiLabelClassification(names, max_length, stride)
    return Classification(names, max_length=max_length, stride=stride)


def are_all_unique(inputs: Sequence[WordsExample]) -> bool:
    """Whether every sentence is a document of its own: none is marked, then, or all are short."""
    return len({given.document for given in inputs}) == len(inputs)


def note_unique(splits: Sequence[Split], context: str, counts: TextCounts) -> None:
    """Count what is read without the context that is asked for, that of a document."""
    for _, inputs in splits:
        if context == "document" and are_all_unique(inputs):
            for given in inputs:
                counts.note("sentence alone in its document, kept", given.place)


def label_counts(inputs: Sequence[TextExample]) -> Counter[str]:
    """How often each label occurs."""
    seen: Counter[str] = Counter()
    for given in inputs:
        seen.update(given.label if isinstance(given.label, tuple) else (str(given.label),))
    return seen
