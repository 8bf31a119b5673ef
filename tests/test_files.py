from __future__ import annotations

import errno
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest

from bertkit import files
from bertkit.corpus.store import write_array
from bertkit.errors import BertkitError, HeldError
from bertkit.files import (
    check_file_size,
    check_output,
    exclusive_lock,
    from_home,
    new_file,
    new_folder,
    read_json,
    temporary_name,
    write_atomic,
    write_json,
    write_text,
)


def test_interrupted_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a" / "b.json"
    write_json(path, {"old": 1})

    def die(descriptor: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", die)
    with pytest.raises(KeyboardInterrupt):
        write_json(path, {"new": 2})
    assert read_json(path) == {"old": 1}
    assert [entry.name for entry in path.parent.iterdir()] == ["b.json"]


def test_one_rule_says_what_is_remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert check_output("c:/out.json") == Path("c:/out.json")
    for url in ("s3://bucket/a.txt", "HF://models/x", "file+ssh:/a"):
        with pytest.raises(BertkitError, match="is remote"):
            check_output(url)


def test_interrupted_folder_leaves_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with new_folder(target) as folder:
        (folder / "file").write_text("old")
    with pytest.raises(BertkitError, match="cannot write"), new_folder(target) as folder:
        (folder / "nowhere" / "file").write_text("new")
    assert (target / "file").read_text() == "old"
    with new_folder(target) as folder:
        (folder / "other").write_text("new")
    assert [entry.name for entry in target.iterdir()] == ["other"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_folder_that_keeps_its_name_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Path, target: Path) -> Path:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(self))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(BertkitError, match="Directory not empty"), new_folder(tmp_path / "model"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_only_errors_about_the_folder_say_that_it_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with pytest.raises(FileNotFoundError, match="input"), new_folder(path) as folder:
        (folder / "file").write_bytes((tmp_path / "input").read_bytes())
    with pytest.raises(BertkitError, match=r"cannot write .*/model: the disk is full"):  # noqa: SIM117
        with new_folder(path):
            raise OSError(errno.ENOSPC, "No space left on device")  # as `write` raises it
    assert list(tmp_path.iterdir()) == []


def test_leftovers_of_a_dead_process_of_this_machine_are_removed_at_once(tmp_path: Path) -> None:
    script = f"""
import os
from pathlib import Path
from bertkit.files import temporary_name
for name in ("model", "other"):
    temporary_name(Path({str(tmp_path)!r}) / name).mkdir()
temporary_name(Path({str(tmp_path)!r}) / "model").write_text("half")
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", script], check=False)
    alive = temporary_name(tmp_path / "model")
    alive.write_text("half")
    foreign = tmp_path / ".model.tmp-99999999-00000000@elsewhere"
    foreign.write_text("half")
    write_text(tmp_path / "model", "whole")
    left = {path.name for path in tmp_path.iterdir()}
    assert len(left) == 4
    assert {"model", alive.name, foreign.name} < left


def test_devices_and_pipes_are_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(BertkitError, match="is a device or a pipe"):
            write_text(path, "x")
        assert not path.is_file()


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_writers_of_one_name_with_one_pid_do_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Containers have pids of their own, so two may have the same, on a folder that they share."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    target = tmp_path / "model"
    if kind == "file":
        with new_file(target) as one:
            one.write_text("one")
            with new_file(target) as two:
                two.write_text("two")
            assert target.read_text() == "two"
            assert one.read_text() == "one"
        assert target.read_text() == "one"
    else:
        with new_folder(target) as one:
            (one / "a").write_text("one")
            with new_folder(target) as two:
                (two / "b").write_text("two")
            assert [path.name for path in target.iterdir()] == ["b"]
            assert (one / "a").read_text() == "one"
        assert [path.name for path in target.iterdir()] == ["a"]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("path", ["file/below.txt", "/proc/nowhere/x.txt"])
def test_impossible_places_are_one_clear_line(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(BertkitError, match=r"cannot write .*choose another folder"):
        write_text(tmp_path / path, "x")


def test_json_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "bad.json").write_text('{"a": 1,\n oops')
    with pytest.raises(BertkitError, match=r"bad\.json is not valid JSON .*line 2"):
        read_json(tmp_path / "bad.json")
    with pytest.raises(BertkitError, match="does not exist"):
        read_json(tmp_path / "none.json")
    with pytest.raises(BertkitError, match="cannot read"):
        read_json(tmp_path)


def test_names_that_are_no_utf8_come_back_from_json(tmp_path: Path) -> None:
    value = {os.fsdecode(b"caf\xe9"): [os.fsdecode(b"\xff\xfe"), "Zoë 漢"]}
    write_json(tmp_path / "a.json", value)
    assert read_json(tmp_path / "a.json") == value
    assert "Zoë 漢" in (tmp_path / "a.json").read_text(encoding="utf-8")


def test_arrays_round_trip(tmp_path: Path) -> None:
    array = np.arange(7, dtype=np.uint16)
    write_array(tmp_path / "a.npy", array)
    np.testing.assert_array_equal(np.load(tmp_path / "a.npy"), array)


def test_lock_is_freed(tmp_path: Path) -> None:
    with (
        exclusive_lock(tmp_path),
        pytest.raises(BertkitError, match="another process"),
        exclusive_lock(tmp_path),
    ):
        pass
    with exclusive_lock(tmp_path):
        pass


def test_a_held_folder_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = exclusive_lock(tmp_path)
    held.__enter__()
    with pytest.raises(HeldError, match="another process"), exclusive_lock(tmp_path, wait=0.15):
        pass
    waits: list[float] = []

    def end(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            held.__exit__(None, None, None)

    monkeypatch.setattr(files.time, "sleep", end)
    with exclusive_lock(tmp_path, wait=600):
        assert len(waits) == 3


def test_a_file_system_without_locks_is_no_other_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    expected = pytest.raises(BertkitError, match=r"cannot lock .*\(No locks available\)")
    with expected as caught, exclusive_lock(tmp_path, wait=600):
        pass
    assert not isinstance(caught.value, HeldError)


def test_kill_between_the_two_renames_loses_nothing(tmp_path: Path) -> None:
    aside = tmp_path / ".model.tmp-12345-old"
    aside.mkdir()
    (aside / "file").write_text("old")
    with (
        pytest.raises(BertkitError, match="cannot write"),
        new_folder(tmp_path / "model") as folder,
    ):
        (folder / "nowhere" / "file").write_text("new")
    assert (tmp_path / "model" / "file").read_text() == "old"


def test_a_short_write_of_an_array_is_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NumPy's error has no number: "8 requested and 0 written"."""

    def short(*_: object, **__: object) -> None:
        raise OSError("8 requested and 0 written")

    monkeypatch.setattr(np, "save", short)
    with pytest.raises(BertkitError, match=r"cannot write .*a\.npy: the disk is full"):
        write_array(tmp_path / "a.npy", np.zeros(8))
    assert not list(tmp_path.iterdir())


def test_other_errors_without_a_number_are_no_full_disk(tmp_path: Path) -> None:
    """Such as gzip's, of a file that is read meanwhile."""

    def write(_: Path) -> None:
        raise OSError("CRC check failed")

    with pytest.raises(BertkitError, match=r"cannot write .*a\.txt: CRC check failed; choose"):
        write_atomic(tmp_path / "a.txt", write)


def test_files_beyond_a_limit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345")
    check_file_size(tmp_path / "a", 5)
    check_file_size(tmp_path / "absent", 5)
    with pytest.raises(BertkitError, match="has 5 bytes; at most 4 are read"):
        check_file_size(tmp_path / "a", 4)


def test_the_home_of_a_user_that_there_is_not() -> None:
    assert from_home("~nobody-of-this-name/x.csv") == "~nobody-of-this-name/x.csv"
    assert from_home("~") == str(Path.home())
    assert from_home("s3://store/~") == "s3://store/~"


def interrupted(action: Callable[[], object], moment: int) -> bool:
    """Call something with a Ctrl-C before its n-th step in files; return whether one came."""
    left = moment
    traced = {files.__file__, pathlib.__file__}

    def step(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        nonlocal left
        if frame.f_code.co_filename not in traced:
            return None
        # A generator cannot be interrupted at its yield, which is a "return", too.
        if event == "line" or (event == "return" and frame.f_code.co_filename != files.__file__):
            left -= 1
            if left == 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an open file
@pytest.mark.parametrize("kind", ["folder", "file"])
@pytest.mark.parametrize("old", [True, False], ids=["replaced", "new"])
def test_an_interruption_at_any_step_leaves_no_temporary_file(
    tmp_path: Path, kind: str, old: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # takes most of the time
    path = tmp_path / "out"

    def write(content: str) -> None:
        if kind == "file":
            write_text(path, content)
        else:
            with new_folder(path) as folder:
                (folder / "part").write_text(content)

    def content() -> str:
        return (path / "part" if kind == "folder" else path).read_text()

    moment, went_on = 0, True
    while went_on:
        files.remove_path(path)
        if old:
            write("old")
        moment += 1
        went_on = interrupted(partial(write, "new"), moment)
        assert [entry.name for entry in tmp_path.iterdir()] in ([], ["out"]), moment
        if old or not went_on:
            assert path.exists(), moment
        if path.exists():
            assert content() in ("old", "new"), moment
    assert content() == "new"
    assert moment > 20
