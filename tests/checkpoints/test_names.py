"""Networks beside BERT: to transformers' classes and back, with the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bertkit.checkpoints.names import BERT, BERTKIT, ELECTRA, choose_class, heads_of_class
from bertkit.checkpoints.pretrained import (
    load_config,
    load_model,
    load_pretraining_model,
    read_pretrained,
)
from bertkit.checkpoints.save import save_generator, save_model
from bertkit.errors import BertkitError
from bertkit.files import read_json, write_json
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel, ReplacedTokenModel
from bertkit.model.outputs import ClassificationModel, SpanModel, TokenClassificationModel
from bertkit.pretraining_data.batch import Packed
from bertkit.tasks.types import TASKS
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import load_encoder

NETWORKS: dict[str, dict[str, Any]] = {
    "bert": {},
    "albert": {"share_layers": True, "embedding_size": 8},
    "factorised": {"embedding_size": 8},
    "electra": {"embedding_size": 8, "pooler_act": "gelu"},
    "electra-base": {"pooler_act": "gelu"},
    "left_to_right": {"direction": "left_to_right"},
}
"""Name -> fields of `ModelConfig`."""


def words_only(config: ModelConfig) -> PretrainingModel:
    return PretrainingModel(config, pairs=False)


def replaced(config: ModelConfig) -> ReplacedTokenModel:
    return ReplacedTokenModel(config, 1 / 3)


def classifier(config: ModelConfig) -> ClassificationModel:
    return ClassificationModel(config, 3)


def chooser(config: ModelConfig) -> ClassificationModel:
    return ClassificationModel(config, 1)


def tagger(config: ModelConfig) -> TokenClassificationModel:
    return TokenClassificationModel(config, 3)


BUILD: dict[str, Callable[[ModelConfig], Any]] = {
    "encoder": Encoder,
    "pairs": PretrainingModel,
    "words": words_only,
    "replaced": replaced,
    "classification": classifier,
    "multiple-choice": chooser,
    "token-classification": tagger,
    "question-answering": SpanModel,
}
"""Head -> what makes the network."""

AUTO = {
    "encoder": "AutoModel",
    "pairs": "AutoModelForPreTraining",
    "words": "AutoModelForMaskedLM",
    "causal": "AutoModelForCausalLM",
    "replaced": "AutoModelForPreTraining",
    "classification": "AutoModelForSequenceClassification",
    "multiple-choice": "AutoModelForMultipleChoice",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
}
"""Head -> the class of transformers that chooses by `model_type` alone."""

KNOWN = [
    ("albert", "encoder", "AlbertModel"),
    ("albert", "pairs", "AlbertForPreTraining"),
    ("albert", "words", "AlbertForMaskedLM"),
    ("albert", "classification", "AlbertForSequenceClassification"),
    ("albert", "token-classification", "AlbertForTokenClassification"),
    ("albert", "question-answering", "AlbertForQuestionAnswering"),
    ("bert", "token-classification", "BertForTokenClassification"),
    ("bert", "question-answering", "BertForQuestionAnswering"),
    ("bert", "words", "BertForMaskedLM"),
    ("bert", "replaced", "ElectraForPreTraining"),
    ("factorised", "encoder", "ElectraModel"),
    ("factorised", "words", "ElectraForMaskedLM"),
    ("factorised", "replaced", "ElectraForPreTraining"),
    ("factorised", "token-classification", "ElectraForTokenClassification"),
    ("factorised", "question-answering", "ElectraForQuestionAnswering"),
    ("electra", "classification", "ElectraForSequenceClassification"),
    ("electra", "multiple-choice", "ElectraForMultipleChoice"),
    ("electra", "token-classification", "ElectraForTokenClassification"),
    ("electra-base", "classification", "ElectraForSequenceClassification"),
    ("electra-base", "multiple-choice", "ElectraForMultipleChoice"),
    ("electra-base", "encoder", "ElectraModel"),
    ("bert", "multiple-choice", "BertForMultipleChoice"),
    ("albert", "multiple-choice", "AlbertForMultipleChoice"),
    ("left_to_right", "encoder", "BertModel"),
    ("left_to_right", "words", "BertLMHeadModel"),
    ("left_to_right", "token-classification", "BertForTokenClassification"),
]
OWN = [
    ("left_to_right", "pairs"),
    ("left_to_right", "classification"),
    ("left_to_right", "question-answering"),
    ("factorised", "pairs"),
    ("factorised", "classification"),
    ("factorised", "multiple-choice"),
    ("electra", "pairs"),
    ("albert", "replaced"),
]


@pytest.fixture
def make(config: ModelConfig, tokenizer: Tokenizer) -> Callable[..., Any]:
    """A network with large random weights: `make("albert", "token-classification")`."""

    def build(network: str, head: str, **fields: Any) -> Any:
        torch.manual_seed(len(network) + len(head))
        sizes = {"vocab_size": tokenizer.size, **NETWORKS[network], **fields}
        model = BUILD[head](replace(config, **sizes)).eval()
        return with_large_weights(model)

    return build


def with_large_weights(model: Any) -> Any:
    """So that a small mistake shows."""
    for name, parameter in model.named_parameters():
        mean = float(name.endswith(("LayerNorm.weight", "layer_norm.weight", "norm.weight")))
        nn.init.normal_(parameter, mean=mean, std=0.2)
    return model


@pytest.fixture
def write(tokenizer: Tokenizer, tmp_path: Path) -> Callable[[Any, str], Path]:
    def save(model: Any, head: str) -> Path:
        details = {"task": head, "head": TASKS[head].head} if head in TASKS else {}
        save_model(tmp_path / "model", model, tokenizer, details)
        return tmp_path / "model"

    return save


@torch.no_grad()
def our_outputs(model: Any, packed: Packed) -> list[Tensor]:
    """What a padded library answers, at the real tokens."""
    every = torch.arange(len(packed.ids))
    if isinstance(model, Encoder):
        return [model(packed)]
    if isinstance(model, PretrainingModel):
        output = model(packed, every)
        return [output.mlm_logits] + ([] if output.nsp_logits is None else [output.nsp_logits])
    if isinstance(model, ReplacedTokenModel):
        return [model.rtd(model.encoder(packed))]
    output = model(packed)
    return [output[:, 0], output[:, 1]] if isinstance(model, SpanModel) else [output]


@torch.no_grad()
def their_outputs(model: Any, inputs: dict[str, Tensor]) -> list[Tensor]:
    if type(model).__name__.endswith("ForMultipleChoice"):  # each sequence is the only choice
        return [model.eval()(**{name: rows[:, None] for name, rows in inputs.items()})["logits"]]
    output, real = model.eval()(**inputs), inputs["attention_mask"].bool()
    wanted = ("last_hidden_state", "logits", "prediction_logits", "start_logits", "end_logits")
    found = [output[name] for name in wanted if name in output]
    found = [x[real] if x.shape[:2] == real.shape else x for x in found]
    pairs = [n for n in ("sop_logits", "seq_relationship_logits") if n in output]
    return found + [output[name] for name in pairs]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for our, their in zip(ours, theirs, strict=True):
        assert our.std() > 0.05, "the numbers say nothing"
        torch.testing.assert_close(our, their, atol=1e-5, rtol=1e-5)


def assert_is_a_start(folder: Path, model: Any) -> None:
    """Fine-tuning can begin with it: the encoder's weights, and a head that is new."""
    start = read_pretrained(folder)
    assert start.config.direction == model.config.direction
    assert start.config.share_layers == model.config.share_layers
    built = start.build(classifier, keep_head=False)
    found = built.model.encoder.state_dict()
    encoder = model if isinstance(model, Encoder) else model.encoder
    for name, tensor in encoder.state_dict().items():
        assert name.startswith("pooler.") or torch.equal(found[name], tensor), name
    assert all(name.startswith(("classifier.", "encoder.pooler.")) for name in built.missing_keys)


