"""Files larger than memory: what is held, what comes out, what an error or a stop leaves behind."""

from __future__ import annotations

import gc
import gzip
import io
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from bertkit.datasets.columns import TextColumns
from bertkit.datasets.examples import ChoiceExample, TextExample, WordsExample
from bertkit.predict.predictors import CHUNK_INPUTS, TaskPredictor, input_chunks
from bertkit.tasks.spec import SPECS
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.cli.options import NO_COLUMNS, ColumnFlags
from bertkit.cli.options import given as named
from bertkit.cli.predict import predict_command
from bertkit.console import Console
from bertkit.errors import BertkitError
from bertkit.predict import files
from bertkit.predict import predictors as tasks
from bertkit.predict.files import (
    FileProgress,
    end_position,
    model_inputs,
    predicted_rows,
    row_parts,
)
from bertkit.predict.load import load_predictor
from bertkit.tasks.classification import LabelPrediction
from bertkit.text.lines import TextCounts
from tests.conftest import WORDS
from tests.predict.conftest import TASKS


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Stretches of five inputs."""
    monkeypatch.setattr(tasks, "CHUNK_INPUTS", 5)
    return 5


def chunks(inputs: Sequence[Any]) -> Iterator[Sequence[Any]]:
    """What `input_chunks` gives where documents stay whole, from inputs that are all there."""
    start = 0
    while start < len(inputs):
        end = min(start + tasks.CHUNK_INPUTS, len(inputs))
        while end < len(inputs) and isinstance(inputs[end], WordsExample):
            if inputs[end].document != inputs[end - 1].document:
                break
            end += 1
        yield inputs[start:end]
        start = end


def read_inputs(task_type: str, file: str, columns: ColumnFlags = NO_COLUMNS) -> Iterator[Any]:
    return model_inputs(SPECS[task_type], {}, file, named(columns), TextCounts())[1]


def read_whole(
    model: Path, file: Path, columns: ColumnFlags = NO_COLUMNS, *, kept: bool = True
) -> str:
    """What comes out where all inputs are held at once."""
    predictor = load_predictor([model], device="cpu", precision="fp32")
    rows: dict[str, Any] | None = {} if kept else None
    spec = SPECS[predictor.task.task_type]
    inputs = list(model_inputs(spec, {}, str(file), named(columns), TextCounts(), rows)[1])
    lines = []
    for chunk in chunks(inputs):
        predictions, _ = predictor.run(chunk)
        for asked, found in zip(chunk, predictions, strict=True):
            parts = [row_parts(predictor, asked, found, rows)]
            [row] = predicted_rows(parts, {}, flat=False)
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    return "".join(lines)


def run(model: Path, file: Path, out: Path | None, columns: ColumnFlags = NO_COLUMNS) -> None:
    predict_command(model, str(file), out=out, device="cpu", precision="fp32", columns=columns)


def watch_inputs(
    monkeypatch: pytest.MonkeyPatch, watch: Callable[[Iterator[Any]], Iterator[Any]]
) -> None:
    """Let the inputs of a file pass through a function of the test."""

    def watched(*given: Any) -> Any:
        columns, inputs = model_inputs(*given)
        return columns, watch(inputs)

    monkeypatch.setattr(files, "model_inputs", watched)


def sentence(number: int) -> str:
    return " ".join(WORDS[(number * step) % len(WORDS)] for step in range(1, 2 + number % 5))


def test_a_column_that_comes_late_is_not_mixed_with_predictions(
    models: Path, tmp_path: Path, small_chunks: int
) -> None:
    late = [{"text": "river"}] * small_chunks + [{"text": "stone", "label": "wet"}]
    file, out = tmp_path / "a.jsonl", tmp_path / "found.jsonl"
    file.write_text("\n".join(map(json.dumps, late)))
    with pytest.raises(BertkitError, match="input 5 has the column 'label', which the"):
        run(models / "classify", file, out)
    assert not out.exists()
    file.write_text("\n".join(map(json.dumps, [late[-1], *late])))
    run(models / "classify", file, out)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert all("predicted_label" in row for row in rows)
    assert [row["label"] for row in rows if "label" in row] == ["wet", "wet"]


# What is held -----------------------------------------------------------------------------------


def alive() -> Counter[type]:
    return Counter(type(found) for found in gc.get_objects())


@pytest.mark.slow
def test_no_more_than_two_stretches_are_held(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file, out = tmp_path / "many.csv", tmp_path / "found.jsonl"
    rows = 20_000
    with file.open("w") as stream:
        stream.write("id,text\n")
        stream.writelines(f"n{i},{sentence(i) if i % 1000 else ''}\n" for i in range(rows))
    columns = ColumnFlags(id="id")
    gc.collect()  # what other tests left, lest it go while this one counts
    before, held = alive(), []

    def watch(items: Iterator[Any]) -> Iterator[Any]:
        for number, item in enumerate(items, 1):
            if (
                number % CHUNK_INPUTS == 0
            ):  # where a chunk is complete, and the last one still there
                held.append(alive() - before)
            yield item

    watch_inputs(monkeypatch, watch)
    run(models / "classify", file, out, columns)
    monkeypatch.undo()
    assert len(held) == 9
    assert all(CHUNK_INPUTS <= found[TextExample] <= 2 * CHUNK_INPUTS for found in held)
    assert max(found[LabelPrediction] for found in held) <= CHUNK_INPUTS
    said = capsys.readouterr().err.splitlines()
    assert said[-2:] == [
        f"counted: empty 'text': 20 (first: {file}:2)",
        "19,980 inputs, 0 in several windows, 0 cut",
    ]
    assert out.read_text(encoding="utf-8") == read_whole(models / "classify", file, columns)
    found = [json.loads(line)["id"] for line in out.read_text(encoding="utf-8").splitlines()]
    assert found == [f"n{i}" for i in range(rows) if i % 1000]


HEADS = {"csv": "text\n", "jsonl": "", "text": "", "conll": "-DOCSTART-\n\n"}
SHOWN: dict[str, Callable[[str], str]] = {
    "csv": lambda text: text,
    "jsonl": lambda text: json.dumps({"text": text}),
    "text": lambda text: text,
    "conll": lambda text: text.replace(" ", "\n") + "\n",
}


@pytest.mark.parametrize("form", HEADS)
def test_readers_read_no_further_than_asked(form: str, tmp_path: Path) -> None:
    """The first inputs are there before a fault far behind them is found; it says where it is."""
    lines = [SHOWN[form](sentence(i)) for i in range(100_000)]
    packed = gzip.compress((HEADS[form] + "\n".join(lines)).encode(), compresslevel=1)
    file = tmp_path / "many.txt.gz"
    file.write_bytes(packed[: 9 * len(packed) // 10])
    kind, columns = "classification", ColumnFlags(format=form)
    if form == "conll":
        kind, columns = "token-classification", ColumnFlags()
    inputs = read_inputs(kind, str(file), columns)
    first = next(inputs)
    assert (first.words if form == "conll" else (first.text,)) == (sentence(0),)
    with pytest.raises(BertkitError, match=r"many\.txt\.gz cannot be read after .*line \d{5}"):
        list(inputs)


@given(
    documents=st.lists(st.integers(1, 9), max_size=12), size=st.integers(1, 7), words=st.booleans()
)
@settings(max_examples=60, deadline=None)
def test_stretches_are_those_of_a_list(documents: list[int], size: int, words: bool) -> None:
    inputs: list[Any] = [
        WordsExample("", ("a",), None, number, "")
        if words
        else TextExample("", "a", None, None, "")
        for number, length in enumerate(documents)
        for _ in range(length)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tasks, "CHUNK_INPUTS", size)
        whole = list(input_chunks(iter(inputs), whole=words))
        divided = list(input_chunks(iter(inputs)))
        assert whole == list(chunks(inputs))
    assert [given for chunk in divided for given in chunk] == inputs
    assert {len(chunk) for chunk in divided[:-1]} <= {size}


def test_many_inputs_are_divided_between_documents(
    models: Path, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [WordsExample("", ("river", "stone"), None, i // 3, "") for i in range(14)]
    for name, lengths in (("documents", [6, 6, 2]), ("tag", [5, 5, 4])):
        predictor = load_predictor([models / name], device="cpu", precision="fp32")
        asked: list[int] = []

        def noted(chunk: Any, real: Any = predictor.run, asked: list[int] = asked) -> Any:
            asked.append(len(chunk))
            return real(chunk)

        monkeypatch.setattr(predictor, "run", noted)
        assert len(predictor.many(inputs)) == 14
        assert asked == lengths


# What comes out ---------------------------------------------------------------------------------


def file_for(name: str, folder: Path) -> tuple[Path, ColumnFlags]:
    """23 inputs for a task."""
    texts = [f"{sentence(i)} {sentence(i + 7)}" for i in range(23)]
    if name in {"classify", "multi-label", "regress"}:
        file = folder / "a.txt"
        file.write_text("\n".join(texts))
        return file, ColumnFlags()
    if name == "choose":
        file = folder / "a.csv"
        rows = [f"{text},{sentence(i)},{sentence(i + 1)}" for i, text in enumerate(texts)]
        file.write_text("text,a,b\n" + "\n".join(rows))
        return file, ColumnFlags(choices=("a", "b"))
    if name == "answer":
        file = folder / "a.jsonl"
        rows = [json.dumps({"question": "river", "context": text * 4}) for text in texts]
        file.write_text("\n".join(rows))
        return file, ColumnFlags()
    file = folder / "a.conll.txt"
    lines = ["-DOCSTART-\n\n" * (i % 7 == 0) + SHOWN["conll"](t) for i, t in enumerate(texts)]
    file.write_text("\n".join(lines))
    return file, ColumnFlags()


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_the_output_is_that_of_the_whole_file(
    name: str, models: Path, tmp_path: Path, small_chunks: int, capsys: Any
) -> None:
    file, columns = file_for(name, tmp_path)
    out = tmp_path / "deep" / "found.jsonl"
    run(models / name, file, out, columns)
    capsys.readouterr()
    run(models / name, file, None, columns)
    printed = capsys.readouterr().out
    found = out.read_text(encoding="utf-8")
    if name not in ("tag", "documents"):
        assert printed == read_whole(models / name, file, columns, kept=False)
    whole = read_whole(models / name, file, columns)
    if name == "tag":  # its documents are divided, so that batches and last digits may differ
        ours, theirs = ([json.loads(row) for row in rows.splitlines()] for rows in (found, whole))
        for one, other in zip(ours, theirs, strict=True):
            expected = pytest.approx(other.pop("probabilities"), abs=1e-5)
            assert one.pop("probabilities") == expected
            assert one == other
    else:
        assert found == whole
    assert len(found.splitlines()) == 23
    assert [path.name for path in out.parent.iterdir()] == ["found.jsonl"]


def test_what_is_cut_and_unknown_is_said_over_all_stretches(
    models: Path, tmp_path: Path, small_chunks: int, capsys: Any
) -> None:
    file = tmp_path / "a.jsonl"
    asked = ["river", "river " * 30, "\u05e9", "\u05e9"] * 2
    rows = [json.dumps({"question": text, "context": "\u05e9"}) for text in asked]
    file.write_text("\n".join(rows))
    run(models / "answer", file, tmp_path / "found.jsonl")
    said = capsys.readouterr().err
    assert "8 inputs, 0 in several windows, questions cut at 16 tokens: 2, " in said
    assert "12 of 46 tokens [UNK] (26.1%), inputs without a known token: 4" in said


def test_lines_are_printed_as_they_are_made(
    models: Path, tmp_path: Path, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = file_for("classify", tmp_path)
    printed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", printed)
    seen = []

    def watch(items: Iterator[Any]) -> Iterator[Any]:
        for item in items:
            seen.append(printed.getvalue().count("\n"))
            yield item

    watch_inputs(monkeypatch, watch)
    run(models / "classify", file, None)
    assert seen == [max(0, 5 * ((i - 1) // 5)) for i in range(23)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_and_lines_keep_apart(
    models: Path, tmp_path: Path, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a bar on the screen, lines still go to where the output goes; on a screen, none is."""
    monkeypatch.setenv("TERM", "xterm")
    file, _ = file_for("classify", tmp_path)
    expected = read_whole(models / "classify", file)
    for output, bars in ((io.StringIO(), True), (Terminal(), False)):
        screen = Terminal()
        monkeypatch.setattr(sys, "stdout", output)
        monkeypatch.setattr(sys, "stderr", screen)
        run(models / "classify", file, None)
        assert output.getvalue() == expected
        assert ("predicting" in screen.getvalue()) == bars
        assert screen.getvalue().endswith("23 inputs, 0 in several windows, 0 cut\n")


