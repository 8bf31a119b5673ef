"""Programs for developers: golden outputs."""
