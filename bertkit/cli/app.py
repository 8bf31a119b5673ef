"""The command line, `bertkit COMMAND`: each command is a function in a module of `bertkit.cli`."""

from __future__ import annotations

import errno
import gc
import logging
import math
import os
import re
import shlex
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from cyclopts import App, ArgumentCollection, CycloptsError, Group

import bertkit
from bertkit.cli.options import FLAGS, fill_from_recipe
from bertkit.errors import BertkitError
from bertkit.files import from_home
from bertkit.processes import cpu_quota, is_alone, rank, usable_cores

COMMANDS = {
    "Start": {
        "demo": ("training", "Pre-train and fine-tune a small BERT on text that comes with Python.")
    },
    "Text": {
        "clean": ("corpus", "Remove duplicates, and short or long documents, from text."),
        "learn": ("corpus", "Learn a WordPiece vocabulary from text."),
        "prepare": ("corpus", "Turn text into a token store."),
    },
    "Pre-training": {
        "pretrain": ("training", "Pre-train a BERT from text or a token store."),
        "report": ("training", "Write a run's report as one HTML page."),
    },
    "Tasks": {
        "finetune": ("tasks", "Fine-tune a model on labelled data: one run, or a grid of runs."),
        "evaluate": ("tasks", "Score a fine-tuned model on a data set."),
    },
    "Use": {
        "info": ("models", "Show what a model is: its task, labels, network and vocabulary."),
        "predict": ("predict", "Use a trained model."),
        "serve": ("serve", "Serve one or several models over HTTP."),
        "export": ("models", "Write a model as an ONNX file."),
        "push": ("models", "Publish a model on the Hugging Face hub."),
        "explain": ("models", "Follow an example through a model, from characters to losses."),
    },
}
"""Group of --help -> command -> (module, summary)."""


def application(asked: str | None = None) -> App:
    """Build the cyclopts app, in which the command `asked` shows its whole docstring as help."""
    app = App(
        name="bertkit",
        help="BERT from raw text to answers.",
        version=bertkit.__version__,
        config=fill_and_check,
        default_parameter=FLAGS,
        result_action="return_value",
        suppress_keyboard_interrupt=False,
    )
    for number, (title, commands) in enumerate(COMMANDS.items()):
        group = Group(title, sort_key=number)
        for index, (name, (module, summary)) in enumerate(commands.items()):
            app.command(
                f"bertkit.cli.{module}:{name}_command",
                name=name,
                sort_key=index,
                group=group,
                help=None if name == asked else summary,
            )
    app.register_install_completion_command(
        help="Let the Tab key complete commands and flags in this shell."
    )
    return app


