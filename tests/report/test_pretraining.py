"""The report: valid self-contained HTML whose numbers are those of the journal."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import BertkitError
from bertkit.files import write_json
from bertkit.report import page
from bertkit.report.findings import run_findings
from bertkit.report.page import Curve, flatten_fields, smooth, thin
from bertkit.report.pretraining import write_report

RENDER = page.render_svg  # before the one of other tests, which draws nothing


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The page of a run with its curves, which take long to draw."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "render_svg", RENDER)
        path = write_report(full_run(tmp_path_factory.mktemp("runs") / "run"))
    return path.read_text(encoding="utf-8")


VOID = {"meta", "link", "br", "img", "hr", "input"}

START = {
    "kind": "start",
    "step": 0,
    "recipe_name": "tiny <&> 漢",
    "baselines": {
        "unigram_entropy": 6.5613,
        "most_frequent_accuracy": 0.0512,
        "nsp_majority": 0.5213,
    },
    "tokens_total": 123456,
    "parameters": 4_400_000,
    "steps_total": 40,
    "phases": [
        {"length": 128, "steps": 30, "batch_size": 8},
        {"length": 512, "steps": 10, "batch_size": 8},
    ],
}


def step(number: int) -> dict[str, Any]:
    return {
        "kind": "step",
        "step": number,
        "phase": int(number > 30),
        "mlm_loss": 9 - 0.1 * number,
        "nsp_loss": 0.7,
        "mlm_accuracy": 0.01 * number,
        "nsp_accuracy": 0.5,
        "learning_rate": 1e-4,
        "gradient_norm": 1.0 + number,
        "tokens_per_second": 4321.0 + number,
        "seconds": 1.0,
    }


EVALUATION = {
    "kind": "evaluation",
    "step": 40,
    "phase": 1,
    "mlm_loss": 4.2134,
    "mlm_perplexity": 67.586,
    "mlm_accuracy": 0.2811,
    "nsp_loss": 0.5987,
    "nsp_accuracy": 0.7125,
    "targets": 1000,
    "sequences": 50,
}

END = {"kind": "end", "step": 40, "reason": "finished", "seconds": 41.5}


def write_run(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({**record, "time": 1.7e9 + i}) + "\n" for i, record in enumerate(records)]
    (folder / "journal.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


def full_run(folder: Path) -> Path:
    checkpoint = {"kind": "checkpoint", "step": 40, "path": "checkpoints/step-00000040"}
    note = {"kind": "note", "step": 3, "message": "<script>alert('no')</script> & so on"}
    steps = [step(number) for number in range(2, 41, 2)]
    write_run(folder, [START, note, *steps, EVALUATION, {**checkpoint, "seconds": 0.25}, END])
    recipe = {"recipe": {"phases": {"steps": [30, 10]}, "training": {"learning_rate": 1e-4}}}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "environment.json").write_text(json.dumps({"versions": {"torch": "9.9"}}))
    (folder / "corpus.json").write_text(json.dumps({"documents": 77, "source": "<wiki>"}))
    return folder


class Page(HTMLParser):
    """Checks that tags are balanced and ids unique; collects text, attributes and table rows."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.rows: list[list[str]] = []
        self.feed(text)
        self.close()
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.handle_startendtag(tag, attrs)
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in {"style", "script"}:
            self.text.append(data)
        if self.open and self.open[-1] in {"td", "th"}:
            self.rows[-1][-1] += data

    def prose(self) -> str:
        return " ".join(" ".join(self.text).split())


