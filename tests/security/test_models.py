"""Model directories of someone who means harm are refused in one line; nothing is run or taken."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bertkit.export.source import read_export_source
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from bertkit.checkpoints.pretrained import (
    load_config,
    load_model,
    load_pretraining_model,
    read_pretrained,
)
from bertkit.checkpoints.save import save_model
from bertkit.checkpoints.sentence_transformers import TextPooling, write_pooling
from bertkit.checkpoints.tensorflow import google_tensors
from bertkit.checkpoints.weights import load_state, read_safetensors, read_tensors
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.predict.embeddings import load_embedder
from bertkit.predict.load import load as load_anything
from bertkit.tasks.classification import Classification
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.saved import load_task_model
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import Bomb, load_encoder
from tests.google import save_google_checkpoint

CPU = torch.device("cpu")
FEW = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def reconfigure(folder: Path, **changes: Any) -> None:
    write_json(folder / "config.json", {**read_json(folder / "config.json"), **changes})


def is_refused(call: Any, *arguments: Any, match: str = ".") -> str:
    """The one line with which a call refuses its arguments."""
    with pytest.raises(BertkitError, match=match) as caught:
        call(*arguments)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


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
        is_refused(load, model, match=r"pytorch_model\.bin (is damaged|holds Python objects)")
    path.rename(model / "model.pt")
    is_refused(read_tensors, model / "model.pt", match="is damaged")
    assert not (tmp_path / "ran").exists()


def test_the_bomb_would_go_off(tmp_path: Path) -> None:
    """What the tests above try is a threat."""
    pickle.loads(pickle.dumps(Bomb(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


def test_code_in_a_directory_is_never_run(model: Path, tuned: Path, tmp_path: Path) -> None:
    """`auto_map` makes transformers import a file, where it is told to trust it; bertkit never."""
    for folder in (model, tuned):
        code = f"from pathlib import Path\nPath({str(tmp_path / 'ran')!r}).touch()\n"
        for name in ("modeling_evil.py", "__init__.py", "tokenization_evil.py", "conftest.py"):
            (folder / name).write_text(code)
        evil = {"AutoConfig": "modeling_evil.Config", "AutoModel": "modeling_evil.Model"}
        reconfigure(folder, auto_map=evil, custom_pipelines={"x": {"impl": "modeling_evil.P"}})
        settings_of = read_json(folder / "tokenizer_config.json")
        settings_of["auto_map"] = {"AutoTokenizer": ["tokenization_evil.T", None]}
        write_json(folder / "tokenizer_config.json", settings_of)
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
        {"max_position_embeddings": 10**12},
        {"type_vocab_size": 10**12},
        {"vocab_size": 10**400},
    ],
)
def test_configs_that_ask_for_terabytes_are_refused(sizes: dict[str, int], model: Path) -> None:
    reconfigure(model, **sizes)
    held = (model / "model.safetensors").stat().st_size
    for load in (load_pretraining_model, load_encoder, read_pretrained):
        message = is_refused(load, model, match=r"the config asks for .* parameters, but the")
        assert f"{held:,} bytes" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_attention_heads": 3},
        {"num_attention_heads": -2},
        {"hidden_size": -16},
        {"hidden_size": "16"},
        {"hidden_size": 16.0},
        {"hidden_size": True},
        {"hidden_size": None},
        {"num_hidden_layers": 3},
        {"vocab_size": 16},
        {"layer_norm_eps": float("nan")},
        {"hidden_dropout_prob": float("inf")},
        {"hidden_dropout_prob": 1},
        {"initializer_range": 0},
        {"hidden_act": {"gelu": 1}},
        {"model_type": ["bert"]},
    ],
)
def test_absurd_sizes_are_refused(changes: dict[str, Any], model: Path) -> None:
    reconfigure(model, **changes)
    is_refused(load_pretraining_model, model)
    is_refused(lambda path: read_pretrained(path).build(Encoder, keep_head=False), model)


def test_shared_layers_have_a_limit(config: Any, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """ALBERT's layers take no bytes each, and so nothing else would limit them."""
    from dataclasses import replace

    from bertkit.checkpoints.save import save_model

    albert = replace(config, share_layers=True, embedding_size=8)
    save_model(tmp_path / "albert", Encoder(albert), tokenizer, {})
    assert load_encoder(tmp_path / "albert").config == albert
    reconfigure(tmp_path / "albert", num_hidden_layers=10**9)
    is_refused(load_encoder, tmp_path / "albert", match="asks for 1,000,000,000 layers")


