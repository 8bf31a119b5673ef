"""What is wrong with a pre-training run or a token store: each finding with its number."""
