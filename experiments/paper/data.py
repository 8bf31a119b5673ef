"""Official data sets, reduced to the number of rows of a scale, in their official formats.

The data folder holds `glue`, `squad`, `swag` and `conll2003`. If GLUE lacks MNLI or QQP, the
samples `MNLI-10k` and `QQP-10k` of BabyLM's evaluation are read (JSON lines); if it lacks QNLI,
pairs of questions and sentences are made from SQuAD, as GLUE made QNLI from it (Wang et al. 2018,
section 3.2).
"""

from __future__ import annotations

import csv
import json
import random
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GLUE = {
    "cola": "CoLA",
    "sst-2": "SST-2",
    "mrpc": "MRPC",
    "sts-b": "STS-B",
    "qqp": "QQP",
    "mnli": "MNLI",
    "qnli": "QNLI",
    "rte": "RTE",
}
"""Task -> its folder."""
SAMPLES = {
    "mnli": ("premise", "hypothesis", "sentence1\tsentence2\tgold_label"),
    "qqp": ("question1", "question2", "question1\tquestion2\tis_duplicate"),
}
"""Task -> the columns of the texts in BabyLM's sample, and the header of the official file."""
MNLI_LABELS = ("entailment", "neutral", "contradiction")


class MissingDataError(Exception):
    """The data folder lacks the files of a task."""


def task_folder(task: str, data: Path, out: Path, train: int, dev: int) -> Path:
    """Return the folder to read a task from; a reduced set is written to `out` once.

    Args:
        task: the name of an official set.
        data: the folder of all data.
        out: where reduced sets are kept.
        train: the number of training rows; 0 for all.
        dev: the number of rows of each dev split; 0 for all.

    Raises:
        MissingDataError: files are missing; the message names them.
    """
    folder = out / task
    if not folder.exists():
        draft = folder.with_name(f"{task}.partial")
        shutil.rmtree(draft, ignore_errors=True)
        limits = {"train": train, "dev": dev}
        if task in GLUE:
            write_glue(task, data, draft / GLUE[task], limits)
        elif task.startswith("squad"):
            write_squad(task.removeprefix("squad-"), data / "squad", draft, limits)
        elif task == "swag":
            write_swag(data / "swag", draft, limits)
        else:
            write_conll(data / "conll2003", draft, limits)
        draft.rename(folder)
    return folder


def stand_in(task: str, data: Path) -> str:
    """Return what is read if the data folder lacks a task's official files, or ""."""
    if task not in GLUE or (data / "glue" / GLUE[task]).exists():
        return ""
    return {"qnli": "pairs made from SQuAD", "mnli": "MNLI-10k", "qqp": "QQP-10k"}.get(task, "")


def existing(path: Path) -> Path:
    """Return a path that exists; raise a `MissingDataError` otherwise."""
    if not path.exists():
        raise MissingDataError(f"{path} is missing")
    return path


def drawn(rows: Iterable[Any], limit: int) -> list[Any]:
    """Return `limit` random rows in their order, or all of them if the limit is 0 or larger."""
    every = list(rows)
    if not 0 < limit < len(every):
        return every
    return [every[i] for i in sorted(random.Random(0).sample(range(len(every)), limit))]


