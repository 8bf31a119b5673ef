"""The estimators that fine-tune a model: a classifier, a regressor and a tagger."""

from __future__ import annotations

import io
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_array, check_random_state, check_scalar
from sklearn.utils.validation import check_is_fitted, column_or_1d

from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.console import Console
from bertkit.datasets.examples import Example
from bertkit.datasets.fields import row_number
from bertkit.errors import BertkitError
from bertkit.finetuning.settings import BALANCED, ClassWeights, Grid, RunSettings, TrainingSettings
from bertkit.predict.load import load_predictor
from bertkit.predict.predictors import TaskPredictor
from bertkit.sklearn.fitted import FittedModel, tuned_model, whole_fit
from bertkit.sklearn.inputs import (
    UNLABELLED,
    InputValueError,
    examples_of_texts,
    names_of_classes,
    read_labels,
    read_texts,
    tagged_examples,
)
from bertkit.tasks.data import TaskData, set_apart
from bertkit.tasks.spec import SPECS, TaskSpec
from bertkit.tasks.task import TaskInputs
from bertkit.tasks.token_classification import tag_labels
from bertkit.text.lines import TextCounts

ClassWeight = Literal["balanced"] | dict[Any, float] | None


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
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 2,
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
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.random_state = random_state
        self.precision = precision
        self.device = device
        self.verbose = verbose

    def __sklearn_tags__(self) -> Any:
        """Return the tags: X is an array of texts, and y is required."""
        tags = super().__sklearn_tags__()
        tags.input_tags.one_d_array = tags.input_tags.string = True
        tags.input_tags.two_d_array = False
        tags.target_tags.required = True
        return tags

    def _run_settings(self, width: int, rows: int, task_type: str) -> RunSettings:
        """Return the settings of the fit; those that are None are chosen as in `finetune`."""
        given: dict[str, Any] = {}
        if self.learning_rate is not None:
            inside: dict[str, Any] = {"min_val": 0, "include_boundaries": "neither"}
            check_scalar(self.learning_rate, "learning_rate", Real, **inside)
            given["learning_rate"] = (float(self.learning_rate),)
        for name in ("epochs", "batch_size"):
            if (value := getattr(self, name)) is not None:
                check_scalar(value, name, Integral, min_val=1)
                given[name] = (int(value),)
        [run] = Grid(**given).chosen(width, rows, task_type).runs()
        seed, generator = self.random_state, check_random_state(self.random_state)
        if not isinstance(seed, Integral):
            seed = generator.randint(1 << 31)
        return replace(run, seed=int(seed))

    def _tune(
        self, task_type: str, examples: Sequence[Example], class_weights: ClassWeights = ()
    ) -> Self:
        """Fine-tune the model on labelled examples."""
        spec, patience = SPECS[task_type], 0
        inside: dict[str, Any] = {"min_val": 0, "max_val": 1, "include_boundaries": "neither"}
        check_scalar(self.validation_fraction, "validation_fraction", Real, **inside)
        for name in ("model", "precision", "device"):
            check_scalar(getattr(self, name), name, (str, Path))
        if self.early_stopping:
            check_scalar(self.n_iter_no_change, "n_iter_no_change", Integral, min_val=1)
            patience = int(self.n_iter_no_change)
        if self.max_length is not None:
            check_scalar(self.max_length, "max_length", Integral, min_val=1)
        training = TrainingSettings(
            precision=self.precision, early_stopping=patience, class_weights=class_weights
        )
        start = read_pretrained(Path(self.model))
        windows = spec.make_windows({"max_length": int(self.max_length or 0)})
        length = windows.length(start.config.max_position_embeddings)
        inputs = TaskInputs(examples, spec.columns(), windows, length, TextCounts())
        train, apart = self._sides(spec, examples) if self.early_stopping else (examples, ())
        dev = [("dev", apart)] if apart else []
        run = self._run_settings(start.config.hidden_size, len(train), task_type)
        data = TaskData(task_type, spec.task.from_data(inputs), train, dev)
        console = Console(stream=None if self.verbose else io.StringIO())
        self.model_ = tuned_model(start, data, run, training, device=self.device, console=console)
        return self

    def _sides(
        self, spec: TaskSpec, examples: Sequence[Example]
    ) -> tuple[Sequence[Example], Sequence[Example]]:
        """Return the examples to train on, and the share to validate on."""
        why = f"the {len(examples)} rows are too few for their labels"
        with suppress(BertkitError):
            sides = set_apart(spec, examples, float(self.validation_fraction), TextCounts())
            if spec.has_labels or len({given.gold for given in sides[1]}) > 1:
                return sides
            why = "those chosen have one number only, with which nothing correlates"
        raise InputValueError(
            f"early_stopping cannot set rows apart to validate on: {why}; give more rows, or turn "
            "early_stopping off"
        )

    def _predictor(self) -> TaskPredictor:
        def load(folder: Path, device: str, precision: str) -> TaskPredictor:
            return load_predictor([folder], device=device, precision=precision)

        return self.model_.used_by(load, self.device, self.precision)

    def _texts(self, given: Any, y: Any = UNLABELLED, *, reset: bool) -> np.ndarray:
        return read_texts(self, given, y, reset=reset, maximum=2)

    def _predictions(self, given: Any) -> list[Any]:
        check_is_fitted(self, "model_")
        return self._predictor().many(examples_of_texts(self._texts(given, reset=False)))


