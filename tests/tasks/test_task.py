"""Batches, outputs and losses of the kinds, against transformers' own classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from bertkit.datasets.examples import ChoiceExample, QuestionExample, TextExample, WordsExample
from bertkit.datasets.examples import GoldAnswer as Gold

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.checkpoints.save import save_model
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.objectives import total_loss
from bertkit.tasks.classification import Classification, MultiLabelClassification
from bertkit.tasks.data import describe_losses, with_unknown
from bertkit.tasks.multiple_choice import MultipleChoice
from bertkit.tasks.question_answering import QuestionAnswering
from bertkit.tasks.regression import Regression
from bertkit.tasks.task import (
    Encoded,
    Item,
    ItemPart,
    Items,
    Unknown,
    check_segments,
    make_batch,
    mean_outputs,
    run_model,
    split_parts,
)
from bertkit.tasks.token_classification import TokenClassification

CPU = torch.device("cpu")
TEXTS = [
    TextExample("0", "river stone bridge", None, None, "a:1"),
    TextExample("1", "lantern.", "harvest winter, garden letter", None, "a:2"),
    TextExample("2", "walking singing quickly slowly " * 3, "sailor", None, "a:3"),
    TextExample("3", "", "mountain window", None, "a:4"),
]
LONG = TextExample("4", "copper thread market " * 40, None, None, "a:5")


def padded(sequences: list[Any]) -> dict[str, torch.Tensor]:
    """The sequences as transformers wants them."""
    max_length = max(len(s.ids) for s in sequences)
    ids = torch.zeros(len(sequences), max_length, dtype=torch.int64)
    mask, segments = torch.zeros_like(ids), torch.zeros_like(ids)
    for row, sequence in enumerate(sequences):
        n = len(sequence.ids)
        ids[row, :n] = torch.from_numpy(sequence.ids.astype(np.int64))
        mask[row, :n] = 1
        segments[row, sequence.first : n] = 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": segments}


def both(task: Any, start: PretrainedWeights, folder: Path, oracle: type) -> tuple[Any, Any]:
    """Our model with a fresh head, and transformers' with the same weights."""
    torch.manual_seed(1)
    ours = start.build(task.build, keep_head=False).model
    for parameter in (
        ours.qa_outputs if hasattr(ours, "qa_outputs") else ours.classifier
    ).parameters():
        torch.nn.init.normal_(parameter)
    details = {"task": task.task_type, "labels": list(task.labels)}
    save_model(folder / "model", ours, start.tokenizer, details)
    return ours.eval(), oracle.from_pretrained(folder / "model").eval()


def loss_of(task: Any, model: Any, parts: list[ItemPart]) -> float:
    batch = make_batch(parts, task.targets)
    with torch.no_grad():
        return float(total_loss(task.objective(model, batch), batch.counts))


def flat(items: Items) -> list[ItemPart]:
    return [part for item in items.items for part in item.parts]


@pytest.mark.parametrize(
    ("task", "labels", "theirs"),
    [
        (
            Classification(("no", "yes", "maybe"), max_length=40),
            ["yes", "no", "maybe", "no"],
            [1, 0, 2, 0],
        ),
        (Regression(max_length=40), [0.5, 4.0, -1.0, 2.0], [0.5, 4.0, -1.0, 2.0]),
        (
            MultiLabelClassification(("a", "b", "c"), max_length=40),
            [("a",), (), ("b", "c"), ("a", "c")],
            [[1.0, 0, 0], [0.0, 0, 0], [0.0, 1, 1], [1.0, 0, 1]],
        ),
    ],
    ids=["classification", "regression", "multi-label-classification"],
)
def test_texts_equal_transformers(
    task: Any, labels: list[Any], theirs: list[Any], start: PretrainedWeights, tmp_path: Path
) -> None:
    inputs = [t._replace(label=label) for t, label in zip(TEXTS, labels, strict=True)]
    items = task.items(inputs, start.tokenizer)
    ours, oracle = both(task, start, tmp_path, transformers.BertForSequenceClassification)
    rows = padded([part.sequences[0] for part in flat(items)])
    with torch.no_grad():
        expected = oracle(**rows, labels=torch.tensor(theirs))
    found = np.concatenate([parts[0] for parts in run_model(ours, items, CPU)])
    np.testing.assert_allclose(found, expected.logits, atol=2e-5)
    assert loss_of(task, ours, flat(items)) == pytest.approx(float(expected.loss), rel=1e-4)


