"""The draws and the batches that every version must repeat, or a stopped run could not resume.

NumPy promises the bits of Philox, but not what `Generator` makes of them (NEP 19). Where one of
these numbers changes, the method has to be written out here, or the old NumPy be kept.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertkit.corpus.prepare import prepare
from bertkit.pretraining_data.examples import MaskingOptions, PairOptions
from bertkit.pretraining_data.loader import BatchBuilder, ExampleSampler, stream_steps
from bertkit.processes import MASKS, keyed_rng
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import WORDS

METHODS: dict[str, tuple[Callable[[np.random.Generator], Any], list[float]]] = {
    "random": (
        lambda rng: rng.random(4),
        [0.7451323485933565, 0.9193247199467524, 0.387789048888866, 0.7591129348128871],
    ),
    "integers": (lambda rng: rng.integers(0, 30_522, 5), [12213, 22742, 17570, 28059, 22117]),
    "integers with the end": (
        lambda rng: rng.integers(2, 126, 5, endpoint=True),
        [52, 95, 73, 116, 92],
    ),
    "permutation of a number": (lambda rng: rng.permutation(9), [3, 5, 0, 8, 6, 2, 7, 4, 1]),
    "permutation of an array": (
        lambda rng: rng.permutation(np.arange(100, 900, 100)),
        [400, 800, 100, 600, 300, 700, 500, 200],
    ),
    "binomial": (lambda rng: rng.binomial([1, 7, 40, 300, 5000], 0.5), [1, 5, 19, 146, 2525]),
}


@pytest.mark.parametrize("method", METHODS)
def test_draws_never_change(method: str) -> None:
    draw, expected = METHODS[method]
    rng = keyed_rng(7, MASKS, epoch=1, window=2, row=3)
    assert draw(rng).tolist() == expected


def test_batches_never_change(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """Of more than an epoch: shard order, pairs, cuts, the order of examples, and masks."""
    for part in range(2):
        documents = (
            "\n".join(sentence(part, document, line) for line in range(1 + document % 7))
            for document in range(40)
        )
        (tmp_path / f"{part}.txt").write_text("\n\n".join(documents))
    options: Any = {"held_out": 0.0, "shard_megabytes": 1}
    store = prepare([str(tmp_path / "*.txt")], tokenizer, tmp_path / "store", **options)
    table = ExampleSampler(store, PairOptions(max_length=32), seed=5)
    builder = BatchBuilder(store, MaskingOptions(), 5, seed=5)
    digest = hashlib.sha256()
    for step in stream_steps(table, builder, batch_size=16, steps=12):
        for batch in step.micro_batches:
            packed = batch.packed
            tensors = [packed.ids, packed.segment_ids, packed.cu_seqlens]
            for tensor in (*tensors, batch.target_positions, batch.target_ids, batch.next_labels):
                digest.update(tensor.numpy().astype("<i8").tobytes())
    assert step.after == (1, 0, 12), "an epoch and a bit"
    expected = "4266b769b0c2875efb9b2f3049154f0b69ee422851b7dc08d4aa0b693f2e2ae7"
    assert digest.hexdigest() == expected


def sentence(part: int, document: int, line: int) -> str:
    """Words that no generator has drawn."""
    first = 7 * part + 5 * document + 3 * line
    words = (WORDS[(first + step * step) % len(WORDS)] for step in range(3 + first % 11))
    return f"{' '.join(words).capitalize()}."
