"""What a pre-training run takes: memory, speed, time and cost."""
