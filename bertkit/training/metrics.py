"""Metrics of the updates between two lines of the journal: means, speed and MFU."""

from __future__ import annotations

import time
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
        ranks: the processes that made them; all have to close the window together.
    """

    def __init__(self, ranks: Ranks = ALONE) -> None:
        self.ranks = ranks
        self.restart()

    def restart(self) -> None:
        """Begin a new window now, so that evaluation and saving are not counted as training."""
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
        """The journal's record of the window; the next one begins.

        Raises:
            BertkitError: the loss is not a number.
        """
        assert self.sums is not None
        assert self.last is not None
        values = self.ranks.all_reduce_scalars(
            {name: kept.value for name, kept in self.sums.items()}
        )
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
    """A window of pre-training, whose record also says the phase and the MFU."""

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
