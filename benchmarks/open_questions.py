"""Questions that reviews of BERT left open, each answered by a small experiment.

nesting: how deep can brackets be nested for networks of 1 to 6 layers? Opening brackets are of four
types, and all closing brackets look alike. A network learns, from random weights, to name the type
of the bracket that each closing one belongs to. It is then asked about new strings; accuracy is
counted by how many levels of brackets lie between the two.

features: what do features computed once save against fine-tuning? A logistic regression on the mean
of the last layer's hidden states is compared with fine-tuning the same encoder, on 2,000 sentences
of SST-2.

next-sentence: do tasks on pairs of sentences lose when a network was pre-trained without NSP? The
networks of the speedrun's recipes `wide` and `wide-no-nsp`, which saw the same text for the same
number of updates, are fine-tuned with the default settings on three tasks on pairs and on one task
on single sentences. `python -m benchmarks.speedrun` makes the networks in the folder --work.

sentence-order: can shuffled sentences be put back in order? A classifier of pairs says which of two
sentences of a paragraph came first; it is fine-tuned on paragraphs of other documents. A whole list
is sorted by the sum of each sentence's log odds to come before the others. The same is done with
logistic regression on TF-IDF features of words and pairs of words.

text-choices: what are case, punctuation and segment embeddings worth? See
`benchmarks.text_choices`, which makes its networks in the folder --work.

static-vectors: what do hidden states add to vectors of words alone? See `benchmarks.word_vectors`,
which uses one of those networks.

answer-ends: are answers better if the end is scored given the start? The head `conditional` is
compared with the paper's independent start and end on a part of SQuAD 1.1, with the same seeds.

equal-time: which objective teaches most in equal time? See `benchmarks.equal_time`, which makes its
networks in the folder --work.

The page docs/open-questions.md has the results.

    python -m benchmarks.open_questions --data FOLDER [--questions nesting features] [--seeds 3]
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from bertkit.datasets.glue import read_glue
from bertkit.finetuning.grid import all_results
from sklearn.compose import ColumnTransformer
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline

from benchmarks.defaults import folder_name, sample, task_data, tuned_scores
from benchmarks.equal_time import equal_time
from benchmarks.quality_data import dataset, make_slices
from benchmarks.record import data_folder, new_parser, start_model, summary, write_result
from benchmarks.text_choices import text_choices
from benchmarks.word_vectors import static_vectors
from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.settings import FinetuneSettings, Grid, HeadSettings
from bertkit.model.encoder import ModelConfig
from bertkit.model.task_heads import TokenClassificationModel
from bertkit.objectives import Sums, cross_entropy_sums
from bertkit.pretraining_data.batch import Packed, TensorFields, from_arrays
from bertkit.sklearn import BertClassifier, BertEmbedder
from bertkit.tasks.data import TaskData
from bertkit.text.documents import read_documents
from bertkit.text.lines import TextCounts
from bertkit.text.sentences import split_sentences
from bertkit.text.sources import find_sources
from bertkit.training.optimizer import build_optimizer
from bertkit.training.recipe import learning_rate
from bertkit.training.step import LoopSettings, train_steps

TYPES = 4
"""The types of brackets; their ids are 1 to 4, a closing bracket is 5, and [CLS] is 0."""
CLOSING = 1 + TYPES
LAYERS = (1, 2, 3, 4, 6)
HEIGHTS = 8
"""The levels between two brackets that are counted; deeper pairs count as the last."""
PAIRS = range(4, 21)
"""The numbers of pairs of brackets in a string; all strings of a batch have the same number."""
BATCH, UPDATES, TEST_STRINGS = 32, 2_000, 200
PEAK_RATE = 1e-3
FEATURE_ROWS = 2_000
NETWORKS = {"with NSP": "wide-0", "without NSP": "wide-no-nsp-0"}
"""Row -> the run of the speedrun."""
TASKS = ("mnli-10k", "qqp-10k", "mrpc", "sst-2, 2,000 rows")
MOST_DEV = 3_000
PASSAGE = 5
"""The number of sentences of a paragraph that are put in order."""
TRAIN_PASSAGES, TEST_PASSAGES = 4_000, 500
END_HEADS = {"linear": "independent ends, as in the paper", "conditional": "end given the start"}
"""Head -> row."""
END_EPOCHS = 2


@dataclass(frozen=True)
class Brackets(TensorFields):
    """A batch of strings of brackets."""

    packed: Packed
    closing: torch.Tensor
    """(closing brackets,) their indices in the batch."""
    types: torch.Tensor
    """(closing brackets,) the type of the bracket that each belongs to, from 0."""
    heights: np.ndarray
    """(closing brackets,) the levels of brackets between the two, from 0."""

    @property
    def counts(self) -> dict[str, int]:
        """The counts that losses are divided by."""
        return {"brackets": len(self.types)}


def draw_string(rng: np.random.Generator, pairs: int) -> list[tuple[int, int, int]]:
    """Draw a well-nested string of some pairs of brackets.

    Returns:
        For each bracket its id, its type from 0, and, for closing ones, the levels inside the pair.
    """
    left, open_pairs = pairs, list[list[int]]()
    found = []
    while left or open_pairs:
        if left and (not open_pairs or rng.random() < 0.5):
            kind, left = int(rng.integers(TYPES)), left - 1
            open_pairs.append([kind, 0])
            found.append((1 + kind, kind, 0))
        else:
            kind, height = open_pairs.pop()
            if open_pairs:
                open_pairs[-1][1] = max(open_pairs[-1][1], height + 1)
            found.append((CLOSING, kind, height))
    return found


def draw_batch(rng: np.random.Generator, strings: int, pairs: int) -> Brackets:
    """Draw a batch of strings, each behind a [CLS]."""
    drawn = [draw_string(rng, pairs) for _ in range(strings)]
    rows = np.array([one for string in drawn for one in [(0, 0, 0), *string]], dtype=np.int64)
    lengths = np.array([1 + len(string) for string in drawn])
    closing = np.flatnonzero(rows[:, 0] == CLOSING)
    return Brackets(
        from_arrays(rows[:, 0].copy(), np.zeros(len(rows), dtype=np.int64), lengths),
        torch.from_numpy(closing),
        torch.from_numpy(rows[closing, 1]),
        np.minimum(rows[closing, 2], HEIGHTS - 1),
    )


def train_network(layers: int, seed: int) -> TokenClassificationModel:
    """Train a network from random weights; no string is seen twice."""
    torch.manual_seed(seed)
    config = ModelConfig(
        vocab_size=1 + CLOSING, hidden_size=64, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=1 + 2 * PAIRS[-1], hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, initializer_range=0.05,
    )  # fmt: skip
    model = TokenClassificationModel(config, TYPES).train()
    optimizer = build_optimizer(model, learning_rate=PEAK_RATE)
    rng = np.random.default_rng([seed, layers])
    drawn = (draw_batch(rng, BATCH, int(rng.choice(PAIRS))) for _ in range(UPDATES))
    settings = LoopSettings(
        device=torch.device("cpu"),
        precision="fp32",
        seed=seed,
        max_gradient_norm=1.0,
        learning_rate=partial(learning_rate, peak=PEAK_RATE, warmup_steps=100, total_steps=UPDATES),
    )
    steps = (([batch], None) for batch in drawn)
    for _ in train_steps(model, optimizer, bracket_types, steps, settings):
        pass
    return model.eval()


def bracket_types(model: TokenClassificationModel, batch: Brackets) -> Sums:
    """Compute the loss of the types of the closing brackets."""
    logits = model(batch.packed)[batch.closing]
    return cross_entropy_sums("type", logits, batch.types, "brackets")


def accuracy_by_height(model: TokenClassificationModel) -> np.ndarray:
    """Return (heights,) the share of closing brackets of fixed new strings that are right."""
    rng, right, heights = np.random.default_rng(1 << 30), [], []
    for pairs in PAIRS:
        batch = draw_batch(rng, TEST_STRINGS, pairs)
        with torch.inference_mode():
            found = model(batch.packed)[batch.closing].argmax(-1) == batch.types
        right.append(found.numpy())
        heights.append(batch.heights)
    every, levels = np.concatenate(right), np.concatenate(heights)
    return np.array([every[levels == height].mean() for height in range(HEIGHTS)])


def nesting(data: Path, seeds: int, work: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row for each number of layers: the median accuracy for each height."""
    rows: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for layers in LAYERS:
        found = [accuracy_by_height(train_network(layers, seed)) for seed in range(seeds)]
        name = f"{layers} layer{'s' * (layers > 1)}"
        medians = np.median(found, axis=0)
        rows[name] = {"seeds": seeds} | {
            f"{height}{'+' * (height == HEIGHTS - 1)} levels accuracy": round(float(share), 4)
            for height, share in enumerate(medians)
        }
        runs[name] = [np.round(one, 4).tolist() for one in found]
        print(name, np.round(medians, 3).tolist(), flush=True)
    return rows, {
        "chance": 1 / TYPES,
        "updates": UPDATES,
        "strings_per_update": BATCH,
        "accuracies_by_seed": runs,
    }


