"""`bertkit plan`: measure what a pre-training run takes before it is started."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.cli.options import FLATTEN, Device
from bertkit.config import as_json
from bertkit.files import check_output, write_json
from bertkit.training.recipe import PretrainRecipe

PLANNED_DEFAULTS = PretrainRecipe()


def plan_command(
    recipe: str = "base",
    *,
    store: Path | None = None,
    vocabulary_size: int = 30522,
    device: Device = "auto",
    seconds: float = 20.0,
    json: Path | None = None,
    settings: Annotated[PretrainRecipe, FLATTEN] = PLANNED_DEFAULTS,
) -> None:
    """Measure the speed, time and memory of a pre-training run by training for some seconds.

    Parameters
    ----------
    recipe
        A shipped recipe or a .toml file, as for `bertkit pretrain`; flags override its fields.
    store
        The token store to train on; without it, random ids in examples of full length.
    vocabulary_size
        The number of ids, without a store.
    seconds
        About how long to measure.
    json
        A file to write the plan to.
    """
    from bertkit.training.plan import plan

    json = json and check_output(json)
    made = plan(settings, store, vocabulary_size=vocabulary_size, device=device, seconds=seconds)
    print(  # noqa: T201
        f"{Path(recipe).stem}: {made.parameters:,} parameters, {made.precision}, on {made.device}"
    )
    for phase in made.phases:
        print(  # noqa: T201
            f"{phase.steps:,} updates of {phase.batch_size} x {phase.length} tokens: "
            f"{phase.tokens_per_second:,.0f} tokens/s (MFU {phase.mfu:.0%}), "
            f"{phase.seconds_per_update:,.3g} s each, {phase.hours:,.3g} hours"
        )
    print(f"in all {made.hours:,.3g} hours, {made.memory_bytes / 2**30:.2f} GiB of memory")  # noqa: T201
    if json is not None:
        write_json(json, as_json(made))
