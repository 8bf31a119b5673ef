"""Stores broken on purpose are found out; healthy ones are left in peace."""

from __future__ import annotations

import io
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.console import Console
from bertkit.corpus.build import PrepareOptions, prepare
from bertkit.corpus.minhash import hash_parameters, mix_bits
from bertkit.corpus.store import ShardArrays, TokenStore
from bertkit.doctor import copies
from bertkit.doctor.copies import Tally, Texts, hash_documents, hash_sentences
from bertkit.doctor.corpus import check_store, is_store
from bertkit.doctor.findings import (
    STORE_LIMITS,
    THRESHOLDS,
    Finding,
    Threshold,
    judge_value,
    percent,
)
from bertkit.tokenizer.train import learn_vocabulary
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from tests.conftest import WORDS, make_document

SILENT = io.StringIO()
HUNGARIAN = "az egy kutya ház folyó híd és nem volt ember nagy kicsi szép zöld piros fehér hegy"
RUSSIAN = "река камень мост фонарь урожай зима сад письмо моряк гора окно медь нить рынок вечер"


def look(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in check_store(folder, Console(stream=SILENT))}


def problems(folder: Path) -> set[str]:
    return {name for name, finding in look(folder).items() if finding.severity == "problem"}


Build = Callable[..., Path]


@pytest.fixture
def build(tokenizer: Tokenizer, tmp_path: Path) -> Build:
    """Documents → a store's folder."""

    def make(documents: list[str], **options: object) -> Path:
        text = tmp_path / "text.txt"
        text.write_text("\n\n".join(documents) + "\n")
        own = options.pop("tokenizer", tokenizer)
        assert isinstance(own, Tokenizer)
        settings = {"held_out": 0.1, "language": "lines", **options}
        folder = tmp_path / "store"
        return prepare([str(text)], own, folder, PrepareOptions(**settings)).folder  # type: ignore[arg-type]

    return make


