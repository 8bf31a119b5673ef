"""A task with its data (paper section 4): official sets by name, or the user's files."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.config import as_json
from bertkit.datasets.benchmarks import (
    OFFICIAL,
    DataFiles,
    benchmark_folder,
    check_sources,
    official_paths,
    read_official,
)
from bertkit.datasets.examples import TextExample
from bertkit.datasets.glue import GLUE, find_file, read_glue
from bertkit.datasets.image_columns import IMAGE_OPTIONS, LABELS_GIVEN
from bertkit.datasets.readers import Columns
from bertkit.errors import BertkitError
from bertkit.files import write_json_lines
from bertkit.pretraining_data.rng import DATA_SPLIT, keyed_rng
from bertkit.tasks.classification import label_counts
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.spec import TaskSpec, spec_for
from bertkit.tasks.task import Items, PredictedSplit, Task, TaskInputs, Unknown
from bertkit.tasks.token_classification import are_all_unique
from bertkit.tasks.windows import WindowLengths, WordTarget
from bertkit.text.lines import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer

Split = tuple[str, Sequence[Any]]
"""A name, such as dev-mismatched, and the examples."""


@dataclass(frozen=True)
class TaskData:
    """A task and its examples, from an official set or the user's files."""

    name: str
    task: Task
    train: Sequence[Any]
    dev: Sequence[Split]
    """The dev splits; runs are compared on the first."""
    test: Sequence[Split] = ()
    """The test splits, with or without labels."""
    counts: TextCounts = field(default_factory=TextCounts)
    """What was skipped while reading."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Split -> path, for the results."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The column names of the user's data, which are the defaults when predicting for a file."""

    @property
    def has_pairs(self) -> bool:
        """Whether some training example is a pair of texts."""
        return any(getattr(given, "pair", None) is not None for given in self.train)


def load_dataset(
    name: str,
    files: DataFiles,
    columns: Columns | None = None,
    windows: WindowLengths | None = None,
    positions: int = 512,
) -> TaskData:
    """Read a data set.

    Args:
        name: an official set (`OFFICIAL`), or a task type (`SPECS`) for the user's data.
        files: the files of the data set.
        columns: the column names of the user's data; None for the default names.
        windows: the window lengths; None for the defaults of the task type.
        positions: the model's maximum sequence length in tokens.

    Raises:
        BertkitError: a file is missing (for official ones the message says where to get it),
            damaged, or lacks a column; or the options belong to another task type.
    """
    key, spec = name.lower(), spec_for(name)
    check_sources(key, files, columns)
    columns, windows = columns or spec.columns(), windows or spec.windows()
    spec.check_options(columns, windows)
    if key in GLUE:
        return glue_dataset(key, files, windows, positions)
    if key in OFFICIAL:
        return official_dataset(key, spec, files, windows, positions)
    if not files.train:
        raise BertkitError(f"{key} takes your own data: give --train FILE (and --dev, --test)")
    return user_dataset(spec, files, columns, windows, positions)


def glue_dataset(name: str, files: DataFiles, windows: WindowLengths, positions: int) -> TaskData:
    """Read one of GLUE's tasks from its official folder."""
    official = GLUE[name]
    folder, counts = benchmark_folder(files, name), TextCounts()
    made: dict[str, Any] = {"max_length": windows.length(positions), "stride": windows.stride}
    if official.labels:
        made |= {"labels": official.labels, "metrics": official.metrics}
    task: Task = spec_for(name).task(**made)
    if "train" not in official.files:
        raise BertkitError(
            f"{name} has no training data: fine-tune on mnli, then "
            f"bertkit evaluate RUN --task {name} --data {folder} --split test (or dev)"
        )
    labelled = [split for split in official.files if not split.startswith("test")]
    splits = {split: read_glue(name, folder, split, counts) for split in labelled}
    tests = []
    for split in official.submissions:
        try:
            find_file(name, official, folder, split)
        except BertkitError:
            counts.note(f"{split} file is absent: nothing to submit", str(folder))
        else:
            tests.append((split, read_glue(name, folder, split, counts)))
    train = splits.pop("train")
    return TaskData(name, task, train, list(splits.items()), tests, counts, {"data": str(folder)})


