"""What the paper reports: `paper.toml` as tables."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources

from bertkit.errors import BertkitError, nearest


@dataclass(frozen=True)
class Claim:
    """An order of two rows in a column, as the paper has it.

    "first" and "last" are those of our table, whose rows or columns a scale may choose.
    """

    text: str
    column: str
    better: str
    worse: str
    argued: bool = False
    """Made in the text; the table has not both rows."""
    needs_pairs: bool = False
    """Means nothing unless next-sentence prediction was learned."""


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper."""

    key: str
    """ "table-5", "figure-5"."""
    title: str
    section: str
    remarks: tuple[str, ...]
    ours: tuple[str, ...]
    """Remarks on what is run here."""
    columns: tuple[str, ...]
    rows: Mapping[str, tuple[float, ...]]
    """A value for each column."""
    claims: tuple[Claim, ...] = ()

    @property
    def name(self) -> str:
        """For reading: "Table 5"."""
        return self.key.replace("-", " ").capitalize()

    def value(self, row: str, column: str) -> float | None:
        """The paper's value, or None where it has none."""
        if row not in self.rows or column not in self.columns:
            return None
        return self.rows[row][self.columns.index(column)]


@cache
def paper_tables() -> dict[str, PaperTable]:
    """All tables by key."""
    text = resources.files("bertkit.reproduce").joinpath("paper.toml").read_text("utf-8")
    return {
        key: PaperTable(
            key=key,
            title=values["title"],
            section=values["section"],
            remarks=tuple(values["remarks"]),
            ours=tuple(values.get("ours", ())),
            columns=tuple(values["columns"]),
            rows={name: tuple(row) for name, row in values["rows"].items()},
            claims=tuple(Claim(**claim) for claim in values.get("claims", ())),
        )
        for key, values in tomllib.loads(text).items()
    }


def find_table(name: str) -> PaperTable:
    """A table by key, or by number alone ("5").

    Raises:
        BertkitError: there is no such table.
    """
    tables = paper_tables()
    key = f"table-{name}" if name.isdigit() else name.lower()
    if key not in tables:
        hint = nearest(key, tables)
        raise BertkitError(f"the paper has no '{name}'{hint}; choose {', '.join(tables)} or all")
    return tables[key]
