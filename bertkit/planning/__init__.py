"""Estimates of a pre-training run: memory, speed, time and cost."""

GIB = 2**30
HERE = "here"
"""The name of the machine that runs the planner, which is measured."""
