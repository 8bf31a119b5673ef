"""Pre-training: a token store and a recipe → a run directory with a model (paper section 3.1, A.2).

A run directory holds `recipe.json` (the resolved recipe), `environment.json`, `journal.jsonl`,
`checkpoints/` and `model/`. Running the same command again resumes from the last good checkpoint,
and the final weights are byte for byte those of an uninterrupted run. If torchrun starts many
processes, they share every batch, and rank 0 writes.
"""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

import bertkit
from bertkit.checkpoints.save import save_generator, save_model
from bertkit.config import as_json, read_recipe
from bertkit.console import Console, console_or_new
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError, DivergedError
from bertkit.files import (
    claim,
    differences,
    escaped,
    exclusive_lock,
    from_home,
    read_optional,
    write_json,
)
from bertkit.model.encoder import ModelConfig
from bertkit.pretraining_data.loader import START, DataPosition, check_batch_sizes
from bertkit.processes import busy_note, check_process_count, usable_cores
from bertkit.training.checkpoint import (
    load_checkpoint,
    load_latest,
    restore_training,
    save_training,
)
from bertkit.training.data import HeldOut, TrainingData, opening_lines, start_record
from bertkit.training.device import (
    OUT_OF_MEMORY,
    choose_device,
    choose_precision,
    device_notes,
    environment,
    matmul_peak,
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
from bertkit.training.journal import Journal, OnRecord, RunLog, check_trackers
from bertkit.training.optimizer import AdamW, build_optimizer, trainable_parameters
from bertkit.training.recipe import ModelSize, PretrainRecipe
from bertkit.training.step import (
    LoopSettings,
    PretrainMetrics,
    compile_training,
    evaluate_batches,
    mean_losses,
    train_steps,
)

if TYPE_CHECKING:
    from bertkit.checkpoints.pretrained import PretrainedWeights
    from bertkit.tokenizer.wordpiece import Tokenizer

GPU_WORKERS = 4
"""The default number of loader processes of a rank that trains on a GPU."""
ENVIRONMENT = "environment.json"


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
    workers: int
    save_models_at: frozenset[int]
    console: Console
    has_initial_model: bool

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of a global batch, over all ranks."""
        return self.ranks.micro_batches(self.recipe.training.accumulate)

    @property
    def rounding_settings(self) -> dict[str, Any]:
        """The settings that affect how an update is rounded."""
        return {"micro_batches": self.micro_batches, "precision": self.precision}

    def smaller_micro_batches(self, lengths: Sequence[int]) -> str:
        """Return advice for a micro-batch, of these lengths, that does not fit into memory."""
        if len(lengths) == 1:
            return "try shorter sequences or a smaller network"
        return (
            f"try training.accumulate = {2 * self.micro_batches} in a new --out (micro-batches of "
            f"{-(-len(lengths) // 2)} sequences)"
        )

    @cached_property
    def matmul_peak(self) -> float:
        """FLOP/s of matrix products on this device, against which the MFU is measured."""
        return matmul_peak(self.device, self.precision, seconds=0.3)

    def loop_settings(self, asked_to_stop: Callable[[], bool]) -> LoopSettings:
        """Return the settings of the training loop."""
        return LoopSettings(
            device=self.device,
            precision=self.precision,
            seed=self.recipe.training.seed,
            max_gradient_norm=self.recipe.training.max_gradient_norm,
            learning_rate=self.recipe.learning_rate,
            ranks=self.ranks,
            asked_to_stop=asked_to_stop,
            advice_if_too_large=self.smaller_micro_batches,
        )


@dataclass
class TrainState:
    """A network in training, on its device, with its optimizer and progress."""

    model: Any
    optimizer: AdamW
    loss_fn: Callable[..., Any]
    """(model, batch) → sums; compiled if that was requested."""
    eval_loss_fn: Callable[..., Any]
    """The uncompiled loss, used for evaluation."""
    step: int = 0
    """The number of updates made."""
    position: DataPosition = START
    """The position of the next example of the phase."""


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
    track: Sequence[str] = ("tensorboard",),
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
        track: the trackers that receive the journal's records: "tensorboard" (events in
            `out`/tensorboard, if it is installed), "wandb", "mlflow".
        on_record: a function that receives each new record of the journal as a dict, on rank 0. An
            exception that it raises ends the run, which the same call resumes.

    Returns:
        None if the recipe was finished, else the number of the signal that stopped the run, after
        its checkpoint was saved.

    Raises:
        BertkitError: the folder holds a run of another recipe or store, or something else; another
            process is using it; training diverged; a shard is damaged; a tracker is not installed;
            `save_models_at` has an update that the recipe does not make; or the disk is full.
    """
    if not isinstance(recipe, PretrainRecipe):
        recipe_name, recipe = Path(recipe).stem, read_recipe(PretrainRecipe, recipe)
    total = recipe.phases.total_steps
    if never := [step for step in save_models_at if not 1 <= step <= total]:
        raise BertkitError(f"save_models_at has {never[0]:,}, and updates are 1 to {total:,}")
    check_process_count(workers or 0, "--workers")
    check_trackers(track)
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
            has_initial_model=init_from is not None,
        )
        ranks.on_rank0(
            lambda: check_batch_sizes(recipe.phases.batch_sizes, run.micro_batches, ranks.world)
        )
        changes = claim_folder(run, init_from.digest if init_from else "", stack)
        stack.enter_context(own_random_numbers(on))
        state = build_state(run, init_from, compiled=compiled)
        changes += resume(run, state)
        if ranks.broadcast(ranks.on_rank0(lambda: int(is_finished(run, state)))):
            run.console.say(f"{run.folder} is finished ({total:,} updates); nothing to do")
            return None
        journal = ranks.on_rank0(
            lambda: Journal(run.folder, resume_step=state.step, track=track, on_record=on_record)
        )
        log = stack.enter_context(RunLog(journal, run.console))
        with GracefulStop(patient=ranks.world > 1).install() as stop:
            return train(run, state, log, stop, changes)


