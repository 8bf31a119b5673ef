"""Pre-training: a token store and a recipe → a run directory with a model (paper section 3.1, A.2).

A run directory holds `recipe.json` (the resolved recipe), `environment.json`, `journal.jsonl`,
`checkpoints/` and `model/`. Running the same command again resumes from the last good checkpoint,
and the final weights are byte for byte those of an uninterrupted run. If torchrun starts many
processes, they share every batch, and rank 0 writes.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Generator, Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bertkit.checkpoints.save import save_generator, save_model
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError, DivergedError
from bertkit.files import as_json, from_home, read_optional
from bertkit.pretraining_data.loader import (
    START,
    DataPosition,
    StreamStep,
    check_batch_sizes,
    stream_steps,
)
from bertkit.processes import check_process_count
from bertkit.progress import Console, Journal, OnRecord, console_or_new
from bertkit.training.device import (
    choose_device,
    choose_precision,
    default_workers,
    own_random_numbers,
)
from bertkit.training.distributed import GracefulStop, init_distributed, local_device, replicate
from bertkit.training.optimizer import save_training
from bertkit.training.recipe import PretrainRecipe, read_recipe
from bertkit.training.start import (
    RECIPE,
    Examples,
    HeldOut,
    Run,
    announce,
    build_network,
    check_initial_model,
    claim_folder,
    is_finished,
    lock_folder,
    phase_examples,
    resume,
    with_sizes,
)
from bertkit.training.step import (
    LoopSettings,
    MetricWindow,
    StepRecord,
    time_updates,
    train_steps,
)

if TYPE_CHECKING:
    from bertkit.checkpoints.pretrained import PretrainedWeights


MEASURED_SHARE, MEASURED_SECONDS = 0.05, 20.0
"""The part of a budget of minutes that measures the speed, and the seconds that suffice for it."""


def pretrain(
    recipe: PretrainRecipe | Path | str,
    store: TokenStore | Path | str,
    out: Path | str,
    *,
    recipe_name: str = "recipe",
    minutes: float | None = None,
    workers: int | None = None,
    device: str = "auto",
    compiled: bool = False,
    save_models_at: Sequence[int] = (),
    init_from: PretrainedWeights | None = None,
    timeout: float = 600.0,
    console: Console | None = None,
    on_record: OnRecord | None = None,
) -> int | None:
    """Pre-train a model and write its run directory; `bertkit report` makes a report of it.

    Args:
        recipe: a `PretrainRecipe`, or the path or name of one.
        store: a token store or its folder; its tokenizer becomes the model's.
        out: the run directory; an unfinished run of the same recipe is resumed.
        recipe_name: the name to report if the recipe is not given by name.
        minutes: how long to train: the speed of each phase is measured, and the numbers of updates
            and the warm-up are scaled. They are recorded, and a resumed run keeps them.
        workers: the number of loader processes that build batches; by default 0 on a CPU, whose
            cores train, and up to 4 on a GPU. Batches are the same for any number.
        device: "auto", "cpu", "cuda", "cuda:1", ...
        compiled: whether to compile the layers, which suits long runs on CUDA.
        save_models_at: updates after which the model is also written to `models/step-NNNNNNNN`.
        init_from: a model to take the weights and sizes from, by `checkpoints.read_pretrained`.
        timeout: the number of seconds to wait for another process of torchrun before giving up.
        console: the console that shows progress; the default is a new one.
        on_record: a function that receives each new record of the journal as a dict, on rank 0. An
            exception that it raises ends the run, which the same call resumes.

    Returns:
        None if the recipe was finished, else the number of the signal that stopped the run, after
        its checkpoint was saved.

    Raises:
        BertkitError: the folder holds a run of another recipe or store, or something else; another
            process is using it; training diverged; a shard is damaged; the minutes are too few;
            `save_models_at` has an update that the recipe does not make; or the disk is full.
    """
    if not isinstance(recipe, PretrainRecipe):
        recipe_name, recipe = Path(recipe).stem, read_recipe(recipe)
    if minutes is not None and not 0 < minutes < 1e7:
        raise BertkitError(f"minutes must be above 0, not {minutes:g}", code="number")
    check_process_count(workers or 0, "--workers")
    on = choose_device(local_device(device))
    store = store if isinstance(store, TokenStore) else TokenStore(store)
    if init_from is not None:
        check_initial_model(init_from, recipe, store.tokenizer)
        recipe = with_sizes(recipe, init_from.config)
    with init_distributed(on, timeout) as ranks, ExitStack() as stack:
        run = Run(
            recipe=recipe,
            recipe_name=recipe_name,
            store=store,
            folder=Path(from_home(out)),
            ranks=ranks,
            device=on,
            precision=choose_precision(recipe.training.precision, on),
            workers=default_workers(on) if workers is None else workers,
            save_models_at=frozenset(save_models_at),
            console=stack.enter_context(console_or_new(console)),
            initial=init_from,
        )
        ranks.on_rank0(
            lambda: check_batch_sizes(recipe.phases.batch_sizes, run.micro_batches, ranks.world)
        )
        lock_folder(run, stack)
        stack.enter_context(own_random_numbers(on))
        notes = [] if minutes is None else fit_recipe(run, minutes, compiled=compiled)
        total = run.recipe.phases.total_steps
        if never := [step for step in save_models_at if not 1 <= step <= total]:
            raise BertkitError(f"save_models_at has {never[0]:,}, and updates are 1 to {total:,}")
        changes = claim_folder(run)
        build_network(run, compiled=compiled)
        if changes := changes + resume(run):
            notes.append(f"resumed with changes: {'; '.join(changes)}")
        if ranks.broadcast(ranks.on_rank0(lambda: int(is_finished(run)))):
            run.console.say(f"{run.folder} is finished ({total:,} updates); nothing to do")
            return None
        log = ranks.on_rank0(
            lambda: Journal(*(run.folder, run.console), resume_step=run.step, on_record=on_record)
        )
        log = stack.enter_context(log or Journal(None, run.console))
        with GracefulStop(patient=ranks.world > 1).install() as stop:
            return train(run, log, stop, notes)


def train(run: Run, log: Journal, stop: GracefulStop, notes: list[str]) -> int | None:
    """Make the remaining updates and write the model; or return the signal that stopped the run."""
    started, total = time.perf_counter(), run.recipe.phases.total_steps
    held_out, first = HeldOut(run.recipe, run.store), phase_examples(run.recipe, run.store, 0)
    if held_out.store is None:
        notes.append("the store has fewer than two held-out documents; nothing is evaluated")
    announce(run, log, first[0], notes)
    run.console.start(total, run.step, title="training")
    run.model.train()
    try:
        stopped = train_phases(run, first, held_out, log, stop)
    except DivergedError:
        log.write({"kind": "end", "step": run.step, "reason": "diverged"})
        raise
    if not stopped:
        run.ranks.on_rank0(lambda: write_model(run, run.folder / "model"))
    seconds = time.perf_counter() - started
    reason = "interrupted" if stopped else "finished"
    log.write({"kind": "end", "step": run.step, "reason": reason, "seconds": seconds})
    run.console.close()
    if not stopped:
        run.console.say(f"finished: the model is in {run.folder / 'model'}")
        return None
    number = stop.received or signal.SIGTERM
    saved = f"saved after {run.step:,} updates" if run.step else "before the first update"
    name = signal.Signals(number).name
    run.console.say(f"stopped by {name}, {saved}; run the same command to resume")
    return number


def train_phases(
    run: Run, first: Examples, held_out: HeldOut, log: Journal, stop: GracefulStop
) -> bool:
    """Train, log, evaluate and save until the end of the recipe; True if a signal stopped it."""
    phases, ranks = run.recipe.phases, run.ranks
    settings = LoopSettings(
        device=run.device,
        precision=run.precision,
        seed=run.recipe.training.seed,
        max_gradient_norm=run.recipe.training.max_gradient_norm,
        learning_rate=run.recipe.learning_rate,
        ranks=ranks,
        asked_to_stop=lambda: stop.asked,
        advice_if_too_large=run.smaller_micro_batches,
    )
    if ranks.world == 1 and stop.asked:
        return True
    if not measure(run, held_out, settings, log):  # what a stop after this update has left out
        return True
    model = replicate(run.model, run.device) if ranks.world > 1 else run.model
    for phase in range(phases.locate(run.step)[0], len(phases.steps)):
        begin_phase(run, phase)
        examples = phase_examples(run.recipe, run.store, phase) if phase else first
        made = phases.locate(run.step)[1]
        with closing(phase_steps(run, examples, phase, made)) as steps:
            window = MetricWindow(ranks)
            for update in train_steps(
                model, run.optimizer, run.loss_fn, steps, settings, done=run.step
            ):
                stopping = update.stop or (ranks.world == 1 and stop.asked)
                if after_update(run, update, window, held_out, settings, log, stopping=stopping):
                    return True
    return False


def begin_phase(run: Run, phase: int) -> None:
    """Start a phase with its first example, and give positions that are new in it their start."""
    phases = run.recipe.phases
    if phases.locate(run.step)[1]:  # resumed within the phase
        return
    run.position = START
    if phases.copy_positions and phase and run.initial is None:  # a model has its own
        longest = max(phases.lengths[:phase])
        run.model.encoder.copy_positions(longest, phases.lengths[phase])


def phase_steps(
    run: Run, examples: Examples, phase: int, made: int = 0
) -> Generator[StreamStep, None, None]:
    """Yield this rank's micro-batches of a phase after its first `made` updates."""
    return stream_steps(
        *examples,
        batch_size=run.recipe.phases.batch_sizes[phase],
        steps=run.recipe.phases.steps[phase] - made,
        position=run.position,
        micro_batches=run.micro_batches,
        rank=run.ranks.rank,
        world=run.ranks.world,
        workers=run.workers,
    )


