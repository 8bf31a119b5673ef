"""The heads against transformers, their dropout, and the paper's parameter counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel, count_parameters
from bertkit.model.outputs import (
    ClassificationModel,
    SpanModel,
    TokenClassificationModel,
)
from tests.model.test_encoder import spread

BASE = ModelConfig(vocab_size=30522)
LARGE = ModelConfig(
    vocab_size=30522,
    hidden_size=1024,
    num_hidden_layers=24,
    num_attention_heads=16,
    intermediate_size=4096,
)


@pytest.mark.parametrize("act", ["gelu", "gelu_tanh"])
def test_pretraining_logits_equal_transformers(
    act: str, config: ModelConfig, batch: Any, twin: Any, padded: Any
) -> None:
    model = spread(PretrainingModel(ModelConfig(**{**vars(config), "hidden_act": act})))
    packed = batch(6, 20, 3, 20)
    targets = torch.tensor([1, 6, 25, 28, 48])
    with torch.no_grad():
        output = model(packed, targets)
        answer = twin(model, "BertForPreTraining")(**padded(packed))
    real = padded(packed)["attention_mask"].bool()
    assert output.mlm_logits.shape == (5, 50)
    everywhere = answer.prediction_logits[real]
    torch.testing.assert_close(output.mlm_logits, everywhere[targets], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        output.nsp_logits, answer.seq_relationship_logits, atol=1e-5, rtol=1e-5
    )


def test_gradients_equal_transformers(
    config: ModelConfig, batch: Any, twin: Any, padded: Any
) -> None:
    """The tied matrix gets gradients from both of its uses; no loss means no gradient."""
    model = spread(PretrainingModel(config))
    packed, targets = batch(6, 9), torch.tensor([2, 8, 14])
    other = twin(model, "BertForPreTraining")
    output = model(packed, targets)
    (output.mlm_logits.square().sum() + output.nsp_logits.square().sum()).backward()
    answer = other(**padded(packed))
    real = padded(packed)["attention_mask"].bool()
    logits = answer.prediction_logits[real][targets]
    (logits.square().sum() + answer.seq_relationship_logits.square().sum()).backward()
    pairs = [
        (model.encoder.word_embeddings, other.bert.embeddings.word_embeddings),
        (model.encoder.layers[0].output, other.bert.encoder.layer[0].output.dense),
        (model.encoder.pooler, other.bert.pooler.dense),
        (model.mlm.dense, other.cls.predictions.transform.dense),
    ]
    for ours, theirs in pairs:
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, atol=1e-3, rtol=1e-4)
    torch.testing.assert_close(
        model.encoder.layers[1].query_key_value.weight.grad[24:48],
        other.bert.encoder.layer[1].attention.self.key.weight.grad,
        atol=1e-3,
        rtol=1e-4,
    )


def test_classification_logits_equal_transformers(
    config: ModelConfig, batch: Any, twin: Any, padded: Any
) -> None:
    model = spread(ClassificationModel(config, 2))
    packed = batch(6, 20, 3)
    with torch.no_grad():
        answer = twin(model, "BertForSequenceClassification")(**padded(packed))
        torch.testing.assert_close(model(packed), answer.logits, atol=1e-5, rtol=1e-5)
    assert ClassificationModel(config, 7)(packed).shape == (3, 7)


def head_training(model: Any) -> Any:
    """Training mode for what stands on the encoder, so that the encoder draws nothing."""
    for name, part in model.train().named_children():
        if name == "encoder":
            part.eval()
    return model


def read_by(
    layer: torch.nn.Module,
    model: ClassificationModel | TokenClassificationModel | SpanModel,
    packed: Any,
) -> torch.Tensor:
    """What a layer of a model is given."""
    seen: list[torch.Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach()))
    model(packed)
    hook.remove()
    [given] = seen
    return given


@pytest.mark.parametrize("kind", [ClassificationModel, TokenClassificationModel])
def test_classifiers_read_what_is_dropped_out_once(
    kind: type[ClassificationModel | TokenClassificationModel],
    config: ModelConfig,
    batch: Any,
) -> None:
    """Vectors of sequences or of tokens, once more than in the encoder; only in training."""
    torch.manual_seed(0)
    model = kind(replace(config, hidden_dropout_prob=0.25), 3)
    packed = batch(*[5] * 80)
    whole = read_by(model.classifier, model.eval(), packed)
    thinned = read_by(model.classifier, head_training(model), packed)
    kept = thinned != 0
    assert (whole != 0).all()
    assert len(whole) == (80 if kind is ClassificationModel else 400)
    assert kept.double().mean() == pytest.approx(0.75, abs=0.05)
    torch.testing.assert_close(thinned[kept], whole[kept] / 0.75)


def test_span_logits_have_no_dropout_of_their_own(config: ModelConfig, batch: Any) -> None:
    model = SpanModel(replace(config, hidden_dropout_prob=0.5))
    packed = batch(6, 20, 3)
    whole = model.eval()(packed)
    assert torch.equal(head_training(model)(packed), whole)
    assert not torch.equal(model.train()(packed), whole)


def test_pretraining_heads_have_no_dropout_of_their_own(config: ModelConfig, batch: Any) -> None:
    model = PretrainingModel(replace(config, hidden_dropout_prob=0.5))
    packed, targets = batch(6, 20, 3), torch.tensor([1, 6, 25])
    whole, trained = model.eval()(packed, targets), head_training(model)(packed, targets)
    assert torch.equal(trained.mlm_logits, whole.mlm_logits)
    assert torch.equal(trained.nsp_logits, whole.nsp_logits)
    assert not torch.equal(model.train()(packed, targets).nsp_logits, whole.nsp_logits)


def test_paper_sizes_have_the_paper_parameter_counts() -> None:
    assert count_parameters(BASE) == 109_482_240
    assert count_parameters(LARGE) == 335_141_888
    assert count_parameters(BASE, heads=True) == 110_106_428
