"""One GPU measured in three commands; see `__main__`."""
