"""A device without room: training names the batch, prediction divides it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bertkit.datasets.examples import TextExample

from bertkit import load
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder
from bertkit.model.heads import PretrainingModel
from bertkit.predict.embeddings import load_embedder
from bertkit.predict.features import extract
from bertkit.tasks.classification import Classification
from bertkit.tasks.task import run_model
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import in_halves, lacks_memory
from bertkit.training.journal import read_journal
from bertkit.training.pretrain import pretrain
from tests.conftest import WORDS, tiny_config
from tests.training.test_pretrain import TOY

TEXTS = [" ".join(WORDS[first : first + 5]) for first in range(12)]
CPU = torch.device("cpu")

Room = Callable[[int], list[int]]


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> Room:
    """Let encoders fail beyond a number of tokens in a batch; the list gets what they did read."""
    real = Encoder.embed

    def limit(most: int) -> list[int]:
        read: list[int] = []

        def embed(encoder: Encoder, packed: Any, *words: Any) -> torch.Tensor:
            if len(packed.ids) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            read.append(len(packed.ids))
            return real(encoder, packed, *words)

        monkeypatch.setattr(Encoder, "embed", embed)
        return read

    return limit


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "model"
    network = PretrainingModel(tiny_config(tokenizer, initializer_range=0.3))
    save_model(folder, network, tokenizer, {"task": "pretraining"})
    return folder


def test_pretraining_says_which_micro_batch_does_not_fit_and_what_to_try(
    store: TokenStore, tmp_path: Path, room: Room
) -> None:
    room(60)
    with pytest.raises(BertkitError, match=r"a batch of 4 sequences with \d+ tokens") as caught:
        pretrain(TOY, store, tmp_path / "a")
    assert caught.value.code == "out-of-memory"
    assert "training.accumulate = 4" in str(caught.value)
    assert "micro-batches of 2 sequences" in str(caught.value)
    small = replace(TOY, training=replace(TOY.training, accumulate=4))
    room(10)
    with pytest.raises(BertkitError, match=r"accumulate = 8 .*of 1 sequences"):
        pretrain(small, store, tmp_path / "b")


def test_held_out_examples_are_evaluated_in_batches_that_fit(
    store: TokenStore, tmp_path: Path, room: Room
) -> None:
    recipe = replace(TOY, training=replace(TOY.training, accumulate=4, warmup_steps=1))
    recipe = replace(recipe, phases=replace(TOY.phases, steps=(2, 1)))
    found = []
    for most in (10_000, 100):  # 100 are enough for training, not for the 16 held-out sequences
        read = room(most)
        assert pretrain(recipe, store, tmp_path / str(most)) is None
        assert (max(read) > 100) == (most > 100)
        records = read_journal(tmp_path / str(most) / "journal.jsonl")
        record = next(one for one in records if one["kind"] == "evaluation")
        found.append({name: record[name] for name in ("mlm_loss", "nsp_loss", "targets")})
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_predictions_divide_a_batch_that_does_not_fit(model: Path, room: Room) -> None:
    embedder = load_embedder(model, device="cpu", precision="fp32")
    predictor, encoder = load(model, device="cpu", precision="fp32"), read_pretrained(model)
    features = encoder.build(Encoder, keep_head=False).model
    task = Classification(("no", "yes"), max_length=40)
    tuned = encoder.build(task.build, keep_head=False).model
    items = task.items([TextExample("", text, None, None, "") for text in TEXTS], encoder.tokenizer)
    masked = [f"{text} [MASK]" for text in TEXTS]

    def results() -> list[Any]:
        found = extract(features, encoder.tokenizer, TEXTS)
        masks = [one for text in predictor.fill_mask(masked, top=3) for one in text[0]]
        return [
            embedder.encode(TEXTS),
            np.concatenate([text.vectors for text in found]),
            np.concatenate([row for part in run_model(tuned, items, CPU) for row in part]),
            [candidate.probability for candidate in masks],
            predictor.next_sentence([(text, TEXTS[0]) for text in TEXTS]),
            torch.cat(predictor.hidden(TEXTS)).numpy(),
            [sentence.score for sentence in predictor.score(TEXTS)],
        ]

    whole = results()
    read = room(40)
    halves = results()
    assert read
    assert max(read) <= 40
    for before, after in zip(whole, halves, strict=True):
        np.testing.assert_allclose(after, before, atol=2e-6)


def test_only_a_lack_of_memory_divides_a_batch() -> None:
    for text in ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED", "MPS backend out of memory"):
        assert lacks_memory(RuntimeError(text))
    assert not lacks_memory(ValueError("out of memory"))
    calls = []

    def wrong(parts: list[int]) -> None:
        calls.append(parts)
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with pytest.raises(RuntimeError, match="mat1"):
        in_halves(wrong, [1, 2, 3])
    assert calls == [[1, 2, 3]]
