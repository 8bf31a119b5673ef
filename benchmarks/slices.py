"""Fixed slices of the public data sets for the quality benchmark, in their official formats.

Both sides read these files: bertkit and the reference. A full set is used where it is small.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from bertkit.files import write_json, write_text

SST_TRAIN = 20_000
SQUAD_TRAIN = 8_000
SQUAD2_DEV_SHARE = 0.3
SQUAD2_TRAIN = 4_000


def make_slices(data: Path, out: Path) -> None:
    """Write the slices that are not the whole set; the same ones every time."""
    if not (out / "SST-2" / "train.tsv").is_file():
        sst(data / "glue" / "SST-2", out / "SST-2")
    if not (out / "squad" / "train.json").is_file():
        squad(data / "squad", out / "squad")
    if not (out / "squad2" / "dev.json").is_file():
        squad2(data / "squad", out / "squad2")


def sst(source: Path, out: Path) -> None:
    """A random 20,000 training sentences; the whole dev file."""
    header, *rows = (source / "train.tsv").read_text(encoding="utf-8").splitlines()
    kept = sorted(random.Random(0).sample(range(len(rows)), SST_TRAIN))
    write_text(out / "train.tsv", "\n".join([header, *(rows[i] for i in kept)]) + "\n")
    write_text(out / "dev.tsv", (source / "dev.tsv").read_text(encoding="utf-8"))


def squad(source: Path, out: Path) -> None:
    """A random 8,000 training questions whose answer's place is certain."""
    articles = read_articles(source / "train-v1.1.json")
    ambiguous = set(json.loads((source / "train-v1.1.ambiguous-ids.json").read_text()))
    certain = [q["id"] for q in questions(articles) if q["id"] not in ambiguous]
    kept = set(random.Random(0).sample(certain, SQUAD_TRAIN))
    write_json(out / "train.json", {"version": "1.1", "data": [only(a, kept) for a in articles]})


def squad2(source: Path, out: Path) -> None:
    """The dev file of 2.0 in two parts that share no article: there is no training file here.

    Training takes a random 4,000 questions of its part.
    """
    articles = read_articles(source / "dev-v2.0.json")
    random.Random(0).shuffle(articles)
    total = len(questions(articles))
    dev: list[Any] = []
    while len(questions(dev)) < SQUAD2_DEV_SHARE * total:
        dev.append(articles.pop())
    ids = [q["id"] for q in questions(articles)]
    kept = set(random.Random(0).sample(ids, SQUAD2_TRAIN))
    write_json(out / "train.json", {"version": "v2.0", "data": [only(a, kept) for a in articles]})
    write_json(out / "dev.json", {"version": "v2.0", "data": dev})


def read_articles(path: Path) -> list[Any]:
    """The articles of a SQuAD file."""
    return json.loads(path.read_text(encoding="utf-8"))["data"]


def questions(articles: list[Any]) -> list[Any]:
    """All questions of some articles."""
    return [q for article in articles for p in article["paragraphs"] for q in p["qas"]]


def only(article: Any, kept: set[str]) -> Any:
    """An article with only the questions kept, and only the paragraphs that still have one."""
    paragraphs = [
        {**p, "qas": [q for q in p["qas"] if q["id"] in kept]} for p in article["paragraphs"]
    ]
    return {**article, "paragraphs": [p for p in paragraphs if p["qas"]]}
