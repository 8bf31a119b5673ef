"""The token store: a corpus as memory-mapped shards of token ids."""
