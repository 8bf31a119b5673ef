"""`benchmarks.gpu rest`: inference and fine-tuning."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.gpu.setup import Case, Found, Setup, make_batches
from benchmarks.gpu.train import (
    BATCHES,
    Race,
    moved,
    own_inference,
    their_config,
    their_inference,
)
from benchmarks.record import summary
from bertkit.checkpoints.names import BERT
from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.checkpoints.save import foreign_tensors
from bertkit.finetuning.runs import RunSettings, TrainingSettings
from bertkit.finetuning.train import TaskTraining
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.model.outputs import ClassificationModel
from bertkit.tasks.classification import Classification
from bertkit.tasks.sequences import prepare_network, run_task
from bertkit.tasks.task import Encoded, Item, ItemPart, Items, make_batch
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from bertkit.training.device import autocast, synchronize

EXAMPLES = 3668
"""The number of training examples of MRPC, whose pairs have about 53 tokens."""


def inference_case(setup: Setup, *, length: int) -> Iterator[Found]:
    """Measure hidden states in bf16, then whole predictions of texts of the same lengths."""
    config = setup.config()
    batches = make_batches(config, setup.tokens(65536), length, setup.count(BATCHES))
    ways: dict[str, Callable[[], Any]] = {
        "eager": partial(own_inference, setup, config, compiled=False),
        "transformers": partial(their_inference, setup, config, compiled=False),
        "compiled layers": partial(own_inference, setup, config, compiled=True),
        "transformers, compiled": partial(their_inference, setup, config, compiled=True),
    }
    race = Race(setup, config, batches, training=False)
    yield from race.run(ways)
    lengths = [length for batch in batches for length in batch.packed.packed.lengths]
    yield setup.attempt("predictions", lambda: predictions(setup, config, lengths))


def predictions(setup: Setup, config: ModelConfig, lengths: list[int]) -> dict[str, Any]:
    """Time `run_task`, by which `bertkit predict` computes, from token ids to arrays."""
    model = ClassificationModel(config, 2).to(setup.device).eval()
    mode = "fp32" if setup.dry else "bf16"
    threads = prepare_network(setup.device, model.encoder, mode)
    items = random_items(config, lengths)
    work = partial(run_task, model, items, setup.device, precision=mode, threads=threads)
    work()
    seconds = [setup.seconds_of_one(work) for _ in range(setup.count(5))]
    return {"tokens_per_second": summary([items.tokens / taken for taken in seconds])}


def random_items(config: ModelConfig, lengths: list[int]) -> Items:
    """Return labelled pairs of random tokens, in random order."""
    rng = np.random.default_rng(0)
    parts = [
        ItemPart((Encoded(rng.integers(5, config.vocab_size, n, dtype=np.int32), n // 2),), n % 2)
        for n in rng.permutation(lengths).tolist()
    ]
    return Items([Item(i, [part]) for i, part in enumerate(parts)], len(parts), 0, {})


def finetuning_case(setup: Setup) -> Iterator[Found]:
    """Fine-tune base for an epoch on pairs as long as MRPC's, in batches of 32, in bf16."""
    rng = np.random.default_rng(0)
    count = 160 if setup.dry else EXAMPLES
    lengths = np.clip(rng.normal(53, 15, count).round().astype(int), 16, 128).tolist()
    items = random_items(setup.config(), lengths)
    yield setup.attempt("bertkit", lambda: rates_of(setup, own_finetuning(setup, items)))
    yield setup.attempt("transformers", lambda: rates_of(setup, their_finetuning(setup, items)))


def rates_of(setup: Setup, updates: Iterator[int]) -> dict[str, Any]:
    """Return the rates of parts of 20 updates, each of which yields its tokens."""
    rates, tokens, number, started = [], 0, 0, time.perf_counter()
    part = setup.count(20)
    for number, real in enumerate(updates, 1):
        tokens += real
        if number % part == 0:
            synchronize(setup.device)
            now = time.perf_counter()
            rates.append(tokens / (now - started))
            tokens, started = 0, now
    return {"tokens_per_second": summary(rates[1:] or rates), "updates": number}


def own_finetuning(setup: Setup, items: Items) -> Iterator[int]:
    """Fine-tune by `TaskTraining`; yield the tokens of each update."""
    config = setup.config()
    words = [f"w{number}" for number in range(config.vocab_size - len(SPECIAL_TOKENS))]
    tokenizer = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *words], lowercase=True)
    tensors = foreign_tensors(PretrainingModel(config), BERT)
    training = TaskTraining(
        PretrainedWeights(Path(), config, tensors, tokenizer, {}),
        *(Classification(("a", "b")), items),
        *(RunSettings(batch_size=32, learning_rate=2e-5, epochs=1, seed=0), TrainingSettings()),
        device=setup.device,
        precision="bf16",
        keep_head=False,
    )
    with training:
        for update in training.updates():
            yield update.tokens


def their_finetuning(setup: Setup, items: Items) -> Iterator[int]:
    """Fine-tune their BertForSequenceClassification on padded batches; yield real tokens."""
    from transformers import BertForSequenceClassification

    with setup.device:
        model: Any = BertForSequenceClassification(their_config(setup.config())).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
    for first in range(0, len(items.items), 32):
        parts = [item.parts[0] for item in items.items[first : first + 32]]
        packed = make_batch(parts).packed
        inside = torch.arange(packed.max_seqlen) < torch.tensor(packed.lengths)[:, None]
        ids = torch.zeros(inside.shape, dtype=torch.long).masked_scatter(inside, packed.ids)
        labels = torch.tensor([part.target for part in parts])
        arguments = {"input_ids": ids, "attention_mask": inside.long(), "labels": labels}
        with autocast(setup.device, "bf16"):
            loss = model(**moved(arguments, setup.device)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield len(packed.ids)


OTHERS: dict[str, Case] = {
    "inference base 128": partial(inference_case, length=128),
    "fine-tuning base": finetuning_case,
    "inference base 512": partial(inference_case, length=512),
}
