"""Pre-training: a token store and a recipe → a run directory with a model (paper section 3.1, A.2).

A run directory holds `recipe.json` (the resolved recipe), `environment.json`, `journal.jsonl`,
`checkpoints/`, `model/` and `report.html`. Running the same command again goes on from the last
good checkpoint, and the weights at the end are byte for byte those of an undisturbed run. Where
torchrun starts many processes (`bertkit launch`), they share every batch, and the first one writes.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bertkit.checkpoints.save import save_generator, save_model
from bertkit.config import as_json, read_recipe
from bertkit.corpus.store import TokenStore
from bertkit.errors import DivergedError
from bertkit.files import exclusive_lock, read_json
from bertkit.pretraining_data.loader import BatchBuilder, stream_steps
from bertkit.pretraining_data.sampler import START, AnyPosition, ExampleSource
from bertkit.training.checkpoint_writer import CheckpointWriter, model_tensors, restore_model
from bertkit.training.data import (
    commoner_label,
    held_out_batches,
    held_out_rows,
    held_out_store,
    missing_evaluations,
    opening_lines,
    start_record,
    training_examples,
)
from bertkit.training.device import choose_device, choose_precision, matmul_peak, slow_precision
from bertkit.training.distributed import (
    ALONE,
    Ranks,
    check_strategy,
    code_digest,
    init_distributed,
    local_device,
    mark_of_first,
)
from bertkit.training.journal import Console, Journal
from bertkit.training.metrics import GracefulStop, PretrainMetrics
from bertkit.training.optimizer import trainable_parameters
from bertkit.training.recipe import PretrainRecipe, claim_run_folder, origin
from bertkit.training.setup import build_train_state
from bertkit.training.step import LoopSettings, evaluate_batches, train_steps


class PretrainingRun:
    """One run directory being filled.

    Args:
        recipe: what to do.
        store: the corpus, or a mixture; its tokenizer becomes the model's.
        folder: the run directory; a run stopped earlier goes on.
        recipe_name: for the journal and the report.
        workers: loader processes; 0 suits CPUs.
        device: "auto", "cpu", "cuda", "cuda:1", ...
        compiled: compile the layers, for CUDA; the first update of a shape takes long.
        save_models_at: updates after which the model is also written to `models/step-NNNNNNNN`.
        start: a model to go on from; its sizes take the place of the recipe's.
        ranks: the processes that share the work.
        strategy: of several ranks: "ddp", or "fsdp" for a network too large for one.
        held: keeps other processes out of the folder until it is closed.
        console: where progress is shown.

    Raises:
        BertkitError: the folder holds a run of another recipe or store, or something else; or the
            ranks disagree.
    """

    def __init__(
        self,
        recipe: PretrainRecipe,
        store: TokenStore,
        folder: Path,
        *,
        recipe_name: str = "recipe",
        workers: int = 0,
        device: str = "auto",
        compiled: bool = False,
        save_models_at: Sequence[int] = (),
        start: Path | None = None,
        ranks: Ranks = ALONE,
        strategy: str = "ddp",
        held: ExitStack,
        console: Console,
    ) -> None:
        self.store, self.folder = store, folder
        self.ranks, self.sharded = ranks, strategy == "fsdp" and ranks.world > 1
        self.recipe_name, self.workers, self.console = recipe_name, workers, console
        self.save_models_at = frozenset(save_models_at)
        self.tokenizer = store.tokenizer
        self.device = choose_device(device)
        self.precision = choose_precision(recipe.training.precision, self.device)
        self.micro_batches = ranks.micro_batches(recipe.training.accumulate)
        self.stop = GracefulStop(patient=ranks.world > 1)
        trained = build_train_state(
            recipe,
            store,
            start,
            self.device,
            parts=ranks.world if self.sharded else 1,
            compiled=compiled,
            say=console.say,
        )
        self.recipe, self.config = trained.recipe, trained.config
        self.model, self.optimizer = trained.model, trained.optimizer
        self.objective, self.written = trained.objective, trained.eval_loss_fn
        self.settings = LoopSettings(
            device=self.device,
            precision=self.precision,
            seed=recipe.training.seed,
            max_gradient_norm=recipe.training.max_gradient_norm,
            learning_rate=recipe.learning_rate,
            ranks=ranks,
            asked_to_stop=lambda: self.stop.asked,
        )
        # of several, the first may have been cut off and replaced, and still be saving
        wait = ranks.timeout / 2 if ranks.world > 1 else 0.0
        ranks.together(lambda: held.enter_context(exclusive_lock(folder, wait)))
        ranks.agree(self._facts(trained.start, strategy))
        self.changes = ranks.together(self._claim(trained.start)) or []
        self.checkpoints = CheckpointWriter(
            folder / "checkpoints", self.model, self.optimizer, ranks, sharded=self.sharded
        )
        self.done, self.place = self._resume()
        self.trained = self._spread()
        self.opened: tuple[int, ExampleSource, BatchBuilder] | None = None
        self.evaluated: tuple[int, np.ndarray] | None = None  # the held-out examples of a phase
        self.matmul_peak = matmul_peak(self.device, self.precision, seconds=0.3)

    def _facts(self, start: str, strategy: str) -> dict[str, str]:
        """What must be the same for all ranks."""
        if self.ranks.world == 1:
            return {}
        return {
            "bertkit's code": code_digest(),
            "the version of torch": torch.__version__,
            "the recipe": json.dumps(as_json(self.recipe)),
            "the corpus": self.store.content_hash,
            "the tokenizer": self.store.tokenizer_hash,
            "the weights to start from": start,
            "the run directory, which all hosts have to share": mark_of_first(
                self.folder, self.ranks
            ),
            "the kind of device": self.device.type,
            "the precision (training.precision)": self.precision,
            "--strategy": strategy,
            "--save-models-at": str(sorted(self.save_models_at)),
        }

    def _claim(self, start: str) -> Callable[[], list[str]]:
        recipe = as_json(self.recipe)
        return lambda: claim_run_folder(self.folder, recipe, self.recipe_name, self.store, start)

    def _resume(self) -> tuple[int, AnyPosition]:
        checkpoint = self.checkpoints.resume(self.console.say)
        if checkpoint is None:
            return 0, START
        self.console.say(f"going on from {checkpoint.path} ({checkpoint.step:,} updates made)")
        for name, now in self._computed().items():
            if (before := checkpoint.progress.get(name, now)) != now:
                self.changes.append(f"{name.replace('_', '-')} of an update {before} -> {now}")
        return checkpoint.step, tuple(checkpoint.progress["place"])

    def _computed(self) -> dict[str, Any]:
        """How an update is computed here; on another machine it may differ in its last digits."""
        return {"micro_batches": self.micro_batches, "precision": self.precision}

    def _spread(self) -> nn.Module:
        """The model as the ranks train it together."""
        if self.ranks.world == 1 or self.sharded:
            return self.model
        from bertkit.training.parallel import apply_ddp

        return apply_ddp(self.model, self.device)

    def run(self) -> int | None:
        """Train to the end of the recipe, or until a signal; the folder is held by the caller.

        Returns:
            None at the end of the recipe, else the number of the signal that stopped the run.

        Raises:
            BertkitError: training diverged, a shard is damaged, or the disk is full.
        """
        total = self.recipe.phases.total_steps
        if self.ranks.first_says(lambda: self.done == total and self.model_is_current()):
            message = f"{self.folder} is finished ({self.done:,} updates); nothing to do"
            self.console.say(message)
            return None
        self.journal = self.ranks.together(lambda: Journal(self.folder, resume_step=self.done))
        started = time.perf_counter()
        try:
            with self.stop.install():
                self._announce()
                self.console.start(total, self.done, title="training")
                self.model.train()
                while self.done < total and not self.stop.should_stop(False, self.ranks):
                    self._run_phase(self.recipe.phases.locate(self.done)[0])
                return self._finish(time.perf_counter() - started)
        except DivergedError:
            self._write({"kind": "end", "step": self.done, "reason": "diverged"})
            raise
        finally:
            self._close_examples()
            self.checkpoints.close()
            if self.journal is not None:
                self.journal.close()
            self.console.close()

    def _write(self, record: dict[str, Any]) -> None:
        """Append to the journal, which the first rank has."""
        if self.journal is not None:
            self.journal.write(record)

    def model_is_current(self) -> bool:
        """Whether `model/` holds the weights after `done` updates."""
        details = self.folder / "model" / "bertkit.json"
        if not details.is_file() or not (self.folder / "model" / "model.safetensors").is_file():
            return False
        return bool(read_json(details).get("steps") == self.done)

    def _announce(self) -> None:
        phase, _ = self.recipe.phases.locate(self.done)
        start = start_record(self.recipe, self.store, None if phase else self._examples(0)[0])
        start |= {
            "step": self.done,
            "recipe_name": self.recipe_name,
            "matmul_peak": self.matmul_peak,
            "precision": self.precision,
            "parameters": sum(weights.numel() for _, weights in trainable_parameters(self.model)),
        }
        self._write(start)
        for line in opening_lines(start, self.recipe, self.store):
            self.console.say(line)
        if self.changes:
            self._note(f"resumed with changes: {'; '.join(self.changes)}")
        if slow := slow_precision(self.precision, self.device):
            self._note(slow)
        for line in missing_evaluations(start, self.held_out):
            self._note(line)

    def _note(self, message: str) -> None:
        self._write({"kind": "note", "step": self.done, "message": message})
        self.console.say(message)

    def _examples(self, phase: int) -> tuple[ExampleSource, BatchBuilder]:
        """The examples of a phase; those of the phase before are given up."""
        if self.opened is None or self.opened[0] != phase:
            self._close_examples()
            self.opened = (phase, *training_examples(self.recipe, self.store, phase))
        return self.opened[1:]

    def _close_examples(self) -> None:
        if self.opened is not None:
            self.opened[1].close()
            self.opened = None

    def _run_phase(self, phase: int) -> None:
        """Make the updates of a phase that are still to be made."""
        phases = self.recipe.phases
        _, made = phases.locate(self.done)
        if made == 0:
            self.place = START
        table, builder = self._examples(phase)
        steps = stream_steps(
            table,
            builder,
            batch_size=phases.batch_sizes[phase],
            steps=phases.steps[phase] - made,
            place=self.place,
            micro_batches=self.micro_batches,
            rank=self.ranks.rank,
            world=self.ranks.world,
            workers=self.workers,
        )
        interval = PretrainMetrics(self.model, self.matmul_peak, phase, self.ranks)
        records = train_steps(
            self.trained, self.optimizer, self.objective, steps, self.settings, done=self.done
        )
        with closing(steps):
            for record in records:
                self.done, self.place = record.step, record.after
                interval.add(record)
                saved = self._watch(interval, phase)
                if self.stop.should_stop(record.stop, self.ranks):
                    if not saved:
                        self._log(interval)
                        self.save()
                    return

    def _watch(self, interval: PretrainMetrics, phase: int) -> bool:
        """Log, evaluate and save where the recipe says so; returns whether it saved."""
        logging, phases = self.recipe.logging, self.recipe.phases
        last = self.done == phases.total_steps
        ends_phase = phases.locate(self.done)[0] != phase
        saving = last or self.done % logging.checkpoint_every == 0
        evaluating = last or self.done % logging.evaluate_every == 0
        writing = self.done in self.save_models_at
        is_log_due = ends_phase or self.done % logging.log_every == 0
        if saving or evaluating or writing or is_log_due:
            self._log(interval)  # which stops where weights are no longer numbers
        if evaluating:
            self._evaluate(phase)
        if writing:
            self.write_model(self.folder / "models" / f"step-{self.done:08d}")
        if saving:
            self.save()
        if evaluating or saving:
            interval.restart()
        return saving

    def _log(self, interval: PretrainMetrics) -> None:
        """Write the interval down, which refuses a loss that is not a number."""
        self._note_saved(wait=False)
        if interval.updates:
            record = interval.close()
            self._write(record)
            self.console.update(record)

    @cached_property
    def held_out(self) -> TokenStore | None:
        """Opened and verified once for all evaluations."""
        return held_out_store(self.store)

    def _evaluate(self, phase: int) -> None:
        if self.held_out is None:
            return
        if self.evaluated is None or self.evaluated[0] != phase:
            self.evaluated = (phase, held_out_rows(self.recipe, self.held_out, phase))
        rows = self.evaluated[1]
        batches = held_out_batches(self.recipe, self.held_out, phase, rows)
        torch.manual_seed(0)  # a generator's draws, too, are the same at every evaluation
        means, counts = evaluate_batches(self.model, self.written, batches, self.settings)
        words = "mlm" if "mlm_loss" in means else "lm"
        perplexity = math.exp(min(means[f"{words}_loss"], 700.0))
        record = {"kind": "evaluation", "step": self.done, "phase": phase, **means}
        record |= {f"{words}_perplexity": perplexity, **counts}
        if self.recipe.objectives.has_pairs:
            record["nsp_majority"] = commoner_label(self.recipe, rows, phase)
        self._write(record)
        self.console.update(record)

    def save(self) -> None:
        """Begin a checkpoint of the current state; the one before is finished first."""
        self._note_saved(wait=True)
        self.checkpoints.save_async(self.done, {"place": list(self.place), **self._computed()})
        self._note_saved(wait=False)

    def _note_saved(self, *, wait: bool) -> None:
        """Write down a checkpoint that has been finished, or refuse to go on without it."""
        if record := self.checkpoints.poll(wait=wait):
            self._write(record)

    def write_model(self, folder: Path) -> None:
        """Write the current weights as a model directory; before it, ELECTRA's generator.

        All ranks have to call this; the first one writes.
        """
        tensors: dict[str, Tensor] = {}
        if self.sharded:
            from bertkit.training.parallel import gather_full

            tensors = gather_full(model_tensors(self.model), keep=self.ranks.first)
        self.ranks.together(lambda: self._write_whole(tensors, folder))

    def _write_whole(self, tensors: dict[str, Tensor], folder: Path) -> None:
        model: Any = self.model
        if self.sharded:
            model = self.recipe.objectives.model(self.config)
            restore_model(model, tensors)
        details = {
            "task": "pretraining",
            "made_by": "bertkit pretrain",
            "recipe": as_json(self.recipe),
            "steps": self.done,
            **origin(self.store),
        }
        if self.recipe.objectives.words == "replaced":
            beside = "generator" if folder.name == "model" else f"generator-{folder.name}"
            save_generator(folder.with_name(beside), model, self.tokenizer, details)
        # last, because a run with a model is a finished one
        save_model(folder, model, self.tokenizer, details)

    def _finish(self, seconds: float) -> int | None:
        """Write the model and the end of the journal; returns the signal, if one ended the run."""
        finished = self.done == self.recipe.phases.total_steps
        self._note_saved(wait=True)
        if self.done:
            self.write_model(self.folder / "model")
        reason = "finished" if finished else "interrupted"
        self._write({"kind": "end", "step": self.done, "reason": reason, "seconds": seconds})
        if finished:
            self.console.say(f"finished: the model is in {self.folder / 'model'}")
            return None
        assert self.stop.signal is not None
        what = f"saved after {self.done:,} updates" if self.done else "before the first update"
        name = signal.Signals(self.stop.signal).name
        self.console.say(f"stopped by {name}, {what}; run the same command to go on")
        return self.stop.signal


def pretrain(
    recipe: PretrainRecipe | str,
    store: TokenStore | Path | str,
    out: Path | str,
    *,
    recipe_name: str = "recipe",
    workers: int = 0,
    device: str = "auto",
    compiled: bool = False,
    save_models_at: Sequence[int] = (),
    start: Path | None = None,
    strategy: str = "ddp",
    timeout: float = 600.0,
    console: Console | None = None,
) -> int | None:
    """Pre-train a model and write its run directory; `bertkit report` draws it.

    Args:
        recipe: a `PretrainRecipe`, or the path or name of one.
        store: a token store or its folder, or several stores as a `mixture.mix`.
        out: the run directory; an unfinished run of the same recipe goes on.
        recipe_name: for the report, where the recipe is not given by name.
        workers: loader processes; 0 suits CPUs.
        device: "auto", "cpu", "cuda", ...
        compiled: compile the layers, for long runs on CUDA.
        save_models_at: updates after which the model is also written to `models/step-NNNNNNNN`.
        start: a model to go on from, such as one with domain words added (`bertkit vocab extend`).
        strategy: of several processes: "ddp" or "fsdp"; see `bertkit.training.parallel`.
        timeout: seconds to wait for another process before giving it up.
        console: shows progress; a new one where absent.

    Returns:
        None when the recipe was finished, else the number of the signal that stopped the run.

    Raises:
        BertkitError: see `PretrainingRun`; or another process works in the folder.
    """
    name = recipe if isinstance(recipe, str) else recipe_name
    resolved = read_recipe(PretrainRecipe, recipe) if isinstance(recipe, str) else recipe
    opened = store if isinstance(store, TokenStore) else TokenStore(store)
    device = local_device(device)
    check_strategy(strategy)
    with init_distributed(choose_device(device), timeout) as ranks, ExitStack() as held:
        return PretrainingRun(
            resolved,
            opened,
            Path(out),
            recipe_name=Path(name).stem,
            workers=workers,
            device=device,
            compiled=compiled,
            save_models_at=save_models_at,
            start=start,
            ranks=ranks,
            strategy=strategy,
            held=held,
            console=console or Console(),
        ).run()