NUMBERS = [0, 1, -1, 2, 3, 7, 40, 10**6, 10**12, 10**30, -(10**12), 1.5, float("nan"), 1e308]
VALUES = st.one_of(
    st.sampled_from(NUMBERS),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    st.lists(st.integers() | st.text(max_size=3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2),
)
FILES = ("config.json", "bertkit.json", "tokenizer_config.json")


@FEW
@given(data=st.data())
def test_a_changed_file_ends_in_a_model_or_in_one_line(data: Any, original: Path) -> None:
    """Any fields of a JSON file get any values."""
    name = data.draw(st.sampled_from(FILES))
    values = read_json(original / name)
    fields = st.sampled_from([*values, "id2label", "architectures", "problem_type", "settings"])
    changed = {**values, **data.draw(st.dictionaries(fields, VALUES, min_size=1, max_size=3))}
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(original, Path(folder) / "model")
        (copy / name).write_text(json.dumps(changed))
        for load in (
            load_pretraining_model,
            read_pretrained,
            lambda path: load_task_model(path, CPU),
        ):
            assert model_or_line(load, copy)


@FEW
@given(data=st.data())
def test_flipped_bits_of_a_header_end_in_a_model_or_in_one_line(data: Any, original: Path) -> None:
    content = bytearray((original / "model.safetensors").read_bytes())
    (header,) = struct.unpack("<Q", content[:8])
    for place in data.draw(st.lists(st.integers(0, 8 + header - 1), min_size=1, max_size=3)):
        content[place] ^= 1 << data.draw(st.integers(0, 7))
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(original, Path(folder) / "model")
        (copy / "model.safetensors").write_bytes(content)
        assert model_or_line(lambda path: load_model(path, Encoder), copy)


HEADERS: dict[str, Any] = {
    "terabytes": {"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}},
    "overflow": {"x": {"dtype": "F32", "shape": [2**62, 4], "data_offsets": [0, 0]}},
    "shape and bytes differ": {"x": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4]}},
    "backwards": {"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
    "negative": {"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}},
    "unknown type": {"x": {"dtype": "OBJECT", "shape": [1], "data_offsets": [0, 4]}},
    "overlapping": {
        name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in ("x", "y")
    },
    "no object": [1],
}


@pytest.mark.parametrize("name", HEADERS)
def test_absurd_headers_are_refused(name: str, model: Path) -> None:
    text = json.dumps(HEADERS[name]).encode()
    padding = b"\0" * (model / "model.safetensors").stat().st_size
    (model / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + padding)
    is_refused(load_encoder, model, match=r"model\.safetensors is damaged")


@pytest.mark.parametrize("length", [2**63, 2**40, 10**9])
def test_headers_of_absurd_length_are_refused(length: int, model: Path) -> None:
    content = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(struct.pack("<Q", length) + content[8:])
    is_refused(load_encoder, model, match=r"model\.safetensors is damaged")


def as_pickle(model: Path) -> dict[str, torch.Tensor]:
    """The tensors of a directory; their file is removed."""
    tensors = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    return tensors


def test_one_number_cannot_stand_for_a_terabyte(model: Path) -> None:
    """A view of one half-precision number becomes real when it is converted."""
    tensors = as_pickle(model)
    tensors["cls.extra"] = torch.zeros(1, dtype=torch.float16).expand(10**12)
    torch.save(tensors, model / "pytorch_model.bin")
    is_refused(load_encoder, model, match=r"would take 2,000,[\d,]+ bytes, and the file has")


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
def test_tensors_without_data_are_refused(model: Path) -> None:
    tensors = as_pickle(model)
    shape = tensors["bert.pooler.dense.weight"].shape
    sparse = torch.sparse_coo_tensor(torch.zeros(2, 1, dtype=torch.long), torch.ones(1), shape)
    for wrong in (sparse, torch.empty(shape, device="meta")):
        torch.save({**tensors, "bert.pooler.dense.weight": wrong}, model / "pytorch_model.bin")
        is_refused(load_encoder, model, match=r"is sparse or without data|is damaged")
    torch.save({**tensors, 5: torch.ones(1)}, model / "pytorch_model.bin")
    is_refused(load_encoder, model, match="5 is not a tensor name")


def test_archives_that_grow_are_refused(model: Path) -> None:
    """Zeros pack a thousand times; torch never packs and yet would unpack."""
    tensors = as_pickle(model)
    torch.save({**tensors, "cls.zeros": torch.zeros(10**7)}, model / "whole.bin")
    with (
        zipfile.ZipFile(model / "whole.bin") as whole,
        zipfile.ZipFile(model / "pytorch_model.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in whole.namelist():
            packed.writestr(entry, whole.read(entry))
    assert (model / "pytorch_model.bin").stat().st_size < 10**6
    is_refused(load_state, model, match="holds compressed data, which torch never writes")


@pytest.mark.parametrize(
    "name", ["../secret.safetensors", "/etc/passwd", "..", ".", "", "a/b", "\0", 5, None, ["x"]]
)
def test_an_index_names_files_beside_it_only(name: Any, model: Path, tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "secret.safetensors")
    (model / "model.safetensors").unlink()
    write_json(model / "model.safetensors.index.json", {"weight_map": {"a": name}})
    is_refused(load_state, model)


@pytest.mark.parametrize(
    "text",
    ["[" * 10**5, "9" * 5000, '{"vocab_size": ' + "9" * 5000 + "}", "\ud800", "{'a': 1}", "\0"],
)
def test_json_of_any_kind_is_refused(text: str, model: Path) -> None:
    (model / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    is_refused(load_encoder, model, match=r"config\.json")


def enormous(path: Path, size: int) -> None:
    """A file of zeros that takes no place on the disk."""
    with path.open("wb") as file:
        file.truncate(size)


@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "tokenizer.json"])
def test_enormous_files_are_not_read(name: str, model: Path) -> None:
    enormous(model / name, 1 << 40)
    is_refused(read_pretrained, model, match=rf"{name} has 1,099,511,627,776 bytes; at most")


def test_weights_beyond_the_memory_are_not_read(model: Path) -> None:
    enormous(model / "model.safetensors", 1 << 43)
    is_refused(load_encoder, model, match=r"weights have 8,796,093,022,208 bytes, but this machine")


def test_vocabularies_that_do_not_fit_are_refused(model: Path) -> None:
    lines = (model / "vocab.txt").read_text()
    tokens = read_json(model / "tokenizer.json")
    (model / "vocab.txt").write_text(lines + "another\n")
    is_refused(read_pretrained, model, match="hold different vocabularies")
    (model / "tokenizer.json").unlink()
    is_refused(read_pretrained, model, match="tokens but the model only")
    for damaged in (lines.replace("[MASK]", "mask"), lines + "\n\n", lines + lines, "\0" * 99, ""):
        (model / "vocab.txt").write_text(damaged)
        is_refused(read_pretrained, model, match=r"vocab\.txt")
    (model / "vocab.txt").write_bytes(b"\xff\xfe" * 99)
    is_refused(read_pretrained, model, match="is not UTF-8")
    (model / "vocab.txt").unlink()
    tokens["model"]["vocab"]["[MASK]"] = 10**12
    write_json(model / "tokenizer.json", tokens)
    is_refused(read_pretrained, model, match="are not 0, 1, 2")


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": None},
        {"labels": []},
        {"labels": [1, 2, 3]},
        {"labels": "abc"},
        {"labels": ["a"] * 4},
        {"settings": [1]},
        {"settings": {"__class__": 1}},
    ],
)
def test_absurd_details_are_refused(changes: dict[str, Any], tuned: Path) -> None:
    load_task_model(tuned, CPU)
    write_json(tuned / "bertkit.json", {**read_json(tuned / "bertkit.json"), **changes})
    is_refused(load_task_model, tuned, CPU)


def test_arrays_of_objects_are_refused(tmp_path: Path) -> None:
    """A `.npy` of objects is a pickle."""
    from bertkit.files import map_array

    path = tmp_path / "features.npy"
    np.save(path, np.array([Bomb(tmp_path / "ran")], dtype=object), allow_pickle=True)
    is_refused(map_array, path, match="is not an array of numbers")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("bertkit.json", {"task": []}),
        ("bertkit.json", {"recipe": "x"}),
        ("bertkit.json", {"recipe": {"objectives": [1]}}),
        ("config.json", {"architectures": 7}),
        ("config.json", {"architectures": [[]]}),
        ("modules.json", [{"type": "a.Transformer", "path": "../.."}]),
        ("modules.json", [{"type": "a.Transformer", "path": "/etc"}]),
        ("config_sentence_transformers.json", {"prompts": [1], "default_prompt_name": "a"}),
        ("config_sentence_transformers.json", {"prompts": {"a": 1}, "default_prompt_name": "a"}),
        ("config_sentence_transformers.json", {"prompts": {}, "default_prompt_name": []}),
        ("sentence_bert_config.json", {"max_seq_length": "abc"}),
        ("tokenizer_config.json", {"model_max_length": "x"}),
        ("1_Pooling/config.json", []),
    ],
)
def test_absurd_descriptions_end_in_a_model_or_in_one_line(
    file: str, changes: Any, model: Path, tokenizer: Tokenizer
) -> None:
    write_pooling(model, TextPooling("mean"), load_config(model))
    path = model / file
    known = read_json(path) if path.is_file() else {}
    if file == "tokenizer_config.json":
        (model / "sentence_bert_config.json").unlink()
    write_json(path, {**known, **changes} if isinstance(changes, dict) else changes)
    for read in (load_anything, read_export_source, load_embedder):
        assert model_or_line(read, model)


