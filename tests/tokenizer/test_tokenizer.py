"""Ids and offsets against the reference, against Hugging Face's and by hand."""

from __future__ import annotations

import gc
import lzma
import os
import pickle
import random
import shutil
import threading
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from bertkit.errors import BertkitError
from bertkit.tokenizer import compiled, wordpiece
from bertkit.tokenizer.compiled import (
    WORDPIECE_SOURCE,
    CharacterPages,
    compiled_library,
    wordpiece_library,
)
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from tests.tokenizer.reference import basic_tokenize, tokenize
from tests.tokenizer.test_normalize import every_character, in_context, texts

SMALL = [
    *SPECIAL_TOKENS,
    *("the", "cat", "un", "##want", "##ed", "run", "##ning", ",", "[", "]", "mask", "!"),
    *("漢", "cafe", "##s", "\u1112\u1161", "##\u11ab", "a", "##a"),
]


@pytest.fixture(scope="module", params=["compiled", "python"])
def route(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let tokenizers that are made from now on use the compiled code, or do without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BERTKIT_NATIVE", "1" if request.param == "compiled" else "0")
        wordpiece_library.cache_clear()
        if request.param == "compiled" and wordpiece_library() is None:
            pytest.skip("bertkit was installed without a C compiler")
        yield request.param
    wordpiece_library.cache_clear()


def genuine(data: Path, name: str, compat: str = "google") -> Tokenizer:
    return loaded(data, name, compat, os.environ.get("BERTKIT_NATIVE", "1"))


@cache
def loaded(data: Path, name: str, compat: str, native: str) -> Tokenizer:
    return Tokenizer.load(data / "vocab" / f"bert-base-{name}-vocab.txt", compat=compat)


@cache
def numbered(vocabulary: tuple[str, ...]) -> dict[str, int]:
    return {piece: index for index, piece in enumerate(vocabulary)}


def wikipedia(data: Path, lines: int) -> list[str]:
    with lzma.open(data / "wikipedia" / "wiki_AA.txt.xz", "rt", encoding="utf-8") as file:
        return [line for line in islice(file, lines) if not line.isspace()]


def expected_pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    ids = numbered(tuple(tokenizer.vocabulary))
    return tokenize(text, ids, lowercase=tokenizer.lowercase)


def assert_lines_agree(tokenizer: Tokenizer, lines: list[str]) -> None:
    ids = numbered(tuple(tokenizer.vocabulary))
    expected = [tokenize(line, ids, lowercase=tokenizer.lowercase) for line in lines]
    encodings = [tokenizer.encode(line) for line in lines]
    assert [encoding.tokens for encoding in encodings] == expected
    assert tokenizer.encode_batch(lines) == [encoding.ids for encoding in encodings]
    assert all(len(e.ids) == len(e.tokens) == len(e.offsets) for e in encodings)


def small(**settings: Any) -> Tokenizer:
    return Tokenizer.from_vocabulary(SMALL, **{"lowercase": True, **settings})


# Ids


@pytest.mark.usefixtures("route")
def test_pieces_and_offsets_by_hand() -> None:
    text = "The UNWANTED Cafe\u0301s, dog 漢!"
    encoding = small().encode(text)
    assert encoding.tokens == (
        ["the", "un", "##want", "##ed", "cafe", "##s", ",", "[UNK]", "漢", "!"]
    )
    assert [text[start:end] for start, end in encoding.offsets] == (
        ["The", "UN", "WANT", "ED", "Cafe", "s", ",", "dog", "漢", "!"]
    )
    assert encoding.ids == [SMALL.index(piece) for piece in encoding.tokens]
    assert small().encode_batch([text, ""]) == [encoding.ids, []]


@pytest.mark.usefixtures("route")
def test_pieces_of_one_syllable_share_its_offset() -> None:
    assert small().encode("한") == (
        [SMALL.index("\u1112\u1161"), SMALL.index("##\u11ab")],
        ["\u1112\u1161", "##\u11ab"],
        [(0, 1), (0, 1)],
    )


@pytest.mark.parametrize("route", ["python"], indirect=True)  # below: compiled, all of them
@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("name", ["uncased", "cased", "multilingual-cased"])
def test_ids_of_sampled_code_points(data: Path, name: str) -> None:
    tokenizer = genuine(data, name)
    for characters in every_character(step=61):
        assert_lines_agree(tokenizer, [in_context(characters)])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["uncased", "cased"])
