"""Sources: files, folders, globs, URLs, names of data sets; and what is in compressed files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from bertkit.errors import BertkitError
from bertkit.text import Source, TextSource, find_sources
from bertkit.text.sources import COMPRESSIONS, DAMAGE, open_binary


def write(path: Path, text: str = "Some text.\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def compressed(path: Path, content: bytes) -> bytes:
    with fsspec.open(str(path), "wb", compression="infer") as file:
        file.write(content)
    return path.read_bytes()


def names(sources: list[Source], root: Path) -> list[str]:
    return [str(Path(source.path).relative_to(root)) for source in sources]


def test_formats_follow_the_extension_and_the_first_line(tmp_path: Path) -> None:
    expected = {
        "a.txt": "text",
        "b.jsonl": "jsonl",
        "c.JSON": "jsonl",
        "d.csv": "csv",
        "e.tsv": "tsv",
        "f.parquet": "parquet",
        "photo.jpg": "unknown",
        "wiki_00": "text",
    }
    for name in expected:
        write(tmp_path / name)
    sources = find_sources([str(tmp_path)])
    assert {Path(source.path).name: source.format for source in sources} == expected
    for name, content, format_ in (
        ("g.csv.gz", b"text\n", "csv"),
        ("H.TXT.XZ", b"text\n", "text"),
        ("wiki_01.zst", b'\xef\xbb\xbf\n\n<doc id="1">\nA\n</doc>\n', "wikiextractor"),
    ):
        path = tmp_path / name
        size = len(compressed(path, content))
        assert find_sources([path]) == [Source(str(path), format_, size)]
    with pytest.raises(BertkitError, match="photo"):
        find_sources([tmp_path / "photo.jpg"])
    assert TextSource((str(tmp_path / "photo.jpg"),), format="text").files()[0].format == "text"


def test_folders_are_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", ".hidden.txt", ".git/x.txt", "c.txt"):
        write(tmp_path / name)
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert names(find_sources([tmp_path]), tmp_path) == (
        ["a.txt", "b/1.txt", "b/2.txt", "c.txt", "pipe"]
    )
    assert find_sources([tmp_path])[-1].format == "unknown"
    both = [tmp_path / "c.txt", tmp_path / "b" / "[12].txt"]
    assert names(find_sources(both), tmp_path) == ["c.txt", "b/1.txt", "b/2.txt"]
    assert names(find_sources([tmp_path / "**" / "1.txt"]), tmp_path)[0] == "b/1.txt"


@pytest.mark.parametrize(
    "path",
    ["missing.txt", "*.txt", "empty", "photos", "hf:", "hf:a:b:c:d", "nosuch://bucket/a.txt", ""],
)
def test_nothing_to_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "photos" / "a.jpg")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BertkitError) as caught:
        find_sources([path])
    assert path in str(caught.value)


def test_arguments_that_are_no_paths() -> None:
    for wrong in ([], "a.txt", b"a.txt"):
        with pytest.raises(BertkitError):
            TextSource.of(wrong).files()  # type: ignore[arg-type]
    with pytest.raises(BertkitError, match="jsonl"):
        find_sources(["a"], format="jsnl")


def test_names_of_data_sets_are_completed() -> None:
    sources = find_sources(["hf:user/set", "hf:set:en", "hf:set::test"])
    assert [source.path for source in sources] == (
        ["hf:user/set::train", "hf:set:en:train", "hf:set::test"]
    )
    assert find_sources(["set"], format="huggingface") == find_sources(["hf:set"])


def test_addresses_are_refused() -> None:
    for url in ("https://example.org/a.txt", "s3://bucket/*.txt"):
        with pytest.raises(BertkitError, match="is remote; download it"):
            find_sources([url])


@pytest.mark.parametrize("extension", COMPRESSIONS)
def test_compressed_files_are_read_whole_or_are_errors(tmp_path: Path, extension: str) -> None:
    path = tmp_path / f"a.txt{extension}"
    text = os.urandom(300_000)
    first = compressed(path, text)
    path.write_bytes(first + compressed(path, b"two"))
    with open_binary(str(path)) as stream:
        assert stream.read() == text + b"two"
    for damaged in (first[:-1], first[: len(first) // 2], b"plain"):
        path.write_bytes(damaged)
        with pytest.raises(DAMAGE), open_binary(str(path)) as stream:
            stream.read()


def test_reading_text_loads_no_command_line_and_no_network() -> None:
    heavy = {"cyclopts", "datasets", "pandas", "pyarrow", "rich", "torch", "transformers"}
    code = f"import sys, bertkit.text; print([*{heavy} & {{*sys.modules}}])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
