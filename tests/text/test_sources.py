"""Finding sources: files, folders, globs, URLs, data set names; and opening them."""

from __future__ import annotations

import bz2
import errno
import gzip
import lzma
import os
import random
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import fsspec
import pytest
import zstandard

from bertkit.errors import BertkitError
from bertkit.text.sources import DAMAGE, Source, find_sources, open_binary, source_format


def write(path: Path, text: str = "Some text.\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def names(sources: list[Source], root: Path) -> list[str]:
    return [str(Path(source.path).relative_to(root)) for source in sources]


def test_formats_follow_the_extension_under_the_compression(tmp_path: Path) -> None:
    expected = {
        "a.txt": "text",
        "b.jsonl": "jsonl",
        "c.JSON": "jsonl",
        "d.csv": "csv",
        "e.tsv": "tsv",
        "f.parquet": "parquet",
        "wiki_00": "text",
    }
    for name in expected:
        write(tmp_path / name)
    found = find_sources([str(tmp_path)])
    assert {Path(source.path).name: source.format for source in found} == expected
    for name, format_ in {"g.csv.gz": "csv", "h.TXT.GZ": "text", "wiki_01.gz": "text"}.items():
        path = tmp_path / name
        path.write_bytes(gzip.compress(b"text\n"))
        assert find_sources([str(path)]) == [Source(str(path), format_, path.stat().st_size)]


def test_wikiextractor_is_recognised_by_its_first_line(tmp_path: Path) -> None:
    first = write(tmp_path / "wiki_00", '\ufeff\n\n<doc id="1">\nA\n</doc>\n')
    second = tmp_path / "wiki_01.bz2"
    second.write_bytes(bz2.compress(b'<doc id="1">\nA\n</doc>\n'))
    found = find_sources([str(first), str(second)])
    assert [source.format for source in found] == ["wikiextractor", "wikiextractor"]
    assert find_sources([str(first)], format="text")[0].format == "text"


def test_folders_are_read_in_order_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a.txt", ".hidden.txt", ".git/x.txt", "c.txt"):
        write(tmp_path / name)
    assert names(find_sources([str(tmp_path)]), tmp_path) == [
        "a.txt",
        "b/1.txt",
        "b/2.txt",
        "c.txt",
    ]
    given = [str(tmp_path / "c.txt"), str(tmp_path / "b")]
    assert names(find_sources(given), tmp_path) == ["c.txt", "b/1.txt", "b/2.txt"]


def test_a_linked_folder_is_followed_once(tmp_path: Path) -> None:
    write(tmp_path / "corpus" / "a.txt")
    write(tmp_path / "elsewhere" / "b.txt")
    (tmp_path / "corpus" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "corpus" / "loop").symlink_to(tmp_path / "corpus")
    found = find_sources([str(tmp_path / "corpus")])
    assert [Path(source.path).name for source in found] == ["a.txt", "b.txt"]


def test_links_are_followed_in_the_order_of_names(tmp_path: Path) -> None:
    """Which of two names of a folder is read must not depend on the file system."""
    for first, second in (("a", "b"), ("b", "a")):
        corpus = tmp_path / first
        write(corpus / first / "x.txt")
        (corpus / second).symlink_to(first)
        assert names(find_sources([str(corpus)]), corpus) == ["a/x.txt"]


def test_globs(tmp_path: Path) -> None:
    for name in ("AA/wiki_00", "AA/wiki_01", "AB/wiki_00", "AB/deep/wiki_02", "odd[1].txt"):
        write(tmp_path / name)

    def match(pattern: str) -> list[str]:
        return names(find_sources([str(tmp_path / pattern)]), tmp_path)

    assert match("A?") == ["AA/wiki_00", "AA/wiki_01", "AB/deep/wiki_02", "AB/wiki_00"]
    assert match("*/wiki_00") == ["AA/wiki_00", "AB/wiki_00"]
    assert match("AB/**") == ["AB/deep/wiki_02", "AB/wiki_00"]
    assert match("**/wiki_0*") == ["AA/wiki_00", "AA/wiki_01", "AB/deep/wiki_02", "AB/wiki_00"]
    assert match("odd[1].txt") == ["odd[1].txt"]
    assert match("**/deep") == ["AB/deep/wiki_02"]
    assert match("**/[Aw]*") == match("A?")
    write(tmp_path / "AB-other.txt")
    assert match("**/*") == names(find_sources([str(tmp_path)]), tmp_path)


def test_unknown_extensions_stay_visible_in_a_folder_and_fail_when_named(tmp_path: Path) -> None:
    write(tmp_path / "a.txt")
    photo = write(tmp_path / "photo.jpg")
    assert [source.format for source in find_sources([str(tmp_path)])] == ["text", "unknown"]
    with pytest.raises(BertkitError, match=r"photo\.jpg has an unknown extension .*\.jsonl"):
        find_sources([str(photo)])
    assert find_sources([str(photo)], format="text") == [
        Source(str(photo), "text", photo.stat().st_size)
    ]


@pytest.mark.parametrize("start", ["<!DOCTYPE html>\n<html>", "\ufeff \n<HTML lang='en'>"])
def test_a_web_page_in_place_of_a_file_is_refused(start: str, tmp_path: Path) -> None:
    """As a server sends it for a folder, or for a file that is gone."""
    page = f"{start}<body>A page.</body></html>\n".encode()
    fsspec.filesystem("memory").pipe_file("/page/corpus", page)
    assert find_sources(["memory://page/corpus"], format="text")[0].format == "text"
    with pytest.raises(BertkitError, match=r"page/corpus is an HTML page"):
        find_sources(["memory://page/corpus"])
    (tmp_path / "mails.txt").write_bytes(page)
    assert find_sources([str(tmp_path / "mails.txt")])[0].format == "text"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("missing.txt", r"missing\.txt does not exist"),
        ("*.txt", r"no file matches .*\*\.txt"),
        ("empty", "the folder .*empty is empty"),
        ("photos", "photos holds no file with a known extension"),
        ("hf:", "'hf:' is not a data set name"),
        ("hf:a:b:c:d", "write hf:NAME:CONFIG:SPLIT"),
        ("nosuch://bucket/a.txt", "cannot reach nosuch://bucket/a.txt: Protocol not known"),
        ("memory://nowhere/*.txt", "does not exist or holds no file"),
    ],
)
def test_nothing_to_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, message: str
) -> None:
    (tmp_path / "empty").mkdir()
    write(tmp_path / "photos" / "a.jpg")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(BertkitError, match=message) as caught:
        find_sources([path])
    assert "\n" not in str(caught.value)


