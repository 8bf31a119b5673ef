"""Tools for developers: golden outputs, crashes, a GPU without values, and an installed wheel."""
