"""Learning is deterministic, fits the tokenizer, and keeps its promises about size and order."""

from __future__ import annotations

import ast
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.cli.learn import learn_command
from bertkit.console import Console
from bertkit.errors import BertkitError, InputTypeError
from bertkit.tokenizer import count as counting
from bertkit.tokenizer import train
from bertkit.tokenizer.learn import (
    CRITERIA,
    LearnOptions,
    count_words,
    learn_from_counts,
    learn_from_files,
    learn_vocabulary,
    measure_vocabulary,
)
from bertkit.tokenizer.normalize import is_cjk
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from bertkit.tokenizer.words import smoothing_weights, weigh_counts
from tests.conftest import python
from tests.tokenizer.test_tokenizer import wikipedia

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
    assert "rare" in learn_vocabulary([*TEXTS, "rare"], 200, min_frequency=1)


def test_the_alphabet_keeps_the_most_frequent_characters() -> None:
    vocabulary = learn_vocabulary(["aaa bb c d", "aab zq"], 40, max_alphabet=3)
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
    assert tokenizer.encode(texts[0]).tokens == (["angstrom", "\ue000x", "οδος", "\U0002b820", "y"])
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
        "from bertkit.tokenizer.learn import learn_vocabulary\n"
        "from tests.tokenizer.test_tokenizer import wikipedia\n"
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
        ran = python("-c", script, data, check=True, cwd=root, env=environment)
        hashes.add(ran.stdout.strip())
    lines = wikipedia(data, 3000)
    found = learn_vocabulary(lines, 8000, lowercase=lowercase)
    assert hashes == {hashlib.sha256(repr(found).encode()).hexdigest()}


def test_report() -> None:
    vocabulary = [*SPECIAL_TOKENS, "the", "run", "##ning", "never"]
    tokenizer = Tokenizer.from_vocabulary(vocabulary, lowercase=True)
    report = measure_vocabulary(tokenizer, ["the running dog", "Dog the DOG cat"])
    assert (report.words, report.tokens) == (7, 8)
    assert report.fertility == pytest.approx(8 / 7)
    assert report.unknown_share == pytest.approx(4 / 7)
    assert list(report.unknown_words) == [("DOG", 1), ("Dog", 1), ("cat", 1), ("dog", 1)]
    assert report.characters_per_token == pytest.approx((3 + 7 + 3 + 3 + 3 + 3 + 3) / 8)
    assert list(report.unused_tokens) == ["never"]
    assert report.as_dict()["unused_tokens"] == 1


def test_report_of_no_text() -> None:
    tokenizer = Tokenizer.from_vocabulary(SPECIAL_TOKENS, lowercase=True)
    report = measure_vocabulary(tokenizer, [])
    assert (report.words, report.fertility, report.unknown_share) == (0, 0.0, 0.0)


def test_only_lists_of_texts_are_read() -> None:
    tokenizer = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, "a"], lowercase=True)
    other = Tokenizer.from_vocabulary(tokenizer.vocabulary, lowercase=True)
    table = pd.DataFrame({"text": ["a", "a a", None]})
    wrong: list[Any] = [table.text, table, table.to_dict("records"), {"text": "a"}, ["a", math.nan]]
    wrong.append(np.array("a"))
    for texts in wrong:
        with pytest.raises(InputTypeError):
            learn_vocabulary(texts, 10)
        with pytest.raises(InputTypeError):
            measure_vocabulary(tokenizer, texts)
        with pytest.raises(InputTypeError):
            tokenizer.encode_batch(texts)
        with pytest.raises(InputTypeError):
            other.encode_batch(texts)
    with pytest.raises(InputTypeError, match="number 1 "):
        learn_vocabulary(iter(["a", None]), 10)


def test_an_unknown_criterion_is_refused_before_reading() -> None:
    def never() -> Iterator[str]:
        raise AssertionError
        yield ""

    with pytest.raises(BertkitError, match="no criterion is called 'likelyhood'; did you mean"):
        learn_vocabulary(never(), 100, criterion="likelyhood")


