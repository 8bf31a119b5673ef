"""The command `bertkit info`, which says what a model is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import rich.console
from rich.markup import escape
from rich.table import Table

from bertkit.checkpoints.pretrained import model_folder, read_pretrained
from bertkit.files import write_json
from bertkit.model.pooling import read_optional_json, read_pooling
from bertkit.outputs import FILE
from bertkit.predict.load import is_tuned
from bertkit.tasks.saved import task_details

MOST_SHOWN = 20


def info_command(model: Path, *, json: Annotated[Path | None, FILE] = None) -> None:
    """Show what a model is: its task, labels, network, vocabulary, size and origin.

    Parameters
    ----------
    model
        A model directory, a run, a model of the hub, or a Google checkpoint.
    json
        The file for the same facts as JSON.
    """
    facts = model_info(model)
    table = Table("", "", show_header=False, box=None)
    for name, value in facts.items():
        if value not in (None, "", [], {}):
            table.add_row(name.replace("_", " "), escape(shown(value)))
    rich.console.Console().print(table)
    if json is not None:
        write_json(json, facts)


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
    heads = any(name.startswith(("cls.", "discriminator_")) for name in start.tensors)
    details, task = dict(start.details), "pre-training" if heads else "encoder"
    if folder.is_dir() and is_tuned(folder):
        details = task_details(folder)
        task = str(details["task"])
    elif (start.path / "modules.json").is_file():
        details, task = {"settings": vars(read_pooling(start.path)[1])}, "embedding"
    recipe = details.get("recipe") or {}
    family = read_optional_json(folder / "config.json") if folder.is_dir() else {}
    dtypes = sorted({str(one.dtype).removeprefix("torch.") for one in start.tensors.values()})
    return {
        "model": start.origin,
        "task": task,
        "labels": details.get("labels") or [],
        "data": details.get("data", ""),
        "columns": details.get("columns") or {},
        "settings": details.get("settings") or {},
        "objectives": recipe.get("objectives") or {},
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


def shown(value: Any) -> str:
    """Return a fact as one line of text."""
    if isinstance(value, dict):
        return ", ".join(
            f"{name.replace('_', ' ')} {shown(one)}"
            for name, one in value.items()
            if one not in (None, "", [])
        )
    if isinstance(value, list | tuple):
        more = f", and {len(value) - MOST_SHOWN} more" if len(value) > MOST_SHOWN else ""
        return ", ".join(map(str, value[:MOST_SHOWN])) + more
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)
