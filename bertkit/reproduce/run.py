"""Run the work behind the tables: pre-training, fine-tuning, and finding out what is left to do.

Each part has a separate folder that is either complete or can be resumed: `text/` (tokenizer and
token store), `networks/VARIANT` (pre-training runs) and `tuned/VARIANT/TASK` (grids of seeds). The
same command therefore continues with what is missing, and several processes can share the work:
each takes a step that no other process holds.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.config import as_json, claim_settings, read_recipe
from bertkit.console import Console
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError, DivergedError, HeldError
from bertkit.files import exclusive_lock, read_json, read_object, write_json
from bertkit.finetuning.finetune import finetune
from bertkit.finetuning.grid import RunResult, read_results
from bertkit.finetuning.settings import FinetuneSettings, Grid, RunSettings
from bertkit.reproduce.data import absent_files, load_task
from bertkit.reproduce.experiments import (
    BASE,
    PERPLEXITY,
    SNAPSHOTS,
    Experiment,
    TaskRun,
    size_name,
    variant_of,
)
from bertkit.reproduce.paper import Scale, Sources, build_scale, read_scale
from bertkit.tasks.data import TaskData
from bertkit.training.journal import read_journal
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import PretrainRecipe

POLL_SECONDS = 5.0
"""The number of seconds between two checks of the steps that other processes hold."""


@dataclass(frozen=True, kw_only=True)
class LaterSeeds(Grid):
    """A grid without the runs of its first seeds, which are made elsewhere."""

    first: int = 1
    """The first seed that is run; the last is `seeds`."""

    def runs(self) -> list[RunSettings]:
        """Return the runs whose seed is at least `first`; see `Grid.runs`."""
        return [run for run in super().runs() if run.seed >= self.first]


class Reproduction:
    """The folder of a reproduction."""

    def __init__(
        self, out: Path, scale: Scale, sources: Sources, device: str, console: Console
    ) -> None:
        self.out, self.scale, self.sources = out, scale, sources
        self.device, self.console = device, console
        self.data: dict[tuple[str, int], TaskData] = {}
        """The task data read so far: (task, number of positions) -> data."""

    def begin(self) -> None:
        """Record the settings in the folder, or check that they are the recorded ones."""
        settings = {"scale": as_json(self.scale), "sources": as_json(self.sources)}
        path = self.out / "reproduce.json"
        parts = [self.out / name for name in ("text", "networks", "tuned")]
        made = [one for part in parts for one in part.glob("*") if one.name != ".lock"]
        if not made:  # settings with which nothing was made do not bind
            path.unlink(missing_ok=True)
        same = path.is_file() and recorded_scale(self.out) == self.scale  # it may lack new fields
        claim_settings(path, settings, "a reproduction", ignored=["scale"] if same else ())

    def given(self, variant: str, at: int = 0) -> Path | None:
        """Return the model of `--model` if it replaces this network, else None."""
        bases = {BASE, *map(size_name, self.scale.bases.values())}
        return self.sources.model if variant_of(variant) in bases and not at else None

    def network(self, variant: str, at: int = 0) -> Path:
        """Return the folder of a variant's model: finished, or after `at` updates if not 0."""
        if given := self.given(variant, at):
            return given
        folder = self.out / "networks" / variant
        return folder / "models" / f"step-{at:08d}" if at else folder

    def is_trained(self, variant: str, *, own: bool = False) -> bool:
        """Return whether a variant's pre-training is finished, or `--model` replaces it."""
        if self.given(variant) and not own:
            return True
        ends = [r for r in self.journal(variant) if r["kind"] == "end"]
        return bool(ends) and ends[-1]["reason"] == "finished"

    def journal(self, variant: str) -> list[dict[str, Any]]:
        """Return the journal records of a variant's pre-training so far."""
        path = self.out / "networks" / variant / "journal.jsonl"
        return read_journal(path) if path.is_file() else []

    def tuned(self, job: TaskRun) -> Path:
        """Return the folder of a fine-tuning job."""
        return self.out / "tuned" / job.name

    def models(self, job: TaskRun) -> list[Path]:
        """Return the models that a job has left so far; a finished job has none."""
        return [p for glob in ("runs/*/model", "model") for p in self.tuned(job).glob(glob)]

    def grid(self, job: TaskRun) -> Grid:
        """Return the grid of a job's runs: one setting, all seeds or that of the job."""
        task = self.scale.task(job.task)
        rate = (task.frozen_learning_rate if job.head.frozen else 0) or task.learning_rate
        return LaterSeeds(
            batch_size=(task.batch_size,),
            learning_rate=(rate,),
            epochs=(task.epochs,),
            seeds=job.seed or self.scale.seeds,
            first=job.seed or 1,
        )

    def results(self, job: TaskRun) -> list[RunResult]:
        """Return the results of a job's finished runs."""
        return read_results(self.tuned(job), self.grid(job).runs())

    def why_unrunnable(self, job: TaskRun) -> str:
        """Return why a job cannot be run, or "" if it can."""
        for variant, at in ((job.variant, job.at), (job.head.beside, 0)):
            made_here = variant and not self.given(variant, at)
            if made_here and (reason := self.why_untrainable(variant)):
                return reason
        if reason := self.failure(f"tune {job.name}"):
            return reason
        if self.sources.data is None:
            return "no data folder was given"
        return absent_files(job.task, self.sources.data)

    def why_untrainable(self, variant: str) -> str:
        """Return why a network can neither be found nor pre-trained, or "" if it can."""
        if reason := self.failure(f"pre-train {variant}"):
            return f"{variant}: {reason}"
        textless = self.sources.model is not None and not self.sources.text
        if textless and not self.is_trained(variant, own=True):
            return f"there is no text to pre-train {variant} on; give --text and choose a new --out"
        return ""

    def failure(self, step: str) -> str:
        """Return why a step ended without a result, or "" if it did not."""
        path = self.out / "failed" / f"{folder_name(step)}.json"
        return str(read_object(path).get("reason")) if path.is_file() else ""

    def give_up(self, step: ReproductionStep, error: DivergedError) -> None:
        """Record that a step diverged, so that the other steps can continue."""
        path = self.out / "failed" / f"{folder_name(step.name)}.json"
        write_json(path, {"reason": f"diverged ({error})"})
        again = f"delete {path}"
        if step.job is None:  # resuming from its checkpoints would diverge again
            again += f" and {self.out / 'networks' / step.variant}"
        self.console.say(f"{step.name} is skipped: {error}; to retry after changing code, {again}")

    def steps(self, experiments: Sequence[Experiment]) -> list[ReproductionStep]:
        """Return the distinct steps of the tables: each network, then its fine-tuning jobs."""
        variants: dict[str, tuple[str, ...]] = {}
        jobs: list[TaskRun] = []
        for experiment in experiments:
            variants |= experiment.variants
            jobs += [job for job in experiment.jobs if job not in jobs]
        possible = [job for job in jobs if not self.why_unrunnable(job)]
        needed = {job.variant for job in possible} | {job.head.beside for job in possible}
        needed |= {
            job.variant
            for experiment in experiments
            for cell in experiment.cells
            for job in cell.jobs
            if cell.metric == PERPLEXITY
        }
        steps = []
        for variant, flags in variants.items():
            own = [job for job in possible if job.variant == variant]
            wanted = variant in needed and not (
                self.given(variant) or self.why_untrainable(variant)
            )
            if wanted or any(job.at for job in own):
                steps.append(ReproductionStep(variant, flags))
            steps += [ReproductionStep(variant, flags, job) for job in own]
        return steps

    def is_done(self, step: ReproductionStep) -> bool:
        """Return whether a step needs no more work: it is done, or cannot be done."""
        if step.job is None:
            return self.is_trained(step.variant, own=True) or bool(self.failure(step.name))
        done = len(self.results(step.job)) == len(self.grid(step.job).runs())
        return (done and not self.models(step.job)) or bool(self.why_unrunnable(step.job))

    def is_ready(self, step: ReproductionStep) -> bool:
        """Return whether the networks that a step starts from are trained."""
        if step.job is None:
            return True
        beside = step.job.head.beside
        ready = self.is_trained(step.variant, own=bool(step.job.at))
        return ready and (not beside or self.is_trained(beside))

    def run(self, step: ReproductionStep) -> int:
        """Do a step, and return the number of the signal that stopped it, else 0."""
        if step.job is None:
            return self.train(step)
        self.tune(step.job)
        return 0

    def train(self, step: ReproductionStep) -> int:
        """Pre-train a network; see `run`."""
        flags = self.scale.recipe_flags(step.flags)
        stopped_by = pretrain(
            read_recipe(PretrainRecipe, self.scale.recipe, flags),
            TokenStore(self.out / "text" / "store"),
            self.out / "networks" / step.variant,
            recipe_name=step.variant,
            device=self.device,
            save_models_at=self.scale.steps if variant_of(step.variant) in SNAPSHOTS else (),
            console=self.console,
        )
        return stopped_by or 0

    def tune(self, job: TaskRun) -> None:
        """Fine-tune a network on a task with all seeds, keeping only the scores."""
        assert self.sources.data is not None, "a job without data is not run"
        start, task = read_pretrained(self.network(job.variant, job.at)), self.scale.task(job.task)
        key = job.task, start.config.max_position_embeddings
        if key not in self.data:
            self.data[key] = load_task(job.task, self.sources.data, task, key[1])
        head = job.head
        if head.beside:
            head = replace(head, beside=str(self.network(head.beside)))
        finetune(
            self.data[key],
            start,
            self.tuned(job),
            settings=FinetuneSettings(grid=self.grid(job), head=head, device=self.device),
            console=self.console,
        )
        for model in self.models(job):  # only scores are needed
            shutil.rmtree(model)


