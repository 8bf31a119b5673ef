"""Text embeddings: `load_embedder(folder).encode(texts)`.

Models fine-tuned by sentence-transformers (Reimers and Gurevych 2019) are used as their directories
say. For texts up to the maximum length the vectors equal that library's, which truncates longer
ones. bertkit reads these through overlapping windows, unless truncation is requested. Poolings over
tokens take each token from the window where it has the most context, and average [CLS] and [SEP]
over the windows; cls, lasttoken and pooler are the mean of the windows' vectors, weighted by the
number of tokens that each window contributes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.checkpoints.pretrained import LoadResult, load_model, model_folder, resolve_model
from bertkit.checkpoints.sentence_transformers import TextPooling, read_pooling
from bertkit.errors import BertkitError, checked_texts
from bertkit.model.encoder import Encoder, check_vocabulary
from bertkit.model.outputs import (
    SUMMARIES,
    check_pooling,
    summary_vectors,
    token_weights,
    weighted_vectors,
)
from bertkit.tasks.sequences import (
    Progress,
    choose_mode,
    no_progress,
    plan_windows,
    prepare_network,
    run_model,
    surround,
)
from bertkit.tasks.task import ItemPart, TaskBatch
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import choose_device

CHUNK_TEXTS = 2048
"""The number of texts that are tokenised and run together."""


class EncodedText(NamedTuple):
    """The input sequences for one text."""

    parts: list[ItemPart]
    """The text's windows. The target of each is its weight in the text's vector: a number for cls
    and pooler, else (tokens, modes)."""

    @property
    def tokens(self) -> int:
        """The number of tokens in all windows, including special tokens."""
        return sum(part.tokens for part in self.parts)


class Embedder:
    """A model that computes text embeddings; it can no longer be trained.

    The encoder, in fp32, is changed and moved to the device; the mode is a result of `choose_mode`.
    `source` loads the model again, by which it pickles.
    """

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        settings: TextPooling,
        device: torch.device,
        mode: str,
        *,
        source: Callable[[], Embedder] | None = None,
    ) -> None:
        config = encoder.config
        check_vocabulary(config, tokenizer.size)
        positions = config.max_position_embeddings
        self.settings = replace(
            settings, max_length=min(settings.max_length or positions, positions)
        )
        if self.settings.max_length < 3:
            raise BertkitError(
                f"windows of {self.settings.max_length} tokens are too short; give at least 3"
            )
        self.pooled_width = config.hidden_size * len(settings.pooling.split("+"))
        self.width = self.finished(np.zeros((1, self.pooled_width), dtype=np.float32)).shape[1]
        """The number of dimensions of a vector."""
        self.encoder = encoder.to(device).eval()
        self.tokenizer, self.device, self.mode, self.source = tokenizer, device, mode, source
        prepare_network(device, self.encoder, mode)

    def __reduce__(self) -> Any:
        return self.source, ()

    @property
    def max_length(self) -> int:
        """The tokens per window, including special ones; longer texts take several windows."""
        return self.settings.max_length

    def encode(self, texts: str | Iterable[str], *, windows: bool = True) -> np.ndarray:
        """Return the vectors of texts, (texts, width) float32, in order; (width,) for one text.

        Args:
            texts: the texts, which may have any length or be empty; or one text.
            windows: whether long texts are read through windows; otherwise they are truncated, as
                in sentence-transformers.

        Raises:
            InputTypeError: the argument is neither a text nor an iterable of texts.
        """
        if isinstance(texts, str):
            return self.encode([texts], windows=windows)[0]
        encoded = (self.tokenize(part, windows=windows) for part in text_chunks(texts))
        return np.concatenate([np.zeros((0, self.width), np.float32), *map(self.vectors, encoded)])

    def tokenize(self, texts: Sequence[str], *, windows: bool = True) -> list[EncodedText]:
        """Tokenize texts, and split them into windows or truncate them; see `encode`."""
        ids = self.tokenizer.encode_batch([self.settings.prompt + text for text in texts])
        return [self.split_ids(np.array(row, dtype=np.int32), windows) for row in ids]

    def split_ids(self, ids: np.ndarray, windows: bool) -> EncodedText:
        """Return the windows of one text's ids, and their weights in the text's vector."""
        used_ids = ids if windows else ids[: self.max_length - 2]
        planned = plan_windows(np.ones_like(used_ids), self.max_length - 2)
        parts = []
        for first, end, owned in planned:
            window = surround(used_ids[first:end], None, self.tokenizer)
            share: Any = len(owned) / len(used_ids) if len(used_ids) else 1.0
            if self.settings.pooling not in SUMMARIES:
                positions = np.arange(first, first + len(window.ids), dtype=np.float32)
                positions[[0, -1]] = 0, len(used_ids) + 1
                share = self.weights(positions, 1 + owned - first, share, len(planned))
            parts.append(ItemPart((window,), share))
        return EncodedText(parts)

    def weights(
        self, positions: np.ndarray, owned: np.ndarray, share: float, windows: int
    ) -> np.ndarray:
        """Return the weights of a window's tokens, (tokens, modes), in the text's vector."""
        columns = []
        for mode in self.settings.pooling.split("+"):
            counted = np.zeros_like(positions)
            counted[owned] = 1.0
            # [CLS] and [SEP] have the window's share of the text where only they count
            counted[[0, -1]] = share if mode in ("cls", "lasttoken") else 1 / windows
            direction, tokens = self.encoder.config.direction, positions[-1] + 1
            columns.append(token_weights(mode, counted, positions, tokens, direction))
        return np.stack(columns, axis=1).astype(np.float32)

    def vectors(self, texts: Sequence[EncodedText], progress: Progress = no_progress) -> np.ndarray:
        """Return the vectors of tokenized texts, (texts, width) float32, in order.

        `progress` is called with the number of finished windows, and of all.
        """
        owners = [number for number, text in enumerate(texts) for _ in text.parts]
        parts = [part for text in texts for part in text.parts]
        pooling = self.settings.pooling
        over_tokens = pooling not in SUMMARIES
        rows = run_model(
            self.forward,
            parts,
            self.device,
            prepared=True,
            targets=packed_weights if over_tokens else None,
            progress=progress,
        )
        vectors = np.zeros((len(texts), self.pooled_width), dtype=np.float32)
        if rows:
            stacked = np.concatenate(rows)
            if not over_tokens:
                stacked *= np.array([part.target for part in parts], dtype=np.float32)[:, None]
            modes = pooling.split("+")
            columns = (np.split(array, len(modes), axis=1) for array in (vectors, stacked))
            for mode, total, values in zip(modes, *columns, strict=True):
                total.fill(-np.inf if mode == "max" else 0.0)
                (np.maximum if mode == "max" else np.add).at(total, owners, values)
        return self.finished(vectors)

    def finished(self, vectors: np.ndarray) -> np.ndarray:
        """Return pooled vectors after the modules that follow, divided by their length if asked."""
        if modules := self.settings.modules:
            with torch.inference_mode():
                vectors = nn.Sequential(*modules)(torch.from_numpy(vectors)).numpy()
        return normalize_rows(vectors) if self.settings.normalize else vectors

    def forward(self, batch: TaskBatch) -> Tensor:
        """Return the vector of each sequence of a batch, (sequences, width)."""
        pooling = self.settings.pooling
        if pooling not in SUMMARIES:
            weights = batch.tensors["weights"]
            return weighted_vectors(self.encoder, batch.packed, pooling, weights)
        return summary_vectors(self.encoder, batch.packed, pooling)


def packed_weights(
    parts: Sequence[ItemPart], packed_index: np.ndarray, starts: np.ndarray
) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the weight of each packed token in its text's vector, (tokens, modes)."""
    weights = np.concatenate([parts[i].target for i in np.argsort(packed_index)])
    return {"weights": torch.from_numpy(weights)}, {}


