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

In `pll` the later tokens of a word betray the earlier ones ("##ov" for "so ##ov ##enir"), so rare
words that are split into many tokens score too high. `within-word-l2r` (Kauf and Ivanova 2023, "A
Better Way to Do Masked Language Model Scoring") hides those tokens too, and is the default.

A sentence of n tokens is n masked copies, and most of the work goes into them: copies that several
sentences share are computed once, copies of equal length share a batch without padding, and the
last layer and the vocabulary's product are computed for the masked position only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import numpy as np
import torch

from bertkit.errors import BertkitError, nearest
from bertkit.model.encoder import ModelConfig, check_vocabulary
from bertkit.model.heads import PretrainingModel
from bertkit.model.inference import prepare_encoder
from bertkit.predict.engine import check_outputs, one_thread_each, shares
from bertkit.pretraining_data.batch import from_arrays
from bertkit.tasks.task import PREDICTION_TOKENS
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import autocast

METHODS = ("within-word-l2r", "pll", "causal")
PIECE_TOKENS = 1 << 17
"""The number of tokens whose masked copies are in memory at a time."""
HEAD_ROWS = 128
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
    """Check a method, and resolve "auto" to the model's own: within-word-l2r or causal.

    Raises:
        BertkitError: the method is unknown, or does not fit the direction in which the model reads.
    """
    masked = config.direction == "bidirectional"
    if name == "auto":
        return METHODS[0] if masked else "causal"
    if name not in METHODS:
        raise BertkitError(
            f"no method is called '{name}'{nearest(name, (*METHODS, 'auto'))}", code="method"
        )
    if masked == (name == "causal"):
        own = "is a masked language model" if masked else "predicts adjacent tokens, not masks"
        raise BertkitError(f"the model {own}; leave out the method {name}", code="method")
    return name


def masked_copies(ids: np.ndarray, tokenizer: Tokenizer, method: str) -> Readings:
    """Return the masked copies of sentences of one length, each distinct copy once.

    Args:
        ids: (sentences, n) the sentences' tokens.
        tokenizer: the tokenizer of the ids.
        method: "within-word-l2r" or "pll".
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
    keys, rows = np.unique(
        np.concatenate([copies, places[:, None]], axis=1), axis=0, return_inverse=True
    )
    return Readings(keys[:, :-1], keys[:, -1:], rows.reshape(-1), ids.reshape(-1))


def causal_readings(ids: np.ndarray, tokenizer: Tokenizer, direction: str) -> Readings:
    """Return sentences of one length, each token of which is predicted from the adjacent one.

    Args:
        ids: (sentences, n) the sentences' tokens.
        tokenizer: the tokenizer of the ids.
        direction: "left_to_right" or "right_to_left".
    """
    sentences, n = ids.shape
    first = 0 if direction == "left_to_right" else 2
    positions = np.tile(np.arange(first, first + n), (sentences, 1))
    whole = with_special(ids, tokenizer)
    return Readings(whole, positions, np.arange(sentences * n), ids.reshape(-1))


def with_special(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return (sentences, n + 2) ids: [CLS], the n ids of each sentence, and [SEP]."""
    whole = np.pad(ids, ((0, 0), (1, 1)))
    whole[:, 0], whole[:, -1] = tokenizer.cls_id, tokenizer.sep_id
    return whole


class SentenceScorer:
    """A pre-trained model prepared for scoring sentences, which can no longer be trained.

    Args:
        model: the model in fp32, which is changed and moved to the device.
        tokenizer: the tokenizer with which the model was trained.
        device: the device to compute on.
        mode: "fp32", "bf16" or "int8", the result of `bertkit.predict.engine.choose_mode`.
    """

    def __init__(
        self, model: PretrainingModel, tokenizer: Tokenizer, device: torch.device, mode: str
    ) -> None:
        check_vocabulary(model.config, tokenizer.size)
        self.model = model.to(device).eval()
        self.tokenizer, self.device, self.mode = tokenizer, device, mode
        self.threads = 1
        if device.type == "cpu":
            prepare_encoder(self.model.encoder, mode)
            self.threads = torch.get_num_threads()

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

        Raises:
            BertkitError: a number is NaN or infinite.
        """
        index: dict[bytes, int] = {}
        places = [index.setdefault(ids.tobytes(), len(index)) for ids in sentences]
        unique = [np.frombuffer(key, dtype=np.int32) for key in index]
        cost = (lambda n: n + 2) if method == "causal" else (lambda n: n * (n + 2))
        total, done = sum(cost(len(ids)) for ids in unique), 0
        found: list[np.ndarray] = [np.zeros(0)] * len(unique)
        with ExitStack() as stack:
            each, tokens = self._workers(stack, total)
            for group in equal_lengths(unique, cost):
                progress(done, total)
                ids = np.stack([unique[i] for i in group])
                numbers = self._run(self._readings(ids, method), tokens, each)
                for i, row in zip(group, numbers.reshape(ids.shape), strict=True):
                    found[i] = row
                done += ids.shape[0] * cost(ids.shape[1])
        progress(total, total)
        check_outputs(*found)
        return [found[place] for place in places]

    def _workers(self, stack: ExitStack, total: int) -> tuple[Callable[..., Iterable[Any]], int]:
        """Return a version of `map` that may use threads, and the tokens of a batch for it."""
        threads, tokens = shares(total, self.threads)
        if threads == 1:
            return map, PREDICTION_TOKENS
        return stack.enter_context(one_thread_each(threads)).map, tokens

    def _readings(self, ids: np.ndarray, method: str) -> Readings:
        if method == "causal":
            return causal_readings(ids, self.tokenizer, self.model.config.direction)
        return masked_copies(ids, self.tokenizer, method)

    def _run(
        self, readings: Readings, tokens: int, each: Callable[..., Iterable[Any]]
    ) -> np.ndarray:
        """Return the log-probability of each target, (tokens,) float64."""
        ids, positions, rows, targets = readings
        outputs = positions.shape[1]
        order = np.argsort(rows, kind="stable")
        step = max(1, tokens // ids.shape[1])
        starts = np.arange(0, len(ids), step)
        cuts = np.searchsorted(rows[order], [*starts * outputs, len(ids) * outputs])

        def compute(number: int) -> np.ndarray:
            first = int(starts[number])
            asked = order[cuts[number] : cuts[number + 1]]
            own = slice(first, first + step)
            return self._compute(
                ids[own], positions[own], rows[asked] - first * outputs, targets[asked]
            )

        numbers = np.empty(len(targets))
        numbers[order] = np.concatenate(list(each(compute, range(len(starts)))))
        return numbers

    @torch.inference_mode()
    def _compute(
        self, ids: np.ndarray, positions: np.ndarray, rows: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        """Return the log-probabilities of targets in a batch; see `Readings` for the arguments."""
        sequences, length = ids.shape
        flat = ids.reshape(-1).astype(np.int64)
        packed = from_arrays(flat, np.zeros_like(flat), np.full(sequences, length))
        read = (np.arange(sequences)[:, None] * length + positions).reshape(-1)
        # prepared layers compute in their own precision, without autocast
        precision = "fp32" if self.device.type == "cpu" else self.mode
        with autocast(self.device, precision):
            hidden = self.model.encoder(
                packed.to(self.device), torch.from_numpy(read).to(self.device)
            )
            parts = [
                self._head(hidden, torch.from_numpy(rows[own]), torch.from_numpy(targets[own]))
                for own in row_blocks(rows)
            ]
        return np.concatenate(parts)

    def _head(self, hidden: torch.Tensor, rows: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
        """Return (targets,) log-probabilities from states at rows `rows`, which are ascending."""
        first, last = int(rows[0]), int(rows[-1])
        words = self.model.encoder.word_embeddings
        logits = self.model.mlm(hidden[first : last + 1], words).float()
        chances = logits.log_softmax(dim=-1)
        picked = chances[(rows - first).to(self.device), targets.long().to(self.device)]
        return picked.double().cpu().numpy()


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
