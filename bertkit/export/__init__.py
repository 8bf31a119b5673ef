"""Export a model to ONNX, Hugging Face, sentence-transformers, Google's format or torch."""
