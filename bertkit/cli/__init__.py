"""One module a verb of the command line, loaded when the verb is used."""
