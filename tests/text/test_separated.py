"""What divides the fields of a CSV."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from bertkit.datasets.columns import TextColumns
from bertkit.datasets.tabular import has_columns, numbered_rows
from bertkit.predict.text_vectors import read_lines

from bertkit.errors import BertkitError
from bertkit.text.documents import read_documents
from bertkit.text.lines import TextCounts, field_divider
from bertkit.text.sources import find_sources
from tests.conftest import read_rows

Write = Callable[[str, str], Path]


@pytest.mark.parametrize(("divider", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_csv_without_commas(write: Write, divider: str, name: str) -> None:
    rows = ["text;label", "one, two;x", '"a;b\n""c""";y', "three;x"]
    path = write("a.csv", "\n".join(rows).replace(";", divider))
    counts = TextCounts()
    found = [(i.text, i.label, i.place) for i in TextColumns().read(path, counts)]
    assert found == [
        ("one, two", "x", f"{path}:2"),
        (f'a{divider}b\n"c"', "y", f"{path}:3"),
        ("three", "x", f"{path}:5"),
    ]
    assert counts.skipped == {f"CSV divided by {name}, kept": 1}
    assert has_columns(path, ["label"])


def test_a_comma_or_a_name_that_is_asked_for_decides(write: Write) -> None:
    path = write("a.csv", "text,a;b\none,x\n")
    assert [row for _, row in read_rows(path, TextCounts())] == [{"text": "one", "a;b": "x"}]
    path = write("b.csv", "text;note\none;two\n")
    rows = read_rows(path, counts := TextCounts(), columns=["text;note"])
    assert [row for _, row in rows] == [{"text;note": "one;two"}]
    assert not counts.skipped
    with pytest.raises(BertkitError, match=r"no column 'label' \(columns: text, note\)"):
        list(TextColumns().read(path, TextCounts()))
    path = write("c.csv", "one; or\ntwo\n")  # the first line names nothing
    rows = read_rows(path, TextCounts(), header=False, columns=["0"])
    assert [row["0"] for _, row in rows] == ["one; or", "two"]


def test_what_excel_says_and_blank_lines(write: Write) -> None:
    path = write("a.csv", "sep=;\ntext;label\none, two;x\n")
    assert [(i.text, i.place) for i in TextColumns().read(path, TextCounts())] == [
        ("one, two", f"{path}:3")
    ]
    rows = read_rows(path, counts := TextCounts(), header=False, columns=["0"])
    assert [row["0"] for _, row in rows] == ["text", "one, two"]
    assert counts.skipped == {"CSV divided by semicolons, kept": 1}
    path = write("b.csv", "\n \ntext;label\none;x\n")
    assert [(i.text, i.place) for i in TextColumns().read(path, TextCounts())] == [
        ("one", f"{path}:4")
    ]
    path = write("c.csv", 'text; note\n"a, b"\nc\n')
    assert not has_columns(path, ["label"])
    found = TextColumns(text="text; note").read(path, TextCounts(), labelled=False)
    assert [i.text for i in found] == ["a, b", "c"]


def test_corpora_too(write: Write) -> None:
    path = write("a.csv", "id;text\n1;one, two\n2;three\n")
    counts = TextCounts()
    [source] = find_sources([str(path)])
    assert list(read_documents(source, counts)) == ["one, two", "three"]
    assert counts.skipped == {"CSV divided by semicolons, kept": 1}


def test_headers_without_a_divider() -> None:
    for header in ("", "text", '"a;b"', '"a\tb"', "text,"):
        assert field_divider(header, ("text",)) == ","


def test_rows_that_are_kept_whole_have_no_column_twice(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("text,note,note\nhello,one,two\n")
    [(_, _, row)] = numbered_rows(str(tmp_path / "a.csv"), TextCounts(), columns=("text",))
    assert row["text"] == "hello"
    with pytest.raises(BertkitError, match="two columns 'note'"):
        list(numbered_rows(str(tmp_path / "a.csv"), TextCounts(), columns=("text",), whole=True))


@pytest.mark.parametrize("name", ["a.csv", "a.tsv"])
def test_blank_lines_of_one_column_are_counted(write: Write, name: str) -> None:
    path = write(name, "\ntext\none\n\n\ntwo\n\n")
    counts = TextCounts()
    assert [row["text"] for _, row in read_rows(path, counts)] == ["one", "two"]
    assert counts.skipped == {"blank line in a file of one column": 2}
    assert counts.examples == {"blank line in a file of one column": f"{path}:4"}
    with pytest.raises(BertkitError, match=f"{name}:4: blank line"):
        list(read_lines(path, "text", TextCounts()))
    for others in ("text,b\none,x\n\ntwo,y\n", "text\r\r\none\r\r\ntwo\r\r\n"):
        divided = others.replace(",", "\t") if name == "a.tsv" else others
        counts = TextCounts()
        assert len(list(read_rows(write(name, divided), counts))) == 2
        assert not counts.skipped
