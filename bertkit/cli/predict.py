"""The command `bertkit predict`, for fine-tuned models on files and pre-trained ones on texts."""

from __future__ import annotations

import re
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import rich.console
from cyclopts import App
from rich.markup import escape
from rich.table import Table

from bertkit.cli.features import embed_command, similar_command
from bertkit.cli.options import (
    NO_COLUMNS,
    ColumnFlags,
    Device,
    NullThreshold,
    Precision,
    given,
)
from bertkit.config import FLATTEN
from bertkit.errors import BertkitError
from bertkit.files import BLOCK_BYTES
from bertkit.outputs import FILE, TEXT
from bertkit.predict.files import predict_file, predict_texts
from bertkit.predict.load import load_predictor
from bertkit.predict.pretrained import load_pretrained
from bertkit.training.journal import Console

STANDARD_INPUT = "/dev/stdin"
"""What the command line makes of the argument -."""
LIKE_A_FILE = re.compile(r"\S*(/\S*|\.\w{1,8})")
"""What is taken for the name of a file, whether there is one or not; anything else is a text."""


def predict_command(
    model: Path,
    *inputs: Annotated[str, TEXT],
    ensemble: tuple[Path, ...] = (),
    out: Annotated[Path | None, FILE] = None,
    precision: Precision = "auto",
    null_threshold: NullThreshold = None,
    device: Device = "auto",
    columns: Annotated[ColumnFlags, FLATTEN] = NO_COLUMNS,
) -> None:
    """Predict with a fine-tuned model for a text, or for every input of a file.

    CSV, TSV, JSON lines, Parquet and hf:NAME are read by columns; plain text (.txt) has one input
    per line. A tagger also reads CoNLL columns; a question answering model reads SQuAD's JSON, or
    rows with the columns "question" and "context"; a GLUE or SWAG model knows the columns of its
    data set. A few thousand inputs are in memory at a time, so a file may be larger than memory
    (except SQuAD's JSON and SWAG's files).

    Parameters
    ----------
    model
        A fine-tuned model: a model directory, a run, or a model of the hub.
    inputs
        A file (.csv, .tsv, .jsonl, .parquet, .txt, hf:NAME, CoNLL columns or SQuAD's JSON), or -
        for lines of text or JSON from the standard input; or the texts of one input: a text, two
        texts of a pair, a question and its context, or a text and its choices.
    ensemble
        More models of the same task; the outputs of all are averaged.
    out
        The file for the predictions, by its ending JSON lines, CSV, TSV or Parquet, with all
        columns of the input; it is created once all are made. By default they are printed.
    """
    if not inputs:
        raise BertkitError("there is nothing to predict; give a file, a text, or - for the input")
    is_file = [names_file(given) for given in inputs]
    if any(is_file) and len(inputs) > 1:
        raise BertkitError(
            f"{inputs[is_file.index(True)]} names a file, and there are {len(inputs)} inputs; give "
            "one file, or only texts"
        )
    predictor = load_predictor(
        [model, *ensemble], device=device, precision=precision, null_threshold=null_threshold
    )
    with Console() as console, TemporaryDirectory(prefix="bertkit-") as folder:
        if is_file[0]:
            named = given(columns)
            file = inputs[0] if inputs[0] != STANDARD_INPUT else standard_input(Path(folder), named)
            predict_file(predictor, file, columns=named, out=out, console=console)
        else:
            predict_texts(predictor, inputs, out=out)


def names_file(given: str) -> bool:
    """Return whether an argument names a file, a folder, a URL or the standard input."""
    with suppress(OSError, ValueError):  # too long, or not the name of a file
        if Path(given).expanduser().exists():
            return True
    return given.startswith("hf:") or bool(LIKE_A_FILE.fullmatch(given))


def standard_input(folder: Path, named: dict[str, Any]) -> str:
    """Copy the standard input to a file whose ending says its format; return its path."""
    start = sys.stdin.buffer.read(BLOCK_BYTES)
    ending = "jsonl" if start.lstrip().startswith(b"{") else "txt"
    path = folder / f"stdin.{named.get('format') or ending}"
    with path.open("wb") as file:
        file.write(start)
        shutil.copyfileobj(sys.stdin.buffer, file)
    return str(path)


def fill_mask_command(model: Path, text: str, *, top: int = 5, device: Device = "auto") -> None:
    """Predict the tokens at each [MASK] of a text.

    Parameters
    ----------
    model
        A model directory, for example runs/demo/model.
    text
        A text with one or more [MASK].
    top
        The number of predictions per mask.
    """
    guesses = load_pretrained(model, device=device).fill_mask(text, top)
    for number, candidates in enumerate(guesses, start=1):
        table = Table("token", "probability", title=f"mask {number}")
        for token, probability in candidates:
            table.add_row(escape(token), f"{probability:.4f}")
        rich.console.Console().print(table)


def next_sentence_command(
    model: Path, text: str, following: str, *, device: Device = "auto"
) -> None:
    """Estimate the probability that one text follows another.

    Parameters
    ----------
    model
        A model directory, for example runs/demo/model.
    text
        The first text.
    following
        The text that may or may not follow it.
    """
    probability = load_pretrained(model, device=device).next_sentence(text, following)
    rich.console.Console().print(f"follows with probability {probability:.4f}")


predict_application = App(name="predict", default_command=predict_command)
predict_application.command(embed_command, name="embed")
predict_application.command(fill_mask_command, name="fill-mask")
predict_application.command(next_sentence_command, name="next-sentence")
predict_application.command(similar_command, name="similar")
