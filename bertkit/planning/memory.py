"""The memory of a pre-training step by part, from the sizes alone, and the batch that fits.

What the forward pass keeps is derived from `model/encoder.py`, `model/attention.py` and
`model/heads.py`; a test compares it with what torch saves. The weights and Adam's two moments are
fp32 in either precision.
"""

from __future__ import annotations

from dataclasses import dataclass

from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import count_parameters
from bertkit.planning.corpus import BatchSize, largest_batch
from bertkit.planning.measure import GIB, Machine
from bertkit.pretraining_data.pairs import EXAMPLE_DTYPE
from bertkit.training.data import HELD_OUT_BATCH
from bertkit.training.recipe import PretrainRecipe

USABLE = 0.9
"""Share of a machine's memory that is planned with; the rest is for allocator and system."""
WINDOW_TOKENS = 108_000_000
"""Tokens whose examples are planned together: eight shards of 64 MB."""
KERNEL_BYTES = 1.25 * GIB
"""Kept by oneDNN on a CPU in bf16: a kernel for each new shape of a product, at most 1,024. Nearly
every batch has another number of tokens, so it fills within some fifty updates, whatever the
network. Attention has shapes of its own for every length."""
HEAP = 0.4 * GIB
"""The most that the C library's heap keeps on a CPU of what was freed; larger buffers go back."""


def activation_bytes(
    config: ModelConfig, batch: BatchSize, precision: str, device: str = "cpu"
) -> float:
    """Bytes that the forward pass of a step keeps for the backward pass.

    With w = 2 bytes in bf16 and 4 in fp32, hidden size h, feed-forward width f, L layers,
    vocabulary V, n tokens, t targets, s sequences; masks of d and e bytes with dropout, 0 without:

        embeddings    (24 + 8 + (4 + e) h) n                 ids, LayerNorm's input, mask
        a layer       w h n + attention + ((2 w + 8 + 2 d) h + 2 w f + 16) rows
                      inputs of the matrices, of GELU, and in fp32 of both LayerNorms; masks
        heads         (w h + 8) rows + (3 w h + 4 V) t + w h s
        bf16 copies   2 (L (4 h^2 + 2 h f) + V h + 2 h^2)    of the weights, by autocast

    rows is n, and t + s in the last layer, which computes those tokens alone. A mask is of the
    type that it thins on a CPU (d = w, e = 4) and of booleans elsewhere (d = e = 1).

    Args:
        config: the network.
        batch: one micro-batch.
        precision: bf16 or fp32.
        device: decides the attention kernel.
    """
    h, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    wide = 2 if precision == "bf16" else 4
    mask = dropout_bytes(config.hidden_dropout_prob, wide, device)
    first_mask = dropout_bytes(config.hidden_dropout_prob, 4, device)
    n, last = batch.tokens, batch.targets + batch.sequences
    rows = (layers - 1) * n + last
    embeddings = (24 + 8 + (4 + first_mask) * h) * n
    inside = layers * (wide * h * n + attention_bytes(config, batch, wide, device))
    inside += ((2 * wide + 8 + 2 * mask) * h + 2 * wide * inner + 16) * rows
    heads = (wide * h + 8) * last + wide * h * batch.sequences
    heads += (3 * wide * h + 4 * config.vocab_size) * batch.targets
    copies = 0
    if precision == "bf16":
        copies = 2 * (layers * (4 * h + 2 * inner) + config.vocab_size + 2 * h) * h
    return embeddings + inside + heads + copies


def dropout_bytes(probability: float, wide: int, device: str) -> int:
    """Bytes an element of the mask of a dropout, of elements of `wide` bytes."""
    if not probability:
        return 0
    return wide if device == "cpu" else 1


def attention_bytes(config: ModelConfig, batch: BatchSize, wide: int, device: str) -> float:
    """Bytes that one layer's attention keeps, between its two matrices.

    Written out (CPU, but in fp32 without dropout): query, key and value, once more where lengths
    differ, and for each pair of tokens and head its weight in fp32, what is multiplied with the
    values, and the mask of a dropout. Flash kernels keep query, key, value, their output and a sum
    for each row.
    """
    width = wide * config.hidden_size * batch.tokens
    heads = config.num_attention_heads
    dropout = config.attention_probs_dropout_prob > 0
    sums = 4 * heads * batch.tokens
    if device != "cpu":
        if wide == 2 and not dropout:
            return 3 * width + sums
        return 7 * width + sums + wide * batch.squares  # padded copies and their mask
    if wide == 4 and not dropout:
        return 3 * width + sums + (width if batch.mixed else 0)
    mask = dropout_bytes(config.attention_probs_dropout_prob, wide, device)
    pairs = heads * batch.squares
    return (6 if batch.mixed else 3) * width + pairs * (4 + wide + mask)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of a training process by part, and the most that are in use at a time."""

    program: float
    weights: float
    gradients: float
    moments: float
    """Adam's two averages."""
    activations: float
    """Kept by the forward pass, with the bf16 copies of the weights."""
    logits: float
    """Passing: gradients between the loss and the vocabulary projection."""
    evaluation: float
    """In its turn: what a batch of held-out examples takes, mostly logits."""
    data: float
    """The batch, and the table of the examples of a window."""
    kept: float
    """On a CPU, by libraries: `KERNEL_BYTES` and `HEAP`."""
    peak: float
    """Less than the sum: gradients of a single micro-batch come as activations go."""


