"""Pre-training: the recipe, the training loop, the optimizer, checkpoints and the journal."""
