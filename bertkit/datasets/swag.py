"""SWAG's CSV files (BERT section 4.4): a sentence, the start of the next and four endings for it.

Sentence A is `sent1`; sentence B of a choice is `sent2` followed by an ending.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bertkit.datasets.examples import ChoiceExample
from bertkit.datasets.tabular import Fields, has_columns, numbered_rows, require_all
from bertkit.errors import BertkitError
from bertkit.files import write_text
from bertkit.text.lines import TextCounts

SWAG_SITE = "https://github.com/rowanz/swagaf/tree/master/data"
ENDINGS = ("ending0", "ending1", "ending2", "ending3")
SWAG_COLUMNS = ("sent1", "sent2", *ENDINGS)


def read_swag(
    path: str | Path,
    counts: TextCounts,
    *,
    labelled: bool | None = None,
    format: str = "auto",  # noqa: A002
    rows: dict[str, Fields] | None = None,
) -> list[ChoiceExample]:
    """Read the rows of train.csv, val.csv or test.csv; in test.csv every label is None.

    The ID is the number of the row, from 0: `video-id` and `fold-ind` are not unique.

    Args:
        path: the file.
        counts: collects empty texts, which are kept.
        labelled: True requires labels, False ignores them, None reads them if the file has them.
        format: the format of a file with the same columns; see `tabular.numbered_rows`.
        rows: if given, gets all fields of the row of every input, by its `place`.

    Raises:
        BertkitError: the file is missing or a different one, it lacks required labels, a row is
            ragged (its prediction would be missing, and no official file has one), or a label is
            not an index; the message names the file or the line.
    """
    has_labels = labelled is not False and has_columns(path, ["label"], format)
    if labelled and not has_labels:
        raise BertkitError(
            f"{path} has no column 'label', like test.csv of SWAG; train and score on train.csv "
            f"and val.csv"
        )
    found = TextCounts()
    inputs = []
    columns = [*SWAG_COLUMNS, *(["label"] if has_labels else [])]
    whole = rows is not None
    for number, place, row in numbered_rows(path, found, format, columns=columns, whole=whole):
        if rows is not None:
            rows[place] = row
        fields = {k: "" if v is None else str(v).strip() for k, v in row.items()}
        if not all((fields["sent1"], *(fields[name] for name in ENDINGS))):
            found.note("empty text, kept", place)
        choices = tuple(f"{fields['sent2']} {fields[name]}".strip() for name in ENDINGS)
        if has_labels and fields["label"] not in ("0", "1", "2", "3"):
            raise BertkitError(
                f"{place}: the label is '{fields['label']}', not 0, 1, 2 or 3; correct the row"
            )
        label = int(fields["label"]) if has_labels else None
        inputs.append(ChoiceExample(str(number), fields["sent1"], choices, label, place))
    if not inputs:
        raise BertkitError(f"{path} has no rows; get it again from {SWAG_SITE}")
    require_all(found, f"every row needs its prediction; get the file again from {SWAG_SITE}")
    counts += found
    return inputs


def write_swag_predictions(path: Path, ids: Sequence[str], choices: Sequence[int]) -> None:
    """Write a file for the leaderboard: a CSV with the header `pred` and one index per line.

    The IDs are all of those from `read_swag`, in the order of the file.

    Raises:
        BertkitError: the IDs are not 0, 1, 2, ... in order, or an index is not 0 to 3.
    """
    if len(ids) != len(choices):
        raise BertkitError(f"{len(choices)} predictions for {len(ids)} rows; predict all of them")
    for number, (name, choice) in enumerate(zip(ids, choices, strict=True)):
        if name != str(number):
            raise BertkitError(
                f"row {number} of the predictions has the ID '{name}'; give every row of the file, "
                f"in its order"
            )
        if choice not in range(len(ENDINGS)):
            raise BertkitError(f"the prediction for row {number} is {choice}, not 0, 1, 2 or 3")
    write_text(path, "pred\n" + "".join(f"{int(choice)}\n" for choice in choices))
