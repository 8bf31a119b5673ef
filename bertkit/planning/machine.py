"""What a machine can do, and what fits into its memory, by arithmetic from the sizes alone.

What the forward pass keeps is derived from `model/encoder.py`, `model/attention.py` and
`model/heads.py`; a test compares it with what torch saves. GPUs of the table can be planned for
without having one, and so can networks that are too large to be tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

from bertkit.errors import BertkitError, nearest
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import count_parameters
from bertkit.planning import GIB, HERE
from bertkit.planning.corpus import BatchSize, largest_batch
from bertkit.pretraining_data.pairs import EXAMPLE_DTYPE
from bertkit.training.data import HELD_OUT_BATCH
from bertkit.training.recipe import PretrainRecipe

USABLE = 0.9
"""Share of a machine's memory that is planned with; the rest is for allocator and system."""
CONTEXT_BYTES = 0.6 * GIB
"""Assumed for the libraries on a GPU, or where the system does not tell."""
WINDOW_TOKENS = 108_000_000
"""Tokens whose examples are planned together: eight shards of 64 MB."""
KERNEL_BYTES = 1.25 * GIB
"""Kept by oneDNN on a CPU in bf16: a kernel for each new shape of a product, at most 1,024. Nearly
every batch has another number of tokens, so it fills within some fifty updates."""
HEAP = 0.4 * GIB
"""The most that the C library's heap keeps on a CPU of what was freed; larger buffers go back."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The memory and the speed of one device."""

    title: str
    device: str
    """cpu, cuda or mps."""
    memory: float
    """Bytes."""
    peak: Mapping[str, float]
    """FLOP/s of matrix products, by precision; one that it lacks is absent."""
    mfu: Mapping[str, float]
    """Assumed share of the peak, by precision; empty where it is measured."""
    program: float = CONTEXT_BYTES
    """Bytes taken by interpreter and libraries."""

    def precision(self, name: str) -> str:
        """The precision called `name`; "auto" is bf16 where the machine is made for it."""
        if name != "auto":
            return name
        return "bf16" if "bf16" in self.peak else "fp32"


def card(title: str, gib: int, *, bf16: float | None, fp32: float, mfu: float = 0.3) -> Machine:
    """A GPU by its data sheet; TFLOP/s of dense bf16 matrix units and of plain fp32."""
    peak = {"fp32": fp32 * 1e12} | ({} if bf16 is None else {"bf16": bf16 * 1e12})
    shares = {"bf16": mfu, "fp32": 0.6}
    return Machine(title=title, device="cuda", memory=gib * GIB, peak=peak, mfu=shares)


MACHINES = {
    "t4": card("NVIDIA T4", 15, bf16=None, fp32=8.1),
    "v100": card("NVIDIA V100 SXM2 16 GB", 16, bf16=None, fp32=15.7),
    "a10": card("NVIDIA A10", 22, bf16=125, fp32=31.2, mfu=0.4),
    "l4": card("NVIDIA L4", 22, bf16=121, fp32=30.3, mfu=0.4),
    "rtx-4090": card("NVIDIA RTX 4090", 24, bf16=165, fp32=82.6, mfu=0.35),
    "a100-40": card("NVIDIA A100 SXM 40 GB", 40, bf16=312, fp32=19.5),
    "a100-80": card("NVIDIA A100 SXM 80 GB", 79, bf16=312, fp32=19.5),
    "h100": card("NVIDIA H100 SXM", 79, bf16=989, fp32=66.9, mfu=0.25),
    "h200": card("NVIDIA H200 SXM", 139, bf16=989, fp32=66.9, mfu=0.25),
}
"""GPUs by name. Peaks are the makers'; every MFU is an assumption, none measured with bertkit."""


