"""Text embeddings: `load_embedder(folder).encode(texts)`.

The paper's model gives no such vectors by itself; models fine-tuned by sentence-transformers do
(Reimers and Gurevych 2019), and their directories can be used as they are: pooling, normalisation
and maximum length are read from them. For texts up to this length the vectors equal that library's,
which truncates longer ones. bertkit reads these through overlapping windows, unless truncation is
requested, and the vector of a text is

- for mean pooling, the mean over all of its tokens, each taken from the window where it has the
  most context, and [CLS] and [SEP] averaged over the windows, as by `bertkit features --pooling
  mean`;
- for cls and pooler, the mean of the windows' vectors, weighted by the number of tokens that each
  window contributes.

Vectors are normalised after that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from bertkit.checkpoints.huggingface import LoadResult, load_model
from bertkit.checkpoints.pretrained import model_folder, resolve_model
from bertkit.errors import BertkitError, checked_texts
from bertkit.model.encoder import Encoder, check_vocabulary
from bertkit.model.pooling import (
    OVER_TOKENS,
    TextPooling,
    check_pooling,
    read_pooling,
    summary_vectors,
    weighted_vectors,
)
from bertkit.predict.engine import batch_map, choose_mode, prepare_for
from bertkit.tasks.task import (
    HostCopy,
    ItemPart,
    check_outputs,
    make_batch,
    one_ahead,
    prediction_tokens,
    split_parts,
)
from bertkit.tasks.windows import context_windows, surround
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import choose_device
from bertkit.training.memory import in_halves

CHUNK_TEXTS = 2048
"""The number of texts that are tokenised and run together."""


class EncodedText(NamedTuple):
    """The input sequences for one text."""

    parts: list[ItemPart]
    """The text's windows. The target of each is its weight in the text's vector: (tokens,) for
    means, else a number. The weights of a text add up to 1."""
    cut: int
    """The number of tokens that were truncated."""

    @property
    def tokens(self) -> int:
        """The number of tokens in all windows, including special tokens."""
        return sum(part.tokens for part in self.parts)


class Embedder:
    """A model that computes text embeddings; it can no longer be trained.

    The encoder, in fp32, is changed and moved to the device; the mode is a result of `choose_mode`.

    Raises:
        BertkitError: the pooling or the length does not fit the model.
    """

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        settings: TextPooling,
        device: torch.device,
        mode: str,
    ) -> None:
        config = encoder.config
        check_vocabulary(config, tokenizer.size)
        check_pooling(settings.pooling, config)
        positions = config.max_position_embeddings
        self.settings = replace(
            settings, max_length=min(settings.max_length or positions, positions)
        )
        if self.settings.max_length < 3:
            raise BertkitError(
                f"windows of {self.settings.max_length} tokens are too short; give at least 3"
            )
        self.encoder = encoder.to(device).eval()
        self.tokenizer, self.device, self.mode = tokenizer, device, mode
        self.threads = prepare_for(device, self.encoder, mode)

    @property
    def width(self) -> int:
        """The number of dimensions of a vector."""
        return self.encoder.config.hidden_size

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
        special = self.tokenizer.compat == "hf"
        ids = self.tokenizer.encode_batch(self.settings.whole_texts(texts, special=special))
        return [self.split_ids(np.array(one, dtype=np.int32), windows) for one in ids]

    def split_ids(self, ids: np.ndarray, windows: bool) -> EncodedText:
        """Return the windows of one text's ids, and their weights in the text's vector."""
        room, over_tokens = self.max_length - 2, self.settings.pooling in OVER_TOKENS
        kept = ids if windows else ids[:room]
        found = context_windows(np.ones_like(kept), room)
        parts = []
        for first, end, answered in found:
            window = surround(kept[first:end], None, self.tokenizer)
            share: np.ndarray | float = len(answered) / len(kept) if len(kept) else 1.0
            if over_tokens:
                share = np.zeros(len(window.ids), dtype=np.float32)
                share[1 + answered - first] = 1.0
                share[[0, -1]] = 1 / len(found)
                share /= len(kept) + 2
            parts.append(ItemPart((window,), share))
        return EncodedText(parts, len(ids) - len(kept))

    def vectors(
        self, texts: Sequence[EncodedText], progress: Callable[[int], None] = lambda done: None
    ) -> np.ndarray:
        """Return the vectors of tokenized texts, (texts, width) float32, in order.

        `progress` is called with the number of finished windows.
        """
        owners = [number for number, text in enumerate(texts) for _ in text.parts]
        parts = [part for text in texts for part in text.parts]
        order = sorted(range(len(parts)), key=lambda i: -parts[i].tokens)
        vectors = np.zeros((len(texts), self.width), dtype=np.float32)
        done = 0
        with batch_map(sum(part.tokens for part in parts), self.threads) as (each, tokens):
            groups = split_parts(
                [parts[i] for i in order], tokens or prediction_tokens(self.device)
            )
            launched = chain.from_iterable(each(partial(in_halves, self._launch), groups))
            for copy, places, weights in one_ahead(launched, self.device):
                rows = copy.numpy()[places] * weights
                np.add.at(vectors, [owners[i] for i in order[done : done + len(rows)]], rows)
                done += len(rows)
                progress(done)
        check_outputs(vectors)
        if self.settings.normalize:
            normalize_rows(vectors)
        return vectors

    @torch.inference_mode()
    def _launch(self, parts: list[ItemPart]) -> tuple[HostCopy, np.ndarray, np.ndarray | float]:
        """Compute the vectors of windows.

        Returns:
            The (windows, width) vectors in the order of the batch, (windows,) the place of each
            window among them, and the weights with which the vectors have yet to be multiplied.
        """
        batch = make_batch(parts).to(self.device)
        pooling = self.settings.pooling
        if pooling in OVER_TOKENS:
            shares = [parts[i].target for i in np.argsort(batch.place)]
            weights = torch.from_numpy(np.concatenate(shares)).to(self.device)
            rows = weighted_vectors(self.encoder, batch.packed, pooling, weights)
            return HostCopy(rows), batch.place, 1.0
        rows = summary_vectors(self.encoder, batch.packed, pooling).float()
        whole = np.array([part.target for part in parts], dtype=np.float32)
        return HostCopy(rows), batch.place, whole[:, None]


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
        pooling: one of `bertkit.model.pooling.POOLINGS`, or "auto": the pooling that the directory
            configures, or else the mean.
        normalize: whether to scale vectors to length 1; None uses the setting of a directory that
            configures its pooling, and normalises for other models.

    Raises:
        BertkitError: there is no model, it is damaged, has no pooler although the pooling needs
            one, or its directory names a module or a pooling that is not supported.
    """
    loaded, tokenizer, settings = read_embedder(Path(path), pooling=pooling, normalize=normalize)
    encoder = loaded.model
    where = choose_device(device)
    return Embedder(encoder, tokenizer, settings, where, choose_mode(precision, where))


