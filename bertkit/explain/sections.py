"""The sections of an explanation, from a text to its losses: what each says, as text and tables.

`terminal.py` prints them, and `page.py` makes an HTML page of them. "Paper" is Devlin et al. 2018
throughout; "Vaswani et al." is "Attention is all you need" (2017).
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

import numpy as np

from bertkit.explain.steps import EMBEDDING_PARTS, UNCHANGED, TokenizedWord, printable
from bertkit.explain.trace import Trace

MAX_FAILED = 6
"""The number of candidates that did not match and are named."""
MASK_KINDS = ("[MASK]", "random", "kept")
ANSWERS = {
    "nsp": ("IsNext: it follows", "NotNext: it is random"),
    "sop": ("in order: it follows", "swapped: it comes before"),
}
"""The two answers of a pair head, by what it was trained on."""
MIN_PROBABILITY = 1e-38
"""Stands for a probability of 0 in a logarithm; it is about the smallest number of fp32."""


class Table(NamedTuple):
    """A table of plain text."""

    columns: tuple[str, ...]
    """The headings; those that begin with ">" are columns of numbers, set flush right."""
    rows: list[list[str]]
    title: str = ""
    """On the page, the table is folded under this title."""
    page_only: bool = False
    """Whether the terminal leaves the table out."""


Content = str | Table


@dataclass(frozen=True)
class Section:
    """One step from text to loss."""

    title: str
    source: str
    """The section of the literature that defines it."""
    modules: list[str]
    """The files of bertkit that do it, from the root of the repository."""
    meaning: str
    """One or two sentences for the reader."""
    blocks: Callable[[Trace], Iterator[Content]]
    """What it shows of a trace."""


def normalization_blocks(trace: Trace) -> Iterator[Content]:
    """Show each text after each step that changed it."""
    for stages in trace.stages:
        rows = [
            [stage.name, "" if stage.remark == UNCHANGED else printable(stage.text), stage.remark]
            for stage in stages
        ]
        yield Table(("step", "text", "remark"), rows)


def wordpiece_blocks(trace: Trace) -> Iterator[Content]:
    """Show the words that are not in the vocabulary, and the candidates that were tried."""
    for words in trace.words:
        split = {word.word: word for word in words if word.tokens != (word.word,)}
        whole = sum(word.word not in split for word in words)
        yield f"{whole:,} of {len(words):,} words are in the vocabulary."
        rows = [
            [printable(word.word), " ".join(word.tokens), describe_matches(word)]
            for word in split.values()
        ]
        if rows:
            yield Table(("word", "tokens", "not in the vocabulary, longest first"), rows)


def describe_matches(word: TokenizedWord) -> str:
    """List the candidates that are not in the vocabulary."""
    if not word.matches:
        return f"the word has {len(word.word)} characters, more than the tokenizer tries"
    failed = [token for match in word.matches for token in match.tried]
    more = f", and {len(failed) - MAX_FAILED:,} more" if len(failed) > MAX_FAILED else ""
    return printable(", ".join(failed[:MAX_FAILED])) + more


def input_blocks(trace: Trace) -> Iterator[Content]:
    """Show the input sequence, one token a row."""
    rows = []
    for position, token in enumerate(trace.tokens):
        special = token.text_index < 0
        span = "" if special else f"{token.start}-{token.end}"
        text = "" if special else trace.texts[token.text_index][token.start : token.end]
        ids = [str(token.id), str(token.segment)]
        rows.append([str(position), printable(token.token), *ids, span, printable(text)])
    columns = (">position", "token", ">id", ">segment", ">characters", "text")
    yield Table(columns, rows, "ids, segments, positions, characters")


def mask_blocks(trace: Trace) -> Iterator[Content]:
    """Say how many targets there are and why; show what the network reads in their place."""
    options = trace.masking
    kept = 1 - options.mask_share - options.random_share
    unit = "whole words" if options.whole_words else "tokens"
    drawn = ", ".join(
        f"{sum(target.kind == kind for target in trace.targets)} {kind}" for kind in MASK_KINDS
    )
    read = "these" if trace.masked else "the text"
    yield (
        f"Targets are {options.probability:.0%} of n = {len(trace.tokens)} tokens, rounded: "
        f"{len(trace.targets)}, in {unit}, never [CLS] or [SEP]. Each is shown as [MASK] "
        f"({options.mask_share:.0%}), as a random token ({options.random_share:.0%}) or unchanged "
        f"({kept:.0%}); with seed {trace.seed}: {drawn}; the network below reads {read}."
    )
    if trace.targets:
        rows = [
            [
                str(target.position),
                printable(target.token),
                printable(target.shown),
                "" if target.kind == target.shown else target.kind,
            ]
            for target in trace.targets
        ]
        yield Table((">position", "token", "shown", ""), rows, "every target")


def embedding_blocks(trace: Trace) -> Iterator[Content]:
    """Show the norms of the vectors of each token."""
    vectors = zip(trace.tokens, trace.inside.embeddings.tolist(), strict=True)
    rows = [
        [str(position), printable(token.shown), *(f"{value:.3f}" for value in row)]
        for position, (token, row) in enumerate(vectors)
    ]
    columns = (">position", "read", *(f">{part}" for part in EMBEDDING_PARTS))
    yield Table(columns, rows, "every token")


def layer_blocks(trace: Trace) -> Iterator[Content]:
    """Show norms of hidden states and entropies of heads, layer by layer."""
    rows = []
    for number, norms in enumerate(trace.inside.norms):
        cells = [f"{number}" if number else "input", f"{norms.mean():.3f}", f"{norms[0]:.3f}"]
        if number:
            entropy = trace.inside.entropy[number - 1].mean(-1)  # of each head
            ends = (int(entropy.argmin()), int(entropy.argmax()))
            cells.append(f"{entropy.mean():.3f}")
            cells += [f"{entropy[head]:.3f} ({head + 1})" for head in ends]
        rows.append(cells + [""] * (6 - len(cells)))
    names = (">layer", ">mean norm", ">of [CLS]", ">entropy", ">lowest head", ">highest head")
    yield Table(names, rows)
    count = len(trace.tokens)
    yield f"The highest possible entropy is ln {count} = {math.log(count):.3f}."
    states = zip(trace.tokens, trace.inside.norms.T.tolist(), strict=True)
    tokens = [
        [str(position), printable(token.shown), *(f"{value:.2f}" for value in column)]
        for position, (token, column) in enumerate(states)
    ]
    layers = (f">{'layer ' * (row[0] != 'input')}{row[0]}" for row in rows)
    columns = (">position", "read", *layers)
    yield Table(columns, tokens, "norm of every token's state", page_only=True)


def pooler_blocks(trace: Trace) -> Iterator[Content]:
    """Say how long and how saturated the pooled vector is."""
    assert trace.pooled is not None
    size = np.abs(trace.pooled)
    yield (
        f"{len(size):,} numbers, norm {float(np.sqrt((size**2).sum())):.3f}, mean absolute value "
        f"{float(size.mean()):.3f}; {float((size > 0.9).mean()):.0%} are beyond 0.9, where tanh is "
        "nearly flat."
    )


def mlm_blocks(trace: Trace) -> Iterator[Content]:
    """Show what the network predicts at each target."""
    rows = []
    for target, guess in zip(trace.targets, trace.guesses, strict=True):
        numbers = [str(guess.rank), f"{guess.probability:.3f}", f"{guess.loss:.3f}"]
        top = ", ".join(f"{printable(one.token)} {one.probability:.0%}" for one in guess.top)
        rows.append([str(target.position), printable(target.token), target.kind, *numbers, top])
    columns = (">position", "true", "shown", ">rank", ">probability", ">loss", "most probable")
    yield Table(columns, rows)
    yield f"Mean loss: {trace.mlm_loss:.4f}."


def pair_blocks(trace: Trace) -> Iterator[Content]:
    """Show both answers about the pair and the loss of each."""
    assert trace.next_probability is not None
    shares = (trace.next_probability, 1 - trace.next_probability)
    rows = [
        [answer, f"{share:.4f}", f"{-math.log(max(share, MIN_PROBABILITY)):.4f}"]
        for answer, share in zip(ANSWERS[trace.pairs], shares, strict=True)
    ]
    yield Table(("answer", ">probability", ">loss, if it is true"), rows)


BLOCKS: dict[str, Callable[[Trace], Iterator[Content]]] = {
    "normalization": normalization_blocks,
    "wordpiece": wordpiece_blocks,
    "input": input_blocks,
    "masks": mask_blocks,
    "embeddings": embedding_blocks,
    "attention": lambda trace: iter(()),
    "layers": layer_blocks,
    "pooler": pooler_blocks,
    "mlm": mlm_blocks,
    "nsp": pair_blocks,
    "task": lambda trace: iter((f"{trace.task}.",)),
}
"""Key of `sections.toml` -> what the section shows of a trace; renderers show the attention."""
SECTIONS = {
    key: Section(**values, blocks=BLOCKS[key])
    for key, values in tomllib.loads(
        resources.files("bertkit.explain").joinpath("sections.toml").read_text("utf-8")
    ).items()
}
"""The sections by key, in the order of an explanation."""


def trace_sections(trace: Trace) -> list[tuple[str, Section]]:
    """Return (key, section) for everything that a trace has, in order."""
    return [(key, section) for key, section in SECTIONS.items() if key != "task" or trace.task]


def attention_accuracy(trace: Trace) -> str:
    """Say how close the recomputed layers are to the encoder's own."""
    return (
        "Recomputing each layer from these weights gives the encoder's own hidden states to within "
        f"{trace.inside.difference:.1e}."
    )
