"""The command `bertkit submit`, which packs the GLUE predictions of several runs into glue.zip."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from bertkit.datasets.submissions import ZIPPED, write_glue_zip
from bertkit.errors import BertkitError
from bertkit.outputs import FILE, Read

SUBMISSIONS = Read("data", ("*.tsv",))


def submit_command(
    *runs: Annotated[Path, SUBMISSIONS], out: Annotated[Path, FILE] = Path("glue.zip")
) -> None:
    """Pack GLUE predictions into the zip file for its server.

    Every run of `bertkit finetune` on a GLUE task writes its file to RUN/results; the file of AX
    comes from `bertkit evaluate RUN --task ax --data GLUE --split test --out FOLDER`. Each file is
    checked. WNLI may be missing: it is filled with its more frequent label, as the paper leaves
    WNLI out.

    Parameters
    ----------
    runs
        The folders that contain such files, at any depth.
    out
        The zip file to write.
    """
    found: dict[str, Path] = {}
    for run in runs:
        if not run.is_dir():
            raise BertkitError(f"{run} is not a folder; name the folders of the runs")
        for path in sorted(run.rglob("*.tsv")):
            if path.name in found and not path.samefile(found[path.name]):
                raise BertkitError(
                    f"{path} and {found[path.name]} are both {path.name}; name one of the folders"
                )
            if path.name in ZIPPED:
                found[path.name] = path
    for remark in write_glue_zip(found, out):
        print(remark)  # noqa: T201
    print(f"{out}: {len(ZIPPED)} files, {len(found)} of them from these runs")  # noqa: T201