def documents(count: int = 150, sentences: int = 20) -> list[str]:
    rng = np.random.default_rng(3)
    return [make_document(rng, int(rng.integers(sentences // 2, sentences))) for _ in range(count)]


@pytest.fixture(scope="module")
def healthy(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with several shards of each split; tests copy it before they break it."""
    folder = tmp_path_factory.mktemp("healthy")
    rng = np.random.default_rng(5)
    text = "\n\n".join(make_document(rng, int(rng.integers(40, 120))) for _ in range(300))
    (folder / "text.txt").write_text(text)
    options = PrepareOptions(held_out=0.1, language="lines", shard_megabytes=1)
    return prepare([str(folder / "text.txt")], tokenizer, folder / "store", options).folder


def test_a_healthy_store_has_no_problem(healthy: Path) -> None:
    found = look(healthy)
    assert not problems(healthy), [one.lines() for one in found.values()]
    assert set(found) == set(STORE_LIMITS)
    store, held_out = TokenStore(healthy), TokenStore(healthy, "held_out")
    assert len(store.shards) > 1
    assert found["corpus-size"].numbers == {"tokens": store.tokens}
    assert found["documents"].numbers == {"documents": store.documents}
    assert found["held-out-size"].numbers["documents"] == held_out.documents
    assert found["duplicate-documents"].numbers["documents"] == 0
    assert found["held-out-copies"].numbers == {"share": 0, "compared": held_out.documents}
    assert found["label-balance"].numbers["random_share"] == pytest.approx(0.53, abs=0.05)
    assert all(one.change == "" for one in found.values() if one.severity == "ok")


def test_duplicate_documents(build: Build) -> None:
    # only the training split counts, so every document comes three times there or not at all
    found = look(build([text for text in documents() for _ in range(3)]))["duplicate-documents"]
    assert found.severity == "problem"
    assert found.numbers["documents"] == pytest.approx(2 / 3)
    assert found.numbers["tokens"] == pytest.approx(2 / 3)
    assert "67%" in found.meaning
    assert found.change


def test_repeated_lines(build: Build) -> None:
    line = "River stone bridge lantern harvest winter garden letter sailor mountain window."
    found = look(build([f"{text}\n{line}\n{line}\n{line}" for text in documents(sentences=8)]))
    assert found["repeated-sentences"].severity == "problem"
    assert found["repeated-sentences"].numbers["sentence"].startswith("river stone bridge lantern")
    assert (
        found["repeated-sentences"].numbers["most"] == 3 * found["documents"].numbers["documents"]
    )
    assert found["duplicate-documents"].severity == "ok"


def test_one_sentence_documents(build: Build) -> None:
    rng = np.random.default_rng(1)
    found = look(build([make_document(rng, 1) for _ in range(1500)]))
    assert found["one-sentence-documents"].numbers["share"] == 1
    assert found["one-sentence-documents"].severity == "problem"
    assert found["label-balance"].severity == "problem"
    assert found["label-balance"].numbers["random_share"] == 1


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (RUSSIAN, {"unknown-tokens", "unused-vocabulary"}),
        (HUNGARIAN + " q w x j c y abcdefghijklmnopqrstuvwxyz" * 2, {"fertility"}),
    ],
    ids=["other script", "other language"],
)
def test_vocabulary_of_another_language(build: Build, words: str, expected: set[str]) -> None:
    vocabulary = learn_vocabulary([words + " . ,"] * 20, 200)
    foreign = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    folder = build(documents(), tokenizer=foreign)
    assert expected <= problems(folder)


@pytest.mark.parametrize("pair", ["sop", "none", "single-segment"])
def test_what_other_examples_do_not_need_is_not_judged(build: Build, pair: str) -> None:
    rng = np.random.default_rng(1)
    folder = build([make_document(rng, 1) for _ in range(1500)])
    assert problems(folder) == {"one-sentence-documents", "label-balance"}
    found = {one.name: one for one in check_store(folder, Console(stream=SILENT), pair)}
    assert not [name for name, one in found.items() if one.severity == "problem"]
    assert "one-sentence-documents" not in found
    assert ("label-balance" in found) == (pair == "sop")
    assert ("largest-document" in found) == (pair == "none")
    if pair == "sop":
        assert found["label-balance"].numbers["random_share"] == pytest.approx(0.5, abs=0.05)


def test_own_vocabulary_is_fine(build: Build) -> None:
    own = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, ".", *WORDS], lowercase=True)
    found = look(build(documents(), tokenizer=own))
    for name in ("unknown-tokens", "fertility", "unused-vocabulary"):
        assert found[name].severity == "ok", found[name]


def test_unsplit_sentences(build: Build) -> None:
    texts = [text.replace("\n", " ") * 3 for text in documents(sentences=60)]
    assert "long-sentences" in problems(build(texts))


def test_missing_document_boundaries(build: Build) -> None:
    texts = documents()
    found = look(build([*texts[:9], "\n".join(texts[9:])], held_out=0))
    assert found["largest-document"].severity == "problem"
    assert found["documents"].severity == "problem"
    assert found["largest-document"].numbers["share"] > 0.9


def test_held_out_documents_that_are_training_documents(build: Build) -> None:
    texts = documents()
    found = look(build([*texts, *(text.upper() for text in texts)], held_out=0.3))
    assert found["held-out-copies"].severity == "problem"
    assert found["held-out-copies"].numbers["share"] == pytest.approx(0.7, abs=0.15)


def test_nothing_held_out_and_too_little_text(build: Build) -> None:
    found = look(build(documents(30, 4), held_out=0))
    assert found["held-out-size"].severity == "notice"
    assert "no evaluation" in found["held-out-size"].meaning
    assert found["corpus-size"].severity == "problem"
    assert found["documents"].severity == "notice"


@pytest.mark.parametrize("kind", ["tokens", "sentences", "documents"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove", "empty"])
def test_damaged_shards(healthy: Path, tmp_path: Path, kind: str, damage: str) -> None:
    folder = tmp_path / "store"
    shutil.copytree(healthy, folder)
    victim = folder / f"{TokenStore(folder).shards[0].name}.{kind}.npy"
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    if damage == "remove":
        victim.unlink()
    else:
        victim.write_bytes({"flip": content, "cut": content[:-9], "empty": b""}[damage])
    found = look(folder)
    assert found["files"].severity == "problem"
    assert found["files"].numbers["damaged"] == 1
    assert victim.name in found["files"].meaning
    whole = TokenStore(folder).shards[1:]
    assert found["corpus-size"].numbers["tokens"] == sum(shard.tokens for shard in whole)
    assert "label-balance" in found, "the rest is still looked at"


def test_all_shards_gone(healthy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(healthy, folder)
    for path in folder.glob("*.tokens.npy"):
        path.unlink()
    assert {"files", "corpus-size", "documents"} <= problems(folder)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"format": 1}', b'{"format": 99}', b"\xff"])
def test_damaged_manifest(healthy: Path, tmp_path: Path, content: bytes) -> None:
    folder = tmp_path / "store"
    shutil.copytree(healthy, folder)
    (folder / "manifest.json").write_bytes(content)
    assert is_store(folder)
    assert problems(folder) == {"files"}


def test_unfinished_store(healthy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(healthy, folder)
    (folder / "manifest.json").unlink()
    assert is_store(folder)
    assert "unfinished" in look(folder)["files"].meaning


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer_config.json", "tokenizer.json"])
def test_damaged_tokenizer(healthy: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "store"
    shutil.copytree(healthy, folder)
    (folder / "tokenizer" / name).write_text("[PAD]\n")
    assert problems(folder) == {"tokenizer"}


def test_exchanged_tokenizer(healthy: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(healthy, folder)
    Tokenizer.from_vocabulary([*tokenizer.vocabulary, "more"], lowercase=True).save(
        folder / "tokenizer"
    )
    found = look(folder)
    assert found["tokenizer"].severity == "problem"
    assert "fertility" not in found, "its pieces say nothing about these ids"


def test_ids_outside_of_the_vocabulary(healthy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(healthy, folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["vocabulary_size"] = 60
    (folder / "manifest.json").write_text(json.dumps(manifest))
    found = look(folder)
    assert {"files", "tokenizer"} <= problems(folder)
    assert "outside of the 60 tokens" in found["files"].meaning


def test_missing_unigrams(healthy: Path, tmp_path: Path) -> None:
    folder = tmp_path / "store"
    shutil.copytree(healthy, folder)
    (folder / "unigrams.npy").unlink()
    assert problems(folder) == {"files"}


def arrays_of(texts: list[list[list[int]]]) -> ShardArrays:
    sentences = [sentence for document in texts for sentence in document]
    return ShardArrays(
        np.array([token for sentence in sentences for token in sentence], dtype=np.uint16),
        np.cumsum([0, *map(len, sentences)]).astype(np.uint32),
        np.cumsum([0, *map(len, texts)]).astype(np.uint32),
    )


TEXTS = st.lists(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=1, max_size=3),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(texts=TEXTS, chunk=st.integers(1, 9))
def test_hashes_are_equal_where_texts_are(texts: list[list[list[int]]], chunk: int) -> None:
    arrays, keys = arrays_of(texts), hash_parameters(3, 4)
    whole = hash_sentences(arrays, keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(copies, "CHUNK_TOKENS", chunk)
        pieces = hash_sentences(arrays, keys)
    np.testing.assert_array_equal(whole.hashes, pieces.hashes)
    sentences = [tuple(sentence) for document in texts for sentence in document]
    assert len(set(whole.hashes.tolist())) == len(set(sentences))
    of_documents = hash_documents(arrays, whole)
    assert len(set(of_documents.hashes.tolist())) == len({str(document) for document in texts})
    assert of_documents.tokens.tolist() == [sum(map(len, document)) for document in texts]


@settings(max_examples=40, deadline=None)
@given(
    numbers=st.lists(st.lists(st.integers(0, 300), max_size=60), min_size=1, max_size=8),
    most=st.integers(1, 400),
)
def test_a_tally_counts_every_copy_of_what_it_remembers(
    numbers: list[list[int]], most: int
) -> None:
    tally = Tally(most)
    spread = mix_bits(np.arange(301, dtype=np.uint64))
    place = 0
    for part in numbers:
        chosen = np.array(part, dtype=np.int64)
        places = np.arange(place, place + len(part))
        tally.add(Texts(spread[chosen], chosen + 1), places)
        place += len(part)
    tally.settle()
    everything = [number for part in numbers for number in part]
    counts = {int(spread[number]): count for number, count in Counter(everything).items()}
    first = {int(spread[number]): everything.index(number) for number in everything}
    found = dict(zip(tally.hashes.tolist(), tally.counts.tolist(), strict=True))
    assert len(found) <= most
    assert all(counts[key] == count for key, count in found.items())
    assert all(
        first[key] == at
        for key, at in zip(tally.hashes.tolist(), tally.places.tolist(), strict=True)
    )
    if len(counts) <= most:
        assert found == counts
        assert tally.looked_at == "all"
        assert tally.copies == len(everything) - len(counts)
        assert tally.all_tokens == sum(everything) + len(everything)
    else:
        assert tally.level > 0


def test_shares_of_a_sample_are_those_of_all(
    healthy: Path, monkeypatch: pytest.MonkeyPatch, build: Build
) -> None:
    folder = build([text for text in documents(400) for _ in range(2)], held_out=0)
    monkeypatch.setattr(copies, "MAX_DOCUMENTS", 150)
    monkeypatch.setattr(copies, "MAX_SENTENCES", 1000)
    found = look(folder)
    assert found["duplicate-documents"].numbers["documents"] == pytest.approx(0.5)
    assert "a sample of 1 in 4" in found["duplicate-documents"].meaning
    assert found["repeated-sentences"].numbers["tokens"] == pytest.approx(0.5, abs=0.02)
    assert look(healthy)["held-out-copies"].numbers["share"] == 0


def test_limits_grade_from_both_sides() -> None:
    high, low = Threshold(0.1, 0.5), Threshold(100, 10, "documents", low=True)
    assert [high.grade(value) for value in (0.0, 0.1, 0.49, 0.5)] == [
        *("ok", "notice", "notice", "problem")
    ]
    assert [low.grade(value) for value in (101, 100, 11, 10)] == [
        *("ok", "notice", "notice", "problem")
    ]
    assert Threshold(0.1).grade(1e9) == "notice"
    assert judge_value("fertility", 3.0, {}, "said", "do").lines() == [
        *("problem  fertility: said", "         > do")
    ]
    for limit in THRESHOLDS.values():
        assert limit.notice <= limit.problem or limit.low, limit
    assert [percent(value) for value in (0, 1e-7, 0.0001, 0.0512, 0.512, 0.99999, 1)] == [
        *("0%", "less than 0.001%", "0.01%", "5.1%", "51%", "99.99%", "100%")
    ]
