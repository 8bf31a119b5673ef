"""Export of models to ONNX."""
