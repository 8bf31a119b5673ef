"""Using the server's page: by keyboard, on a phone, in the dark, when something goes wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from benchmarks.screenshots import served
from bertkit.serve.app import WEB
from tests.serve.pages import (
    FORMS,
    LONG,
    Open,
    address,
    answered,
    ask,
    choose,
    chromium,
    fill,
    visit,
)

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import expect

__all__ = ["address", "chromium", "visit"]
pytestmark = pytest.mark.slow

BAD = '<img src=x onerror="window.hurt=1"><script>window.hurt=1</script> river'


def test_keyboard_only(visit: Open) -> None:
    """From the address bar to an answer and into it, without a mouse."""
    page = visit("classify", "classify")
    focus = "document.activeElement.id || document.activeElement.value"
    order = []
    page.evaluate("document.activeElement.blur()")
    for _ in range(7):
        page.keyboard.press("Tab")
        order.append(page.evaluate(focus))
        width = page.evaluate(
            "getComputedStyle(document.activeElement.type === 'radio' ?"
            " document.activeElement.nextSibling : document.activeElement).outlineWidth"
        )
        assert width == "3px", order
    assert order[:1] == ["model"]
    assert order[-5:] == ["classify", "field-text", "field-pair", "go", "example"]
    page.focus("#model")
    page.keyboard.press("p")  # a select chooses by the first letter
    page.wait_for_selector("input[value='fill-mask']")
    page.focus("input[value='fill-mask']")
    page.keyboard.press("ArrowRight")
    expect(page.locator("#field-following")).to_be_visible()
    assert page.evaluate(focus) == "next-sentence"
    page.keyboard.press("Tab")
    page.keyboard.type("river")
    page.keyboard.press("Tab")
    page.keyboard.type("stone")
    page.keyboard.press("Control+Enter")
    answered(page)
    assert page.evaluate(focus) == "field-following"
    assert page.locator("#status").inner_text().startswith("Done. It ")


@pytest.mark.parametrize("name", FORMS)
def test_text_stays_text(visit: Open, name: str) -> None:
    route, fields = FORMS[name]
    page = visit(name.split(maxsplit=1)[0], route)
    if route == "attention-maps":  # the tiny models read forty pieces
        typed = {"text": "<b>", "pair": "<i>&amp;"}
    else:
        typed = {key: f"{BAD} {text}" for key, text in fields.items()}
    results = ask(page, typed)
    assert results.locator("img, script, b, i").count() == 0
    assert page.evaluate("window.hurt") is None
    if route not in {"attention-maps", "tokens"}:
        shown = results.inner_text().replace("\u00a0X", "").replace("\u00a0", "")  # without tags
        assert "<img src=x onerror" in shown


def test_errors_are_shown_and_results_stay(visit: Open) -> None:
    page = visit("encoder", "attention-maps")
    before = ask(page, {"text": "river"}).inner_text()
    error = page.locator("#error")
    for text, message in ((" ", "Text: write something"), (LONG, "the model allows 40; shorten")):
        page.fill("#field-text", text)
        page.click("#go")
        expect(error).to_contain_text(message)
        assert page.locator("#results").inner_text() == before
    page.route("**/v1/attention-maps", lambda route: route.abort())
    page.fill("#field-text", "stone")
    page.click("#go")
    expect(error).to_contain_text("cannot be reached")
    headers = {"retry-after": "7", "content-type": "application/json"}
    body = json.dumps({"error": {"message": "too much waits <b>", "type": "", "param": None}})
    page.route(
        "**/v1/attention-maps", lambda route: route.fulfill(status=429, headers=headers, body=body)
    )
    page.click("#go")
    expect(error).to_have_text("too much waits <b> Try again in 7 s.")
    page.route("**/v1/attention-maps", lambda route: route.fulfill(status=502, body="<html>"))
    page.click("#go")
    expect(error).to_contain_text("status 502")
    assert page.locator("#results").inner_text() == before
    page.unroute("**/v1/attention-maps")
    page.click("#go")
    expect(page.locator("#results")).to_contain_text("stone")
    expect(error).to_be_hidden()


def test_more_lines_than_a_request_takes(visit: Open) -> None:
    page = visit("encoder", "embeddings")
    page.fill("#field-query", "river")
    # typing so much would take Chromium a quarter of a minute
    page.eval_on_selector("#field-lines", "area => { area.value = 'stone\\n'.repeat(2048) }")
    page.click("#go")
    expect(page.locator("#error")).to_contain_text("2048 lines are too many")
    assert len(ask(page, {"lines": "stone\n" * 40}).locator("li").all()) == 40


def test_a_request_at_work_is_shown_and_not_doubled(visit: Open) -> None:
    page = visit("classify", "classify")
    held: list[Any] = []

    def hold(route: Any) -> None:
        held.append(route)

    page.route("**/v1/classify", hold)
    page.fill("#field-text", "river")
    page.click("#go")
    expect(page.locator("#go")).to_have_text("Working …")
    assert page.locator("#results").get_attribute("aria-busy") == "true"
    page.keyboard.press("Control+Enter")
    page.click("#go", force=True)
    page.wait_for_timeout(50)
    assert len(held) == 1
    page.check("input[value='tokens']")  # the reader looks elsewhere meanwhile
    held[0].continue_()
    page.wait_for_selector("body:not(.busy)")
    expect(page.locator("#results")).to_be_hidden()
    page.check("input[value='classify']")
    expect(page.locator("#results")).to_contain_text("river")


def test_texts_come_along(visit: Open) -> None:
    """What was typed stays with its form, and looks inside begin with the task's texts."""
    page = visit("answer", "answer")
    fill(page, {"question": "who", "context": "a sailor"})
    page.check("input[value='tokens']")
    assert page.locator("#field-text").input_value() == "who"
    assert page.locator("#field-pair").input_value() == "a sailor"
    page.select_option("#model", "classify")
    assert page.evaluate("location.hash") == "#model=classify&do=tokens"
    page.check("input[value='classify']")
    page.fill("#field-text", "river")
    page.check("input[value='attention-maps']")
    assert page.locator("#field-text").input_value() == "river"
    page.fill("#field-text", "own")
    page.check("input[value='classify']")
    assert page.locator("#field-text").input_value() == "river"
    page.check("input[value='attention-maps']")
    assert page.locator("#field-text").input_value() == "own"
    page.select_option("#model", "answer")
    page.check("input[value='answer']")
    assert page.locator("#field-context").input_value() == "a sailor"
    page.select_option("#model", "classify")
    page.check("input[value='tokens']")
    page.fill("#field-text", "")
    page.fill("#field-pair", "a pair of one's own")
    page.check("input[value='classify']")
    page.check("input[value='tokens']")
    assert page.locator("#field-pair").input_value() == "a pair of one's own"
    required = page.locator("#field-text").get_attribute("aria-required")
    optional = page.locator("#field-pair").get_attribute("aria-required")
    assert (required, optional) == ("true", "false")


