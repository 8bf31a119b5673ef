"""Any trained model: `load` loads it for use, and `model_info` says what it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertkit.checkpoints.families import heads_of_class
from bertkit.checkpoints.pretrained import (
    model_folder,
    read_details,
    read_pretrained,
    resolve_model,
)
from bertkit.checkpoints.save import SAVED_HEADS
from bertkit.checkpoints.weights import recorded_recipe
from bertkit.errors import BertkitError
from bertkit.files import read_optional
from bertkit.model.pooling import is_embedder, read_pooling
from bertkit.predict.predictors import PREDICTORS, TaskPredictor
from bertkit.tasks.saved import load_task_model, task_details
from bertkit.tasks.spec import SPECS
from bertkit.training.device import choose_device

if TYPE_CHECKING:
    from bertkit.predict.embeddings import Embedder
    from bertkit.predict.pretrained import Predictor


def load(
    path: Path | str | Sequence[Path | str],
    *,
    device: str = "auto",
    precision: str = "auto",
    null_threshold: float | None = None,
) -> Predictor | TaskPredictor | Embedder:
    """Load a trained model for use.

    Args:
        path: a model directory, a run directory or a model of the hub; several fine-tuned models
            make an ensemble.
        device: "auto", "cpu", "cuda", ... On a CPU, torch's number of threads is taken when the
            model is loaded, so set it before.
        precision: "fp32", "bf16", "int8" (CPUs only), or "auto": bf16 if the device computes it
            fast, else fp32.
        null_threshold: the null odds (score of no answer minus score of the best span) above which
            a question answering model gives no answer. The default is the threshold saved with the
            model; a model fine-tuned with transformers has none and answers every question.

    Returns:
        By the model's task a `TextPredictor`, `ChoicePredictor`, `TagPredictor` or
        `AnswerPredictor`; an `Embedder` for a model of sentence-transformers; a `Predictor` for any
        other pre-trained model.

    Raises:
        BertkitError: there is no model, it is damaged, or the models cannot form an ensemble.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    if len(paths) == 1:
        folder = resolve_model(Path(paths[0]))
        embeds = is_embedder(folder)
        if embeds or not is_tuned(model_folder(folder)):
            if null_threshold is not None:
                raise BertkitError(f"{folder} was not fine-tuned for a task; it has no threshold")
            if embeds:
                from bertkit.predict.embeddings import load_embedder

                return load_embedder(folder, device=device, precision=precision)
            from bertkit.predict.pretrained import load_pretrained

            return load_pretrained(folder, device=device, precision=precision)
        paths = [folder]
    return load_predictor(paths, device=device, precision=precision, null_threshold=null_threshold)


def load_predictor(
    paths: Sequence[Path | str],
    *,
    device: str = "auto",
    precision: str = "auto",
    null_threshold: float | None = None,
) -> TaskPredictor:
    """Load one fine-tuned model, or several for an ensemble; see `load`.

    Raises:
        BertkitError: see `load`; or a model was not fine-tuned for a task.
    """
    if not paths:
        raise BertkitError("there is no model to load; name at least one")
    where = choose_device(device)
    if null_threshold is not None and math.isnan(null_threshold):
        raise BertkitError("null_threshold must be a number, not NaN")
    loaded = [load_task_model(Path(one), where, null_threshold) for one in paths]
    return PREDICTORS[SPECS[loaded[0].task.task_type].example](loaded, where, precision)


def is_tuned(folder: Path) -> bool:
    """Return whether a model directory contains a fine-tuned model."""
    if str(read_details(folder).get("task")) in SPECS:
        return True
    named = read_optional(folder / "config.json").get("architectures")
    tuned = {head for head, _ in SAVED_HEADS.values()}
    return isinstance(named, list) and any(tuned & heads_of_class(str(name)) for name in named)


def model_info(model: Path | str) -> dict[str, Any]:
    """Return what a model's files say about it.

    Args:
        model: a model directory, a run directory, a model of the hub or a Google checkpoint.

    Returns:
        JSON values by name: `task` ("pre-training", "encoder", "embedding" or a task type),
        `labels`, `network` (its sizes), `vocabulary`, `parameters`, `bytes`, `dtypes`, and the
        data, columns and settings with which bertkit trained the model.

    Raises:
        BertkitError: there is no model, or a file is missing or damaged.
    """
    start = read_pretrained(Path(model))
    folder, config = model_folder(start.path), start.config
    prefixes = ("cls.predictions.", "cls.seq_relationship.", "discriminator_")
    heads = any(name.startswith(prefixes) for name in start.tensors)
    details, task = dict(start.details), "pre-training" if heads else "encoder"
    if folder.is_dir() and is_tuned(folder):
        details = task_details(folder)
        task = str(details["task"])
    elif is_embedder(start.path):
        details, task = {"settings": vars(read_pooling(start.path)[1])}, "embedding"
    family = read_optional(folder / "config.json") if folder.is_dir() else {}
    dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in start.tensors.values()})
    return {
        "model": start.origin,
        "task": task,
        "labels": details.get("labels") or [],
        "data": details.get("data", ""),
        "columns": details.get("columns") or {},
        "settings": details.get("settings") or {},
        "objectives": recorded_recipe(details, "objectives"),
        "type": family.get("model_type", "bert"),
        "network": {
            "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size,
            "heads": config.num_attention_heads,
            "intermediate_size": config.intermediate_size,
            "max_length": config.max_position_embeddings,
            "segments": config.type_vocab_size,
            "direction": config.direction,
        },
        "vocabulary": {
            "tokens": start.tokenizer.size,
            "case": "lowercased" if start.tokenizer.lowercase else "cased",
        },
        "parameters": sum(one.numel() for one in start.tensors.values()),
        "bytes": sum(one.numel() * one.element_size() for one in start.tensors.values()),
        "dtypes": dtypes,
    }
