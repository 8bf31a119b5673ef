from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shutil
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bertkit.datasets.examples import TextExample
from bertkit.export.directories import read_back
from bertkit.export.source import ExportSource, read_export_source
from bertkit.export.verify import Opened, built_in, padded_arrays, run_exported, run_packed
from safetensors.torch import load_file, save_file

from bertkit.checkpoints.extend import extend_vocabulary
from bertkit.checkpoints.save import save_model
from bertkit.checkpoints.sentence_transformers import read_pooling
from bertkit.checkpoints.tensorflow import read_checkpoint
from bertkit.cli.export import export_command
from bertkit.errors import BertkitError
from bertkit.export import export as export_module
from bertkit.export.export import Check, compare_outputs, export_model, write_export
from bertkit.export.padded import OUTPUTS
from bertkit.files import read_json, temporary_name, write_json
from bertkit.predict.embeddings import load_embedder
from bertkit.predict.load import load
from bertkit.tasks.classification import Classification
from bertkit.tasks.multiple_choice import MultipleChoice
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import python, run
from tests.export.conftest import TASKS, sizes

EVERY = {
    "classify": "classification",
    "multi-label": "multi-label-classification",
    "regress": "regression",
    "choose": "multiple-choice",
    "electra-classify": "classification",
    "electra-choose": "multiple-choice",
    "tag": "token-classification",
    "answer": "question-answering",
    "answer-left-to-right": "question-answering",
    "pretraining": "pretraining",
    "albert": "pretraining",
    "left_to_right": "words",
    "electra": "replaced",
    "encoder": "encoder",
    "embedding": "embedding",
}
"""Model → head."""


@pytest.mark.parametrize("name", EVERY)
def test_the_padded_network_equals_the_packed_one(name: str, models: Path) -> None:
    source = read_export_source(models / name)
    assert source.head == EVERY[name]
    found = compare_outputs(source, read_back(source.padded()).run, Check(), exact=True)
    assert tuple(found["outputs"]) == OUTPUTS[source.head]
    assert max(one["max_error"] for one in found["outputs"].values()) < 1e-5
    lengths = {len(part.sequences[0].ids) for part in built_in(source)}
    if source.head != "multiple-choice":
        assert len(lengths) > 3  # so that something is padded
        assert max(lengths) == source.max_length


@pytest.mark.parametrize("pooling", ["cls", "mean", "pooler"])
@pytest.mark.parametrize("name", ["encoder", "left_to_right"])
def test_vectors_of_any_model_equal_those_of_the_embedder(
    name: str, pooling: str, models: Path
) -> None:
    if (name, pooling) == ("left_to_right", "pooler"):
        with pytest.raises(BertkitError, match="has no pooler"):
            read_export_source(models / name, head="embedding", pooling=pooling)
        return
    source = read_export_source(models / name, head="embedding", pooling=pooling)
    texts = ["river stone", "walking slowly to the bridge", "lantern"]
    embedder = load_embedder(models / name, device="cpu", precision="fp32", pooling=pooling)
    parts = [part for text in embedder.tokenize(texts) for part in text.parts]
    outputs = run_exported(read_back(source.padded()).run, source, parts)
    found = np.stack([output["sentence_embedding"] for output in outputs])
    np.testing.assert_allclose(found, embedder.encode(texts), atol=2e-6)


def test_padding_of_any_amount_changes_nothing(models: Path) -> None:
    source = read_export_source(models / "left_to_right")
    run, [part, *_] = read_back(source.padded()).run, built_in(source)[::-1]
    arrays = padded_arrays([part], source.head)
    short = {name: array[:, :9] for name, array in arrays.items()}
    wide = {name: np.pad(array, ((0, 0), (0, 7))) for name, array in short.items()}
    np.testing.assert_allclose(run(short)["logits"], run(wide)["logits"][:, :9], atol=2e-6)


