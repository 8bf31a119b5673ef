"""A demonstration without a download: text from this Python, a small BERT, a labelled task."""
