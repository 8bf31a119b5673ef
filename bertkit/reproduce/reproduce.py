"""Reproduce the paper's tables: run what is missing, and write them next to the paper's numbers."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.config import read_recipe
from bertkit.console import Console, console_or_new
from bertkit.corpus.from_text import TextOptions, store_from_text
from bertkit.errors import BertkitError, HeldError, nearest
from bertkit.files import from_home, read_json, write_json, write_text
from bertkit.reproduce.experiments import EXPERIMENTS, RESIZED
from bertkit.reproduce.outcome import gather_results
from bertkit.reproduce.paper import NO_SOURCES, Scale, Sources, find_table, read_scale
from bertkit.reproduce.report import as_markdown, as_page
from bertkit.reproduce.run import (
    POLL_SECONDS,
    Reproduction,
    ReproductionStep,
    recorded_scale,
    run_experiments,
)
from bertkit.training.device import choose_device
from bertkit.training.recipe import PretrainRecipe


def reproduce_tables(
    tables: Sequence[str],
    out: Path | str,
    *,
    scale: str | None = None,
    sources: Sources = NO_SOURCES,
    device: str = "auto",
    plan: bool = False,
    render: bool = False,
    console: Console | None = None,
) -> int:
    """Run tables 1 to 8 and figure 5 of the paper at some scale, and write them.

    Args:
        tables: "table-1" to "table-8", "figure-5", or "all".
        out: the folder for networks, fine-tuning results, reproduction.json, .md and .html.
        scale: "tiny", "small", "base", "large" or a .toml file; None for the scale recorded in the
            folder, else "small".
        sources: the text, the labelled data, and the model to use instead of a pre-trained one.
        device: "auto", "cpu", "cuda", ...
        plan: whether only to say what would be run.
        render: whether only to write the tables from the results that exist.
        console: the console for progress; None for a new one.

    Returns:
        0 if everything was run, else the number of the signal that stopped it.

    Raises:
        BertkitError: a table or scale is unknown, data or text is missing, or the folder holds a
            reproduction with other settings.
    """
    out = Path(from_home(out))
    if render:
        sources = recorded_sources(out)
        if not tables and (out / "reproduction.json").is_file():
            tables = [one["key"] for one in read_json(out / "reproduction.json")["tables"]]
    elif not tables:
        raise BertkitError(f"no table is given; choose {', '.join(EXPERIMENTS)} or all")
    chosen = list(EXPERIMENTS) if "all" in tables else [find_table(name).key for name in tables]
    found = read_scale(scale) if scale else recorded_scale(out)
    experiments = [EXPERIMENTS[key](found) for key in chosen]
    check_networks(found)
    if not render:
        if sources.data is None:
            raise BertkitError("there is no labelled data to fine-tune on; give --data FOLDER")
        if not sources.data.is_dir():
            raise BertkitError(f"there is no folder {sources.data} to fine-tune on; correct --data")
        choose_device(device)  # fails before text is prepared
        if sources.model is not None:
            read_pretrained(sources.model)
    with console_or_new(console) as shown:
        work = Reproduction(out, found, sources, device, shown)
        stopped_by = 0
        if render:
            work.begin()  # refuses another scale than the folder's
        else:
            steps = work.steps(experiments)
            jobs = [job for experiment in experiments for job in experiment.jobs]
            reasons = dict.fromkeys(map(work.why_unrunnable, jobs))
            shown.say(describe_work(work, steps), *(f"left out: {one}" for one in reasons if one))
            pretrains = any(step.job is None for step in steps)
            if pretrains and not sources.text:
                raise BertkitError("there is no text to pre-train on; give --text PATHS")
            if plan:
                return 0
            work.begin()
            make_text(work, steps, shown)
            stopped_by = run_experiments(work, steps)
        every = [build(found) for build in EXPERIMENTS.values()]
        shown_tables = [e for e in every if e.paper.key in chosen or any(map(work.results, e.jobs))]
        write_tables(gather_results(work, shown_tables), out)
        shown.say(f"tables: {out / 'reproduction.html'}")
    return stopped_by


def check_networks(scale: Scale) -> None:
    """Refuse networks that are impossible, and names of networks or tables that have no effect."""
    known: dict[str, tuple[str, ...]] = {}
    for build in EXPERIMENTS.values():
        known |= build(replace(scale, repeated=())).variants
    for flags in known.values():
        read_recipe(PretrainRecipe, scale.recipe, scale.recipe_flags(flags))
    for key in scale.bases.keys() - RESIZED:
        raise BertkitError(f"scale {scale.name}: bases: {key} has no base of its own")
    for name in scale.repeated:
        if name not in known:
            raise BertkitError(
                f"scale {scale.name}: repeated: no network is called '{name}'{nearest(name, known)}"
            )


def write_tables(outcome: dict[str, Any], out: Path) -> None:
    """Write the results as JSON, Markdown and a page."""
    write_json(out / "reproduction.json", outcome)
    write_text(out / "reproduction.md", as_markdown(outcome))
    write_text(out / "reproduction.html", as_page(outcome))


def recorded_sources(out: Path) -> Sources:
    """Return the sources that are recorded in the folder of a reproduction."""
    path = out / "reproduce.json"
    if not path.is_file():
        raise BertkitError(f"{out} holds no reproduction to render; leave out --render")
    try:
        values = read_json(path)["sources"]
        paths = {name: values[name] and Path(values[name]) for name in ("data", "model")}
        return Sources(text=tuple(values["text"]), **paths)
    except (TypeError, KeyError):
        raise BertkitError(f"{path} is damaged; choose another --out") from None


def describe_work(work: Reproduction, steps: list[ReproductionStep]) -> str:
    """Return a sentence that says how many steps there are, and how many are left to do."""
    networks = [work.is_done(step) for step in steps if step.job is None]
    tunings = [work.is_done(step) for step in steps if step.job is not None]
    return (
        f"{work.scale.title}: networks to pre-train: {len(networks)} "
        f"({networks.count(False)} left); fine-tuning jobs: {len(tunings)} "
        f"({tunings.count(False)} left), seeds for each: {work.scale.seeds}"
    )


def make_text(work: Reproduction, steps: list[ReproductionStep], console: Console) -> None:
    """Make the vocabulary and the token store if any step pre-trains a network."""
    folder, scale = work.out / "text", work.scale
    if all(step.job is not None for step in steps):
        return
    corpus = TextOptions(
        text=work.sources.text, vocabulary_size=scale.vocabulary_size, cased=scale.cased
    )
    for attempt in count():
        try:
            store_from_text(corpus, folder, console=console)
            return
        except HeldError:
            if attempt == 0:
                console.say("another process is preparing the text; waiting for it")
            time.sleep(POLL_SECONDS)
