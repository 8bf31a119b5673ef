"""The message of the one error a user can cause."""

from __future__ import annotations

import pickle

import pytest

from bertkit.errors import BertkitError, DivergedError, HeldError, short_repr


@pytest.mark.parametrize(
    "character", ["\n", "\r", "\x0b", "\x1b", "\x1e", "\x85", "\u2028", "\x00", "\u202e", "\udce9"]
)
def test_a_message_is_one_line_whatever_a_file_holds(character: str) -> None:
    error = DivergedError(f"no task '{character}[2J' in Zoë's מודל; check it")
    assert len(str(error).splitlines()) == 1
    assert character not in str(error)
    assert str(error) == f"no task '{character!r}[2J' in Zoë's מודל; check it".replace(
        repr(character), repr(character)[1:-1]
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_other_characters_stay() -> None:
    message = "the label 'می\u200cخواهم' \u00a0 is not one; known: 王, 👩\u200d💻"
    assert str(BertkitError(message)) == message


def test_errors_have_a_code_which_other_processes_see_too() -> None:
    assert BertkitError("x").code == "error"
    assert (HeldError("x").code, DivergedError("x").code) == ("held", "diverged")
    error = pickle.loads(pickle.dumps(BertkitError("x", code="link")))
    assert (str(error), error.code) == ("x", "link")


def test_values_of_any_depth_and_size_are_shown() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert len(short_repr(deep)) <= 60
    assert len(short_repr("a" * 1_000_000)) <= 60
    assert short_repr(("river", 5)) == "('river', 5)"
