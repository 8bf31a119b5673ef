"""The best model of a fine-tuning folder, its predictions, and `results.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.checkpoints.card import CARD, kept_card
from bertkit.files import read_optional, write_json
from bertkit.finetuning.card import TunedCards
from bertkit.finetuning.evaluation import Scorer
from bertkit.finetuning.grid import (
    RunResult,
    best_run,
    copy_model,
    grid_summary,
    model_problem,
    scores_text,
    setting_text,
    shown_scores,
)
from bertkit.finetuning.settings import RunSettings
from bertkit.outputs import within
from bertkit.tasks.data import describe_cut, digest_inputs, labelled_part, write_results
from bertkit.tasks.saved import load_task_model
from bertkit.tasks.task import PredictedSplit

LatestRun = tuple[str, dict[str, list[Any]]]
"""The name of a run, and split -> its predictions, which need not be made again."""


def is_complete(out: Path, scorer: Scorer, best: RunResult, results: Sequence[RunResult]) -> bool:
    """Return whether `write_best` is done for these runs, and the model is intact."""
    found = read_optional(out / "results.json", file_names=True)
    predicted = found.get("predicted", {})
    for name, inputs in scorer.data.test:
        own = predicted.get(name, {})
        if name in scorer.items and own.get("digest") != digest_inputs([inputs]):
            return False
    for name in scorer.items:
        files = predicted.get(name, {}).get("files", ())
        if not all((out / "results" / file).is_file() for file in files):
            return False
    if not (out / "model" / CARD).is_file():  # deleted to get a new one
        return False
    if found.get("best") != best.name or model_problem(out / "model", best):
        return False
    seals = {run["name"]: run.get("sha256") for run in found.get("runs", [])}
    return seals == {result.name: result.as_json()["sha256"] for result in results}


def write_best(
    out: Path, scorer: Scorer, cards: TunedCards, results: Sequence[RunResult], latest: LatestRun
) -> None:
    """Write predictions on dev and test, the best model with its card, and `results.json`."""
    best = best_run(results)
    predicted = {**earlier_splits(out, scorer, best), **predict_splits(out, scorer, best, latest)}
    rows = grid_summary(results)
    scores = {name: own["scores"] for name, own in predicted.items() if own["scores"]}
    dev_first = sorted(scores, key=lambda name: not name.startswith("dev"))
    card = cards.card(RunSettings(**best.settings), {n: scores[n] for n in dev_first}, rows)
    copy_model(out / "runs" / best.name / "model", out / "model", card)
    every = {"train": cards.train, **scorer.items}
    windowed = {name: items.windowed for name, items in every.items()}
    cut = {name: items.cut for name, items in every.items()}
    results_json = {
        "data": scorer.data.name,
        "metric": scorer.metric,
        "best": best.name,
        "model": best.model,
        "scores": scores,
        "predicted": predicted,
        "baseline": scorer.baselines,
        "windowed": windowed,
        "cut": cut,
        "unknown": {name: items.unknown._asdict() for name, items in every.items()},
        "settings": rows,
        "runs": [result.as_json() for result in results],
    }
    write_json(out / "results.json", results_json)
    for row in rows:
        scorer.console.say(setting_text(row, scorer.metric))
    counted = ", ".join(f"{name} {count:,}" for name, count in windowed.items())
    lost = sum((Counter(own) for own in cut.values()), Counter[str]())
    named = describe_cut(lost) or "cut: 0"
    scorer.console.say(f"inputs in several windows: {counted}; {named}")
    if kept := kept_card(out / "model"):
        scorer.console.say(kept)
    scorer.console.say(f"best: {scores_text(best, scorer.metric)}; the model is in {out / 'model'}")


def predict_splits(
    out: Path, scorer: Scorer, best: RunResult, latest: LatestRun
) -> dict[str, dict[str, Any]]:
    """Write the predictions of the best model; return split -> its scores, counts and files."""
    loaded = load_task_model(out / "runs" / best.name / "model", scorer.device)
    predicted = {}
    for name, inputs in (*scorer.data.dev, *scorer.data.test):
        if name not in scorer.items:
            continue
        run, made = latest
        predictions = made.get(name) if run == best.name else None
        if predictions is None:
            predictions = scorer.predict(loaded.model, name, inputs)
        folder = out / "results"
        done = PredictedSplit(scorer.data.name, name, inputs, predictions)
        written = write_results(loaded.task, folder, done)
        known, found, unscored = labelled_part(inputs, predictions)
        scores = scorer.score(loaded.task, known, found) if known else {}
        if known:
            scorer.console.say(f"{name}: {shown_scores(scores, scorer.metric)}")
            if unscored:
                scorer.console.say(f"{name}: {unscored}")
        scorer.console.say(f"{name} predictions: {', '.join(map(str, written))}")
        predicted[name] = {
            "scores": scores,
            "inputs": len(inputs),
            "scored": len(known),
            "files": [path.relative_to(folder).as_posix() for path in written],
            "digest": digest_inputs([inputs]),
        }
    return predicted


def earlier_splits(out: Path, scorer: Scorer, best: RunResult) -> dict[str, dict[str, Any]]:
    """Return splits that only an earlier call predicted, as when `--test` is now left out.

    Predictions of another model are deleted, since `results/` belongs to the current `model/`.
    """
    before = read_optional(out / "results.json", file_names=True)
    earlier = {
        name: own for name, own in before.get("predicted", {}).items() if name not in scorer.items
    }
    if before.get("model") == best.model:
        return earlier
    for name, own in earlier.items():
        for path in (out / "results" / file for file in own["files"]):
            if within(path, out / "results"):  # the record may be a stranger's
                path.unlink(missing_ok=True)
        scorer.console.say(
            f"{name} predictions of {before['best']}, the best run before, are deleted; "
            "give the file again for those of this one"
        )
    return {}