NO_NUMBERS = [float("nan"), float("inf"), float("-inf")]


@pytest.mark.parametrize("number", NO_NUMBERS)
@pytest.mark.parametrize("kind", ["safetensors", "bin", "double"])
def test_weights_that_are_no_numbers_are_refused(kind: str, number: float, model: Path) -> None:
    tensors = as_pickle(model)
    name = "bert.encoder.layer.1.output.dense.weight"
    if kind == "double":  # finite, until it is read as fp32
        tensors[name] = tensors[name].double()
        number = 1e300 if number != float("-inf") else -1e300
    tensors[name][3, 5] = number
    if kind == "bin":
        torch.save(tensors, model / "pytorch_model.bin")
    else:
        save_file(tensors, model / "model.safetensors")
    for load in (
        load_encoder,
        load_pretraining_model,
        read_pretrained,
        load_anything,
        read_export_source,
    ):
        is_refused(load, model, match=rf"{name} has NaN or infinite numbers")


def test_other_weights_that_are_no_numbers_are_refused(config: ModelConfig, tmp_path: Path) -> None:
    (tmp_path / "google").mkdir()
    google = PretrainingModel(config)
    torch.nn.init.constant_(google.encoder.pooler.bias, torch.nan)
    save_google_checkpoint(google, tmp_path / "google" / "bert.ckpt")
    is_refused(google_tensors, tmp_path / "google", match=r"pooler/dense/bias has NaN")


