"""Learning is deterministic, fits the tokenizer, and keeps its promises about size and order."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from bertkit.errors import BertkitError
from bertkit.tokens.learn import count_words, learn_vocabulary, measure_vocabulary
from bertkit.tokens.tokenizer import SPECIAL_TOKENS, Tokenizer
from tests.tokens.test_tokenizer import wikipedia

TEXTS = ["low lower lowest", "newer new lower low", "wide wider widest", "low, new, wide!"] * 5


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
    assert "rare" in learn_vocabulary([*TEXTS, "rare"], 200, minimum_frequency=1)


def test_the_alphabet_keeps_the_most_frequent_characters() -> None:
    vocabulary = learn_vocabulary(["aaa bb c d", "aab zq"], 40, alphabet_limit=3)
    assert vocabulary[5:11] == ["a", "b", "c", "##a", "##b", "##c"]  # ties: the lower code point
    assert not any("z" in piece or "q" in piece for piece in vocabulary)


def test_words_follow_the_normalisation_of_the_tokenizer() -> None:
    texts = ["Ångström \ue000x ΟΔΟΣ \U0002b820y", "a\x0bb " + "long" * 60, "\ud83d x"]
    counts = count_words(texts, lowercase=True)
    assert counts == dict.fromkeys(
        ["angstrom", "\ue000x", "οδος", "\U0002b820", "y", "ab", "\ud83d", "x"], 1
    )
    vocabulary = learn_vocabulary(texts * 3, 200)
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    assert tokenizer.encode(texts[0]).pieces == (["angstrom", "\ue000x", "οδος", "\U0002b820", "y"])
    assert "##\U0002b820" not in vocabulary
    assert any("Å" in piece for piece in learn_vocabulary(texts * 3, 200, lowercase=False))


def test_texts_are_read_once_and_progress_is_told() -> None:
    def stream() -> Iterator[str]:
        yield from islice(iter(lambda: "low lower", None), 25_000)

    told: list[int] = []
    learn_vocabulary(stream(), 20, progress=told.append)
    assert told == [*range(1_000, 25_001, 1_000)]


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
    assert report.unknown_share < 0.001
    assert 1.0 < report.fertility < 1.4


@pytest.mark.slow
@pytest.mark.parametrize("lowercase", [True, False])
def test_learning_is_the_same_in_every_process(data: Path, lowercase: bool) -> None:
    script = (
        "import sys, hashlib\n"
        "from pathlib import Path\n"
        "from bertkit.tokens.learn import learn_vocabulary\n"
        "from tests.tokens.test_tokenizer import wikipedia\n"
        "lines = wikipedia(Path(sys.argv[1]), 3000)\n"
        f"found = learn_vocabulary(lines, 8000, lowercase={lowercase})\n"
        "print(hashlib.sha256(repr(found).encode()).hexdigest())\n"
    )
    root = Path(__file__).resolve().parents[2]
    hashes = set()
    for seed, threads in ((0, "1"), (1, "2")):
        environment = {
            **os.environ,
            "PYTHONHASHSEED": str(seed),
            "RAYON_NUM_THREADS": threads,
            "TOKENIZERS_PARALLELISM": "true" if threads == "2" else "false",
        }
        ran = subprocess.run(
            [sys.executable, "-c", script, str(data)],
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
            env=environment,
        )
        hashes.add(ran.stdout.strip())
    lines = wikipedia(data, 3000)
    runs = {tuple(learn_vocabulary(lines, 8000, lowercase=lowercase)) for _ in range(8)}
    assert len(hashes) == len(runs) == 1


def test_report() -> None:
    vocabulary = [*SPECIAL_TOKENS, "the", "run", "##ning", "never"]
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    report = measure_vocabulary(tokenizer, ["the running dog", "Dog the DOG cat"])
    assert (report.words, report.pieces) == (7, 8)
    assert report.fertility == pytest.approx(8 / 7)
    assert report.unknown_share == pytest.approx(4 / 7)
    assert list(report.unknown_words) == [("DOG", 1), ("Dog", 1), ("cat", 1), ("dog", 1)]
    assert report.characters_per_piece == pytest.approx((3 + 7 + 3 + 3 + 3 + 3 + 3) / 8)
    assert list(report.unused_pieces) == ["never"]
    assert report.as_dict()["unused_pieces"] == 1


def test_report_of_no_text() -> None:
    tokenizer = Tokenizer.from_vocabulary(SPECIAL_TOKENS, lowercase=True)
    report = measure_vocabulary(tokenizer, [])
    assert (report.words, report.fertility, report.unknown_share) == (0, 0.0, 0.0)
