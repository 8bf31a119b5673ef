"""The files of the server's page, without a browser."""

from __future__ import annotations

import re

from benchmarks.screenshots import SCENES
from bertkit.serve.app import MEDIA_TYPES, WEB
from tests.markdown import ROOT

FILES = sorted(WEB.iterdir())


def test_all_files_are_served_and_short() -> None:
    assert {"index.html", "style.css", "page.js", "icon.svg"} <= {path.name for path in FILES}
    for path in FILES:
        assert path.suffix in MEDIA_TYPES
        assert len(path.read_text().splitlines()) <= 300, path.name


def test_nothing_stands_in_the_page_that_its_policy_forbids() -> None:
    page = (WEB / "index.html").read_text()
    assert not re.search(r"\son\w+=|\sstyle=|<style|<script(?![^>]* src=)", page)
    for path in FILES:
        text = path.read_text().replace("http://www.w3.org/2000/svg", "")
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|\beval\(", text)


def test_all_modules_are_there_and_used() -> None:
    named = {
        name
        for path in FILES
        for name in re.findall(r"""(?:from "\./|src="|href=")([\w.]+\.\w+)\"""", path.read_text())
    }
    assert named == {path.name for path in FILES} - {"index.html"}


def test_pictures_are_small_and_show_what_there_is() -> None:
    views = (WEB / "views.js").read_text()
    for name, scene in SCENES.items():
        assert re.search(rf'^  "?{scene.route}"?: \{{', views, re.MULTILINE)
        picture = ROOT / "docs" / "images" / f"{name}.png"
        assert picture.stat().st_size < 150_000
