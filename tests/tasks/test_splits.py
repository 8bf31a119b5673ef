"""What is held out: equal inputs on one side, every label where it can be, and what is counted."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from typing import Any

import pytest

from bertkit.errors import BertkitError
from bertkit.tasks.splits import fold_numbers, hold_out
from bertkit.tasks.types import TASKS, DataFiles, load_dataset
from bertkit.text.documents import TextCounts

ROWS: dict[str, Any] = {
    "classification": lambda n: {"text": f"text {n}", "label": "ab"[n % 2]},
    "multi-label-classification": lambda n: {"text": f"text {n}", "label": ["ab"[n % 2], "c"]},
    "regression": lambda n: {"text": f"text {n}", "label": n * 1.5},
    "multiple-choice": lambda n: {"text": f"text {n}", "choices": ["yes", "no"], "label": n % 2},
    "token-classification": lambda n: {"tokens": ["in", f"Rome {n}"], "ner_tags": ["O", "B-LOC"]},
    "question-answering": lambda n: {
        "question": f"Which {n}?", "context": f"It is {n} of {n // 2}.", "answers": str(n)
    },
}  # fmt: skip


def key(task: str, example: Any) -> Any:
    return tuple(getattr(example, name) for name in TASKS[task].input_fields)


@pytest.mark.parametrize("task", list(TASKS))
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_equal_inputs_stay_on_one_side(task: str, share: float) -> None:
    rows = [ROWS[task](n) for n in range(60)] * 4
    data = load_dataset(task, DataFiles(train=rows, dev_share=share))
    [(_, dev)] = data.dev
    assert len(dev) == pytest.approx(share * 240, abs=8)
    assert len(data.train) + len(dev) == 240
    assert not {key(task, e) for e in dev} & {key(task, e) for e in data.train}
    folds = fold_numbers(TASKS[task], [*data.train, *dev], 5)
    assert {*folds} == {1, 2, 3, 4, 5}
    pairs = {(key(task, e), fold) for e, fold in zip([*data.train, *dev], folds, strict=True)}
    assert len(pairs) == 60


def test_case_and_spaces_make_no_other_input() -> None:
    rows = [(f"Text {n}", "ab"[n % 2]) for n in range(40)]
    twins = [(f" tEXT   {n}", label) for n, (_, label) in enumerate(rows)]
    data = load_dataset("classification", DataFiles(train=[*rows, *twins]))
    texts = [{e.text.split()[-1] for e in inputs} for inputs in (data.train, data.dev[0][1])]
    assert not texts[0] & texts[1]
    counts = load_dataset("classification", DataFiles(train=rows, dev=twins)).counts
    assert counts.skipped["dev input that training has, too, kept"] == 40


@pytest.mark.parametrize("task", list(TASKS))
def test_inputs_that_training_has_and_conflicts_are_counted(task: str) -> None:
    rows = [ROWS[task](n) for n in range(8)]
    name = {"token-classification": "ner_tags", "question-answering": "answers"}.get(task, "label")
    other = {"regression": 9.0, "multiple-choice": 1, "token-classification": ["B-LOC", "O"]}
    value = other.get(task, rows[1][name] if task != "question-answering" else "It")
    train = [*rows, {**rows[0], name: value}]
    new = ROWS[task](99)
    data = load_dataset(task, DataFiles(train=train, dev=[rows[0], rows[3], new], test=[rows[5]]))
    skipped = data.counts.skipped
    assert skipped["equal inputs with different labels, kept"] == 1
    assert skipped["dev input that training has, too, kept"] == 2
    assert skipped["test input that training has, too, kept"] == 1
    assert data.counts.examples["dev input that training has, too, kept"] == "dev[0]"


def labelled(**numbers: int) -> list[dict[str, str]]:
    labels = [label for label, count in numbers.items() for _ in range(count)]
    return [{"text": f"text {n}", "label": label} for n, label in enumerate(labels)]


@pytest.mark.parametrize(
    ("numbers", "held", "lacking"),
    [
        ({"a": 190, "b": 8, "c": 2}, {"a": 19, "b": 1, "c": 1}, 0),
        ({"a": 190, "b": 9, "c": 1}, {"a": 19, "b": 1}, 1),
        ({"a": 4, "b": 4}, {"a": 1, "b": 1}, 0),
        (dict.fromkeys("abcdefghijklmnopqrst", 5), dict.fromkeys("abcdefghijklmnopqrst", 1), 0),
    ],
)
def test_each_label_is_held_out_where_it_can_be(
    numbers: dict[str, int], held: dict[str, int], lacking: int
) -> None:
    data = load_dataset("classification", DataFiles(train=labelled(**numbers)))
    [(_, dev)] = data.dev
    assert Counter(example.gold for example in dev) == held
    assert {example.gold for example in data.train} == numbers.keys()
    assert data.counts.skipped["label with too few inputs to hold one out, kept"] == lacking
    again = load_dataset("classification", DataFiles(train=labelled(**numbers)))
    assert again.dev == data.dev


def test_thousands_of_labels_keep_the_share_that_was_asked_for() -> None:
    rows = labelled(**{f"l{n}": 2 for n in range(2000)}, many=2000)
    data = load_dataset("classification", DataFiles(train=rows))
    [(_, dev)] = data.dev
    labels = Counter(example.gold for example in dev)
    assert len(dev) == pytest.approx(600, abs=2)
    assert labels["many"] >= 150
    assert len({example.gold for example in data.train}) == 2001


def test_sets_of_labels_and_documents() -> None:
    rows = [{"text": f"text {n}", "label": ["a", "b"] if n < 3 else ["a"]} for n in range(60)]
    data = load_dataset("multi-label-classification", DataFiles(train=rows))
    assert sum("b" in example.gold for example in data.dev[0][1]) == 1
    kind = TASKS["token-classification"]
    sentence = load_dataset(kind.task_type, DataFiles(train=[ROWS[kind.task_type](0)] * 2, dev=[
        ROWS[kind.task_type](1)])).train[0]  # fmt: skip
    inputs = [
        sentence._replace(words=("in", word), document=f"d{document}")
        for document in range(20)
        for word in (f"A{document}", f"B{document}", "again")
    ]
    train, dev = hold_out(kind, inputs, 0.1, TextCounts())
    assert len(dev) in (4, 6)
    documents = {e.document for e in dev if e.words[1] != "again"}
    assert not documents & {e.document for e in train if e.words[1] != "again"}
    assert not {e.words for e in dev} & {e.words for e in train}


def test_a_share_beside_dev_data_and_too_few_groups_are_refused() -> None:
    rows = labelled(a=4, b=4)
    with pytest.raises(BertkitError, match="--dev-share"):
        load_dataset("classification", DataFiles(train=rows, dev=rows, dev_share=0.2))
    with pytest.raises(BertkitError, match="too few"):
        load_dataset("classification", DataFiles(train=labelled(a=1, b=1)))
    with pytest.raises(BertkitError, match="too few for 5 folds"):
        fold_numbers(TASKS["regression"], load_dataset(
            "regression", DataFiles(train=[ROWS["regression"](n) for n in range(3)] * 9), whole=True
        ).train, 5)  # fmt: skip


def test_a_generator_is_read_once() -> None:
    train, dev = (((f"{word} {n}", "ab"[n % 2]) for n in range(9)) for word in ("one", "two"))
    data = load_dataset("classification", DataFiles(train=train, dev=dev))
    assert (len(data.train), len(data.dev[0][1])) == (9, 9)
    with pytest.raises(BertkitError, match=r"^train has no row"):
        load_dataset("classification", DataFiles(train=iter([])))


def test_a_context_of_many_questions_is_not_copied_for_each() -> None:
    context = "Some  words " * 2000
    rows = [{"question": f"{n}?", "context": context, "answers": "Some"} for n in range(200)]
    rows.append({"question": "a?", "context": context.upper(), "answers": "SOME"})
    kind = TASKS["question-answering"]
    train = load_dataset("question-answering", DataFiles(train=rows), whole=True).train
    tracemalloc.start()
    assert set(fold_numbers(kind, [*train, train[0]._replace(context="x")], 2)) == {1, 2}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * len(context)
