"""The `bertkit doctor` command: diagnose a pre-training run or a token store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from bertkit.doctor.corpus import check_store, is_store
from bertkit.doctor.findings import SEVERITIES, Finding
from bertkit.doctor.records import RunRecords, is_run, is_tuning
from bertkit.doctor.run import check_run
from bertkit.errors import BertkitError
from bertkit.files import write_json
from bertkit.outputs import FILE
from bertkit.training.journal import Console


def doctor_command(path: Path, *, json: Annotated[Path | None, FILE] = None) -> int:
    """Diagnose a pre-training run or a token store, and advise what to change.

    Every finding states the number behind it. The exit status is 1 if there is a problem.

    Parameters
    ----------
    path
        A run directory of `bertkit pretrain`, finished or not, or a token store.
    json
        The file to write the findings to, with all their numbers.
    """
    with Console() as console:
        parts = diagnose(path, console)
    everything = [finding for _, findings in parts for finding in findings]
    for title, findings in parts:
        print(title)  # noqa: T201
        for finding in findings:
            print(*[f"  {line}" for line in finding.lines()], sep="\n")  # noqa: T201
    print(summarize_findings(everything))  # noqa: T201
    if json is not None:
        write_json(
            json,
            {
                "path": str(path),
                "parts": [
                    {"about": title, "findings": [finding.as_json() for finding in findings]}
                    for title, findings in parts
                ],
            },
        )
    return int(any(finding.severity == "problem" for finding in everything))


def diagnose(path: Path, console: Console) -> list[tuple[str, list[Finding]]]:
    """Return (title, findings) of a store, or of a run followed by those of its stores.

    Stores of the run that cannot be found are left out.
    """
    if is_store(path):
        return [(f"token store {path}", check_store(path, console))]
    if not is_run(path):
        raise BertkitError(
            f"{path} {describe_subject(path)}; name a pre-training run or a token store"
        )
    run = RunRecords(path)
    folders = dict.fromkeys(store.folder for store in run.stores)
    about = [(folder, check_store(folder, console, run.pair)) for folder in folders]
    in_stores = [finding for _, findings in about for finding in findings]
    parts = [(f"run {path}", check_run(run, in_stores))]
    return [*parts, *((f"its token store {folder}", findings) for folder, findings in about)]


def describe_subject(path: Path) -> str:
    """Return a phrase that says what a path is, if it is neither a run nor a store."""
    if not path.exists():
        return "does not exist"
    if path.is_file():
        return "is a file, not the folder of a run or store"
    if is_tuning(path):
        return "is one run of a fine-tuning (see `bertkit report`)"
    kinds = {
        "finetune.json": "is a fine-tuning (see `bertkit report`)",
        "model.safetensors": "is a model directory",
        "vocab.txt": "is a tokenizer",
    }
    for name, kind in kinds.items():
        if (path / name).is_file():
            return kind
    return "holds neither journal.jsonl and recipe.json nor manifest.json"


def summarize_findings(findings: Sequence[Finding]) -> str:
    """Return the numbers of findings by severity, such as `1 problem, 2 notices, 14 ok`."""
    counts = [sum(finding.severity == one for finding in findings) for one in SEVERITIES]
    fine, notices, problems = counts
    return (
        f"{problems} problem{'s' * (problems != 1)}, {notices} notice{'s' * (notices != 1)}, "
        f"{fine} ok"
    )