class WeightedEstimator(TunedEstimator):
    """A `TunedEstimator` with classes, whose losses may have weights."""

    def __init__(
        self,
        model: str | Path,
        *,
        epochs: int | None = None,
        batch_size: int | None = None,
        learning_rate: float | None = None,
        max_length: int | None = None,
        class_weight: ClassWeight = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 2,
        random_state: Any = 1,
        precision: str = "auto",
        device: str = "auto",
        verbose: int = 0,
    ) -> None:
        super().__init__(
            model, epochs=epochs, batch_size=batch_size, learning_rate=learning_rate,
            max_length=max_length, early_stopping=early_stopping,
            validation_fraction=validation_fraction, n_iter_no_change=n_iter_no_change,
            random_state=random_state, precision=precision, device=device, verbose=verbose,
        )  # fmt: skip
        self.class_weight = class_weight

    def _weights(
        self, given: ClassWeight, names: dict[Any, str], present: Set[str]
    ) -> ClassWeights:
        """Return class weights by name, without those of classes that a fold lacks."""
        if given is None:
            return ()
        if isinstance(given, dict):
            weights = {names.get(label, str(label)): weight for label, weight in given.items()}
            known = {*names.values()}
            if present <= weights.keys():  # as in scikit-learn
                known |= weights.keys()
            return {n: one for n, one in weights.items() if n in present or n not in known}
        if given != BALANCED:
            raise InputValueError(
                f"The 'class_weight' parameter must be a dict, 'balanced' or None, not {given!r}"
            )
        return BALANCED


class BertClassifier(ClassifierMixin, WeightedEstimator):
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
            where labels that are not named have 1. With an indicator matrix, a label is the name or
            the number of its column.
        early_stopping: whether to set a share of the rows apart, to evaluate on it after every
            epoch, and to keep the best model. Otherwise all rows are trained on for all epochs.
        validation_fraction: the share of the rows that early stopping sets apart.
        n_iter_no_change: the number of evaluations without a better score after which a fit stops.
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
        """Return the tags: y may be an indicator matrix."""
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    @whole_fit
    def fit(self, X: Any, y: Any) -> Self:
        """Fine-tune the model.

        Args:
            X: the texts, or the pairs of texts.
            y: a label for each row, or a binary indicator matrix (rows, labels).

        Raises:
            ValueError: a text or a label is missing, the lengths differ, there is one class only,
                or a parameter is out of range.
            TypeError: a value of X is not a text.
            BertkitError: there is no such model, or the loss became NaN or infinite.
        """
        table = self._texts(X, y, reset=True)
        classes, names, labels = read_labels(y, type(self).__name__)
        many = isinstance(classes, list)
        if many:  # a weight may name a column, or give its number
            keys = {number: one for number, one in enumerate(names) if str(number) not in names}
        else:
            keys = dict(zip(classes.tolist(), names, strict=True))
        present = {one for row in labels for one in (row if many else (row,))}
        weights = self._weights(self.class_weight, keys, present)
        task_type = "multi-label-classification" if many else "classification"
        self._tune(task_type, examples_of_texts(table, labels), weights)
        self.classes_, self._names = classes, names
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of every class or label, (rows, classes)."""
        found = self._predictions(X)
        # a column of an indicator matrix that was always 0 has no output
        return np.array(
            [[one.probabilities.get(name, 0.0) for name in self._names] for one in found]
        )

    def decision_function(self, X: Any) -> np.ndarray:
        """Return scores, of which the highest is that of the predicted label.

        They are (rows, classes) log probabilities; for two classes (rows,) the log odds of the
        second; for an indicator matrix (rows, labels) the log odds of every label.
        """
        chances = self.predict_proba(X)
        if isinstance(self.classes_, list):
            edge = np.finfo(float).eps
            chances = chances.clip(edge, 1 - edge)
            return np.log(chances) - np.log1p(-chances)
        logs = np.log(chances.clip(np.finfo(float).tiny))
        return logs[:, 1] - logs[:, 0] if len(self.classes_) == 2 else logs

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of every row, or an indicator matrix (rows, labels).

        The labels have the dtype of y. In the matrix, labels with a probability above 0.5 are 1.
        """
        chances = self.predict_proba(X)
        if isinstance(self.classes_, list):
            return (chances > 0.5).astype(np.int64)
        return self.classes_[chances.argmax(axis=1)]


