"""Replaced-token detection: what is shared, what is drawn, and what the losses are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import (
    DISCRIMINATOR_WEIGHT,
    ReplacedTokenModel,
    generator_config,
    replaced_objective,
    total_loss,
)
from bertkit.pretraining_data.batch import Packed, pack
from bertkit.pretraining_data.loader import PretrainingBatch

MASK = 4


@pytest.fixture
def sizes() -> ModelConfig:
    return ModelConfig(
        vocab_size=50,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=36,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        embedding_size=12,
        initializer_range=0.2,
    )


@pytest.fixture
def model(sizes: ModelConfig) -> ReplacedTokenModel:
    torch.manual_seed(0)
    return ReplacedTokenModel(sizes, 1 / 3)


def masked(sequences: list[list[int]], places: list[int]) -> PretrainingBatch:
    """A batch whose tokens at some places of the run are targets and masked."""
    packed = pack(sequences)
    targets = torch.tensor(places)
    truth = packed.ids[targets].clone()
    packed.ids[targets] = MASK
    return PretrainingBatch(packed, targets, truth, torch.zeros(len(sequences), dtype=torch.long))


@pytest.fixture
def example() -> PretrainingBatch:
    rows = torch.randint(5, 50, (3, 9), generator=torch.Generator().manual_seed(1)).tolist()
    return masked([rows[0], rows[1][:5], rows[2]], [1, 4, 10, 12, 15, 20])


@pytest.fixture
def seen(model: ReplacedTokenModel) -> list[Packed]:
    """What the discriminator was shown, forward by forward."""
    shown: list[Packed] = []

    def note(module: Any, inputs: tuple[Any, ...]) -> None:
        shown.append(inputs[0])

    model.encoder.register_forward_pre_hook(note)
    return shown


def forward(model: ReplacedTokenModel, batch: PretrainingBatch) -> Any:
    return model(batch.packed, batch.target_positions, batch.target_ids)


def test_sizes_of_the_generator(sizes: ModelConfig) -> None:
    small = generator_config(sizes, 1 / 3)
    assert (small.hidden_size, small.num_attention_heads, small.intermediate_size) == (8, 1, 12)
    assert (small.embedding_size, small.num_hidden_layers) == (12, 2)
    base = ModelConfig(vocab_size=30_522)  # ELECTRA-base: a third; embeddings as wide as the rest
    third = generator_config(base, 1 / 3)
    assert (third.hidden_size, third.num_attention_heads, third.intermediate_size) == (256, 4, 1024)
    assert third.embedding_size == 768
    tenth = generator_config(sizes, 0.1)
    assert (tenth.hidden_size, tenth.num_attention_heads) == (8, 1), "one head at least"


def test_the_embeddings_are_shared(model: ReplacedTokenModel, example: PretrainingBatch) -> None:
    words = [n for n, p in model.named_parameters() if p.shape == (50, 12)]
    assert words == ["encoder.word_embeddings.weight"]
    before = torch.get_rng_state()
    whole, head = model.whole_generator()
    assert whole.word_embeddings is model.encoder.word_embeddings
    assert head is model.generator.mlm
    assert torch.equal(torch.get_rng_state(), before), "no weight is drawn and then replaced"
    # each loss alone has gradients in them
    for name in ("mlm_loss", "rtd_loss"):
        model.zero_grad()
        replaced_objective(model, example)[name].value.backward()
        for shared in ("word", "position", "segment"):
            weight = getattr(model.encoder, f"{shared}_embeddings").weight
            assert weight.grad is not None, (name, shared)
            assert float(weight.grad.abs().sum()) > 0


@pytest.mark.slow
def test_labels_mark_what_differs(
    model: ReplacedTokenModel, example: PretrainingBatch, seen: list[Packed]
) -> None:
    truth = example.packed.ids.clone()
    truth[example.target_positions] = example.target_ids
    lucky = 0
    for seed in range(120):
        torch.manual_seed(seed)
        with torch.no_grad():
            output = forward(model, example)
        differs = (seen[-1].ids != truth).float()
        assert torch.equal(output.replaced, differs)
        untouched = torch.ones(len(truth), dtype=torch.bool)
        untouched[example.target_positions] = False
        assert not output.replaced[untouched].any()
        lucky += int((differs[example.target_positions] == 0).sum())
    assert lucky > 0, "no draw hit the original; more draws are needed to test that"
    assert (example.packed.ids[example.target_positions] == MASK).all(), "the batch is not changed"
    for name in ("segment_ids", "position_ids", "cu_seqlens"):
        assert torch.equal(getattr(seen[-1], name), getattr(example.packed, name))


def test_a_lucky_draw_is_an_original(
    model: ReplacedTokenModel, example: PretrainingBatch, seen: list[Packed]
) -> None:
    with torch.no_grad():
        model.generator.mlm.bias[7] = 1e4  # it always draws 7
    truth = torch.where(torch.arange(6) < 2, 7, example.target_ids)
    batch = PretrainingBatch(example.packed, example.target_positions, truth, example.next_labels)
    wanted = torch.zeros(len(example.packed.ids))
    wanted[example.target_positions[truth != 7]] = 1
    assert torch.equal(forward(model, batch).replaced, wanted)
    assert (seen[-1].ids[example.target_positions] == 7).all()


def test_no_gradient_goes_through_the_draw(
    model: ReplacedTokenModel, example: PretrainingBatch
) -> None:
    sums = replaced_objective(model, example)
    sums["rtd_loss"].value.backward()
    assert all(parameter.grad is None for parameter in model.generator.parameters())
    assert model.encoder.layers[0].output.weight.grad is not None
    model.zero_grad()
    replaced_objective(model, example)["mlm_loss"].value.backward()
    assert all(parameter.grad is None for parameter in model.encoder.layers.parameters())
    assert all(parameter.grad is None for parameter in model.rtd.parameters())
    assert all(parameter.grad is not None for parameter in model.generator.parameters())


def test_losses_by_hand(model: ReplacedTokenModel, example: PretrainingBatch) -> None:
    with torch.no_grad():
        torch.manual_seed(5)
        output = forward(model, example)
        torch.manual_seed(5)
        sums = replaced_objective(model, example)
    mlm = -output.mlm_logits.log_softmax(-1)[torch.arange(6), example.target_ids].sum()
    assert float(sums["mlm_loss"].value) == pytest.approx(float(mlm), rel=1e-5)
    right = torch.sigmoid(torch.where(output.replaced == 1, 1.0, -1.0) * output.replaced_logits)
    assert len(right) == 23, "every token counts, not only the masked ones"
    rtd = float(-right.log().sum())
    assert float(sums["rtd_loss"].value) == pytest.approx(rtd, rel=1e-5)
    assert float(sums["rtd_accuracy"].value) == float((right > 0.5).sum())
    assert float(sums["rtd_share"].value) == float(output.replaced.sum())
    assert {name: s.per for name, s in sums.items()} == {
        "mlm_loss": "targets",
        "mlm_accuracy": "targets",
        "rtd_loss": "tokens",
        "rtd_accuracy": "tokens",
        "rtd_share": "tokens",
    }
    assert example.counts == {"targets": 6, "sequences": 3, "tokens": 23}
    assert DISCRIMINATOR_WEIGHT == 50
    loss = total_loss(sums, example.counts)
    assert float(loss) == pytest.approx(float(mlm) / 6 + 50 * rtd / 23, rel=1e-5)


@pytest.mark.parametrize("embedding_size", [12, 0])
def test_numbers_are_those_of_transformers(
    embedding_size: int,
    sizes: ModelConfig,
    example: PretrainingBatch,
    padded: Any,
    transformers: Any,
) -> None:
    """ElectraForMaskedLM with a generator's weights, and ElectraForPreTraining on its draws."""
    fields = {**vars(sizes), "embedding_size": embedding_size or 24}
    theirs = transformers.ElectraForPreTraining(
        transformers.ElectraConfig(**fields, attn_implementation="eager")
    ).eval()
    small = {"hidden_size": 8, "num_attention_heads": 1, "intermediate_size": 12}
    their_generator = transformers.ElectraForMaskedLM(
        transformers.ElectraConfig(**{**fields, **small}, attn_implementation="eager")
    ).eval()
    their_generator.electra.embeddings = theirs.electra.embeddings
    their_generator.tie_weights()

    torch.manual_seed(0)
    config = ModelConfig(**{**vars(sizes), "embedding_size": embedding_size})
    model = ReplacedTokenModel(config, 1 / 3).eval()
    with torch.no_grad():
        for parameter in (*theirs.parameters(), *their_generator.parameters()):
            parameter.normal_(std=0.3)
        copy_electra(model, theirs, their_generator)
    real = padded(example.packed)["attention_mask"].bool()
    torch.manual_seed(7)
    with torch.no_grad():
        output = forward(model, example)
        logits = their_generator(**padded(example.packed)).logits[real][example.target_positions]
    torch.testing.assert_close(output.mlm_logits, logits, atol=1e-5, rtol=1e-5)
    torch.manual_seed(7)
    drawn = example.packed.ids.clone()
    drawn[example.target_positions] = torch.multinomial(logits.softmax(-1), 1)[:, 0]
    inputs = padded(example.packed)
    inputs["input_ids"][real] = drawn
    labels = torch.zeros(real.shape, dtype=torch.long)
    labels[real] = output.replaced.long()
    with torch.no_grad():
        answer = theirs(**inputs, labels=labels)
    torch.testing.assert_close(output.replaced_logits, answer.logits[real], atol=1e-5, rtol=1e-5)
    torch.manual_seed(7)
    with torch.no_grad():
        ours = float(replaced_objective(model, example)["rtd_loss"].value) / 23
    assert ours == pytest.approx(float(answer.loss), rel=1e-5)


