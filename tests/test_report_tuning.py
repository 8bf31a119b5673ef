"""The report of a fine-tuning: its numbers are those of the files, finished or not."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest

from bertkit.report import plots
from bertkit.report.finetuning import MAX_TEXT, MAX_WRONG
from bertkit.report.plots import DotRow, beside_each_other, shown_range
from bertkit.report.pretraining import write_report
from tests.test_report import Page, drawn_curves, page_of, step, write_run

__all__ = ["drawn_curves"]

SHARED = {
    "data": "mnli <&> 漢",
    "task_type": "classification",
    "metric": "accuracy",
    "inputs": {"train": 20123, "dev": 9815, "dev-mismatched": 9832},
    "start": "a/model",
    "labels": ["yes", "no"],
    "tuning": {"warmup": 0.1},
}

SCORES = {
    "b16-lr5e-05-e3-s1": 0.8612,
    "b16-lr5e-05-e3-s2": 0.8534,
    "b16-lr5e-05-e3-s3": 0.3333,
    "b32-lr2e-05-e3-s1": 0.8101,
    "b32-lr2e-05-e3-s2": 0.8207,
    "b32-lr2e-05-e3-s3": None,
}
DEGENERATE = {
    "b16-lr5e-05-e3-s3": "answers 'no' to every input",
    "b32-lr2e-05-e3-s3": "diverged: the loss is not a number",
}
BEST = "b16-lr5e-05-e3-s1"


def run_values(name: str, score: float | None) -> dict[str, Any]:
    batch, rate, epochs, seed = re.fullmatch(r"b(\d+)-lr(.+)-e(\d+)-s(\d+)", name).groups()  # type: ignore[union-attr]
    scores = {}
    if score is not None:
        scores = {
            "dev": {"accuracy": score, "macro_f1": score - 0.01, "f1/A": 0.5, "recall/A": 0.25},
            "dev-mismatched": {"accuracy": score - 0.02, "mean_squared_error": 1.25},
        }
    return {
        "name": name,
        "settings": {
            "batch_size": int(batch),
            "learning_rate": float(rate),
            "epochs": int(epochs),
            "seed": int(seed),
        },
        "scores": scores,
        "metric": score,
        "degenerate": DEGENERATE.get(name, ""),
        "seconds": 61.25,
    }


def in_progress(
    folder: Path, scores: dict[str, float | None] = SCORES, shared: dict[str, Any] = SHARED
) -> Path:
    """A grid that has these runs done."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "finetune.json").write_text(json.dumps(shared))
    (folder / "environment.json").write_text(json.dumps({"versions": {"torch": "9.9"}}))
    for name, score in scores.items():
        losses = [{**step(at), "loss": 1 / at} for at in (20, 40, 60)]
        path = write_run(folder / "runs" / name, losses) / "run.json"
        path.write_text(json.dumps(run_values(name, score)))
    return folder


def finished(folder: Path, **changes: Any) -> Path:
    in_progress(folder)
    results = {
        "data": "mnli",
        "metric": "accuracy",
        "best": BEST,
        "scores": {"dev": {"accuracy": 0.8612}, "test": {"accuracy": 0.7177}},
        "settings": [],
        "runs": [run_values(*pair) for pair in SCORES.items()],
        **changes,
    }
    (folder / "results.json").write_text(json.dumps(results))
    return folder


def answer(number: int, gold: str | None, label: str, probability: float) -> dict[str, Any]:
    row = {"id": str(number), "label": label, "probability": probability, "probabilities": {}}
    return row if gold is None else {**row, "gold": gold, "text": f"<text> {number}", "pair": None}


def write_answers(folder: Path, rows: list[dict[str, Any]]) -> None:
    (folder / "results").mkdir(exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "results" / "dev.jsonl").write_text(text)


def drawings(page: Page) -> list[str]:
    return [value for tag, name, value in page.attributes if (tag, name) == ("svg", "aria-label")]


def test_the_page_is_whole_and_needs_nothing_else(tmp_path: Path) -> None:
    write_answers(finished(tmp_path), [answer(1, "yes", "no", 0.9)])
    page = page_of(tmp_path)
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert "http://" not in text
    assert "https://" not in text
    assert not {"script", "link", "img", "iframe", "object", "embed"} & set(page.tags)
    assert "url(" not in re.sub(r"url\(#", "", text)
    assert "@import" not in text
    for _, name, value in page.attributes:
        assert not name.startswith("on")
        if name in {"src", "href", "xlink:href"}:
            assert value[:1] == "#"
            assert value[1:] in page.ids
    svg = "".join(re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL))
    assert not re.search(r"(fill|stroke): *#[0-9a-f]{6}", svg)
    used = {plots.INK, plots.TRAINING, plots.HELD_OUT}
    assert all(plots.VARIABLES[colour] in svg for colour in used)


