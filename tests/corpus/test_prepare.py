from __future__ import annotations

import hashlib
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

from bertkit.console import Console
from bertkit.corpus import blocks as module
from bertkit.corpus import build
from bertkit.corpus.blocks import cut_strings, is_held_out
from bertkit.corpus.build import PrepareOptions, prepare
from bertkit.corpus.store import TokenStore
from bertkit.corpus.writers import offsets
from bertkit.errors import BertkitError
from bertkit.text.sentences import split_sentences
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import make_document


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="module")
def large_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 3.5 MB in 500 documents: several blocks and shards of one megabyte."""
    rng = np.random.default_rng(9)
    path = tmp_path_factory.mktemp("text") / "large.txt"
    path.write_text("\n\n".join(make_document(rng, int(rng.integers(20, 200))) for _ in range(500)))
    return path


SMALL_SHARDS = PrepareOptions(held_out=0.05, shard_megabytes=1)


def test_store_holds_exactly_the_text(
    corpus_text: str, store: TokenStore, tokenizer: Tokenizer
) -> None:
    documents = [text.strip("\n") for text in corpus_text.split("\n\n")]
    expected: dict[str, list[list[list[int]]]] = {"train": [], "held_out": []}
    for document in documents:
        split = "held_out" if is_held_out(document, 0.2) else "train"
        expected[split].append([tokenizer.encode(s).ids for s in split_sentences(document)])
    assert expected["held_out"]
    for split, wanted in expected.items():
        found = []
        opened = TokenStore(store.folder, split)
        for shard in range(len(opened.shards)):
            tokens, sentences, bounds = opened.arrays(shard)
            for first, stop in pairwise(bounds):
                found.append(
                    [tokens[sentences[i] : sentences[i + 1]].tolist() for i in range(first, stop)]
                )
        assert found == wanted
        assert opened.documents == len(wanted)
        assert opened.sentences == sum(map(len, wanted))
    counts = np.zeros(tokenizer.size, dtype=np.int64)
    for document in expected["train"]:
        for sentence in document:
            np.add.at(counts, sentence, 1)
    np.testing.assert_array_equal(store.unigrams, counts)


@pytest.fixture(scope="module")
def whole(large_text: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store that one process makes of the large text, undisturbed."""
    folder = tmp_path_factory.mktemp("whole") / "store"
    assert len(prepare([str(large_text)], tokenizer, folder, SMALL_SHARDS).shards) >= 3
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_any_number_of_processes_writes_the_same_bytes(
    whole: Path, large_text: Path, tokenizer: Tokenizer, tmp_path: Path, processes: int
) -> None:
    folder = tmp_path / "store"
    prepare([str(large_text)], tokenizer, folder, SMALL_SHARDS, processes=processes)
    assert digests(folder) == digests(whole)


@pytest.mark.slow
def test_the_tokenizer_may_be_a_path(store: TokenStore, tmp_path: Path) -> None:
    text = str(store.folder.with_name("corpus.txt"))
    options = PrepareOptions(held_out=0.2)
    again = prepare([text], str(store.folder), str(tmp_path / "store"), options)
    assert digests(again.folder) == digests(store.folder)


