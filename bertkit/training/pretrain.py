"""Pre-training: a token store and a recipe → a run directory with a model (paper section 3.1, A.2).

A run directory holds `recipe.json` (the resolved recipe), `environment.json`, `journal.jsonl`,
`checkpoints/`, `model/` and `report.html`. Running the same command again resumes from the last
good checkpoint, and the final weights are byte for byte those of an uninterrupted run. If torchrun
starts many processes (`bertkit launch`), they share every batch, and rank 0 writes.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertkit.config import as_json, read_recipe
from bertkit.console import Console, console_or_new
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError, DivergedError, HeldError, check_known
from bertkit.files import exclusive_lock, from_home, read_object
from bertkit.pretraining_data.loader import check_batch_sizes
from bertkit.pretraining_data.sampler import START
from bertkit.processes import KeptHeap, busy_note, check_process_count, usable_cores
from bertkit.training.checkpoint import CheckpointWriter
from bertkit.training.data import (
    HeldOut,
    TrainingData,
    missing_evaluations,
    opening_lines,
    start_record,
)
from bertkit.training.device import choose_device, choose_precision, device_notes, matmul_peak
from bertkit.training.distributed import (
    RANKS_MARK,
    STRATEGIES,
    GracefulStop,
    Ranks,
    check_timeout,
    code_digest,
    init_distributed,
    local_device,
    mark_of_first,
    own_random_numbers,
)
from bertkit.training.journal import Journal, OnRecord, RunLog
from bertkit.training.optimizer import trainable_parameters
from bertkit.training.recipe import PretrainRecipe, claim_run_folder, corpora
from bertkit.training.state import (
    InitialNetwork,
    TrainState,
    build_train_state,
    model_tensors,
    pretrained_network,
    random_network,
    restore_model,
)
from bertkit.training.step import LoopSettings, PretrainMetrics, evaluate_batches, train_steps

GPU_WORKERS = 4
"""The default number of loader processes of a rank that trains on a GPU."""
SMALLER_INPUT = "try shorter sequences, a smaller network, or more GPUs with --strategy fsdp"


@dataclass(frozen=True, kw_only=True)
class Run:
    """The settings of a run, which do not change while it trains."""

    recipe: PretrainRecipe
    recipe_name: str
    store: TokenStore
    folder: Path
    ranks: Ranks
    device: torch.device
    precision: str
    strategy: str
    workers: int
    save_models_at: frozenset[int]
    console: Console
    start: str = ""
    """Where the initial weights are from, for the model card; "" if they are random."""
    inherited: Mapping[str, Any] = field(default_factory=dict)
    """The metadata that the model card takes over from the initial model."""

    @property
    def sharded(self) -> bool:
        """Whether FSDP2 divides the network among the ranks."""
        return self.strategy == "fsdp" and self.ranks.world > 1

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a global batch, over all ranks."""
        return self.ranks.micro_batches(self.recipe.training.accumulate)

    @property
    def arithmetic(self) -> dict[str, Any]:
        """The settings that affect how an update is rounded."""
        return {"micro_batches": self.micro_batches, "precision": self.precision}

    def smaller_micro_batches(self, lengths: Sequence[int]) -> str:
        """Return advice for a micro-batch, of these lengths, that does not fit into memory."""
        if len(lengths) == 1:
            return SMALLER_INPUT
        return (
            f"try training.accumulate = {2 * self.micro_batches} in a new --out (micro-batches of "
            f"{-(-len(lengths) // 2)} sequences)"
        )

    @cached_property
    def matmul_peak(self) -> float:
        """FLOP/s of matrix products on this device, against which the MFU is measured."""
        return matmul_peak(self.device, self.precision, seconds=0.3)


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
    init_from: Path | str | None = None,
    strategy: str = "ddp",
    timeout: float = 600.0,
    console: Console | None = None,
    track: Sequence[str] = ("tensorboard",),
    on_record: OnRecord | None = None,
) -> int | None:
    """Pre-train a model and write its run directory; `bertkit report` makes a report of it.

    Args:
        recipe: a `PretrainRecipe`, or the path or name of one.
        store: a token store or its folder, or several stores joined by `mixture.mix_stores`; its
            tokenizer becomes the model's.
        out: the run directory; an unfinished run of the same recipe is resumed.
        recipe_name: the name to report if the recipe is not given by name.
        workers: the number of loader processes that build batches; by default 0 on a CPU, whose
            cores train, and up to 4 on a GPU. Batches are the same for any number.
        device: "auto", "cpu", "cuda", "cuda:1", ...
        compiled: whether to compile the layers, which suits long runs on CUDA.
        save_models_at: updates after which the model is also written to `models/step-NNNNNNNN`.
        init_from: a model to take the weights and sizes from, such as one with domain words added
            (`bertkit vocab extend`).
        strategy: how several processes train: "ddp", or "fsdp" for a network too large for one.
        timeout: the number of seconds to wait for another process before giving up.
        console: the console that shows progress; the default is a new one.
        track: the trackers that receive the journal's records: "tensorboard" (events in
            `out`/tensorboard, if it is installed), "wandb", "mlflow".
        on_record: a function that receives each new record of the journal as a dict, on rank 0. An
            exception that it raises ends the run, which the same call resumes.

    Returns:
        None if the recipe was finished, else the number of the signal that stopped the run.

    Raises:
        BertkitError: the folder holds a run of another recipe or store, or something else; another
            process is using it; the ranks disagree; training diverged; a shard is damaged; a
            tracker is not installed; `save_models_at` has an update that the recipe does not make;
            or the disk is full.
    """
    if not isinstance(recipe, PretrainRecipe):
        recipe_name, recipe = Path(recipe).stem, read_recipe(PretrainRecipe, str(recipe))
    total = recipe.phases.total_steps
    if never := [step for step in save_models_at if not 1 <= step <= total]:
        raise BertkitError(
            f"save_models_at has {never[0]:,}, and the recipe makes updates 1 to {total:,}; remove "
            "it or train longer"
        )
    on = choose_device(local_device(device))
    check_options(recipe, strategy=strategy, workers=workers, timeout=timeout, track=track)
    with init_distributed(on, timeout) as ranks, ExitStack() as stack:
        run = Run(
            recipe=recipe,
            recipe_name=recipe_name,
            store=store if isinstance(store, TokenStore) else TokenStore(store),
            folder=Path(from_home(out)),
            ranks=ranks,
            device=on,
            precision=choose_precision(recipe.training.precision, on),
            strategy=strategy,
            workers=default_workers(on) if workers is None else workers,
            save_models_at=frozenset(save_models_at),
            console=stack.enter_context(console_or_new(console)),
        )
        stack.enter_context(own_random_numbers(on))
        torch.manual_seed(recipe.training.seed)
        network = build_network(run, init_from)
        run = replace(  # with the sizes of the model
            run, recipe=network.recipe, start=network.start, inherited=network.inherited
        )
        state = build_train_state(run.recipe, network.model, run.device, compiled=compiled)
        ranks.on_rank0(
            lambda: check_batch_sizes(run.recipe.phases.batch_sizes, run.micro_batches, ranks.world)
        )
        changes = claim_folder(run, network.digest, stack)
        checkpoints = CheckpointWriter(
            run.folder / "checkpoints", state.model, state.optimizer, ranks, sharded=run.sharded
        )
        changes += resume(run, state, checkpoints)
        if ranks.broadcast_bool(lambda: is_finished(run, state)):
            run.console.say(f"{run.folder} is finished ({total:,} updates); nothing to do")
            return None
        journal = ranks.on_rank0(
            lambda: Journal(run.folder, resume_step=state.step, track=track, on_record=on_record)
        )
        log = stack.enter_context(RunLog(journal, run.console))
        stack.callback(checkpoints.close)
        with GracefulStop(patient=ranks.world > 1).install() as stop:
            return train(run, state, checkpoints, log, stop, changes)


