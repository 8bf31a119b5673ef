"""ONNX exports of every head compute what bertkit computes, or are not written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard

from bertkit.checkpoints.publish import new_card
from bertkit.errors import BertkitError
from bertkit.export import export
from bertkit.export.export import compare_outputs, export_model, padded_arrays
from bertkit.export.padded import OUTPUTS, PADDED_INPUTS, PaddedModel, read_export_source
from bertkit.predict.embeddings import load_embedder
from bertkit.pretraining_data.batch import pack

HEADS = {
    "classify": "classification",
    "multi-label": "multi-label-classification",
    "regress": "regression",
    "choose": "multiple-choice",
    "electra-classify": "classification",
    "electra-choose": "multiple-choice",
    "tag": "token-classification",
    "answer": "question-answering",
    "pretraining": "pretraining",
    "albert": "pretraining",
    "words": "words",
    "electra": "encoder",
    "encoder": "encoder",
    "embedding": "embedding",
}
"""Model -> head."""


def run(model: PaddedModel, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What a library that ran the padded network would return."""
    with torch.inference_mode():
        outputs = model(*(torch.from_numpy(arrays[name]) for name in PADDED_INPUTS))
    return {name: out.numpy() for name, out in zip(model.outputs, outputs, strict=True)}


@pytest.mark.parametrize("name", HEADS)
def test_the_padded_network_equals_the_packed_one(name: str, models: Path) -> None:
    source = read_export_source(models / name)
    assert source.head == HEADS[name]
    padded = source.padded()
    check = compare_outputs(source, lambda arrays: run(padded, arrays), 1e-5)
    assert tuple(check["outputs"]) == source.outputs == OUTPUTS[source.head][: len(source.outputs)]
    assert check["sequences"] >= 9


@pytest.mark.parametrize("pooling", ["cls", "mean", "pooler"])
def test_vectors_of_any_model_equal_those_of_the_embedder(pooling: str, models: Path) -> None:
    source = read_export_source(models / "encoder", head="embedding", pooling=pooling)
    texts = ["river stone", "walking slowly to the bridge", "lantern"]
    ids = [source.tokenizer.encode_pair(text).ids for text in texts]
    found = run(source.padded(), padded_arrays(pack(ids), "embedding"))["sentence_embedding"]
    own = load_embedder(models / "encoder", device="cpu", precision="fp32", pooling=pooling)
    np.testing.assert_allclose(found, own.encode(texts), atol=2e-6)


def test_padding_of_any_amount_changes_nothing(models: Path) -> None:
    padded = read_export_source(models / "words").padded()
    arrays = padded_arrays(pack([[2, 9, 11, 7, 3]]), "words")
    wide = {name: np.pad(array, ((0, 0), (0, 7))) for name, array in arrays.items()}
    short = run(padded, arrays)["logits"]
    np.testing.assert_allclose(short, run(padded, wide)["logits"][:, :5], atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["choose", "embedding"])
def test_onnx_files_equal_bertkit(name: str, models: Path, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    out = tmp_path / "out"
    manifest = export_model(models / name, out, max_error=1e-5)
    assert json.loads((out / "export.json").read_text()) == manifest
    shape = ["batch", "choices", "sequence"] if name == "choose" else ["batch", "sequence"]
    session = onnxruntime.InferenceSession(str(out / "model.onnx"))
    assert tuple(output.name for output in session.get_outputs()) == OUTPUTS[HEADS[name]]
    assert all(value.shape == shape for value in session.get_inputs())
    ones = np.ones((1,) * len(shape), dtype=np.int64)
    for array in session.run(None, dict.fromkeys(PADDED_INPUTS, ones)):
        assert np.isfinite(array).all()
    content = (out / "model.onnx").read_bytes()
    for folder in (Path(__file__).parents[2], Path(torch.__file__).parent):
        assert str(folder).encode() not in content, "a path of this machine"
    files = {path.name for path in out.iterdir()}
    assert files >= {"model.onnx", "vocab.txt", "tokenizer.json", "config.json"}
    assert ModelCard(new_card(out, "org/mine")).data.library_name == "onnx"


@pytest.mark.slow
def test_eight_bits_are_smaller_and_near(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnxscript")
    manifest = export_model(models / "classify", tmp_path / "out", "onnx-int8")
    output = manifest["check"]["outputs"]["logits"]
    assert manifest["check"]["bound"] is None
    # without VNNI its 8-bit products saturate, which these large random weights reach
    assert 1e-5 < output["max_error"] < 0.4 * output["largest"]
    made = tmp_path / "out" / "model.onnx"  # again, without the seconds that writing takes
    monkeypatch.setattr(
        export, "write_onnx", lambda _, folder, **__: shutil.copy(made, folder / made.name)
    )
    with pytest.raises(BertkitError, match="logits differs"):
        export_model(models / "classify", tmp_path / "exact", "onnx-int8", max_error=1e-9)
    assert not (tmp_path / "exact").exists()


def test_outputs_beyond_the_bound_or_not_finite_are_refused(models: Path) -> None:
    source = read_export_source(models / "classify")
    padded = source.padded()
    for change in (0.1, float("nan")):
        with pytest.raises(BertkitError, match="logits"):
            compare_outputs(
                source, lambda a, by=change: {"logits": run(padded, a)["logits"] + by}, 1e-4
            )


def test_what_cannot_be_exported_is_refused(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for arguments, said in (
        ({"to": "tensorflow"}, "format"),
        ({"head": "tagger"}, "head"),
        ({"pooling": "mean"}, "--head embedding"),
        ({"max_error": float("nan")}, "finite"),
    ):
        with pytest.raises(BertkitError, match=said):
            export_model(models / "classify", out, **arguments)
    (out / "notes").mkdir(parents=True)
    with pytest.raises(BertkitError, match="choose another folder"):
        export_model(models / "classify", out)
    with pytest.raises(BertkitError, match="contains the model"):
        export_model(models / "classify", models)
    with pytest.raises(BertkitError, match="left to right"):
        export_model(models / "left_to_right", tmp_path / "other")
