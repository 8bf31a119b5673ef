"""The server's page, in a real Chromium, against a real server of tiny models."""

from __future__ import annotations

import base64
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from bertkit.serve.app import WEB, make_server, open_socket, serving_app, socket_url
from tests.serve.conftest import NAMES

CHROMIUM = Path("/usr/bin/chromium")
LONG = "The sailor walking slowly over the bridge, the harbour in the evening. " * 6


@contextmanager
def served(*models: Path, token: str = "") -> Iterator[str]:
    """Serve models in a thread of this process; yield the address."""
    app = serving_app(*models, precision="fp32", device="cpu", token=token)
    server = make_server(app, log_requests=False)
    with open_socket("127.0.0.1", 0) as listening:
        thread = threading.Thread(target=server.run, args=([listening],))
        thread.start()
        while not server.started and thread.is_alive():
            time.sleep(0.02)
        yield socket_url(listening)
        server.should_exit = True
        thread.join(60)


@pytest.fixture(scope="module")
def address(models: Path) -> Iterator[str]:
    with served(*(models / name for name in NAMES)) as found:
        yield found


@pytest.fixture
def visit() -> Iterator[Callable[[str], Any]]:
    """Opens a page; until the test ends, nothing may go wrong or be sent elsewhere."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM.exists():
        pytest.skip(f"there is no {CHROMIUM}")
    errors, urls = list[str](), list[str]()
    arguments = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=str(CHROMIUM), args=arguments)

        def open_page(url: str) -> Any:
            page = browser.new_page()
            page.set_default_timeout(20_000)
            page.on("request", lambda request: urls.append(request.url))
            page.on("pageerror", lambda error: errors.append(str(error)))
            page.on("console", lambda message: errors.append(message.text))
            page.goto(url)
            return page

        yield open_page
        browser.close()
    # Chromium itself notes refused requests
    assert not [error for error in errors if "Failed to load resource" not in error]
    assert {url[: len("http://127.0.0.1:")] for url in urls} <= {"http://127.0.0.1:"}


def ask(page: Any, **fields: str) -> Any:
    """Fill the form in and send it; return the element of the results."""
    for name, text in fields.items():
        page.fill(f"#field-{name}", text)
    page.keyboard.press("Control+Enter")
    page.wait_for_selector("#results > div")
    page.wait_for_selector("body:not(.busy)")
    assert page.locator("#error").is_hidden(), page.locator("#error").inner_text()
    return page.locator("#results")


def choose(page: Any, model: str, route: str) -> None:
    page.select_option("#model", model)
    page.check(f"input[value='{route}']")


@pytest.mark.slow
def test_each_form_shows_what_the_server_answers(visit: Any, address: str) -> None:
    def predict(model: str, route: str, *inputs: Any) -> Any:
        answer = httpx.post(f"{address}/v1/{route}", json={"model": model, "inputs": inputs})
        assert answer.status_code == 200, answer.text
        return answer.json()["predictions"][0]

    page = visit(f"{address}/#model=classify&do=classification")
    results = ask(page, text="river 🙂 stone", pair="a letter")
    found = predict("classify", "classification", ["river 🙂 stone", "a letter"])
    chances = sorted(found["probabilities"].items(), key=lambda pair: -pair[1])
    assert results.locator(".bars .name").all_inner_texts() == [label for label, _ in chances]
    assert results.locator(".outcome").inner_text() == found["label"]

    choose(page, "multi-label", "multi-label-classification")
    ask(page, text="river stone")
    choose(page, "regress", "regression")
    value = predict("regress", "regression", ["river", "stone"])["value"]
    results = ask(page, text="river", pair="stone")
    assert results.locator(".outcome").inner_text() == f"{value:.3f}"

    choose(page, "choose", "multiple-choice")
    found = predict("choose", "multiple-choice", ["river", ["stone", "kettle"]])
    results = ask(page, text="river", choices="stone\n\n kettle ")
    assert results.locator(".outcome").inner_text() == found["text"]

    choose(page, "tag", "token-classification")
    text = "😀 The sailor 🙂 walking, over the bridge."
    found = predict("tag", "token-classification", text)
    results = ask(page, text=text)
    wanted = [f"{entity['text']}\u00a0{entity['type']}" for entity in found["entities"]]
    assert wanted
    assert results.locator("mark").all_inner_texts() == wanted

    choose(page, "answer", "question-answering")
    found = predict("answer", "question-answering", ["who", f"🙂🙂 {LONG}"])
    results = ask(page, question="who", context=f"🙂🙂 {LONG}")
    answers = [] if found["start"] is None else [found["answer"]]
    assert results.locator("mark").all_inner_texts() == answers

    choose(page, "pretrained", "fill-mask")
    results = ask(page, text="the [MASK] and the [MASK].")
    results.locator(".bars button").first.click()
    assert page.locator("#field-text").input_value().count("[MASK]") == 1
    page.check("input[value='next-sentence']")
    ask(page, text="river", following="stone")
    page.check("input[value='embeddings']")
    results = ask(page, query="river", lines="stone\nriver\n\nkettle")
    assert results.locator(".bars .name").first.inner_text() == "river"
    page.check("input[value='tokens']")
    results = ask(page, text="Évening kettle", pair="stone")
    assert results.locator(".chips li").count() == 7
    page.check("input[value='attention-maps']")
    page.click("#example")
    assert page.locator("#field-text").input_value()


@pytest.mark.slow
def test_attention(visit: Any, address: str) -> None:
    page = visit(f"{address}/#model=encoder&do=attention-maps")
    results = ask(page, text="river kettle", pair="stone")
    page.click("button[aria-label='layer 1, head 2']")
    tokens = results.locator(".looking button")
    tokens.nth(1).hover()
    body = {"model": "encoder", "text": "river kettle", "pair": "stone"}
    found = httpx.post(f"{address}/v1/attention-maps", json=body).json()
    size = len(found["tokens"])
    coded = np.frombuffer(base64.b64decode(found["weights"]), np.uint8)
    weights = ((coded.reshape(2, 2, size, size)[0, 1, 1] / 255) ** 2).tolist()
    best = max(range(size), key=weights.__getitem__)
    looks = results.locator("#looks").inner_text()
    assert looks.startswith(f"river (1) attends to {found['tokens'][best]['token']} ({best})")
    page.focus("button[aria-label='layer 1, head 2']")
    page.keyboard.press("ArrowUp")
    assert results.locator("h3").inner_text() == "Layer 2 of 2, head 2"


@pytest.mark.slow
def test_the_token_is_requested(visit: Any, models: Path) -> None:
    with served(models / "classify", token="secret") as guarded:
        page = visit(guarded)
        page.wait_for_selector("#token-field:focus")
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        page.wait_for_selector("#error:not([hidden])")
        page.fill("#token-field", "secret")
        page.keyboard.press("Enter")
        page.wait_for_selector("#ask:not([hidden])")
        ask(page, text="river")
        assert "secret" not in page.content() + page.url
        page.reload()
        page.wait_for_selector("#ask:not([hidden])")  # this tab knows it
        page.close()


@pytest.mark.slow
def test_the_page_needs_nothing_else(address: str) -> None:
    policy = httpx.get(address).headers["content-security-policy"]
    assert "default-src 'self'" in policy
    assert "unsafe" not in policy
    for path in WEB.iterdir():
        answer = httpx.get(f"{address}/{path.name}".replace("/index.html", "/"))
        assert answer.status_code == 200
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["content-security-policy"] == policy
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|\beval\(", text)