def check_options(
    recipe: PretrainRecipe,
    *,
    strategy: str,
    workers: int | None,
    timeout: float,
    track: Sequence[str],
) -> None:
    """Check options of `pretrain` that cannot work, before hours of preparing text.

    Raises:
        BertkitError: the strategy is unknown or does not suit the recipe, a number is out of range,
            or a tracker is not installed.
    """
    check_known("strategy", strategy, STRATEGIES)
    if recipe.phases.copy_positions and strategy == "fsdp":
        raise BertkitError(
            "phases.copy_positions does not work with --strategy fsdp; set it to false"
        )
    if workers is not None:
        check_process_count(workers, "--workers")
    check_timeout(timeout)
    if track:
        from bertkit.training.trackers import check_trackers

        check_trackers(track)


def default_workers(device: torch.device) -> int:
    """Return the number of loader processes: 0 on a CPU, and on a GPU what the cores allow."""
    if device.type == "cpu":
        return 0
    each = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(0, min(GPU_WORKERS, each - 1))


def build_network(run: Run, init_from: Path | str | None) -> InitialNetwork:
    """Initialize or load the network, move it to the device and, with FSDP2, shard it."""
    recipe, tokenizer = run.recipe, run.store.tokenizer
    if init_from is None:
        parts = run.ranks.world if run.sharded else 1
        network = random_network(recipe, tokenizer, run.device, parts)
    else:
        network = pretrained_network(Path(init_from), recipe, tokenizer, run.console.say)
    network.model.to(run.device)
    if run.sharded:
        from bertkit.training.parallel import apply_fsdp

        apply_fsdp(network.model, run.device, run.precision)
    return network


