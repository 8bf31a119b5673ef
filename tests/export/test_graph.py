from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from bertkit.datasets.examples import TextExample
from bertkit.export.source import read_export_source
from huggingface_hub import ModelCard

from bertkit.checkpoints.card import CARD
from bertkit.export.export import Check, write_export
from bertkit.export.padded import OUTPUTS, PADDED_INPUTS
from bertkit.predict.load import load
from tests.export.test_card import run_snippets
from tests.markdown import ROOT, blocks

pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")

HOMES = [str(place).encode() for place in (ROOT, Path(torch.__file__).parent)]
"""Folders of this machine, which no exported file may name."""
HEADS = [
    *("choose", "tag", "answer-left-to-right", "albert", "left_to_right", "electra", "encoder"),
    "embedding",
]
"""Every operation is in one of them: what is written is a second each."""


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_onnx_files_of_every_head_equal_bertkit(
    name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_export_source(models / name)
    manifest = write_export(source, "onnx", tmp_path / "out")
    worst = max(one["max_error"] for one in manifest["check"]["outputs"].values())
    assert worst < 1e-5
    assert tuple(manifest["inputs"]) == PADDED_INPUTS
    assert tuple(manifest["outputs"]) == OUTPUTS[source.head]
    shape = ["batch", "choices", "sequence"] if name == "choose" else ["batch", "sequence"]
    assert {tuple(one["shape"]) for one in manifest["inputs"].values()} == {tuple(shape)}
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "model.onnx"))
    ones = np.ones((1,) * len(shape), dtype=np.int64)
    for array in session.run(None, dict.fromkeys(PADDED_INPUTS, ones)):
        assert array.shape[0] == 1
        assert np.isfinite(array).all()
    import onnx

    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    words = [tensor for tensor in graph.initializer if source.config.vocab_size in tensor.dims[:-1]]
    assert len(words) == 1  # also where a head reads the same matrix again
    content = (tmp_path / "out" / "model.onnx").read_bytes()
    assert not any(home in content for home in HOMES), "a path of this machine"
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names >= {"model.onnx", "vocab.txt", "tokenizer.json", "config.json", "export.json"}
    [block] = blocks((tmp_path / "out" / CARD).read_text(), "python")
    assert not {"bertkit", "torch"} & {*re.findall(r"\w+", block)}
    assert run_snippets(tmp_path / "out", monkeypatch) == 1


@pytest.mark.slow
def test_eight_bits_are_measured_by_the_metric(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the file of a plain classifier, whose graph three tasks share."""
    source = read_export_source(models / "classify")
    words = ["river stone", "bridge lantern", "harvest", "winter garden", "letter", "sailor window"]
    classify = load(models / "classify", device="cpu", precision="fp32")
    labelled = [TextExample(str(i), w, None, classify(w).label, "f:1") for i, w in enumerate(words)]
    check = Check(labelled=labelled, dev="dev.csv", bound=50)
    manifest = write_export(source, "onnx-int8", tmp_path / "out", check)
    output = manifest["check"]["outputs"]["logits"]
    # without VNNI its 8-bit products saturate, which these large random weights reach
    most = 0.2 if torch.cpu.get_capabilities().get("avx512_vnni") else 0.4
    assert 1e-5 < output["max_error"] < most * output["largest"]
    assert manifest["check"]["bound"] is None
    assert manifest["metric"]["bertkit"]["accuracy"] == 1
    assert json.loads((tmp_path / "out" / "export.json").read_text()) == manifest
    first, *_ = ModelCard.load(tmp_path / "out" / CARD).data.eval_results
    assert first.metric_type == "accuracy"
    assert first.metric_value == manifest["metric"]["exported"]["accuracy"]
    assert run_snippets(tmp_path / "out", monkeypatch) == 1
    import onnx

    graph = onnx.load(tmp_path / "out" / "model.onnx").graph
    matrices = [tensor for tensor in graph.initializer if len(tensor.dims) == 2]
    exact = [list(one.dims) for one in matrices if one.data_type == onnx.TensorProto.FLOAT]
    assert exact == [[40, 32]]  # the positions, which are sliced and not looked up
    assert sum(one.data_type == onnx.TensorProto.INT8 for one in matrices) == 6


@pytest.mark.slow
def test_a_program_of_torch_is_plain_numbers(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_export_source(models / "tag")
    manifest = write_export(source, "torch-export", tmp_path / "out")
    assert manifest["check"]["outputs"]["logits"]["max_error"] < 1e-5
    assert manifest["outputs"] == ["logits"]
    with zipfile.ZipFile(tmp_path / "out" / "model.pt2") as file:
        for name in file.namelist():
            content = file.read(name)
            assert not any(home in content for home in HOMES), "a path of this machine"
            # torch.save begins with a zip file, a bare pickle with its protocol
            is_number = "/weights/weight_" in name
            assert is_number or not content.startswith((b"PK\x03\x04", b"\x80")), name
        [name] = [name for name in file.namelist() if name.endswith("weights_config.json")]
        settings = json.loads(file.read(name))
        assert not any(one["use_pickle"] for one in settings["config"].values())
    module = torch.export.load(tmp_path / "out" / "model.pt2").module()
    ids = torch.ones((1, 40), dtype=torch.int64)
    assert module(ids, ids, torch.zeros_like(ids))[0].shape == (1, 40, 3)
    assert run_snippets(tmp_path / "out", monkeypatch) == 1
    write_export(read_export_source(models / "choose"), "torch-export", tmp_path / "choices")
    assert run_snippets(tmp_path / "choices", monkeypatch) == 1
