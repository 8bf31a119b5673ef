"""The network: attention, the encoder, its heads, and the modules that pool and classify."""
