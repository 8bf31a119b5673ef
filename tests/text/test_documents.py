"""Every format and every kind of bad input, from hand-written files."""

from __future__ import annotations

import gzip
import json
import lzma
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.text import lines
from bertkit.text.documents import Source, TextCounts, find_sources, read_documents, text_documents
from bertkit.text.lines import READ_BYTES, line_blocks, unix_lines
from tests.text.test_sources import COMPRESSORS


def read(path: Path, *, column: str = "text") -> tuple[list[str], TextCounts]:
    counts = TextCounts()
    documents: list[str] = []
    for source in find_sources([str(path)]):
        documents.extend(read_documents(source, counts, column=column))
    return documents, counts


@pytest.fixture
def file(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


File = Callable[[str, "str | bytes"], Path]


# Text --------------------------------------------------------------------------------------------


def test_blank_lines_part_documents(file: File) -> None:
    path = file("a.txt", "\n\nOne.\nTwo.\n\n \t\nThree.\n\n\n\nFour")
    documents, counts = read(path)
    assert documents == ["One.\nTwo.", "Three.", "Four"]
    assert counts == TextCounts(files=1, documents=3, bytes=9 + 6 + 4)


def test_documents_know_the_line_where_they_begin(file: File) -> None:
    [source] = find_sources([str(file("a.txt", "\nOne.\nTwo.\n\n\nThree.\n"))])
    assert list(text_documents(source, TextCounts(), "")) == [(2, "One.\nTwo."), (6, "Three.")]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_line_ends_of_three_systems(file: File, end: str) -> None:
    path = file("a.txt", "\ufeff" + end.join(["Erste Zeile", "zweite", "", "Käse", ""]))
    assert read(path)[0] == ["Erste Zeile\nzweite", "Käse"]


def test_form_feeds_and_a_stray_nul_are_text(file: File) -> None:
    path = file("a.txt", "One page" + " of text" * 20 + "\x0cthe next\x00 one.\n")
    documents, counts = read(path)
    assert documents == ["One page" + " of text" * 20 + "\x0cthe next\x00 one."]
    assert not counts.skipped


def test_a_line_longer_than_many_blocks(file: File) -> None:
    line = "wörd " * READ_BYTES
    documents, counts = read(file("a.txt", f"First.\n\n{line}\n\nLast.\n"))
    assert documents == ["First.", line.strip(), "Last."]
    assert counts.bytes == sum(len(document.encode()) for document in documents)


@settings(max_examples=60)
@given(st.lists(st.sampled_from([b"a", b"\n", b"\r\n", b"b", b"\n\n"])), st.integers(1, 7))
def test_blocks_do_not_change_the_lines(parts: list[bytes], size: int) -> None:
    content = b"".join(parts)

    class Trickle:
        def __init__(self) -> None:
            self.left = content

        def read(self, _: int) -> bytes:
            block, self.left = self.left[:size], self.left[size:]
            return block

    lines = [line for block in line_blocks(Trickle(), "a.txt") for line in block.split(b"\n")]  # type: ignore[arg-type]
    expected = unix_lines(content).split(b"\n")
    assert lines == (expected if expected[-1] else expected[:-1])


def test_empty_files_are_counted(file: File) -> None:
    for content in ("", "\n \n\n"):
        documents, counts = read(file("a.txt", content))
        assert documents == []
        assert counts.skipped == {"empty file": 1}
        assert counts.files == 1
    assert counts.examples["empty file"].endswith("a.txt")


# Encodings ---------------------------------------------------------------------------------------


def test_invalid_bytes_are_replaced_and_the_first_is_located(file: File) -> None:
    path = file("a.txt", b"Good line.\n" * 20 + b"caf\xe9 noir, bien s\xfbr\n\n" + b"na\xefve\n")
    documents, counts = read(path)
    assert documents[0].endswith("Good line.\ncaf\ufffd noir, bien s\ufffdr")
    assert documents[1] == "na\ufffdve"
    assert counts.skipped == {"invalid UTF-8 replaced, kept": 2}
    assert counts.examples == {"invalid UTF-8 replaced, kept": f"{path}:21"}


def test_a_replacement_character_in_the_text_is_no_error(file: File) -> None:
    documents, counts = read(file("a.txt", "\ufffd\ufffd"))
    assert documents == ["\ufffd\ufffd"]
    assert not counts.skipped


def test_one_stray_nul_in_a_short_text_is_no_error(file: File) -> None:
    documents, _ = read(file("a.txt", b"One\0 two.\n"))
    assert documents == ["One\0 two."]


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("Plain English.".encode("utf-16"), "UTF-16 byte order mark"),
        ("Plain English.".encode("utf-16-be"), "50% of its first bytes are NUL"),
        ("Это русский текст.".encode("cp1251"), "cannot be decoded"),
        ("Été à la plage. ".encode("latin-1") * 9, "19% of its first characters cannot be decoded"),
        (bytes(range(128, 256)) * 10, "cannot be decoded"),
        ("Für den Winter im März. ".encode("latin-1") * 12, "24 of its first letters"),
        ("It was “just” so, they said. ".encode("cp1252") * 20, "40 of its first letters"),
    ],
)
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_other_encodings_are_refused(file: File, name: str, content: bytes, problem: str) -> None:
    with pytest.raises(BertkitError, match=problem) as caught:
        read(file(name, content))
    assert name in str(caught.value)
    advised = "UTF-16" if 0 in content else "CP1252"
    assert f"iconv -f {advised} " in str(caught.value)


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_a_compressed_file_of_another_name_is_named_as_such(file: File, ending: str) -> None:
    content = "".join(f"Sentence {i}.\n" for i in range(999)).encode()
    with pytest.raises(BertkitError, match=rf"a\.csv is not text.*\.{ending}"):
        read(file("a.csv", COMPRESSORS[ending](content)))