def after_update(
    run: Run,
    update: StepRecord[DataPosition],
    window: MetricWindow,
    held_out: HeldOut,
    settings: LoopSettings,
    log: Journal,
    *,
    stopping: bool,
) -> bool:
    """Log, save, evaluate and export what is due after an update; True if a signal stops the run.

    A signal waits for the checkpoint alone: what is left out is made up for when the run resumes.
    """
    run.step, run.position = update.step, update.after
    window.add(update)
    every = run.recipe.logging
    saving = stopping or run.step % every.checkpoint_every == 0
    saving |= run.step == run.recipe.phases.total_steps
    measuring = must_evaluate(run) or run.step in run.save_models_at
    if saving or measuring or run.step % every.log_every == 0:
        phase, _ = run.recipe.phases.locate(run.step - 1)
        log.write({**window.close(), "phase": phase}, show=True)
    elif run.console.is_due:
        run.console.update({"kind": "step", "step": run.step, **window.so_far()})
    if saving:
        run.ranks.on_rank0(partial(save_checkpoint, run, log))
    if measuring and not stopping:
        stopping = not measure(run, held_out, settings, log)
        if stopping and not saving:
            run.ranks.on_rank0(partial(save_checkpoint, run, log))
    if saving or measuring:
        window.restart()  # they do not count as training
    return stopping


