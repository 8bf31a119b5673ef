"""Words of running text in many scripts."""

from __future__ import annotations

import pytest
from bertkit.predict.word_splitter import split_words_with_offsets

SCOTLAND = "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("U.N. said AT&T's 3.5 part-time (x).", "U.N.|said|AT&T's|3.5|part-time|(|x|)|."),
        ("cafe\u0301 noir", "cafe\u0301|noir"),
        ("हिन्दी में।", "हिन्दी|में|।"),
        ("مُحَمَّد هنا", "مُحَمَّد|هنا"),
        ("שָׁלוֹם", "שָׁלוֹם"),
        ("ภาษาไทย", "ภาษาไทย"),
        ("می\u200cخواهم", "می\u200cخواهم"),
        ("王小明在北京。", "王|小|明|在|北|京|。"),
        ("甲.乙.", "甲|.|乙|."),
        ("東京タワー", "東|京|タワー"),
        ("한국어 문장", "한국어|문장"),
        ("I \u2764\ufe0f it!", "I|\u2764\ufe0f|it|!"),
        ("👩\u200d💻👍🏽🇩🇪🇫🇷", "👩\u200d💻|👍🏽|🇩🇪|🇫🇷"),
        ("so\u00adlid \u200fשלום\u200f\u200b \u200e(\ufeffa)", "so\u00adlid|שלום|(|a|)"),
        ("ស្រី\u200bស្អាត", "ស្រី|ស្អាត"),
        ("سورة \u06dd \u0600\u0661", "سورة|\u06dd|\u0600|\u0661"),
        (f"{SCOTLAND} x", f"{SCOTLAND}|x"),
    ],
)
def test_marks_stay_with_their_letters(text: str, words: str) -> None:
    same, spans = split_words_with_offsets(text)
    assert same == text
    assert [text[start:end] for start, end in spans] == words.split("|")


def test_given_words_stand_between_spaces() -> None:
    text, spans = split_words_with_offsets(["New York", "", "e\u0301"])
    assert [text[start:end] for start, end in spans] == ["New York", "", "e\u0301"]
