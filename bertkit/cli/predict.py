"""The command `bertkit predict`, for fine-tuned models on files and pre-trained ones on texts."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import gettempdir
from typing import Annotated, Any

import rich.console
from cyclopts import App
from rich.markup import escape
from rich.table import Table

import bertkit
from bertkit.cli.options import (
    NO_COLUMNS,
    Column,
    ColumnFlags,
    Device,
    EmbeddingModel,
    NullThreshold,
    Pooling,
    Precision,
    PretrainedModel,
    TunedModel,
    VectorFormat,
    given,
)
from bertkit.config import flag_group
from bertkit.console import Console
from bertkit.errors import BertkitError, flag
from bertkit.files import (
    BLOCK_BYTES,
    disk_errors,
    from_home,
    remove_leftovers,
    remove_path,
    temporary_name,
)
from bertkit.outputs import FILE, TEXT, VECTORS
from bertkit.text.lines import TextCounts, describe_skipped
from bertkit.text.sources import BYTE_ORDER_MARK

STANDARD_INPUT = "/dev/stdin"
"""What the command line makes of the argument -."""
LIKE_A_FILE = re.compile(r"\S*(/\S*|\.\w{1,8})")
"""What is taken for the name of a file, whether there is one or not; anything else is a text."""
DATA_FILE = re.compile(r"\S+\.(csv|tsv|jsonl?|parquet|txt|conllu?|gz|bz2|xz|zst)")
"""The same beside other arguments, where "3.5" may be a choice, and "yes/no" a text."""

JSON_ROWS = re.compile(rb"\s*(\[\s*)?\{")
"""How a file of JSON begins; one array of rows is refused with an explanation."""


def predict_command(
    model: TunedModel,
    *inputs: Annotated[str, TEXT],
    ensemble: tuple[Path, ...] = (),
    out: Annotated[Path | None, FILE] = None,
    precision: Precision = "auto",
    null_threshold: NullThreshold = None,
    device: Device = "auto",
    columns: Annotated[ColumnFlags, flag_group("Columns of your data")] = NO_COLUMNS,
) -> None:
    """Predict with a fine-tuned model for a text, or for every input of a file.

    CSV, TSV, JSON lines, Parquet and hf:NAME are read by columns; plain text (.txt) has one input
    per line. A tagger also reads CoNLL columns; a question answering model reads SQuAD's JSON, or
    rows with the columns "question" and "context"; a GLUE or SWAG model knows the columns of its
    data set. A few thousand inputs are in memory at a time, so a file may be larger than memory
    (except SQuAD's JSON and SWAG's files).

    Parameters
    ----------
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
    from bertkit.predict.files import predict_file, predict_texts
    from bertkit.predict.load import load_predictor

    if not inputs:
        raise BertkitError(
            "there is nothing to predict; give a file, a text, or - for the standard input"
        )
    is_file = [names_file(given, alone=len(inputs) == 1) for given in inputs]
    if any(is_file) and len(inputs) > 1:
        raise BertkitError(
            f"{inputs[is_file.index(True)]} names a file, and there are {len(inputs)} inputs; give "
            "one file, or only texts"
        )
    named = given(columns)
    if named and not is_file[0]:
        raise BertkitError(
            f"{flag(next(iter(named)))} is for files, and the input is a text; leave it out"
        )
    predictor = load_predictor(
        [model, *ensemble], device=device, precision=precision, null_threshold=null_threshold
    )
    if not is_file[0]:
        predict_texts(predictor, inputs, out=out)
        return
    source = standard_input(named) if inputs[0] == STANDARD_INPUT else nullcontext(inputs[0])
    with Console() as console, source as file:
        predict_file(predictor, file, columns=named, out=out, console=console)


def names_file(given: str, *, alone: bool) -> bool:
    """Return whether an argument, perhaps the only one, names a file, a URL or standard input."""
    with suppress(OSError, ValueError):  # too long, or not the name of a file
        if Path(from_home(given)).exists():
            return True
    like = LIKE_A_FILE if alone else DATA_FILE
    return given.startswith("hf:") or bool(like.fullmatch(given))