@pytest.mark.parametrize(("network", "head", "name"), KNOWN)
def test_transformers_computes_the_same(
    network: str,
    head: str,
    name: str,
    make: Any,
    write: Any,
    batch: Any,
    padded: Any,
    transformers: Any,
) -> None:
    tanh = (network, head) in (("albert", "pairs"), ("factorised", "replaced"))
    model = make(network, head, hidden_act="gelu_tanh" if tanh else "gelu")
    folder = write(model, head)
    assert_is_a_start(folder, model)
    assert read_json(folder / "config.json")["architectures"] == [name]
    auto = AUTO["causal" if name == "BertLMHeadModel" else head]
    other, report = getattr(transformers, auto).from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert type(other).__name__ == name
    assert {kind: keys for kind, keys in report.items() if keys} == {}
    packed = batch(5, 12, 12, 1)
    assert_same(our_outputs(model, packed), their_outputs(other, padded(packed)))
    other.save_pretrained(folder.with_name("back"))
    pairs = {"pairs": load_pretraining_model, "words": load_pretraining_model}
    for place in (folder, folder.with_name("back")):
        load = pairs.get(head, lambda place: load_model(place, BUILD[head]).model)
        again = load(place)
        torch.testing.assert_close(
            our_outputs(again, packed), our_outputs(model, packed), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize(("network", "head"), OWN)
def test_what_transformers_has_not_is_read_back(
    network: str, head: str, make: Any, write: Any, batch: Any, transformers: Any
) -> None:
    model = make(network, head)
    folder = write(model, head)
    described = read_json(folder / "config.json")
    assert (described["model_type"], described["architectures"]) == ("bertkit", ["bertkit"])
    with pytest.raises(ValueError, match="bertkit"):
        transformers.AutoModel.from_pretrained(folder)
    assert load_config(folder) == model.config
    loaded = load_model(folder, BUILD[head])
    left = ("generator.", "encoder.pooler.") if head in ("words", "replaced") else ()
    assert all(name.startswith(left) for name in loaded.missing_keys)
    assert loaded.unexpected_keys == []
    assert_is_a_start(folder, model)
    packed = batch(5, 12, 12)
    assert_same(our_outputs(loaded.model, packed), our_outputs(model, packed))


def test_poolers_come_back_where_the_class_has_one(make: Any, write: Any) -> None:
    for network in ("albert", "left_to_right"):
        model = make(network, "encoder")
        assert torch.equal(load_encoder(write(model, "encoder")).pooler.weight, model.pooler.weight)
    folder = write(make("factorised", "encoder"), "encoder")
    with pytest.raises(BertkitError, match=r"lacks encoder.pooler"):
        load_encoder(folder)
    assert "encoder.pooler.weight" in load_model(folder, Encoder).missing_keys


def theirs(transformers: Any, name: str, **fields: Any) -> Any:
    """A network of transformers with large random weights."""
    torch.manual_seed(1)
    sizes = {
        "vocab_size": 50, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 3,
        "intermediate_size": 40, "max_position_embeddings": 32, **fields,
    }  # fmt: skip
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**sizes, attn_implementation="eager")).eval()
    return with_large_weights(model)


