"""WordPiece: text normalisation, learning a vocabulary, and converting text to ids and back."""
