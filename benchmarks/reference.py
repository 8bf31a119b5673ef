"""The reference of the quality benchmark: transformers' Trainer, on the same data and settings.

It reads the files by code of its own and shares nothing with bertkit but the slices and, for SQuAD
2.0, the model that both begin with. A run's result is `WORK/reference/TASK-SEED.json`; runs that
exist are skipped, and several processes may work through the list together. SQuAD's tuned models
are saved and scored by `benchmarks.quality` with the same windows and decoding as bertkit's own, so
that only the training differs.
"""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.quality import SETTINGS, Setting, make_slices, start_folder
from benchmarks.record import data_folder, made, new_parser, start_model
from bertkit.errors import HeldError
from bertkit.files import exclusive_lock, write_json
from bertkit.training.device import choose_precision

Examples = list[dict[str, Any]]


class Task(NamedTuple):
    """The parts of a task that the Trainer needs besides the settings."""

    model: Any
    train: Examples
    dev: Examples
    collate: Callable[[Examples], dict[str, Any]]
    metrics: Callable[[np.ndarray, np.ndarray], dict[str, float]]


def tsv(path: Path) -> list[list[str]]:
    """Read the rows of a TSV file without quoting."""
    return [line.split("\t") for line in path.read_text(encoding="utf-8-sig").splitlines()]


