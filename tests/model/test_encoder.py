"""The encoder against transformers, the paper's sizes, isolation, and its refusals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.pretraining_data.batch import Packed, pack
from tests.conftest import load_encoder, tiny_config

TINY = tiny_config(30, hidden_size=8, intermediate_size=16, max_position_embeddings=16)


def spread(model: Any) -> Any:
    """Weights large enough that a wrong term shows, biases and norms away from 0 and 1."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@pytest.mark.parametrize(
    ("width", "heads", "layers", "inner", "act"),
    [
        (24, 3, 3, 40, "gelu"),
        (35, 5, 2, 16, "gelu_tanh"),
        (64, 1, 1, 256, "gelu"),
        (12, 12, 4, 48, "gelu"),
    ],
)
def test_every_layer_equals_transformers(
    width: int, heads: int, layers: int, inner: int, act: str, batch: Any, twin: Any, padded: Any
) -> None:
    config = tiny_config(
        50,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        max_position_embeddings=32,
        hidden_act=act,
    )
    encoder = spread(Encoder(config))
    packed = batch(9, 1, 32, 9, 9, 4)
    other = twin(encoder, "BertModel")
    with torch.no_grad():
        states = encoder.layers_of(packed)
        pooled = encoder.pool(states[-1][packed.first_tokens])
        answer = other(**padded(packed), output_hidden_states=True)
    real = padded(packed)["attention_mask"].bool()
    assert len(states) == layers + 1 == len(answer.hidden_states)
    for ours, theirs in zip(states, answer.hidden_states, strict=True):
        torch.testing.assert_close(ours, theirs[real], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pooled, answer.pooler_output, atol=1e-5, rtol=1e-5)
    assert torch.equal(encoder(packed), states[-1])


