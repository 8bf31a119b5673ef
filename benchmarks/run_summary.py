"""Write a pre-training run to results/NAME.json: held-out numbers, baselines, the loss curve.

python -m benchmarks.run_summary runs/two-cores
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.record import write_result
from bertkit.files import read_json
from bertkit.training.journal import read_journal

CURVE = (
    "step", "phase", "mlm_loss", "mlm_accuracy", "nsp_loss", "nsp_accuracy", "learning_rate",
    "tokens", "tokens_per_second", "mfu", "seconds",
)  # fmt: skip


def summarize(run: Path) -> dict[str, Any]:
    """Return each phase's last evaluation beside the baselines, and the whole curve."""
    records = read_journal(run / "journal.jsonl")
    start = next(record for record in records if record["kind"] == "start")
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    rows: dict[str, Any] = {}
    for phase, described in enumerate(start["phases"]):
        measured = [record for record in evaluations if record["phase"] == phase]
        if not measured:  # the run was stopped before
            continue
        last = measured[-1]
        rows[f"phase {phase + 1}, length {described['length']}"] = {
            "updates": last["step"],
            "minutes": round(minutes(steps, last["step"]), 1),
            "held_out_sequences": last["sequences"],
            "held_out_targets": last["targets"],
            "mlm_loss": round(last["mlm_loss"], 4),
            "unigram_entropy": round(start["baselines"]["unigram_entropy"], 4),
            "mlm_accuracy": round(last["mlm_accuracy"], 4),
            "most_frequent_accuracy": round(start["baselines"]["most_frequent_accuracy"], 4),
        }
        if "nsp_accuracy" in last:
            rows[f"phase {phase + 1}, length {described['length']}"] |= {
                "nsp_accuracy": round(last["nsp_accuracy"], 4),
                "nsp_majority": round(start["baselines"]["nsp_majority"], 4),
            }
    end = records[-1]
    return {
        "table": rows,
        "run": {
            "recipe": without(read_json(run / "recipe.json"), "store"),
            "environment": without(read_json(run / "environment.json"), "command"),
            "parameters": start["parameters"],
            "corpus_tokens": start["tokens_total"],
            "pairs": start["pairs"],
            "seconds": end.get("seconds"),
            "training_tokens": sum(record["tokens"] for record in steps),
        },
        "curve": [{name: record[name] for name in CURVE if name in record} for record in steps],
        "evaluations": evaluations,
    }


def minutes(steps: list[dict[str, Any]], until: int) -> float:
    """Return the minutes of the updates up to a step, without evaluations."""
    return sum(record["seconds"] for record in steps if record["step"] <= until) / 60


def without(values: dict[str, Any], name: str) -> dict[str, Any]:
    """Return all values but one: paths of a machine mean nothing elsewhere."""
    return {key: value for key, value in values.items() if key != name}


def main() -> None:
    """Write the results file of one run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path)
    arguments = parser.parse_args()
    found = summarize(arguments.run)
    details = {key: found[key] for key in ("run", "curve", "evaluations")}
    details |= {key: found["run"]["environment"][key] for key in ("commit", "threads")}
    print(write_result(arguments.run.name, found["table"], details))


if __name__ == "__main__":
    main()
