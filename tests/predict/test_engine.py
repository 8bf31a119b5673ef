"""The engine: every head in every precision, a batch for each thread, and a bound on the loss."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from bertkit.datasets.examples import ChoiceExample, QuestionExample, TextExample, WordsExample
from bertkit.predict.engine import (
    choose_mode,
    compute_with,
    one_thread_each,
    shares,
)

from bertkit import load
from bertkit.errors import BertkitError
from bertkit.model.inference import possible_modes
from bertkit.predict import engine
from bertkit.predict.evaluate import check_change
from bertkit.predict.load import load_predictor
from bertkit.tasks.classification import Classification
from tests.conftest import python, run
from tests.predict.conftest import TASKS

CPU = torch.device("cpu")
needs_int8 = pytest.mark.skipif("int8" not in possible_modes(), reason="needs 8-bit products")
WORDS = ["open", "the", "file", "and", "read", "a", "long", "line", "of", "text", "from", "it"]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    assert torch.get_num_threads() == before, "a test changed the number of threads"
    torch.set_num_threads(before)


def words(number: int) -> list[str]:
    return [WORDS[(number * step) % len(WORDS)] for step in range(1, 3 + number % 30)]


def inputs_of(kind: str, count: int) -> list[object]:
    texts = [" ".join(words(number)) for number in range(count)]
    if kind == "choose":
        return [
            ChoiceExample(str(i), t, ("the line", "a file"), None, "") for i, t in enumerate(texts)
        ]
    if kind in {"tag", "documents"}:
        return [WordsExample(str(i), tuple(words(i)), None, i, "") for i in range(count)]
    if kind == "answer":
        return [QuestionExample(str(i), "what", t, None, "") for i, t in enumerate(texts)]
    return [TextExample(str(i), t, None, None, "") for i, t in enumerate(texts)]


def outputs(model: Path, precision: str, inputs: list[object]) -> list[np.ndarray]:
    predictor = load_predictor([model], device="cpu", precision=precision)
    items = predictor.task.items(inputs, predictor.tokenizer)
    return [rows for parts in predictor.engines[0].run(items) for rows in parts]


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize(
    ("precision", "close"), [("bf16", 0.03), pytest.param("int8", 0.06, marks=needs_int8)]
)
def test_every_head_in_every_precision(
    kind: str, precision: str, close: float, models: Path
) -> None:
    given = inputs_of(kind, 40)
    exact, fast = (outputs(models / kind, mode, given) for mode in ("fp32", precision))
    for a, b in zip(exact, fast, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype == np.float32
    a, b = (np.concatenate([rows.ravel() for rows in side]) for side in (exact, fast))
    assert 0 < np.abs(a - b).mean() < close * np.abs(a).mean() + close * a.std()


@pytest.mark.parametrize("kind", ["classify", "tag", "choose"])
def test_threads_change_neither_order_nor_results(
    kind: str, models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs_of(kind, 150)
    alone = outputs(models / kind, "fp32", given)
    monkeypatch.setattr(engine, "LEAST_TOKENS", 16)
    seen = []
    monkeypatch.setattr(
        engine, "one_thread_each", lambda workers: seen.append(workers) or one_thread_each(workers)
    )
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        shared = outputs(models / kind, "fp32", given)
    finally:
        torch.set_num_threads(before)
    assert seen == [3]
    for a, b in zip(alone, shared, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_workers_compute_with_one_thread_and_others_keep_theirs() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with one_thread_each(2) as pool:
            assert set(pool.map(lambda _: torch.get_num_threads(), range(8))) == {1}
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_gpu_gets_one_batch_whatever_the_threads_of_the_caller() -> None:
    found: list[tuple[int, int]] = []

    def work() -> None:
        compute_with(16)
        found.extend([shares(8192, 1), shares(8192, 2)])

    worker = threading.Thread(target=work)
    worker.start()
    worker.join()
    assert (found[0], found[1][0]) == ((1, 0), 16)


def test_a_thread_that_begins_meanwhile_gets_its_own_number() -> None:
    """torch tells it 1 then, which is not to stay."""
    before, seen = torch.get_num_threads(), list[int]()

    def meanwhile() -> None:
        with one_thread_each(2):
            pass
        seen.append(torch.get_num_threads())

    try:
        with one_thread_each(2) as pool:
            pool.submit(torch.get_num_threads).result()
            thread = threading.Thread(target=meanwhile)
            thread.start()
            thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [2]


def test_an_error_in_a_worker_is_raised(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "LEAST_TOKENS", 1)
    predictor = load_predictor([models / "classify"], device="cpu", precision="fp32")
    monkeypatch.setattr(predictor.engines[0], "threads", 2)
    items = predictor.task.items(inputs_of("classify", 50), predictor.tokenizer)
    items.items[7].parts[0].sequences[0].ids[1] = 10**6  # outside the vocabulary
    before = torch.get_num_threads()
    with pytest.raises(IndexError):
        predictor.engines[0].run(items)
    torch.set_num_threads(before)


def test_calls_with_other_things_than_texts(models: Path) -> None:
    answer, choose, tag, classify = (
        load(models / kind, device="cpu") for kind in ("answer", "choose", "tag", "classify")
    )
    for call in (
        lambda: answer(5, 6),
        lambda: answer("a", None),
        lambda: choose(None, ["a", "b"]),
        lambda: choose("a", [1, 2]),
        lambda: tag(["a", 2]),
        lambda: classify("a", b"b"),
    ):
        with pytest.raises(TypeError):
            call()
    for call in (lambda: choose("a", "bc"), lambda: choose("a", None), lambda: tag(5)):
        with pytest.raises(TypeError):
            call()
    with pytest.raises(BertkitError, match="no choice to choose from"):
        choose("a", [])


def test_precisions_are_checked() -> None:
    assert choose_mode("fp32", CPU) == "fp32"
    assert choose_mode("auto", CPU) in {"fp32", "bf16"}
    assert choose_mode("bf16-residual", CPU) == "bf16"  # as the estimators were trained with
    with pytest.raises(BertkitError, match=r"no precision is called 'int9'.*int8"):
        choose_mode("int9", CPU)
    with pytest.raises(BertkitError, match="int8 is for CPUs; choose bf16 or fp32 for cuda"):
        choose_mode("int8", torch.device("cuda"))


def test_a_bound_refuses_what_costs_more() -> None:
    check_change("f1", {"f1": 0.9}, {"f1": 0.896}, 0.005, "int8")
    check_change("f1", {"f1": 0.9}, {"f1": 0.95}, 0.0, "int8")
    with pytest.raises(BertkitError, match=r"int8 lowers f1 from 90.00 to 89.00, .* 0.50 points"):
        check_change("f1", {"f1": 0.9}, {"f1": 0.89}, 0.005, "int8")


@needs_int8
def test_evaluate_shows_int8_beside_fp32_and_keeps_the_bound(
    models: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    dev = tmp_path / "dev.csv"
    predictor = load_predictor([models / "classify"], device="cpu", precision="fp32")
    given = inputs_of("classify", 60)
    found = predictor.many(given)  # what the model says in fp32 is the truth here
    rows = [f"{asked.text},{answer.label}" for asked, answer in zip(given, found, strict=True)]  # type: ignore[attr-defined]
    dev.write_text("\n".join(["text,label", *rows]) + "\n")
    command = ["evaluate", str(models / "classify"), str(dev)]
    command += ["--precision", "int8", "--device", "cpu"]
    tokenized, real = [], Classification.items

    def counted(*given: object) -> object:
        tokenized.append(1)
        return real(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(Classification, "items", counted)
    run(*command, "--bound", "100")
    assert len(tokenized) == 1, "both precisions take the same sequences"
    shown = capsys.readouterr().out
    assert "classification dev in fp32: accuracy 100.0%" in shown
    run(*command, "--bound", "-1", status=2)  # not even an equal score would do
    assert "int8 lowers accuracy from 100.00" in capsys.readouterr().err


FORKED = """
import multiprocessing, sys, torch, bertkit
torch.set_num_threads(2)
predict = bertkit.load(sys.argv[1], device="cpu")
expected = predict("a river stone and a lantern")
def work(found):
    found.put(predict("a river stone and a lantern").label)
context = multiprocessing.get_context("fork")
found = context.Queue()
child = context.Process(target=work, args=[found], daemon=True)
child.start()
assert found.get(timeout=60) == expected.label
"""


def test_a_loaded_model_works_after_a_fork(models: Path) -> None:
    done = python("-c", FORKED, models / "classify")
    assert done.returncode == 0, done.stderr[-2000:]