def lock_folder(run: Run, held: ExitStack) -> None:
    """Lock the run directory until `held` is closed; one of several ranks may wait for it.

    An earlier rank 0 may have lost its connection and been replaced while it still saves.
    """
    try:
        held.enter_context(exclusive_lock(run.folder))
    except HeldError:
        if run.ranks.world == 1:
            raise
        wait = run.ranks.timeout / 2
        run.console.say(f"another process is working in {run.folder}; waiting {wait:g} seconds")
        held.enter_context(exclusive_lock(run.folder, wait))


def claim_folder(run: Run, digest: str, held: ExitStack) -> list[str]:
    """Lock the run directory, check that all ranks agree, and write the recipe down.

    Returns:
        The changes since the run was started; [] on ranks other than rank 0.
    """
    ranks, recipe = run.ranks, as_json(run.recipe)
    ranks.on_rank0(lambda: lock_folder(run, held))
    if ranks.world > 1:
        ranks.assert_same_on_all_ranks(
            {
                "bertkit's code": code_digest(),
                "the version of torch": torch.__version__,
                "the recipe": json.dumps(recipe),
                "the corpus": run.store.content_hash,
                "the tokenizer": run.store.tokenizer_hash,
                "the initial weights": digest,
                "the run directory, which hosts share": mark_of_first(run.folder, ranks),
                "the type of device": run.device.type,
                "the precision (training.precision)": run.precision,
                "--strategy": run.strategy,
                "save_models_at": str(sorted(run.save_models_at)),
            }
        )
        ranks.on_rank0((run.folder / RANKS_MARK).unlink)
    changes = ranks.on_rank0(
        lambda: claim_run_folder(run.folder, recipe, run.recipe_name, run.store, digest)
    )
    return changes or []


def resume(run: Run, state: TrainState, checkpoints: CheckpointWriter) -> list[str]:
    """Restore the newest complete checkpoint, if any; return what changed in `Run.arithmetic`."""
    checkpoint = checkpoints.resume(run.console.say)
    if checkpoint is None:
        return []
    state.step, state.position = checkpoint.step, tuple(checkpoint.progress["position"])
    run.console.say(f"resuming from {checkpoint.path} ({state.step:,} updates made)")
    return [
        f"{name.replace('_', '-')} of an update {before} -> {now}"
        for name, now in run.arithmetic.items()
        if (before := checkpoint.progress.get(name, now)) != now
    ]


def is_finished(run: Run, state: TrainState) -> bool:
    """Whether all updates are made and `model/` holds the final weights.

    Raises:
        BertkitError: the run would begin anew and overwrite the model of an earlier one.
    """
    model, total = run.folder / "model", run.recipe.phases.total_steps
    names = ("model.safetensors", "bertkit.json")
    if not all((model / name).is_file() for name in names):
        return False
    try:
        made = read_object(model / "bertkit.json").get("steps")
    except BertkitError:
        if not state.step:  # the model may be all that is left of an earlier run
            raise
        return False
    if isinstance(made, int) and made and not state.step:  # the checkpoints were removed
        if made == total:
            return True
        raise BertkitError(
            f"{model} holds the model of {made:,} updates, and there is no checkpoint to resume "
            "from; restore checkpoints/, choose another --out, or remove the model"
        )
    if made != state.step or made != total or not (model / "README.md").is_file():
        return False  # a card is deleted to get a new one
    from bertkit.checkpoints.pretrained import read_pretrained

    with suppress(BertkitError):  # a file is damaged
        return bool(read_pretrained(model))
    return False


