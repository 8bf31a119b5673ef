"""Pre-training: a token store and a recipe → a run directory with a model (paper section 3.1, A.2).

A run directory holds `recipe.json` (the resolved recipe), `environment.json`, `journal.jsonl`,
`checkpoints/`, `model/` and `report.html`. Running the same command again goes on from the last
good checkpoint, and the weights at the end are byte for byte those of an undisturbed run.
"""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bertkit.config import as_json, read_recipe
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError, DivergedError
from bertkit.examples.stream import START, AnyPlace, stream_steps
from bertkit.files import only_process, read_json
from bertkit.model.directory import save_generator, save_model
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import count_parameters
from bertkit.model.weights import some
from bertkit.training.batches import (
    held_out_batches,
    held_out_of,
    start_record,
    training_examples,
)
from bertkit.training.checkpoint import (
    load_latest,
    model_tensors,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
    save_checkpoint,
)
from bertkit.training.devices import check_memory, check_precision, choose_device, matmul_peak
from bertkit.training.journal import Console, Journal
from bertkit.training.loop import LoopSettings, evaluate, train_steps
from bertkit.training.optimizer import build_optimizer, trainable_parameters
from bertkit.training.recipe import PretrainRecipe, claim_folder, origin
from bertkit.training.watching import Interval, StopRequest


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
        models_at: updates after which the model is also written to `models/step-NNNNNNNN`.
        start: a model to go on from; its sizes take the place of the recipe's.
        console: where progress is shown.

    Raises:
        BertkitError: the folder holds a run of another recipe or store, or something else.
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
        models_at: Sequence[int] = (),
        start: Path | None = None,
        console: Console,
    ) -> None:
        self.store, self.folder = store, folder
        self.recipe_name, self.workers, self.console = recipe_name, workers, console
        self.models_at = frozenset(models_at)
        self.tokenizer = store.tokenizer
        training = recipe.training
        self.device = choose_device(device)
        check_precision(training.precision, self.device)
        self.settings = LoopSettings(
            device=self.device,
            precision=training.precision,
            seed=training.seed,
            max_gradient_norm=training.max_gradient_norm,
            learning_rate=recipe.learning_rate,
        )
        self.model: Any
        self.recipe, self.config, self.model, digest = self._build(recipe, start)
        self.model.to(self.device)
        self.written = self.objective = recipe.objectives.function()
        if compiled:
            from bertkit.training.compiled import compile_layers

            if recipe.objectives.words == "replaced":
                raise BertkitError("--compile does not know objectives.words = replaced; leave it")
            self.objective = compile_layers(self.model.encoder, self.objective, self.device)
        self.optimizer = build_optimizer(
            self.model,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            bias_correction=training.bias_correction,
        )
        self.changes = claim_folder(folder, as_json(self.recipe), recipe_name, store, digest)
        self.done, self.place = self._resume()
        self.matmul_peak = matmul_peak(self.device, training.precision, seconds=0.3)

    def _build(
        self, recipe: PretrainRecipe, start: Path | None
    ) -> tuple[PretrainRecipe, ModelConfig, nn.Module, str]:
        """The recipe, the network, and what it begins with: "" for random weights."""
        torch.manual_seed(recipe.training.seed)
        if start is None:
            config = recipe.config(self.tokenizer.size)
            check_memory(count_parameters(config, heads=True), self.device)
            return recipe, config, recipe.objectives.model(config), ""
        from bertkit.training.continuing import begin_with

        found = begin_with(start, recipe, self.tokenizer)
        new = f"; new: {some(found.new)}" if found.new else ""
        unused = f"; left behind: {some(found.unused)}" if found.unused else ""
        self.console.say(f"the weights are those of {start}{new}{unused}")
        return found.recipe, found.config, found.network, found.start.digest

    def _resume(self) -> tuple[int, AnyPlace]:
        checkpoint = load_latest(self.folder / "checkpoints", self.console.say)
        if checkpoint is None:
            return 0, START
        restore_model(self.model, checkpoint.tensors["model"])
        restore_optimizer(self.model, self.optimizer, checkpoint.tensors["optimizer"])
        self.console.say(f"going on from {checkpoint.path} ({checkpoint.step:,} updates made)")
        return checkpoint.step, tuple(checkpoint.progress["place"])

    def run(self) -> int | None:
        """Train to the end of the recipe, or until a signal.

        Returns:
            None at the end of the recipe, else the number of the signal that stopped the run.

        Raises:
            BertkitError: training diverged, a shard is damaged, the disk is full, or another
                process works in the folder.
        """
        with only_process(self.folder):
            total = self.recipe.phases.total_steps
            if self.done == total and self.model_is_current():
                message = f"{self.folder} is finished ({self.done:,} updates); nothing to do"
                self.console.say(message)
                return None
            self.journal = Journal(self.folder, resume_step=self.done)
            started = time.perf_counter()
            try:
                with StopRequest().listening() as stop:
                    self._announce()
                    self.console.start(total, self.done, title="training")
                    self.model.train()
                    while self.done < total and stop.signal is None:
                        self._run_phase(self.recipe.phases.locate(self.done)[0], stop)
                    return self._finish(stop, time.perf_counter() - started)
            except DivergedError:
                self.journal.write({"kind": "end", "step": self.done, "reason": "diverged"})
                raise
            finally:
                self.journal.close()
                self.console.close()

    def model_is_current(self) -> bool:
        """Whether `model/` holds the weights after `done` updates."""
        details = self.folder / "model" / "bertkit.json"
        if not details.is_file() or not (self.folder / "model" / "model.safetensors").is_file():
            return False
        return bool(read_json(details).get("steps") == self.done)

    def _announce(self) -> None:
        start = start_record(self.recipe, self.store)
        start |= {
            "step": self.done,
            "recipe_name": self.recipe_name,
            "matmul_peak": self.matmul_peak,
            "parameters": sum(weights.numel() for _, weights in trainable_parameters(self.model)),
        }
        self.journal.write(start)
        known, pairs = start["baselines"], start["pairs"]
        wanted = self.recipe.objectives
        label_1 = "A and B swapped" if wanted.sentences == "order" else "a random next sentence"
        share = f"{pairs['random_share']:.1%} with {label_1}, " if wanted.has_pairs else ""
        self.console.say(
            f"{start['parameters']:,} parameters; {self.store.tokens:,} training tokens in "
            f"{self.store.documents:,} documents; first window: {pairs['examples']:,} examples of "
            f"{pairs['mean_tokens']:.1f} tokens, {share}{pairs['cut_share']:.1%} of tokens cut"
        )
        commoner = f", commoner label of pairs {known['nsp_majority']:.1%}"
        self.console.say(
            f"baselines: unigram entropy {known['unigram_entropy']:.3f} nats, commonest piece "
            f"{known['most_frequent_accuracy']:.1%}{commoner if wanted.has_pairs else ''}"
        )
        if self.changes:
            self._note(f"resumed elsewhere: {'; '.join(self.changes)}")
        if held_out_of(self.store) is None:
            self._note("the store has fewer than two held-out documents: no evaluation is made")
        self._announce_shares(start.get("mixture", []))

    def _announce_shares(self, mixture: list[dict[str, Any]]) -> None:
        """Say what each store of a mixture is to the whole."""
        for member in mixture:
            self.console.say(
                f"{member['store']}: {member['tokens']:,} tokens, {member['token_share']:.2%} of "
                f"all; {member['share']:.2%} of the examples"
            )
        few = [member["store"] for member in mixture if member["held_out_documents"] < 2]
        if few:
            self._note(f"fewer than two held-out documents, no evaluation on: {', '.join(few)}")

    def _note(self, message: str) -> None:
        self.journal.write({"kind": "note", "step": self.done, "message": message})
        self.console.say(message)

    def _run_phase(self, phase: int, stop: StopRequest) -> None:
        """Make the updates of a phase that are still to be made."""
        phases, training = self.recipe.phases, self.recipe.training
        _, made = phases.locate(self.done)
        if made == 0:
            self.place = START
        table, builder = training_examples(self.recipe, self.store, phase)
        steps = stream_steps(
            table,
            builder,
            batch_size=phases.batch_sizes[phase],
            steps=phases.steps[phase] - made,
            place=self.place,
            accumulate=training.accumulate,
            workers=self.workers,
        )
        interval = Interval(self.model, self.matmul_peak, phase)
        records = train_steps(
            self.model, self.optimizer, self.objective, steps, self.settings, done=self.done
        )
        for record in records:
            self.done, self.place = record.step, record.after
            interval.add(record)
            saved = self._watch(interval, phase)
            if stop.signal is not None:
                if not saved:
                    self._log(interval)
                    self.save()
                return

    def _watch(self, interval: Interval, phase: int) -> bool:
        """Log, evaluate and save where the recipe says so; returns whether it saved."""
        watching, phases = self.recipe.watching, self.recipe.phases
        last = self.done == phases.total_steps
        ends_phase = phases.locate(self.done)[0] != phase
        saving = last or self.done % watching.checkpoint_every == 0
        evaluating = last or self.done % watching.evaluate_every == 0
        if saving or evaluating or ends_phase or self.done % watching.log_every == 0:
            self._log(interval)
        if evaluating:
            self._evaluate(phase)
        if self.done in self.models_at:
            self.write_model(self.folder / "models" / f"step-{self.done:08d}")
        if saving:
            self.save()
        if evaluating or saving:
            interval.restart()
        return saving

    def _log(self, interval: Interval) -> None:
        """Write the interval down, which refuses a loss that is not a number."""
        if interval.updates:
            record = interval.close()
            self.journal.write(record)
            self.console.update(record)

    def _evaluate(self, phase: int) -> None:
        held_out = held_out_of(self.store)
        if held_out is None:
            return
        batches = held_out_batches(self.recipe, held_out, phase)
        torch.manual_seed(0)  # a generator's draws, too, are the same at every evaluation
        means, counts = evaluate(self.model, self.written, batches, self.settings)
        words = "mlm" if "mlm_loss" in means else "lm"
        perplexity = math.exp(min(means[f"{words}_loss"], 700.0))
        record = {"kind": "evaluation", "step": self.done, "phase": phase, **means}
        record |= {f"{words}_perplexity": perplexity, **counts}
        self.journal.write(record)
        self.console.update(record)

    def save(self) -> Path:
        """Write a checkpoint of the current state."""
        started = time.perf_counter()
        path = save_checkpoint(
            self.folder / "checkpoints",
            self.done,
            {
                "model": model_tensors(self.model),
                "optimizer": optimizer_tensors(self.model, self.optimizer),
            },
            {"place": list(self.place)},
        )
        seconds = time.perf_counter() - started
        name = str(path.relative_to(self.folder))
        record = {"kind": "checkpoint", "step": self.done, "path": name, "seconds": seconds}
        self.journal.write(record)
        return path

    def write_model(self, folder: Path) -> None:
        """Write the current weights as a model directory; before it, ELECTRA's generator."""
        details = {
            "task": "pretraining",
            "made_by": "bertkit pretrain",
            "recipe": as_json(self.recipe),
            "steps": self.done,
            **origin(self.store),
        }
        if self.recipe.objectives.words == "replaced":
            beside = "generator" if folder.name == "model" else f"generator-{folder.name}"
            save_generator(folder.with_name(beside), self.model, self.tokenizer, details)
        # last, because a run with a model is a finished one
        save_model(folder, self.model, self.tokenizer, details)

    def _finish(self, stop: StopRequest, seconds: float) -> int | None:
        """Write the model and the end of the journal; returns the signal, if one ended the run."""
        finished = self.done == self.recipe.phases.total_steps
        if self.done:
            self.write_model(self.folder / "model")
        reason = "finished" if finished else "interrupted"
        self.journal.write({"kind": "end", "step": self.done, "reason": reason, "seconds": seconds})
        if finished:
            self.console.say(f"finished: the model is in {self.folder / 'model'}")
            return None
        assert stop.signal is not None
        what = f"saved after {self.done:,} updates" if self.done else "before the first update"
        self.console.say(
            f"stopped by {signal.Signals(stop.signal).name}, {what}; run the same command to go on"
        )
        return stop.signal


def pretrain(
    recipe: PretrainRecipe | str,
    store: TokenStore | Path | str,
    out: Path | str,
    *,
    recipe_name: str = "recipe",
    workers: int = 0,
    device: str = "auto",
    compiled: bool = False,
    models_at: Sequence[int] = (),
    start: Path | None = None,
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
        models_at: updates after which the model is also written to `models/step-NNNNNNNN`.
        start: a model to go on from, such as one with domain words added (`bertkit vocab extend`).
        console: shows progress; a new one where absent.

    Returns:
        None when the recipe was finished, else the number of the signal that stopped the run.

    Raises:
        BertkitError: see `PretrainingRun`.
    """
    name = recipe if isinstance(recipe, str) else recipe_name
    resolved = read_recipe(PretrainRecipe, recipe) if isinstance(recipe, str) else recipe
    opened = store if isinstance(store, TokenStore) else TokenStore(store)
    run = PretrainingRun(
        resolved,
        opened,
        Path(out),
        recipe_name=Path(name).stem,
        workers=workers,
        device=device,
        compiled=compiled,
        models_at=models_at,
        start=start,
        console=console or Console(),
    )
    return run.run()
