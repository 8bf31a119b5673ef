from __future__ import annotations

from tests.networks import batch, config, minilm, padded, twin

__all__ = ["batch", "config", "minilm", "padded", "twin"]
