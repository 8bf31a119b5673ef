"""Model directories: to transformers and back, older formats, and every kind of damage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from bertkit.checkpoints.pretrained import (
    load_config,
    load_model,
    load_pretraining_model,
    model_folder,
)
from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.model.encoder import Encoder, ModelConfig, check_vocabulary
from bertkit.model.heads import PretrainingModel
from bertkit.model.outputs import ClassificationModel
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from tests.conftest import load_encoder


class FakeTokenizer:
    """Writes a vocabulary, as the real one does."""

    pad_id = 0

    def __init__(self, size: int = 50) -> None:
        self.size = size

    def save(self, directory: Path, max_length: int) -> None:
        (directory / "vocab.txt").write_text("".join(f"piece{n}\n" for n in range(self.size)))


def three_classes(config: ModelConfig) -> ClassificationModel:
    return ClassificationModel(config, 3)


def equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    ours, theirs = first.state_dict(), second.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[n], theirs[n]) for n in ours)


@pytest.fixture
def model(config: ModelConfig) -> PretrainingModel:
    torch.manual_seed(0)
    return PretrainingModel(config).eval()


@pytest.fixture
def saved(model: PretrainingModel, tmp_path: Path) -> Path:
    save_model(tmp_path / "model", model, FakeTokenizer(), {"task": "pretrain"})
    return tmp_path / "model"


def rewrite(directory: Path, change: Any) -> None:
    """Apply a function to the dictionary of tensors on disk."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def reconfigure(directory: Path, **changes: Any) -> None:
    write_json(directory / "config.json", {**read_json(directory / "config.json"), **changes})


