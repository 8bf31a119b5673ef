"""Sentences are scored as a plain loop over transformers' networks scores them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bertkit import load
from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError, InputTypeError
from bertkit.model.heads import PretrainingModel
from bertkit.predict import pretrained as module
from bertkit.predict.pretrained import Predictor
from bertkit.tasks.sequences import set_threads
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import WORDS, tiny_config

SENTENCES = [
    "River stone bridge.",
    "The kettle mirror walking, singing!",  # words of several tokens, and letters
    "winter",
    "saddle thunder saddle thunder river orchard",
    "River stone bridge.",
    "river bridge stone.",
    "river stone bridges.",
    "",
]

Save = Callable[[str], Path]


@pytest.fixture(scope="module")
def save(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Save:
    """Write a network of random weights that reads in a direction."""

    def make(direction: str) -> Path:
        torch.manual_seed(0)
        config = tiny_config(tokenizer, num_hidden_layers=3, initializer_range=0.3)
        folder = tmp_path_factory.mktemp(direction) / "model"
        network = PretrainingModel(replace(config, direction=direction), pairs=False)
        save_model(folder, network, tokenizer, {"task": "pretraining"})
        return folder

    return make


@pytest.fixture(scope="module")
def masked(save: Save) -> Path:
    return save("bidirectional")


@pytest.fixture(scope="module")
def bert(masked: Path) -> Predictor:
    return load(masked, device="cpu", precision="fp32")


@pytest.mark.parametrize(
    "context",
    [lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.device("meta")],
    ids=["autocast", "default device"],
)
def test_the_state_of_a_caller_changes_nothing(bert: Predictor, context: Any) -> None:
    texts, masked_text = ["a river stone", "the lantern"], "a [MASK] stone"
    expected = bert.score(texts), bert.fill_mask(masked_text), bert.hidden(texts)[0]
    with context():
        found = bert.score(texts), bert.fill_mask(masked_text), bert.hidden(texts)[0]
    assert found[:2] == expected[:2]
    assert torch.equal(found[2], expected[2])


def whole_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    return [tokenizer.cls_id, *tokenizer.encode(text).ids, tokenizer.sep_id]


def plain_scores(network: Any, tokenizer: Tokenizer, text: str) -> list[float]:
    """The log-probability of each token of a sentence, one masked copy at a time."""
    ids, found = whole_ids(tokenizer, text), []
    for place in range(1, len(ids) - 1):
        hidden = [place]
        while tokenizer.vocabulary[ids[hidden[-1] + 1]].startswith("##"):
            hidden.append(hidden[-1] + 1)
        copy = [tokenizer.mask_id if i in hidden else one for i, one in enumerate(ids)]
        with torch.no_grad():
            logits = network(torch.tensor([copy])).logits[0, place]
        found.append(logits.log_softmax(-1)[ids[place]].item())
    return found


def test_masked_scores_equal_a_plain_loop(bert: Predictor, masked: Path, transformers: Any) -> None:
    oracle = transformers.BertForMaskedLM.from_pretrained(masked).eval()
    found = bert.score(SENTENCES)
    for text, one in zip(SENTENCES, found, strict=True):
        wanted = plain_scores(oracle, bert.tokenizer, text)
        assert one.tokens == bert.tokenizer.encode(text).tokens
        assert one.log_probabilities == pytest.approx(wanted, abs=1e-4)
        assert one.score == pytest.approx(sum(wanted), abs=1e-4)
    assert found[0] == found[4]
    assert found[-1] == ([], [])


def test_left_to_right_scores_equal_transformers(save: Save, transformers: Any) -> None:
    folder = save("left_to_right")
    oracle = transformers.BertLMHeadModel.from_pretrained(folder).eval()
    bert = load(folder, device="cpu", precision="fp32")
    for text, one in zip(SENTENCES, bert.score(SENTENCES), strict=True):
        ids = whole_ids(bert.tokenizer, text)
        with torch.no_grad():
            chances = oracle(torch.tensor([ids])).logits[0].log_softmax(-1)
        wanted = [chances[i - 1, ids[i]].item() for i in range(1, len(ids) - 1)]
        assert one.log_probabilities == pytest.approx(wanted, abs=1e-4)


def random_sentences(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    return [" ".join(rng.choice(WORDS, int(rng.integers(1, 12)))) for _ in range(count)]


@pytest.mark.slow
def test_scores_do_not_depend_on_batches_order_or_threads(
    bert: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = random_sentences(150)
    wanted = [one.score for one in bert.score(texts)]
    assert [one.score for one in bert.score(texts[::-1])][::-1] == pytest.approx(wanted, abs=1e-5)
    alone = [bert.score([text])[0].score for text in texts[:20]]
    assert alone == pytest.approx(wanted[:20], abs=1e-5)
    monkeypatch.setattr(module, "SCORED_TOKENS", 500)
    monkeypatch.setattr(module, "HEAD_ROWS", 3)
    assert [one.score for one in bert.score(texts)] == pytest.approx(wanted, abs=1e-5)
    with ThreadPoolExecutor(1, initializer=set_threads, initargs=(2,)) as pool:
        [found] = pool.map(bert.score, [texts])
    assert [one.score for one in found] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("mode", ["bf16", "int8"])
def test_other_precisions_are_near(masked: Path, bert: Predictor, mode: str) -> None:
    try:
        near = load(masked, device="cpu", precision=mode)
    except BertkitError as error:
        pytest.skip(str(error))
    texts = random_sentences(20)
    wanted = np.array([one.score for one in bert.score(texts)])
    scores = np.array([one.score for one in near.score(texts)])
    assert np.abs(scores - wanted).max() < 0.1 * np.abs(wanted).mean()


def test_what_cannot_be_scored_is_refused(bert: Predictor) -> None:
    longest = bert.score(["river " * 38])[0]
    assert len(longest.tokens) == 38
    with pytest.raises(BertkitError) as caught:
        bert.score(["river", "river " * 39])
    assert caught.value.code == "too-long"
    with pytest.raises(InputTypeError):
        bert.score("river")
