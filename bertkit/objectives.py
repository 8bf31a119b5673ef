"""The pre-training objectives (paper section 3.1 and appendix A.2): logits and targets → losses.

The loss of a step is the mean of the masked-token losses plus the mean of the next-sentence
losses. Means are taken over the *whole* step: the functions here return sums, and the training
loop divides by the counts of all micro-batches and ranks together. So one batch of 256 and
sixteen of 16 give the same gradient, though each of the sixteen holds another number of targets.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F

from bertkit.model.heads import PretrainingOutput
from bertkit.shapes import Scalar, SequenceLabels, TargetIndices


class PretrainingSums(NamedTuple):
    """Sums over one batch; divide by the counts of the whole step."""

    mlm_loss_sum: Scalar
    """Cross entropy in nats, summed over targets."""
    mlm_correct: Scalar
    """Targets whose most probable piece is the right one."""
    nsp_loss_sum: Scalar
    """Cross entropy in nats, summed over sequences."""
    nsp_correct: Scalar
    """Sequences whose next-sentence label is right."""


class PretrainingLoss(NamedTuple):
    """Losses of one step, in nats."""

    total: Scalar
    """`mlm` + `nsp`: what is minimised."""
    mlm: Scalar
    """Mean over targets."""
    nsp: Scalar
    """Mean over sequences."""


def pretraining_sums(
    output: PretrainingOutput, target_ids: TargetIndices, next_labels: SequenceLabels
) -> PretrainingSums:
    """Loss and correct answers of one batch, summed; computed in fp32 whatever the logits are.

    Args:
        output: logits of the network.
        target_ids: (targets,) the pieces that stood at the masked positions.
        next_labels: (sequences,) 0 = B follows A, 1 = B is random.
    """
    mlm_logits, nsp_logits = output.mlm_logits.float(), output.nsp_logits.float()
    target_ids, next_labels = target_ids.long(), next_labels.long()
    return PretrainingSums(
        mlm_loss_sum=F.cross_entropy(mlm_logits, target_ids, reduction="sum"),
        mlm_correct=(mlm_logits.argmax(dim=-1) == target_ids).sum().float(),
        nsp_loss_sum=F.cross_entropy(nsp_logits, next_labels, reduction="sum"),
        nsp_correct=(nsp_logits.argmax(dim=-1) == next_labels).sum().float(),
    )


def pretraining_loss(sums: PretrainingSums, targets: int, sequences: int) -> PretrainingLoss:
    """The loss of a step, or this batch's share of it.

    Args:
        sums: of one batch.
        targets: masked positions of the whole step, over all micro-batches and ranks.
        sequences: sequences of the whole step.
    """
    mlm = sums.mlm_loss_sum / max(targets, 1)
    nsp = sums.nsp_loss_sum / max(sequences, 1)
    return PretrainingLoss(total=mlm + nsp, mlm=mlm, nsp=nsp)
