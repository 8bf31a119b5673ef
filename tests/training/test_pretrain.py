from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bertkit.planning.plan import CorpusSize, plan
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForPreTraining

from bertkit import objectives
from bertkit.checkpoints.card import CARD
from bertkit.checkpoints.pretrained import load_model, load_pretraining_model, read_pretrained
from bertkit.corpus import store as store_module
from bertkit.corpus.prepare import prepare
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import exclusive_lock
from bertkit.model.encoder import Encoder
from bertkit.objectives import Sums
from bertkit.pretraining_data import sampler as table_module
from bertkit.report.pretraining import write_report
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training import pretrain as module
from bertkit.training.checkpoint import CheckpointWriter
from bertkit.training.distributed import Ranks
from bertkit.training.journal import read_journal
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import Logging, ModelSize, Objectives, Phases, PretrainRecipe, Training
from tests.markdown import blocks

TOY = PretrainRecipe(
    model=ModelSize(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    ),
    phases=Phases(lengths=(32, 64), steps=(30, 10), batch_sizes=(8, 4), max_predictions=(5, 9)),
    training=Training(learning_rate=1e-3, warmup_steps=5, accumulate=2),
    logging=Logging(log_every=4, evaluate_every=10, held_out_sequences=16, checkpoint_every=6),
)

TOY_TOML = """
[model]
hidden_size = 32
num_hidden_layers = 2
num_attention_heads = 2
max_position_embeddings = 64
[phases]
lengths = [32, 64]
steps = [300, 40]
batch_sizes = [8, 4]
max_predictions = [5, 9]
[training]
learning_rate = 1e-3
warmup_steps = 5
accumulate = 2
[logging]
log_every = 10
evaluate_every = 100
held_out_sequences = 16
checkpoint_every = 15
"""