def test_text_without_blank_lines_is_refused_before_it_fills_the_memory(
    file: File, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "MAX_TEXT_SIZE", 1000)
    text = "A line.\n" * 50
    assert len(read(file("a.txt", f"{text}\n" * 4))[0]) == 4
    with pytest.raises(BertkitError, match=r"b\.txt:52: no blank line, which ends a document"):
        read(file("b.txt", f"{text}\n{text * 4}"))


@pytest.mark.parametrize(
    ("name", "head", "text", "place"),
    [
        ("a.txt", "One.\n\n", "word ", ":3"),
        ("a.jsonl", '{"text": "One."}\n', "word ", ":2"),
        ("a.txt", '<doc id="1">\nOne.\n', "Word.\n\n", ":1"),
        ("a.csv", 'text\n"One\nmore."\n"', "Word.\n", ":4"),
    ],
)
def test_what_never_ends_is_refused_before_it_fills_the_memory(
    file: File, monkeypatch: pytest.MonkeyPatch, name: str, head: str, text: str, place: str
) -> None:
    """A small compressed file can hold more than any memory."""
    monkeypatch.setattr(lines, "MAX_TEXT_SIZE", 100_000)
    content = gzip.compress((head + text * (1 << 20)).encode(), 1)
    path = file(f"{name}.gz", content[:-100])  # who reads it to the end finds another error
    with pytest.raises(BertkitError, match=rf"{re.escape(path.name)}{place}: no .* characters"):
        read(path)


# WikiExtractor -----------------------------------------------------------------------------------


def test_wikiextractor_keeps_title_and_body(file: File) -> None:
    path = file(
        "wiki_00",
        '<doc id="1" url="u" title="A">\nA\n\nBody one.\nBody two.\n\n</doc>\n'
        '<doc id="2" url="u" title="B">\nB\nText.</doc>\n\n<doc id="3">\n\n</doc>\n',
    )
    documents, counts = read(path)
    assert documents == ["A\n\nBody one.\nBody two.", "B\nText."]
    assert counts.skipped == {"empty document": 1}
    assert counts.examples == {"empty document": f"{path}:12"}


def test_wikiextractor_keeps_a_document_on_one_line(file: File) -> None:
    path = file("wiki_00", '<doc id="1" title="A > B">One.</doc>\n<doc id="2">\nTwo.\n</doc>\n')
    documents, counts = read(path)
    assert documents == ["One.", "Two."]
    assert not counts.skipped


