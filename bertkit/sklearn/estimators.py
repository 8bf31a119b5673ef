"""The estimators; see `bertkit.sklearn`."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import numpy as np
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    ClassNamePrefixFeaturesOutMixin,
    RegressorMixin,
    TransformerMixin,
)
from sklearn.utils import check_array, check_random_state
from sklearn.utils.validation import check_is_fitted, column_or_1d

from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.files import from_home, new_folder
from bertkit.finetuning.runs import Grid, RunSettings, TrainingSettings
from bertkit.finetuning.train import TaskTraining, label_order, tuned_details
from bertkit.predict.embeddings import load_embedder
from bertkit.predict.load import TaskPredictor, load_predictor
from bertkit.progress import Console
from bertkit.sklearn.inputs import (
    UNLABELLED,
    InputValueError,
    examples_of_texts,
    read_labels,
    read_texts,
)
from bertkit.tasks.task import TrainingData, encode
from bertkit.tasks.types import TASKS, TaskData, make_options
from bertkit.text.documents import TextCounts
from bertkit.training.device import choose_device, choose_precision


class FittedModel:
    """The model of a fitted estimator: a model directory in memory, `files` by name."""

    def __init__(self, write: Callable[[Path], object]) -> None:
        with TemporaryDirectory(prefix="bertkit-") as folder:
            home = Path(folder) / "model"
            write(home)
            paths = [path for path in sorted(home.rglob("*")) if path.is_file()]
            self.files = {path.relative_to(home).as_posix(): path.read_bytes() for path in paths}
        self._used: tuple[Any, TaskPredictor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for a pickle or a copy, without the network that is in use."""
        return {"files": self.files, "_used": None}

    def save(self, folder: Path | str) -> None:
        """Write the model directory, for `bertkit.load`, the commands and transformers."""
        with new_folder(Path(from_home(folder))) as target:
            self._write(target)

    def predictor(self, **options: Any) -> TaskPredictor:
        """Return the predictor of the model, which is kept until the options change."""
        if self._used is None or self._used[0] != options:
            with TemporaryDirectory(prefix="bertkit-") as folder:
                self._write(Path(folder))
                self._used = options, load_predictor(folder, **options)
        return self._used[1]

    def _write(self, folder: Path) -> None:
        for name, content in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)


def text_tags(tags: Any) -> Any:
    """Return scikit-learn's tags of an estimator whose X is an array of texts."""
    tags.input_tags.one_d_array = tags.input_tags.string = True
    tags.input_tags.two_d_array = False
    return tags


