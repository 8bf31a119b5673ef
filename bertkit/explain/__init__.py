"""One example followed through the whole network, step by step: `bertkit explain`."""
