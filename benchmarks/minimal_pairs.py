"""Speed of minimal pairs beside minicons: the same network and pairs, in one run.

bertkit scores all of BLiMP. minicons, which the field uses, scores a slice of it: the same number
of pairs of every set. Its batch size is the fastest of several, tried once before, and its
sentences are sorted by length, which it does not do by itself. Rounds go through both in turn;
ratios are between runs of one round. Scores are compared in fp32, and the largest difference is
kept. Without --model a small network is pre-trained on BabyLM's text, only to have weights: the
accuracy is shown beside the speed, not as a result.

    python -m benchmarks.minimal_pairs --data FOLDER --work FOLDER
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from bertkit.datasets.minimal_pairs import MinimalPair, read_minimal_pairs
from bertkit.predict.minimal_pairs import MinimalPairEvaluation, evaluate_minimal_pairs

from benchmarks.record import data_folder, installed, new_parser, summary, timed, write_result
from bertkit.checkpoints.pretrained import load_config, model_folder
from bertkit.config import read_recipe
from bertkit.corpus.from_text import TextOptions, store_from_text
from bertkit.predict.pretrained import load_pretrained
from bertkit.text.lines import TextCounts
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import PretrainRecipe

METHODS = {"within-word-l2r": "within_word_l2r", "pll": "original"}
"""bertkit's name of a method -> minicons' name."""
NETWORK = (
    *("--model.hidden-size", "256", "--model.num-attention-heads", "4"),
    *("--phases.lengths", "64", "--phases.batch-sizes", "64", "--phases.max-predictions", "10"),
)
"""The network of 4 layers of width 256 that is pre-trained without --model."""

Scorer = Callable[[Sequence[str]], np.ndarray]
"""Maps sentences to scores, (sentences,)."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The extent of the measurement."""

    repeats: int = 3
    pairs: int = 8
    """The pairs of every set that both score."""
    batches: Sequence[int] = (1, 2, 4, 8, 16, 32)
    """The numbers of sentences at a time that are tried for minicons, on an eighth of the texts."""
    steps: int = 300
    """The updates of the network that is pre-trained."""
    whole: bool = True
    """Whether to score all of BLiMP."""


QUICK = Settings(repeats=1, pairs=1, batches=(4,), steps=2, whole=False)


