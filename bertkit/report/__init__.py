"""Reports of runs as HTML pages."""