class TunedEstimator(BaseEstimator):
    """What the estimators that fine-tune a model have in common; see `BertClassifier`."""

    model_: FittedModel

    def __init__(
        self,
        model: str | Path,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        max_length: int | None = None,
        class_weight: Any = None,
        random_state: Any = 1,
        precision: str = "auto",
        device: str = "auto",
        verbose: int = 0,
    ) -> None:
        self.model = model
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.max_length = max_length
        self.class_weight = class_weight
        self.random_state = random_state
        self.precision = precision
        self.device = device
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        tags = text_tags(super().__sklearn_tags__())
        tags.target_tags.required = True
        return tags

    def _run_settings(self, width: int, rows: int, task_type: str) -> RunSettings:
        """Return the settings of the fit; those that are None are chosen as in `finetune`."""
        names = ("epochs", "batch_size", "learning_rate")
        values: dict[str, Any] = {
            name: (getattr(self, name),) for name in names if getattr(self, name) is not None
        }
        [run] = Grid(**values).chosen(width, rows, task_type).runs()
        seed, generator = self.random_state, check_random_state(self.random_state)
        fixed = isinstance(seed, int | np.integer)
        return replace(run, seed=int(seed) if fixed else generator.randint(1 << 31))

    def _tune(self, task_type: str, examples: Sequence[Any], class_weights: Any = ()) -> Self:
        """Fine-tune the model on labelled examples."""
        kind, start = TASKS[task_type], read_pretrained(Path(self.model))
        training = TrainingSettings(precision=self.precision, class_weights=class_weights)
        windows = make_options(kind, kind.windows, {"max_length": int(self.max_length or 0)})
        length = windows.length(start.config.max_position_embeddings)
        inputs = TrainingData(examples, kind.columns(), windows, length, TextCounts())
        data = TaskData(task_type, kind.from_data(inputs), examples, [])
        task, keep_head = label_order(data, start)
        items = encode(task, examples, start.tokenizer, start.config)
        run = self._run_settings(start.config.hidden_size, len(examples), task_type)
        where = choose_device(self.device)
        console = Console(stream=None if self.verbose else io.StringIO())
        with TaskTraining(
            start,
            task,
            items,
            run,
            training,
            device=where,
            precision=choose_precision(self.precision, where),
            keep_head=keep_head,
        ) as loop:
            console.start(loop.total, title="fit")
            for update in loop.updates():
                console.update({"step": update.step})
            console.close()
            network = loop.finish()
        details = tuned_details(data, task)
        self.model_ = FittedModel(lambda out: save_model(out, network, start.tokenizer, details))
        return self

    def _texts(self, table: Any, y: Any = UNLABELLED, *, reset: bool) -> np.ndarray:
        return read_texts(self, table, y, reset=reset, maximum=2)

    def _results(self, X: Any, **options: Any) -> list[Any]:
        check_is_fitted(self, "model_")
        examples = examples_of_texts(self._texts(X, reset=False))
        options |= {"device": self.device, "precision": self.precision}
        return self.model_.predictor(**options).predict(examples)

    def _weights(self, names: dict[Any, str], present: set[str]) -> Any:
        """Return class weights by name, without those of classes that a fold lacks."""
        weights = self.class_weight
        if weights is None or weights == "balanced":
            return weights or ()
        if not isinstance(weights, dict):
            raise InputValueError(f"class_weight must be a dict, 'balanced' or None: {weights!r}")
        named = {names.get(label, str(label)): weight for label, weight in weights.items()}
        known = {*names.values()}
        return {n: weight for n, weight in named.items() if n in present or n not in known}


class BertClassifier(ClassifierMixin, TunedEstimator):
    """A classifier of texts or pairs of texts (paper section 4.1).

    X is a list, an array or a Series of texts, or a two-dimensional array or DataFrame whose two
    columns are the texts of pairs. Texts may be blank and of any length. y has a label for each
    row, or is a binary indicator matrix, by which a row may have any number of labels.

    Args:
        model: the model to fine-tune: a model directory, a run, or a name on the Hugging Face hub.
        epochs: passes over the training data; None to choose by the number of rows, as `finetune`.
        batch_size: rows per update; None to choose by the number of rows.
        learning_rate: the peak learning rate; None to choose by the model's width.
        max_length: the maximum tokens of a window, None for the model's maximum; longer texts are
            read through several windows.
        class_weight: factors of the classes' losses: None for 1, "balanced", or label -> factor,
            where labels that are not named have 1.
        random_state: the seed of the new head, the order and the dropout; an int gives the same
            model again, None another one each time.
        precision: "fp32", "bf16", or "auto": bf16 if the device computes it fast, else fp32.
        device: "auto" (CUDA, else Apple's mps, else the CPU), "cpu", "cuda", ...
        verbose: whether to show progress on standard error.

    Attributes:
        classes_: the sorted labels; for an indicator matrix a list with [0, 1] for each column.
        model_: the fine-tuned model, a `FittedModel`; `model_.save(FOLDER)` writes it as a model
            directory.
        n_features_in_: 2 if the texts are pairs, else 1.
        feature_names_in_: the column names of X, if it was a DataFrame.
    """

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    def fit(self, X: Any, y: Any) -> Self:
        """Fine-tune the model on texts or pairs, and a label or a row of 0 and 1 for each.

        It raises a ValueError if a text or a label is missing, the lengths differ, there is one
        class only, or a parameter is out of range; a TypeError if a value of X is not a text; and a
        BertkitError if there is no such model, or the loss became NaN or infinite.
        """
        table = self._texts(X, y, reset=True)
        classes, names, labels = read_labels(y, type(self).__name__)
        several = isinstance(classes, list)
        keys = dict(enumerate(names) if several else zip(classes.tolist(), names, strict=True))
        present = {name for row in labels for name in (row if several else (row,))}
        task_type = "multi-label-classification" if several else "classification"
        self._tune(task_type, examples_of_texts(table, labels), self._weights(keys, present))
        self.classes_, self._names = classes, names
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class or label, (rows, classes)."""
        check_is_fitted(self, "model_")
        results = self._results(X, top=len(self._names))
        # a column of an indicator matrix that was always 0 has no output
        return np.array(
            [[result.probabilities.get(name, 0.0) for name in self._names] for result in results]
        )

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each row, or an indicator matrix (rows, labels)."""
        chances = self.predict_proba(X)
        if isinstance(self.classes_, list):
            return (chances > 0.5).astype(np.int64)
        return self.classes_[chances.argmax(axis=1)]


