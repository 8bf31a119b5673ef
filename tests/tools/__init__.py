"""Tools for developers: crashes and an installed wheel."""
