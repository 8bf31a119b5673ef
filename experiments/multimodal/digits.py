"""The data and the training loop that `mmbt.py` and `vilbert.py` share.

The images are the 1,797 handwritten digits of scikit-learn (8 x 8 pixels); every third one is held
out. Each is asked three questions: is the digit odd or even; is it low or high; is it in the middle
or at an edge? Each answer is true of five of the ten digits. So the question alone leaves two
answers of equal probability, the image alone leaves three, and together they decide.

A scene is two digits side by side, which are two regions with boxes; its caption names both:
"three left of five".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer

QUESTIONS = {
    "is the digit odd or even ?": ("odd", "even", {1, 3, 5, 7, 9}),
    "is the digit low or high ?": ("low", "high", {0, 1, 2, 3, 4}),
    "is the digit in the middle or at an edge ?": ("middle", "edge", {3, 4, 5, 6, 7}),
}
"""Question -> the answer for the digits of the set, the answer for the others, and the set."""
ANSWERS = sorted(answer for *pair, _ in QUESTIONS.values() for answer in pair)
NAMES = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
BOXES = torch.tensor([[0, 0, 0.5, 1], [0.5, 0, 1, 1]])
"""The boxes of a scene's regions: left, top, right, bottom, as fractions of width and height."""
LAST_PIXEL = 16
"""The largest value of a pixel in scikit-learn's digits."""
BATCH_SIZE, LEARNING_RATE, WARMUP, MAX_GRADIENT_NORM = 32, 1e-3, 0.1, 1.0


@dataclass(frozen=True)
class Examples:
    """Texts with an image each."""

    texts: list[list[int]]
    """The token ids of each text, without [CLS] and [SEP]."""
    images: Tensor
    """(examples, vectors, width)."""
    labels: Tensor
    """(examples,) indices of `ANSWERS`, or, without labels, zeros."""

    def __len__(self) -> int:
        """Return the number of examples."""
        return len(self.texts)


def load_digits(*, held_out: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return the images, (images, 8, 8) with values from -1 to 1, and their digits."""
    from sklearn import datasets

    data = datasets.load_digits()
    chosen = (np.arange(len(data.target)) % 3 == 0) == held_out
    images = data.images.astype(np.float32) / LAST_PIXEL * 2 - 1
    return images[chosen], data.target[chosen]


def as_patches(images: np.ndarray, size: int) -> np.ndarray:
    """Cut images (images, 8, 8) into square patches; return (images, patches, size * size)."""
    count, side = len(images), images.shape[1] // size
    grid = images.reshape(count, side, size, side, size).transpose(0, 1, 3, 2, 4)
    return grid.reshape(count, side * side, size * size)


def questions(
    tokenizer: Tokenizer, vectors: Callable[[np.ndarray], np.ndarray], *, held_out: bool, most: int
) -> Examples:
    """Return each of at most `most` images with each question.

    `vectors` maps images (images, 8, 8) to (images, vectors, width).
    """
    images, digits = load_digits(held_out=held_out)
    images, digits = images[:most], digits[:most]
    answers = [
        answer if digit in true else other
        for digit in digits.tolist()
        for answer, other, true in QUESTIONS.values()
    ]
    return Examples(
        tokenizer.encode_batch([*QUESTIONS] * len(images)),
        torch.from_numpy(vectors(images)).repeat_interleave(len(QUESTIONS), dim=0),
        torch.tensor([ANSWERS.index(answer) for answer in answers]),
    )


def scenes(tokenizer: Tokenizer, count: int, *, held_out: bool) -> Examples:
    """Return random scenes with captions; if held out, at most 100, one for each caption."""
    images, digits = load_digits(held_out=held_out)
    images, rng = images.reshape(len(images), -1), np.random.default_rng(0)
    pairs = rng.integers(0, 10, (count, 2))
    if held_out:
        pairs = np.stack(np.divmod(np.arange(100), 10), axis=1)[:count]
    chosen = [[images[rng.choice(np.flatnonzero(digits == d))] for d in pair] for pair in pairs]
    captions = [" left of ".join(NAMES[digit] for digit in pair) for pair in pairs]
    return Examples(
        tokenizer.encode_batch(captions),
        torch.from_numpy(np.array(chosen)),
        torch.zeros(len(captions), dtype=torch.int64),
    )


def initial_encoder(folder: str) -> tuple[Encoder, Tokenizer]:
    """Return the encoder and tokenizer of a model directory; "" for a small random encoder."""
    if folder:
        weights = read_pretrained(Path(folder))
        return weights.build(Encoder, keep_head=False).model, weights.tokenizer
    words = dict.fromkeys(word for text in (*QUESTIONS, *NAMES, "left of") for word in text.split())
    tokenizer = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *words], lowercase=True)
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=tokenizer.size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=64,
        initializer_range=0.125,  # with BERT's 0.02, so narrow a network hardly mixes tokens
    )
    return Encoder(config), tokenizer


def train(
    model: nn.Module, loss_of: Callable[[list[int]], Tensor], examples: int, epochs: int, seed: int
) -> None:
    """Train with AdamW and a linear schedule; `loss_of` gets the indices of a batch's examples."""
    torch.manual_seed(seed)
    updates = epochs * -(-examples // BATCH_SIZE)
    warmup = max(1, round(WARMUP * updates))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (updates - step) / (updates - warmup + 1))
    )
    model.train()
    for _ in range(epochs):
        for batch in torch.randperm(examples).split(BATCH_SIZE):
            optimizer.zero_grad()
            torch.autograd.backward(loss_of(batch.tolist()))
            nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
            optimizer.step()
            schedule.step()
    model.eval()


def summary(values: Sequence[float]) -> str:
    """Return the median of some shares, and their range."""
    return f"{median(values):.1%} ({min(values):.1%} to {max(values):.1%})"