@pytest.mark.parametrize("to", ["huggingface", "tensorflow"])
@pytest.mark.parametrize("name", [name for name in EVERY if name != "embedding"])
def test_directories_of_every_head_or_a_refusal(
    name: str, to: str, models: Path, tmp_path: Path
) -> None:
    refused = {
        "huggingface": {"answer-left-to-right"},
        "tensorflow": {*EVERY}
        - {"classify", "multi-label", "regress", "answer", "pretraining", "encoder"},
    }
    source, out = read_export_source(models / name), tmp_path / "out"
    if name in refused[to]:
        with pytest.raises(BertkitError, match=r"--to onnx|--head encoder"):
            write_export(source, to, out)
        assert list(tmp_path.iterdir()) == []
        return
    manifest = write_export(source, to, out)
    assert json.loads((out / "export.json").read_text()) == manifest
    by = manifest["check"]["by"]
    assert by == {"tensorflow": "bertkit", "huggingface": "transformers"}[to]
    assert ("transformers" in manifest["versions"]) is (to == "huggingface")
    worst = max(one["max_error"] for one in manifest["check"]["outputs"].values())
    assert worst < 1e-5
    if to == "huggingface":
        labels = list(source.task.labels) if source.task else []
        described = json.loads((out / "config.json").read_text())
        if labels:
            assert list(described["id2label"].values()) == labels
        again = read_export_source(out)
        assert again.head == source.head
    elif name == "pretraining":
        first, second = source.model.state_dict(), read_export_source(out).model.state_dict()
        assert all(torch.equal(first[key], second[key]) for key in first)
        assert "erf" in manifest["note"]


