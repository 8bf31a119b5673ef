"""What the tests of the server's page share: a browser, the forms, and how to fill them in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.screenshots import CHROMIUM, browser, served
from tests.serve.conftest import NAMES

Open = Callable[..., Any]
"""A model, a route and options of the browser's context -> a page."""

LONG = "The sailor walking slowly over the bridge, the harbour in the evening. " * 6
FORMS: dict[str, tuple[str, dict[str, str]]] = {
    "classify": ("classify", {"text": "river 🙂 stone", "pair": "a letter"}),
    "multi-label": ("classify", {"text": "river stone"}),
    "regress": ("regress", {"text": "river", "pair": "stone"}),
    "choose": ("choose", {"text": "river", "choices": "stone\n\n kettle \na letter"}),
    "tag": ("tag", {"text": "😀 The sailor 🙂 walking, over the bridge."}),
    "documents": ("tag", {"text": "river stone"}),
    "answer": ("answer", {"question": "who", "context": f"🙂🙂 {LONG}"}),
    "pretrained": ("fill-mask", {"text": "the [MASK] and the [MASK]."}),
    "pretrained 2": ("next-sentence", {"text": "river", "following": "stone"}),
    "pretrained 3": ("embeddings", {"query": "river", "lines": "stone\nriver\n\nkettle"}),
    "encoder": ("embeddings", {"query": "river", "lines": "stone\nriver\nkettle"}),
    "encoder 2": ("tokens", {"text": "Évening kettle", "pair": "stone"}),
    "encoder 3": ("attention-maps", {"text": "river kettle", "pair": "stone"}),
}
"""Model, and a number where it has several forms -> route, and what is typed."""


@pytest.fixture(scope="module")
def address(models: Path) -> Iterator[str]:
    with served([str(models / name) for name in NAMES]) as found:
        yield found


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    pytest.importorskip("playwright", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    with browser() as found:
        yield found


@pytest.fixture
def visit(chromium: Any, address: str) -> Iterator[Open]:
    """Opens the page at a model and a route; nothing may go wrong, or out, until the test ends."""
    contexts, errors, asked = [], list[str](), list[str]()

    def open_page(model: str, route: str, at: str = address, **options: Any) -> Any:
        context = chromium.new_context(**{"viewport": {"width": 1100, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("console", lambda message: errors.append(message.text))
        page.goto(f"{at}/#model={model}&do={route}")
        if at == address:
            page.wait_for_selector("#ask")
        return page

    yield open_page
    for context in contexts:
        context.close()
    # Chromium itself notes refused requests; a test that refuses one looks at the page's own words
    assert not [error for error in errors if "Failed to load resource" not in error]
    assert {url[: len("http://127.0.0.1:")] for url in asked} <= {"http://127.0.0.1:"}


def choose(page: Any, name: str) -> tuple[str, dict[str, str]]:
    """Go to a form of `FORMS`; its route and what is typed."""
    route, fields = FORMS[name]
    page.select_option("#model", name.split(maxsplit=1)[0])
    page.check(f"input[value='{route}']")
    return route, fields


def fill(page: Any, fields: dict[str, str]) -> None:
    for name, text in fields.items():
        page.fill(f"#field-{name}", text)


def ask(page: Any, fields: dict[str, str]) -> Any:
    """Fill the form in and send it; the element of the results."""
    fill(page, fields)
    page.keyboard.press("Control+Enter")
    return answered(page)


def answered(page: Any) -> Any:
    page.wait_for_selector("#results > div")
    page.wait_for_selector("body:not(.busy)")
    assert page.locator("#error").is_hidden(), page.locator("#error").inner_text()
    return page.locator("#results")


def api(address: str, route: str, **body: Any) -> Any:
    answer = httpx.post(f"{address}/v1/{route}", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def percents(chances: Any) -> list[str]:
    return [f"{100 * chance:.1f} %" for chance in chances]


def names(results: Any) -> list[str]:
    return results.locator(".bars .name").all_inner_texts()


def numbers(results: Any) -> list[str]:
    return results.locator(".bars .number").all_inner_texts()