FOREIGN = [
    ("AlbertForPreTraining", "pairs", {"embedding_size": 8}),
    ("AlbertForPreTraining", "pairs", {"embedding_size": 24, "hidden_act": "gelu"}),
    ("AlbertForMaskedLM", "words", {"embedding_size": 8}),
    ("AlbertModel", "encoder", {"embedding_size": 8}),
    (
        "AlbertForTokenClassification",
        "token-classification",
        {"embedding_size": 8, "num_labels": 3},
    ),
    ("ElectraForPreTraining", "replaced", {"embedding_size": 8}),
    ("ElectraForPreTraining", "replaced", {"embedding_size": 24}),
    ("ElectraForMaskedLM", "words", {"embedding_size": 8}),
    ("ElectraModel", "encoder", {"embedding_size": 8}),
    ("ElectraModel", "encoder", {"embedding_size": 24}),
    ("ElectraModel", "encoder", {"embedding_size": 8, "is_decoder": True}),
    ("ElectraForQuestionAnswering", "question-answering", {"embedding_size": 8}),
    ("ElectraForSequenceClassification", "classification", {"embedding_size": 8, "num_labels": 3}),
    ("ElectraForSequenceClassification", "classification", {"embedding_size": 24, "num_labels": 3}),
    ("ElectraForMultipleChoice", "multiple-choice", {"embedding_size": 8}),
    (
        "ElectraForMultipleChoice",
        "multiple-choice",
        {"embedding_size": 24, "hidden_act": "gelu_new"},
    ),
    ("BertLMHeadModel", "words", {"is_decoder": True}),
    ("BertModel", "encoder", {"is_decoder": True}),
]