def memory_needed(
    config: ModelConfig,
    batch: BatchSize,
    precision: str,
    machine: Machine,
    micro_batches: int = 1,
    corpus_tokens: float = WINDOW_TOKENS,
) -> Memory:
    """Bytes by part for micro-batches of one size.

    The peak is where the backward pass begins, or where it ends, with every gradient and the dense
    one of the word embeddings beside the tied decoder's, or in an evaluation.
    """
    parameters = count_parameters(config, heads=True)
    wide = 2 if precision == "bf16" else 4
    table = 4 * config.vocab_size * config.hidden_size
    activations = activation_bytes(config, batch, precision, machine.device)
    per_piece = max(8 * batch.targets, wide * batch.targets + (wide + 4) * config.hidden_size)
    logits = config.vocab_size * per_piece
    examples = min(corpus_tokens, WINDOW_TOKENS) / max(1.0, batch.tokens / batch.sequences)
    data = 24 * batch.tokens + EXAMPLE_DTYPE.itemsize * examples
    gradients = 4.0 * parameters
    held_out = HELD_OUT_BATCH / batch.sequences
    evaluation = (6 + wide) * config.vocab_size * batch.targets * held_out
    evaluation += (2 * wide * config.intermediate_size + 8 * config.hidden_size) * (
        batch.tokens * held_out
    )
    begins = activations + logits + (gradients if micro_batches > 1 else 0)
    kept = 0.0
    if machine.device == "cpu":
        kept = min(HEAP, activations + logits) + (KERNEL_BYTES if precision == "bf16" else 0)
    return Memory(
        program=machine.program,
        weights=4.0 * parameters,
        gradients=gradients,
        moments=8.0 * parameters,
        activations=activations,
        logits=logits,
        evaluation=evaluation,
        data=data,
        kept=kept,
        peak=machine.program
        + 12.0 * parameters
        + data
        + kept
        + max(begins, gradients + table, evaluation),
    )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How the updates of a phase fit into a machine's memory."""

    micro_batches: int
    """Into which an update is cut: the recipe's number, or more where that would not fit."""
    micro_batch: int
    """Sequences in the largest of them."""
    largest: int
    """Sequences of full length in the largest micro-batch that fits."""
    memory: Memory
    """With every sequence of full length."""


def fit_memory(
    config: ModelConfig,
    recipe: PretrainRecipe,
    phase: int,
    machine: Machine,
    corpus_tokens: float = WINDOW_TOKENS,
) -> Fit:
    """The largest micro-batch of a phase that fits, and the one to use.

    Raises:
        BertkitError: the machine has no room for one sequence.
    """

    def needed(micro_batch: int, micro_batches: int) -> Memory:
        batch = largest_batch(micro_batch, recipe, phase)
        precision = machine.precision(recipe.training.precision)
        return memory_needed(config, batch, precision, machine, micro_batches, corpus_tokens)

    room, sequences = USABLE * machine.memory, recipe.phases.batch_sizes[phase]
    if needed(1, 1).peak > room:
        raise BertkitError(
            f"one sequence of {recipe.phases.lengths[phase]} tokens needs "
            f"{needed(1, 1).peak / GIB:.1f} GiB, and {machine.title} has "
            f"{machine.memory / GIB:.1f} GiB; choose a smaller network or a larger machine"
        )
    micro_batches = recipe.training.accumulate
    while needed(-(-sequences // micro_batches), micro_batches).peak > room:
        micro_batches += 1
        if micro_batches > sequences:
            raise BertkitError(
                f"an update cut into single sequences does not fit into {machine.title}, as "
                "gradients stay in between; choose a smaller network or a larger machine"
            )
    low, high = 1, 2
    while needed(high, micro_batches).peak <= room:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        fits = needed(middle, micro_batches).peak <= room
        low, high = (middle, high) if fits else (low, middle)
    micro_batch = -(-sequences // micro_batches)
    return Fit(
        micro_batches=micro_batches,
        micro_batch=micro_batch,
        largest=low,
        memory=needed(micro_batch, micro_batches),
    )
