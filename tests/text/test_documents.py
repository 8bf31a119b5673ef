"""Documents of every format, and every kind of bad input, from hand-written files."""

from __future__ import annotations

import json
import lzma
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from bertkit.errors import BertkitError
from bertkit.tasks.classification import LabelColumns
from bertkit.tasks.columns import MemoryRows, read_rows
from bertkit.text import Source, TextCounts, find_sources, read_documents
from bertkit.text.documents import LONE_CR, REPLACED

File = Callable[[str, "str | bytes"], Path]


def read(path: Path, column: str = "text") -> tuple[list[str], TextCounts]:
    counts, documents = TextCounts(), list[str]()
    for source in find_sources([path]):
        documents += read_documents(source, counts, column=column)
    return documents, counts


@pytest.fixture
def file(tmp_path: Path) -> File:
    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def test_blank_lines_separate_documents(file: File) -> None:
    documents, counts = read(file("a.txt", "\n\nOne.\nTwo.\n\n \t\nThree.\n\n\n\nFour"))
    assert documents == ["One.\nTwo.", "Three.", "Four"]
    assert counts == TextCounts(files=1, documents=3, bytes=9 + 6 + 4)
    assert read(file("a.txt", "\n \n"))[1].skipped == {"empty file": 1}


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_line_ends_and_byte_order_marks(file: File, end: str, encoding: str) -> None:
    text = end.join(["Erste Zeile", "zweite\x0cSeite", "", "Käse\x00", ""])
    assert read(file("a.txt", text.encode(encoding)))[0] == (
        ["Erste Zeile\nzweite\x0cSeite", "Käse\x00"]
    )
    rows = end.join(["text,id", '"a,\xe4",1', ""]).encode(encoding)
    assert read(file("a.csv", rows))[0] == ["a,ä"]


def test_a_lone_carriage_return_is_counted_where_others_end_in_line_feeds(file: File) -> None:
    path = file("a.txt", "One\rtwo\r\nthree\rfour\nfive")
    documents, counts = read(path)
    assert documents == ["One\ntwo\nthree\nfour\nfive"]
    assert counts.skipped == {LONE_CR: 2}
    assert counts.examples == {LONE_CR: f"{path}:1"}
    assert read(file("a.txt", "One\rtwo\rthree"))[1].skipped == {}


def test_invalid_bytes_are_replaced_and_the_first_is_located(file: File) -> None:
    path = file(
        "a.txt", b"Good line.\n" * 10_000 + b"caf\xe9 noir, bien s\xfbr\n\n" + b"na\xefve\n"
    )
    documents, counts = read(path)
    assert documents[0].endswith("Good line.\ncaf\ufffd noir, bien s\ufffdr")
    assert documents[1] == "na\ufffdve"
    assert counts.skipped == {REPLACED: 2}
    assert counts.examples == {REPLACED: f"{path}:10001"}