def test_a_saved_model_is_complete_and_comes_back_equal(
    saved: Path, model: PretrainingModel
) -> None:
    assert {path.name for path in saved.iterdir()} == {
        "config.json",
        "model.safetensors",
        "vocab.txt",
        "bertkit.json",
    }
    again = load_pretraining_model(saved)
    assert equal(model, again)
    assert not again.training
    assert again.config == model.config == load_config(saved)
    assert all(parameter.requires_grad for parameter in again.parameters())
    assert equal(model.encoder, load_encoder(saved))
    assert read_json(saved / "bertkit.json") == {"task": "pretrain"}


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
def test_transformers_loads_what_we_save(
    act: str, config: ModelConfig, tmp_path: Path, batch: Any, padded: Any, transformers: Any
) -> None:
    torch.manual_seed(1)
    model = PretrainingModel(ModelConfig(**{**vars(config), "hidden_act": act})).eval()
    save_model(tmp_path / "model", model, FakeTokenizer(), {})
    other, report = transformers.AutoModelForPreTraining.from_pretrained(
        tmp_path / "model", output_loading_info=True, attn_implementation="eager"
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    packed, targets = batch(5, 12, 12), torch.arange(29)
    with torch.no_grad():
        ours, theirs = model(packed, targets), other.eval()(**padded(packed))
    real = padded(packed)["attention_mask"].bool()
    torch.testing.assert_close(
        ours.mlm_logits, theirs.prediction_logits[real], atol=1e-5, rtol=1e-5
    )
    torch.testing.assert_close(
        ours.nsp_logits, theirs.seq_relationship_logits, atol=1e-5, rtol=1e-5
    )
    other.save_pretrained(tmp_path / "back")
    assert equal(model, load_pretraining_model(tmp_path / "back"))


def test_the_real_tokenizer_completes_the_directory(
    config: ModelConfig, tmp_path: Path, transformers: Any
) -> None:
    words = ["the", "river", "bridge", "##s", "."]
    tokenizer = Tokenizer.from_vocabulary([*words, *SPECIAL_TOKENS], lowercase=True)
    save_model(tmp_path / "model", Encoder(config), tokenizer, {})
    saved = json.loads((tmp_path / "model" / "config.json").read_text())
    assert saved["pad_token_id"] == tokenizer.pad_id != 0
    other = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    model = transformers.AutoModel.from_pretrained(tmp_path / "model")
    long = other("the river " * config.max_position_embeddings, truncation=True)["input_ids"]
    assert len(long) == other.model_max_length == config.max_position_embeddings
    encoded = other("The rivers.", return_tensors="pt")
    assert other.convert_ids_to_tokens(encoded["input_ids"][0])[1:-1] == [
        "the",
        "river",
        "##s",
        ".",
    ]
    assert model(**encoded).last_hidden_state.shape == (1, 6, 24)
    check_vocabulary(load_config(tmp_path / "model"), Tokenizer.load(tmp_path / "model").size)


def test_transformers_loads_encoders_and_classifiers(
    config: ModelConfig, tmp_path: Path, transformers: Any
) -> None:
    save_model(tmp_path / "encoder", Encoder(config), FakeTokenizer(), {})
    other, report = transformers.AutoModel.from_pretrained(
        tmp_path / "encoder", output_loading_info=True
    )
    assert (type(other).__name__, report["missing_keys"]) == ("BertModel", set())
    labels = ["good", "bad", "neither"]
    save_model(tmp_path / "c", three_classes(config), FakeTokenizer(), {"labels": labels})
    other, report = transformers.AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "c", output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert other.config.id2label == {0: "good", 1: "bad", 2: "neither"}
    loaded = load_model(tmp_path / "c", three_classes)
    assert (loaded.missing_keys, loaded.unexpected_keys) == ([], [])


def test_headless_directories_of_transformers(
    config: ModelConfig, model: PretrainingModel, twin: Any, tmp_path: Path
) -> None:
    other = twin(model, "BertForPreTraining")
    other.bert.save_pretrained(tmp_path / "plain")  # no "bert." in front of the names
    assert equal(model.encoder, load_encoder(tmp_path / "plain"))


def test_older_pickles_with_older_names_are_read(saved: Path, model: PretrainingModel) -> None:
    tensors = load_file(saved / "model.safetensors")
    old = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors.items()
    }
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"]
    old["cls.predictions.decoder.bias"] = old["cls.predictions.bias"]
    old["bert.embeddings.position_ids"] = torch.arange(32)[None]
    (saved / "model.safetensors").unlink()
    torch.save(old, saved / "pytorch_model.bin")
    assert equal(model, load_pretraining_model(saved))
    old["cls.predictions.decoder.weight"] = old["cls.predictions.decoder.weight"] + 1
    torch.save(old, saved / "pytorch_model.bin")
    with pytest.raises(BertkitError, match=r"decoder.weight differs"):
        load_encoder(saved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_weights_become_fp32(
    saved: Path, model: PretrainingModel, dtype: torch.dtype
) -> None:
    rewrite(saved, lambda tensors: tensors.update({n: t.to(dtype) for n, t in tensors.items()}))
    again = load_pretraining_model(saved)
    assert {parameter.dtype for parameter in again.parameters()} == {torch.float32}
    assert torch.equal(again.mlm.dense.weight, model.mlm.dense.weight.to(dtype).float())


def test_missing_heads_are_new_and_named(saved: Path, model: PretrainingModel) -> None:
    loaded = load_model(saved, three_classes)
    assert loaded.missing_keys == ["classifier.weight", "classifier.bias"]
    assert len(loaded.unexpected_keys) == 7
    assert all(name.startswith(("mlm.", "nsp.")) for name in loaded.unexpected_keys)
    assert equal(loaded.model.encoder, model.encoder)
    assert loaded.model.classifier.weight.any()

    rewrite(saved, lambda tensors: [tensors.pop(n) for n in list(tensors) if "pooler" in n])
    assert "encoder.pooler.weight" in load_model(saved, Encoder).missing_keys
    with pytest.raises(BertkitError, match=r"lacks encoder\.pooler\.weight"):
        load_encoder(saved)


def test_missing_unknown_and_misshapen_tensors_are_named(saved: Path) -> None:
    name = "bert.encoder.layer.1.attention.self.key.bias"
    rewrite(saved, lambda tensors: tensors.update({name: torch.zeros(23)}))
    with pytest.raises(BertkitError, match=str(saved)):
        load_encoder(saved)
    rewrite(saved, lambda tensors: tensors.pop(name))
    with pytest.raises(BertkitError, match=f"lacks .*{name}"):
        load_encoder(saved)
    rewrite(saved, lambda tensors: tensors.update({name: torch.zeros(24)}))
    extra = "bert.encoder.layer.0.crossattention.self.key.bias"
    rewrite(saved, lambda tensors: tensors.update({extra: torch.zeros(24)}))
    with pytest.raises(BertkitError, match=f"holds {extra}"):
        load_encoder(saved)
    rewrite(saved, lambda tensors: tensors.update({extra: torch.zeros(24, dtype=torch.int8)}))
    with pytest.raises(BertkitError, match=f"{extra} is not a floating-point tensor"):
        load_encoder(saved)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": 51},
        {"num_hidden_layers": 4},
        {"max_position_embeddings": 33},
        {"position_embedding_type": "relative_key"},
        {"add_cross_attention": True},
        {"hidden_act": "relu"},
        {"hidden_act": ["gelu"]},
        {"num_attention_heads": 7},
    ],
)
def test_configs_that_do_not_fit_are_refused_before_anything_is_built(
    changes: dict[str, Any], saved: Path
) -> None:
    reconfigure(saved, **changes)
    with pytest.raises(BertkitError, match=str(saved)):
        load_pretraining_model(saved)


