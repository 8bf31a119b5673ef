"""The log-likelihood of sentences under a pre-trained model.

A masked language model has no likelihood of a sentence; its pseudo-log-likelihood (Salazar et al.
2020, "Masked Language Model Scoring", section 2.2) is the sum over tokens of the log-probability of
the token if it is masked. A model that reads in one direction (the ablation in section 5.1 of the
BERT paper) has a likelihood, which takes one pass. [CLS] and [SEP] are read but not scored.

| method           | a token is predicted from                                                |
|------------------|--------------------------------------------------------------------------|
| within-word-l2r  | all tokens but itself and the later tokens of its word                   |
| pll              | all tokens but itself                                                    |
| causal           | the tokens that the model has read before it                             |

In `pll` the later tokens of a word betray the earlier ones ("##uve ##nir" leaves few words but
"so ##uve ##nir"), so rare words that are split into several tokens score too high.
`within-word-l2r` (Kauf and Ivanova 2023, "A Better Way to Do Masked Language Model Scoring") hides
those tokens too, and is the default.

A sentence of n tokens makes n masked copies. A copy that several sentences have in common is
computed once; batches consist of copies of one length, without padding; and the last layer and the
product with the vocabulary are computed for the masked position only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertkit.errors import NOT_FINITE, BertkitError, check_known
from bertkit.model.encoder import Layer, ModelConfig, check_vocabulary
from bertkit.model.heads import PretrainingModel
from bertkit.pretraining_data.batch import Packed, Rows, VocabularyLogits, from_arrays
from bertkit.tasks.inference import CPU_TOKENS, GPU_TOKENS, batch_map, prepare_network, shares
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import autocast, in_halves

METHODS = ("within-word-l2r", "pll", "causal")
PIECE_TOKENS = 1 << 17
"""The number of tokens whose masked copies are in memory at a time."""
HEAD_ROWS = 256
"""The number of positions whose logits over the vocabulary are in memory at a time in a thread."""

SentenceIds = np.ndarray
"""(tokens,) int32: a sentence without [CLS] and [SEP]."""


class SentenceScore(NamedTuple):
    """The log-probability of each token of a sentence, in nats."""

    tokens: list[str]
    log_probabilities: list[float]

    @property
    def score(self) -> float:
        """The sum over all tokens: the sentence's (pseudo-)log-likelihood."""
        return sum(self.log_probabilities)


class Readings(NamedTuple):
    """Sequences of one length for the network, and the tokens that it predicts in them."""

    ids: np.ndarray
    """(sequences, length) int32, with [CLS] and [SEP]."""
    positions: np.ndarray
    """(sequences, outputs) where the network's output is read in each sequence."""
    rows: np.ndarray
    """(tokens,) for each token of the sentences, which of all sequences x outputs predicts it."""
    targets: np.ndarray
    """(tokens,) the ids of these tokens."""


def choose_method(name: str, config: ModelConfig) -> str:
    """Check a method, and resolve "auto" to the model's own: within-word-l2r or causal."""
    masked = config.direction == "bidirectional"
    if name == "auto":
        return METHODS[0] if masked else "causal"
    check_known("method", name, (*METHODS, "auto"), code="method")
    if masked == (name == "causal"):
        own = "is a masked language model" if masked else "predicts adjacent tokens, not masks"
        raise BertkitError(f"the model {own}; leave out the method {name}", code="method")
    return name


def masked_copies(ids: np.ndarray, tokenizer: Tokenizer, method: str) -> Readings:
    """Return the masked copies of sentences of one length, each distinct copy once, in order.

    The ids are (sentences, n), and the method is "within-word-l2r" or "pll".
    """
    sentences, n = ids.shape
    hidden = np.broadcast_to(np.eye(n, dtype=bool), (sentences, n, n))
    if method == "within-word-l2r":
        word = np.cumsum(~tokenizer.continuation[ids], axis=1)
        same = word[:, :, None] == word[:, None, :]
        hidden = same & np.triu(np.ones((n, n), dtype=bool))
    copies = with_special(np.repeat(ids, n, axis=0), tokenizer)
    copies[:, 1:-1][hidden.reshape(-1, n)] = tokenizer.mask_id
    places = np.tile(np.arange(1, n + 1, dtype=np.int32), sentences)
    keys = np.concatenate([copies, places[:, None]], axis=1)
    _, firsts, numbers = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    order = np.argsort(firsts)  # copies of a sentence stay together, which `_encode` profits from
    rows = np.argsort(order)[numbers.reshape(-1)]
    kept = firsts[order]
    return Readings(copies[kept], places[kept, None], rows, ids.reshape(-1))


def causal_readings(ids: np.ndarray, tokenizer: Tokenizer) -> Readings:
    """Return sentences of one length, each token of which is predicted from those before it.

    The ids are (sentences, n).
    """
    sentences, n = ids.shape
    positions = np.tile(np.arange(n), (sentences, 1))
    whole = with_special(ids, tokenizer)
    return Readings(whole, positions, np.arange(sentences * n), ids.reshape(-1))


