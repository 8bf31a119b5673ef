"""The command line, `bertkit VERB`: each verb is one function in `bertkit.cli`."""

from __future__ import annotations

import difflib
import errno
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args, get_origin

from cyclopts import App, ArgumentCollection, Group

import bertkit
from bertkit.cli.streams import end_by_exception, stop_looking, take_streams
from bertkit.config import FLAGS, fill_from, find_recipe, parse
from bertkit.errors import BertkitError, nearest
from bertkit.outputs import check_output_files
from bertkit.processes import is_alone, rank

NO_ROOM = (
    "the device's memory is full; take less at a time, with the same result: pretrain "
    "--training.accumulate 2 or more (in a new --out; `bertkit plan` says what fits), finetune "
    "--max-tokens 4096 or fewer; or give --device cpu"
)
NO_MEMORY = "the memory is full; take less at a time, or use a machine with more of it"
NO_FILES = "too many files are open; allow more of them (ulimit -n) or use fewer processes"
ALLOCATION = re.compile(
    "(can't|cannot|unable to|failed to) (allocate|map|mmap|start new thread)|not enough memory"
)
"""What libraries say of memory that they do not get."""
STORY = {
    "Start": {
        "demo": "Pre-train and tune a small BERT on text that every Python has.",
    },
    "Text": {
        "clean": "Drop duplicates and poor documents from text.",
        "learn": "Learn a WordPiece vocabulary from text.",
        "vocab": "Extend or measure a vocabulary.",
        "prepare": "Turn text into a token store.",
    },
    "Pre-training": {
        "plan": "Say what a pre-training run takes: memory, speed, time, cost.",
        "pretrain": "Pre-train a BERT from text or a token store.",
        "launch": "Pre-train in many processes, on one machine or on many.",
        "report": "Write a run's report as one HTML page.",
        "doctor": "Say what is wrong with a pre-training run or a corpus, and what to change.",
    },
    "Tasks": {
        "finetune": "Tune a model on labelled data: one run, or a grid of settings and seeds.",
        "evaluate": "Score tuned models on a data set, or write its official file.",
        "submit": "Collect GLUE predictions into the zip file of its server.",
        "features": "Write a model's hidden states for the texts of a file.",
    },
    "Use": {
        "predict": "Use a trained model.",
        "serve": "Answer over HTTP with one model or several.",
        "export": "Write a model in another format: ONNX, Hugging Face, TensorFlow, torch.export.",
        "explain": "Follow one example through a model, from characters to losses.",
    },
    "The paper": {
        "reproduce": "Run the paper's tables and figure at some scale, beside the paper's numbers.",
    },
}
COMMANDS = {verb: text for verbs in STORY.values() for verb, text in verbs.items()}
GROUPS = {
    "predict": ("embed", "fill-mask", "next-sentence", "similar"),
    "vocab": ("extend", "measure"),
}
"""Verbs with verbs of their own."""