def must_evaluate(run: Run) -> bool:
    """Whether an evaluation is due after the updates made, as it is at the end of each phase."""
    ended = run.recipe.phases.locate(run.step)[1] == 0
    due = ended or run.step % run.recipe.logging.evaluate_every == 0
    return due and run.step > run.evaluated


def measure(run: Run, held_out: HeldOut, settings: LoopSettings, log: Journal) -> bool:
    """Evaluate and export the model if that is due; False if a signal ended the evaluation."""
    if must_evaluate(run) and held_out.store is not None:
        phase, _ = run.recipe.phases.locate(run.step - 1)
        means = held_out.evaluate(run.model, phase, settings)
        if means is None:
            return False
        log.write({"kind": "evaluation", "step": run.step, **means}, show=True)
        run.evaluated = run.step
    if run.step in run.save_models_at:
        folder = run.folder / "models" / f"step-{run.step:08d}"
        run.ranks.on_rank0(partial(write_model, run, folder))
    return True


def save_checkpoint(run: Run, log: Journal) -> None:
    """Save the current state, after the journal's records before it are on the disk."""
    log.sync()
    progress = {"position": list(run.position), **run.rounding_settings}
    folder = run.folder / "checkpoints"
    log.write(save_training(folder, run.step, run.model, run.optimizer, progress))


def write_model(run: Run, folder: Path) -> None:
    """Write the weights as a model directory, after the generator of an ELECTRA model."""
    store, tokenizer = run.store, run.store.tokenizer
    details = {
        "task": "pretraining",
        "made_by": "bertkit pretrain",
        "recipe": as_json(run.recipe),
        "steps": run.step,
        "start": run.initial.hub if run.initial else "",
        # without paths: the model may be published
        "corpora": [{"name": store.folder.name, "content_hash": store.content_hash, "share": 1.0}],
    }
    if run.recipe.objectives.token == "rtd":
        beside = "generator" if folder.name == "model" else f"generator-{folder.name}"
        save_generator(folder.with_name(beside), run.model, tokenizer, details)
    # written last, because `is_finished` looks for this folder
    save_model(folder, run.model, tokenizer, details)


