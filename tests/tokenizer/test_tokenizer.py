"""Ids and offsets against the `tokenizers` library and transformers, and by hand."""

from __future__ import annotations

import lzma
import pickle
import random
import threading
import time
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Pipeline

from bertkit.errors import BertkitError
from bertkit.tokenizer.files import split_words
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer, wordpiece_library

SMALL = [
    *SPECIAL_TOKENS,
    *("the", "cat", "un", "##want", "##ed", "run", "##ning", ",", "[", "]", "mask", "!"),
    *("漢", "cafe", "##s", "\u1112\u1161", "##\u11ab", "a", "##a"),
]
HOSTILE = [
    *("[MASK]", "[SEP]", "[CLS", "[", "]", "[PAD]", "[UNK]", "##ing", "e\u0301", "\u0301", "Σ"),
    *("ς", "İ", "한", "漢", "\u200b", "\u00ad", " ", "\n", "\u3000", "a" * 100, "a" * 101, "ß"),
    *("ﬁ", "Ǆ", "unaffable", "!", "naïve", "\x00", "\ufffd"),
    *("\u0f73", "\u0345", "\U0001d165\U0001d16d"),
    *("\u2028", "\x85", "\u0c3c", "\u0315\u0300", "\ue000", "\u0898", "\U0001f469\u200d", "$"),
]
NAMES = ["uncased", "cased"]


@cache
def genuine(data: Path, name: str) -> Tokenizer:
    return Tokenizer.load(data / "vocab" / f"bert-base-{name}-vocab.txt")


@pytest.fixture(params=["compiled", "library"])
def route(request: pytest.FixtureRequest) -> Iterator[str]:
    """Let tokenizers that are made from now on use the compiled code, or do without it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BERTKIT_NATIVE", "1" if request.param == "compiled" else "0")
        wordpiece_library.cache_clear()
        if request.param == "compiled" and wordpiece_library() is None:
            pytest.skip("bertkit was installed without a C compiler")
        yield request.param
    wordpiece_library.cache_clear()


def wikipedia(data: Path, lines: int) -> list[str]:
    with lzma.open(data / "wikipedia" / "wiki_AA.txt.xz", "rt", encoding="utf-8") as file:
        return [line for line in islice(file, lines) if not line.isspace()]


@cache
def library(folder: Path, tokenizer: Tokenizer) -> Pipeline:
    """The library's tokenizer of the tokenizer.json that a tokenizer saves."""
    tokenizer.save(folder)
    return Pipeline.from_file(str(folder / "tokenizer.json"))


def assert_equal_to_library(tokenizer: Tokenizer, texts: list[str], folder: Path) -> None:
    pipeline = library(folder, tokenizer)
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        expected = pipeline.encode(text, add_special_tokens=False)
        assert tokenizer.encode(text) == (expected.ids, expected.tokens, expected.offsets)
        assert ids == expected.ids


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ids_and_offsets_are_those_of_the_library(data: Path, tmp_path: Path, name: str) -> None:
    draw = random.Random(0)
    hostile = ["".join(draw.choices(HOSTILE, k=draw.randint(1, 9))) for _ in range(4000)]
    codes = [code for code in range(0, 0x110000, 97) if not 0xD800 <= code < 0xE000]
    characters = [f"ab{chr(code)}cd {chr(code)} x{chr(code)}" for code in codes]
    texts = [*hostile, *characters, *wikipedia(data, 600)]
    assert_equal_to_library(genuine(data, name), texts, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ids_of_many_code_points(data: Path, tmp_path: Path, name: str) -> None:
    """All of the first planes' letters and marks, and of the rest every seventh."""
    codes = [*range(0x3400), *range(0x3400, 0x110000, 7)]
    words = [f"a{chr(code)}b {chr(code)}" for code in codes if not 0xD800 <= code < 0xE000]
    texts = ["\n".join(words[first : first + 100]) for first in range(0, len(words), 100)]
    assert_equal_to_library(genuine(data, name), texts, tmp_path)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.lists(st.sampled_from(HOSTILE)).map("".join))
