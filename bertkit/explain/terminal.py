"""An explanation for the terminal: the sections of `sections.py`, readable in 80 columns."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
import rich.console
from rich.table import Table
from rich.text import Text

from bertkit.errors import BertkitError
from bertkit.explain.steps import EMBEDDING_PARTS, SAME, printable
from bertkit.explain.trace import Trace
from bertkit.explain.wording import (
    describe_answers,
    describe_matches,
    divide_words,
    masks_in_words,
    pooled_in_words,
    trace_sections,
    widest_entropy,
)

WIDEST_MATRIX = 60
"""Tokens whose weights fit beside each other in 80 columns, one digit each."""

MOST_ATTENDED = 3

SectionPrinter = Table | Text


def print_explanation(
    trace: Trace,
    console: rich.console.Console,
    *,
    layer: int | None = None,
    head: int | None = None,
) -> None:
    """Print an explanation.

    Args:
        trace: what to explain.
        console: where to; colours are its affair.
        layer: whose attention is shown, from 1; the last where not given.
        head: whose attention is shown, from 1, as a whole; the mean of all where not given.

    Raises:
        BertkitError: there is no such layer or head.
    """
    check_layer_and_head("layer", layer, trace.config.num_hidden_layers)
    check_layer_and_head("head", head, trace.config.num_attention_heads)
    chosen = (layer or trace.config.num_hidden_layers) - 1
    for number, (key, section) in enumerate(trace_sections(trace), start=1):
        console.print(Text(f"\n{number}. {section.title}", style="bold"))
        console.print(Text(f"{section.place} | {', '.join(section.modules)}", style="dim"))
        console.print(Text(section.meaning))
        if key in trace.left_out:
            console.print(Text(f"Not shown: {trace.left_out[key]}."))
        elif key == "attention":
            console.print(*print_attention(trace, chosen, head), sep="\n")
        else:
            console.print(*PRINTED[key](trace), sep="\n")


def check_layer_and_head(name: str, chosen: int | None, size: int) -> None:
    """Refuse a layer or a head that the model does not have.

    Raises:
        BertkitError: says which there are.
    """
    if chosen is not None and not 1 <= chosen <= size:
        raise BertkitError(f"--{name} must be within 1 to {size} for this model, got {chosen}")


def columns(*names: str) -> Table:
    """A table whose columns of numbers, those with a leading ">", stand to the right."""
    made = Table(box=None, pad_edge=False, header_style="dim")
    for name in names:
        right = name.startswith(">")
        made.add_column(name.removeprefix(">"), justify="right" if right else "left")
    return made


def add(made: Table, *cells: object) -> None:
    """A row of plain text: what a text holds is never taken for markup."""
    made.add_row(*(Text(f"{cell:.3f}" if isinstance(cell, float) else str(cell)) for cell in cells))


def print_normalized(trace: Trace) -> Iterator[SectionPrinter]:
    """Each text after each step."""
    for stages in trace.stages:
        made = columns("step", "text", "remark")
        made.columns[0].no_wrap = True
        for stage in stages:
            add(made, stage.name, printable(stage.text) * (stage.remark != SAME), stage.remark)
        yield made


def print_tokens(trace: Trace) -> Iterator[SectionPrinter]:
    """The words that are not in the vocabulary whole, and what was tried for them."""
    for words in trace.words:
        cut_up, whole = divide_words(words)
        yield Text(f"{len(whole):,} of {len(words):,} words are in the vocabulary whole.")
        if cut_up:
            made = columns("word", "pieces", "not in the vocabulary, longest first")
            for cut in cut_up:
                add(made, printable(cut.word), " ".join(cut.pieces), describe_matches(cut))
            yield made


def print_sequence(trace: Trace) -> Iterator[SectionPrinter]:
    """One token a line."""
    made = columns(">position", "piece", ">id", ">segment", ">characters", "text")
    for position, token in enumerate(trace.tokens):
        special = token.text < 0
        span = "" if special else f"{token.start}-{token.end}"
        raw = "" if special else printable(trace.texts[token.text][token.start : token.end])
        add(made, position, printable(token.piece), token.id, token.segment, span, raw)
    yield made


def print_masks(trace: Trace) -> Iterator[SectionPrinter]:
    """Targets and what stands in their place."""
    yield Text(masks_in_words(trace))
    if trace.targets:
        made = columns(">position", "piece", "shown", "")
        for target in trace.targets:
            how = "" if target.kind == target.shown else target.kind
            add(made, target.position, printable(target.piece), printable(target.shown), how)
        yield made


def print_embeddings(trace: Trace) -> Iterator[SectionPrinter]:
    """Lengths of the vectors of each token."""
    made = columns(">position", "read", *(f">{part}" for part in EMBEDDING_PARTS))
    for position, (token, row) in enumerate(
        zip(trace.tokens, trace.inside.embeddings.tolist(), strict=True)
    ):
        add(made, position, printable(token.seen), *row)
    yield made


def print_attention(trace: Trace, layer: int, head: int | None) -> Iterator[SectionPrinter]:
    """What each token looks at, in one layer (from 0) and one head (from 1) or their mean."""
    heads = trace.inside.attention[layer]
    weights = heads.mean(0) if head is None else heads[head - 1]
    which = "mean of the heads" if head is None else f"head {head} of {len(heads)}"
    yield Text(f"Layer {layer + 1} of {trace.config.num_hidden_layers}, {which}:")
    if head is not None and len(weights) <= WIDEST_MATRIX:
        yield Text("In tenths, rounded: 3 is 0.25 to 0.35, # is 0.95 or more, . is below 0.05.")
        made = columns(">", "token", "its weights, first token to last")
        made.columns[2].no_wrap = True
        for position, (token, row) in enumerate(zip(trace.tokens, weights, strict=True)):
            add(made, position, printable(token.seen)[:12], "".join(map(digit, row.tolist())))
    else:
        made = columns(">", "token", "looks most at")
        for position, (token, row) in enumerate(zip(trace.tokens, weights, strict=True)):
            add(made, position, printable(token.seen), most_attended(trace, row))
    yield made
    yield Text(
        "These weights, put through the rest of each layer, give the encoder's own hidden states "
        f"to within {trace.inside.difference:.1e}."
    )


def digit(weight: float) -> str:
    """A weight as one character."""
    tenths = math.floor(10 * weight + 0.5)
    return ".123456789#"[tenths]


def most_attended(trace: Trace, row: np.ndarray) -> str:
    """The tokens with the largest weights of a row (tokens,)."""
    best = np.argsort(-row, kind="stable")[:MOST_ATTENDED]
    return ", ".join(f"{printable(trace.tokens[i].seen)} ({i}) {row[i]:.0%}" for i in best.tolist())


def print_layers(trace: Trace) -> Iterator[SectionPrinter]:
    """Lengths of hidden states, and entropies of heads."""
    made = columns(">layer", ">mean length", ">of [CLS]", ">entropy", ">least head", ">widest head")
    for number, norms in enumerate(trace.inside.norms.tolist()):
        states = [float(np.mean(norms)), norms[0]]
        if number:
            entropy = trace.inside.entropy[number - 1].mean(-1)  # of each head
            least, widest = int(entropy.argmin()), int(entropy.argmax())
            named = [f"{entropy[i]:.3f} ({i + 1})" for i in (least, widest)]
            add(made, number, *states, float(entropy.mean()), *named)
        else:
            add(made, "input", *states, "", "", "")
    yield made
    yield Text(f"The widest possible entropy is ln {len(trace.tokens)} = {widest_entropy(trace)}.")


def print_pooler(trace: Trace) -> Iterator[SectionPrinter]:
    """The pooled vector in a line."""
    yield Text(pooled_in_words(trace))


def print_masked_loss(trace: Trace) -> Iterator[SectionPrinter]:
    """What the network says at each target."""
    made = columns(">position", "true piece", ">rank", ">probability", ">loss", "most probable")
    for target, guess in zip(trace.targets, trace.guesses, strict=True):
        top = ", ".join(f"{printable(one.piece)} {one.probability:.1%}" for one in guess.top)
        piece = printable(target.piece)
        add(made, target.position, piece, guess.rank, guess.probability, guess.loss, top)
    yield made
    if trace.mlm_loss is not None:
        yield Text(f"Mean loss: {trace.mlm_loss:.4f}.")


def print_next_loss(trace: Trace) -> Iterator[SectionPrinter]:
    """Both answers and what each would cost."""
    made = columns("answer", ">probability", ">loss, if it is true")
    for answer, probability, loss in describe_answers(trace):
        add(made, answer, f"{probability:.4f}", f"{loss:.4f}")
    yield made


def print_task(trace: Trace) -> Iterator[SectionPrinter]:
    """The answer of a fine-tuned head."""
    yield Text(f"{trace.task}.")


PRINTED: dict[str, Callable[[Trace], Iterator[SectionPrinter]]] = {
    "normalisation": print_normalized,
    "pieces": print_tokens,
    "input": print_sequence,
    "masks": print_masks,
    "embeddings": print_embeddings,
    "layers": print_layers,
    "pooler": print_pooler,
    "mlm": print_masked_loss,
    "nsp": print_next_loss,
    "task": print_task,
}
"""Key of a section -> what prints it; attention also needs a layer and a head."""