def page_of(run: Path) -> Page:
    path = write_report(run)
    assert path == run / "report.html"
    return Page(path.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_the_page_is_whole_and_needs_nothing_else(text: str) -> None:
    found = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    assert "http://" not in text
    assert "https://" not in text
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(found.tags)
    for _, name, value in found.attributes:
        if name in {"src", "href", "xlink:href"}:
            assert value.startswith("#")
        assert not name.startswith("on")
    assert "url(" not in re.sub(r"url\(#", "", text)
    assert "@import" not in text
    assert "prefers-color-scheme:dark" in text
    assert ("meta", "name", "viewport") in found.attributes


@pytest.mark.slow
def test_references_inside_the_drawings_are_to_ids_that_exist(text: str) -> None:
    found = Page(text)
    used = {value[1:] for _, name, value in found.attributes if name == "xlink:href"}
    clips = {value[5:-1] for _, name, value in found.attributes if name == "clip-path"}
    assert used
    assert clips
    assert used | clips <= set(found.ids)


@pytest.mark.slow
def test_colours_follow_the_page(text: str) -> None:
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not re.search(r"(fill|stroke): *#[0-9a-f]{6}", drawings)
    for variable in page.VARIABLES.values():
        assert variable in drawings
        assert text.count(f"--{variable[6:-1]}:#") == 2  # once light, once dark


@pytest.mark.slow
def test_the_scores_are_those_of_the_journal(text: str) -> None:
    found = Page(text)
    for row in (
        ["Masked language model: loss", "4.213", "guessing by frequency (unigram entropy) 6.561"],
        ["Masked language model: accuracy", "28.1%", "always the most frequent token 5.1%"],
        ["Next sentence: accuracy", "71.2%", "always the more frequent answer 52.1%"],
        ["tokens/s, median", "4,342", ""],
        ["40", "4.2134", "0.2811", "0.5987", "0.7125"],
        ["40", "checkpoints/step-00000040", "0.25"],
        ["3", "<script>alert('no')</script> & so on"],
        ["recipe.phases.steps", "30, 10"],
        ["versions.torch", "9.9"],
        ["source", "<wiki>"],
        ["recipe_name", "tiny <&> 漢"],
    ):
        assert row in found.rows, row
    assert "40 of 40 updates: finished." in found.prose()
    assert found.tags.count("svg") == found.tags.count("figure") == 7
    labels = [v for tag, name, v in found.attributes if (tag, name) == ("svg", "aria-label")]
    assert labels[0].startswith("Masked language model: loss: training from 8.800 to 5.000, held")


@pytest.mark.slow
def test_the_same_files_give_the_same_page(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page, "render_svg", RENDER)
    assert write_report(full_run(tmp_path / "run")).read_text(encoding="utf-8") == text


def test_a_run_in_progress_with_missing_fields(tmp_path: Path) -> None:
    bare = {"kind": "step", "step": 1, "mlm_loss": None, "gradient_norm": 2.0}
    found = page_of(write_run(tmp_path, [START, bare, START, {**step(4), "nsp_accuracy": None}]))
    assert "4 of 40 updates: still running, or killed; resumed 1 time." in found.prose()
    assert "length 512" not in found.text  # that phase is not reached


def test_sections_of_the_demo_are_shown_and_escaped(tmp_path: Path) -> None:
    run = full_run(tmp_path)
    table = {
        "columns": ["start", "<accuracy>"],
        "rows": [["pre-trained", 0.9125], ["random", None]],
    }
    section = {"title": "Tuning & tests", "paragraphs": ["One <b>.", "Two."], "table": table}
    (run / "demo.json").write_text(json.dumps({"sections": [section]}))
    found = page_of(run)
    assert "Tuning & tests One <b>. Two." in found.prose()
    for row in (["start", "<accuracy>"], ["pre-trained", "0.9125"], ["random", "–"]):
        assert row in found.rows


def test_no_run_no_report(tmp_path: Path) -> None:
    for records in (None, [], [START]):
        if records is not None:
            write_run(tmp_path, records)
        with pytest.raises(BertkitError):
            write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_curves_keep_their_extremes() -> None:
    assert smooth(np.array([0.0, 0, 9, 0, 0]), 1).tolist() == [0, 3, 3, 3, 0]
    values = np.random.default_rng(0).normal(size=50_000)
    values[31_234] = 99
    line = thin(Curve(np.arange(50_000.0), values))
    assert len(line.values) <= 1_200
    assert line.values.max() == 99
    assert (np.diff(line.steps) > 0).all()
    assert flatten_fields({"a": {"b": [1, 2]}, "c": [{"d": 3}]}) == [("a.b", [1, 2]), ("c.0.d", 3)]


def losses(*levels: float, **more: Any) -> list[dict[str, Any]]:
    """The journal of a run of 30,000 updates whose loss goes from level to level in ten records."""
    steps = [
        {"kind": "step", "phase": 0, "step": 30_000 * (i + 1) // 60, "mlm_loss": loss, **more}
        for i, loss in enumerate(np.interp(np.arange(60), np.linspace(0, 59, len(levels)), levels))
    ]
    return [{**START, "steps_total": 30_000}, *steps]


@pytest.mark.parametrize(
    ("levels", "more", "named"),
    [
        ((9.0, 3.0, 2.5), {}, []),
        ((9.0, 6.0, 5.9), {}, ["needs no context"]),
        ((9.0, 7.5, 7.3), {}, ["above the unigram entropy"]),
        ((9.0, 3.0, 4.5), {}, ["rose by"]),
        ((9.0, 3.0, 2.5), {"nsp_accuracy": 0.52, "sequences": 10_000}, ["sentence pairs"]),
        ((9.0, 3.0, 2.5), {"nsp_accuracy": 0.92, "sequences": 10_000}, []),
    ],
)
def test_findings_of_a_journal(
    tmp_path: Path, levels: tuple[float, ...], more: dict[str, Any], named: list[str]
) -> None:
    found = run_findings(tmp_path, losses(*levels, **more))
    assert len(found) == len(named), found
    assert all(word in line for word, line in zip(named, found, strict=True))


def test_a_run_that_memorizes_or_diverges(tmp_path: Path) -> None:
    journal = losses(9.0, 2.0, 1.0)
    evaluations = [{"kind": "evaluation", "phase": 0, "step": 9, "mlm_loss": x} for x in (3.0, 3.5)]
    (finding,) = run_findings(tmp_path, [*journal, *evaluations])
    assert "memorizes" in finding
    (finding,) = run_findings(tmp_path, [START, {"kind": "end", "reason": "diverged"}])
    assert "NaN" in finding


@pytest.mark.parametrize(
    ("copied", "cause"), [(False, "positions 129 to 512"), (True, "too short")]
)
def test_a_held_out_loss_that_rises_between_phases(
    tmp_path: Path, copied: bool, cause: str
) -> None:
    write_json(tmp_path / "recipe.json", {"recipe": {"phases": {"copy_positions": copied}}})
    for last, named in ((4.05, False), (4.9, True)):
        losses = [(0, 6.1), (0, 4.02), (1, 5.5), (1, last)]
        records = [{"kind": "evaluation", "phase": p, "mlm_loss": loss} for p, loss in losses]
        found = run_findings(tmp_path, [START, *records])
        assert [cause in finding for finding in found] == [True] * named
