"""Giving a model away: ONNX, Hugging Face, sentence-transformers, Google's checkpoints, torch."""