def default_workers(device: torch.device) -> int:
    """Return the number of loader processes: 0 on a CPU, and on a GPU what the cores allow."""
    if device.type == "cpu":
        return 0
    each = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(0, min(GPU_WORKERS, each - 1))


def claim_folder(run: Run, initial_digest: str, held: ExitStack) -> list[str]:
    """Lock the run directory until `held` is closed, and write down what is run in it.

    Returns:
        The changes of logging settings, software and hardware since the run was started, on rank 0.
    """
    ranks, folder = run.ranks, run.folder
    recipe = as_json(run.recipe)
    settings = {
        "recipe": recipe,
        "recipe_name": run.recipe_name,
        "store": str(run.store.folder),
        "tokenizer_hash": run.store.tokenizer_hash,
        "corpus": run.store.content_hash,
        **({"init_from": initial_digest} if initial_digest else {}),
    }

    def work() -> list[str]:
        # of several ranks, one that was replaced after it lost its connection may still be saving
        held.enter_context(exclusive_lock(folder, ranks.timeout / 2 if ranks.world > 1 else 0.0))
        may_change = {"store", "recipe_name", "recipe.logging"}
        begun = claim(folder, "pre-training run", settings, may_change=may_change)
        before, now = begun["recipe"]["logging"], recipe["logging"]
        changes = differences(before, now, "logging.")
        if changes:
            write_json(folder / "recipe.json", settings)
        here = environment()
        recorded = read_optional(folder / ENVIRONMENT, file_names=True)
        if not recorded:
            write_json(folder / ENVIRONMENT, here)
        return changes + differences(recorded or here, here, ignored={"command"})

    same = {name: settings[name] for name in settings if name not in ("store", "recipe_name")}
    if ranks.world > 1:
        ranks.check_equal(json.dumps([same, bertkit.__version__, torch.__version__]))
    return ranks.on_rank0(work) or []


