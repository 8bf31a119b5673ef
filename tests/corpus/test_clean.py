"""What clean keeps, drops and counts: hostile lines, duplicates, near-duplicates, outputs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest

from bertkit.corpus.clean import EXACT, NEAR, Cleaned, CleanOptions, clean
from bertkit.errors import BertkitError

Write = Callable[[str, str], Path]
RIVER = "The river runs past old houses and green fields where people walk with their dogs. " * 3
STONE = "Copper kettles hang above the stove while the baker kneads dough for the morning. " * 3


def cleaned(
    out: Path, *texts: Path, processes: int = 1, **options: bool | int
) -> tuple[list[str], Cleaned]:
    """Clean files of text; return the documents that are kept, and the counts."""
    counts = clean(list(texts), out, CleanOptions(**options), processes=processes)  # type: ignore[arg-type]
    with fsspec.open(str(out), "rt", encoding="utf-8", compression="infer") as file:
        rows = [json.loads(line) for line in file]
    assert all(set(row) == {"text"} for row in rows)
    return [row["text"] for row in rows], counts


def test_equal_documents_are_dropped_and_the_first_is_kept(tmp_path: Path, write: Write) -> None:
    first = write("a.txt", "One river.\n\nTwo stones.\n\nONE   river.\n")
    second = write("b.txt", "two\tstones.\n\nOne river!\n")
    kept, counts = cleaned(tmp_path / "out.jsonl", first, second)
    assert kept == ["One river.", "Two stones.", "One river!"]
    assert counts.read.documents == 5
    assert counts.written.documents == 3
    assert counts.written.bytes == sum(map(len, kept))
    assert counts.written.skipped == {EXACT: 2}
    assert counts.written.examples == {EXACT: f'{first}, document 3: "ONE river."'}
    kept, counts = cleaned(tmp_path / "all.jsonl", first, second, exact=False)
    assert len(kept) == 5
    assert not counts.written.skipped


def test_nearly_equal_documents_are_dropped_on_request(tmp_path: Path, write: Write) -> None:
    near = RIVER.replace("green", "wide", 1)
    path = write("a.txt", "\n\n".join([RIVER, STONE, near, "Short.", "Short text."]))
    kept, counts = cleaned(tmp_path / "exact.jsonl", path)
    assert len(kept) == 5
    kept, counts = cleaned(tmp_path / "near.jsonl", path, near=True)
    assert kept == [RIVER.strip(), STONE.strip(), "Short.", "Short text."]
    assert counts.written.skipped == {NEAR: 1}


def test_lengths(tmp_path: Path, write: Write) -> None:
    documents = {
        "one two": "fewer than 3 words",
        "one two three four five six": "more than 5 words",
        "three good words": "",
        "\u6cb3\u6d41\u548c": "",  # three words without spaces
    }
    path = write("a.txt", "\n\n".join(documents))
    kept, counts = cleaned(tmp_path / "out.jsonl", path, min_words=3, max_words=5)
    assert kept == [text for text, reason in documents.items() if not reason]
    assert dict(counts.written.skipped) == dict.fromkeys(filter(None, documents.values()), 1)


def test_hostile_lines_are_counted_and_do_no_harm(tmp_path: Path, write: Write) -> None:
    rows = [
        '{"text": "a\\ud800b"}',  # half of a surrogate pair
        '{"text": "\\u0000\\u202e nulls and marks"}',
        "{not json",
        '{"text": 7}',
        '{"other": "x"}',
        '{"text": " \\n "}',
        json.dumps({"text": "one\u2028two\n\nthree"}),
        json.dumps({"text": "word " * 300_000}),
    ]
    path = write("a.jsonl", "\n".join(rows) + "\n")
    kept, counts = cleaned(tmp_path / "out.jsonl.zst", path, near=True)
    assert kept[:2] == ["a\ufffdb", "\x00\u202e nulls and marks"]
    assert kept[2] == "one\u2028two\n\nthree"
    assert len(kept) == 4
    assert counts.read.skipped == {
        "lone surrogate replaced, kept": 1,
        "line is not a JSON object": 1,
        "column 'text' is not text": 1,
        "row without column 'text'": 1,
        "empty document": 1,
    }
    assert counts.read.documents == counts.written.documents + counts.written.skipped.total()


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same_file(tmp_path: Path, corpus_text: str) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join([corpus_text, RIVER, corpus_text, STONE] * 3))
    one, counts = cleaned(tmp_path / "one.jsonl", tmp_path / "a.txt", near=True)
    two, again = cleaned(tmp_path / "two.jsonl", tmp_path / "a.txt", near=True, processes=2)
    assert one == two
    assert counts == again
    assert (tmp_path / "one.jsonl").read_bytes() == (tmp_path / "two.jsonl").read_bytes()


def test_an_output_is_never_replaced_and_absent_after_an_error(
    tmp_path: Path, write: Write
) -> None:
    path = write("a.txt", "One.\n\nTwo.\n")
    for name in ("a.txt", "out.csv", "out.jsonl.rar", "s3://bucket/out.jsonl"):
        with pytest.raises(BertkitError):
            clean([path], tmp_path / name if "://" not in name else name)
    with pytest.raises(BertkitError, match="none of 2 documents"):
        clean([path], tmp_path / "out.jsonl", CleanOptions(min_words=5))
    with pytest.raises(BertkitError):
        clean([path], tmp_path / "out.jsonl", CleanOptions(min_words=5, max_words=4))
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.txt"]
    cleaned(tmp_path / "out.jsonl", path)
    before = (tmp_path / "out.jsonl").read_bytes()
    with pytest.raises(BertkitError, match="exists"):
        clean([path], tmp_path / "out.jsonl")
    assert (tmp_path / "out.jsonl").read_bytes() == before
