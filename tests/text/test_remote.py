"""Text behind addresses: a web server, and what is said when something is missing."""

from __future__ import annotations

import functools
import gzip
import socket
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import fsspec
import pytest

from bertkit.corpus.build import PrepareOptions, prepare
from bertkit.corpus.remote import fetch_bytes
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.text import remote, sources
from bertkit.text.documents import TextCounts, read_documents
from bertkit.text.remote import RemoteStream, remote_files
from bertkit.text.sources import Source, find_sources, is_remote, open_binary
from bertkit.tokenizer.wordpiece import Tokenizer


class Quiet(SimpleHTTPRequestHandler):
    """Serves a folder and lists it, without a word."""

    def log_message(self, *_: object) -> None: ...  # type: ignore[override]


@pytest.fixture
def server(tmp_path: Path, corpus_text: str) -> Iterator[str]:
    """The address of a folder with two files, behind a web server of this machine."""
    pytest.importorskip("aiohttp", reason="needs aiohttp: the extra 'remote'")
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "a.txt").write_text(corpus_text)
    (folder / "b.txt.gz").write_bytes(gzip.compress(corpus_text.upper().encode(), mtime=0))
    web = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder)))
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{web.server_port}"
    web.shutdown()
    thread.join()
    web.server_close()
    fsspec.filesystem("http").clear_instance_cache()


def test_a_server_that_is_not_there_is_told_from_a_file_that_is_not(server: str) -> None:
    for name in ("none.txt", "none/"):
        with pytest.raises(BertkitError) as missing:
            find_sources([f"{server}/{name}"])
        assert missing.value.code == "error"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
    for name in ("a.txt", "folder/", "*.txt"):
        with pytest.raises(BertkitError, match="cannot reach") as refused:
            find_sources([f"{nobody}/{name}"])
        assert refused.value.code == "unreachable"