# A budget of minutes ------------------------------------------------------------------------------


def fit_recipe(run: Run, minutes: float, *, compiled: bool) -> list[str]:
    """Scale a recipe's updates and warm-up to some minutes; a run that was begun keeps its own.

    Returns:
        A line that says what was decided; [] if the run was begun before.
    """
    recipe, ranks = run.recipe, run.ranks
    asked = [*recipe.phases.steps, recipe.training.warmup_steps]
    run.budget = {"minutes": minutes, "steps": asked[:-1], "warmup_steps": asked[-1]}
    recorded = ranks.on_rank0(lambda: read_optional(run.folder / RECIPE)) or {}
    line = ""
    if ranks.broadcast(len(recorded)):
        numbers = asked  # of another budget: `claim_folder` refuses it
        if recorded.get("budget") == run.budget:
            made = recorded["recipe"]
            numbers = [*made["phases"]["steps"], made["training"]["warmup_steps"]]
    else:
        share = min(MEASURED_SECONDS, MEASURED_SHARE * 60 * minutes) / len(asked[:-1])
        times, spent = measure_updates(run, share, compiled=compiled)
        numbers = ranks.on_rank0(lambda: scaled_updates(run, times, minutes, spent)) or asked
        each = " and ".join(f"{seconds:.3g}" for _, seconds in times)
        line = (
            f"{minutes:g} minutes of training are {sum(numbers[:-1]):,} updates "
            f"({' + '.join(f'{n:,}' for n in numbers[:-1])}), the first {numbers[-1]:,} of them as "
            f"warm-up; an update takes {each} seconds"
        )
    numbers = [ranks.broadcast(None if ranks.rank else number) for number in numbers]
    phases = replace(recipe.phases, steps=tuple(numbers[:-1]))
    training = replace(recipe.training, warmup_steps=numbers[-1])
    run.recipe = replace(recipe, phases=phases, training=training)
    return [line] if line else []


def measure_updates(
    run: Run, seconds: float, *, compiled: bool
) -> tuple[list[tuple[float, float]], float]:
    """Train a new network of the same size for some seconds in each phase.

    Returns:
        The `time_updates` of each phase, and the seconds that all took.
    """
    phases, ranks = run.recipe.phases, run.ranks
    endless = replace(run.recipe, phases=replace(phases, steps=(1 << 40,) * len(phases.steps)))
    trial = replace(run, recipe=endless, initial=None)
    build_network(trial, compiled=compiled)
    model = replicate(trial.model, run.device) if ranks.world > 1 else trial.model
    settings = LoopSettings(
        device=run.device,
        precision=run.precision,
        seed=0,
        max_gradient_norm=1.0,
        learning_rate=lambda step: 0.0,
        ranks=ranks,
        advice_if_too_large=run.smaller_micro_batches,
    )
    times, began = [], time.perf_counter()
    for phase in range(len(phases.steps)):
        examples = phase_examples(endless, run.store, phase)
        with closing(phase_steps(trial, examples, phase)) as steps:
            parts = (model, trial.optimizer, trial.loss_fn, steps, settings)
            times.append(time_updates(*parts, seconds))
    return times, time.perf_counter() - began


def scaled_updates(
    run: Run, times: Sequence[tuple[float, float]], minutes: float, spent: float
) -> list[int]:
    """Return the updates of each phase, and of the warm-up, that fit after the seconds `spent`.

    An evaluation takes a third of the time that training on its examples would.
    """
    phases, every = run.recipe.phases, run.recipe.logging
    held_out = HeldOut(run.recipe, run.store)
    fixed = proportional = 0.0
    for phase, (first, each) in enumerate(times):
        rows = len(held_out.rows(phase)) if held_out.store is not None else 0
        evaluation = each * rows / phases.batch_sizes[phase] / 3
        fixed += first + evaluation
        proportional += phases.steps[phase] * (each + evaluation / every.evaluate_every)
    scale = (60 * minutes - spent - fixed) / proportional
    if scale * min(phases.steps) < 1:
        needed = 1.1 * (spent + fixed + proportional / min(phases.steps)) / 60
        raise BertkitError(
            "the time is too short for one update of each phase; give --minutes "
            f"{math.ceil(needed)} or more, smaller batches or fewer phases",
            code="number",
        )
    steps = [int(scale * count) for count in phases.steps]
    warmup = min(round(scale * run.recipe.training.warmup_steps), sum(steps) - 1)
    return [*steps, warmup]
