"""Tables: columns of the user's files as texts and choices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bertkit.errors import BertkitError
from bertkit.tasks.inputs import ChoiceInput, TextInput
from bertkit.tasks.tables import first_key_of, read_choices, read_texts
from bertkit.text.lines import TextCounts

Write = Callable[[str, str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def texts(path: Path | str, **options: object) -> tuple[list[TextInput], TextCounts]:
    counts = TextCounts()
    return list(read_texts(path, counts, **options)), counts  # type: ignore[arg-type]


def choices(path: Path, **options: object) -> tuple[list[ChoiceInput], TextCounts]:
    counts = TextCounts()
    settings = {"text": "q", "choices": ["a", "b", "c"], **options}
    return list(read_choices(path, counts, **settings)), counts  # type: ignore[arg-type]


# Texts -------------------------------------------------------------------------------------------


def test_pairs_ids_and_skips(write: Write) -> None:
    path = write("a.csv", "n,a,b,y\nu1,one,two,x\nu2, ,two,x\nu3,one,,x\nu4,one,two, \n")
    inputs, counts = texts(path, text="a", pair="b", label="y", id="n")
    assert inputs == [TextInput("u1", "one", "two", "x", f"{path}:2")]
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
    for kind, label in (("classify", "2"), ("regress", 2.0), ("multi-label", ("2",))):
        inputs, _ = texts(path, keep_unlabelled=True, kind=kind)
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
    with pytest.raises(BertkitError, match=r"a\.csv:4: ID '7' stands at .*a\.csv:2 already"):
        texts(path, id="id")
    with pytest.raises(BertkitError, match=r"b\.csv:2: no ID in column 'id'"):
        texts(write("b.csv", "id,text,label\n,one,x\n"), id="id")


def test_numbers(write: Write) -> None:
    inputs, counts = texts(
        write("a.csv", "text,label\none,4.5\ntwo,\nthree,-1e3\n"), kind="regress"
    )
    assert [i.label for i in inputs] == [4.5, -1000.0]
    assert counts.skipped == {"row without label": 1}
    assert texts(write("a.jsonl", '{"text": "one", "label": 3}\n'), kind="regress")[0][0].label == 3


@pytest.mark.parametrize("value", ["good", "nan", "inf", "1e999", "3,5", True, [1], 10**400])
def test_no_number(write: Write, value: object) -> None:
    line = json.dumps({"text": "one", "label": value})
    with pytest.raises(BertkitError, match=r"a\.jsonl:1: 'label' is .*, not a finite number"):
        texts(write("a.jsonl", line), kind="regress")


def test_multi_label(write: Write) -> None:
    rows = 'text,label\na,x|y\nb,\nc,"[""y"", ""x"", ""y""]"\nd,[x\ne, x | |x\n'
    inputs, counts = texts(write("a.csv", rows), kind="multi-label")
    assert [i.label for i in inputs] == [("x", "y"), (), ("y", "x"), ("[x",), ("x",)]
    assert not counts.skipped
    lines = '{"text": "a", "label": ["x", 1]}\n{"text": "b", "label": null}\n'
    inputs, counts = texts(write("a.jsonl", lines), kind="multi-label")
    assert [i.label for i in inputs] == [("x", "1")]
    assert counts.skipped == {"row without label": 1}
    inputs, _ = texts(write("b.csv", "text,label\na,x;y\n"), kind="multi-label", separator=";")
    assert inputs[0].label == ("x", "y")


def test_nothing_to_use(write: Write) -> None:
    with pytest.raises(BertkitError, match=r"no row that can be used; the first: empty 'text' at"):
        texts(write("a.csv", "text,label\n,x\n"))
    with pytest.raises(BertkitError, match="it has no rows"):
        texts(write("b.csv", "text,label\n"))
    with pytest.raises(BertkitError, match="does not exist"):
        texts("nosuch.csv")
    with pytest.raises(BertkitError, match="unknown kind 'regres'; did you mean 'regress'"):
        texts(write("c.csv", "text,label\na,x\n"), kind="regres")


# Choices -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("0 1 2", [0, 1, 2]),
        ("1 2 1", [1, 2, 1]),  # nothing shows that they count from 1
        ("1 2 3", [0, 1, 2]),
        ("A b C", [0, 1, 2]),
        ("A B 2 C", [0, 1, 1, 2]),
        ("0 1 2 B", [0, 1, 2, 1]),
        ("a b c", [0, 1, 2]),
    ],
)
def test_keys_of_choices(write: Write, keys: str, expected: list[int]) -> None:
    rows = "".join(f"what,one,two,three,{key}\n" for key in keys.split())
    inputs, counts = choices(write("a.csv", f"q,x,y,z,label\n{rows}"), choices=["x", "y", "z"])
    assert [given.label for given in inputs] == expected
    shifted = sum(key.isdigit() for key in keys.split()) if keys in ("1 2 3", "A B 2 C") else 0
    assert counts.skipped["key counted from 1, kept"] == shifted


@pytest.mark.parametrize("keys", ["1 2 3 4", "1 2 3", "0 1 2", "A B 1", "A B", "1 2 9", "", " 4"])
def test_files_that_belong_together_count_alike(write: Write, keys: str) -> None:
    """What `first_key_of` says of a file is how `read_choices` reads it and can read others."""
    names = ["a", "b", "c", "d"]
    rows = "".join(f"what,one,two,three,four,{key}\n" for key in keys.split(" "))
    path = write("train.csv", f"q,a,b,c,d,label\n{rows}")
    first = first_key_of(path, choices=names)
    assert first == int(keys in ("1 2 3 4", "A B 1", "A B", " 4"))
    alone, _ = choices(path, choices=names, keep_unlabelled=True)
    assert choices(path, choices=names, first_key=first, keep_unlabelled=True)[0] == alone

    dev = write("dev.csv", "q,a,b,c,d,label\n" + "".join(f"w,1,2,3,4,{key}\n" for key in "123B"))
    inputs, counts = choices(dev, choices=names, first_key=first)
    assert [i.label for i in inputs] == [1 - first, 2 - first, 3 - first, 1]
    assert counts.skipped == ({"key counted from 1, kept": 3} if first else {})


def test_a_first_key_that_is_given_is_kept_to(write: Write) -> None:
    rows = "".join(f"w,1,2,3,{key}\n" for key in ("0", "1", "3", "", "a"))
    path = write("a.csv", f"q,a,b,c,label\n{rows}")
    inputs, counts = choices(path, first_key=1)
    assert [(i.id, i.label) for i in inputs] == [("1", 0), ("2", 2), ("4", 0)]
    assert counts.skipped == {
        "label out of range": 1,
        "row without label": 1,
        "key counted from 1, kept": 2,
    }
    inputs, counts = choices(path, first_key=0, keep_unlabelled=True)
    assert [(i.id, i.label) for i in inputs] == [("0", 0), ("1", 1), ("3", None), ("4", 0)]
    assert counts.skipped == {"label out of range": 1, "row without label, kept": 1}
    with pytest.raises(BertkitError, match="count from 0 or 1, not from 2"):
        choices(path, first_key=2)
    with pytest.raises(BertkitError, match=r"a\.csv has no column 'key' .*"):
        first_key_of(path, choices=["a", "b"], label="key")
    header = write("b.csv", "w,1,2,2\nw,1,2,1\n")
    assert first_key_of(header, choices=["1", "2"], label="3", header=False) == 1
    assert first_key_of(write("c.txt", "a\tb\tk\nx\ty\t2\n"), choices="ab", label="k", format="tsv")


def test_keys_that_are_column_names(write: Write) -> None:
    path = write("a.csv", "q,b,a,label\nwhat,one,two,a\nwhat,one,two,b\n")
    assert [i.label for i in choices(path, choices=["b", "a"])[0]] == [1, 0]
    path = write("b.csv", "what,one,two,0\nwhat,one,two,1\n")
    found, _ = choices(path, text="0", choices=["1", "2"], label="3", header=False)
    assert [i.label for i in found] == [0, 1]


def test_keys_out_of_range_and_empty_choices(write: Write) -> None:
    rows = [
        *("w,1,2,3,0", "w,1,2,3,7", "w,1,2,3,AB", f"w,1,2,3,{'9' * 5000}", "w,1,2,,1", "w,1,2,,2"),
        *("w,1,,3,0", "w,,,,0", "w,1,2,3,"),
    ]
    path = write("a.csv", "q,a,b,c,label\n" + "\n".join(rows))
    inputs, counts = choices(path)
    assert [(i.id, i.choices, i.label) for i in inputs] == [
        ("0", ("1", "2", "3"), 0),
        ("4", ("1", "2"), 1),
    ]
    assert counts.skipped == {
        "label out of range": 4,
        "empty 'b'": 1,
        "empty 'a'": 1,
        "row without label": 1,
    }
    assert counts.examples["label out of range"] == f"{path}:3"
    assert {i.label for i in choices(path, labelled=False)[0]} == {None}


def test_choices_must_be_two_columns(write: Write) -> None:
    for columns in (["a"], ["a", "a"]):
        with pytest.raises(BertkitError, match="two columns or more, each once"):
            choices(write("a.csv", "q,a,label\nw,1,0\n"), choices=columns)


def test_arc_easy(data: Path) -> None:
    """Rows whose keys are digits have no choices in this copy; two have a fifth choice's key."""
    expected = {"train2251": (2147, {"empty '1'": 102, "label out of range": 2})}
    expected["dev570"] = (549, {"empty '1'": 21})
    for name, (size, skipped) in expected.items():
        inputs, counts = choices(
            data / "arc-easy" / f"arc_easy_{name}.csv",
            text="0",
            choices=["1", "2", "3", "4"],
            label="5",
            header=False,
        )
        assert len(inputs) == size
        assert counts.skipped == skipped
        assert size + counts.skipped.total() == int(name.lstrip("traindev"))
        assert {i.label for i in inputs} == {0, 1, 2, 3}
        path = data / "arc-easy" / f"arc_easy_{name}.csv"
        assert first_key_of(path, choices=["1", "2", "3", "4"], label="5", header=False) == 1