def official_dataset(
    name: str, spec: TaskSpec, files: DataFiles, windows: WindowLengths, positions: int
) -> TaskData:
    """Read SQuAD, SWAG or CoNLL-2003 from official files."""
    counts = TextCounts()
    paths = official_paths(name, files)
    train = read_official(name, paths["train"], counts, scoring=False)
    scored = {
        split: read_official(name, paths[split], counts, scoring=True)
        for split in ("dev", "test")
        if split in paths
    }
    tests = [("test", scored["test"])] if "test" in scored else []
    task: Task = spec.task.from_data(
        TaskInputs(train, spec.columns(), windows, windows.length(positions), counts)
    )
    if name == "squad-2.0" and isinstance(task, QuestionAnswering) and not task.null:
        raise BertkitError(f"{paths['train']} has only answerable questions; it is not SQuAD 2.0")
    dev = ("dev", scored["dev"])
    note_unique([dev, *tests], task, counts)
    return TaskData(name, task, train, [dev], tests, counts, dict(paths))


def user_dataset(
    spec: TaskSpec, files: DataFiles, columns: Columns, windows: WindowLengths, positions: int
) -> TaskData:
    """Read the user's files; without a dev file, hold out a share of the training data."""
    counts = TextCounts()
    columns = columns.fitted(files.train, counts)
    train = every = columns.read_labelled(files.train, counts)
    recorded = {"train": str(files.train)}
    if files.dev:
        dev: Split = ("dev", columns.read_labelled(files.dev, counts, scoring=True))
        recorded["dev"] = str(files.dev)
    else:
        train, apart = set_apart(spec, train, files.dev_share, counts)
        dev = ("dev", apart)
        recorded["dev"] = f"{files.dev_share:g} of train"
    tests = []
    if files.test:
        tests.append(("test", columns.read_labelled(files.test, counts, scoring=True, test=True)))
        recorded["test"] = str(files.test)
    images = bool(getattr(columns, "image_column", ""))
    alignment = getattr(columns, "image_task", LABELS_GIVEN) != LABELS_GIVEN
    task: Task = spec.task_class(images=images, alignment=alignment).from_data(
        TaskInputs(every, columns, windows, windows.length(positions), counts)
    )
    dev, *tests = ((name, task.scored_inputs(inputs)) for name, inputs in (dev, *tests))
    note_unique([dev, *tests], task, counts)
    named = as_json(columns)
    if features := named.pop("image_features", ""):
        recorded["image_features"] = features
    if not images:
        named = {name: named[name] for name in named if name not in IMAGE_OPTIONS}
    return TaskData(spec.name, task, train, [dev], tests, counts, recorded, named)


