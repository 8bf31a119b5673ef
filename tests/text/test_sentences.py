"""Sentences: boundaries, languages, long lines, and no text lost."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.text import sentences
from bertkit.text.sentences import language_code, split_sentences


def letters(text: str) -> str:
    return "".join(text.split())


@pytest.mark.parametrize(
    ("document", "language", "expected"),
    [
        ("Hello Mr. Smith. How are you?", "en", ["Hello Mr. Smith.", "How are you?"]),
        ("Title\n\nIt ends. Here", "en", ["Title", "It ends.", "Here"]),
        ("  A line\nbroken in two. \r\n\x0c\n", "en", ["A line", "broken in two."]),
        ("Er kam z. B. am 3. Mai. Gut.", "de", ["Er kam z. B. am 3. Mai.", "Gut."]),
        ("这是第一句。这是第二句!", "zh", ["这是第一句。", "这是第二句!"]),
        ("यह एक है। यह दो है।", "hi", ["यह एक है।", "यह दो है।"]),
        ("One. Two.\n  Three. \n\n", "lines", ["One. Two.", "Three."]),
        ("", "en", []),
        (" \n\t\n", "en", []),
        ("", "lines", []),
    ],
)
def test_by_hand(document: str, language: str, expected: list[str]) -> None:
    assert split_sentences(document, language) == expected


@pytest.mark.parametrize(
    "language", ["DE", "de-AT", "de_CH", "De-at", "bar", "gsw", "bar-AT", "gsw_CH", "de-Latn-DE"]
)
def test_relatives_of_german_use_german_rules(language: str) -> None:
    text = "Am 3. Mai kam er. Gut."
    assert split_sentences(text, language) == ["Am 3. Mai kam er.", "Gut."]
    assert len(split_sentences(text, "en")) == 3


@pytest.mark.parametrize(
    "language", ["", "german", "e", "../en", "en us", "12", "d€", "en-", "Lines"]
)
def test_what_is_no_language_code_is_refused(language: str) -> None:
    with pytest.raises(BertkitError):
        language_code(language)
    with pytest.raises(BertkitError, match="is not a language code"):
        split_sentences("Some text.", language)


@pytest.mark.parametrize(
    "language", ["en", "lines", "zh-hant", "pt-BR", "es_419", "be-tarask", "xx"]
)
def test_language_codes_are_accepted(language: str) -> None:
    language_code(language)
    assert split_sentences("Word", language) == ["Word"]


PIECES = [*'é."“”«()!。你।\n\t \xa0\u2003\u3000\x85\u2028\x00\u200b😀']
PIECES += ["Ab", "J.", ". ", "Mr. ", "? ", "\r\n", " B"]


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=30).map("".join) | st.text(),
    st.sampled_from(["en", "de", "fr", "ru", "zh", "hi", "ar", "my", "am", "lines"]),
)
def test_no_text_is_lost(document: str, language: str) -> None:
    found = split_sentences(document, language)
    assert letters("".join(found)) == letters(document)
    assert all(sentence and sentence == sentence.strip() for sentence in found)
    assert not any(len(sentence.splitlines()) > 1 for sentence in found)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=80).map("".join), st.integers(1, 12))
def test_windows_lose_nothing(document: str, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sentences, "WINDOW", window)
        found = split_sentences(document)
    assert letters("".join(found)) == letters(document)
    assert all(found)


@pytest.mark.parametrize(
    "text", ["This is sentence number {}. ", "这是句子{}。", "Это предложение {}. "]
)
def test_a_long_line_is_split_as_its_sentences_are(text: str) -> None:
    expected = [text.format(number).strip() for number in range(20_000)]
    line = "".join(text.format(number) for number in range(20_000))
    assert split_sentences(line) == expected


def test_a_long_line_without_a_boundary_stays_whole() -> None:
    blob = "x" * 10 * sentences.WINDOW
    assert split_sentences(f"Before. {blob} goes on. After.") == [
        "Before.",
        f"{blob} goes on.",
        "After.",
    ]


def test_long_lines_take_linear_time() -> None:
    """Where the library ends a sentence only at the beginning of a window, as in "A.A.A."."""
    for unit in ("A.", ".A", 'A.a "()', "句"):
        text = unit * (400_000 // len(unit))
        begin = time.process_time()
        assert letters("".join(split_sentences(text))) == letters(text)
        assert time.process_time() - begin < 5


def test_half_a_pair_of_surrogates_is_explained() -> None:
    with pytest.raises(BertkitError, match="cannot split"):
        split_sentences("half a pair: \ud800")