def test_progress_of_an_ensemble_is_of_all_its_windows(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = load_predictor([models / "choose"] * 2, device="cpu", precision="fp32")
    inputs = [ChoiceExample(str(i), sentence(i), ("a", "b"), None, "") for i in range(7)]
    told: list[tuple[int, int]] = []
    found, items = predictor.run(inputs, lambda done, total: told.append((done, total)))
    windows = sum(len(item.parts) for item in items.items)
    assert told == [(0, 2 * windows), (windows, 2 * windows), (2 * windows, 2 * windows)]
    assert predictor.run_items(inputs, items) == found == predictor.many(inputs)


def test_progress_goes_by_the_lines_of_the_file() -> None:
    stream = io.StringIO()
    console = Console(stream=stream, interval=0)
    progress = FileProgress(console, 100, "lines", visible=True)
    for line, size in ((40, 3), (90, 2)):
        progress.begin([TextExample("", "a", None, None, f"a:b.csv:{line}")] * size)
        for done in (0, 4, 8):
            progress(done, 8)
    progress.finish()
    shown = [line.partition(" (")[0] + line[-10:] for line in stream.getvalue().splitlines()]
    assert [line.split(" of ")[0].split()[-1] for line in shown] == ["20", "40", "65", "90", "100"]
    assert [int(line.split()[-2]) for line in shown] == [1, 3, 4, 5, 5]


def test_without_a_total_inputs_are_counted() -> None:
    stream = io.StringIO()
    progress = FileProgress(Console(stream=stream, interval=0), None, "inputs", visible=True)
    for size in (5, 2):
        progress.begin([TextExample("", "a", None, None, "hf:name:3")] * size)
        progress(10, 10)
    progress.finish()
    counted = [line.split(",")[0] for line in stream.getvalue().splitlines()]
    assert counted == [f"predicting: {number} inputs" for number in (5, 7, 7)]


def test_how_far_places_go(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    for end in ("", "\n"):
        file.write_text(f'text\n"a\nb"\nc{end}')
        assert end_position(str(file), TextColumns()) == 4
    with gzip.open(tmp_path / "a.csv.gz", "wb") as stream:
        stream.write(b"text\na\n")
    assert end_position(str(tmp_path / "a.csv.gz"), TextColumns()) is None
    assert end_position(str(tmp_path), TextColumns()) is None
    assert end_position("hf:name", TextColumns()) is None
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"text": ["a"] * 7}), tmp_path / "a.parquet")
    assert end_position(str(tmp_path / "a.parquet"), TextColumns()) == 7
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    assert end_position(str(tmp_path / "b.parquet"), TextColumns()) is None