def read_embedder(
    path: Path, *, pooling: str = "auto", normalize: bool | None = None
) -> tuple[LoadResult[Encoder], Tokenizer, TextPooling]:
    """Read the encoder (fp32, on the CPU), tokenizer and settings; see `load_embedder`."""
    path = resolve_model(path)
    folder = model_folder(path) if not (path / "modules.json").is_file() else path
    folder, settings = read_pooling(folder, pooling)
    if normalize is not None:
        settings = replace(settings, normalize=normalize)
    loaded = load_model(folder, Encoder, trainable=False)
    check_pooling(settings.pooling, loaded.model.config)
    if settings.pooling == "pooler" and loaded.missing_keys:
        raise BertkitError(f"{folder} has no pooler (trained without one); choose --pooling mean")
    tokenizer = Tokenizer.load(folder)
    if tokenizer.lowercase:
        settings = replace(settings, lowercase=False)
    return loaded, tokenizer, settings


def nearest_texts(
    embedder: Embedder, query: str, texts: Iterable[str], top: int = 5
) -> list[tuple[float, int, str]]:
    """Return the texts most similar to a query: (cosine, index, text), most similar first.

    Cosines that differ by rounding count as equal; texts with equal cosines keep their order.
    Every text is compared with the query; memory depends on `top`, not on the number of texts.

    Raises:
        BertkitError: `top` is not above 0.
    """
    if top < 1:
        raise BertkitError(f"top must be above 0, got {top}")
    wanted = normalize_rows(embedder.encode([query]))[0]
    best: list[tuple[float, int, str]] = []
    seen = 0
    for chunk in text_chunks(texts):
        cosines = normalize_rows(embedder.encode(chunk)) @ wanted
        found = zip(cosines.tolist(), range(seen, seen + len(chunk)), chunk, strict=True)
        best = sorted([*best, *found], key=lambda one: (-round(one[0], 6), one[1]))[:top]
        seen += len(chunk)
    return best


def text_chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield lists of at most `CHUNK_TEXTS` texts, reading them lazily; see `checked_texts`."""
    remaining = checked_texts(texts)
    while chunk := list(islice(remaining, CHUNK_TEXTS)):
        yield chunk


def normalize_rows(vectors: np.ndarray) -> np.ndarray:
    """Divide each row by its L2 norm, in place, and return the array."""
    vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return vectors
