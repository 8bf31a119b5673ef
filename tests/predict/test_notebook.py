"""What notebooks show: predictions as HTML, and progress as a bar in the cell."""

from __future__ import annotations

import os
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from bertkit.tasks.predictions import (
    MAX_BARS,
    MAX_CONTEXT,
    Entity,
    GivenAnswer,
    TaggedText,
    WordTag,
    marked_text,
    probability_bars,
)

from bertkit.tasks.classification import LabelPrediction, LabelSetPrediction
from bertkit.tasks.multiple_choice import ChoicePrediction

ODD = '<script>alert("x")</script> & <b>'


class Page(HTMLParser):
    """The elements of a page, its text, and what is marked or bold."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.text, self.strong = "", ""
        self.feed(html)
        self.close()
        assert self.open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)
        self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if {"mark", "b"} & {*self.open} and "small" not in self.open:
            self.strong += data


def test_labels_have_bars_and_are_escaped() -> None:
    page = Page(LabelPrediction(ODD, 0.7, {"dry": 0.3, ODD: 0.7})._repr_html_())
    assert page.strong == ODD
    assert "script" not in page.tags
    assert page.tags.count("tr") == 2
    assert page.text.index("70.0%") < page.text.index("30.0%"), "the most probable one is first"
    several = LabelSetPrediction(("a", "b"), {"a": 0.9, "b": 0.8, "c": 0.1})
    assert Page(several._repr_html_()).strong == "ab"
    assert Page(LabelSetPrediction((), {"a": 0.1})._repr_html_()).strong == ""
    choice = ChoicePrediction(1, ODD, 0.75, (0.25, 0.75))
    assert Page(choice._repr_html_()).strong == f"1: {ODD}"
    many = Page(probability_bars({str(n): 0.01 for n in range(50)}, []))
    assert many.tags.count("tr") == MAX_BARS + 1
    assert "40 more" in many.text


def test_entities_are_marked_in_their_text() -> None:
    text = f"Ann & Bo {ODD}"
    words = (WordTag("Ann", "B-PER", 0.9, 0, 3), WordTag("&", "O", 0.9, 4, 5))
    found = TaggedText(words, (Entity("PER", 0, 3, "Ann", 0, 1),), text)
    page = Page(found._repr_html_())
    assert page.strong.strip() == "Ann"
    assert page.text == f"Ann PER & Bo {ODD}"
    assert Page(TaggedText(words, (), text)._repr_html_()).text.startswith("Ann B-PER &")
    assert Page(marked_text(ODD, [(0, len(ODD), ODD)])).strong.strip() == ODD
    assert found.to_dict().keys() == {"words", "entities"}
    assert found == TaggedText(words, found.entities)


def test_answers_are_marked_in_their_context() -> None:
    context = "x" * 1000 + ODD + "y" * 1000
    answer = GivenAnswer(ODD, 1000, 1000 + len(ODD), 0.5, 0.0, context)
    page = Page(answer._repr_html_())
    assert page.strong == ODD
    assert page.text == f"…{'x' * MAX_CONTEXT}{ODD}{'y' * MAX_CONTEXT}…50.0%"
    assert Page(GivenAnswer("a", 0, 1, 0.5, 0.0, "abc")._repr_html_()).text == "abc50.0%"
    assert "no answer" in GivenAnswer("", None, None, 0.5, 0.5, "abc")._repr_html_()
    assert "context" not in answer.to_dict()
    assert "context" not in repr(answer)


CELLS = (
    """
from bertkit.console import Console
with Console() as console:
    console.start(10, title="<b>work</b>", unit="files")
    for done in range(11):
        console.update({"done": done, "words": 2 * done})
    console.say("saved")
""",
    """
from bertkit.tasks.classification import LabelPrediction
LabelPrediction("dry", 0.75, {"dry": 0.75, "wet": 0.25})
""",
)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_kernel_shows_bars_and_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
    cells = [nbformat.v4.new_code_cell(code) for code in CELLS]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    bar, *rest = notebook.cells[0].outputs
    assert bar.data["text/html"].startswith("<div>&lt;b&gt;work&lt;/b&gt; <progress")
    assert 'value="10" max="10"' in bar.data["text/html"]
    assert "10 of 10 files (100%)" in bar.data["text/plain"]
    assert [output.text for output in rest] == ["saved\n"]
    [shown] = notebook.cells[1].outputs
    assert Page(shown.data["text/html"]).strong == "dry"
    assert shown.data["text/plain"].startswith("LabelPrediction(")