def weights(run: Path) -> str:
    return hashlib.sha256((run / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def finished(store: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "toy"
    assert pretrain(TOY, store, run) is None
    return run


def test_a_recipe_may_be_a_path(store: TokenStore, tmp_path: Path) -> None:
    recipe = tmp_path / "own.v2.toml"
    recipe.write_text(TOY_TOML.replace("[300, 40]", "[2, 1]").replace("steps = 5", "steps = 1"))
    assert pretrain(recipe, store, tmp_path / "run") is None
    assert json.loads((tmp_path / "run" / "recipe.json").read_text())["recipe_name"] == "own.v2"
    planned = plan(recipe, CorpusSize(tokens=1_000_000), machine="a100-80")
    assert [phase.steps for phase in planned.phases] == [2, 1]


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


def test_model_directory_loads_in_transformers(finished: Path) -> None:
    theirs = AutoModelForPreTraining.from_pretrained(finished / "model").eval()
    ours = load_pretraining_model(finished / "model")
    tokenizer = Tokenizer.load(finished / "model")
    ids = [tokenizer.cls_id, *tokenizer.encode("river stone bridge").ids, tokenizer.sep_id]
    from bertkit.pretraining_data.batch import pack

    with torch.no_grad():
        expected = theirs(torch.tensor([ids])).prediction_logits[0]
        found = ours(pack([ids]), torch.arange(len(ids))).mlm_logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_same_recipe_gives_the_same_weights(
    finished: Path, store: TokenStore, tmp_path: Path
) -> None:
    pretrain(TOY, store, tmp_path)
    assert weights(tmp_path) == weights(finished)
    other = replace(TOY, training=replace(TOY.training, seed=1))
    pretrain(other, store, tmp_path / "other")
    assert weights(tmp_path / "other") != weights(finished)


@pytest.mark.slow
def test_records_reach_a_function_of_the_caller(
    finished: Path, store: TokenStore, tmp_path: Path
) -> None:
    """Each one of the journal, and the weights are those without it; its error ends the run."""
    seen: list[dict[str, Any]] = []
    assert pretrain(TOY, store, tmp_path / "run", on_record=seen.append) is None
    assert seen == read_journal(tmp_path / "run" / "journal.jsonl")
    assert {"start", "step", "end"} <= {record["kind"] for record in seen}
    assert weights(tmp_path / "run") == weights(finished)

    def fail(record: dict[str, Any]) -> None:
        if record["kind"] == "step":
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        pretrain(TOY, store, tmp_path / "other", on_record=fail)
    assert pretrain(TOY, store, tmp_path / "other") is None
    assert weights(tmp_path / "other") == weights(finished)


def test_finished_run_is_left_alone(finished: Path, store: TokenStore) -> None:
    before = (finished / "journal.jsonl").read_bytes()
    assert pretrain(TOY, store, finished) is None
    assert (finished / "journal.jsonl").read_bytes() == before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_signal_saves_and_the_run_resumes_exactly(
    finished: Path, store: TokenStore, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = signal.Signals[name]
    if signal.getsignal(number) == signal.SIG_IGN:
        pytest.skip("the tests run under nohup, so the run ignores SIGHUP, too")
    real, calls = module.train_steps, []

    def interrupted(*arguments: object, **options: object) -> object:
        for record in real(*arguments, **options):
            calls.append(record)
            if len(calls) == 17:
                signal.raise_signal(number)
            yield record

    monkeypatch.setattr(module, "train_steps", interrupted)
    assert pretrain(TOY, store, tmp_path) == number
    records = read_journal(tmp_path / "journal.jsonl")
    assert records[-1]["reason"] == "interrupted"
    assert records[-1]["step"] == 17, "saved right after the update in which the signal came"
    assert (tmp_path / "model" / "config.json").exists()
    monkeypatch.undo()
    assert pretrain(TOY, store, tmp_path) is None
    assert weights(tmp_path) == weights(finished)


def test_new_positions_of_a_phase_begin_as_copies(store: TokenStore, tmp_path: Path) -> None:
    """Also if the run is stopped between the phases, before they are copied."""
    recipe = replace(TOY, phases=replace(TOY.phases, copy_positions=True))
    found: dict[int, torch.Tensor] = {}

    def stop_between(record: dict[str, Any]) -> None:
        if record["kind"] == "step" and record["step"] == 30:
            signal.raise_signal(signal.SIGTERM)

    assert pretrain(recipe, store, tmp_path / "a", save_models_at=(30, 31)) is None
    for step in (30, 31):
        folder = tmp_path / "a" / "models" / f"step-{step:08d}"
        found[step] = load_pretraining_model(folder).encoder.position_embeddings.weight
    assert not torch.allclose(found[30][32:64], found[30][:32], atol=0.01)
    assert torch.allclose(found[31][32:64], found[31][:32], atol=0.01)  # after one update
    assert pretrain(recipe, store, tmp_path / "b", on_record=stop_between) == signal.SIGTERM
    assert pretrain(recipe, store, tmp_path / "b") is None
    assert weights(tmp_path / "a") == weights(tmp_path / "b")
    with pytest.raises(BertkitError, match="does not work with --strategy fsdp"):
        pretrain(recipe, store, tmp_path / "c", strategy="fsdp")
    shorter = replace(TOY.phases, lengths=(32, 16), steps=(2, 2), copy_positions=True)
    recipe = replace(TOY, phases=shorter, training=replace(TOY.training, warmup_steps=1))
    assert pretrain(recipe, store, tmp_path / "d") is None, "no position is new"


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
        phases=Phases(lengths=(32, 64), steps=(12, 4), batch_sizes=(8, 4), max_predictions=(5, 9)),
        logging=replace(TOY.logging, evaluate_every=8),
    )
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert pretrain(recipe, store, whole) is None

    real, calls = module.train_steps, []

    def interrupted(*arguments: object, **options: object) -> object:
        for record in real(*arguments, **options):
            calls.append(record)
            if len(calls) == 7:  # between two checkpoints, and before the evaluation
                signal.raise_signal(signal.SIGTERM)
            yield record

    monkeypatch.setattr(module, "train_steps", interrupted)
    assert pretrain(recipe, store, stopped) == signal.SIGTERM
    monkeypatch.undo()
    assert pretrain(recipe, store, stopped) is None
    assert weights(stopped) == weights(whole)

    def evaluations(run: Path) -> list[dict[str, Any]]:
        found = [r for r in read_journal(run / "journal.jsonl") if r["kind"] == "evaluation"]
        return [{n: v for n, v in record.items() if n != "time"} for record in found]

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
    assert start.details["steps"] == 16
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


def test_resuming_in_another_precision_is_reported(
    store: TokenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A run with precision auto that moves to a processor with other instructions."""
    able = {"avx512_bf16": True}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: able)
    training = replace(TOY.training, precision="auto")
    recipe = replace(TOY, training=training)
    assert pretrain(recipe, store, tmp_path / "run") is None
    shutil.rmtree(tmp_path / "run" / "model")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000040")
    able.clear()
    assert pretrain(recipe, store, tmp_path / "run") is None
    journal = read_journal(tmp_path / "run" / "journal.jsonl")
    assert [r["precision"] for r in journal if r["kind"] == "start"] == ["bf16", "fp32"]
    notes = [r["message"] for r in journal if r["kind"] == "note"]
    assert "resumed with changes: precision of an update bf16 -> fp32" in notes


def test_a_processor_without_bf16_is_told_of(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)
    recipe = replace(TOY, training=replace(TOY.training, precision="bf16"))
    assert pretrain(recipe, store, tmp_path / "run") is None
    notes = [
        r["message"]
        for r in read_journal(tmp_path / "run" / "journal.jsonl")
        if r["kind"] == "note"
    ]
    assert any("no instructions for bf16" in note for note in notes)


def test_other_recipe_in_the_same_folder_is_refused(finished: Path, store: TokenStore) -> None:
    other = replace(TOY, training=replace(TOY.training, learning_rate=5e-4))
    with pytest.raises(BertkitError, match=r"other settings \(recipe\.training\.learning_rate"):
        pretrain(other, store, finished)


@pytest.fixture
def stopped(finished: Path, tmp_path: Path) -> Path:
    """The finished run as if it had been killed after its last checkpoint but one."""
    run = tmp_path / "stopped"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "model")
    shutil.rmtree(run / "checkpoints" / "step-00000040")
    return run


def test_a_model_without_its_checkpoints_is_never_overwritten(
    finished: Path, store: TokenStore, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints")
    journal = (run / "journal.jsonl").read_bytes()
    assert pretrain(TOY, store, run) is None
    details = json.loads((run / "model" / "bertkit.json").read_text())
    (run / "model" / "bertkit.json").write_text(json.dumps(details | {"steps": 30}))
    with pytest.raises(BertkitError, match="no checkpoint to resume from"):
        pretrain(TOY, store, run)
    assert weights(run) == weights(finished)
    assert (run / "journal.jsonl").read_bytes() == journal
    (run / "model" / "bertkit.json").write_text("[]")
    with pytest.raises(BertkitError, match=r"bertkit\.json does not hold a JSON object"):
        pretrain(TOY, store, run)


def test_a_batch_of_a_later_phase_that_is_too_small_is_refused_at_once(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "micro_batches", lambda ranks, wanted: 5)  # as of five processes
    with pytest.raises(BertkitError, match="a batch of 4 sequences cannot be cut into 5"):
        pretrain(TOY, store, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_card_of_a_resumed_run_has_the_same_bytes(
    finished: Path, stopped: Path, store: TokenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says what the journal and the store say, and its code for bertkit runs."""
    card = finished / "model" / CARD
    assert pretrain(TOY, store, stopped) is None
    assert (stopped / "model" / CARD).read_bytes() == card.read_bytes()
    data = ModelCard.load(card).data
    assert data.pipeline_tag == "fill-mask"
    *_, last = [r for r in read_journal(finished / "journal.jsonl") if r["kind"] == "evaluation"]
    found = {result.metric_name: result.metric_value for result in data.eval_results}
    assert found["mlm accuracy"] == last["mlm_accuracy"]
    assert f"{store.documents:,} documents" in card.read_text()
    assert str(store.folder) not in card.read_text()
    monkeypatch.chdir(finished / "model")
    exec(blocks(card.read_text(), "python")[0], {})


def test_an_edited_card_outlives_the_rest_of_a_run(stopped: Path, store: TokenStore) -> None:
    assert pretrain(TOY, store, stopped) is None
    card = stopped / "model" / CARD
    generated = card.read_text()
    card.write_text("# Mine\n")
    (stopped / "model" / "model.safetensors").unlink()
    assert pretrain(TOY, store, stopped) is None
    assert card.read_text() == "# Mine\n"
    card.unlink()
    assert pretrain(TOY, store, stopped) is None
    assert card.read_text() == generated


def change_recipe(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    settings = json.loads((run / "recipe.json").read_text())
    change(settings["recipe"])
    (run / "recipe.json").write_text(json.dumps(settings))


def test_a_run_of_a_version_without_some_field_resumes(
    finished: Path, stopped: Path, store: TokenStore
) -> None:
    """A field that a later version added has its default in the runs of before."""
    change_recipe(stopped, lambda recipe: (recipe.pop("masking"), recipe["model"].pop("dropout")))
    assert pretrain(TOY, store, stopped) is None
    assert weights(stopped) == weights(finished)
    change_recipe(stopped, lambda recipe: recipe["training"].pop("accumulate"))  # TOY has 2
    with pytest.raises(BertkitError, match=r"other settings \(recipe\.training\.accumulate 1 -> 2"):
        pretrain(TOY, store, stopped)


@pytest.mark.slow
def test_how_a_run_is_watched_may_change(finished: Path, stopped: Path, store: TokenStore) -> None:
    closer = replace(TOY, logging=replace(TOY.logging, log_every=1, checkpoint_every=2))
    assert pretrain(closer, store, stopped) is None
    assert weights(stopped) == weights(finished)
    journal = read_journal(stopped / "journal.jsonl")
    steps = [record["step"] for record in journal if record["kind"] == "step"]
    assert steps[-5:] == [36, 37, 38, 39, 40]
    notes = [record["message"] for record in journal if record["kind"] == "note"]
    assert (
        "resumed with changes: logging.checkpoint_every 6 -> 2; logging.log_every 4 -> 1" in notes
    )
    watched = json.loads((stopped / "recipe.json").read_text())["recipe"]["logging"]
    assert (watched["log_every"], watched["checkpoint_every"]) == (1, 2)


def test_a_run_that_was_killed_in_its_last_removal_leaves_nothing(
    finished: Path, store: TokenStore, tmp_path: Path
) -> None:
    """There is no other save that would clean up."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "model")
    shutil.copytree(
        run / "checkpoints" / "step-00000036", run / "checkpoints" / ".step-00000030.tmp-removed"
    )
    assert pretrain(TOY, store, run) is None
    assert weights(run) == weights(finished)
    left = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert left == ["step-00000036", "step-00000040"]


def test_held_out_documents_are_verified_and_planned_once_a_phase(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified, planned = Counter[str](), Counter[str]()
    check, plan = store_module.check_shard, table_module.plan_block

    def counted_check(folder: Path, shard: Any, *, checksums: bool = True) -> None:
        verified[shard.name] += checksums
        check(folder, shard, checksums=checksums)

    def counted_plan(store: TokenStore, *arguments: Any) -> Any:
        planned[store.split] += 1
        return plan(store, *arguments)

    monkeypatch.setattr(store_module, "check_shard", counted_check)
    monkeypatch.setattr(table_module, "plan_block", counted_plan)
    often = replace(TOY, logging=replace(TOY.logging, evaluate_every=4))
    assert pretrain(often, store, tmp_path) is None
    assert planned["held_out"] == 2, "once for each phase"
    held_out = {name: count for name, count in verified.items() if name.startswith("held_out")}
    assert held_out
    assert set(held_out.values()) == {1}


def test_other_store_in_the_same_folder_is_refused(
    finished: Path, store: TokenStore, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("river stone.\nbridge.\n\nlantern harvest.\nwinter.\n")
    other = prepare([str(tmp_path / "text.txt")], store.tokenizer, tmp_path / "s", held_out=0)
    with pytest.raises(BertkitError, match=r"other settings \(corpus"):
        pretrain(TOY, other, finished)


def test_corpus_without_held_out_documents_trains_with_a_note(
    store: TokenStore, tmp_path: Path
) -> None:
    text = str(store.folder.parent / "corpus.txt")
    other = prepare([text], store.tokenizer, tmp_path / "s", held_out=0)
    pretrain(TOY, other, tmp_path / "run")
    records = read_journal(tmp_path / "run" / "journal.jsonl")
    assert not [record for record in records if record["kind"] == "evaluation"]
    notes = [record["message"] for record in records if record["kind"] == "note"]
    assert any("nothing is evaluated" in note for note in notes)


def test_divergence_stops_the_run_and_keeps_the_last_checkpoint(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = objectives.pretraining_objective
    calls = []

    def broken(model: Any, batch: Any, **names: str) -> Sums:
        sums = real(model, batch, **names)
        calls.append(1)
        if model.training and len(calls) > 40:
            loss = sums["mlm_loss"]
            sums["mlm_loss"] = loss._replace(value=loss.value * float("nan"))
        return sums

    monkeypatch.setattr(objectives, "pretraining_objective", broken)
    with pytest.raises(BertkitError, match="training has diverged"):
        pretrain(TOY, store, tmp_path, save_models_at=range(1, TOY.phases.total_steps))
    written = sorted((tmp_path / "models").iterdir())
    weights = load_file(written[-1] / "model.safetensors")
    assert all(tensor.isfinite().all() for tensor in weights.values()), "no model without numbers"
    (kept, *_) = sorted((tmp_path / "checkpoints").iterdir(), reverse=True)
    assert int(kept.name.removeprefix("step-")) <= 20
    monkeypatch.undo()
    assert pretrain(TOY, store, tmp_path) is None


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


def test_full_disk_keeps_what_was_saved(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from bertkit.checkpoints import weights as files

    real = files.save_file
    calls = []

    def full(*arguments: object, **options: object) -> None:
        calls.append(1)
        if len(calls) > 4:
            raise OSError(28, "No space left on device")
        real(*arguments, **options)

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(BertkitError, match="the disk is full"):
        pretrain(TOY, store, tmp_path)
    monkeypatch.undo()
    assert [path.name for path in sorted((tmp_path / "checkpoints").glob("step-*"))] == [
        "step-00000006",
        "step-00000012",
    ]
    assert pretrain(TOY, store, tmp_path) is None


def journal_steps(run: Path) -> list[dict[str, object]]:
    return [r for r in read_journal(run / "journal.jsonl") if r["kind"] == "step"]


def test_every_update_is_logged_even_where_a_phase_ends(store: TokenStore, tmp_path: Path) -> None:
    odd = replace(TOY, logging=replace(TOY.logging, evaluate_every=7, checkpoint_every=11))
    pretrain(odd, store, tmp_path)
    steps = journal_steps(tmp_path)
    assert sum(record["sequences"] for record in steps) == 30 * 8 + 10 * 4
    assert 30 in [record["step"] for record in steps]


@pytest.mark.parametrize("part", ["directory", "objective"])
def test_death_between_checkpoint_and_model_is_mended(
    finished: Path, store: TokenStore, tmp_path: Path, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stale or missing model/ is not taken for the finished one."""

    def die(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    if part == "directory":
        monkeypatch.setattr("bertkit.checkpoints.save.save_model", die)
        with pytest.raises(KeyboardInterrupt):
            pretrain(TOY, store, tmp_path)
        monkeypatch.undo()
    else:
        shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
        details = tmp_path / "model" / "bertkit.json"
        details.write_text(details.read_text().replace('"steps": 40', '"steps": 17'))
        (tmp_path / "model" / "model.safetensors").write_bytes(b"stale")
    assert pretrain(TOY, store, tmp_path) is None
    assert weights(tmp_path) == weights(finished)


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "tokenizer.json", "bertkit.json"]
)
def test_a_damaged_model_of_a_finished_run_is_written_again(
    finished: Path, store: TokenStore, tmp_path: Path, name: str
) -> None:
    shutil.copytree(finished, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model" / name
    whole = file.read_bytes()
    file.write_bytes(whole[:100])
    assert pretrain(TOY, store, tmp_path) is None
    assert file.read_bytes() == whole


def test_signal_during_evaluation_still_saves(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.evaluate_batches

    def interrupted(*arguments: object, **options: object) -> object:
        signal.raise_signal(signal.SIGTERM)
        return real(*arguments, **options)

    monkeypatch.setattr(module, "evaluate_batches", interrupted)
    assert pretrain(TOY, store, tmp_path) == signal.SIGTERM
    (*_, latest) = sorted((tmp_path / "checkpoints").iterdir())
    assert latest.name == "step-00000010"


def test_signal_before_the_first_update_leaves_no_model(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = module.start_record

    def interrupted(*arguments: object) -> object:
        signal.raise_signal(signal.SIGINT)
        return real(*arguments)

    monkeypatch.setattr(module, "start_record", interrupted)
    assert pretrain(TOY, store, tmp_path) == signal.SIGINT
    assert not (tmp_path / "model").exists()


def test_two_processes_cannot_share_a_folder(store: TokenStore, tmp_path: Path) -> None:
    with exclusive_lock(tmp_path), pytest.raises(BertkitError, match="another process is working"):
        pretrain(TOY, store, tmp_path)


def test_mistake_does_not_claim_the_folder(store: TokenStore, tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match="hidden_size 33"):
        replace(TOY, model=replace(TOY.model, hidden_size=33))
    huge = replace(TOY, model=replace(TOY.model, hidden_size=40_000_000))
    with pytest.raises(BertkitError, match=r"needs about .* GiB to train, and cpu has"):
        pretrain(huge, store, tmp_path)
    assert not (tmp_path / "recipe.json").exists()


@pytest.mark.parametrize("step", [0, 41])
def test_a_model_of_an_update_that_is_never_made_is_refused(
    store: TokenStore, tmp_path: Path, step: int
) -> None:
    with pytest.raises(BertkitError, match=f"save_models_at has {step}, .* updates 1 to 40"):
        pretrain(TOY, store, tmp_path / "run", save_models_at=[20, step])
    assert not (tmp_path / "run").exists()


def test_a_model_before_the_first_evaluation_says_so_and_checkpoints_follow_the_journal(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[object] = []
    fsync, save = os.fsync, CheckpointWriter.save_async

    def noted_fsync(descriptor: int) -> None:
        events.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def noted_save(*arguments: Any) -> None:
        events.append("save")
        save(*arguments)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(CheckpointWriter, "save_async", noted_save)
    recipe = replace(TOY, training=replace(TOY.training, warmup_steps=1))
    recipe = replace(recipe, phases=replace(TOY.phases, steps=(2, 1)))
    assert pretrain(recipe, store, tmp_path, save_models_at=[1]) is None
    journal = (tmp_path / "journal.jsonl").stat().st_ino
    assert events[events.index("save") - 1] == journal, "on the disk before the checkpoint"
    early, late = (
        (tmp_path / name / CARD).read_text() for name in ("models/step-00000001", "model")
    )
    assert "saved before its first evaluation" in early
    assert "documents were held out.\n" in early
    assert "held out for the scores below" in late


@pytest.mark.parametrize("workers", [-1, 10**20])
def test_impossible_numbers_of_workers_are_refused(
    store: TokenStore, tmp_path: Path, workers: int
) -> None:
    with pytest.raises(BertkitError, match="--workers must be from 0 to 1,024"):
        pretrain(TOY, store, tmp_path / "run", workers=workers)
    assert not (tmp_path / "run").exists(), "the folder is not claimed"


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


def test_late_failures_are_found_before_the_first_update() -> None:
    with pytest.raises(BertkitError, match=r"too few for training\.accumulate"):
        replace(TOY, training=replace(TOY.training, accumulate=5))
    with pytest.raises(BertkitError, match="maximum length of at least 5"):
        replace(TOY, phases=replace(TOY.phases, lengths=(32, 4)))


@pytest.mark.parametrize("name", ["recipe.json", "environment.json"])
def test_damaged_run_files_are_named(finished: Path, store: TokenStore, tmp_path: Path, name: str):
    run = tmp_path / "copy"
    shutil.copytree(finished, run)
    for content in ("[]", "{"):
        (run / name).write_text(content)
        with pytest.raises(BertkitError, match=name):
            pretrain(TOY, store, run)


@pytest.mark.slow
def test_interrupt_reaches_only_the_trainer(store: TokenStore, tmp_path: Path) -> None:
    """Ctrl-C goes to every process of a terminal; loader processes must not die of it."""
    recipe = tmp_path / "toy.toml"
    recipe.write_text(TOY_TOML.replace("steps = [300, 40]", "steps = [30000, 40]"))
    process = subprocess.Popen(
        [
            sys.executable, "-m", "bertkit", "pretrain", str(recipe), "--store", str(store.folder),
            "--out", str(tmp_path / "run"), "--workers", "1",
        ],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )  # fmt: skip
    deadline, journal = time.monotonic() + 60, tmp_path / "run" / "journal.jsonl"
    while not (journal.exists() and journal.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(1.0)  # the loader process is starting
    os.killpg(process.pid, signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 130, shown
    assert "Traceback" not in shown
    assert read_journal(tmp_path / "run" / "journal.jsonl")[-1]["reason"] == "interrupted"


@pytest.mark.slow
def test_a_killed_loader_ends_the_run_in_one_line(store: TokenStore, tmp_path: Path) -> None:
    recipe, run = tmp_path / "toy.toml", tmp_path / "run"
    recipe.write_text(TOY_TOML.replace("steps = [300, 40]", "steps = [30000, 40]"))
    command = ["pretrain", str(recipe), "--store", str(store.folder), "--out", str(run)]
    process = subprocess.Popen(
        [sys.executable, "-m", "bertkit", *command, "--workers", "2"],
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 120
    while not (victims := loaders_of(process.pid)) or not has_step(run / "journal.jsonl"):
        assert process.poll() is None
        assert time.monotonic() < deadline, "it never began"
        time.sleep(0.01)
    os.kill(victims[0], signal.SIGKILL)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 2, shown
    assert "Traceback" not in shown
    [error] = [line for line in shown.splitlines() if line.startswith("error: ")]
    assert "a worker process of `pretrain` died (SIGKILL)" in error
    assert not [number for number in victims if Path(f"/proc/{number}").exists()]
    with exclusive_lock(run):
        pass


def has_step(journal: Path) -> bool:
    return journal.is_file() and '"kind": "step"' in journal.read_text()


def loaders_of(trainer: int) -> list[int]:
    """Process numbers of a trainer's loaders."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == trainer and b"spawn_main" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found
