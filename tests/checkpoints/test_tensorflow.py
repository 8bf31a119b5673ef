"""Google's checkpoints: a genuine one, and damage."""

from __future__ import annotations

import random
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import bertkit
from bertkit.checkpoints.pretrained import load_pretraining_model, read_pretrained
from bertkit.checkpoints.tensorflow import read_checkpoint
from bertkit.errors import BertkitError
from bertkit.pretraining_data.batch import pack


@pytest.fixture
def fixture(data: Path) -> Path:
    return data / "tf-checkpoint"


@pytest.fixture
def copy(fixture: Path, tmp_path: Path) -> Path:
    """A writable copy of the genuine checkpoint."""
    for file in fixture.iterdir():
        shutil.copyfile(file, tmp_path / file.name)
    return tmp_path


def walk(module: Any, variable: str) -> torch.nn.Parameter:
    """The parameter of a transformers BERT that a variable's path leads to."""
    leaves = {
        "kernel": "weight",
        "gamma": "weight",
        "output_weights": "weight",
        "beta": "bias",
        "output_bias": "bias",
    }
    for step in variable.split("/"):
        if step.startswith("layer_"):
            module = module.layer[int(step.removeprefix("layer_"))]
        elif step.endswith("_embeddings"):
            module = getattr(module, step).weight
        else:
            module = getattr(module, leaves.get(step, step))
    return module


def test_the_genuine_checkpoint_computes_what_transformers_computes(
    fixture: Path, transformers: Any
) -> None:
    model = load_pretraining_model(fixture)
    config = transformers.BertConfig.from_json_file(fixture / "bert_config.json")
    other = transformers.BertForPreTraining(config).eval()
    arrays = read_checkpoint(fixture / "bert_model.ckpt")
    assert len(arrays) == 46
    touched = set()
    for variable, array in arrays.items():
        parameter = walk(other, variable)
        tensor = torch.from_numpy(array.copy())
        parameter.data.copy_(tensor.T if variable.endswith("kernel") else tensor)
        touched.add(id(parameter))
    assert {id(parameter) for parameter in other.parameters()} <= touched
    sequences = [[2, 5, 9, 14, 3], [2, 7, 3]]
    segments = [[0, 0, 0, 1, 1], [0, 0, 0]]
    packed = pack(sequences, segments)
    with torch.no_grad():
        output = model(packed, torch.arange(8))
        logits = output.mlm_logits.split([5, 3])
        for row in range(2):
            answer = other(
                input_ids=torch.tensor([sequences[row]]),
                token_type_ids=torch.tensor([segments[row]]),
            )
            torch.testing.assert_close(
                logits[row], answer.prediction_logits[0], atol=1e-5, rtol=1e-5
            )
            torch.testing.assert_close(
                output.nsp_logits[row], answer.seq_relationship_logits[0], atol=1e-5, rtol=1e-5
            )


def test_a_checkpoint_is_loaded_like_any_model(copy: Path) -> None:
    assert bertkit.load(copy).fill_mask("[MASK]")
    prefix = copy / "bert_model.ckpt"
    for named in (copy, prefix, copy / "bert_model.ckpt.index"):
        assert read_pretrained(named).tensors.keys() == read_pretrained(copy).tensors.keys()
    for file in ("vocab.txt", "bert_model.ckpt.data-00000-of-00001"):
        with pytest.raises(BertkitError, match="is a file"):
            read_pretrained(copy / file)


def test_damaged_files_are_named(copy: Path) -> None:
    data = copy / "bert_model.ckpt.data-00000-of-00001"
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(BertkitError, match=str(data)):
        load_pretraining_model(copy)
    data.unlink()
    with pytest.raises(BertkitError, match=str(data)):
        load_pretraining_model(copy)
    shutil.copyfile(copy / "bert_model.ckpt.index", copy / "second.index")
    with pytest.raises(BertkitError, match="one checkpoint"):
        load_pretraining_model(copy)
    (copy / "bert_config.json").unlink()
    with pytest.raises(BertkitError, match=r"config\.json"):
        load_pretraining_model(copy)


@pytest.mark.slow
def test_a_damaged_index_gives_one_line_or_the_weights(copy: Path) -> None:
    index = copy / "bert_model.ckpt.index"
    content = index.read_bytes()
    chance = random.Random(0)
    for _ in range(60):
        damaged = bytearray(content)
        damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        index.write_bytes(damaged)
        with suppress(BertkitError):  # nothing else is raised
            load_pretraining_model(copy)
    for length in (0, 7, 8, 40, 48, 100, len(content) - 1):
        index.write_bytes(content[:length])
        with pytest.raises(BertkitError, match="is not a checkpoint index"):
            load_pretraining_model(copy)
