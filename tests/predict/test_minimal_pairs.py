"""Minimal pairs from files of every format to accuracies and records."""

from __future__ import annotations

import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from bertkit.datasets.minimal_pairs import BLIMP_DEV, MinimalPair, read_minimal_pairs
from bertkit.predict.minimal_pairs import MinimalPairEvaluation, ScoredPair
from safetensors.torch import load_file, save_file

import bertkit
from benchmarks import minimal_pairs as benchmark
from bertkit.checkpoints.save import save_model
from bertkit.console import Console
from bertkit.errors import BertkitError
from bertkit.files import read_json
from bertkit.model.electra import ReplacedTokenModel
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.text.lines import TextCounts
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import run, tiny_config

PAIRS = [
    ("The river stone bridge.", "The rivers stone bridge."),
    ("Winter garden letter sailor.", "Winter garden sailor letter."),
    ("candle forest", "candle candle forest"),
]


def small(tokenizer: Tokenizer) -> ModelConfig:
    torch.manual_seed(0)
    return tiny_config(tokenizer, initializer_range=0.3)


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masked") / "model"
    save_model(folder, PretrainingModel(small(tokenizer)), tokenizer, {"task": "pretraining"})
    return folder


def blimp_row(good: str, bad: str, uid: str, field: str) -> str:
    row = {"sentence_good": good, "sentence_bad": bad, "field": field, "UID": uid, "pairID": "0"}
    return json.dumps(row)


@pytest.fixture
def blimp(tmp_path: Path) -> Path:
    """A folder laid out like BLiMP; the first set is one of its dev sets."""
    folder = tmp_path / "blimp"
    folder.mkdir()
    for uid, field, count in (
        (BLIMP_DEV[0], "syntax", 3),
        ("wh_island", "syntax", 1),
        ("principle_A_case_2", "syntax/semantics", 2),
        ("principle_A_case_1", "syntax_semantics", 2),
    ):
        rows = [blimp_row(*pair, uid, field) for pair in PAIRS[:count]]
        (folder / f"{uid}.jsonl").write_text("\n".join(rows) + "\n")
    return folder


def evaluate(model: Path, data: object, **options: str) -> MinimalPairEvaluation:
    return bertkit.evaluate_minimal_pairs(model, data, device="cpu", **options)


def test_scores_are_those_of_sentences(model: Path, blimp: Path) -> None:
    found = evaluate(model, blimp)
    bert = bertkit.load(model, device="cpu", precision="fp32")
    assert len(found.scored) == 8
    for one in found.scored:
        good, bad = (each.score for each in bert.score([one.pair.good, one.pair.bad]))
        assert (one.good, one.bad) == pytest.approx((good, bad), abs=1e-4)
        assert one.credit == float(good > bad)
    assert found.sentences == 6
    assert (found.method, found.precision) == ("within-word-l2r", "fp32")
    assert {name: one.pairs for name, one in found.sets.items()} == {
        BLIMP_DEV[0]: 3,
        "wh_island": 1,
        "principle_A_case_2": 2,
        "principle_A_case_1": 2,
    }
    assert set(found.fields) == {"syntax", "syntax_semantics"}
    accuracies = [one.accuracy for one in found.sets.values()]
    assert found.accuracy == pytest.approx(sum(accuracies) / 4)
    assert found.fields["syntax"] == pytest.approx(sum(
        one.accuracy for one in found.sets.values() if one.field == "syntax"
    ) / 2)  # fmt: skip


def test_ties_count_half(model: Path) -> None:
    """Both Greek letters are [UNK], so the network cannot tell the sentences apart."""
    found = evaluate(model, [("river Ω", "river Δ"), ("stone", "stone"), *PAIRS])
    assert [one.good == one.bad for one in found.scored[:2]] == [True, True]
    [own] = found.sets.values()
    assert own.ties == 2
    right = sum(one.good > one.bad for one in found.scored)
    assert own.accuracy == pytest.approx((1 + right) / 5)
    pair = MinimalPair("a", "b", "s", "", "p")
    points = [ScoredPair(pair, *scores).credit for scores in ((-1.0, -2.0), (-2.0, -1.0))]
    assert points == [1.0, 0.0]


