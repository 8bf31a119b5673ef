"""Time grows with the length of a text and not with its square, whatever the text holds."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from bertkit.explain.steps import normalize
from bertkit.predict.word_splitter import split_words_with_offsets

from bertkit.corpus import blocks
from bertkit.corpus.clean import CleanOptions, judge_document
from bertkit.tasks.windows import context_windows, text_windows
from bertkit.text import sentences
from bertkit.text.documents import TextCounts, find_sources, read_documents
from bertkit.text.sentences import split_sentences
from bertkit.tokenizer.normalize import align_words, decompose, split_words
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import read_rows

LENGTH, TIMES = 4_000, 8
"""Characters of the shorter text, and how many times longer the other one is."""
MOST = 3 * TIMES
"""Times as long for the longer text; linear time takes TIMES, quadratic time its square."""
UNMEASURED = 0.005
"""Seconds: less is noise."""

# What is repeated: marks that NFD orders, which step 4 drops or keeps; nothing to split at; sigmas
# in front of what str.lower looks beyond; quotes, brackets, dots, line ends, signs within words.
PATTERNS = {
    "dropped marks": "\u0315\u0300",
    "kept marks": "\U0001d165\U0001d16d",
    "marks of one character": "\u0f73",
    "letters": "a",
    "dots": ".",
    "initials": "A.",
    "quotes": '"',
    "quotes and commas": '",',
    "brackets": "([",
    "digits": "1.",
    "spaces": " ",
    "lines": "\n",
    "old lines": "\r",
    "sigmas": "\u03a3'",
    "ideographs": "\u6c49\u3002",
    "syllables": "\ud55c",
    "soft hyphens": "a\u00ad",
    "joiners": "\U0001f469\u200d",
    "flags": "\U0001f1e6",
    "backslashes": "\\",
    "braces": '{"a":',
    "tags": "<doc x>\n",
}


def documents_of(name: str, content: Callable[[str], str]) -> Callable[[str, Path], object]:
    """Reads the text as a corpus file."""

    def read(text: str, folder: Path) -> None:
        path = folder / name
        path.write_text(content(text), encoding="utf-8", newline="")
        [source] = find_sources([str(path)])
        list(read_documents(source, TextCounts()))

    return read


def rows_of(name: str, content: Callable[[str], str]) -> Callable[[str, Path], object]:
    """Reads the text as labelled data."""

    def read(text: str, folder: Path) -> None:
        path = folder / name
        path.write_text(content(text), encoding="utf-8", newline="")
        list(read_rows(path, TextCounts(), columns=["text"]))

    return read


def as_csv(text: str) -> str:
    return 'text,other\n"' + text.replace('"', '""') + '",x\n'


def as_json(text: str) -> str:
    return json.dumps({"text": text}) + "\n"


STEPS: dict[str, Callable[[str, Path], object]] = {
    "split": lambda text, _: split_words(text, lowercase=True, strip_accents=True),
    "align": lambda text, _: list(align_words(text, lowercase=True, strip_accents=True)),
    "explain": lambda text, _: decompose(text),
    "sentences": lambda text, _: split_sentences(text, "en"),
    "words": lambda text, _: split_words_with_offsets(text),
    "clean": lambda text, _: judge_document(text, CleanOptions(quality=True, near=True)),
    "text": documents_of("a.txt", str),
    "wiki": documents_of("b.txt", lambda text: f"<doc x>\n{text}\n</doc>\n"),
    "jsonl": documents_of("a.jsonl", as_json),
    "csv": documents_of("a.csv", as_csv),
    "json rows": rows_of("c.jsonl", as_json),
    "csv rows": rows_of("c.csv", as_csv),
}


def seconds(step: Callable[[str, Path], object], text: str, folder: Path) -> float:
    """Of this process alone, and without the collector's walks through all that tests hold."""
    gc.disable()
    try:
        begin = time.process_time()
        step(text, folder)
        return time.process_time() - begin
    finally:
        gc.enable()


def grows_too_fast(step: Callable[[str, Path], object], unit: str, folder: Path) -> bool:
    """Whether a longer text takes out of proportion long, in each of some attempts."""
    short, long = (unit * (size // len(unit)) for size in (LENGTH, LENGTH * TIMES))
    for _ in range(4):
        once = max(UNMEASURED, min(seconds(step, short, folder) for _ in range(2)))
        if seconds(step, long, folder) <= MOST * once:
            return False
    return True


@pytest.mark.parametrize("step", STEPS)
def test_time_grows_with_the_text(step: str, tmp_path: Path) -> None:
    slow = [name for name, unit in PATTERNS.items() if grows_too_fast(STEPS[step], unit, tmp_path)]
    assert not slow


def test_ids_and_offsets_grow_with_the_text(tokenizer: Tokenizer, tmp_path: Path) -> None:
    for encode in (
        lambda text, _: tokenizer.encode(text),
        lambda text, _: normalize(text, tokenizer),
        lambda text, _: blocks.tokenize_block([text], tokenizer, "en", 0.0),
    ):
        slow = [name for name, unit in PATTERNS.items() if grows_too_fast(encode, unit, tmp_path)]
        assert not slow


@pytest.mark.parametrize("stride", [0, 1, 40])
def test_windows_grow_with_the_text(tokenizer: Tokenizer, stride: int) -> None:
    """By what they hold in all: windows of ids, of pairs of texts, and of words of any length."""
    lengths = np.random.default_rng(0).integers(1, 9, 1 << 13)
    held = []
    for size in (1 << 10, 1 << 13):
        alone = text_windows(range(size), None, tokenizer, 64, stride)
        paired = text_windows(range(size), range(size), tokenizer, 64, stride)
        words = context_windows(lengths[:size], 62, stride)
        ids = sum(len(window.ids) for window in (*alone, *paired))
        held.append(ids + sum(window.end - window.first for window in words))
    assert held[1] < 1.5 * 8 * held[0]


@pytest.mark.parametrize("seed", range(4))
def test_no_character_is_read_by_more_than_some_windows(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the library ends a sentence at a window's beginning alone, as in "A.A.A."."""
    read = 0
    segment = sentences.sentencex.segment

    def counted(code: str, text: str) -> list[str]:
        nonlocal read
        read += len(text)
        return segment(code, text)

    monkeypatch.setattr(sentences.sentencex, "segment", counted)
    monkeypatch.setattr(sentences, "WINDOW", 400)
    rng = random.Random(seed)
    for unit in (
        "A.",
        ".A",
        "".join(rng.choices('A.a "()', k=30)),
        "".join(rng.choices("A. ", k=9)),
    ):
        read, text = 0, unit * (20_000 // len(unit))
        found = split_sentences(text, "en")
        assert "".join("".join(found).split()) == "".join(text.split())
        assert read <= sentences.WINDOW_STEPS * len(text)


def test_long_sentences_are_cut_in_linear_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is copied: no part is taken from a rest that was itself copied."""
    monkeypatch.setattr(blocks, "MAX_STRING", 100)
    copied = 0

    class Watched(str):
        __slots__ = ()

        def __getitem__(self, key: object) -> str:
            nonlocal copied
            part = Watched(str.__getitem__(self, key))  # type: ignore[index]
            copied += len(part)
            return part

    text = "".join(random.Random(0).choices("abc  ", k=50_000)) + " " * 500 + "d" * 500
    parts = list(blocks.cut_strings([Watched(text)]))
    assert all(0 < len(part) <= 100 for part in parts)
    assert "".join("".join(parts).split()) == "".join(text.split())
    assert copied < 3 * len(text)
