"""What a fine-tuning folder says: the best run, how sure that is, how far the grid has come."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from bertkit.errors import BertkitError
from bertkit.finetuning.results import FinetuningResults
from bertkit.finetuning.settings import Grid
from bertkit.report.finetuning import grid_state, verdict_text
from bertkit.report.pretraining import write_report
from tests.test_report_tuning import BEST, SCORES, finished, in_progress, run_values


def test_the_sentence_says_how_sure_one_can_be(tmp_path: Path) -> None:
    words = verdict_text(FinetuningResults(finished(tmp_path)))
    spread = 100 * max(statistics.stdev([0.8612, 0.8534]), statistics.stdev([0.8101, 0.8207]))
    lead = 100 * (0.8534 - (0.8101 + 0.8207) / 2)
    assert (
        "The best of 6 runs has accuracy 86.1% on dev; the setting with the highest median "
        "(batch 16, rate 5e-05, 3 epochs) has median 85.3% over 3 seeds (33.3% to 86.1%, "
        f"1 did not learn, standard deviation of the others "
        f"{100 * statistics.stdev([0.8612, 0.8534]):.2f} points); its lead over the next setting "
        f"(batch 32, rate 2e-05, 3 epochs), {lead:.2f} points, is larger than the spread between "
        f"seeds, {spread:.2f} points."
    ) == words


def test_a_small_lead_is_no_clear_choice(tmp_path: Path) -> None:
    scores = {**SCORES, "b32-lr2e-05-e3-s1": 0.8501, "b32-lr2e-05-e3-s2": 0.8550}
    words = verdict_text(FinetuningResults(in_progress(tmp_path, scores)))
    assert "0.09 points, is not larger than the spread between seeds, 0.55 points: no cl" in words


def test_one_seed_each_may_be_chance(tmp_path: Path) -> None:
    scores = {name: score for name, score in SCORES.items() if name.endswith("s1")}
    words = verdict_text(FinetuningResults(in_progress(tmp_path, scores)))
    assert "one seed does not show the spread between seeds" in words
    assert "5.11 points, may be chance: the spread between seeds is not known." in words


def test_one_run_alone(tmp_path: Path) -> None:
    name = "b16-lr5e-05-e3-s3"
    words = verdict_text(FinetuningResults(in_progress(tmp_path, {name: SCORES[name]})))
    assert "The only run has accuracy 33.3% on dev; but it did not learn: it answers" in words
    assert "one run shows neither the spread between seeds nor what other settings give." in words


def test_a_plan_says_how_many_runs_there_will_be(tmp_path: Path) -> None:
    in_progress(tmp_path, dict(list(SCORES.items())[:2]))
    grid = {"batch_size": [16, 32], "learning_rate": [5e-5], "epochs": [3], "seeds": 4}
    (tmp_path / "grid.json").write_text(json.dumps(grid))
    assert {run.name for run in Grid(**{**grid, "batch_size": (16, 32)}).runs()} >= {BEST}
    assert "2 of 8 runs done: still running, or killed;" in grid_state(FinetuningResults(tmp_path))


def test_results_of_fewer_runs_than_there_are(tmp_path: Path) -> None:
    few = [run_values(name, SCORES[name]) for name in list(SCORES)[1:3]]
    finished(tmp_path, runs=few, best=few[0]["name"])
    words = grid_state(FinetuningResults(tmp_path))
    assert f"6 of 6 runs done: results.json covers 2 of them; best run: {BEST}." in words


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("finetune.json", "[1]", r"finetune\.json does not hold a JSON object"),
        ("finetune.json", "{", r"finetune\.json is not valid JSON"),
        ("results.json", '{"runs": [{"name": "x"}]}', r"results\.json is damaged"),
        (f"runs/{BEST}/run.json", "{}", r"run\.json is damaged; delete it to repeat the run"),
        ("grid.json", '{"sides": 3}', r"grid\.json is damaged"),
        ("grid.json", '{"seeds": 1}', r"grid\.json is damaged"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    finished(tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(BertkitError, match=message):
        FinetuningResults(tmp_path)


def test_runs_stand_seed_by_seed_and_numbers_are_ordered_as_numbers(tmp_path: Path) -> None:
    names = ["b8-lr5e-05-e3-s2", "b16-lr5e-05-e3-s10", "b16-lr5e-05-e3-s2"]
    tuned = FinetuningResults(in_progress(tmp_path, dict.fromkeys(names, 0.5)))
    assert [run.name for run in tuned.runs] == [names[0], names[2], names[1]]


def test_folders_without_anything_to_report(tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match=r"journal.jsonl does not exist, nor does finetune.json"):
        write_report(tmp_path)
    with pytest.raises(BertkitError, match="has no finished run yet; wait for the first"):
        write_report(in_progress(tmp_path / "a", {}))
    inner = finished(tmp_path / "b") / "runs" / BEST
    (inner / "run.json").unlink()  # as while it trains
    with pytest.raises(BertkitError, match=r"one run of a fine-tuning grid; give its folder .*b$"):
        write_report(inner)
    assert not list(tmp_path.rglob("report.html"))
