"""The report: valid self-contained HTML whose numbers are those of the journal."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.errors import BertkitError
from bertkit.report import plots
from bertkit.report.html import flatten_fields
from bertkit.report.plots import Curve, format_number, smooth, thin, trend
from bertkit.report.pretraining import PLOTS, write_report

RENDER = plots.render_svg  # before the one of other tests, which draws nothing


@pytest.fixture(autouse=True)
def drawn_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw the curves."""
    monkeypatch.setattr(plots, "render_svg", RENDER)


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
    "matmul_peak": 1.5e11,
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
        "mfu": 0.4,
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


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    page = page_of(full_run(tmp_path / "run"))
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "http://" not in text
    assert "https://" not in text
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    for _, name, value in page.attributes:
        if name in {"src", "href", "xlink:href"}:
            assert value.startswith("#")
        assert not name.startswith("on")
    assert "url(" not in re.sub(r"url\(#", "", text)
    assert "@import" not in text
    assert "prefers-color-scheme:dark" in text
    assert ("meta", "name", "viewport") in page.attributes


def test_references_inside_the_drawings_are_to_ids_that_exist(tmp_path: Path) -> None:
    page = page_of(full_run(tmp_path / "run"))
    used = {value[1:] for _, name, value in page.attributes if name == "xlink:href"}
    clips = {value[5:-1] for _, name, value in page.attributes if name == "clip-path"}
    assert used
    assert clips
    assert used | clips <= set(page.ids)


def test_colours_follow_the_page(tmp_path: Path) -> None:
    full_run(tmp_path / "run")
    text = write_report(tmp_path / "run").read_text(encoding="utf-8")
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not re.search(r"(fill|stroke): *#[0-9a-f]{6}", drawings)
    for variable in plots.VARIABLES.values():
        assert variable in drawings
        assert text.count(f"--{variable[6:-1]}:#") == 2  # once light, once dark


def test_headline_numbers_are_the_journals(tmp_path: Path) -> None:
    prose = page_of(full_run(tmp_path / "run")).prose()
    for expected in (
        "held-out MLM loss 4.213 unigram 6.561",
        f"held-out perplexity 67.586 unigram {math.exp(6.5613):.3f}",
        "held-out MLM accuracy 28.1% most frequent token 5.1%",
        "held-out next-sentence accuracy 71.2% more frequent label 52.1%",
        "tokens/s 4,342 median",
        "MFU 40.0% median",
        "MLM loss 4.213 is 2.348 below the unigram entropy 6.561",
        "It gets 28.1% of the masked tokens right; always saying the most frequent token gets 5.1%",
        "It gets 71.2% of the next-sentence questions right",
        "Pre-training, 40 of 40 steps: finished.",
    ):
        assert expected in prose, expected


def test_tables_hold_what_the_files_say(tmp_path: Path) -> None:
    page = page_of(full_run(tmp_path / "run"))
    for row in (
        ["40", "4.2134", "67.586", "0.2811", "0.5987", "0.7125"],
        ["40", "checkpoints/step-00000040", "0.25"],
        ["3", "<script>alert('no')</script> & so on"],
        ["recipe.phases.steps", "30, 10"],
        ["recipe.training.learning_rate", "0.0001"],
        ["versions.torch", "9.9"],
        ["documents", "77"],
        ["source", "<wiki>"],
        ["phases.1.length", "512"],
        ["recipe_name", "tiny <&> 漢"],
    ):
        assert row in page.rows, row


def test_every_plot_is_there_and_described(tmp_path: Path) -> None:
    page = page_of(full_run(tmp_path / "run"))
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    known = [plot for plot in PLOTS if plot.field in {*step(2), *EVALUATION}]
    assert len(labels) == len(known) == 8 == page.tags.count("svg") == page.tags.count("figure")
    assert labels[0] == (
        "Masked language model: loss: training from 8.800 to 5.000, held out from 4.213 to 4.213, "
        "guessing by frequency (unigram entropy) 6.561."
    )
    assert "a coin 50.0%, always the more frequent label 52.1%" in labels[3]
    assert page.text.count("length 512") == len(known)  # where the phase changes, in each


def test_the_same_files_give_the_same_page(tmp_path: Path) -> None:
    first = write_report(full_run(tmp_path / "a")).read_bytes()
    again = write_report(full_run(tmp_path / "b")).read_bytes()
    assert first == again


def test_a_network_worse_than_frequency_is_said_to_be(tmp_path: Path) -> None:
    prose = page_of(write_run(tmp_path, [START, {**EVALUATION, "mlm_loss": 7.0}])).prose()
    assert "MLM loss 7.000 is 0.439 above the unigram entropy 6.561" in prose
    assert "not yet learned" in prose


def test_the_network_that_is_kept_of_electra_comes_first(tmp_path: Path) -> None:
    found = {"rtd_loss": 0.3, "rtd_accuracy": 0.9, "rtd_share": 0.15}
    page = page_of(write_run(tmp_path, [START, {**step(2), **found}, {**EVALUATION, **found}]))
    prose = page.prose()
    entropy = -0.15 * math.log(0.15) - 0.85 * math.log(0.85)
    for expected in (
        f"held-out replaced-token loss 0.300 guessing by frequency {entropy:.3f}",
        "held-out replaced-token accuracy 90.0% always original 85.0%",
        "held-out generator's MLM loss 4.213",
        'It gets 90.0% of the tokens (original or replaced?) right; always saying "original" gets',
    ):
        assert expected in prose, expected
    assert prose.index("replaced-token loss") < prose.index("generator's MLM loss")
    labels = [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]
    assert sum("by the final share of replaced tokens 85.0%" in label for label in labels) == 1


