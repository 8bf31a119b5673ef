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
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from bertkit.checkpoints.save import save_generator, save_model
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError, DivergedError
from bertkit.files import as_json, escaped, from_home
from bertkit.pretraining_data.examples import MaskingOptions, PairOptions, measure_pairs
from bertkit.pretraining_data.loader import (
    START,
    BatchBuilder,
    DataPosition,
    ExampleSampler,
    PretrainingBatch,
    StreamStep,
    check_batch_sizes,
    stream_steps,
)
from bertkit.processes import check_process_count
from bertkit.progress import Console, Journal, OnRecord, console_or_new
from bertkit.training.device import (
    OUT_OF_MEMORY,
    choose_device,
    choose_precision,
    own_random_numbers,
)
from bertkit.training.distributed import (
    ALONE,
    GracefulStop,
    Ranks,
    init_distributed,
    local_device,
    replicate,
)
from bertkit.training.optimizer import save_training
from bertkit.training.recipe import PretrainRecipe, read_recipe
from bertkit.training.start import (
    Run,
    announce,
    build_network,
    check_initial_model,
    claim_folder,
    default_workers,
    is_finished,
    resume,
    with_sizes,
)
from bertkit.training.step import (
    LoopSettings,
    PretrainMetrics,
    StepRecord,
    evaluate_batches,
    mean_losses,
    train_steps,
)

if TYPE_CHECKING:
    from bertkit.checkpoints.pretrained import PretrainedWeights


Examples = tuple[ExampleSampler, BatchBuilder]
"""The examples in their order of use, and the builder that makes batches of them."""

HELD_OUT_BATCH = 64
"""The number of sequences in an evaluation batch, if the device has enough memory for them."""


