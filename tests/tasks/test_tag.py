"""Tags: every word gets its own, labels in any scheme, and transformers' own class."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from bertkit.datasets.conll import conll_sentences
from bertkit.datasets.examples import WordsExample
from bertkit.tasks.spec import SPECS
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError
from bertkit.objectives import total_loss
from bertkit.tasks.task import ItemPart, Items, make_batch, run_model
from bertkit.tasks.token_classification import TagsPrediction, TokenClassification, tag_labels
from bertkit.tasks.windows import NO_TAG
from bertkit.text.lines import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer

CPU = torch.device("cpu")
LABELS = ("O", "B-LOC", "B-PER", "I-LOC", "I-PER")
WORDS = ["river", "stone", "meadow", "walking", "x", "zebra", "\u200b", "", "\x07", "Ω", "a.b"]


def sentence(
    words: str | list[str], tags: str | None = None, document: int = 0, number: int = 0
) -> WordsExample:
    own = tuple(words.split() if isinstance(words, str) else words)
    return WordsExample(
        str(number), own, None if tags is None else tuple(tags.split()), document, f"a:{number}"
    )


def flat(items: Items) -> list[ItemPart]:
    return [part for item in items.items for part in item.parts]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.lists(st.sampled_from(WORDS), max_size=25), st.integers(0, 2)), max_size=7
    ),
    st.sampled_from(["sentence", "document"]),
    st.integers(6, 20),
    st.integers(0, 9),
)
def test_every_word_gets_its_own_prediction(
    tokenizer: Tokenizer,
    drawn: list[tuple[list[str], int]],
    context: str,
    max_length: int,
    stride: int,
) -> None:
    inputs = [sentence(words, None, kind, n) for n, (words, kind) in enumerate(drawn)]
    labels = tuple("abcdefg")
    task = TokenClassification(labels, max_length, stride, context, entities=False)
    items = task.items(inputs, tokenizer)
    outputs = []
    for item in items.items:
        rows = []
        for part in item.parts:
            ids = part.sequences[0].ids
            assert 3 <= len(ids) <= max_length
            assert (ids[0], ids[-1]) == (tokenizer.cls_id, tokenizer.sep_id)
            assert len(part.target.rows) > 0
            logits = np.full((len(ids), 7), np.nan, dtype=np.float32)
            for row, i, j in zip(
                part.target.rows, part.target.inputs, part.target.words, strict=True
            ):
                first = (tokenizer.encode(inputs[i].words[j]).ids or [tokenizer.unk_id])[0]
                assert ids[row] == first
                assert np.isnan(logits[row]).all()
                logits[row] = np.arange(7) == (5 * i + j) % 7
            rows.append(logits)
        outputs.append(rows)
    found = task.decode(inputs, items, outputs)
    wanted = [
        tuple(labels[(5 * i + j) % 7] for j in range(len(s.words))) for i, s in enumerate(inputs)
    ]
    assert [prediction.tags for prediction in found] == wanted
    assert all(len(set(np.round(p.probabilities, 6))) <= 1 for p in found)
    assert items.inputs == len(inputs)


def test_long_sentences_are_windows_of_one_item(tokenizer: Tokenizer) -> None:
    inputs = [sentence("river " * 20, "O " * 20), sentence("stone", "B-LOC", number=1)]
    task = TokenClassification(LABELS, max_length=10)
    items = task.items(inputs, tokenizer)
    assert [len(item.parts) for item in items.items] == [3, 1]
    assert [part.leads for part in flat(items)] == [True, False, False, True]
    assert (items.windowed, items.inputs, sum(items.cut.values())) == (1, 2, 0)
    assert sum(len(part.target.rows) for part in items.items[0].parts) == 20
    long_word = task.items([sentence(["abcdefghijklmnop", "river"], "B-PER O")], tokenizer)
    assert list(long_word.cut.values()) == [1]
    assert "8 tokens" in next(iter(long_word.cut))
    first = long_word.items[0].parts[0].sequences[0].ids
    assert tokenizer.decode(first) == "[CLS] abcdefgh [SEP]"


def test_documents_run_on(tokenizer: Tokenizer) -> None:
    inputs = [
        sentence("river stone bridge", "O O B-LOC", 0, 0),
        sentence("lantern harvest", "B-PER I-PER", 0, 1),
        sentence("winter garden letter", "O O O", 1, 2),
        sentence([], "", 1, 3),
        sentence("mountain", "B-LOC", 0, 4),  # the number again, but not next to it
    ]
    whole = TokenClassification(LABELS, max_length=20, context="document").items(inputs, tokenizer)
    texts = [tokenizer.decode(part.sequences[0].ids) for part in flat(whole)]
    assert texts == [
        "[CLS] river stone bridge lantern harvest [SEP]",
        "[CLS] winter garden letter [SEP]",
        "[CLS] mountain [SEP]",
    ]
    assert [item.input for item in whole.items] == [0, 2, 4]
    assert whole.items[0].parts[0].target.labels.tolist() == [0, 0, 1, 2, 4]
    assert (whole.windowed, whole.inputs) == (0, 5)
    short = TokenClassification(LABELS, max_length=6, stride=2, context="document").items(
        inputs, tokenizer
    )
    assert [tokenizer.decode(part.sequences[0].ids) for part in flat(short)][:2] == [
        "[CLS] river stone bridge lantern [SEP]",
        "[CLS] stone bridge lantern harvest [SEP]",
    ]
    assert [part.target.words.tolist() for part in flat(short)][:2] == [[0, 1, 2], [0, 1]]
    assert [item.input for item in short.items] == [0, 0, 2, 4]
    assert all(part.leads for part in flat(short))
    assert short.windowed == 0  # each sentence is answered in one window
    assert TokenClassification(LABELS, 5, 1, "document").items(inputs, tokenizer).windowed == 1


def test_equal_transformers(start: PretrainedWeights, tmp_path: Path) -> None:
    inputs = [
        sentence("river meadow zebra .", "O B-PER I-PER O"),
        sentence(["walking", "", "stone"], "B-LOC I-LOC B-LOC", number=1),
        sentence("lantern", "O", number=2),
    ]
    task = TokenClassification(LABELS, max_length=40)
    torch.manual_seed(1)
    ours = start.build(task.build, keep_head=False).model.eval()
    torch.nn.init.normal_(ours.classifier.weight)
    details = {"task": task.task_type, "labels": list(task.labels), "settings": task.settings()}
    save_model(tmp_path / "model", ours, start.tokenizer, details)
    oracle = transformers.BertForTokenClassification.from_pretrained(tmp_path / "model").eval()
    assert oracle.config.id2label == dict(enumerate(LABELS))
    items = task.items(inputs, start.tokenizer)
    parts = flat(items)
    max_length = max(part.tokens for part in parts)
    ids, labels = torch.zeros(3, max_length, dtype=torch.int64), torch.full((3, max_length), -100)
    mask = torch.zeros_like(ids)
    for n, part in enumerate(parts):
        ids[n, : part.tokens] = torch.from_numpy(part.sequences[0].ids.astype(np.int64))
        mask[n, : part.tokens] = 1
    for n, own in enumerate(inputs):  # the first piece of each word, by transformers' rule
        row = 1
        for word, tag in zip(own.words, own.tags or (), strict=True):
            labels[n, row] = LABELS.index(tag)
            row += max(1, len(start.tokenizer.encode(word).ids))
    with torch.no_grad():
        expected = oracle(ids, attention_mask=mask, labels=labels)
        batch = make_batch(parts, task.targets)
        loss = total_loss(task.objective(ours, batch), batch.counts)
    assert batch.counts == {"words": 8}
    assert float(loss) == pytest.approx(float(expected.loss), rel=1e-5)
    outputs = run_model(ours, items, CPU)
    for n, [logits] in enumerate(outputs):
        np.testing.assert_allclose(logits, expected.logits[n, : len(logits)], atol=1e-5)
    found = task.decode(inputs, items, outputs)
    for n, prediction in enumerate(found):
        rows = labels[n] != -100
        chances = expected.logits[n][rows].softmax(-1)
        assert prediction.tags == tuple(LABELS[i] for i in chances.argmax(-1))
        np.testing.assert_allclose(prediction.probabilities, chances.max(-1).values, rtol=1e-4)
    blind = [own._replace(tags=None) for own in inputs]
    unlabelled = task.items(blind, start.tokenizer)
    assert all((part.target.labels == NO_TAG).all() for part in flat(unlabelled))
    assert task.decode(blind, unlabelled, run_model(ours, unlabelled, CPU)) == found


def test_words_without_a_tag_carry_no_loss(start: PretrainedWeights) -> None:
    task = TokenClassification(LABELS, max_length=40, context="document")
    tagged, blind = sentence("river stone", "O B-LOC"), sentence("lantern zebra", None, 0, 1)
    batch = make_batch(flat(task.items([tagged, blind], start.tokenizer)), task.targets)
    assert batch.counts == {"words": 2}
    assert batch.tensors["rows"].tolist() == [1, 2]
    assert batch.tensors["labels"].tolist() == [0, 1]


def test_neighbours_count_only_in_documents(start: PretrainedWeights) -> None:
    def chances(task: TokenClassification, inputs: list[WordsExample]) -> tuple[float, ...]:
        torch.manual_seed(3)
        model = start.build(task.build, keep_head=False).model
        items = task.items(inputs, start.tokenizer)
        return task.decode(inputs, items, run_model(model, items, CPU))[0].probabilities

    one, other = sentence("river stone"), sentence("lantern", number=1)
    document, alone = (
        TokenClassification(LABELS, 40, context="document"),
        TokenClassification(LABELS, 40),
    )
    assert chances(alone, [one, other]) == pytest.approx(chances(alone, [one]), rel=1e-5)
    assert chances(document, [one, other]) != pytest.approx(chances(document, [one]), rel=1e-5)


def test_labels_of_every_scheme(tokenizer: Tokenizer) -> None:
    words = "river stone bridge lantern"
    schemes = ["I-PER I-PER B-PER O", "B-PER I-PER B-PER O", "B-PER E-PER S-PER O"]
    schemes.append("B-PER L-PER U-PER O")
    for tags in schemes:
        labels, are_entities = tag_labels([sentence(words, tags)])
        assert (labels, are_entities) == (("O", "B-PER", "I-PER"), True)
        [item] = TokenClassification(labels).items([sentence(words, tags)], tokenizer).items
        assert item.parts[0].target.labels.tolist() == [1, 2, 1, 0]
    labels, are_entities = tag_labels([sentence(words, "NOUN VERB O ADJ")])
    assert (labels, are_entities) == (("O", "ADJ", "NOUN", "VERB"), False)
    task = TokenClassification(labels, entities=are_entities)
    assert task.metric == "accuracy"
    assert TokenClassification(LABELS).metric == "f1"


def test_errors_name_the_place(tokenizer: Tokenizer) -> None:
    with pytest.raises(BertkitError, match=r"a:3, word 2: the label 'B-PET'.*known: B-"):
        TokenClassification(LABELS).items([sentence("river stone", "O B-PET", number=3)], tokenizer)
    with pytest.raises(BertkitError, match=r"a:4: 1 tags for 2 words"):
        TokenClassification(LABELS).items([sentence("river stone", "O", number=4)], tokenizer)
    with pytest.raises(BertkitError, match="did you mean 'document'"):
        TokenClassification(LABELS, context="documents")
    with pytest.raises(BertkitError, match="no room"):
        TokenClassification(LABELS, max_length=2)
    with pytest.raises(BertkitError, match="a:5: the sentence has no tags"):
        tag_labels([sentence("river", "O"), sentence("stone", None, number=5)])
    with pytest.raises(BertkitError, match="nothing to tell apart"):
        tag_labels([sentence("river", "O")])


@pytest.mark.parametrize("tag", ["X-PER", "b-PER", "M-PER", "PER", "I_PER", "3", "NOUN"])
def test_tags_of_no_known_scheme_are_refused(tokenizer: Tokenizer, tag: str) -> None:
    """They would count as B-PER."""
    given = sentence("river stone", f"O {tag}", number=3)
    with pytest.raises(BertkitError, match=rf"a:3, word 2: '{tag}' is not an entity tag; these"):
        TokenClassification(LABELS).items([given], tokenizer)
    TokenClassification(("O", tag), entities=False).items([given], tokenizer)


def test_an_unknown_tag_is_named_as_it_stands(tokenizer: Tokenizer) -> None:
    with pytest.raises(BertkitError, match=r"a:0, word 1: the label 'U-PET' is not one"):
        TokenClassification(LABELS).items([sentence("river", "U-PET")], tokenizer)


def test_a_tagger_without_b(tokenizer: Tokenizer) -> None:
    """Taggers of others may know O and I-X only; all entities can be right that do not touch."""
    labels = ("O", "I-LOC", "I-PER", "B-PER")
    given = sentence("river stone bridge lantern", "B-LOC I-LOC O B-PER")
    task = TokenClassification(labels)
    [item] = task.items([given], tokenizer).items
    assert item.parts[0].target.labels.tolist() == [1, 1, 0, 3]
    found = TagsPrediction(("I-LOC", "I-LOC", "O", "B-PER"), (1.0,) * 4, ())
    assert task.score([given], [found])["f1"] == 1.0
    with pytest.raises(BertkitError, match="'I-ORG' is not one of the model's"):
        task.items([sentence("river", "I-ORG")], tokenizer)


def test_rows_are_json_and_settings_make_the_task_anew() -> None:
    task = TokenClassification(LABELS, 40, 7, "document")
    own = sentence("river stone bridge", number=9)
    row = json.loads(
        json.dumps(
            task.row(own, TagsPrediction(("O", "B-PER", "I-PER"), (1.0,) * 3, (("PER", 1, 3),)))
        )
    )
    place = {"start": 6, "end": 18, "text": "stone bridge", "word_start": 1, "word_end": 3}
    assert row["entities"] == [{"type": "PER", **place}]
    assert (row["id"], row["words"], row["tags"]) == (
        "9",
        ["river", "stone", "bridge"],
        ["O", "B-PER", "I-PER"],
    )
    assert len(row["probabilities"]) == 3
    assert (
        SPECS["token-classification"].task(labels=LABELS, **json.loads(json.dumps(task.settings())))
        == task
    )


def test_no_input(tokenizer: Tokenizer) -> None:
    task = TokenClassification(LABELS)
    items = task.items([sentence([])], tokenizer)
    assert items.items == []
    assert task.decode([sentence([])], items, []) == [TagsPrediction((), (), ())]
    assert task.decode([], task.items([], tokenizer), []) == []


@pytest.mark.parametrize("context", ["sentence", "document"])
def test_real_sentences(data: Path, tokenizer: Tokenizer, context: str) -> None:
    path = next((data / "conll2003").glob("valid*"))
    inputs = list(conll_sentences(path, TextCounts()))[:300]
    labels, are_entities = tag_labels(inputs)
    assert are_entities
    assert labels[0] == "O"
    task = TokenClassification(labels, 64, context=context)
    items = task.items(inputs, tokenizer)
    words = sum(len(own.words) for own in inputs)
    assert sum(len(part.target.rows) for part in flat(items)) == words
    assert items.windowed > 10
    perfect = []
    for item in items.items:
        rows = [np.zeros((part.tokens, len(labels)), dtype=np.float32) for part in item.parts]
        for part, logits in zip(item.parts, rows, strict=True):
            logits[part.target.rows, part.target.labels] = 9.0
        perfect.append(rows)
    scores = task.score(inputs, task.decode(inputs, items, perfect))
    assert set(scores.values()) == {1.0}


def test_tags_of_entities_and_others_do_not_mix() -> None:
    given = WordsExample("0", ("a", "b", "c"), ("O", "B-PER", "PER"), 0, "t:1")
    with pytest.raises(BertkitError, match="mixes tags such as B-PER with 'PER'"):
        tag_labels([given])
    assert tag_labels([given._replace(tags=("NOUN", "VERB", "NOUN"))]) == (("NOUN", "VERB"), False)
