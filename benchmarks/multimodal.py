"""Questions about pictures of digits, and captions of scenes of digits.

    python -m benchmarks.multimodal [--quick] [--add]

The pictures are the 1,797 handwritten digits of scikit-learn (8 x 8 pixels); every third one is
held out. In `results/multimodal.json` each is asked three questions: is the digit odd or even; is
it low or high; is it in the middle or at an edge? Each answer is true of five of the ten digits. So
the question alone leaves two answers of equal probability, the picture alone leaves three, and
together they decide: this gives the best possible accuracy of each contestant. The same small
network, from random weights, reads the question, the picture, or both: by MMBT (Kiela et al. 2019),
once with the eight rows of pixels as features, once with the picture cut into patches of 2 x 2
pixels, and by ViLBERT (Lu et al. 2019).

In `results/retrieval.json` a scene is two digits side by side, which are two regions with boxes,
and its caption names both: "three left of five". Of 100 held-out scenes, one for each caption,
ViLBERT has to find that of a caption. It is tuned for retrieval at once, or after pre-training on
the same captions, in the same number of updates.

Settings are the same for all, and the scores are those after the last update, over three seeds.
`--add` measures only what the results files lack.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bertkit.datasets.columns import TextColumns
from bertkit.finetuning.grid import all_results
from bertkit.predict.retrieval import evaluate_retrieval

from benchmarks.record import ROOT, circumstances, commit, summary, write_result
from bertkit.checkpoints.save import save_model
from bertkit.console import Console
from bertkit.finetuning.finetune import finetune
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
"""The deviation of initial weights; with BERT's 0.02, this narrow network hardly mixes tokens."""
PATCHES = TextColumns(image_column="image", image_size=8, patch_size=2)
STREAMS = replace(PATCHES, image_network="vilbert", co_layers=(0, 1))
CAPTIONED = TextColumns(
    image_column="image", image_boxes=True, image_network="vilbert", co_layers=(0, 1)
)
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
SCENES = 2000
BOXES = np.array([[0, 0, 0.5, 1], [0.5, 0, 1, 1]], np.float32)
LAST_PIXEL = 16
"""The largest value of a pixel in scikit-learn's digits."""


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return the pictures, (pictures, 8, 8) from 0 to 1, and their digits."""
    from sklearn.datasets import load_digits

    found = load_digits()
    return found.images.astype(np.float32) / LAST_PIXEL, found.target


def rows(pictures: np.ndarray, targets: np.ndarray, *, text: bool, image: str) -> list[Any]:
    """Return a row for every picture and question, with what a contestant may see of them."""
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
    "question only": {"text": True, "image": "", "network": "mmbt"},
    "picture only, patches": {"text": False, "image": "pixels", "network": "mmbt"},
    "MMBT, rows of pixels as features": {"text": True, "image": "features", "network": "mmbt"},
    "MMBT, patches": {"text": True, "image": "pixels", "network": "mmbt"},
    "ViLBERT, patches": {"text": True, "image": "pixels", "network": "vilbert"},
}


RETRIEVAL: dict[str, dict[str, int]] = {
    "retrieval tuning": {"alignment": 12},
    "pre-training, then retrieval tuning": {"pretraining": 6, "alignment": 6},
}
"""Contestant -> image task -> epochs."""
MOST_UPDATES = 1 << 20


def start_model(folder: Path) -> Path:
    """Make a model directory with random weights, whose vocabulary is the words of all texts."""
    texts = (*QUESTIONS, *NAMES, "left of")
    words = dict.fromkeys(word for text in texts for word in text.split())
    tokenizer = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *words], lowercase=True)
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=tokenizer.size, initializer_range=DEVIATION, **SIZES)
    save_model(folder, Encoder(config), tokenizer, {"task": "encoder"})
    return folder


def contest(start: Path, out: Path, seen: dict[str, Any], grid: Grid, most: int) -> dict[str, Any]:
    """Fine-tune a contestant with all seeds; return its accuracy on the held-out pictures."""
    columns = PATCHES if seen["network"] == "mmbt" else STREAMS
    seen = {name: seen[name] for name in ("text", "image")}
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


def scenes(count: int, *, held: bool) -> list[dict[str, Any]]:
    """Return captioned scenes of two random digits; one of each caption if they are held out."""
    pictures, targets = digits()
    kept = (np.arange(len(targets)) % 3 == 0) == held
    pictures, targets = pictures[kept].reshape(-1, 64), targets[kept]
    rng = np.random.default_rng(0)
    both = np.stack(np.divmod(np.arange(100), 10), 1) if held else rng.integers(0, 10, (count, 2))
    found = []
    for pair in both[:count]:
        regions = [pictures[rng.choice(np.flatnonzero(targets == digit))] for digit in pair]
        image = np.concatenate([np.stack(regions), BOXES], axis=1)
        found.append({"text": " left of ".join(NAMES[digit] for digit in pair), "image": image})
    return found


def tuned(start: Path, out: Path, task: str, epochs: int, seeds: int, most: int) -> list[Path]:
    """Tune on the captions with all seeds, and return the folders of the runs."""
    grid = Grid(batch_size=(32,), learning_rate=(1e-3,), epochs=(epochs,), seeds=seeds)
    training = TrainingSettings(precision="fp32", eval_every=MOST_UPDATES)
    with Console() as console:
        finetune(
            *("classification", start, out),
            train=scenes(min(SCENES, most), held=False),
            dev=scenes(most, held=True),
            columns=replace(CAPTIONED, image_task=task),
            settings=FinetuneSettings(grid=grid, training=training, keep=seeds),
            console=console,
        )
    return sorted(path.parent for path in out.glob("runs/*/model"))


def retrieval(start: Path, out: Path, epochs: dict[str, int], seeds: int, most: int) -> Any:
    """Return the recall of held-out scenes after retrieval tuning, with or without pre-training."""
    first, last = epochs.get("pretraining", 0), epochs["alignment"]
    if first:
        starts = tuned(start, out / "pretraining", "pretraining", first, seeds, most)
        each = [tuned(one, out / one.name, "alignment", last, 1, most) for one in starts]
        ends = [model for models in each for model in models]
    else:
        ends = tuned(start, out / "alignment", "alignment", last, seeds, most)
    dev = scenes(most, held=True)
    found = [evaluate_retrieval(one / "model", dev, precision="fp32") for one in ends]
    return {
        "image_recall_at_1": summary([one.image_recall[1] for one in found]),
        "image_recall_at_5": summary([one.image_recall[5] for one in found]),
        "caption_recall_at_1": summary([one.text_recall[1] for one in found]),
        "chance_recall_at_1": round(found[0].chance[1], 3),
        "seeds": len(found),
        "train_rows": min(SCENES, most),
        "held_out_rows": len(dev),
    }


def measure(
    name: str, contestants: dict[str, Any], run: Callable[[str], Any], details: Any, *, add: bool
) -> None:
    """Run contestants, and write a results file after each; the parts say which code made which.

    Args:
        name: the file's name without its ending.
        contestants: the rows by name.
        run: returns the row of a name.
        details: more for the file, with the commit as it was before a file was written.
        add: whether to keep the rows that the file has.
    """
    path = ROOT / "results" / f"{name}.json"
    old = json.loads(path.read_text()) if add and path.is_file() else {"rows": {}}
    rows, parts = dict(old["rows"]), list(old.get("parts", []))
    if rows and not parts:
        parts = [{"cells": [*rows], "date": old["date"], "commit": old["commit"]}]
    for contestant in contestants:
        if contestant not in rows:
            rows[contestant] = run(contestant)
            if not parts or parts[-1]["commit"] != details["commit"]:
                own = {"date": circumstances()["date"], "commit": details["commit"]}
                parts.append({"cells": [], **own})
            parts[-1]["cells"].append(contestant)
            more = {"parts": parts} if len(parts) > 1 else {}
            print(write_result(name, rows, {**details, **more}))


def main() -> None:
    """Run every contestant and write results/multimodal.json and results/retrieval.json."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few pictures, written nowhere")
    parser.add_argument("--add", action="store_true", help="measure only what the files lack")
    given = parser.parse_args()
    quick, most = given.quick, 20 if given.quick else 10_000
    grid = Grid(batch_size=(32,), learning_rate=(1e-3,), epochs=(1 if quick else 12,), seeds=3)
    settings = "random weights, 2 layers of 64; batch 32, learning rate 1e-3"
    details = {"start": settings, "commit": commit()}
    with tempfile.TemporaryDirectory() as folder:
        start, out = start_model(Path(folder) / "start"), Path(folder)

        def answers(name: str) -> Any:
            return contest(start, out / name, CONTESTANTS[name], grid, most)

        def finds(name: str) -> Any:
            epochs = dict.fromkeys(RETRIEVAL[name], 1) if quick else RETRIEVAL[name]
            return retrieval(start, out / name, epochs, grid.seeds, most)

        if quick:
            print(*map(answers, CONTESTANTS), *map(finds, RETRIEVAL), sep="\n")
            return
        measure("multimodal", CONTESTANTS, answers, {**details, "epochs": 12}, add=given.add)
        measure("retrieval", RETRIEVAL, finds, {**details, "epochs": RETRIEVAL}, add=given.add)


if __name__ == "__main__":
    main()
