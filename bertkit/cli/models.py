"""Commands about one model: info, explain, export and push."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import bertkit
from bertkit.cli.options import AnyModel
from bertkit.errors import escape_line_breaks
from bertkit.files import check_output, write_json
from bertkit.progress import Console

MAX_SHOWN = 20


def info_command(model: AnyModel, *, json: Path | None = None) -> None:
    """Show what a model is: its task, labels, network, vocabulary, size and origin.

    Args:
        json: The file for the same facts as JSON.
    """
    from bertkit.predict.load import model_info

    facts = model_info(model)
    for name, value in facts.items():
        if value not in (None, "", [], {}):
            line = f"{name.replace('_', ' '):12}{shown(value)}"
            print(escape_line_breaks(line))
    if json is not None:
        write_json(check_output(json), facts)


def shown(value: Any) -> str:
    """Return a fact as one line of text."""
    if isinstance(value, dict):
        return ", ".join(
            f"{name.replace('_', ' ')} {shown(fact)}"
            for name, fact in value.items()
            if fact not in (None, "", [])
        )
    if isinstance(value, list | tuple):
        more = f", and {len(value) - MAX_SHOWN} more" if len(value) > MAX_SHOWN else ""
        return ", ".join(map(str, value[:MAX_SHOWN])) + more
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return value if isinstance(value, str) else json.dumps(value)


def explain_command(
    model: AnyModel,
    text: str,
    pair: str | None = None,
    *,
    seed: int = 0,
) -> None:
    """Trace one example through a model: tokens, masks, attention, losses.

    Args:
        text: The text.
        pair: A second text, which may or may not follow the first.
        seed: The seed of the masks.
    """
    import rich.console

    from bertkit.report.explain import print_explanation, trace_example

    trace = trace_example(model, text, pair, seed=seed)
    print_explanation(trace, rich.console.Console(highlight=False))


def export_command(
    model: AnyModel,
    *,
    out: Path,
    to: str = "onnx",
    head: str = "auto",
    pooling: str = "auto",
    normalize: bool | None = None,
    max_error: float | None = None,
) -> None:
    """Write a model as an ONNX file with its tokenizer, and check it.

    The file is run on built-in sequences and compared with bertkit; export.json, next to it,
    records the differences. If a difference exceeds its bound, nothing is written.

    Args:
        out: The folder to write.
        to: onnx, or onnx-int8 (8-bit weights).
        head: auto for the head that the model was trained with; encoder works for any model, and
            embedding for any model directory.
        pooling: The pooling of embeddings, such as cls, mean or cls+mean, or auto.
        normalize: Whether to scale embeddings to unit norm.
        max_error: The largest allowed difference in an output; if the output's largest value is
            above 1, the limit is multiplied by it. By default 0.0001, and unlimited for onnx-int8.
    """
    bertkit.export_model(
        *(model, out, to), head=head, pooling=pooling, normalize=normalize, max_error=max_error
    )


def push_command(model: Path, name: str, *, private: bool = False) -> None:
    """Publish a model on the Hugging Face hub.

    The model's files and its card are uploaded in one commit, and nothing else. Log in first with
    `hf auth login`, or set HF_TOKEN.

    Args:
        model: A model directory, a run directory or an export.
        name: The name on the hub, ORG/NAME; it is created if it does not exist.
        private: Let only members of ORG see the model, if it is created.
    """
    from bertkit.checkpoints.publish import push

    done = push(model, name, private=private)
    Console().say(f"uploaded {len(done.files)} files: {', '.join(done.files)}")
    print(escape_line_breaks(f"{done.url} {done.commit}"))
