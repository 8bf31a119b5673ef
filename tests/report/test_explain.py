"""`bertkit explain`: the recomputed layers are the encoder's, the numbers those of the model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError
from bertkit.model.heads import PretrainingModel
from bertkit.predict.pretrained import load_pretrained
from bertkit.report.explain import trace_example
from bertkit.tasks.classification import Classification
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import run, tiny_config

TEXT, PAIR = "River stone bridge, walking in the garden.", "A letter\u200b for the sailor"


@pytest.fixture(scope="module", params=["bidirectional", "left_to_right"])
def model(
    request: pytest.FixtureRequest, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    torch.manual_seed(0)
    config = tiny_config(tokenizer, direction=request.param, max_position_embeddings=64)
    folder = tmp_path_factory.mktemp("explain") / "model"
    network = PretrainingModel(config)
    for weight in network.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    save_model(folder, network, tokenizer, {})
    return folder


def test_layers_from_these_weights_are_those_of_the_encoder(model: Path) -> None:
    trace = trace_example(model, TEXT, PAIR)
    count = len(trace.tokens)
    assert trace.difference < 1e-4
    assert trace.attention.shape == (2, 2, count, count)
    assert np.allclose(trace.attention.sum(-1), 1, atol=1e-5)
    assert trace.tokens[0] == "[CLS]"
    assert trace.segments.count(1) == len(trace.segments) - trace.segments.index(1)


def test_guesses_and_the_pair_are_those_of_the_predictor(model: Path) -> None:
    trace = trace_example(model, TEXT, PAIR, seed=3)
    predictor = load_pretrained(model, device="cpu", precision="fp32")
    if trace.config.direction != "bidirectional":
        assert trace.guesses == []
        return
    assert len(trace.guesses) == round(0.15 * len(trace.tokens))
    assert trace.mlm_loss is not None
    for guess in trace.guesses:
        assert trace.tokens[guess.position] == guess.shown
        assert all(share <= guess.top[0][1] for _, share in guess.top)
        assert (guess.rank == 1) == (guess.top[0][0] == guess.token)
    if all(guess.shown == guess.token for guess in trace.guesses):
        expected = predictor.next_sentence(TEXT, PAIR)
        assert trace.in_order == pytest.approx(expected, abs=1e-5)


def test_the_terminal_view(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("explain", model, TEXT, PAIR)
    printed = capsys.readouterr().out
    assert re.search(r"\d +river +\d+ +0", printed)
    assert "\u200b" not in printed


def test_what_cannot_be_shown_is_one_line(model: Path) -> None:
    for text in ("", "river " * 70):
        with pytest.raises(BertkitError):
            trace_example(model, text)


@pytest.mark.parametrize("pairs", [True, False])
def test_a_fine_tuned_model_reads_what_it_was_trained_on(
    pairs: bool, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    task = Classification(("dry", "wet"), max_length=40)
    details = {"task": task.task_type, "labels": ["dry", "wet"], "pairs": pairs}
    columns = {"text": "asked", "pair": "known"} if pairs else {"text": "title"}
    details |= {"settings": task.settings(), "columns": columns}
    save_model(tmp_path / "m", task.build(tiny_config(tokenizer)), tokenizer, details)
    right, wrong = ([TEXT, PAIR], [TEXT])[:: 1 if pairs else -1]
    assert json.loads(trace_example(tmp_path / "m", *right).task)["label"] in ("dry", "wet")
    with pytest.raises(BertkitError, match="pairs of texts") as caught:
        trace_example(tmp_path / "m", *wrong)
    assert caught.value.code == "pairs"