def application(asked: str | None = None) -> App:
    """The cyclopts app with every verb registered by name.

    Args:
        asked: the verb of the command line: its own help is its whole docstring.
    """
    app = App(
        name="bertkit",
        help="BERT from raw text to answers.",
        version=bertkit.__version__,
        config=recipe_flags,
        default_parameter=FLAGS,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for number, (title, verbs) in enumerate(STORY.items()):
        group = Group(title, sort_key=number)
        for place, (verb, text) in enumerate(verbs.items()):
            target = f"{verb}_application" if verb in GROUPS else f"{verb}_command"
            shown = None if verb == asked else text
            app.command(
                f"bertkit.cli.{verb}:{target}", name=verb, sort_key=place, group=group, help=shown
            )
    app.register_install_completion_command(
        help="Let the Tab key complete verbs and flags in this shell."
    )
    return app


def check_values(arguments: ArgumentCollection) -> None:
    """Refuse what the library would take for something else.

    These are lists with commas, NaN, and fractions for whole-number flags, which it rounds.
    """
    for argument in arguments:
        several = get_origin(argument.hint) in (tuple, list)
        kind = get_args(argument.hint)[:1] or (argument.hint,)
        for token in argument.tokens:
            if several and kind[0] in (int, float) and "," in token.value:
                apart = " ".join(token.value.replace(",", " ").split())
                raise BertkitError(
                    f"{argument.name} takes numbers with spaces between them: "
                    f"{argument.name} {apart}"
                )
            if float in kind and token.value.strip("+-").lower() == "nan":
                raise BertkitError(
                    f"{argument.name} takes a number, not '{token.value}'", code="number"
                )
            if kind[0] is int and not re.fullmatch(r"[+-]?\d[\d_]*", token.value):
                raise BertkitError(f"{argument.name} takes a whole number, not '{token.value}'")


def recipe_flags(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in the fields of the recipe that the RECIPE argument names (a cyclopts config).

    Flags given on the command line win over the file.
    """
    check_values(arguments)
    check_output_files(arguments)
    for argument in arguments:
        if argument.name == "--recipe" and argument.tokens:
            fill_from(find_recipe(argument.tokens[0].value), app, commands, arguments)


def check_command(words: Sequence[str]) -> None:
    """Refuse a verb that is not there, and say which one may be meant.

    Raises:
        BertkitError: the first word is a verb of a group, or no verb; or the second is like a verb
            of the group, and no file.
    """
    verb, second, *_ = [*words, "", ""]
    if not verb or verb.startswith("-"):
        return
    for group, own in GROUPS.items():
        if verb in own:
            raise BertkitError(f"no verb '{verb}'; it is bertkit {group} {verb}")
    if verb not in COMMANDS:
        raise BertkitError(f"no verb '{verb}'{nearest(verb, COMMANDS)}")
    own = GROUPS.get(verb, ())
    close = difflib.get_close_matches(second, own, n=1, cutoff=0.8)
    if close and second not in own and not Path(second).exists():
        raise BertkitError(f"no verb '{verb} {second}'; did you mean '{verb} {close[0]}'?")


def reason_of(error: Exception) -> str | None:
    """What to say of an error that is none of ours; None for one that is a fault of the program."""
    text = str(error)
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return NO_MEMORY
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which not every verb imports
        return NO_ROOM
    if isinstance(error, RuntimeError | ImportError) and ALLOCATION.search(text):
        return NO_MEMORY
    if not isinstance(error, OSError):
        return None
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return NO_FILES
    what = error.strerror or text or type(error).__name__
    return what if error.filename is None else f"{error.filename}: {what}"


def say(line: str) -> None:
    """Print a line on the standard error."""
    print(line, file=sys.stderr)  # noqa: T201 - the command line prints


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one verb and exit: 0 if it did its work, 2 on a user's error, 128 + n after signal n."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    try:
        check_command(words)
        status = parse(application(next(iter(words), None)), words)
        sys.stdout.flush()
    except BertkitError as error:
        who = f"error of rank {rank()}" if rank() else "error"
        say(f"{who}: {error}")
        sys.exit(2)
    except KeyboardInterrupt as end:
        stop_looking()
        say("stopped; run the same command to go on")
        sys.exit(128 + getattr(end, "number", signal.SIGINT))
    except BrokenPipeError:  # the reader of our output went away, as in `bertkit ... | head`
        sys.exit(1)
    except Exception as error:
        reason = reason_of(error)
        if reason is None:
            raise
        say(f"error: {BertkitError(reason)}")  # names may break the line
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)


def run_program() -> None:
    """What the command `bertkit` runs: `main`, but one of several ranks ends without Python's end.

    A thread of gloo that lets go of a collective's tensor while the interpreter comes to its end
    aborts the process, and groups that DDP or FSDP2 hold keep their threads after
    `destroy_process_group`. By then everything is written and closed.
    """
    take_streams()
    if sys.argv[1:2] != ["serve"]:
        end_by_exception()
    elif signal.getsignal(signal.SIGINT) != signal.SIG_IGN:  # it ends by the signal itself
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except SystemExit as end:
        with suppress(BertkitError, BrokenPipeError):  # of what was printed before an error
            sys.stdout.flush()
        if is_alone() or not isinstance(end.code, int):
            raise
        sys.stderr.flush()
        os._exit(end.code)