def train(
    run: Run,
    state: TrainState,
    checkpoints: CheckpointWriter,
    log: RunLog,
    stop: GracefulStop,
    changes: Sequence[str],
) -> int | None:
    """Make the remaining updates, and write the model.

    Returns:
        None if the recipe was finished, else the number of the signal that stopped the run.

    Raises:
        BertkitError: training diverged, a shard is damaged, or the disk is full.
    """
    started, total = time.perf_counter(), run.recipe.phases.total_steps
    held_out = HeldOut(run.recipe, run.store)
    with closing(TrainingData(run.recipe, run.store)) as data:
        announce(run, state, log, data, held_out, changes)
        run.console.start(total, state.step, title="training")
        state.model.train()
        try:
            train_phases(run, state, data, held_out, checkpoints, log, stop)
        except DivergedError:
            log.write({"kind": "end", "step": state.step, "reason": "diverged"})
            raise
    seconds = time.perf_counter() - started
    log_checkpoint(checkpoints, log, wait=True)
    if state.step:
        write_model(run, state, run.folder / "model")
    finished = state.step == total
    reason = "finished" if finished else "interrupted"
    log.write({"kind": "end", "step": state.step, "reason": reason, "seconds": seconds})
    if finished:
        run.console.say(f"finished: the model is in {run.folder / 'model'}")
        return None
    assert stop.signal is not None
    saved = f"saved after {state.step:,} updates" if state.step else "before the first update"
    name = signal.Signals(stop.signal).name
    run.console.say(f"stopped by {name}, {saved}; run the same command to resume")
    return stop.signal


def announce(
    run: Run,
    state: TrainState,
    log: RunLog,
    data: TrainingData,
    held_out: HeldOut,
    changes: Sequence[str],
) -> None:
    """Log the model and the data of the run before the first update."""
    phase, _ = run.recipe.phases.locate(state.step)
    start = start_record(run.recipe, run.store, None if phase else data.open(0)[0])
    start |= {
        "step": state.step,
        "recipe_name": run.recipe_name,
        "recipe": as_json(run.recipe),
        "matmul_peak": run.matmul_peak,
        "precision": run.precision,
        "parameters": sum(weights.numel() for _, weights in trainable_parameters(state.model)),
    }
    log.write(start)
    run.console.say(*opening_lines(start, run.recipe, run.store), *busy_note())
    if changes:
        log.note(state.step, f"resumed with changes: {'; '.join(changes)}")
    slow = device_notes(run.device, run.precision, state.model.config)
    for line in (*slow, *missing_evaluations(start, held_out.store)):
        log.note(state.step, line)


def train_phases(
    run: Run,
    state: TrainState,
    data: TrainingData,
    held_out: HeldOut,
    checkpoints: CheckpointWriter,
    log: RunLog,
    stop: GracefulStop,
) -> None:
    """Train, log, evaluate and save, until the end of the recipe or a signal."""
    phases, every, ranks = run.recipe.phases, run.recipe.logging, run.ranks
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
    heap = KeptHeap(active=run.device.type == "cpu")
    model = state.model
    if ranks.world > 1 and not run.sharded:
        from bertkit.training.parallel import apply_ddp

        model = apply_ddp(model, run.device)

    def due(interval: int) -> bool:
        return state.step % interval == 0 or state.step == phases.total_steps

    if stop.should_stop(False, ranks):
        return
    for phase in range(phases.locate(state.step)[0], len(phases.steps)):
        made = phases.locate(state.step)[1]
        state.position = state.position if made else START
        if phases.copy_positions and not run.start and phase and not made:  # a model has its own
            longest = max(phases.lengths[:phase])
            state.model.encoder.copy_positions(longest, phases.lengths[phase])
        with closing(data.stream(phase, made, state.position, ranks, run.workers)) as steps:
            window = PretrainMetrics(state.model, run.matmul_peak, phase, ranks)
            for update in train_steps(
                model, state.optimizer, state.loss_fn, steps, settings, done=state.step
            ):
                state.step, state.position = update.step, update.after
                window.add(update)
                heap.after_update()

                phase_ends = phases.locate(state.step)[0] != phase
                evaluating, saving = due(every.evaluate_every), due(every.checkpoint_every)
                exporting = state.step in run.save_models_at

                if phase_ends or evaluating or saving or exporting or due(every.log_every):
                    log_window(window, checkpoints, log)
                if evaluating:
                    evaluate_held_out(run, state, held_out, phase, settings, log)
                if exporting:
                    write_model(run, state, run.folder / "models" / f"step-{state.step:08d}")
                if saving:
                    begin_checkpoint(run, state, checkpoints, log)
                if evaluating or saving or exporting:
                    window.restart()  # they do not count as training
                if stop.should_stop(update.stop, ranks):
                    if not saving:
                        log_window(window, checkpoints, log)
                        begin_checkpoint(run, state, checkpoints, log)
                    return