def test_the_same_files_give_the_same_page(tmp_path: Path) -> None:
    pages = []
    for name in ("a", "b"):
        write_answers(finished(tmp_path / name), [answer(1, "yes", "no", 0.9)])
        pages.append(write_report(tmp_path / name).read_bytes())
    assert pages[0] == pages[1]
    assert write_report(tmp_path / "a").read_bytes() == pages[0]  # the page itself is no input


def test_headline_numbers_are_the_files(tmp_path: Path) -> None:
    base = {"dev": {"accuracy": 0.3545}}
    windows = {"windowed": {"train": 30, "dev": 4}, "cut": {"train": {}, "dev": {"question": 2}}}
    prose = page_of(finished(tmp_path, baseline=base, **windows)).prose()
    for expected in (
        "mnli <&> 漢 (classification)",
        f"Fine-tuning, 6 of 6 runs done: finished; best run: {BEST}.",
        "dev accuracy 86.1% input-independent baseline 35.4%",
        "dev macro f1 85.1% of the best run",
        "dev-mismatched accuracy 84.1%",
        "dev-mismatched mean squared error 1.250",
        "test accuracy 71.8%",
        "runs done 6 of 6 2 settings, 3 seeds",
        "degenerate runs 1",
        "diverged runs 1",
        "training inputs 20,123 dev 9,815, dev-mismatched 9,832",
        "inputs in several windows 34 cut: 2",
    ):
        assert expected in prose, expected


def test_tables_hold_what_the_files_say(tmp_path: Path) -> None:
    page = page_of(finished(tmp_path))
    deviation = statistics.stdev([0.8612, 0.8534, 0.3333])
    setting = "batch 16, rate 5e-05, 3 epochs"
    ends = ["85.3%", "33.3% to 86.1%", f"{100 * deviation:.2f} points"]
    for row in (
        ["setting", "median", "lowest to highest", "deviation", "n", "degenerate", "diverged"],
        [setting, *ends, "3", "1", "0"],
        [setting, "dev", "accuracy", *ends, "3", "1", "0"],
        [setting, "dev-mismatched", "mean squared error", "1.250", "1.250 to 1.250", "0.000",
         "3", "1", "0"],
        ["batch 32, rate 2e-05, 3 epochs", "dev", "f1/A", "50.0%", "50.0% to 50.0%",
         "0.00 points", "3", "0", "1"],
        ["A", "50.0%", "25.0%"],
        ["tuning.warmup", "0.1"],
        ["versions.torch", "9.9"],
        ["inputs.train", "20123"],
    ):  # fmt: skip
        assert row in page.rows, row
    runs = [row for row in page.rows if row[0] in SCORES]
    order = [0.8612, 0.8534, 0.8207, 0.8101, 0.3333, None]  # those that did not learn come last
    assert [SCORES[row[0]] for row in runs] == order
    assert runs[0] == [BEST, "86.1%", "85.1%", "84.1%", "1.250", "61.2", "–"]
    assert runs[-1][1:] == ["–", "–", "–", "–", "61.2", "diverged: the loss is not a number"]


def test_drawings_are_described(tmp_path: Path) -> None:
    dots, losses, rate = drawings(page_of(finished(tmp_path)))
    assert dots == (
        "accuracy of every run. batch 16, rate 5e-05: 86.1%, 85.3%, 33.3%, median 85.3%; "
        "batch 32, rate 2e-05: 81.0%, 82.1%, median 81.5%."
    )
    assert losses == (
        "Training loss: run from 0.050 to 0.017; degenerate run from 0.050 to 0.017; "
        "best run from 0.050 to 0.017."
    )
    assert rate.startswith("Learning rate: training from 1.0e-04 to 1.0e-04")


def test_a_run_far_off_does_not_press_the_others_together() -> None:
    row = DotRow("a", [0.85, 0.87, 0.33], [False, False, True], 0.85)
    assert shown_range([row]) == pytest.approx((0.83, 0.89))
    assert shown_range([DotRow("a", [0.33], [True], 0.33)]) == pytest.approx((0.32, 0.34))
    assert beside_each_other(row) == pytest.approx([-0.22, 0, 0.22])


