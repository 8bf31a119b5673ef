"""Reproduce the paper's tables and figure: what to run, at which scale, and the results."""
