"""Sequences for checking an exported model, and the outputs of it and of bertkit for them.

The reference is bertkit's own packed computation in fp32. An exported model gets the same sequences
in padded batches: a batch mixes sequences of different lengths, padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertkit.errors import BertkitError
from bertkit.export.padded import PADDED_INPUTS, is_token_output
from bertkit.export.source import ExportSource
from bertkit.model.encoder import ONE_SEGMENT
from bertkit.model.pooling import OVER_TOKENS, summary_vectors, weighted_vectors
from bertkit.pretraining_data.batch import Packed
from bertkit.tasks.task import ItemPart, Items, make_batch, split_outputs, split_parts
from bertkit.tasks.windows import surround, text_windows

Arrays = dict[str, np.ndarray]
Runner = Callable[[Arrays], Mapping[str, np.ndarray]]
"""An exported model as a function from int64 arrays for `PADDED_INPUTS` to named outputs."""


class Opened(NamedTuple):
    """An exported model that was read back from its files."""

    by: tuple[str, ...]
    """The package that runs it, followed by packages that this one needs."""
    run: Runner


BATCH_TOKENS = 1024
"""The maximum number of tokens in a batch of the comparison, since logits over a vocabulary are
large."""

BUILT_IN_SENTENCES = (
    "The river rose in the night, and by morning the old bridge was gone.",
    "Who built it?",
    "Nobody in the village could say who had built it, or when.",
    "In 1903 (or so the letter said) a mason named Ada Varga asked 240 crowns for the work.",
    "It rained.",
    "El puente nuevo es más ancho; todos lo cruzan sin pensar en el río.",
    "Die alte Brücke hielt über hundert Jahre.",
    "Numbers: 3.14159, 1,000,000 and -7 %.",
)
"""Hand-written sentences, from which sequences are made if no file is given."""


def built_in(source: ExportSource) -> list[ItemPart]:
    """Return sequences of short texts and pairs, and a sequence of the model's maximum length."""
    tokenizer = source.tokenizer
    texts = tokenizer.encode_batch(BUILT_IN_SENTENCES)
    room = source.max_length - 3
    pairs = [(one[: room // 2], two[: room // 2]) for one, two in pairwise(texts)]
    every = [*chain.from_iterable(texts)] or [tokenizer.unk_id]
    whole = (every * (2 + room // len(every)))[: room + 1]
    one_segment = source.config.type_vocab_size == 1
    if source.head == "multiple-choice":
        if one_segment:
            raise BertkitError(ONE_SEGMENT)
        return [
            ItemPart(tuple(surround(one, two[n:], tokenizer) for n in range(3)))
            for one, two in pairs
        ]
    sequences = [] if one_segment else [surround(one, two, tokenizer) for one, two in pairs]
    if source.head not in ("words", "embedding") and not one_segment:
        sequences.append(surround(whole[: room // 3], whole[room // 3 : room], tokenizer))
    alone = [one[: room + 1] for one in (*texts, whole)]
    return [
        ItemPart((one,)) for one in [*sequences, *(surround(a, None, tokenizer) for a in alone)]
    ]


def text_sequences(source: ExportSource, texts: Iterable[str]) -> list[ItemPart]:
    """Cut texts into windows, for heads that belong to no task."""
    ids = source.tokenizer.encode_batch(list(texts))
    return [
        ItemPart((window,))
        for one in ids
        for window in text_windows(one, None, source.tokenizer, source.max_length)
    ]


def in_batches(parts: Sequence[ItemPart]) -> Iterator[list[ItemPart]]:
    """Yield batches of neighbouring parts with equal numbers of sequences, in the given order."""
    for _, group in groupby(parts, key=lambda part: len(part.sequences)):
        yield from split_parts(list(group), BATCH_TOKENS)


def padded_arrays(parts: Sequence[ItemPart], head: str) -> Arrays:
    """Return padded inputs: (parts, length), or (parts, choices, length) for "multiple-choice"."""
    sequences = [sequence for part in parts for sequence in part.sequences]
    shape = len(sequences), max(len(sequence.ids) for sequence in sequences)
    arrays = {name: np.zeros(shape, dtype=np.int64) for name in PADDED_INPUTS}
    for row, (ids, first) in enumerate(sequences):
        arrays["input_ids"][row, : len(ids)] = ids
        arrays["attention_mask"][row, : len(ids)] = 1
        arrays["token_type_ids"][row, first : len(ids)] = 1
    if head == "multiple-choice":
        return {name: array.reshape(len(parts), -1, shape[1]) for name, array in arrays.items()}
    return dict(arrays)


def run_exported(run: Runner, source: ExportSource, parts: Sequence[ItemPart]) -> list[Arrays]:
    """Run an exported model and return each part's outputs by name, without padding.

    Token outputs are (tokens, ...), sequence outputs (...), and those of the head "multiple-choice"
    (choices,).
    """
    found: list[Arrays] = []
    for batch in in_batches(parts):
        outputs = run(padded_arrays(batch, source.head))
        for row, part in enumerate(batch):
            length = len(part.sequences[0].ids)
            found.append(
                {
                    name: array[row, :length] if is_token_output(source.head, name) else array[row]
                    for name, array in outputs.items()
                }
            )
    return found


@torch.inference_mode()
def run_packed(source: ExportSource, parts: Sequence[ItemPart]) -> list[Arrays]:
    """Return each part's outputs as computed by bertkit from packed sequences."""
    found: list[Arrays] = []
    for group in in_batches(parts):
        batch = make_batch(group)
        rows = {n: t.float().numpy() for n, t in packed_rows(source, batch.packed).items()}
        outputs = {}
        for name, array in rows.items():
            pooled = not is_token_output(source.head, name)
            own = split_outputs(array, batch, group, pooled)
            alone = pooled and source.head != "multiple-choice"
            outputs[name] = [one[0] if alone else one for one in own]
        found += [
            dict(zip(outputs, row, strict=True)) for row in zip(*outputs.values(), strict=True)
        ]
    return found


def packed_rows(source: ExportSource, packed: Packed) -> dict[str, Tensor]:
    """Return the named outputs of a packed batch, with a row for each token or sequence."""
    model, encoder, head = source.model, source.encoder, source.head
    if source.task is not None:
        logits = model(packed)
        if head == "question-answering":
            return dict(zip(("start_logits", "end_logits"), logits.unbind(-1), strict=True))
        return {"logits": logits.squeeze(-1) if head == "multiple-choice" else logits}
    if head == "embedding":
        return {"sentence_embedding": embedded(source, packed)}
    hidden = encoder(packed)
    pooled = encoder.pool(hidden[encoder.summary_tokens(packed).long()])
    outputs: dict[str, Callable[[], Tensor]] = {
        "last_hidden_state": lambda: hidden,
        "pooler_output": lambda: pooled,
        "prediction_logits": lambda: model.mlm(hidden, encoder.word_embeddings),
        "seq_relationship_logits": lambda: model.nsp(pooled),
        "logits": lambda: (
            model.rtd(hidden) if head == "replaced" else model.mlm(hidden, encoder.word_embeddings)
        ),
    }
    return {name: outputs[name]() for name in source.outputs}


def embedded(source: ExportSource, packed: Packed) -> Tensor:
    """Return (sequences, width) vectors, as `bertkit.predict.embeddings` does for short texts."""
    assert source.pooling is not None
    pooling = source.pooling.pooling
    if pooling in OVER_TOKENS:
        shares = torch.tensor([1 / n for n in packed.lengths for _ in range(n)])
        vectors = weighted_vectors(source.encoder, packed, pooling, shares)
    else:
        vectors = summary_vectors(source.encoder, packed, pooling)
    return torch.nn.functional.normalize(vectors) if source.pooling.normalize else vectors


def task_outputs(
    source: ExportSource, items: Items, found: Sequence[Arrays]
) -> list[list[np.ndarray]]:
    """Return the outputs of all items' parts in the form that a task's `decode` takes."""

    def rows(outputs: Mapping[str, Any]) -> np.ndarray:
        if source.head == "question-answering":
            return np.stack([outputs["start_logits"], outputs["end_logits"]], axis=-1)
        logits = outputs["logits"]
        if source.head == "multiple-choice":
            return logits[:, None]
        return logits if source.head == "token-classification" else logits[None]

    remaining = iter(found)
    return [[rows(next(remaining)) for _ in item.parts] for item in items.items]
