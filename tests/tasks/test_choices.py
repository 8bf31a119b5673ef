"""Choices from the columns of the user's files, and which of them a key means."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from bertkit.datasets.columns import NO_ZERO, ChoiceColumns
from bertkit.datasets.examples import ChoiceExample
from bertkit.datasets.records import Records

from bertkit.errors import BertkitError
from bertkit.text.lines import TextCounts

Write = Callable[[str, str], Path]


def choices(
    path: Path, *, labelled: bool = True, keep_unlabelled: bool = False, **options: Any
) -> tuple[list[ChoiceExample], TextCounts]:
    counts = TextCounts()
    columns = made(**{"text": "q", "choices": ["a", "b", "c"], **options})
    kept = {"labelled": labelled, "keep_unlabelled": keep_unlabelled}
    return list(columns.read(path, counts, **kept)), counts


def made(choices: Sequence[str], **options: Any) -> ChoiceColumns:
    return ChoiceColumns(choices=tuple(choices), **options)


def lowest_key(path: Path, **options: Any) -> int:
    some = {"text": next(iter(options["choices"]), "text"), **options}  # any column of the file
    return made(**some).lowest_key(path, TextCounts())


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
        ("0.0 1.0 2.0", [0, 1, 2]),  # as pandas writes them beside a missing value
    ],
)
def test_keys_of_choices(tmp_path: Path, write: Write, keys: str, expected: list[int]) -> None:
    rows = "".join(f"what,one,two,three,{key}\n" for key in keys.split())
    inputs, counts = choices(write("a.csv", f"q,x,y,z,label\n{rows}"), choices=["x", "y", "z"])
    assert [given.label for given in inputs] == expected
    shifted = sum(key.isdigit() for key in keys.split()) if keys in ("1 2 3", "A B 2 C") else 0
    assert counts.skipped["key counted from 1, kept"] == shifted
    open_ = {NO_ZERO: f"{tmp_path / 'a.csv'}:2"} if keys == "1 2 1" else {}
    assert {why: at for why, at in counts.examples.items() if why == NO_ZERO} == open_


@pytest.mark.parametrize(
    ("keys", "named", "from_zero"),
    [
        ("1 2 3", [0, 1, 2], [1, 2]),
        ("A 2 1", [0, 1, 0], [0, 2, 1]),
        ("1 2 0 1", None, [1, 2, 0, 1]),
        ("A 2 9", None, [0, 2]),
    ],
)
def test_choices_called_by_numbers_as_pandas_calls_columns(
    write: Write, keys: str, named: list[int] | None, from_zero: list[int]
) -> None:
    rows = "".join(f"what,x,y,z,{key}\n" for key in keys.split())
    path = write("a.csv", f"0,1,2,3,4\n{rows}")
    columns: dict[str, Any] = {"text": "0", "choices": ["1", "2", "3"], "label": "4"}
    if named is None:
        with pytest.raises(
            BertkitError, match=r"a\.csv:4: no choice is called [09]; .*--first-choice"
        ):
            choices(path, **columns)
    else:
        assert [one.label for one in choices(path, **columns)[0]] == named
    counted, _ = choices(path, **columns, first_choice=0)
    assert [one.label for one in counted] == from_zero


def test_a_choices_name_may_look_like_a_number(write: Write) -> None:
    path = write("a.csv", "q,2.0,1.0,label\nwhat,x,y,1.0\nwhat,x,y,2.0\nwhat,x,y,1.0\n")
    inputs, _ = choices(path, choices=["2.0", "1.0"])
    assert [given.label for given in inputs] == [1, 0, 1]


@pytest.mark.parametrize("keys", ["1 2 3 4", "1 2 3", "0 1 2", "A B 1", "A B", "1 2 9", "", " 4"])
def test_files_that_belong_together_count_alike(write: Write, keys: str) -> None:
    """What `lowest_key` says of a file is how it is read, and can read others.

    A file without numbers says nothing about those of others.
    """
    names = ["a", "b", "c", "d"]
    rows = "".join(f"what,one,two,three,four,{key}\n" for key in keys.split(" "))
    path = write("train.csv", f"q,a,b,c,d,label\n{rows}")
    first = lowest_key(path, choices=names)
    assert first == (-1 if keys in ("A B", "") else int(keys in ("1 2 3 4", "A B 1", " 4")))
    alone, _ = choices(path, choices=names, keep_unlabelled=True)
    assert choices(path, choices=names, first_choice=first, keep_unlabelled=True)[0] == alone
    said = choices(path, choices=names, first_choice=0, keep_unlabelled=True)[1].skipped
    assert NO_ZERO not in said, "who gives the first key knows it"

    dev = write("dev.csv", "q,a,b,c,d,label\n" + "".join(f"w,1,2,3,4,{key}\n" for key in "123B"))
    inputs, counts = choices(dev, choices=names, first_choice=first)
    start = max(0, first)
    assert [i.label for i in inputs] == [1 - start, 2 - start, 3 - start, 1]
    said = {1: {"key counted from 1, kept": 3}, 0: {}, -1: {NO_ZERO: 1}}
    assert counts.skipped == said[first]


def test_keys_from_one_where_rows_have_fewer_choices(write: Write) -> None:
    """A key that is the number of the choices of its own row says that keys count from 1."""
    names = list("abcde")
    rows = [f"w,1,2,3,4,,{1 + number % 4}\n" for number in range(40)] + ["w,1,2,3,4,5,2\n"]
    path = write("a.csv", "q,a,b,c,d,e,label\n" + "".join(rows))
    assert lowest_key(path, choices=names) == 1
    inputs, counts = choices(path, choices=names)
    assert [i.label for i in inputs] == [*(number % 4 for number in range(40)), 1]
    assert counts.skipped == {"key counted from 1, kept": 41}


@pytest.mark.parametrize(
    "rows",
    [
        ["w,1,2,3,,3", "w,1,2,3,,0"],  # a 0 stands somewhere
        ["w,1,2,3,4,3", "w,1,2,3,4,1"],  # below the number of choices
        ["w,1,,3,4,4", "w,,,,,2", "w,1,2,3,4,1"],  # only in rows that have a gap
    ],
)
def test_keys_from_zero(write: Write, rows: list[str]) -> None:
    path = write("a.csv", "\n".join(["q,a,b,c,d,label", *rows]))
    assert lowest_key(path, choices=list("abcd")) == 0


def test_a_first_key_that_is_given_is_kept_to(write: Write) -> None:
    rows = "".join(f"w,1,2,3,{key}\n" for key in ("0", "1", "3", "", "a"))
    path = write("a.csv", f"q,a,b,c,label\n{rows}")
    inputs, counts = choices(path, first_choice=1)
    assert [(i.id, i.label) for i in inputs] == [("1", 0), ("2", 2), ("4", 0)]
    assert counts.skipped == {
        "label out of range": 1,
        "row without label": 1,
        "key counted from 1, kept": 2,
    }
    inputs, counts = choices(path, first_choice=0, keep_unlabelled=True)
    assert [(i.id, i.label) for i in inputs] == [("0", 0), ("1", 1), ("3", None), ("4", 0)]
    assert counts.skipped == {"label out of range": 1, "row without label, kept": 1}
    with pytest.raises(BertkitError, match="count from 0 or 1, not from 2"):
        choices(path, first_choice=2)
    with pytest.raises(BertkitError, match=r"a\.csv has no column 'key' .*"):
        lowest_key(path, choices=["a", "b"], label="key")
    header = write("b.csv", "w,1,2,2\nw,1,2,1\n")
    assert lowest_key(header, choices=["1", "2"], label="3", header=False) == 1
    assert lowest_key(write("c.txt", "a\tb\tk\nx\ty\t2\n"), choices="ab", label="k", format="tsv")


def test_letters_of_keys_are_read_beside_ids_and_unlabelled_files(
    write: Write, tmp_path: Path
) -> None:
    options = ("one", "two", "three")
    rows = [("river", *options, "A", "id1"), ("stone", *options, "B", "id2")]
    columns = made(choices=["a", "b", "c"], id="id")
    found = list(columns.read(Records(rows, "train"), TextCounts()))
    assert [(given.id, given.label) for given in found] == [("id1", 0), ("id2", 1)]
    (tmp_path / "test").mkdir()
    write("test/a.csv", "q,a,b,c,label\nw,one,two,three,B\n")
    write("test/b.csv", "q,a,b,c\nw,one,two,three\n")
    inputs, counts = choices(tmp_path / "test", keep_unlabelled=True)
    assert [given.label for given in inputs] == [1, None]
    assert counts.skipped == {"row without label, kept": 1}


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


def lists(*rows: tuple[object, object]) -> str:
    return "".join(
        json.dumps({"q": "what", "all": found, "label": key}) + "\n" for found, key in rows
    )


def test_a_list_of_choices_in_one_column(write: Write, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows: list[tuple[list[str], object]] = [
        (["one", "two", "three"], "C"),
        (["one", "two"], 1),
        (["one", "", "three", ""], "A"),
        (["one", "two", "three", "four"], 0),
    ]
    expected = [
        (("one", "two", "three"), 2),
        (("one", "two"), 1),
        (("one", "two", "three", "four"), 0),
    ]
    table = "".join(f"what\t{json.dumps(found)}\t{key}\n" for found, key in rows)
    paths = [write("a.jsonl", lists(*rows)), write("a.tsv", f"q\tall\tlabel\n{table}")]
    columns = {"q": ["what"] * 4, "all": [r[0] for r in rows], "label": [str(r[1]) for r in rows]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    for path in (*paths, tmp_path / "a.parquet"):
        inputs, counts = choices(path, choices=["all"])
        assert [(i.choices, i.label) for i in inputs] == expected
        assert counts.skipped == {"empty 'all 2'": 1}
        assert {i.label for i in choices(path, choices=["all"], labelled=False)[0]} == {None}


def test_keys_of_lists_of_choices(write: Write) -> None:
    path = write("a.jsonl", lists((["a", "b"], 2), (["a", "b", "c"], 1)))
    assert lowest_key(path, choices=["all"]) == 1
    assert [i.label for i in choices(path, choices=["all"])[0]] == [1, 0]
    path = write("b.jsonl", lists((["a", "b"], "all"), (["a", "b"], "B")))
    inputs, counts = choices(path, choices=["all"])
    assert [i.label for i in inputs] == [1]
    assert counts.skipped == {"label out of range": 1}


def test_lists_with_too_few_choices(write: Write) -> None:
    rows: list[tuple[object, object]] = [
        (["a", "b"], 0),
        (["a"], 0),
        ([], 0),
        (None, 0),
        (" ", 0),
        (["a", 3], 0),
    ]
    inputs, counts = choices(write("a.jsonl", lists(*rows)), choices=["all"])
    assert len(inputs) == 1
    assert counts.skipped == {"fewer than two 'all'": 4, "column 'all 2' is not text": 1}


def test_choices_in_an_object_as_on_the_hub(write: Write) -> None:
    """ARC mixes letters and numbers from 1; CSV files hold the objects as JSON."""
    found = {"text": ["a", "b", "c"], "label": ["A", "B", "C"]}
    numbered = {"label": ["1", "2", "3"], "text": ["d", "e", "f"]}
    rows = lists((found, "C"), (json.dumps(found), "A"), (numbered, "2"))
    inputs, counts = choices(write("a.jsonl", rows), choices=["all"])
    assert [(i.choices, i.label) for i in inputs] == [
        (("a", "b", "c"), 2),
        (("a", "b", "c"), 0),
        (("d", "e", "f"), 1),
    ]
    assert not counts.skipped.get("label out of range")


@pytest.mark.parametrize("found", ["one, two", 3, {"texts": ["a", "b"]}, {"text": "a"}])
def test_one_column_that_holds_no_list(write: Write, found: object) -> None:
    path = write("a.jsonl", lists((found, 0)))
    message = r"a\.jsonl:1: 'all' is .*, not a list of choices; name a column for each: --choices A"
    for labelled in (True, False):
        with pytest.raises(BertkitError, match=message):
            choices(path, choices=["all"], labelled=labelled)


@pytest.mark.parametrize(("columns", "given"), [(["a", "a"], "a, a"), ([], "none")])
def test_choices_must_be_two_columns(write: Write, columns: list[str], given: str) -> None:
    path = write("a.csv", "q,a,label\nw,1,0\n")
    message = f"two columns or more, each once, or one of lists, not {given}; name them: --choices"
    with pytest.raises(BertkitError, match=message):
        choices(path, choices=columns)
    with pytest.raises(BertkitError, match=message):
        lowest_key(path, choices=columns)


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
        assert lowest_key(path, choices=["1", "2", "3", "4"], label="5", header=False) == 1
