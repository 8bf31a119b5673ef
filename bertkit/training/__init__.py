"""Training: optimizer, loop, checkpoints, journal, pre-training."""
