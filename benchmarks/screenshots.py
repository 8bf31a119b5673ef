"""Pictures of the server's page with given models, as `docs/images/*.png`.

    python -m benchmarks.screenshots sst-2=FOLDER ner=FOLDER squad=FOLDER minilm=FOLDER bert=FOLDER

Each picture takes the first model that can do what it shows; those that no model can do are left
out.
"""

from __future__ import annotations

import argparse
import io
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bertkit.serve.server import make_server, open_socket, socket_url
from bertkit.serve.service import Service
from PIL import Image

from benchmarks.record import ROOT
from bertkit.serve.app import make_app
from bertkit.serve.limits import Limits
from bertkit.serve.metrics import Metrics
from bertkit.serve.models import load_models

if TYPE_CHECKING:
    from playwright.sync_api import Browser

CHROMIUM = Path("/usr/bin/chromium")
"""The browser of Debian; Playwright's own needs a download."""
ARGUMENTS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


@contextmanager
def served(models: Sequence[str], limits: Limits | None = None, token: str = "") -> Iterator[str]:
    """Serve models in a thread of this process; yield the address."""
    limits, metrics = limits or Limits(), Metrics()
    loaded = load_models(models, limits, metrics, precision="fp32", device="cpu")
    serving = Service(loaded, limits, metrics)
    server = make_server(make_app(serving, token=token), serving)
    listening = open_socket("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        while not server.started and thread.is_alive():
            time.sleep(0.02)
        yield socket_url(listening)
    finally:
        server.should_exit = True
        thread.join(60)
        listening.close()


@contextmanager
def browser() -> Iterator[Browser]:
    """Yield Chromium without a window."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=str(CHROMIUM), args=list(ARGUMENTS))
        yield found
        found.close()


WIDE, PHONE = (1200, 400), (390, 600)
"""The widths and minimum heights of pictures; a picture is as high as its page."""
COLOURS = 256
"""The number of colours of a picture: as many as a small PNG holds."""


@dataclass(frozen=True)
class Scene:
    """One picture; fields of the page that `fields` does not name hold the page's own example."""

    route: str
    scheme: str = "light"
    size: tuple[int, int] = WIDE
    fields: dict[str, str] = field(default_factory=dict)
    clicks: tuple[str, ...] = ()
    """The selectors of what is clicked once the answer is there."""


SCENES = {
    "page-classify": Scene("classify"),
    "page-tag": Scene("tag"),
    "page-answer-dark": Scene("answer", "dark"),
    "page-fill-mask": Scene(
        "fill-mask",
        fields={"text": "The film was [MASK] in 2004 by a small company."},
        clicks=(".bars button >> nth=0",),
    ),
    "page-nearest-phone": Scene("embeddings", size=PHONE),
    "page-attention-dark": Scene(
        "attention-maps",
        "dark",
        clicks=("button[aria-label='layer 3, head 2']", ".looking button >> nth=8"),
    ),
    "page-tag-phone-dark": Scene("tag", "dark", PHONE),
}


def take(chromium: Browser, address: str, model: str, scene: Scene) -> bytes:
    """Take one picture, and return it as PNG."""
    width, height = scene.size
    phone = scene.size == PHONE
    scheme: Any = scene.scheme
    context = chromium.new_context(
        viewport={"width": width, "height": height},
        color_scheme=scheme,
        device_scale_factor=2 if phone else 1.5,
    )
    page = context.new_page()
    page.goto(f"{address}/#model={model}&do={scene.route}")
    page.click("#example")
    for name, text in scene.fields.items():
        page.fill(f"#field-{name}", text)
    page.click("#go")
    page.wait_for_selector("#results > div", timeout=120_000)
    page.wait_for_selector("body:not(.busy)")
    for selector in scene.clicks:
        if page.locator(selector).count():
            page.click(selector)
    page.evaluate("document.activeElement?.blur()")
    page.mouse.move(0, 0)
    page.wait_for_timeout(600)  # until animations are over
    picture = page.screenshot(full_page=True)
    context.close()
    return picture


def small(picture: bytes) -> bytes:
    """Return the same picture with fewer colours."""
    made = io.BytesIO()
    image = Image.open(io.BytesIO(picture)).convert("RGB")
    image.quantize(COLOURS, dither=Image.Dither.NONE).save(made, "png", optimize=True)
    return made.getvalue()


def main() -> None:
    """Serve the models, take the pictures, and write them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as `bertkit serve` takes them")
    parser.add_argument("--only", nargs="*", choices=sorted(SCENES), help="pictures; else all")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with served(given.models) as address, browser() as chromium:
        page = chromium.new_page()
        cards = page.request.get(f"{address}/v1/models").json()["data"]
        for name in given.only or SCENES:
            able = [card["id"] for card in cards if SCENES[name].route in card["routes"]]
            if not able:
                print(f"{name}: left out, no model serves {SCENES[name].route}")
                continue
            path = given.out / f"{name}.png"
            path.write_bytes(small(take(chromium, address, able[0], SCENES[name])))
            print(f"{path}: {path.stat().st_size / 1000:.0f} kB, {able[0]}")


if __name__ == "__main__":
    main()