def test_a_run_in_progress_without_held_out_text(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path, [START, step(2), START, step(4)]))
    prose = page.prose()
    assert "4 of 40 steps: still running, or killed; resumed 1 time." in prose
    assert "on the training text (nothing is held out)" in prose
    assert "training MLM loss 8.600" in prose
    assert "length 512" not in page.text  # that phase is not reached


def test_missing_fields_and_nulls_do_not_matter(tmp_path: Path) -> None:
    bare = {"kind": "step", "step": 1, "mlm_loss": None, "gradient_norm": 2.0}
    page = page_of(write_run(tmp_path / "some run", [bare, {**bare, "step": 2}]))
    assert page.tags.count("svg") == 1
    assert "training MLM loss – unigram –" in page.prose()
    assert "some run" in page.prose()


def test_extra_sections_are_shown_and_escaped(tmp_path: Path) -> None:
    run = full_run(tmp_path)
    table = {
        "columns": ["start", "<accuracy>"],
        "rows": [["pre-trained", 0.9125], ["random", None]],
    }
    section = {"title": "Tuning & tests", "paragraphs": ["One <b>.", "Two."], "table": table}
    content = {"sections": [section, {"title": "Only text", "paragraphs": ["Three."]}]}
    (run / "demo.json").write_text(json.dumps(content))
    page = page_of(run)
    assert "Tuning & tests One <b>. Two." in page.prose()
    assert "Only text Three." in page.prose()
    for row in (["start", "<accuracy>"], ["pre-trained", "0.9125"], ["random", "–"]):
        assert row in page.rows


def test_no_journal_no_report(tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match=r"journal\.jsonl does not exist"):
        write_report(tmp_path)
    for records in ([], [START]):
        write_run(tmp_path, records)
        with pytest.raises(BertkitError, match="has no training steps yet"):
            write_report(tmp_path)
    write_run(tmp_path, [START, {"kind": "end", "step": 0, "reason": "diverged"}])
    with pytest.raises(BertkitError, match=r"the run has ended \(diverged\)"):
        write_report(tmp_path)
    assert not (tmp_path / "report.html").exists()


def test_a_record_without_its_step_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "journal.jsonl").write_text('{"kind": "step", "loss": 1.5}\n')
    with pytest.raises(BertkitError, match=r"damaged.*KeyError: 'step'"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("journal.jsonl", {**START, "baselines": {"unigram_entropy": 5000.0}}),
        ("demo.json", {"sections": [1]}),
    ],
)
def test_damaged_records_are_one_line(tmp_path: Path, name: str, content: Any) -> None:
    run = full_run(tmp_path)
    with (run / name).open("a") as file:
        file.write(json.dumps(content) + "\n")
    with pytest.raises(BertkitError, match="damaged"):
        write_report(tmp_path)


def test_thinning_keeps_every_spike_and_order() -> None:
    values = np.sin(np.arange(50_000.0) / 700)
    values[[123, 40_000]] = [9.0, -9.0]
    line = thin(Curve(np.arange(50_000.0), values))
    assert len(line.values) <= plots.MAX_POINTS
    assert {9.0, -9.0} <= set(line.values)
    assert np.all(np.diff(line.steps) > 0)
    assert np.array_equal(values[line.steps.astype(int)], line.values)
    short = Curve(np.arange(5.0), np.ones(5))
    assert thin(short) is short


def test_smoothing_by_hand() -> None:
    values = np.array([0.0, 3.0, 0.0, 9.0])
    np.testing.assert_allclose(smooth(values, 1), [1.5, 1.0, 4.0, 4.5])
    assert smooth(values, 0) is values
    assert len(smooth(np.empty(0), 3)) == 0
    assert len(smooth(values, 50)) == 4


def test_the_trend_keeps_the_edge_between_phases() -> None:
    steps = np.arange(1.0, 201.0)
    line = trend(Curve(steps, np.where(steps <= 120, 1.0, 5.0)), [(120, "length 512")])
    np.testing.assert_allclose(line.values, np.where(steps <= 120, 1.0, 5.0))
    assert np.array_equal(trend(Curve(steps[:3], steps[:3]), [(120, "x")]).values, steps[:3])


def test_numbers_for_reading() -> None:
    assert format_number(4.21345) == "4.213"
    assert format_number(12345.6) == "12,346"
    assert format_number(0.2811, "share") == "28.1%"
    assert format_number(1e-4, "power") == "1.0e-04"
    assert format_number(None) == format_number(math.nan) == format_number(math.inf) == "–"


def test_nested_json_becomes_rows() -> None:
    value = {"a": {"b": 1, "c": [1, 2]}, "d": [{"e": None}], "f": []}
    assert flatten_fields(value) == [("a.b", 1), ("a.c", [1, 2]), ("d.0.e", None), ("f", [])]
    assert flatten_fields({}) == []
