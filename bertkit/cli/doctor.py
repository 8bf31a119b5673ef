"""The `bertkit doctor` command: diagnose a pre-training run or a token store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from bertkit.doctor.findings import SEVERITIES, Finding
from bertkit.doctor.run import diagnose
from bertkit.files import write_json
from bertkit.outputs import FILE


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
    parts = diagnose(path)
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


def summarize_findings(findings: Sequence[Finding]) -> str:
    """Return the numbers of findings by severity, such as `1 problem, 2 notices, 14 ok`."""
    counts = [sum(finding.severity == one for finding in findings) for one in SEVERITIES]
    fine, notices, problems = counts
    return (
        f"{problems} problem{'s' * (problems != 1)}, {notices} notice{'s' * (notices != 1)}, "
        f"{fine} ok"
    )