def test_a_grid_in_progress(tmp_path: Path) -> None:
    scores = dict(list(SCORES.items())[:2])
    write_run(in_progress(tmp_path, scores) / "runs" / "b32-lr2e-05-e3-s1", [step(20), step(40)])
    page = page_of(tmp_path)
    assert (
        "Fine-tuning, 2 of 3 runs done: still running, or killed; b32-lr2e-05-e3-s1 is at "
        f"update 40; best run: {BEST}."
    ) in page.prose()
    assert "accuracy of every run" in drawings(page)[0]  # the metric is found by its value
    assert "no other setting was tried" in page.prose()


def test_results_alone_are_enough(tmp_path: Path) -> None:
    finished(tmp_path)
    for path in (tmp_path / "runs").rglob("*.json*"):
        path.unlink()
    page = page_of(tmp_path)
    assert "6 of 6 runs done: finished" in page.prose()
    assert len(drawings(page)) == 1  # no journal, no losses


def test_every_run_diverged(tmp_path: Path) -> None:
    name = "b32-lr2e-05-e3-s3"
    page = page_of(in_progress(tmp_path, {name: None}))
    assert "1 of 1 runs done: still running, or killed; every run diverged." in page.prose()
    assert "lower the learning rate" in page.prose()
    assert drawings(page) == []
    assert [name, "61.2", "diverged: the loss is not a number"] in page.rows


def test_answers_beside_the_right_labels(tmp_path: Path) -> None:
    rows = [answer(1, "yes", "yes", 0.9), answer(2, "yes", "no", 0.6), answer(3, "no", "no", 0.7)]
    rows += [answer(4, "no", "maybe", 0.95), {**answer(5, "yes", "yes", 0.5), "pair": "B & b"}]
    write_answers(finished(tmp_path), rows)
    page = page_of(tmp_path)
    assert f"Predictions on dev 3 of 5 predictions of {BEST} are right." in page.prose()
    for row in (
        ["right label", "yes", "no", "maybe", "recall"],
        ["yes", "2", "1", "0", "66.7%"],
        ["no", "0", "1", "1", "50.0%"],
        ["maybe", "0", "0", "0", "–"],
        ["id", "right label", "prediction", "probability", "text"],
    ):
        assert row in page.rows, row
    wrong = page.rows.index(["4", "no", "maybe", "95.0%", "<text> 4"])
    assert page.rows[wrong + 1] == ["2", "yes", "no", "60.0%", "<text> 2"]  # surest first


@pytest.mark.parametrize("kind", ["classification", "token-classification"])
def test_answers_without_right_labels_are_not_shown(tmp_path: Path, kind: str) -> None:
    gold = None if kind == "classification" else "yes"
    write_answers(finished(tmp_path), [answer(1, gold, "yes", 0.9)])
    (tmp_path / "finetune.json").write_text(json.dumps({**SHARED, "task_type": kind}))
    assert "Predictions on dev" not in page_of(tmp_path).prose()


def test_many_labels_are_a_list_of_errors(tmp_path: Path) -> None:
    labels = [f"label {number}" for number in range(30)]
    rows = [answer(number, labels[number % 30], "label 0", 0.5) for number in range(90)]
    rows += [answer(90 + i, "label 7", "label 8", i / 100) for i in range(MAX_WRONG + 5)]
    rows[-1]["text"] = "x" * (MAX_TEXT + 1)
    write_answers(finished(tmp_path), rows)
    (tmp_path / "finetune.json").write_text(json.dumps({**SHARED, "labels": labels}))
    page = page_of(tmp_path)
    assert f"3 of 115 predictions of {BEST} are right." in page.prose()
    errors = page.rows.index(["right label", "prediction", "inputs"])
    assert page.rows[errors + 1] == ["label 7", "label 8", str(MAX_WRONG + 5)]
    assert page.rows[errors + 2] == ["label 1", "label 0", "3"]
    surest = page.rows.index(["id", "right label", "prediction", "probability", "text"])
    assert {len(row) for row in page.rows[surest : surest + MAX_WRONG + 1]} == {5}
    assert not any("x" * (MAX_TEXT + 1) in value for row in page.rows for value in row)
