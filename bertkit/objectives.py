"""The pre-training objectives (paper section 3.1 and appendix A.2): logits and targets → losses.

The loss of a step is the mean of the masked-token losses plus the mean of the next-sentence
losses. Means are taken over the *whole* step: an objective returns sums and names the count that
each is divided by, and the training loop divides by the counts of all micro-batches and ranks
together. So one batch of 256 and sixteen of 16 give the same gradient, though each of the sixteen
holds another number of targets.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from bertkit.examples.stream import PretrainingBatch
from bertkit.model.heads import PretrainingModel


class Sum(NamedTuple):
    """A loss or a number of right answers, summed over a batch."""

    value: Tensor
    """A scalar; losses in nats."""
    per: str
    """The count it is divided by."""


Sums = dict[str, Sum]
"""By name; those named `..._loss`, or `loss`, are minimised."""


def pretraining_objective(model: PretrainingModel, batch: PretrainingBatch) -> Sums:
    """Masked tokens and next sentence: losses and right answers of a batch.

    Losses are computed in fp32, whatever the logits are.

    Args:
        model: the network with both heads.
        batch: label 0 = B follows A, 1 = B is random.
    """
    output = model(batch.packed, batch.target_positions)
    mlm_logits, nsp_logits = output.mlm_logits.float(), output.nsp_logits.float()
    mlm_loss = F.cross_entropy(mlm_logits, batch.target_ids, reduction="sum")
    nsp_loss = F.cross_entropy(nsp_logits, batch.next_labels, reduction="sum")
    return {
        "mlm_loss": Sum(mlm_loss, "targets"),
        "mlm_accuracy": Sum(right(mlm_logits, batch.target_ids), "targets"),
        "nsp_loss": Sum(nsp_loss, "sequences"),
        "nsp_accuracy": Sum(right(nsp_logits, batch.next_labels), "sequences"),
    }


def right(logits: Tensor, labels: Tensor) -> Tensor:
    """How many rows of logits (n, classes) are highest at their label (n,)."""
    return (logits.argmax(dim=-1) == labels).sum().float()


def total_loss(sums: Sums, counts: Mapping[str, int]) -> Tensor:
    """Every loss divided by its count over the whole step, added up: what is minimised."""
    losses = [s.value / max(1, counts[s.per]) for name, s in sums.items() if name.endswith("loss")]
    return torch.stack(losses).sum()
