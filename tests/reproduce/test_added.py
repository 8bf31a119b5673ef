"""Results of several machines in one file."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.reproduction import added, rows_of
from bertkit.reproduce.outcome import spread
from bertkit.reproduce.paper import paper_tables

PAPER = paper_tables()["table-7"]


def outcome(values: dict[str, list[float]], networks: dict[str, bool]) -> dict[str, Any]:
    """One table of two rows, and networks by whether they are finished."""
    cells = [
        {
            "row": row, "column": "conll-2003", "task": "conll-2003", "metric": "f1", "paper": None,
            "stands_in": False, "given": "", "complete": len(found) == 3, "values": found,
            **spread(found),
        }
        for row, found in values.items()
    ]  # fmt: skip
    return {
        "scale": {"name": "small"},
        "remarks": [],
        "tables": [{"key": "table-7", "name": PAPER.name, "cells": cells, "claims": []}],
        "networks": {
            name: {"finished": done, "updates": 9 if done else 0, "held_out": {}}
            for name, done in networks.items()
        },
    }


def test_what_is_there_stays_and_what_is_missing_is_filled() -> None:
    before = outcome({"Concat last four": [9.0, 9.1, 9.2], "Last hidden": []}, {"bert": True})
    found = outcome(
        {"Concat last four": [1.0, 1.1, 1.2], "Last hidden": [5.0, 5.1, 5.2]},
        {"bert": False, "right-to-left": True},
    )
    whole, names = added(before, found)
    assert names == ["Table 7, Last hidden, conll-2003"]
    assert {name: row["median"] for name, row in rows_of(whole).items()} == {
        "Table 7, Concat last four, conll-2003": 9.1,
        "Table 7, Last hidden, conll-2003": 5.1,
    }
    assert {name: facts["finished"] for name, facts in whole["networks"].items()} == {
        "bert": True,
        "right-to-left": True,
    }
    [claim, *_] = [c for c in whole["tables"][0]["claims"] if c["worse"] == "Last hidden"]
    assert claim["verdict"] == "holds", "the claims are judged with the new cells"


def test_more_seeds_and_whole_tables_are_added_and_another_scale_is_refused() -> None:
    few = outcome({"Last hidden": [1.0]}, {"bert": False})
    many = outcome({"Last hidden": [5.0, 5.1, 5.2]}, {"bert": True})
    whole, names = added(few, many)
    assert whole["tables"][0]["cells"][0]["n"] == 3
    assert len(names) == 1
    assert whole["networks"]["bert"]["finished"]
    assert added({**few, "tables": []}, many)[0]["tables"][0]["cells"][0]["n"] == 3
    with pytest.raises(ValueError, match="the scales differ in name: small and tiny"):
        added(few, {**many, "scale": {"name": "tiny"}})
    sized = {**many, "scale": {"name": "small", "bases": {"table-7": [4, 256, 8]}}}
    with pytest.raises(ValueError, match="the scales differ in bases"):
        added({**few, "scale": {"name": "small", "bases": {}}}, sized)
    other = {**few, "tables": [], "scale": {"name": "small", "bases": {}}}
    assert added(other, sized)[1], "the table that has another size is new"
    again, names = added(whole, many)
    assert names == []
    assert again["tables"] == whole["tables"]