class BertRegressor(RegressorMixin, TunedEstimator):
    """A regressor of texts or pairs of texts, trained with the mean squared error.

    The values of y may have any size, but their standard deviation must be at least 1e-5 of their
    mean. X, the other parameters and the attributes are those of `BertClassifier`.
    """

    def fit(self, X: Any, y: Any) -> Self:
        """Fine-tune the model on a number for each row; see `BertClassifier.fit`."""
        table = self._texts(X, y, reset=True)
        numbers = check_array(
            column_or_1d(y, warn=True), dtype=float, ensure_2d=False, input_name="y", estimator=self
        )
        if len(set(numbers.tolist())) < 2:
            raise InputValueError(
                f"{type(self).__name__} needs two different numbers in y: n_samples={len(numbers)}"
            )
        return self._tune("regression", examples_of_texts(table, numbers.tolist()))

    def predict(self, X: Any) -> np.ndarray:
        """Return (rows,) the predicted numbers."""
        return np.array([result.value for result in self._results(X)])


class BertEmbedder(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """A transformer of texts to vectors, with a model that is not trained; see `load_embedder`.

    X is a list, an array or a Series of texts, or one column of a DataFrame.

    Args:
        model: a model directory of bertkit, Hugging Face or sentence-transformers, a run, or a name
            on the Hugging Face hub.
        pooling: such as "cls", "mean" or "pooler", or "auto": the pooling that the
            directory configures, or else the mean.
        normalize: whether to scale vectors to length 1; None uses the setting of a directory that
            configures its pooling, and normalises for other models.
        precision: "fp32", "bf16", "int8" (CPUs only), or "auto".
        device: "auto", "cpu", "cuda", ...

    Attributes:
        embedder_: the model, an `Embedder`, which pickles by its directory.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        pooling: str = "auto",
        normalize: bool | None = None,
        precision: str = "auto",
        device: str = "auto",
    ) -> None:
        self.model = model
        self.pooling = pooling
        self.normalize = normalize
        self.precision = precision
        self.device = device

    def __sklearn_tags__(self) -> Any:
        tags = text_tags(super().__sklearn_tags__())
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _texts(self, table: Any, *, reset: bool) -> np.ndarray:
        return read_texts(self, table, reset=reset, maximum=1)

    def fit(self, X: Any, y: Any = None) -> Self:
        """Load the model; the texts are only checked, and y is ignored."""
        self._texts(X, reset=True)
        self.embedder_ = load_embedder(
            self.model,
            device=self.device,
            precision=self.precision,
            pooling=self.pooling,
            normalize=self.normalize,
        )
        self._n_features_out = self.embedder_.width
        return self

    def transform(self, X: Any) -> np.ndarray:
        """Return the vectors of the texts, (rows, width) float32."""
        check_is_fitted(self, "embedder_")
        texts = self._texts(X, reset=False)[:, 0].tolist()
        return self.embedder_.encode(texts)
