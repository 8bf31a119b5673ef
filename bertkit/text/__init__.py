"""Raw text: documents and sentences."""
