"""`bertkit launch`: torchrun, with the settings under which its restarts work."""

from __future__ import annotations

import logging
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import Annotated, NamedTuple

from cyclopts import Parameter

from bertkit.errors import BertkitError

USAGE = "bertkit launch --nproc-per-node 8 [torchrun's options] pretrain RECIPE --store ..."

TORCHRUN_SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, workers that were restarted may meet the keys of those before them in the store that
the agent shares with them, and wait in vain (pytorch issue 135712)."""


class Launch(NamedTuple):
    """A command line, divided between torchrun and bertkit."""

    options: list[str]
    """The options of torchrun."""
    words: list[str]
    """The command of bertkit and its flags."""
    processes: str
    """Processes on a host, in torchrun's words: a number, auto, cpu or gpu."""


def launch_command(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True)],
) -> None:
    """Start a command in several processes that work as one, on this host or on many.

    Everything before the command goes to torchrun as it is: --nproc-per-node, --nnodes,
    --rdzv-endpoint, --max-restarts, ... Where OMP_NUM_THREADS is not set, the cores are shared out
    evenly among the processes of a host.

    Parameters
    ----------
    words
        torchrun's options, then a bertkit command with its flags, such as
        --nproc-per-node 2 pretrain small --store STORE --out RUN
    """
    found = parse_words(words)
    environment = {**os.environ, **TORCHRUN_SETTINGS}
    environment.setdefault("OMP_NUM_THREADS", str(threads_each(found.processes)))
    command = [sys.executable, "-m", "torch.distributed.run", *found.options, "-m", "bertkit"]
    # this process becomes torchrun, which so gets the signals that are meant for it
    os.execve(sys.executable, [*command, *found.words], environment)  # noqa: S606


def parse_words(words: Sequence[str]) -> Launch:
    """What is torchrun's and what is bertkit's, by torchrun's own parser.

    Raises:
        BertkitError: an option is not torchrun's, or the command cannot run in several processes.
    """
    from torch.distributed.run import get_args_parser

    parser = get_args_parser()

    def refuse(message: str) -> None:
        raise BertkitError(f"torchrun: {message}; write it as in: {USAGE}")

    parser.error = refuse  # type: ignore[method-assign,assignment]
    known = parser.parse_args(words)
    if reason := why_unsupported(known):
        refuse(reason)
    own = [known.training_script, *known.training_script_args]
    if own[0] != "pretrain":
        raise BertkitError(
            f"only pretrain runs in several processes, not '{own[0]}'; use it as: {USAGE}"
        )
    return Launch([*words[: len(words) - len(own)]], own, known.nproc_per_node)


def why_unsupported(options: Namespace) -> str:
    """What torchrun would only notice while it starts: what is wrong with its options, or "".

    Args:
        options: as torchrun's parser gives them.
    """
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import config_from_args

    if options.no_python or options.run_path:
        return "it is bertkit that is started, so leave --no-python and --run-path out"
    threads = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"  # where it is not set, torch sets it
    logging.disable(logging.WARNING)
    try:
        config, *_ = config_from_args(options)
        port = "" if options.master_port is None else f"host:{options.master_port}"
        for endpoint in (options.rdzv_endpoint, port):
            parse_rendezvous_endpoint(endpoint, 0)
    except (ValueError, AssertionError, RuntimeError, OSError) as error:
        return " ".join(str(error).split())
    finally:
        logging.disable(logging.NOTSET)
        os.environ.pop("OMP_NUM_THREADS")
        if threads is not None:
            os.environ["OMP_NUM_THREADS"] = threads
    return "" if config.nproc_per_node > 0 else "--nproc-per-node must be at least 1"


def threads_each(processes: str) -> int:
    """Cores of this host for each process; 1 where their number is not known yet."""
    known = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if known else os.cpu_count() or 1
    return max(1, cores // int(processes)) if processes.isdecimal() and int(processes) else 1
