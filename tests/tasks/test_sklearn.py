"""The estimators of scikit-learn: the models of `finetune`, in pipelines, searches and pickles."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pandas
import pytest
import torch
from scipy.sparse import csr_matrix
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.exceptions import DataConversionWarning, NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, StandardScaler
from sklearn.utils import get_tags

import bertkit
from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.finetuning.settings import FinetuneSettings, Grid, TrainingSettings
from bertkit.model.encoder import ModelConfig
from bertkit.model.task_heads import ClassificationModel
from bertkit.sklearn import BertClassifier, BertEmbedder, BertRegressor, BertTagger
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import WORDS

QUICK: dict[str, Any] = {"epochs": 2, "batch_size": 4, "learning_rate": 1e-3, "precision": "fp32"}
LEARNING: dict[str, Any] = QUICK | {"epochs": 8, "learning_rate": 1e-2}
TEXTS = [f"{WORDS[i % 12]} {WORDS[12 + i % 5]}" for i in range(24)]
LABELS = ["dry", "damp", "wet"] * 8
SENTENCES = [[*text.split(), "."] for text in TEXTS]
TAGS = [["O", "B-X", "I-X"], ["B-Y", "O", "O"]] * 12
NEW = ["stone river", "", "mirror", "a longer text of lantern and bridge " * 9, " \n"]


@pytest.fixture(scope="module")
def fitted(pretrained: Path) -> BertClassifier:
    return BertClassifier(pretrained, **QUICK).fit(TEXTS, LABELS)


# The same as finetune -----------------------------------------------------------------------------

ROWS: dict[str, tuple[type, Any, list[dict[str, Any]]]] = {
    "classification": (
        BertClassifier,
        (TEXTS, LABELS),
        [{"text": text, "label": label} for text, label in zip(TEXTS, LABELS, strict=True)],
    ),
    "regression": (
        BertRegressor,
        (TEXTS, np.arange(24) / 10),
        [{"text": text, "label": i / 10} for i, text in enumerate(TEXTS)],
    ),
    "multi-label-classification": (
        BertClassifier,
        (TEXTS, np.array([[1, i % 2] for i in range(24)])),
        [{"text": text, "label": ["0", "1"][: 1 + i % 2]} for i, text in enumerate(TEXTS)],
    ),
    "token-classification": (
        BertTagger,
        (SENTENCES, TAGS),
        [{"tokens": words, "ner_tags": tags} for words, tags in zip(SENTENCES, TAGS, strict=True)],
    ),
}


@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("task_type", ROWS)
def test_a_fit_is_a_fine_tuning(
    task_type: str, early_stopping: bool, pretrained: Path, tmp_path: Path
) -> None:
    kind, (given, wanted), rows = ROWS[task_type]
    estimator = kind(
        pretrained, **QUICK, max_length=20, early_stopping=early_stopping, n_iter_no_change=1
    ).fit(given, wanted)
    bertkit.finetune(
        task_type,
        pretrained,
        tmp_path / "run",
        train=rows,
        dev=None if early_stopping else rows,
        windows=bertkit.WordWindows(max_length=20)
        if kind is BertTagger
        else bertkit.WindowLengths(max_length=20),
        settings=FinetuneSettings(
            grid=Grid(batch_size=(4,), learning_rate=(1e-3,), epochs=(2,)),
            training=TrainingSettings(precision="fp32", early_stopping=int(early_stopping)),
            track=(),
        ),
    )
    predictor = bertkit.load(tmp_path / "run", precision="fp32")
    if kind is BertTagger:
        expected = [found.tags for found in predictor.many(tagged(predictor))]
        assert [tuple(tags) for tags in estimator.predict(SENTENCES)] == expected
    elif kind is BertRegressor:
        assert estimator.predict(NEW).tolist() == [found.value for found in predictor(NEW)]
    else:
        chances = [list(found.probabilities.values()) for found in predictor(NEW)]
        order = np.argsort(predictor.task.labels)
        assert (estimator.predict_proba(NEW) == np.array(chances)[:, order]).all()


def tagged(predictor: Any) -> list[Any]:
    return [predictor.example(words, "", "0") for words in SENTENCES]


def test_the_fitted_model_is_a_model_directory(
    fitted: BertClassifier, pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    fitted.model_.save("~/model")
    found = bertkit.load(tmp_path / "model", precision="fp32")(NEW)
    assert [one.label for one in found] == fitted.predict(NEW).tolist()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("")
    with pytest.raises(BertkitError, match="choose another"):
        fitted.model_.save(tmp_path / "other")
    further = BertClassifier(tmp_path / "model", **QUICK).fit(TEXTS, LABELS)  # keeps the head
    assert (further.predict(TEXTS) == LABELS).mean() >= (fitted.predict(TEXTS) == LABELS).mean()


# Inputs -------------------------------------------------------------------------------------------


def test_no_row_is_dropped(fitted: BertClassifier) -> None:
    chances = fitted.predict_proba(NEW)
    assert chances.shape == (5, 3)
    assert np.allclose(chances.sum(axis=1), 1)
    np.testing.assert_allclose(chances[1], chances[4], rtol=1e-6)
    model = BertClassifier(fitted.model, **QUICK).fit(["", " ", *TEXTS], ["wet", "dry", *LABELS])
    assert model.predict([""]).shape == (1,)


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (LABELS, ["damp", "dry", "wet"]),
        ([i % 12 for i in range(24)], list(range(12))),  # 10 is after 9, not after 1
        ([i % 2 == 0 for i in range(24)], [False, True]),
        ([float(i % 3) for i in range(24)], [0.0, 1.0, 2.0]),
    ],
    ids=["str", "int", "bool", "float"],
)
def test_labels_keep_their_type(labels: list[Any], classes: list[Any], pretrained: Path) -> None:
    wanted = np.array(labels)
    model = BertClassifier(pretrained, **{**LEARNING, "epochs": 16}).fit(TEXTS, wanted)
    assert model.classes_.tolist() == classes
    found = model.predict(TEXTS)
    assert found.dtype == wanted.dtype
    assert (found == model.classes_[model.predict_proba(TEXTS).argmax(axis=1)]).all()
    assert model.score(TEXTS, wanted) > 0.9
    names = json.loads(model.model_.files["bertkit.json"])["labels"]
    assert names == sorted({str(label).removesuffix(".0") for label in labels})
    decision = model.decision_function(TEXTS)
    if len(classes) == 2:
        assert ((decision > 0) == found).all()
    else:
        assert (model.classes_[decision.argmax(axis=1)] == found).all()


def test_nullable_integers_of_pandas_stay_integers(pretrained: Path) -> None:
    labels = pandas.Series([i % 2 for i in range(24)], dtype="Int64")
    model = BertClassifier(pretrained, **QUICK).fit(TEXTS, labels)
    assert model.classes_.tolist() == [0, 1]
    assert model.predict(TEXTS).dtype == np.int64


def test_containers_of_texts(fitted: BertClassifier) -> None:
    pandas = pytest.importorskip("pandas")
    expected = fitted.predict_proba(NEW)
    frame = pandas.DataFrame({"text": NEW})
    given: list[Any] = [np.array(NEW), np.array(NEW, dtype=object), frame["text"], tuple(NEW)]
    given += [pandas.Series(NEW, dtype=object), frame.to_numpy(), [[text] for text in NEW]]
    for one in given:
        assert (fitted.predict_proba(one) == expected).all()
    with pytest.warns(UserWarning, match="was fitted without feature names"):
        assert (fitted.predict_proba(frame) == expected).all()
    framed = BertClassifier(fitted.model, **QUICK).fit(frame.iloc[:3], LABELS[:3])
    assert framed.predict(frame).shape == (5,)


def test_columns_of_data_sets(fitted: BertClassifier) -> None:
    datasets = pytest.importorskip("datasets")
    column = datasets.Dataset.from_dict({"text": NEW})["text"]
    assert (fitted.predict_proba(column) == fitted.predict_proba(NEW)).all()


def test_pairs(pretrained: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"first": TEXTS, "second": TEXTS[::-1]})
    model = BertClassifier(pretrained, **QUICK).fit(frame, pandas.Series(LABELS))
    pairs = list(zip(TEXTS, TEXTS[::-1], strict=True))
    with pytest.warns(UserWarning, match="does not have valid feature names"):
        found = model.predict_proba(pairs)
    assert (found == model.predict_proba(frame)).all()
    assert (model.predict_proba(frame) != model.predict_proba(frame.assign(second=""))).any()
    assert model.feature_names_in_.tolist() == ["first", "second"]
    with pytest.raises(ValueError, match="in the same order"):
        model.predict(frame[["second", "first"]])
    bare = BertRegressor(pretrained, **QUICK).fit(pairs, np.arange(24.0))
    with pytest.raises(ValueError, match="X has 1 features, but BertRegressor is expecting 2"):
        bare.predict(TEXTS)


@pytest.mark.parametrize("sparse", [False, True])
def test_several_labels(sparse: bool, pretrained: Path) -> None:
    matrix = np.array([[i % 2, 1 - i % 2, 0] for i in range(24)])
    model = BertClassifier(pretrained, **LEARNING, class_weight="balanced")
    model.fit(TEXTS, csr_matrix(matrix) if sparse else matrix)
    found, chances = model.predict(TEXTS), model.predict_proba(TEXTS)
    assert found.shape == chances.shape == matrix.shape
    assert ((chances > 0.5) == found).all()
    assert ((model.decision_function(TEXTS) > 0) == found).all()
    assert not found[:, 2].any()  # a label that no row had
    assert model.score(TEXTS, matrix) == (found == matrix).all(axis=1).mean() > 0.9


def test_several_labels_by_name(pretrained: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"wet": [1, 0] * 12, "cold": [1, 1, 0] * 8})
    model = BertClassifier(pretrained, **QUICK, class_weight={"cold": 2.0}).fit(TEXTS, frame)
    assert json.loads(model.model_.files["bertkit.json"])["labels"] == ["cold", "wet"]
    assert cross_val_score(model, TEXTS, frame, cv=2, scoring="roc_auc").shape == (2,)

    numbered = model.set_params(class_weight={1: 2.0}).fit(TEXTS, frame)  # "cold" is column 1
    assert numbered.predict_proba(TEXTS).tolist() == model.predict_proba(TEXTS).tolist()
    with pytest.raises(BertkitError, match="names the label '2'"):
        model.set_params(class_weight={2: 2.0}).fit(TEXTS, frame)
    frame["cold"] = 0  # a fold without a label
    frame["dry"] = 1 - frame["wet"]
    model.set_params(class_weight={"cold": 2.0}).fit(TEXTS, frame)


def test_a_fit_that_fails_leaves_the_last_one(pretrained: Path) -> None:
    model = BertClassifier(pretrained, **QUICK).fit(TEXTS, LABELS)
    before = model.predict_proba(NEW)
    for broken in ({"learning_rate": 1e30}, {"epochs": 0}):
        with pytest.raises((BertkitError, ValueError)):
            model.set_params(**broken).fit(TEXTS, ["no", "yes"] * 12)
        assert model.classes_.tolist() == sorted(set(LABELS))
        assert (model.predict_proba(NEW) == before).all()
        model.set_params(**QUICK)
    with pytest.raises(ValueError, match="at least"):
        model.fit([("a", "b")] * 4, ["x"] * 4)
    assert (model.n_features_in_, model.predict_proba(NEW).tolist()) == (1, before.tolist())


def test_class_weights(pretrained: Path) -> None:
    labels = [1] * 4 + [0] * 20

    def share(weight: Any) -> float:
        model = BertClassifier(pretrained, **QUICK | {"epochs": 4}, class_weight=weight)
        return float(model.fit(TEXTS, labels).predict_proba(TEXTS)[:, 1].mean())

    assert share(None) < share("balanced") < share({1: 50.0})
    assert share({0: 1.0, 1: 50.0, 2: 9.0}) == share({1: 50.0}), "a fold may lack a class"
    tagger = BertTagger(pretrained, **QUICK, class_weight=dict.fromkeys([*"BIO", "B-Z"], 2.0))
    with pytest.raises(BertkitError, match="names the label 'B'"):
        tagger.fit(SENTENCES, TAGS)
    weights = dict.fromkeys(["B-X", "B-Y", "I-X", "I-Y", "O", "B-Z"], 2.0)
    tagger.set_params(class_weight=weights).fit(SENTENCES, TAGS)
    begins = [[{"B-X": "I-X", "B-Y": "I-Y"}.get(tag, tag) for tag in row] for row in TAGS]
    tagger.fit(SENTENCES, begins)  # IOB1 has no B- here, but training has
    first = tagger.set_params(class_weight={**weights, "B-X": 50.0}).fit(SENTENCES, begins)
    assert json.loads(first.model_.files["bertkit.json"])["tuning"]["class_weights"] == [
        *("B-X=50.0", "B-Y=2.0", "I-X=2.0", "I-Y=2.0", "O=2.0")
    ]


def test_tags(pretrained: Path) -> None:
    model = BertTagger(pretrained, **LEARNING).fit(SENTENCES, TAGS)
    assert model.classes_.tolist() == ["B-X", "B-Y", "I-X", "I-Y", "O"]
    given = [["river"], [], np.array(["stone", ""])]
    assert [len(tags) for tags in model.predict(given)] == [1, 0, 2]
    assert model.score(SENTENCES, TAGS) > 0.5
    found = cross_val_predict(model.set_params(epochs=1), SENTENCES, TAGS, cv=2)
    assert [len(tags) for tags in found] == [3] * 24
    parts = [["NOUN" if tag == "O" else "VERB" for tag in tags] for tags in TAGS]
    scores = cross_val_score(model, SENTENCES, parts, cv=2, error_score="raise")
    assert ((scores >= 0) & (scores <= 1)).all()
    assert model.fit(SENTENCES, parts).score([["river"], ["stone"]], [["NEW"], ["NEW"]]) == 0


def test_what_is_not_read_is_said(pretrained: Path) -> None:
    model = BertTagger(pretrained, **QUICK, max_length=20)
    with pytest.warns(UserWarning, match="train: inputs with words cut at 18 tokens: 1") as said:
        model.fit([["ab" * 30, "river"], *SENTENCES], [["O", "O"], *TAGS])
    assert said[0].filename == __file__
    with pytest.warns(UserWarning, match="words cut at 18 tokens: 1") as said:
        model.predict([["ab" * 30]])
    assert said[0].filename == __file__


def test_vectors_are_those_of_the_embedder(pretrained: Path, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    embedder = BertEmbedder(pretrained, precision="fp32")
    expected = bertkit.load_embedder(pretrained, precision="fp32").encode(NEW)
    assert (embedder.fit_transform(NEW) == expected).all()
    assert embedder.transform(NEW).dtype == np.float32
    framed = embedder.set_output(transform="pandas").transform(pandas.Series(NEW))
    assert framed.columns[-1] == "bertembedder31"
    for pooling in ("cls", "pooler"):  # sentence-transformers has only the first
        changes: dict[str, Any] = {"max_length": 8, "pooling": pooling, "normalize": False}
        short = BertEmbedder(pretrained, precision="fp32", **changes).fit(NEW)
        assert not np.allclose(short.transform(NEW), expected)
        short.model_.save(tmp_path / pooling)
        saved = bertkit.load(tmp_path / pooling, precision="fp32")
        assert (saved.encode(NEW) == short.transform(NEW)).all()
    details = read_json(tmp_path / "pooler" / "bertkit.json")
    write_json(tmp_path / "pooler" / "bertkit.json", {**details, "embedding": {"prompt": 1}})
    with pytest.raises(BertkitError, match="embedding is not valid"):
        bertkit.load_embedder(tmp_path / "pooler")


def test_a_pooler_that_the_encoders_of_its_family_lack_is_kept(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=tokenizer.size, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, pooler_act="gelu",
    )  # fmt: skip
    details = {"task": "classification", "labels": ["x", "y"]}
    save_model(tmp_path / "model", ClassificationModel(config, 2), tokenizer, details)
    chosen: dict[str, Any] = {"pooling": "pooler", "precision": "fp32"}
    expected = bertkit.load_embedder(tmp_path / "model", **chosen).encode(NEW)
    embedder = BertEmbedder(tmp_path / "model", **chosen).fit(NEW)
    assert (embedder.transform(NEW) == expected).all()
    assert (pickle.loads(pickle.dumps(embedder)).transform(NEW) == expected).all()


# In scikit-learn ----------------------------------------------------------------------------------


def test_params(pretrained: Path) -> None:
    for kind in (BertClassifier, BertRegressor, BertTagger, BertEmbedder):
        estimator = kind(pretrained, max_length=8)
        assert clone(estimator).get_params() == estimator.get_params()
        assert estimator.set_params(precision="fp32").precision == "fp32"
        tags = get_tags(estimator)
        assert tags.input_tags.string
        assert not tags.input_tags.two_d_array
        assert tags.target_tags.required == (kind is not BertEmbedder)


@pytest.mark.slow
def test_a_search_over_a_pipeline(pretrained: Path) -> None:
    lower = FunctionTransformer(lambda texts: [text.lower() for text in texts])
    pipeline = make_pipeline(lower, BertClassifier(pretrained, **QUICK))
    grid = {"bertclassifier__learning_rate": [1e-6, 1e-2], "bertclassifier__epochs": [8]}
    search = GridSearchCV(pipeline, grid, cv=2, error_score="raise").fit(TEXTS * 2, LABELS * 2)
    assert search.best_params_["bertclassifier__learning_rate"] == 1e-2
    assert search.best_estimator_.predict(TEXTS).shape == (24,)
    scores = cross_val_score(
        pipeline, TEXTS, LABELS, cv=2, scoring="neg_log_loss", error_score="raise"
    )
    assert (scores < 0).all()


def test_a_column_of_texts_beside_numbers(pretrained: Path) -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"title": TEXTS, "price": np.arange(24.0)})
    columns = ColumnTransformer(
        [("text", BertEmbedder(pretrained), "title"), ("number", StandardScaler(), ["price"])]
    )
    model = make_pipeline(columns, LogisticRegression()).fit(frame, LABELS)
    assert model[0].transform(frame).shape == (24, 33)
    assert model.predict(frame).shape == (24,)
    assert columns.fit(frame).get_feature_names_out()[[0, -1]].tolist() == [
        "text__bertembedder0",
        "number__price",
    ]


@pytest.mark.slow
def test_a_pickle_is_whole(tokenizer: Tokenizer, pretrained: Path, tmp_path: Path) -> None:
    """It works in another process, and after the folder of the model is gone."""
    folder = tmp_path / "gone"
    BertClassifier(pretrained, **QUICK).fit(TEXTS, LABELS).model_.save(folder)
    classifier = BertClassifier(folder, **QUICK).fit(TEXTS, LABELS)
    embedder = BertEmbedder(folder, precision="fp32").fit(TEXTS)
    tagger = BertTagger(folder, **QUICK).fit(SENTENCES, TAGS)
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    expected = [classifier.predict_proba(NEW), embedder.transform(NEW), tagger.predict(SENTENCES)]
    joblib.dump([classifier, embedder, tagger, NEW, SENTENCES], tmp_path / "all.joblib")
    code = (
        "import sys, joblib\n"
        f"one, two, three, new, words = joblib.load({str(tmp_path / 'all.joblib')!r})\n"
        "found = [one.predict_proba(new), two.transform(new), three.predict(words)]\n"
        f"joblib.dump(found, {str(tmp_path / 'found.joblib')!r})\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(bertkit.__file__).parents[1])
    found = joblib.load(tmp_path / "found.joblib")
    assert np.allclose(found[0], expected[0], atol=1e-6)
    assert np.allclose(found[1], expected[1], atol=1e-6)
    assert found[2].tolist() == expected[2].tolist()


def test_a_fit_leaves_no_files(
    pretrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    model = BertClassifier(pretrained, **QUICK, early_stopping=True).fit(TEXTS, LABELS)
    pickle.loads(pickle.dumps(model)).predict(NEW)
    assert list(tmp_path.iterdir()) == []


def test_seeds(pretrained: Path) -> None:
    def chances(seed: Any) -> list[Any]:
        model = BertClassifier(pretrained, **QUICK | {"epochs": 1}, random_state=seed)
        return model.fit(TEXTS, LABELS).predict_proba(TEXTS[:2]).tolist()

    assert chances(3) == chances(np.int64(3)) != chances(4)
    generator = np.random.RandomState(0)
    assert chances(generator) != chances(generator)
    assert chances(None) != chances(None)


def test_fits_in_threads_are_those_of_their_seeds(pretrained: Path) -> None:
    """Threads share torch's random numbers, from which dropout is drawn."""

    def chances(seed: int) -> list[Any]:
        model = BertClassifier(pretrained, **QUICK | {"epochs": 6}, random_state=seed)
        return model.fit(TEXTS, LABELS).predict_proba(TEXTS[:2]).tolist()

    alone = [chances(seed) for seed in range(4)]
    torch.manual_seed(7)
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(chances, range(4))) == alone
    assert torch.equal(torch.get_rng_state(), before), "the caller's own go on"