def test_damaged_files_are_named(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match="absent"):
        load_encoder(tmp_path / "absent")
    weights = saved / "model.safetensors"
    content = weights.read_bytes()
    size = len(content)
    for damaged in (content[:-10], b"\xff" * size, b"\0" * size, content[:100], b""):
        weights.write_bytes(damaged)
        with pytest.raises(BertkitError, match=str(weights)):
            load_encoder(saved)
    weights.unlink()
    with pytest.raises(BertkitError, match="neither"):
        load_encoder(saved)
    for text in ("{", "[]", "{}"):
        (saved / "config.json").write_text(text)
        with pytest.raises(BertkitError, match=str(saved / "config.json")):
            load_encoder(saved)


def test_a_pickle_of_something_else_is_refused(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    torch.save([1, "long" * 10**5], saved / "pytorch_model.bin")
    with pytest.raises(BertkitError, match="holds no named tensors"):
        load_encoder(saved)


def test_saving_replaces_models_only_and_leaves_nothing_after_an_error(
    saved: Path, model: PretrainingModel, config: ModelConfig, tmp_path: Path
) -> None:
    save_model(saved, Encoder(config), FakeTokenizer(), {})  # a model directory: replaced
    assert read_json(saved / "config.json")["architectures"] == ["BertModel"]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.txt").write_text("years of work")
    with pytest.raises(BertkitError, match="thesis exists and holds no model"):
        save_model(other, model, FakeTokenizer(), {})
    assert (other / "chapter.txt").read_text() == "years of work"

    with pytest.raises(BertkitError, match="2 label names for 3 classes"):
        save_model(tmp_path / "new", three_classes(config), FakeTokenizer(), {"labels": ["a", "b"]})
    with pytest.raises(BertkitError, match="tokenizer has 51 tokens but the model only 50"):
        save_model(tmp_path / "new", model, FakeTokenizer(51), {})
    assert {path.name for path in tmp_path.iterdir()} == {"model", "thesis"}


@pytest.mark.parametrize(
    ("before", "after"),
    [("", "module."), ("", "_orig_mod."), ("bert.", "model."), ("bert.", ""), ("", "bert.")],
)
def test_prefixes_of_wrapped_models_are_left_out(
    before: str, after: str, saved: Path, model: PretrainingModel
) -> None:
    def rename(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            if name.startswith(before):
                tensors[after + name.removeprefix(before)] = tensors.pop(name)

    rewrite(saved, rename)
    assert equal(model, load_pretraining_model(saved))


def test_two_encoders_in_a_file_are_refused(saved: Path) -> None:
    def copy(tensors: dict[str, Any]) -> None:
        tensors |= {f"student.{name}": tensor.clone() for name, tensor in tensors.items()}

    rewrite(saved, copy)
    with pytest.raises(BertkitError, match=r"holds 2 encoders \(bert\., student\.bert\.\)"):
        load_pretraining_model(saved)


def test_an_adapter_is_named(saved: Path, tmp_path: Path) -> None:
    lora = "bert.encoder.layer.0.attention.self.query.lora_A.default.weight"
    rewrite(saved, lambda tensors: tensors.update({lora: torch.ones(2, 24)}))
    adapter = tmp_path / "adapter"
    write_json(adapter / "adapter_config.json", {"base_model_name_or_path": "org/base"})
    for folder, said in ((saved, "adapter"), (adapter, "adapter .* of org/base")):
        with pytest.raises(BertkitError, match=said) as caught:
            load_pretraining_model(model_folder(folder))
        assert caught.value.code == "adapter"
        assert "merge_and_unload" in str(caught.value)


def test_vocabulary_may_be_smaller_than_the_embeddings(config: ModelConfig) -> None:
    check_vocabulary(config, 50)
    check_vocabulary(config, 49)
    with pytest.raises(BertkitError, match="use the tokenizer that the model was made with"):
        check_vocabulary(config, 51)
