"""May a command write where its user says: outputs that are inputs, and folders that are taken."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bertkit.errors import BertkitError
from bertkit.files import check_output, check_replaceable, claim, new_file, read_json, write_json


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one")
    (tmp_path / "link.txt").symlink_to("texts/a.txt")
    return tmp_path


@pytest.mark.parametrize(
    ("out", "given"),
    [
        ("texts/a.txt", "texts/a.txt"),
        ("texts/a.txt", "texts/*.txt"),
        ("texts/a.txt", "link.txt"),
        ("link.txt", "texts/a.txt"),
        ("texts/new.txt", "texts"),
        ("texts/deep/new.txt", "./texts/../texts"),
        ("s3://bucket/out.txt", "texts"),
    ],
)
def test_an_output_that_is_an_input_is_refused(home: Path, out: str, given: str) -> None:
    for path in (out, Path(out)):
        with pytest.raises(BertkitError):
            check_output(path, [given])
    assert (home / "texts" / "a.txt").read_text() == "one"


def test_an_output_elsewhere_is_allowed(home: Path) -> None:
    inputs = ["texts", "hf:name", "s3://bucket/texts", ""]
    assert check_output("out/new.txt", inputs) == Path("out/new.txt")
    assert check_output(home, ["texts/a.txt"], folder=True) == home
    assert check_output("~/new.txt") == Path.home() / "new.txt"


def test_a_file_is_no_folder_and_the_reverse(home: Path) -> None:
    for out, folder in (("texts", False), ("link.txt", True), ("link.txt/below", False)):
        with pytest.raises(BertkitError):
            check_output(out, folder=folder)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_is_an_error_at_once(home: Path) -> None:
    (home / "texts").chmod(0o500)
    with pytest.raises(BertkitError, match="permission denied"):
        check_output("texts/new.txt")


def test_a_link_is_written_through(home: Path) -> None:
    with new_file(home / "link.txt") as path:
        path.write_text("two")
    assert (home / "link.txt").is_symlink()
    assert (home / "texts" / "a.txt").read_text() == "two"


SETTINGS = {"steps": (7, 8), "model": {"width": 32}, "store": "here", "corpus": "0" * 16}


def test_a_claimed_folder_is_resumed_with_equal_settings_only(tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = claim(out, "pre-training run", SETTINGS)
    assert first == read_json(out / "recipe.json") == {**SETTINGS, "steps": [7, 8]}
    assert claim(out, "pre-training run", SETTINGS) == first
    moved = {**SETTINGS, "store": "there"}
    assert claim(out, "pre-training run", moved, may_change=("store",)) == first
    wider = {**SETTINGS, "model": {"width": 64}, "corpus": "1" * 16}
    with pytest.raises(BertkitError, match=r"model\.width 32 -> 64") as refused:
        claim(out, "pre-training run", wider)
    assert "0000" not in str(refused.value)
    assert claim(out, "pre-training run", SETTINGS, may_change=("model",)) == first


def test_a_folder_with_something_else_is_not_claimed(tmp_path: Path) -> None:
    claim(tmp_path / "run", "pre-training run", SETTINGS)
    with pytest.raises(BertkitError, match=r"recipe\.json"):
        claim(tmp_path / "run", "fine-tuning", SETTINGS)
    write_json(tmp_path / "model" / "config.json", {})
    with pytest.raises(BertkitError, match=r"config\.json"):
        claim(tmp_path / "model", "pre-training run", SETTINGS)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log.txt").touch()  # as in `nohup bertkit pretrain > run/log.txt`
    claim(tmp_path / "logs", "pre-training run", SETTINGS)
    (tmp_path / "run" / "recipe.json").write_text("{")
    with pytest.raises(BertkitError):
        claim(tmp_path / "run", "pre-training run", SETTINGS)


def test_only_a_folder_of_its_kind_is_replaced(tmp_path: Path) -> None:
    check_replaceable(tmp_path / "new", "export")
    check_replaceable(tmp_path, "export")
    (tmp_path / "letter.txt").touch()
    with pytest.raises(BertkitError):
        check_replaceable(tmp_path, "export")
    write_json(tmp_path / "export.json", {})
    check_replaceable(tmp_path, "export")
