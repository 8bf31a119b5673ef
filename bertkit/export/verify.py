"""Sequences to try an exported model on, and what it and bertkit make of them.

The reference is bertkit's own packed computation in fp32. An exported model gets the same sequences
as rectangles: several at once, so of different lengths, and padded to the longest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby, pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from bertkit.export.padded import PADDED_INPUTS, is_token_output
from bertkit.export.source import ExportSource
from bertkit.model.pooling import OVER_TOKENS, summary_vectors, weighted_vectors
from bertkit.pretraining_data.batch import Packed
from bertkit.tasks.task import ItemPart, Items, make_batch, split_parts
from bertkit.tasks.windows import surround, text_windows

Arrays = dict[str, np.ndarray]
Runner = Callable[[Arrays], Mapping[str, np.ndarray]]
"""An exported model: `PADDED_INPUTS` as int64 arrays to outputs by name."""


class Opened(NamedTuple):
    """What was written, read back."""

    by: tuple[str, ...]
    """The package that runs it, and those that this one needs."""
    run: Runner


BATCH_TOKENS = 1024
"""In a batch of the comparison; the logits of a vocabulary are many numbers."""

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
"""Hand-written; the tokenizer makes examples of them where no file is given."""


def built_in(source: ExportSource) -> list[ItemPart]:
    """Short texts, pairs, and one as long as the model takes."""
    tokenizer = source.tokenizer
    texts = tokenizer.encode_batch(BUILT_IN_SENTENCES)
    room = source.max_length - 3
    pairs = [(one[: room // 2], two[: room // 2]) for one, two in pairwise(texts)]
    every = [*chain.from_iterable(texts)] or [tokenizer.unk_id]
    whole = (every * (1 + room // len(every)))[:room]
    if source.head == "multiple-choice":
        return [
            ItemPart(tuple(surround(one, two[n:], tokenizer) for n in range(3)))
            for one, two in pairs
        ]
    one_segment = source.config.type_vocab_size == 1
    sequences = [] if one_segment else [surround(one, two, tokenizer) for one, two in pairs]
    if source.head not in ("words", "embedding") and not one_segment:
        sequences.append(surround(whole[: room // 3], whole[room // 3 :], tokenizer))
    alone = [one[: room + 1] for one in texts] + [whole]
    return [
        ItemPart((one,)) for one in [*sequences, *(surround(a, None, tokenizer) for a in alone)]
    ]


def text_sequences(source: ExportSource, texts: Iterable[str]) -> list[ItemPart]:
    """The windows of texts, for heads that are no task."""
    ids = source.tokenizer.encode_batch(list(texts))
    return [
        ItemPart((window,))
        for one in ids
        for window in text_windows(one, None, source.tokenizer, source.max_length)
    ]


def in_batches(parts: Sequence[ItemPart]) -> Iterator[list[ItemPart]]:
    """Neighbours, of one number of sequences each, in the order given."""
    for _, group in groupby(parts, key=lambda part: len(part.sequences)):
        yield from split_parts(list(group), BATCH_TOKENS)


def padded_arrays(parts: Sequence[ItemPart], head: str) -> Arrays:
    """The rectangles of some parts, (parts, length); of choices (parts, choices, length)."""
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
    """The outputs of each part: (tokens, ...) or, of a sequence, (...); of choices (choices,).

    What stands at the padding is dropped.
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
    """What bertkit computes of the same parts, packed."""
    found: list[Arrays] = []
    for group in in_batches(parts):
        batch = make_batch(group)
        rows = {n: t.float().numpy() for n, t in packed_rows(source, batch.packed).items()}
        bounds = np.cumsum([0, *batch.packed.lengths])
        at = 0
        for part in group:
            places = batch.place[at : at + len(part.sequences)]
            at += len(part.sequences)
            first, end = bounds[places[0]], bounds[places[0] + 1]
            own = places if source.head == "multiple-choice" else places[0]
            found.append(
                {
                    name: array[first:end] if is_token_output(source.head, name) else array[own]
                    for name, array in rows.items()
                }
            )
    return found


def packed_rows(source: ExportSource, packed: Packed) -> dict[str, Tensor]:
    """The outputs of a packed batch by name, a row for each token or each sequence."""
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
    """(sequences, width), as `bertkit.predict.embeddings` has it for texts of one window."""
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
    """Outputs of the parts of all items, in order, as a task's `decode` takes them."""

    def rows(outputs: Mapping[str, Any]) -> np.ndarray:
        if source.head == "question-answering":
            return np.stack([outputs["start_logits"], outputs["end_logits"]], axis=-1)
        logits = outputs["logits"]
        if source.head == "multiple-choice":
            return logits[:, None]
        return logits if source.head == "token-classification" else logits[None]

    remaining = iter(found)
    return [[rows(next(remaining)) for _ in item.parts] for item in items.items]
