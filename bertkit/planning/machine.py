"""The speed and memory of a machine, and the batches that fit, computed from the sizes alone.

The memory kept by the forward pass is derived from `model/encoder.py`, `model/attention.py` and
`model/heads.py`; a test compares it with what torch saves. So a run can be planned for a GPU of the
table without having one, and for a network that is too large to be tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from bertkit.errors import BertkitError, nearest
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import count_parameters
from bertkit.model.native.library import step_types
from bertkit.planning import GIB, HERE
from bertkit.planning.corpus import BatchSize, largest_batch
from bertkit.pretraining_data.pairs import EXAMPLE_DTYPE
from bertkit.training.data import HELD_OUT_BATCH
from bertkit.training.recipe import PretrainRecipe

USABLE = 0.9
"""The share of a machine's memory to plan with; the allocator and the system take the rest."""
CONTEXT_BYTES = 0.6 * GIB
"""The assumed size of the libraries on a GPU, or if the system does not report it."""
WINDOW_TOKENS = 108_000_000
"""The number of tokens whose examples are planned together: eight shards of 64 MB."""
KERNEL_BYTES = 1.25 * GIB
"""oneDNN's kernel cache on a CPU in bf16: a kernel for each new shape of a product, at most 1,024.
Nearly every batch has a new number of tokens, so the cache is full after about fifty updates."""
HEAP = 0.4 * GIB
"""The maximum freed memory that the C library's heap keeps on a CPU; it returns larger buffers."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The memory and the speed of one device."""

    title: str
    device: str
    """The type of device: cpu, cuda or mps."""
    memory: float
    """The memory in bytes."""
    peak: Mapping[str, float]
    """FLOP/s of matrix products by precision; an unsupported precision is absent."""
    mfu: Mapping[str, float]
    """The assumed share of the peak by precision; empty if updates are measured."""
    program: float = CONTEXT_BYTES
    """The bytes taken by the interpreter and libraries."""

    def precision(self, name: str) -> str:
        """Return the precision called `name`; "auto" is bf16 if the machine has a peak for it."""
        if name != "auto":
            return name
        return "bf16" if "bf16" in self.peak else "fp32"


def gpu(title: str, gib: int, *, bf16: float | None, fp32: float, mfu: float = 0.3) -> Machine:
    """Describe a GPU by its data sheet: TFLOP/s of dense bf16 matrix units and of plain fp32."""
    narrow = () if bf16 is None else ("bf16", "bf16-residual")
    peak = {"fp32": fp32 * 1e12} | {precision: bf16 * 1e12 for precision in narrow if bf16}
    shares = {"fp32": 0.6} | dict.fromkeys(narrow, mfu)
    return Machine(title=title, device="cuda", memory=gib * GIB, peak=peak, mfu=shares)


MACHINES = {
    "t4": gpu("NVIDIA T4", 15, bf16=None, fp32=8.1),
    "v100": gpu("NVIDIA V100 SXM2 16 GB", 16, bf16=None, fp32=15.7),
    "a10": gpu("NVIDIA A10", 22, bf16=125, fp32=31.2, mfu=0.4),
    "l4": gpu("NVIDIA L4", 22, bf16=121, fp32=30.3, mfu=0.4),
    "rtx-4090": gpu("NVIDIA RTX 4090", 24, bf16=165, fp32=82.6, mfu=0.35),
    "a100-40": gpu("NVIDIA A100 SXM 40 GB", 40, bf16=312, fp32=19.5),
    "a100-80": gpu("NVIDIA A100 SXM 80 GB", 79, bf16=312, fp32=19.5),
    "h100": gpu("NVIDIA H100 SXM", 79, bf16=989, fp32=66.9),
    "h200": gpu("NVIDIA H200 SXM", 139, bf16=989, fp32=66.9, mfu=0.33),
}
"""GPUs by name. Peaks are the vendors'. The H200's MFU in bf16 is that of BERT-base at length 128
without `--compile` (results/gpu-train.json); the others are assumptions."""


def find_machine(name: str, precision: str, mfu: float | None = None) -> Machine:
    """Return a machine of the table, with a different MFU if one is given."""
    if mfu is not None and not 0 < mfu <= 1:
        raise BertkitError(f"--mfu is a share of the peak, above 0 and at most 1, not {mfu}")
    if name not in MACHINES:
        raise BertkitError(f"no machine is called '{name}'{nearest(name, (*MACHINES, HERE))}")
    machine = MACHINES[name]
    precision = machine.precision(precision)
    if precision not in machine.peak:
        raise BertkitError(
            f"{machine.title} does not support {precision}; add --training.precision fp32"
        )
    return machine if mfu is None else replace(machine, mfu={precision: mfu})