def test_ids_of_every_code_point(data: Path, name: str) -> None:
    tokenizer = genuine(data, name)
    ids = {piece: index for index, piece in enumerate(tokenizer.vocabulary)}
    seen = 0
    for characters in every_character():
        text = in_context(characters)
        pieces = tokenize(text, ids, lowercase=tokenizer.lowercase)
        if tokenizer.encode_batch([text]) != [[ids[piece] for piece in pieces]]:
            for character in characters:
                alone = in_context([character])
                assert tokenizer.encode(alone).tokens == expected_pieces(tokenizer, alone)
            pytest.fail("the characters agree one by one but not together")
        seen += len(characters)
    assert seen > 150_000


@pytest.mark.usefixtures("route")
@settings(max_examples=200, deadline=None)
@given(text=texts)
def test_ids_of_any_text(data: Path, text: str) -> None:
    for name in ("uncased", "cased"):
        assert_lines_agree(genuine(data, name), [text])


@pytest.mark.usefixtures("route")
@pytest.mark.parametrize("name", ["uncased", "cased", "multilingual-cased"])
def test_ids_of_some_wikipedia(data: Path, name: str) -> None:
    assert_lines_agree(genuine(data, name), wikipedia(data, 600))


@pytest.mark.usefixtures("route")
def test_offsets_cut_the_word_out_of_the_raw_text(data: Path) -> None:
    tokenizer = genuine(data, "uncased")
    for line in wikipedia(data, 600):
        for piece, (start, end) in zip(*tokenizer.encode(line)[1:], strict=True):
            if piece != "[UNK]":
                (word,) = basic_tokenize(line[start:end], lowercase=True)
                assert word.replace("ς", "σ") == piece.removeprefix("##").replace("ς", "σ")


@pytest.mark.parametrize("name", ["uncased", "cased"])
def test_offsets_equal_those_of_the_library(data: Path, name: str) -> None:
    compared = 0
    for line in wikipedia(data, 2000):
        ours, theirs = genuine(data, name).encode(line), genuine(data, name, "hf").encode(line)
        if ours.ids == theirs.ids:
            assert ours == theirs
            compared += 1
    assert compared > 1000


def test_words_that_are_no_longer_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(0)
    made = (str(draw.randrange(10**9)) for _ in range(280_000))
    texts = [" ".join(islice(made, 10_000)) for _ in range(28)]
    digits = [*SPECIAL_TOKENS, *"0123456789", *(f"##{one}" for one in range(10))]
    tokenizer = Tokenizer.from_vocabulary(digits, lowercase=True)
    expected = [[5 + int(word[0]), *(15 + int(one) for one in word[1:])] for text in texts
                for word in text.split()]  # fmt: skip
    found, lengths = tokenizer.encode_arrays(texts)
    assert found.tolist() == [one for word in expected for one in word]
    assert lengths.sum() == len(found)
    assert tokenizer.encode_batch(texts[:1]) == [found[: lengths[0]].tolist()]


def test_texts_that_are_left_to_python(data: Path) -> None:
    tokenizer = genuine(data, "uncased")
    plain, sigma = "a plain text", "ΟΔΟΣ, ΣΑΣ"  # the lower case of a sigma depends on its place
    mixed = [plain, sigma, "", sigma, plain, "\ud83d", "x" * 300]
    expected = [tokenizer.encode(text).ids for text in mixed]
    assert tokenizer.encode(sigma).tokens == expected_pieces(tokenizer, sigma)
    assert tokenizer.encode_batch(mixed) == expected
    ids, lengths = tokenizer.encode_arrays(mixed)
    assert ids.tolist() == [one for part in expected for one in part]
    assert lengths.tolist() == [len(part) for part in expected]