class Answers(NamedTuple):
    """The time and the accuracy of an experiment on SST-2."""

    once: float
    """The seconds that are needed once, however many experiments follow."""
    each: float
    """The seconds of each experiment."""
    accuracy: float


def features(data: Path, seeds: int, work: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row for fine-tuning and one for features, with the time of one and of ten runs."""
    read = {split: read_glue("sst-2", data / "glue", split, TextCounts()) for split in
            ("train", "dev")}  # fmt: skip
    dev = read["dev"]
    cases: dict[str, Callable[[Any, int], Answers]] = {
        "fine-tuning": lambda train, seed: fine_tune(train, dev, seed),
        "features and logistic regression": lambda train, seed: on_features(train, dev),
    }
    found: dict[str, list[Answers]] = {name: [] for name in cases}
    for seed in range(1, seeds + 1):
        chosen = np.random.default_rng(seed).choice(len(read["train"]), FEATURE_ROWS, replace=False)
        train = [read["train"][i] for i in chosen]
        for name, run in cases.items():
            found[name].append(run(train, seed))
            print(name, seed, found[name][-1], flush=True)
    rows = {}
    for name, answers in found.items():
        once, each = (statistics.median(getattr(one, field) for one in answers)
                      for field in ("once", "each"))  # fmt: skip
        rows[name] = {
            "seeds": seeds,
            "dev_accuracy_percent": summary([round(100 * one.accuracy, 2) for one in answers]),
            "seconds_for_one_run": round(once + each, 1),
            "seconds_for_ten_runs": round(once + 10 * each, 1),
        }
    size = 4 * 384 * (FEATURE_ROWS + len(dev)) / 1e6
    rows["features and logistic regression"]["megabytes_of_features"] = round(size, 1)
    return rows, {"training_rows": FEATURE_ROWS, "dev_rows": len(dev)}


def labels(examples: Any) -> list[str]:
    """Return the labels of examples."""
    return [one.label for one in examples]


def fine_tune(train: Any, dev: Any, seed: int) -> Answers:
    """Fine-tune with the default settings."""
    began = time.perf_counter()
    model = BertClassifier(start_model(), random_state=seed)
    model.fit([one.text for one in train], labels(train))
    accuracy = model.score([one.text for one in dev], labels(dev))
    return Answers(0.0, time.perf_counter() - began, float(accuracy))


def on_features(train: Any, dev: Any) -> Answers:
    """Compute vectors once, and fit a logistic regression on them."""
    began = time.perf_counter()
    embedder = BertEmbedder(start_model(), pooling="mean", normalize=False).fit(["text"])
    vectors = [embedder.transform([one.text for one in part]) for part in (train, dev)]
    with tempfile.TemporaryDirectory() as folder:  # as they would be kept between experiments
        for name, part in zip(("train", "dev"), vectors, strict=True):
            np.save(Path(folder) / f"{name}.npy", part)
    ready = time.perf_counter()
    model = LogisticRegression(max_iter=2_000).fit(vectors[0], labels(train))
    accuracy = model.score(vectors[1], labels(dev))
    return Answers(ready - began, time.perf_counter() - ready, float(accuracy))


def next_sentence(data: Path, seeds: int, work: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row for each network of the speedrun, with its median score on each task."""
    rows: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for name, folder in NETWORKS.items():
        start = read_pretrained(work / folder)
        positions = start.config.max_position_embeddings
        rows[name] = {"seeds": seeds}
        for task in TASKS:
            used = task_data(task, data, positions, MOST_DEV)
            out = work / "next-sentence" / folder_name(folder, task)
            settings = FinetuneSettings(grid=Grid(seeds=seeds), track=())
            scores = tuned_scores(used, start, out, settings)
            rows[name][f"{task} {used.task.metric} percent"] = summary(scores)
            runs.setdefault(name, {})[task] = scores
            print(name, task, scores, flush=True)
    return rows, {"scores_by_seed": runs, "most_dev_inputs": MOST_DEV}


def answer_ends(data: Path, seeds: int, work: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row for each head with its scores on questions of SQuAD 1.1."""
    start = read_pretrained(start_model())
    slices = work / "slices"
    make_slices(data, slices)
    whole = dataset("squad-1.1", data, slices, start.config.max_position_embeddings)
    used = sample(whole, None, MOST_DEV)
    found = {head: end_scores_of(used, start, work, head, seeds) for head in END_HEADS}
    independent, given = (found[head] for head in END_HEADS)
    gains = {
        metric: [b - a for a, b in zip(scores, given[metric], strict=True)]
        for metric, scores in independent.items()
    }
    columns = {**{name: found[head] for head, name in END_HEADS.items()}, "difference": gains}
    rows: dict[str, Any] = {
        name: {"seeds": seeds, **{f"{metric} percent": summary(own[metric]) for metric in own}}
        for name, own in columns.items()
    }
    sizes = {"train_questions": len(used.train), "dev_questions": MOST_DEV, "epochs": END_EPOCHS}
    return rows, {**sizes, "scores_by_seed": found}


def end_scores_of(
    used: TaskData, start: PretrainedWeights, work: Path, head: str, seeds: int
) -> dict[str, list[float]]:
    """Fine-tune with a head, unless that is done, and return the scores of all seeds in percent."""
    out = work / "answer-ends" / head
    grid = Grid(seeds=seeds, epochs=(END_EPOCHS,))
    settings = FinetuneSettings(grid=grid, head=HeadSettings(head=head), track=())
    finetune(used, start, out, settings=settings)
    scores = [next(iter(run.scores.values())) for run in all_results(out)]
    return {name: [round(100 * one[name], 2) for one in scores] for name in ("f1", "exact_match")}


def read_passages(data: Path) -> list[list[str]]:
    """Return passages of consecutive sentences, each from one paragraph of another document."""
    [source] = find_sources([str(data / "wikipedia" / "wiki_AA.txt.xz")])
    found: list[list[str]] = []
    for document in read_documents(source, TextCounts()):
        paragraphs = (split_sentences(line) for line in document.splitlines())
        first = next((one for one in paragraphs if len(one) >= PASSAGE), None)
        found += [first[:PASSAGE]] if first else []
        if len(found) == TRAIN_PASSAGES + TEST_PASSAGES:
            break
    return found


def ordered_pairs(passage: list[str]) -> list[tuple[str, str]]:
    """Return every pair of different sentences, each in both orders."""
    return list(permutations(passage, 2))


def order_scores(probabilities: np.ndarray) -> np.ndarray:
    """Measure how well passages were ordered.

    Args:
        probabilities: (passages, pairs) that the first sentence of each of `ordered_pairs` comes
            before the second in the text.

    Returns:
        (3,) the share of pairs in the right order, Kendall's tau of the sorted passages, and the
        share of passages that are exactly right.
    """
    odds = np.full((len(probabilities), PASSAGE, PASSAGE), 0.0)
    first, second = np.array(list(permutations(range(PASSAGE), 2))).T
    clipped = np.clip(probabilities, 1e-6, 1 - 1e-6)
    odds[:, first, second] = np.log(clipped / (1 - clipped))
    odds -= odds.transpose(0, 2, 1)  # both orders of a pair count
    above = np.triu_indices(PASSAGE, 1)
    sums = odds.sum(-1)  # the higher the sum, the earlier the sentence
    sorted_right = np.sign(sums[:, above[0]] - sums[:, above[1]])
    return np.array(
        [(odds[:, *above] > 0).mean(), sorted_right.mean(), (sorted_right == 1).all(-1).mean()]
    )


def sentence_order(data: Path, seeds: int, work: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row for BERT and one for TF-IDF: pairs, Kendall's tau and whole passages."""
    passages = read_passages(data)
    train, test = passages[:TRAIN_PASSAGES], passages[TRAIN_PASSAGES:][:TEST_PASSAGES]
    asked = [pair for passage in test for pair in ordered_pairs(passage)]
    words = ColumnTransformer(
        [(f"sentence {i}", TfidfVectorizer(ngram_range=(1, 2), min_df=2), i) for i in range(2)]
    )
    found: dict[str, list[np.ndarray]] = {}
    for seed in range(1, seeds + 1):
        rng = np.random.default_rng(seed)
        drawn = [np.sort(rng.choice(PASSAGE, 2, replace=False)) for _ in train]
        before = rng.random(len(train)) < 0.5
        pairs = [
            (passage[i], passage[j]) if right else (passage[j], passage[i])
            for passage, (i, j), right in zip(train, drawn, before, strict=True)
        ]
        models = {
            "BERT": BertClassifier(start_model(), random_state=seed),
            "TF-IDF and logistic regression": make_pipeline(
                words, LogisticRegression(max_iter=2_000)
            ),
        }
        for name, model in models.items():
            model.fit(np.array(pairs, dtype=object), before.astype(int))
            right = model.predict_proba(np.array(asked, dtype=object))[:, 1]
            found.setdefault(name, []).append(order_scores(right.reshape(len(test), -1)))
            print(name, seed, found[name][-1], flush=True)
    columns = ("pairs_accuracy", "kendall_tau", "whole_passages_accuracy")
    rows = {
        name: {"seeds": seeds}
        | {
            column: summary([round(float(one), 4) for one in values])
            for column, values in zip(columns, np.transpose(scores), strict=True)
        }
        for name, scores in found.items()
    }
    rows["guessing"] = {
        "pairs_accuracy": 0.5, "kendall_tau": 0.0,
        "whole_passages_accuracy": round(1 / math.factorial(PASSAGE), 4),
    }  # fmt: skip
    sizes = {"sentences": PASSAGE, "train_pairs": len(train), "test_passages": len(test)}
    return rows, sizes


QUESTIONS = {
    "nesting": nesting,
    "features": features,
    "next-sentence": next_sentence,
    "sentence-order": sentence_order,
    "static-vectors": static_vectors,
    "text-choices": text_choices,
    "answer-ends": answer_ends,
    "equal-time": equal_time,
}


def main() -> None:
    """Answer the questions, and write a results file for each."""
    parser = new_parser(__doc__)
    parser.add_argument("--questions", nargs="+", choices=QUESTIONS, default=[*QUESTIONS])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--work", type=Path, default=Path("runs/speedrun"), help="of the speedrun")
    arguments = parser.parse_args()
    data = data_folder(arguments.data)
    for name in arguments.questions:
        rows, details = QUESTIONS[name](data, arguments.seeds, arguments.work)
        print(write_result(f"question-{name}", rows, details))


if __name__ == "__main__":
    main()
