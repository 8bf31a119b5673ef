"""Runs broken on purpose are found out, real ones and journals written by hand."""

from __future__ import annotations

import io
import json
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.cli.doctor import doctor_command
from bertkit.config import as_json
from bertkit.console import Console
from bertkit.corpus.build import PrepareOptions, prepare
from bertkit.corpus.store import TokenStore
from bertkit.doctor.findings import RUN_LIMITS, STORE_LIMITS, THRESHOLDS, Finding
from bertkit.doctor.learning import copying_loss
from bertkit.doctor.records import RunRecords, mean
from bertkit.doctor.run import check_run, diagnose
from bertkit.errors import BertkitError
from bertkit.files import exclusive_lock, write_json
from bertkit.pretraining_data.mixture import MixedStore, mix_stores
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer
from bertkit.training.journal import json_line
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import Logging, ModelSize, Phases, PretrainRecipe, Training
from tests.conftest import WORDS
from tests.markdown import ROOT, table_rows

ENTROPY, COPYING = 7.0, 6.3
RATE = 1e-3
Record = dict[str, Any]


def falling(step: int) -> float:
    """A loss as runs have it: down to the entropy, a plateau, then down again."""
    return 3.0 + 3.2 / (1 + math.exp((step - 2000) / 300)) + 4.0 * math.exp(-step / 60)


def journal(
    loss: Callable[[int], float] = falling,
    *,
    updates: int = 6000,
    total: int = 6000,
    held_out: Callable[[int], float] | None = None,
    pairs: Callable[[int], float] = lambda step: 0.55 + 0.3 * min(1.0, step / 6000),
    sequences: int = 6400,
    every: int = 50,
    reason: str | None = "finished",
    **fields: Callable[[int], Any],
) -> list[Record]:
    """The records of a run, its curves given as functions of the update."""
    records: list[Record] = [
        {
            "kind": "start",
            "step": 0,
            "baselines": {"unigram_entropy": ENTROPY, "nsp_majority": 0.53},
            "pairs": {"examples": 100_000, "random_share": 0.53, "cut_share": 0.1},
            "tokens_total": 20_000_000,
            "steps_total": total,
        }
    ]
    for step in range(every, updates + 1, every):
        warm = min(1.0, step / 100)
        record = {
            "kind": "step",
            "step": step,
            "phase": 0,
            "loss": loss(step) + 0.6,
            "mlm_loss": loss(step),
            "nsp_loss": 0.6,
            "nsp_accuracy": pairs(step),
            "learning_rate": RATE * warm * (1 - 0.98 * step / total),
            "gradient_norm": 1.5 + 0.3 * math.sin(step),
            "tokens": sequences * 100,
            "targets": sequences * 15,
            "sequences": sequences,
            "tokens_per_second": 10_000.0 + 100 * math.sin(step),
            "mfu": 0.3,
        }
        records.append(record | {name: value(step) for name, value in fields.items()})
        if step % 1000 == 0:
            value = (held_out or (lambda at: loss(at) + 0.05))(step)
            evaluation = {"kind": "evaluation", "step": step, "phase": 0, "mlm_loss": value}
            records.append(evaluation | {"nsp_accuracy": pairs(step), "sequences": 1000})
    if reason is not None:
        records.append({"kind": "end", "step": updates, "reason": reason, "seconds": 1.0})
    return records


RECIPE = as_json(PretrainRecipe(training=Training(learning_rate=RATE, warmup_steps=100)))


def write(folder: Path, records: list[Record], recipe: Record | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    claims = {"recipe": RECIPE if recipe is None else recipe, "store": "elsewhere"}
    write_json(folder / "recipe.json", claims)
    (folder / "journal.jsonl").write_text("".join(map(json_line, records)))
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "model.safetensors").touch()
    return folder


def findings(folder: Path) -> dict[str, Finding]:
    found = check_run(RunRecords(folder), [])
    assert len({one.name for one in found}) == len(found)
    return {one.name: one for one in found}


def problems(folder: Path) -> set[str]:
    return {name for name, one in findings(folder).items() if one.severity == "problem"}


def severity(folder: Path, name: str) -> str:
    return findings(folder)[name].severity


