"""The command line, `bertkit VERB`: each verb is one function in `bertkit.verbs`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App

import bertkit
from bertkit.config import FLAGS, parse, recipe_flags
from bertkit.errors import BertkitError

VERBS = {
    "learn": "Learn a WordPiece vocabulary from text.",
    "clean": "Drop duplicates and poor documents from text.",
    "prepare": "Turn text into a token store.",
    "plan": "Say what a pre-training run takes: memory, speed, time, cost.",
    "pretrain": "Pre-train a BERT from text or a token store.",
    "launch": "Pre-train in many processes, on one machine or on many.",
    "finetune": "Tune a model on labelled data: one run, or a grid of settings and seeds.",
    "evaluate": "Score tuned models on a data set, or write its official file.",
    "submit": "Collect GLUE predictions into the zip file of its server.",
    "features": "Write a model's hidden states for the texts of a file.",
    "export": "Write a model in another format: ONNX, Hugging Face, TensorFlow, torch.export.",
    "serve": "Answer over HTTP with one model or several.",
    "report": "Write a run's report as one HTML page.",
    "doctor": "Say what is wrong with a pre-training run or a corpus, and what to change.",
    "explain": "Follow one example through a model, from characters to losses.",
    "reproduce": "Run the paper's tables and figure at some scale, beside the paper's numbers.",
    "demo": "Pre-train and tune a small BERT on text that every Python has.",
}


def application() -> App:
    """The cyclopts app with every verb registered by name."""
    app = App(
        name="bertkit",
        help="BERT from raw text to answers.",
        version=bertkit.__version__,
        config=recipe_flags,
        default_parameter=FLAGS,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for verb, text in VERBS.items():
        app.command(f"bertkit.verbs.{verb}:{verb}", name=verb, help=text)
    app.command("bertkit.verbs.predict:application", name="predict", help="Use a trained model.")
    app.command(
        "bertkit.verbs.vocab:application", name="vocab", help="Extend or measure a vocabulary."
    )
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit: 0 if it did its work, 2 on a user's error, 128 + n after signal n."""
    try:
        status = parse(application(), arguments)
    except BertkitError as error:
        rank = os.environ.get("RANK", "0")
        who = "error" if rank == "0" else f"error of rank {rank}"
        print(f"{who}: {error}", file=sys.stderr)  # noqa: T201 - the command line prints
        sys.exit(2)
    except KeyboardInterrupt:
        print("stopped; run the same command to go on", file=sys.stderr)  # noqa: T201
        sys.exit(130)
    except BrokenPipeError:  # the reader of our output went away, as in `bertkit ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(status if isinstance(status, int) else 0)
