from __future__ import annotations

import errno
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder
from bertkit.model.heads import count_parameters
from bertkit.progress import Console, read_journal
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import Logging, Phases, read_recipe, shipped_recipes

RECIPES = sorted(shipped_recipes())


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_recipe_builds_its_network(name: str) -> None:
    recipe = read_recipe(name)
    config = recipe.config(30_522)
    with torch.device("meta"):
        model = recipe.objectives.model(config)
        encoder = Encoder(config)
    assert sum(p.numel() for p in encoder.parameters()) == count_parameters(config)
    if recipe.objectives.has_pairs:  # else a head is missing, or others are there
        parameters = sum(parameter.numel() for parameter in model.parameters())
        assert parameters == count_parameters(config, heads=True)


def test_objectives_of_the_recipes() -> None:
    """Each way of training is some recipe's, and what a recipe is named after is in it."""
    recipes = {name: read_recipe(name) for name in RECIPES}
    found = {name: (r.objectives.token, r.objectives.pair) for name, r in recipes.items()}
    assert {n: pair for n, pair in found.items() if pair != ("mlm", "nsp")} == {
        "no-nsp": ("mlm", "none"),
        "left-to-right": ("clm", "none"),
        "sentence-order": ("mlm", "sop"),
        "doc-sentences": ("mlm", "single-segment"),
        "albert-base": ("mlm", "sop"),
        "demo": ("mlm", "single-segment"),
        "adapt": ("mlm", "single-segment"),
        "two-cores": ("mlm", "none"),
        "overnight": ("mlm", "none"),
        "electra-small": ("rtd", "single-segment"),
    }
    base = recipes["base"]
    for name, pair in found.items():
        if name in ("no-nsp", "left-to-right", "sentence-order", "doc-sentences"):
            assert pair != found["base"]
            assert replace(recipes[name], objectives=base.objectives) == base, name
    with torch.device("meta"):
        small = recipes["electra-small"]
        generator = small.objectives.model(small.config(30_522)).generator.config
    assert (generator.hidden_size, generator.num_attention_heads) == (64, 1)
    assert generator.intermediate_size == 256


def test_base_and_large_have_the_papers_size() -> None:
    sizes = {
        name: count_parameters(read_recipe(name).model.config(30_522)) for name in ("base", "large")
    }
    assert sizes == {"base": 109_482_240, "large": 335_141_888}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_takes_a_shrunken_step(name: str, store: TokenStore, tmp_path: Path) -> None:
    """The recipe with its own objective, optimizer and schedule, but a toy network and one step."""
    recipe = read_recipe(name)
    shrunken = replace(
        recipe,
        model=replace(
            recipe.model, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
            max_position_embeddings=64,
        ),
        phases=replace(
            recipe.phases,
            lengths=tuple(32 for _ in recipe.phases.lengths),
            steps=tuple(1 for _ in recipe.phases.steps),
            batch_sizes=tuple(4 for _ in recipe.phases.batch_sizes),
        ),
        training=replace(recipe.training, warmup_steps=0),
        logging=Logging(log_every=1, evaluate_every=9, held_out_sequences=8, checkpoint_every=9),
    )  # fmt: skip
    pretrain(shrunken, store, tmp_path, console=Console())
    records = read_journal(tmp_path / "journal.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    assert len(steps) == len(recipe.phases.steps)
    words = "lm" if recipe.objectives.direction != "bidirectional" else "mlm"
    assert all(0 < record[f"{words}_loss"] < 12 for record in steps)
    pairs = {"nsp": "nsp_loss", "sop": "sop_loss"}.get(recipe.objectives.pair)
    assert all({n for n in record if n in ("nsp_loss", "sop_loss")} == {pairs} - {None}
               for record in steps)  # fmt: skip


def test_flags_win_over_the_file() -> None:
    overrides = {"training.learning_rate": 3e-4, "phases.steps": [20_000, 8]}
    recipe = read_recipe("base", overrides)
    assert recipe.training.learning_rate == 3e-4
    assert recipe.phases.steps == (20_000, 8)
    assert recipe.phases.lengths == (128, 512)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[trainin]\nseed = 1", r"bad\.toml: there is no field 'trainin\.seed'; did you mean"),
        ("[training]\nlearning_rat = 1", r"did you mean 'training\.learning_rate'"),
        ('[training]\nseed = "x"', r"bad\.toml: training\.seed must be a whole number, not 'x'"),
        ("[training]\nseed = 1.5", r"bad\.toml: training\.seed must be a whole number, not 1\.5"),
        ("[phases]\nsteps = [1, 2.5]", r"bad\.toml: phases\.steps must be a list"),
        ("[model]\nhidden_size = true", r"hidden_size must be a whole number, not True"),
        ("model = 2", r"there is no field 'model'"),
        ('out = "x"', r"there is no field 'out'"),
        ("[training]\nseed = -1", r"training\.seed must be from 0 to below 2.31, not -1"),
        ('[training]\noptimizer = "sgd"', r"training\.optimizer must be adamw or muon, not 'sgd'"),
        ("[training]\nmax_gradient_norm = inf", r"finite \(1e9 clips nothing\), not inf"),
        ("[phases]\nsteps = [1]", r"need one entry for each phase"),
        ("[phases]\nlengths = [128, 1024]", r"phases\.lengths has 1024, but.*512"),
        ("[masking]\nprobability = 1.5", r"masking\.probability must be between"),
        ("[training\nseed = 1", r"bad\.toml is not valid TOML"),
        (f"[training]\nseed = {'1' * 5000}", r"bad\.toml is not valid TOML"),
        ("[training]\nwarmup_steps = -1", r"training\.warmup_steps must be at least 0, not -1"),
    ],
)
def test_bad_recipes_are_one_clear_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(content)
    with pytest.raises(BertkitError) as error:
        read_recipe(str(path))
    assert re.search(message, str(error.value)), error.value
    assert "\n" not in str(error.value)


def test_a_recipe_that_cannot_be_read_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "own.toml"
    path.touch()

    def refuse(*_: object, **__: object) -> str:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(BertkitError, match=r"cannot read .*own\.toml: Permission denied"):
        read_recipe(str(path))


def test_unknown_recipe_names_the_nearest() -> None:
    with pytest.raises(BertkitError, match="no recipe is called 'bse'; did you mean 'base'"):
        read_recipe("bse")
    with pytest.raises(BertkitError, match=r"there is no recipe file nowhere\.toml"):
        read_recipe("nowhere.toml")


def test_phases_locate_a_step() -> None:
    phases = Phases(lengths=(8, 16), steps=(3, 2), batch_sizes=(1, 1), max_predictions=(1, 1))
    found = [phases.locate(done) for done in range(6)]
    assert found == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0)]
