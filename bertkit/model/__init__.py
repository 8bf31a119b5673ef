"""The network: attention, encoder, heads, and its directory on disk."""
