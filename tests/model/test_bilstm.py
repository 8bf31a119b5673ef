"""The BiLSTM without padding, and on top of the tasks' networks (paper section 5.1)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.errors import BertkitError
from bertkit.files import read_json
from bertkit.model import bilstm
from bertkit.model.bilstm import BiLSTM, step_order
from bertkit.model.encoder import ModelConfig
from bertkit.model.features import save_with_head
from bertkit.model.inference import prepare_encoder
from bertkit.model.task_heads import (
    ClassificationModel,
    SpanModel,
    TaskModel,
    TokenClassificationModel,
    add_bilstm,
    load_with_head,
)
from bertkit.pretraining_data.batch import pack
from bertkit.tokenizer.wordpiece import Tokenizer

KINDS: dict[str, Callable[[ModelConfig], TaskModel]] = {
    "classification": lambda config: ClassificationModel(config, 3),
    "token-classification": lambda config: TokenClassificationModel(config, 3),
    "question-answering": SpanModel,
}


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=8))
def test_step_order(lengths: list[int]) -> None:
    order, alive = step_order(lengths)
    ranked = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    wanted = [
        sum(lengths[:i]) + step for step in range(max(lengths)) for i in ranked if lengths[i] > step
    ]
    assert order.tolist() == wanted
    assert alive.tolist() == [sum(n > step for n in lengths) for step in range(max(lengths))]


@pytest.mark.parametrize("form", ["forward", "padded", "packed"])
@pytest.mark.parametrize("lengths", [(7, 5, 5, 1), (3, 8, 1, 8, 2)], ids=["sorted", "unsorted"])
def test_bilstm_equals_each_sequence_alone(lengths: tuple[int, ...], form: str) -> None:
    """Its states, and the gradients of its input and weights."""
    torch.manual_seed(0)
    model = BiLSTM(6, 5)
    assert (model.lstm.num_layers, model.lstm.bidirectional) == (2, True)
    packed = pack([[1] * length for length in lengths])
    hidden = torch.randn(sum(lengths), 6, requires_grad=True)
    inputs = [hidden, *model.parameters()]
    given = packed if form == "forward" else lengths
    found = getattr(model, form)(hidden, given)
    alone = torch.cat([model.lstm(part)[0] for part in torch.split(hidden, list(lengths))])
    torch.testing.assert_close(found, alone, atol=1e-6, rtol=1e-5)
    ours = torch.autograd.grad(found.square().sum(), inputs)
    theirs = torch.autograd.grad(alone.square().sum(), inputs)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_batch_is_padded_only_where_little_is_wasted(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long sequence among many short ones would take a hundred times the memory."""

    def form_of(model: BiLSTM, width: int, lengths: list[int]) -> str:
        states = torch.zeros(sum(lengths), width)
        taken = []
        for name in ("padded", "packed"):
            found = lambda *given, name=name: taken.append(name) or states  # noqa: E731
            monkeypatch.setattr(model, name, found)
        model(states, pack([[1] * n for n in lengths]))
        return str(taken[0])

    monkeypatch.setattr(bilstm, "has_products", lambda dtype: dtype == torch.float32)
    assert form_of(BiLSTM(6, 5), 6, [9, 8, 7]) == "padded"
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert form_of(BiLSTM(6, 5), 6, [9, 8, 7]) == "packed", "oneDNN has no such LSTM here"
    assert form_of(BiLSTM(6, 5), 6, [64] + [1] * 20) == "packed"
    assert form_of(BiLSTM(768, 5), 768, [9, 8, 7]) == "packed"


@pytest.mark.parametrize("form", ["padded", "packed"])
def test_dropout_stands_between_the_layers(form: str) -> None:
    torch.manual_seed(0)
    model = BiLSTM(6, 5, dropout=0.999)
    hidden = torch.randn(9, 6)
    nearly_nothing = getattr(model, form)(hidden, (5, 4))
    none = getattr(model.eval(), form)(hidden, (5, 4))
    assert not torch.allclose(nearly_nothing, none)


