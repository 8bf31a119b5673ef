"""The words of bertkit against those of the plain reference, character by character."""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.tokenizer import normalize
from bertkit.tokenizer.normalize import (
    CHUNK,
    align_words,
    decompose,
    replace_surrogates,
    split_words,
)
from bertkit.tokenizer.words import cut_text
from tests.tokenizer.reference import basic_tokenize, is_cjk, is_punctuation, is_whitespace

# Letters with odd lower case, marks that change order, controls that Python takes for white space,
# format characters, ideographs inside and at the ends of Google's blocks, private use, emoji.
TRICKY = (
    "aZ 9\tΣσςßİıẞéÅ\u0301\u0327\u0345\u05b0\u05bc\u0e38\u0e48\U0001d165\U0001d16d\U0001d15e"
    "\x00\x01\x0b\x0c\x1c\x85\r\n\u00a0\u00ad\u200b\u200d\u2028\u2029\u3000\ufeff\ufffd"
    "漢\u4e00\u9fff\ua000\u3400\u4dbf\u4dc0\uf900豈\U00020000\U0002b820\U0002ceaf\U0002ceb0"
    "한ㄱかガ\ue000\U000f0000$^`'-.¡§«。\u0378\U0001f600\U0001e900ǅ\u1f88ﬁ\u212a\u2126\u1fef\u037e"
)
texts = st.text(st.one_of(st.sampled_from(TRICKY), st.characters(exclude_categories=["Cs"])))
casings = pytest.mark.parametrize("lowercase", [True, False], ids=["uncased", "cased"])


def every_character(step: int = 1) -> Iterator[list[str]]:
    """All code points but surrogates in blocks; the tables of bertkit are emptied between them.

    Of those that are unassigned or for private use, three quarters of all, one in 61 is there.
    """
    points = [
        p
        for p in range(0, sys.maxunicode + 1, step)
        if not 0xD800 <= p <= 0xDFFF
        and (p % 61 == 0 or unicodedata.category(chr(p)) not in ("Cn", "Co"))
    ]
    for start in range(0, len(points), 1 << 14):
        yield [chr(point) for point in points[start : start + (1 << 14)]]
        for table in (normalize.CLEAN, normalize.SPLIT, normalize.STRIP_AND_SPLIT):
            table.clear()


def in_context(characters: list[str]) -> str:
    """Each character as a word, and inside one."""
    return " ".join(f"{character} A{character}b" for character in characters)


def assert_words_agree(text: str, lowercase: bool) -> None:
    expected = basic_tokenize(text, lowercase=lowercase)
    assert split_words(text, lowercase=lowercase, strip_accents=lowercase) == expected
    aligned = align_words(text, lowercase=lowercase, strip_accents=lowercase)
    assert [word.text for word in aligned] == expected


@casings
def test_words_of_sampled_code_points(lowercase: bool) -> None:
    for characters in every_character(step=41):
        assert_words_agree(in_context(characters), lowercase)


@pytest.mark.slow
@casings
def test_aligned_words_of_every_code_point(lowercase: bool) -> None:
    """Of every one that is changed inside a word; the others are in the sample above.

    `split_words`, which decides what is changed, meets them all in test_ids_of_every_code_point.
    """
    rules = {"lowercase": lowercase, "strip_accents": lowercase}
    changed = 0
    for characters in every_character():
        words = [f"a{c}b" for c in characters if split_words(f"a{c}b", **rules) != [f"a{c}b"]]
        text = " ".join(words)
        aligned = [word.text for word in align_words(text, **rules)]
        assert aligned == basic_tokenize(text, lowercase=lowercase)
        changed += len(words)
    assert changed > 80_000


@casings
@settings(max_examples=300, deadline=None)
@given(text=texts)
def test_words_of_any_text(lowercase: bool, text: str) -> None:
    assert_words_agree(text, lowercase)


@settings(max_examples=200, deadline=None)
@given(text=texts, lowercase=st.booleans(), strip_accents=st.booleans())
def test_spans_lie_in_the_text_in_order(text: str, lowercase: bool, strip_accents: bool) -> None:
    rules = {"lowercase": lowercase, "strip_accents": strip_accents}
    words = list(align_words(text, **rules))
    assert [word.text for word in words] == split_words(text, **rules)
    sources = [start for word in words for start in word.starts]
    assert sources == sorted(sources)
    for word in words:
        assert len(word.text) == len(word.starts) == len(word.ends)
        assert all(0 <= start < len(text) for start in word.starts)
        assert list(word.ends) == [start + 1 for start in word.starts]


