"""What case, punctuation and segment embeddings are worth: a question of `open_questions`.

Two-layer networks are pre-trained by a recipe of the speedrun on one part of Wikipedia, with one
thing changed each: the vocabulary keeps case and accents; all punctuation and symbols are taken
out, and every sentence is a line; or every token is in the first segment. They are fine-tuned with
the default settings on tasks where the change may matter.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from benchmarks.defaults import folder_name, task_data, tuned_scores
from benchmarks.record import summary
from benchmarks.speedrun import RECIPES, finish_run
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.config import read_recipe
from bertkit.corpus.from_text import TextOptions, store_from_text
from bertkit.files import write_text
from bertkit.finetuning.settings import FinetuneSettings, Grid
from bertkit.model.encoder import Encoder
from bertkit.tasks.data import TaskData
from bertkit.text.documents import read_documents
from bertkit.text.lines import TextCounts
from bertkit.text.sentences import split_sentences
from bertkit.text.sources import find_sources
from bertkit.training.recipe import PretrainRecipe

MARKS = dict.fromkeys(
    code for code in range(sys.maxunicode) if unicodedata.category(chr(code))[0] in "PS"
)
"""A table for `str.translate` that takes out punctuation and symbols."""
MOST_DEV = 3_000
VOCABULARY = 16_000


class Choice(NamedTuple):
    """A network and the tasks that it is fine-tuned on."""

    tasks: tuple[str, ...]
    cased: bool = False
    punctuation: bool = True
    pair: str = "none"
    """The objective on pairs of segments."""
    segments: bool = True


RECIPE = "short"
"""The recipe of the speedrun that all networks are pre-trained with."""
SENTENCES, ENTITIES = "sst-2, 2,000 rows", "conll-2003, 2,000 sentences"
PAIRS = ("qqp-10k", "mrpc")
CHOICES = {
    "lower case, punctuation": Choice((ENTITIES, SENTENCES)),
    "case kept": Choice((ENTITIES, SENTENCES), cased=True),
    "no punctuation": Choice((SENTENCES,), punctuation=False),
    "NSP, two segments": Choice(PAIRS, pair="nsp"),
    "NSP, one segment": Choice(PAIRS, pair="nsp", segments=False),
}


def plain(text: str) -> str:
    """Return a text without punctuation and symbols, or as it is if nothing else is in it."""
    return " ".join(text.translate(MARKS).split()) or text


def plain_documents(path: str) -> Iterator[str]:
    """Yield the documents of a file without punctuation, each sentence on a line."""
    [source] = find_sources([path])
    for document in read_documents(source, TextCounts()):
        yield "\n".join(plain(sentence) for sentence in split_sentences(document))


def plain_rows(used: TaskData) -> TaskData:
    """Return the rows of a task on texts without punctuation."""

    def change(examples: Any) -> list[Any]:
        return [
            one._replace(text=plain(one.text), pair=None if one.pair is None else plain(one.pair))
            for one in examples
        ]

    dev = tuple((name, change(examples)) for name, examples in used.dev)
    return replace(used, train=change(used.train), dev=dev)


@contextmanager
def segments_or_not(kept: bool) -> Iterator[None]:
    """Put every token into the first segment, unless segments are kept."""

    def first(encoder: Encoder, segment_ids: torch.Tensor) -> torch.Tensor:
        return encoder.segment_embeddings(torch.zeros_like(segment_ids))

    if kept:
        yield
        return
    with patch.object(Encoder, "embed_segments", first):
        yield


def make_network(choice: Choice, data: Path, work: Path) -> Path:
    """Pre-train the network of a choice, unless that is done, and return its run."""
    text, language = str(data / "wikipedia" / "wiki_AA.txt.xz"), "en"
    changes = ["cased"] * choice.cased + ["no-punctuation"] * (not choice.punctuation)
    if not choice.punctuation:
        path, language = work / "no-punctuation.txt", "lines"
        if not path.is_file():
            write_text(path, "\n\n".join(plain_documents(text)) + "\n")
        text = str(path)
    options = TextOptions(
        text=(text,), vocabulary_size=VOCABULARY, cased=choice.cased, language=language
    )
    store = store_from_text(options, work / "-".join(["corpus", *changes]))
    changes += [choice.pair] * (choice.pair != "none") + ["one-segment"] * (not choice.segments)
    run = work / "-".join([RECIPE, *changes, "0"])
    flags = ["--training.seed", "0", "--objectives.pair", choice.pair]
    recipe = read_recipe(PretrainRecipe, str(RECIPES / f"{RECIPE}.toml"), flags)
    finish_run(recipe, store, run, RECIPE)
    return run


def text_choices(data: Path, seeds: int, work: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a row for each network, with its median score on each of its tasks."""
    rows: dict[str, Any] = {}
    runs: dict[str, Any] = {}
    for name, choice in CHOICES.items():
        with segments_or_not(choice.segments):
            run = make_network(choice, data, work)
            start = read_pretrained(run)
            rows[name] = {"seeds": seeds}
            for task in choice.tasks:
                used = task_data(task, data, start.config.max_position_embeddings, MOST_DEV)
                used = used if choice.punctuation else plain_rows(used)
                out = work / "text-choices" / folder_name(run.name, task)
                settings = FinetuneSettings(grid=Grid(seeds=seeds), track=())
                scores = tuned_scores(used, start, out, settings)
                rows[name][f"{task} {used.task.metric} percent"] = summary(scores)
                runs.setdefault(name, {})[task] = scores
                print(name, task, scores, flush=True)
    return rows, {"scores_by_seed": runs, "most_dev_inputs": MOST_DEV}
