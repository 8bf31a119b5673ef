"""The page of `bertkit explain --html` in a real browser: heads, layers and tokens to click."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from bertkit.explain.page import explanation_page
from bertkit.explain.trace import Trace
from bertkit.files import write_text
from tests.serve.pages import chromium

__all__ = ["chromium"]


@pytest.fixture(scope="module")
def page(chromium: Any, trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The page, opened as a file; nothing may go wrong in it or be asked for."""
    file = tmp_path_factory.mktemp("page") / "page.html"
    write_text(file, explanation_page(trace))
    errors, asked = list[str](), list[str]()
    opened = chromium.new_page(viewport={"width": 1100, "height": 900})
    opened.on("pageerror", lambda error: errors.append(str(error)))
    opened.on("request", lambda request: asked.append(request.url))
    opened.goto(file.as_uri())
    yield opened
    opened.close()
    assert not errors
    assert asked == [file.as_uri()]


def said(page: Any) -> tuple[str, str]:
    """What is chosen, and what the token attends to."""
    return page.text_content("#chosen"), page.text_content("#looks")


def places(looks: str) -> tuple[int, int]:
    """The token of a sentence on looking, and the one that it attends to most."""
    found = re.match(r".* \((\d+)\) attends to .*? \((\d+)\) ", looks)
    assert found, looks
    return int(found[1]), int(found[2])


def looked_at(trace: Trace, layer: int, head: int, token: int) -> tuple[int, int]:
    """What `places` has to be for a layer, a head (0: their mean) and a token."""
    weights = trace.inside.attention[layer - 1]
    row = np.asarray(weights.mean(0) if head == 0 else weights[head - 1])[token]
    return token, int(row.argmax())


@pytest.mark.parametrize(("layer", "head"), [(3, 1), (1, 2), (2, 0), (1, 1)])
def test_a_click_shows_its_layer_and_head(page: Any, trace: Trace, layer: int, head: int) -> None:
    before = page.evaluate("document.getElementById('map').toDataURL()")
    page.click(f"#layer-{layer}-head-{head}")
    chosen, looks = said(page)
    name = f"head {head}" if head else "mean of the heads"
    assert chosen.startswith(f"Layer {layer} of 3, {name}")
    assert places(looks) == looked_at(trace, layer, head, places(looks)[0])
    own = trace.inside.entropy.mean(-1)[layer - 1]
    number = float(own.mean() if head == 0 else own[head - 1])
    assert float(re.search(r"entropy ([\d.]+)", chosen)[1]) == pytest.approx(number, abs=0.006)  # type: ignore[index]
    assert page.evaluate("document.getElementById('map').toDataURL()") != before
    pressed = page.eval_on_selector_all(
        "#heads [aria-pressed=true]", "found => found.map(one => one.id)"
    )
    assert pressed == [f"layer-{layer}-head-{head}"]


def test_a_token_shows_what_it_looks_at(page: Any, trace: Trace) -> None:
    page.click("#layer-2-head-1")
    for token in (4, 1):
        page.click(f"#tokens button:nth-child({token + 1})")
        assert places(said(page)[1]) == looked_at(trace, 2, 1, token)


def test_arrow_keys_go_from_head_to_head(page: Any) -> None:
    page.click("#layer-1-head-0")
    for key, place in (("ArrowUp", "Layer 2 of 3, mean"), ("ArrowRight", "Layer 2 of 3, head 1")):
        page.keyboard.press(key)
        assert said(page)[0].startswith(place)


def test_a_place_of_the_map_is_named(page: Any, trace: Trace) -> None:
    page.click("#layer-1-head-1")
    box = page.locator("#map").bounding_box()
    corner = {"x": box["width"] - 2, "y": box["height"] - 2}
    page.locator("#map").hover(position=corner)
    last = len(trace.tokens) - 1
    looks = said(page)[1]
    assert places(looks) == looked_at(trace, 1, 1, last)
    assert f"; at {trace.tokens[last].token} ({last}) " in looks
