"""Any trained model: `load` loads it for use, and `model_info` says what it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bertkit.checkpoints.pretrained import model_folder, read_pretrained, resolve_model
from bertkit.checkpoints.sentence_transformers import is_embedder
from bertkit.errors import BertkitError
from bertkit.files import read_optional
from bertkit.predict.embeddings import Embedder, load_embedder
from bertkit.predict.predictor import TaskPredictor
from bertkit.predict.pretrained import Predictor, load_pretrained
from bertkit.tasks.types import is_tuned, task_details


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
        A `TaskPredictor` for a fine-tuned model; an `Embedder` for a model of
        sentence-transformers; a `Predictor` for any other pre-trained model.

    Raises:
        BertkitError: there is no model, it is damaged, or the models cannot form an ensemble.
    """
    paths = [path] if isinstance(path, str | Path) else list(path)
    if not paths:
        raise BertkitError("there is no model to load; name at least one")
    folders = [resolve_model(Path(one)) for one in paths]
    first = folders[0]
    if len(folders) == 1 and (is_embedder(first) or not is_tuned(model_folder(first))):
        if null_threshold is not None:
            raise BertkitError(f"{first} was not fine-tuned for a task; it has no threshold")
        if is_embedder(first):
            return load_embedder(first, device=device, precision=precision)
        return load_pretrained(first, device=device, precision=precision)
    return TaskPredictor(folders, device=device, precision=precision, null_threshold=null_threshold)


def load_predictor(path: Path | str | Sequence[Path | str], **options: Any) -> TaskPredictor:
    """Load one fine-tuned model, or several for an ensemble; any other model is an error."""
    paths = [path] if isinstance(path, str | Path) else list(path)
    if not paths:
        raise BertkitError("there is no model to load; name at least one")
    return TaskPredictor([resolve_model(Path(one)) for one in paths], **options)


def model_info(model: Path | str) -> dict[str, Any]:
    """Return what a model's files say about it.

    Args:
        model: a model directory, a run directory, a model of the hub or a Google checkpoint.

    Returns:
        JSON values by name: `task` ("pre-training", "encoder", "embedding" or a task type),
        `labels`, `network` (its sizes), `vocabulary`, `parameters`, `bytes`, and the data, columns
        and settings with which bertkit trained the model.

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
        task = "embedding"
    family = read_optional(folder / "config.json") if folder.is_dir() else {}
    return {
        "model": start.origin,
        "task": task,
        "labels": details.get("labels") or [],
        "data": details.get("data", ""),
        "columns": details.get("columns") or {},
        "settings": details.get("settings") or {},
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
        "parameters": sum(tensor.numel() for tensor in start.tensors.values()),
        "bytes": sum(tensor.numel() * tensor.element_size() for tensor in start.tensors.values()),
    }
