"""The pre-training objectives (paper section 3.1 and appendix A.2): logits and targets → losses.

| `objectives.words`           | model            | a target is                                    |
|------------------------------|------------------|------------------------------------------------|
| masked                       | bidirectional    | the piece that was masked (MLM, task 1)        |
| left_to_right, right_to_left | causal           | the next piece, the one before (section 5.1)   |
| replaced                     | bidirectional    | whether the piece was replaced (ELECTRA); see  |
|                              |                  | `bertkit.model.electra`                       |

| `objectives.sentences` | B                                              | loss          |
|------------------------|------------------------------------------------|---------------|
| next                   | what follows A, or half the time a random text | NSP, task 2   |
| order                  | what follows A, or the two swapped (ALBERT)    | which of them |
| none                   | as with next                                   | none          |
| single                 | empty: A is all that fits                      | none          |

The loss of a step is the mean of the words' losses plus the mean of the pairs' losses. Means are
taken over the *whole* step: an objective returns sums and names the count that each is divided by,
and the training loop divides by the counts of all micro-batches and ranks together. So one batch of
256 and sixteen of 16 give the same gradient, though each of the sixteen holds another number of
targets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.errors import BertkitError, nearest
from bertkit.model.attention import DIRECTIONS
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.pretraining_data.loader import WORDS, PretrainingBatch
from bertkit.pretraining_data.pairs import PAIR_OBJECTIVES

if TYPE_CHECKING:
    from bertkit.model.electra import ReplacedTokenModel

DISCRIMINATOR_WEIGHT = 50.0
"""Of replaced-token detection beside the generator's loss (ELECTRA, appendix A)."""


@dataclass(frozen=True, kw_only=True)
class Objectives:
    """What a model is trained to do; see the tables above."""

    words: str = "masked"
    """masked, left_to_right, right_to_left or replaced."""
    sentences: str = "next"
    """next, order, none or single."""
    generator_share: float = 1 / 3
    """Of replaced: width of the generator as a share of the model's."""

    def __post_init__(self) -> None:
        for field, known in (("words", WORDS), ("sentences", PAIR_OBJECTIVES)):
            value = getattr(self, field)
            if value not in known:
                raise BertkitError(
                    f"objectives.{field} cannot be {value!r}{nearest(str(value), known)}; it is "
                    f"one of {', '.join(known)}"
                )
        if self.words == "replaced" and self.has_pairs:
            raise BertkitError(
                "objectives.words = replaced goes with objectives.sentences = none or single"
            )
        if not 0 < self.generator_share <= 1:
            raise BertkitError(
                f"objectives.generator_share must be above 0, at most 1, not {self.generator_share}"
            )

    @property
    def has_pairs(self) -> bool:
        """Whether there is a loss on sentence pairs."""
        return self.sentences in ("next", "order")

    @property
    def direction(self) -> str:
        """Of the model's attention."""
        return self.words if self.words in DIRECTIONS else "bidirectional"

    def model(self, config: ModelConfig) -> nn.Module:
        """A new network for these objectives, drawn from torch's generator."""
        if self.words == "replaced":
            from bertkit.model.electra import ReplacedTokenModel

            return ReplacedTokenModel(config, self.generator_share)
        return PretrainingModel(config, pairs=self.has_pairs)

    def function(self) -> Callable[[Any, PretrainingBatch], Sums]:
        """(model, batch) → sums."""
        if self.words == "replaced":
            return replaced_objective
        causal = self.direction != "bidirectional"
        pairs = "sop" if self.sentences == "order" else "nsp"
        return partial(pretraining_objective, words="lm" if causal else "mlm", pairs=pairs)


class LossSum(NamedTuple):
    """A loss or a number of right answers, summed over a batch."""

    value: Tensor
    """A scalar; losses in nats."""
    per: str
    """The count it is divided by."""
    weight: float = 1.0
    """Of a loss among the losses."""


Sums = dict[str, LossSum]
"""By name; those named `..._loss`, or `loss`, are minimised."""


def pretraining_objective(
    model: PretrainingModel, batch: PretrainingBatch, *, words: str = "mlm", pairs: str = "nsp"
) -> Sums:
    """Words and, if the model has a head for them, sentence pairs: losses and right answers.

    Losses are computed in fp32, whatever the logits are.

    Args:
        model: the network with its heads.
        batch: its targets are what `words` says; label 0 = B follows A, 1 = it does not.
        words: name of the words' sums.
        pairs: name of the pairs' sums.
    """
    output = model(batch.packed, batch.target_positions)
    found = cross_entropy_sums(words, output.mlm_logits, batch.target_ids, "targets")
    if output.nsp_logits is not None:
        found |= cross_entropy_sums(pairs, output.nsp_logits, batch.next_labels, "sequences")
    return found


def cross_entropy_sums(name: str, logits: Tensor, labels: Tensor, per: str) -> Sums:
    """Cross entropy and right answers of logits (n, classes) for labels (n,)."""
    logits = logits.float()
    return {
        f"{name}_loss": LossSum(F.cross_entropy(logits, labels, reduction="sum"), per),
        f"{name}_accuracy": LossSum(num_correct(logits, labels), per),
    }


def replaced_objective(model: ReplacedTokenModel, batch: PretrainingBatch) -> Sums:
    """Replaced-token detection (ELECTRA, Clark et al. 2020, section 2): losses and right answers.

    The generator's masked language model, and for every token whether it was replaced; the second
    weighs 50 times as much.

    Args:
        model: generator and discriminator.
        batch: masked.
    """
    output = model(batch.packed, batch.target_positions, batch.target_ids)
    logits, labels = output.replaced_logits.float(), output.replaced
    loss = F.binary_cross_entropy_with_logits(logits, labels, reduction="sum")
    return cross_entropy_sums("mlm", output.mlm_logits, batch.target_ids, "targets") | {
        "rtd_loss": LossSum(loss, "tokens", DISCRIMINATOR_WEIGHT),
        "rtd_accuracy": LossSum(((logits > 0) == labels.bool()).sum().float(), "tokens"),
        "rtd_share": LossSum(labels.sum(), "tokens"),
    }


def num_correct(logits: Tensor, labels: Tensor) -> Tensor:
    """How many rows of logits (n, classes) are highest at their label (n,)."""
    return (logits.argmax(dim=-1) == labels).sum().float()


def total_loss(sums: Sums, counts: Mapping[str, int]) -> Tensor:
    """Every loss divided by its count over the whole step, weighted, added up: it is minimised."""
    losses = [
        s.weight * s.value / max(1, counts[s.per])
        for name, s in sums.items()
        if name.endswith("loss")
    ]
    return torch.stack(losses).sum()
