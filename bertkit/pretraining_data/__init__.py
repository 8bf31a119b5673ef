"""Pre-training examples: pairs, masks, packed batches, the endless stream of them."""
