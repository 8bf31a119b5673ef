"""`bertkit plan`: estimate the cost of a pre-training run before it is started."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import rich.console
from rich.table import Table

from bertkit.cli.options import FLATTEN
from bertkit.config import as_json, dotted_values, read_recipe
from bertkit.files import check_output, write_json
from bertkit.planning import GIB, HERE
from bertkit.planning.plan import MEASURE_SECONDS, UNKNOWN, CorpusSize, plan
from bertkit.training.recipe import PretrainRecipe

if TYPE_CHECKING:
    from bertkit.planning.estimate import Plan

PLANNED_DEFAULTS = PretrainRecipe()


def plan_command(
    recipe: str = "base",
    *,
    machine: str = HERE,
    device: str = "auto",
    seconds: float = MEASURE_SECONDS,
    mfu: float | None = None,
    hours: float | None = None,
    price: float | None = None,
    json: Path | None = None,
    corpus: Annotated[CorpusSize, FLATTEN] = UNKNOWN,
    settings: Annotated[PretrainRecipe, FLATTEN] = PLANNED_DEFAULTS,
) -> None:
    """Estimate the memory, speed, time and cost of a pre-training run.

    This machine is measured by short updates of a shallow network. For a machine from the table,
    a share of its peak is assumed.

    Parameters
    ----------
    recipe
        A shipped recipe or a .toml file, as for `bertkit pretrain`; flags override its fields.
    machine
        here (this machine), or one of t4, v100, a10, l4, rtx-4090, a100-40, a100-80, h100, h200.
    device
        The device of this machine to measure: auto, cpu, cuda, cuda:N or mps.
    seconds
        The approximate time to measure for.
    mfu
        The share of its peak that a named machine reaches, instead of the table's assumption.
    hours
        A time budget: also plan the updates that fit into it.
    price
        The price of an hour of the machine, in any currency.
    json
        A file to write the plan to.
    """
    json = json and check_output(json)
    made = plan(
        *(settings, corpus),
        machine=machine,
        device=device,
        seconds=seconds,
        mfu=mfu,
        hours=hours,
        price=price,
    )
    flags = [*overrides(recipe, settings, made.flags), *made.flags] if made.flags else []
    print_plan(made, recipe, flags, rich.console.Console(), price)
    if json is not None:
        write_json(json, as_json(made))


def overrides(recipe: str, settings: PretrainRecipe, planned: Sequence[str]) -> list[str]:
    """Return the flags that turn a recipe into the settings, except for the planned flags."""
    before = dict(dotted_values(as_json(read_recipe(PretrainRecipe, recipe))))
    names = {one.split()[0] for one in planned}
    flags = []
    for name, value in dotted_values(as_json(settings)):
        flag = f"--{name.replace('_', '-')}"
        if value == before[name] or flag in names:
            continue
        if isinstance(value, bool):
            flags.append(f"{flag}={str(value).lower()}")
        else:
            words = value if isinstance(value, list) else [value]
            flags.append(shlex.join([flag, *map(str, words)]))
    return flags


def print_plan(
    made: Plan,
    recipe: str,
    flags: Sequence[str],
    out: rich.console.Console,
    price: float | None,
) -> None:
    """Print the plan as text and tables."""
    config, machine = made.model, made.machine
    out.print(
        f"{Path(recipe).stem}: {config.num_hidden_layers} layers x {config.hidden_size}, "
        f"{config.num_attention_heads} heads, a vocabulary of {config.vocab_size:,}: "
        f"{made.parameters:,} parameters, {made.precision}\n"
        f"corpus: {made.corpus}, {made.corpus_tokens:,.0f} tokens\n"
        f"machine: {machine.title}, {machine.memory / GIB:.1f} GiB, "
        f"{machine.peak[made.precision] / 1e9:,.0f} GFLOP/s",
        markup=False,
        highlight=False,
    )
    out.print(memory_table(made))
    out.print(speed_table(made))
    out.print(budget_table(made, price))
    if flags:
        command = shlex.join(["bertkit", "pretrain", recipe])
        out.print(f"{command} {' '.join(flags)}", soft_wrap=True, markup=False)
    source = "assumed" if machine.mfu else "measured here; assumed"
    out.print(f"{source}: {'; '.join(made.assumed)}.", markup=False, highlight=False)


def memory_table(made: Plan) -> Table:
    """Build the table of memory by part, with a column for each phase."""
    table = Table("memory, GiB", title="memory of a micro-batch of full-length examples")
    for phase in made.phases:
        table.add_column(f"{phase.fit.micro_batch} x {phase.length}", justify="right")
    for part in vars(made.phases[0].fit.memory):
        values = [getattr(phase.fit.memory, part) / GIB for phase in made.phases]
        table.add_row(part, *[f"{value:,.2f}" for value in values], end_section=part == "kept")
    table.add_row("largest that fits", *[f"{phase.fit.largest:,}" for phase in made.phases])
    return table


def speed_table(made: Plan) -> Table:
    """Build the table of the phases' speeds."""
    table = Table("length", "batch", "tokens/s", "MFU", "s/update", title="speed")
    for phase in made.phases:
        cut = phase.fit.micro_batches
        table.add_row(
            str(phase.length),
            f"{phase.sequences}" + (f" in {cut}" if cut > 1 else ""),
            f"{phase.tokens_per_second:,.0f}",
            f"{phase.mfu:.0%}",
            f"{phase.seconds:,.3g}",
        )
    return table


def budget_table(made: Plan, price: float | None) -> Table:
    """Build the table of schedules with their time and cost."""
    table = Table("schedule", "updates", "tokens", "epochs", "time", title="time")
    if price is not None:
        table.add_column(f"cost at {price:g}/h", justify="right")
    for found in made.answers:
        cost = [] if found.cost is None else [f"{found.cost:,.2f}"]
        updates = " + ".join(f"{steps:,}" for steps in found.steps)
        epochs = f"{found.epochs:,.0f}" if found.epochs >= 10 else f"{found.epochs:.2g}"
        table.add_row(
            *(found.title, updates, amount(found.tokens), epochs, duration(found.seconds), *cost)
        )
    return table


def amount(number: float) -> str:
    """Format a number with a unit prefix, such as `1.2 G`."""
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:,.1f} {unit}"
    return f"{number:,.0f}"


TIME_UNITS = (("years", 365.25 * 86400), ("days", 86400), ("hours", 3600), ("minutes", 60))


def duration(seconds: float) -> str:
    """Format a time such as `3.4 days`, in the largest unit of which there are at least 2."""
    for name, size in TIME_UNITS:
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {name}"
    return f"{seconds:,.1f} s"
