"""What every report is made of: one HTML page that needs nothing else, its style and tables."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from bertkit.files import read_json

STYLE = """
:root{color-scheme:light dark;--page:#fff;--card:#f4f6f8;--text:#1c1e21;--grid:#d8dce2;
 --training:#2563a8;--held-out:#c8501e;--baseline:#6f7680}
@media(prefers-color-scheme:dark){:root{--page:#15171a;--card:#20242a;--text:#e6e8eb;--grid:#3a3f47;
 --training:#6cb0f5;--held-out:#ff9a5c;--baseline:#9aa2ad}}
body{background:var(--page);color:var(--text);font:16px/1.5 system-ui,sans-serif;margin:0 auto;
 max-width:64rem;padding:1rem}
h1{font-size:1.6rem}h2{font-size:1.25rem;margin-top:2rem}h3{font-size:1rem;margin:0}
.cards,.plots{display:grid;gap:1rem;grid-template-columns:repeat(auto-fit,minmax(min(11rem,100%),1fr))}
.plots{grid-template-columns:repeat(auto-fit,minmax(min(24rem,100%),1fr))}
.cards div,figure{background:var(--card);border-radius:.5rem;margin:0;padding:.75rem 1rem}
.cards dt,.cards dd.than{color:var(--baseline);font-size:.85rem}.cards dd{margin:0}
.cards dd.value{font-size:1.5rem;font-variant-numeric:tabular-nums}
svg{display:block;height:auto;width:100%}svg *{stroke-linecap:butt;stroke-linejoin:round}
svg text{font-family:system-ui,sans-serif!important}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem}
td,th{border-bottom:1px solid var(--grid);padding:.25rem 1rem .25rem 0;text-align:left;
 vertical-align:top}details td:last-child{overflow-wrap:anywhere}.named td{white-space:nowrap}
.remarks td:last-child,.texts td:nth-child(n+5){min-width:12rem;overflow-wrap:anywhere;
 white-space:normal}
section h3{margin:1rem 0 .25rem}summary{cursor:pointer;font-weight:600;margin:.75rem 0}
"""


def html_page(title: str, parts: Sequence[str]) -> str:
    """A whole page.

    Args:
        title: of the browser's tab; plain text.
        parts: of the body, as HTML.
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>"
        + "\n".join(part for part in parts if part)
        + "</main></body></html>\n"
    )


def field_title(name: str) -> str:
    """A field's name for reading."""
    return name.replace("_", " ")


def card_list(shown: Sequence[tuple[str, str, str]]) -> str:
    """Headline numbers: (what, value, what to hold against it) of each, as plain text."""
    body = "".join(
        f'<div><dt>{escape(label)}</dt><dd class="value">{escape(value)}</dd>'
        f'<dd class="than">{escape(than)}</dd></div>'
        for label, value, than in shown
    )
    return f'<dl class="cards">{body}</dl>'


def drawing(title: str, svg: str) -> str:
    """A drawing with its title above it."""
    return f"<figure><h3>{escape(title)}</h3>{svg}</figure>"


def folded(title: str, body: str) -> str:
    """Something that is shown when the reader asks for it."""
    return f"<details><summary>{escape(title)}</summary>{body}</details>"


def field_table(value: Any) -> str:
    """Nested JSON as an HTML table of dotted names and values."""
    return html_table(["field", "value"], [list(row) for row in flatten_fields(value)])


def optional_json(path: Path) -> Any:
    """A JSON file's value, or None where there is no such file."""
    return read_json(path) if path.is_file() else None


def flatten_fields(value: Any, name: str = "") -> list[tuple[str, Any]]:
    """Nested JSON as (dotted name, value); a list of plain values stays one value."""
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        children = [(str(i), item) for i, item in enumerate(value)]
    else:
        return [(name, value)]
    return [
        row
        for key, item in children
        for row in flatten_fields(item, f"{name}.{key}" if name else key)
    ]


def html_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """An HTML table of any values."""
    head = "".join(f'<th scope="col">{escape(str(column))}</th>' for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape(html_cell(value))}</td>" for value in row) + "</tr>\n"
        for row in rows
    )
    head = f"<thead><tr>{head}</tr></thead>"
    return f'<div class="wide"><table>{head}<tbody>{body}</tbody></table></div>'


def html_cell(value: Any) -> str:
    """A value in a table: text as it is, numbers short, the rest as in JSON."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return ", ".join(html_cell(item) for item in value)
    return json.dumps(value, ensure_ascii=False)
