from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import rich.console

from bertkit.errors import BertkitError
from bertkit.explain.sections import SECTIONS
from bertkit.explain.terminal import digit, print_explanation
from bertkit.explain.trace import Trace, trace_example


def printed(trace: Trace, *, layer: int | None = None, head: int | None = None) -> str:
    stream = io.StringIO()
    console = rich.console.Console(file=stream, width=80, highlight=False)
    print_explanation(trace, console, layer=layer, head=head)
    return stream.getvalue()


def test_plain_text_in_80_columns(trace: Trace) -> None:
    text = printed(trace)
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text
    assert "[bold]harvest[/bold]" in text  # what a text holds is no markup
    titles = [section.title for key, section in SECTIONS.items() if key != "task"]
    found = re.findall(r"^\d+\. (.+)$", text, flags=re.MULTILINE)
    assert found == titles
    for section in SECTIONS.values():
        if section.title in found:
            assert section.modules[0] in text


def test_the_numbers_are_the_traces(trace: Trace) -> None:
    text = printed(trace)
    assert f"Mean loss: {trace.mlm_loss:.4f}." in text
    assert (
        f"Targets are 15% of n = {len(trace.tokens)} tokens, rounded: {len(trace.targets)}" in text
    )
    assert f"{trace.next_probability:.4f}" in text
    assert "Layer 3 of 3, mean of the heads" in text
    row = trace.inside.attention[-1].mean(0)[0]
    best = int(row.argmax())
    named = re.escape(f"{trace.tokens[best].shown} ({best}) {row[best]:.0%}")
    assert re.search(rf"^ 0 +\[CLS\] +{named}", text, flags=re.MULTILINE)
    assert f"{trace.inside.embeddings[0, 3]:.3f}" in text


def test_one_head_in_full(directory: Path) -> None:
    small = trace_example(directory, "river stone")
    lines = printed(small, layer=2, head=1).splitlines()
    start = lines.index("Layer 2 of 3, head 1 of 2:")
    expected = ["".join(map(digit, row)) for row in small.inside.attention[1, 0].tolist()]
    assert [line.split()[-1] for line in lines[start + 3 : start + 7]] == expected
    assert [digit(weight) for weight in (0, 0.049, 0.05, 0.34, 0.94, 0.96, 1)] == list("..139##")


def test_a_long_example_names_the_most_attended_instead(trace: Trace) -> None:
    assert len(trace.tokens) > 60
    text = printed(trace, layer=1, head=2)
    assert "Layer 1 of 3, head 2 of 2" in text
    row = trace.inside.attention[0, 1, 0]
    assert f"({int(np.argmax(row))}) {row.max():.0%}" in text


def test_what_is_left_out_is_said(trace: Trace) -> None:
    text = printed(replace(trace, left_out={"mlm": "because"}, guesses=[], mlm_loss=None))
    assert "Not shown: because." in text
    assert "Mean loss" not in text
    assert "says so." in printed(replace(trace, task="says so"))


@pytest.mark.parametrize("choice", [{"layer": 4}, {"layer": 0}, {"head": 3}, {"head": -1}], ids=str)
def test_layers_and_heads_that_do_not_exist(trace: Trace, choice: dict[str, int]) -> None:
    with pytest.raises(BertkitError, match=r"must be within 1 to [23] for this model"):
        printed(trace, **choice)