def test_loading_draws_no_random_numbers(pretrained: Path, tmp_path: Path) -> None:
    """Another thread may be training with them; a model for tokens lacks the pooler."""
    tagger = BertTagger(pretrained, **QUICK | {"epochs": 1}).fit(SENTENCES, TAGS)
    tagger.model_.save(tmp_path / "tags")
    before = torch.get_rng_state()
    bertkit.load(tmp_path / "tags")
    assert torch.equal(torch.get_rng_state(), before)


def test_progress(pretrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    BertClassifier(pretrained, **QUICK).fit(TEXTS, LABELS)
    assert capsys.readouterr() == ("", "")
    BertClassifier(pretrained, **QUICK, verbose=1, early_stopping=True).fit(TEXTS, LABELS)
    assert "train: 22 inputs" in capsys.readouterr().err


# Errors -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted", "error", "message"),
    [
        ("a text", LABELS, ValueError, "string object received"),
        ([], [], ValueError, "Found array with 0 sample"),
        ([*TEXTS[:-1], None], LABELS, ValueError, "Input X contains NaN: row 23 is None"),
        ([*TEXTS[:-1], np.nan], LABELS, ValueError, "Input X contains NaN: row 23 is nan"),
        ([*TEXTS[:-1], 3.5], LABELS, TypeError, r"X\[23\] is 3.5, which is not a text"),
        (np.zeros((24, 2)), LABELS, TypeError, r"X\[0\] is 0.0, which is not a text"),
        (np.full((24, 3), "a"), LABELS, ValueError, "X has 3 columns"),
        (np.full((24, 1, 1), "a"), LABELS, ValueError, "Found array with dim 3"),
        (csr_matrix(np.eye(24)), LABELS, TypeError, "Sparse data was passed"),
        (TEXTS, LABELS[:-1], ValueError, "inconsistent numbers of samples"),
        (TEXTS, None, ValueError, "requires y to be passed, but the target y is None"),
        (TEXTS, ["wet"] * 24, ValueError, "y contains only one class: 'wet'"),
        (TEXTS, [*LABELS[:-1], None], ValueError, "Input y contains NaN: row 23"),
        (TEXTS, [*LABELS[:-1], "wet "], ValueError, "several labels of y have the name 'wet'"),
        (TEXTS, [*LABELS[:-1], "\ud800"], BertkitError, "half of a surrogate pair"),
        (TEXTS, [0.5, 1, np.nan] * 8, ValueError, "Input y contains NaN: row 2"),
        (TEXTS, np.arange(24) / 7, ValueError, "Unknown label type: continuous"),
        (TEXTS, [["wet"], ["dry", "damp"]] * 12, ValueError, "MultiLabelBinarizer"),
        (TEXTS, np.zeros((24, 2), dtype=int), ValueError, "all of y is 0"),
    ],
)
def test_bad_input_of_a_classifier(
    given: Any, wanted: Any, error: type[Exception], message: str, pretrained: Path
) -> None:
    with pytest.raises(error, match=message):
        BertClassifier(pretrained).fit(given, wanted)


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"epochs": 0}, ValueError, "epochs == 0, must be >= 1"),
        ({"epochs": 1.5}, TypeError, "epochs must be an instance of int"),
        ({"batch_size": -1}, ValueError, "batch_size"),
        ({"learning_rate": 0}, ValueError, "learning_rate"),
        ({"max_length": 0}, ValueError, "max_length"),
        ({"max_length": 99}, BertkitError, "99 tokens do not fit"),
        ({"random_state": -1}, ValueError, "[Ss]eed"),
        ({"class_weight": "equal"}, ValueError, "'class_weight' parameter"),
        ({"class_weight": {"wet": -1.0}}, BertkitError, "weight above 0"),
        ({"class_weight": {"soaked": 2.0}}, BertkitError, "names the label 'soaked'"),
        ({"validation_fraction": 1.0}, ValueError, "validation_fraction"),
        ({"early_stopping": True, "n_iter_no_change": 0}, ValueError, "n_iter_no_change"),
        ({"precision": "fp8"}, BertkitError, "fp8"),
        ({"device": None}, TypeError, "device must be an instance of"),
        ({"model": "/nowhere/model"}, BertkitError, "/nowhere/model"),
    ],
)
def test_bad_parameters(
    params: dict[str, Any], error: type[Exception], message: str, pretrained: Path
) -> None:
    model = BertClassifier(pretrained).set_params(**params)
    with pytest.raises(error, match=message):
        model.fit(TEXTS, LABELS)
    with pytest.raises(NotFittedError):
        model.predict(TEXTS)


