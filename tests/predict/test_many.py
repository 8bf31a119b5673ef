"""What predictors take from Python, one input or many, and what they refuse or warn of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas
import pytest
from bertkit.datasets.examples import TextExample

from bertkit import clean, embed_file, extract_file, load, to_frame
from bertkit.errors import BertkitError, InputTypeError
from bertkit.files import read_json, write_json
from bertkit.predict.evaluate import evaluate
from bertkit.predict.files import predict_file
from bertkit.predict.load import load_predictor
from tests.conftest import python


def texts() -> Iterator[TextExample]:
    """Three inputs, as a reader gives them."""
    for number in range(3):
        yield TextExample(str(number), "river stone " * number, None, None, "f")


def test_inputs_may_come_one_after_the_other(models: Path) -> None:
    predict = load(models / "classify", device="cpu", precision="fp32")
    assert len(predict.many(texts())) == 3
    assert predict.many(texts()) == predict.many(list(texts()))
    assert predict.many([]) == []


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("classify", ["river", None], r"inputs\[1\] is None"),
        ("classify", ["river", 3], r"inputs\[1\] is 3"),
        ("classify", [("a", "b", "c")], r"inputs\[0\] has 3 texts"),
        ("classify", [("river", None)], r"inputs\[0\]: None is not a text"),
        ("classify", [{"said": "river"}], r"inputs\[0\] has no column 'text' \(columns: said\)"),
        ("classify", {"text": "river"}, "give a list of texts"),
        ("classify", b"river", "give a list of texts"),
        ("classify", 3, "give a list of texts"),
        ("classify", np.array("river"), "give a list of texts"),
        (
            "choose",
            [("river", {"text": ["stone", "night"]})],
            r"inputs\[0\]: choices must be a list",
        ),
        ("answer", ["who"], r"inputs\[0\] is \('who',\)|inputs\[0\] is 'who'"),
        ("answer", [("who", " ")], r"inputs\[0\]: an answer needs a question and a context"),
        ("tag", [["a", 3]], r"inputs\[0\]: 3 is not a text"),
        ("choose", ["river"], r"inputs\[0\] is 'river'"),
        ("choose", [("river", "stone")], r"inputs\[0\]: choices must be a list"),
        ("choose", [("river", [])], r"inputs\[0\] has no choice"),
    ],
)
def test_what_is_no_input_is_shown(models: Path, kind: str, given: Any, message: str) -> None:
    with pytest.raises(BertkitError, match=message) as caught:
        load(models / kind, device="cpu", precision="fp32")(given)
    right_type = any(part in message for part in ("columns:", "needs a question", "no choice"))
    assert isinstance(caught.value, TypeError) is not right_type


def test_choices_beside_their_keys_are_read_as_in_files(models: Path) -> None:
    """As ARC on the hub has them; a DataFrame may hold them as JSON."""
    predict = load(models / "choose", device="cpu", precision="fp32")
    listed = {"text": "river", "choices": ["stone", "night"]}
    keyed = {"text": "river", "choices": {"text": ["stone", "night"], "label": ["A", "B"]}}
    written = {**keyed, "choices": json.dumps(keyed["choices"])}
    wanted = predict([listed])
    assert predict([keyed]) == predict([written]) == wanted


def dictionaries(kind: str) -> list[dict[str, Any]]:
    """Two inputs of each kind of model, with the names of its columns."""
    context = "the river runs under a stone bridge"
    return {
        "classify": [{"text": "river stone", "more": 1}, {"text": "night"}],
        "pair": [{"text": "river", "pair": "stone"}, {"text": "night", "pair": "river"}],
        "tag": [{"tokens": ["river", "stone"]}, {"tokens": ["night"]}],
        "choose": [{"text": "river", "choices": ["stone", "night"]}] * 2,
        "answer": [{"question": "what runs", "context": context}] * 2,
    }[kind]


def plain(found: list[Any]) -> list[tuple[str, Any]]:
    """Every leaf of the predictions with its path."""

    def leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, dict | list):
            pairs = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in pairs:
                yield from leaves(f"{path}.{key}", one)
        else:
            yield path, value

    return list(leaves("", [one.to_dict() for one in found]))


def approx(found: list[Any]) -> list[tuple[str, Any]]:
    """The leaves to compare with: batches change the last bits of numbers."""
    return [
        (path, pytest.approx(value, abs=1e-5) if isinstance(value, float) else value)
        for path, value in plain(found)
    ]


@pytest.mark.parametrize("kind", ["classify", "tag", "answer"])
def test_a_list_has_the_predictions_of_its_inputs(models: Path, kind: str) -> None:
    """As tuples, dicts, a generator and a data frame, each equal to one call after the other."""
    predict = load(models / kind, device="cpu", precision="fp32")
    rows = dictionaries(kind)
    names = next(found for found in predict.columns if set(found) <= set(rows[0]))
    tuples = [tuple(row[name] for name in names) for row in rows]
    if kind == "classify":
        one_by_one = [predict(*texts) for texts in tuples]
        assert plain(predict([texts[0] for texts in tuples])) == approx(one_by_one)
    elif kind == "tag":
        tuples = [words for (words,) in tuples]
        one_by_one = [predict(" ".join(words)) for words in tuples]
        assert [one.words[0].word for one in one_by_one] == ["river", "night"]
        assert plain(predict(["river stone", "night"])) == approx(one_by_one)
    else:
        one_by_one = [predict(*texts) for texts in tuples]
    assert predict(rows) == predict(tuples) == predict(iter(tuples))
    assert predict(pandas.DataFrame(rows, index=[7, 7])) == predict(rows)
    assert plain(predict(rows)) == approx(one_by_one)
    assert predict([]) == []


def test_predictions_become_dictionaries_and_a_table(models: Path) -> None:
    predict = load(models / "classify", device="cpu", precision="fp32")
    found = predict(["river stone", "night"])
    asked = found[0].to_dict()
    assert asked == json.loads(json.dumps(asked))
    assert asked["label"] == max(asked["probabilities"], key=asked["probabilities"].get)
    table = to_frame(found)
    assert list(table["label"]) == [one.label for one in found]
    for label in found[0].probabilities:
        assert list(table[f"probability_{label}"]) == [one.probabilities[label] for one in found]
    assert repr(found[0]).startswith(f"LabelPrediction(label={found[0].label!r}, probability=0.")
    tagged = load(models / "tag", device="cpu", precision="fp32")("river stone").to_dict()
    assert [word["word"] for word in tagged["words"]] == ["river", "stone"]
    with pytest.raises(TypeError, match="number 1 is 'night'"):
        to_frame([found[0], "night"])


@pytest.mark.parametrize("choices", [{"a": "the", "b": "night"}, {"the", "night"}, b"the", "the"])
def test_choices_have_an_order(models: Path, choices: Any) -> None:
    """The keys of a dict would be read, and not its texts."""
    with pytest.raises(BertkitError, match="choices must be a list of texts"):
        load(models / "choose", device="cpu", precision="fp32")("river", choices)


def test_what_is_not_read_is_warned_of(models: Path) -> None:
    """The warning names the caller's line, whichever way the model is called."""
    predict = load(models / "answer", device="cpu", precision="fp32")
    pair = ("river " * 20, "stone bridge")
    for call in (
        lambda: predict(*pair),
        lambda: predict([pair]),
        lambda: predict.many([predict.example(pair, "input", "0")]),
    ):
        with pytest.warns(UserWarning, match="questions cut at 16 tokens: 1") as said:
            call()
        assert said[0].filename == __file__
    said_once = python("-m", "bertkit", "predict", models / "answer", *pair, check=True).stderr
    assert said_once.splitlines() == ["warning: questions cut at 16 tokens: 1"]