def pretrained_network(data: Path, work: Path, steps: int) -> Path:
    """Pre-train a network of 4 layers of width 256 for some updates; return its run directory."""
    out = work / f"network-{steps}"
    text = TextOptions(text=(str(data / "babylm"),), vocabulary_size=16_000, format="text")
    store = store_from_text(text, out)
    length = ("--phases.steps", str(steps), "--training.warmup-steps", str(max(1, steps // 10)))
    recipe = read_recipe(PretrainRecipe, "two-cores", [*NETWORK, *length])
    pretrain(recipe, store, out)
    return out


def slice_of(pairs: Sequence[MinimalPair], count: int) -> list[str]:
    """Return the sentences of the first pairs of every set."""
    taken: dict[str, int] = {}
    texts: list[str] = []
    for pair in pairs:
        taken[pair.set] = taken.get(pair.set, 0) + 1
        if taken[pair.set] <= count:
            texts += (pair.good, pair.bad)
    return texts


def ours(model: Path, method: str) -> Scorer:
    """Return bertkit's scorer in fp32, from texts to scores, so that tokenizing is timed, too."""
    scorer = load_pretrained(model, device="cpu", precision="fp32").scorer
    return lambda texts: np.array([one.sum() for one in scorer.score(scorer.encode(texts), method)])


def minicons(model: Path, method: str) -> Callable[[int], Scorer]:
    """Return minicons' scorer for a number of sentences at a time."""
    from minicons.scorer import MaskedLMScorer

    scorer = MaskedLMScorer(str(model_folder(model)), "cpu")

    def score(texts: Sequence[str], size: int) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
        found = np.empty(len(texts))
        for start in range(0, len(texts), size):
            own = order[start : start + size]
            # tokenized here: minicons calls a method that transformers 5 no longer has
            encoded = scorer.tokenizer([texts[i] for i in own], padding=True, return_tensors="pt")
            found[own] = scorer.sequence_score(
                encoded, reduction=lambda one: one.double().sum().item(), PLL_metric=METHODS[method]
            )
        return found

    return lambda size: lambda texts: score(texts, size)


def compare(
    model: Path, method: str, texts: Sequence[str], settings: Settings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the row of a method, and the seconds of minicons by batch size."""
    own, theirs = ours(model, method), minicons(model, method)
    own(texts[:40])
    tried = {size: timed(theirs(size), texts[::8])[1] for size in settings.batches}
    best = min(tried, key=tried.__getitem__)
    seconds: dict[str, list[float]] = {"bertkit": [], "minicons": []}
    difference = 0.0
    for _ in range(settings.repeats):
        scores, taken = timed(own, texts)
        their_scores, their_time = timed(theirs(best), texts)
        seconds["bertkit"].append(taken)
        seconds["minicons"].append(their_time)
        difference = max(difference, float(np.abs(scores - their_scores).max()))
        print(f"{method}: bertkit {taken:.2f} s, minicons {their_time:.2f} s", flush=True)
    both = zip(seconds["minicons"], seconds["bertkit"], strict=True)
    return {
        "runs": settings.repeats,
        "sentences": len(texts),
        "bertkit_sentences_per_second": summary([len(texts) / s for s in seconds["bertkit"]]),
        "minicons_sentences_per_second": summary([len(texts) / s for s in seconds["minicons"]]),
        "over_minicons": summary([theirs / own for theirs, own in both]),
        "minicons_batch": best,
        "largest_difference_in_nats": float(f"{difference:.2g}"),
    }, {str(size): round(taken, 2) for size, taken in tried.items()}


def whole(found: MinimalPairEvaluation) -> dict[str, Any]:
    """Return the columns about all of BLiMP."""
    return {
        "blimp_sets": len(found.sets),
        "blimp_pairs": len(found.scored),
        "blimp_minutes": round(found.seconds / 60, 2),
        "blimp_sentences_per_second": round(found.sentences / found.seconds, 1),
        "blimp_accuracy": round(found.accuracy, 4),
    }


def run(data: Path, model: Path, settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows by method, and the details that belong to them."""
    network = load_config(model_folder(model))
    details: dict[str, Any] = {
        "precision": "fp32",
        "layers": network.num_hidden_layers,
        "width": network.hidden_size,
        "vocabulary": network.vocab_size,
        "minicons": installed("minicons"),
    }
    texts = slice_of(read_minimal_pairs(data / "blimp", TextCounts()), settings.pairs)
    rows, tried = {}, {}
    for method in METHODS:
        rows[method], tried[method] = compare(model, method, texts, settings)
    details["minicons_seconds_by_batch"] = tried
    if settings.whole:
        found = evaluate_minimal_pairs(model, data / "blimp", device="cpu")
        rows[found.method] |= whole(found)
        details["accuracy_by_field"] = {name: round(one, 4) for name, one in found.fields.items()}
    return rows, details


def main() -> None:
    """Measure, and write the results file."""
    parser = new_parser(__doc__, work="runs/minimal-pairs")
    parser.add_argument("--model", type=Path, help="a pre-trained model; by default a small one")
    parser.add_argument("--repeats", type=int, default=Settings.repeats)
    parser.add_argument("--quick", action="store_true", help="a few pairs; writes no results")
    arguments = parser.parse_args()
    settings = QUICK if arguments.quick else replace(Settings(), repeats=arguments.repeats)
    data = data_folder(arguments.data)
    model = arguments.model or pretrained_network(data, arguments.work, settings.steps)
    rows, details = run(data, model, settings)
    details["network"] = "given by --model" if arguments.model else f"{settings.steps} updates"
    for name, row in rows.items():
        print(name, row)
    print(details)
    if not arguments.quick:
        print(write_result("minimal-pairs", rows, details))


if __name__ == "__main__":
    main()
