"""Questions about pictures of digits, which neither the picture nor the question answers alone.

    python -m benchmarks.multimodal [--quick]

The pictures are the 1,797 handwritten digits of scikit-learn (8 x 8 pixels). Each is asked three
questions: is the digit odd or even; is it low or high; is it in the middle or at an edge? Each
answer is true of five of the ten digits. So the question alone leaves two answers of equal
probability, the picture alone leaves three, and together they decide: this gives the best possible
accuracy of each contestant.

The same small network, from random weights, reads the question, the picture, or both (MMBT, Kiela
et al. 2019): once with the eight rows of pixels as features, once with the picture cut into patches
of 2 x 2 pixels. Every third picture is held out; settings are the same for all, and the scores are
those after the last update, over three seeds.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.record import summary, write_result
from bertkit.checkpoints.save import save_model
from bertkit.console import Console
from bertkit.datasets.columns import TextColumns
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.grid import all_results
from bertkit.finetuning.settings import FinetuneSettings, Grid, TrainingSettings
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer

QUESTIONS: dict[str, tuple[str, str, set[int]]] = {
    "is the digit odd or even ?": ("odd", "even", {1, 3, 5, 7, 9}),
    "is the digit low or high ?": ("low", "high", {0, 1, 2, 3, 4}),
    "is the digit in the middle or at an edge ?": ("middle", "edge", {3, 4, 5, 6, 7}),
}
"""Question -> the answer for the digits of the set, the answer for the others, and the set."""
NO_QUESTION = "?"
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"intermediate_size": 256, "max_position_embeddings": 64}
DEVIATION = 0.125
"""Of initial weights: with BERT's 0.02, a network of this width hardly mixes its tokens."""
PATCHES = TextColumns(image_column="image", image_size=8, patch_size=2)
STREAMS = replace(PATCHES, image_network="vilbert")
LAST_PIXEL = 16
"""The largest value of a pixel in scikit-learn's digits."""


def digits() -> tuple[np.ndarray, np.ndarray]:
    """The pictures, (pictures, 8, 8) from 0 to 1, and their digits."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images.astype(np.float32) / LAST_PIXEL, found.target


def rows(pictures: np.ndarray, targets: np.ndarray, *, text: bool, image: str) -> list[Any]:
    """Every picture with every question, as far as a contestant may see them."""
    forms = {
        "": lambda picture: None,
        "features": lambda picture: picture,
        "pixels": lambda picture: (picture * 255).astype(np.uint8),
    }
    return [
        {
            "text": question if text else NO_QUESTION,
            "image": forms[image](picture),
            "label": answer if int(digit) in true else other,
        }
        for picture, digit in zip(pictures, targets, strict=True)
        for question, (answer, other, true) in QUESTIONS.items()
    ]


CONTESTANTS: dict[str, dict[str, Any]] = {
    "question only": {"text": True, "image": ""},
    "picture only, patches": {"text": False, "image": "pixels"},
    "MMBT, rows of pixels as features": {"text": True, "image": "features"},
    "MMBT, patches": {"text": True, "image": "pixels"},
    "ViLBERT, patches": {"text": True, "image": "pixels", "columns": STREAMS},
}


def start_model(folder: Path) -> Path:
    """A model directory with random weights and the questions' words as its vocabulary."""
    words = dict.fromkeys(word for question in QUESTIONS for word in question.split())
    tokenizer = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *words], lowercase=True)
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=tokenizer.size, initializer_range=DEVIATION, **SIZES)
    save_model(folder, Encoder(config), tokenizer, {"task": "encoder"})
    return folder


def contest(start: Path, out: Path, seen: dict[str, Any], grid: Grid, most: int) -> dict[str, Any]:
    """The accuracy of one contestant on the held-out pictures, over the seeds."""
    seen, columns = {**seen}, PATCHES
    columns = seen.pop("columns", columns)
    pictures, targets = digits()
    held = np.arange(len(targets)) % 3 == 0
    train = rows(pictures[~held][:most], targets[~held][:most], **seen)
    dev = rows(pictures[held][:most], targets[held][:most], **seen)
    with Console() as console:
        finetune(
            *("classification", start, out),
            train=train,
            dev=dev,
            columns=columns if seen["image"] else None,
            settings=FinetuneSettings(grid=grid, training=TrainingSettings(precision="fp32")),
            console=console,
        )
    runs = all_results(out)
    answers = 1 if seen["text"] and seen["image"] else 2 if seen["text"] else len(QUESTIONS)
    return {
        "best_possible_accuracy": round(1 / answers, 3),
        "accuracy": summary([run.scores["dev"]["accuracy"] for run in runs]),
        "seconds": summary([run.seconds for run in runs]),
        "seeds": len(runs),
        "train_rows": len(train),
        "held_out_rows": len(dev),
    }


def main() -> None:
    """Run every contestant and write results/multimodal.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few pictures, written nowhere")
    quick = parser.parse_args().quick
    grid = Grid(batch_size=(32,), learning_rate=(1e-3,), epochs=(1 if quick else 12,), seeds=3)
    most = 20 if quick else 10_000
    with tempfile.TemporaryDirectory() as folder:
        start = start_model(Path(folder) / "start")
        found = {
            name: contest(start, Path(folder) / str(number), seen, grid, most)
            for number, (name, seen) in enumerate(CONTESTANTS.items())
        }
    details = {"start": "random weights, 2 layers of 64; batch 32, learning rate 1e-3, 12 epochs"}
    print(found if quick else write_result("multimodal", found, details))


if __name__ == "__main__":
    main()