def test_genuine_weights_equal_transformers(minilm: Path, transformers: Any) -> None:
    encoder = load_encoder(minilm)
    other = transformers.BertModel.from_pretrained(minilm, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm)
    sentences = [
        ("The bank raised its rates.", "We sat on the bank of the river."),
        ("Paris", None),
        ("A much longer sentence, with commas, so that the lengths of this batch differ.", None),
        ("Does it rain?", "No."),
    ]
    encoded = [tokenizer(*pair) if pair[1] else tokenizer(pair[0]) for pair in sentences]
    packed = pack([row["input_ids"] for row in encoded], [row["token_type_ids"] for row in encoded])
    with torch.no_grad():
        states = encoder.layers_of(packed)
        pooled = encoder.pool(states[-1][packed.first_tokens])
        for number, (row, *ours) in enumerate(
            zip(encoded, *(state.split(packed.lengths) for state in states), strict=True)
        ):
            answer = other(
                **row.convert_to_tensors("pt", prepend_batch_axis=True), output_hidden_states=True
            )
            for mine, theirs in zip(ours, answer.hidden_states, strict=True):
                torch.testing.assert_close(mine, theirs[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                pooled[number], answer.pooler_output[0], atol=1e-5, rtol=1e-5
            )


def change_of_others(encoder: Encoder, packed: Packed, changed: int) -> float:
    """How much other sequences' outputs move when sequence `changed` gets other tokens."""
    ids = packed.ids.clone()
    first, last = packed.cu_seqlens[changed : changed + 2].tolist()
    ids[first:last] = (ids[first:last] + 1) % encoder.config.vocab_size
    other = Packed(
        ids, packed.segment_ids, packed.position_ids, packed.cu_seqlens, packed.max_seqlen
    )
    with torch.no_grad():
        moved = (encoder(packed) - encoder(other)).abs().amax(dim=1)
    assert moved[first:last].max() > 0
    moved[first:last] = 0
    return float(moved.max())


@pytest.mark.slow
@given(
    lengths=st.lists(st.integers(1, 16), min_size=2, max_size=6),
    changed=st.integers(0, 5),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_a_sequence_never_sees_another(lengths: list[int], changed: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    sequences = [torch.randint(0, 30, (n,), generator=generator).tolist() for n in lengths]
    encoder = spread(Encoder(TINY))
    assert change_of_others(encoder, pack(sequences), changed % len(lengths)) == 0.0


def test_packed_equals_one_at_a_time(config: ModelConfig, batch: Any) -> None:
    encoder = spread(Encoder(config))
    packed = batch(3, 17, 17, 32, 1)
    with torch.no_grad():
        together = encoder(packed).split(packed.lengths)
        for row, alone in enumerate(together):
            part = slice(*packed.cu_seqlens[row : row + 2].tolist())
            single = pack([packed.ids[part].tolist()], [packed.segment_ids[part].tolist()])
            torch.testing.assert_close(encoder(single), alone, atol=1e-5, rtol=1e-5)


def test_chosen_rows_equal_those_of_all_with_their_gradients(
    config: ModelConfig, batch: Any
) -> None:
    encoder = spread(Encoder(config))
    packed = batch(9, 1, 32, 9, 4)
    rows = torch.cat([packed.first_tokens, torch.tensor([3, 54, 12])])
    weights = torch.randn(len(rows), config.hidden_size)
    found = []
    for states in (encoder(packed)[rows], encoder(packed, rows)):
        encoder.zero_grad()
        (states * weights).sum().backward()
        gradients = [p.grad for p in encoder.parameters() if p.grad is not None]
        found.append([states, *(gradient.clone() for gradient in gradients)])
    assert len(found[0]) > 40  # of every layer
    for of_all, of_chosen in zip(*found, strict=True):
        torch.testing.assert_close(of_chosen, of_all, atol=1e-5, rtol=1e-5)


def test_initial_weights_are_cut_at_two_deviations_and_follow_the_seed(config: ModelConfig) -> None:
    torch.manual_seed(5)
    encoder = Encoder(config)
    weight = encoder.layers[0].intermediate.weight
    assert weight.abs().max() <= 0.04
    assert (
        0.0168 < float(weight.detach().std()) < 0.0184
    )  # 0.02 x 0.8796, the deviation after the cut
    for name, parameter in encoder.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any()
        elif "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter))
    torch.manual_seed(5)
    again = Encoder(config)
    assert all(
        torch.equal(a, b) for a, b in zip(encoder.parameters(), again.parameters(), strict=True)
    )


@pytest.mark.parametrize("site", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_dropout_happens_in_training_only(site: str, config: ModelConfig, batch: Any) -> None:
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, site: 0.5}
    encoder, packed = Encoder(replace(config, **rates)), batch(8, 8, 5)
    assert not torch.equal(encoder(packed), encoder(packed))
    encoder.eval()
    assert torch.equal(encoder(packed), encoder(packed))


def test_bf16_autocast_keeps_the_residual_stream_in_fp32(config: ModelConfig, batch: Any) -> None:
    encoder = spread(Encoder(config))
    packed = batch(9, 30, 30)
    with torch.no_grad():
        exact = encoder(packed)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            states = encoder.layers_of(packed)
    assert {state.dtype for state in states} == {torch.float32}
    similarity = torch.nn.functional.cosine_similarity(states[-1], exact, dim=-1)
    assert similarity.min() > 0.999


@pytest.mark.parametrize(
    "change",
    [
        {"num_attention_heads": 5},
        {"vocab_size": 0},
        {"num_hidden_layers": True},
        {"hidden_dropout_prob": 1.0},
        {"attention_probs_dropout_prob": -0.1},
        {"hidden_act": "gleu"},
    ],
)
def test_impossible_configs_are_named(change: dict[str, Any]) -> None:
    [name] = change
    with pytest.raises(BertkitError, match=name):
        ModelConfig(**{**vars(TINY), **change})


@pytest.mark.parametrize("name", ["hidden_size", "layer_norm_eps"])
def test_values_of_another_type_are_named(name: str) -> None:
    # a TypeError where beartype checks the call first
    with pytest.raises((BertkitError, TypeError), match=name):
        ModelConfig(**{**vars(TINY), name: "8"})


def test_too_long_a_sequence_is_refused_by_forward() -> None:
    with pytest.raises(BertkitError, match=r"17 tokens.* only 16 positions; split it"):
        Encoder(TINY)(pack([[1] * 4, [1] * 17]))
