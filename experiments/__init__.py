"""Studies on top of bertkit: the paper's tables, BLiMP, and networks that read images."""
