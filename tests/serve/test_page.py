"""Every form of the server's page, in a real Chromium, against a real server of tiny models."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from tests.serve.pages import (
    FORMS,
    Open,
    address,
    answered,
    api,
    ask,
    chromium,
    names,
    numbers,
    percents,
    visit,
)

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import expect

__all__ = ["address", "chromium", "visit"]
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["classify", "multi-label"])
def test_labels(visit: Open, address: str, name: str) -> None:
    route, fields = FORMS[name]
    results = ask(visit(name, route), fields)
    wanted = api(address, route, model=name, inputs=[fields])["predictions"][0]
    chances = sorted(wanted["probabilities"].items(), key=lambda pair: -pair[1])
    assert names(results) == [label for label, _ in chances]
    assert numbers(results) == percents(chance for _, chance in chances)
    best = wanted.get("labels", [wanted.get("label")])
    assert results.locator(".best .name").all_inner_texts() == best
    assert results.locator("q").all_inner_texts() == list(fields.values())


def test_numbers_and_choices(visit: Open, address: str) -> None:
    route, fields = FORMS["regress"]
    wanted = api(address, route, inputs=[fields])["predictions"][0]["value"]
    page = visit("regress", route)
    assert ask(page, fields).locator(".outcome").inner_text() == f"{wanted:.3f}"
    route, fields = FORMS["choose"]
    choices = ["stone", "kettle", "a letter"]
    asked = [{"text": fields["text"], "choices": choices}]
    found = api(address, route, inputs=asked)["predictions"][0]
    page.select_option("#model", "choose")
    results = ask(page, fields)
    assert names(results) == choices  # in their own order
    assert numbers(results) == percents(found["probabilities"])
    assert results.locator(".outcome").inner_text() == choices[found["choice"]]


def test_entities_stand_where_they_are(visit: Open, address: str) -> None:
    route, fields = FORMS["tag"]
    found = api(address, route, model="tag", inputs=[fields])["predictions"][0]
    assert found["entities"], "choose another text"
    results = ask(visit("tag", route), fields)
    wanted = [f"{one['text']}\u00a0{one['type']}" for one in found["entities"]]
    assert results.locator("mark").all_inner_texts() == wanted
    whole = results.locator("p.text").evaluate(
        "p => [...p.querySelectorAll('small')].forEach(s => s.remove()) ?? p.textContent"
    )
    assert whole == fields["text"]
    results.locator("summary").click()
    cells = results.locator("tbody tr").all_inner_texts()
    assert cells == [
        f"{one['word']}\t{one['tag']}\t{100 * one['probability']:.1f} %" for one in found["words"]
    ]


def test_answers_stand_where_they_are(visit: Open, address: str) -> None:
    page = visit("answer", "answer")
    context = FORMS["answer"][1]["context"] * 6  # more than its box shows
    seen = set()
    for question in ("who", "where is it", "what", "a", "letter", "stone river kettle"):
        fields = {"question": question, "context": context}
        found = api(address, "answer", inputs=[fields])["predictions"][0]
        none = found["start"] is None
        if none in seen:
            continue
        seen.add(none)
        results = ask(page, fields)
        assert results.locator("mark").all_inner_texts() == ([] if none else [found["answer"]])
        outcome = results.locator(".outcome").inner_text()
        assert outcome == ("No answer in the context" if none else found["answer"].strip())
        share = 1 - found["probability"] if none else found["probability"]
        both = share, found["no_answer_probability"]
        assert numbers(results) == percents(both)
        assert results.locator(".scroll").text_content() == context
        if not none:  # a long context is scrolled to it
            box, mark = (results.locator(of).bounding_box() for of in (".scroll", "mark"))
            assert box is not None
            assert mark is not None
            assert box["y"] <= mark["y"] <= box["y"] + box["height"] - 10
            assert box["height"] < results.locator(".scroll").evaluate("p => p.scrollHeight")
    assert False in seen


def test_no_answer(visit: Open) -> None:
    page = visit("answer", "answer")
    prediction = {
        **dict.fromkeys(("start", "end"), None),
        "answer": "",
        "probability": 0.75,
        "no_answer_probability": 0.75,
        "null_odds": 2.0,
    }
    usage = {"inputs": 1, "tokens": 9, "windowed": 1, "cut": {"questions cut at 16 tokens": 1}}
    body = {"model": "answer", "predictions": [prediction], "usage": usage}
    page.route("**/v1/answer", lambda route: route.fulfill(json=body))
    results = ask(page, {"question": "who", "context": "nobody"})
    assert results.locator(".outcome").inner_text() == "No answer in the context"
    assert results.locator("mark").count() == 0
    assert numbers(results) == ["25.0 %", "75.0 %"]
    assert "several windows, questions cut at 16 tokens" in results.inner_text()


def test_guesses_are_put_in_and_taken_out(visit: Open, address: str) -> None:
    route, fields = FORMS["pretrained"]
    masks = api(address, route, inputs=[{**fields, "top": 8}])["predictions"][0]
    page = visit("pretrained", route)
    results = ask(page, fields)
    wanted = [guess for mask in masks for guess in mask]
    assert names(results) == [guess["token"] for guess in wanted]
    assert numbers(results) == percents(guess["probability"] for guess in wanted)
    buttons, area = results.locator(".bars button"), page.locator("#field-text")
    plain = next(i for i, one in enumerate(masks[1]) if not one["token"].startswith("##"))
    buttons.nth(8 + plain).click()
    assert area.input_value() == f"the [MASK] and the {masks[1][plain]['token']}."
    joined = next(i for i, one in enumerate(masks[0]) if one["token"].startswith("##"))
    buttons.nth(joined).click()
    word = f"the{masks[0][joined]['token'][2:]}"
    assert area.input_value() == f"{word} and the {masks[1][plain]['token']}."
    buttons.nth(8 + plain).click()
    assert area.input_value() == f"{word} and the [MASK]."
    assert results.locator("p.text").inner_text() == f"{word} and the [MASK]."
    page.check("input[value='next-sentence']")
    page.check("input[value='fill-mask']")  # the page keeps what was put in
    assert area.input_value() == f"{word} and the [MASK]."
    area.fill("something else")
    buttons.nth(8).click()
    assert area.input_value() == "something else"
    assert "left as it is" in results.inner_text()


def test_masks_are_needed_and_can_be_put_in(visit: Open) -> None:
    page = visit("pretrained", "fill-mask")
    page.fill("#field-text", "the river")
    page.click("#go")
    expect(page.locator("#error")).to_contain_text("at least one [MASK]")
    page.locator("#field-text").press("End")
    page.click("text=Insert [MASK]")
    assert page.locator("#field-text").input_value() == "the river[MASK]"
    page.keyboard.press("Control+Enter")
    answered(page)


def test_next_sentence_and_nearest(visit: Open, address: str) -> None:
    route, fields = FORMS["pretrained 2"]
    chance = api(address, route, inputs=[fields])["predictions"][0]["probability"]
    page = visit("pretrained", route)
    assert numbers(ask(page, fields)) == percents((chance, 1 - chance))
    page.check("input[value='embeddings']")
    fields = FORMS["pretrained 3"][1]
    texts = [fields["query"], "stone", "river", "kettle"]
    data = api(address, "embeddings", model="pretrained", input=texts)["data"]
    first, *others = [one["embedding"] for one in data]
    cosines = [sum(a * b for a, b in zip(first, other, strict=True)) for other in others]
    wanted = sorted(zip(cosines, texts[1:], strict=True), reverse=True)
    results = ask(page, fields)
    assert names(results) == [text for _, text in wanted]
    assert [float(text) for text in numbers(results)] == pytest.approx(
        [cosine for cosine, _ in wanted], abs=1e-3
    )
    assert wanted[0][1] == "river"


def test_pieces(visit: Open, address: str) -> None:
    route, fields = FORMS["encoder 2"]
    pieces = api(address, route, model="encoder", **fields)["tokens"]
    results = ask(visit("encoder", route), fields)
    chips = results.locator(".chips li")
    assert chips.all_inner_texts() == [f"{one['token']}\n{one['id']}" for one in pieces]
    segments = results.locator(".chips .segment-1").all_inner_texts()
    assert segments == [f"{one['token']}\n{one['id']}" for one in pieces if one["segment"]]
    results.locator("summary").click()
    rows = [row.split("\t") for row in results.locator("tbody tr").all_inner_texts()]
    assert [row[5] for row in rows] == ["", "Évening", "ket", "tle", "", "stone", ""]


def test_attention(visit: Open, address: str) -> None:
    route, fields = FORMS["encoder 3"]
    page = visit("encoder", route)
    results = ask(page, fields)
    expect(results.locator("h3")).to_have_text("Layer 2 of 2, mean of all heads")
    page.click("button[aria-label='layer 1, head 2']")
    tokens = results.locator(".looking button")
    tokens.nth(1).hover()
    found = api(address, "attention-maps", model="encoder", **fields)
    size = len(found["tokens"])
    coded = np.frombuffer(base64.b64decode(found["weights"]), np.uint8)
    weights = ((coded.reshape(2, 2, size, size)[0, 1, 1] / 255) ** 2).tolist()
    shown = [text.split("\n")[-1] for text in tokens.all_inner_texts()]
    for text, weight in zip(shown, weights, strict=True):
        if weight > 0.015:
            assert float(text.removesuffix(" %")) / 100 == pytest.approx(weight, abs=5e-3)
    best = max(range(len(weights)), key=weights.__getitem__)
    looks = results.locator("#looks").inner_text()
    assert looks.startswith(f"river (1) attends to {found['tokens'][best]['token']} ({best})")
    page.focus("button[aria-label='layer 1, head 2']")
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowLeft")
    expect(results.locator("h3")).to_have_text("Layer 2 of 2, head 1")
    inked = results.locator("canvas").first.evaluate(
        "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some(v => v)"
    )
    assert inked