def test_what_can_be_read_only_once_is_refused_or_left_out(tmp_path: Path) -> None:
    """Its first bytes would be gone after the look at them, and a pipe may wait for ever."""
    write(tmp_path / "a.txt")
    os.mkfifo(tmp_path / "b.txt")
    with pytest.raises(BertkitError, match=r"b\.txt is a pipe or a device, and text is read twice"):
        find_sources([str(tmp_path / "b.txt")])
    found = [(Path(source.path).name, source.format) for source in find_sources([str(tmp_path)])]
    assert found == [("a.txt", "text"), ("b.txt", "unknown")]


def test_a_folder_that_cannot_be_listed_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "open" / "a.txt")
    write(tmp_path / "shut" / "b.txt")
    scan = os.scandir

    def refuse(path: str) -> object:
        if Path(path).name == "shut":
            raise PermissionError(errno.EACCES, "Permission denied", path)
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(BertkitError, match=r"the folder .*shut cannot be read \(Permission denied"):
        find_sources([str(tmp_path)])


def test_an_empty_name_is_not_this_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a.txt")
    monkeypatch.chdir(tmp_path)
    assert [source.path for source in find_sources(["."])] == ["a.txt"]
    with pytest.raises(BertkitError, match="name is empty"):
        find_sources([""])


def test_no_paths_and_misspelt_formats_are_errors() -> None:
    with pytest.raises(BertkitError, match="no input was named"):
        find_sources([])
    with pytest.raises(BertkitError, match="no format is called 'jsnl'; did you mean 'jsonl'"):
        find_sources(["a"], format="jsnl")


