"""`bertkit launch`: run torchrun with the settings that make its restarts work."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from cyclopts import Parameter

from bertkit.errors import BertkitError
from bertkit.processes import usable_cores

USAGE = "bertkit launch --nproc-per-node 8 [torchrun's options] pretrain RECIPE --store ..."

TORCHRUN_SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, restarted workers may find the keys of earlier workers in the store that the agent
shares with them, and wait forever (pytorch issue 135712)."""


class Launch(NamedTuple):
    """A command line, divided between torchrun and bertkit."""

    options: list[str]
    """The options for torchrun."""
    words: list[str]
    """The bertkit command and its flags."""
    processes: int
    """The processes on this host."""


def launch_command(*words: Annotated[str, Parameter(allow_leading_hyphen=True)]) -> None:
    """Run a command in several processes that work together, on one host or on several.

    Everything before the command is passed to torchrun: --nproc-per-node, --nnodes,
    --rdzv-endpoint, --max-restarts, ... If OMP_NUM_THREADS is not set, the cores of a host are
    divided evenly among its processes.

    Parameters
    ----------
    words
        torchrun's options, then a bertkit command with its flags, such as
        --nproc-per-node 2 pretrain small --store STORE --out RUN
    """
    found = parse_words(words)
    environment = {**os.environ, **TORCHRUN_SETTINGS}
    environment.setdefault("OMP_NUM_THREADS", str(threads_each(found.processes)))
    command = [sys.executable, "-m", "bertkit.cli.launch", *found.options, "-m", "bertkit"]
    # torchrun replaces this process, so that it receives the signals sent to it
    os.execve(sys.executable, [*command, *found.words], environment)  # noqa: S606


def run_torchrun() -> None:
    """Run torchrun, and exit with the status of the process that failed first, or of a signal."""
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import main

    try:
        main(sys.argv[1:])
    except SignalException as stopped:
        sys.exit(128 + stopped.sigval)
    except ChildFailedError as failed:  # the process has said why, unless it was killed
        rank, failure = failed.get_first_failure()
        if failure.exitcode >= 0:
            sys.exit(failure.exitcode)
        sys.stderr.write(
            f"error: the process of rank {rank} was killed by {failure.signal_name()}\n"
        )
        sys.exit(128 - failure.exitcode)


def parse_words(words: Sequence[str]) -> Launch:
    """Divide a command line between torchrun and bertkit with torchrun's parser.

    Raises:
        BertkitError: torchrun rejects an option, or the command cannot run in several processes.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()

    def refuse(message: str) -> None:
        raise BertkitError(f"torchrun: {message}; write it as in: {USAGE}")

    parser.error = refuse  # type: ignore[method-assign,assignment]
    known = parser.parse_args(words)
    try:
        processes = processes_here(known)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        refuse(" ".join(str(error).split()))
    own = [known.training_script, *known.training_script_args]
    if own[0] != "pretrain":
        raise BertkitError(
            f"only pretrain runs in several processes, not '{own[0]}'; use it as: {USAGE}"
        )
    return Launch([*words[: len(words) - len(own)]], own, processes)


def processes_here(options: Namespace) -> int:
    """Return how many processes torchrun will start on this host, or raise what it would raise."""
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import config_from_args

    if options.no_python or options.run_path:
        raise ValueError("--no-python and --run-path cannot be used: the program is bertkit")
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # else torch would set it
    logging.disable(logging.WARNING)
    try:
        config, *_ = config_from_args(options)
        port = "" if options.master_port is None else f"host:{options.master_port}"
        for endpoint in (options.rdzv_endpoint, port):
            parse_rendezvous_endpoint(endpoint, 0)
    finally:
        logging.disable(logging.NOTSET)
        os.environ.pop("OMP_NUM_THREADS")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
    if config.nproc_per_node < 1:
        raise ValueError("--nproc-per-node must be at least 1")
    return config.nproc_per_node


def threads_each(processes: int) -> int:
    """Return the cores of this host per process, at least 1."""
    return max(1, usable_cores() // processes)


if __name__ == "__main__":
    run_torchrun()
