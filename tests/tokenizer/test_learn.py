"""Learning is deterministic, fits the tokenizer, and keeps its promises about size and order."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

from bertkit.errors import BertkitError
from bertkit.tokenizer.learn import (
    count_words,
    learn_from_counts,
    measure_vocabulary,
)
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from tests.conftest import run
from tests.tokenizer.test_tokenizer import wikipedia

TEXTS = ["low lower lowest", "newer new lower low", "wide wider widest", "low, new, wide!"] * 5


def learn_vocabulary(
    texts: Iterable[str], size: int, *, lowercase: bool = True, **options: int
) -> list[str]:
    return learn_from_counts(count_words(texts, lowercase=lowercase), size, **options)


def test_by_hand() -> None:
    # Each round has low 3, lower 2, lowest 1: the pairs "l ##o" and "##o ##w" occur 6 times, the
    # others ("##e ##r", "w ##i", ...) 4 times at most. A tie goes to the "##" pair, then low joins.
    vocabulary = learn_vocabulary(TEXTS, 60)
    assert vocabulary[:5] == list(SPECIAL_TOKENS)
    assert vocabulary[5:17] == list("!,deilnorstw")
    assert vocabulary[17:27] == [f"##{letter}" for letter in "deilnorstw"]
    assert vocabulary[27:29] == ["##ow", "low"]
    assert {"low", "new", "wide", "lowest", "widest"} <= set(vocabulary)
    assert len(vocabulary) < 60  # the text has no more pairs
    assert "##!" not in vocabulary


def test_size_is_exact_when_the_text_allows() -> None:
    assert [len(learn_vocabulary(TEXTS, size)) for size in (27, 28, 33)] == [27, 28, 33]
    whole = learn_vocabulary(TEXTS, 33)
    assert learn_vocabulary(TEXTS, 30) == whole[:30]


def test_a_size_below_the_alphabet_is_refused() -> None:
    with pytest.raises(BertkitError, match=r"no room for its 12 characters: ask for at least 27"):
        learn_vocabulary(TEXTS, 26)
    with pytest.raises(BertkitError, match="hold no words"):
        learn_vocabulary(["", "\u200b \n"], 100)
    with pytest.raises(BertkitError, match="hold no words"):
        learn_vocabulary(iter(()), 100)


def test_minimum_frequency() -> None:
    assert "rare" not in learn_vocabulary([*TEXTS, "rare"], 200)
    assert "rare" in learn_vocabulary([*TEXTS, "rare"], 200, min_frequency=1)


def test_the_alphabet_keeps_the_most_frequent_characters() -> None:
    vocabulary = learn_vocabulary(["aaa bb c d", "aab zq"], 40, max_alphabet=3)
    assert vocabulary[5:11] == ["a", "b", "c", "##a", "##b", "##c"]  # ties: the lower code point
    assert not any("z" in piece or "q" in piece for piece in vocabulary)


@pytest.mark.slow
@pytest.mark.parametrize("lowercase", [True, False])
def test_learning_twice_gives_the_same(data: Path, lowercase: bool) -> None:
    lines = wikipedia(data, 3000)
    first = learn_vocabulary(lines, 8000, lowercase=lowercase)
    assert len(first) == len(set(first)) == 8000
    for _ in range(2):
        assert learn_vocabulary(lines, 8000, lowercase=lowercase) == first
    assert learn_vocabulary(lines[::-1], 8000, lowercase=lowercase) == first
    tokenizer = Tokenizer.from_vocabulary(first, lowercase=lowercase)
    report = measure_vocabulary(tokenizer, lines)
    assert report["unknown_share"] < 0.001
    assert 1.0 < report["fertility"] < 1.4


HINDI = ["अपने पोस्ट ऑफिस में पदों पर भर्ती", "वह यहाँ है और यह वहाँ है"] * 9
ENGLISH = ["The café is naïve, Ἑλλάς ёлка й."] * 9


@pytest.mark.parametrize(
    ("texts", "flags", "keeps", "said"),
    [
        (HINDI, [], True, "kept, and with them accents"),
        (HINDI, ["--no-keep-accents"], False, "dropped; --keep-accents keeps them"),
        (["が ぱ", "ที่นี่มีน้ำ"] * 9, [], True, "kept"),
        (ENGLISH, [], False, ""),
        (ENGLISH, ["--keep-accents"], True, ""),
        (HINDI, ["--cased"], True, ""),
        ([*ENGLISH * 9, *HINDI[:2]], [], False, "dropped"),
    ],
)
def test_marks_are_kept_where_scripts_need_them(
    texts: list[str],
    flags: list[str],
    keeps: bool,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(texts))
    run("learn", tmp_path / "a.txt", "--out", tmp_path / "t", "--size", 300, *flags)
    tokenizer = Tokenizer.load(tmp_path / "t")
    assert tokenizer.lowercase == ("--cased" not in flags)
    assert tokenizer.strip_accents != keeps
    assert any("é" in piece or "ँ" in piece for piece in tokenizer.vocabulary) == (
        keeps and texts[0] != "が ぱ"
    )
    marks = [line for line in capsys.readouterr().err.splitlines() if "tone marks" in line]
    assert len(marks) == bool(said)
    assert all(said in line for line in marks)


def test_preparing_says_which_marks_a_tokenizer_drops(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("\n\n".join(HINDI))
    uncased = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, "अ", "##अ"], lowercase=True)
    uncased.save(tmp_path / "uncased")
    prepare = ("prepare", tmp_path / "a.txt", "--out", tmp_path / "store")
    run(*prepare, "--tokenizer", tmp_path / "uncased", "--held-out", 0)
    [line] = [line for line in capsys.readouterr().err.splitlines() if "tone marks" in line]
    assert "dropped by the tokenizer" in line
