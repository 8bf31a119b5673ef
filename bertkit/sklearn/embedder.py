"""A transformer of texts to vectors."""

from __future__ import annotations

from dataclasses import asdict, replace
from numbers import Integral
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_scalar
from sklearn.utils.validation import check_is_fitted

from bertkit.checkpoints.huggingface import load_model
from bertkit.checkpoints.save import save_model
from bertkit.model.encoder import Encoder
from bertkit.model.pooling import write_pooling
from bertkit.predict.embeddings import Embedder, read_embedder
from bertkit.predict.engine import choose_mode
from bertkit.sklearn.fitted import FittedModel, whole_fit
from bertkit.sklearn.inputs import read_texts
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import choose_device


class BertEmbedder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A transformer of texts to vectors, with a model that is not trained; see `load_embedder`.

    X is a list, an array or a Series of texts, or one column of a DataFrame.

    Args:
        model: a model directory of bertkit, Hugging Face or sentence-transformers, a run, or a name
            on the Hugging Face hub.
        pooling: one of `bertkit.model.pooling.POOLINGS`, or "auto": the pooling that the directory
            configures, or else the mean.
        normalize: whether to scale vectors to length 1; None uses the setting of a directory that
            configures its pooling, and normalises for other models.
        max_length: the maximum tokens of a window, None for the model's; longer texts are read
            through several windows.
        precision: "fp32", "bf16", "int8" (CPUs only), or "auto": bf16 if the device computes it
            fast, else fp32.
        device: "auto", "cpu", "cuda", ...

    Attributes:
        model_: the model, a `FittedModel`.
        n_features_in_: 1.
        feature_names_in_: the column name of X, if it was a DataFrame.
    """

    model_: FittedModel

    def __init__(
        self,
        model: str | Path,
        *,
        pooling: str = "auto",
        normalize: bool | None = None,
        max_length: int | None = None,
        precision: str = "auto",
        device: str = "auto",
    ) -> None:
        self.model = model
        self.pooling = pooling
        self.normalize = normalize
        self.max_length = max_length
        self.precision = precision
        self.device = device

    def __sklearn_tags__(self) -> Any:
        """Return the tags: X is an array of texts, and vectors are float32."""
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = tags.input_tags.string = True
        tags.input_tags.two_d_array = False
        tags.transformer_tags.preserves_dtype = []
        return tags

    @whole_fit
    def fit(self, X: Any, y: Any = None) -> Self:
        """Read the model; the texts are only checked.

        Args:
            X: the texts.
            y: ignored.

        Raises:
            ValueError: a text is missing.
            TypeError: a value is not a text.
            BertkitError: there is no such model, or the pooling or the length does not fit it.
        """
        self._texts(X, reset=True)
        found, tokenizer, settings = read_embedder(
            Path(self.model), pooling=self.pooling, normalize=self.normalize
        )
        if self.max_length is not None:
            check_scalar(self.max_length, "max_length", Integral, min_val=3)
            positions = found.model.config.max_position_embeddings
            settings = replace(settings, max_length=min(int(self.max_length), positions))

        def write(folder: Path) -> None:
            details: dict[str, Any] = {"pooling": settings.pooling}
            shared = settings.pooling in ("cls", "mean")  # sentence-transformers has no others
            if not shared:
                details["embedding"] = asdict(settings)
            save_model(folder, found.model, tokenizer, details)
            if shared:
                write_pooling(folder, settings, found.model.config)

        self.model_ = FittedModel(write)
        self._settings = settings
        self._n_features_out = found.model.config.hidden_size
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the vectors of the texts, (rows, width) float32."""
        check_is_fitted(self, "model_")
        texts = self._texts(X, reset=False)[:, 0].tolist()
        return self.model_.used_by(self._load, self.device, self.precision).encode(texts)

    def _texts(self, given: Any, *, reset: bool) -> np.ndarray:
        return read_texts(self, given, reset=reset, maximum=1)

    def _load(self, folder: Path, device: str, precision: str) -> Embedder:
        encoder, where = load_model(folder, Encoder, trainable=False).model, choose_device(device)
        mode = choose_mode(precision, where)
        return Embedder(encoder, Tokenizer.load(folder), self._settings, where, mode)
