"""Fill documents with numbers, tables and charts of results files (rule 5: none is made by hand).

A document holds pairs of markers. Between `<!-- results:NAME -->` and `<!-- /results -->` stands a
table of results/NAME.json, between `<!-- value:NAME/ROW/COLUMN -->` and `<!-- / -->` one number of
it; of several runs, this is the median. `benchmarks/charts.py` draws the charts.

    python -m benchmarks.tables
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import charts

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"(<!-- results:([\w-]+) -->\n).*?(<!-- /results -->)", re.DOTALL)
VALUE = re.compile(r"(<!-- value:([\w-]+)/([^/]+)/(\w+) -->).*?(<!-- / -->)", re.DOTALL)
SPREAD = ("median", "lowest", "highest")
PERCENT = re.compile(r"(?:^|_)(?:share|accuracy|recall|mfu)(?:$|_)")

Row = dict[str, Any]


def documents() -> list[Path]:
    """Return the files that may hold result tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(text: str, results: Path) -> str:
    """Return a document with all tables and numbers made anew from the results of a folder."""
    text = VALUE.sub(
        lambda match: f"{match[1]}{single(results, *match.group(2, 3, 4))}{match[5]}", text
    )
    return SECTION.sub(lambda match: f"{match[1]}{render(results, match[2])}\n{match[3]}", text)


def single(results: Path, name: str, row: str, column: str) -> str:
    """Return one number of a results file as text."""
    result = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    content = result["rows"][row][column]
    return value(column, content["median"] if is_spread(content) else content)


def render(results: Path, name: str) -> str:
    """Return the table and the caption of one results file as Markdown."""
    result = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))
    if "outcome" in result:  # of the paper's tables
        return "\n".join([*claims(result["outcome"]["tables"]), "", caption(result, [])])
    rows = [flat(row) for row in named(result["rows"])]
    shown, constants = split_constants(rows)
    lines = upright(rows[0]) if len(rows) == 1 else across(shown)
    notes = [f"{heading(key)}: {value(key, content)}" for key, content in constants.items()]
    return "\n".join([*lines, "", caption(result, [*notes, *origins(result)])])


def claims(tables: Sequence[Row]) -> list[str]:
    """Return what the paper says of each table, and whether these runs agree."""
    rows = [
        [result["name"], claim["text"], claim["column"], claim["verdict"]]
        + [rounded(claim[key]) for key in ("difference", "deviation")]
        for result in tables
        for claim in result["claims"]
    ]
    columns = ["paper", "statement", "measured by", "here", "difference", "deviation over seeds"]
    return table(columns, rows)


def origins(result: Row) -> list[str]:
    """Return the origins of a file's runs, or, of a comparison, who did not take part."""
    if runs := result.get("runs"):
        sides = [side for task in runs.values() for side in task.values()]
        made = dict.fromkeys(made for side in sides for made in side["made"])
        split = [text.partition(", ") for text in made]
        said = [f"{short(commit)} in {precision}" for commit, _, precision in split]
        return [f"runs of {', '.join(said)}"]
    skipped = result.get("skipped") or {}
    return [f"without {name}: {' '.join(why.split())}" for name, why in skipped.items()]


def short(commit: object) -> str:
    """Return a commit as a reader sees it."""
    hash_, _, changes = str(commit).partition("+")
    return hash_[:10] + (" with changes" if changes else "")


def named(rows: Any) -> list[Row]:
    """Return rows as a list; a mapping from name to row becomes rows that begin with their name."""
    if isinstance(rows, list):
        return rows
    return [{"case": name, **row} for name, row in rows.items()]


def flat(row: Row, prefix: str = "") -> Row:
    """Return a row with one level of columns, keeping spreads but no lists (curves, samples)."""
    columns: Row = {}
    for key, content in row.items():
        if isinstance(content, dict) and not is_spread(content):
            columns |= flat(content, f"{prefix}{key} ")
        elif not isinstance(content, list):
            columns[f"{prefix}{key}"] = content
    return columns


