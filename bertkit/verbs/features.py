"""`bertkit features`: the texts of a file → a model's hidden states."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any

from torch import Tensor

from bertkit.config import FLATTEN
from bertkit.errors import BertkitError
from bertkit.files import keep_apart
from bertkit.model.encoder import Encoder
from bertkit.model.features import is_weighted, load_feature_model
from bertkit.model.start import Start, model_folder, read_start
from bertkit.tasks.dataset import describe_lost
from bertkit.tasks.feature_files import feature_format, write_features
from bertkit.tasks.features import Extraction, TextFeatures, extract
from bertkit.tasks.rows import read_rows, require_all
from bertkit.tasks.task import NOTHING_UNKNOWN
from bertkit.text.documents import TextCounts, read_documents
from bertkit.text.lines import describe_skipped, plain_lines
from bertkit.text.sources import find_sources
from bertkit.training.devices import choose_device, choose_precision
from bertkit.training.journal import Console

EXTRACTION = Extraction()
ADVICE = "correct it, so that the vectors stay those of the rows"


def features(
    model: Path,
    file: str,
    *,
    out: Path,
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
    check_out(out, format, file)
    start, where = read_start(model), choose_device(device)
    encoder = start.build(Encoder, keep_head=False).model.to(where)
    mix = learned_mix(model, start, extraction.layers)
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
            f"numbers, {describe_lost(progress.windowed, {}, progress.unknown)}"
        )


def check_out(out: Path, format: str, file: str) -> None:  # noqa: A002
    """Make sure that features can go to a file.

    Raises:
        BertkitError: see `feature_format`; or the file is one of those that hold the texts.
    """
    feature_format(out, format)
    written = (out, out.with_name(f"{out.name}.json"))  # the second one of .npy
    if any(path.exists() for path in written):  # an address is not asked for its files for nothing
        read = [source.path for source in find_sources([file])]
        for path in written:
            keep_apart(path, read)


class Progress:
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
) -> Progress:
    """Write the features with progress, then say what was noted about their texts."""
    progress = Progress(console)
    write_features(out, progress.follow(found), format, details)
    console.close()
    for line in describe_skipped(counts.skipped, counts.examples):
        console.say(line)
    return progress


def learned_mix(model: Path, start: Start, layers: str) -> Tensor | None:
    """The weights of a weighted sum, where the model was tuned with it."""
    if not is_weighted(layers) or start.details.get("layers") != layers:
        return None
    mix = load_feature_model(model_folder(model)).mix
    return None if mix is None else mix.detach()


def text_of(value: object, column: str, place: str) -> str:
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
                text = text_of(row[column], column, place)
                if not text.strip():
                    found.note("empty text, kept", place)
                yield text
            require_all(found, ADVICE)
            counts += found