@contextmanager
def standard_input(named: dict[str, Any]) -> Iterator[str]:
    """Copy the standard input to a file whose ending says its format; yield its path.

    The copy is removed at the end, and that of a killed command by the next one.
    """
    if sys.stdin is None:
        raise BertkitError("the standard input is closed; name a file, or pipe the inputs in")
    start = sys.stdin.buffer.read(BLOCK_BYTES)
    ending = "json" if JSON_ROWS.match(start.removeprefix(BYTE_ORDER_MARK)) else "txt"
    if named.get("format", "auto") != "auto":
        ending = named["format"]
    home = Path(gettempdir(), "bertkit-stdin")
    remove_leftovers(home)
    folder = temporary_name(home)
    try:
        with disk_errors(folder):
            folder.mkdir(mode=0o700)
            with (folder / f"stdin.{ending}").open("wb") as file:
                file.write(start)
                shutil.copyfileobj(sys.stdin.buffer, file)
        try:
            yield file.name
        except BertkitError as error:
            message = str(error).replace(file.name, "the standard input")
            raise BertkitError(message, code=error.code) from error
    finally:
        remove_path(folder)


def fill_mask_command(
    model: PretrainedModel,
    text: str,
    *,
    top: int = 5,
    precision: Precision = "auto",
    device: Device = "auto",
) -> None:
    """Predict the tokens at each [MASK] of a text.

    Parameters
    ----------
    text
        A text with one or more [MASK].
    top
        The number of predictions per mask.
    """
    from bertkit.predict.pretrained import load_pretrained

    predictor = load_pretrained(model, device=device, precision=precision)
    guesses = predictor.fill_mask(text, top)
    for number, candidates in enumerate(guesses, start=1):
        table = Table("token", "probability", title=f"mask {number}")
        for token, probability in candidates:
            table.add_row(escape(token), f"{probability:.4f}")
        rich.console.Console().print(table)


def next_sentence_command(
    model: PretrainedModel,
    text: str,
    following: str,
    *,
    precision: Precision = "auto",
    device: Device = "auto",
) -> None:
    """Estimate the probability that one text follows another.

    Parameters
    ----------
    text
        The first text.
    following
        The text that may or may not follow it.
    """
    from bertkit.predict.pretrained import load_pretrained

    predictor = load_pretrained(model, device=device, precision=precision)
    probability = predictor.next_sentence(text, following)
    rich.console.Console().print(f"follows with probability {probability:.4f}")


def embed_command(
    model: EmbeddingModel,
    file: Annotated[str, TEXT],
    *,
    out: Annotated[Path, VECTORS],
    format: VectorFormat = "auto",  # noqa: A002
    column: Column = "text",
    pooling: Pooling = "auto",
    normalize: bool | None = None,
    cut: bool = False,
    precision: Precision = "auto",
    device: Device = "auto",
) -> None:
    """Write one vector for every text of a file, in order.

    In plain text every line is a text; CSV, TSV, JSON lines, Parquet and hf:NAME have a column of
    texts. Long texts are read through windows. The file may be larger than memory.

    Parameters
    ----------
    file
        The texts.
    out
        The file to write.
    normalize
        Divide vectors by their norm; by default as the model's directory specifies, else yes.
    cut
        Drop the text beyond the model's length, as sentence-transformers does.
    """
    bertkit.embed_file(
        model,
        file,
        out,
        format=format,
        column=column,
        pooling=pooling,
        normalize=normalize,
        cut=cut,
        precision=precision,
        device=device,
    )


def similar_command(
    model: EmbeddingModel,
    file: Annotated[str, TEXT],
    text: str,
    *,
    top: int = 5,
    column: Column = "text",
    pooling: Pooling = "auto",
    precision: Precision = "auto",
    device: Device = "auto",
) -> None:
    """Find the texts of a file that are most similar to a text, by the cosine of their vectors.

    Parameters
    ----------
    file
        The texts; see bertkit predict embed.
    text
        The text to look for.
    top
        The number of texts to show.
    """
    from bertkit.predict.embeddings import load_embedder, nearest_texts
    from bertkit.predict.text_vectors import read_lines

    embedder = load_embedder(model, device=device, precision=precision, pooling=pooling)
    counts = TextCounts()
    table = Table("number", "cosine", "text")
    lines = read_lines(file, column, counts)
    nearest = nearest_texts(embedder, text, lines, top)
    if not nearest:
        raise BertkitError(f"there is no text in {file}; check the input")
    for cosine, number, found in nearest:
        table.add_row(f"{number + 1:,}", f"{cosine:.4f}", escape(found.strip()))
    rich.console.Console().print(table)
    Console().say(*describe_skipped(counts.skipped, counts.examples))


predict_application = App(name="predict", default_command=predict_command)
predict_application.command(embed_command, name="embed")
predict_application.command(fill_mask_command, name="fill-mask")
predict_application.command(next_sentence_command, name="next-sentence")
predict_application.command(similar_command, name="similar")
