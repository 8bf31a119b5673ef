from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from bertkit import load
from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError, InputTypeError
from bertkit.files import read_json, write_json
from bertkit.model.heads import PretrainingModel
from bertkit.predict.pretrained import Predictor
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import tiny_config


@pytest.fixture(scope="module")
def directory(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = tiny_config(tokenizer, max_position_embeddings=24, initializer_range=0.3)
    folder = tmp_path_factory.mktemp("models") / "model"
    save_model(folder, PretrainingModel(config), tokenizer, {"task": "pretraining"})
    return folder


@pytest.fixture(scope="module")
def bert(directory: Path) -> Predictor:
    return load(directory, device="cpu", precision="fp32")


@pytest.fixture(scope="module")
def oracle(directory: Path, transformers: Any) -> Any:
    return transformers.BertForPreTraining.from_pretrained(directory).eval()


def test_fill_mask_equals_transformers(bert: Predictor, oracle: Any) -> None:
    tokenizer = bert.tokenizer
    found = bert.fill_mask("river [MASK] stone [MASK].", top=7)
    ids = [
        tokenizer.cls_id,
        *tokenizer.encode("river").ids,
        tokenizer.mask_id,
        *tokenizer.encode("stone").ids,
        tokenizer.mask_id,
        *tokenizer.encode(".").ids,
        tokenizer.sep_id,
    ]
    with torch.no_grad():
        logits = oracle(torch.tensor([ids])).prediction_logits[0]
    places = [i for i, token in enumerate(ids) if token == tokenizer.mask_id]
    assert len(found) == 2
    for place, candidates in zip(places, found, strict=True):
        probabilities = logits[place].softmax(-1)
        best = probabilities.topk(7)
        assert [c.token for c in candidates] == [tokenizer.vocabulary[i] for i in best.indices]
        expected = pytest.approx(best.values.tolist(), rel=1e-4)
        assert [c.probability for c in candidates] == expected


def test_rows_of_embeddings_without_a_token_count_in_the_softmax(
    directory: Path, tmp_path: Path, transformers: Any
) -> None:
    padded = transformers.BertForPreTraining.from_pretrained(directory).eval()
    tokenizer = Tokenizer.load(directory)
    padded.resize_token_embeddings(len(tokenizer.vocabulary) + 8, mean_resizing=False)
    padded.save_pretrained(tmp_path)
    shutil.copy(directory / "tokenizer.json", tmp_path)
    ids = [tokenizer.cls_id, tokenizer.mask_id, tokenizer.sep_id]
    with torch.no_grad():
        wanted = padded(torch.tensor([ids])).prediction_logits[0, 1].softmax(-1)
    size = len(tokenizer.vocabulary)
    [found] = load(tmp_path, device="cpu", precision="fp32").fill_mask("[MASK]", top=size)
    best = wanted[:size].sort(descending=True).values
    assert [one.probability for one in found] == pytest.approx(best.tolist(), rel=1e-4)


def test_next_sentence_equals_transformers(bert: Predictor, oracle: Any) -> None:
    encoded = bert.tokenizer.encode_pair("river stone.", "bridge lantern.")
    with torch.no_grad():
        logits = oracle(
            torch.tensor([encoded.ids]), token_type_ids=torch.tensor([encoded.segment_ids])
        ).seq_relationship_logits
    expected = logits.softmax(-1)[0, 0].item()
    found = bert.next_sentence("river stone.", "bridge lantern.")
    assert found == pytest.approx(expected, rel=1e-4)


@pytest.mark.filterwarnings("ignore:pairs cut")
def test_many_texts_and_pairs_at_once_give_what_each_gives(bert: Predictor) -> None:
    texts = ["river [MASK] stone [MASK].", "[MASK]", "winter " * 40 + "[MASK]"] * 60
    many = bert.fill_mask((text for text in texts), top=3)
    pairs = [("river stone.", "bridge lantern."), ("winter", "river " * 60)] * 80
    for text, found in zip(texts[:3], many, strict=False):
        alone = bert.fill_mask(text, top=3)
        assert [[c.token for c in mask] for mask in found] == [
            [c.token for c in mask] for mask in alone
        ]
        for one, other in zip(found, alone, strict=True):
            alike = pytest.approx([c.probability for c in other], rel=1e-5)  # fp32, other batches
            assert [c.probability for c in one] == alike
    assert len(many) == 180
    assert many[3:6] == many[:3]
    chances = bert.next_sentence(pairs)
    assert chances[:2] == pytest.approx([bert.next_sentence(*pair) for pair in pairs[:2]])
    assert len(chances) == 160
    assert (bert.fill_mask([]), bert.next_sentence([])) == ([], [])


NO_PAIRS = ["river", [("river",)], [("river", 5)], {"river": "stone"}, None, {("river", "stone")}]


@pytest.mark.parametrize("given", NO_PAIRS)
def test_next_sentence_refuses_what_is_no_pair(bert: Predictor, given: object) -> None:
    with pytest.raises(InputTypeError):
        bert.next_sentence(given)


def test_the_precision_is_honoured(directory: Path, bert: Predictor) -> None:
    """bf16 keeps eight bits, so probabilities differ, but by little."""
    rounded = load(directory, device="cpu", precision="bf16").fill_mask("river [MASK].", top=40)
    exact = dict(bert.fill_mask("river [MASK].", top=40)[0])
    found = dict(rounded[0])
    assert found != exact
    shared = found.keys() & exact.keys()
    assert len(shared) > 30
    assert max(abs(found[token] - exact[token]) for token in shared) < 0.02


def test_long_texts_are_read_through_windows(bert: Predictor) -> None:
    """The model has 24 positions: what lies far from a mask changes nothing, what is near does."""
    near = "river " * 12 + "[MASK]" + " stone" * 12
    far = "lantern " * 30 + near + " copper" * 30
    other = "candle " * 30 + near + " winter" * 30
    assert bert.fill_mask(far) == bert.fill_mask(other)
    assert bert.fill_mask(far) != bert.fill_mask("garden " * 40 + "[MASK]" + " stone" * 40)
    with pytest.warns(UserWarning, match="cut to the tokens around their boundary: 1"):
        both = bert.next_sentence("river " * 50 + "stone.", "bridge " * 50)
    start = "candle " * 50 + "river " * 20
    with pytest.warns(UserWarning, match="boundary: 2"):
        found = bert.next_sentence([(f"{start}stone.", "bridge " * 50)] * 2)
    assert found == pytest.approx([both, both], abs=1e-6)
    assert 0 < both < 1


@pytest.mark.filterwarnings("ignore:pairs cut")
def test_long_first_text_leaves_room_for_a_short_second(bert: Predictor) -> None:
    one = bert.next_sentence("river " * 50, "bridge.")
    assert one == bert.next_sentence("candle " * 9 + "river " * 50, "bridge.")
    assert one != bert.next_sentence("river " * 50, "stone.")


def test_hidden_states(bert: Predictor, oracle: Any) -> None:
    texts = ["river stone bridge.", "winter"]
    for text, states in zip(texts, bert.hidden(texts), strict=True):
        ids = bert.tokenizer.encode_pair(text).ids
        with torch.no_grad():
            expected = oracle.bert(torch.tensor([ids])).last_hidden_state[0]
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
    with pytest.raises(BertkitError, match="only 24 positions"):
        bert.hidden(["river " * 100])


def test_bad_requests(bert: Predictor) -> None:
    with pytest.raises(BertkitError, match=r"there is no \[MASK\] in the text"):
        bert.fill_mask("river stone")
    with pytest.raises(BertkitError, match="top must be between"):
        bert.fill_mask("[MASK]", top=0)
    with pytest.raises(BertkitError, match="one of them has no token"):
        bert.next_sentence("river", "  ")


def test_vocabulary_larger_than_the_embedding_is_refused(
    directory: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    import shutil

    folder = tmp_path / "model"
    shutil.copytree(directory, folder)
    larger = Tokenizer.from_vocabulary([*tokenizer.vocabulary, "more"], lowercase=True)
    larger.save(folder)
    with pytest.raises(BertkitError, match="vocab"):
        load(folder)


@pytest.mark.parametrize("width", [16, 32])
def test_electras_of_transformers_answer_as_there(
    width: int, directory: Path, tmp_path: Path, transformers: Any
) -> None:
    """Their heads on texts read [CLS] through a matrix and GELU; ELECTRA has no pooler."""
    tokenizer = Tokenizer.load(directory)
    torch.manual_seed(0)
    config = transformers.ElectraConfig(
        vocab_size=tokenizer.size,
        embedding_size=width,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=24,
        initializer_range=0.5,
        num_labels=3,
    )
    text, choices = "river stone", ("lantern", "bridge and winter")
    pairs = [tokenizer.encode_pair(text, choice) for choice in choices]
    with torch.no_grad():
        classifier = transformers.ElectraForSequenceClassification(config).eval()
        classifier.save_pretrained(tmp_path / "classify")
        ids = torch.tensor([tokenizer.encode_pair(text).ids])
        chances = classifier(ids).logits[0].softmax(-1).tolist()
        chooser = transformers.ElectraForMultipleChoice(config).eval()
        chooser.save_pretrained(tmp_path / "choose")
        scores = [
            chooser(
                torch.tensor([[pair.ids]]), token_type_ids=torch.tensor([[pair.segment_ids]])
            ).logits[0, 0]
            for pair in pairs
        ]
    for folder in ("classify", "choose"):
        tokenizer.save(tmp_path / folder)
    found = load(tmp_path / "classify", device="cpu", precision="fp32")(text)
    assert list(found.probabilities.values()) == pytest.approx(chances, abs=1e-5)
    assert max(chances) - min(chances) > 0.01
    chosen = load(tmp_path / "choose", device="cpu", precision="fp32")(text, choices)
    wanted = torch.stack(scores).softmax(-1).tolist()
    assert chosen.probabilities == pytest.approx(wanted, abs=1e-5)

    described = read_json(tmp_path / "choose" / "config.json")
    write_json(tmp_path / "choose" / "config.json", {**described, "summary_type": "mean"})
    with pytest.raises(BertkitError, match=r"summary_type is 'mean'.* only 'first' is supported"):
        load(tmp_path / "choose")
