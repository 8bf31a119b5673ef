"""Sphinx: Markdown pages, no network. `make docs` builds them with warnings as errors."""

from __future__ import annotations

from typing import Any

import bertkit

project = "bertkit"
release = version = bertkit.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
myst_enable_extensions = ["colon_fence"]
copybutton_selector = "div.highlight-default pre, div.highlight-python pre"  # not outputs
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = f"bertkit {release}"
html_show_copyright = False
myst_heading_anchors = 3
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_class_signature = "separated"


def keep_colons(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Undo what napoleon takes for a type: the words before a colon. Ours are in annotations."""
    for mark, begin in ((":type: ", ""), (":rtype: ", ":returns: ")):
        typed = [number for number, line in enumerate(lines) if line.startswith(mark)]
        told = [number for number, line in enumerate(lines) if line.startswith(begin)]
        if typed and told:
            words = lines[typed[0]].removeprefix(mark)
            lines[told[0]] = f"{begin}{words}: {lines[told[0]].removeprefix(begin)}"
            del lines[typed[0]]


def setup(app: Any) -> None:
    """Come after napoleon, whose priority is 500."""
    app.connect("autodoc-process-docstring", keep_colons, priority=600)


suppress_warnings = ["ref.python"]
"""Marks in annotations, such as `Read(kind="text")`, are no references."""
