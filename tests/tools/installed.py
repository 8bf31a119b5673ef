"""A wheel of this repository, installed into a folder, and somebody who uses it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.markdown import ROOT

IN_WHEEL = ("py.typed", "recipes/base.toml", "serve/web/index.html", "serve/web/page.js")


@dataclass
class Person:
    """Somebody at a terminal, in an empty folder."""

    site: Path
    """The folder into which the wheel is installed."""
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def start(self, *words: str) -> subprocess.Popen[str]:
        """Start a program; its output is piped."""
        kept = ("BERTKIT_", "HF_", "PYTHON")
        given = {key: value for key, value in os.environ.items() if not key.startswith(kept)}
        given |= {"PYTHONPATH": str(self.site), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        given |= {"HF_HOME": str(self.folder / "hub-cache"), "TOKENIZERS_PARALLELISM": "false"}
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=self.folder,
            env=given | self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def bertkit_words(self, line: str) -> list[str]:
        return [str(self.site / "bin" / "bertkit"), *shlex.split(line)]

    def bertkit(self, line: str, *, status: int = 0) -> tuple[str, str]:
        """Run a command to its end and return what it printed and what it said beside that."""
        return finish(self.start(*self.bertkit_words(line)), status)

    def python(self, code: str) -> Any:
        """Run a script and return the JSON value in the last line that it printed."""
        printed, _ = finish(self.start("-c", code), 0)
        return json.loads(printed.splitlines()[-1])

    def table(self, name: str) -> Any:
        import pandas

        return pandas.read_csv(self.folder / name)

    def json(self, name: str) -> Any:
        return json.loads((self.folder / name).read_text())


def finish(process: subprocess.Popen[str], status: int) -> tuple[str, str]:
    """Wait for the end of a process and return what it printed and what it said beside that."""
    printed, said = process.communicate(timeout=200)
    assert process.returncode == status, printed + said
    assert "Traceback" not in said
    assert "Warning" not in said
    return printed, said


def install_wheel(folder: Path) -> Path:
    """Build a wheel without compiled code, and return the folder into which it is installed."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(folder), str(ROOT)]
    subprocess.run(wheel, check=True, env={**os.environ, "CC": "false"})
    [built] = folder.glob("bertkit-*.whl")
    with zipfile.ZipFile(built) as archive:
        assert {f"bertkit/{name}" for name in IN_WHEEL} <= set(archive.namelist())
    install = [*pip, "install", "--no-deps", "--no-index", "--target", str(folder / "site")]
    subprocess.run([*install, str(built)], check=True)
    return folder / "site"