def test_choices_equal_transformers(start: PretrainedWeights, tmp_path: Path) -> None:
    inputs = [
        ChoiceExample("0", "river stone", ("bridge.", "lantern harvest", "winter"), 2, "a:1"),
        ChoiceExample("1", "garden", ("letter", "sailor mountain window", "copper"), 0, "a:2"),
    ]
    task = MultipleChoice(max_length=40)
    items = task.items(inputs, start.tokenizer)
    ours, oracle = both(task, start, tmp_path, transformers.BertForMultipleChoice)
    rows = padded([s for part in flat(items) for s in part.sequences])
    shaped = {name: tensor.view(2, 3, -1) for name, tensor in rows.items()}
    with torch.no_grad():
        expected = oracle(**shaped, labels=torch.tensor([2, 0]))
    found = np.stack([parts[0][:, 0] for parts in run_model(ours, items, CPU)])
    np.testing.assert_allclose(found, expected.logits, atol=2e-5)
    assert loss_of(task, ours, flat(items)) == pytest.approx(float(expected.loss), rel=1e-4)
    chosen = task.decode(inputs, items, run_model(ours, items, CPU))
    assert [c.choice for c in chosen] == expected.logits.argmax(-1).tolist()


NOTHING = "\u200b\x01"


@pytest.mark.parametrize(
    ("task", "inputs", "empty"),
    [
        (
            Regression(max_length=40),
            [
                TextExample("0", "river", None, 1.0, "a:1"),
                TextExample("1", NOTHING, None, 1.0, "a:2"),
                TextExample("2", "river", NOTHING, 1.0, "a:3"),
                TextExample("3", NOTHING, NOTHING, 1.0, "a:4"),
            ],
            3,
        ),
        (
            MultipleChoice(max_length=40),
            [
                ChoiceExample("0", "river", ("stone", "bridge"), 1, "a:1"),
                ChoiceExample("1", "river", ("stone", NOTHING), 1, "a:2"),
                ChoiceExample("2", NOTHING, ("stone", NOTHING), 1, "a:3"),
            ],
            2,
        ),
        (
            QuestionAnswering(max_length=40, max_question_length=8),
            [
                QuestionExample("0", "river", "stone", (), "a:1"),
                QuestionExample("1", NOTHING, "stone", (), "a:2"),
                QuestionExample("2", "river", NOTHING, (), "a:3"),
            ],
            2,
        ),
    ],
    ids=["regression", "multiple-choice", "question-answering"],
)
def test_texts_of_which_nothing_is_read_are_counted(
    task: Any, inputs: list[Any], empty: int, start: PretrainedWeights
) -> None:
    items = task.items(inputs, start.tokenizer)
    assert items.cut.pop(next(name for name in items.cut if "without tokens" in name)) == empty
    assert not any(items.cut.values())
    model = start.build(task.build, keep_head=False).model.eval()
    assert len(task.decode(inputs, items, run_model(model, items, CPU))) == len(inputs)


def test_inputs_may_have_different_numbers_of_choices(start: PretrainedWeights) -> None:
    inputs = [
        ChoiceExample("0", "river", ("bridge", "stone"), 1, "a:1"),
        ChoiceExample("1", "garden", ("letter", "sailor", "window", "copper"), 3, "a:2"),
    ]
    task = MultipleChoice(max_length=40)
    items = task.items(inputs, start.tokenizer)
    model = start.build(task.build, keep_head=False).model.eval()
    alone = [loss_of(task, model, item.parts) for item in items.items]
    assert loss_of(task, model, flat(items)) == pytest.approx(sum(alone) / 2, rel=1e-5)


