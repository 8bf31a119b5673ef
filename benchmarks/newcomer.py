"""A newcomer in an empty folder follows README, overview and how-tos, word by word.

    python -m benchmarks.newcomer                          a new environment, a wheel, every page
    python -m benchmarks.newcomer --python .venv/bin/python --demo FOLDER --pages docs/start.md

The first makes a virtual environment in an empty folder, installs a wheel of this repository with
the versions of constraints.txt, and runs every command and Python block of the pages with small
made-up data (`newcomer_data`). It stops at the first surprise, with page and line: a status that is
not 0, a warning, or output unlike the page's. Then it writes results/newcomer.json. The second uses
an environment and a demo that are there and writes nothing. `newcomer_pages` says what a page's
steps are, `newcomer_visit` how they are taken.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.newcomer_visit import START, Newcomer, SurpriseError
from benchmarks.record import ROOT, write_result

PAGES = (
    START,
    "docs/howto-corpus.md",
    "docs/howto-classify.md",
    "docs/howto-entities.md",
    "docs/howto-answers.md",
    "docs/index.md",
    "README.md",
)


def build_wheel(folder: Path) -> Path:
    """A wheel of this repository."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder)]
    subprocess.run([*command, str(ROOT)], check=True)
    [wheel] = folder.glob("bertkit-*.whl")
    return wheel


def main() -> None:
    """Follow the pages, print what was done, and write it where everything was made anew."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", nargs="+", choices=PAGES, default=PAGES, metavar="PAGE")
    parser.add_argument("--python", type=Path, help="of an environment that has bertkit")
    parser.add_argument("--demo", type=Path, help="the folder of a finished bertkit demo")
    parser.add_argument("--keep", action="store_true", help="keep the folder")
    given = parser.parse_args()
    pages = [page for page in PAGES if page in given.pages]
    if START not in pages and not (given.python and given.demo):
        pages.insert(0, START)
    folder = Path(tempfile.mkdtemp(prefix="newcomer-"))
    wheel = None if given.python else build_wheel(folder / "wheel")
    own = folder / Path(START).stem / ".venv" / "bin"
    programs = given.python.absolute().parent if given.python else own
    newcomer = Newcomer(folder, programs, wheel, given.demo)
    rows = []
    try:
        for page in pages:
            rows.append(newcomer.follow(page, (ROOT / page).read_text(encoding="utf-8")))
            print(rows[-1], flush=True)
    except SurpriseError as surprise:
        sys.exit(f"surprise at {surprise}\nthe folder is {folder}")
    if wheel is not None and given.demo is None and tuple(pages) == PAGES:
        print(write_result("newcomer", rows, {"left_out": newcomer.left_out}))
    if not given.keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
