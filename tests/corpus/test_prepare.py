"""Preparation: exactly the text, the same bytes however it is made, and no torn or mixed store."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.corpus import prepare as preparation
from bertkit.corpus.prepare import cut_strings, describe_store, is_held_out, prepare
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.progress import Console
from bertkit.text import TextSource, split_sentences
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import make_document

SMALL_SHARDS: dict[str, Any] = {"held_out": 0.05, "shard_megabytes": 1}


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".tmp-" not in path.name
    }


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 3.5 MB in 500 documents and three files: several blocks and shards of a megabyte."""
    rng = np.random.default_rng(9)
    folder = tmp_path_factory.mktemp("text")
    made = [make_document(rng, int(rng.integers(20, 200))) for _ in range(500)]
    for name, part in (("a", made[:2]), ("b", made[2:450]), ("c", made[450:])):
        (folder / f"{name}.txt").write_text("\n\n".join(part))
    (folder / "empty.txt").write_text("")
    return folder


@pytest.fixture(scope="module")
def whole(texts: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that one process makes of the texts, undisturbed."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    assert len(prepare([texts], tokenizer, folder, **SMALL_SHARDS).shards) >= 3
    return folder


def test_a_store_holds_exactly_the_text(
    corpus_text: str, store: TokenStore, tokenizer: Tokenizer
) -> None:
    documents = [text.strip("\n") for text in corpus_text.split("\n\n")]
    expected: dict[str, list[list[list[int]]]] = {"train": [], "held_out": []}
    for document in documents:
        split = "held_out" if is_held_out(document, 0.2) else "train"
        expected[split].append([tokenizer.encode(s).ids for s in split_sentences(document)])
    assert expected["held_out"]
    for split, wanted in expected.items():
        read = []
        opened = TokenStore(store.folder, split)
        for shard in range(len(opened.shards)):
            tokens, sentences, bounds = opened.arrays(shard)
            for first, stop in pairwise(bounds):
                read.append(
                    [tokens[sentences[i] : sentences[i + 1]].tolist() for i in range(first, stop)]
                )
        assert read == wanted
        assert opened.documents == len(wanted)
        assert opened.sentences == sum(map(len, wanted))
    counts = np.zeros(tokenizer.size, dtype=np.int64)
    for document in expected["train"]:
        for sentence in document:
            np.add.at(counts, sentence, 1)
    np.testing.assert_array_equal(store.unigrams, counts)


@pytest.mark.slow
def test_two_processes_write_the_same_bytes(
    whole: Path, texts: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    tokenizer.save(tmp_path / "tokenizer")
    prepare([texts], tmp_path / "tokenizer", folder, processes=2, **SMALL_SHARDS)
    assert digests(folder) == digests(whole)


class Stopping(Console):
    """Stops the work at some point, and counts how often it was shown."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.updates = after, 0

    def update(self, record: dict[str, Any]) -> None:
        self.updates += 1
        if self.updates == self.after:
            raise KeyboardInterrupt


@pytest.mark.slow
@pytest.mark.parametrize("after", [2, 8, 13])
def test_a_stopped_preparation_resumes(
    whole: Path, texts: Path, tokenizer: Tokenizer, tmp_path: Path, after: int
) -> None:
    folder = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        prepare([texts], tokenizer, folder, console=Stopping(after), **SMALL_SHARDS)
    with pytest.raises(BertkitError, match="unfinished token store"):
        TokenStore(folder)
    console = Stopping(-1)
    prepare([texts], tokenizer, folder, console=console, **SMALL_SHARDS)
    assert digests(folder) == digests(whole)
    assert console.updates <= 17 - 4 * (after // 5), "complete shards are not made again"
    prepare([texts], tokenizer, folder, console=Stopping(1), **SMALL_SHARDS)
    assert digests(folder) == digests(whole)


def test_a_text_that_has_shrunk_unnoticed_is_refused(
    texts: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Data sets of the hub have neither a size nor a time of change."""
    copied, folder = tmp_path / "text", tmp_path / "store"
    shutil.copytree(texts, copied)
    with pytest.raises(KeyboardInterrupt):
        prepare([copied], tokenizer, folder, console=Stopping(8), **SMALL_SHARDS)
    path = copied / "b.txt"
    times = path.stat()
    path.write_text(path.read_text().replace("\n\n", "\n "))  # one document
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(BertkitError, match=r"b\.txt has fewer documents"):
        prepare([copied], tokenizer, folder, **SMALL_SHARDS)
    assert not (folder / "manifest.json").exists()


@pytest.mark.slow
def test_a_killed_preparation_resumes(
    whole: Path, texts: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    command = [
        sys.executable, "-m", "bertkit", "prepare", str(texts),
        "--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "killed"),
        "--held-out", "0.05", "--shard-megabytes", "1", "--processes", "2",
    ]  # fmt: skip
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    end = time.monotonic() + 60
    while not list((tmp_path / "killed" / "shards").glob("*.json")) and process.poll() is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    assert digests(tmp_path / "killed") == digests(whole)


def test_damaged_shards_are_named_and_remade(
    whole: Path, texts: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    folder = tmp_path / "store"
    shutil.copytree(whole, folder)
    before = digests(folder)
    victim = folder / f"{TokenStore(folder).shards[1].name}.tokens.npy"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    with pytest.raises(BertkitError, match=rf"{victim.name} is corrupt.*remove its manifest\.json"):
        TokenStore(folder).arrays(1)
    victim.write_bytes(content[:-10])
    with pytest.raises(BertkitError, match=f"{victim.name} is torn"):
        TokenStore(folder).arrays(1)
    victim.unlink()
    with pytest.raises(BertkitError, match=f"{victim.name} is missing"):
        TokenStore(folder).arrays(1)
    TokenStore(folder).arrays(0)
    (folder / "manifest.json").unlink()
    prepare([texts], tokenizer, folder, **SMALL_SHARDS)
    assert digests(folder) == before


def test_a_wrong_first_attempt_may_be_corrected(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text, folder = tmp_path / "a.jsonl", tmp_path / "store"
    text.write_text('{"body": "River."}\n{"body": "Stone."}\n')
    with pytest.raises(BertkitError, match="body"):
        prepare([text], tokenizer, folder)
    source = TextSource((str(text),), column="body")
    assert prepare(source, tokenizer, folder, held_out=0).documents == 2
    with pytest.raises(BertkitError, match=r"other settings .column"):
        prepare([text], tokenizer, folder, held_out=0)


def test_other_settings_and_changed_texts_are_refused(
    tokenizer: Tokenizer, tmp_path: Path, corpus_text: str
) -> None:
    text, folder = tmp_path / "a.txt", tmp_path / "store"
    text.write_text(corpus_text)
    prepare([text], tokenizer, folder)
    for options in ({"held_out": 0.5}, {"shard_megabytes": 3}):
        with pytest.raises(BertkitError, match=rf"other settings .{next(iter(options))}"):
            prepare([text], tokenizer, folder, **options)
    with pytest.raises(BertkitError, match=r"other settings .language"):
        prepare(TextSource((str(text),), language="lines"), tokenizer, folder)
    cased = Tokenizer.from_vocabulary(tokenizer.vocabulary, lowercase=False)
    with pytest.raises(BertkitError, match=r"other settings .tokenizer_hash"):
        prepare([text], cased, folder)
    text.write_text(corpus_text.replace("a", "e"))
    with pytest.raises(BertkitError, match=r"other settings .sources"):
        prepare([text], tokenizer, folder)


def test_what_was_skipped_is_counted_in_the_manifest(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("River.\n\n\x00\u200b\n\n" + "stone " * 1200 + "\n\nBridge.\n")
    (tmp_path / "b.jsonl").write_text('{"text": "Water."}\nno JSON\n')
    (tmp_path / "c.jpg").write_bytes(b"x")
    paths = [tmp_path / name for name in ("a.txt", "b.jsonl", "c.*", "a.txt")]
    store = prepare([*paths[:2], tmp_path / "*.[jt]*"], tokenizer, tmp_path / "s", held_out=0)
    assert store.manifest["text"]["documents"] == 2 * 5
    assert store.manifest["text"]["skipped"] == {
        "line is not a JSON object": 2,
        "file of unknown type": 1,
    }
    counted = store.manifest["tokenization"]
    assert counted["document without any token"] == 2
    assert counted["sentence cut in pieces (nothing lost)"] == 2
    assert store.documents == 2 * 4


@pytest.mark.slow
def test_a_manifest_of_another_version_is_read(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path / "store")
    path = tmp_path / "store" / "manifest.json"
    manifest = json.loads(path.read_text())
    for shard in manifest["shards"]:
        shard["compression"] = "none"
    for name in ("text", "tokenization", "sources", "settings"):
        del manifest[name]
    whole_tokenizer = TokenStore(whole).tokenizer
    facts = [[True, True, "google", 200], whole_tokenizer.vocabulary]  # that of version 0.1
    manifest["tokenizer_hash"] = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
    path.write_text(json.dumps(manifest))
    described = tmp_path / "store" / "tokenizer" / "tokenizer.json"
    described.write_text(described.read_text().replace('_per_word": 100', '_per_word": 200'))
    store = TokenStore(tmp_path / "store")
    assert store.tokenizer.content_hash == whole_tokenizer.content_hash
    store.check_tokenizer(whole_tokenizer, "the model")
    assert store.content_hash == TokenStore(whole).content_hash
    assert describe_store(store)[0].endswith("of tokens")


@pytest.mark.parametrize("options", [{"held_out": 1.0}, {"shard_megabytes": 0}])
def test_impossible_arguments(tokenizer: Tokenizer, tmp_path: Path, options: Any) -> None:
    text = tmp_path / "text" / "a.txt"
    text.parent.mkdir()
    text.write_text("Only one document.\n")
    with pytest.raises(BertkitError, match=next(iter(options))):
        prepare([text], tokenizer, tmp_path / "store", **options)
    with pytest.raises(BertkitError, match="blank line"):
        prepare([text], tokenizer, tmp_path / "store", held_out=0)
    with pytest.raises(BertkitError, match="language"):
        prepare(TextSource((str(text),), language="german"), tokenizer, tmp_path / "store")
    for folder in (text.parent / "store", text.parent, "s3://bucket/store"):
        with pytest.raises(BertkitError):
            prepare([text.parent], tokenizer, folder)
    assert [path.name for path in text.parent.iterdir()] == ["a.txt"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.text("ab  ", max_size=200), max_size=5))
def test_long_strings_are_cut_at_spaces_and_lose_nothing(sentences: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "MAX_STRING", 20)
        parts = list(cut_strings(sentences))
    assert all(len(part) <= 20 for part in parts)
    assert "".join("".join(parts).split()) == "".join("".join(sentences).split())
