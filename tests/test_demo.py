from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bertkit.config import read_recipe
from bertkit.console import Console
from bertkit.demo import data as docstrings
from bertkit.demo import data as task
from bertkit.demo import run
from bertkit.errors import BertkitError
from bertkit.training.journal import read_journal
from bertkit.training.recipe import Logging, PretrainRecipe, Training

FEW = ("asyncio", "email", "xml", "unittest", "logging", "json", "http", "multiprocessing")


@pytest.fixture
def few_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some packages of the standard library instead of everything."""
    real = docstrings.source_files
    monkeypatch.setattr(docstrings, "DOCUMENTED_LIBRARIES", ())
    monkeypatch.setattr(
        docstrings,
        "source_files",
        lambda: (item for item in real() if item[0].partition(".")[0] in FEW),
    )
    monkeypatch.setattr(task, "LABELLED_ROWS", 60)
    monkeypatch.setattr(task, "TESTED", 120)
    monkeypatch.setattr(task, "EPOCHS", 2)
    monkeypatch.setattr(run, "SEEDS", (1,))
    monkeypatch.setattr(run, "VOCABULARY", 800)


def test_clean_keeps_prose_only() -> None:
    docstring = """Return the sum of two numbers.

    >>> add(1, 2)
    3

    Short one.

    The second paragraph has
    two lines of text.
    """
    assert docstrings.clean_docstring(docstring) == (
        "Return the sum of two numbers.\nThe second paragraph has two lines of text."
    )


def test_docstrings_are_read_without_importing(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(
        '"""What this module does, in words."""\nraise SystemExit\n'
        'class A:\n    """A class that is described."""\n'
        '    async def b(self):\n        """A method that is described too."""\n'
    )
    found = docstrings.read_docstrings("package.module", path)
    assert [d.family for d in found] == ["package"] * 3
    assert found[2].text == "A method that is described too."
    path.write_text("def broken(:\n")
    assert docstrings.read_docstrings("package.module", path) == []


@pytest.mark.slow
@pytest.mark.usefixtures("few_sources")
def test_demo_tells_the_whole_story(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recipe = read_recipe(PretrainRecipe, "demo")
    small = replace(
        recipe,
        model=replace(recipe.model, hidden_size=32, num_hidden_layers=1),
        phases=replace(recipe.phases, steps=(12, 8), batch_sizes=(16, 16)),
        training=Training(learning_rate=1e-3, warmup_steps=2),
        logging=Logging(log_every=5, evaluate_every=20, held_out_sequences=32),
    )
    assert run.run_demo(tmp_path, Console(), small) is None
    shown = capfd.readouterr().err
    assert "Does pre-training help?" in shown
    assert "report.html" in shown
    written = json.loads((tmp_path / "demo.json").read_text())
    assert set(written["accuracies"]) == {"pre-trained", "random"}
    page = (tmp_path / "report.html").read_text()
    assert "Does pre-training help?" in page
    assert "Filling masks" in page
    assert read_journal(tmp_path / "journal.jsonl")[-1]["reason"] == "finished"


@pytest.mark.usefixtures("few_sources")
def test_labelled_task_is_tested_on_modules_set_apart(tokenizer) -> None:
    documents, found = docstrings.gather_corpus(Console())
    labelled = task.labelled_task(found, tokenizer, 200)
    assert len(labelled.families) >= 2
    trained = {line for document in documents for line in document.splitlines()}
    apart = [d.text for d in found if docstrings.is_apart(d.module) and len(d.text) > 80]
    assert apart
    assert sum(text.splitlines()[0] not in trained for text in apart) > 0.9 * len(apart)
    known = {given.text for given in labelled.train}
    assert known.isdisjoint(given.text for given in labelled.test)
    assert {given.label for given in labelled.train} == set(labelled.families)
    with pytest.raises(BertkitError, match="too few docstrings"):
        task.labelled_task(found[:3], tokenizer, 200)
