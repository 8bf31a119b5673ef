"""`bertkit predict`: a tuned model on a file, and a pre-trained one on a text."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from operator import length_hint
from pathlib import Path
from typing import Annotated, Any

import rich.console
from cyclopts import App
from rich.markup import escape
from rich.table import Table

from bertkit.cli.embed import embed_command, similar_command
from bertkit.config import FLATTEN
from bertkit.datasets.examples import QuestionExample, TextExample, WordsExample
from bertkit.datasets.glue import GLUE
from bertkit.datasets.swag import SWAG_COLUMNS, read_swag
from bertkit.datasets.tabular import has_columns
from bertkit.datasets.user_files import Columns, end_position, read_unlabelled
from bertkit.errors import BertkitError
from bertkit.outputs import FILE, TEXT
from bertkit.predict.files import FileProgress, new_lines
from bertkit.predict.predictors import TaskPredictor, stretches
from bertkit.predict.pretrained import load_pretrained
from bertkit.predict.word_splitter import split_words_with_offsets
from bertkit.tasks.benchmarks import glue_columns
from bertkit.tasks.data import describe_losses
from bertkit.tasks.task import NOTHING_UNKNOWN, Items
from bertkit.tasks.user_data import are_all_unique
from bertkit.text.lines import TextCounts, describe_skipped, plain_lines
from bertkit.text.sources import extension, find_sources
from bertkit.training.journal import Console

DEFAULT_COLUMNS = Columns()
LONE_SENTENCES = (
    "every sentence is alone in its document, and the model was tuned with the context of "
    "documents; begin them by -DOCSTART- lines or name their column (--document)"
)
NAMING = {field.name for field in fields(Columns)} - {"format", "id"}


def predict_command(
    model: Path,
    file: Annotated[str, TEXT],
    *,
    ensemble: tuple[Path, ...] = (),
    out: Annotated[Path | None, FILE] = None,
    precision: str = "auto",
    null_threshold: float | None = None,
    device: str = "auto",
    columns: Annotated[Columns, FLATTEN] = DEFAULT_COLUMNS,
) -> None:
    """Predict for every input of a file with a tuned model: a JSON object a line.

    CSV, TSV, JSON lines, Parquet and hf:NAME by columns; plain text (.txt) has an input on each
    line; a tagger also reads CoNLL columns, a model that answers SQuAD's JSON, or rows with the
    columns "question" and "context"; a model of GLUE or SWAG knows its set's columns. Some
    thousand inputs are held at a time, so a file (but SQuAD's JSON and SWAG's) may be larger than
    memory.

    Parameters
    ----------
    model
        A tuned model's directory.
    file
        The inputs: .csv, .tsv, .jsonl, .parquet, .txt, hf:NAME, CoNLL columns or SQuAD's JSON.
    ensemble
        More models of the same task; the outputs of all are averaged.
    out
        The file for the predictions, which appears when all are made; the terminal where not
        given.
    precision
        fp32, bf16, int8 (CPUs only), or auto: bf16 where the device is made for it.
    null_threshold
        Of models that answer: there is no answer where the odds of none are above it. The model's
        own where not given; one of transformers has none, and gives an answer to everything.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    """
    counts = TextCounts()
    predictor = TaskPredictor.load(
        [model, *ensemble], device=device, precision=precision, null_threshold=null_threshold
    )
    details = predictor.loaded[0].details
    named, inputs = known_inputs(predictor.task.task_type, details, file, columns, counts)
    with Console() as console:
        with new_lines(out) as write:
            visible = out is not None or not sys.stdout.isatty()  # else lines would tear the bar
            progress = FileProgress(console, *input_bytes(file, named, inputs), visible=visible)
            lost, alone = LostInputs(), predictor.reads_documents
            for stretch in stretches(inputs, whole=predictor.reads_documents):
                progress.begin(stretch)
                alone = alone and are_all_unique(stretch)
                lines, items = predicted(predictor, stretch, progress)
                write(lines)
                lost.add(items)
            progress.finish()
        for line in describe_skipped(counts.skipped, counts.examples):
            console.say(line)
        if alone:
            console.say(f"{file}: {LONE_SENTENCES}")
        console.say(f"{progress.inputs:,} inputs, {lost.described()}")


class LostInputs:
    """What became of the inputs of all stretches: see `describe_losses`."""

    def __init__(self) -> None:
        self.windowed = 0
        self.cut: Counter[str] = Counter()
        self.unknown = NOTHING_UNKNOWN

    def add(self, items: Items) -> None:
        """One more stretch."""
        self.windowed += items.windowed
        self.cut.update(items.cut)
        self.unknown = self.unknown.plus(items.unknown)

    def described(self) -> str:
        """In words."""
        return describe_losses(self.windowed, self.cut, self.unknown)


def predicted(
    predictor: TaskPredictor, stretch: list[Any], progress: FileProgress
) -> tuple[list[str], Items]:
    """A line of JSON for each input, and their sequences."""
    predictions, items = predictor.run(stretch, progress)
    lines = []
    for given, found in zip(stretch, predictions, strict=True):
        row = attach_texts(given, found, predictor.task.row(given, found))
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    return lines, items


def input_bytes(file: str, columns: Columns, inputs: Iterator[Any]) -> tuple[int | None, str]:
    """How long a file is, where that is soon known, and in which unit."""
    held = length_hint(inputs)  # of inputs that had to be read whole
    last = None if held else end_position(file, columns)
    return (held or None, "inputs") if last is None else (last, "lines")


def attach_texts(given: Any, found: Any, row: dict[str, Any]) -> dict[str, Any]:
    """A row with the text that it is about."""
    if isinstance(given, TextExample):
        pair = {} if given.pair is None else {"pair": given.pair}
        return {"id": given.id, "text": given.text, **pair, **row}
    if isinstance(given, QuestionExample):
        return {"id": given.id, "question": given.question, **row}
    return row


def input_columns(columns: Columns, details: Mapping[str, Any]) -> Columns:
    """The columns as given; what was not, as `bertkit.json` says that the model was tuned with."""
    known = details.get("columns")
    changes: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in (known if isinstance(known, dict) else {}).items()
        if name in NAMING and name not in columns.given
    }
    return replace(columns, **changes)


def known_inputs(
    kind: str, details: Mapping[str, Any], file: str, columns: Columns, counts: TextCounts
) -> tuple[Columns, Iterator[Any]]:
    """The inputs of a file, as they are read, and its columns, which models of some sets know.

    Args:
        kind: of the model's task.
        details: of its `bertkit.json`.
        file: any that `read_inputs` takes, or an official file of the model's set.
        columns: as given.
        counts: of what is skipped.

    Raises:
        BertkitError: see `read_inputs`; or the file's columns are neither those of the model's set
            nor the usual ones.
    """
    named = input_columns(columns, details)
    if not is_plain(kind, file, named):
        if is_swag(details, file, named):
            refuse_swag_flags(file, columns)
            return named, iter(read_swag(file, counts, labelled=False, format=named.format))
        data = str(details.get("data"))
        if data in GLUE and columns.given.isdisjoint({"text", "pair"}):
            named = glue_columns(data, file, named)
    return named, read_inputs(kind, file, named, counts)


def is_swag(details: Mapping[str, Any], file: str, columns: Columns) -> bool:
    """Whether a model of SWAG, by its `bertkit.json`, is given a file with SWAG's columns."""
    if details.get("data") != "swag":
        return False
    return has_columns(file, SWAG_COLUMNS, columns.format)


