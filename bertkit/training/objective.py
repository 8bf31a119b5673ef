"""The pre-training objectives as the loop takes them, and what a blind guesser reaches."""

from __future__ import annotations

import numpy as np

from bertkit.corpus.store import TokenStore
from bertkit.examples.stream import PretrainingBatch
from bertkit.model.heads import PretrainingModel
from bertkit.objectives import pretraining_sums
from bertkit.training.loop import Sum, Sums


def pretraining_objective(model: PretrainingModel, batch: PretrainingBatch) -> Sums:
    """MLM and NSP losses and right answers of a batch (paper, tasks 1 and 2)."""
    output = model(batch.packed, batch.target_positions)
    sums = pretraining_sums(output, batch.target_ids, batch.next_labels)
    return {
        "mlm_loss": Sum(sums.mlm_loss_sum, "targets"),
        "mlm_accuracy": Sum(sums.mlm_correct, "targets"),
        "nsp_loss": Sum(sums.nsp_loss_sum, "sequences"),
        "nsp_accuracy": Sum(sums.nsp_correct, "sequences"),
    }


def baselines(store: TokenStore, random_share: float) -> dict[str, float]:
    """What a model that looks at nothing reaches.

    Args:
        store: gives the unigram counts.
        random_share: measured share of NSP examples with a random second sentence.

    Returns:
        unigram_entropy in nats: MLM loss of predicting the frequency of each piece.
        most_frequent_accuracy: MLM accuracy of always the commonest piece.
        nsp_majority: NSP accuracy of always the commoner label.
    """
    shares = store.unigrams[store.unigrams > 0] / store.unigrams.sum()
    return {
        "unigram_entropy": float(-(shares * np.log(shares)).sum()),
        "most_frequent_accuracy": float(shares.max()),
        "nsp_majority": max(random_share, 1 - random_share),
    }
