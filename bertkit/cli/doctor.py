"""The `bertkit doctor` command: diagnose a pre-training run or a token store."""

from __future__ import annotations

from pathlib import Path

from bertkit.doctor.findings import SEVERITIES
from bertkit.doctor.run import diagnose
from bertkit.files import write_json


def doctor_command(path: Path, *, json: Path | None = None) -> int:
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
    fine, notices, problems = (
        sum(finding.severity == one for finding in everything) for one in SEVERITIES
    )
    print(  # noqa: T201
        f"{problems} problem{'s' * (problems != 1)}, {notices} notice{'s' * (notices != 1)}, "
        f"{fine} ok"
    )
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
    return int(problems > 0)
