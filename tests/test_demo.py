from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bertkit import demo
from bertkit.errors import BertkitError
from bertkit.processes import keyed_rng
from bertkit.progress import Console, read_journal
from bertkit.training.recipe import Logging, Training, read_recipe
from tests.conftest import WORDS

FEW = ("asyncio", "email", "xml", "unittest", "logging", "json", "http", "multiprocessing")


@pytest.fixture
def few_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some packages of the standard library instead of everything."""
    real = demo.source_files
    monkeypatch.setattr(demo, "TEXT_LIBRARIES", ())
    monkeypatch.setattr(
        demo, "source_files", lambda: (item for item in real() if item[0].partition(".")[0] in FEW)
    )
    monkeypatch.setattr(demo, "LABELLED", 60)
    monkeypatch.setattr(demo, "TESTED", 40)
    monkeypatch.setattr(demo, "SEEDS", (1,))
    monkeypatch.setattr(demo, "VOCABULARY", 800)


def test_damaged_sentences_have_the_same_words() -> None:
    sentences = [f"The {a} and {b} are new." for a in WORDS[:5] for b in WORDS[5:9]]
    pairs = demo.damaged_pairs(sentences, 12, keyed_rng(0, 0))
    assert len(pairs) == 12
    assert {pair.gold for pair in pairs} == {0, 1}
    for pair in pairs:
        genuine, damaged = pair.choices[pair.gold], pair.choices[1 - pair.gold]
        assert genuine in sentences
        assert damaged != genuine
        assert sorted(damaged[:-1].split()) == sorted(genuine[:-1].split())


@pytest.mark.slow
@pytest.mark.usefixtures("few_sources")
def test_demo_tells_the_whole_story(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = read_recipe("demo")
    small = replace(
        recipe,
        model=replace(recipe.model, hidden_size=32, num_hidden_layers=1),
        phases=replace(recipe.phases, steps=(12, 8), batch_sizes=(16, 16)),
        training=Training(learning_rate=1e-3, warmup_steps=2),
        logging=Logging(log_every=5, evaluate_every=20, held_out_sequences=32),
    )
    assert demo.run_demo(tmp_path, Console(), small) is None
    shown = capfd.readouterr().err
    assert "Does pre-training help?" in shown
    assert "report.html" in shown
    written = json.loads((tmp_path / "demo.json").read_text())
    assert [len(found) for found in written["accuracies"].values()] == [1, 1]
    page = (tmp_path / "report.html").read_text()
    assert "Does pre-training help?" in page
    assert "Filling masks" in page
    assert read_journal(tmp_path / "journal.jsonl")[-1]["reason"] == "finished"


@pytest.mark.slow
@pytest.mark.usefixtures("few_sources")
def test_labelled_task_is_tested_on_sentences_set_apart(
    tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "FITTING", 100)  # the small vocabulary splits words into letters
    text = demo.gather_corpus(Console())
    trained = {demo.spelling(line) for found in text.documents for line in found.splitlines()}
    assert len(text.apart) > 100
    assert trained.isdisjoint(map(demo.spelling, text.apart))
    labelled = demo.labelled_task(text, tokenizer)
    sides = [{given.choices[given.gold] for given in side} for side in labelled]
    assert {demo.spelling(sentence) for sentence in sides[0]} <= trained
    assert sides[1] <= set(text.apart)
    with pytest.raises(BertkitError, match="too few docstrings"):
        demo.labelled_task(text._replace(apart=text.apart[:5]), tokenizer)