def test_a_healthy_journal_has_no_problem(tmp_path: Path) -> None:
    found = findings(write(tmp_path, journal()))
    bad = {name for name, one in found.items() if one.severity != "ok"}
    assert bad == {"corpus"}, "the store is not there"
    assert set(found) == set(RUN_LIMITS) - {"vocabulary", "replaced-chance"}
    assert found["plateau"].numbers["copying_loss"] == pytest.approx(COPYING)
    assert found["epochs"].numbers["planned"] == pytest.approx(
        120 * 6400 * (100 - 3) / 20_000_000  # without [CLS] and two [SEP]
    )


def test_only_a_store_of_the_run_is_taken_for_its_store(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(store.folder, tmp_path / "store")
    monkeypatch.chdir(tmp_path)
    folder = write(tmp_path / "runs" / "lost", journal())
    (folder / "recipe.json").unlink()
    assert findings(folder)["corpus"].severity == "notice"
    shutil.copytree(store.folder, folder / "store")
    assert findings(folder)["corpus"].severity == "ok"


@pytest.mark.parametrize(
    ("updates", "total", "reason", "sequences", "expected"),
    [
        (6000, 6000, "finished", 6400, "problem"),  # it ended there
        (6000, 6000, "finished", 64, "problem"),
        (4000, 100_000, None, 640, "notice"),  # 51,200 examples: early
        (4000, 100_000, None, 6400, "problem"),  # 512,000 examples: late
        (4000, 6000, None, 640, "problem"),  # past half of the run
        (20_000, 1_000_000, None, 64, "problem"),  # many updates
    ],
)
def test_plateau(
    tmp_path: Path, updates: int, total: int, reason: str | None, sequences: int, expected: str
) -> None:
    def stuck(step: int) -> float:
        return 6.35 + 3 * math.exp(-step / 60) + 0.01 * math.sin(step)

    records = journal(stuck, updates=updates, total=total, reason=reason, sequences=sequences)
    found = findings(write(tmp_path, records))["plateau"]
    assert found.severity == expected
    assert found.numbers["loss"] == pytest.approx(6.35, abs=0.02)
    assert ("still early" in found.meaning) == (expected == "notice")
    assert "phases.lengths" in found.change


def test_a_healthy_run_is_not_blamed_before_it_leaves_the_plateau(tmp_path: Path) -> None:
    for updates in range(50, 6000, 250):
        records = journal(updates=updates, reason=None, sequences=3200)
        assert not problems(write(tmp_path, records)), updates


def test_stuck_at_the_entropy_itself_is_a_problem_however_early(tmp_path: Path) -> None:
    records = journal(lambda step: ENTROPY, updates=1500, total=100_000, reason=None, sequences=64)
    found = findings(write(tmp_path, records))["plateau"]
    assert found.severity == "problem"
    assert "learning-rate-high" in found.change


def test_causes_of_a_plateau_are_named(tmp_path: Path) -> None:
    run = RunRecords(write(tmp_path, journal(lambda step: 6.4)))
    duplicates = Finding("duplicate-documents", "problem", {}, "half")
    fine = Finding("fertility", "ok", {}, "low")
    (found,) = [
        one for one in check_run(run, [duplicates, fine, duplicates]) if one.name == "plateau"
    ]
    assert found.change.startswith("fix first: duplicate-documents; ")


def test_left_to_right_has_nothing_to_copy(tmp_path: Path) -> None:
    records = journal(lambda step: 6.4, targets=lambda step: 6400 * 97)
    for record in records:
        if "mlm_loss" in record:
            record["lm_loss"] = record.pop("mlm_loss")
    found = findings(write(tmp_path, records))["plateau"]
    assert found.severity == "ok"
    assert found.meaning.startswith("LM loss 6.4")
    assert "repeating" not in found.meaning
    assert found.numbers["copying_loss"] == pytest.approx((1 - 2 / 97) * ENTROPY)
    for record in records:
        if "lm_loss" in record:
            record["lm_loss"] = ENTROPY
    found = findings(write(tmp_path, records))["plateau"]
    assert found.severity == "problem"
    assert "kept tokens" not in found.change


def test_sentence_order_is_named_so(tmp_path: Path) -> None:
    records = journal(pairs=lambda step: 0.53)
    records[0]["pairs"]["random_share"] = 0.85
    for record in records:
        for field in ("loss", "accuracy"):
            if f"nsp_{field}" in record:
                record[f"sop_{field}"] = record.pop(f"nsp_{field}")
    found = findings(write(tmp_path, records))
    assert found["next-sentence-chance"].severity == "problem"
    assert "of sentence-order labels are right" in found["next-sentence-chance"].meaning
    assert found["label-balance"].severity == "problem"
    assert "have A and B swapped" in found["label-balance"].meaning


@pytest.mark.parametrize(
    ("rtd", "updates", "expected"),
    [(0.30, 6000, "ok"), (0.42, 6000, "problem"), (0.42, 1000, "notice")],
    ids=["learns", "blind at the end", "blind early"],
)
def test_replaced_pieces(tmp_path: Path, rtd: float, updates: int, expected: str) -> None:
    # 15 % are replaced: whoever says so of every piece has a loss of 0.4227
    records = journal(
        updates=updates, reason="finished" if updates == 6000 else None, sequences=640,
        rtd_loss=lambda step: rtd, rtd_accuracy=lambda step: 0.85, rtd_share=lambda step: 0.15,
    )  # fmt: skip
    found = findings(write(tmp_path, records))["replaced-chance"]
    assert found.severity == expected
    assert found.numbers["blind_loss"] == pytest.approx(0.4227, abs=1e-4)


def test_runs_without_pairs_are_not_blamed_for_their_labels(tmp_path: Path) -> None:
    records = journal()
    records[0]["pairs"]["random_share"] = 0.0
    for record in records:
        record.pop("nsp_loss", None)
        record.pop("nsp_accuracy", None)
    found = findings(write(tmp_path, records))
    assert not {"label-balance", "next-sentence-chance"} & set(found)


@pytest.mark.parametrize(
    ("curve", "expected"),
    [
        (lambda step: falling(min(step, 3000)) + max(0, step - 3000) / 1000, "problem"),
        (lambda step: falling(step) + 2 * (3000 < step < 3300), "notice"),
        (lambda step: 8.0 + math.sin(step / 100), "problem"),
        (lambda step: None if step > 3000 else falling(step), "problem"),
        (falling, "ok"),
    ],
    ids=["rises", "rises and comes down", "jumps", "no number", "healthy"],
)
def test_learning_rate_too_high(
    tmp_path: Path, curve: Callable[[int], float | None], expected: str
) -> None:
    records = journal(lambda step: curve(step) or 0.0, reason=None)
    for record in records:
        if "mlm_loss" in record:
            record["mlm_loss"] = curve(record["step"])
    found = findings(write(tmp_path, records))
    assert found["learning-rate-high"].severity == expected
    assert found["learning-rate-low"].severity == "ok" if "learning-rate-low" in found else True
    if expected != "ok":
        assert "now 0.001; try 0.0003" in found["learning-rate-high"].change


def test_a_longer_second_phase_is_no_rise(tmp_path: Path) -> None:
    records = journal(lambda step: falling(step) + (step > 4000), phase=lambda step: step > 4000)
    found = findings(write(tmp_path, records))
    assert found["learning-rate-high"].severity == "ok"
    assert not {name for name, one in found.items() if one.severity == "problem"}


@pytest.mark.parametrize(
    ("updates", "reason", "expected"),
    [(6000, "finished", "problem"), (1000, None, "problem"), (150, None, "ok")],
)
def test_learning_rate_too_low(
    tmp_path: Path, updates: int, reason: str | None, expected: str
) -> None:
    records = journal(lambda step: 9.5 - step / 10_000, updates=updates, reason=reason)
    found = findings(write(tmp_path, records))
    assert found["learning-rate-low"].severity == expected
    assert found["learning-rate-high"].severity == "ok"


@pytest.mark.parametrize(
    ("warmup", "updates", "expected"),
    [(100, 6000, "ok"), (2000, 6000, "notice"), (9000, 6000, "problem"), (500, 400, "notice")],
)
def test_warm_up(tmp_path: Path, warmup: int, updates: int, expected: str) -> None:
    recipe = {**RECIPE, "training": {**RECIPE["training"], "warmup_steps": warmup}}
    reason = "finished" if updates == 6000 else "interrupted"
    assert severity(
        write(tmp_path, journal(updates=updates, reason=reason), recipe), "warm-up"
    ) == (expected)


@pytest.mark.parametrize(
    ("loss", "sequences", "expected"),
    [(falling, 6400, "problem"), (falling, 640, "notice"), (lambda step: 6.4, 640, "ok")],
    ids=["learns words for long", "learns words", "on the plateau"],
)
def test_next_sentences_at_chance(
    tmp_path: Path, loss: Callable[[int], float], sequences: int, expected: str
) -> None:
    records = journal(loss, pairs=lambda step: 0.53, sequences=sequences)
    assert severity(write(tmp_path, records), "next-sentence-chance") == expected


@pytest.mark.parametrize(("training", "expected"), [(0.84, "problem"), (0.6, "ok")])
def test_the_accuracy_on_training_pairs_is_compared_with_their_labels(
    tmp_path: Path, training: float, expected: str
) -> None:
    """Held-out pairs may have another share of random next sentences."""
    records = journal(falling, pairs=lambda step: 0.84)
    records[0]["baselines"]["nsp_majority"] = training
    for record in records:
        if record["kind"] == "evaluation":
            record["nsp_majority"] = 0.8
    assert severity(write(tmp_path, records), "next-sentence-chance") == expected


@pytest.mark.parametrize(("majority", "expected"), [(0.56, "ok"), (0.87, "problem"), (None, "")])
def test_next_sentences_are_judged_by_the_labels_of_their_phase(
    tmp_path: Path, majority: float | None, expected: str
) -> None:
    """Of short examples nearly all have a random next sentence; of the long ones only half."""
    records = journal(pairs=lambda step: 0.87 if step <= 3000 else 0.66)
    records[0]["baselines"]["nsp_majority"] = 0.87
    for record in records:
        if record.get("step", 0) > 3000 and "phase" in record:
            record["phase"] = 1
            if record["kind"] == "evaluation" and majority is not None:
                record["nsp_majority"] = majority
    found = findings(write(tmp_path, records))
    if majority is None:  # of an older run
        assert "next-sentence-chance" not in found
    else:
        assert found["next-sentence-chance"].severity == expected
        assert found["next-sentence-chance"].numbers["majority"] == majority


def test_the_first_phase_alone_is_no_problem(tmp_path: Path) -> None:
    records = journal()
    records[0]["pairs"] |= {"random_share": 0.87, "cut_share": 0.95}
    assert {"label-balance", "cut-tokens"} <= problems(write(tmp_path / "one", records))
    records[0]["phases"] = [{"length": 32}, {"length": 128}]
    found = findings(write(tmp_path / "two", records))
    for name in ("label-balance", "cut-tokens"):
        assert found[name].severity == "notice"
        assert "(of the first phase)" in found[name].meaning


@pytest.mark.parametrize(
    ("held_out", "expected"),
    [
        (lambda step: falling(step) + 1.2, "problem"),
        (lambda step: falling(step) + 0.4, "notice"),
        (lambda step: max(falling(step), 3.2) + 0.2 * (step > 4000), "problem"),
        (lambda step: falling(step) + 0.1, "ok"),
    ],
    ids=["far above", "above", "rising", "close"],
)
def test_overfitting(tmp_path: Path, held_out: Callable[[int], float], expected: str) -> None:
    assert severity(write(tmp_path, journal(held_out=held_out)), "overfitting") == expected


def test_too_many_epochs(tmp_path: Path) -> None:
    records = journal()
    records[0]["tokens_total"] = 1_000_000
    assert severity(write(tmp_path, records), "epochs") == "notice"
    records[0]["tokens_total"] = 100_000
    assert severity(write(tmp_path, records), "epochs") == "problem"


def test_epochs_of_longer_phases_and_of_small_stores(tmp_path: Path) -> None:
    records = journal(updates=4500, total=6000, reason=None)
    records[0]["phases"] = [
        {"length": 128, "steps": 5400, "batch_size": 256},
        {"length": 512, "steps": 600, "batch_size": 256},
    ]
    found = findings(write(tmp_path, records))["epochs"]
    read = 90 * 6400 * (100 - 3) / 20_000_000
    made = 4500 * 128 / (5400 * 128 + 600 * 512)
    assert found.numbers["planned"] == pytest.approx(read / made)
    records[0]["mixture"] = [
        {"store": "en", "share": 0.6, "token_share": 0.99},
        {"store": "tr", "share": 0.4, "token_share": 0.01},
    ]
    found = findings(write(tmp_path, records))["epochs"]
    assert found.severity == "notice"
    assert found.numbers["most_read_store"] == pytest.approx(40 * read / made)
    assert "the most repeated store, tr, is read 193.7 times" in found.meaning


def test_missing_evaluation(tmp_path: Path) -> None:
    records = [record for record in journal() if record["kind"] != "evaluation"]
    found = findings(write(tmp_path, records))
    assert found["evaluation"].severity == "notice"
    assert "overfitting" not in found
    for reason in (None, "interrupted"):
        young = write(tmp_path, journal(updates=500, reason=reason))
        assert severity(young, "evaluation") == "ok", "none was due"


@pytest.mark.parametrize(
    ("reason", "expected", "said"),
    [
        ("finished", "ok", "finished, 3,000 of 6,000"),
        ("interrupted", "notice", "interrupted after 3,000 of 6,000"),
        (None, "notice", "breaks off after 3,000"),
    ],
)
def test_state(tmp_path: Path, reason: str | None, expected: str, said: str) -> None:
    found = findings(write(tmp_path, journal(updates=3000, reason=reason)))["state"]
    assert found.severity == expected
    assert said in found.meaning


def test_a_run_that_diverged(tmp_path: Path) -> None:
    records = journal(updates=3000, reason="diverged")
    records[-1]["step"] = 3041
    found = findings(write(tmp_path, records))
    assert found["state"].severity == found["learning-rate-high"].severity == "problem"
    assert "diverged after 3,041 of 6,000 updates" in found["state"].meaning
    assert "the same command would diverge again" in found["state"].change
    assert "now 0.001; try 0.0003" in found["state"].change
    assert "between updates 3,000 and 3,041" in found["learning-rate-high"].meaning
    at_once = write(tmp_path, [records[0], records[-1] | {"step": 7}])
    assert severity(at_once, "state") == "problem", "before any line"


def test_a_run_in_progress_is_recognised(tmp_path: Path) -> None:
    folder = write(tmp_path, journal(updates=3000, reason=None))
    with exclusive_lock(folder):
        assert severity(folder, "state") == "ok"
    assert severity(folder, "state") == "notice"


def test_finished_without_a_model(tmp_path: Path) -> None:
    folder = write(tmp_path, journal())
    (folder / "model" / "model.safetensors").unlink()
    assert problems(folder) == {"state"}


def test_nothing_written_yet(tmp_path: Path) -> None:
    for records in ([], journal()[:1]):
        folder = write(tmp_path, records)
        assert severity(folder, "state") == "problem", "a finished model has a journal"
        (folder / "model" / "model.safetensors").unlink()
        found = findings(folder)
        assert found["state"].severity == "notice"
        assert "plateau" not in found


def test_a_torn_last_line_is_no_damage(tmp_path: Path) -> None:
    folder = write(tmp_path, journal(updates=3000, reason=None))
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"kind": "step", "st')
    assert severity(folder, "journal") == "ok"
    text = (folder / "journal.jsonl").read_text()
    (folder / "journal.jsonl").write_text(text.replace('"kind"', "", 1) + "\n")
    found = findings(folder)
    assert found["journal"].severity == "problem"
    assert "line 1" in found["journal"].meaning
    assert found["state"].numbers["updates"] == 3000, "the other lines are read"


@pytest.mark.parametrize("name", ["recipe.json", "journal.jsonl"])
@pytest.mark.parametrize(
    "content",
    [
        None, b"", b"[]", b"\xff{", b'{"recipe": [], "store": 7}', b"[" * 200_000 + b"\n{}",
        b'{"kind": "step", "step": 1' + b"0" * 400 + b', "loss": 1' + b"0" * 400 + b"}\n{}",
    ],
)  # fmt: skip
def test_damaged_files_do_not_crash_it(tmp_path: Path, name: str, content: bytes | None) -> None:
    folder = write(tmp_path, journal())
    if content is None:
        (folder / name).unlink()
    else:
        (folder / name).write_bytes(content)
    found = findings(folder)
    if content is None or (name == "recipe.json" and not content.startswith(b'{"')):
        assert found["journal"].severity == "problem"


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-9, 9), st.floats(), st.text(max_size=3))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_no_journal_crashes_it(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    records = journal(updates=data.draw(st.integers(0, 40)) * 50, reason=None)
    for _ in range(data.draw(st.integers(0, 12))):
        record = data.draw(st.sampled_from(records))
        field = data.draw(st.sampled_from(sorted(record)))
        record[field] = data.draw(VALUES)
        if field == "step":
            record[field] = data.draw(st.integers(-5, 9000))
    folder = write(tmp_path_factory.mktemp("run"), records)
    content = (folder / "journal.jsonl").read_bytes()
    kept = data.draw(st.integers(0, len(content)))
    (folder / "journal.jsonl").write_bytes(content[:kept])
    for one in findings(folder).values():
        assert one.lines()
        assert json.dumps(one.as_json())


def test_copying_loss_is_that_of_the_best_guesser() -> None:
    counts = np.array([50, 30, 12, 5, 3, 0])
    p, size = counts / counts.sum(), len(counts)
    mask, random = 0.7, 0.2
    kept = 1 - mask - random
    expected = 0.0
    for seen in range(size):
        joint = random / size * p + kept * p[seen] * (np.arange(size) == seen)  # with the truth
        for truth in range(size):
            if joint[truth]:
                expected -= joint[truth] * math.log(joint[truth] / joint.sum())
    entropy = -sum(share * math.log(share) for share in p if share)
    assert copying_loss(counts, mask, random) == pytest.approx(expected + mask * entropy)
    assert copying_loss(counts, 1.0, 0.0) == pytest.approx(entropy)
    assert copying_loss(counts, 0.0, 1.0) == pytest.approx(entropy)
    assert copying_loss(counts, 0.8, 0.0) == pytest.approx(0.8 * entropy)


TINY = PretrainRecipe(
    model=ModelSize(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=32,
        dropout=0.0,
    ),
    phases=Phases(lengths=(16,), steps=(60,), batch_sizes=(32,), max_predictions=(3,)),
    training=Training(learning_rate=4e-3, warmup_steps=15, precision="fp32"),
    logging=Logging(log_every=5, evaluate_every=50, held_out_sequences=64, checkpoint_every=999),
)  # fmt: skip


def at_rate(factor: float, steps: int) -> PretrainRecipe:
    training = replace(TINY.training, learning_rate=TINY.training.learning_rate * factor)
    return replace(TINY, phases=replace(TINY.phases, steps=(steps,)), training=training)


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Text in which a word is known by its neighbours: a round of words, a tenth of them random."""
    rng, folder = np.random.default_rng(0), tmp_path_factory.mktemp("chain")
    documents = []
    for _ in range(300):
        place, lines = int(rng.integers(len(WORDS))), []
        for size in rng.integers(4, 8, int(rng.integers(15, 60))):
            drawn = rng.integers(0, len(WORDS), size)
            words = np.where(rng.random(size) < 0.9, (place + np.arange(size)) % len(WORDS), drawn)
            lines.append(" ".join(WORDS[word] for word in words))
            place += int(size)
        documents.append("\n".join(lines))
    (folder / "text.txt").write_text("\n\n".join(documents))
    own = Tokenizer.from_vocabulary([*SPECIAL_TOKENS, *WORDS], lowercase=True)
    options = PrepareOptions(held_out=0.1, language="lines")
    return prepare([str(folder / "text.txt")], own, folder / "store", options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factor", "expected"), [(100, "learning-rate-high"), (0.001, "learning-rate-low")]
)
def test_real_runs_at_impossible_rates(
    chain: TokenStore, tmp_path: Path, factor: float, expected: str
) -> None:
    pretrain(at_rate(factor, 60), chain, tmp_path, console=Console(stream=io.StringIO()))
    found = findings(tmp_path)
    rates = {name for name in found if name.startswith("learning-rate")}
    assert {name for name in rates if found[name].severity == "problem"} == {expected}
    assert found["plateau"].severity == "problem", "it ended without having learnt anything"
    assert expected in found["plateau"].change


@pytest.fixture(scope="module")
def learnt(chain: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real run that leaves the plateau."""
    folder = tmp_path_factory.mktemp("learnt") / "run"
    assert pretrain(at_rate(1, 140), chain, folder, console=Console(stream=io.StringIO())) is None
    return folder


@pytest.mark.slow
def test_a_real_healthy_run(
    learnt: Path, chain: TokenStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor_command(learnt, json=tmp_path / "found.json") == 0
    shown = capsys.readouterr().out
    assert "0 problems" in shown
    assert shown.startswith(f"run {learnt}\n  ok       state: finished, 140 of 140 updates\n")
    assert f"its token store {chain.folder}" in shown
    parts = json.loads((tmp_path / "found.json").read_text())["parts"]
    names = [[one["name"] for one in part["findings"]] for part in parts]
    assert "plateau" in names[0]
    assert "fertility" in names[1]
    (found,) = [one for one in parts[0]["findings"] if one["name"] == "plateau"]
    entropy, copying = found["numbers"]["unigram_entropy"], found["numbers"]["copying_loss"]
    assert 0.8 * entropy < copying < entropy
    assert found["numbers"]["loss"] < copying - 0.1


@pytest.mark.slow
def test_a_real_run_beside_another_corpus(
    learnt: Path, chain: TokenStore, store: TokenStore, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(learnt, run)
    claims = json.loads((run / "recipe.json").read_text())
    write_json(run / "recipe.json", {**claims, "store": str(store.folder)})
    found = findings(run)
    assert found["vocabulary"].severity == "problem"
    assert "the store with a tokenizer that differs from recipe.json" in found["vocabulary"].meaning
    assert found["corpus"].severity == "notice"
    shutil.copytree(chain.folder, run / "store")  # the right one is preferred where both are there
    found = findings(run)
    assert (found["vocabulary"].severity, found["corpus"].severity) == ("ok", "ok")


def mixture_run(folder: Path, store: TokenStore) -> tuple[Path, Path, Path]:
    """A run, by hand, on a mixture of two copies of a store."""
    one, two = folder / "stores" / "one", folder / "stores" / "two"
    for copy in (one, two):
        shutil.copytree(store.folder, copy)
    mixture = mix_stores([TokenStore(one), TokenStore(two)], weights=[3.0, 1.0])
    run = write(folder / "runs" / "mixed", journal())
    claims = {"recipe": RECIPE, **mixture.origin(), "corpus": mixture.content_hash}
    names = ["stores/one", "stores/two"]  # as they are named from the folder above
    hashes = {"tokenizer_hash": store.tokenizer_hash, "stores": names}
    write_json(run / "recipe.json", claims | hashes)
    return run, one, two


def test_the_stores_of_a_mixture_are_opened(tmp_path: Path, store: TokenStore) -> None:
    run, one, two = mixture_run(tmp_path, store)
    found = findings(run)
    assert (found["corpus"].severity, found["vocabulary"].severity) == ("ok", "ok")
    opened = RunRecords(run).store
    assert isinstance(opened, MixedStore)
    assert opened.shares == pytest.approx([0.75, 0.25])
    titles = [title for title, _ in diagnose(run, console=Console(stream=io.StringIO()))]
    assert titles == [f"run {run}", f"its token store {one}", f"its token store {two}"]
    shutil.rmtree(two)
    found = findings(run)
    assert found["corpus"].severity == "notice"
    assert "of the mixture of 2 stores, 1 can be found" in found["corpus"].meaning
    titles = [title for title, _ in diagnose(run, console=Console(stream=io.StringIO()))]
    assert titles == [f"run {run}", f"its token store {one}"]


@pytest.mark.parametrize(
    "change",
    [{"stores": []}, {"stores": [7, None]}, {"shares": None}, {"shares": ["a", 1]},
     {"shares": [1]}, {"corpora": 3}, {"corpus": [1]}, {"stores": ["x" * 300, "\0"]}],
    ids=str,
)  # fmt: skip
def test_damaged_records_of_a_mixture(
    tmp_path: Path, store: TokenStore, change: dict[str, object]
) -> None:
    run, *_ = mixture_run(tmp_path, store)
    claims = json.loads((run / "recipe.json").read_text())
    write_json(run / "recipe.json", claims | change)
    assert "corpus" in findings(run)


def test_a_store_in_a_folder_of_somebody_else_is_out_of_reach(tmp_path: Path) -> None:
    run = write(tmp_path, journal())
    named = "x" * 300  # no file can have this name: asking for it is an error of the system
    write_json(run / "recipe.json", {"recipe": RECIPE, "store": named})
    assert severity(run, "corpus") == "notice"


def test_exit_status_and_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], store: TokenStore
) -> None:
    run = write(tmp_path / "run", journal(lambda step: 6.4))
    assert doctor_command(run) == 1
    lines = capsys.readouterr().out.splitlines()
    at = next(index for index, line in enumerate(lines) if line.startswith("  problem  plateau: "))
    assert lines[at + 1].startswith("           > attention has not formed")
    assert re.fullmatch(r"1 problem, 1 notice, \d+ ok", lines[-1])
    assert doctor_command(write(tmp_path / "run", journal())) == 0
    assert doctor_command(store.folder) == 0, "too little text is worth notices"
    ((title, _),) = diagnose(store.folder, console=Console(stream=io.StringIO()))
    assert title == f"token store {store.folder}"


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("finetune.json", "is a fine-tuning"),
        ("model.safetensors", "is a model directory"),
        ("vocab.txt", "is a tokenizer"),
        ("thesis.txt", "holds no journal"),
    ],
)
def test_other_paths_are_refused(tmp_path: Path, file: str, said: str) -> None:
    (tmp_path / file).touch()
    with pytest.raises(BertkitError, match=f"{said}.*name a pre-training run or a token store"):
        doctor_command(tmp_path)
    with pytest.raises(BertkitError, match="is a file"):
        doctor_command(tmp_path / file)
    with pytest.raises(BertkitError, match="does not exist"):
        doctor_command(tmp_path / "nowhere")


