"""The tasks of the paper: official data or your own → a tuned model, scores and result files."""
