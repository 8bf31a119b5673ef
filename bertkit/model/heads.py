"""Pre-training networks and their losses: BERT's (paper section 3.1) and replaced-token detection.

In replaced-token detection (ELECTRA, Clark et al. 2020) a small generator replaces masked tokens by
samples from its distribution; the discriminator, which is the model to keep, predicts for every
token whether it is the original. They share their embeddings (section 3.2 of that paper). No
gradient flows through the sampling.

The loss of a step is the mean of the token losses plus the mean of the pair losses. Means are
taken over the *whole* step: an objective returns sums and names the count that each is divided by,
and the training loop divides by the counts of all micro-batches and ranks together. So one batch of
256 and sixteen of 16 give the same gradient, although their numbers of targets differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bertkit.model.encoder import (
    Encoder,
    Layer,
    ModelConfig,
    activation,
    as_residual,
    initialize,
    layer_sequence,
    run_layers,
)
from bertkit.pretraining_data.batch import (
    Hidden,
    NextLogits,
    Packed,
    Pooled,
    Rows,
    TargetIndices,
    VocabularyLogits,
)

if TYPE_CHECKING:
    from bertkit.pretraining_data.loader import PretrainingBatch


class LanguageHead(nn.Module):
    """A head that maps hidden states at target positions to logits over the vocabulary.

    It predicts the token at the position (masked language model) or the adjacent one (causal
    language model). The decoder is the word embedding matrix itself ("tied"), with a separate bias.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.Linear(config.hidden_size, config.embedding_width)
        self.norm = nn.LayerNorm(config.embedding_width, eps=config.layer_norm_eps)
        self.bias = nn.Parameter(torch.zeros(config.vocab_size))
        initialize(self, config)

    def forward(self, hidden: Hidden, word_embeddings: nn.Embedding) -> VocabularyLogits:
        """Return (targets, vocabulary) logits for hidden states (targets, width)."""
        product = aligned_linear if hidden.is_cuda else F.linear
        return product(self.transform(hidden), word_embeddings.weight, self.bias)

    def transform(self, hidden: Rows) -> Tensor:
        """Return (targets, embedding width): what is multiplied by the word embeddings."""
        return self.norm(activation(self.dense(hidden), self.config))


ALIGNMENT = 64
"""CUDA's fast matrix products need sizes that are multiples of 8, and 64 fills their tiles."""


def aligned_linear(x: Rows, weight: Tensor, bias: Tensor) -> Tensor:
    """Return what `F.linear` does, computed with a number of columns that is a multiple of 64.

    BERT's vocabulary of 30,522 tokens is not a multiple of 8. The weights, (columns, width), get
    rows of zeros for the product only; parameters, results and gradients are those of `F.linear`.
    """
    columns = len(weight)
    missing = -columns % ALIGNMENT
    if not missing:
        return F.linear(x, weight, bias)
    weight, bias = F.pad(weight, (0, 0, 0, missing)), F.pad(bias, (0, missing))
    return F.linear(x, weight, bias)[:, :columns]


class NextSentenceHead(nn.Module):
    """A head that maps the pooled [CLS] to logits for "B follows A" (0) and "it does not" (1).

    The order of labels is Google's. Label 1 means a random B, or, in sentence-order prediction,
    that A and B are swapped.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, 2)
        initialize(self, config)

    def forward(self, pooled: Pooled) -> NextLogits:
        """Return (sequences, 2) logits."""
        return self.dense(pooled)


class PretrainingOutput(NamedTuple):
    """The logits from which the pre-training losses are computed."""

    mlm_logits: VocabularyLogits
    nsp_logits: NextLogits | None
    """None if the model has no head for sentence pairs."""


class PretrainingModel(nn.Module):
    """An encoder with its pre-training heads.

    Args:
        config: the model's sizes.
        pairs: whether to add a head for sentence pairs. Without it the pooler is not trained.
    """

    def __init__(self, config: ModelConfig, *, pairs: bool = True) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.mlm = LanguageHead(config)
        self.nsp = NextSentenceHead(config) if pairs else None
        if not pairs:
            self.encoder.pooler.requires_grad_(False)

    def forward(self, packed: Packed, target_positions: TargetIndices) -> PretrainingOutput:
        """Return the logits at the target positions and those of each sentence pair.

        The targets are (targets,) indices into the tokens of the batch. The vocabulary projection,
        the largest matrix of the network, never runs on the 85 % of tokens that carry no loss, nor
        does most of the last layer.
        """
        words = self.encoder.word_embeddings
        if self.nsp is None:
            return PretrainingOutput(self.mlm(self.encoder(packed, target_positions), words), None)
        summaries = self.encoder.summary_tokens(packed)
        hidden = self.encoder(packed, torch.cat([summaries, target_positions]))
        summary, targets = hidden.split([len(summaries), len(target_positions)])
        return PretrainingOutput(
            mlm_logits=self.mlm(targets, words), nsp_logits=self.nsp(self.encoder.pool(summary))
        )


class ReplacedTokenOutput(NamedTuple):
    """The tensors from which the two losses are computed."""

    mlm_logits: VocabularyLogits
    """The generator's logits at the targets."""
    replaced_logits: Tensor
    """(tokens,) the discriminator's logits; above 0 if it considers the token replaced."""
    replaced: Tensor
    """(tokens,) 1.0 if the token differs from the original; 0.0 otherwise, also at a target whose
    sample is the original."""