def pretrain(
    recipe: PretrainRecipe | Path | str,
    store: TokenStore | Path | str,
    out: Path | str,
    *,
    recipe_name: str = "recipe",
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
            process is using it; training diverged; a shard is damaged;
            `save_models_at` has an update that the recipe does not make; or the disk is full.
    """
    if not isinstance(recipe, PretrainRecipe):
        recipe_name, recipe = Path(recipe).stem, read_recipe(recipe)
    total = recipe.phases.total_steps
    if never := [step for step in save_models_at if not 1 <= step <= total]:
        raise BertkitError(f"save_models_at has {never[0]:,}, and updates are 1 to {total:,}")
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
        changes = claim_folder(run, stack)
        stack.enter_context(own_random_numbers(on))
        build_network(run, compiled=compiled)
        changes += resume(run)
        if ranks.broadcast(ranks.on_rank0(lambda: int(is_finished(run)))):
            run.console.say(f"{run.folder} is finished ({total:,} updates); nothing to do")
            return None
        log = ranks.on_rank0(
            lambda: Journal(*(run.folder, run.console), resume_step=run.step, on_record=on_record)
        )
        log = stack.enter_context(log or Journal(None, run.console))
        with GracefulStop(patient=ranks.world > 1).install() as stop:
            return train(run, log, stop, changes)


def train(run: Run, log: Journal, stop: GracefulStop, changes: Sequence[str]) -> int | None:
    """Make the remaining updates and write the model; or return the signal that stopped the run."""
    started, total = time.perf_counter(), run.recipe.phases.total_steps
    with closing(TrainingData(run.recipe, run.store)) as data:
        held_out = HeldOut(run.recipe, run.store)
        notes = [f"resumed with changes: {'; '.join(changes)}"] if changes else []
        if held_out.store is None:
            notes.append("the store has fewer than two held-out documents; nothing is evaluated")
        announce(run, log, data.open(0)[0], notes)
        run.console.start(total, run.step, title="training")
        run.model.train()
        try:
            stopped = train_phases(run, data, held_out, log, stop)
        except DivergedError:
            log.write({"kind": "end", "step": run.step, "reason": "diverged"})
            raise
    if not stopped:
        run.ranks.on_rank0(lambda: write_model(run, run.folder / "model"))
    seconds = time.perf_counter() - started
    reason = "interrupted" if stopped else "finished"
    log.write({"kind": "end", "step": run.step, "reason": reason, "seconds": seconds})
    if not stopped:
        run.console.say(f"finished: the model is in {run.folder / 'model'}")
        return None
    number = stop.received or signal.SIGTERM
    saved = f"saved after {run.step:,} updates" if run.step else "before the first update"
    name = signal.Signals(number).name
    run.console.say(f"stopped by {name}, {saved}; run the same command to resume")
    return number


def train_phases(
    run: Run, data: TrainingData, held_out: HeldOut, log: Journal, stop: GracefulStop
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
    model = replicate(run.model, run.device) if ranks.world > 1 else run.model
    if ranks.world == 1 and stop.asked:
        return True
    for phase in range(phases.locate(run.step)[0], len(phases.steps)):
        begin_phase(run, phase)
        made = phases.locate(run.step)[1]
        with closing(data.stream(phase, made, run.position, ranks, run.workers)) as steps:
            window = PretrainMetrics(run.model, run.matmul_peak, phase, ranks)
            for update in train_steps(
                model, run.optimizer, run.loss_fn, steps, settings, done=run.step
            ):
                stopping = update.stop or (ranks.world == 1 and stop.asked)
                after_update(run, update, window, held_out, settings, log, stopping=stopping)
                if stopping and run.step < phases.total_steps:
                    return True
    return False


def begin_phase(run: Run, phase: int) -> None:
    """Start a phase with its first example, and with copied positions if the recipe says so."""
    phases = run.recipe.phases
    if phases.locate(run.step)[1]:  # resumed within the phase
        return
    run.position = START
    if phases.copy_positions and phase and run.initial is None:  # a model has its own
        longest = max(phases.lengths[:phase])
        run.model.encoder.copy_positions(longest, phases.lengths[phase])


def after_update(
    run: Run,
    update: StepRecord[DataPosition],
    window: PretrainMetrics,
    held_out: HeldOut,
    settings: LoopSettings,
    log: Journal,
    *,
    stopping: bool,
) -> None:
    """Log, evaluate and save what is due after an update."""
    run.step, run.position = update.step, update.after
    window.add(update)
    phases, every = run.recipe.phases, run.recipe.logging

    def due(interval: int) -> bool:
        return run.step % interval == 0 or run.step == phases.total_steps

    evaluating = due(every.evaluate_every)
    saving = due(every.checkpoint_every) or stopping
    exporting = run.step in run.save_models_at
    phase_ends = phases.locate(run.step)[0] != window.phase
    if phase_ends or evaluating or saving or exporting or due(every.log_every):
        log.write(window.close(), show=True)
    if evaluating and held_out.store is not None:
        means = held_out.evaluate(run.model, window.phase, settings)
        log.write({"kind": "evaluation", "step": run.step, **means}, show=True)
    if exporting:
        folder = run.folder / "models" / f"step-{run.step:08d}"
        run.ranks.on_rank0(partial(write_model, run, folder))
    if saving:
        run.ranks.on_rank0(partial(save_checkpoint, run, log))
    if evaluating or saving or exporting:
        window.restart()  # they do not count as training


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
        "corpora": [
            {"name": escaped(store.folder.name), "content_hash": store.content_hash, "share": 1.0}
        ],
    }
    if run.recipe.objectives.token == "rtd":
        beside = "generator" if folder.name == "model" else f"generator-{folder.name}"
        save_generator(folder.with_name(beside), run.model, tokenizer, details)
    # written last, because `is_finished` looks for this folder
    save_model(folder, run.model, tokenizer, details)


def phase_examples(
    recipe: PretrainRecipe, store: TokenStore, phase: int, masking: MaskingOptions, seed: int
) -> Examples:
    """Return the examples of a phase in order, and the builder that makes batches of them."""
    phases, objectives = recipe.phases, recipe.objectives
    seed += phase << 32  # each phase draws its own examples and masks
    options = PairOptions(max_length=phases.lengths[phase], pair=objectives.pair)
    builder = BatchBuilder(store, masking, phases.max_predictions[phase], seed, objectives.token)
    return ExampleSampler(store, options, seed), builder


class TrainingData:
    """The training examples of a run, one phase at a time."""

    def __init__(self, recipe: PretrainRecipe, store: TokenStore) -> None:
        self.recipe, self.store = recipe, store
        self._opened: tuple[int, Examples] | None = None

    def open(self, phase: int) -> Examples:
        """Return the examples of a phase, and close those of the previous one."""
        if self._opened is None or self._opened[0] != phase:
            self.close()
            masking, seed = self.recipe.masking, self.recipe.training.seed
            self._opened = phase, phase_examples(self.recipe, self.store, phase, masking, seed)
        return self._opened[1]

    def stream(
        self, phase: int, made: int, position: DataPosition, ranks: Ranks, workers: int
    ) -> Generator[StreamStep, None, None]:
        """Yield this rank's micro-batches of a phase after its first `made` updates."""
        examples, builder = self.open(phase)
        return stream_steps(
            examples,
            builder,
            batch_size=self.recipe.phases.batch_sizes[phase],
            steps=self.recipe.phases.steps[phase] - made,
            position=position,
            micro_batches=ranks.micro_batches(self.recipe.training.accumulate),
            rank=ranks.rank,
            world=ranks.world,
            workers=workers,
        )

    def close(self) -> None:
        """Cancel the planning of the next window; calling this again does nothing."""
        if self._opened is not None:
            self._opened[1][0].close()
            self._opened = None


class HeldOut:
    """The held-out examples of a run: opened and verified once, planned once for each phase.

    Their seed is 0 and their masking is 15 %, 80/10/10, whatever the recipe says, so that runs with
    different seeds and masking can be compared.
    """

    def __init__(self, recipe: PretrainRecipe, store: TokenStore) -> None:
        self.recipe = recipe
        self.store = store.held_out
        """The held-out split, or None if it lacks the two documents that an evaluation needs."""
        self.batch_size = HELD_OUT_BATCH
        """The number of sequences in a batch; lower it if the device has too little memory."""
        self._rows: dict[int, np.ndarray] = {}

    def _examples(self, phase: int) -> Examples:
        assert self.store is not None, "there are too few held-out documents"
        return phase_examples(self.recipe, self.store, phase, MaskingOptions(), seed=0)

    def rows(self, phase: int) -> np.ndarray:
        """Return the examples that a phase is evaluated on."""
        if phase not in self._rows:
            with closing(self._examples(phase)[0]) as examples:
                rows = examples.first(self.recipe.logging.held_out_sequences)
            self._rows[phase] = rows.copy()  # a view would keep the whole window in memory
        return self._rows[phase]

    def batches(self, phase: int, ranks: Ranks = ALONE) -> Iterator[PretrainingBatch]:
        """Yield a rank's batches of a phase, with the same masks at every evaluation."""
        share, builder = self.rows(phase)[ranks.rank :: ranks.world], self._examples(phase)[1]
        for start in range(0, len(share), self.batch_size):
            yield builder[share[start : start + self.batch_size]]

    def evaluate(self, model: nn.Module, phase: int, settings: LoopSettings) -> dict[str, Any]:
        """Return the fields of an evaluation record; if memory is short, measure in parts."""
        ranks = settings.ranks if len(self.rows(phase)) >= settings.ranks.world else ALONE
        loss_fn = self.recipe.objectives.function()
        while True:
            torch.manual_seed(0)  # so that ELECTRA's generator, too, samples the same every time
            try:
                batches = self.batches(phase, ranks)
                sums, counted = evaluate_batches(model, loss_fn, batches, settings)
                break
            except BertkitError as error:
                if error.code != OUT_OF_MEMORY or self.batch_size == 1:
                    raise
            self.batch_size //= 2
        counts = ranks.all_reduce_counts(counted)()
        values = ranks.all_reduce_scalars({name: total.value for name, total in sums.items()})
        means = mean_losses({n: s._replace(value=values[n]) for n, s in sums.items()}, counts)
        token = "mlm" if "mlm_loss" in means else "lm"
        perplexity = math.exp(min(means[f"{token}_loss"], 700.0))
        record = {"phase": phase, **means, f"{token}_perplexity": perplexity, **counts}
        if self.recipe.objectives.has_pairs:
            share = measure_pairs(self.rows(phase)).random_share
            record["nsp_majority"] = max(share, 1 - share)  # the accuracy of a constant answer
        return record
