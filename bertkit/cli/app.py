"""The command line, `bertkit COMMAND`: each command is one function in `bertkit.cli`."""

from __future__ import annotations

import difflib
import errno
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import get_args, get_origin

from cyclopts import (
    App,
    ArgumentCollection,
    CoercionError,
    CycloptsError,
    Group,
    UnknownCommandError,
    UnknownOptionError,
)

import bertkit
from bertkit.cli.options import FLAGS, fill_from, parse
from bertkit.cli.streams import end_by_exception, stop_looking, take_streams
from bertkit.errors import BertkitError, nearest
from bertkit.processes import is_alone, rank

NO_DEVICE_MEMORY = (
    "the device is out of memory; use smaller batches, which give the same result: pretrain "
    "--training.accumulate 2 or more (in a new --out; `bertkit plan` says what fits), finetune "
    "--max-tokens 4096 or fewer; or use --device cpu"
)
NO_MEMORY = "this machine is out of memory; use smaller batches or fewer processes"
NO_FILES = "too many files are open; raise the limit (ulimit -n) or use fewer processes"
ALLOCATION = re.compile(
    "(can't|cannot|unable to|failed to) (allocate|map|mmap|start new thread)|not enough memory"
)
"""What libraries say when an allocation fails."""
LIBRARY = re.compile(r"\.(so|dll|dylib)\b|undefined symbol|DLL load failed")
"""What the system says when it cannot load a library that torch or another package needs."""
MIXED = "packages of different builds may be mixed: install torch anew, in a new environment"
COMMAND_GROUPS = {
    "Start": {"demo": "Pre-train and fine-tune a small BERT on text that comes with Python."},
    "Text": {
        "clean": "Remove duplicates and low-quality documents from text.",
        "learn": "Learn a WordPiece vocabulary from text.",
        "vocab": "Extend or measure a vocabulary.",
        "prepare": "Turn text into a token store.",
    },
    "Pre-training": {
        "plan": "Measure what a pre-training run takes: memory, speed, time.",
        "pretrain": "Pre-train a BERT from text or a token store.",
        "report": "Write a run's report as one HTML page.",
    },
    "Tasks": {
        "finetune": "Fine-tune a model on labelled data: one run, or a grid of settings and seeds.",
        "evaluate": "Score a fine-tuned model on a data set.",
    },
    "Use": {
        "info": "Show what a model is: its task, labels, network, vocabulary and size.",
        "predict": "Use a trained model.",
        "serve": "Serve one or several models over HTTP.",
        "export": "Write a model in another format: ONNX, Hugging Face, TensorFlow, torch.export.",
        "push": "Publish a model on the Hugging Face hub.",
        "explain": "Follow one example through a model, from characters to losses.",
    },
}
COMMANDS = {name: text for group in COMMAND_GROUPS.values() for name, text in group.items()}
SUBCOMMANDS = {
    "predict": ("embed", "features", "fill-mask", "next-sentence", "similar"),
    "vocab": ("extend", "measure"),
}
"""Commands with subcommands."""


