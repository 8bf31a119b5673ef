from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.explain.steps import Match, match, normalize, printable, tokenize_words
from bertkit.tokenizer.normalize import split_words
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer

LETTERS = list("abcdefghijklmnopqrstuvwxyz漢\u1100\u1161")
VOCABULARY = [*SPECIAL_TOKENS, *LETTERS, *(f"##{c}" for c in LETTERS), "un", "##able", ".", "##ab"]
TEXTS = st.text(
    st.sampled_from("abcdefgAZé\u0301İΣ漢가.#$☃ \t\n\xa0\u200b\ufffd\ud800") | st.characters(),
    max_size=30,
)


@pytest.mark.parametrize("lowercase", [True, False])
@pytest.mark.parametrize("compat", ["google", "hf"])
@settings(max_examples=60, deadline=None)
@given(text=TEXTS)
def test_the_steps_and_the_cuts_are_the_tokenizers(lowercase: bool, compat: str, text: str) -> None:
    tokenizer = Tokenizer.from_vocabulary(VOCABULARY, lowercase=lowercase, compat=compat)
    encoding = tokenizer.encode(text)
    found = tokenize_words(text, encoding, tokenizer)
    assert [piece for word in found for piece in word.tokens] == encoding.tokens
    for word in found:
        if word.tokens != ("[UNK]",) and word.tokens[0] not in SPECIAL_TOKENS:
            assert tuple(one.token for one in word.matches) == word.tokens
    if compat == "google":
        words = split_words(text, lowercase=lowercase, strip_accents=lowercase)
        assert [word.word for word in found] == words
        assert normalize(text, tokenizer)[-1].text.split() == words
        for word in found:
            if word.tokens == ("[UNK]",) and word.matches:
                assert word.matches[-1].token == ""


def test_every_step_shows_its_work() -> None:
    tokenizer = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True)
    stages = normalize("Né\u200be\xa0漢b.", tokenizer)
    assert [stage.text for stage in stages] == [
        "Né\u200be\xa0漢b.",
        "Née 漢b.",
        "Née  漢 b.",
        "née  漢 b.",
        "nee  漢 b.",
        "nee 漢 b .",
    ]
    cased = Tokenizer.from_vocabulary(VOCABULARY, lowercase=False)
    unused = [stage for stage in normalize("Né", cased) if "skipped" in stage.remark]
    assert [stage.name for stage in unused] == ["lower-cased", "accents stripped"]
    assert {stage.text for stage in unused} == {"Né"}
    assert normalize("abc", tokenizer)[1].remark == "nothing to do"


def test_the_longest_match_is_tried_first() -> None:
    assert match("unable", set(VOCABULARY), 200) == (
        Match("un", ("unable", "unabl", "unab", "una")),
        Match("##able", ()),
    )
    assert match("a☃", set(VOCABULARY), 200) == (Match("a", ("a☃",)), Match("", ("##☃",)))
    assert match("aaaa", set(VOCABULARY), 3) == ()


def test_a_word_that_is_too_long_is_unknown_untried() -> None:
    tokenizer = Tokenizer.from_vocabulary(VOCABULARY, lowercase=True, max_word_characters=4)
    [word] = tokenize_words("abcde", tokenizer.encode("abcde"), tokenizer)
    assert (word.word, word.tokens, word.matches) == ("abcde", ("[UNK]",), ())
    assert (word.start, word.end) == (0, 5)


def test_what_cannot_be_seen_is_written_out() -> None:
    assert printable("a\nb\xa0\u200b\ud800 漢") == r"a\nb\xa0\u200b\ud800 漢"