def test_a_store_from_a_web_server_holds_what_one_from_files_does(
    server: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    options = PrepareOptions(held_out=0.1)
    addresses = [f"{server}/a.txt", f"{server}/b.txt.gz"]
    remote = prepare(addresses, tokenizer, tmp_path / "remote", options)
    files = [str(tmp_path / "served" / name) for name in ("a.txt", "b.txt.gz")]
    local = prepare(files, tokenizer, tmp_path / "local", options)
    assert remote.documents > 100
    for split in ("train", "held_out"):
        stores = [TokenStore(store.folder, split) for store in (remote, local)]
        assert stores[0].content_hash == stores[1].content_hash
    found = find_sources([f"{server}/*.txt"])
    assert [(source.path, source.bytes) for source in found] == [
        (addresses[0], (tmp_path / "served" / "a.txt").stat().st_size)
    ]
    with pytest.raises(BertkitError, match="made with other sources"):
        prepare(addresses[:1], tokenizer, tmp_path / "remote", options)


def test_a_folder_of_a_web_server_is_not_read_as_a_page(server: str, tmp_path: Path) -> None:
    (tmp_path / "served" / "more").mkdir()
    (tmp_path / "served" / "more" / "c.txt").write_text("In a folder.\n")
    more = f"{server}/more/"
    assert [source.path for source in find_sources([more])] == [f"{more}c.txt"]
    [source] = find_sources([f"{more}c.txt?version=1.csv"])
    assert list(read_documents(source, TextCounts())) == ["In a folder."]
    for name, expected in (("c.csv", "csv"), ("b.jsonl.gz", "jsonl"), ("b.bin", "unknown")):
        assert sources.source_format(f"{server}/download?name={name}", "auto") == expected
    [packed] = find_sources([f"{server}/b.txt.gz?version=1"])
    assert next(iter(read_documents(packed, TextCounts()))).isupper()


def test_hidden_files_and_other_orders_of_a_web_folder_are_left_out(
    server: str, tmp_path: Path
) -> None:
    """Apache's listing of a folder links to itself in other orders."""
    names = ("a.txt", "?C=N;O=D", "?C=M;O=A", ".hidden.txt", ".git/d.txt")
    for name in names[3:]:
        (tmp_path / "served" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "served" / name).write_text("hidden\n")
    links = " ".join(f'<a href="{name}">{name}</a>' for name in names)
    (tmp_path / "served" / "index.html").write_text(f"<html>{links}</html>")
    assert [source.path for source in find_sources([f"{server}/"])] == [f"{server}/a.txt"]


def test_a_server_that_says_nothing_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp: the extra 'remote'")
    for module in (sources, remote):
        monkeypatch.setattr(module, "SILENT_SECONDS", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        begin = time.monotonic()
        for path in (f"{url}/a.txt", f"{url}/*.txt", url):
            with pytest.raises(BertkitError, match=r"cannot reach http.*: no answer for 0.3 sec"):
                find_sources([path])
        with pytest.raises(BertkitError, match=r"no answer for 0\.3 seconds"):
            fetch_bytes(f"{url}/manifest.json")
        assert time.monotonic() - begin < 40  # the library's own limit is minutes for each
    fsspec.filesystem("http").clear_instance_cache()


def test_a_server_that_falls_silent_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp", reason="needs aiohttp: the extra 'remote'")
    for module in (sources, remote):
        monkeypatch.setattr(module, "SILENT_SECONDS", 0.3)
    release = threading.Event()

    class Stops(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", "100000")
            self.end_headers()
            self.wfile.write(b"One.\n\nTwo")
            release.wait(60)

        def log_message(self, *_: object) -> None: ...  # type: ignore[override]

    web = ThreadingHTTPServer(("127.0.0.1", 0), Stops)
    thread = threading.Thread(target=web.serve_forever)
    thread.start()
    try:
        with pytest.raises(BertkitError, match=r"cannot read .*: no answer for 0\.3 seconds"):
            find_sources([f"http://127.0.0.1:{web.server_port}/a.txt"])
        source = Source(f"http://127.0.0.1:{web.server_port}/a.txt", "text", 0)
        with pytest.raises(BertkitError, match=r"cannot be read .*no answer for 0\.3 seconds"):
            list(read_documents(source, TextCounts()))
    finally:
        release.set()
        web.shutdown()
        thread.join()
        web.server_close()
        fsspec.filesystem("http").clear_instance_cache()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("aiohttp", "fsspec.implementations.http"):
        monkeypatch.setitem(sys.modules, module, None)
    for protocol in ("http", "https", "s3"):
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, protocol, raising=False)
    message = r"https?://h/a\.txt needs a package .*aiohttp.*; run: pip install 'fsspec\[http\]'"
    for url in ("http://h/a.txt", "https://h/a.txt"):  # fsspec has no extra for https
        with pytest.raises(BertkitError, match=message):
            find_sources([url])
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(BertkitError, match=r"pip install 'fsspec\[s3\]'"):
        find_sources(["s3://bucket/a.txt"])
    with (
        pytest.raises(BertkitError, match=r"pip install 'fsspec\[s3\]'"),
        open_binary("s3://b/a.json"),
    ):
        pass


class Breaking:
    """A remote file whose connection fails after some bytes."""

    def __init__(self) -> None:
        self.blocks = [b"One.\n\n"]

    def read(self, size: int) -> bytes:
        if self.blocks:
            return self.blocks.pop()
        raise RuntimeError("Response payload is not completed\nand more")


def test_a_broken_connection_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    system = fsspec.filesystem("memory")
    system.pipe("/broken/a.txt", b"One.\n\nTwo.\n")
    [source] = find_sources(["memory://broken/a.txt"])
    assert list(read_documents(source, TextCounts())) == ["One.", "Two."]
    monkeypatch.setattr(
        "bertkit.text.remote.RemoteStream",
        lambda file: RemoteStream(Breaking()),  # type: ignore[arg-type]
    )
    with pytest.raises(BertkitError, match=r"cannot be read .*payload is not completed\);"):
        list(read_documents(source, TextCounts()))


def test_folders_that_are_named_may_be_hidden() -> None:
    for name in (".staging/a.txt", ".staging/.b.txt", ".staging/.c/d.txt"):
        fsspec.filesystem("memory").pipe(f"/{name}", b"text")
    for url in ("memory://.staging", "memory://.staging/*.txt", "memory://.staging/**/*.txt"):
        assert [path for path, _ in remote_files(url)[0]] == ["memory:///.staging/a.txt"], url


def test_remote_streams_can_be_searched() -> None:
    fsspec.filesystem("memory").pipe("/searched/a.bin", bytes(range(256)))
    with open_binary("memory://searched/a.bin") as stream:
        assert stream.seek(-6, 2) == 250
        assert stream.read() == bytes(range(250, 256))
        stream.seek(3)
        assert stream.tell() == 3
        assert stream.read(2) == b"\x03\x04"


@pytest.mark.parametrize(
    ("path", "answer"),
    [("s3://bucket/a", True), ("memory://a", True), ("C:/data", False), ("a/b:/c", False)],
)
def test_what_is_remote(path: str, answer: bool) -> None:
    assert is_remote(Path(path)) == answer