def load_embedder(
    path: Path | str,
    *,
    device: str = "auto",
    precision: str = "auto",
    pooling: str = "auto",
    normalize: bool | None = None,
) -> Embedder:
    """Load a model for computing text embeddings.

    Args:
        path: a model directory of bertkit, Hugging Face or sentence-transformers, a run
            directory, or a model of the hub.
        device: "auto", "cpu", "cuda", ...
        precision: "fp32", "bf16", "int8" (CPUs only), or "auto": bf16 if the device supports it
            natively, else fp32.
        pooling: one of `bertkit.model.outputs.POOLINGS`, or "auto": the pooling that the directory
            configures, or else the mean.
        normalize: whether to scale vectors to length 1; None uses the setting of a directory that
            configures its pooling, and normalises for other models.

    Raises:
        BertkitError: there is no model, it is damaged, has no pooler although the pooling needs
            one, or its directory names a module or a pooling that is not supported.
    """
    options: dict[str, Any] = {"pooling": pooling, "normalize": normalize}
    loaded, tokenizer, settings = read_embedder(path, **options)
    where = choose_device(device)
    mode = choose_mode(precision, where)
    source = partial(load_embedder, path, device=device, precision=precision, **options)
    return Embedder(loaded.model, tokenizer, settings, where, mode, source=source)


def read_embedder(
    path: Path | str, *, pooling: str = "auto", normalize: bool | None = None
) -> tuple[LoadResult[Encoder], Tokenizer, TextPooling]:
    """Read the encoder (fp32, on the CPU), tokenizer and settings; see `load_embedder`."""
    path = resolve_model(path)
    folder = model_folder(path) if not (path / "modules.json").is_file() else path
    folder, settings = read_pooling(folder, pooling)
    if normalize is not None:
        settings = replace(settings, normalize=normalize)
    loaded = load_model(folder, Encoder, trainable=False)
    check_pooling(settings.pooling)
    if settings.pooling == "pooler" and loaded.missing_keys:
        raise BertkitError(f"{folder} has no pooler (trained without one); choose --pooling mean")
    return loaded, Tokenizer.load(folder), settings


def text_chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of at most `CHUNK_TEXTS` texts, reading them lazily; see `checked_texts`."""
    remaining = checked_texts(texts)
    while chunk := list(islice(remaining, CHUNK_TEXTS)):
        yield chunk


def normalize_rows(vectors: np.ndarray) -> np.ndarray:
    """Divide each row by its L2 norm, in place, and return the array."""
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors
