"""What each table asks for, at every scale."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bertkit.config import read_recipe
from bertkit.console import Console
from bertkit.datasets.benchmarks import OFFICIAL
from bertkit.errors import BertkitError
from bertkit.model.features import check_layers
from bertkit.reproduce.experiments import EXPERIMENTS, PERPLEXITY, column_task
from bertkit.reproduce.paper import Scale, Sources, read_scale, shipped_scales
from bertkit.reproduce.reproduce import check_networks
from bertkit.reproduce.run import Reproduction
from bertkit.training.recipe import PretrainRecipe

SCALES = [read_scale(name) for name in shipped_scales()]


@pytest.mark.parametrize("scale", SCALES, ids=lambda scale: scale.name)
@pytest.mark.parametrize("key", EXPERIMENTS)
def test_every_network_is_a_recipe_and_every_cell_has_a_task(scale: Scale, key: str) -> None:
    experiment = EXPERIMENTS[key](scale)
    recipes = {
        variant: read_recipe(PretrainRecipe, scale.recipe, scale.recipe_flags(flags))
        for variant, flags in experiment.variants.items()
    }
    seen = {repr(recipe) for recipe in recipes.values()}
    assert len(seen) == len(recipes), "two networks of a table are the same"
    steps = min(recipe.phases.total_steps for recipe in recipes.values())
    for cell in experiment.cells:
        for job in cell.jobs:
            assert job.variant in recipes
            assert job.at <= steps
            assert job.head.beside in ("", *recipes)
            known = (*OFFICIAL, "squad-sentences")
            assert cell.metric == PERPLEXITY or job.task in known, cell
            if job.head.frozen:
                check_layers(job.head.layers, recipes[job.variant].config(100))
    assert len({job.name for job in experiment.jobs}) == len(experiment.jobs)


def test_networks_of_one_name_are_one_network() -> None:
    """Tables share networks: what two of them call by one name must have the same flags."""
    for scale in SCALES:
        found: dict[str, tuple[str, ...]] = {}
        for build in EXPERIMENTS.values():
            for variant, flags in build(scale).variants.items():
                assert found.setdefault(variant, flags) == flags


def test_a_table_may_have_networks_of_another_size() -> None:
    scale = replace(read_scale("tiny"), bases={"table-7": (2, 32, 4)}, sizes=((2, 32, 4),))
    table = EXPERIMENTS["table-7"](scale)
    sizes = {
        name: read_recipe(PretrainRecipe, scale.recipe, scale.recipe_flags(flags)).model
        for name, flags in table.variants.items()
    }
    names = ["2x32x4", "left-to-right-2x32x4", "right-to-left-2x32x4"]
    assert list(sizes) == names
    assert {(one.num_hidden_layers, one.hidden_size) for one in sizes.values()} == {(2, 32)}
    assert [job.variant for job in table.jobs][-2:] == names[:2]
    assert table.jobs[-1].head.beside == names[2]
    assert EXPERIMENTS["table-6"](scale).variants[names[0]] == table.variants[names[0]]
    given = Reproduction(Path("out"), scale, Sources(model=Path("own")), "cpu", Console())
    assert given.network(names[0]) == Path("own")
    with pytest.raises(BertkitError, match="num_attention_heads"):
        check_networks(replace(scale, bases={"table-7": (2, 32, 3)}))
    with pytest.raises(BertkitError, match="table-5 has no base of its own"):
        check_networks(replace(scale, bases={"table-5": (2, 32, 4)}))


def test_a_repeated_network_is_another_one_for_each_seed() -> None:
    scale = replace(read_scale("tiny"), repeated=("left-to-right",), seeds=2)
    table = EXPERIMENTS["table-7"](scale)
    networks = {
        name: read_recipe(PretrainRecipe, scale.recipe, scale.recipe_flags(flags)).training.seed
        for name, flags in table.variants.items()
    }
    assert networks == {
        "bert": 0,
        "left-to-right-seed-1": 1,
        "left-to-right-seed-2": 2,
        "right-to-left": 0,
    }
    work = Reproduction(Path("out"), scale, Sources(), "cpu", Console())
    jobs = {cell.row: cell.jobs for cell in table.cells}
    seeds = {
        row: [(job.variant, run.seed) for job in found for run in work.grid(job).runs()]
        for row, found in jobs.items()
    }
    assert seeds["Fine-tuning"] == [("bert", 1), ("bert", 2)]
    assert seeds["LTR + RTL"] == [("left-to-right-seed-1", 1), ("left-to-right-seed-2", 2)]
    assert {job.head.beside for job in jobs["LTR + RTL"]} == {"right-to-left"}
    with pytest.raises(BertkitError, match="no network is called 'brt'; did you mean 'bert'"):
        check_networks(replace(scale, repeated=("brt",)))


def test_table_5_is_the_papers() -> None:
    experiment = EXPERIMENTS["table-5"](read_scale("base"))
    assert experiment.rows == list(experiment.paper.rows)
    assert experiment.columns == list(experiment.paper.columns)
    assert set(experiment.variants) == {"bert", "no-nsp", "left-to-right"}
    last = experiment.cells[-1].jobs[0]
    assert (last.task, last.head.head, last.head.frozen) == ("squad-1.1", "bilstm", False)
    recipes = {
        variant: read_recipe(PretrainRecipe, "base", list(flags))
        for variant, flags in experiment.variants.items()
    }
    assert recipes["left-to-right"].objectives.direction == "left_to_right"
    assert not recipes["no-nsp"].objectives.has_pairs
    assert recipes["no-nsp"].masking == recipes["bert"].masking


def test_table_6_at_base_scale_has_the_papers_rows() -> None:
    experiment = EXPERIMENTS["table-6"](read_scale("base"))
    assert experiment.rows == list(experiment.paper.rows)


@pytest.mark.parametrize("name", ["base", "large"])
def test_taggers_of_the_papers_scales_make_as_many_updates_as_with_sentences(name: str) -> None:
    """14,041 sentences stand in 1,062 windows of 512 tokens; batches are of windows."""
    scale = read_scale(name)
    task = scale.task("conll-2003")
    assert task.context == "document"
    assert 1062 * task.epochs / task.batch_size > 14041 * 3 / 32
    jobs = EXPERIMENTS["table-7"](scale).jobs
    work = Reproduction(Path("out"), scale, Sources(), "cpu", Console())
    rates = {job.head.frozen: work.grid(job).learning_rate for job in jobs}
    assert rates == {False: (5e-5,), True: (1e-3,)}


def test_what_stands_in_has_its_own_metric() -> None:
    """The F1 of QQP and MRPC is not asked of another task."""
    scale = read_scale("small")
    stand_ins = {"table-1": {"qqp": "squad-sentences", "mrpc": "sst-2"}}
    cells = EXPERIMENTS["table-1"](replace(scale, stand_ins=stand_ins)).cells
    metrics = {cell.column: cell.metric for cell in cells}
    assert (metrics["qqp"], metrics["mrpc"]) == ("accuracy", "accuracy")
    plain = {cell.column: cell.metric for cell in EXPERIMENTS["table-1"](read_scale("base")).cells}
    assert (plain["qqp"], plain["mrpc"]) == ("f1", "f1")


def test_table_8_shares() -> None:
    experiment = EXPERIMENTS["table-8"](read_scale("base"))
    masking = {
        row: read_recipe(
            PretrainRecipe, "base", list(experiment.variants[cell.jobs[0].variant])
        ).masking
        for row, cell in zip([cell.row for cell in experiment.cells], experiment.cells, strict=True)
    }
    for row, options in masking.items():
        mask, keep, swap = (int(part) / 100 for part in row.split("/"))
        assert (options.mask_share, options.random_share) == (mask, swap)
        assert 1 - options.mask_share - options.random_share == pytest.approx(keep)


@pytest.mark.parametrize(
    ("column", "task"),
    [
        ("mnli-m", ("mnli", "accuracy")),
        ("squad-1.1, exact match", ("squad-1.1", "exact_match")),
        ("squad-2.0", ("squad-2.0", "f1")),
        ("conll-2003, features", ("conll-2003", "f1")),
        ("sts-b", ("sts-b", "spearman")),
    ],
)
def test_columns(column: str, task: tuple[str, str]) -> None:
    assert column_task(column) == task


def test_scales_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(Path("bertkit/reproduce/tiny.toml").read_text())
    assert read_scale(str(path)).name == "mine"
    path.write_text(path.read_text().replace("seeds", "seed"))
    with pytest.raises(BertkitError, match="no field 'seed'; did you mean 'seeds'"):
        read_scale(str(path))
    with pytest.raises(BertkitError, match="no scale is called 'smal'; did you mean 'small'"):
        read_scale("smal")
    with pytest.raises(BertkitError, match="does not exist"):
        read_scale("nowhere.toml")
    whole = Path("bertkit/reproduce/tiny.toml").read_text()
    for before, after, message in (
        ("seeds = 2", 'seeds = "2"', "seeds must be a whole number, not '2'"),
        (
            "[[4, 32, 2], [4, 64, 2]]",
            "[[4, 32]]",
            "sizes must be a list|each size must be three numbers",
        ),
        ("steps = [50, 150]", "steps = [50, 151]", "updates up to the recipe's 150"),
        ("steps = [50, 150]", "steps = []", "steps must not be empty"),
        ("cased = true", 'cased = "false"', "cased must be true or false"),
        ("train = 256", 'train = "256"', "tasks.default.train must be a whole number"),
        ("epochs = 1", "epochs = [1]", "tasks.default.epochs must be a whole number"),
        ("epochs = 1", "epochs = 0", "epochs must be a finite number above 0"),
        ("train = 256", "train = -1", "train must be 0 or more"),
        ("epochs = 1", 'context = "page"', "context must be sentence or document"),
        ("units = 32", "repeated = [[4, 32, 2]]\nunits = 32", "repeated must be a list"),
        ("units = 32\n", "", "the field 'units' is missing"),
        ("units = 32", f"units = {'[' * 3000}", "scale .*mine.toml: "),
        ("[tasks.default]", "[bases]\ntable-7 = [4, 32]\n[tasks.default]", "three numbers"),
        ("[tasks.default]", "[bases]\ntabel-7 = [4, 32, 2]\n[tasks.default]", "not a table"),
        ("[tasks.default]", "[tasks]\ndefault = 3\n[other]", "scale .*mine.toml: "),
        ("[tasks.default]", "[tasks.sst2]\n[tasks.default]", "'sst2' is not a task.*'sst-2'"),
        ("[stand_ins.table-5]", "[stand_ins.tabel-5]", "'tabel-5' is not a table.*'table-5'"),
        ("qnli =", "qnil =", "'qnil' is not a column of table-5; did you mean 'qnli'"),
        ('mnli-m = "', 'mnli-m = "x', "is not a task"),
    ):
        assert before in whole
        path.write_text(whole.replace(before, after))
        with pytest.raises(BertkitError, match=message):
            read_scale(str(path))