def with_special(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return (sentences, n + 2) ids: [CLS], the n ids of each sentence, and [SEP]."""
    whole = np.pad(ids, ((0, 0), (1, 1)))
    whole[:, 0], whole[:, -1] = tokenizer.cls_id, tokenizer.sep_id
    return whole


class SingleQuery:
    """Attention in which one token of each sequence looks at all, for a last layer in fp32.

    A score is q (W_k x + b_k) = (q W_k) x + q b_k, whose last term is the same for all tokens, and
    the result is W_v (sum of weights * x) + b_v. So keys and values are computed for no token, only
    two products for each query: a fifteenth of the work for a sentence of fifteen tokens.
    """

    def __init__(self, layer: Layer) -> None:
        linear, self.heads = layer.query_key_value, layer.config.num_attention_heads
        assert linear.bias is not None
        self.query, key, value = linear.weight.detach().chunk(3)
        self.query_bias, _, self.value_bias = linear.bias.detach().chunk(3)
        self.key = key.view(self.heads, -1, key.shape[1])  # (heads, head width, width)
        self.value = value.view(self.key.shape).transpose(1, 2)  # (heads, width, head width)

    def __call__(self, hidden: Tensor, queries: Rows) -> Rows:
        """Return (sequences, width): the attention of `queries` to the tokens of their sequence.

        `hidden` is the layer's input, (sequences, length, width), and `queries` its rows at the
        tokens that attend, (sequences, width).
        """
        sequences, width = queries.shape
        query = F.linear(queries, self.query, self.query_bias).view(sequences, self.heads, -1)
        asked = torch.bmm(query.transpose(0, 1), self.key).transpose(0, 1)  # (.., heads, width)
        scale = (width // self.heads) ** -0.5
        weights = (torch.bmm(asked, hidden.transpose(1, 2)) * scale).softmax(dim=-1)
        mixed = torch.bmm(weights, hidden).transpose(0, 1)  # (heads, sequences, width)
        attended = torch.bmm(mixed, self.value).transpose(0, 1).reshape(sequences, width)
        return attended + self.value_bias


class SentenceScorer:
    """A pre-trained model prepared for scoring sentences, which can no longer be trained.

    The model, in fp32, is changed and moved to the device; the mode is a result of `choose_mode`.
    """

    def __init__(
        self, model: PretrainingModel, tokenizer: Tokenizer, device: torch.device, mode: str
    ) -> None:
        check_vocabulary(model.config, tokenizer.size)
        self.model = model.to(device).eval()
        self.tokenizer, self.device = tokenizer, device
        encoder = self.model.encoder
        self.single_query: SingleQuery | None = None
        if (device.type, mode, model.config.direction) == ("cpu", "fp32", "bidirectional"):
            self.single_query = SingleQuery(cast("Layer", encoder.stack[-1]))
        if device.type != "cpu" and mode == "bf16":
            self.model.to(torch.bfloat16)  # the heads, too, whose decoder is the embeddings
        self.threads = prepare_network(device, encoder, mode)

    @cached_property
    def decode(self) -> Callable[[Rows], VocabularyLogits]:
        """The function from hidden states to logits, with weights prepared once on a CPU."""
        words, head = self.model.encoder.word_embeddings, self.model.mlm
        return lambda hidden: head(hidden, words)

    @property
    def max_tokens(self) -> int:
        """The maximum number of tokens of a sentence, without [CLS] and [SEP]."""
        return self.model.config.max_position_embeddings - 2

    def encode(self, texts: Sequence[str]) -> list[SentenceIds]:
        """Return the ids of sentences."""
        return [np.array(ids, dtype=np.int32) for ids in self.tokenizer.encode_batch(texts)]

    def score(
        self,
        sentences: Sequence[SentenceIds],
        method: str,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> list[np.ndarray]:
        """Return the log-probability of each token of each sentence, (tokens,) float64 in nats.

        Equal sentences get equal numbers, and a number depends on its batch only by rounding.

        Args:
            sentences: the sentences, none longer than `max_tokens`.
            method: the result of `choose_method`.
            progress: called with the number of tokens that the network has read, and the total.
        """
        index: dict[bytes, int] = {}
        numbers_of = [index.setdefault(ids.tobytes(), len(index)) for ids in sentences]
        unique = [np.frombuffer(key, dtype=np.int32) for key in index]

        def cost(length: int) -> int:
            """Return the tokens that are read for a sentence: once, or once for each token."""
            return (1 if method == "causal" else length) * (length + 2)

        total, done = sum(cost(len(ids)) for ids in unique), 0
        found: list[np.ndarray] = [np.zeros(0)] * len(unique)
        workers, tokens = shares(total, self.threads)
        tokens = tokens or (CPU_TOKENS if self.device.type == "cpu" else GPU_TOKENS)
        with batch_map(workers) as each:
            for group in equal_lengths(unique, cost):
                progress(done, total)
                ids = np.stack([unique[i] for i in group])
                if method == "causal":
                    readings = causal_readings(ids, self.tokenizer)
                else:
                    readings = masked_copies(ids, self.tokenizer, method)
                numbers = self._run(readings, tokens, each)
                for i, row in zip(group, numbers.reshape(ids.shape), strict=True):
                    found[i] = row
                done += ids.shape[0] * cost(ids.shape[1])
        progress(total, total)
        if not all(np.isfinite(numbers).all() for numbers in found):
            raise BertkitError(
                "a log-probability is NaN or infinite: the model's weights are damaged",
                code=NOT_FINITE,
            )
        return [found[number] for number in numbers_of]

    def _run(
        self, readings: Readings, tokens: int, each: Callable[..., Iterable[Any]]
    ) -> np.ndarray:
        """Return the log-probability of each target, (tokens,) float64."""
        ids, positions, rows, targets = readings
        outputs = positions.shape[1]
        order = np.argsort(rows, kind="stable")
        step = max(1, tokens // ids.shape[1])
        ordered = rows[order]
        groups = [range(len(ids))[first : first + step] for first in range(0, len(ids), step)]

        def compute(group: range) -> np.ndarray:
            first, end = np.searchsorted(ordered, [group.start * outputs, group.stop * outputs])
            own, asked = slice(group.start, group.stop), order[first:end]
            return self._compute(
                ids[own], positions[own], rows[asked] - group.start * outputs, targets[asked]
            )

        def compute_what_fits(group: range) -> np.ndarray:
            return np.concatenate(in_halves(compute, group, lambda _: ids.shape[1]))

        numbers = np.empty(len(targets))
        numbers[order] = np.concatenate(list(each(compute_what_fits, groups)))
        return numbers

    @torch.inference_mode()
    def _compute(
        self, ids: np.ndarray, positions: np.ndarray, rows: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        """Return the log-probabilities of targets in a batch; see `Readings` for the arguments."""
        sequences, length = ids.shape
        flat = ids.reshape(-1).astype(np.int64)
        packed = from_arrays(flat, np.zeros_like(flat), np.full(sequences, length))
        read = torch.from_numpy((np.arange(sequences)[:, None] * length + positions).reshape(-1))
        with autocast(self.device, "fp32"):  # whatever the caller's is
            if self.device.type == "cpu":
                states = self._encode(packed, read)
            else:
                states = self.model.encoder(packed.to(self.device), read.to(self.device))
            parts = [self._pick(states, rows[own], targets[own]) for own in row_blocks(rows)]
        return np.concatenate(parts)

    def _encode(self, packed: Packed, read: torch.Tensor) -> torch.Tensor:
        """Return the last layer's output at the tokens `read`, from the layers prepared for a CPU.

        The first layer's input depends on a token's id and position alone, which the copies of a
        sentence have in common but for the masks, so its products are computed once for all.
        """
        encoder = self.model.encoder
        first, *rest = cast("list[Layer]", encoder.stack)
        keys = (packed.ids * packed.max_seqlen + packed.position_ids).numpy()
        unique, place = map(torch.from_numpy, np.unique(keys, return_inverse=True))
        distinct = replace(
            packed,
            ids=unique // packed.max_seqlen,
            position_ids=unique % packed.max_seqlen,
            segment_ids=torch.zeros_like(unique),
        )
        embedded = encoder.embed(distinct)
        projected = first.project(embedded).index_select(0, place)
        hidden = embedded.index_select(0, place)
        if not rest:
            return first.attend(projected, hidden, packed, read)
        hidden = first.attend(projected, hidden, packed, None)
        *middle, last = rest
        for layer in middle:
            hidden = layer(hidden, packed)
        if self.single_query is None:
            return last(hidden, packed, read)
        asking = hidden.index_select(0, read)
        sequences = hidden.view(-1, packed.max_seqlen, hidden.shape[-1])
        return last.complete(self.single_query(sequences, asking), asking)

    def _pick(self, states: torch.Tensor, rows: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return the log-probabilities of targets (n,), from states at rows (n,), ascending."""
        first, last = int(rows[0]), int(rows[-1])
        chances = self.decode(states[first : last + 1]).float().log_softmax(dim=-1)
        at, wanted = torch.from_numpy(rows - first), torch.from_numpy(targets.astype(np.int64))
        return chances[at.to(self.device), wanted.to(self.device)].double().cpu().numpy()


def row_blocks(rows: np.ndarray) -> Iterator[slice]:
    """Yield slices of ascending `rows`, in each of which they differ by less than `HEAD_ROWS`."""
    start = 0
    while start < len(rows):
        end = int(np.searchsorted(rows, rows[start] + HEAD_ROWS))
        yield slice(start, end)
        start = end


def equal_lengths(
    sentences: Sequence[SentenceIds], cost: Callable[[int], int]
) -> Iterator[list[int]]:
    """Yield the indices of sentences of one length, longest first, in groups of limited cost.

    Sentences without tokens are left out.
    """
    lengths = np.array([len(ids) for ids in sentences], dtype=np.int64)
    for length in np.unique(lengths)[::-1].tolist():
        if length:
            same = np.flatnonzero(lengths == length)
            step = max(1, PIECE_TOKENS // cost(length))
            yield from (same[i : i + step].tolist() for i in range(0, len(same), step))