def write(path: Path, text: str) -> None:
    """Write a file, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8", newline="")


def write_glue(task: str, data: Path, out: Path, limits: dict[str, int]) -> None:
    """Write the labelled files of a GLUE task."""
    source = data / "glue" / GLUE[task]
    if not source.exists() and task == "qnli":
        write_question_sentences(data / "squad", out, limits)
        return
    if not source.exists() and task in SAMPLES:
        write_sample(task, existing(source.with_name(f"{GLUE[task]}-10k")), out, limits)
        return
    devs = ("dev_matched", "dev_mismatched") if task == "mnli" else ("dev",)
    for name in ("train", *devs):
        text = existing(source / f"{name}.tsv").read_text(encoding="utf-8-sig")
        lines = text.removesuffix("\n").split("\n")
        head = [] if task == "cola" else [lines.pop(0)]
        rows = [*head, *drawn(lines, limits[name.partition("_")[0]])]
        write(out / f"{name}.tsv", "\n".join(rows) + "\n")


def write_sample(task: str, source: Path, out: Path, limits: dict[str, int]) -> None:
    """Write a sample of BabyLM's evaluation as official files; MNLI's dev sets are both matched."""
    first, second, header = SAMPLES[task]
    for split in ("train", "dev"):
        text = existing(source / f"{split}.jsonl").read_text(encoding="utf-8")
        lines = [header]
        for line in drawn(text.splitlines(), limits[split]):
            row = json.loads(line)
            label = MNLI_LABELS[row["label"]] if task == "mnli" else row["label"]
            fields = (row[first], row[second], label)
            lines.append("\t".join(re.sub(r"\s", " ", str(field)) for field in fields))
        names = ("dev_matched", "dev_mismatched") if (task, split) == ("mnli", "dev") else (split,)
        for name in names:
            write(out / f"{name}.tsv", "\n".join(lines) + "\n")


def write_squad(version: str, source: Path, out: Path, limits: dict[str, int]) -> None:
    """Write random questions of SQuAD with their paragraphs."""
    for split, limit in limits.items():
        name = f"{split}-v{version}.json"
        questions_of: dict[tuple[str, str], list[Any]] = {}
        for title, context, question in drawn(questions(source / name), limit):
            questions_of.setdefault((title, context), []).append(question)
        articles = [
            {"title": title, "paragraphs": [{"context": context, "qas": asked}]}
            for (title, context), asked in questions_of.items()
        ]
        write(out / name, json.dumps({"version": version, "data": articles}))


def questions(path: Path) -> list[tuple[str, str, Any]]:
    """Return the title, context and question object of every question of a SQuAD file."""
    return [
        (article.get("title", ""), paragraph["context"], question)
        for article in json.loads(existing(path).read_text(encoding="utf-8"))["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
    ]


def write_question_sentences(source: Path, out: Path, limits: dict[str, int]) -> None:
    """Write QNLI's stand-in: does a sentence of the paragraph contain the answer to a question?

    Half of the questions get a sentence that does, the others one that does not; questions whose
    paragraph lacks either are left out, so twice as many are drawn and the rest is cut.
    """
    for split, limit in limits.items():
        coin, rows = random.Random(1), []
        for _, context, question in drawn(questions(source / f"{split}-v1.1.json"), 2 * limit):
            texts = [answer["text"] for answer in question["answers"]]
            sentences = re.split(r"(?<=[.!?])\s+", context)
            holding = [s for s in sentences if any(text in s for text in texts)]
            others = [s for s in sentences if s not in holding]
            if not (holding and others):
                continue
            holds = coin.random() < 0.5
            sentence = coin.choice(holding if holds else others)
            label = "entailment" if holds else "not_entailment"
            fields = (str(len(rows)), question["question"], sentence, label)
            rows.append("\t".join(re.sub(r"\s", " ", text) for text in fields))
        rows = rows[:limit] if limit else rows
        write(out / f"{split}.tsv", "\n".join(["index\tquestion\tsentence\tlabel", *rows]) + "\n")


def write_swag(source: Path, out: Path, limits: dict[str, int]) -> None:
    """Write random rows of SWAG."""
    for split, file in (("train", "train.csv"), ("dev", "val.csv")):
        with existing(source / file).open(encoding="utf-8", newline="") as lines:
            header, *rows = csv.reader(lines)
        out.mkdir(parents=True, exist_ok=True)
        with (out / file).open("w", encoding="utf-8", newline="") as target:
            csv.writer(target).writerows([header, *drawn(rows, limits[split])])


def write_conll(source: Path, out: Path, limits: dict[str, int]) -> None:
    """Write random documents of CoNLL-2003 with at least the wanted number of sentences."""
    for split, file in (("train", "train.txt"), ("dev", "valid.txt")):
        text = existing(source / file).read_text(encoding="utf-8")
        documents = [part for part in re.split(r"(?m)^(?=-DOCSTART-)", text) if part.strip()]
        random.Random(0).shuffle(documents)
        chosen, sentences = [], 0
        for document in documents:
            if limits[split] and sentences >= limits[split]:
                break
            chosen.append(document.rstrip("\n") + "\n\n")
            sentences += len(re.findall(r"\n\n+(?=\S)", document.strip()))
        write(out / file, "".join(chosen))