def copy_electra(model: ReplacedTokenModel, theirs: Any, their_generator: Any) -> None:
    """Weights of two networks of transformers into ours, name by name."""

    def linear(ours: Any, *others: Any) -> None:
        ours.weight.copy_(torch.cat([other.weight for other in others]))
        if ours.bias is not None:
            ours.bias.copy_(torch.cat([other.bias for other in others]))

    def layers(ours: Any, others: Any) -> None:
        for layer, other in zip(ours, others, strict=True):
            attention = other.attention
            linear(layer.query_key_value, attention.self.query, attention.self.key,
                   attention.self.value)  # fmt: skip
            linear(layer.attention_output, attention.output.dense)
            linear(layer.attention_norm, attention.output.LayerNorm)
            linear(layer.intermediate, other.intermediate.dense)
            linear(layer.output, other.output.dense)
            linear(layer.output_norm, other.output.LayerNorm)

    def table(ours: Any, other: Any) -> None:
        weight: Tensor = other.weight
        ours.weight.copy_(weight)

    encoder, generator, electra = model.encoder, model.generator, theirs.electra
    table(encoder.word_embeddings, electra.embeddings.word_embeddings)
    table(encoder.position_embeddings, electra.embeddings.position_embeddings)
    table(encoder.segment_embeddings, electra.embeddings.token_type_embeddings)
    linear(encoder.embedding_norm, electra.embeddings.LayerNorm)
    if encoder.projection is not None:
        linear(encoder.projection, electra.embeddings_project)
    layers(encoder.layers, electra.encoder.layer)
    linear(model.rtd.dense, theirs.discriminator_predictions.dense)
    linear(model.rtd.output, theirs.discriminator_predictions.dense_prediction)
    linear(generator.projection, their_generator.electra.embeddings_project)
    layers(generator.layers, their_generator.electra.encoder.layer)
    linear(generator.mlm.dense, their_generator.generator_predictions.dense)
    linear(generator.mlm.norm, their_generator.generator_predictions.LayerNorm)
    generator.mlm.bias.copy_(their_generator.generator_lm_head.bias)
