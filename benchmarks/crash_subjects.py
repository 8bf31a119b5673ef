"""What is made to crash: pre-training, a grid and preparation, on inputs made up here."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.crash_runs import run

WORDS = [f"{a}{b}" for a in "bdfgklmnprst" for b in ("ala", "ero", "inu", "ost", "umbe", "ayeri")]

RECIPE = """
[model]
hidden_size = 16
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 32
[phases]
lengths = [16, 32]
steps = [28, 8]
batch_sizes = [8, 4]
max_predictions = [3, 5]
[training]
learning_rate = 1e-3
warmup_steps = 5
[watching]
log_every = 4
evaluate_every = 18
held_out_sequences = 16
checkpoint_every = 4
"""


@dataclass(frozen=True)
class Subject:
    """A command, and what must be the same in the end however it got there."""

    name: str
    arguments: Callable[[Path], list[str]]
    """The command line for an output folder."""
    outcome: Callable[[Path], dict[str, str]]
    """File -> digest of its content, but for times."""


def digests(folder: Path, pattern: str) -> dict[str, str]:
    """File -> SHA-256, for the files of a folder that match a pattern."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.glob(pattern))
        if path.is_file()
    }


def plain_json(path: Path, left_out: Sequence[str]) -> str:
    """A digest of a JSON file without some keys, wherever they stand."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: without(v) for k, v in value.items() if k not in left_out}
        return [without(item) for item in value] if isinstance(value, list) else value

    return hashlib.sha256(json.dumps(without(json.loads(path.read_text()))).encode()).hexdigest()


def pretrained(out: Path) -> dict[str, str]:
    """The model, the last checkpoint, and the numbers of the logged updates."""
    steps = []
    journal = out / "journal.jsonl"
    for line in journal.read_text().splitlines() if journal.is_file() else []:
        record = json.loads(line)
        if record["kind"] == "step":
            steps.append(record["step"])
    ordered = "in order" if steps == sorted(set(steps)) and steps[-1:] == [36] else str(steps)
    last = digests(out, "checkpoints/step-00000036/*")
    return {**digests(out, "model/*"), **last, "updates": ordered}


def tuned(out: Path) -> dict[str, str]:
    """The best model, its predictions, and the table of the grid."""
    times = ("seconds",)
    found = {**digests(out, "model/*"), **digests(out, "results/**/*")}
    return {**found, "results.json": plain_json(out / "results.json", times)}


def prepared(out: Path) -> dict[str, str]:
    """Every file of the store but the settings, which hold the time of the text."""
    return {**digests(out, "*.npy"), **digests(out, "manifest.json"), **digests(out, "tokenizer/*")}


def make_inputs(home: Path) -> None:
    """Text of about 3 MB in four files, a vocabulary, labelled data, a store, and a small model."""
    import torch

    rng = random.Random(0)
    (home / "text").mkdir(parents=True)
    for number in range(4):
        with (home / "text" / f"{number}.txt").open("w") as file:
            for _ in range(400):
                for _ in range(rng.randint(2, 30)):
                    line = " ".join(rng.choices(WORDS, k=rng.randint(4, 25)))
                    file.write(line.capitalize() + ".\n")
                file.write("\n")
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]
    (home / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    (home / "tiny.toml").write_text(RECIPE)
    for name, rows in (("train", 48), ("dev", 24)):
        lines = ["text,label"]
        for _ in range(rows):
            words = rng.choices(WORDS, k=8)
            lines.append(f"{' '.join(words)},{'yes' if words[0] < 'm' else 'no'}")
        (home / f"{name}.csv").write_text("\n".join(lines) + "\n")
    short = home / "short.txt"
    short.write_text("\n\n".join((home / "text" / "0.txt").read_text().split("\n\n")[:60]))
    command = ["prepare", str(short), "--tokenizer", str(home / "vocab.txt")]
    command += ["--out", str(home / "store"), "--held-out", "0.2", "--processes", "1"]
    ended = run(command, home / "store", home / "log")
    if ended.status:
        raise RuntimeError(ended.shown)
    from bertkit.model.encoder import ModelConfig
    from bertkit.model.heads import PretrainingModel
    from bertkit.model.saving import save_model
    from bertkit.tokens.tokenizer import Tokenizer

    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=len(pieces), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    tokenizer = Tokenizer.load(home / "vocab.txt")
    save_model(home / "start", PretrainingModel(config), tokenizer, {"task": "pretraining"})


def subjects(home: Path) -> list[Subject]:
    """Pre-training, a grid of four fine-tunings, and preparation."""
    store, files = str(home / "store"), [str(home / "train.csv"), str(home / "dev.csv")]
    grid = ["--learning-rate", "1e-3", "2e-3", "--seeds", "2", "--epochs", "2", "--keep", "2"]
    return [
        Subject(
            "pretrain",
            lambda out: ["pretrain", str(home / "tiny.toml"), "--store", store, "--out", str(out)],
            pretrained,
        ),
        Subject(
            "finetune",
            lambda out: [
                "finetune", "classify", "--model", str(home / "start"), "--out", str(out),
                "--train", files[0], "--dev", files[1], *grid, "--batch-size", "16",
            ],
            tuned,
        ),
        Subject(
            "prepare",
            lambda out: [
                "prepare", str(home / "text"), "--tokenizer", str(home / "vocab.txt"),
                "--out", str(out), "--shard-megabytes", "1", "--processes", "1",
            ],
            prepared,
        ),
    ]  # fmt: skip