@pytest.mark.parametrize(
    ("text", "lowercase", "words"),
    [
        ("The café, naïve.", True, ["the", "cafe", ",", "naive", "."]),
        ("The café, naïve.", False, ["The", "café", ",", "naïve", "."]),
        ("ΟΔΟΣ ΟΔΟΣ'Α", True, ["οδος", "οδοσ", "'", "α"]),  # a final sigma needs the whole word
        ("a漢字b", True, ["a", "漢", "字", "b"]),
        ("\U0002b820x", True, ["\U0002b820", "x"]),  # extension E, which Hugging Face misses
        ("x\ue000y", True, ["x\ue000y"]),  # private use, which Hugging Face deletes
        ("한국", True, ["\u1112\u1161\u11ab\u1100\u116e\u11a8"]),  # Hangul is decomposed, not split
        ("a\x0bb\x85c\u200dd\x00e\ufffdf", True, ["abcdef"]),
        ("a\u2028b\u2029c\u3000d\u00a0e", True, ["a", "b", "c", "d", "e"]),
        ("\u0301", True, []),
        ("$5^2`", False, ["$", "5", "^", "2", "`"]),
        ("\u1fef\u037e", True, ["`", ";"]),  # punctuation only after decomposition
        ("İstanbul ǅ", True, ["istanbul", "ǆ"]),
        ("a\U0001d16d\U0001d165", True, ["a\U0001d165\U0001d16d"]),  # NFD orders the two marks
        ("", True, []),
    ],
)
def test_words_by_hand(text: str, lowercase: bool, words: list[str]) -> None:
    assert basic_tokenize(text, lowercase=lowercase) == words
    assert_words_agree(text, lowercase)


def test_accents_and_case_are_independent() -> None:
    assert split_words("Été", lowercase=True, strip_accents=False) == ["été"]
    assert split_words("Été", lowercase=False, strip_accents=True) == ["Ete"]


def test_spans_by_hand() -> None:
    text = "  Cafe\u0301! 漢\u200dé\u0301x"
    words = list(align_words(text, lowercase=True, strip_accents=True))
    assert [(word.text, text[word.starts[0] : word.ends[-1]]) for word in words] == [
        ("cafe", "Cafe"),
        ("!", "!"),
        ("漢", "漢"),
        ("ex", "é\u0301x"),
    ]


def test_a_decomposed_syllable_keeps_its_span() -> None:
    (word,) = align_words("x한", lowercase=True, strip_accents=True)
    assert list(word.starts) == [0, 1, 1, 1]
    assert list(word.ends) == [1, 2, 2, 2]


MARKS = (
    "\u0315\u0300\u0345\u034f\u0f73\u0344\U0001d165\U0001d16d\U0001d15e\u302e\u1b44\u05b0a\u00e9 "
)
marked = st.text(st.one_of(st.sampled_from(MARKS), st.characters(categories=["Mn", "Mc"])))


@settings(max_examples=300, deadline=None)
@given(text=st.one_of(texts, marked))
def test_decomposing_is_that_of_unicode(text: str) -> None:
    assert decompose(text) == unicodedata.normalize("NFD", text)
    assert_words_agree(text, lowercase=True)


def test_no_character_beyond_those_looked_at_combines() -> None:
    beyond = range(normalize.COMBINING.stop, sys.maxunicode + 1)
    assert not any(unicodedata.combining(chr(point)) for point in beyond)


def test_any_run_of_marks_is_ordered_at_once() -> None:
    """unicodedata takes minutes for a run of this length."""
    count = 200_000
    assert decompose("a" + "\u0315\u0300" * count) == "a" + "\u0300" * count + "\u0315" * count
    assert split_words("a" + "\u0315\u0300" * count, lowercase=True, strip_accents=True) == ["a"]
    kept = "a" + "\U0001d16d\U0001d165" * count
    assert split_words(kept, lowercase=True, strip_accents=True) == [
        "a" + "\U0001d165" * count + "\U0001d16d" * count
    ]


def test_a_text_of_many_characters_leaves_little_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "".join(map(chr, range(0x20, 0x3000)))
    rules = {"lowercase": True, "strip_accents": True}
    words = split_words(text, **rules)
    tables = (normalize.CLEAN, normalize.STRIP_AND_SPLIT, normalize.DECOMPOSE)
    for table in tables:
        table.clear()
    monkeypatch.setattr(normalize, "MAX_TABLE_CHARACTERS", 100)
    assert split_words(text, **rules) == words
    assert [word.text for word in align_words(text, **rules)] == words
    assert max(map(len, tables)) <= 100


@settings(max_examples=200, deadline=None)
@given(text=st.one_of(texts, marked), characters=st.integers(1, 9))
def test_parts_of_a_text_have_the_words_of_the_whole(text: str, characters: int) -> None:
    parts = list(cut_text(text, characters))
    assert "".join(parts) == text
    for lowercase in (True, False):
        rules = {"lowercase": lowercase, "strip_accents": lowercase}
        words = [word for part in parts for word in split_words(part, **rules)]
        assert words == split_words(text, **rules)


def test_long_texts_are_cut_between_words_and_ideographs() -> None:
    assert list(cut_text("one two three", 2)) == ["one ", "two ", "three"]
    assert list(cut_text("漢字漢字x漢", 2)) == ["漢字漢", "字x漢", ""]


def test_chunks_end_where_google_ends_words() -> None:
    for point in range(sys.maxunicode + 1):
        character = chr(point)
        splits = is_whitespace(character) or character in "\u2028\u2029"
        if (CHUNK.fullmatch(character) is None) != splits:
            pytest.fail(f"U+{point:04X} {unicodedata.name(character, '')}")


def test_character_classes_equal_the_reference() -> None:
    for point in range(sys.maxunicode + 1):
        character = chr(point)
        assert normalize.is_cjk(character) == is_cjk(character), hex(point)
        assert normalize.is_punctuation(character) == is_punctuation(character), hex(point)


def test_lone_surrogates_become_replacement_characters() -> None:
    assert replace_surrogates("a\ud83db\U0001f600") == "a\ufffdb\U0001f600"
    assert replace_surrogates("plain") == "plain"
