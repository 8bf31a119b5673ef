"""A demonstration without downloads: text from this Python, a small BERT and a labelled task."""
