"""Sphinx: Markdown pages, no network. `make docs` builds them with warnings as errors."""

from __future__ import annotations

import bertkit

project = "bertkit"
release = version = bertkit.__version__
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"bertkit {release}"
html_show_copyright = False
myst_heading_anchors = 3
