"""What hidden states add to vectors of words alone: a question of `open_questions`.

A BiLSTM tags the entities of CoNLL-2003 from frozen vectors, as in table 7 of the paper:

- of co-occurrences: the singular value decomposition of positive pointwise mutual information (Levy
  and Goldberg 2014), a close relative of GloVe, of the tokens of one part of Wikipedia;
- of two LSTM language models, one for each direction, that share their token embeddings: a small
  ELMo (Peters et al. 2018), trained on the same text;
- of the last layer of the speedrun's network `short`, a BERT of two layers that read the same text
  for about as long;
- of the last layer and of the embedding table of a published BERT.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
import torch.nn.functional as F
from scipy.sparse import coo_matrix, csr_matrix
from sklearn.utils.extmath import randomized_svd
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.defaults import folder_name, task_data, tuned_scores
from benchmarks.record import start_model, summary
from benchmarks.text_choices import CHOICES, make_network
from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.corpus.from_text import TextOptions, store_from_text
from bertkit.corpus.store import TokenStore
from bertkit.finetuning.settings import FinetuneSettings, Grid, HeadSettings
from bertkit.model import features
from bertkit.model.encoder import Encoder
from bertkit.pretraining_data.batch import Packed
from bertkit.training.journal import read_journal
from bertkit.training.recipe import learning_rate

TASK = "conll-2003, 2,000 sentences"
MOST_DEV = 3_000
WINDOW = 5
"""The greatest distance of tokens that count as occurring together."""
CHUNK = 2_000_000
LSTM = "LSTM language models"
WIDTH, LAYERS = 256, 2
"""The width and the number of layers of each of the two language models."""
BATCH, LENGTH, UPDATES, WARMUP, PEAK_RATE = 32, 64, 1_500, 100, 2e-3
SAMPLED, EVALUATED = 2_048, 50
"""The number of other tokens that each is told apart from, and of batches that are evaluated."""


def token_chunks(store: TokenStore) -> list[np.ndarray]:
    """Return the training tokens of a store, in pieces of at most `CHUNK`."""
    found = []
    for index in range(len(store.shards)):
        tokens = np.asarray(store.arrays(index).tokens, dtype=np.int64)
        found += [tokens[first : first + CHUNK] for first in range(0, len(tokens), CHUNK)]
    return found


def cooccurrence_vectors(store: TokenStore, width: int) -> np.ndarray:
    """Return a vector for each token of the vocabulary, from the tokens that stand beside it.

    Counts are weighted by 1 / distance, as in GloVe; those of contexts are smoothed by the power
    0.75 (Levy et al. 2015).

    Returns:
        (vocabulary, width) vectors; those of tokens that never occur are 0.
    """
    size = store.tokenizer.size
    counts = csr_matrix((size, size))
    for chunk in token_chunks(store):
        for apart in range(1, 1 + WINDOW):
            places = (chunk[:-apart], chunk[apart:])
            weights = np.full(len(places[0]), 1 / apart)
            counts += coo_matrix((weights, places), shape=(size, size)).tocsr()
    counts = (counts + counts.T).tocoo()
    words = np.asarray(counts.sum(1)).ravel()
    contexts = words**0.75
    expected = words[counts.row] * (contexts / contexts.sum())[counts.col]
    information = np.maximum(np.log(counts.data / expected), 0)
    found = coo_matrix((information, (counts.row, counts.col)), shape=(size, size)).tocsr()
    left, values, _ = randomized_svd(found, width, random_state=0)
    return left * np.sqrt(values)


class LanguageModels(nn.Module):
    """A left-to-right and a right-to-left LSTM with the same token embeddings, as in ELMo."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(size, WIDTH)
        nn.init.normal_(self.embeddings.weight, std=0.05)
        self.directions = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, num_layers=LAYERS) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(size))

    def states(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Map (length, sequences) ids to two (length, sequences, width) states.

        Those of the first have read up to each token, those of the second down to it.
        """
        forwards, backwards = self.directions
        words = self.embeddings(ids)
        return forwards(words)[0], backwards(words.flip(0))[0].flip(0)

    def loss(self, ids: Tensor, chances: Tensor | None = None) -> Tensor:
        """Return the mean loss of the next and the previous token of (length, sequences) ids.

        Args:
            ids: The tokens.
            chances: (vocabulary,) how often each token occurs. If given, each token is told apart
                from `SAMPLED` others only, drawn by these (Jean et al. 2015), as in ELMo.
        """
        forwards, backwards = self.states(ids)
        read = torch.cat([forwards[:-1], backwards[1:]]).flatten(0, 1)
        wanted = torch.cat([ids[1:], ids[:-1]]).flatten()
        with torch.autocast("cpu", torch.bfloat16):
            if chances is None:
                logits = F.linear(read, self.embeddings.weight, self.bias.bfloat16())
                return F.cross_entropy(logits.float(), wanted)
            others = torch.multinomial(chances, SAMPLED, replacement=True)
            bias = self.bias - chances.log()
            logits = F.linear(read, self.embeddings(others), bias[others].bfloat16()).float()
        logits = logits.masked_fill(others == wanted[:, None], -torch.inf)
        right = (read * self.embeddings(wanted)).sum(-1) + bias[wanted]
        return (torch.logaddexp(logits.logsumexp(-1), right) - right).mean()

    def packed_states(self, packed: Packed) -> Tensor:
        """Return (tokens, 2 * width): the states of both directions for a packed batch."""
        sequences = torch.split(
            packed.ids, packed.lengths
        )  # padding at the end is read after a sequence
        turned = [ids.flip(0) for ids in sequences]
        first, second = (
            model(self.embeddings(pad_sequence(found)))[0]
            for model, found in zip(self.directions, (sequences, turned), strict=True)
        )
        return torch.cat(
            [
                torch.cat([first[:length, i], second[:length, i].flip(0)], dim=-1)
                for i, length in enumerate(packed.lengths)
            ]
        )


class Trained(NamedTuple):
    """Language models, and how they were trained."""

    models: LanguageModels
    minutes: float
    loss: float
    """The loss on windows that are drawn anew after training, in nats per token."""


def train_language_models(store: TokenStore) -> Trained:
    """Train on random windows of a store, each between [CLS] and [SEP] as sentences will be."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    tokenizer = store.tokenizer
    tokens = np.concatenate(token_chunks(store))
    counts = torch.from_numpy(np.bincount(tokens, minlength=tokenizer.size) + 1.0).float()
    chances = counts / counts.sum()
    models = LanguageModels(tokenizer.size).train()
    with torch.no_grad():
        models.bias.copy_(chances.log())  # at its rate, Adam would need thousands of updates for it
    optimizer = torch.optim.AdamW(models.parameters(), lr=PEAK_RATE, weight_decay=0.01)
    began = time.perf_counter()

    def draw() -> Tensor:
        starts = rng.integers(len(tokens) - LENGTH, size=BATCH)
        ids = tokens[starts + np.arange(LENGTH)[:, None]]
        ids[0], ids[-1] = tokenizer.cls_id, tokenizer.sep_id
        return torch.from_numpy(ids)

    for step in range(UPDATES):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(
                step, peak=PEAK_RATE, warmup_steps=WARMUP, total_steps=UPDATES
            )
        loss = models.loss(draw(), chances)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(models.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0:
            print(f"language models: {step} of {UPDATES} updates, loss {loss:.3f}", flush=True)
    minutes = (time.perf_counter() - began) / 60
    with torch.no_grad():
        losses = [models.eval().loss(draw()).item() for _ in range(EVALUATED)]
    return Trained(models, minutes, float(np.mean(losses)))


def save_table(folder: Path, vectors: np.ndarray, start: PretrainedWeights) -> Path:
    """Save an encoder of one layer whose token embeddings are the vectors, with nothing added."""
    config = replace(
        start.config,
        hidden_size=vectors.shape[1],
        num_hidden_layers=1,
        num_attention_heads=8,
        intermediate_size=64,
    )
    encoder = Encoder(config)
    with torch.no_grad():
        encoder.word_embeddings.weight.copy_(torch.from_numpy(vectors))
        encoder.position_embeddings.weight.zero_()
        encoder.segment_embeddings.weight.zero_()
    save_model(folder, encoder, start.tokenizer, {})
    return folder


@contextmanager
def read_by(models: LanguageModels) -> Iterator[None]:
    """Let the states of language models stand for those of any frozen encoder."""

    def states(encoder: Encoder, packed: Packed, layers: str, mix: Tensor | None = None) -> Tensor:
        with torch.no_grad():
            return models.packed_states(packed)

    with patch.object(features, "encoder_features", states):
        yield


def static_vectors(data: Path, seeds: int, work: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the F1 of entities for each kind of vectors."""
    start = read_pretrained(start_model())
    text = str(data / "wikipedia" / "wiki_AA.txt.xz")
    folder = work / "static"
    store = store_from_text(TextOptions(text=(text,), tokenizer=start_model()), folder)
    width = start.config.hidden_size
    counted = cooccurrence_vectors(store, width)
    trained = train_language_models(store)
    network = make_network(CHOICES["lower case, punctuation"], data, work)
    steps = [one for one in read_journal(network / "journal.jsonl") if one["kind"] == "step"]
    states = np.zeros((store.tokenizer.size, 2 * WIDTH))  # only the width of the features counts
    cases = {
        "co-occurrences": (save_table(folder / "model", counted, start), "embeddings"),
        LSTM: (save_table(folder / "lstm", states, start), "last"),
        "last layer of a BERT trained as long": (network, "last"),
        "embedding table of a published BERT": (start_model(), "embeddings"),
        "last layer of a published BERT": (start_model(), "last"),
    }
    rows: dict[str, Any] = {}
    runs: dict[str, list[float]] = {}
    for name, (model, layers) in cases.items():
        read = read_pretrained(model)
        used = task_data(TASK, data, read.config.max_position_embeddings, MOST_DEV)
        head = HeadSettings(frozen=True, layers=layers, head="bilstm", units=200)
        grid = Grid(batch_size=(16,), learning_rate=(1e-3,), epochs=(10,), seeds=seeds)
        out = work / "static-vectors" / folder_name(name, TASK)
        settings = FinetuneSettings(grid=grid, head=head, track=())
        with read_by(trained.models) if name == LSTM else nullcontext():
            runs[name] = tuned_scores(used, read, out, settings)
        rows[name] = {"seeds": seeds, "dev_f1_percent": summary(runs[name])}
        print(name, runs[name], flush=True)
    return rows, {
        "training_sentences": len(used.train),
        "tokens": store.tokens,
        "language_models": {
            "minutes": round(trained.minutes, 1),
            "training_tokens": UPDATES * BATCH * LENGTH,
            "loss": round(trained.loss, 3),
        },
        "bert": {
            "minutes": round(sum(one["seconds"] for one in steps) / 60, 1),
            "training_tokens": sum(one["tokens"] for one in steps),
        },
        "scores": runs,
    }
