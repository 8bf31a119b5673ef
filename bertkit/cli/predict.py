"""The command `bertkit predict`, for fine-tuned models on files and pre-trained ones on texts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import rich.console
from cyclopts import App
from rich.markup import escape
from rich.table import Table

from bertkit.cli.features import embed_command, similar_command
from bertkit.cli.options import NO_COLUMNS, ColumnFlags, given
from bertkit.config import FLATTEN
from bertkit.outputs import FILE, TEXT
from bertkit.predict.files import predict_file
from bertkit.predict.predictors import TaskPredictor
from bertkit.predict.pretrained import load_pretrained
from bertkit.training.journal import Console


def predict_command(
    model: Path,
    file: Annotated[str, TEXT],
    *,
    ensemble: tuple[Path, ...] = (),
    out: Annotated[Path | None, FILE] = None,
    precision: str = "auto",
    null_threshold: float | None = None,
    device: str = "auto",
    columns: Annotated[ColumnFlags, FLATTEN] = NO_COLUMNS,
) -> None:
    """Predict for every input of a file with a fine-tuned model; write one JSON object per line.

    CSV, TSV, JSON lines, Parquet and hf:NAME are read by columns; plain text (.txt) has one input
    per line. A tagger also reads CoNLL columns; a question answering model reads SQuAD's JSON, or
    rows with the columns "question" and "context"; a GLUE or SWAG model knows the columns of its
    data set. A few thousand inputs are in memory at a time, so a file may be larger than memory
    (except SQuAD's JSON and SWAG's files).

    Parameters
    ----------
    model
        The directory of a fine-tuned model.
    file
        The inputs: .csv, .tsv, .jsonl, .parquet, .txt, hf:NAME, CoNLL columns or SQuAD's JSON.
    ensemble
        More models of the same task; the outputs of all are averaged.
    out
        The file for the predictions, which is created once all are made; by default they are
        printed.
    precision
        fp32, bf16, int8 (CPUs only), or auto: bf16 if the device computes it fast.
    null_threshold
        For question answering: the null odds above which a question gets no answer. The default is
        saved with the model; a model of transformers has none and answers every question.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    """
    predictor = TaskPredictor.load(
        [model, *ensemble], device=device, precision=precision, null_threshold=null_threshold
    )
    with Console() as console:
        predict_file(predictor, file, columns=given(columns), out=out, console=console)


def fill_mask_command(model: Path, text: str, *, top: int = 5, device: str = "auto") -> None:
    """Predict the tokens at each [MASK] of a text.

    Parameters
    ----------
    model
        A model directory, for example runs/demo/model.
    text
        A text with one or more [MASK].
    top
        The number of predictions per mask.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    """
    guesses = load_pretrained(model, device=device).fill_mask(text, top)
    for number, candidates in enumerate(guesses, start=1):
        table = Table("token", "probability", title=f"mask {number}")
        for token, probability in candidates:
            table.add_row(escape(token), f"{probability:.4f}")
        rich.console.Console().print(table)


def next_sentence_command(model: Path, text: str, following: str, *, device: str = "auto") -> None:
    """Estimate the probability that one text follows another.

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
