"""Tables: columns of the user's files as texts with labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from bertkit.datasets.columns import LabelSetColumns, NumberColumns, TextColumns
from bertkit.datasets.examples import TextExample
from bertkit.datasets.fields import row_number

from bertkit.errors import BertkitError
from bertkit.text.lines import TextCounts

Write = Callable[[str, str], Path]


def texts(
    path: Path | str,
    columns: type[TextColumns] = TextColumns,
    *,
    labelled: bool = True,
    keep_unlabelled: bool = False,
    **options: Any,
) -> tuple[list[TextExample], TextCounts]:
    counts = TextCounts()
    kept = {"labelled": labelled, "keep_unlabelled": keep_unlabelled}
    return list(columns(**options).read(path, counts, **kept)), counts


def test_pairs_ids_and_skips(write: Write) -> None:
    path = write("a.csv", "n,a,b,y\nu1,one,two,x\nu2, ,two,x\nu3,one,,x\nu4,one,two, \n")
    inputs, counts = texts(path, text="a", pair="b", label="y", id="n")
    assert inputs == [TextExample("u1", "one", "two", "x", f"{path}:2")]
    assert counts.skipped == {"empty 'a'": 1, "empty 'b'": 1, "row without label": 1}
    unlabelled, counts = texts(path, text="a", pair="b", labelled=False)
    assert [(i.id, i.label) for i in unlabelled] == [("0", None), ("3", None)]
    assert counts.skipped.total() == 2


def test_rows_without_label_may_be_kept(write: Write) -> None:
    path = write("a.csv", "text,label\none,x\ntwo, \n ,y\nfour,\n")
    inputs, counts = texts(path, keep_unlabelled=True)
    assert [(i.id, i.label) for i in inputs] == [("0", "x"), ("1", None), ("3", None)]
    assert counts.skipped == {"row without label, kept": 2, "empty 'text'": 1}
    assert counts.examples["row without label, kept"] == f"{path}:3"
    path = write("b.jsonl", '{"text": "a", "label": null}\n{"text": "b", "label": 2}\n')
    for columns, label in ((TextColumns, "2"), (NumberColumns, 2.0), (LabelSetColumns, ("2",))):
        inputs, _ = texts(path, keep_unlabelled=True, columns=columns)
        assert [i.label for i in inputs] == [None, label]


def test_csv_labels_stay_strings_and_texts_must_be_text(write: Write) -> None:
    [found], _ = texts(write("a.csv", "text,label\none, 01 \n"))
    assert found.label == "01"
    path = write("a.jsonl", '{"text": "one", "label": 2.0}\n{"text": 5, "label": 2}\n')
    inputs, counts = texts(path)
    assert [i.label for i in inputs] == ["2"]
    assert counts.skipped == {"column 'text' is not text": 1}
    with pytest.raises(BertkitError, match=r"b\.jsonl:1: 'label' holds a list.*multi-label"):
        texts(write("b.jsonl", '{"text": "one", "label": ["x"]}\n'))


def test_ids_must_differ(write: Write) -> None:
    path = write("a.csv", "id,text,label\n7,one,x\n8,two,x\n7,three,x\n")
    with pytest.raises(BertkitError, match=r"a\.csv:4: ID '7' is already used at .*a\.csv:2"):
        texts(path, id="id")
    with pytest.raises(BertkitError, match=r"b\.csv:2: no ID in column 'id'"):
        texts(write("b.csv", "id,text,label\n,one,x\n"), id="id")


def test_numbers(write: Write) -> None:
    inputs, counts = texts(
        write("a.csv", "text,label\none,4.5\ntwo,\nthree,-1e3\n"), columns=NumberColumns
    )
    assert [i.label for i in inputs] == [4.5, -1000.0]
    assert counts.skipped == {"row without label": 1}
    assert (
        texts(write("a.jsonl", '{"text": "one", "label": 3}\n'), columns=NumberColumns)[0][0].label
        == 3
    )


@pytest.mark.parametrize("value", ["good", "nan", "inf", "1e999", "3,5", "1_000", True, [1]])
def test_no_number(write: Write, value: object) -> None:
    line = json.dumps({"text": "one", "label": value})
    with pytest.raises(BertkitError, match=r"a\.jsonl:1: 'label' is .*, not a finite number"):
        texts(write("a.jsonl", line), columns=NumberColumns)


@pytest.mark.parametrize("value", ["1e39", -1e16, 10**20])
def test_numbers_that_would_overflow_are_refused(write: Write, value: object) -> None:
    path = write("a.jsonl", json.dumps({"text": "one", "label": value}))
    with pytest.raises(BertkitError, match=r"a\.jsonl:1: 'label' is .*1e\+15"):
        texts(path, columns=NumberColumns)
    [kept], _ = texts(write("b.jsonl", '{"text": "one", "label": -1e15}'), columns=NumberColumns)
    assert kept.label == -1e15


@pytest.mark.parametrize("columns", [TextColumns, LabelSetColumns])
def test_labels_that_no_file_can_spell_are_refused(
    write: Write, columns: type[TextColumns]
) -> None:
    """Else x\\ud800 and x\\ud801 were one class."""
    rows = ["x\ufffd", "x\U0001f642", "x\ud800", "x\ud801"]
    lines = [json.dumps({"text": "one", "label": label}) + "\n" for label in rows]
    good, _ = texts(write("a.jsonl", "".join(lines[:2])), columns=columns)
    assert len({given.label for given in good}) == 2
    with pytest.raises(BertkitError, match=r"b\.jsonl:3: the label 'x\\ud800' holds half of") as e:
        texts(write("b.jsonl", "".join(lines)), columns=columns)
    str(e.value).encode()  # can be printed


def test_multi_label(write: Write) -> None:
    rows = 'text,label\na,x|y\nb,\nc,"[""y"", ""x"", ""y""]"\nd,[x\ne, x | |x\n'
    inputs, counts = texts(write("a.csv", rows), columns=LabelSetColumns)
    assert [i.label for i in inputs] == [("x", "y"), (), ("y", "x"), ("[x",), ("x",)]
    assert not counts.skipped
    lines = '{"text": "a", "label": ["x", 1]}\n{"text": "b", "label": null}\n'
    inputs, counts = texts(write("a.jsonl", lines), columns=LabelSetColumns)
    assert [i.label for i in inputs] == [("x", "1")]
    assert counts.skipped == {"row without label": 1}
    inputs, _ = texts(write("b.csv", "text,label\na,x;y\n"), columns=LabelSetColumns, separator=";")
    assert inputs[0].label == ("x", "y")


@pytest.mark.parametrize(
    "label",
    [
        [0, 1, 0],
        [1, 0],
        [0.0, 1.0],
        [False, True],
        "[1, 0]",
        "[0, 0]",
        [["x", "y"]],
        {"x": 1},
        [{}],
    ],
)
def test_labels_that_are_no_names_are_refused(write: Write, label: object) -> None:
    path = write("a.jsonl", json.dumps({"text": "one", "label": label}))
    with pytest.raises(BertkitError, match=r"a\.jsonl:1: the labels are .*; write (a list|the) "):
        texts(path, columns=LabelSetColumns)


def test_nan_is_not_the_empty_set_of_labels(write: Write) -> None:
    path = write("a.jsonl", '{"text": "a", "label": NaN}\n{"text": "b", "label": []}\n')
    found = list(LabelSetColumns().read(path, TextCounts()))
    assert [(one.text, one.label) for one in found] == [("b", ())]


def test_numbers_may_be_names_of_labels(write: Write) -> None:
    path = write("a.jsonl", '{"text": "a", "label": [0, 1]}\n{"text": "b", "label": [7, 1, 7]}\n')
    assert [i.label for i in texts(path, columns=LabelSetColumns)[0]] == [("0", "1"), ("7", "1")]
    with pytest.raises(BertkitError, match="--separator is empty"):
        LabelSetColumns(separator="")


def test_decimals_are_numbers() -> None:
    assert row_number(Decimal("4.50"), "label", "a:1") == 4.5


def test_lists_of_labels_that_pandas_wrote_are_refused(write: Write) -> None:
    for text in ("['a', 'b']", "['a' 'b']", " [\"a\", 'b'] "):
        quoted = text.replace('"', '""')
        path = write("a.csv", f'text,label\none,x|y\ntwo,"{quoted}"\n')
        message = r"a\.csv:3: .* is a list or object in Python's notation; write it as JSON"
        with pytest.raises(BertkitError, match=message):
            texts(path, columns=LabelSetColumns)
    [found], _ = texts(write("b.csv", "text,label\none,['a'] and [b\n"), columns=LabelSetColumns)
    assert found.label == ("['a'] and [b",)


def test_a_label_that_only_begins_as_a_list_is_a_name(write: Write) -> None:
    deep = "[" * 100_000
    [found], _ = texts(write("a.csv", f'text,label\none,"{deep}"\n'), columns=LabelSetColumns)
    assert found.label == (deep,)


def test_nothing_to_use(write: Write) -> None:
    with pytest.raises(BertkitError, match=r"no row that can be used; the first: empty 'text' at"):
        texts(write("a.csv", "text,label\n,x\n"))
    with pytest.raises(BertkitError, match="it has no rows"):
        texts(write("b.csv", "text,label\n"))
    with pytest.raises(BertkitError, match="does not exist"):
        texts("nosuch.csv")
