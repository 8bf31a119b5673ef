"""How often a pre-trained model prefers the acceptable sentence of a minimal pair (BLiMP).

    python -m experiments.blimp MODEL DATA --split test --out blimp.json

DATA is the folder of BLiMP (Warstadt et al. 2020): JSON lines with `sentence_good`,
`sentence_bad`, `UID` and `field`, one file for each of its 67 sets. Sentences are compared by their
pseudo-log-likelihood (Salazar et al. 2020; within words from left to right, Kauf and Ivanova 2023),
and those of a left-to-right network by their likelihood; equal scores count half. The accuracy is
the mean over the sets.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import bertkit

DEV = (
    "adjunct_island",
    "anaphor_gender_agreement",
    "distractor_agreement_relative_clause",
    "drop_argument",
    "npi_present_2",
    "tough_vs_raising_1",
    "wh_questions_subject_gap_long_distance",
)
"""The tenth of BLiMP's sets on which recipes may be chosen: of each of the four fields, the tenth
whose names have the lowest SHA-256. What was chosen on them is reported on the other sixty sets."""


class MinimalPair(NamedTuple):
    """An acceptable sentence and its unacceptable counterpart."""

    good: str
    bad: str
    set: str
    field: str


def read_pairs(data: Path, split: str = "all") -> list[MinimalPair]:
    """Read the pairs of a JSON-lines file or of all such files in a folder.

    The split is "all", "dev" (the sets in `DEV`) or "test" (the others).
    """
    paths = sorted(data.glob("*.jsonl")) if data.is_dir() else [data]
    pairs = []
    for path in paths:
        for line in path.read_text(encoding="utf-8").splitlines():
            row = json.loads(line)
            name = row.get("UID", path.stem)
            field = str(row.get("field", "")).replace("/", "_")  # as another set of BLiMP has it
            pairs.append(MinimalPair(row["sentence_good"], row["sentence_bad"], name, field))
    if split != "all":
        pairs = [pair for pair in pairs if (pair.set in DEV) == (split == "dev")]
    if not pairs:
        raise SystemExit(f"error: {data} has no pairs of the split {split}")
    return pairs


def evaluate(predictor: Any, pairs: list[MinimalPair]) -> dict[str, Any]:
    """Return the accuracy of a model on pairs: of every set, of every field, and the mean.

    Args:
        predictor: a pre-trained model, as `bertkit.load` returns it; in fp32, since the scores of a
            pair may be almost equal.
        pairs: the pairs.
    """
    scores = predictor.score([text for pair in pairs for text in pair[:2]])
    values = [sentence.score for sentence in scores]
    points: dict[str, list[float]] = defaultdict(list)
    fields: dict[str, set[str]] = defaultdict(set)
    for pair, good, bad in zip(pairs, values[::2], values[1::2], strict=True):
        points[pair.set].append(1.0 if good > bad else 0.5 if good == bad else 0.0)
        fields[pair.field].add(pair.set)
    sets = {name: mean(hits) for name, hits in sorted(points.items())}
    return {
        "accuracy": mean(sets.values()),
        "fields": {name: mean(sets[s] for s in names) for name, names in sorted(fields.items())},
        "sets": sets,
        "pairs": len(pairs),
    }


def mean(values: Iterable[float]) -> float:
    """Return the mean of some numbers."""
    every = list(values)
    return sum(every) / len(every)


def main() -> None:
    """Evaluate the model of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.blimp",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", help="a pre-trained model")
    parser.add_argument("data", type=Path, help="the folder of BLiMP")
    parser.add_argument("--split", choices=("all", "dev", "test"), default="all")
    parser.add_argument("--out", type=Path, help="a JSON file for the accuracies")
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    pairs = read_pairs(options.data, options.split)
    predictor = bertkit.load(options.model, precision="fp32", device=options.device)
    accuracies = evaluate(predictor, pairs)
    for name, accuracy in [*accuracies["sets"].items(), *accuracies["fields"].items()]:
        print(f"{accuracy:7.1%}  {name}")
    print(f"{accuracies['accuracy']:7.1%}  mean of {len(accuracies['sets'])} sets")
    if options.out:
        options.out.write_text(json.dumps(accuracies, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except bertkit.BertkitError as error:
        raise SystemExit(f"error: {error}") from None