def activation_bytes(
    config: ModelConfig, batch: BatchSize, precision: str, device: str = "cpu"
) -> float:
    """Return the bytes that the forward pass of a step keeps for the backward pass.

    With w = 2 bytes in bf16 and 4 in fp32, hidden size h, feed-forward width f, L layers,
    vocabulary V, n tokens, t targets, s sequences; masks of d and e bytes with dropout, 0 without:

        embeddings    (24 + 8 + (4 + e) h) n                 ids, LayerNorm's input, mask
        a layer       w h n + attention + ((2 w + 8 + 2 d) h + 2 w f + 16) rows
                      inputs of the matrices, of GELU, and in fp32 of both LayerNorms; masks
        heads         (w h + 8) rows + (3 w h + g V) t + w h s
        bf16 copies   2 (L (4 h^2 + 2 h f) + V h + 2 h^2)    of the weights, by autocast

    rows is n, but t + s in the last layer, which computes only those tokens. A dropout mask has the
    type of its input on a CPU (d = w, e = 4) and is boolean on other devices (d = e = 1); compiled
    steps draw it again instead (d = 0; see `bertkit.model.cpu`). Of the logits, a CPU keeps the
    gradients (g = w), and other devices the fp32 logarithms (g = 4).
    """
    h, inner, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    wide = 4 if precision == "fp32" else 2
    dropout = config.hidden_dropout_prob
    mask = 0 if runs_compiled(wide, device) else mask_bytes(dropout, wide, device)
    n, last = batch.tokens, batch.targets + batch.sequences
    rows = (layers - 1) * n + last
    kept = (24 + 8 + (4 + mask_bytes(dropout, 4, device)) * h) * n
    kept += layers * (wide * h * n + attention_bytes(config, batch, wide, device))
    kept += ((2 * wide + 8 + 2 * mask) * h + 2 * wide * inner + 16) * rows
    kept += (wide * h + 8) * last + wide * h * batch.sequences
    kept += (3 * wide * h + (wide if device == "cpu" else 4) * config.vocab_size) * batch.targets
    if precision != "fp32":
        copies = 1 if config.share_layers else layers  # of the weights, in two bytes
        kept += 2 * (copies * (4 * h + 2 * inner) + 2 * h) * h
        kept += 2 * config.vocab_size * config.embedding_width
    return kept


def runs_compiled(wide: int, device: str) -> bool:
    """Return whether training in a type of this many bytes runs compiled steps here."""
    dtype = torch.bfloat16 if wide == 2 else torch.float32
    return device == "cpu" and (dtype, torch.float32) in step_types()


def mask_bytes(probability: float, wide: int, device: str) -> int:
    """Return the bytes per element of a dropout mask, for activations of `wide` bytes."""
    if not probability:
        return 0
    return wide if device == "cpu" else 1


def attention_bytes(config: ModelConfig, batch: BatchSize, wide: int, device: str) -> float:
    """Return the bytes that one layer's attention keeps between its two matrices.

    Compiled code and flash kernels keep query, key and value, and a number for each token and head.
    torch's operators on a CPU also keep their output if lengths differ. With dropout they keep
    three fp32 numbers for each head and pair of tokens, and query, key and value in fp32.
    """
    width, heads = wide * config.hidden_size * batch.tokens, config.num_attention_heads
    dropout, sums = config.attention_probs_dropout_prob, 4 * heads * batch.tokens
    if device != "cpu" and wide == 4:
        return 7 * width + sums + wide * batch.squares  # padded copies and their mask
    if device != "cpu" or runs_compiled(wide, device):
        return 3 * width + sums
    joined = width if batch.mixed else 0
    if not dropout:
        return 3 * width + sums + joined
    return 12 * (config.hidden_size * batch.tokens + heads * batch.squares) + joined


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The bytes of a training process by part, and the peak of their total."""

    program: float
    weights: float
    gradients: float
    moments: float
    """Adam's two averages."""
    activations: float
    """What the forward pass keeps, including the bf16 copies of the weights."""
    logits: float
    """Temporary gradients between the loss and the vocabulary projection."""
    evaluation: float
    """A batch of held-out examples, mostly logits; not at the same time as an update."""
    data: float
    """The batch, and the examples of a window."""
    kept: float
    """Memory that libraries keep on a CPU: `KERNEL_BYTES` and `HEAP`."""
    peak: float
    """Less than the sum: with one micro-batch, gradients replace activations."""


def memory_needed(
    config: ModelConfig,
    batch: BatchSize,
    precision: str,
    machine: Machine,
    micro_batches: int = 1,
    corpus_tokens: float = WINDOW_TOKENS,
) -> Memory:
    """Return the bytes by part for micro-batches of one size; weights and moments are fp32.

    The peak is at the start of the backward pass; or at its end, with all gradients and the word
    embeddings' dense gradient in addition to the tied decoder's; or in an evaluation.
    """
    parameters = count_parameters(config, heads=True)
    vocabulary, h = config.vocab_size, config.hidden_size
    width = config.embedding_width
    wide = 4 if precision == "fp32" else 2
    activations = activation_bytes(config, batch, precision, machine.device)
    logits = vocabulary * max(8 * batch.targets, wide * batch.targets + (wide + 4) * width)
    examples = min(corpus_tokens, WINDOW_TOKENS) / max(1.0, batch.tokens / batch.sequences)
    data = 24 * batch.tokens + EXAMPLE_DTYPE.itemsize * examples
    gradients = 4.0 * parameters
    evaluation = (6 + wide) * vocabulary * batch.targets
    evaluation += (2 * wide * config.intermediate_size + 8 * h) * batch.tokens
    evaluation *= HELD_OUT_BATCH / batch.sequences
    kept = 0.0
    if machine.device == "cpu":
        kept = min(HEAP, activations + logits) + (0 if precision == "fp32" else KERNEL_BYTES)
    begins = activations + logits + (gradients if micro_batches > 1 else 0)
    most = max(begins, gradients + 4 * vocabulary * width, evaluation)
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
    """The micro-batches of an update: the recipe's number, or more if that would not fit."""
    micro_batch: int
    """The number of sequences in the largest micro-batch."""
    largest: int
    """The number of full-length sequences in the largest micro-batch that would fit."""
    memory: Memory
    """The memory needed if every sequence has full length."""


def fit_memory(
    config: ModelConfig,
    recipe: PretrainRecipe,
    phase: int,
    machine: Machine,
    corpus_tokens: float = WINDOW_TOKENS,
) -> Fit:
    """Find the micro-batch of a phase to use, and the largest one that fits."""
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
        f"an update cut into single sequences does not fit into {machine.title}, because "
        "gradients are accumulated; choose a smaller network or a larger machine"
    )
