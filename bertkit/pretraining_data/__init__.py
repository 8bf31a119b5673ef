"""Pre-training examples: sentence pairs, masking, packed batches and the endless batch stream."""