def find_machine(name: str, precision: str, mfu: float | None = None) -> Machine:
    """A machine of the table, with another MFU where one is given.

    Raises:
        BertkitError: no machine has that name, it lacks the precision, or the MFU is impossible.
    """
    if mfu is not None and not 0 < mfu <= 1:
        raise BertkitError(f"--mfu is a share of the peak, above 0 and at most 1, not {mfu}")
    if name not in MACHINES:
        raise BertkitError(f"no machine is called '{name}'{nearest(name, (*MACHINES, HERE))}")
    machine = MACHINES[name]
    precision = machine.precision(precision)
    if precision not in machine.peak:
        raise BertkitError(
            f"{machine.title} does not compute in {precision}; add --training.precision fp32"
        )
    return machine if mfu is None else replace(machine, mfu={precision: mfu})


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

    rows is n, and t + s in the last layer, which computes those tokens alone. A mask is of the type
    that it thins on a CPU (d = w, e = 4) and of booleans elsewhere (d = e = 1).
    """
    h, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    wide = 2 if precision == "bf16" else 4
    mask = mask_bytes(config.hidden_dropout_prob, wide, device)
    n, last = batch.tokens, batch.targets + batch.sequences
    rows = (layers - 1) * n + last
    kept = (24 + 8 + (4 + mask_bytes(config.hidden_dropout_prob, 4, device)) * h) * n
    kept += layers * (wide * h * n + attention_bytes(config, batch, wide, device))
    kept += ((2 * wide + 8 + 2 * mask) * h + 2 * wide * inner + 16) * rows
    kept += (wide * h + 8) * last + wide * h * batch.sequences
    kept += (3 * wide * h + 4 * config.vocab_size) * batch.targets
    if precision == "bf16":
        kept += 2 * (layers * (4 * h + 2 * inner) + config.vocab_size + 2 * h) * h
    return kept


def mask_bytes(probability: float, wide: int, device: str) -> int:
    """Bytes per element of the mask of a dropout, for activations of `wide` bytes."""
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
    width, heads = wide * config.hidden_size * batch.tokens, config.num_attention_heads
    dropout, sums = config.attention_probs_dropout_prob, 4 * heads * batch.tokens
    if device != "cpu":
        if wide == 2 and not dropout:
            return 3 * width + sums
        return 7 * width + sums + wide * batch.squares  # padded copies and their mask
    if wide == 4 and not dropout:
        return 3 * width + sums + (width if batch.mixed else 0)
    pairs = heads * batch.squares * (4 + wide + mask_bytes(dropout, wide, device))
    return (6 if batch.mixed else 3) * width + pairs


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
    """Bytes by part for micro-batches of one size; weights and moments are fp32.

    The peak is where the backward pass begins, or where it ends, with every gradient and the dense
    one of the word embeddings beside the tied decoder's, or in an evaluation.
    """
    parameters, vocabulary, h = (
        count_parameters(config, heads=True), config.vocab_size, config.hidden_size,
    )  # fmt: skip
    wide = 2 if precision == "bf16" else 4
    activations = activation_bytes(config, batch, precision, machine.device)
    logits = vocabulary * max(8 * batch.targets, wide * batch.targets + (wide + 4) * h)
    examples = min(corpus_tokens, WINDOW_TOKENS) / max(1.0, batch.tokens / batch.sequences)
    data = 24 * batch.tokens + EXAMPLE_DTYPE.itemsize * examples
    gradients = 4.0 * parameters
    evaluation = (6 + wide) * vocabulary * batch.targets
    evaluation += (2 * wide * config.intermediate_size + 8 * h) * batch.tokens
    evaluation *= HELD_OUT_BATCH / batch.sequences
    kept = 0.0
    if machine.device == "cpu":
        kept = min(HEAP, activations + logits) + (KERNEL_BYTES if precision == "bf16" else 0)
    begins = activations + logits + (gradients if micro_batches > 1 else 0)
    most = max(begins, gradients + 4 * vocabulary * h, evaluation)
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
        peak=machine.program + 12.0 * parameters + data + kept + most,
    )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How the updates of a phase fit into a machine's memory."""

    micro_batches: int
    """Micro-batches of an update: the recipe's number, or more where that would not fit."""
    micro_batch: int
    """Sequences in the largest micro-batch."""
    largest: int
    """Sequences of full length in the largest micro-batch that fits."""
    memory: Memory
    """The memory with every sequence of full length."""


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
    precision = machine.precision(recipe.training.precision)
    room, sequences = USABLE * machine.memory, recipe.phases.batch_sizes[phase]

    def needed(micro_batch: int, micro_batches: int) -> Memory:
        batch = largest_batch(micro_batch, recipe, phase)
        return memory_needed(config, batch, precision, machine, micro_batches, corpus_tokens)

    if needed(1, 1).peak > room:
        raise BertkitError(
            f"one sequence of {recipe.phases.lengths[phase]} tokens needs "
            f"{needed(1, 1).peak / GIB:.1f} GiB, and {machine.title} has "
            f"{machine.memory / GIB:.1f} GiB; choose a smaller network or a larger machine"
        )
    for cut in range(recipe.training.accumulate, sequences + 1):
        used = needed(-(-sequences // cut), cut)
        if used.peak <= room:
            too_large = bisect_left(
                range(1 << 40), True, 1, key=lambda n: needed(n, cut).peak > room
            )
            return Fit(
                micro_batches=cut,
                micro_batch=-(-sequences // cut),
                largest=too_large - 1,
                memory=used,
            )
    raise BertkitError(
        f"an update cut into single sequences does not fit into {machine.title}, as "
        "gradients stay in between; choose a smaller network or a larger machine"
    )