@pytest.mark.parametrize("name", ["classify", "encoder", "left_to_right", "embedding"])
def test_without_their_library_bertkit_reads_directories_back(
    name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says so: also a check that was asked for is run, not left out."""
    find, hidden = importlib.util.find_spec, ("transformers", "sentence_transformers")
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name in hidden else find(name)
    )
    source = read_export_source(models / name)
    labelled = None
    if source.pooling is not None:
        source = replace(source, pooling=replace(source.pooling, prompt="A ", lowercase=True))
    if source.task is not None:
        labelled = [TextExample(str(i), "river stone", None, "dry", "f:1") for i in range(3)]
    manifest = write_export(source, "huggingface", tmp_path / "out", Check(labelled=labelled))
    assert manifest["check"]["by"] == "bertkit"
    assert max(one["max_error"] for one in manifest["check"]["outputs"].values()) < 1e-5
    assert "transformers" not in manifest["versions"]
    assert ("metric" in manifest) is (name == "classify")
    said = ("mean", True, "A ", True) if name == "embedding" else (None,) * 4
    assert tuple(map(manifest.get, ("pooling", "normalize", "prompt", "lowercase"))) == said
    with pytest.raises(BertkitError, match="the bound is -1"):
        write_export(source, "huggingface", tmp_path / "out", Check(max_error=-1))


def test_a_tuned_google_checkpoint_has_the_names_of_its_scripts(
    models: Path, tmp_path: Path
) -> None:
    for name, variable in (("classify", "output_weights"), ("answer", "cls/squad/output_weights")):
        source = read_export_source(models / name)
        write_export(source, "tensorflow", tmp_path / name)
        found = read_checkpoint(tmp_path / name / "bert_model.ckpt")
        head = source.model.classifier if name == "classify" else source.model.qa_outputs
        np.testing.assert_array_equal(found[variable], head.weight.detach())
        assert found["bert/encoder/layer_0/output/dense/kernel"].shape == (64, 32)
        again = read_export_source(
            tmp_path / name, head="encoder"
        )  # no task is named in a checkpoint
        first, second = source.encoder.state_dict(), again.encoder.state_dict()
        assert again.pooler is (name == "classify")
        assert all(torch.equal(first[k], second[k]) for k in first if "pooler" not in k)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_sentence_transformers_loads_an_embedding_model(models: Path, tmp_path: Path) -> None:
    library = pytest.importorskip("sentence_transformers")
    texts = ["river stone", "walking slowly to the bridge", "", "copper thread market " * 9]
    for name, pooling in (("encoder", "cls"), ("encoder", "mean"), ("left_to_right", "cls")):
        source = read_export_source(models / name, head="embedding", pooling=pooling)
        out = tmp_path / f"{name}-{pooling}"
        manifest = write_export(source, "huggingface", out)
        assert manifest["check"]["by"] == "sentence-transformers"
        assert {"sentence-transformers", "transformers"} <= {*manifest["versions"]}
        theirs = library.SentenceTransformer(str(out), device="cpu").encode(texts)
        for folder in (models / name, out):
            own = load_embedder(
                folder,
                device="cpu",
                precision="fp32",
                pooling=pooling if folder == models / name else "auto",
            )
            np.testing.assert_allclose(own.encode(texts, windows=False), theirs, atol=1e-5)
    source = read_export_source(models / "encoder", head="embedding", pooling="pooler")
    with pytest.raises(BertkitError, match="sentence-transformers has no pooling 'pooler'"):
        write_export(source, "huggingface", tmp_path / "out")


def test_what_cannot_be_exported_is_refused(models: Path, tmp_path: Path) -> None:
    plain = read_export_source(models / "encoder")
    with pytest.raises(BertkitError, match="no format is called 'onx'; did you mean 'onnx'"):
        write_export(plain, "onx", tmp_path / "out")
    with pytest.raises(BertkitError, match="no head is called 'encode'; did you mean 'encoder'"):
        read_export_source(models / "encoder", head="encode")
    with pytest.raises(BertkitError, match="--pooling and --normalize require --head embedding"):
        read_export_source(models / "encoder", pooling="mean")
    with pytest.raises(BertkitError, match="the head 'encoder' has no metric; remove --dev"):
        export_command(models / "encoder", to="tensorflow", out=tmp_path / "out", dev="x.csv")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(BertkitError, match="mine exists and is not an export"):
        write_export(plain, "tensorflow", tmp_path / "mine")
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    with pytest.raises(BertkitError, match="does not end in a name"):
        temporary_name(Path())


def test_a_full_disk_is_one_error_of_a_program_too(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(BertkitError, match="the disk is full"):
        write_export(read_export_source(models / "tag"), "torch-export", tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_directory_of_an_old_sentence_transformers_is_exported(
    models: Path, tmp_path: Path
) -> None:
    """Its weights are in a folder of their own."""
    old = tmp_path / "old"
    shutil.copytree(models / "embedding", old)
    (old / "0_Transformer").mkdir()
    for file in [*old.iterdir()]:
        if file.is_file() and file.name != "modules.json":
            file.rename(old / "0_Transformer" / file.name)
    modules = read_json(old / "modules.json")
    write_json(old / "modules.json", [{**modules[0], "path": "0_Transformer"}, *modules[1:]])
    manifest = write_export(read_export_source(old), "torch-export", tmp_path / "out")
    assert (manifest["head"], manifest["max_length"]) == ("embedding", 24)
    extend_vocabulary(old, tmp_path / "longer", words=["zebra"])
    assert read_pooling(tmp_path / "longer")[1].max_length == 24
    (old / "modules.json").rename(old / "other.json")
    with pytest.raises(BertkitError, match="holds no model"):
        read_export_source(old)
    (old / "other.json").rename(old / "modules.json")
    plain = read_export_source(models / "embedding", head="encoder").model.state_dict()
    found = read_export_source(old, head="encoder").model.state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in plain.items())


def test_an_export_does_not_replace_what_it_is_made_of(models: Path, tmp_path: Path) -> None:
    out = tmp_path / "hf"
    write_export(read_export_source(models / "encoder"), "huggingface", out)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(BertkitError, match="hf contains the model to export"):
        write_export(read_export_source(out), "tensorflow", out)
    (out / "dev.csv").write_text("text\nriver\n")
    words = ["--to", "tensorflow", "--out", str(out), "--inputs", str(out / "dev.csv")]
    run("export", models / "encoder", *words, status=2)
    assert before.items() <= {path: path.read_bytes() for path in out.iterdir()}.items()


@pytest.mark.parametrize("head", ["encoder", "embedding"])
def test_a_pooler_that_nothing_trained_is_not_exported(
    models: Path, tmp_path: Path, head: str
) -> None:
    """A model of masked words alone has none; one drawn at random would pass for a real one."""
    for number in range(2):
        source = read_export_source(models / "left_to_right", head=head)
        write_export(source, "huggingface", tmp_path / str(number))
    first, second = (load_file(tmp_path / str(n) / "model.safetensors") for n in range(2))
    assert not any("pooler" in name for name in first)
    assert first.keys() == second.keys()
    assert not read_export_source(tmp_path / "0", head="encoder").pooler


def test_an_encoder_has_the_outputs_that_transformers_computes(
    models: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """ELECTRA's class has no pooler, and transformers pools the first token in any direction."""
    task = TASKS["classify"]
    details = {"task": task.task_type, "labels": list(task.labels), "settings": task.settings()}
    forward = task.build(sizes(tokenizer, direction="left_to_right"))
    save_model(tmp_path / "model", forward, tokenizer, details)
    for model in (models / "electra-classify", models / "electra-choose", tmp_path / "model"):
        source = read_export_source(model, head="encoder")
        assert source.outputs == ("last_hidden_state", "pooler_output")
        manifest = write_export(source, "huggingface", tmp_path / "out")
        assert [*manifest["check"]["outputs"]] == ["last_hidden_state"]
        assert not any("pooler" in name for name in load_file(tmp_path / "out/model.safetensors"))
        onnx = write_export(source, "onnx", tmp_path / "out")
        assert [*onnx["check"]["outputs"]] == ["last_hidden_state", "pooler_output"]


@pytest.mark.parametrize(("act", "read"), [("gelu", "tanh form"), ("gelu_tanh", "with erf")])
def test_the_other_form_of_gelu_is_noted(models: Path, tmp_path: Path, act: str, read: str) -> None:
    shutil.copytree(models / "encoder", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    write_json(path, {**read_json(path), "hidden_act": "gelu" if act == "gelu" else "gelu_new"})
    source = read_export_source(tmp_path / "model")
    assert source.config.hidden_act == act
    assert read in write_export(source, "tensorflow", tmp_path / "out")["note"]


def test_what_an_export_would_lose_is_refused(models: Path, tmp_path: Path) -> None:
    shutil.copytree(models / "pretraining", tmp_path / "nsp")
    path = tmp_path / "nsp" / "model.safetensors"
    kept = {n: t for n, t in load_file(path).items() if not n.startswith("cls.predictions.")}
    save_file(kept, path, {"format": "pt"})
    with pytest.raises(BertkitError, match="next-sentence head without that of masked tokens"):
        read_export_source(tmp_path / "nsp")
    assert read_export_source(tmp_path / "nsp", head="encoder").head == "encoder"


def test_choices_need_two_segments(models: Path) -> None:
    source = read_export_source(models / "choose")
    assert {len(part.sequences) for part in built_in(source)} == {3}
    source.encoder.config = replace(source.config, type_vocab_size=1)
    with pytest.raises(BertkitError, match="segment"):
        built_in(source)


def test_rules_that_vocab_txt_cannot_say_are_noted(models: Path, tmp_path: Path) -> None:
    source = read_export_source(models / "encoder")
    plain = write_export(source, "tensorflow", tmp_path / "plain")
    assert plain["do_lower_case"] is True
    assert "vocab.txt does not say" not in plain["note"]
    pieces = source.tokenizer.vocabulary
    accents = Tokenizer.from_vocabulary(pieces, lowercase=True, strip_accents=False)
    found = write_export(replace(source, tokenizer=accents), "tensorflow", tmp_path / "accents")
    assert "vocab.txt does not say how text is normalised" in found["note"]


def spoiled(source: ExportSource, amount: float) -> Any:
    """A writer whose model's outputs are wrong by this share."""
    run = read_back(source.padded()).run

    def write(source: ExportSource, folder: Path) -> Any:
        (folder / "model").write_text("wrong")
        return Opened(
            ("torch",),
            lambda arrays: {
                name: value * np.where(np.arange(value.shape[-1]) == 0, 1 - amount, 1 + amount)
                for name, value in run(arrays).items()
            },
        )

    return write


def test_results_beyond_the_bounds_are_refused_and_not_written(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_export_source(models / "classify")
    monkeypatch.setitem(export_module.WRITERS, "onnx", spoiled(source, 1e-3))
    with pytest.raises(BertkitError, match=r"logits differs .* the bound is 0\.0001; choose"):
        write_export(source, "onnx", tmp_path / "out")
    words = ["river stone", "bridge lantern", "harvest", "winter garden", "letter", "sailor window"]
    classify = load(models / "classify", device="cpu", precision="fp32")
    labelled = [TextExample(str(i), w, None, classify(w).label, "f:1") for i, w in enumerate(words)]
    monkeypatch.setitem(export_module.WRITERS, "onnx-int8", spoiled(source, 5.0))
    check = Check(labelled=labelled, dev="dev.csv")
    with pytest.raises(BertkitError, match=r"lowers accuracy on dev\.csv from 100\.00 to .* 1\.00"):
        write_export(source, "onnx-int8", tmp_path / "out", check)
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_are_none_are_refused_in_every_format(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = read_export_source(models / "classify")
    for amount in (np.nan, np.inf):
        monkeypatch.setitem(export_module.WRITERS, "onnx-int8", spoiled(source, amount))
        with pytest.raises(BertkitError, match="exported logits has NaN or infinity; choose"):
            write_export(source, "onnx-int8", tmp_path / "out")
    broken = read_export_source(models / "classify")
    monkeypatch.setitem(export_module.WRITERS, "onnx-int8", spoiled(broken, 0.0))
    torch.nn.init.constant_(broken.model.classifier.bias, torch.nan)
    with pytest.raises(BertkitError, match="the model's own logits has NaN or infinity"):
        write_export(broken, "onnx-int8", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_outputs_are_compared_batch_by_batch(models: Path) -> None:
    """The logits of some hundred texts over a large vocabulary take gigabytes together."""
    source = read_export_source(models / "pretraining")
    run, alive, most = read_back(source.padded()).run, set[int](), []

    def counted(arrays: dict[str, np.ndarray]) -> Any:
        outputs = run(arrays)
        for array in outputs.values():
            alive.add(id(array))
            weakref.finalize(array, alive.discard, id(array))
        most.append(len(alive))
        return outputs

    check = Check(parts=built_in(source) * 50)
    found = compare_outputs(source, counted, check, exact=True)
    once = compare_outputs(source, run, Check(), exact=True)
    assert found["sequences"] == 50 * once["sequences"]
    assert found["outputs"].keys() == once["outputs"].keys() == set(source.outputs)
    assert len(most) > 5
    assert max(most) <= 2 * len(source.outputs)


def test_files_without_inputs_are_refused(models: Path, tmp_path: Path) -> None:
    """The built-in sentences do not take their place."""
    (tmp_path / "none.txt").write_text("")
    file, out = str(tmp_path / "none.txt"), tmp_path / "out"
    with pytest.raises(BertkitError, match=r"none\.txt has no inputs to compare on"):
        export_command(models / "encoder", to="tensorflow", out=out, inputs=file)
    source = read_export_source(models / "classify")
    with pytest.raises(BertkitError, match=r"dev\.csv has no labelled inputs"):
        write_export(source, "tensorflow", out, Check(labelled=[], dev="dev.csv"))
    assert not out.exists()


def test_the_verb_compares_on_given_inputs_and_measures_the_metric(
    models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = ["text,label", "river stone,dry", '"bridge, lantern",wet', "harvest " * 60 + ",damp"]
    (tmp_path / "dev.csv").write_text("\n".join(rows) + "\n")
    file, out = str(tmp_path / "dev.csv"), tmp_path / "out"
    export_command(models / "classify", to="huggingface", out=out, inputs=file, dev=file)
    manifest = json.loads((out / "export.json").read_text())
    assert manifest["check"]["examples"] == file
    assert manifest["check"]["sequences"] > 3  # the last text takes several windows
    assert manifest["metric"]["change"] == 0
    assert (manifest["metric"]["name"], manifest["metric"]["inputs"]) == ("accuracy", 3)
    shown = capsys.readouterr().err
    assert "huggingface, head classification" in shown
    assert "accuracy on " in shown
    (tmp_path / "lines.txt").write_text("river\nstone bridge\n")
    lines = str(tmp_path / "lines.txt")
    export_command(models / "pretraining", to="huggingface", out=out, inputs=lines)
    assert json.loads((out / "export.json").read_text())["check"]["sequences"] == 2


@pytest.mark.parametrize("head", ["encoder", "embedding"])
def test_the_encoder_of_a_tuned_model_is_compared_on_the_column_of_its_texts(
    models: Path, tokenizer: Tokenizer, tmp_path: Path, head: str
) -> None:
    task = TASKS["classify"]
    details = {"task": task.task_type, "labels": list(task.labels), "settings": task.settings()}
    details["columns"] = {"text": "review", "label": "stars"}
    save_model(tmp_path / "model", task.build(sizes(tokenizer)), tokenizer, details)
    (tmp_path / "dev.csv").write_text("id,review\n1,river stone\n2,bridge\n")
    manifest = export_model(
        tmp_path / "model", tmp_path / "out", "huggingface",
        head=head, pooling="mean" if head == "embedding" else "auto",
        inputs=str(tmp_path / "dev.csv"),
    )  # fmt: skip
    assert manifest["check"]["sequences"] == 2


MRPC_ROW = "1\t1\t2\triver stone\tbridge lantern\n"
SWAG_ROWS = """\
video-id,fold-ind,startphrase,sent1,sent2,gold-source,ending0,ending1,ending2,ending3,label
v1,1,A river,A river,rises,gold,a,b,c,d,2
v2,2,A stone,A stone,falls,gold,a,b,c,d,0
"""


def test_official_files_of_the_set_that_a_model_was_tuned_on(
    models: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """As for predict and evaluate; a folder means the dev split of the set."""
    (tmp_path / "GLUE" / "MRPC").mkdir(parents=True)
    file = tmp_path / "GLUE" / "MRPC" / "dev.tsv"
    file.write_text("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + 2 * MRPC_ROW)
    labels = ("not_equivalent", "equivalent")
    tuned(tmp_path / "pairs", tokenizer, Classification(labels, max_length=40), "mrpc")
    glue = str(tmp_path / "GLUE")
    out = tmp_path / "out"
    export_command(tmp_path / "pairs", to="huggingface", out=out, inputs=str(file), dev=glue)
    manifest = json.loads((out / "export.json").read_text())
    assert manifest["check"]["sequences"] == manifest["metric"]["inputs"] == 2
    assert manifest["check"]["tokens"] == 2 * 7  # both texts of a pair
    own = tmp_path / "own"
    own.mkdir()
    for name in ("a.csv", "b.csv"):
        (own / name).write_text("text,label\nriver stone,dry\n")
    export_command(models / "classify", to="huggingface", out=out, dev=str(own))
    assert json.loads((out / "export.json").read_text())["metric"]["inputs"] == 2

    (tmp_path / "val.csv").write_text(SWAG_ROWS)
    tuned(tmp_path / "endings", tokenizer, MultipleChoice(max_length=40), "swag")
    swag = str(tmp_path / "val.csv")
    export_command(tmp_path / "endings", to="huggingface", out=out, inputs=swag, dev=swag)
    manifest = json.loads((out / "export.json").read_text())
    assert manifest["metric"]["inputs"] == 2
    assert manifest["metric"]["name"] == "accuracy"
    (tmp_path / "test.csv").write_text(re.sub(r",(label|\d)\n", "\n", SWAG_ROWS))
    with pytest.raises(BertkitError, match=r"test\.csv:2: the dev data has no label here"):
        export_command(
            tmp_path / "endings", to="huggingface", out=out, dev=str(tmp_path / "test.csv")
        )


def tuned(folder: Path, tokenizer: Tokenizer, task: Any, data: str) -> None:
    """A model directory that says on which official set it was tuned."""
    details = {"task": task.task_type, "labels": list(task.labels), "settings": task.settings()}
    save_model(folder, task.build(sizes(tokenizer)), tokenizer, {**details, "data": data})


def test_choices_are_run_in_groups_of_one_number(models: Path) -> None:
    source = read_export_source(models / "choose")
    parts = built_in(source)
    mixed = [parts[0], parts[1]._replace(sequences=parts[1].sequences[:2]), parts[2]]
    found = run_exported(read_back(source.padded()).run, source, mixed)
    assert [output["logits"].shape for output in found] == [(3,), (2,), (3,)]
    for one, other in zip(found, run_packed(source, mixed), strict=True):
        np.testing.assert_allclose(one["logits"], other["logits"], atol=2e-6)


def test_onnxruntime_sends_no_telemetry(tmp_path: Path) -> None:
    """Its builds otherwise keep an identifier of the machine in the user's cache."""
    program = """
import sys
import onnx
from pathlib import Path
from bertkit.export.onnx import open_graph
value = lambda name: onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1])
graph = onnx.helper.make_graph(
    [onnx.helper.make_node("Neg", ["x"], ["y"])], "negative", [value("x")], [value("y")]
)
path = Path(sys.argv[1])
opsets = [onnx.helper.make_opsetid('', 18)]
onnx.save(onnx.helper.make_model(graph, ir_version=8, opset_imports=opsets), path)
open_graph(path)
"""
    home = tmp_path / "home"
    home.mkdir()
    names = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    kept = {k: v for k, v in os.environ.items() if k not in names}
    done = python("-c", program, str(tmp_path / "a.onnx"), env={**kept, "HOME": str(home)})
    assert done.returncode == 0, done.stderr
    assert list(home.rglob("*")) == []