def application(asked: str | None = None) -> App:
    """Build the cyclopts app with every command registered by name.

    Args:
        asked: the command that was given; its own help shows its whole docstring.
    """
    app = App(
        name="bertkit",
        help="BERT from raw text to answers. Every command takes --threads N, the number of "
        "threads that compute; by default, one for each core.",
        version=bertkit.__version__,
        config=recipe_flags,
        default_parameter=FLAGS,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for number, (title, commands) in enumerate(COMMAND_GROUPS.items()):
        group = Group(title, sort_key=number)
        for index, (name, text) in enumerate(commands.items()):
            target = f"{name}_application" if name in SUBCOMMANDS else f"{name}_command"
            shown = None if name == asked else text
            app.command(
                f"bertkit.cli.{name}:{target}", name=name, sort_key=index, group=group, help=shown
            )
    app.register_install_completion_command(
        help="Let the Tab key complete commands and flags in this shell."
    )
    return app


NO_VALUE = "{} has no value; give one, or leave it out"


def explain_usage(error: CycloptsError) -> str:
    """Return the message for an unknown flag, which comes first, or one without a value, or ""."""
    words = error.unused_tokens or []
    if isinstance(error, UnknownCommandError) and not words[0].startswith("--"):
        return ""
    if isinstance(error, UnknownOptionError):
        words = [error.token.keyword or error.token.value]
        if not words[0].startswith("--"):
            return f"there is no option {words[0]}; write -- before a text that begins with -"
    for word in words:
        name = word.partition("=")[0].replace("_", "-")
        flags = known_flags(error.command_chain or ()) if word.startswith("--") else {name}
        if name not in flags:
            close = difflib.get_close_matches(name, flags, n=1, cutoff=0.75)
            hint = f"did you mean {close[0]}?" if close else "`--help` lists those of the command"
            if name == "--seed" and close == ["--seeds"]:
                hint = "--seeds N makes N runs, with seeds 1 to N"
            return f"there is no option {name}; {hint}"
    if isinstance(error, CoercionError) and error.token and not error.token.value:
        return NO_VALUE.format(error.token.keyword)
    return ""


def known_flags(command: Sequence[str]) -> set[str]:
    """Return all flags of a command."""
    app = application()
    for word in command:
        app = app[word]
    arguments = app.assemble_argument_collection() if app.default_command else ()
    return {name for argument in arguments for name in argument.names} | {"--help", "--version"}


MAX_DIGITS = 18
"""The number of digits of a flag's whole number, which then fits into 64 bits."""


def check_values(arguments: ArgumentCollection) -> None:
    """Reject values that the library would misread.

    These are numbers without a value, which it would take for absent ones, lists with commas, NaN,
    and fractions for whole-number flags, which it would round.
    """
    for argument in arguments:
        hint = next((h for h in get_args(argument.hint) if get_origin(h) is tuple), argument.hint)
        several = get_origin(hint) is tuple
        needs_value = not {bool, str} & {hint, *get_args(argument.hint), *get_args(hint)}
        kind = get_args(hint)[:1] or (hint,)
        for token in argument.tokens:
            if not token.value and needs_value:
                raise BertkitError(NO_VALUE.format(argument.name))
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
            if kind[0] is int and len(token.value.lstrip("+-0").replace("_", "")) > MAX_DIGITS:
                raise BertkitError(f"{argument.name} takes a number below 10^{MAX_DIGITS}")


def recipe_flags(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Fill in the fields of the recipe that the RECIPE argument names (a cyclopts config).

    Flags on the command line override the file.
    """
    check_values(arguments)
    for argument in arguments:
        if argument.name == "--recipe" and argument.tokens:
            fill_from(argument.tokens[0].value, app, commands, arguments)


def check_command(words: Sequence[str]) -> None:
    """Reject an unknown command and suggest the one that may be meant.

    Raises:
        BertkitError: the first word is a subcommand or not a command; or the second resembles a
            subcommand and is not a file.
    """
    name, second, *_ = [*words, "", ""]
    if not name or name.startswith("-"):
        return
    for group, own in SUBCOMMANDS.items():
        if name in own:
            raise BertkitError(f"there is no command '{name}'; it is bertkit {group} {name}")
    if name not in COMMANDS:
        raise BertkitError(f"there is no command '{name}'{nearest(name, COMMANDS)}")
    own = SUBCOMMANDS.get(name, ())
    close = difflib.get_close_matches(second, own, n=1, cutoff=0.8)
    if close and second not in own and not Path(second).exists():
        raise BertkitError(
            f"there is no command '{name} {second}'; did you mean '{name} {close[0]}'?"
        )


MAX_THREADS = 1024


def split_threads(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the words without --threads and its value, and the value; None if it is not given."""
    left = list(words)
    for index, word in enumerate(left):
        name, equals, value = word.partition("=")
        if name == "--threads":
            value = value if equals else " ".join(left[index + 1 : index + 2])
            del left[index : index + (1 if equals else 2)]
            return left, value
    return left, None


def take_threads(words: Sequence[str]) -> list[str]:
    """Set the number of threads that --threads gives, and return the words without it.

    The libraries that compute read it from the environment when they are imported, and so do worker
    processes.

    Raises:
        BertkitError: the number is missing, or is not from 1 to `MAX_THREADS`.
    """
    left, value = split_threads(words)
    if value is not None:
        if not value.isdecimal() or not 1 <= int(value) <= MAX_THREADS:
            raise BertkitError(
                f"--threads takes a whole number from 1 to {MAX_THREADS}, not '{value}'",
                code="number",
            )
        os.environ["OMP_NUM_THREADS"] = str(int(value))
        if "torch" in sys.modules:
            sys.modules["torch"].set_num_threads(int(value))
    return left


def command_of(words: Sequence[str]) -> str:
    """Return the name of the command, which --threads N may precede; "" if there is none."""
    return next(iter(split_threads(words)[0]), "")


def explain_error(error: Exception) -> str | None:
    """Explain an error that another library raised; None if it is a bug in bertkit."""
    text = str(error)
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return NO_MEMORY
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which not every command imports
        return NO_DEVICE_MEMORY
    if isinstance(error, RuntimeError | ImportError) and ALLOCATION.search(text):
        return NO_MEMORY
    if isinstance(error, RuntimeError) and text.startswith("Symlink loop from "):
        path = text.removeprefix("Symlink loop from ").strip("'\"")  # as pathlib shows it
        error = OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
    if isinstance(error, ModuleNotFoundError):
        missing = (error.name or "bertkit").partition(".")[0]
        needs = f"this command needs {missing}, which is not installed; install it"
        return None if missing == "bertkit" else needs
    number = getattr(error, "errno", None)
    if isinstance(error, ImportError | OSError) and number is None and LIBRARY.search(text):
        return f"a library cannot be loaded ({text.splitlines()[0]}); {MIXED}"
    return explain_system_error(error) if isinstance(error, OSError) else None


def explain_system_error(error: OSError) -> str:
    """Explain an error of the operating system, which names the file that is meant, if any."""
    if error.errno in {errno.EMFILE, errno.ENFILE}:
        return NO_FILES
    what = error.strerror or str(error) or type(error).__name__
    return what if error.filename is None else f"{error.filename}: {what}"


def report_thread_error(ended: threading.ExceptHookArgs) -> None:
    """Print the traceback of an exception that ended a thread, unless the system caused it.

    Such a thread is another library's, as TensorBoard's writer is. The main thread gets the same
    error when it next uses that library.
    """
    if not isinstance(ended.exc_value, Exception) or explain_error(ended.exc_value) is None:
        threading.__excepthook__(ended)


def say(line: str) -> None:
    """Print a line on the standard error."""
    print(line, file=sys.stderr)  # noqa: T201 - the command line prints


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 on success, 2 on a user's error, 128 + n after signal n."""
    try:
        words = take_threads(sys.argv[1:] if arguments is None else arguments)
        if words[:1] == ["predict"] and not {*words[1:2]} & {*SUBCOMMANDS["predict"]}:
            words = ["/dev/stdin" if one == "-" else one for one in words]  # - is parsed as a flag
        check_command(words)
        status = parse(application(next(iter(words), None)), words, explain_usage)
        sys.stdout.flush()
    except BertkitError as error:
        who = f"error of rank {rank()}" if rank() else "error"
        say(f"{who}: {error}")
        sys.exit(2)
    except KeyboardInterrupt as end:
        stop_looking()
        say("stopped; run the same command again")
        sys.exit(128 + getattr(end, "number", signal.SIGINT))
    except BrokenPipeError:  # the reader of our output went away, as in `bertkit ... | head`
        sys.exit(1)
    except Exception as error:
        reason = explain_error(error)
        if reason is None:
            raise
        say(f"error: {BertkitError(reason)}")  # names may break the line
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)


def run_program() -> None:
    """Run `main` as the program `bertkit`; one of several ranks skips Python's own shutdown.

    A gloo thread that releases a collective's tensor while the interpreter shuts down aborts the
    process, and the groups of DDP keep their threads after `destroy_process_group`. By
    then everything has been written and closed.
    """
    take_streams()
    warnings.showwarning = lambda message, *_: say(f"warning: {message}")
    threading.excepthook = report_thread_error
    if command_of(sys.argv[1:]) != "serve":
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
