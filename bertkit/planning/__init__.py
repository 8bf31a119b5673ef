"""What a pre-training run takes: memory, speed, time and cost."""

GIB = 2**30
HERE = "here"
"""The name of the machine that plans, which is measured."""