def test_wikiextractor_keeps_unclosed_documents(file: File) -> None:
    path = file("wiki_00", '<doc id="1">\nA\n<doc id="2">\nB\n</doc>\nstray\n<doc id="3">\nC\n')
    documents, counts = read(path)
    assert documents == ["A", "B", "C"]
    assert counts.skipped == {"unclosed <doc>, kept": 2, "line outside <doc>": 1}
    assert counts.examples["unclosed <doc>, kept"] == f"{path}:1"
    assert counts.examples["line outside <doc>"] == f"{path}:6"


# JSON lines --------------------------------------------------------------------------------------


def test_json_lines_without_an_extension(file: File) -> None:
    """WikiExtractor's --json writes them."""
    rows = [{"id": "1", "url": "u", "text": "A river."}, {"id": "2", "text": "A stone."}]
    documents, _ = read(file("wiki_00", "".join(json.dumps(row) + "\n" for row in rows)))
    assert documents == ["A river.", "A stone."]
    assert read(file("prose", '{"One"} is a set: not JSON.\n'))[0] == [
        '{"One"} is a set: not JSON.'
    ]


def test_jsonl_reads_a_column_and_counts_the_rest(file: File) -> None:
    rows = ['{"text": "One.\\n\\nStill one.", "id": 1}', "", "{not json", '{"id": 2}', "[1]"]
    rows += ['{"text": " "}', '{"text": null}', '{"text": 7}', "[" * 100_000, '{"text": "Last"}']
    path = file("a.jsonl", "\n".join(rows))
    documents, counts = read(path)
    assert documents == ["One.\n\nStill one.", "Last"]
    assert counts.skipped == {
        "line is not JSON": 2,
        "row without column 'text'": 2,
        "empty document": 2,
        "column 'text' is not text": 1,
    }
    assert counts.examples["line is not JSON"] == f"{path}:3"
    assert counts.examples["row without column 'text'"] == f"{path}:4"


def test_jsonl_with_half_a_surrogate_pair_stays_encodable(file: File) -> None:
    documents, counts = read(file("a.jsonl", r'{"text": "a\ud800b \ud83d\ude00"}'))
    assert documents == ["a\ufffdb \U0001f600"]
    assert counts.skipped == {"lone surrogate replaced, kept": 1}
    assert counts.bytes == len(documents[0].encode())


def test_jsonl_without_the_column_names_those_there_are(file: File) -> None:
    path = file("a.jsonl", '{"id": 1, "Text": "a"}\n{"title": "x"}\n')
    with pytest.raises(BertkitError, match=r"column 'text'.*id.*title.*did you mean 'Text'"):
        read(path)
    with pytest.raises(BertkitError, match=r"column 'id'.*known: Text, title"):
        read(path, column="id")
    assert read(path, column="title")[0] == ["x"]


def test_jsonl_that_is_not_json_at_all(file: File) -> None:
    for content in ("[\n  {\n", '[{"text": "a"}, {"text": "b"}]\n', '"a"\n"b"\n'):
        with pytest.raises(BertkitError, match=r"a\.json:1: no line of this file is a JSON object"):
            read(file("a.json", content))


# CSV and TSV -------------------------------------------------------------------------------------


def test_csv_with_quotes_and_line_ends_inside(file: File) -> None:
    path = file(
        "a.csv",
        '\ufeffid,text\r\n1,"One, ""two""\r\n\r\nthree"\r\n2\r\n\r\n3,x,y\r\n4,\r\n5,z,\r\n',
    )
    documents, counts = read(path)
    assert documents == ['One, "two"\n\nthree', "z"]
    assert counts.skipped == {
        "row without column 'text'": 1,
        "row with more fields than the first line": 1,
        "empty document": 1,
    }
    assert counts.examples["row without column 'text'"] == f"{path}:5"


def test_ragged_rows_are_one_count_and_blank_fields_do_not_matter(file: File) -> None:
    rows = "".join(f"A text{', and more' * i},{i}\n" for i in range(9))
    _, counts = read(file("a.csv", "text,label\n" + rows + "plain,1,  ,\n" * 9))
    assert counts.skipped == {"row with more fields than the first line": 8}
    assert counts.documents == 10


