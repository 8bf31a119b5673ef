"""Pre-training that is initialised from an existing model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bertkit.checkpoints.pretrained import load_pretraining_model, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.files import read_json
from bertkit.model.heads import PretrainingModel
from bertkit.progress import read_journal
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import Logging, ModelSize, Objectives, Phases, PretrainRecipe, Training
from bertkit.training.start import initial_network, with_sizes
from tests.conftest import run, tiny_config

RECIPE = PretrainRecipe(
    model=ModelSize(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=3, max_position_embeddings=32
    ),
    phases=Phases(lengths=(32,), steps=(6,), batch_sizes=(4,), max_predictions=(5,)),
    training=Training(learning_rate=1e-9, warmup_steps=0),
    logging=Logging(log_every=2, evaluate_every=6, held_out_sequences=8, checkpoint_every=3),
)


@pytest.fixture
def start(store: TokenStore, tmp_path: Path) -> Path:
    """A model of other sizes than the recipe's, with weights of its own."""
    torch.manual_seed(7)
    config = tiny_config(
        store.tokenizer, intermediate_size=48, max_position_embeddings=64, hidden_act="gelu_tanh"
    )
    save_model(tmp_path / "start", PretrainingModel(config), store.tokenizer, {})
    return tmp_path / "start"


@pytest.mark.slow
def test_a_run_begins_with_the_models_weights_and_sizes(
    start: Path, store: TokenStore, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    assert pretrain(RECIPE, store, out, init_from=read_pretrained(start)) is None
    before, after = load_pretraining_model(start), load_pretraining_model(out / "model")
    assert after.config.hidden_act == "gelu_tanh"
    assert after.config.intermediate_size == 48
    for name, weights in after.state_dict().items():  # the rate is next to nothing
        torch.testing.assert_close(weights, before.state_dict()[name], atol=1e-6, rtol=0)
    sizes = read_json(out / "recipe.json")["recipe"]["model"]
    assert (sizes["hidden_size"], sizes["num_hidden_layers"]) == (32, 2)
    assert (
        pretrain(RECIPE, store, out, init_from=read_pretrained(start)) is None
    )  # finished: nothing to do


def test_positions_of_a_model_are_not_replaced_by_copies(
    start: Path, store: TokenStore, tmp_path: Path
) -> None:
    phases = Phases(
        lengths=(16, 32), steps=(2, 2), batch_sizes=(4, 4), max_predictions=(2, 5),
        copy_positions=True,
    )  # fmt: skip
    recipe = replace(RECIPE, phases=phases)
    assert pretrain(recipe, store, tmp_path / "run", init_from=read_pretrained(start)) is None
    folders = (start, tmp_path / "run" / "model")
    before, after = (load_pretraining_model(folder).encoder for folder in folders)
    positions = (one.position_embeddings.weight for one in (after, before))
    torch.testing.assert_close(*positions, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_training_continues_and_a_stopped_run_resumes(
    start: Path, store: TokenStore, tmp_path: Path
) -> None:
    quick = replace(RECIPE, training=Training(learning_rate=1e-3, warmup_steps=0))
    assert pretrain(quick, store, tmp_path / "whole", init_from=read_pretrained(start)) is None
    short = tmp_path / "short"
    assert pretrain(quick, store, short, init_from=read_pretrained(start)) is None
    for later in ("step-00000006",):  # as if it had been killed after the third update
        for file in (short / "checkpoints" / later).iterdir():
            file.unlink()
        (short / "checkpoints" / later).rmdir()
    for file in (short / "model").iterdir():
        file.unlink()
    (short / "model").rmdir()
    assert pretrain(quick, store, short, init_from=read_pretrained(start)) is None
    one, two = (
        (folder / "model" / "model.safetensors").read_bytes()
        for folder in (tmp_path / "whole", short)
    )
    assert one == two
    steps = [r for r in read_journal(short / "journal.jsonl") if r["kind"] == "step"]
    assert steps[-1]["step"] == 6


def test_another_start_in_the_same_folder_is_refused(
    start: Path, store: TokenStore, tmp_path: Path
) -> None:
    pretrain(RECIPE, store, tmp_path / "run", init_from=read_pretrained(start))
    with pytest.raises(BertkitError, match="init_from"):
        pretrain(
            replace(RECIPE, model=replace(
                RECIPE.model, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
                max_position_embeddings=64,
            )),
            store, tmp_path / "run",
        )  # fmt: skip


def test_a_model_with_one_segment_reads_single_segments(
    start: Path, store: TokenStore, tmp_path: Path
) -> None:
    config = replace(read_pretrained(start).config, type_vocab_size=1)
    save_model(tmp_path / "one", PretrainingModel(config, pairs=False), store.tokenizer, {})
    recipe = replace(RECIPE, objectives=Objectives(pair="none"))
    with pytest.raises(BertkitError, match=r"--objectives\.pair single-segment"):
        pretrain(recipe, store, tmp_path / "a", init_from=read_pretrained(tmp_path / "one"))
    single = replace(RECIPE, objectives=Objectives(pair="single-segment"))
    assert (
        pretrain(single, store, tmp_path / "b", init_from=read_pretrained(tmp_path / "one")) is None
    )


@pytest.mark.parametrize(("pair", "kept"), [("sop", True), ("nsp", False)])
def test_an_albert_of_others_keeps_its_head_for_the_order_of_sentences(
    start: Path, store: TokenStore, tmp_path: Path, pair: str, kept: bool
) -> None:
    """Without a recipe beside it, a network that shares its layers was trained on order."""
    config = replace(load_pretraining_model(start).config, share_layers=True)
    save_model(tmp_path / "albert", PretrainingModel(config), store.tokenizer, {})
    recipe = replace(RECIPE, objectives=Objectives(pair=pair))
    said: list[str] = []
    initial = read_pretrained(tmp_path / "albert")
    initial_network(initial, with_sizes(recipe, initial.config), said.append)
    assert ("new: nsp" in said[0]) != kept


@pytest.mark.slow
def test_the_recipe_adapt_reads_text_as_the_model_does(
    start: Path, corpus_text: str, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text(corpus_text)
    command = [
        *("pretrain", "adapt", "--init-from", str(start), "--text", str(tmp_path / "text.txt")),
        *("--phases.lengths", "64", "--phases.steps", "4", "--phases.batch-sizes", "4"),
        *("--training.warmup-steps", "1", "--logging.held-out-sequences", "8"),
        *("--training.learning-rate", "1e-9", "--device", "cpu"),
    ]
    run(*command, "--out", tmp_path / "run")
    before, after = load_pretraining_model(start), load_pretraining_model(tmp_path / "run/model")
    assert after.config.hidden_size == before.config.hidden_size
    name = "encoder.word_embeddings.weight"
    torch.testing.assert_close(before.state_dict()[name], after.state_dict()[name])
    own = Tokenizer.load(tmp_path / "run" / "model")
    assert own.content_hash == Tokenizer.load(start).content_hash
    run(*command, "--out", tmp_path / "learned", "--vocabulary-size", "99", status=2)
