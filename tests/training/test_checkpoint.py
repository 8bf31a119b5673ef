"""Checkpoints: exact round trips, and every way a file or a disk can fail."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from bertkit.errors import BertkitError
from bertkit.training import optimizer as checkpoint
from bertkit.training.optimizer import (
    AdamW,
    build_optimizer,
    load_latest,
    model_tensors,
    optimizer_tensors,
    restore_model,
    restore_optimizer,
    save_checkpoint,
)


class Tied(nn.Module):
    """A tied decoder, a LayerNorm, a buffer, and a layer that no loss may reach."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.words = nn.Embedding(7, width)
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, 7)
        self.decoder.weight = self.words.weight
        self.pooler = nn.Linear(width, 2)
        self.register_buffer("positions", torch.arange(5))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.dropout(self.decoder(self.norm(self.words(ids))), 0.2)


def train(model: Tied, optimizer: AdamW, steps: range) -> None:
    for step in steps:
        torch.manual_seed(step)
        loss = model(torch.randint(7, (8,))).logsumexp(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def start(seed: int = 0, bias_correction: bool = True) -> tuple[Tied, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Tied()
    return model, build_optimizer(model, learning_rate=0.01, bias_correction=bias_correction)


def save(folder: Path, step: int, **settings: Any) -> Path:
    tensors = {
        "model": {"weight": torch.full((64,), float(step)), "ids": torch.arange(9)},
        "optimizer": {"exp_avg.weight": torch.full((64,), -float(step))},
    }
    return save_checkpoint(folder, step, tensors, {"epoch": 1, "at": [step, 0.1]}, **settings)


def refuse_warnings(message: str) -> None:
    raise AssertionError(message)


@pytest.mark.parametrize("bias_correction", [True, False])
def test_resuming_equals_the_undisturbed_run(tmp_path: Path, bias_correction: bool) -> None:
    model, optimizer = start(bias_correction=bias_correction)
    train(model, optimizer, range(3))
    save_checkpoint(
        tmp_path,
        3,
        {"model": model_tensors(model), "optimizer": optimizer_tensors(model, optimizer)},
        {},
    )
    train(model, optimizer, range(3, 6))

    again, fresh_optimizer = start(seed=99, bias_correction=bias_correction)
    found = load_latest(tmp_path, refuse_warnings)
    assert found is not None
    restore_model(again, found.tensors["model"])
    restore_optimizer(again, fresh_optimizer, found.tensors["optimizer"])
    train(again, fresh_optimizer, range(found.step, 6))

    for name, value in model_tensors(model).items():
        assert torch.equal(value, model_tensors(again)[name]), name
    expected = optimizer_tensors(model, optimizer)
    restored = optimizer_tensors(again, fresh_optimizer)
    assert expected.keys() == restored.keys()
    for name, value in expected.items():
        assert torch.equal(value, restored[name]), name


def test_tied_tensors_are_saved_once_and_stay_tied(tmp_path: Path) -> None:
    model, optimizer = start()
    names = set(model_tensors(model))
    assert "words.weight" in names
    assert "decoder.weight" not in names
    assert "scratch" not in names
    assert "exp_avg.decoder.weight" not in optimizer_tensors(model, optimizer)
    save_checkpoint(tmp_path, 1, {"model": model_tensors(model)}, {})
    again, _ = start(seed=5)
    found = load_latest(tmp_path, refuse_warnings)
    assert found is not None
    restore_model(again, found.tensors["model"])
    assert again.decoder.weight is again.words.weight
    assert torch.equal(again.decoder.weight, model.decoder.weight)


BITS = {
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float64: torch.int64,
}


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_every_bit_pattern_survives(tmp_path_factory: pytest.TempPathFactory, data: Any) -> None:
    kinds = [*BITS, torch.int64, torch.int32, torch.uint8, torch.bool]
    tensors = {}
    for name in data.draw(st.lists(st.text(min_size=1), unique=True, max_size=4)):
        kind = data.draw(st.sampled_from(kinds))
        shape = data.draw(st.lists(st.integers(0, 3), max_size=3))
        seed = data.draw(st.integers(0, 1000))
        limit = 2 if kind is torch.bool else 256
        size = torch.empty((), dtype=kind).element_size()
        raw = torch.randint(
            limit, (*shape, size), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8
        )
        tensors[name] = raw.view(kind).reshape(shape)  # NaNs with payloads and -0.0 among them
    tensors.pop("__metadata__", None)  # the one name that safetensors keeps to itself
    folder = tmp_path_factory.mktemp("run")
    progress = {"index": data.draw(st.integers()), "name": data.draw(st.text(alphabet='aé漢\n"'))}
    save_checkpoint(folder, 7, {"model": tensors}, progress)
    found = load_latest(folder, refuse_warnings)
    assert found is not None
    assert found.progress == progress
    assert found.tensors["model"].keys() == tensors.keys()
    for name, value in tensors.items():
        other = found.tensors["model"][name]
        assert (other.dtype, other.shape) == (value.dtype, value.shape)
        bits = BITS.get(value.dtype, value.dtype)
        assert torch.equal(other.view(bits), value.view(bits))


def test_progress_with_number_keys_and_infinity_can_be_read_back(tmp_path: Path) -> None:
    progress = {"counts": {2: "b", 10: "a"}, "best": float("inf"), "pair": (1, 2)}
    save_checkpoint(tmp_path, 1, {}, progress)
    found = load_latest(tmp_path, refuse_warnings)
    assert found is not None
    expected = {"counts": {"2": "b", "10": "a"}, "best": float("inf"), "pair": [1, 2]}
    assert found.progress == expected


def test_a_transposed_tensor_is_saved_by_its_values(tmp_path: Path) -> None:
    value = torch.arange(6.0).view(2, 3).T
    save_checkpoint(tmp_path, 1, {"model": {"value": value}}, {})
    found = load_latest(tmp_path, refuse_warnings)
    assert found is not None
    assert torch.equal(found.tensors["model"]["value"], value)


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert load_latest(tmp_path / "absent", refuse_warnings) is None
    assert load_latest(tmp_path, refuse_warnings) is None


FILES = ("model.safetensors", "optimizer.safetensors", "progress.json")


def flip_bit(path: Path, position: int, bit: int = 3) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def check_falls_back(folder: Path, named: str) -> None:
    """The newest checkpoint, 2, is refused with `named` in the line; 1 is whole and is used."""
    lines: list[str] = []
    found = load_latest(folder, lines.append)
    assert found is not None
    assert found.step == 1
    assert torch.equal(found.tensors["model"]["weight"], torch.full((64,), 1.0))
    assert found.progress == {"epoch": 1, "at": [1, 0.1]}
    assert len(lines) == 1
    assert "step-00000002" in lines[0]
    assert named in lines[0]
    assert "\n" not in lines[0]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("place", [0.0, 0.3, 0.6, 0.95])
def test_one_flipped_bit_is_noticed(tmp_path: Path, name: str, place: float) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2) / name
    flip_bit(path, int(place * path.stat().st_size))
    check_falls_back(tmp_path, name)


@pytest.mark.slow
def test_any_flipped_bit_of_the_progress_file_is_noticed_or_harmless(tmp_path: Path) -> None:
    path = save_checkpoint(tmp_path, 2, {}, {"epoch": 1, "at": [2, 0.1]}) / "progress.json"
    whole = path.read_bytes()
    before = checkpoint.load_checkpoint(path.parent, 2).progress
    for position in range(len(whole)):
        for bit in (0, 3, 5):
            flip_bit(path, position, bit)
            try:  # white space may turn into other white space
                assert checkpoint.load_checkpoint(path.parent, 2).progress == before
                assert whole[position : position + 1].isspace()
            except BertkitError:
                pass
            path.write_bytes(whole)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kept", [0, 10, -1])
def test_a_truncated_file_is_noticed(tmp_path: Path, name: str, kept: int) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2) / name
    content = path.read_bytes().rstrip()
    path.write_bytes(content[:kept])
    check_falls_back(tmp_path, name)


