"""Rows of files with columns: CSV, TSV, JSON lines, Parquet, Hugging Face data sets."""

from __future__ import annotations

import csv
import gzip
import io
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from bertkit.datasets.columns import LabelSetColumns
from bertkit.datasets.tabular import has_columns
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.text.lines import TextCounts
from tests.conftest import read_rows
from tests.tasks.test_tables import texts

Write = Callable[[str, str], Path]


def test_csv_is_quoted_and_places_are_first_lines(write: Write) -> None:
    path = write("a.csv", 'text,label\n"one\ntwo, ""three""",x\n\nשלום עולם,y\n👩‍👩‍👧,z\n')
    rows = list(read_rows(path, TextCounts()))
    assert rows == [
        (f"{path}:2", {"text": 'one\ntwo, "three"', "label": "x"}),
        (f"{path}:5", {"text": "שלום עולם", "label": "y"}),
        (f"{path}:6", {"text": "👩‍👩‍👧", "label": "z"}),
    ]


@pytest.mark.parametrize("end", ["\r\n", "\n", "\r"])
def test_lines_within_a_field_end_as_in_the_file(tmp_path: Path, end: str) -> None:
    """Offsets are of the user's text: Python's csv and pandas read the same."""
    path = tmp_path / "a.csv"
    field = "One.\r\nTwo.\n\nThree.\rFour"
    rows = ["text,label", f'"{field}",x', "next,y"]
    path.write_bytes((end.join(rows) + end).encode())
    assert [row["text"] for _, row in read_rows(path, TextCounts())] == [field, "next"]
    with path.open(newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == [field, "next"]
    path.write_bytes((end.join(["a;b", f'"{field}";x']) + end).encode())
    assert [row["a"] for _, row in read_rows(path, TextCounts())] == [field]


@pytest.mark.parametrize("end", ["\r\n", "\n", "\r"])
def test_invalid_bytes_are_counted_by_lines(tmp_path: Path, end: str) -> None:
    path, counts = tmp_path / "a.csv", TextCounts()
    path.write_bytes(end.join(["text,label", "a,x", "b\udcff,y", "c\udcff,z"]).encode(
        errors="surrogateescape"))  # fmt: skip
    assert [row["text"] for _, row in read_rows(path, counts)] == ["a", "b\ufffd", "c\ufffd"]
    [(reason, number)] = counts.skipped.items()
    assert (number, counts.examples[reason]) == (2, f"{path}:3")


def test_tsv_has_no_quotes(write: Write) -> None:
    path = write("a.tsv", '\ufefftext\tlabel\n"He said\tx\nit\'s "fine"\ty\n')
    assert [row for _, row in read_rows(path, TextCounts())] == [
        {"text": '"He said', "label": "x"},
        {"text": 'it\'s "fine"', "label": "y"},
    ]


def test_tsv_with_the_quotes_of_csv_is_told_and_read_as_csv_on_demand(write: Write) -> None:
    path = write("a.tsv", 'text\tlabel\n"He said ""no"""\tx\n"Why?" is "it"\ty\n""\tz\n')
    counts = TextCounts()
    rows = [row["text"] for _, row in read_rows(path, counts)]
    assert rows == ['"He said ""no"""', '"Why?" is "it"', '""']
    told = "field of TSV quoted as in CSV (the format csv reads its quotes), kept"
    assert counts.examples == {told: f"{path}:2"}
    assert counts.skipped[told] == 1
    path = write("b.tsv", 'text\tlabel\n"He said ""no"""\tx\n')
    rows = [row["text"] for _, row in read_rows(path, TextCounts(), "csv", columns=["text"])]
    assert rows == ['He said "no"']


@given(
    st.lists(
        st.tuples(
            st.text(
                st.characters(exclude_categories=("Cs", "Cc")) | st.sampled_from('",\n\t'),
                max_size=8,
            ),
            st.sampled_from(["x", "y"]),
        ),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=60, deadline=None)
def test_csv_survives_a_round_trip(rows: list[tuple[str, str]]) -> None:
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="\n").writerows([("text", "label"), *rows])
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.csv")
        path.write_text(file.getvalue(), encoding="utf-8", newline="")
        found = [(row["text"], row["label"]) for _, row in read_rows(path, TextCounts())]
    assert found == rows


def test_ragged_rows_are_counted(write: Write) -> None:
    path = write("a.csv", "text,label\none,x\ntwo\nthree,y,extra\nfour,z\nfive,z\n")
    inputs, counts = texts(path)
    assert [(i.id, i.text) for i in inputs] == [("0", "one"), ("3", "four"), ("4", "five")]
    assert counts.skipped == {
        "row with fewer fields than the first line": 1,
        "row with more fields than the first line": 1,
    }
    assert counts.examples["row with more fields than the first line"] == f"{path}:4"


def test_mostly_ragged_rows_are_an_error(write: Write) -> None:
    path = write("a.csv", "text,label\na,b,c\nx,y\nd,e,f\n")
    with pytest.raises(BertkitError, match=r"a\.csv:2: row with 3 fields.* 2 of 3 rows"):
        texts(path)


@pytest.mark.parametrize("rest", ["", '\nmore,"x"\n'])
def test_a_quote_left_open_swallows_nothing(write: Write, rest: str) -> None:
    path = write("a.csv", f'text,label\none,x\n"two,y\nthree,z{rest}')
    with pytest.raises(BertkitError, match=r"a\.csv:3: bad quotes in the row that begins here"):
        texts(path)


def test_missing_columns_are_named(write: Write) -> None:
    message = r"a\.csv has no column 'lable' \(columns: text, label\); did you mean 'label'\?"
    with pytest.raises(BertkitError, match=message):
        texts(write("a.csv", "text,label\none,x\n"), label="lable")
    with pytest.raises(BertkitError, match=r"no column 'zzz' \(columns: text, label\); name one"):
        texts(write("a.jsonl", '{"text": "one", "label": "x"}\n'), label="zzz")
    with pytest.raises(BertkitError, match="two columns 'text'"):
        texts(write("b.csv", "text,text,label\na,b,c\n"))


def test_json_lines(write: Write) -> None:
    lines = ['{"text": "one", "label": 1}', "[1]", "{broken", '{"text": "two"}', ""]
    path = write("a.jsonl", "\n".join([*lines, '{"text": "\\ud800three", "label": true}']))
    inputs, counts = texts(path)
    assert [(i.id, i.text, i.label) for i in inputs] == [
        ("0", "one", "1"),
        ("4", "\ufffdthree", "True"),
    ]
    assert counts.skipped == {
        "line is not a JSON object": 2,
        "row without column 'label'": 1,
        "lone surrogate replaced, kept": 1,
    }
    array = r"b\.jsonl:1: this file is a JSON array; no line of this file is a JSON object"
    with pytest.raises(BertkitError, match=array):
        texts(write("b.jsonl", '[{"text": "one"}]\n'))


def test_the_last_object_of_an_array_is_not_all_of_it(write: Write) -> None:
    rows = ",\n".join(f'{{"text": "{word}", "label": "x"}}' for word in ("one", "two", "three"))
    for name, text in (("a.json", f"[\n{rows}\n]\n"), ("b.jsonl", f"[{rows}]\n")):
        with pytest.raises(BertkitError, match=r"1: this file is a JSON array; "):
            texts(write(name, text))
    with pytest.raises(BertkitError, match=r"c\.jsonl:2: 2 of 3 lines are not a JSON object"):
        texts(write("c.jsonl", '{"text": "one", "label": "x"}\n{"text"\n{"label"\n'))


def test_compressed_files_folders_and_damage(tmp_path: Path) -> None:
    content = gzip.compress(b"text,label\none,x\n" * 1)
    (tmp_path / "a.csv.gz").write_bytes(content)
    (tmp_path / "b.jsonl").write_text('{"text": "two", "label": "y"}\n')
    (tmp_path / "c.pdf").write_text("no table")
    inputs, counts = texts(tmp_path)
    assert [(i.id, i.text) for i in inputs] == [("0", "one"), ("1", "two")]
    assert counts.skipped == {"file of unknown type": 1}
    assert counts.files == 2
    (tmp_path / "a.csv.gz").write_bytes(content[:-9])
    with pytest.raises(BertkitError, match=r"a\.csv\.gz cannot be read after row or line"):
        texts(tmp_path / "a.csv.gz")


def test_a_million_characters(write: Write) -> None:
    long = "x" * 10**6
    for name, separator in (("a.csv", ","), ("a.tsv", "\t")):
        [found], _ = texts(write(name, f"text{separator}label\n{long}{separator}y\n"))
        assert found.text == long


def test_files_without_a_header_and_text_files(write: Write) -> None:
    [found], _ = texts(write("a.csv", "one,x\n"), text="0", label="1", header=False)
    assert (found.text, found.label) == ("one", "x")
    path = write("a.txt", "text\tlabel\none\tx\n")
    with pytest.raises(BertkitError, match=r"a\.txt is text, which has no columns; give the form"):
        texts(path)
    assert texts(path, format="tsv")[0][0].label == "x"


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    columns = {"text": ["one", "two", None], "label": [1.0, None, 2.0], "n": [["a"], [], None]}
    parquet.write_table(pyarrow.table(columns), path)
    inputs, counts = texts(path)
    assert [(i.text, i.label, i.place) for i in inputs] == [("one", "1", f"{path}:1")]
    assert counts.skipped == {"row without label": 1, "empty 'text'": 1}
    assert [i.label for i in texts(path, label="n", columns=LabelSetColumns)[0]] == [("a",), ()]
    with pytest.raises(BertkitError, match="no column 'body'"):
        texts(path, text="body")
    path.write_text("no parquet, but long enough for a footer")
    with pytest.raises(BertkitError, match=r"a\.parquet cannot be read"):
        texts(path)


def test_hugging_face_class_numbers_become_names(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])}
    )
    rows = {"text": ["one", "two", "three"], "label": [1, 0, -1]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(str(tmp_path / "train.parquet"))
    for source in (f"hf:{tmp_path}::train", tmp_path / "train.parquet"):
        inputs, counts = texts(source)
        assert [i.label for i in inputs] == ["yes", "no"]
        assert counts.skipped == {"row without label": 1}
    with pytest.raises(BertkitError, match=r"no column 'txt' \(columns: text, label\); did you"):
        texts(f"hf:{tmp_path}", text="txt")
    with pytest.raises(BertkitError, match="cannot load hf:"):
        texts(f"hf:{tmp_path}::nosuch")


def test_class_numbers_in_lists_become_names_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    kind = datasets.ClassLabel(names=["O", "B-PER"])
    features = datasets.Features(
        {
            "tags": datasets.Sequence(kind),
            "deep": datasets.Sequence(datasets.Sequence(kind)),
            "numbers": datasets.Sequence(datasets.Value("int32")),
            "answers": datasets.Sequence({"names": datasets.Value("string")}),
        }
    )
    columns = {
        "tags": [[1, 0, -1], [], None],
        "deep": [[[1], []], None, [[0, 1]]],
        "numbers": [[1, 0], [], None],
        "answers": [{"names": ["x"]}, {"names": []}, {"names": ["y"]}],
    }
    path = str(tmp_path / "train.parquet")
    datasets.Dataset.from_dict(columns, features=features).to_parquet(path)
    for source in (f"hf:{tmp_path}::train", path):
        rows = [row for _, row in read_rows(source, TextCounts())]
        assert [row["tags"] for row in rows] == [["B-PER", "O", None], [], None]
        assert [row["deep"] for row in rows] == [[["B-PER"], []], None, [["O", "B-PER"]]]
        for name in ("numbers", "answers"):
            assert [row[name] for row in rows] == columns[name]


LABEL = {"names": ["no", "yes"], "_type": "ClassLabel"}


@pytest.mark.parametrize(
    ("feature", "value", "expected"),
    [
        (LABEL, 1, "yes"),
        (LABEL, "yes", "yes"),
        ({"feature": LABEL, "length": -1, "_type": "Sequence"}, [0, -1], ["no", None]),
        ([LABEL], [1], ["yes"]),
        ({"feature": {"dtype": "int64", "_type": "Value"}}, {"feature": 1}, {"feature": 1}),
        ({"names": {"dtype": "int64", "_type": "Value"}}, {"names": 1}, {"names": 1}),
        ("no type", 1, 1),
        ([], [1], [1]),
        ({"names": None, "_type": "ClassLabel"}, 1, 1),
    ],
)
def test_classes_of_parquet_as_every_version_of_datasets_names_them(
    tmp_path: Path, feature: object, value: object, expected: object
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"
    table = pyarrow.table({"x": [value]})
    for features in ({"x": feature}, {"x": feature, "gone": LABEL}):
        about = json.dumps({"info": {"features": features}})
        parquet.write_table(table.replace_schema_metadata({"huggingface": about}), path)
        assert [row for _, row in read_rows(path, TextCounts())] == [{"x": expected}]
    for about in ("{", "[]", '{"info": {"features": []}}'):
        parquet.write_table(table.replace_schema_metadata({"huggingface": about}), path)
        assert [row for _, row in read_rows(path, TextCounts())] == [{"x": value}]


def test_a_class_without_a_name(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    about = json.dumps({"info": {"features": {"label": LABEL}}})
    table = pyarrow.table({"text": ["a", "b"], "label": [1, 2]})
    parquet.write_table(
        table.replace_schema_metadata({"huggingface": about}), tmp_path / "a.parquet"
    )
    message = r"a\.parquet:2: 'label' holds the class 2, and the file names 2 from 0; correct it"
    with pytest.raises(BertkitError, match=message):
        texts(tmp_path / "a.parquet")


@pytest.mark.parametrize(("name", "module"), [("a.parquet", "pyarrow"), ("hf:x", "datasets")])
def test_missing_libraries_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    for loaded in (module, "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, loaded, None)
    (tmp_path / "a.parquet").touch()
    path = name if ":" in name else str(tmp_path / name)
    with pytest.raises(
        BertkitError, match=rf"need {module}.*; install bertkit with the extra 'data'"
    ):
        texts(path)


def test_has_columns(write: Write) -> None:
    path = write("a.csv", "text,label\none,x\n")
    assert has_columns(path, ["label"])
    assert not has_columns(path, ["class"])
    assert has_columns(write("a.jsonl", '{"text": "one"}\n{"label": 1}\n'), ["label"])


@pytest.mark.parametrize("name", ["a.csv.gz", "a.tsv.gz", "a.jsonl.gz"])
def test_has_column_of_a_damaged_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(gzip.compress(b"text,label\none,x\n")[:-9])
    with pytest.raises(BertkitError, match=rf"{name} cannot be read after row or line 0 \("):
        has_columns(tmp_path / name, ["label"])


def test_csv_is_divided_by_semicolons_whatever_its_columns_are_called(write: Write) -> None:
    path = write("a.csv", "Titel;Thema\neins;x\n")
    with pytest.raises(BertkitError, match=r"no column 'title' \(columns: Titel, Thema\)"):
        list(read_rows(path, TextCounts(), columns=["title"]))
    whole = write("b.csv", "a;b\neins\n")
    assert [row for _, row in read_rows(whole, TextCounts(), columns=["a;b"])] == [{"a;b": "eins"}]
