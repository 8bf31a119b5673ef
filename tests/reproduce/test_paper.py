"""The paper's numbers: whole, and its claims true of its own tables."""

from __future__ import annotations

import pytest

from bertkit.errors import BertkitError
from bertkit.reproduce.experiments import PERPLEXITY
from bertkit.reproduce.paper import PaperTable, find_table, paper_tables

TABLES = list(paper_tables().values())


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.key)
def test_every_row_has_a_value_for_every_column(table: PaperTable) -> None:
    assert table.rows
    for name, values in table.rows.items():
        assert len(values) == len(table.columns), name
        assert all(0 < value < 100 for value in values), name


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.key)
def test_claims_are_true_of_the_papers_own_numbers(table: PaperTable) -> None:
    for claim in table.claims:
        if claim.argued:
            assert {claim.better, claim.worse} - set(table.rows), "the table has both rows"
            continue
        column, better, worse = (
            {"first": names[0], "last": names[-1]}.get(name, name)
            for name, names in (
                (claim.column, table.columns),
                (claim.better, [*table.rows]),
                (claim.worse, [*table.rows]),
            )
        )
        higher, lower = table.value(better, column), table.value(worse, column)
        if column == PERPLEXITY:
            higher, lower = lower, higher
        assert higher is not None, claim
        assert lower is not None, claim
        assert higher > lower, claim


def test_some_values_as_printed() -> None:
    tables = paper_tables()
    assert tables["table-5"].value("No NSP", "qnli") == 84.9
    assert tables["table-6"].value("24 x 1024, 16", "perplexity") == 3.23
    assert tables["table-1"].value("BERT-large", "rte") == 70.1
    assert tables["table-7"].value("Concat last four", "conll-2003") == 96.1
    assert tables["table-8"].value("100 / 0 / 0", "conll-2003, features") == 94.0
    assert tables["table-5"].value("BERT", "rte") is None


def test_average_of_table_1() -> None:
    """The paper prints the mean of its nine columns."""
    table = paper_tables()["table-1"]
    for row, printed in (("BERT-base", 79.6), ("BERT-large", 82.1), ("OpenAI GPT", 75.1)):
        assert sum(table.rows[row]) / 9 == pytest.approx(printed, abs=0.051), row


def test_tables_are_found_by_number_and_by_name() -> None:
    assert find_table("5").key == find_table("table-5").key == find_table("Table-5").key
    assert find_table("figure-5").name == "Figure 5"
    with pytest.raises(BertkitError, match="the paper has no 'tabel-5'; did you mean 'table-5'"):
        find_table("tabel-5")