@pytest.mark.parametrize("route", ["compiled"], indirect=True)
@pytest.mark.usefixtures("route")
def test_only_characters_that_occur_are_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    examined: list[str] = []
    plain = compiled.character_rule
    monkeypatch.setattr(
        compiled, "character_rule", lambda one, **rules: examined.append(one) or plain(one, **rules)
    )
    monkeypatch.setattr(wordpiece, "character_pages", CharacterPages)  # fresh ones
    tokenizer = small()
    tokenizer.encode("the")
    examined.clear()
    text = "cat \u00e9\u4e00\ud83d\U0010ffff \u00e9"
    assert tokenizer.encode(text).ids == tokenizer.encode_batch([text])[0]
    assert sorted(examined) == ["\u00e9", "\u4e00", "\ud83d", "\U0010ffff"]


@pytest.mark.usefixtures("route")
def test_ids_as_arrays_may_be_changed() -> None:
    ids, lengths = small().encode_arrays(["the cat", ""])
    ids += 1
    assert (ids.tolist(), lengths.tolist()) == ([6, 7], [2, 0])


@pytest.mark.parametrize("route", ["compiled"], indirect=True)
@pytest.mark.usefixtures("route")
def test_memory_is_freed_when_python_exits(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = small()
    tokenizer.encode("the cat")
    monkeypatch.setattr(compiled, "ctypes", None)  # as modules are when Python exits
    del tokenizer
    gc.collect()  # an exception would be a warning, which is an error


def test_a_library_of_another_system_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "some.c").touch()
    assert compiled_library(tmp_path / "some.c", "absent") is None
    (tmp_path / "libbertkit-other.so").write_bytes(b"\x7fELF of another processor")
    assert compiled_library(tmp_path / "some.c", "other") is None


def test_a_library_without_its_source_is_not_used(tmp_path: Path) -> None:
    built = WORDPIECE_SOURCE.with_name("libbertkit-wordpiece.so")
    if not built.is_file():
        pytest.skip("bertkit was installed without a C compiler")
    shutil.copy(built, tmp_path / "libbertkit-lone.so")
    assert compiled_library(tmp_path / "removed.c", "lone") is None


@pytest.mark.parametrize("route", ["compiled"], indirect=True)
@pytest.mark.usefixtures("route")
def test_rules_of_long_texts_are_computed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "LONG_TEXT", 3)
    monkeypatch.setattr(wordpiece, "character_pages", CharacterPages)
    given = ["caf\u00e9s the", "\u6f22", "the cat", "un\u00f1wanted \u1112\u1161\u11ab", ""]
    assert small().encode_batch(given) == small(compat="google")._encode_lists(given)
    assert [small().encode(one).ids for one in given] == small()._encode_lists(given)


def test_what_is_no_text_is_refused() -> None:
    for other in (None, 3, b"abc", ["a"]):
        with pytest.raises(TypeError):
            small().encode(other)  # type: ignore[arg-type]