def test_data_set_names_are_filled_in() -> None:
    found = find_sources(["hf:user/set", "hf:set:en", "hf:set::test"])
    assert [source.path for source in found] == [
        "hf:user/set::train",
        "hf:set:en:train",
        "hf:set::test",
    ]
    assert {(source.format, source.bytes) for source in found} == {("huggingface", 0)}
    assert find_sources(["set"], format="huggingface") == find_sources(["hf:set"])


def test_remote_files_folders_and_globs() -> None:
    system = fsspec.filesystem("memory")
    for name in ("/remote/b.txt", "/remote/deep/a.txt.gz", "/remote/.hidden.txt", "/remote/c.md"):
        content = b"Hello.\n"
        system.pipe(name, gzip.compress(content) if name.endswith(".gz") else content)
    found = find_sources(["memory://remote"])
    assert [(source.path, source.format) for source in found] == [
        ("memory:///remote/b.txt", "text"),
        ("memory:///remote/c.md", "unknown"),
        ("memory:///remote/deep/a.txt.gz", "text"),
    ]
    assert found[0].bytes == len("Hello.\n")
    assert find_sources(["memory://remote/*.txt"])[0].path == "memory:///remote/b.txt"
    assert find_sources(["memory://remote/*"]) == find_sources(["memory://remote"])
    assert source_format("zip://rows.jsonl.gz::/tmp/a.zip", "auto") == "jsonl"
    [single] = find_sources(["memory://remote/deep/a.txt.gz"])
    with open_binary(single.path) as stream:
        assert stream.read() == b"Hello.\n"


COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lambda content: lzma.compress(content, preset=0),
    "zst": zstandard.ZstdCompressor(write_checksum=True).compress,
}


def test_a_small_file_of_zstandard_does_not_fill_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "a.txt.zst"
    path.write_bytes(COMPRESSORS["zst"](b"one line of text\n" * 20_000_000))
    assert path.stat().st_size < 1 << 16
    tracemalloc.start()
    try:
        assert find_sources([str(path)])[0].format == "text"
        assert tracemalloc.get_traced_memory()[1] < 100_000_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("extension", COMPRESSORS)
def test_compressed_files_of_several_parts_are_read_whole(tmp_path: Path, extension: str) -> None:
    compress = COMPRESSORS[extension]
    path = tmp_path / f"a.txt.{extension}"
    padding = bytes(4) if extension != "zst" else b""
    path.write_bytes(compress(b"one " * 1_000_000) + padding + compress(b"two") + padding)
    with open_binary(str(path)) as stream:
        assert stream.read() == b"one " * 1_000_000 + b"two"


@pytest.mark.parametrize("extension", COMPRESSORS)
def test_damage_after_the_first_part_is_an_error(tmp_path: Path, extension: str) -> None:
    """The readers of bz2 and lzma end there without a word."""
    first, second = (COMPRESSORS[extension](random.randbytes(5_000)) for _ in range(2))
    path = tmp_path / f"a.txt.{extension}"
    half = len(second) // 2
    damaged = second[:half] + bytes([second[half] ^ 255]) + second[half + 1 :]
    for after in (b"not compressed", b"\1" + second[1:], damaged, second[:half], second[:-1]):
        path.write_bytes(first + after)
        with pytest.raises(DAMAGE), open_binary(str(path)) as stream:
            stream.read()


def test_zstandard_skips_foreign_frames(tmp_path: Path) -> None:
    content = bytes(range(256)) * 5000
    frame = zstandard.compress(content)
    skippable = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"note"  # RFC 8878, 3.1.2
    path = tmp_path / "a.txt.zst"
    path.write_bytes(skippable + frame + skippable + frame)
    with open_binary(str(path)) as stream:
        assert b"".join(iter(lambda: stream.read(777), b"")) == content * 2
    path.write_bytes(b"")
    with open_binary(str(path)) as stream:
        assert stream.read() == b""