def log_window(window: PretrainMetrics, checkpoints: CheckpointWriter, log: RunLog) -> None:
    """Log the updates since the journal's last record of them.

    Raises:
        DivergedError: the loss or the gradient became NaN or infinite.
    """
    log_checkpoint(checkpoints, log, wait=False)
    if window.updates:
        log.write(window.close(), show=True)


def log_checkpoint(checkpoints: CheckpointWriter, log: RunLog, *, wait: bool) -> None:
    """Log a checkpoint that has been saved, or raise the error of a failed save."""
    if record := checkpoints.poll(wait=wait):
        log.write(record)


def evaluate_held_out(
    run: Run, state: TrainState, held_out: HeldOut, phase: int, settings: LoopSettings, log: RunLog
) -> None:
    """Measure the model on a phase's held-out examples, if any; if memory is short, in parts."""
    if held_out.store is None:
        return
    settings = replace(settings, advice_if_too_large=lambda lengths: SMALLER_INPUT)
    while True:
        torch.manual_seed(0)  # so that ELECTRA's generator, too, samples the same every time
        try:
            batches = held_out.batches(phase)
            means, counts = evaluate_batches(state.model, state.eval_loss_fn, batches, settings)
            break
        except BertkitError as error:
            # with FSDP2 the ranks compute together, and only some of them may lack memory
            if error.code != "out-of-memory" or held_out.batch_size == 1 or run.sharded:
                raise
        held_out.batch_size //= 2
    token = "mlm" if "mlm_loss" in means else "lm"
    perplexity = math.exp(min(means[f"{token}_loss"], 700.0))
    record = {"kind": "evaluation", "step": state.step, "phase": phase, **means}
    record |= {f"{token}_perplexity": perplexity, **counts}
    if run.recipe.objectives.has_pairs:
        record["nsp_majority"] = held_out.majority(phase)
    log.write(record, show=True)


def begin_checkpoint(
    run: Run, state: TrainState, checkpoints: CheckpointWriter, log: RunLog
) -> None:
    """Start to save the current state, after the previous save has finished."""
    log_checkpoint(checkpoints, log, wait=True)
    if log.journal is not None:
        log.journal.sync()
    checkpoints.save_async(state.step, {"position": list(state.position), **run.arithmetic})
    log_checkpoint(checkpoints, log, wait=False)


def write_model(run: Run, state: TrainState, folder: Path) -> None:
    """Write the weights as a model directory, after the generator of an ELECTRA model.

    All ranks have to call this; rank 0 writes.
    """
    tensors: dict[str, Tensor] = {}
    if run.sharded:
        from bertkit.training.parallel import gather_full

        tensors = gather_full(model_tensors(state.model), keep=run.ranks.is_first)

    def write() -> None:
        from bertkit.checkpoints.card import kept_card
        from bertkit.checkpoints.save import save_model
        from bertkit.training.card import card_of_run

        model, card = state.model, card_of_run(run, state)
        if run.sharded:
            model = run.recipe.objectives.model(model.config)
            restore_model(model, tensors)
        details = {
            "task": "pretraining",
            "made_by": "bertkit pretrain",
            "recipe": as_json(run.recipe),
            "steps": state.step,
            "corpora": corpora(run.store),  # without paths: the model may be published
        }
        if run.recipe.objectives.token == "rtd":
            beside = "generator" if folder.name == "model" else f"generator-{folder.name}"
            from bertkit.checkpoints.save import save_generator

            save_generator(folder.with_name(beside), model, run.store.tokenizer, details, card)
        # written last, because `is_finished` looks for this folder
        save_model(folder, model, run.store.tokenizer, details, card=card)
        if kept := kept_card(folder):
            run.console.say(kept)

    run.ranks.on_rank0(write)
