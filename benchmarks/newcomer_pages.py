"""The steps that a page of the documentation asks a newcomer to take, and stand-ins for its data.

- A block without a language that begins with a program holds commands, one on each line.
- A block after "as `NAME`:" is a file to save.
- A block of Python is run as a program of its own.
- A block of text after commands is what they print; … stands for anything.
- "add `FLAGS` to `bertkit VERB`" says how to make commands small; such flags are added.

What a reader has (a corpus, tables, official files) is a small stand-in that is made up here: a
file or a folder with the very name that the pages use for it, so that commands can be run as they
are printed.
"""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SAVED = re.compile(r"as\s+`([^`\s]+)`:\s*\Z")
REHEARSAL = re.compile(r"add\s+`(--[^`]+)`\s+to\s+`(bertkit [^`]+)`")
PROGRAMS = ("bertkit ", "make ", "python3 ", ". ", "pip ", "curl ", ".venv/bin/")
PLACEHOLDER = re.compile(r"(?<![\w\[/.-])[A-Z]{3,}(?:\.[a-z]+)?(?![\w\]])")
"""A word such as CORPUS or TRAIN.csv; [MASK] is none."""


class Step(NamedTuple):
    """One thing to do or to compare."""

    kind: str
    """The kind of step: command, file, python or output."""
    line: int
    """The line of the page, from 1."""
    text: str
    """A command line, or a block's content."""
    name: str = ""
    """The name of a file."""


def steps_of(page: str) -> list[Step]:
    """Return everything that a page asks for, in order.

    Raises:
        ValueError: a block of commands holds a line that is none.
    """
    small = [
        (" ".join(prefix.split()), " ".join(flags.split()))  # a line may end within them
        for flags, prefix in REHEARSAL.findall(page)
    ]
    steps: list[Step] = []
    for block in BLOCK.finditer(page):
        language, content = block.groups()
        first = page.count("\n", 0, block.start()) + 2
        saved = SAVED.search(page[: block.start()])
        if saved:
            steps.append(Step("file", first, content, saved[1]))
        elif language == "python":
            steps.append(Step("python", first, content))
        elif language == "text" and any(step.kind == "command" for step in steps):
            steps.append(Step("output", first, content))
        elif not language and content.startswith(PROGRAMS):
            steps += commands_of(content, first, small)
    return steps


def commands_of(content: str, first: int, small: list[tuple[str, str]]) -> Iterator[Step]:
    """Yield the commands of a block; a backslash at a line's end joins it to the next."""
    waiting, begun = "", first
    for number, line in enumerate(content.splitlines(), start=first):
        begun = begun if waiting else number
        waiting += line.strip()
        if waiting.endswith("\\"):
            waiting = waiting[:-1]
            continue
        if waiting and not waiting.startswith(PROGRAMS):
            raise ValueError(f"line {begun} stands among commands and is none: {waiting}")
        if waiting:
            added = [flags for prefix, flags in small if waiting.startswith(prefix)]
            yield Step("command", begun, " ".join([waiting, *added]))
        waiting = ""


def placeholders_of(steps: list[Step]) -> set[str]:
    """Return the words that stand for something of the reader's own."""
    commands = [step.text for step in steps if step.kind == "command"]
    return {found for text in commands for found in PLACEHOLDER.findall(bare(text))}


def bare(command: str) -> str:
    """Return a command without its texts for a model, in double quotes, and without its comment."""
    return re.sub(r'"[^"]*"|\s#.*', "", command)


def missing_output(expected: str, printed: str) -> list[str]:
    """Return the lines of a page's output that no printed line is like."""
    lines = [line.strip() for line in printed.splitlines()]
    missing = []
    for wanted in expected.splitlines():
        parts = [re.escape(part) for part in wanted.strip().split("…")]
        pattern = re.compile(".*".join(parts))
        if wanted.strip() and not any(pattern.fullmatch(line) for line in lines):
            missing.append(wanted)
    return missing


PLACES = ("file", "folder", "line", "module", "class", "method")
ACTS = ("returns", "opens", "closes", "reads", "copies", "names")
NAMES = ("Mara", "Nils", "Okafor", "Lindqvist")
TOWNS = ("Bergen", "Oslo", "Ellen", "Riga")


def sentences() -> list[tuple[str, str]]:
    """Return texts, each with one of two topics."""
    both = [(act, place) for act in ACTS for place in PLACES]
    return [
        *((f"The function {act} the {place}", "functions") for act, place in both),
        *((f"Text of a {place} that nobody {act}", "texts") for act, place in both),
    ]


def corpus(path: Path) -> None:
    """Make a folder with the reference topics that every Python carries, one document each."""
    from pydoc_data.topics import topics

    path.mkdir()
    whole = (" ".join(text.split("\n\n")) for text in topics.values())
    documents = "\n\n".join(text.replace("\n\n", "\n").strip() for text in whole)
    (path / "topics.txt").write_text(documents + "\n", encoding="utf-8")


def table(path: Path, first: int, step: int, columns: tuple[str, ...]) -> None:
    """Write every `step`-th text from `first` as CSV with a title, and a topic if asked for."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        for row in sentences()[first::step]:
            writer.writerow(row[: len(columns)])


def texts(path: Path) -> None:
    """Write a text on each line."""
    path.write_text("".join(f"{text}\n" for text, _ in sentences()), encoding="utf-8")


def words(path: Path) -> None:
    """Write words that no small vocabulary has as one piece."""
    path.write_text("hyperboreanism\nquixotryness\nzymurgically\n", encoding="utf-8")


def glue(path: Path) -> None:
    """Write MRPC's files in their official form."""
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
    """Write SQuAD 2.0's files in their official form."""
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
    """Write CoNLL-2003's files in their official form: word, part of speech, chunk, entity."""
    path.mkdir()
    for number, name in enumerate(("train", "valid", "test")):
        lines = ["-DOCSTART- -X- -X- O", ""]
        for i in range(4):
            who, where = NAMES[(i + number) % 4], TOWNS[i]
            lines += [f"{who} NNP B-NP B-PER", "left VBD B-VP O", f"{where} NNP B-NP B-LOC"]
            lines += [". . O O", ""]
        (path / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")


def blimp(path: Path) -> None:
    """Write two of BLiMP's files in their official form, one of each split."""
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
    """Make an empty folder: no data set is at hand."""
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
"""Name of a reader's own file or folder on the pages → the function that makes a small one."""
GIVEN = frozenset({"MODEL", "BERTKIT", "ORG"})
"""MODEL is a link to the demo's model, BERTKIT becomes the wheel; what needs an ORG is skipped."""
