"""Pre-training: a token store and a recipe → a run directory with a model (paper section 3.1, A.2).

A run directory holds `recipe.json` (the resolved recipe), `environment.json`, `journal.jsonl`,
`checkpoints/`, `model/` and `report.html`. Running the same command again goes on from the last
good checkpoint, and the weights at the end are byte for byte those of an undisturbed run.
"""

from __future__ import annotations

import hashlib
import math
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertkit.config import as_json, differences, read_recipe
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.examples.masking import MaskingOptions
from bertkit.examples.pairs import PairOptions, measure_pairs
from bertkit.examples.stream import (
    START,
    BatchBuilder,
    ExampleTable,
    Place,
    PretrainingBatch,
    stream_steps,
)
from bertkit.files import read_json, write_json
from bertkit.model.directory import save_model
from bertkit.model.heads import PretrainingModel, count_parameters
from bertkit.objectives import pretraining_sums
from bertkit.training.checkpoint import (
    load_latest,
    model_tensors,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
    save_checkpoint,
)
from bertkit.training.devices import check_precision, choose_device, environment, matmul_peak
from bertkit.training.interval import Interval
from bertkit.training.journal import Console, Journal
from bertkit.training.loop import LoopSettings, Sum, Sums, evaluate, train_steps
from bertkit.training.optimizer import build_optimizer, learning_rate
from bertkit.training.recipe import PretrainRecipe
from bertkit.training.stopping import StopRequest

HELD_OUT_BATCH = 64
"""Sequences in a batch of the evaluation."""


def pretraining_objective(model: PretrainingModel, batch: PretrainingBatch) -> Sums:
    """MLM and NSP losses and right answers of a batch (paper, tasks 1 and 2)."""
    output = model(batch.packed, batch.target_positions)
    sums = pretraining_sums(output, batch.target_ids, batch.next_labels)
    return {
        "mlm_loss": Sum(sums.mlm_loss_sum, "targets"),
        "mlm_accuracy": Sum(sums.mlm_correct, "targets"),
        "nsp_loss": Sum(sums.nsp_loss_sum, "sequences"),
        "nsp_accuracy": Sum(sums.nsp_correct, "sequences"),
    }


def baselines(store: TokenStore, random_share: float) -> dict[str, float]:
    """What a model that looks at nothing reaches.

    Args:
        store: gives the unigram counts.
        random_share: measured share of NSP examples with a random second sentence.

    Returns:
        unigram_entropy in nats: MLM loss of predicting the frequency of each piece.
        most_frequent_accuracy: MLM accuracy of always the commonest piece.
        nsp_majority: NSP accuracy of always the commoner label.
    """
    shares = store.unigrams[store.unigrams > 0] / store.unigrams.sum()
    return {
        "unigram_entropy": float(-(shares * np.log(shares)).sum()),
        "most_frequent_accuracy": float(shares.max()),
        "nsp_majority": max(random_share, 1 - random_share),
    }


def phase_seed(seed: int, phase: int) -> int:
    """Each phase draws examples and masks of its own."""
    return seed + (phase << 32)


