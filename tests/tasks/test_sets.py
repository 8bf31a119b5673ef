"""Official sets by name: where their files are, and which of them a request needs."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from bertkit.datasets.benchmarks import BENCHMARKS, DataFiles, official_paths, read_split
from bertkit.datasets.columns import NO_ZERO, ChoiceColumns, TextColumns, WordColumns
from bertkit.tasks.spec import SPECS, spec_for

from bertkit.cli.options import ColumnFlags, WindowFlags
from bertkit.errors import BertkitError
from bertkit.tasks.data import load_dataset
from bertkit.tasks.windows import WordWindows
from bertkit.text.lines import TextCounts

Write = Callable[[str, str], Path]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("squad-1.1", r"dev-v1\.1\.json does not exist.*SQuAD-explorer"),
        ("squad-2.0", r"dev-v2\.0\.json does not exist.*SQuAD-explorer"),
        ("swag", r"val\.csv does not exist.*rowanz/swagaf"),
        ("conll-2003", r"valid\.txt does not exist.*uantwerpen.*Reuters.*NIST"),
    ],
)
def test_absent_data_names_the_place(tmp_path: Path, name: str, message: str) -> None:
    assert set(BENCHMARKS) >= {name}
    with pytest.raises(BertkitError, match=message):
        read_split(name, "dev", DataFiles(data=tmp_path), None, TextCounts())


def test_a_split_needs_its_own_file_only(write: Write) -> None:
    path = str(write("mine.txt", "a O\nb B-X\n"))
    for split in ("train", "dev", "test"):
        files = DataFiles(**{split: path})  # type: ignore[arg-type]
        assert len(read_split("conll-2003", split, files, None, TextCounts())) == 1
        other = "dev" if split == "train" else "train"
        with pytest.raises(BertkitError, match=f"give --data FOLDER, or --{other} FILE"):
            read_split("conll-2003", other, files, None, TextCounts())
    with pytest.raises(BertkitError, match=r"squad-1\.1 has no official test file; .* --test FILE"):
        read_split("squad-1.1", "test", DataFiles(data=Path()), None, TextCounts())


def test_files_and_columns_that_an_official_set_has_no_use_for_are_refused(write: Write) -> None:
    own = str(write("mine.tsv", "a\n"))
    with pytest.raises(BertkitError, match="mrpc is read from --data FOLDER"):
        read_split("mrpc", "dev", DataFiles(data=Path(), dev=own), None, TextCounts())
    with pytest.raises(BertkitError, match="conll-2003 knows its columns"):
        read_split("conll-2003", "dev", DataFiles(dev=own), WordColumns(tag_column=1), TextCounts())


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("classification", {"words": "w"}, r"--words \(an option of token-classification\)"),
        ("regression", {"separator": ";"}, r"--separator \(an option of multi-label-classificatio"),
        ("multiple-choice", {"pair": "b"}, r"--pair \(an option of classification and multi-.*\)"),
        ("token-classification", {"text": "a", "words": "w"}, r"--text \(an option of"),
        ("question-answering", {"label": "a", "id": "i"}, r"--label \(an option of"),
    ],
)
def test_columns_of_other_task_types_are_refused(
    name: str, given: dict[str, str], message: str
) -> None:
    with pytest.raises(BertkitError, match=f"^{name} does not accept {message}.*; it accepts --.*"):
        SPECS[name].make_columns(given)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("classification", {"context": "document"}, "--context .*; it accepts .* --stride$"),
        ("mrpc", {"max_question_length": 7}, r"--max-question-length \(an option of question-"),
        ("swag", {"context": "document", "max_answer_length": 7}, "--context .* --max-answer-l"),
        ("conll-2003", {"max_question_length": 7}, "--max-question-length .* --context$"),
        ("squad-2.0", {"context": "document"}, r"--context \(an option of token-.*-length$"),
    ],
)
def test_lengths_of_other_task_types_are_refused(
    name: str, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(BertkitError, match=f"does not accept {message}"):
        spec_for(name).make_windows(given)


def test_options_of_another_task_type_are_refused(write: Write) -> None:
    files = DataFiles(train=str(write("a.csv", "text,label\na,1\nb,2\n")))
    with pytest.raises(BertkitError, match="regression takes NumberColumns, not TextColumns"):
        load_dataset("regression", files, TextColumns())
    with pytest.raises(BertkitError, match="classification takes WindowLengths, not WordWindows"):
        load_dataset("classification", files, windows=WordWindows())


def test_every_option_is_a_flag() -> None:
    for flags, options in (
        (ColumnFlags, {spec.columns for spec in SPECS.values()}),
        (WindowFlags, {spec.windows for spec in SPECS.values()}),
    ):
        names = {field.name for made in options for field in fields(made)}
        assert {field.name for field in fields(flags)} == names


def test_options_of_another_kind_are_named(write: Write) -> None:
    files = DataFiles(train=str(write("a.csv", "text,label\na,x\nb,y\n")))
    with pytest.raises(BertkitError, match="classification takes TextColumns, not dict"):
        load_dataset("classification", files, {"text": "text"})  # type: ignore[arg-type]
    with pytest.raises(BertkitError, match=r"options go by name, as in {'NAME': VALUE}, not as Te"):
        SPECS["classification"].merged_columns(TextColumns(text="a"), {})  # type: ignore[arg-type]


def test_no_such_context() -> None:
    with pytest.raises(BertkitError, match="called 'documnet'; did you mean 'document'"):
        WordWindows(context="documnet")


def test_files_that_are_not_read_are_refused(write: Write) -> None:
    own = str(write("a.csv", "text,label\na,x\nb,y\n"))
    with pytest.raises(
        BertkitError, match=r"^classification takes your own data, .*; --data is the f"
    ):
        load_dataset("classification", DataFiles(train=own, data=Path()))
    for name, files in (
        ("classification", DataFiles(train=own, dev=own, dev_share=0.5)),
        ("mrpc", DataFiles(data=Path(), dev_share=0.5)),
    ):
        with pytest.raises(BertkitError, match=r"--dev-share has no effect, .*; leave"):
            load_dataset(name, files)


def test_keys_that_may_count_from_zero_or_one_are_told(write: Write) -> None:
    rows = "".join(f"w,1,2,3,{key}\n" for key in (1, 2, 1))
    path = str(write("a.csv", f"text,a,b,c,label\n{rows}"))
    files, columns = DataFiles(train=path, dev=path), ChoiceColumns(choices=("a", "b", "c"))
    found = load_dataset("multiple-choice", files, columns)
    assert found.counts.examples == {NO_ZERO: f"{path}:2"}
    assert found.columns["first_choice"] == 0
    for first in (0, 1):
        said = replace(columns, first_choice=first)
        found = load_dataset("multiple-choice", files, said)
        assert NO_ZERO not in found.counts.examples


def test_documents_must_be_marked_where_their_context_is_wanted(write: Write) -> None:
    alone = str(write("alone.txt", "a B-X\nb O\n\na B-X\n"))
    marked = str(write("marked.txt", "-DOCSTART- O\n\na B-X\nb O\n\na B-X\n"))
    whole = WordWindows(context="document")
    for name in ("token-classification", "conll-2003"):
        files = DataFiles(train=alone, dev=marked)
        with pytest.raises(BertkitError, match=r"document of its own; .* -DOCSTART- .*--document"):
            load_dataset(name, files, windows=whole)
        load_dataset(name, files)
        found = load_dataset(name, DataFiles(train=marked, dev=alone), windows=whole)
        assert found.counts.skipped == {"sentence alone in its document, kept": 2}
        assert found.counts.examples["sentence alone in its document, kept"] == f"{alone}:1"
    rows = "".join(
        f'{{"tokens": ["a"], "ner_tags": ["{tag}"], "d": "x"}}\n' for tag in ("O", "B-X", "B-X")
    )
    files = DataFiles(train=(train := str(write("a.jsonl", rows))), dev=train)
    with pytest.raises(BertkitError, match="or leave --context out"):
        load_dataset("token-classification", files, windows=whole)
    load_dataset("token-classification", files, WordColumns(document="d"), whole)


@pytest.mark.parametrize(
    ("tags", "once"),
    [
        ("O B-X I-X B-Y B-Y", ["entity 'X'"]),
        ("O U-X B-Y L-Y", ["entity 'X'", "entity 'Y'"]),
        ("O B-X O B-X", []),
        ("NOUN VERB NOUN", ["tag 'VERB'"]),
    ],
)
def test_tags_seen_once_are_counted(write: Write, tags: str, once: list[str]) -> None:
    path = str(write("a.txt", "".join(f"a {tag}\n" for tag in tags.split())))
    counts = load_dataset("token-classification", DataFiles(train=path, dev=path)).counts
    reason = "label seen once in training, kept"
    assert counts.skipped == ({reason: len(once)} if once else {})
    assert counts.examples == ({reason: once[0]} if once else {})


def test_a_table_with_a_word_in_each_row_is_counted(write: Write) -> None:
    """As the corpora for entities on Kaggle have it: each row would be a sentence of its own."""
    path = str(write("a.csv", "tokens,ner_tags\nin,O\nRome,B-LOC\nParis,B-LOC\n"))
    counts = load_dataset("token-classification", DataFiles(train=path, dev=path)).counts
    [reason] = counts.skipped
    assert reason.startswith("sentence of one word, like all others")
    assert counts.examples[reason] == f"{path}:2"


@pytest.mark.parametrize("name", ["classification", "squad-1.1"])
def test_misspelt_splits(name: str) -> None:
    with pytest.raises(BertkitError, match="no split 'tset'; did you mean 'test'"):
        read_split(name, "tset", DataFiles(), None, TextCounts())


def test_files_in_a_folder_and_overruled(tmp_path: Path) -> None:
    for name in ("eng.train", "dev.txt", "valid.txt"):
        (tmp_path / name).write_text("a O\n")
    assert official_paths("conll-2003", DataFiles(data=tmp_path)) == {
        "train": str(tmp_path / "eng.train"),
        "dev": str(tmp_path / "dev.txt"),
    }
    url = "https://host/eng.testb.gz"
    assert official_paths("conll-2003", DataFiles(data=tmp_path, test=url))["test"] == url


def test_an_official_file_may_be_compressed_and_remote(tmp_path: Path) -> None:
    path = tmp_path / "eng.testa.gz"
    path.write_bytes(gzip.compress(b"a O\n\nb O\n"))
    for place in (str(path), path.as_uri()):
        found = read_split("conll-2003", "dev", DataFiles(dev=place), None, TextCounts())
        assert [given.words for given in found] == [("a",), ("b",)]
