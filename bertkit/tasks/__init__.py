"""The task types of the paper: data, windows, targets, losses, predictions and metrics."""