def build_state(run: Run, init_from: PretrainedWeights | None, *, compiled: bool) -> TrainState:
    """Build the network, with random or existing weights, its optimizer and its loss."""
    recipe, device = run.recipe, run.device
    torch.manual_seed(recipe.training.seed)
    if init_from is None:
        model = recipe.objectives.model(recipe.config(run.store.tokenizer.size))
    else:
        model = initial_network(init_from, recipe, run.console.say)
    model.to(device)
    loss_fn = eval_loss_fn = recipe.objectives.function()
    if compiled:
        loss_fn = partial(loss_fn, cross_entropy=compile_training(model, device))
    optimizer = build_optimizer(
        model,
        learning_rate=recipe.training.learning_rate,
        weight_decay=recipe.training.weight_decay,
        bias_correction=recipe.training.bias_correction,
        optimizer=recipe.training.optimizer,
    )
    return TrainState(model, optimizer, loss_fn, eval_loss_fn)


def check_initial_model(
    initial: PretrainedWeights, recipe: PretrainRecipe, tokenizer: Tokenizer
) -> None:
    """Raise a BertkitError unless a run can begin with the weights of a model."""
    path, config = initial.path, initial.config
    if config.type_vocab_size == 1 and recipe.objectives.pair != "single-segment":
        raise BertkitError(
            f"{path} has one segment (type_vocab_size 1), and training examples have two; give "
            "--objectives.pair single-segment"
        )
    if initial.tokenizer.content_hash != tokenizer.content_hash:
        home = path / "model" if (path / "model").is_dir() else path  # of a run
        raise BertkitError(
            f"{path} has another tokenizer than the store; prepare the text with --tokenizer {home}"
        )
    if config.direction != recipe.objectives.direction:
        raise BertkitError(
            f"{path} is {config.direction} and the recipe's objectives.token = "
            f"{recipe.objectives.token} trains a {recipe.objectives.direction} model; choose the "
            "same direction"
        )
    if (longest := max(recipe.phases.lengths)) > (positions := config.max_position_embeddings):
        raise BertkitError(
            f"{path} has {positions} positions, and phases.lengths has {longest}; give lengths of "
            f"at most {positions} (--phases.lengths)",
            code="number",
        )


def with_sizes(recipe: PretrainRecipe, config: ModelConfig) -> PretrainRecipe:
    """Return a recipe with the sizes of a network; dropout stays that of the recipe."""
    names = [name for name in ModelSize.__dataclass_fields__ if name != "dropout"]
    return replace(
        recipe, model=replace(recipe.model, **{name: getattr(config, name) for name in names})
    )


def initial_network(
    initial: PretrainedWeights, recipe: PretrainRecipe, say: Callable[[str], None]
) -> nn.Module:
    """Build the recipe's network with the weights of a model; `say` reports new and unused ones."""
    config = replace(
        initial.config,
        hidden_dropout_prob=recipe.model.dropout,
        attention_probs_dropout_prob=recipe.model.dropout,
        pooler_act=ModelConfig.pooler_act,  # the pair objective uses BERT's pooler
    )
    tensors = dict(initial.tensors)
    if (initial.pair == "sop") != (recipe.objectives.pair == "sop"):
        tensors = {n: t for n, t in tensors.items() if not n.startswith("nsp.")}
    kept = replace(initial, config=config, tensors=tensors)
    loaded = kept.build(recipe.objectives.model, keep_head=True)
    pairs = recipe.objectives.has_pairs
    unused = [*loaded.unexpected_keys, *(name for name in initial.tensors if name not in tensors)]
    if not pairs:  # nothing would train the pooler, so it is not saved
        unused += [name for name in tensors if "pooler." in name and name not in unused]
    missing = [name for name in loaded.missing_keys if pairs or "pooler." not in name]
    new = f"; new: {', '.join(missing)}" if missing else ""
    left = f"; unused: {', '.join(unused)}" if unused else ""
    say(f"weights loaded from {initial.path}{new}{left}")
    return loaded.model.train()