def test_predictions_are_numbers_or_one_line(tuned: Path, model: Path) -> None:
    """Finite weights can be so large that the outputs are not."""
    for folder, name in ((tuned, "classifier.weight"), (model, "cls.seq_relationship.weight")):
        tensors = load_file(folder / "model.safetensors")
        tensors["bert.pooler.dense.bias"].fill_(9.0)  # so that no sum cancels out
        tensors[name].fill_(3e38)
        save_file(tensors, folder / "model.safetensors")
    is_refused(load_anything(tuned, precision="fp32"), "river stone", match="NaN or infinite")
    pretrained = load_anything(model)
    is_refused(pretrained.next_sentence, "river", "stone", match="NaN or infinite")


HALF = "wet\ud800"


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("bertkit.json", {"labels": ["dry", HALF, "damp"]}),
        ("bertkit.json", {"columns": {"text": HALF}}),
        ("config.json", {"id2label": {"0": "dry", "1": HALF, "2": "damp"}}),
        ("config.json", {HALF: 1}),
        ("tokenizer_config.json", {"unk_token": HALF}),
        ("added_tokens.json", {HALF: 1}),
    ],
)
def test_halves_of_characters_are_refused(file: str, change: Any, tuned: Path) -> None:
    """JSON can write them, and UTF-8 cannot: they would end the answer that they stand in."""
    load_anything(tuned)
    known = read_json(tuned / file) if (tuned / file).exists() else {}
    (tuned / file).write_text(json.dumps({**known, **change}))
    is_refused(load_anything, tuned, match=rf"{file} has the character '\\ud800', half of a")