class BertRegressor(RegressorMixin, TunedEstimator):
    """A regressor of texts or pairs of texts, trained with the mean squared error.

    The values of y may have any size, but their standard deviation must be at least 1e-5 of their
    mean. X, the other parameters and the attributes are those of `BertClassifier`.
    """

    @whole_fit
    def fit(self, X: Any, y: Any) -> Self:
        """Fine-tune the model.

        Args:
            X: the texts, or the pairs of texts.
            y: a number for each row.

        Raises:
            ValueError: a text or a number is missing, the lengths differ, all numbers are the same,
                or a parameter is out of range.
            TypeError: a value of X is not a text.
            BertkitError: there is no such model, a number is too large, or the loss became NaN or
                infinite.
        """
        table = self._texts(X, y, reset=True)
        numbers = check_array(
            column_or_1d(y, warn=True), dtype=float, ensure_2d=False, input_name="y", estimator=self
        )
        if len(set(numbers.tolist())) < 2:
            raise InputValueError(
                f"{type(self).__name__} needs at least two different numbers in y; it has "
                f"n_samples={len(numbers)}, all {numbers[0]:g}"
            )
        for place, number in enumerate(numbers.tolist()):
            row_number(number, "y", f"row {place}")
        return self._tune("regression", examples_of_texts(table, numbers.tolist()))

    def predict(self, X: Any) -> np.ndarray:
        """Return (rows,) the predicted numbers."""
        found = self._predictions(X)
        return np.array([one.value for one in found])


class BertTagger(WeightedEstimator):
    """A tagger of words (paper section 5.3), for entities, parts of speech and the like.

    X is a list of lists of words, y a list of lists of tags. Entity tags (B-PER, I-PER, O, in any
    of the usual schemes) are trained and predicted as IOB2. The parameters are those of
    `BertClassifier`.

    Attributes:
        classes_: the sorted tags that may be predicted.
        model_: the fine-tuned model; see `BertClassifier`.
    """

    @whole_fit
    def fit(self, X: Any, y: Any) -> Self:
        """Fine-tune the model.

        Args:
            X: a list of words for each row.
            y: a list of tags for each row.

        Raises:
            ValueError: a word has no tag, the lengths differ, all tags are the same, or a parameter
                is out of range.
            TypeError: X or y is not a list of lists of strings.
            BertkitError: there is no such model, tags such as B-PER are mixed with others, or the
                loss became NaN or infinite.
        """
        examples = tagged_examples(X, y)
        tags = {tag for one in examples for tag in one.tags or ()}
        if len(tags) < 2:
            raise InputValueError(
                f"{type(self).__name__} needs at least 2 different tags in y, but y contains only "
                f"{', '.join(tags) or 'rows without a word'}"
            )
        names_of_classes(sorted(tags))  # names that the model can hold
        weights = self._weights(self.class_weight, {}, {*tag_labels(examples)[0]})
        self._tune("token-classification", examples, weights)
        self.classes_ = np.array(sorted(self._predictor().task.labels))
        return self

    def predict(self, X: Any) -> np.ndarray:
        """Return (rows,) an object array with a list of tags for each row."""
        check_is_fitted(self, "model_")
        found = self._predictor().many(tagged_examples(X))
        rows = np.empty(len(found), dtype=object)
        for number, one in enumerate(found):
            rows[number] = list(one.tags)
        return rows

    def score(self, X: Any, y: Any) -> float:
        """Return the F1 of entities as the conlleval script defines it; the accuracy of other tags.

        Args:
            X: a list of words for each row.
            y: a list of tags for each row.
        """
        check_is_fitted(self, "model_")
        predictor = self._predictor()
        found = predictor.many(tagged_examples(X))  # without tags, which the model may not know
        task = predictor.task
        return float(task.score(tagged_examples(X, y), found)[task.metric])