def fill_and_check(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Reject fractions for whole numbers, which cyclopts rounds, and read the recipe's file."""
    for argument in arguments:
        kinds = {argument.hint, *get_args(argument.hint)}
        if int in kinds or tuple[int, ...] in kinds:
            for token in argument.tokens:
                if "." in token.value:
                    raise BertkitError(f"{argument.name} takes a whole number, not {token.value}")
    for argument in arguments:
        if argument.name == "--recipe" and argument.tokens:
            fill_from_recipe(argument.tokens[0].value, app, commands, arguments)


# Errors -------------------------------------------------------------------------------------------

NO_DEVICE_MEMORY = (
    "the device is out of memory; use smaller batches, which give the same result: pretrain "
    "--training.accumulate 2 or more (in a new --out), finetune "
    "--max-tokens 4096 or fewer; or use --device cpu"
)
ALLOCATION = re.compile(
    "(can't|cannot|unable to|failed to) (allocate|map|mmap|start new thread)|not enough memory"
)
"""What libraries say when an allocation fails."""


def explain_error(error: Exception) -> str | None:
    """Explain an error of another library or the system; None if it is a bug in bertkit."""
    number = getattr(error, "errno", None)
    allocation = isinstance(error, RuntimeError | ImportError) and ALLOCATION.search(str(error))
    if type(error).__name__ == "OutOfMemoryError":  # torch's, which not every command imports
        return NO_DEVICE_MEMORY
    if isinstance(error, MemoryError) or number == errno.ENOMEM or allocation:
        return "this machine is out of memory; use smaller batches or fewer processes"
    if number in (errno.EMFILE, errno.ENFILE):
        return "too many files are open; raise the limit (ulimit -n) or use fewer processes"
    missing = getattr(error, "name", None) or "bertkit"
    if isinstance(error, ModuleNotFoundError) and not missing.startswith("bertkit"):
        return (
            f"this command needs {missing}, which is not installed; install it, or the extra of "
            "bertkit that has it: data, onnx, serve"
        )
    if isinstance(error, OSError):
        what = error.strerror or str(error) or type(error).__name__
        return what if error.filename is None else f"{error.filename}: {what}"
    return None


def end_if_finished() -> None:
    """Exit with the result if this same command has fine-tuned before; nothing imports torch."""
    from bertkit.finetuning.runs import finished_result, finished_text

    command = sys.argv[1:]
    out = Path(from_home(dict(pairwise(command)).get("--out", "")))
    report = out / "report.html"
    if report.is_file() and (result := finished_result(out, shlex.join(command))):
        say(f"{finished_text(result)}\nreport: {report}")
        sys.exit(0)


def import_command(names: Sequence[str]) -> None:
    """Import the module of a command; the garbage collector would search it for half a second."""
    gc.disable()
    for group in COMMANDS.values():
        for name in group.keys() & {*names}:
            import_module(f"bertkit.cli.{group[name][0]}")
    gc.freeze()
    gc.enable()


def say(line: str) -> None:
    """Print a line on the standard error."""
    print(line, file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit: 0 on success, 2 on a user's error, 128 + n after signal n."""
    try:
        words = sys.argv[1:] if arguments is None else arguments
        if arguments is None:  # in a process of its own
            if words[:1] == ["finetune"]:
                end_if_finished()
            import_command(words[:1])
        app = application(next(iter(words), None))
        status = app(words, exit_on_error=False, print_error=False)
    except (BertkitError, CycloptsError) as error:
        who = f"error of rank {rank()}" if rank() else "error"
        say(f"{who}: {' '.join(str(error).split())}")
        sys.exit(2)
    except KeyboardInterrupt as end:
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


# The process --------------------------------------------------------------------------------------

REPEAT_SECONDS = 1.0
"""The time within which a repeated signal is ignored: `timeout` also signals its whole group."""


class EndedError(KeyboardInterrupt):
    """A signal has asked the process to end; code that does not catch Ctrl-C does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number


def end_by_exception() -> None:
    """Make the signals that end a process raise `EndedError`, so that `finally` clauses run.

    Python reports an exception that it cannot propagate, such as one raised in a `__del__`, and
    drops it: it is then raised again. Ignored signals, as under `nohup`, stay ignored.
    """
    last = -REPEAT_SECONDS

    def end(number: int, _: object) -> None:
        nonlocal last
        before, last = last, time.monotonic()
        if last - before > REPEAT_SECONDS:
            raise EndedError(number)

    def raise_again(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, EndedError):
            sys.__unraisablehook__(unraisable)
        elif hasattr(signal, "setitimer"):
            number = unraisable.exc_value.number

            def again(*_: object) -> None:
                raise EndedError(number)

            signal.signal(signal.SIGALRM, again)
            signal.setitimer(signal.ITIMER_REAL, 0.05)

    sys.unraisablehook = raise_again
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, end)


def prepare_streams() -> None:
    """Make standard output and error accept any character; a closed one becomes the null device."""
    for name in ("stdin", "stdout", "stderr"):
        stream: Any = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w"))  # noqa: PTH123, SIM115
        elif name != "stdin" and hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")


def prepare_libraries() -> None:
    """Settle what libraries read when they are imported, also in workers; a user's choice stays."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # threads that wait leave their cores
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    if cpu_quota() < math.inf:  # which OpenMP does not know
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))
    logging.getLogger("matplotlib").setLevel(logging.ERROR)  # it warns of a home that is read-only


def flush_output(end: SystemExit) -> int:
    """Write what is left of the standard output, and return the exit status."""
    status = end.code if isinstance(end.code, int) else 0
    try:
        sys.stdout.flush()
    except OSError as error:  # else Python tries again when it ends, and prints a traceback
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError) and not status:
            say(f"error: cannot write to the standard output: {error.strerror}")
            return 2
    return status


def run_program() -> None:
    """Run `main` as the program `bertkit`; one of several ranks skips Python's own shutdown.

    A gloo thread that releases a collective's tensor while the interpreter shuts down aborts the
    process, and the groups of DDP keep their threads after `destroy_process_group`. By then
    everything has been written and closed.
    """
    prepare_streams()
    prepare_libraries()
    warnings.showwarning = lambda message, *_: say(f"warning: {message}")
    if "serve" not in sys.argv[1:4]:  # the server ends by the signal itself
        end_by_exception()
    elif signal.getsignal(signal.SIGINT) != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except SystemExit as end:
        status = flush_output(end)
    with suppress(OSError):
        sys.stderr.flush()
    gc.freeze()  # Python's shutdown need not search the libraries for garbage, which takes a second
    if not is_alone():
        os._exit(status)
    sys.exit(status)
