"""What every case of `benchmarks.gpu` is given and yields, and how it measures seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bertkit.model.encoder import ModelConfig
from bertkit.training.device import synchronize

Found = tuple[str, dict[str, Any] | str]
"""The name of a row, and the row or, if it could not be measured, the error."""
Case = Callable[["Setup"], Iterator[Found]]

BASE = ModelConfig(vocab_size=30522)
LARGE = ModelConfig(
    vocab_size=30522, hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
    intermediate_size=4096,
)  # fmt: skip
TINY = ModelConfig(
    vocab_size=1018, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=64, hidden_dropout_prob=0.0,
)  # fmt: skip
"""The network of a dry run, without the CPU's way of dropout, which torch cannot trace."""

DATA_SHEET = {"H100": 989e12, "H200": 989e12}
"""FLOP/s of dense bf16 matrix products that the vendor states for the SXM cards."""


class Setup(NamedTuple):
    """The device of a case, the folder where it writes, and the time when it has to be done."""

    device: torch.device
    out: Path
    """The folder for text beside the results file."""
    end: float
    """The time when the case has to be done, in seconds of `time.monotonic`."""

    @property
    def dry(self) -> bool:
        """Whether this only tries the code, with a tiny network on the CPU."""
        return self.device.type == "cpu"

    def config(self, wanted: ModelConfig = BASE) -> ModelConfig:
        """Return the sizes of the network; the tiny ones in a dry run."""
        return TINY if self.dry else wanted

    def tokens(self, wanted: int) -> int:
        """Return the tokens of a batch; fewer in a dry run."""
        return min(wanted, 256) if self.dry else wanted

    def count(self, wanted: int) -> int:
        """Return how often something is done; once or twice in a dry run."""
        return min(wanted, 2) if self.dry else wanted

    def late(self, needed: float = 5.0) -> bool:
        """Return whether fewer than `needed` seconds are left."""
        return time.monotonic() > self.end - needed

    def data_sheet(self) -> float | None:
        """Return the card's peak in `DATA_SHEET`; None if it is not there."""
        name = "" if self.dry else torch.cuda.get_device_name(self.device)
        return next((peak for card, peak in DATA_SHEET.items() if card in name), None)

    def attempt(self, name: str, measure: Callable[[], dict[str, Any]]) -> Found:
        """Return what a contestant measures, or why it cannot: others do not pay for its errors."""
        if self.late(1.0 if self.dry else TO_COMPILE):
            return name, NO_TIME
        try:
            return name, measure()
        except Exception as error:
            if not self.dry:
                torch.cuda.empty_cache()
            return name, in_one_line(error)

    def seconds_of(self, work: Callable[[], object], least: float = 0.05) -> list[float]:
        """Time some work after two calls that warm up: five times the mean of several calls.

        Args:
            work: queues the work on the device.
            least: the seconds that the calls of one time take together.
        """
        work()
        calls = max(1, round(least / self.seconds_of_one(work)))
        return [self.seconds_of_one(work, calls) for _ in range(self.count(5))]

    def seconds_of_one(self, work: Callable[[], object], calls: int = 1) -> float:
        """Return the mean seconds of some calls, which the host waits for once."""
        synchronize(self.device)
        started = time.perf_counter()
        for _ in range(calls):
            work()
        synchronize(self.device)
        return (time.perf_counter() - started) / calls


NO_TIME = "there was no time left"
TO_COMPILE = 20.0
"""The seconds without which no contestant is begun on a GPU: it may have to be compiled."""


def in_one_line(error: Exception) -> str:
    """Return the kind of an error and its message; of a long one, both ends."""
    message = " ".join(str(error).split())
    if len(message) > 500:
        message = f"{message[:200]} [...] {message[-300:]}"
    return f"{type(error).__name__}: {message}"