def test_answers_equal_transformers(start: PretrainedWeights, tmp_path: Path) -> None:
    context = "river stone bridge, lantern harvest winter garden letter sailor mountain window."
    inputs = [
        QuestionExample("0", "walking?", context, (Gold("lantern", 20),), "q0"),
        QuestionExample("1", "singing slowly", "copper thread", (), "q1"),
    ]
    task = QuestionAnswering(null=True, max_length=18, stride=4, max_question_length=10)
    items = task.items(inputs, start.tokenizer)
    assert items.windowed == 1
    ours, oracle = both(task, start, tmp_path, transformers.BertForQuestionAnswering)
    parts = flat(items)
    rows = padded([part.sequences[0] for part in parts])
    spans = torch.tensor([part.target[:2] for part in parts])
    mask = rows["attention_mask"] == 0
    with torch.no_grad():
        expected = oracle(**rows)
    logits = torch.stack([expected.start_logits, expected.end_logits], -1)
    logits = logits.masked_fill(mask[..., None], -torch.inf)
    wanted = torch.nn.functional.cross_entropy(logits, spans)  # the mean over windows and ends
    assert loss_of(task, ours, parts) == pytest.approx(float(wanted), rel=1e-4)
    for row, [output] in enumerate(run_model(ours, items, CPU)):
        np.testing.assert_allclose(output, logits[row, : len(output)], atol=2e-5)


def test_the_order_of_inputs_and_the_size_of_batches_change_nothing(
    start: PretrainedWeights,
) -> None:
    task = Classification(("no", "yes"), max_length=40)
    inputs = [*TEXTS, LONG, *TEXTS[::-1]]
    items = task.items(inputs, start.tokenizer)
    assert items.windowed == 1
    model = start.build(task.build, keep_head=False).model.eval()
    outputs = run_model(model, items, CPU)
    assert [len(parts) for parts in outputs] == [1, 1, 1, 1, 4, 1, 1, 1, 1]
    for item, parts in zip(items.items, outputs, strict=True):
        for part, output in zip(item.parts, parts, strict=True):
            with torch.no_grad():
                alone = model(make_batch([part]).packed)
            np.testing.assert_allclose(output, alone, atol=1e-5)
    for first, last in zip(outputs[:4], outputs[:4:-1], strict=True):
        np.testing.assert_allclose(first[0], last[0], atol=1e-5)


def test_a_windowed_text_counts_once(start: PretrainedWeights) -> None:
    """Its windows' losses are averaged, and its prediction is the mean of their outputs."""
    task = Classification(("no", "yes"), max_length=40)
    inputs = [LONG._replace(label="yes"), TEXTS[0]._replace(label="no")]
    items = task.items(inputs, start.tokenizer)
    model = start.build(task.build, keep_head=False).model.eval()
    windows = [loss_of(task, model, [part._replace(weight=1.0)]) for part in items.items[0].parts]
    short = loss_of(task, model, items.items[1].parts)
    assert loss_of(task, model, flat(items)) == pytest.approx((np.mean(windows) + short) / 2)
    outputs = run_model(model, items, CPU)
    mean = np.mean([part[0] for part in outputs[0]], axis=0)
    [label, _] = task.decode(inputs, items, outputs)
    chances = torch.tensor(mean).softmax(-1)
    assert label.probabilities["yes"] == pytest.approx(float(chances[1]), rel=1e-5)
    assert sum(label.probabilities.values()) == pytest.approx(1.0)


