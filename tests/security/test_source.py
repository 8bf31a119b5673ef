"""What no file of the package may do: run what it reads, unpack archives, reach out by itself."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = sorted((ROOT / "bertkit").rglob("*.py"))

RUNS_CODE = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "yaml"}
REACHES_OUT = {"urllib", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "telnetlib", "socket"}
REACHES_OUT |= {"http", "xmlrpc", "huggingface_hub"}
UNPACKS = {"tarfile"}
ALLOWED = {
    "bertkit/serve/": {"socket", "http"},  # a server, started by a command of its own
    "bertkit/cli/serve.py": {"socket", "http"},
    "bertkit/checkpoints/hub.py": {"huggingface_hub"},  # of files that are no code
    "bertkit/checkpoints/publish.py": {"huggingface_hub"},  # the command push
    "bertkit/checkpoints/save.py": {"pickle"},  # the error that the restricted loader raises
    "bertkit/predict/files.py": {"pickle"},  # of rows, in a temporary file of the process
    "bertkit/processes.py": {"pickle"},  # of functions, for its own worker processes
}
"""Where a folder or a file may import or call one of these all the same."""

CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.save"),
    *("torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "shutil.unpack_archive"),
    *("torch.export.load", "tempfile.mktemp"),
}
METHODS = {"extractall", "extract", "unpack_archive"}


def dotted(node: ast.expr) -> str:
    """`torch.load` of the expression that calls it; "" where it is no plain name."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(node: ast.AST) -> set[str]:
    """The packages that a statement imports."""
    if isinstance(node, ast.Import):
        return {alias.name.partition(".")[0] for alias in node.names}
    if isinstance(node, ast.ImportFrom) and not node.level:
        module = node.module or ""
        return set() if module == "urllib.parse" else {module.partition(".")[0]}  # splits strings
    return set()


def constant(call: ast.Call, keyword: str) -> object:
    """The constant that a call gives a keyword; None where it gives none."""
    for given in call.keywords:
        if given.arg == keyword:
            return given.value.value if isinstance(given.value, ast.Constant) else "computed"
    return None


def problems(tree: ast.AST, place: str) -> Iterator[str]:
    """Everything in a file that is not allowed, with its line."""
    allowed = set().union(*(names for start, names in ALLOWED.items() if place.startswith(start)))
    for node in ast.walk(tree):
        for name in imported(node) & (RUNS_CODE | REACHES_OUT | UNPACKS) - allowed:
            yield f"{place}:{node.lineno}: imports {name}"  # type: ignore[attr-defined]
        if not isinstance(node, ast.Call):
            continue
        name, line = dotted(node.func), f"{place}:{node.lineno}"
        if name in CALLS - allowed or (
            isinstance(node.func, ast.Attribute) and node.func.attr in METHODS
        ):
            yield f"{line}: calls {name}"
        if name == "torch.load" and constant(node, "weights_only") is not True:
            yield f"{line}: torch.load without weights_only=True"
        if constant(node, "allow_pickle") not in (None, False):
            yield f"{line}: allow_pickle"
        if constant(node, "shell") not in (None, False):
            yield f"{line}: a shell"
        if constant(node, "trust_remote_code") not in (None, False):
            yield f"{line}: trust_remote_code"


def test_no_file_runs_what_it_reads() -> None:
    found = [
        problem
        for path in PACKAGE
        for problem in problems(ast.parse(path.read_text()), path.relative_to(ROOT).as_posix())
    ]
    assert found == []


def test_each_of_these_lines_would_be_found() -> None:
    lines = [
        "import pickle",
        "from yaml import load",
        "import urllib.request",
        "import tarfile",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "torch.load(path, weights_only=flag)",
        "np.load(path, allow_pickle=True)",
        "eval(text)",
        "subprocess.run(text, shell=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
        "archive.extractall(folder)",
        "os.system(text)",
    ]
    counts = {line: len(list(problems(ast.parse(line), "bertkit/x.py"))) for line in lines}
    assert counts == dict.fromkeys(lines, 1)


def test_harmless_lines_are_not() -> None:
    fine = "import numpy as np\nmodel.eval()\nnp.load(path, mmap_mode='r')\nre.compile(text)\n"
    fine += "torch.load(path, weights_only=True)\nsubprocess.run([git, 'log'])\n"
    assert not list(problems(ast.parse(fine), "bertkit/x.py"))


def test_every_dependency_is_pinned_for_ci() -> None:
    """constraints.txt has one exact version for each package that pyproject.toml names."""
    import re
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    wanted = [line for group in groups for line in group if "==" not in line]  # those are pinned
    names = {re.match(r"[\w.-]+", line)[0].lower() for line in wanted}  # type: ignore[index]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in pinned), pinned
    assert names - {"bertkit"} <= {line.partition("==")[0].lower() for line in pinned}