class PretrainingRun:
    """One run directory being filled.

    Args:
        recipe: what to do.
        store: the corpus; its tokenizer becomes the model's.
        folder: the run directory; a run stopped earlier goes on.
        recipe_name: for the journal and the report.
        workers: loader processes; 0 suits CPUs.
        device: "auto", "cpu", "cuda", "cuda:1", ...
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
        console: Console,
    ) -> None:
        self.recipe, self.store, self.folder = recipe, store, folder
        self.recipe_name, self.workers, self.console = recipe_name, workers, console
        self.tokenizer = store.tokenizer
        training = recipe.training
        self.device = choose_device(device)
        check_precision(training.precision, self.device)
        self._check_folder()
        self.settings = LoopSettings(
            device=self.device,
            precision=training.precision,
            seed=training.seed,
            max_gradient_norm=training.max_gradient_norm,
            learning_rate=self.learning_rate,
        )
        torch.manual_seed(training.seed)
        self.config = recipe.model.config(self.tokenizer.size)
        self.model = PretrainingModel(self.config).to(self.device)
        self.optimizer = build_optimizer(
            self.model,
            learning_rate=training.learning_rate,
            weight_decay=training.weight_decay,
            bias_correction=training.bias_correction,
        )
        self.done, self.place = self._resume()
        self.matmul_peak = matmul_peak(self.device, training.precision, seconds=0.3)

    def learning_rate(self, step: int) -> float:
        """Learning rate of the update that follows `step` updates."""
        training = self.recipe.training
        return learning_rate(
            step,
            peak=training.learning_rate,
            warmup_steps=training.warmup_steps,
            total_steps=self.recipe.phases.total_steps,
            schedule=training.schedule,
        )

    def _check_folder(self) -> None:
        """Begin the folder, or make sure that it holds this very run."""
        path = self.folder / "recipe.json"
        settings = {
            "recipe": as_json(self.recipe),
            "recipe_name": self.recipe_name,
            "store": str(self.store.folder),
            "tokenizer_hash": self.store.tokenizer_hash,
            "corpus": self.corpus_hash(),
        }
        if path.is_file():
            begun = read_json(path)
            ignored = {"store", "recipe_name"}  # a store may move, a recipe may be renamed
            changed = differences(
                {key: value for key, value in begun.items() if key not in ignored},
                {key: value for key, value in settings.items() if key not in ignored},
            )
            if changed:
                raise BertkitError(
                    f"{self.folder} holds a run with other settings ({'; '.join(changed[:3])}); "
                    "choose another --out, or restore the settings to go on"
                )
            return
        if self.folder.is_dir() and (self.folder / "journal.jsonl").exists():
            raise BertkitError(
                f"{self.folder} has a journal but no recipe.json; choose another --out"
            )
        write_json(path, settings)
        write_json(self.folder / "environment.json", environment())

    def corpus_hash(self) -> str:
        """Names the content of the store by its shards' checksums."""
        sums = "".join(shard.sha256["tokens"] for shard in self.store.shards)
        return hashlib.sha256(sums.encode()).hexdigest()

    def _resume(self) -> tuple[int, Place]:
        checkpoint = load_latest(self.folder / "checkpoints", self.console.say)
        if checkpoint is None:
            return 0, START
        restore_model(self.model, checkpoint.tensors["model"])
        restore_optimizer(self.model, self.optimizer, checkpoint.tensors["optimizer"])
        self.console.say(f"going on from {checkpoint.path} ({checkpoint.step:,} updates made)")
        return checkpoint.step, Place(*checkpoint.progress["place"])

    def table_and_builder(self, phase: int, split: str) -> tuple[ExampleTable, BatchBuilder]:
        """Examples of a phase; held-out ones do not depend on the run's seed."""
        phases = self.recipe.phases
        store = self.store if split == "train" else TokenStore(self.store.folder, split)
        seed = phase_seed(self.recipe.training.seed if split == "train" else 0, phase)
        table = ExampleTable(store, PairOptions(max_length=phases.lengths[phase]), seed)
        masking = self.recipe.masking if split == "train" else MaskingOptions()
        return table, BatchBuilder(store, masking, phases.max_predictions[phase], seed)

    def held_out_batches(self, phase: int) -> Iterator[PretrainingBatch]:
        """The same examples with the same masks at every evaluation of a phase.

        Their masks are always 15 %, 80/10/10, so that runs with other masks can be compared.
        """
        table, builder = self.table_and_builder(phase, "held_out")
        count = min(self.recipe.watching.held_out_sequences, len(table.rows_of(0, 0)))
        rows, _ = table.take(START, count)
        for start in range(0, count, HELD_OUT_BATCH):
            yield builder[rows[start : start + HELD_OUT_BATCH]]

    @property
    def has_held_out(self) -> bool:
        """Whether the store has the two held-out documents that an evaluation needs."""
        return TokenStore(self.store.folder, "held_out").documents > 1

    def start_record(self) -> dict[str, Any]:
        """What is known before the first update: baselines, sizes, the real label balance."""
        phases = self.recipe.phases
        table, _ = self.table_and_builder(0, "train")
        pairs = measure_pairs(table.rows_of(0, 0), phases.lengths[0])
        return {
            "kind": "start",
            "step": self.done,
            "recipe_name": self.recipe_name,
            "baselines": baselines(self.store, pairs.random_share),
            "pairs": as_json(pairs),
            "matmul_peak": self.matmul_peak,
            "tokens_total": self.store.tokens,
            "parameters": count_parameters(self.config, heads=True),
            "steps_total": phases.total_steps,
            "phases": [
                {"length": length, "steps": steps, "batch_size": size}
                for length, steps, size in zip(
                    phases.lengths, phases.steps, phases.batch_sizes, strict=True
                )
            ],
        }

    def run(self) -> int | None:
        """Train to the end of the recipe, or until a signal.

        Returns:
            None at the end of the recipe, else the number of the signal that stopped the run.

        Raises:
            BertkitError: training diverged, a shard is damaged, or the disk is full.
        """
        total = self.recipe.phases.total_steps
        if self.done >= total and (self.folder / "model").is_dir():
            self.console.say(f"{self.folder} is finished ({self.done:,} updates); nothing to do")
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
                self._finish(stop, time.perf_counter() - started)
                return stop.signal
        finally:
            self.journal.close()
            self.console.close()

    def _announce(self) -> None:
        start = self.start_record()
        self.journal.write(start)
        known, pairs = start["baselines"], start["pairs"]
        self.console.say(
            f"{start['parameters']:,} parameters; {self.store.tokens:,} training tokens in "
            f"{self.store.documents:,} documents; first window: {pairs['examples']:,} examples of "
            f"{pairs['mean_tokens']:.1f} tokens, {pairs['random_share']:.1%} with a random next "
            f"sentence, {pairs['cut_share']:.1%} of tokens cut"
        )
        self.console.say(
            f"baselines: unigram entropy {known['unigram_entropy']:.3f} nats, commonest piece "
            f"{known['most_frequent_accuracy']:.1%}, commoner next-sentence label "
            f"{known['nsp_majority']:.1%}"
        )
        if not self.has_held_out:
            self._note("the store has fewer than two held-out documents: no evaluation is made")

    def _note(self, message: str) -> None:
        self.journal.write({"kind": "note", "step": self.done, "message": message})
        self.console.say(message)

    def _run_phase(self, phase: int, stop: StopRequest) -> None:
        """Make the updates of a phase that are still to be made."""
        phases, training = self.recipe.phases, self.recipe.training
        _, made = phases.locate(self.done)
        if made == 0:
            self.place = START
        table, builder = self.table_and_builder(phase, "train")
        steps = stream_steps(
            table,
            builder,
            batch_size=phases.batch_sizes[phase],
            steps=phases.steps[phase] - made,
            place=self.place,
            accumulate=training.accumulate,
            workers=self.workers,
        )
        interval = Interval(self.config, self.matmul_peak, phase)
        records = train_steps(
            self.model, self.optimizer, pretraining_objective, steps, self.settings, done=self.done
        )
        for record in records:
            self.done, self.place = record.step, record.after
            interval.add(record)
            self._watch(interval, phase, stop)
            if stop.signal is not None:
                return

    def _watch(self, interval: Interval, phase: int, stop: StopRequest) -> None:
        """Log, evaluate and save where the recipe says so; always before stopping."""
        watching = self.recipe.watching
        last = self.done == self.recipe.phases.total_steps
        saving = last or stop.signal is not None or self.done % watching.checkpoint_every == 0
        evaluating = last or self.done % watching.evaluate_every == 0
        if saving or evaluating or self.done % watching.log_every == 0:
            record = interval.close()
            self.journal.write(record)
            self.console.update(record)
        if evaluating:
            self._evaluate(phase)
            interval.restart()
        if saving:
            self.save()
            interval.restart()

    def _evaluate(self, phase: int) -> None:
        if not self.has_held_out:
            return
        means, counts = evaluate(
            self.model, pretraining_objective, self.held_out_batches(phase), self.settings
        )
        record = {
            "kind": "evaluation",
            "step": self.done,
            "phase": phase,
            **means,
            "mlm_perplexity": math.exp(min(means["mlm_loss"], 700.0)),
            **counts,
        }
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
        self.journal.write(
            {"kind": "checkpoint", "step": self.done, "path": name, "seconds": seconds}
        )
        return path

    def _finish(self, stop: StopRequest, seconds: float) -> None:
        """Write the model directory and the end of the journal."""
        details = {
            "task": "pretraining",
            "made_by": "bertkit pretrain",
            "recipe": as_json(self.recipe),
            "steps": self.done,
            "store": str(self.store.folder),
        }
        save_model(self.folder / "model", self.model, self.tokenizer, details)
        reason = "finished" if stop.signal is None else "interrupted"
        self.journal.write({"kind": "end", "step": self.done, "reason": reason, "seconds": seconds})
        if stop.signal is None:
            self.console.say(f"finished: the model is in {self.folder / 'model'}")
        else:
            self.console.say(
                f"stopped by {signal.Signals(stop.signal).name}: saved after {self.done:,} "
                "updates; run the same command to go on"
            )


def pretrain(
    recipe: PretrainRecipe | str,
    store: TokenStore | Path | str,
    out: Path | str,
    *,
    recipe_name: str = "recipe",
    workers: int = 0,
    device: str = "auto",
    console: Console | None = None,
) -> int | None:
    """Pre-train a model and write its run directory, with the report.

    Args:
        recipe: a `PretrainRecipe`, or the path or name of one.
        store: a token store or its folder.
        out: the run directory; an unfinished run of the same recipe goes on.
        recipe_name: for the report, where the recipe is not given by name.
        workers: loader processes; 0 suits CPUs.
        device: "auto", "cpu", "cuda", ...
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
        console=console or Console(),
    )
    return run.run()
