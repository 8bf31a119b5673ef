"""From scores to verdicts and pages."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bertkit.checkpoints.pretrained import model_name
from bertkit.reproduce.outcome import claim_facts, spread
from bertkit.reproduce.paper import Claim
from bertkit.reproduce.report import as_markdown, as_page, format_cell, table_notes

CLAIM = Claim("a is better", "x", "A", "B")


def cell(row: str, column: str, values: list[float], **more: Any) -> dict[str, Any]:
    found = {
        "row": row,
        "column": column,
        "task": "mrpc",
        "metric": "accuracy",
        "paper": 80.0,
        "complete": True,
        "stands_in": False,
        "given": "",
    }
    return {
        **found,
        "values": values,
        "missing": "" if values else "not run",
        **spread(values),
        **more,
    }


@pytest.mark.parametrize(
    ("better", "worse", "verdict"),
    [
        ([70.0, 71.0, 72.0], [60.0, 61.0, 62.0], "holds"),
        ([60.0, 61.0, 62.0], [70.0, 71.0, 72.0], "reversed"),
        ([70.0, 71.0, 72.0], [69.9, 70.5, 74.0], "not clear"),
        ([71.0, 71.0], [71.0, 71.0], "not clear"),
        ([71.0], [70.0], "too few seeds"),
        ([], [70.0], "not run"),
    ],
)
def test_verdicts(better: list[float], worse: list[float], verdict: str) -> None:
    assert claim_facts(CLAIM, [cell("A", "x", better), cell("B", "x", worse)])["verdict"] == verdict


def test_no_verdict_before_all_seeds_and_without_what_it_is_about() -> None:
    better, worse = cell("A", "x", [70.0, 71.0]), cell("B", "x", [60.0, 61.0])
    assert claim_facts(CLAIM, [{**better, "complete": False}, worse])["verdict"] == "too few seeds"
    pairs = replace(CLAIM, needs_pairs=True)
    assert claim_facts(pairs, [better, worse], pairs_learned=False)["verdict"] == "not learned"
    assert claim_facts(pairs, [better, worse], pairs_learned=True)["verdict"] == "holds"
    stood_in = claim_facts(CLAIM, [{**better, "stands_in": True}, worse])
    assert stood_in["task"] == "mrpc"


def test_no_verdict_where_every_run_of_a_row_learned_nothing() -> None:
    cells = [cell("A", "x", [70.0, 71.0]), cell("B", "x", [0.0, 0.0], degenerate=2)]
    assert claim_facts(CLAIM, cells)["verdict"] == "degenerate"
    assert claim_facts(CLAIM, [cells[0], {**cells[1], "degenerate": 1}])["verdict"] == "holds"


def test_a_model_is_called_by_its_run(tmp_path: Path) -> None:
    assert model_name(tmp_path / "laws" / "model") == "laws"
    assert model_name(tmp_path / "laws") == "laws"


def test_first_and_last_column() -> None:
    cells = [
        cell("A", "1", [1.0, 1.1]),
        cell("B", "1", [2.0, 2.1]),
        cell("A", "2", [4.0, 4.1]),
        cell("B", "2", [3.0, 3.1]),
    ]
    verdicts = {
        column: claim_facts(Claim("", column, "A", "B"), cells)["verdict"]
        for column in ("first", "last")
    }
    assert verdicts == {"first": "reversed", "last": "holds"}


def test_first_and_last_row_and_one_network_each() -> None:
    """Of sizes a scale has its own; perplexities are of one pre-training, and lower is better."""
    cells = [cell(row, "x", [value, value + 1]) for row, value in (("s", 1.0), ("m", 9.0))]
    cells += [cell(row, "p", [v], metric="perplexity") for row, v in (("s", 30.0), ("m", 20.0))]
    found = {
        column: claim_facts(Claim("", column, "last", "first"), cells) for column in ("x", "p")
    }
    assert found["x"]["verdict"] == "holds"
    assert (found["p"]["verdict"], found["p"]["difference"]) == ("holds once", 10.0)
    backwards = claim_facts(Claim("", "p", "first", "last"), cells)
    assert backwards["verdict"] == "reversed once"
    begun = [cells[2], {**cells[3], "complete": False}]
    assert claim_facts(Claim("", "p", "last", "first"), begun)["verdict"] == "too few seeds"
    repeated = [
        cell(row, "p", values, metric="perplexity")
        for row, values in (("s", [30.0, 31.0]), ("m", [20.0, 21.0]), ("l", [20.5, 21.5]))
    ]
    found = claim_facts(Claim("", "p", "m", "first"), repeated)
    assert (found["verdict"], found["difference"]) == ("holds", 10.0)
    assert claim_facts(Claim("", "p", "last", "m"), repeated)["verdict"] == "not clear"


def test_a_given_model_is_not_compared_with_the_scales_own() -> None:
    given = cell("A", "x", [70.0, 71.0], given="minilm")
    own = cell("B", "x", [60.0, 61.0])
    assert claim_facts(CLAIM, [given, own])["verdict"] == "not comparable"
    both = [given, {**own, "given": "minilm"}]
    assert claim_facts(CLAIM, both)["verdict"] == "holds"
    found = {**outcome()["tables"][0], "cells": [given, own]}
    assert "The given model minilm replaces the scale's network in: A." in table_notes(found)


def test_a_value_says_its_spread_and_the_papers() -> None:
    assert (
        format_cell(cell("A", "x", [70.0, 72.0, 71.0])) == "**71.0** (70.0 to 72.0, n=3); paper 80"
    )
    assert format_cell(cell("A", "x", [70.0])) == "**70.0**; paper 80"
    assert format_cell(cell("A", "x", [])) == "not run; paper 80"
    gone = cell("A", "x", [], missing="every run diverged")
    assert format_cell(gone) == "diverged; paper 80"
    assert "2 degenerate" in format_cell(cell("A", "x", [1.0, 1.0], degenerate=2))
    assert format_cell(None) == "–"


def outcome() -> dict[str, Any]:
    cells = [cell("A", "x", [70.0, 71.0]), cell("B", "x", [])]
    table = {
        "key": "table-5", "name": "Table 5", "title": "T <&>", "section": "5.1",
        "remarks": ["a | b"], "columns": ["x"], "rows": ["A", "B"], "paper_columns": ["x"],
        "paper_rows": {"A": [80.0], "C": [81.5]}, "cells": cells,
        "claims": [claim_facts(CLAIM, cells)],
    }  # fmt: skip
    curve = [
        cell(row, step, [float(i), i + 1.0])
        for row in ("Masked LM", "Left-to-right LM")
        for i, step in enumerate(("500", "1,000"))
    ]
    figure = {
        **table, "key": "figure-5", "rows": ["Masked LM", "Left-to-right LM"],
        "columns": ["500", "1,000"], "cells": curve, "claims": [],
    }  # fmt: skip
    facts = {
        "model": "", "failure": "", "flags": ["--x", "1"], "updates": 10, "finished": False,
        "held_out": {"mlm_loss": 2.5},
    }  # fmt: skip
    scale = {"name": "s", "title": "s: small", "seeds": 2}
    return {
        "scale": scale,
        "remarks": ["so it is"],
        "tables": [table, figure],
        "networks": {"bert": facts},
    }


def test_markdown_says_what_was_run_and_what_not() -> None:
    text = as_markdown(outcome())
    assert "1 of 2 cells were run." in text
    assert "| B | not run; paper 80 |" in text
    assert "| paper: C | 81.5 |" in text
    assert "| finds: a is better | x | not run | – | – |" in text
    assert "10, unfinished" in text
    assert "so it is" in text


def test_page_is_escaped_and_draws_the_figure() -> None:
    text = as_page(outcome())
    assert "T &lt;&amp;&gt;" in text
    assert text.count("<svg") == 1
    assert "Masked LM: 0.5 after 500, 1.5 after 1,000" in text
    assert "**" not in text
