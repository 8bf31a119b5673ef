"""The `bertkit reproduce` command: run the paper's tables and figure at any scale."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

from bertkit.cli.pretrain import TextOptions, store_from_text
from bertkit.config import FLATTEN
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json, write_text
from bertkit.outputs import FOLDER, NAMED
from bertkit.reproduce.experiments import EXPERIMENTS, Experiment
from bertkit.reproduce.outcome import gather_results, has_results
from bertkit.reproduce.paper import find_table, read_scale
from bertkit.reproduce.report import as_markdown, as_page
from bertkit.reproduce.run import (
    POLL_SECONDS,
    Reproduction,
    ReproductionStep,
    Sources,
    hold_network,
    recorded_scale,
    run_experiments,
)
from bertkit.training.journal import Console

NO_SOURCES = Sources()


def reproduce_command(
    *tables: str,
    out: Annotated[Path, FOLDER],
    scale: Annotated[str | None, NAMED] = None,
    sources: Annotated[Sources, FLATTEN] = NO_SOURCES,
    device: str = "auto",
    plan: bool = False,
    render: bool = False,
) -> int:
    """Run the paper's tables 1 to 8 and figure 5 at some scale, next to the results of the paper.

    The command first prints what it will run. The same command resumes a stopped reproduction, and
    several processes with the same command share the work. Cells without results are shown as
    not run.

    Parameters
    ----------
    tables
        The tables to run: table-1 to table-8, figure-5, or all.
    out
        The folder for networks, fine-tuning results and the rendered tables.
    scale
        The scale: tiny (minutes on two cores), small (hours on two cores), base or large (those of
        the paper), or a .toml file. By default it is the scale recorded in the folder, else small.
    device
        auto (CUDA, else Apple's mps, else the CPU), cpu, cuda, cuda:N or mps.
    plan
        Only print what would be run.
    render
        Only render the results that exist.
    """
    if not tables:
        raise BertkitError(f"no table is given; choose {', '.join(EXPERIMENTS)} or all")
    chosen = list(EXPERIMENTS) if "all" in tables else [find_table(name).key for name in tables]
    found = read_scale(scale) if scale else recorded_scale(out)
    experiments = [EXPERIMENTS[key](found) for key in chosen]
    if render:
        sources = recorded_sources(out)
    elif sources.data is None:
        raise BertkitError("there is no labelled data to fine-tune on; give --data FOLDER")
    elif not sources.data.is_dir():
        raise BertkitError(f"there is no folder {sources.data} to fine-tune on; correct --data")
    with Console() as console:
        work = Reproduction(out, found, sources, device, console)
        steps = work.steps(experiments)
        stopped_by = 0
        if render:
            work.begin()  # refuses another scale than the folder's
        else:
            for line in (describe_work(work, steps), *missing(work, experiments)):
                console.say(line)
            if plan:
                return 0
            work.begin()
            make_text(work, steps, console)
            stopped_by = run_experiments(work, steps)
        every = [build(found) for build in EXPERIMENTS.values()]
        shown = [e for e in every if e.paper.key in chosen or has_results(work, e)]
        outcome = gather_results(work, shown)
        write_json(out / "reproduction.json", outcome)
        write_text(out / "reproduction.md", as_markdown(outcome))
        write_text(out / "reproduction.html", as_page(outcome))
        console.say(f"tables: {out / 'reproduction.html'}")
    return 128 + stopped_by if stopped_by else 0


def recorded_sources(out: Path) -> Sources:
    """Return the sources that are recorded in the folder of a reproduction."""
    path = out / "reproduce.json"
    if not path.is_file():
        raise BertkitError(f"{out} holds no reproduction to render; leave out --render")
    values = read_json(path)["sources"]
    paths = {name: values[name] and Path(values[name]) for name in ("data", "model")}
    return Sources(text=tuple(values["text"]), **paths)


def describe_work(work: Reproduction, steps: list[ReproductionStep]) -> str:
    """Return a sentence that says how many steps there are, and how many are left to do."""
    networks = [work.is_done(step) for step in steps if step.job is None]
    tunings = [work.is_done(step) for step in steps if step.job is not None]
    return (
        f"{work.scale.title}: {len(networks)} networks to pre-train "
        f"({networks.count(False)} left), {len(tunings)} fine-tuning jobs with "
        f"{work.scale.seeds} seeds each ({tunings.count(False)} left)"
    )


def missing(work: Reproduction, experiments: list[Experiment]) -> list[str]:
    """Return a sentence for each reason why something cannot be run."""
    reasons = {work.absence(job): None for experiment in experiments for job in experiment.jobs}
    return [f"left out: {reason}" for reason in reasons if reason]


def make_text(work: Reproduction, steps: list[ReproductionStep], console: Console) -> None:
    """Make the vocabulary and the token store if any step pre-trains a network."""
    folder, scale = work.out / "text", work.scale
    if all(step.job is not None for step in steps):
        return
    if not work.sources.text:
        raise BertkitError("there is no text to pre-train on; give --text PATHS")
    corpus = TextOptions(
        text=work.sources.text, vocabulary_size=scale.vocabulary_size, cased=scale.cased
    )
    while True:
        with hold_network(folder) as free:
            if free:
                store_from_text(corpus, folder, console)
                return
        console.say("another process is preparing the text; waiting for it")
        time.sleep(POLL_SECONDS)