def is_spread(content: Any) -> bool:
    """Return whether a value is a median with its lowest and highest."""
    return isinstance(content, dict) and set(SPREAD) <= set(content)


def split_constants(rows: Sequence[Row]) -> tuple[list[Row], Row]:
    """Separate columns that differ from those that are the same in every row of several."""
    if len(rows) < 2:
        return list(rows), {}
    first = rows[0]
    constants = {
        key: content
        for key, content in first.items()
        if all(key in row and row[key] == content for row in rows)
    }
    varying = [{key: row[key] for key in row if key not in constants} for row in rows]
    return varying, constants


def across(rows: Sequence[Row]) -> list[str]:
    """Return a table with one line per row."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return table(
        [heading(column) for column in columns],
        [[value(column, row.get(column)) for column in columns] for row in rows],
    )


def upright(row: Row) -> list[str]:
    """Return a single row as a table of two columns."""
    return table(["what", "value"], [[heading(key), value(key, row[key])] for key in row])


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table."""
    return [f"| {' | '.join(cells)} |" for cells in (columns, ["---"] * len(columns), *rows)]


def heading(key: str) -> str:
    """Return a key as words."""
    return key.replace("_", " ").replace("|", "\\|")


def value(key: str, content: Any) -> str:
    """Return a value as text, rounded for reading; shares and accuracies are in percent."""
    if is_spread(content):
        median, lowest, highest = (value(key, content[name]) for name in SPREAD)
        return f"{median} ({lowest} to {highest})"
    if isinstance(content, bool | None):
        return {True: "yes", False: "no", None: ""}[content]
    if not isinstance(content, int | float):
        return " ".join(str(content).split()).replace("|", "\\|")
    is_share = bool(PERCENT.search(key.replace(" ", "_"))) and 0 <= content <= 1
    return f"{content:.1%}" if is_share else rounded(content)


def rounded(number: float) -> str:
    """Return a number as text: integers in full, others with about three digits."""
    if isinstance(number, int):
        return f"{number:,}"
    forms = ((100, ",.0f"), (10, ".1f"), (1, ".2f"), (0, ".3g"))
    return format(number, next(form for least, form in forms if abs(number) >= least))


def caption(result: Row, notes: Sequence[str]) -> str:
    """Return the file's name, and when, with what and on what its numbers were measured."""
    parts = [str(result.get("date", ""))[:10], f"bertkit {result.get('bertkit', '?')}"]
    if commit := result.get("commit"):
        parts[-1] += f" at {short(commit)}"
    if torch := (result.get("versions") or {}).get("torch"):
        parts.append(f"torch {torch}")
    parts += list(machine(result))
    text = ", ".join(part for part in parts if part)
    file = f"results/{result['name']}.json" if "name" in result else ""
    return f"*{'; '.join(part for part in [file, text, *notes] if part)}.*"


def machine(details: Row) -> Iterator[str]:
    """Yield the parts of the hardware in words."""
    if cpu := details.get("cpu"):
        yield " ".join(str(cpu).split())
    for key, unit in (("cores", "core"), ("threads", "thread")):
        if count := details.get(key):
            yield f"{count} {unit}{'' if count == 1 else 's'}"
    yield from map(str, details.get("devices") or ())


def stale(paths: Sequence[Path], results: Path) -> list[Path]:
    """Return the documents whose tables and numbers are not those of the results files."""
    texts = {path: path.read_text(encoding="utf-8") for path in paths}
    return [path for path, text in texts.items() if filled(text, results) != text]


def main() -> None:
    """Rewrite tables, numbers and charts."""
    results, images = ROOT / "results", ROOT / "docs" / "images"
    texts, drawings = stale(documents(), results), charts.stale(results, images)
    for path in texts:
        path.write_text(filled(path.read_text(encoding="utf-8"), results), encoding="utf-8")
    for path, svg in drawings.items():
        path.write_text(svg, encoding="utf-8")
    names = [str(path.relative_to(ROOT)) for path in [*texts, *drawings]]
    print("rewritten:", ", ".join(names) or "nothing")


if __name__ == "__main__":
    main()
