"""Measurements, side by side in one run, as ratios; each writes results/NAME.json."""
