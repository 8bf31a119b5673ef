"""A small slice of `python -m benchmarks.crashes`: the whole of it takes minutes.

It runs in a process of its own, which forks: what pytest has loaded would be in every fork.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_every_kind_of_crash_ends_with_the_same_bytes() -> None:
    """Kills, SIGTERM in a save, damage to checkpoints, shards and runs, a full disk."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.crashes", "--quick"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "BERTKIT_CHECK_SHAPES": "0"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("pretrain, killed", "finetune, killed", "prepare, killed"):
        assert f"{row}: " in done.stdout
    assert "other bytes" not in done.stdout
    assert "stuck" not in done.stdout
