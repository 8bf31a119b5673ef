"""A task with its data, and the files that results are written to."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from bertkit.datasets.examples import TextExample
from bertkit.errors import BertkitError
from bertkit.files import write_text
from bertkit.tasks.task import Items, Task, Unknown
from bertkit.tasks.windows import WordTarget as Words
from bertkit.text.lines import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer

Split = tuple[str, Sequence[Any]]
"""A name, such as dev-mismatched, and the inputs."""

Writer = Callable[[Path, str, Sequence[Any], Sequence[Any], Task[Any, Any]], list[Path]]
"""(folder, split, inputs, predictions, task) -> the official files written."""


def no_official_files(
    folder: Path, split: str, inputs: Sequence[Any], predictions: Sequence[Any], task: Any
) -> list[Path]:
    """For data that no evaluation server waits for."""
    return []


@dataclass(frozen=True)
class TaskData:
    """What a named task, or the user's columns, stand for."""

    name: str
    task: Task[Any, Any]
    train: Sequence[Any]
    dev: Sequence[Split]
    """The first one decides between runs."""
    test: Sequence[Split] = ()
    """Without labels, or with."""
    counts: TextCounts = field(default_factory=TextCounts)
    """What was skipped while reading."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Split -> path, for the record."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """What own data calls its columns; predicting for another file begins with the same names."""
    write: Writer = no_official_files


def write_results(
    data: TaskData,
    task: Task[Any, Any],
    folder: Path,
    split: str,
    inputs: Sequence[Any],
    predictions: Sequence[Any],
) -> list[Path]:
    """Write predictions: a JSON object a line for each input, and the official file of the set.

    Raises:
        BertkitError: the folder cannot be written.
    """
    path = folder / f"{split}.jsonl"
    pairs = zip(inputs, predictions, strict=True)
    rows = ({**task.row(*pair), **given_text(pair[0])} for pair in pairs)
    write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return [path, *data.write(folder, split, inputs, predictions, task)]


def given_text(given: Any) -> dict[str, Any]:
    """What stands beside a prediction for reading: the gold label and the text."""
    if not isinstance(given, TextExample):
        return {}
    return {"gold": given.label, "text": given.text, "pair": given.pair}


def is_labelled(inputs: Sequence[Any]) -> bool:
    """Whether every input has a label, tags, or answers (which may be none)."""
    return bool(inputs) and all(
        getattr(given, name) is not None
        for given in inputs
        for name in ("label", "tags", "answers")
        if hasattr(given, name)
    )


def labelled_part(
    inputs: Sequence[Any], predictions: Sequence[Any]
) -> tuple[list[Any], list[Any], str]:
    """The inputs that can be scored, their predictions, and in words how many cannot."""
    known = [number for number, given in enumerate(inputs) if is_labelled([given])]
    lost = len(inputs) - len(known)
    said = f"{lost:,} of {len(inputs):,} inputs have no label and are not scored" if lost else ""
    return [inputs[i] for i in known], [predictions[i] for i in known], said


def check_labelled(split: str, inputs: Sequence[Any]) -> None:
    """Refuse data to learn from or to choose by where an input has no label.

    Raises:
        BertkitError: names the first such input.
    """
    missing = next((given for given in inputs if not is_labelled([given])), None)
    if missing is not None:
        raise BertkitError(f"{missing.place}: the {split} data has no label here; it needs one")


def digest_inputs(splits: Sequence[Sequence[Any]]) -> str:
    """SHA-256 of all inputs, wherever their files lie, as hex."""
    digest = hashlib.sha256()
    for inputs in splits:
        for given in inputs:
            digest.update(repr(given._replace(place="")).encode(errors="surrogatepass"))
    return digest.hexdigest()


def encode(task: Task[Any, Any], inputs: Sequence[Any], tokenizer: Tokenizer, split: str) -> Items:
    """The inputs of a split as sequences.

    Raises:
        BertkitError: there is no input, or one has an unknown label.
    """
    if not inputs:
        raise BertkitError(f"the {split} data has no usable input; see what was skipped")
    return with_unknown(task.items(inputs, tokenizer), tokenizer.unk_id)


def with_unknown(items: Items, unknown: int) -> Items:
    """The same items, with a count of the pieces that are [UNK], which has the id `unknown`.

    Of tagged words, an input is known by the first pieces of its words.
    """
    pieces = total = 0
    known: set[int] = set()
    for item in items.items:
        for part in item.parts:
            for one in part.sequences:
                size = len(one.ids) - 2 - (one.first < len(one.ids))
                lost = int(np.count_nonzero(one.ids == unknown))
                pieces, total = pieces + lost, total + size
                if isinstance(part.target, Words):  # a window may hold several inputs
                    first = one.ids[part.target.rows]
                    known.update(part.target.inputs[first != unknown].tolist())
                elif lost < size:
                    known.add(item.input)
    return replace(items, unknown=Unknown(pieces, total, items.inputs - len(known)))


def describe_items(split: str, items: Items) -> str:
    """How many inputs there are, how long, and what `describe_losses` says of them."""
    return (
        f"{split}: {items.inputs:,} inputs, {items.tokens / max(1, items.inputs):.1f} tokens each, "
        f"{describe_losses(items.windowed, items.cut, items.unknown)}"
    )


def describe_losses(windowed: int, cut: Mapping[str, int], unknown: Unknown) -> str:
    """How many inputs were windowed, that none was cut, or what, and the share of [UNK] if any."""
    said = [f"{windowed:,} in several windows", describe_cut(cut) or "0 cut"]
    if unknown.pieces:
        share = unknown.pieces / unknown.total
        said.append(f"{unknown.pieces:,} of {unknown.total:,} pieces [UNK] ({share:.1%})")
    if unknown.inputs:
        said.append(f"inputs without one known piece: {unknown.inputs:,}")
    return ", ".join(said)


def describe_cut(cut: Mapping[str, int]) -> str:
    """What was lost and of how many inputs; "" where nothing was."""
    return "; ".join(f"{what}: {count:,}" for what, count in cut.items() if count)