@pytest.mark.parametrize("name", FILES)
def test_a_deleted_file_is_noticed(tmp_path: Path, name: str) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 2) / name).unlink()
    check_falls_back(tmp_path, name)


def test_when_nothing_is_whole_training_does_not_silently_start_again(tmp_path: Path) -> None:
    for step in (1, 2):
        (save(tmp_path, step) / "model.safetensors").unlink()
    lines: list[str] = []
    with pytest.raises(BertkitError, match="is intact"):
        load_latest(tmp_path, lines.append)
    assert len(lines) == 2


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_only_the_newest_are_kept(tmp_path: Path, keep: int) -> None:
    for step in range(1, 6):
        save(tmp_path, step, keep=keep)
    expected = [f"step-{step:08d}" for step in range(6 - keep, 6)]
    assert sorted(path.name for path in tmp_path.iterdir()) == expected


def test_leftovers_of_a_killed_save_are_ignored_and_then_removed(tmp_path: Path) -> None:
    save(tmp_path, 1)
    leftover = tmp_path / ".step-00000002.tmp-4242"
    leftover.mkdir()
    (leftover / "model.safetensors").write_bytes(b"half")
    found = load_latest(tmp_path, refuse_warnings)
    assert found is not None
    assert found.step == 1
    (tmp_path / "notes.txt").write_text("the user's own")
    save(tmp_path, 2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["notes.txt", "step-00000001", "step-00000002"]


def test_going_back_behind_a_damaged_checkpoint_removes_it_and_keeps_the_new(
    tmp_path: Path,
) -> None:
    save(tmp_path, 10)
    (save(tmp_path, 20) / "model.safetensors").unlink()
    save(tmp_path, 15, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000015"]


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path, 3)
    save_checkpoint(tmp_path, 3, {"model": {"x": torch.ones(1)}}, {"again": True})
    found = load_latest(tmp_path, refuse_warnings)
    assert found is not None
    assert found.progress == {"again": True}


def test_restoring_into_another_model_is_refused_and_changes_nothing() -> None:
    model, optimizer = start()
    train(model, optimizer, range(2))
    tensors = {name: value.clone() for name, value in model_tensors(model).items()}
    moments = {name: value.clone() for name, value in optimizer_tensors(model, optimizer).items()}
    other, other_optimizer = start(seed=1)
    before = {name: value.clone() for name, value in model_tensors(other).items()}

    for broken in (
        {k: v for k, v in tensors.items() if k != "norm.bias"},
        {**tensors, "extra": torch.ones(1)},
        {**tensors, "norm.bias": torch.ones(5)},
        {**tensors, "norm.bias": torch.ones(4).bfloat16()},
    ):
        with pytest.raises(BertkitError, match="the model checkpoint does not fit"):
            restore_model(other, broken)
    for broken in ({}, {**moments, "exp_avg.gone": torch.ones(1)}):
        with pytest.raises(BertkitError, match="the optimizer checkpoint does not fit"):
            restore_optimizer(other, other_optimizer, broken)
    assert all(torch.equal(before[name], value) for name, value in model_tensors(other).items())
    assert not other_optimizer.state


def test_bias_correction_cannot_change_on_the_way() -> None:
    model, corrected = start()
    _, original = start(bias_correction=False)
    moments = optimizer_tensors(model, corrected)
    with pytest.raises(BertkitError, match="was made with bias correction"):
        restore_optimizer(*start(bias_correction=False), moments)
    del original
    other, original = start(bias_correction=False)
    moments = optimizer_tensors(other, original)
    with pytest.raises(BertkitError, match="was made without bias correction"):
        restore_optimizer(*start(), moments)