def test_runs_of_a_fine_tuning_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "runs" / "seed-0", journal())
    (tmp_path / "finetune.json").write_text("{}")
    with pytest.raises(BertkitError, match="is one run of a fine-tuning"):
        doctor_command(folder)


def test_every_finding_is_explained_with_its_limits() -> None:
    """docs/doctor.md says for each finding what `findings.py` says."""
    page = (ROOT / "docs/doctor.md").read_text()
    rows = [(name.strip("`"), limits) for name, _, *limits, _ in table_rows(page)]
    expected = [
        (name, [limit.written(limit.notice), limit.written(limit.problem)])
        for limits in (RUN_LIMITS, STORE_LIMITS)
        for name, limit in limits.items()
        if limit.unit != "rule" and not (limits is RUN_LIMITS and name in STORE_LIMITS)
    ]
    assert sorted(row for row in rows if "rule" not in row[1]) == sorted(expected)
    assert {name for name, _ in rows} == set(THRESHOLDS)


def test_absurd_weights_of_a_journal_are_no_error() -> None:
    records = [{"loss": 2.0, "targets": 1e308}, {"loss": 4.0, "targets": 1e308}]
    assert mean(records, "loss", "targets") == 3.0
    assert mean([{"loss": 2.0, "targets": -1}, {"loss": 4.0, "targets": 1}], "loss", "targets") == 3
    huge = [{"loss": 1.5e308, "targets": 3}, {"loss": 1.5e308, "targets": 3}]
    assert mean(huge, "loss", "targets") == math.inf
    assert mean([{"targets": 3}], "loss", "targets") is None