def resume(run: Run, state: TrainState) -> list[str]:
    """Restore the newest complete checkpoint; return what changed in `Run.rounding_settings`."""
    folder, ranks = run.folder / "checkpoints", run.ranks
    latest = ranks.on_rank0(lambda: load_latest(folder, run.console.say))
    step = ranks.broadcast(latest.step + 1 if latest else None) - 1
    if step < 0:
        return []
    checkpoint = latest or load_checkpoint(folder / f"step-{step:08d}", step)
    restore_training(checkpoint, state.model, state.optimizer)
    progress = checkpoint.progress
    state.step, state.position = step, DataPosition(*progress["position"])
    run.console.say(f"resuming from {checkpoint.path} ({state.step:,} updates made)")
    return [
        f"{name.replace('_', '-')} of an update {before} -> {now}"
        for name, now in run.rounding_settings.items()
        if (before := progress.get(name, now)) != now
    ]


def is_finished(run: Run, state: TrainState) -> bool:
    """Whether all updates are made and `model/` holds the final weights."""
    model = run.folder / "model"
    details = read_optional(model / "bertkit.json") if state.step else {}
    if not state.step and (model / "model.safetensors").exists():
        raise BertkitError(
            f"{model} holds a model, but there is no checkpoint to resume from; restore "
            "checkpoints/, choose another --out, or remove the model"
        )
    return details.get("steps") == state.step == run.recipe.phases.total_steps


def train(
    run: Run, state: TrainState, log: RunLog, stop: GracefulStop, changes: Sequence[str]
) -> int | None:
    """Make the remaining updates and write the model; or return the signal that stopped the run."""
    started, total = time.perf_counter(), run.recipe.phases.total_steps
    with closing(TrainingData(run.recipe, run.store)) as data:
        held_out = HeldOut(run.recipe, run.store)
        announce(run, state, log, data, held_out, changes)
        run.console.start(total, state.step, title="training")
        state.model.train()
        try:
            stopped = train_phases(run, state, data, held_out, log, stop)
        except DivergedError:
            log.write({"kind": "end", "step": state.step, "reason": "diverged"})
            raise
    if not stopped:
        run.ranks.on_rank0(lambda: write_model(run, state, run.folder / "model"))
    seconds = time.perf_counter() - started
    reason = "interrupted" if stopped else "finished"
    log.write({"kind": "end", "step": state.step, "reason": reason, "seconds": seconds})
    if not stopped:
        run.console.say(f"finished: the model is in {run.folder / 'model'}")
        return None
    number = stop.received or signal.SIGTERM
    saved = f"saved after {state.step:,} updates" if state.step else "before the first update"
    name = signal.Signals(number).name
    run.console.say(f"stopped by {name}, {saved}; run the same command to resume")
    return number


def announce(
    run: Run,
    state: TrainState,
    log: RunLog,
    data: TrainingData,
    held_out: HeldOut,
    changes: Sequence[str],
) -> None:
    """Log the model and the data of the run before the first update."""
    start = start_record(run.recipe, run.store, data.open(0)[0])
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
    notes = device_notes(run.device, run.precision, state.model.config)
    if changes:
        notes.append(f"resumed with changes: {'; '.join(changes)}")
    if held_out.store is None:
        notes.append("the store has fewer than two held-out documents; nothing is evaluated")
    for line in notes:
        log.note(state.step, line)


def train_phases(
    run: Run,
    state: TrainState,
    data: TrainingData,
    held_out: HeldOut,
    log: RunLog,
    stop: GracefulStop,
) -> bool:
    """Train, log, evaluate and save until the end of the recipe; True if a signal stopped it."""
    phases, every, ranks = run.recipe.phases, run.recipe.logging, run.ranks
    settings = run.loop_settings(lambda: stop.asked)
    model = replicate(state.model, run.device) if ranks.world > 1 else state.model

    def due(interval: int) -> bool:
        return state.step % interval == 0 or state.step == phases.total_steps

    if ranks.world == 1 and stop.asked:
        return True
    for phase in range(phases.locate(state.step)[0], len(phases.steps)):
        begin_phase(run, state, phase)
        made = phases.locate(state.step)[1]
        with closing(data.stream(phase, made, state.position, ranks, run.workers)) as steps:
            window = PretrainMetrics(state.model, run.matmul_peak, phase, ranks)
            for update in train_steps(
                model, state.optimizer, state.loss_fn, steps, settings, done=state.step
            ):
                state.step, state.position = update.step, update.after
                window.add(update)
                stopping = update.stop or (ranks.world == 1 and stop.asked)
                phase_ends = phases.locate(state.step)[0] != phase
                evaluating = due(every.evaluate_every)
                saving = due(every.checkpoint_every) or stopping
                exporting = state.step in run.save_models_at
                if phase_ends or evaluating or saving or exporting or due(every.log_every):
                    log.write(window.close(), show=True)
                if evaluating:
                    evaluate_held_out(run, state, held_out, phase, settings, log)
                if exporting:
                    folder = run.folder / "models" / f"step-{state.step:08d}"
                    ranks.on_rank0(partial(write_model, run, state, folder))
                if saving:
                    ranks.on_rank0(partial(save_checkpoint, run, state, log))
                if evaluating or saving or exporting:
                    window.restart()  # they do not count as training
                if stopping and state.step < phases.total_steps:
                    return True
    return False