def test_too_few_rows_to_validate_on(pretrained: Path) -> None:
    with pytest.raises(ValueError, match="turn early_stopping off"):
        BertClassifier(pretrained, early_stopping=True).fit(["a", "b"], ["x", "y"])
    with pytest.raises(ValueError, match="turn early_stopping off"):  # one row has no correlation
        BertRegressor(pretrained, early_stopping=True).fit(["a"] * 9, range(9))


@pytest.mark.parametrize(
    ("given", "wanted", "error", "message"),
    [
        ("a b", TAGS, TypeError, "list of lists of words"),
        ([], [], ValueError, "0 sample"),
        (SENTENCES, None, TypeError, "y must be a list of lists"),
        ([["a", "b"]], [["O", "\ud800"]], BertkitError, "half of a surrogate pair"),
        (["a b", "c d"], [["O", "X"]] * 2, TypeError, r"X\[0\] is 'a b', not a list"),
        ([["a", 3]], [["O", "X"]], TypeError, r"X\[0\] has 3, which is not a word"),
        ([["a", "b"]], [["O", None]], TypeError, r"y\[0\] has None"),
        ([["a", "b"]], [["O"]], ValueError, r"X\[0\] has 2 words and y\[0\] has 1 tags"),
        ([["a"]], [["O"], ["X"]], ValueError, "inconsistent numbers of samples"),
        ([["a"]], [["O"]], ValueError, "at least 2 different tags"),
    ],
)
def test_bad_input_of_a_tagger(
    given: Any, wanted: Any, error: type[Exception], message: str, pretrained: Path
) -> None:
    with pytest.raises(error, match=message):
        BertTagger(pretrained).fit(given, wanted)


def test_bad_targets_of_a_regressor(pretrained: Path) -> None:
    model = BertRegressor(pretrained, **QUICK)
    for wanted, message in (
        ([np.nan, *range(23)], "Input y contains NaN"),
        ([[1.0, 2.0]] * 24, "y should be a 1d array"),
        ([1.0] * 24, "at least two different numbers"),
        (["many"] * 24, "could not convert"),
    ):
        with pytest.raises(ValueError, match=message):
            model.fit(TEXTS, wanted)
    with pytest.warns(DataConversionWarning):
        model.fit(TEXTS, np.arange(24.0)[:, None])


@pytest.mark.parametrize("kind", [BertClassifier, BertRegressor, BertTagger, BertEmbedder])
def test_use_before_a_fit(kind: Any, pretrained: Path) -> None:
    for name in ("predict", "predict_proba", "decision_function", "transform"):
        if hasattr(kind, name):
            with pytest.raises(NotFittedError):
                getattr(kind(pretrained), name)(TEXTS)