def test_texts_with_commas_and_without_quotes_are_not_cut(file: File) -> None:
    path = file("a.csv", "text\nYes, he said.\nNo comma.\nAnother one, really.\n")
    with pytest.raises(BertkitError, match=r"a\.csv:2: row with 2 .* 2 of 3 rows are ragged"):
        read(path)


def test_a_quote_left_open_swallows_nothing(file: File) -> None:
    path = file("a.csv", 'text,id\nfirst,1\n"second,2\nthird,3\n')
    with pytest.raises(BertkitError, match=r"a\.csv:3: bad quotes in the row that begins here"):
        read(path)


def test_tsv_takes_quotes_as_text(file: File) -> None:
    documents, _ = read(file("a.tsv", 'text\tlabel\n"Open quote\t1\nB "b" b\t0\n'))
    assert documents == ['"Open quote', 'B "b" b']


def test_csv_fields_may_be_long(file: File) -> None:
    text = "long " * 60_000
    assert read(file("a.csv", f"text\n{text}\n"))[0] == [text.strip()]


def test_csv_without_the_column(file: File) -> None:
    with pytest.raises(BertkitError, match=r"a\.csv .*'txt'.*did you mean 'text'"):
        read(file("a.csv", "id,text\n1,a\n"), column="txt")
    assert read(file("c.csv", "id, text\n1,a\n"))[0] == ["a"], "as in rows for fine-tuning"
    assert read(file("b.csv", "id,text\n"))[1].skipped == {"empty file": 1}


# Parquet and Hugging Face ------------------------------------------------------------------------