def test_halves_of_characters_in_a_vocabulary_are_refused(tuned: Path) -> None:
    tokens = read_json(tuned / "tokenizer.json")
    vocabulary = tokens["model"]["vocab"]
    [piece] = [piece for piece, number in vocabulary.items() if number == len(vocabulary) - 1]
    vocabulary[HALF] = vocabulary.pop(piece)
    (tuned / "tokenizer.json").write_text(json.dumps(tokens))
    (tuned / "vocab.txt").unlink()
    for load in (load_anything, read_pretrained, Tokenizer.load):
        is_refused(load, tuned, match=r"tokenizer\.json has the character '\\ud800', half of a")


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "bertkit.json", "tokenizer.json", "tokenizer_config.json", "vocab.txt"),
        *("added_tokens.json", "model.safetensors"),
    ],
)
def test_files_that_never_end_are_refused(name: str, tuned: Path) -> None:
    """A link to a device would fill the memory, and a pipe would be waited for."""
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        (tuned / name).unlink(missing_ok=True)
        make(tuned / name)
        is_refused(load_anything, tuned, match="not a regular file|holds no (weights|model)")


def test_descriptions_have_a_limit_in_bytes(tuned: Path) -> None:
    for name in ("bertkit.json", "tokenizer_config.json", "added_tokens.json"):
        before = (tuned / name).read_bytes() if (tuned / name).exists() else b"{}"
        enormous(tuned / name, 1 << 40)
        is_refused(load_anything, tuned, match=rf"{name} has 1,099,511,627,776 bytes; at most")
        (tuned / name).write_bytes(before)
    (tuned / "model.safetensors").unlink()
    enormous(tuned / "model.safetensors.index.json", 1 << 40)
    is_refused(load_anything, tuned, match=r"index\.json has 1,099,511,627,776 bytes; at most")


def test_two_tensors_for_one_parameter_are_refused(model: Path) -> None:
    tensors = load_file(model / "model.safetensors")
    tensors["bert.embeddings.LayerNorm.gamma"] = tensors["bert.embeddings.LayerNorm.weight"] + 1
    save_file(tensors, model / "model.safetensors")
    is_refused(load_encoder, model, match=r"is a second bert\.embeddings\.LayerNorm\.weight")


def test_a_file_of_four_bits_is_refused(model: Path) -> None:
    tensors = as_pickle(model)
    tensors["cls.packed"] = torch.zeros(2, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    torch.save(tensors, model / "pytorch_model.bin")
    is_refused(load_encoder, model, match=r"cls\.packed is not a floating-point tensor")


def test_a_file_that_changes_while_it_is_read_is_refused(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the old weights and half of the new ones are a model that nobody has made."""
    path = model / "model.safetensors"

    def interrupted(*arguments: Any) -> Any:
        found = read_safetensors(*arguments)
        with path.open("r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\1\1")
        return found

    monkeypatch.setattr("bertkit.checkpoints.weights.read_safetensors", interrupted)
    is_refused(load_encoder, model, match="was changed while it was read")


def test_weights_that_do_not_fit_into_memory_are_one_line(model: Path) -> None:
    """Under the limit on memory that all tests here have."""
    header = {"x": {"dtype": "F32", "shape": [10**9], "data_offsets": [0, 4 * 10**9]}}
    text = json.dumps(header).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 4 * 10**9)
    is_refused(load_encoder, model, match="not enough memory for its 4,000,000,0")


def test_open_files_that_are_too_many_are_one_line(model: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))
    try:
        is_refused(load_state, model, match=r"cannot read .*model\.safetensors: Too many open")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    "settings_",
    [
        {"threshold": float("nan")},
        {"max_length": -1},
        {"max_length": 0},
        {"max_length": 2},
        {"max_length": 10**12},
        {"stride": -1},
        {"stride": 10**12},
        {"max_question_length": -1},
        {"max_question_length": 10**12},
        {"max_answer_length": -1},
        {"max_answer_length": 0},
        {"max_answer_length": 10**12},
        {"threshold": 10**400},
    ],
)
def test_absurd_settings_end_in_an_answer_or_in_one_line(
    settings_: dict[str, Any], config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    task = QuestionAnswering(null=True, max_length=40, stride=8, max_question_length=16)
    for kind in (task, Classification(("a", "b"), max_length=40)):
        known = kind.settings()
        changed = {**known, **{k: v for k, v in settings_.items() if k in known}}
        details = {"task": kind.task_type, "labels": list(kind.labels), "settings": changed}
        save_model(tmp_path / kind.task_type, kind.build(config), tokenizer, details)
    asked = {"answer": ("river", "stone bridge " * 30), "classify": ("river " * 60, None)}
    for kind_name, arguments in asked.items():

        def ask(folder: Path, arguments: Any = arguments) -> Any:
            return load_anything(folder)(*arguments)

        assert model_or_line(ask, tmp_path / kind_name)
