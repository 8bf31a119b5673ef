"""Retrieval with a model of the image task "alignment": the image of a text, the text of an image.

Every text is read with every image, and the score of a pair is the difference of its two logits.
Recall at k is the share of texts whose image is among the k images of highest score, and of images
that have one of their texts among the k texts (Lu et al. 2019, section 3.2). Equal scores count
against the model, so that one that tells nothing apart finds nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch

from bertkit.console import Console, console_or_new
from bertkit.datasets.examples import TextExample
from bertkit.datasets.records import as_source
from bertkit.errors import BertkitError
from bertkit.files import from_home, write_json, write_json_lines
from bertkit.predict.engine import count_bar
from bertkit.predict.load import load_predictor
from bertkit.predict.predictors import TaskPredictor
from bertkit.tasks.data import describe_items, with_unknown
from bertkit.tasks.spec import SPECS
from bertkit.tasks.task import Items, check_outputs, make_batch, prediction_tokens
from bertkit.text.lines import TextCounts, describe_skipped
from bertkit.training.device import environment

CUTOFFS = (1, 5, 10)
"""The numbers of first results for which recall is computed."""


class TextRank(NamedTuple):
    """A text with the rank, from 1, of its image among all images."""

    id: str
    text: str
    rank: int


@dataclass(frozen=True)
class RetrievalEvaluation:
    """How well a model finds the images of texts, and the texts of images."""

    model: str
    data: str
    images: int
    """The number of different images in each group of candidates, added up."""
    candidates: int
    """The maximum number of rows that are compared with each other."""
    seconds: float
    """The time for scoring, without loading the model."""
    image_recall: dict[int, float]
    """k -> the share of texts whose image is among the first k."""
    text_recall: dict[int, float]
    """k -> the share of images with one of their texts among the first k."""
    chance: dict[int, float]
    """k -> the image recall of random scores."""
    ranks: list[TextRank]
    skipped: dict[str, int]
    """Reason -> the number of rows left out."""

    @property
    def median_rank(self) -> float:
        """The median rank of a text's image."""
        return median(one.rank for one in self.ranks)

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the ranks of single texts, as JSON values."""
        found = {name: value for name, value in asdict(self).items() if name != "ranks"}
        numbers = {"texts": len(self.ranks), "median_rank": self.median_rank}
        return {**found, **numbers, "environment": environment()}

    def save(self, out: Path | str) -> list[Path]:
        """Write the record and, as JSON lines, the rank of every text's image to a folder.

        Returns:
            The two files.

        Raises:
            BertkitError: the folder cannot be written.
        """
        out = Path(from_home(out))
        write_json_lines(out / "retrieval.jsonl", (one._asdict() for one in self.ranks))
        write_json(out / "retrieval.json", self.to_dict())
        return [out / "retrieval.json", out / "retrieval.jsonl"]


def evaluate_retrieval(
    model: Path | str,
    file: Any,
    *,
    columns: Mapping[str, Any] | None = None,
    candidates: int = 1000,
    precision: str = "auto",
    device: str = "auto",
    console: Console | None = None,
) -> RetrievalEvaluation:
    """Measure how well a model finds the image of a text, and the text of an image.

    The time grows with the number of texts times that of images.

    Args:
        model: a model fine-tuned with the image task "alignment" or "pretraining".
        file: rows of a text and its image: a file, a DataFrame, a `datasets.Dataset`, or a list of
            dicts or tuples. Rows with the same image are texts of one image.
        columns: the column options, by name; the others are those of the model.
        candidates: the maximum number of rows that are compared with each other; more rows are
            divided into groups of adjacent rows.
        precision: "fp32", "bf16", "int8" (CPUs only) or "auto".
        device: "auto", "cpu", "cuda", ...
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: the model or the data is missing or damaged, the model has another task (code
            "image-task"), or there are too few candidates (code "number").
    """
    from bertkit.tasks.alignment import Alignment

    if candidates < 2:
        raise BertkitError(f"--candidates must be at least 2, not {candidates}", code="number")
    with console_or_new(console) as shown:
        predictor = load_predictor([model], precision=precision, device=device)
        if not isinstance(predictor.task, Alignment):
            raise BertkitError(
                f"{model} does not tell whether image and text belong together; fine-tune it with "
                "--image-task alignment",
                code="image-task",
            )
        counts, spec = TextCounts(), SPECS[predictor.task.task_type]
        named = spec.merged_columns(columns or {}, predictor.loaded[0].details)
        inputs = list(named.read(as_source(file, "inputs"), counts, labelled=False))
        shown.say(*describe_skipped(counts.skipped, counts.examples))
        items = with_unknown(predictor.items(inputs), predictor.tokenizer.unk_id)
        shown.say(describe_items("retrieval", items))
        began, bar = perf_counter(), count_bar(shown, "ranking", "texts")
        bar(0, len(inputs))
        groups = []
        count = math.ceil(len(inputs) / candidates)
        bounds = [len(inputs) * number // count for number in range(count + 1)]
        for rows in map(range, bounds, bounds[1:]):
            seen: dict[bytes, int] = {}  # the number of each different image
            own = [seen.setdefault(inputs[row].image.tobytes(), len(seen)) for row in rows]
            images = [rows[own.index(number)] for number in range(len(seen))]
            scores = pair_scores(predictor, items, rows, images, bar)
            groups.append((rows, scores, np.array(own)))
    return RetrievalEvaluation(
        model=str(model),
        data=str(file) if isinstance(file, str | Path) else f"{len(inputs)} rows in memory",
        images=sum(scores.shape[1] for _, scores, _ in groups),
        candidates=candidates,
        seconds=round(perf_counter() - began, 3),
        **recalls(groups, inputs),
        skipped=dict(sorted(counts.skipped.items())),
    )


@torch.inference_mode()
def pair_scores(
    predictor: TaskPredictor,
    items: Items,
    rows: Sequence[int],
    images: Sequence[int],
    progress: Callable[[int, int], None],
) -> np.ndarray:
    """Return the scores (rows, images) of texts with images; windows of a text are averaged.

    The texts are those of the inputs with the numbers `rows`, and the images those of `images`.
    """
    model: Any = predictor.engines[0].model
    budget, found = prediction_tokens(predictor.device), []
    regions = [items.items[row].parts[0].image for row in images]
    longest = max(len(image.vectors) for image in regions) + 1
    for row in rows:
        texts = [part._replace(image=None) for part in items.items[row].parts]
        every = max(1, budget // (len(texts) * (longest + len(texts[0].sequences[0].ids))))
        scores = []
        for start in range(0, len(regions), every):
            chosen = regions[start : start + every]
            logits = model.pair_logits(*paired(texts, chosen, predictor.device))
            logits = logits.float().cpu().numpy()
            check_outputs(logits)
            scores.append((logits[:, 1] - logits[:, 0]).reshape(len(texts), -1).mean(axis=0))
        found.append(np.concatenate(scores))
        progress(row + 1, items.inputs)
    return np.stack(found)


def paired(texts: Sequence[Any], images: Sequence[Any], device: torch.device) -> tuple[Any, Any]:
    """Return a batch of some texts and images on a device, and the pairs of each with each."""
    from bertkit.multimodal.regions import with_regions

    packed = with_regions(make_batch(texts).packed, images).to(device)
    first = [number for number in range(len(texts)) for _ in images]
    return packed, (first, list(range(len(images))) * len(texts))


def recalls(
    groups: Sequence[tuple[Sequence[int], np.ndarray, np.ndarray]], inputs: Sequence[TextExample]
) -> dict[str, Any]:
    """Return recalls and ranks of groups of rows.

    A group has rows, their scores (rows, images), and the number of the image of each row.
    """
    ranks: list[TextRank] = []
    of_images: list[int] = []
    chance: list[list[float]] = []
    for rows, scores, own in groups:
        right = scores[np.arange(len(rows)), own]
        better = (scores >= right[:, None]).sum(axis=1)  # the right one, and all that are no worse
        named = zip(rows, better.tolist(), strict=True)
        ranks += [TextRank(inputs[row].id, inputs[row].text, rank) for row, rank in named]
        for number in range(scores.shape[1]):
            best = scores[own == number, number].max()
            of_images.append(1 + int((scores[own != number, number] >= best).sum()))
        chance += [[min(1.0, k / scores.shape[1]) for k in CUTOFFS]] * len(rows)
    found = [one.rank for one in ranks]
    return {
        "ranks": ranks,
        "image_recall": {k: fmean(rank <= k for rank in found) for k in CUTOFFS},
        "text_recall": {k: fmean(rank <= k for rank in of_images) for k in CUTOFFS},
        "chance": dict(zip(CUTOFFS, np.mean(chance, axis=0).tolist(), strict=True)),
    }