# What is left behind ----------------------------------------------------------------------------


def damaged_parquet(folder: Path) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    file = folder / "a.parquet"
    texts = [f"{sentence(i)} {i}" for i in range(9000)]
    parquet.write_table(
        *(arrow.table({"text": texts}), file), row_group_size=3000, compression="zstd"
    )
    content = bytearray(file.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 5000] = b"\xff" * 5000
    file.write_bytes(content)
    return file


def late_faults(name: str, folder: Path) -> tuple[Path, str]:
    """A file whose first chunk is sound."""
    if name == "parquet":
        return damaged_parquet(folder), r"a\.parquet cannot be read after row or line \d"
    file = folder / "a.csv"
    rows = [f"{i},{sentence(i)}" for i in range(20)]
    if name == "id":
        file.write_text("\n".join(["id,text", *rows, "3,river"]))
        return file, r"a\.csv:22: ID '3' is already used at .*a\.csv:5"
    if name == "ragged":
        file.write_text("\n".join(["id,text", *rows, *["river"] * 21]))
        return file, "21 of 41 rows are ragged"
    file.write_text("\n".join(["id,text", *rows, '20,"river']))
    return file, r"a\.csv:22: bad quotes in the row that begins here"


@pytest.mark.parametrize("name", ["parquet", "id", "ragged", "quote"])
def test_a_late_fault_leaves_the_old_file(
    name: str, models: Path, tmp_path: Path, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, message = late_faults(name, tmp_path)
    made = []
    real = TaskPredictor.run

    def counted(self: TaskPredictor, *given: Any) -> Any:
        made.append(1)
        return real(self, *given)

    monkeypatch.setattr(TaskPredictor, "run", counted)
    if name == "parquet":
        monkeypatch.setattr(tasks, "CHUNK_INPUTS", 1000)
    out = tmp_path / "results" / "found.jsonl"
    out.parent.mkdir()
    out.write_text("old\n")
    with pytest.raises(BertkitError, match=message):
        run(models / "classify", file, out, ColumnFlags(id="" if name == "parquet" else "id"))
    assert made
    assert out.read_text() == "old\n"
    assert list(out.parent.iterdir()) == [out]


def test_an_interrupted_run_leaves_the_old_file(
    models: Path, tmp_path: Path, small_chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, _ = file_for("classify", tmp_path)
    out = tmp_path / "results" / "found.jsonl"
    out.parent.mkdir()
    out.write_text("old\n")
    real, beside = TaskPredictor.run, []

    def stopped(self: TaskPredictor, *given: Any) -> Any:
        beside.append(len(list(out.parent.iterdir())))
        if len(beside) == 3:
            raise KeyboardInterrupt
        return real(self, *given)

    monkeypatch.setattr(TaskPredictor, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(models / "classify", file, out)
    assert beside == [2, 2, 2]
    assert out.read_text() == "old\n"
    assert list(out.parent.iterdir()) == [out]


def test_plain_text_that_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match="does not exist; check the path"):
        next(read_inputs("classification", str(tmp_path / "no.txt")))
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("river\n")
    with pytest.raises(BertkitError, match="is 2 files; name one of them"):
        next(read_inputs("classification", str(tmp_path), ColumnFlags(format="text")))
    (tmp_path / "a.txt").write_text("\n \n")
    with pytest.raises(BertkitError, match="holds no text; give one input per line"):
        next(read_inputs("classification", str(tmp_path / "a.txt")))
