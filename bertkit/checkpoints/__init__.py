"""Model files: Hugging Face directories, Google checkpoints, and what may be loaded from them."""