@dataclass(frozen=True)
class ReproductionStep:
    """A network to pre-train or, if it has a job, a fine-tuning to run."""

    variant: str
    flags: tuple[str, ...]
    job: TaskRun | None = None

    @property
    def name(self) -> str:
        """The name in messages, from which the names of its lock and failure file are derived."""
        return f"pre-train {self.variant}" if self.job is None else f"tune {self.job.name}"


def recorded_scale(out: Path) -> Scale:
    """Return the scale recorded in the folder of a reproduction, or "small" if there is none."""
    path = out / "reproduce.json"
    if not path.is_file():
        return read_scale("small")
    try:
        values = read_json(path)["scale"]
        return build_scale(values.pop("name"), values)
    except (TypeError, KeyError, AttributeError, ValueError):
        raise BertkitError(f"{path} is damaged; choose another --out") from None


def run_experiments(work: Reproduction, steps: Sequence[ReproductionStep]) -> int:
    """Do all steps that no other process is doing, then wait for the steps of the others.

    Returns:
        The number of the signal that stopped the work, else 0.

    Raises:
        BertkitError: a step failed for another reason than divergence.
    """
    waiting = False
    while left := [step for step in steps if not work.is_done(step)]:
        for step in left:
            if not work.is_ready(step):
                continue
            with hold_network(work.out / "locks" / folder_name(step.name)) as free:
                if not free or work.is_done(step):
                    continue
                number = steps.index(step) + 1
                work.console.say(f"[{number} of {len(steps)}] {step.name}")
                try:
                    if stopped_by := work.run(step):
                        return stopped_by
                except DivergedError as error:
                    work.give_up(step, error)
                break
        else:
            if not waiting:
                work.console.say("other processes are doing the remaining steps; waiting for them")
            waiting = True
            time.sleep(POLL_SECONDS)
    return 0


def folder_name(step: str) -> str:
    """Return a step's name in a form that can name a folder."""
    return step.replace("/", "-").replace(" ", "-")


@contextmanager
def hold_network(folder: Path) -> Iterator[bool]:
    """Hold a folder's lock for the block; yield False if another process holds it."""
    with ExitStack() as stack:
        try:
            stack.enter_context(exclusive_lock(folder))
        except HeldError:
            yield False
        else:
            yield True
