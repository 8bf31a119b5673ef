"""WordPiece: normalisation, learning a vocabulary, text to ids and back."""
