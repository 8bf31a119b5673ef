"""`bertkit launch`: torchrun, with the settings under which its restarts work."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated

from cyclopts import Parameter

from bertkit.errors import BertkitError

USAGE = "bertkit launch --nproc-per-node 8 [torchrun's options] pretrain RECIPE --store ..."

SETTINGS = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it, workers that were restarted may meet the keys of those before them in the store that
the agent shares with them, and wait in vain (pytorch issue 135712)."""


def launch(
    *words: Annotated[str, Parameter(allow_leading_hyphen=True)],
) -> None:
    """Start a command in several processes that work as one, on this host or on many.

    Everything before the verb goes to torchrun as it is: --nproc-per-node, --nnodes,
    --rdzv-endpoint, --max-restarts, ... Where OMP_NUM_THREADS is not set, the cores are shared out
    evenly among the processes of a host.

    Parameters
    ----------
    words
        torchrun's options, then a bertkit verb with its own, such as
        --nproc-per-node 2 pretrain small --store STORE --out RUN
    """
    given = list(words)
    verb = next((number for number, word in enumerate(given) if word == "pretrain"), None)
    if verb is None:
        raise BertkitError(f"say what to launch: {USAGE}; only pretrain shares its work out")
    environment = {**os.environ, **SETTINGS}
    environment.setdefault("OMP_NUM_THREADS", str(threads_each(given[:verb])))
    command = [sys.executable, "-m", "torch.distributed.run", *given[:verb], "-m", "bertkit"]
    os.execve(sys.executable, [*command, *given[verb:]], environment)  # noqa: S606 - and signals, too


def threads_each(options: Sequence[str]) -> int:
    """Cores of this host for each process that torchrun's options ask for; 1 where unclear."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    parts = [part for option in options for part in option.split("=", 1)]
    for name, value in pairwise(parts):
        if name.replace("_", "-") == "--nproc-per-node":
            return max(1, cores // int(value)) if value.isdigit() and int(value) else 1
    return cores
