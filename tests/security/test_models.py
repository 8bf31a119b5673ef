"""Model directories of someone who means harm: nothing is run, and an error is one line."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bertkit.checkpoints.pretrained import (
    load_config,
    load_pretraining_model,
    read_details,
    read_pretrained,
)
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.tasks.types import load_task_model
from tests.conftest import Bomb, load_encoder

CPU = torch.device("cpu")
FEW = settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def reconfigure(folder: Path, **changes: Any) -> None:
    write_json(folder / "config.json", {**read_json(folder / "config.json"), **changes})


def is_refused(call: Any, *arguments: Any, match: str = ".") -> None:
    """A call refuses its arguments in one line."""
    with pytest.raises(BertkitError, match=match) as caught:
        call(*arguments)
    assert len(str(caught.value).splitlines()) == 1


def model_or_line(load: Any, folder: Path) -> bool:
    """Whether loading gives something, or a `BertkitError` of one line; other errors pass on."""
    try:
        return load(folder) is not None
    except BertkitError as error:
        return len(str(error).splitlines()) == 1


@pytest.mark.parametrize("how", ["zip", "plain", "old"])
def test_a_pickle_with_code_is_refused_and_not_run(how: str, model: Path, tmp_path: Path) -> None:
    tensors: dict[str, Any] = load_file(model / "model.safetensors")
    tensors["bert.pooler.dense.bias"] = Bomb(tmp_path / "ran")
    (model / "model.safetensors").unlink()
    path = model / "pytorch_model.bin"
    if how == "plain":
        path.write_bytes(pickle.dumps(tensors))
    else:
        torch.save(tensors, path, _use_new_zipfile_serialization=how == "zip")
    for load in (load_encoder, load_pretraining_model, read_pretrained):
        is_refused(load, model, match=r"pytorch_model\.bin")
    assert not (tmp_path / "ran").exists()
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))
    assert (tmp_path / "ran").exists(), "the threat is none"


def test_code_in_a_directory_is_never_run(model: Path, tuned: Path, tmp_path: Path) -> None:
    """`auto_map` makes transformers import a file, where it is told to trust it; bertkit never."""
    for folder in (model, tuned):
        code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        for name in ("modeling_evil.py", "__init__.py", "tokenization_evil.py"):
            (folder / name).write_text(code)
        reconfigure(folder, auto_map={"AutoModel": "modeling_evil.Model"})
        described = read_json(folder / "tokenizer_config.json")
        described["auto_map"] = {"AutoTokenizer": ["tokenization_evil.T", None]}
        write_json(folder / "tokenizer_config.json", described)
    load_pretraining_model(model)
    read_pretrained(model)
    load_task_model(tuned, CPU)
    assert not (tmp_path / "ran").exists()
    assert not [name for name in sys.modules if "evil" in name]


@pytest.mark.parametrize(
    "sizes",
    [
        {"vocab_size": 10**11},
        {"hidden_size": 10**6, "num_attention_heads": 1},
        {"num_hidden_layers": 10**9},
        {"intermediate_size": 10**12},
        {"type_vocab_size": 10**12},
    ],
)
def test_configs_that_ask_for_terabytes_are_refused(sizes: dict[str, int], model: Path) -> None:
    reconfigure(model, **sizes)
    for load in (load_pretraining_model, load_encoder, read_pretrained):
        is_refused(load, model)


@pytest.mark.slow
@given(data=st.data())
@FEW
def test_a_changed_file_ends_in_a_model_or_in_one_line(data: Any, original: Path) -> None:
    """Any byte of any file, also of the header of the weights."""
    files = sorted(path for path in original.iterdir() if path.is_file())
    path = data.draw(st.sampled_from(files))
    content = path.read_bytes()
    end = 4096 if path.suffix == ".safetensors" else len(content)
    at = data.draw(st.integers(0, min(end, len(content)) - 1))
    changed = bytearray(content)
    changed[at] = data.draw(st.integers(0, 255))
    try:
        path.write_bytes(changed)
        assert model_or_line(read_pretrained, original)
        path.write_bytes(content[:at])
        assert model_or_line(read_pretrained, original)
    finally:
        path.write_bytes(content)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "1e999", '"x"', "null", "{" * 9])
def test_json_of_any_kind_is_refused(text: str, model: Path) -> None:
    (model / "config.json").write_text(text)
    is_refused(load_config, model)


def test_deep_json_is_refused_before_it_is_walked_through(model: Path) -> None:
    """The parser takes more levels than functions that call themselves."""
    for name, read in (("config.json", load_config), ("bertkit.json", read_details)):
        content = (model / name).read_text().strip()
        for opened, closed in (("[", "]"), ('{"a":', "}")):
            deep = f'"deep": {opened * 300} 1 {closed * 300}'
            (model / name).write_text(f"{content[:-1]}, {deep}}}")
            is_refused(read, model, match="levels")


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(number: float, model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["bert.pooler.dense.bias"][3] = number
    save_file(tensors, model / "model.safetensors")
    is_refused(load_encoder, model, match=r"pooler\.dense\.bias has NaN or infinite numbers")


def test_two_tensors_for_one_parameter_are_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["pooler.dense.bias"] = tensors["bert.pooler.dense.bias"].clone()
    save_file(tensors, model / "model.safetensors")
    is_refused(load_encoder, model, match="second")
