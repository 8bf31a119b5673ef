from __future__ import annotations

import hashlib
import json
import math
import shutil
import signal
from collections.abc import Iterator
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertkit.checkpoints.pretrained import load_model, load_pretraining_model, read_pretrained
from bertkit.corpus.prepare import prepare
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import exclusive_lock
from bertkit.model import heads
from bertkit.model.encoder import Encoder
from bertkit.model.heads import Sums
from bertkit.progress import Console, read_journal
from bertkit.report.pretraining import write_report
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training import pretrain as module
from bertkit.training.distributed import Ranks
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import Logging, ModelSize, Objectives, Phases, PretrainRecipe, Training
from bertkit.training.start import HeldOut
from bertkit.training.step import train_steps

TOY = PretrainRecipe(
    model=ModelSize(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    ),
    phases=Phases(lengths=(32, 64), steps=(30, 10), batch_sizes=(8, 4), max_predictions=(5, 9)),
    training=Training(learning_rate=1e-3, warmup_steps=5, accumulate=2),
    logging=Logging(log_every=4, evaluate_every=10, held_out_sequences=16, checkpoint_every=6),
)

SHORT = replace(TOY, phases=replace(TOY.phases, steps=(14, 4)))
ONE_STEP = """
[model]
hidden_size = 32
num_hidden_layers = 1
num_attention_heads = 2
[phases]
lengths = [32]
steps = [1]
batch_sizes = [8]
max_predictions = [5]
[training]
warmup_steps = 0
"""


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def finished(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "toy"
    assert pretrain(TOY, store, run) is None
    return run


def test_a_recipe_may_be_a_path(
    store: TokenStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "own.v2.toml"
    recipe.write_text(ONE_STEP)
    assert pretrain(recipe, store, tmp_path / "run") is None
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe_name"] == "own.v2"
    assert capfd.readouterr().err.splitlines()[-1].startswith("finished")


@pytest.mark.slow
def test_run_directory_is_complete(finished: Path, store: TokenStore) -> None:
    for name in ("recipe.json", "environment.json", "journal.jsonl", "checkpoints", "model"):
        assert (finished / name).exists(), name
    records = read_journal(finished / "journal.jsonl")
    kinds = [record["kind"] for record in records]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert records[-1]["reason"] == "finished"
    steps = [record for record in records if record["kind"] == "step"]
    assert steps[-1]["step"] == 40
    assert sum(record["sequences"] for record in steps) == 30 * 8 + 10 * 4, "no update is unlogged"
    assert {record["phase"] for record in steps} == {0, 1}
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert [record["step"] for record in evaluations] == [10, 20, 30, 40]
    assert evaluations[0]["targets"] == evaluations[1]["targets"]
    assert [path.name for path in sorted((finished / "checkpoints").iterdir())] == [
        "step-00000036",
        "step-00000040",
    ]
    text = write_report(finished).read_text()
    assert str(evaluations[-1]["mlm_loss"])[:5] in text


@pytest.mark.slow
def test_model_directory_loads_in_transformers(finished: Path, transformers: Any) -> None:
    theirs = transformers.AutoModelForPreTraining.from_pretrained(finished / "model").eval()
    ours = load_pretraining_model(finished / "model")
    tokenizer = Tokenizer.load(finished / "model")
    ids = [tokenizer.cls_id, *tokenizer.encode("river stone bridge").ids, tokenizer.sep_id]
    from bertkit.pretraining_data.batch import pack

    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).prediction_logits[0]
        found = ours(pack([ids]), torch.arange(len(ids))).mlm_logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_the_same_recipe_gives_the_same_weights_and_another_seed_other_losses(
    finished: Path, store: TokenStore, tmp_path: Path
) -> None:
    """Also where a function reads each record of the journal; its error ends the run."""
    seen: list[dict[str, Any]] = []
    assert pretrain(TOY, store, tmp_path / "run", on_record=seen.append) is None
    assert seen == read_journal(tmp_path / "run" / "journal.jsonl")
    assert {"start", "step", "end"} <= {record["kind"] for record in seen}
    assert weights(tmp_path / "run") == weights(finished)

    def fail(record: dict[str, Any]) -> None:
        if record["kind"] == "step":
            raise KeyError(record["loss"])

    other = replace(TOY, training=replace(TOY.training, seed=1))
    with pytest.raises(KeyError) as raised:
        pretrain(other, store, tmp_path / "other", on_record=fail)
    assert raised.value.args[0] not in [r["loss"] for r in seen if r["kind"] == "step"]


def test_finished_run_is_left_alone(finished: Path, store: TokenStore) -> None:
    before = (finished / "journal.jsonl").read_bytes()
    assert pretrain(TOY, store, finished) is None
    assert (finished / "journal.jsonl").read_bytes() == before


def stop_after(updates: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGTERM) -> None:
    """Send later runs of the test a signal after every so many updates."""

    def interrupted(*arguments: Any, **options: Any) -> Iterator[Any]:
        for record in train_steps(*arguments, **options):
            if record.step % updates == 0:
                signal.raise_signal(number)
            yield record

    monkeypatch.setattr(module, "train_steps", interrupted)


def evaluations(run: Path) -> list[dict[str, Any]]:
    records = [r for r in read_journal(run / "journal.jsonl") if r["kind"] == "evaluation"]
    return [{n: v for n, v in record.items() if n != "time"} for record in records]


@pytest.mark.slow
def test_signal_saves_and_the_run_resumes_exactly(
    finished: Path, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = signal.SIGINT
    stop_after(17, monkeypatch, number)
    assert pretrain(TOY, store, tmp_path) == number
    records = read_journal(tmp_path / "journal.jsonl")
    assert records[-1]["reason"] == "interrupted"
    assert records[-1]["step"] == 17, "saved right after the update in which the signal came"
    monkeypatch.undo()
    assert pretrain(TOY, store, tmp_path) is None
    assert weights(tmp_path) == weights(finished)


OTHER_OBJECTIVES = {
    "no-nsp": (Objectives(pair="none"), {}),
    "albert": (Objectives(pair="sop"), {"embedding_size": 16, "share_layers": True}),
    "left-to-right": (Objectives(token="clm", pair="none"), {}),
    "electra": (
        Objectives(token="rtd", pair="single-segment", generator_share=0.5),
        {"embedding_size": 24},
    ),
    "muon": (Objectives(), {}),
}
"""Name -> objectives, and fields of the model."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "left-to-right" else pytest.mark.slow)
        for name in OTHER_OBJECTIVES
    ],
)
def test_other_objectives_train_resume_and_end_in_a_model(
    name: str, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted, sizes = OTHER_OBJECTIVES[name]
    recipe = replace(
        TOY,
        objectives=wanted,
        model=replace(TOY.model, **sizes),
        training=replace(TOY.training, optimizer="muon" if name == "muon" else "adamw"),
        phases=replace(TOY.phases, steps=(8, 2)),
        logging=replace(TOY.logging, evaluate_every=8),
    )
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert pretrain(recipe, store, whole) is None

    stop_after(7, monkeypatch)  # between two checkpoints, and before the evaluation
    assert pretrain(recipe, store, stopped) == signal.SIGTERM
    monkeypatch.undo()
    assert pretrain(recipe, store, stopped) is None
    assert weights(stopped) == weights(whole)

    first, last = evaluations(whole)
    assert evaluations(stopped) == [first, last], "the same held-out numbers after a stop"
    words = "lm" if wanted.direction != "bidirectional" else "mlm"
    losses = {f"{words}_loss"} | ({f"{wanted.pair}_loss"} if wanted.has_pairs else set())
    losses |= {"rtd_loss"} if wanted.token == "rtd" else set()
    assert {n for n in last if n.endswith("_loss")} == losses
    assert last[f"{words}_perplexity"] == pytest.approx(math.exp(last[f"{words}_loss"]))
    assert last[f"{words}_loss"] < math.log(store.tokenizer.size) + 0.2

    start = read_pretrained(whole)
    reads_as = "gelu" if wanted.token == "rtd" else "tanh"  # what tasks read from ELECTRA
    assert start.config == replace(recipe.config(store.tokenizer.size), pooler_act=reads_as)
    assert start.details["steps"] == 10
    if wanted.token == "rtd":
        generator = load_pretraining_model(whole / "generator").encoder
        discriminator = load_model(whole / "model", Encoder).model
        shared = generator.word_embeddings.weight, discriminator.word_embeddings.weight
        assert torch.equal(*shared)
        assert (stopped / "generator" / "model.safetensors").read_bytes() == (
            whole / "generator" / "model.safetensors"
        ).read_bytes()
    else:
        model = load_pretraining_model(whole / "model")
        assert (model.nsp is not None) == wanted.has_pairs


@pytest.mark.slow
def test_held_out_draws_are_the_same_at_every_evaluation(store: TokenStore, tmp_path: Path) -> None:
    """ELECTRA's generator draws; runs and evaluations can be compared all the same."""
    recipe = replace(
        TOY,
        objectives=OTHER_OBJECTIVES["electra"][0],
        training=replace(TOY.training, learning_rate=1e-12, warmup_steps=1),
        phases=Phases(lengths=(32,), steps=(4,), batch_sizes=(8,), max_predictions=(5,)),
        logging=replace(TOY.logging, evaluate_every=2),
    )
    pretrain(recipe, store, tmp_path)
    records = read_journal(tmp_path / "journal.jsonl")
    first, last = (record for record in records if record["kind"] == "evaluation")
    assert first["rtd_share"] == last["rtd_share"]
    assert first["rtd_loss"] == pytest.approx(last["rtd_loss"], rel=1e-6)


@pytest.mark.slow
def test_damaged_checkpoint_is_named_and_the_one_before_is_used(
    finished: Path, store: TokenStore, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "copy"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "model")
    damaged = run / "checkpoints" / "step-00000040" / "model.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-5] ^= 4
    damaged.write_bytes(content)
    assert pretrain(TOY, store, run) is None
    shown = capfd.readouterr()
    assert "step-00000040" in shown.err
    assert "resuming from" in shown.err
    assert weights(run) == weights(finished)


@pytest.mark.slow
def test_resuming_in_another_precision_is_reported(
    store: TokenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A run with precision auto that moves to a processor with other instructions."""
    able = {"avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    recipe = replace(SHORT, training=replace(TOY.training, precision="auto"))
    assert pretrain(recipe, store, tmp_path / "run") is None
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000018")
    able.clear()
    assert pretrain(recipe, store, tmp_path / "run") is None
    journal = read_journal(tmp_path / "run" / "journal.jsonl")
    assert [r["precision"] for r in journal if r["kind"] == "start"] == ["bf16", "fp32"]
    notes = [r["message"] for r in journal if r["kind"] == "note"]
    assert "resumed with changes: precision of an update bf16 -> fp32" in notes


def test_other_recipe_in_the_same_folder_is_refused(finished: Path, store: TokenStore) -> None:
    other = replace(TOY, training=replace(TOY.training, learning_rate=5e-4))
    with pytest.raises(BertkitError, match=r"other settings \(recipe\.training\.learning_rate"):
        pretrain(other, store, finished)


def test_the_record_of_an_earlier_version_may_lack_fields(
    finished: Path, store: TokenStore, tmp_path: Path
) -> None:
    shutil.copytree(finished, tmp_path / "run")
    path = tmp_path / "run" / "recipe.json"
    record = json.loads(path.read_text())
    del record["recipe"]["masking"]["whole_words"], record["recipe"]["logging"]["log_every"]
    path.write_text(json.dumps(record))
    whole = replace(TOY, masking=replace(TOY.masking, whole_words=True))
    with pytest.raises(BertkitError, match=r"recipe\.masking\.whole_words None -> True"):
        pretrain(whole, store, tmp_path / "run")
    assert pretrain(TOY, store, tmp_path / "run") is None
    assert weights(tmp_path / "run") == weights(finished)


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """The finished run as if it had been killed after its last checkpoint but one."""
    run = tmp_path / "stopped"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "step-00000040")
    return run


def test_a_batch_of_a_later_phase_that_is_too_small_is_refused_at_once(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "micro_batches", lambda ranks, wanted: 5)  # as of five processes
    with pytest.raises(BertkitError, match="a batch of 4 sequences cannot be cut into 5"):
        pretrain(TOY, store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_other_store_in_the_same_folder_is_refused(
    finished: Path, store: TokenStore, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("river stone.\nbridge.\n\nlantern harvest.\nwinter.\n")
    other = prepare([str(tmp_path / "text.txt")], store.tokenizer, tmp_path / "s", held_out=0)
    with pytest.raises(BertkitError, match=r"other settings \(corpus"):
        pretrain(TOY, other, finished)


@pytest.mark.slow
def test_corpus_without_held_out_documents_trains_with_a_note(
    store: TokenStore, tmp_path: Path
) -> None:
    text = str(store.folder.parent / "corpus.txt")
    other = prepare([text], store.tokenizer, tmp_path / "s", held_out=0)
    pretrain(SHORT, other, tmp_path / "run")
    records = read_journal(tmp_path / "run" / "journal.jsonl")
    assert not [record for record in records if record["kind"] == "evaluation"]
    notes = [record["message"] for record in records if record["kind"] == "note"]
    assert any("nothing is evaluated" in note for note in notes)


@pytest.mark.slow
def test_divergence_stops_the_run_and_keeps_the_last_checkpoint(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = heads.pretraining_objective
    calls = []

    def broken(model: Any, batch: Any, **names: str) -> Sums:
        sums = real(model, batch, **names)
        calls.append(1)
        if model.training and len(calls) > 20:
            loss = sums["mlm_loss"]
            sums["mlm_loss"] = loss._replace(value=loss.value * float("nan"))
        return sums

    monkeypatch.setattr(heads, "pretraining_objective", broken)
    with pytest.raises(BertkitError, match="training has diverged"):
        pretrain(SHORT, store, tmp_path, save_models_at=range(1, SHORT.phases.total_steps))
    written = sorted((tmp_path / "models").iterdir())
    weights = load_file(written[-1] / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values()), "no model without numbers"
    (kept, *_) = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)
    assert int(kept.name.removeprefix("step-")) <= 10
    monkeypatch.undo()
    assert pretrain(SHORT, store, tmp_path) is None


def test_damaged_shard_stops_the_run_before_it_learns_nonsense(
    store: TokenStore, tmp_path: Path
) -> None:
    copy = tmp_path / "store"
    shutil.copytree(store.folder, copy)
    (shard,) = copy.glob("train-*.tokens.npy")
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    with pytest.raises(BertkitError, match="is corrupt"):
        pretrain(TOY, TokenStore(copy), tmp_path / "run")


@pytest.mark.slow
def test_full_disk_keeps_what_was_saved(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bertkit.checkpoints import save as files

    real = files.save_file
    calls = []

    def full(*arguments: object, **options: object) -> None:
        calls.append(1)
        if len(calls) > 4:
            raise OSError(28, "No space left on device")
        real(*arguments, **options)

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(BertkitError, match="the disk is full"):
        pretrain(SHORT, store, tmp_path)
    monkeypatch.undo()
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("step-*"))] == [
        "step-00000006",
        "step-00000012",
    ]
    assert pretrain(SHORT, store, tmp_path) is None


def journal_steps(run: Path) -> list[dict[str, object]]:
    return [r for r in read_journal(run / "journal.jsonl") if r["kind"] == "step"]


@pytest.mark.slow
def test_every_update_is_logged_even_where_a_phase_ends(store: TokenStore, tmp_path: Path) -> None:
    odd = replace(SHORT, logging=replace(TOY.logging, evaluate_every=5, checkpoint_every=11))
    pretrain(odd, store, tmp_path)
    steps = journal_steps(tmp_path)
    assert sum(record["sequences"] for record in steps) == 14 * 8 + 4 * 4
    assert 14 in [record["step"] for record in steps]


@pytest.mark.slow
@pytest.mark.parametrize("when", ["before", "during", "at the end"])
def test_a_signal_waits_for_no_evaluation_and_no_model(
    finished: Path, store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Only a checkpoint is written; what was due is made up for when the run resumes."""
    last = 40 if when == "at the end" else 10
    real = HeldOut.batches

    def interrupted(held_out: HeldOut, *arguments: Any) -> Iterator[Any]:
        for batch in real(held_out, *arguments):
            signal.raise_signal(signal.SIGTERM)
            yield batch

    if when == "during":
        monkeypatch.setattr(HeldOut, "batches", interrupted)
    else:
        stop_after(last, monkeypatch)
    assert pretrain(TOY, store, tmp_path) == signal.SIGTERM
    (*_, latest) = sorted((tmp_path / "checkpoints").iterdir())
    assert latest.name == f"step-{last:08d}"
    assert len(evaluations(tmp_path)) == last // 10 - 1
    assert not (tmp_path / "model").exists()
    monkeypatch.undo()
    assert pretrain(TOY, store, tmp_path) is None
    assert evaluations(tmp_path) == evaluations(finished)
    assert weights(tmp_path) == weights(finished)


@pytest.mark.slow
def test_progress_is_shown_by_time_and_says_what_cut_the_text(
    store: TokenStore, tmp_path: Path
) -> None:
    recipe = replace(TOY, logging=replace(TOY.logging, log_every=1000, checkpoint_every=1000))
    recipe = replace(recipe, phases=replace(TOY.phases, steps=(8, 1)))
    shown = StringIO()
    with Console(interval=0.0, stream=shown) as console:
        pretrain(recipe, store, tmp_path, console=console)
    lines = shown.getvalue().splitlines()
    assert any(line.startswith("training: 3 of 9 steps") and "loss" in line for line in lines)
    (cut,) = [line for line in lines if "of tokens cut" in line]
    assert "at most 32 tokens" in cut
    assert [record["step"] for record in journal_steps(tmp_path)] == [8, 9]


@pytest.mark.slow
def test_minutes_decide_the_updates_once(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop_after(3, monkeypatch)
    for folder in (tmp_path / "begun", tmp_path / "begun"):
        assert pretrain(TOY, store, folder, minutes=0.3) == signal.SIGTERM
        record = (folder / "recipe.json").read_bytes()
    recorded = json.loads(record)["recipe"]
    first, second = recorded["phases"]["steps"]
    assert abs(first - 3 * second) <= 3, "in proportion, but for rounding"
    warmup = recorded["training"]["warmup_steps"]
    assert abs(warmup - (first + second) * 5 / 40) <= 1
    for minutes in (None, 0.5):
        with pytest.raises(BertkitError, match="other settings"):
            pretrain(TOY, store, tmp_path / "begun", minutes=minutes)
    assert (tmp_path / "begun" / "recipe.json").read_bytes() == record
    same = replace(
        TOY,
        phases=replace(TOY.phases, steps=(first, second)),
        training=replace(TOY.training, warmup_steps=warmup),
    )
    for _ in range(2):
        assert pretrain(same, store, tmp_path / "same") == signal.SIGTERM
    for name in ("model.safetensors", "optimizer.safetensors"):
        one, other = (
            (tmp_path / run / "checkpoints" / "step-00000006" / name).read_bytes()
            for run in ("begun", "same")
        )
        assert one == other
    with pytest.raises(BertkitError, match="too short"):
        pretrain(TOY, store, tmp_path / "short", minutes=1e-4)


def test_more_minutes_are_named_than_were_too_few(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "measure_updates", lambda *_, **__: ([(30.0, 0.001)] * 2, 61.0))
    stop_after(1, monkeypatch)
    with pytest.raises(BertkitError, match="give --minutes 3 or more"):
        pretrain(TOY, store, tmp_path, minutes=2)
    assert pretrain(TOY, store, tmp_path, minutes=3) == signal.SIGTERM


@pytest.mark.parametrize("copied", [True, False])
def test_positions_of_a_longer_phase_begin_as_copies(
    store: TokenStore, tmp_path: Path, copied: bool
) -> None:
    phases = replace(TOY.phases, steps=(2, 1))
    recipe = replace(
        TOY,
        phases=phases if copied else replace(phases, copy_positions=False),
        training=replace(TOY.training, learning_rate=1e-9, warmup_steps=0),
    )
    pretrain(recipe, store, tmp_path)
    rows = load_pretraining_model(tmp_path / "model").encoder.position_embeddings.weight
    copies = torch.cat([rows[1:32], rows[1:2]])  # position 0 is that of [CLS] alone
    assert torch.allclose(rows[32:], copies, atol=1e-6) == copied


def test_two_processes_cannot_share_a_folder(store: TokenStore, tmp_path: Path) -> None:
    with exclusive_lock(tmp_path), pytest.raises(BertkitError, match="another process is working"):
        pretrain(TOY, store, tmp_path)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", -1.0),
        ("learning_rate", float("nan")),
        ("max_gradient_norm", -1.0),
        ("max_gradient_norm", float("inf")),
        ("weight_decay", -0.1),
        ("accumulate", 0),
        ("seed", -1),
    ],
)
def test_impossible_training_fields_are_refused(field: str, value: float) -> None:
    with pytest.raises(BertkitError, match=rf"training\.{field} must be"):
        Training(**{field: value})
