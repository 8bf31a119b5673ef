"""Official data sets: their files with their quirks; and the keys of choices."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bertkit.errors import BertkitError
from bertkit.tasks.columns import MemoryRows
from bertkit.tasks.multiple_choice import ChoiceColumns
from bertkit.tasks.official import GLUE, OFFICIAL, read_glue, read_swag, write_official
from bertkit.tasks.types import DataFiles, load_dataset
from bertkit.text.documents import TextCounts

SIZES = {"cola": (8551, 1043, 1063), "mrpc": (3668, 408, 1725), "rte": (2490, 277, 3000),
         "sst-2": (67349, 872, 1821), "sts-b": (5749, 1500, 1379)}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_official_files_of_glue(data: Path, name: str) -> None:
    loaded = load_dataset(name, DataFiles(data=data / "glue"))
    [(_, dev)], [(_, test)] = loaded.dev, loaded.test
    assert (len(loaded.train), len(dev), len(test)) == SIZES[name]
    assert not [reason for reason in loaded.counts.skipped if not reason.endswith("kept")]
    assert {example.gold for example in test} == {None}
    assert loaded.task.metric == GLUE[name].metrics[0] or name == "sts-b"
    if labels := GLUE[name].labels:
        assert loaded.task.labels == labels
        assert {example.gold for example in dev} == set(labels)


def test_cola_without_a_header(data: Path) -> None:
    path = str(data / "glue" / "CoLA" / "train.tsv")
    first = read_glue("cola", path, TextCounts(), "train")[0]
    assert first.id == "0"
    assert first.gold in GLUE["cola"].labels


def test_mnli_rows_without_agreement_and_two_splits(tmp_path: Path) -> None:
    folder = tmp_path / "MNLI"
    folder.mkdir()
    header = "index\tsentence1\tsentence2\tgold_label"
    rows = [f"{i}\ta {i}\tb\t{label}" for i, label in enumerate(("neutral", "-", "entailment"))]
    for split in ("train", "dev_matched", "dev_mismatched"):
        (folder / f"{split}.tsv").write_text("\n".join([header, *rows]) + "\n")
    loaded = load_dataset("mnli", DataFiles(data=tmp_path))
    assert [name for name, _ in loaded.dev] == ["dev", "dev-mismatched"]
    assert [example.gold for example in loaded.train] == ["neutral", "entailment"]
    assert loaded.counts.skipped["row without a majority label"] == 3
    assert loaded.test == []


def test_files_for_official_programs(tmp_path: Path) -> None:
    ids = ["1", "0", "2"]
    named = [SimpleNamespace(label=x) for x in ("entailment", "not_entailment", "entailment")]
    [path] = write_official("rte", "test", tmp_path, ids, named)
    assert path.name == "RTE.tsv"
    assert path.read_text().splitlines() == [
        "index\tprediction", "0\tnot_entailment", "1\tentailment", "2\tentailment"
    ]  # fmt: skip
    values = [SimpleNamespace(value=x) for x in (6.2, -0.5, 2.5)]
    [numbers] = write_official("sts-b", "test", tmp_path, ids, values)
    assert numbers.read_text().splitlines()[1:] == ["0\t0.000", "1\t5.000", "2\t2.500"]
    mismatched = write_official("mnli", "test-mismatched", tmp_path, [], [])
    assert [file.name for file in mismatched] == ["MNLI-mm.tsv"]
    assert write_official("rte", "dev", tmp_path, ids, named) == []
    with pytest.raises(BertkitError, match="whole test file"):
        write_official("rte", "test", tmp_path, ["5"], named[:1])
    answers = [SimpleNamespace(answer="1895", null_odds=-2.5)]
    files = write_official("squad-2.0", "dev", tmp_path, ["q"], answers)
    contents = [json.loads(file.read_text()) for file in files]
    assert contents == [{"q": "1895"}, {"q": -2.5}]
    assert files[0] == tmp_path / "dev" / "predictions.json"
    assert write_official("squad-1.1", "dev", tmp_path, ["q"], answers) == files[:1]


def test_swag(data: Path, tmp_path: Path) -> None:
    counts = TextCounts()
    examples = read_swag(str(data / "swag" / "sample.csv"), counts, "dev")
    assert len(examples) == 11
    assert {len(example.choices) for example in examples} == {4}


@pytest.mark.slow
def test_conll_and_squad_by_name(data: Path) -> None:
    loaded = load_dataset("conll-2003", DataFiles(data=data / "conll2003"))
    assert [len(loaded.train), *(len(split) for _, split in (*loaded.dev, *loaded.test))] == [
        14041, 3250, 3453
    ]  # fmt: skip
    assert len(loaded.task.labels) == 9
    dev = str(data / "squad" / "dev-v2.0.json")
    loaded = load_dataset("squad-2.0", DataFiles(train=dev, dev=dev))
    assert len(loaded.dev[0][1]) == 11873
    assert sum(example.gold == () for example in loaded.dev[0][1]) == 5945
    assert loaded.task.settings()["null"] is True


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    for name in OFFICIAL:
        with pytest.raises(BertkitError):
            load_dataset(name, DataFiles(data=tmp_path))
    with pytest.raises(BertkitError, match="knows its columns"):
        load_dataset("swag", DataFiles(data=tmp_path), ChoiceColumns())
    with pytest.raises(BertkitError, match="classification"):
        load_dataset("mrpc", DataFiles(train="x.csv"))
    with pytest.raises(BertkitError, match="--data is the folder"):
        load_dataset("classification", DataFiles(data=tmp_path))


@pytest.mark.parametrize(
    ("label", "index"),
    [
        ("b", 1),
        ("C", 2),
        ("0", 0),
        (1, 1),
        (2.0, 2),
        ("some", 1),
        ("none of these", None),
        ("9", None),
    ],
)
def test_keys_of_choices(label: object, index: int | None) -> None:
    columns = ChoiceColumns(choices=("a", "b", "c"))
    row = {"text": "x", "a": "nothing", "b": "some", "c": "all", "label": label}
    counts: TextCounts = TextCounts()
    example = columns.example(row, "f:1", counts, "train")
    assert (example.gold if example else None) == index
    assert bool(counts.skipped) == (index is None)


def test_keys_may_be_the_text_of_a_choice() -> None:
    def golds(rows: list[list[str]], **options: Any) -> list[int | None]:
        columns = ChoiceColumns(choices=("a", "b", "c", "d"), **options)
        names = ("text", "a", "b", "c", "d", "label")
        made = [
            columns.example(dict(zip(names, row, strict=True)), "f:1", TextCounts(), "train")
            for row in rows
        ]
        return [example and example.gold for example in made]

    cats = ["How many cats?", "None", "One", "Two", "Three", "None"]
    assert golds([cats, ["Pick", "x", "y", "z", "w", "w"]]) == [0, 3]
    numbers = ["Two and one?", "1", "2", "3", "4", "3"]
    with pytest.raises(BertkitError, match="--key"):
        golds([numbers])
    assert golds([numbers], key="text") == [2]
    assert golds([numbers], key="position") == [3]
    assert golds([["x", "p", "p", "q", "r", "p"]]) == [None], "two choices have the text"
    with pytest.raises(BertkitError, match="key"):
        ChoiceColumns(key="texts")


def test_keys_that_count_from_1_name_the_flag() -> None:
    def read(*keys: int | str, **options: Any) -> tuple[list[int | None], int]:
        rows = [{"text": "x", "a": "p", "b": "q", "c": "", "label": key} for key in keys]
        columns, counts = ChoiceColumns(choices=("a", "b", "c"), **options), TextCounts()
        examples = list(columns.read(MemoryRows("train", rows), counts))
        return [example.gold for example in examples], counts.skipped.total()

    for keys in ((1, 2, 1), (2, 2)):
        with pytest.raises(
            BertkitError, match=r"--first-choice 1.*train\[0\]|train\[1\].*--first-choice 1"
        ):
            read(*keys)
    assert read(0, 2, 1) == ([0, 1], 1), "choices count from 0, and one is empty"
    assert read(1, 2, 1, first_choice=1) == ([0, 1, 0], 0)
    assert read("q", 2, "q", key="text") == ([1, 1], 1)


def test_the_names_of_listed_choices_are_keys() -> None:
    choices = {"text": ["p", "q", "r"], "label": ["1", "2", "3"]}  # as some rows of ARC
    for key, index in (("1", 0), ("3", 2)):
        row = {"text": "x", "choices": choices, "label": key}
        example = ChoiceColumns().example(row, "f:1", TextCounts(), "train")
        assert example is not None
        assert example.gold == index
    for names in (["A"], ["A", "A", "B"], ["A", "B", "C", "C"], None):
        row = {"text": "x", "choices": {**choices, "label": names}, "label": "r"}
        example = ChoiceColumns().example(row, "f:1", TextCounts(), "train")
        assert example is not None
        assert (example.choices, example.gold) == (("p", "q", "r"), 2)


def test_lists_of_choices_and_fewer_of_them() -> None:
    columns, counts = ChoiceColumns(first_choice=1), TextCounts()
    hub = {"text": "x", "choices": {"text": ["p", "q", ""], "label": ["A", "B", "C"]}, "label": "2"}
    example = columns.example(hub, "f:1", counts, "train")
    assert example is not None
    assert (example.choices, example.gold) == (("p", "q"), 1)
    written = {**hub, "choices": json.dumps(["p", "q"]), "label": "A"}
    example = columns.example(written, "f:1", counts, "train")
    assert example is not None
    assert example.gold == 0
    assert not Counter(counts.skipped)