@pytest.mark.parametrize(("name", "head", "fields"), FOREIGN)
def test_directories_of_transformers_load(
    name: str,
    head: str,
    fields: dict[str, Any],
    tmp_path: Path,
    batch: Any,
    padded: Any,
    transformers: Any,
) -> None:
    other = theirs(transformers, name, **fields)
    other.save_pretrained(tmp_path)
    loaded = load_model(tmp_path, BUILD[head])
    assert all(new.startswith(("generator.", "encoder.pooler.")) for new in loaded.missing_keys), (
        loaded.missing_keys
    )
    assert loaded.unexpected_keys == []
    packed = batch(5, 12, 12, 1)
    assert_same(our_outputs(loaded.model, packed), their_outputs(other, padded(packed)))
    if head in ("pairs", "words"):
        whole = load_pretraining_model(tmp_path)
        assert_same(our_outputs(whole, packed), their_outputs(other, padded(packed)))


def test_both_parts_of_electra_are_directories(
    make: Any, tokenizer: Tokenizer, tmp_path: Path, batch: Any, padded: Any, transformers: Any
) -> None:
    model = with_large_weights(ReplacedTokenModel(make("factorised", "encoder").config, 2 / 3))
    model.eval()
    before = torch.get_rng_state()
    save_generator(tmp_path / "generator", model, tokenizer, {})
    assert torch.equal(torch.get_rng_state(), before)
    other, report = transformers.AutoModelForMaskedLM.from_pretrained(
        tmp_path / "generator", output_loading_info=True, attn_implementation="eager"
    )
    assert type(other).__name__ == "ElectraForMaskedLM"
    assert {kind: keys for kind, keys in report.items() if keys} == {}
    packed = batch(5, 12)
    every = torch.arange(17)
    with torch.no_grad():
        encoder = model.encoder
        logits = model.generator(encoder.embeddings(packed), packed, every, encoder.word_embeddings)
    assert_same([logits], their_outputs(other, padded(packed)))
    assert_same([logits], our_outputs(load_pretraining_model(tmp_path / "generator"), packed))


def test_classes_by_architecture() -> None:
    assert heads_of_class("BertForMaskedLM") == {"words"}
    assert heads_of_class("AlbertForQuestionAnswering") == {"span"}
    assert heads_of_class("bertkit") == heads_of_class("GPT2LMHeadModel") == set()
    plain = ModelConfig(vocab_size=9)
    assert choose_class(plain, "pairs") == (BERT, "BertForPreTraining")
    own = (BERTKIT, "bertkit")
    assert choose_class(replace(plain, embedding_size=768), "encoder") == own
    narrow = replace(plain, embedding_size=128)
    assert choose_class(narrow, "words") == (ELECTRA, "ElectraForMaskedLM")
    # the head of ELECTRA's generator has the GELU with erf, whatever its config says
    assert choose_class(replace(narrow, hidden_act="gelu_tanh"), "words") == own


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_groups": 3},
        {"inner_group_num": 2},
        {"embedding_size": 9},
        {"embedding_size": -1},
        {"model_type": "bert"},
        {"model_type": "electra"},
        {"model_type": "roformer"},
        {"model_type": "bertkit", "direction": "up"},
        {"num_hidden_layers": 10**9},
        {"model_type": "bertkit", "share_layers": True, "num_hidden_layers": 10**9},
        {
            "model_type": "electra",
            "architectures": ["ElectraForMaskedLM"],
            "hidden_act": "gelu_new",
        },
    ],
)
def test_configs_that_do_not_fit(changes: dict[str, Any], make: Any, write: Any) -> None:
    folder = write(make("albert", "pairs"), "pairs")
    write_json(folder / "config.json", {**read_json(folder / "config.json"), **changes})
    with pytest.raises(BertkitError, match=str(folder)):
        load_pretraining_model(folder)


@pytest.mark.parametrize("family", ["bert", "albert", "electra"])
def test_fields_that_a_config_leaves_out_are_those_of_its_family(
    family: str, tmp_path: Path, transformers: Any
) -> None:
    theirs = transformers.AutoConfig.for_model(family)
    bare = {"model_type": family, "vocab_size": theirs.vocab_size}
    write_json(tmp_path / "config.json", bare)
    ours = load_config(tmp_path)
    same = [name for name in vars(ours) if hasattr(theirs, name)]
    assert {"hidden_size", "num_attention_heads", "hidden_dropout_prob"} <= set(same)
    found = {name: getattr(ours, name) for name in same} | {"hidden_act": theirs.hidden_act}
    wanted = {name: getattr(theirs, name) for name in same}
    assert found == wanted
    assert ours.hidden_act == {"gelu": "gelu", "gelu_new": "gelu_tanh"}[theirs.hidden_act]