def test_padding_changes_nothing() -> None:
    """The same numbers as torch's own way with padded sequences of other lengths."""
    torch.manual_seed(0)
    model, lengths = BiLSTM(6, 5).eval(), [3, 8, 1, 8, 2]
    parts = torch.split(torch.randn(sum(lengths), 6), lengths)
    padded = torch.nn.utils.rnn.pad_sequence(list(parts))
    steps = torch.nn.utils.rnn.pack_padded_sequence(padded, lengths, enforce_sorted=False)
    with torch.no_grad():
        theirs, _ = torch.nn.utils.rnn.pad_packed_sequence(model.lstm(steps)[0])
        ours = model(torch.cat(parts), pack([[1] * length for length in lengths]))
    wanted = torch.cat([theirs[:length, row] for row, length in enumerate(lengths)])
    torch.testing.assert_close(ours, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("direction", ["bidirectional", "left_to_right"])
def test_on_top_of_a_task(kind: str, direction: str, config: ModelConfig, batch: Any) -> None:
    """Against a plain LSTM over each sequence alone; classes read both last states."""
    torch.manual_seed(0)
    sizes = ModelConfig(**{**vars(config), "direction": direction, "initializer_range": 0.2})
    model = add_bilstm(KINDS[kind](sizes)).eval()
    assert model.bilstm is not None
    lstm = model.bilstm.lstm
    assert (lstm.num_layers, lstm.input_size, lstm.hidden_size) == (2, 24, 24)
    packed = batch(5, 12, 7, 1)
    with torch.no_grad():
        found = model(packed)
        states = model.encoder(packed).split(packed.lengths)
        if isinstance(model, ClassificationModel):
            last = [lstm(part)[1][0][-2:].flatten() for part in states]  # of the upper layer
            wanted = model.classifier(torch.stack(last))
        else:
            top = model.qa_outputs if isinstance(model, SpanModel) else model.classifier
            wanted = top(torch.cat([lstm(part)[0] for part in states]))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_everything_is_trained(kind: str, config: ModelConfig, batch: Any) -> None:
    torch.manual_seed(0)
    model = add_bilstm(KINDS[kind](config)).train()
    for precision in (torch.float32, torch.bfloat16):
        model.zero_grad()
        with torch.autocast("cpu", dtype=precision, enabled=precision == torch.bfloat16):
            found = model(batch(5, 12, 7))
        assert found.dtype == torch.float32
        found.square().sum().backward()
        for name, parameter in model.named_parameters():
            assert name.startswith("encoder.pooler.") == (parameter.grad is None), name


@pytest.mark.parametrize("kind", KINDS)
def test_to_disk_and_back(
    kind: str, config: ModelConfig, tokenizer: Tokenizer, tmp_path: Path, batch: Any
) -> None:
    torch.manual_seed(0)
    sizes = ModelConfig(**{**vars(config), "vocab_size": tokenizer.size})
    model = add_bilstm(KINDS[kind](sizes)).eval()
    save_with_head(tmp_path / "m", model, tokenizer, {"task": kind, "head": "bilstm"})
    assert read_json(tmp_path / "m" / "config.json")["architectures"] == ["BertModel"]
    loaded = load_with_head(tmp_path / "m", KINDS[kind](sizes), "bilstm")
    assert not loaded.training
    packed = batch(5, 12, 7)
    with torch.no_grad():
        torch.testing.assert_close(loaded(packed), model(packed), atol=1e-6, rtol=1e-6)
        for mode, tolerance in (("fp32", 1e-5), ("bf16", 0.02)):
            fast = load_with_head(tmp_path / "m", KINDS[kind](sizes), "bilstm")
            prepare_encoder(fast.encoder, mode)
            torch.testing.assert_close(fast(packed), model(packed), atol=tolerance, rtol=tolerance)
    other = "question-answering" if kind != "question-answering" else "token-classification"
    with pytest.raises(BertkitError, match=r"head.safetensors: .* missing, unknown or of"):
        load_with_head(tmp_path / "m", KINDS[other](sizes), "bilstm")