def test_threads_share_a_tokenizer(data: Path) -> None:
    tokenizer = genuine(data, "cased")
    lines = wikipedia(data, 400)
    expected, found = tokenizer.encode_batch(lines), list[Any]()
    fresh = Tokenizer(*tokenizer.__reduce__()[1])
    threads = [
        threading.Thread(target=lambda: found.append(fresh.encode_batch(lines))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


@pytest.mark.usefixtures("route")
def test_long_words_are_unknown_above_the_limit() -> None:
    assert small().encode("a" * 200).tokens == ["a", *["##a"] * 199]
    assert small().encode("a" * 201).tokens == ["[UNK]"]
    assert small().encode("a" * 201).offsets == [(0, 201)]
    assert small(compat="hf").encode("a" * 101).tokens == ["[UNK]"]
    assert small(max_word_characters=2).encode("aa aaa").tokens == ["a", "##a", "[UNK]"]


@pytest.mark.usefixtures("route")
def test_special_tokens_in_raw_text() -> None:
    assert small().encode("the [MASK]").tokens == ["the", "[", "mask", "]"]
    assert small(compat="hf").encode("the [MASK]").tokens == ["the", "[MASK]"]


@pytest.mark.usefixtures("route")
def test_lone_surrogates_are_unknown() -> None:
    assert small().encode("the \ud83d cat").tokens == ["the", "[UNK]", "cat"]
    assert small().encode_batch(["\ud83d"]) == [[1]]
    assert small(compat="hf").encode("the \ud83d cat").offsets == [(0, 3), (6, 9)]
    assert small(compat="hf").encode_batch(["\ud83d"]) == [[]]


# Pairs, decoding, properties


def test_pair() -> None:
    text, pair = "The cat", "unwanted!"
    encoding = small().encode_pair(text, pair)
    pieces = [SMALL[index] for index in encoding.ids]
    assert pieces == ["[CLS]", "the", "cat", "[SEP]", "un", "##want", "##ed", "!", "[SEP]"]
    assert encoding.segment_ids == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert encoding.text_index == [-1, 0, 0, -1, 1, 1, 1, 1, -1]
    assert encoding.offsets[:5] == [(0, 0), (0, 3), (4, 7), (0, 0), (0, 2)]
    single = small().encode_pair("the")
    assert single == ([2, SMALL.index("the"), 3], [0, 0, 0], [(0, 0), (0, 3), (0, 0)], [-1, 0, -1])
    assert small().encode_pair("the", " ").ids == single.ids, "no second text"


def test_decode() -> None:
    tokenizer = small()
    ids = tokenizer.encode_pair("The unwanted cafés!").ids
    assert tokenizer.decode(ids) == "[CLS] the unwanted cafes ! [SEP]"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the unwanted cafes !"
    assert tokenizer.decode([SMALL.index("##s"), SMALL.index("##ed")]) == "sed"
    assert tokenizer.decode(np.array([5])) == "the"
    assert tokenizer.decode([]) == ""
    with pytest.raises(BertkitError, match=f"id {len(SMALL)} is outside"):
        tokenizer.decode([len(SMALL)])
    with pytest.raises(BertkitError, match="id -1"):
        tokenizer.decode([-1])


def test_properties() -> None:
    tokenizer = small()
    assert tokenizer.size == len(SMALL)
    special = (tokenizer.pad_id, tokenizer.unk_id, tokenizer.cls_id)
    assert (*special, tokenizer.sep_id, tokenizer.mask_id) == (0, 1, 2, 3, 4)
    assert tokenizer.continuation.dtype == bool
    assert [SMALL[index] for index in np.flatnonzero(tokenizer.continuation)] == (
        ["##want", "##ed", "##ning", "##s", "##\u11ab", "##a"]
    )
    assert "uncased" in repr(tokenizer)


def test_content_hash_follows_what_changes_ids() -> None:
    variants = [
        small(),
        small(lowercase=False),
        small(compat="hf"),
        small(strip_accents=False),
        small(max_word_characters=50),
        Tokenizer.from_vocabulary([*SMALL, "more"], lowercase=True),
        Tokenizer.from_vocabulary([*SMALL[:-2], "##a", "a"], lowercase=True),
    ]
    assert len({tokenizer.content_hash for tokenizer in variants}) == len(variants)
    assert small().content_hash == small(max_word_characters=200).content_hash


@pytest.mark.parametrize("compat", ["google", "hf"])
def test_pickle(compat: str) -> None:
    tokenizer = small(compat=compat, strip_accents=False, max_word_characters=7)
    tokenizer.encode("the cat")
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert copy.content_hash == tokenizer.content_hash
    assert copy.encode("the unwanted cat") == tokenizer.encode("the unwanted cat")