def test_too_long_words_are_counted() -> None:
    skipped: Counter[str] = Counter()
    counts = count_words(["a " + "b" * 201, "b" * 201], lowercase=True, skipped=skipped)
    assert counts == {"a": 1}
    assert skipped == {"word of more than 200 characters": 2}


def test_accents_are_kept_where_they_are_asked_for() -> None:
    texts = ["Über ÜBER uber"]
    assert count_words(texts, lowercase=True) == {"uber": 3}
    assert count_words(texts, lowercase=True, strip_accents=False) == {"über": 2, "uber": 1}
    assert count_words(texts, lowercase=False, strip_accents=True) == {
        "Uber": 1, "UBER": 1, "uber": 1,
    }  # fmt: skip


def test_a_model_keeps_its_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the river and the stone\n" * 5)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "vocab.txt").write_text("mine")
    with pytest.raises(BertkitError, match="holds more than a vocabulary"):
        learn_command(str(tmp_path / "text.txt"), out=tmp_path, size=40)
    assert (tmp_path / "vocab.txt").read_text() == "mine"


def test_nothing_is_written_before_the_work_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("the river and the stone\n" * 5)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("bertkit.tokenizer.learn.measure_vocabulary", fail)
    with pytest.raises(KeyboardInterrupt):
        learn_command(str(tmp_path / "text.txt"), out=tmp_path / "out", size=40)
    assert not (tmp_path / "out").exists()


def test_a_long_text_is_counted_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [f"Word{n % 7} word{n % 91} 漢字 other{n * n % 53} " * 3 for n in range(400)]
    whole = count_words(["".join(texts)], lowercase=True)
    monkeypatch.setattr(counting, "BLOCK_CHARACTERS", 2_000)
    assert count_words(["".join(texts)], lowercase=True, processes=2) == whole
    assert count_words(texts, lowercase=True) == whole