def write_parquet(path: Path, columns: dict[str, list[object]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)


def test_csv_with_the_column_twice(file: File) -> None:
    source = file("a.csv", "text,other,other,text\none,x,y,two\n")
    with pytest.raises(BertkitError, match=r"a\.csv has two columns 'text'"):
        read(source)
    assert read(file("b.csv", "text,other,other\none,x,y\n"))[0] == ["one"]


def test_parquet_with_the_column_twice(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table([["one"], ["two"]], names=["text", "text"]), path)
    with pytest.raises(BertkitError, match=r"a\.parquet has two columns 'text'"):
        read(path)


def test_parquet_reads_one_column(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, {"id": [1, 2, 3, 4], "text": ["Eins", None, "", "Vier é"]})
    documents, counts = read(path)
    assert documents == ["Eins", "Vier é"]
    assert counts.skipped == {"empty document": 2}
    assert counts.examples == {"empty document": f"{path}:2"}


def test_parquet_errors(tmp_path: Path, file: File) -> None:
    path = tmp_path / "a.parquet"
    write_parquet(path, {"id": [1], "body": ["a"]})
    with pytest.raises(BertkitError, match=r"column 'text'.*known: body, id"):
        read(path)
    with pytest.raises(BertkitError, match=r"no row .* has text in column 'id'"):
        read(path, column="id")
    with pytest.raises(BertkitError, match=r"b\.parquet cannot be read after 0 documents"):
        read(file("b.parquet", "no parquet, but long enough for a footer"))


def test_parquet_text_that_is_not_utf8(tmp_path: Path) -> None:
    pyarrow, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    buffers = [pyarrow.py_buffer(one) for one in (bytes([0, 0, 0, 0, 1, 0, 0, 0]), b"\xff")]
    text = pyarrow.StringArray.from_buffers(1, *buffers)
    parquet.write_table(pyarrow.table({"text": text}), tmp_path / "a.parquet")
    with pytest.raises(BertkitError, match=r"a\.parquet, rows 1 to 1: the column 'text'"):
        read(tmp_path / "a.parquet")


@pytest.mark.parametrize(("name", "module"), [("a.parquet", "pyarrow"), ("hf:x", "datasets")])
def test_missing_libraries_are_named(
    file: File, monkeypatch: pytest.MonkeyPatch, name: str, module: str
) -> None:
    for loaded in (module, "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, loaded, None)
    path = file(name, "").as_posix() if ":" not in name else name
    [source] = find_sources([path])
    with pytest.raises(BertkitError, match=rf"need {module}.*the extra 'data'"):
        list(read_documents(source, TextCounts()))


def test_hugging_face_data_sets_are_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_text('{"id": 1, "text": "One"}\n{"id": 2, "text": "Two"}\n')
    (tmp_path / "test.jsonl").write_text('{"id": 3, "text": "Three"}\n')
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    counts = TextCounts()
    for spec, expected in ((f"hf:{tmp_path}", ["One", "Two"]), (f"hf:{tmp_path}::test", ["Three"])):
        [source] = find_sources([spec])
        assert list(read_documents(source, counts)) == expected
    with pytest.raises(BertkitError, match=r"column 'body'.*known: id, text"):
        list(read_documents(source, counts, column="body"))
    [source] = find_sources([f"hf:{tmp_path}::nosuch"])
    with pytest.raises(BertkitError, match=r"cannot load hf:.*::nosuch \(.*check name"):
        list(read_documents(source, counts))


# Damage ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large_text() -> bytes:
    """Several blocks of text that does not compress away."""
    numbers = (str(pow(3, n, 10**40 + 1)) for n in range(60_000))
    return "\n\n".join(numbers).encode()


@pytest.mark.parametrize("extension", COMPRESSORS)
def test_truncated_files_are_named_with_what_was_read(
    file: File, large_text: bytes, extension: str
) -> None:
    whole = COMPRESSORS[extension](large_text)
    path = file(f"a.txt.{extension}", whole)
    assert len(read(path)[0]) == 60_000
    file(path.name, whole[: len(whole) * 3 // 4])
    counts = TextCounts()
    with pytest.raises(BertkitError, match="cannot be read after") as caught:
        for _ in read_documents(find_sources([str(path)])[0], counts):
            pass
    assert path.name in str(caught.value)
    assert counts.documents > 10_000
    assert f"after {counts.documents} documents" in str(caught.value)


@pytest.mark.parametrize("extension", COMPRESSORS)
def test_a_file_that_is_not_compressed_at_all(file: File, extension: str) -> None:
    with pytest.raises(
        BertkitError, match=rf"a\.txt\.{extension} cannot be read after 0 documents"
    ):
        read(file(f"a.txt.{extension}", "plain text, no compression"))


def test_a_file_that_vanished(tmp_path: Path) -> None:
    source = Source(str(tmp_path / "gone.txt"), "text", 0)
    with pytest.raises(BertkitError, match=r"gone\.txt cannot be read after 0 documents"):
        list(read_documents(source, TextCounts()))


def test_unknown_formats(file: File) -> None:
    counts = TextCounts()
    path = str(file("a.jpg", "x"))
    assert list(read_documents(Source(path, "unknown", 1), counts)) == []
    assert counts == TextCounts(
        skipped=Counter({"file of unknown type": 1}), examples={"file of unknown type": path}
    )
    with pytest.raises(BertkitError, match="no format is called 'txt'; did you mean 'text'"):
        list(read_documents(Source(path, "txt", 1), counts))


# Counts ------------------------------------------------------------------------------------------


def test_counts_add_up() -> None:
    total = TextCounts(1, 2, 3, Counter({"a": 1}), {"a": "x:1"})
    total += TextCounts(1, 1, 1, Counter({"a": 2, "b": 1}), {"a": "y:2", "b": "y:3"})
    assert total.as_dict() == {
        "files": 2,
        "documents": 3,
        "bytes": 4,
        "skipped": {"a": 3, "b": 1},
        "examples": {"a": "x:1", "b": "y:3"},
    }
    assert json.loads(json.dumps(total.as_dict())) == total.as_dict()


def test_wikipedia_articles_are_all_there(data: Path) -> None:
    path = data / "wikipedia" / "wiki_AA.txt.xz"
    counts = TextCounts()
    [source] = find_sources([str(path)])
    assert source.format == "wikiextractor"
    documents = []
    for document in read_documents(source, counts):
        documents.append(document)
        if len(documents) == 500:
            break
    with lzma.open(path, "rt", encoding="utf-8") as stream:
        raw = stream.read(counts.bytes + 200_000)
    bodies = re.findall(r"<doc [^\n]*>\n(.*?)</doc>\n", raw, flags=re.DOTALL)[:500]
    assert documents == [body.strip() for body in bodies]