def set_apart(
    spec: TaskSpec, inputs: Sequence[Any], share: float, counts: TextCounts
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Split inputs into training data and a random share for dev.

    Sentences of one document, or questions on one context, stay on the same side. An input with a
    label that training would otherwise lack is not held out; this is counted.

    Raises:
        BertkitError: the share is not between 0 and 1, or a side would be empty.
    """
    if not 0 < share < 1:
        raise BertkitError(f"--dev-share must be between 0 and 1, got {share}; or give --dev")
    groups: dict[Any, list[Any]] = {}
    for number, given in enumerate(inputs):
        key = getattr(given, spec.together) if spec.together else number
        groups.setdefault(key, []).append(given)
    order = keyed_rng(0, DATA_SPLIT).permutation(len(groups)).tolist()
    apart = set(order[: max(1, round(share * len(groups)))])
    labels = [set(label_counts(group if spec.has_labels else ())) for group in groups.values()]
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
        if spec.together:
            what += f" in {len(groups)} {spec.together}{'s' * (len(groups) > 1)}, which stay whole,"
        raise BertkitError(f"{what} are too few to set some apart; give --dev")
    return sides


def note_unique(splits: Sequence[Split], task: Task, counts: TextCounts) -> None:
    """Count sentences read without context although `context` is "document"."""
    for _, inputs in splits:
        if getattr(task, "context", "") == "document" and are_all_unique(inputs):
            for given in inputs:
                counts.note("sentence alone in its document, kept", given.place)


# Results -----------------------------------------------------------------------------------------


def write_results(task: Task, folder: Path, done: PredictedSplit) -> list[Path]:
    """Write predictions: one JSON object per line and input, and the official files of the set.

    Raises:
        BertkitError: the folder cannot be written.
    """
    path = folder / f"{done.split}.jsonl"
    pairs = zip(done.inputs, done.predictions, strict=True)
    write_json_lines(path, ({**task.row(*pair), **given_text(pair[0])} for pair in pairs))
    return [path, *task.official_files(folder, done)]


def given_text(given: Any) -> dict[str, Any]:
    """Return the gold label and the texts, which readers want next to a prediction."""
    if not isinstance(given, TextExample):
        return {}
    return {"gold": given.label, "text": given.text, "pair": given.pair}


def labelled_part(
    inputs: Sequence[Any], predictions: Sequence[Any]
) -> tuple[list[Any], list[Any], str]:
    """Return the labelled inputs, their predictions, and a note on how many have no label."""
    known = [number for number, given in enumerate(inputs) if given.gold is not None]
    lost = len(inputs) - len(known)
    said = f"{lost:,} of {len(inputs):,} inputs have no label and are not scored" if lost else ""
    return [inputs[i] for i in known], [predictions[i] for i in known], said


def check_labelled(split: str, inputs: Sequence[Any]) -> None:
    """Check that every input of training or dev data has a label.

    Raises:
        BertkitError: an input has no label; the message names the first one.
    """
    missing = next((given for given in inputs if given.gold is None), None)
    if missing is not None:
        raise BertkitError(f"{missing.place}: the {split} data has no label here; it needs one")


def digest_inputs(splits: Sequence[Sequence[Any]]) -> str:
    """Return the hex SHA-256 of all inputs, which does not depend on the paths of their files."""
    digest = hashlib.sha256()
    for inputs in splits:
        for given in inputs:
            fields = given._replace(place="")._asdict()
            image = fields.pop("image", None)  # NumPy shortens the repr of an array
            text = ", ".join(f"{name}={value!r}" for name, value in fields.items())
            digest.update(f"{type(given).__name__}({text})".encode(errors="surrogatepass"))
            if image is not None:
                digest.update(f"{image.dtype} {image.shape}".encode() + image.tobytes())
    return digest.hexdigest()


def encode(task: Task, inputs: Sequence[Any], tokenizer: Tokenizer, split: str) -> Items:
    """Encode the inputs of a split as sequences.

    Raises:
        BertkitError: there is no input, or one has an unknown label.
    """
    if not inputs:
        raise BertkitError(f"the {split} data has no usable input; see what was skipped")
    return with_unknown(task.items(inputs, tokenizer), tokenizer.unk_id)


def with_unknown(items: Items, unknown: int) -> Items:
    """Return the same items with a count of the tokens with the id `unknown`, that of [UNK].

    An input of tagged words is judged only by the first token of each word.
    """
    pieces = total = 0
    known: set[int] = set()
    for item in items.items:
        for part in item.parts:
            for one in part.sequences:
                size = len(one.ids) - 2 - (one.first < len(one.ids))
                size -= part.placeholders
                lost = int(np.count_nonzero(one.ids == unknown))
                pieces, total = pieces + lost, total + size
                if isinstance(part.target, WordTarget):  # a window may hold several inputs
                    first = one.ids[part.target.rows]
                    known.update(part.target.inputs[first != unknown].tolist())
                elif lost < size:
                    known.add(item.input)
    return replace(items, unknown=Unknown(pieces, total, items.inputs - len(known)))


def describe_items(split: str, items: Items) -> str:
    """Describe the inputs of a split: their number, mean length, and `describe_losses`."""
    return (
        f"{split}: {items.inputs:,} inputs, {items.tokens / max(1, items.inputs):.1f} tokens each, "
        f"{describe_losses(items.windowed, items.cut, items.unknown)}"
    )


def describe_losses(windowed: int, cut: Mapping[str, int], unknown: Unknown) -> str:
    """Describe how many inputs were windowed, what was cut, and the share of [UNK] if any."""
    said = [f"{windowed:,} in several windows", describe_cut(cut) or "0 cut"]
    if unknown.tokens:
        share = unknown.tokens / unknown.total
        said.append(f"{unknown.tokens:,} of {unknown.total:,} tokens [UNK] ({share:.1%})")
    if unknown.inputs:
        said.append(f"inputs without a known token: {unknown.inputs:,}")
    return ", ".join(said)


def describe_cut(cut: Mapping[str, int]) -> str:
    """Describe what was lost and of how many inputs; "" if nothing was."""
    return "; ".join(f"{what}: {count:,}" for what, count in cut.items() if count)
