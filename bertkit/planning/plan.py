"""`plan`: estimate what a pre-training run takes, before it is started."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bertkit.config import read_recipe
from bertkit.console import Console, console_or_new
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.planning import HERE
from bertkit.planning.corpus import CorpusEstimate, assumed_corpus, store_corpus, text_corpus
from bertkit.processes import busy_note
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.recipe import PretrainRecipe

if TYPE_CHECKING:
    from bertkit.planning.estimate import Plan

MEASURE_SECONDS = 20.0
"""How many seconds this machine is measured for by default."""


@dataclass(frozen=True, kw_only=True)
class CorpusSize:
    """The amount of text, given by one of the first three fields."""

    store: Path | None = None
    """A token store made by `bertkit prepare`."""
    text: tuple[str, ...] = ()
    """Files, folders or globs, of which a sample is read."""
    tokens: int | None = None
    """The number of tokens, if there is no text to measure."""
    tokenizer: Path | None = None
    """For --text: a folder made by `bertkit learn`, a model directory, or a vocab.txt."""
    vocabulary_size: int = 30522
    """Size of the vocabulary, for --text without a tokenizer and for --tokens."""
    format: str = "auto"
    """Format of --text; auto detects it from file names and first lines."""
    column: str = "text"
    """Column of --text that holds the text, in formats that have columns."""


UNKNOWN = CorpusSize()


def plan(
    recipe: PretrainRecipe | Path | str = "base",
    corpus: CorpusSize = UNKNOWN,
    *,
    machine: str = HERE,
    device: str = "auto",
    seconds: float = MEASURE_SECONDS,
    mfu: float | None = None,
    hours: float | None = None,
    price: float | None = None,
    console: Console | None = None,
) -> Plan:
    """Estimate the memory, speed, time and cost of a pre-training run.

    Args:
        recipe: a `PretrainRecipe`, or the path or name of one.
        corpus: the amount of text: a store, text to sample, or a number of tokens.
        machine: "here" to measure this machine, or the name of one whose peak is known, such as
            "a100-80"; see `bertkit.planning.machine`.
        device: the device of this machine to measure: "auto", "cpu", "cuda", ...
        seconds: the approximate time to measure for.
        mfu: the share of its peak that a named machine reaches; None for the assumed one.
        hours: a time budget: the plan also has the updates that fit into it.
        price: the price of an hour of the machine, in any currency.
        console: the console for progress; None for a new one.

    Raises:
        BertkitError: there is no text, or a setting is impossible.
    """
    from bertkit.planning.estimate import make_plan, this_machine
    from bertkit.planning.machine import find_machine
    from bertkit.training.device import choose_device, choose_precision

    if not isinstance(recipe, PretrainRecipe):
        recipe = read_recipe(PretrainRecipe, str(recipe))
    if hours is not None and not 0 < hours <= MAX_HOURS:
        raise BertkitError(f"--hours must be above 0 and at most {MAX_HOURS:,}, not {hours:g}")
    check_flags(machine, device, seconds, mfu, price)
    precision = recipe.training.precision
    named = None if machine == HERE else find_machine(machine, precision, mfu)
    where = choose_device(device) if named is None else None
    if where is not None:
        choose_precision(precision, where)  # fails before the corpus is measured
    with console_or_new(console) as shown:
        size = measure_corpus(corpus, recipe.phases.lengths, recipe.objectives.pair)
        if where is not None:
            shown.say(*busy_note())
            shown.say(f"calibrating for about {seconds:g} s; do not use the machine meanwhile")
            named = this_machine(where, recipe)
        assert named is not None
        return make_plan(
            *(recipe, size, named, where),
            hours=hours,
            price=price,
            seconds=seconds,
            progress=shown.say,
        )


MAX_HOURS = 1_000_000_000
"""The largest time budget; it keeps the number of updates an exact number."""


def check_flags(
    machine: str, device: str, seconds: float, mfu: float | None, price: float | None
) -> None:
    """Check that numbers are in range and that the flags can be combined."""
    if price is not None and not 0 <= price < math.inf:
        raise BertkitError(f"--price must be 0 or more, not {price}")
    if not 0 < seconds < math.inf:
        raise BertkitError(f"--seconds must be above 0, not {seconds}")
    if machine != HERE and device != "auto":
        raise BertkitError(f"--device is for this machine; leave it out with --machine {machine}")
    if machine != HERE and seconds != MEASURE_SECONDS:
        raise BertkitError(f"--seconds is for this machine; leave it out with --machine {machine}")
    if machine == HERE and mfu is not None:
        raise BertkitError("--mfu is for a named --machine; on this one it is measured")


def measure_corpus(size: CorpusSize, lengths: Sequence[int], pair: str) -> CorpusEstimate:
    """Estimate the corpus that the flags describe; `pair` is as in `PairOptions`."""
    given = [size.store is not None, bool(size.text), size.tokens is not None]
    if sum(given) != 1:
        raise BertkitError(
            "say how much text there is by one of --store STORE, --text PATHS and --tokens NUMBER"
        )
    if not size.text and (size.tokenizer or size.format != "auto" or size.column != "text"):
        raise BertkitError("--tokenizer, --format and --column are for --text; leave them out")
    if (size.store or size.tokenizer) and size.vocabulary_size != UNKNOWN.vocabulary_size:
        raise BertkitError("--store and --tokenizer have a vocabulary; remove --vocabulary-size")
    if size.vocabulary_size < 1:
        raise BertkitError(f"--vocabulary-size must be above 0, not {size.vocabulary_size}")
    if size.store is not None:
        return store_corpus(TokenStore(size.store), lengths, pair)
    if size.tokens is not None:
        return assumed_corpus("only its size", size.tokens, size.vocabulary_size, lengths, pair)
    tokenizer = None if size.tokenizer is None else Tokenizer.load(size.tokenizer)
    return text_corpus(
        size.text, tokenizer, size.vocabulary_size, lengths,
        pair=pair, format=size.format, column=size.column,
    )  # fmt: skip
