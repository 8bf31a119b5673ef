"""Labelled data: files of rows, official formats, and the examples they hold."""
