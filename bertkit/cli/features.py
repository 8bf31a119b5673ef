"""`bertkit features`: the texts of a file → a model's hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from bertkit.checkpoints.pretrained import PretrainedWeights, model_folder, read_pretrained
from bertkit.config import FLATTEN
from bertkit.datasets.tabular import read_rows, require_all
from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder
from bertkit.model.features import is_weighted, load_feature_model
from bertkit.outputs import TEXT, Written
from bertkit.predict.feature_files import feature_format, write_features
from bertkit.predict.features import Extraction, TextFeatures, extract
from bertkit.tasks.data import describe_losses
from bertkit.tasks.task import NOTHING_UNKNOWN
from bertkit.text.documents import TextCounts, read_documents
from bertkit.text.lines import describe_skipped, plain_lines
from bertkit.text.sources import find_sources
from bertkit.training.device import choose_device, choose_precision
from bertkit.training.journal import Console

EXTRACTION = Extraction()
FEATURES = Written("file", beside=".json")
"""An index is written beside a .npy file."""
ADVICE = "correct it, so that the vectors stay those of the rows"


def features_command(
    model: Path,
    file: Annotated[str, TEXT],
    *,
    out: Annotated[Path, FEATURES],
    format: str = "auto",  # noqa: A002 - the flag's natural name
    column: str = "text",
    precision: str = "fp32",
    device: str = "auto",
    extraction: Annotated[Extraction, FLATTEN] = EXTRACTION,
) -> None:
    """Write a model's hidden states for the texts of a file, in order.

    Plain text has a text on each line; CSV, TSV, JSON lines, Parquet and hf:NAME have one in a
    column. No text is left out, and none is cut: long ones are read through windows.

    Parameters
    ----------
    model
        A model directory, a run directory, or a Google checkpoint.
    file
        The texts.
    out
        The file to write.
    format
        safetensors, parquet, npy, or auto for the ending of the file.
    column
        The column of the text, in formats that have columns.
    precision
        fp32, bf16, or auto: bf16 where the device is made for it.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    """
    feature_format(out, format)  # refused before the model is loaded
    start, where = read_pretrained(model), choose_device(device)
    encoder = start.build(Encoder, keep_head=False).model.to(where)
    mix = learned_layer_mix(model, start, extraction.layers)
    counts = TextCounts()
    with Console() as console:
        console.start(None, title="features", unit="texts")
        found = extract(
            encoder,
            start.tokenizer,
            read_lines(file, column, counts),
            extraction,
            mix=None if mix is None else mix.to(where),
            device=where,
            precision=choose_precision(precision, where),
        )
        details = {"model": str(model), "layers": extraction.layers, "pooling": extraction.pooling}
        progress = write_all(out, found, format, details, console, counts)
        console.say(
            f"{out}: {progress.texts:,} texts, {progress.rows:,} vectors of {progress.width:,} "
            f"numbers, {describe_losses(progress.windowed, {}, progress.unknown)}"
        )


class TextProgress:
    """Counts what passes, and shows it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.texts = self.rows = self.width = self.windowed = 0
        self.unknown = NOTHING_UNKNOWN

    def follow(self, found: Iterable[TextFeatures]) -> Iterator[TextFeatures]:
        """The same features."""
        for text in found:
            self.texts += 1
            self.rows += len(text.vectors)
            self.width = text.vectors.shape[1]
            self.windowed += text.windows > 1
            self.unknown = self.unknown.plus(text.unknown)
            yield text
            self.console.update({"done": self.texts, "vectors": self.rows})


def write_all(
    out: Path,
    found: Iterable[TextFeatures],
    format: str,  # noqa: A002 - the flag's natural name
    details: dict[str, Any],
    console: Console,
    counts: TextCounts,
) -> TextProgress:
    """Write the features with progress, then say what was noted about their texts."""
    progress = TextProgress(console)
    write_features(out, progress.follow(found), format, details)
    console.close()
    for line in describe_skipped(counts.skipped, counts.examples):
        console.say(line)
    return progress


def learned_layer_mix(model: Path, start: PretrainedWeights, layers: str) -> Tensor | None:
    """The weights of a weighted sum, where the model was tuned with it."""
    if not is_weighted(layers) or start.details.get("layers") != layers:
        return None
    mix = load_feature_model(model_folder(model)).mix
    return None if mix is None else mix.detach()


def row_text(value: object, column: str, place: str) -> str:
    """A field, a number too, as a text; "" for none.

    Raises:
        BertkitError: it holds something else.
    """
    if value is None or value != value:  # noqa: PLR0124 - NaN, where a data frame has no text
        return ""
    if not isinstance(value, str | int | float):
        raise BertkitError(
            f"{place}: '{column}' holds {str(value)[:40]!r}, which is no text; name another column"
        )
    return str(value)


def read_lines(file: str, column: str, counts: TextCounts) -> Iterator[str]:
    """Every text of a file; an empty one is a text, too, so that numbers stay those of the lines.

    Raises:
        BertkitError: the file is absent or damaged, or a row lacks the column.
    """
    for source in find_sources([file]):
        if source.format == "wikiextractor":
            yield from read_documents(source, counts)
        elif source.format == "text":
            for number, line in plain_lines(source, counts):
                if not line.strip():
                    counts.note("empty text, kept", f"{source.path}:{number}")
                yield line
        elif source.format == "unknown":
            counts.note("file of unknown type", source.path)
        else:
            found = TextCounts()  # of rows alone: a file that is no text loses none
            for place, row in read_rows(source.path, found, source.format, columns=[column]):
                require_all(found, ADVICE)
                text = row_text(row[column], column, place)
                if not text.strip():
                    found.note("empty text, kept", place)
                yield text
            require_all(found, ADVICE)
            counts += found
