"""Google's checkpoints: a genuine one, exact round trips, and every kind of damage."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bertkit.checkpoints.families import parameter_names
from bertkit.checkpoints.sstable import (
    crc32c,
    masked_crc32c,
    read_table,
    read_varint,
    varint,
    write_table,
)
from bertkit.export.source import read_export_source
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.checkpoints import sstable as crc32c_module
from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.checkpoints.tensorflow import (
    from_google_name,
    google_name,
    read_checkpoint,
    write_checkpoint,
)
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.pretraining_data.batch import pack
from tests.google import load_google_checkpoint, save_google_checkpoint


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


def test_the_genuine_checkpoint_computes_what_transformers_computes(fixture: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = load_google_checkpoint(fixture)
    config = transformers.BertConfig.from_json_file(fixture / "bert_config.json")
    other = transformers.BertForPreTraining(config).eval()
    touched = set()
    for variable, array in read_checkpoint(fixture / "bert_model.ckpt").items():
        if "adam" in variable or variable == "global_step":
            continue
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


def test_the_genuine_checkpoint_is_read_whole_and_its_data_rewritten_to_the_byte(
    fixture: Path, tmp_path: Path
) -> None:
    arrays = read_checkpoint(fixture / "bert_model.ckpt")
    assert len(arrays) == 139
    assert arrays["bert/embeddings/word_embeddings"].shape == (15, 4)
    assert arrays["global_step"].shape == ()
    assert len(read_checkpoint(fixture / "bert_model.ckpt", slots=False)) == 46
    write_checkpoint(tmp_path / "copy", arrays)
    data = "data-00000-of-00001"
    genuine = (fixture / f"bert_model.ckpt.{data}").read_bytes()
    assert (tmp_path / f"copy.{data}").read_bytes() == genuine
    again = read_checkpoint(tmp_path / "copy")
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert again[name].dtype == array.dtype
        np.testing.assert_array_equal(again[name], array)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
def test_models_survive_the_round_trip_exactly(
    act: str, config: ModelConfig, tmp_path: Path
) -> None:
    model = PretrainingModel(ModelConfig(**{**vars(config), "hidden_act": act}))
    save_google_checkpoint(model, tmp_path / "model.ckpt")
    for path in (tmp_path, tmp_path / "model.ckpt", tmp_path / "model.ckpt.index"):
        again = load_google_checkpoint(path, hidden_act=act)
        assert again.config == model.config
        for name, tensor in model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name
    variables = read_checkpoint(tmp_path / "model.ckpt")
    kernel = variables["bert/encoder/layer_2/intermediate/dense/kernel"]
    assert kernel.shape == (24, 40)  # TensorFlow's (in, out)


def test_names_go_both_ways(config: ModelConfig) -> None:
    for names in parameter_names(PretrainingModel(config)).values():
        for name in names:
            assert from_google_name(google_name(name)) == name


@given(
    st.dictionaries(
        st.text(min_size=1, max_size=60),
        st.tuples(
            st.sampled_from(["<f4", "<f8", "<i4", "<i8", "?", "<f2"]),
            st.lists(st.integers(0, 5), max_size=3),
        ),
        max_size=90,
    )
)
@settings(max_examples=25, deadline=None)
def test_any_variables_survive_the_round_trip(
    tmp_path_factory: pytest.TempPathFactory, variables: dict[str, tuple[str, list[int]]]
) -> None:
    prefix = tmp_path_factory.mktemp("checkpoint") / "any"
    generator = np.random.default_rng(0)
    arrays = {
        name: np.asarray(generator.random(shape) * 100, dtype=dtype)
        for name, (dtype, shape) in variables.items()
    }
    write_checkpoint(prefix, arrays)
    again = read_checkpoint(prefix)
    assert again.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (again[name].dtype, again[name].shape) == (array.dtype, array.shape)
        np.testing.assert_array_equal(again[name], array)


def slow_crc32c(data: bytes) -> int:
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = (register >> 1) ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


def test_checksum_has_the_published_values() -> None:
    assert crc32c(b"") == 0
    assert crc32c(b"123456789") == 0xE3069283
    # RFC 3720, appendix B.4
    assert crc32c(bytes(32)) == 0x8A9136AA
    assert crc32c(b"\xff" * 32) == 0x62A8AB43
    assert crc32c(bytes(range(32))) == 0x46DD794E
    assert (
        masked_crc32c(b"123456789") == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) % 2**32
    )


@given(st.binary(max_size=200))
@settings(max_examples=40, deadline=None)
def test_checksum_equals_the_bit_by_bit_one(data: bytes) -> None:
    assert crc32c(data) == slow_crc32c(data)


def test_checksum_of_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crc32c_module, "CHECKSUM_BLOCK_WORDS", 16)
    for length in (63, 64, 65, 128, 1000):
        data = random.Random(length).randbytes(length)
        assert crc32c(data) == slow_crc32c(data)


@given(st.integers(0, 2**63))
@settings(max_examples=50, deadline=None)
def test_varints(value: int) -> None:
    assert read_varint(varint(value), 0) == (value, len(varint(value)))


def test_tables_of_many_blocks() -> None:
    items = [(f"key/{number:05d}".encode(), bytes(number % 50)) for number in range(2000)]
    data = write_table(items)
    assert len(data) > 3 * 4096
    assert list(read_table(data)) == items


def test_damaged_data_names_file_and_variable(copy: Path) -> None:
    data = copy / "bert_model.ckpt.data-00000-of-00001"
    content = data.read_bytes()
    flipped = bytearray(content)
    flipped[10] ^= 1
    data.write_bytes(flipped)
    first = "bert/embeddings/LayerNorm/beta"
    with pytest.raises(BertkitError, match=rf"00001: the checksum of {first} is wrong"):
        load_google_checkpoint(copy)
    data.write_bytes(content[:-1])
    with pytest.raises(BertkitError, match=r"00001 ends before the end of global_step"):
        read_checkpoint(copy / "bert_model.ckpt")
    data.unlink()
    with pytest.raises(BertkitError, match=r"cannot read .*00001 \(No such file"):
        load_google_checkpoint(copy)


def test_every_damaged_index_is_refused(copy: Path) -> None:
    index = copy / "bert_model.ckpt.index"
    content = index.read_bytes()
    chance = random.Random(0)
    for _ in range(150):
        damaged = bytearray(content)
        place = chance.randrange(len(content))
        if place >= len(content) - 40 and place < len(content) - 8 and content[place] == 0:
            continue  # the footer's padding means nothing
        damaged[place] ^= 1 << chance.randrange(8)
        index.write_bytes(damaged)
        with pytest.raises(BertkitError, match=r"bert_model.ckpt.index"):
            read_checkpoint(copy / "bert_model.ckpt")
    for length in (0, 7, 8, 40, 48, 100, len(content) - 1):
        index.write_bytes(content[:length])
        with pytest.raises(BertkitError, match=r"index is not a checkpoint index"):
            read_checkpoint(copy / "bert_model.ckpt")


def test_what_is_missing_is_named(copy: Path) -> None:
    arrays = dict(read_checkpoint(copy / "bert_model.ckpt"))
    del arrays["cls/seq_relationship/output_bias"]
    write_checkpoint(copy / "bert_model.ckpt", arrays)
    with pytest.raises(BertkitError, match=r"lacks cls.seq_relationship.bias"):
        load_google_checkpoint(copy)
    shutil.copyfile(copy / "bert_model.ckpt.index", copy / "second.index")
    with pytest.raises(BertkitError, match=r"one checkpoint .* found: bert_model.ckpt, second"):
        load_google_checkpoint(copy)
    (copy / "bert_config.json").unlink()
    with pytest.raises(BertkitError, match=r"bert_config.json does not exist"):
        load_google_checkpoint(copy / "bert_model.ckpt")
    with pytest.raises(BertkitError, match=r"cannot read .*absent.index"):
        read_checkpoint(copy / "absent")


def test_a_checkpoint_is_named_by_folder_prefix_or_index(copy: Path) -> None:
    """Any other file is refused and never looked for on the hub."""
    prefix = copy / "bert_model.ckpt"
    for named in (copy, prefix, copy / "bert_model.ckpt.index"):
        assert read_pretrained(named).tensors.keys() == read_pretrained(copy).tensors.keys()
    for file in ("vocab.txt", "bert_model.ckpt.data-00000-of-00001"):
        with pytest.raises(BertkitError, match="is a file; give the folder of a model"):
            read_pretrained(copy / file)
    for named in (copy, prefix):
        with pytest.raises(BertkitError, match="is a Google checkpoint; make it a model directory"):
            read_export_source(named, head="embedding", pooling="mean")


def test_types_without_counterpart_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match="a: numbers of type complex64 cannot go"):
        write_checkpoint(tmp_path / "c", {"a": np.zeros(2, dtype=np.complex64)})
    assert list(tmp_path.iterdir()) == []