@pytest.mark.parametrize(
    "content",
    [
        "Plain English.".encode("utf-16-be"),
        "Это русский текст.".encode("cp1251"),
        "Été à la plage. ".encode("latin-1") * 9,
        bytes(range(128, 256)) * 10,
        "It was “just” so, they said. ".encode("cp1252") * 20,
        lzma.compress(b"Text in a file without the ending of its compression."),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_other_encodings_are_refused(file: File, name: str, content: bytes) -> None:
    with pytest.raises(BertkitError, match=name) as caught:
        read(file(name, content))
    assert caught.value.code == "encoding"


def test_wikiextractor_keeps_title_and_body(file: File) -> None:
    path = file(
        "wiki_00",
        '<doc id="1" url="u" title="A">\nA\n\nBody one.\nBody two.\n\n</doc>\n'
        '<doc id="2" url="u" title="B">\nB\nText.</doc>\n\n<doc id="3">\n\n</doc>\n'
        "<doc id='1' title='A'>Hello world. One line.</doc>\n"
        '<doc id="1" title="A > B">One.</doc>\n<doc id="4">Begins here\nand ends.\n</doc>\n',
    )
    documents, counts = read(path)
    assert documents == [
        *("A\n\nBody one.\nBody two.", "B\nText.", "Hello world. One line.", "One."),
        "Begins here\nand ends.",
    ]
    assert counts.skipped == {"empty document": 1}
    assert counts.examples == {"empty document": f"{path}:12"}


def test_wikiextractor_reads_several_documents_of_a_line(file: File) -> None:
    path = file(
        "wiki_00",
        '<doc id="1" title="A">One.</doc><doc id="2">Two.</doc>  <doc id="3">\nThree.\n'
        "quotes </doc> here</doc> <doc id='4' title='B'>Four.</doc>\n"
        ' <doc id="5" title="12" records">Five.</doc>\n',
    )
    documents, counts = read(path)
    assert documents == ["One.", "Two.", "Three.\nquotes </doc> here", "Four.", "Five."]
    assert counts.skipped == {}


def test_wikiextractor_keeps_unclosed_documents(file: File) -> None:
    path = file("wiki_00", '<doc id="1">\nA\n<doc id="2">\nB\n</doc>\nstray\n<doc id="3">\nC\n')
    documents, counts = read(path)
    assert documents == ["A", "B", "C"]
    assert counts.skipped == {"unclosed <doc>, kept": 2, "line outside <doc>": 1}
    assert counts.examples["line outside <doc>"] == f"{path}:6"


@pytest.mark.slow
def test_wikipedia_articles_are_all_there(data: Path) -> None:
    path = data / "wikipedia" / "wiki_AA.txt.xz"
    [source] = find_sources([path])
    documents = list(islice(read_documents(source, TextCounts()), 300))
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        raw = stream.read(sum(map(len, documents)) + 200_000)
    bodies = re.findall(r"<doc [^\n]*>\n(.*?)</doc>\n", raw, flags=re.DOTALL)[:300]
    assert documents == [body.strip() for body in bodies]


def test_jsonl_reads_a_column_and_counts_the_rest(file: File) -> None:
    rows = ['{"text": "One.\\n\\nStill one.", "id": 1}', "", "{not json", '{"id": 2}', "[1]"]
    rows += ['{"text": " "}', '{"text": null}', '{"text": 7}', "[" * 100_000]
    path = file("a.jsonl", "\n".join([*rows, r'{"text": "a\ud800b \ud83d\ude00"}']))
    documents, counts = read(path)
    assert documents == ["One.\n\nStill one.", "a\ufffdb \U0001f600"]
    assert counts.skipped == {
        "line is not a JSON object": 3,
        "row without column 'text'": 1,
        "empty document": 2,
        "column 'text' is not text": 1,
        "lone surrogate replaced, kept": 1,
    }
    assert counts.examples["line is not a JSON object"] == f"{path}:3"
    for content in ("[\n  {\n", '"a"\n"b"\n', '{"data": ["a"]}'):
        with pytest.raises(BertkitError, match=r"a\.json"):
            read(file("a.json", content))


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_json_array_has_rows(file: File, indent: int | None, wrapped: bool) -> None:
    rows: Any = [{"text": "One."}, 7, {"text": "Two."}, {"id": 3}]
    content = json.dumps({"data": rows} if wrapped else rows, indent=indent)
    documents, counts = read(file("a.json", content))
    assert documents == ["One.", "Two."]
    assert counts.skipped == {"line is not a JSON object": 1, "row without column 'text'": 1}
    assert counts.examples["row without column 'text'"].endswith("a.json:4")


def test_csv_and_tsv(file: File) -> None:
    content = '\ufeffid, text\r\n1,"One, ""two""\r\n\r\nthree"\r\n2\r\n\r\n3,x,y\r\n4,\r\n5,z,\r\n'
    path = file("a.csv", content)
    documents, counts = read(path)
    assert documents == ['One, "two"\r\n\r\nthree', "z"]
    assert counts.skipped == {
        "row without column 'text'": 1,
        "row with more fields than the first line": 1,
        "empty document": 1,
    }
    assert counts.examples["row without column 'text'"] == f"{path}:5"
    with pytest.raises(BertkitError, match=r"a\.csv:3: bad quotes"):
        read(file("a.csv", 'text,id\nfirst,1\n"second,2\nthird,3\n'))
    long = "long " * 60_000
    assert read(file("a.tsv", f'text\tlabel\n"Open quote\t1\nB "b" b\t0\n{long}\t0\n'))[0] == (
        ['"Open quote', 'B "b" b', long.strip()]
    )


@pytest.mark.parametrize("sign", [";", "\t", ","])
def test_the_header_of_csv_shows_what_separates_fields(file: File, sign: str) -> None:
    content = f'id{sign}text\n1{sign}One; two, three\n2{sign}"One; two, ""three"""\n'
    content = content.replace("1;One; two, three", '1;"One; two, three"')
    content = content.replace("1,One; two, three", '1,"One; two, three"')
    assert read(file("a.csv", content))[0] == ["One; two, three", 'One; two, "three"']


def test_full_exports_of_annotation_tools(file: File) -> None:
    def choice(name: str, *choices: str) -> dict[str, Any]:
        return {"value": {"choices": choices}, "from_name": name, "type": "choices"}

    def row(*annotations: dict[str, Any]) -> dict[str, Any]:
        return {"id": 1, "data": {"text": "One.", "page": 2}, "annotations": [*annotations]}

    tasks = [
        row({"result": [choice("mood", "good")]}, {"result": [choice("mood", "bad")]}),
        row({"was_cancelled": True, "result": [choice("mood", "bad")]}),
        row({"result": [choice("mood", "good"), choice("topics", "a", "b")]}),
    ]
    counts = TextCounts()
    path = file("a.json", json.dumps(tasks, indent=1))
    rows = [row for _, _, row in read_rows(path, counts, whole=True)]
    data = {"text": "One.", "page": 2}
    assert rows == [
        {**data, "spans": [], "label": "good", "mood": "good"},
        {**data, "spans": None},
        {**data, "spans": [], "mood": "good", "topics": ["a", "b"]},
    ]
    assert counts.skipped == {"annotation beside the first of its text": 1}
    one: dict[str, Any] = {"value": {"choices": "good"}, "from_name": "mood"}
    plain = [
        row(*annotations)
        for annotations in (["x"], [7], [{"result": ["x"]}], [{"result": {"x": 1}}])  # type: ignore[list-item]
    ]
    odd = [row({"result": [one, {"value": "start"}, {"value": {"choices": ["bad"]}}]})]
    path = file("a.jsonl", "".join(json.dumps(task) + "\n" for task in (*plain, *odd)))
    *rows, last = (row for _, _, row in read_rows(path, TextCounts(), whole=True))
    assert rows == plain, "the rows of another tool"
    assert (last["label"], last["spans"]) == ("bad", [])


def test_what_was_rejected_in_prodigy_is_not_learned_but_predicted(file: File) -> None:
    marks = {"answer": "reject", "_task_hash": 7}
    tasks = [{"text": "One.", "label": "x", **marks}, {"text": "Two.", "label": "y"}]
    path = file("a.jsonl", "".join(json.dumps(task) + "\n" for task in tasks))
    for source in (path, MemoryRows("train", tasks)):
        for purpose, texts in {"train": 1, "dev": 1, "test": 1, "predict": 2}.items():
            counts = TextCounts()
            examples = list(LabelColumns().read(source, counts, purpose))  # type: ignore[arg-type]
            assert len(examples) == texts
            assert counts.skipped.total() == 2 - texts
    assert [row["text"] for _, _, row in read_rows(path, TextCounts())] == ["One.", "Two."]


@pytest.mark.parametrize("content", ['{"text": null}\n' * 3, "{}\n" * 3, '{"text": null}\n{}\n'])
def test_a_column_without_any_text_is_refused(file: File, content: str) -> None:
    with pytest.raises(BertkitError, match="column 'text'"):
        read(file("a.jsonl", content))


def write_parquet(path: Path, columns: list[list[Any]], names: list[str]) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    parquet.write_table(pyarrow.table(columns, names=names), path)


def test_parquet_reads_a_column(tmp_path: Path, file: File) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, [[1, 2, 3, 4], ["Eins", None, "", "Vier é"]], ["id", "text"])
    documents, counts = read(path)
    assert documents == ["Eins", "Vier é"]
    assert counts.skipped == {"empty document": 2}
    assert counts.examples == {"empty document": f"{path}:2"}
    with pytest.raises(BertkitError, match=r"'id'"):
        read(path, column="id")
    with pytest.raises(BertkitError, match=r"b\.parquet cannot be read"):
        read(file("b.parquet", "no parquet, but long enough for a footer"))


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet"])
def test_a_column_that_is_missing_or_there_twice(tmp_path: Path, file: File, name: str) -> None:
    path = file(name, '{"id": 1, "Text": "a"}\n' if name == "a.jsonl" else "id,Text\n1,a\n")
    if name == "a.parquet":
        write_parquet(path, [["1"], ["a"]], ["id", "Text"])
    with pytest.raises(BertkitError, match="column 'text'; did you mean 'Text'"):
        read(path)
    if name == "a.parquet":
        write_parquet(path, [["1"], ["a"]], ["text", "text"])
    else:
        path = file("a.csv", "text,other,text\none,x,two\n")
    with pytest.raises(BertkitError, match="two columns 'text'"):
        read(path)


def test_hugging_face_data_sets_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text('{"id": 1, "text": "One"}\n{"id": 2, "text": "Two"}\n')
    (tmp_path / "test.jsonl").write_text('{"id": 3, "text": "Three"}\n')
    counts = TextCounts()
    for name, expected in ((f"hf:{tmp_path}", ["One", "Two"]), (f"hf:{tmp_path}::test", ["Three"])):
        [source] = find_sources([name])
        assert list(read_documents(source, counts)) == expected
    with pytest.raises(BertkitError, match=r"column 'body'.*id, text"):
        list(read_documents(source, counts, column="body"))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(BertkitError, match="the extra 'data'"):
        list(read_documents(source, counts))


@pytest.mark.slow
def test_damage_is_named_with_what_was_read(tmp_path: Path, file: File) -> None:
    draw = random.Random(0)
    content = "\n\n".join(str(draw.getrandbits(130)) for _ in range(60_000)).encode()
    path = file("a.txt.xz", lzma.compress(content, preset=0)[:-150_000])
    counts = TextCounts()
    with pytest.raises(BertkitError, match=r"a\.txt\.xz cannot be read after line"):
        for _ in read_documents(find_sources([path])[0], counts):
            pass
    assert counts.documents > 5_000
    with pytest.raises(BertkitError, match=r"gone\.txt cannot be read"):
        list(read_documents(Source(str(tmp_path / "gone.txt"), "text", 0), TextCounts()))


def test_counts_add_up(file: File) -> None:
    path = str(file("a.jpg", "x"))
    total = TextCounts(1, 2, 3, Counter({"a": 1}), {"a": "x:1"})
    assert list(read_documents(Source(path, "unknown", 1), total)) == []
    total += TextCounts(1, 1, 1, Counter({"a": 2, "b": 1}), {"a": "y:2", "b": "y:3"})
    assert json.loads(json.dumps(total.to_dict())) == {
        "files": 2,
        "documents": 3,
        "bytes": 4,
        "skipped": {"a": 3, "b": 1, "file of unknown type": 1},
        "examples": {"a": "x:1", "b": "y:3", "file of unknown type": path},
    }


@pytest.mark.slow
def test_reading_takes_linear_time(file: File) -> None:
    """Lines without an end, quotes, brackets and tags that are never closed."""
    for name, start, unit, end in (
        ("a.txt", "", "a", ""),
        ("a.txt", "", "\n", ""),
        ("wiki_00", "<doc id=1>\n", "<doc id=\n", "</doc>"),
        ("wiki_00", "<doc ", "a='", ""),
        ("a.jsonl", '{"text": "', "[{", '"}'),
        ("a.csv", 'text\n"', '""', '"'),
    ):
        begin = time.process_time()
        read(file(name, start + unit * 1_000_000 + end))
        assert time.process_time() - begin < 5
