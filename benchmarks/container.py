"""The size of the Dockerfile's image: its installed packages, without what it leaves out.

Nothing is built. The sizes are those of the packages in this environment that the extras of the
Dockerfile need; the base image (Python and Debian) and compiled bytecode come on top.

    python -m benchmarks.container
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from importlib.metadata import distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from benchmarks.record import ROOT, write_result

MEGABYTE = 1_000_000


def arguments(text: str) -> dict[str, list[str]]:
    """Return the words of each quoted ARG of a Dockerfile, and the extras that it installs."""
    found = {name: words.split() for name, words in re.findall(r'ARG (\w+)="(.*)"', text)}
    [extras] = re.findall(r"'\.\[([\w,]+)\]'", text)
    return {**found, "extras": extras.split(",")}


def needed(name: str, extras: Iterable[str]) -> set[str]:
    """Return the packages that a package needs with some extras, itself included."""
    found: set[tuple[str, str]] = set()
    waiting = [(canonicalize_name(name), extra) for extra in ("", *extras)]
    while waiting:
        package, extra = one = waiting.pop()
        if one in found:
            continue
        found.add(one)
        for line in distribution(package).requires or []:
            wanted = Requirement(line)
            if wanted.marker is None or wanted.marker.evaluate({"extra": extra}):
                own = canonicalize_name(wanted.name)
                waiting += [(own, more) for more in ("", *wanted.extras)]
    return {package for package, _ in found}


def sizes(package: str) -> Iterator[tuple[str, int]]:
    """Yield each installed file of a package and its bytes, without compiled bytecode."""
    for file in distribution(package).files or []:
        path = file.locate()
        if file.suffix != ".pyc" and path.is_file():
            yield file.as_posix(), path.stat().st_size


def is_unused(file: str, patterns: Iterable[str]) -> bool:
    """Return whether a file matches a pattern, or lies in a folder that does."""
    return any(fnmatch(file, pattern) or fnmatch(file, f"{pattern}/*") for pattern in patterns)


def main() -> None:
    """Measure and write `results/container.json`."""
    given = arguments((ROOT / "Dockerfile").read_text(encoding="utf-8"))
    kept: dict[str, int] = {}
    everything = 0
    for package in sorted(needed("bertkit", given["extras"])):
        for file, size in sizes(package):
            everything += size
            left_out = package in given["UNUSED_PACKAGES"] or is_unused(file, given["UNUSED_FILES"])
            kept[package] = kept.get(package, 0) + (0 if left_out else size)
    largest = dict(sorted(kept.items(), key=lambda item: -item[1])[:10])
    total = sum(kept.values())
    rows = {
        "all packages": {"megabytes": round(everything / MEGABYTE, 1)},
        "left out": {"megabytes": round((everything - total) / MEGABYTE, 1)},
        "in the image": {"megabytes": round(total / MEGABYTE, 1)},
    }
    details = {name: round(size / MEGABYTE, 1) for name, size in largest.items()}
    print(write_result("container", rows, {"largest": details}))


if __name__ == "__main__":
    main()