@pytest.mark.parametrize("limit", [None, 40])
def test_counting_is_the_same_in_any_number_of_processes(
    monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    texts = [f"Word{n % 7} word{n % 91} other{n * n % 53} " * 3 for n in range(400)]
    monkeypatch.setattr(counting, "BLOCK_CHARACTERS", 2_000)
    tables, losses = [], []
    for processes in (1, 2):
        skipped: Counter[str] = Counter()
        tables.append(
            count_words(
                texts,
                lowercase=True,
                processes=processes,
                max_distinct_words=limit,
                skipped=skipped,
            )
        )
        losses.append(skipped)
    assert tables[0] == tables[1]
    assert losses[0] == losses[1]
    lost = losses[0][counting.PRUNED]
    assert tables[0].total() + lost == 3 * 3 * len(texts)
    assert (lost > 0) == (limit is not None)
    assert limit is None or len(tables[0]) <= limit


def test_the_rarest_words_are_dropped() -> None:
    counts = Counter({"often": 9, "twice": 2, "same": 2, "once": 1})
    skipped: Counter[str] = Counter()
    counting.drop_rarest(counts, 2, skipped)
    assert counts == {"often": 9, "same": 2}
    assert skipped == {counting.PRUNED: 3, counting.PRUNED_WORDS: 2}
    with pytest.raises(BertkitError, match="at least 1, got 0"):
        count_words([], lowercase=True, max_distinct_words=0)


@given(st.lists(st.integers(1, 10**9), min_size=2, max_size=9), st.floats(0.05, 1.0))
@settings(max_examples=60, deadline=None)
def test_smoothing_keeps_the_total_and_brings_shares_together(
    words: list[int], smoothing: float
) -> None:
    weights = smoothing_weights(words, smoothing)
    smoothed = [count * weight for count, weight in zip(words, weights, strict=True)]
    assert sum(smoothed) == pytest.approx(sum(words))
    for n, m in pairwise(words):
        i = words.index(n), words.index(m)
        assert smoothed[i[0]] / smoothed[i[1]] == pytest.approx((n / m) ** smoothing)


def test_smoothing_by_hand() -> None:
    # Shares 0.8 and 0.2; square roots 0.894 and 0.447: new shares 2/3 and 1/3.
    weights = smoothing_weights([80, 20], 0.5)
    assert weights == pytest.approx([(2 / 3) / 0.8, (1 / 3) / 0.2])
    skipped: Counter[str] = Counter()
    tables = [Counter({"the": 79, "rare": 1}), Counter({"ein": 20, "the": 3})]
    assert weigh_counts(tables, [0.4, 2.0], skipped) == {"the": 32 + 6, "ein": 40}
    assert skipped == {counting.ROUNDED_AWAY: 1}
    assert smoothing_weights([5], 1.0) == [1.0]
    with pytest.raises(BertkitError, match="only one was given"):
        smoothing_weights([5], 0.7)
    for wrong in (0.0, 1.5, float("nan")):
        with pytest.raises(BertkitError, match="above 0 and at most 1"):
            smoothing_weights([5, 6], wrong)
    with pytest.raises(BertkitError, match="source 2 of 2 holds no words"):
        smoothing_weights([5, 0], 0.7)


LANGUAGES = {"es": 6, "fr": 6, "ru": 6, "zh_CN": 3, "ja": 3, "tr": 1}
"""Language -> how often its text is there: Turkish is the small one."""


def messages(language: str) -> list[str]:
    """The translated messages of Sphinx in a language, from its installed files."""
    spec = find_spec("sphinx")
    if spec is None or spec.origin is None:
        pytest.skip("the package sphinx, whose translations are the text, is not installed")
    path = Path(spec.origin).parent / "locale" / language / "LC_MESSAGES" / "sphinx.po"
    if not path.is_file():
        pytest.skip(f"sphinx has no translation file for {language}")
    blocks = re.findall(r'^msgstr ((?:"[^\n]*"\s*)+)', path.read_text("utf-8"), re.MULTILINE)
    texts = ["".join(map(ast.literal_eval, block.strip().split("\n"))) for block in blocks]
    return [text for text in texts[1:] if text.strip()]  # the first is the file's header


@pytest.fixture
def sources(tmp_path: Path) -> dict[str, Path]:
    """A text file a language; every fifth message is held out."""
    found = {}
    for language, times in LANGUAGES.items():
        texts = [text for n, text in enumerate(messages(language)) if n % 5]
        found[language] = tmp_path / f"{language}.txt"
        found[language].write_text("\n\n".join(texts * times), encoding="utf-8")
    return found


@pytest.mark.parametrize("criterion", CRITERIA)
def test_smoothing_helps_the_small_language(sources: dict[str, Path], criterion: str) -> None:
    fits = {}
    for smoothing in (1.0, 0.5):
        options = LearnOptions(
            criterion=criterion, smoothing=smoothing, max_alphabet=1200, processes=1
        )
        with Console() as console:
            paths = [str(path) for path in sources.values()]
            tokenizer, made = learn_from_files(paths, 3600, options, console)
        fits[smoothing] = {
            language: measure_vocabulary(tokenizer, messages(language)[::5])
            for language in LANGUAGES
        }
        held_out = [text for language in LANGUAGES for text in messages(language)[::5]]
        for text in held_out:
            check_round_trip(tokenizer, text)
    plain, smoothed = fits[1.0]["tr"], fits[0.5]["tr"]
    assert (plain.words, plain.words > 100) == (smoothed.words, True)
    assert smoothed.fertility < 0.97 * plain.fertility
    assert smoothed.unknown_share <= plain.unknown_share
    weights = {Path(row["paths"][0]).stem: row["weight"] for row in made["sources"]}
    assert max(weights, key=weights.__getitem__) == "tr"
    assert made["criterion"] == criterion
    assert made["settings"]["smoothing"] == 0.5


def check_round_trip(tokenizer: Tokenizer, text: str) -> None:
    """Ideographs stand alone, and what is decoded is encoded to the same ids."""
    encoding = tokenizer.encode(text)
    for piece, (start, end) in zip(encoding.tokens, encoding.offsets, strict=True):
        if any(map(is_cjk, text[start:end])):
            assert end - start == 1
            assert piece in (text[start:end], "[UNK]")
    if tokenizer.unk_id not in encoding.ids:
        assert tokenizer.encode(tokenizer.decode(encoding.ids)).ids == encoding.ids


def test_the_record_of_learning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = []
    for name, text in (("large", "the cat sat " * 60), ("small", "die Katze sitzt " * 6)):
        paths.append(str(tmp_path / f"{name}.txt"))
        Path(paths[-1]).write_text(text)
    options = LearnOptions(criterion="likelihood", smoothing=0.7, processes=1)
    learn_command(*paths, out=tmp_path / "out", size=80, options=options)
    record = json.loads((tmp_path / "out" / "vocabulary.json").read_text())
    assert record["criterion"] == "likelihood"
    assert record["settings"]["smoothing"] == 0.7
    assert record["settings"]["min_frequency"] == 2
    assert record["distinct_words"] == 6
    assert [row["words"] for row in record["sources"]] == [180, 18]
    assert record["sources"][0]["weight"] < 1 < record["sources"][1]["weight"]
    assert record["unknown_share"] == 0
    shown = capsys.readouterr().err
    assert "small.txt: 18 words, 9.09% of all words, weighted by" in shown
    assert "; on the first 2 documents " in shown
    again = tmp_path / "again"
    learn_command(*paths, out=again, size=80, options=options)
    assert (again / "vocab.txt").read_text() == (tmp_path / "out" / "vocab.txt").read_text()
    with pytest.raises(BertkitError, match="only one was given"):
        learn_command(paths[0], out=tmp_path / "one", size=80, options=options)
    (tmp_path / "empty.txt").write_text("\u200b")
    with pytest.raises(BertkitError, match=r"empty.txt holds no words to weigh"):
        learn_command(*paths, str(tmp_path / "empty.txt"), out=again, size=80, options=options)


def test_pairs_that_are_too_frequent_for_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = Counter({"the": 900, "then": 500, "cat": 40, "cats": 30, "dog": 3, "rare": 1})
    expected = learn_from_counts(counts, 5 + 20 + 12, min_frequency=2)
    monkeypatch.setattr(train, "LARGEST_PAIR_COUNT", 700)
    assert train.counts_in_range({"the": 1400, "a": 1}, 5) == ({"the": 700, "a": 1}, 3)
    repeat, fed = train.repeat_words, Counter[str]()

    def repeat_words(given: dict[str, int]) -> Iterator[str]:
        fed.update(given)
        return repeat(given)

    monkeypatch.setattr(train, "repeat_words", repeat_words)
    found = learn_from_counts(counts, 5 + 20 + 12, min_frequency=2)
    assert found[:-4] == expected[: len(found) - 4]
    assert {"the", "then", "cat", "cats"} <= set(found)
    assert fed == {"the": 450, "then": 250, "cat": 20, "cats": 15, "dog": 2, "rare": 1}


def test_both_criteria_share_alphabet_and_checks() -> None:
    counts = count_words(TEXTS, lowercase=True)
    both = [learn_from_counts(counts, 45, criterion=criterion) for criterion in CRITERIA]
    assert both[0][:27] == both[1][:27]
    assert {"low", "wide"} <= set(both[0]) & set(both[1])
    for criterion in CRITERIA:
        with pytest.raises(BertkitError, match="ask for at least 27"):
            learn_from_counts(counts, 26, criterion=criterion)