def test_files_are_predicted_and_scored_from_python(models: Path, tmp_path: Path) -> None:
    """With the columns that the caller names, in one function each."""
    file, out = tmp_path / "own.csv", tmp_path / "found.jsonl"
    file.write_text("said,label\nriver stone,dry\nbridge,wet\n")
    predictor = load_predictor([models / "classify"], device="cpu", precision="fp32")
    predict_file(predictor, str(file), columns={"text": "said"}, out=out)
    found = [json.loads(line)["predicted_label"] for line in out.read_text().splitlines()]
    scored = evaluate(
        models / "classify", file, columns={"text": "said"}, precision="fp32", device="cpu"
    )
    right = [label == gold for label, gold in zip(found, ("dry", "wet"), strict=True)]
    assert scored.scores["accuracy"] == sum(right) / 2
    unscored = evaluate(models / "classify", [{"text": "river"}], split="test", unlabelled_ok=True)
    assert (unscored.scores, unscored.metric) == ({}, "accuracy")
    with pytest.raises(BertkitError, match="classification does not accept --words"):
        predict_file(predictor, str(file), columns={"words": "said"}, out=out)


def test_a_file_is_not_replaced_by_its_predictions(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "in.csv"
    file.write_text("text\nriver stone\n")
    predictor = load_predictor([models / "classify"], device="cpu", precision="fp32")
    for own, out in ((file, tmp_path / "." / "in.csv"), ("~/in.csv", file), (file, "~/in.csv")):
        with pytest.raises(BertkitError) as refused:
            predict_file(predictor, own, out=out)
        assert refused.value.code == "overwrites-input"
    functions = {
        "predict": lambda given: predict_file(predictor, given, out=file),
        "embed": lambda given: embed_file(models / "classify", given, file, format="parquet"),
        "extract": lambda given: extract_file(
            models / "classify", given, file, format="safetensors"
        ),
        "clean": lambda given: clean([given], file),
    }
    for given in (str(file), str(tmp_path), f"{tmp_path}/*.csv", f"file://{file}"):
        for name, function in functions.items():
            with pytest.raises(BertkitError) as refused:
                function(given)
            assert refused.value.code == "overwrites-input", name
    assert file.read_text() == "text\nriver stone\n"
    with pytest.raises(InputTypeError, match="give what load"):
        predict_file(str(models / "classify"), file)  # type: ignore[arg-type]


def test_a_column_called_pair_is_read_as_in_python(models: Path, tmp_path: Path) -> None:
    """Nothing in a model of the hub tells whether it was fine-tuned on pairs."""
    rows = [{"text": "river", "pair": "stone"}, {"text": "bridge", "pair": "the"}]
    file, out = tmp_path / "rows.csv", tmp_path / "found.jsonl"
    pandas.DataFrame(rows).to_csv(file, index=False)
    predictor = load_predictor([models / "classify"], device="cpu", precision="fp32")
    predict_file(predictor, file, out=out)
    found = [json.loads(line)["probabilities"] for line in out.read_text().splitlines()]
    for own, row in zip(found, predictor(rows), strict=True):
        assert own == pytest.approx(row.probabilities, abs=1e-6)
    damaged = tmp_path / "rows.jsonl"
    damaged.write_text("{\n" + "".join(f"{json.dumps(row)}\n" for row in rows))
    predict_file(predictor, damaged, out=out)
    assert [json.loads(line)["probabilities"] for line in out.read_text().splitlines()] == found
    predict_file(predictor, file, columns={"text": "text"}, out=out)
    single = json.loads(out.read_text().splitlines()[0])["probabilities"]
    assert single == pytest.approx(predictor("river").probabilities, abs=1e-6)


def test_options_of_columns_are_refused_where_there_are_none(models: Path, tmp_path: Path) -> None:
    contents = {
        "t.txt": "river stone\n",
        "t.conll": "river O\n\nstone O\n",
        "t.json": '{"data": [{"paragraphs": []}]}',
    }
    for name, text in contents.items():
        (tmp_path / name).write_text(text)
    for model, name, option in (
        ("classify", "t.txt", "id"),
        ("classify", "t.txt", "header"),
        ("tag", "t.conll", "words"),
        ("documents", "t.conll", "document"),
        ("answer", "t.json", "passage"),
    ):
        predictor = load_predictor([models / model], device="cpu", precision="fp32")
        with pytest.raises(BertkitError) as refused:
            predict_file(predictor, tmp_path / name, columns={option: "x"})
        assert refused.value.code == "column", (name, option)


def test_a_single_sentence_is_not_told_that_it_is_alone(
    models: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    predictor = load_predictor([models / "documents"], device="cpu", precision="fp32")
    file = tmp_path / "words.conll"
    for text in ("river O\n\nstone O\n", "river O\n"):
        file.write_text(text)
        predict_file(predictor, file)
        assert ("alone in its document" in capfd.readouterr().err) == ("stone" in text)


def test_an_unknown_task_is_not_guessed_from_the_head(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "answer", tmp_path / "m")
    details = read_json(tmp_path / "m" / "bertkit.json")
    write_json(tmp_path / "m" / "bertkit.json", {**details, "task": "question-answerin"})
    with pytest.raises(BertkitError, match="did you mean 'question-answering'"):
        load(tmp_path / "m", device="cpu")


def test_a_file_of_squad_is_predicted(models: Path, tmp_path: Path) -> None:
    """Whose locations are questions, not lines."""
    asked = [{"id": str(n), "question": "river?", "answers": []} for n in range(3)]
    content = {"data": [{"paragraphs": [{"context": "stone bridge.", "qas": asked}]}]}
    file, out = tmp_path / "questions.json", tmp_path / "found.jsonl"
    file.write_text(json.dumps(content))
    predictor = load_predictor([models / "answer"], device="cpu", precision="fp32")
    predict_file(predictor, str(file), out=out)
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["0", "1", "2"]


def test_choices_of_a_table_may_be_fewer_than_its_columns(models: Path) -> None:
    predict = load(models / "choose", device="cpu", precision="fp32")
    expected = predict([("river", ["stone", "bridge"])])
    assert predict([{"text": "river", "choices": ["stone", "bridge"]}]) == expected
    predict.columns = [["q", "a", "b", "c"]]
    for empty in ("", None, " ", float("nan")):
        row = {"q": "river", "a": "stone", "b": "bridge", "c": empty}
        assert predict(pandas.DataFrame([row])) == predict([row]) == expected
    del predict.columns
    for empty in ("", None, " "):
        listed = {"text": "river", "choices": ["stone", "bridge", empty]}
        assert predict([listed]) == expected


def test_fields_of_a_table_are_read_as_in_a_file(models: Path) -> None:
    tag = load(models / "tag", device="cpu", precision="fp32")
    words = ["U.S.-based", "river", "'s"]
    for field in (words, " ".join(words), json.dumps(words)):
        assert tag([{"tokens": field}]) == tag([words])
    choose = load(models / "choose", device="cpu", precision="fp32")
    listed = {"text": "river", "choices": '["stone", "night"]'}
    assert choose([listed]) == choose([("river", ["stone", "night"])])


def test_a_second_text_is_read_if_nothing_says_that_there_is_none(models: Path) -> None:
    predict = load(models / "classify", device="cpu", precision="fp32")
    assert predict.pairs is None
    both = {"text": "river", "pair": "stone"}
    assert predict([both]) == predict([("river", "stone")])

    class Pair(NamedTuple):
        premise: str
        hypothesis: str

    assert predict([Pair("river", "stone")]) == predict([both])
    assert predict([{"text": "river"}]) == predict(["river"])


def test_sentences_of_one_document_are_read_together(models: Path) -> None:
    predict = load(models / "documents", device="cpu", precision="fp32")
    predict.columns = [["tokens", "doc"]]
    rows = [{"tokens": ["river"], "doc": name} for name in ("a", "a", "b", None, None)]
    given = [predict.example(row, "f", str(number)) for number, row in enumerate(rows)]
    documents = [one.document for one in given]
    assert documents[0] == documents[1]
    assert len(set(documents)) == 4


def test_a_threshold_is_a_number(models: Path) -> None:
    with pytest.raises(BertkitError, match="NaN"):
        load(models / "answer", device="cpu", null_threshold=float("nan"))


def test_a_program_ends_in_silence(models: Path) -> None:
    program = f"import bertkit\nfound = bertkit.load({str(models / 'classify')!r})\nfound('a')"
    assert python("-c", program, check=True).stderr == ""