def jsonl(path: Path) -> list[Any]:
    """Read the rows of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]


def glue(kind: str, folder: Path, tokenizer: Any) -> Task:
    """Build one of seven GLUE tasks; the samples of MNLI and QQP are JSON lines."""
    from sklearn.metrics import f1_score, matthews_corrcoef
    from transformers import AutoModelForSequenceClassification, DataCollatorWithPadding

    layout = {
        "cola": (0, lambda r: (r[3], None, int(r[1]))),
        "mrpc": (1, lambda r: (r[3], r[4], int(r[0]))),
        "rte": (1, lambda r: (r[1], r[2], int(r[3] == "not_entailment"))),
        "sst-2": (1, lambda r: (r[0], None, int(r[1]))),
        "sts-b": (1, lambda r: (r[-3], r[-2], float(r[-1]))),
        "mnli-10k": (0, lambda r: (r["premise"], r["hypothesis"], r["label"])),
        "qqp-10k": (0, lambda r: (r["question1"], r["question2"], r["label"])),
    }
    skip, columns = layout[kind]
    read_rows, ending = (jsonl, "jsonl") if kind.endswith("-10k") else (tsv, "tsv")
    classes = {"sts-b": 1, "mnli-10k": 3}.get(kind, 2)

    def read(split: str) -> Examples:
        rows = [columns(row) for row in read_rows(folder / f"{split}.{ending}")[skip:]]
        return [
            {**tokenizer(a, b, truncation=True, max_length=512), "labels": y} for a, b, y in rows
        ]

    def metrics(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        if kind == "sts-b":
            from scipy.stats import pearsonr, spearmanr

            predicted = outputs.reshape(-1)
            return {"pearson": float(pearsonr(predicted, labels)[0]),
                    "spearman": float(spearmanr(predicted, labels)[0])}  # fmt: skip
        predicted = outputs.argmax(-1)
        scores = {"accuracy": float((predicted == labels).mean()),
                  "matthews": float(matthews_corrcoef(labels, predicted))}  # fmt: skip
        return scores if classes > 2 else {**scores, "f1": float(f1_score(labels, predicted))}

    model = AutoModelForSequenceClassification.from_pretrained(start_model(), num_labels=classes)
    return Task(model, read("train"), read("dev"), DataCollatorWithPadding(tokenizer), metrics)


def arc(folder: Path, tokenizer: Any) -> Task:
    """Build ARC-easy as multiple choice; each input is the question and an option."""
    from transformers import AutoModelForMultipleChoice

    def read(path: Path) -> Examples:
        examples = []
        with path.open(encoding="utf-8", newline="") as file:
            for question, *options, key in csv.reader(file):
                choices = tokenizer([question] * 4, options, truncation=True, max_length=512)
                examples.append({**choices, "labels": "ABCD".index(key)})
        return examples

    def collate(examples: Examples) -> dict[str, Any]:
        flat = [
            {k: e[k][i] for k in ("input_ids", "token_type_ids", "attention_mask")}
            for e in examples
            for i in range(4)
        ]
        batch = tokenizer.pad(flat, return_tensors="pt")
        shaped = {k: v.view(len(examples), 4, -1) for k, v in batch.items()}
        return {**shaped, "labels": torch.tensor([e["labels"] for e in examples])}

    def metrics(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        return {"accuracy": float((outputs.argmax(-1) == labels).mean())}

    model = AutoModelForMultipleChoice.from_pretrained(start_model())
    return Task(model, read(folder / "train.csv"), read(folder / "dev.csv"), collate, metrics)


def conll(folder: Path, tokenizer: Any) -> Task:
    """Build CoNLL-2003 by sentence, with labels on the first piece of each word."""
    from seqeval.metrics import f1_score
    from transformers import AutoModelForTokenClassification, DataCollatorForTokenClassification

    def sentences(path: Path) -> list[tuple[list[str], list[str]]]:
        blocks = []
        for block in path.read_text(encoding="utf-8").split("\n\n"):
            rows = [line.split() for line in block.splitlines() if line.strip()]
            if rows and rows[0][0] != "-DOCSTART-":
                blocks.append(([r[0] for r in rows], [r[-1] for r in rows]))
        return blocks

    names = sorted({tag for _, tags in sentences(folder / "train.txt") for tag in tags})

    def read(path: Path) -> Examples:
        examples = []
        for words, tags in sentences(path):
            encoded = tokenizer(words, is_split_into_words=True, truncation=True, max_length=512)
            labels, before = [], None
            for word in encoded.word_ids():
                first = word is not None and word != before
                labels.append(names.index(tags[word]) if first else -100)
                before = word
            examples.append({**encoded, "labels": labels})
        return examples

    def metrics(outputs: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        predicted = outputs.argmax(-1)
        gold = [[names[y] for y in row if y != -100] for row in labels]
        tags = [[names[p] for p, y in zip(*pair, strict=True) if y != -100]
                for pair in zip(predicted, labels, strict=True)]  # fmt: skip
        return {"f1": float(f1_score(gold, tags))}

    model = AutoModelForTokenClassification.from_pretrained(start_model(), num_labels=len(names))
    collate = DataCollatorForTokenClassification(tokenizer)
    return Task(model, read(folder / "train.txt"), read(folder / "valid.txt"), collate, metrics)


def squad(path: Path, start: Path, tokenizer: Any) -> Task:
    """Build the SQuAD training windows of 384 tokens; an answer outside of a window is [CLS]."""
    from transformers import AutoModelForQuestionAnswering, DataCollatorWithPadding

    examples: Examples = []
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                answer = qa["answers"][0] if qa["answers"] else {"text": "", "answer_start": 0}
                begin = answer["answer_start"]
                examples += squad_windows(
                    tokenizer, qa["question"], paragraph["context"],
                    (begin, begin + len(answer["text"])),
                )  # fmt: skip
    model = AutoModelForQuestionAnswering.from_pretrained(start)
    return Task(model, examples, [], DataCollatorWithPadding(tokenizer), lambda o, y: {})


def squad_windows(tokenizer: Any, question: str, context: str, span: tuple[int, int]) -> Examples:
    """Return the windows of one question with their start and end positions."""
    room = 384 - 3 - len(tokenizer.tokenize(question.strip()))
    encoded = tokenizer(
        question.strip(), context, truncation="only_second", max_length=384,
        stride=max(0, room - 128),  # the overlap here, but the step in bertkit and the paper's code
        return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    windows = []
    for i, offsets in enumerate(encoded["offset_mapping"]):
        inside = [j for j, part in enumerate(encoded.sequence_ids(i)) if part == 1]
        start = end = 0
        covers = offsets[inside[0]][0] <= span[0] and span[1] <= offsets[inside[-1]][1]
        if span[1] > span[0] and covers:
            start = max(j for j in inside if offsets[j][0] <= span[0])
            end = min(j for j in inside if offsets[j][1] >= span[1])
        keys = ("input_ids", "token_type_ids", "attention_mask")
        windows.append(
            {**{k: encoded[k][i] for k in keys}, "start_positions": start, "end_positions": end}
        )
    return windows


def build(task: str, data: Path, slices: Path, start: Path, tokenizer: Any) -> Task:
    """Build a task by its name."""
    folders = {"cola": data / "glue/CoLA", "mrpc": data / "glue/MRPC", "rte": data / "glue/RTE",
               "sts-b": data / "glue/STS-B", "sst-2": slices / "SST-2",
               "mnli-10k": data / "glue/MNLI-10k", "qqp-10k": data / "glue/QQP-10k"}  # fmt: skip
    if task in folders:
        return glue(task, folders[task], tokenizer)
    if task == "arc-easy":
        return arc(slices / "arc-easy", tokenizer)
    if task == "conll-2003":
        return conll(data / "conll2003", tokenizer)
    folder = slices / {"squad-1.1": "squad", "squad-2.0": "squad2"}[task]
    return squad(folder / "train.json", start, tokenizer)


def run(
    task: str, setting: Setting, seed: int, data: Path, work: Path, out: Path, precision: str
) -> None:
    """Train one run, evaluate it (or save its model, for SQuAD), and write the result."""
    from transformers import AutoTokenizer, Trainer, TrainingArguments, set_seed
    from transformers.utils import logging

    logging.set_verbosity_error()
    tokenizer = AutoTokenizer.from_pretrained(start_model(), use_fast=True)
    tokenizer.model_max_length = 512
    start = start_folder(setting, data, work, precision)
    set_seed(seed)
    parts = build(task, data, work / "slices", start, tokenizer)
    arguments = TrainingArguments(
        output_dir=str(out.with_suffix("")), seed=seed, use_cpu=True, report_to=[],
        bf16=precision == "bf16",
        learning_rate=setting.learning_rate, per_device_train_batch_size=setting.batch,
        num_train_epochs=setting.epochs, weight_decay=0.01, warmup_steps=0.1, adam_epsilon=1e-6,
        max_grad_norm=1.0, lr_scheduler_type="linear", per_device_eval_batch_size=32,
        save_strategy="no", disable_tqdm=True, logging_strategy="no",
        remove_unused_columns=False,
    )  # fmt: skip
    trainer = Trainer(
        model=parts.model, args=arguments, train_dataset=parts.train, data_collator=parts.collate
    )
    started = time.perf_counter()
    trainer.train()
    seconds = time.perf_counter() - started
    scores: dict[str, float] = {}
    if parts.dev:
        output = trainer.predict(parts.dev)
        scores = parts.metrics(output.predictions, output.label_ids)
    else:
        parts.model.save_pretrained(out.with_suffix(""))
        tokenizer.save_pretrained(out.with_suffix(""))
    result = {"task": task, "seed": seed, "scores": scores, "seconds": seconds}
    write_json(out, {**result, "made": made(precision)})
    print(task, seed, scores, f"{seconds:.0f} s", flush=True)


def main() -> None:
    """Work through all tasks and seeds."""
    parser = new_parser(__doc__, work="runs/quality")
    parser.add_argument("--tasks", nargs="+", default=[*SETTINGS])
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--precision", default="auto", help="fp32, bf16 or auto")
    arguments = parser.parse_args()
    precision = choose_precision(arguments.precision, torch.device("cpu"))
    data = data_folder(arguments.data)
    make_slices(data, arguments.work / "slices")
    folder = arguments.work / "reference"
    folder.mkdir(parents=True, exist_ok=True)
    for task in arguments.tasks:
        for seed in arguments.seeds:
            out = folder / f"{task}-{seed}.json"
            if out.is_file():
                continue
            try:
                with exclusive_lock(out.with_suffix("")):
                    run(task, SETTINGS[task], seed, data, arguments.work, out, precision)
            except HeldError:
                print(task, seed, "is made by another process", flush=True)


if __name__ == "__main__":
    main()