def test_ids_of_any_text(data: Path, tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    for name in NAMES:
        folder = tmp_path_factory.getbasetemp() / f"any-{name}"
        assert_equal_to_library(genuine(data, name), [text], folder)


@pytest.mark.parametrize("name", NAMES)
def test_ids_are_those_of_transformers(
    data: Path, tmp_path: Path, name: str, transformers: Any
) -> None:
    tokenizer = genuine(data, name)
    tokenizer.save(tmp_path)
    theirs = transformers.BertTokenizer.from_pretrained(tmp_path)
    texts = [*HOSTILE, " ".join(HOSTILE), *wikipedia(data, 60)]
    assert tokenizer.encode_batch(texts) == theirs(texts, add_special_tokens=False)["input_ids"]


@pytest.mark.usefixtures("route")
def test_pieces_and_offsets_by_hand() -> None:
    tokenizer = Tokenizer.from_vocabulary(SMALL, lowercase=True)
    text = "The UNWANTED Caf\u00e9s, dog 漢![MASK]한"
    encoding = tokenizer.encode(text)
    assert encoding.tokens == [
        *("the", "un", "##want", "##ed", "cafe", "##s", ",", "[UNK]", "漢", "!", "[MASK]"),
        *("\u1112\u1161", "##\u11ab"),
    ]
    assert [text[start:end] for start, end in encoding.offsets] == (
        ["The", "UN", "WANT", "ED", "Café", "s", ",", "dog", "漢", "!", "[MASK]", "한", "한"]
    )
    assert tokenizer.encode_batch([text, ""]) == [encoding.ids, []]
    ids, lengths = tokenizer.encode_arrays([text, "", "the \ud83d cat"])
    assert ids.tolist() == [*encoding.ids, 5, 6]
    assert lengths.tolist() == [13, 0, 2]
    assert tokenizer.encode("a" * 101) == ([1], ["[UNK]"], [(0, 101)])
    for other in (None, 3, b"abc", ["a"]):
        with pytest.raises(TypeError):
            tokenizer.encode(other)  # type: ignore[arg-type]


@settings(max_examples=200, deadline=None)
@given(st.text() | st.lists(st.sampled_from(HOSTILE)).map("".join), st.booleans(), st.booleans())
def test_words_are_those_of_the_tokenizer(text: str, lowercase: bool, strip: bool) -> None:
    tokenizer = Tokenizer.from_vocabulary(SMALL, lowercase=lowercase, strip_accents=strip)
    pipeline: Any = tokenizer._pipeline
    normal = pipeline.normalizer.normalize_str(text)
    expected = [word for word, _ in pipeline.pre_tokenizer.pre_tokenize_str(normal)]
    assert split_words(text, lowercase=lowercase, strip_accents=strip) == expected


@pytest.mark.slow
def test_words_that_are_no_longer_remembered() -> None:
    draw = random.Random(0)
    made = (str(draw.randrange(10**9)) for _ in range(280_000))
    texts = [" ".join(islice(made, 10_000)) for _ in range(28)]
    digits = [*SPECIAL_TOKENS, *"0123456789", *(f"##{one}" for one in range(10))]
    tokenizer = Tokenizer.from_vocabulary(digits, lowercase=True)
    expected = [
        [5 + int(word[0]), *(15 + int(one) for one in word[1:])]
        for text in texts
        for word in text.split()
    ]
    ids, lengths = tokenizer.encode_arrays(texts)
    assert ids.tolist() == [one for word in expected for one in word]
    assert lengths.sum() == len(ids)


def test_threads_share_a_tokenizer(data: Path) -> None:
    tokenizer = genuine(data, "cased")
    lines = wikipedia(data, 400)
    expected, found = tokenizer.encode_batch(lines), list[Any]()
    fresh = pickle.loads(pickle.dumps(tokenizer))
    assert fresh.content_hash == tokenizer.content_hash
    threads = [
        threading.Thread(target=lambda: found.append(fresh.encode_batch(lines))) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 8


@pytest.mark.slow
def test_encoding_takes_linear_time(data: Path) -> None:
    tokenizer = genuine(data, "uncased")
    for unit in ("\u0315\u0300", "\U0001d165\U0001d16d", "a", "[", "[MASK]", "\u6c49", "\u0f73"):
        begin = time.process_time()
        tokenizer.encode(unit * (400_000 // len(unit)))
        assert time.process_time() - begin < 5


def test_pair_and_decode() -> None:
    tokenizer = Tokenizer.from_vocabulary(SMALL, lowercase=True)
    encoding = tokenizer.encode_pair("The cat", "unwanted!")
    pieces = [SMALL[index] for index in encoding.ids]
    assert pieces == ["[CLS]", "the", "cat", "[SEP]", "un", "##want", "##ed", "!", "[SEP]"]
    assert encoding.segment_ids == [0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert encoding.text_index == [-1, 0, 0, -1, 1, 1, 1, 1, -1]
    assert encoding.offsets[:5] == [(0, 0), (0, 3), (4, 7), (0, 0), (0, 2)]
    single = tokenizer.encode_pair("the")
    assert single == ([2, SMALL.index("the"), 3], [0, 0, 0], [(0, 0), (0, 3), (0, 0)], [-1, 0, -1])
    assert tokenizer.encode_pair("the", " ").ids == single.ids, "no second text"
    ids = tokenizer.encode_pair("The unwanted cafés!").ids
    assert tokenizer.decode(ids) == "[CLS] the unwanted cafes ! [SEP]"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "the unwanted cafes !"
    assert tokenizer.decode(np.array([SMALL.index("##s"), SMALL.index("##ed")])) == "sed"
    for wrong in (len(SMALL), -1):
        with pytest.raises(BertkitError, match=f"id {wrong}"):
            tokenizer.decode([wrong])


def test_content_hash_follows_what_changes_ids() -> None:
    variants = [
        Tokenizer.from_vocabulary(SMALL, lowercase=True),
        Tokenizer.from_vocabulary(SMALL, lowercase=False),
        Tokenizer.from_vocabulary(SMALL, lowercase=True, strip_accents=False),
        Tokenizer.from_vocabulary([*SMALL, "more"], lowercase=True),
        Tokenizer.from_vocabulary([*SMALL[:-2], "##a", "a"], lowercase=True),
    ]
    assert len({tokenizer.content_hash for tokenizer in variants}) == len(variants)
    assert variants[0].continuation.sum() == 6
