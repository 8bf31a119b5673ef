"""`bertkit predict embed` and `bertkit predict similar`: the texts of a file as vectors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import rich.console
from rich.markup import escape
from rich.table import Table

from bertkit.cli.features import FEATURES, read_lines, write_all
from bertkit.outputs import TEXT
from bertkit.predict.embeddings import Embedder, load_embedder, nearest_texts, text_chunks
from bertkit.predict.feature_files import feature_format
from bertkit.predict.features import TextFeatures
from bertkit.tasks.data import describe_losses
from bertkit.tasks.task import unknown_of_text
from bertkit.text.lines import TextCounts, describe_skipped
from bertkit.training.journal import Console


def embed_command(
    model: Path,
    file: Annotated[str, TEXT],
    *,
    out: Annotated[Path, FEATURES],
    format: str = "auto",  # noqa: A002 - the flag's natural name
    column: str = "text",
    pooling: str = "auto",
    normalize: bool | None = None,
    cut: bool = False,
    precision: str = "auto",
    device: str = "auto",
) -> None:
    """Write a vector for every text of a file, in order.

    Plain text has a text on each line; CSV, TSV, JSON lines, Parquet and hf:NAME have one in a
    column. Long texts are read through windows. The file may be larger than memory.

    Parameters
    ----------
    model
        A model directory, also one of sentence-transformers, or a run directory.
    file
        The texts.
    out
        The file to write.
    format
        safetensors, parquet, npy, or auto for the ending of the file.
    column
        The column of the text, in formats that have columns.
    pooling
        cls, mean, pooler, mean-last-four, or auto: as the model's directory says, else mean.
    normalize
        Divide vectors by their length; where not given, as the directory says, else yes.
    cut
        Leave out what is beyond the model's length, as sentence-transformers does.
    precision
        fp32, bf16, int8 (CPUs only), or auto: bf16 where the device is made for it.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    """
    feature_format(out, format)  # refused before the model is loaded
    embedder = load_embedder(
        model, device=device, precision=precision, pooling=pooling, normalize=normalize
    )
    counts = TextCounts()
    with Console() as console:
        console.start(None, title="embedding", unit="texts")
        found = Embedding(embedder, read_lines(file, column, counts), cut=cut)
        details = {"model": str(model), "normalize": embedder.settings.normalize}
        details |= {"pooling": embedder.settings.pooling, "precision": embedder.mode}
        progress = write_all(out, found, format, details, console, counts)
        console.say(
            f"{out}: {progress.texts:,} vectors of {progress.width:,} numbers, "
            f"{describe_losses(progress.windowed, {'texts cut': found.lost}, progress.unknown)}"
        )


class Embedding:
    """The vectors of texts, stretch by stretch; `lost` counts the texts that lose their ends."""

    def __init__(self, embedder: Embedder, texts: Iterable[str], *, cut: bool) -> None:
        self.embedder, self.texts, self.cut, self.lost = embedder, texts, cut, 0

    def __iter__(self) -> Iterator[TextFeatures]:
        for stretch in text_chunks(self.texts):
            encoded = self.embedder.encode(stretch, windows=not self.cut)
            self.lost += sum(text.cut > 0 for text in encoded)
            vectors = self.embedder.vectors(encoded)
            for text, vector in zip(encoded, vectors, strict=True):
                unknown = unknown_of_text(text.parts, self.embedder.tokenizer.unk_id)
                yield TextFeatures(vector[None], [], [], len(text.parts), unknown)


def similar_command(
    model: Path,
    file: Annotated[str, TEXT],
    text: str,
    *,
    top: int = 5,
    column: str = "text",
    pooling: str = "auto",
    precision: str = "auto",
    device: str = "auto",
) -> None:
    """Find the texts of a file that are most like a text, by the cosine of their vectors.

    Parameters
    ----------
    model
        A model directory, also one of sentence-transformers, or a run directory.
    file
        The texts; see bertkit predict embed.
    text
        What to look for.
    top
        How many are shown.
    column
        The column of the text, in formats that have columns.
    pooling
        cls, mean, pooler, mean-last-four, or auto: as the model's directory says, else mean.
    precision
        fp32, bf16, int8 (CPUs only), or auto: bf16 where the device is made for it.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    """
    embedder = load_embedder(model, device=device, precision=precision, pooling=pooling)
    counts = TextCounts()
    table = Table("number", "cosine", "text")
    lines = read_lines(file, column, counts)
    for cosine, number, found in nearest_texts(embedder, text, lines, top):
        table.add_row(f"{number + 1:,}", f"{cosine:.4f}", escape(found.strip()))
    rich.console.Console().print(table)
    for line in describe_skipped(counts.skipped, counts.examples):
        rich.console.Console(stderr=True).print(line)