def begin_phase(run: Run, state: TrainState, phase: int) -> None:
    """Start a phase with its first example, and with copied positions if the recipe says so."""
    phases = run.recipe.phases
    if phases.locate(state.step)[1]:  # resumed within the phase
        return
    state.position = START
    if phases.copy_positions and phase and not run.has_initial_model:  # a model has its own
        longest = max(phases.lengths[:phase])
        state.model.encoder.copy_positions(longest, phases.lengths[phase])


def evaluate_held_out(
    run: Run, state: TrainState, held_out: HeldOut, phase: int, settings: LoopSettings, log: RunLog
) -> None:
    """Measure the model on a phase's held-out examples, if any; if memory is short, in parts."""
    if held_out.store is None:
        return
    ranks = run.ranks if len(held_out.rows(phase)) >= run.ranks.world else ALONE
    while True:
        torch.manual_seed(0)  # so that ELECTRA's generator, too, samples the same every time
        try:
            batches = held_out.batches(phase, ranks)
            sums, counted = evaluate_batches(state.model, state.eval_loss_fn, batches, settings)
            break
        except BertkitError as error:
            if error.code != OUT_OF_MEMORY or held_out.batch_size == 1:
                raise
        held_out.batch_size //= 2
    counts = ranks.all_reduce_counts(counted)()
    values = ranks.all_reduce_scalars({name: kept.value for name, kept in sums.items()})
    means = mean_losses({n: s._replace(value=values[n]) for n, s in sums.items()}, counts)
    token = "mlm" if "mlm_loss" in means else "lm"
    perplexity = math.exp(min(means[f"{token}_loss"], 700.0))
    record = {"kind": "evaluation", "step": state.step, "phase": phase, **means}
    record |= {f"{token}_perplexity": perplexity, **counts}
    if run.recipe.objectives.has_pairs:
        record["nsp_majority"] = held_out.majority(phase)
    log.write(record, show=True)


def save_checkpoint(run: Run, state: TrainState, log: RunLog) -> None:
    """Save the current state, after the journal's records before it are on the disk."""
    if log.journal is not None:
        log.journal.sync()
    progress = {"position": list(state.position), **run.rounding_settings}
    folder = run.folder / "checkpoints"
    log.write(save_training(folder, state.step, state.model, state.optimizer, progress))


def write_model(run: Run, state: TrainState, folder: Path) -> None:
    """Write the weights as a model directory, after the generator of an ELECTRA model."""
    store, tokenizer = run.store, run.store.tokenizer
    details = {
        "task": "pretraining",
        "made_by": "bertkit pretrain",
        "recipe": as_json(run.recipe),
        "steps": state.step,
        # without paths: the model may be published
        "corpora": [
            {"name": escaped(store.folder.name), "content_hash": store.content_hash, "share": 1.0}
        ],
    }
    if run.recipe.objectives.token == "rtd":
        beside = "generator" if folder.name == "model" else f"generator-{folder.name}"
        save_generator(folder.with_name(beside), state.model, tokenizer, details)
    # written last, because `is_finished` looks for this folder
    save_model(folder, state.model, tokenizer, details)