def test_examples_fit_their_forms(visit: Open) -> None:
    """All but those of pieces that are longer than a tiny model reads."""
    page = visit("classify", "classify")
    for name in FORMS:
        route, _ = choose(page, name)
        page.click("#example")
        if route != "attention-maps":
            page.click("#go")
            answered(page)


def test_the_token_is_asked_for(visit: Open, models: Path) -> None:
    with served([str(models / "classify")], token="secret") as guarded:
        page = visit("classify", "classify", at=guarded)
        expect(page.locator("#error")).to_contain_text("the token is missing or wrong")
        expect(page.locator("#token-field")).to_be_focused()
        expect(page.locator("#ask")).to_be_hidden()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#token-field")).to_be_focused()
        page.keyboard.type("secret")
        page.keyboard.press("Enter")
        expect(page.locator("#token")).to_be_hidden()
        ask(page, {"text": "river"})
        assert "secret" not in page.content() + page.url
        page.reload()
        page.wait_for_selector("#ask")  # this tab knows it


def test_only_the_server_itself_is_trusted(chromium: Any, address: str) -> None:
    policy = httpx.get(address).headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    for path in WEB.iterdir():
        answer = httpx.get(f"{address}/{path.name}".replace("/index.html", "/"))
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == policy
    page = chromium.new_page()
    page.goto(address)
    page.wait_for_load_state("networkidle")
    reached: list[str] = []
    page.route("**/*", lambda route: reached.append(route.request.url))
    refused = page.evaluate("fetch('http://example.org/').then(() => false, () => true)")
    page.evaluate(
        "document.head.append(Object.assign(document.createElement('script'),"
        "{textContent: 'window.hurt = 1'}))"
    )
    assert refused
    assert not reached
    assert page.evaluate("window.hurt") is None
    page.close()
