"""Commands that use trained models: predict, and its subcommands."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App

from bertkit.cli.options import (
    AUTO,
    FLATTEN,
    AnyModel,
    Column,
    Compute,
    Device,
    EmbeddingModel,
    NullThreshold,
    Pooling,
    PretrainedModel,
    Top,
    TunedModel,
    flag_group,
    set_flags,
    task_flags,
)
from bertkit.errors import BertkitError
from bertkit.predict.features import WHOLE, Extraction, embed_file, extract_file
from bertkit.predict.files import (
    check_ending,
    entity_columns,
    entity_rows,
    new_rows,
    predict_file,
)
from bertkit.predict.load import load_predictor
from bertkit.predict.pretrained import load_pretrained
from bertkit.progress import Console

if TYPE_CHECKING:
    ColumnFlags = Any
else:
    ColumnFlags = task_flags("columns", "ColumnFlags", without=("text",))
NO_COLUMNS = ColumnFlags()


def predict_texts(
    model: TunedModel,
    file: str = "",
    *,
    text: tuple[str, ...] = (),
    out: Path | None = None,
    rows: str = "inputs",
    null_threshold: NullThreshold = None,
    top: Top = None,
    compute: Annotated[Compute, FLATTEN] = AUTO,
    columns: Annotated[ColumnFlags, flag_group("Columns of your data")] = NO_COLUMNS,
) -> None:
    """Predict with a fine-tuned model for a text, or for each input of a file.

    CSV, TSV, JSON lines, Parquet and hf:NAME are read by columns; plain text (.txt) has one input
    per line. A tagger also reads CoNLL columns; a question answering model reads SQuAD's JSON, or
    rows with the columns "question" and "context"; a GLUE or SWAG model knows the columns of its
    data set. A few thousand inputs are in memory at a time, so a file may be larger than memory
    (except SQuAD's JSON and SWAG's files).

    Args:
        file: A file (.csv, .tsv, .jsonl, .parquet, .txt, hf:NAME, CoNLL columns or SQuAD's JSON).
        text: With a file, the column of the text. Without, the texts of one input: a text, two
            texts of a pair, a question and its context, or a text and its choices.
        out: The file for the predictions, by its ending JSON lines, CSV, TSV or Parquet, with all
            columns of the input, called input_NAME where a result has the same name; it is created
            once all are made. By default they are printed.
        rows: inputs, or entities for one row an entity, with the ID of its input.
    """
    if not file and not text:
        raise BertkitError("there is no input; give a file, or the texts of one input with --text")
    if file and len(text) > 1:
        raise BertkitError("--text names the column of a file's text; give one, or leave out FILE")
    if out is not None:
        check_ending(out)
    predictor = load_predictor(model, null_threshold=null_threshold, top=top, **vars(compute))
    if file:
        named = {"text": text[0]} if text else {}
        predict_file(predictor, file, columns=named | set_flags(columns), out=out, rows=rows)
        return
    names = entity_columns(predictor, rows)
    result = predictor(*text) if len(text) < 3 else predictor(text[0], list(text[1:]))
    row = result.to_dict()
    with Console() as console, new_rows(out, console, names) as write:
        write(entity_rows([{"id": "0", **row}]) if names else [row])


def fill_mask_command(
    model: PretrainedModel,
    text: str,
    *,
    top: int = 5,
    compute: Annotated[Compute, FLATTEN] = AUTO,
) -> None:
    """Predict the tokens at each [MASK] of a text.

    Args:
        text: A text with one or more [MASK].
        top: The number of predictions per mask.
    """
    predictor = load_pretrained(model, **vars(compute))
    for number, candidates in enumerate(predictor.fill_mask(text, top), start=1):
        for token, probability in candidates:
            print(f"{number}\t{token}\t{probability:.4f}")


def embed_command(
    model: EmbeddingModel,
    file: str,
    *,
    out: Path,
    column: Column = "text",
    pooling: Pooling = "auto",
    normalize: bool | None = None,
    compute: Annotated[Compute, FLATTEN] = AUTO,
) -> None:
    """Write one vector for each text of a file, in order.

    In plain text each line is a text; CSV, TSV, JSON lines, Parquet and hf:NAME have a column of
    texts. Long texts are read through windows. The file may be larger than memory.

    Args:
        file: The texts.
        out: The file to write: .npy or .parquet.
        normalize: Divide vectors by their norm; by default as the model's directory specifies, else
            yes.
    """
    embed_file(
        *(model, file, out),
        column=column,
        pooling=pooling,
        normalize=normalize,
        **vars(compute),
    )


def features_command(
    model: AnyModel,
    file: str,
    *,
    out: Path,
    column: Column = "text",
    precision: str = "fp32",
    device: Device = "auto",
    extraction: Annotated[Extraction, FLATTEN] = WHOLE,
) -> None:
    """Write a model's hidden states for the tokens of the texts of a file, in order.

    In plain text each line is a text; CSV, TSV, JSON lines, Parquet and hf:NAME have a column of
    texts. No text is dropped or cut: long texts are read through windows.

    Args:
        file: The texts.
        out: The file to write: .parquet.
        precision: fp32, bf16, or auto: bf16 if the device computes it fast.
    """
    extract_file(model, file, out, extraction, column=column, precision=precision, device=device)


predict_command = App(name="predict", default_command=predict_texts)
predict_command.command(embed_command, name="embed")
predict_command.command(features_command, name="features")
predict_command.command(fill_mask_command, name="fill-mask")
