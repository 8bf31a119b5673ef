"""The commands that are made to crash, on inputs made up here, and what they must leave."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.tools.crashes.runs import run

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
[logging]
log_every = 4
evaluate_every = 18
held_out_sequences = 16
checkpoint_every = 4
"""
LAST = "out/checkpoints/step-00000036/"
"""The last checkpoint of pre-training with this recipe."""

TIMES = {"seconds", "date", "created", "environment"}
"""The keys of JSON files whose values no two runs share."""


@dataclass(frozen=True)
class Subject:
    """A command that writes to a place of its own, and what must be there in the end."""

    name: str
    command: tuple[str, ...]
    """The command line without --out."""
    out: str = "out"
    """The name of the file or folder that it writes."""
    kept: Callable[[str], bool] = lambda name: True
    """Whether the bytes of a file must be the same, by its name below the place."""

    def arguments(self, place: Path) -> list[str]:
        """Return the command line."""
        return [*self.command, "--out", str(place / self.out)]

    def outcome(self, place: Path) -> dict[str, str]:
        """Return file -> digest of its content, or only that it is there if its bytes may differ.

        Checkpoints before the last are called by their place: a stop saves one at its own update.
        """
        found = {}
        older = sorted((place / "out" / "checkpoints").glob("step-*"), reverse=True)[1:]
        places = {str(path.relative_to(place)): f"older/{i}" for i, path in enumerate(older)}
        for path in sorted(path for path in place.rglob("*") if path.is_file()):
            folder = str(path.parent.relative_to(place))
            name = str(Path(places.get(folder, folder), path.name))
            found[name] = digest(path) if self.kept(name) else "there"
            if path.name == "journal.jsonl":
                found["updates"] = updates(path)
        return found


def digest(path: Path) -> str:
    """Return the SHA-256 of a file; that of JSON is without `TIMES`."""
    content = path.read_bytes()
    if path.suffix == ".json":
        content = json.dumps(without_times(json.loads(content))).encode()
    return hashlib.sha256(content).hexdigest()


def without_times(value: Any) -> Any:
    """Return JSON values without the keys of `TIMES`, wherever they stand."""
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if k not in TIMES}
    return [without_times(item) for item in value] if isinstance(value, list) else value


def updates(journal: Path) -> str:
    """Return "in order" if a finished journal has each logged update once, else the updates."""
    records = map(json.loads, journal.read_text().splitlines())
    steps = [record["step"] for record in records if record["kind"] == "step"]
    return "in order" if steps == sorted(set(steps)) and steps[-1:] == [36] else str(steps)


def subjects(home: Path) -> list[Subject]:
    """Return every command that writes; the first three are those that take long elsewhere."""
    short, start, tuned = str(home / "short.txt"), str(home / "start"), str(home / "tuned")
    vocabulary, rows = str(home / "vocab.txt"), str(home / "dev.csv")
    pretrain = ("pretrain", str(home / "tiny.toml"), "--store", str(home / "store"))
    finetune = ("finetune", "classification", "--model", start, "--train", str(home / "train.csv"),
                "--dev", rows, "--learning-rate", "1e-3", "2e-3", "--seeds", "2", "--epochs", "2",
                "--batch-size", "16", "--eval-every", "3")  # fmt: skip
    prepare = ("prepare", str(home / "text"), "--tokenizer", vocabulary, "--shard-megabytes", "1")
    alone = ("--processes", "1")
    return [
        Subject("pretrain", pretrain, kept=lambda n: n.startswith(("out/model/", LAST))),
        Subject("finetune", finetune, kept=lambda n: n.startswith(("out/model/", "out/results"))),
        Subject("prepare", (*prepare, *alone), kept=lambda n: n != "out/settings.json"),
        Subject("learn", ("learn", short, "--size", "120", *alone)),
        Subject("clean", ("clean", short, "--near", "--processes", "2"), "clean.jsonl"),
        Subject("predict", ("predict", tuned, rows), "answers.jsonl"),
        Subject("embed", ("predict", "embed", start, short), "vectors.npy"),
        Subject("features", ("predict", "features", start, short), "states.parquet"),
        Subject("export", ("export", start, "--to", "onnx")),
    ]


def make_inputs(home: Path) -> None:
    """Make about 3 MB of text in four files, a vocabulary, labelled data, a store, two models."""
    rng = random.Random(0)
    (home / "text").mkdir(parents=True)
    for number in range(4):
        documents = ["\n".join(sentences(rng, rng.randint(2, 30))) for _ in range(400)]
        (home / "text" / f"{number}.txt").write_text("\n\n".join(documents))
        if number == 0:
            (home / "short.txt").write_text("\n\n".join(documents[:60]))
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *WORDS]
    (home / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
    (home / "tiny.toml").write_text(RECIPE)
    for name, rows in (("train", 48), ("dev", 24)):
        drawn = [rng.choices(WORDS, k=8) for _ in range(rows)]
        lines = [f"{' '.join(words)},{'yes' if words[0] < 'm' else 'no'}" for words in drawn]
        (home / f"{name}.csv").write_text("\n".join(["text,label", *lines]) + "\n")
    make_model(home, len(pieces))
    store = ("prepare", str(home / "short.txt"), "--tokenizer", str(home / "vocab.txt"),
             "--held-out", "0.2", "--processes", "1", "--out", str(home / "store"))  # fmt: skip
    tuned = ("finetune", "classification", "--model", str(home / "start"), "--train",
             str(home / "train.csv"), "--epochs", "1", "--out", str(home / "tuning"))  # fmt: skip
    for command in (store, tuned):
        ended = run(command, home, home / "log")
        if ended.status:
            raise RuntimeError(ended.shown)
    (home / "tuning" / "model").rename(home / "tuned")


def sentences(rng: random.Random, count: int) -> Iterator[str]:
    """Yield lines of random words."""
    for _ in range(count):
        yield f"{' '.join(rng.choices(WORDS, k=rng.randint(4, 25))).capitalize()}."


def make_model(home: Path, vocabulary: int) -> None:
    """Write a small pre-trained model with random weights."""
    import torch

    from bertkit.checkpoints.save import save_model
    from bertkit.model.encoder import ModelConfig
    from bertkit.model.heads import PretrainingModel
    from bertkit.tokenizer.wordpiece import Tokenizer

    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=vocabulary, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=32,
    )  # fmt: skip
    tokenizer = Tokenizer.load(home / "vocab.txt")
    save_model(home / "start", PretrainingModel(config), tokenizer, {"task": "pretraining"})
