"""The words of an explanation: its sections, and what the terminal and the page both say.

Each section has a title, its place in the paper, and its code. "Paper" is Devlin et al. 2018
throughout; "Vaswani et al." is "Attention is all you need" (2017).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from bertkit.explain.steps import Cut, printable
from bertkit.explain.trace import Trace


class Section(NamedTuple):
    """One step from text to loss."""

    title: str
    place: str
    """Where the literature has it."""
    modules: tuple[str, ...]
    """Files of bertkit, from the root of the repository."""
    meaning: str
    """One or two sentences for the reader."""


SECTIONS = {
    "normalisation": Section(
        "Normalisation",
        "paper section 3, Input/Output Representations; BasicTokenizer of google-research/bert",
        ("bertkit/tokenizer/normalize.py",),
        "The raw text becomes words: cleaned, lower-cased where the model is uncased, and split at "
        "white space, punctuation and ideographs.",
    ),
    "pieces": Section(
        "Pieces",
        "paper section 3, WordPiece (Wu et al. 2016)",
        ("bertkit/tokenizer/wordpiece.py",),
        "Each word is cut greedily: the longest beginning that is in the vocabulary is taken, then "
        "the longest of the rest, which is written with ##, and so on. If nothing fits, the whole "
        "word is [UNK].",
    ),
    "input": Section(
        "Input sequence",
        "paper section 3 and figure 2",
        ("bertkit/tokenizer/wordpiece.py", "bertkit/pretraining_data/batch.py"),
        "[CLS] comes first and [SEP] ends each text. Segment 0 is the first text, 1 the second. "
        "Characters count from 0 in each raw text.",
    ),
    "masks": Section(
        "Masks",
        "paper section 3.1, task 1, and appendix A.1",
        ("bertkit/pretraining_data/masking.py",),
        "In pre-training some pieces become targets: the network must say what they were, from "
        "what it is shown in their place.",
    ),
    "embeddings": Section(
        "Embeddings",
        "paper section 3, figure 2",
        ("bertkit/model/encoder.py",),
        "Each token is the sum of three learned vectors, of its piece, its position and its "
        "segment, and LayerNorm evens the sum out. Shown are lengths (Euclidean norms).",
    ),
    "attention": Section(
        "Attention",
        "paper section 3; Vaswani et al. 2017, sections 3.2.1 and 3.2.2",
        ("bertkit/model/attention.py",),
        "In every layer each head gives each token a weight for every token it sees: softmax of "
        "query times key over the square root of the head's width. The weights of a token add up "
        "to 1.",
    ),
    "layers": Section(
        "Layers",
        "paper section 3; Vaswani et al. 2017, section 3.1",
        ("bertkit/model/encoder.py",),
        "Attention, then a network of two layers, each added to its input and normalised. Entropy, "
        "in nats, says how widely a head looks: 0 at one token only, and at most the logarithm of "
        "the number of tokens.",
    ),
    "pooler": Section(
        "Pooler",
        "paper section 3, the vector C of [CLS]",
        ("bertkit/model/encoder.py",),
        "One vector for the whole input: tanh of a linear map of the last state of [CLS].",
    ),
    "mlm": Section(
        "Loss of the masked pieces",
        "paper section 3.1, task 1",
        ("bertkit/model/heads.py", "bertkit/objectives.py"),
        "At each target the network gives every piece of the vocabulary a probability; the loss is "
        "minus the logarithm of the true one's (in nats), averaged over the targets.",
    ),
    "nsp": Section(
        "Loss of the sentence pair",
        "paper section 3.1, task 2; for order, Lan et al. 2019 (ALBERT), section 3.1",
        ("bertkit/model/heads.py", "bertkit/objectives.py"),
        "From the pooled vector: does the second text really follow the first one? Both losses are "
        "shown, as only you know the answer.",
    ),
    "task": Section(
        "Fine-tuned head",
        "paper section 3.2",
        ("bertkit/model/task_heads.py", "bertkit/predict/predictors.py"),
        "What the model was tuned to say.",
    ),
}
"""Key -> section, in the order of an explanation."""

MASK_KINDS = ("[MASK]", "random", "kept")

SMALLEST = 1e-38
"""A probability of 0 is the smallest of fp32."""


def trace_sections(trace: Trace) -> list[tuple[str, Section]]:
    """(key, section) of what a trace has, in order."""
    return [(key, section) for key, section in SECTIONS.items() if key != "task" or trace.task]


def divide_words(words: list[Cut]) -> tuple[list[Cut], list[Cut]]:
    """Words that are not in the vocabulary whole, each once; and all others."""
    apart = {cut.word: cut for cut in words if cut.pieces != (cut.word,)}
    return list(apart.values()), [cut for cut in words if cut.word not in apart]


def describe_matches(cut: Cut, most: int = 6) -> str:
    """What did not fit on the way to a word's pieces."""
    if not cut.matches:
        return f"the word has {len(cut.word)} characters, more than are tried"
    failed = [piece for match in cut.matches for piece in match.tried]
    more = f", and {len(failed) - most:,} more" if len(failed) > most else ""
    return printable(", ".join(failed[:most])) + more


def masks_in_words(trace: Trace) -> str:
    """How many targets there are, and why."""
    n, options = len(trace.tokens), trace.masking
    kept = 1 - options.mask_share - options.random_share
    unit = "whole words" if options.whole_words else "pieces"
    counted = [(kind, sum(t.kind == kind for t in trace.targets)) for kind in MASK_KINDS]
    drawn = ", ".join(f"{count} {kind}" for kind, count in counted)
    read = "the network below reads these" if trace.masked else "the network below reads the text"
    return (
        f"Of n = {n} tokens, {options.probability:.0%} are {len(trace.targets)} targets, in "
        f"{unit}, never [CLS] or [SEP]. Each is shown as [MASK] ({options.mask_share:.0%}), as a "
        f"random piece ({options.random_share:.0%}) or as it is ({kept:.0%}); with seed "
        f"{trace.seed}: {drawn}; {read}."
    )


def widest_entropy(trace: Trace) -> str:
    """The entropy of equal weights."""
    return f"{math.log(len(trace.tokens)):.3f}"


def pooled_in_words(trace: Trace) -> str:
    """Length and saturation of the pooled vector."""
    if trace.pooled is None:
        return ""
    size = np.abs(trace.pooled)
    return (
        f"{len(size):,} numbers, length {float(np.sqrt((size**2).sum())):.3f}, mean absolute value "
        f"{float(size.mean()):.3f}; {float((size > 0.9).mean()):.0%} are beyond 0.9, where tanh "
        "hardly moves."
    )


ANSWERS = {
    "nsp": ("IsNext: it follows", "NotNext: it is random"),
    "sop": ("in order: it follows", "swapped: it comes before"),
}
"""What a head on pairs was trained on -> its two answers."""


def describe_answers(trace: Trace) -> list[tuple[str, float, float]]:
    """(name, probability, loss if it is the true one) of the two answers; none without a head."""
    if trace.next_probability is None:
        return []
    shares = (trace.next_probability, 1 - trace.next_probability)
    named = zip(ANSWERS[trace.pairs], shares, strict=True)
    return [(name, share, -math.log(max(share, SMALLEST))) for name, share in named]
