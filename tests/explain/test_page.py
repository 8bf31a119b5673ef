from __future__ import annotations

import base64
import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bertkit.cli.explain import explain_command
from bertkit.errors import BertkitError
from bertkit.explain import page as module
from bertkit.explain.page import explanation_page, weight_bytes
from bertkit.explain.sections import SECTIONS
from bertkit.explain.trace import Trace
from tests.explain.conftest import PAIR, TEXT
from tests.test_report import Page


@pytest.fixture(scope="module")
def text(trace: Trace) -> str:
    return explanation_page(trace)


def data_of(text: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="trace">(.*?)</script>', text)
    assert found
    return json.loads(found[1])


def test_the_page_is_whole_and_needs_nothing_else(text: str) -> None:
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert "http://" not in text
    assert "https://" not in text
    assert not {"link", "img", "iframe", "object", "embed"} & set(page.tags)
    for _, name, value in page.attributes:
        assert name != "src"
        assert not name.startswith("on")
        if name == "href":
            assert value[0] == "#"
            assert value[1:] in page.ids
    assert "fetch(" not in text
    assert "import(" not in text
    assert "prefers-color-scheme:dark" in text
    assert ("meta", "name", "viewport") in page.attributes


def test_what_a_text_holds_is_no_markup(text: str) -> None:
    page = Page(text)
    assert page.tags.count("script") == 2
    assert "<script>alert" not in text
    assert "alert('no')" not in text
    assert TEXT in page.prose()
    assert PAIR in page.prose()


def test_bytes_that_are_no_text_are_written_out(directory: Path, tmp_path: Path) -> None:
    """A command line with invalid UTF-8 comes as lone surrogates, which no file can hold."""
    explain_command(directory, "river \udcff stone", html=tmp_path / "page.html")
    assert r"river \udcff stone: bertkit explain" in (tmp_path / "page.html").read_text()


def test_the_question_of_the_pairs_is_named(trace: Trace) -> None:
    assert "next-sentence prediction" in Page(explanation_page(trace)).prose()
    swapped = Page(explanation_page(replace(trace, pairs="sop"))).prose()
    assert "sentence order" in swapped
    assert "next-sentence prediction" not in swapped


def test_data_cannot_end_the_script(trace: Trace) -> None:
    """No vocabulary is trusted, either: a piece may be anything."""
    bad = trace.tokens[3]._replace(shown="</script><b>", token="<i>&")
    text = explanation_page(replace(trace, tokens=[*trace.tokens[:3], bad, *trace.tokens[4:]]))
    assert Page(text).tags.count("script") == 2
    assert "</script><b>" not in text
    assert data_of(text)["tokens"][3] == "</script><b>"


def test_every_section_is_there_with_its_place(text: str) -> None:
    page = Page(text)
    for key, section in SECTIONS.items():
        if key != "task":
            assert key in page.ids
            assert section.source in page.prose()
            for file in section.modules:
                assert file in page.prose()


def test_the_weights_of_the_page_are_the_networks(trace: Trace, text: str) -> None:
    data = data_of(text)
    shape = trace.inside.attention.shape
    assert (data["layers"], data["heads"], len(data["tokens"])) == shape[:3]
    stored = np.frombuffer(base64.b64decode(data["weights"]), np.uint8).reshape(shape)
    np.testing.assert_allclose((stored / 255) ** 2, trace.inside.attention, atol=4e-3)
    np.testing.assert_allclose(data["entropy"], trace.inside.entropy.mean(-1), atol=1e-3)


def test_small_weights_are_not_lost() -> None:
    assert list(weight_bytes(np.array([0, 1e-5, 0.01, 1]))) == [0, 1, 26, 255]


def test_the_script_finds_its_elements(text: str) -> None:
    code = text.rpartition("<script>")[2]
    wanted = set(re.findall(r'element\("([a-z]+)"\)', code)) | {"trace", "heads", "tokens", "map"}
    assert wanted == {"trace", "heads", "tokens", "map", "chosen", "looks"}
    assert wanted <= set(Page(text).ids)


def test_numbers_of_the_page(trace: Trace, text: str) -> None:
    page = Page(text)
    prose = page.prose()
    assert f"MLM loss {trace.mlm_loss:.3f} {len(trace.targets)} targets, seed 5" in prose
    assert f"Mean loss: {trace.mlm_loss:.4f}." in prose
    assert f"second text follows {trace.next_probability:.1%}" in prose
    positions = [[str(target.position), target.token, target.kind] for target in trace.targets]
    assert [row[:3] for row in page.rows if len(row) == 7 and row[:3] in positions] == positions
    for token in trace.tokens[:5]:
        assert any(
            row[1:4] == [token.token, str(token.id), str(token.segment)] for row in page.rows
        )


def test_what_is_left_out_is_said(trace: Trace) -> None:
    lacking = replace(
        trace,
        left_out={"mlm": "no <head>", "nsp": "nor that", "pooler": "nor this"},
        guesses=[],
        mlm_loss=None,
        next_probability=None,
        pooled=None,
        task="",
    )
    prose = Page(explanation_page(lacking)).prose()
    for reason in lacking.left_out.values():
        assert f"Not shown: {reason}." in prose
    assert "sunny 90.0%." in Page(explanation_page(replace(trace, task="sunny 90.0%"))).prose()


def test_too_many_weights_for_a_page(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_PAGE_WEIGHTS", 600)
    with pytest.raises(BertkitError, match=f"from {len(trace.tokens)} to 10 tokens"):
        explanation_page(trace)


def test_the_command(directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    html = tmp_path / "pages" / "one.html"
    explain_command(directory, TEXT, PAIR, html=html, seed=5)
    assert capsys.readouterr().out == f"explanation: {html}\n"
    again = tmp_path / "two.html"
    explain_command(directory, TEXT, PAIR, html=again, seed=5)
    assert html.read_bytes() == again.read_bytes()
    explain_command(directory, TEXT, layer=1)
    shown = capsys.readouterr().out
    assert "Layer 1 of 3" in shown
    assert "Not shown: one text was given" in shown
    assert "\x1b" not in shown


def test_the_page_has_every_head_already(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match="leave --layer and --head out"):
        explain_command(directory, TEXT, html=tmp_path / "page.html", layer=1)
    assert not (tmp_path / "page.html").exists()


def test_the_command_names_what_it_cannot_write(directory: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BertkitError, match="cannot write"):
        explain_command(directory, TEXT, html=tmp_path / "file" / "page.html")