def test_stopped_preparation_resumes(
    whole: Path,
    large_text: Path,
    tokenizer: Tokenizer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    real = build.tokenize_block

    def counting(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return real(*arguments, **options)

    monkeypatch.setattr(build, "tokenize_block", counting)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(large_text)], tokenizer, tmp_path / "stopped", SMALL_SHARDS)
    with pytest.raises(BertkitError, match="unfinished token store"):
        TokenStore(tmp_path / "stopped")
    finished = len(list((tmp_path / "stopped" / "parts").glob("*.json")))
    assert finished >= 1
    before = len(calls)
    prepare([str(large_text)], tokenizer, tmp_path / "stopped", SMALL_SHARDS)
    total_blocks = -(-large_text.stat().st_size // module.TOKENIZE_CHARACTERS) + 1
    assert len(calls) - before < total_blocks, "finished shards were tokenised again"
    assert digests(whole) == digests(tmp_path / "stopped")


def test_a_complete_store_stays_one_while_it_is_prepared_again(
    whole: Path, large_text: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Reading all of its checksums takes minutes, in which a run may start, or Ctrl-C may come."""

    class Stopped(Console):
        def update(self, record: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    folder = tmp_path / "store"
    shutil.copytree(whole, folder)
    before = digests(folder)
    with pytest.raises(KeyboardInterrupt):
        prepare([str(large_text)], tokenizer, folder, SMALL_SHARDS, console=Stopped())
    assert TokenStore(folder).documents
    prepare([str(large_text)], tokenizer, folder, SMALL_SHARDS)
    assert digests(folder) == before


@pytest.mark.slow
def test_killed_preparation_resumes(
    whole: Path, large_text: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    command = [
        sys.executable, "-m", "bertkit", "prepare", str(large_text),
        "--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "killed"),
        "--held-out", "0.05", "--shard-megabytes", "1", "--processes", "2",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "killed" / "parts").glob("*.json")):
        assert time.monotonic() < deadline
        if process.poll() is not None:
            break
        time.sleep(0.01)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    left = {
        name: value for name, value in digests(tmp_path / "killed").items() if ".tmp-" not in name
    }
    assert left == digests(whole)


def test_damaged_shards_are_named_and_only_they_are_remade(
    whole: Path, large_text: Path, tokenizer: Tokenizer, tmp_path: Path
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
    prepare([str(large_text)], tokenizer, folder, SMALL_SHARDS)
    assert digests(folder) == before


def test_settings_of_which_nothing_was_made_bind_nobody(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """A wrong column, another encoding, no blank line: it may be put right in the same folder."""
    text, folder = tmp_path / "a.jsonl", tmp_path / "store"
    text.write_text('{"body": "River."}\n{"body": "Stone."}\n')
    with pytest.raises(BertkitError, match="known: body"):
        prepare([str(text)], tokenizer, folder)
    made = prepare([str(text)], tokenizer, folder, PrepareOptions(column="body", held_out=0))
    assert made.documents == 2
    with pytest.raises(BertkitError, match="made with other column"):
        prepare([str(text)], tokenizer, folder)


def test_other_settings_are_refused(store: TokenStore, tokenizer: Tokenizer) -> None:
    source = [str(store.folder.parent / "corpus.txt")]
    with pytest.raises(BertkitError, match="made with other held_out"):
        prepare(source, tokenizer, store.folder, PrepareOptions(held_out=0.3))
    cased = Tokenizer.from_vocabulary(tokenizer.vocabulary, lowercase=False)
    with pytest.raises(BertkitError, match="made with other tokenizer_hash"):
        prepare(source, cased, store.folder, PrepareOptions(held_out=0.2))
    with pytest.raises(BertkitError, match=r"another tokenizer than here.*other settings"):
        store.check_tokenizer(cased, "here")
    other = Tokenizer.from_vocabulary([*tokenizer.vocabulary, "more"], lowercase=True)
    with pytest.raises(BertkitError, match="vocabularies of"):
        store.check_tokenizer(other, "here")


def test_foreign_folder_is_left_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("One.\n\nTwo.\n")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("important")
    with pytest.raises(BertkitError, match="not empty and not a token store"):
        prepare([str(tmp_path / "text.txt")], tokenizer, tmp_path / "mine")


@pytest.mark.slow
def test_full_disk_is_one_clear_line(
    corpus_text: str, tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text(corpus_text)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(BertkitError, match=r"cannot write .*\.npy: the disk is full"):
        prepare([str(tmp_path / "text.txt")], tokenizer, tmp_path / "store", SMALL_SHARDS)
    monkeypatch.undo()
    store = prepare([str(tmp_path / "text.txt")], tokenizer, tmp_path / "store", SMALL_SHARDS)
    assert store.documents > 10


def test_long_sentences_are_cut_and_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = " ".join(["river"] * 30_000)  # one sentence of 180,000 characters
    (tmp_path / "text.txt").write_text(f"{words}\n\nStone.\n\n\x00\n")
    store = prepare(
        [str(tmp_path / "text.txt")], tokenizer, tmp_path / "store", PrepareOptions(held_out=0)
    )
    assert store.tokens == 30_000 + 2
    assert max(np.diff(store.arrays(0).sentences)) == module.MAX_SENTENCE_TOKENS
    assert store.manifest["tokenization"]["sentence cut in pieces (nothing lost)"] == 4
    pieces = list(cut_strings([words]))
    assert max(map(len, pieces)) <= module.MAX_STRING
    assert " ".join(pieces) == words
    assert list(cut_strings(["x" * 120_000])) == ["x" * 50_000, "x" * 50_000, "x" * 20_000]


def test_large_vocabularies_take_four_bytes(tmp_path: Path) -> None:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary += [f"w{number}" for number in range(70_000)]
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    (tmp_path / "text.txt").write_text("w1 w69999\n\nw65600\n")
    store = prepare(
        [str(tmp_path / "text.txt")], tokenizer, tmp_path / "store", PrepareOptions(held_out=0)
    )
    tokens = store.arrays(0).tokens
    assert tokens.dtype == np.uint32
    assert tokens.tolist() == [6, 70_004, 65_605]


def test_not_a_store(tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match="is not a token store"):
        TokenStore(tmp_path)
    with pytest.raises(BertkitError, match="held_out must be"):
        prepare(["x"], None, tmp_path, PrepareOptions(held_out=1.5))  # type: ignore[arg-type]


def test_edited_text_of_the_same_size_is_noticed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("river.\n\nstone.\n")
    prepare([str(text)], tokenizer, tmp_path / "store")
    os.utime(text, ns=(1, 1))
    with pytest.raises(BertkitError, match="made with other sources"):
        prepare([str(text)], tokenizer, tmp_path / "store")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("manifest.json", "[]"),
        ("manifest.json", '{"format": 1}'),
        ("manifest.json", '{"format": 1, "shards": [{"nam": 1}]}'),
        ("manifest.json", "{"),
        ("manifest.json", '{"format": 99}'),
        ("unigrams.npy", "torn"),
    ],
)
def test_damaged_store_files_are_named(
    store: TokenStore, tmp_path: Path, name: str, content: str
) -> None:
    import shutil

    folder = tmp_path / "store"
    shutil.copytree(store.folder, folder)
    (folder / name).write_text(content)
    with pytest.raises(BertkitError, match=name):
        _ = TokenStore(folder).unigrams


@pytest.mark.parametrize("content", ["{}", "[", '{"shards": [{}]}'])
def test_damaged_part_record_is_remade(
    corpus_text: str, tokenizer: Tokenizer, tmp_path: Path, content: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(corpus_text)
    folder = tmp_path / "store"
    prepare([str(text)], tokenizer, folder)
    before = digests(folder)
    (folder / "parts" / "00000-000.json").write_text(content)
    prepare([str(text)], tokenizer, folder)
    assert digests(folder) == before


def test_impossible_numbers_are_refused(store: TokenStore, tmp_path: Path) -> None:
    text = [str(store.folder.parent / "corpus.txt")]
    for options in (PrepareOptions(shard_megabytes=0), PrepareOptions(shard_megabytes=10**9)):
        with pytest.raises(BertkitError, match="shard_megabytes must be 1 to 1000"):
            prepare(text, store.tokenizer, tmp_path, options)
    with pytest.raises(BertkitError, match="--processes must be from 0 to 1,024"):
        prepare(text, store.tokenizer, tmp_path, processes=-1)
    with pytest.raises(BertkitError, match=r"2\^32 tokens"):
        offsets(np.array([2**31, 2**31]))