def test_every_format_gives_the_same_pairs(
    model: Path, write: Callable[[str, str], Path], tmp_path: Path
) -> None:
    frame = pd.DataFrame(PAIRS, columns=["sentence_good", "sentence_bad"])
    records = frame.to_dict("records")
    frame.to_csv(tmp_path / "a.csv", index=False)
    frame.to_csv(tmp_path / "a.tsv", index=False, sep="\t")
    frame.to_parquet(tmp_path / "a.parquet")
    write("a.jsonl", "".join(json.dumps(row) + "\n" for row in records))
    write("a.txt", "".join(f"{good}\n{bad}\n" for good, bad in PAIRS) + "\n")
    sources = [tmp_path / f"a.{ending}" for ending in ("csv", "tsv", "parquet", "jsonl", "txt")]
    for source in (*sources, frame, records, PAIRS):
        found = read_minimal_pairs(source, TextCounts())
        assert [(one.good, one.bad) for one in found] == PAIRS
        assert {one.set for one in found} == {"a" if isinstance(source, Path) else "data"}
    assert read_minimal_pairs(tmp_path / "a.txt", TextCounts())[1].place.endswith("a.txt:3")
    write("b.csv", "yes,no\nriver.,rivers.\n")
    [pair] = read_minimal_pairs(tmp_path / "b.csv", TextCounts(), good="yes", bad="no")
    assert (pair.good, pair.bad) == ("river.", "rivers.")


def test_sets_of_files_with_one_name(tmp_path: Path) -> None:
    for folder in ("en", "de"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "agreement.txt").write_text("river.\nrivers.\n")
    found = read_minimal_pairs(tmp_path, TextCounts())
    assert {one.set for one in found} == {"en/agreement", "de/agreement"}
    (tmp_path / "de" / "agreement.csv").write_text("sentence_good,sentence_bad\na,b\n")
    found = read_minimal_pairs(tmp_path / "de", TextCounts())
    assert {one.set for one in found} == {"agreement.txt", "agreement.csv"}
    for name in ("verbs.en.csv", "verbs.de.csv"):
        (tmp_path / "en" / name).write_text("sentence_good,sentence_bad\na,b\n")
    found = read_minimal_pairs(tmp_path / "en", TextCounts())
    assert {one.set for one in found} == {"agreement", "verbs.en", "verbs.de"}


def test_what_is_left_out_is_counted_with_its_place(
    model: Path, write: Callable[[str, str], Path]
) -> None:
    rows = [
        blimp_row("river.", "rivers.", "one", "syntax"),
        json.dumps({"sentence_good": "river."}),
        blimp_row("  ", "rivers.", "one", "syntax"),
        blimp_row("river " * 39, "rivers.", "one", "syntax"),
        blimp_row("river.", "\u200b\x01", "one", "syntax"),
        "no JSON",
    ]
    path = write("one.jsonl", "\n".join(rows))
    stream = io.StringIO()
    found = evaluate(model, path, console=Console(stream=stream))
    assert len(found.scored) == 1
    assert sorted(found.skipped.values()) == [1, 1, 1, 1, 1]
    for line in range(2, 7):
        assert f"one.jsonl:{line}" in stream.getvalue(), line
    text = write("two.txt", "river.\nrivers.\nbridge.\nbridges.\n \n\n")
    assert len(read_minimal_pairs(text, TextCounts())) == 2


def test_bad_requests_have_codes(
    model: Path, blimp: Path, write: Callable[[str, str], Path], tmp_path: Path
) -> None:
    cases = {
        "odd-lines": lambda: read_minimal_pairs(write("a.txt", "a\nb\nc\n"), TextCounts()),
        "column": lambda: read_minimal_pairs(blimp, TextCounts(), good="yes"),
        "split": lambda: read_minimal_pairs(blimp, TextCounts(), split="train"),
        "no-pairs": lambda: read_minimal_pairs(
            write("b.jsonl", blimp_row(" ", "b", "one", "syntax")), TextCounts()
        ),
        "method": lambda: evaluate(model, blimp, method="causal"),
    }
    for text in ("a\nb\n\nc\nd\ne\nf\n\ng\nh\n", " \nb\n", "a\n\nc\nd\n"):  # shifts the pairs
        with pytest.raises(BertkitError) as caught:
            read_minimal_pairs(write("c.txt", text), TextCounts())
        assert caught.value.code == "blank-line"
    for good in ("sentence_bad", ""):
        with pytest.raises(BertkitError) as caught:
            read_minimal_pairs(blimp, TextCounts(), good=good, bad="sentence_bad")
        assert caught.value.code == "column"
    for code, call in cases.items():
        with pytest.raises(BertkitError) as caught:
            call()
        assert caught.value.code == code
    with pytest.raises(BertkitError) as caught:
        read_minimal_pairs(PAIRS, TextCounts(), split="dev")
    assert caught.value.code == "split"
    with pytest.raises(BertkitError) as caught:  # nothing would be left
        read_minimal_pairs(blimp / f"{BLIMP_DEV[0]}.jsonl", TextCounts(), split="test")
    assert caught.value.code == "split"
    with pytest.raises(BertkitError) as caught:
        evaluate(model, [("river " * 50, "river")])
    assert caught.value.code == "no-pairs"
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "a.pdf").write_text("")
    (folder / "b.txt").write_text(f"{'river ' * 50}\nriver\n")
    with pytest.raises(BertkitError, match="a sentence of more than"):  # why, and not the PDF
        evaluate(model, folder)


