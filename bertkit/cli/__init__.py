"""The commands, one module each, imported when the command is used."""
