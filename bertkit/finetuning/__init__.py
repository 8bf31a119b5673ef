"""Fine-tuning: one run, grids of runs, and their results."""