def test_models_without_a_language_head_are_refused(
    tokenizer: Tokenizer, minilm: Path, models: Path, tmp_path: Path
) -> None:
    save_model(tmp_path / "encoder", Encoder(small(tokenizer)), tokenizer, {})
    save_model(
        tmp_path / "electra", ReplacedTokenModel(small(tokenizer), 0.5), tokenizer, {"task": "x"}
    )
    for folder in (tmp_path / "encoder", tmp_path / "electra", minilm, models / "classify"):
        with pytest.raises(BertkitError) as caught:
            evaluate(folder, PAIRS)
        assert caught.value.code == "no-language-head", folder
    path = tmp_path / "encoder" / "model.safetensors"
    save_file({f"module.{name}": one for name, one in load_file(path).items()}, path)
    with pytest.raises(BertkitError, match=r"names that bertkit does not know \(module\."):
        evaluate(tmp_path / "encoder", PAIRS)


def test_dev_is_a_tenth_of_every_field(data: Path, blimp: Path) -> None:
    """The rule that `BLIMP_DEV` was made by, on the genuine names."""
    if not (data / "blimp").is_dir():
        pytest.skip(f"no {data / 'blimp'}")
    fields: dict[str, list[str]] = {}
    for path in sorted((data / "blimp").glob("*.jsonl")):
        with path.open(encoding="utf-8") as lines:
            row = json.loads(next(lines))
        fields.setdefault(row["field"].replace("/", "_"), []).append(row["UID"])
    assert sum(map(len, fields.values())) == 67
    chosen = [
        name
        for names in fields.values()
        for name in sorted(names, key=lambda one: hashlib.sha256(one.encode()).hexdigest())[
            : round(len(names) / 10)
        ]
    ]
    assert sorted(chosen) == list(BLIMP_DEV)
    parts = {
        split: {one.set for one in read_minimal_pairs(blimp, TextCounts(), split=split)}
        for split in ("all", "dev", "test")
    }
    assert parts["dev"] == {BLIMP_DEV[0]}
    assert parts["dev"] | parts["test"] == parts["all"]
    assert not parts["dev"] & parts["test"]


def test_real_sentences_of_blimp(model: Path, data: Path, tmp_path: Path) -> None:
    names = ("principle_A_case_2", "wh_island", "regular_plural_subject_verb_agreement_1")
    for name in names:
        if not (data / "blimp" / f"{name}.jsonl").is_file():
            pytest.skip(f"no {data / 'blimp'}")
        lines = (data / "blimp" / f"{name}.jsonl").read_text().splitlines()[:4]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    found = evaluate(model, tmp_path)
    assert list(found.sets) == sorted(names)
    assert set(found.fields) == {"syntax_semantics", "syntax", "morphology"}
    assert len(found.scored) + sum(found.skipped.values()) == 12


@pytest.mark.slow
@pytest.mark.parametrize("method", list(benchmark.METHODS))
def test_scores_of_real_sentences_equal_minicons(model: Path, data: Path, method: str) -> None:
    pytest.importorskip("minicons")
    if not (data / "blimp").is_dir():
        pytest.skip(f"no {data / 'blimp'}")
    pairs = read_minimal_pairs(data / "blimp", TextCounts())[:: 67_000 // 500]
    bert = bertkit.load(model, device="cpu", precision="fp32")
    texts = [text for pair in pairs for text in (pair.good, pair.bad)]
    texts = [text for text in texts if len(bert.tokenizer.encode(text).ids) <= 38]
    assert len(texts) > 500
    wanted = benchmark.minicons(model, method)(16)(texts)
    assert np.abs(benchmark.ours(model, method)(texts) - wanted).max() < 1e-4


def test_the_command_prints_and_writes(
    model: Path, blimp: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    words = ["evaluate", "minimal-pairs", str(model), str(blimp), "--device", "cpu"]
    run(*words, "--method", "pll", "--out", str(out))
    printed = capsys.readouterr().out
    record = read_json(out / "minimal-pairs.json")
    assert f"{record['accuracy']:.1%}" in printed
    assert all(name in printed for name in record["sets"])
    assert (record["method"], record["precision"], record["pairs"]) == ("pll", "fp32", 8)
    rows = [json.loads(line) for line in (out / "minimal-pairs.jsonl").read_text().splitlines()]
    assert len(rows) == 8
    by_set = [row for row in rows if row["set"] == BLIMP_DEV[0]]
    wanted = sum(row["good_score"] > row["bad_score"] for row in by_set) / len(by_set)
    assert record["sets"][BLIMP_DEV[0]]["accuracy"] == pytest.approx(wanted)
    run(*words, "--split", "dev")
    assert "wh_island" not in capsys.readouterr().out
    shutil.rmtree(blimp)
    run(*words, status=2)
