"""From a file of texts to a file of vectors: hidden states (paper section 5.3) or embeddings."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from bertkit.checkpoints.pretrained import PretrainedWeights, model_folder, read_pretrained
from bertkit.console import Console
from bertkit.datasets.tabular import numbered_rows, require_all
from bertkit.errors import BertkitError
from bertkit.files import from_home
from bertkit.model.encoder import Encoder
from bertkit.model.features import is_weighted, load_feature_model
from bertkit.outputs import VECTORS, refuse_overwriting
from bertkit.predict.embeddings import Embedder, load_embedder, text_chunks
from bertkit.predict.feature_files import feature_format, write_features
from bertkit.predict.features import WHOLE, Extraction, TextFeatures, extract, unknown_of_text
from bertkit.tasks.data import describe_losses
from bertkit.tasks.task import NOTHING_UNKNOWN
from bertkit.text.documents import TextCounts, read_documents
from bertkit.text.lines import describe_skipped, plain_lines
from bertkit.text.sources import find_sources
from bertkit.training.device import choose_device, choose_precision

ADVICE = "correct it, so that the vectors stay those of the rows"


def extract_file(
    model: Path | str,
    file: Path | str,
    out: Path | str,
    extraction: Extraction = WHOLE,
    *,
    format: str = "auto",  # noqa: A002
    column: str = "text",
    precision: str = "fp32",
    device: str = "auto",
) -> None:
    """Write a model's hidden states for the texts of a file, in order.

    Args:
        model: a model directory, a run directory, a model of the hub or a Google checkpoint.
        file: the texts; see `read_lines`.
        out: the file to write.
        extraction: the layers to read and how to pool them.
        format: "safetensors", "parquet", "npy", or "auto" for the ending of `out`.
        column: the column of the text, in formats that have columns.
        precision: "fp32", "bf16" or "auto".
        device: "auto", "cpu", "cuda", ...

    Raises:
        BertkitError: the model, the file or a setting cannot be used; the message says why.
    """
    model, out = Path(model), Path(from_home(out))
    feature_format(out, format)  # refused before the model is loaded
    refuse_overwriting(out, [file], VECTORS)
    start, where = read_pretrained(model), choose_device(device)
    encoder = start.build(Encoder, keep_head=False).model.to(where)
    mix = learned_layer_mix(start, extraction.layers)
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
        VectorProgress(console).write(found, out, format, details, counts)


def embed_file(
    model: Path | str,
    file: Path | str,
    out: Path | str,
    *,
    format: str = "auto",  # noqa: A002
    column: str = "text",
    pooling: str = "auto",
    normalize: bool | None = None,
    cut: bool = False,
    precision: str = "auto",
    device: str = "auto",
) -> None:
    """Write one vector for every text of a file, in order.

    Args:
        model: a model directory, also sentence-transformers', a run directory, or a hub name.
        file: the texts; see `read_lines`.
        out: the file to write.
        format: "safetensors", "parquet", "npy", or "auto" for the ending of `out`.
        column: the column of the text, in formats that have columns.
        pooling: see `load_embedder`.
        normalize: see `load_embedder`.
        cut: whether text beyond the model's length is dropped, and counted, instead of being read
            through windows.
        precision: see `load_embedder`.
        device: see `load_embedder`.

    Raises:
        BertkitError: the model, the file or a setting cannot be used; the message says why.
    """
    out = Path(from_home(out))
    feature_format(out, format)  # refused before the model is loaded
    refuse_overwriting(out, [file], VECTORS)
    embedder = load_embedder(
        model, device=device, precision=precision, pooling=pooling, normalize=normalize
    )
    counts = TextCounts()
    with Console() as console:
        console.start(None, title="embedding", unit="texts")
        progress = VectorProgress(console)
        found = text_embeddings(embedder, read_lines(file, column, counts), progress, cut=cut)
        details = {"model": str(model), "normalize": embedder.settings.normalize}
        details |= {"pooling": embedder.settings.pooling, "precision": embedder.mode}
        progress.write(found, out, format, details, counts)


def text_embeddings(
    embedder: Embedder, texts: Iterable[str], progress: VectorProgress, *, cut: bool
) -> Iterator[TextFeatures]:
    """Yield the vector of each text; `progress.cut` counts the texts that lose their ends."""
    for chunk in text_chunks(texts):
        encoded = embedder.tokenize(chunk, windows=not cut)
        progress.cut += sum(text.cut > 0 for text in encoded)
        for text, vector in zip(encoded, embedder.vectors(encoded), strict=True):
            unknown = unknown_of_text(text.parts, embedder.tokenizer.unk_id)
            yield TextFeatures(vector[None], [], [], len(text.parts), unknown)


class VectorProgress:
    """A progress bar that counts the texts and vectors that pass through it."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.texts = self.rows = self.width = self.windowed = self.cut = 0
        self.unknown = NOTHING_UNKNOWN

    def follow(self, found: Iterable[TextFeatures]) -> Iterator[TextFeatures]:
        """Yield the same features, counting them."""
        for text in found:
            self.texts += 1
            self.rows += len(text.vectors)
            self.width = text.vectors.shape[1]
            self.windowed += text.windows > 1
            self.unknown = self.unknown.plus(text.unknown)
            yield text
            self.console.update({"done": self.texts, "vectors": self.rows})

    def write(
        self,
        found: Iterable[TextFeatures],
        out: Path,
        format: str,  # noqa: A002
        details: dict[str, Any],
        counts: TextCounts,
    ) -> None:
        """Write the features by `write_features`, and print what was noted about the texts."""
        write_features(out, self.follow(found), format, details)
        self.console.close()
        self.console.say(*describe_skipped(counts.skipped, counts.examples))
        losses = describe_losses(self.windowed, {"texts cut": self.cut}, self.unknown)
        vectors = f"{self.rows:,} vectors of {self.width:,} numbers"
        self.console.say(f"{out}: {self.texts:,} texts, {vectors}, {losses}")


def learned_layer_mix(start: PretrainedWeights, layers: str) -> Tensor | None:
    """Return the weights of a weighted sum of layers, if the model was fine-tuned with it."""
    if not is_weighted(layers) or start.details.get("layers") != layers:
        return None
    mix = load_feature_model(model_folder(start.path)).mix
    return None if mix is None else mix.detach()


def read_lines(file: Path | str, column: str, counts: TextCounts) -> Iterator[str]:
    """Yield every text of a file: lines of plain text, or one column of any tabular format.

    The source is a file, folder, glob, URL or `hf:NAME`. Empty texts are yielded too, so that there
    is one vector per row; `counts` collects them and files of unknown type.

    Raises:
        BertkitError: the file is missing or damaged, or a row has no text in that column.
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
            found = TextCounts()  # counts only rows, not files of unknown type
            rows = numbered_rows(source.path, found, source.format, columns=[column])
            for _, place, row in rows:
                require_all(found, ADVICE)
                text = row_text(row[column], column, place)
                if not text.strip():
                    found.note("empty text, kept", place)
                yield text
            require_all(found, ADVICE)
            counts += found


def row_text(value: object, column: str, place: str) -> str:
    """Return a field, a string or a number, as text; "" if it is null.

    Raises:
        BertkitError: the field holds something else.
    """
    if value is None:
        return ""
    if not isinstance(value, str | int | float):
        raise BertkitError(
            f"{place}: '{column}' holds {str(value)[:40]!r}, which is not text; name another column"
        )
    return str(value)