class Generator(nn.Module):
    """A narrow encoder on top of the discriminator's embeddings, with a masked-language-model head.

    Its width and number of heads are a `share` of those of the discriminator, whose config it gets.
    """

    def __init__(self, config: ModelConfig, share: float) -> None:
        super().__init__()
        self.config = generator_config(config, share)
        width = self.config.hidden_size
        self.projection = nn.Linear(config.embedding_width, width)
        depth = 1 if config.share_layers else config.num_hidden_layers
        self.layers = nn.ModuleList(Layer(self.config) for _ in range(depth))
        self.mlm = LanguageHead(self.config)
        initialize(self, self.config)

    def forward(
        self, embeddings: Hidden, packed: Packed, targets: TargetIndices, words: nn.Embedding
    ) -> VocabularyLogits:
        """Return (targets, vocabulary) logits from embeddings (tokens, embedding width)."""
        stack = layer_sequence(self.layers, self.config)
        hidden = as_residual(self.projection(embeddings))
        return self.mlm(run_layers(stack, hidden, packed, targets), words)


class ReplacedTokenHead(nn.Module):
    """A head that gives one logit per token: a linear layer with GELU and a linear output layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.output = nn.Linear(config.hidden_size, 1)
        initialize(self, config)

    def forward(self, hidden: Hidden) -> Tensor:
        """Map hidden states (tokens, width) to logits (tokens,)."""
        return self.output(activation(self.dense(hidden), self.config)).squeeze(-1)


class ReplacedTokenModel(nn.Module):
    """The generator and the discriminator, for pre-training; see `Generator` for the arguments."""

    def __init__(self, config: ModelConfig, share: float) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.encoder.pooler.requires_grad_(False)  # no loss depends on it
        self.rtd = ReplacedTokenHead(config)
        self.generator = Generator(config, share)

    def forward(
        self, packed: Packed, target_positions: TargetIndices, target_ids: TargetIndices
    ) -> ReplacedTokenOutput:
        """Replace the masked tokens by the generator's samples, and run the discriminator.

        The batch is masked at the targets: (targets,) indices into its tokens, with their original
        ids. Samples come from torch's random generator, which the training loop seeds at every
        step.
        """
        encoder = self.encoder
        logits = self.generator(
            encoder.embeddings(packed), packed, target_positions, encoder.word_embeddings
        )
        with torch.no_grad():
            drawn = sample_rows(logits.float().softmax(-1))
        ids = packed.ids.index_copy(0, target_positions, drawn)
        replaced = torch.zeros(len(ids), device=ids.device)
        replaced[target_positions] = (drawn != target_ids).float()
        hidden = encoder(replace(packed, ids=ids))
        return ReplacedTokenOutput(logits, self.rtd(hidden), replaced)

    def whole_generator(self) -> tuple[Encoder, LanguageHead]:
        """Return the generator as a separate encoder that shares its weights, and its head."""
        with torch.device("meta"):  # every tensor but the pooler, which is unused, is replaced
            whole, shared = Encoder(self.generator.config), self.encoder
        whole.word_embeddings = shared.word_embeddings
        whole.position_embeddings = shared.position_embeddings
        whole.segment_embeddings = shared.segment_embeddings
        whole.embedding_norm = shared.embedding_norm
        whole.projection, whole.layers = self.generator.projection, self.generator.layers
        return whole, self.generator.mlm


def sample_rows(probabilities: Tensor) -> Tensor:
    """Draw an index from each row of (rows, classes) probabilities.

    The draws are those of `torch.multinomial(probabilities, 1)`, which computes them in the same
    way but first checks its input, and so makes the host wait for a GPU.
    """
    return (probabilities / torch.empty_like(probabilities).exponential_()).argmax(dim=-1)


def generator_config(config: ModelConfig, share: float) -> ModelConfig:
    """Return the generator's config: the discriminator's depth and head width, but fewer heads."""
    heads = max(1, round(config.num_attention_heads * share))
    width = heads * config.hidden_size // config.num_attention_heads
    return replace(
        config,
        hidden_size=width,
        num_attention_heads=heads,
        intermediate_size=max(1, config.intermediate_size * width // config.hidden_size),
        embedding_size=config.embedding_width,
    )


def count_parameters(config: ModelConfig, *, heads: bool = False) -> int:
    """Return the number of parameters of the encoder with its pooler, or of the whole network.

    The paper's 110M and 340M are base and large without heads and with a vocabulary of 30,522. With
    `heads`, the two pre-training heads are included; the tied decoder is counted once.
    """
    with torch.device("meta"):
        network = PretrainingModel(config) if heads else Encoder(config)
    return sum(parameter.numel() for parameter in network.parameters())


# Losses -------------------------------------------------------------------------------------------

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
            part, targets = logits[start : start + rows].float(), labels[start : start + rows, None]
            highest, at_label = part.amax(-1, keepdim=True), part.gather(1, targets)
            hits = (at_label == highest).squeeze(1)  # another class may be as high
            correct += num_correct(part[hits], targets[hits, 0])
            powers = part.sub(highest).exp_()
            total = powers.sum(-1, keepdim=True)
            losses[start : start + rows] = (total.log() + highest - at_label).squeeze(1)
            if gradients is not None:
                shares = powers.div_(total).scatter_add_(1, targets, torch.full_like(total, -1.0))
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
    sums = cross_entropy(token, output.mlm_logits, batch.target_ids, "targets")
    if output.nsp_logits is not None:
        sums |= cross_entropy(pair, output.nsp_logits, batch.next_labels, "sequences")
    return sums


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
