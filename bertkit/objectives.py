"""The pre-training losses (paper section 3.1 and appendix A.2): logits and targets → losses.

The loss of a step is the mean of the token losses plus the mean of the pair losses. Means are
taken over the *whole* step: an objective returns sums and names the count that each is divided by,
and the training loop divides by the counts of all micro-batches and ranks together. So one batch of
256 and sixteen of 16 give the same gradient, although the sixteen differ in their number of
targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:  # the losses of tasks need none of these
    from bertkit.model.heads import PretrainingModel, ReplacedTokenModel
    from bertkit.pretraining_data.loader import PretrainingBatch

DISCRIMINATOR_WEIGHT = 50.0
"""The weight of the replaced-token loss relative to the generator's (ELECTRA, appendix A)."""


class LossSum(NamedTuple):
    """A loss or a number of correct predictions, summed over a batch."""

    value: Tensor
    """A scalar tensor; losses are in nats."""
    per: str
    """The name of the count that the sum is divided by, such as "targets"."""
    weight: float = 1.0
    """The weight of this loss in the total loss."""


Sums = dict[str, LossSum]
"""Sums by name; those whose name ends in `loss` are minimised."""


def cross_entropy_sums(name: str, logits: Tensor, labels: Tensor, per: str) -> Sums:
    """Sum cross entropy and correct predictions of logits (n, classes) for labels (n,)."""
    plain = torch.compiler.is_compiling() or logits.dtype == torch.float64
    if logits.device.type == "cpu" and not plain and bool((labels >= 0).all()):  # none is ignored
        loss, correct = CachedCrossEntropy.apply(logits, labels)  # type: ignore[no-untyped-call]
    else:
        logits = logits.float()
        loss = F.cross_entropy(logits, labels, reduction="sum")
        correct = num_correct(logits, labels)
    return {f"{name}_loss": LossSum(loss, per), f"{name}_accuracy": LossSum(correct, per)}


CACHED_LOGITS = 1 << 18
"""The number of logits whose cross entropy is computed at a time on a CPU: one megabyte."""


class CachedCrossEntropy(torch.autograd.Function):
    """The sum of cross entropies and the correct predictions on a CPU, a few rows at a time.

    Logits over a vocabulary fill tens of megabytes, and the plain formula writes and reads several
    fp32 tensors of this size, which takes as long as the rest of a small network. Here a few rows
    pass through all steps while they are in the cache, and only their gradient is kept, in the
    dtype of the logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the two sums of logits (n, classes) for labels (n,)."""
        rows = max(1, CACHED_LOGITS // logits.shape[1])
        gradients = torch.empty_like(logits) if ctx.needs_input_grad[0] else None
        losses = torch.empty(len(logits))
        correct = torch.zeros(())
        for start in range(0, len(logits), rows):
            part, own = logits[start : start + rows].float(), labels[start : start + rows, None]
            highest, at_label = part.amax(-1, keepdim=True), part.gather(1, own)
            hits = (at_label == highest).squeeze(1)  # another class may be as high
            correct += num_correct(part[hits], own[hits, 0])
            powers = part.sub(highest).exp_()
            total = powers.sum(-1, keepdim=True)
            losses[start : start + rows] = (total.log() + highest - at_label).squeeze(1)
            if gradients is not None:
                shares = powers.div_(total).scatter_add_(1, own, torch.full_like(total, -1.0))
                gradients[start : start + rows] = shares
        if gradients is not None:
            ctx.save_for_backward(gradients)
        ctx.mark_non_differentiable(correct)
        return losses.sum(), correct

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
        """Return the gradients of the logits."""
        [gradients] = ctx.saved_tensors
        return gradients.mul_(gradient), None


CrossEntropy = Callable[[str, Tensor, Tensor, str], Sums]
"""`cross_entropy_sums`, or a compiled version of it."""


def pretraining_objective(
    model: PretrainingModel,
    batch: PretrainingBatch,
    *,
    token: str = "mlm",
    pair: str = "nsp",
    cross_entropy: CrossEntropy = cross_entropy_sums,
) -> Sums:
    """Sum the losses and correct predictions of tokens and, if the model has a pair head, of pairs.

    The sums are named by the objectives: "mlm" or "lm", and "nsp" or "sop". Losses are computed in
    fp32, whatever the type of the logits.
    """
    output = model(batch.packed, batch.target_positions)
    found = cross_entropy(token, output.mlm_logits, batch.target_ids, "targets")
    if output.nsp_logits is not None:
        found |= cross_entropy(pair, output.nsp_logits, batch.next_labels, "sequences")
    return found


def replaced_objective(
    model: ReplacedTokenModel,
    batch: PretrainingBatch,
    *,
    cross_entropy: CrossEntropy = cross_entropy_sums,
) -> Sums:
    """Return the sums of replaced-token detection (ELECTRA, Clark et al. 2020, section 2).

    The generator is a masked language model, and the discriminator predicts for every token whether
    it was replaced. The discriminator's loss has a weight of 50.
    """
    output = model(batch.packed, batch.target_positions, batch.target_ids)
    logits, labels = output.replaced_logits.float(), output.replaced
    loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return cross_entropy("mlm", output.mlm_logits, batch.target_ids, "targets") | {
        "rtd_loss": LossSum(loss, "tokens", DISCRIMINATOR_WEIGHT),
        "rtd_accuracy": LossSum(((logits > 0) == labels.bool()).sum().float(), "tokens"),
        "rtd_share": LossSum(labels.sum(), "tokens"),
    }


def num_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """Count the rows of logits (n, classes) that are highest at their label (n,)."""
    return (logits.argmax(dim=-1) == labels).sum().float()


def total_loss(sums: Sums, counts: Mapping[str, int]) -> Tensor:
    """Return the weighted sum of all losses, each divided by its count over the whole step."""
    losses = [
        s.weight * s.value / max(1, counts[s.per])
        for name, s in sums.items()
        if name.endswith("loss")
    ]
    return torch.stack(losses).sum()
