"""Small stand-ins for what a reader has: a corpus, tables, official files, all made up here.

Each is a file or a folder with the very name that the pages use for it, so that commands can be
run as they are printed.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

PLACES = ("file", "folder", "line", "module", "class", "method")
ACTS = ("returns", "opens", "closes", "reads", "copies", "names")
NAMES = ("Mara", "Nils", "Okafor", "Lindqvist")
TOWNS = ("Bergen", "Oslo", "Ellen", "Riga")


def sentences() -> list[tuple[str, str]]:
    """Texts, each with one of two topics."""
    both = [(act, place) for act in ACTS for place in PLACES]
    return [
        *((f"The function {act} the {place}", "functions") for act, place in both),
        *((f"Text of a {place} that nobody {act}", "texts") for act, place in both),
    ]


def corpus(path: Path) -> None:
    """A folder with the reference topics that every Python carries, a document each."""
    from pydoc_data.topics import topics

    path.mkdir()
    whole = (" ".join(text.split("\n\n")) for text in topics.values())
    documents = "\n\n".join(text.replace("\n\n", "\n").strip() for text in whole)
    (path / "topics.txt").write_text(documents + "\n", encoding="utf-8")


def table(path: Path, first: int, step: int, columns: tuple[str, ...]) -> None:
    """Every `step`-th text from `first` as CSV with a title, and a topic where asked for."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in sentences()[first::step]:
            writer.writerow(row[: len(columns)])


def texts(path: Path) -> None:
    """A text on each line."""
    path.write_text("".join(f"{text}\n" for text, _ in sentences()), encoding="utf-8")


def words(path: Path) -> None:
    """Words that no small vocabulary has as one piece."""
    path.write_text("hyperboreanism\nquixotryness\nzymurgically\n", encoding="utf-8")


def glue(path: Path) -> None:
    """MRPC's files in their official form."""
    folder = path / "MRPC"
    folder.mkdir(parents=True)
    pairs = pairwise(text for text, _ in sentences())
    rows = [(i % 2, a, b) for i, (a, b) in enumerate(pairs)]
    for name, part in (("train", rows[:32]), ("dev", rows[32:48])):
        lines = [f"{label}\t{i}\t{i}\t{a}\t{b}" for i, (label, a, b) in enumerate(part)]
        head = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String"
        (folder / f"{name}.tsv").write_text("\n".join([head, *lines, ""]), encoding="utf-8")
    lines = [f"{i}\t{i}\t{i}\t{a}\t{b}" for i, (_, a, b) in enumerate(rows[48:64])]
    head = "index\t#1 ID\t#2 ID\t#1 String\t#2 String"
    (folder / "test.tsv").write_text("\n".join([head, *lines, ""]), encoding="utf-8")


def squad(path: Path) -> None:
    """SQuAD 2.0's files in their official form."""
    path.mkdir()
    for name, places in (("train", PLACES[:4]), ("dev", PLACES[4:])):
        paragraphs = [
            {
                "context": f"The {place} is in the garden. The lamp is behind it.",
                "qas": [
                    {
                        "id": f"{place}-1",
                        "question": f"Where is the {place}?",
                        "is_impossible": False,
                        "answers": [
                            {"text": "in the garden", "answer_start": len(f"The {place} is ")}
                        ],
                    },
                    {
                        "id": f"{place}-2",
                        "question": f"Who made the {place}?",
                        "is_impossible": True,
                        "answers": [],
                    },
                ],
            }
            for place in places
        ]
        content = {"version": "v2.0", "data": [{"title": name, "paragraphs": paragraphs}]}
        (path / f"{name}-v2.0.json").write_text(json.dumps(content), encoding="utf-8")


def conll(path: Path) -> None:
    """CoNLL-2003's files in their official form: word, part of speech, chunk, entity."""
    path.mkdir()
    for number, name in enumerate(("train", "valid", "test")):
        lines = ["-DOCSTART- -X- -X- O", ""]
        for i in range(4):
            who, where = NAMES[(i + number) % 4], TOWNS[i]
            lines += [f"{who} NNP B-NP B-PER", "left VBD B-VP O", f"{where} NNP B-NP B-LOC"]
            lines += [". . O O", ""]
        (path / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")


def blimp(path: Path) -> None:
    """Two of BLiMP's files in their official form, one of each split."""
    path.mkdir()
    for name in ("adjunct_island", "anaphor_number_agreement"):
        rows = [
            {
                "sentence_good": f"The {place} is in the garden.",
                "sentence_bad": f"The {place} are in the garden.",
                "field": "syntax",
                "UID": name,
            }
            for place in PLACES
        ]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (path / f"{name}.jsonl").write_text(lines, encoding="utf-8")


def folder(path: Path) -> None:
    """An empty one: no data set is at hand."""
    path.mkdir()


STAND_INS: dict[str, Callable[[Path], None]] = {
    "CORPUS": corpus,
    "TRAIN.csv": lambda path: table(path, 0, 2, ("title", "topic")),
    "DEV.csv": lambda path: table(path, 1, 4, ("title", "topic")),
    "NEW.csv": lambda path: table(path, 3, 4, ("title",)),
    "TEXTS.txt": texts,
    "WORDS.txt": words,
    "GLUE": glue,
    "SQUAD": squad,
    "CONLL": conll,
    "BLIMP": blimp,
    "DATA": folder,
}
"""What a reader's own file or folder is called on the pages → what makes a small one."""
GIVEN = frozenset({"MODEL", "BERTKIT", "ORG"})
"""MODEL is a link to the demo's model, BERTKIT becomes the wheel; what needs an ORG is skipped."""