def test_parts_of_a_batch_give_the_gradient_of_the_whole(start: PretrainedWeights) -> None:
    task = Classification(("no", "yes"), max_length=40)
    inputs = [t._replace(label="yes") for t in (*TEXTS, LONG)]
    parts = flat(task.items(inputs, start.tokenizer))

    def gradient(groups: list[list[ItemPart]]) -> torch.Tensor:
        torch.manual_seed(0)
        model = start.build(task.build, keep_head=False).model.eval()
        batches = [make_batch(group, task.targets) for group in groups]
        counts = {"examples": sum(batch.counts["examples"] for batch in batches)}
        assert counts == {"examples": 5}
        for batch in batches:
            total_loss(task.objective(model, batch), counts).backward()
        return model.encoder.layers[0].output.weight.grad

    groups = list(split_parts(parts, 45))
    assert len(groups) > 3
    assert [part for group in groups for part in group] == parts
    torch.testing.assert_close(gradient(groups), gradient([parts]), atol=1e-6, rtol=1e-4)


def test_an_ensemble_is_the_mean_of_outputs() -> None:
    one = [[np.array([[0.0, 2.0]])], [np.array([[1.0, 1.0]]), np.array([[3.0, 3.0]])]]
    two = [[np.array([[2.0, 0.0]])], [np.array([[3.0, 1.0]]), np.array([[5.0, 1.0]])]]
    [[first], [second, third]] = mean_outputs([one, two])
    assert first.tolist() == [[1.0, 1.0]]
    assert second.tolist() == [[2.0, 1.0]]
    assert third.tolist() == [[4.0, 2.0]]


def test_unknown_tokens_are_counted(start: PretrainedWeights) -> None:
    """In every kind; a word of a million characters is one [UNK]."""
    tokenizer = start.tokenizer
    lost, long = "\U0001f600 \u05e9", "x" * 10**6

    def counted(task: Any, *inputs: Any) -> tuple[int, ...]:
        return with_unknown(task.items(inputs, tokenizer), tokenizer.unk_id).unknown

    texts = [
        TextExample("0", f"river {lost}", None, None, "a"),
        TextExample("1", lost, lost, None, ""),
    ]
    texts += [TextExample("2", long, "stone", None, ""), TextExample("3", "\u200b", None, None, "")]
    assert counted(Classification(("a", "b"), max_length=40), *texts) == (7, 9, 2)
    choices = [
        ChoiceExample("0", lost, ("river", lost), None, ""),
        ChoiceExample("1", lost, (lost,) * 2, None, ""),
    ]
    assert counted(MultipleChoice(max_length=40), *choices) == (6 + 8, 7 + 8, 1)
    words = [
        WordsExample(str(i), own, None, 0, "")
        for i, own in enumerate([("river", "\u05e9"), (long,)])
    ]
    for context in ("sentence", "document"):
        assert counted(
            TokenClassification(("O", "B-X"), max_length=40, context=context), *words
        ) == (2, 3, 1)
    asked = [
        QuestionExample("0", lost, "river", None, ""),
        QuestionExample("1", lost, lost, None, ""),
    ]
    assert counted(QuestionAnswering(max_length=40, max_question_length=8), *asked) == (6, 7, 1)


def test_what_is_lost_in_words() -> None:
    cut = {"questions cut at 32 tokens": 1, "answers in no window whole": 0}
    assert describe_losses(2, {}, Unknown(0, 9, 0)) == "2 in several windows, 0 cut"
    assert describe_losses(0, cut, Unknown(3, 1000, 1)) == (
        "0 in several windows, questions cut at 32 tokens: 1, 3 of 1,000 tokens [UNK] (0.3%), "
        "inputs without a known token: 1"
    )


def test_two_texts_need_two_segments() -> None:
    def items(first: int) -> Items:
        part = ItemPart((Encoded(np.arange(5, dtype=np.int32), first),))
        return Items([Item(0, [part])], 1, 0, {})

    one, two = ModelConfig(vocab_size=9, type_vocab_size=1), ModelConfig(vocab_size=9)
    check_segments(items(5), one)
    check_segments(items(3), two)
    with pytest.raises(BertkitError, match=r"one segment .* choose another model"):
        check_segments(items(3), one)