def refuse_swag_flags(file: str, columns: Columns) -> None:
    """Stop where columns of SWAG's own file are named: its second sentences would not be read.

    Raises:
        BertkitError: they are.
    """
    if named := columns.given & {"text", "choices"}:
        flags = " and ".join(f"--{name}" for name in sorted(named))
        raise BertkitError(f"{file} has SWAG's columns, which the model knows; leave out {flags}")


def is_plain(kind: str, file: str, columns: Columns) -> bool:
    """Whether a file is read as plain text."""
    return columns.format == "text" or (
        columns.format == "auto" and kind != "token-classification" and extension(file) == ".txt"
    )


def read_inputs(kind: str, file: str, columns: Columns, counts: TextCounts) -> Iterator[Any]:
    """The inputs of a file for a kind of task, without labels, as they are read.

    Raises:
        BertkitError: the file is absent, damaged or lacks a column.
    """
    if not is_plain(kind, file, columns):
        return read_unlabelled(kind, file, columns, counts)
    if kind not in {
        "classification",
        "multi-label-classification",
        "regression",
        "token-classification",
    }:
        raise BertkitError(f"{file}: a model tuned to {kind} needs columns, not plain text")
    if columns.pair:
        raise BertkitError(f"{file}: plain text has no columns; give CSV or JSONL for pairs")
    return plain_inputs(kind, file, counts)


def plain_inputs(kind: str, file: str, counts: TextCounts) -> Iterator[TextExample | WordsExample]:
    """An input on each line that is not blank, as it is read."""
    [source, *more] = find_sources([file], format="text")
    if more:
        raise BertkitError(f"{file} is {1 + len(more)} files; predict them one by one")
    used = document = 0
    for number, line in plain_lines(source, counts):
        place = f"{source.path}:{number}"
        if not line.strip():
            counts.note("blank line", place)
            document += 1  # as in a corpus, a blank line ends a document
            continue
        if kind == "token-classification":
            _, spans = split_words_with_offsets(line)
            words = tuple(line[start:end] for start, end in spans)
            yield WordsExample(str(number), words, None, document, place, line, tuple(spans))
        else:
            yield TextExample(str(number), line.strip(), None, None, place)
        used += 1
    if not used:
        raise BertkitError(f"{file} holds no text; give one input a line")


def fill_mask_command(model: Path, text: str, *, top: int = 5, device: str = "auto") -> None:
    """Guess what stands at each [MASK] of a text.

    Parameters
    ----------
    model
        A model directory, for example runs/demo/model.
    text
        A text with one or more [MASK].
    top
        Guesses per mask.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    """
    guesses = load_pretrained(model, device=device).fill_mask(text, top)
    for number, candidates in enumerate(guesses, start=1):
        table = Table("piece", "probability", title=f"mask {number}")
        for piece, probability in candidates:
            table.add_row(escape(piece), f"{probability:.4f}")
        rich.console.Console().print(table)


def next_sentence_command(model: Path, text: str, following: str, *, device: str = "auto") -> None:
    """How probable it is that one text follows another.

    Parameters
    ----------
    model
        A model directory, for example runs/demo/model.
    text
        The first text.
    following
        The text that may or may not follow it.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    """
    probability = load_pretrained(model, device=device).next_sentence(text, following)
    rich.console.Console().print(f"follows with probability {probability:.4f}")


predict_application = App(name="predict", default_command=predict_command)
predict_application.command(embed_command, name="embed")
predict_application.command(fill_mask_command, name="fill-mask")
predict_application.command(next_sentence_command, name="next-sentence")
predict_application.command(similar_command, name="similar")
