"""Watching a run: what is written down between two journal lines, and a request to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from bertkit.model.encoder import ModelConfig
from bertkit.objectives import Sums
from bertkit.training.device import training_flops
from bertkit.training.distributed import ALONE, Ranks
from bertkit.training.step import StepRecord, check_finite, mean_losses, merge_sums


class MetricWindow:
    """The updates since the last journal line, averaged over all ranks.

    Args:
        ranks: the processes that made them; all have to close the stretch together.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.restart()

    def restart(self) -> None:
        """Begin a new interval now, so that evaluation and saving are not counted as training."""
        self.began = time.perf_counter()
        self.sums: Sums | None = None
        self.counts: dict[str, int] = {}
        self.tokens = self.squares = self.updates = 0
        self.last: StepRecord[Any] | None = None

    def add(self, record: StepRecord[Any]) -> None:
        """Count one update."""
        self.sums = merge_sums(self.sums, record.sums)
        for name, count in record.counts.items():
            self.counts[name] = self.counts.get(name, 0) + count
        self.tokens += record.tokens
        self.squares += record.sum_squared_lengths
        self.updates += 1
        self.last = record

    def close(self) -> dict[str, Any]:
        """The journal's record of the stretch; the next one begins.

        Raises:
            BertkitError: the loss is not a number.
        """
        assert self.sums is not None
        assert self.last is not None
        values = self.ranks.add({name: kept.value for name, kept in self.sums.items()})
        sums = {name: kept._replace(value=values[name]) for name, kept in self.sums.items()}
        means = mean_losses(sums, self.counts)
        norm = float(self.last.gradient_norm)
        seconds = time.perf_counter() - self.began
        check_finite(means["loss"], norm, self.last.step, self.last.learning_rate)
        record = {
            "kind": "step",
            "step": self.last.step,
            **means,
            "learning_rate": self.last.learning_rate,
            "gradient_norm": norm,
            "tokens": self.tokens,
            **self.counts,
            "tokens_per_second": self.tokens / seconds,
            "seconds": seconds,
        }
        self.restart()
        return record


class PretrainMetrics(MetricWindow):
    """A stretch of pre-training, whose record also says the phase and the MFU."""

    def __init__(
        self, model: nn.Module, matmul_peak: float, phase: int, ranks: Ranks = ALONE
    ) -> None:
        super().__init__(ranks)
        self.model, self.matmul_peak, self.phase = model, matmul_peak, phase

    def close(self) -> dict[str, Any]:
        """See `MetricWindow`."""
        squares, record = self.squares, super().close()
        work = sum(
            training_flops(
                config,
                tokens=record["tokens"],
                targets=record["targets"] if has_words else 0,
                sequences=record["sequences"],
                sum_squared_lengths=squares,
            )
            for config, has_words in network_sizes(self.model)
        )
        mfu = work / record["seconds"] / (self.matmul_peak * self.ranks.world)
        return {**record, "phase": self.phase, "mfu": mfu}


def network_sizes(model: nn.Module) -> list[tuple[ModelConfig, bool]]:
    """The encoders of a model in training, and whether a vocabulary projection is on each."""
    generator = getattr(model, "generator", None)
    assert isinstance(model.config, ModelConfig)
    if generator is None:
        return [(model.config, True)]
    return [(model.config, False), (generator.config, True)]


class GracefulStop:
    """Set by Ctrl-C or SIGTERM: the run saves after the current update and ends.

    Args:
        patient: a second signal does nothing. torchrun sends on a signal that a terminal has sent
            to every process already, and kills processes that take too long.
    """

    def __init__(self, *, patient: bool = False) -> None:
        self.patient = patient
        self.received: int | None = None
        self.signal: int | None = None
        """What the run has decided to end by."""

    @property
    def asked(self) -> bool:
        """Whether this process has received a signal."""
        return self.received is not None

    def should_stop(self, all_ranks: bool, ranks: Ranks) -> bool:
        """Whether the run ends now; several ranks end after the same update.

        Args:
            all_ranks: whether any rank was asked, as all know.
            ranks: of the run; one alone need not wait for the next update.
        """
        if all_ranks or (ranks.world == 1 and self.asked):
            self.signal = self.received or signal.SIGTERM
        return self.signal is not None

    @contextmanager
    def install(self) -> Iterator[GracefulStop]:
        """Catch both signals inside the block; a second one acts as usual."""
        before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}

        def remember(number: int, frame: Any) -> None:
            self.received = number
            if not self.patient:
                signal.signal(number, before[signal.Signals(number)])

        try:
            for name in before:
                signal.signal(name, remember)
        except ValueError:  # not the main thread: the caller handles signals
            before = {}
        try:
            yield self
        finally:
            for name, handler in before.items():
                signal.signal(name, handler)
