"""Benchmarks, which compare contestants of one run by ratios; each writes results/NAME.json."""
