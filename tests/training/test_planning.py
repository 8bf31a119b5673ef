"""The arithmetic of `bertkit plan`: against what torch saves, by hand, and on the command line."""

from __future__ import annotations

import gzip
import json
import shlex
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bertkit.cli.plan import amount, duration, plan_command
from bertkit.config import find_recipe, read_recipe
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel, count_parameters
from bertkit.objectives import pretraining_objective
from bertkit.planning import GIB
from bertkit.planning.corpus import (
    BatchSize,
    LengthSample,
    assumed_corpus,
    largest_batch,
    store_corpus,
    typical_batch,
)
from bertkit.planning.estimate import (
    Plan,
    Trial,
    budget_steps,
    calibrate,
    fit_line,
    make_plan,
    synthetic_batch,
    this_machine,
)
from bertkit.planning.machine import (
    MACHINES,
    USABLE,
    activation_bytes,
    find_machine,
    fit_memory,
    memory_needed,
)
from bertkit.planning.plan import CorpusSize, measure_corpus, plan
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.pretraining_data.pairs import PairOptions, measure_pairs, plan_block
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.recipe import ModelSize, Objectives, Phases, PretrainRecipe, Training
from bertkit.training.step import LoopSettings, run_objective
from tests.conftest import run

CPU = torch.device("cpu")
RECIPE = PretrainRecipe()
BASE = RECIPE.model.config(30_522)


def network(width: int, layers: int, dropout: float, vocabulary: int = 3000) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=layers,
        num_attention_heads=width // 32, intermediate_size=4 * width,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip


def saved_bytes(config: ModelConfig, batch: PretrainingBatch, precision: str) -> int:
    """What torch keeps between forward and backward, each storage once, weights not counted."""
    model = PretrainingModel(config).train()
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage  # held, so that no address is used twice
        return tensor

    loop = LoopSettings(
        device=CPU, precision=precision, seed=0, max_gradient_norm=1.0, learning_rate=lambda _: 0.0
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        run_objective(pretraining_objective, model, batch, loop)
    return sum(storage.nbytes() for storage in kept.values())


def size_of(batch: PretrainingBatch) -> BatchSize:
    return BatchSize(
        sequences=len(batch.next_labels),
        tokens=len(batch.packed.ids),
        targets=len(batch.target_ids),
        squares=sum(length**2 for length in batch.packed.lengths),
        mixed=len(set(batch.packed.lengths)) > 1,
    )


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize(
    ("width", "layers", "lengths"),
    [
        (64, 2, [64] * 8),
        (64, 2, [64] * 6 + [60, 50, 33, 12]),
        (128, 4, [128] * 4),
        (128, 4, [128] * 5 + [120, 111, 90, 71, 40, 8]),
        (128, 1, [128] * 3 + [100, 20]),
        (96, 3, [512, 512, 400, 100]),
    ],
)
def test_activations_are_what_torch_saves(
    precision: str, dropout: float, width: int, layers: int, lengths: list[int]
) -> None:
    config = network(width, layers, dropout)
    batch = synthetic_batch(config, lengths, RECIPE, max_predictions=77)
    saved = saved_bytes(config, batch, precision)
    assert activation_bytes(config, size_of(batch), precision) == pytest.approx(saved, rel=0.10)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_shared_layers_and_narrow_embeddings_are_counted_once(precision: str) -> None:
    config = replace(network(256, 8, 0.0), share_layers=True, embedding_size=64)
    batch = synthetic_batch(config, [64] * 4, RECIPE, max_predictions=77)
    saved = saved_bytes(config, batch, precision)
    assert activation_bytes(config, size_of(batch), precision) == pytest.approx(saved, rel=0.10)


def test_parts_of_the_memory_of_base_by_hand() -> None:
    machine = MACHINES["a100-80"]
    parameters = 110_106_428  # with both heads
    needed = memory_needed(BASE, largest_batch(64, RECIPE, 0), "bf16", machine)
    assert needed.weights == needed.gradients == 4 * parameters
    assert needed.moments == 8 * parameters
    assert needed.logits == 8 * 64 * 19 * 30_522  # 19 targets in 128 tokens, two fp32 gradients
    assert needed.kept == 0
    cpu = replace(machine, device="cpu")
    assert memory_needed(BASE, largest_batch(64, RECIPE, 0), "bf16", cpu).kept > 0.5 * GIB
    twice = memory_needed(BASE, largest_batch(64, RECIPE, 0), "bf16", machine, micro_batches=2)
    assert twice.peak == needed.peak + needed.gradients  # they stay between micro-batches


@given(
    sequences=st.integers(1, 300),
    layers=st.integers(1, 24),
    precision=st.sampled_from(["bf16", "fp32"]),
    device=st.sampled_from(["cpu", "cuda"]),
)
@settings(max_examples=40, deadline=None)
def test_memory_grows_with_batch_and_depth(
    sequences: int, layers: int, precision: str, device: str
) -> None:
    machine = replace(MACHINES["h100"], device=device)
    config = replace(BASE, num_hidden_layers=layers)

    def peak(config: ModelConfig, sequences: int) -> float:
        return memory_needed(config, largest_batch(sequences, RECIPE, 0), precision, machine).peak

    assert peak(config, sequences) < peak(config, sequences + 1)
    assert peak(config, sequences) < peak(replace(config, num_hidden_layers=layers + 1), sequences)


@given(gib=st.floats(4, 200), batch=st.integers(1, 300), accumulate=st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_the_batch_that_fits_is_the_largest(gib: float, batch: int, accumulate: int) -> None:
    recipe = replace(
        RECIPE,
        phases=replace(RECIPE.phases, batch_sizes=(batch + 4, batch + 4)),
        training=replace(RECIPE.training, accumulate=accumulate),
    )
    machine = replace(MACHINES["a100-80"], memory=gib * GIB)
    found, room = fit_memory(BASE, recipe, 1, machine), USABLE * gib * GIB

    def peak(sequences: int, micro_batches: int) -> float:
        size = largest_batch(sequences, recipe, 1)
        return memory_needed(BASE, size, "bf16", machine, micro_batches).peak

    assert found.memory.peak <= room
    assert peak(found.largest, found.micro_batches) <= room
    assert peak(found.largest + 1, found.micro_batches) > room
    assert found.micro_batch * found.micro_batches >= batch + 4
    if found.micro_batches > accumulate:
        fewer = found.micro_batches - 1
        assert peak(-(-(batch + 4) // fewer), fewer) > room


def test_a_network_too_large_for_a_machine_is_refused() -> None:
    with pytest.raises(BertkitError, match=r"one sequence of 512 tokens needs .* GiB, and NVIDIA"):
        fit_memory(replace(BASE, num_hidden_layers=500), RECIPE, 1, MACHINES["t4"])


@pytest.mark.parametrize(("fixed", "slope"), [(0.01, 3e-5), (0.0, 2e-3), (0.2, 0.0)])
def test_a_line_of_noiseless_times_is_found(fixed: float, slope: float) -> None:
    found = fit_line([(n, fixed + slope * n) for n in (100, 107, 400, 409)])
    assert found == pytest.approx([fixed, slope], abs=1e-9)


def test_a_line_has_no_negative_cost() -> None:
    more = fit_line([(100, 1.0), (400, 4.4)])  # than in proportion
    assert more == pytest.approx([0, 5.4 / 500])
    assert fit_line([(100, 2.0), (400, 1.0)]) == pytest.approx([1.5, 0])
    assert fit_line([(100, 2.0), (100, 4.0)]) == pytest.approx([0, 0.03])


def test_synthetic_batches_are_like_real_ones() -> None:
    config = network(32, 1, 0.0)
    examples = LengthSample(lengths=(8, 20, 40, 40), epoch_tokens=1.0)
    drawn = examples.draw(400, seed=1)
    assert drawn == sorted(drawn, reverse=True)
    assert drawn != examples.draw(400, seed=2)
    assert [drawn.count(n) / 400 for n in (8, 20, 40)] == pytest.approx([0.25, 0.25, 0.5], abs=0.1)
    batch = synthetic_batch(config, [40, 40, 20, 8], RECIPE, 5)
    assert batch.packed.lengths == [40, 40, 20, 8]
    assert batch.counts == {"targets": 5 + 5 + 3 + 1, "sequences": 4, "tokens": 108}
    assert len(set(batch.target_positions.tolist())) == 14
    expected = typical_batch(examples, 4, PretrainRecipe(), 0)
    assert (expected.tokens, expected.squares) == (108, 40**2 * 2 + 20**2 + 8**2)


def test_assumed_examples_are_mostly_full() -> None:
    corpus = assumed_corpus("x", 1e6, 100, [128, 512])
    short, long = (np.mean(corpus.examples[n].lengths) / n for n in (128, 512))
    assert 0.85 < short < 0.95  # results/stream.json: 0.90 and 0.76
    assert 0.7 < long < 0.8
    with pytest.raises(BertkitError, match="at least 1 token"):
        assumed_corpus("x", 0, 100, [128])


def test_examples_of_a_store_are_its_own(store: TokenStore) -> None:
    corpus = store_corpus(store, [64])
    rows = plan_block(store, [0], PairOptions(max_length=64), 0, 0, 0)
    assert np.mean(corpus.examples[64].lengths) == pytest.approx(
        measure_pairs(rows).mean_tokens, rel=0.01
    )
    assert 1 < corpus.examples[64].epoch_tokens < 1.6
    assert (corpus.tokens, corpus.vocabulary_size) == (store.tokens, store.vocabulary_size)


def test_examples_without_random_sentences_read_the_corpus_once(store: TokenStore) -> None:
    """Order swaps what follows, and single packs sentences: neither reads from elsewhere."""
    for pair in ("sop", "single-segment"):
        options = PairOptions(max_length=64, pair=pair)
        rows = plan_block(store, [0], options, 0, 0, 0)
        found = store_corpus(store, [64], pair).examples[64]
        assert found.epoch_tokens <= 1
        assert np.mean(found.lengths) == pytest.approx(
            np.mean(rows["a_length"] + rows["b_length"]) + 64 - options.room, rel=0.01
        )
        assumed = assumed_corpus("x", 1e6, 100, [64], pair)
        assert assumed.examples[64].epoch_tokens == 1
        assert len(assumed.assumed) == 1


SMALL = PretrainRecipe(
    model=ModelSize(hidden_size=32, num_hidden_layers=2, num_attention_heads=2),
    phases=Phases(lengths=(32,), steps=(100,), batch_sizes=(8,), max_predictions=(5,)),
    training=Training(warmup_steps=10, precision="fp32"),
)


def named_plan(recipe: PretrainRecipe = RECIPE, name: str = "a100-80", **options: float) -> Plan:
    corpus = assumed_corpus("x", 3.3e9, 30_522, recipe.phases.lengths)
    machine = find_machine(name, recipe.training.precision)
    return make_plan(recipe, corpus, machine, None, **options)  # type: ignore[arg-type]


def test_a_named_machine_goes_at_its_assumed_share() -> None:
    made = named_plan(hours=24, price=2.0)
    assert made.parameters == count_parameters(BASE, heads=True)
    for phase in made.phases:
        assert phase.mfu == pytest.approx(MACHINES["a100-80"].mfu["bf16"])
    # 0.545 GFLOP a token at length 128 and 15 % targets
    assert made.phases[0].tokens_per_second == pytest.approx(0.3 * 312e12 / 0.545e9, rel=0.01)
    whole, budget = made.answers
    assert whole.steps == (900_000, 100_000)
    seconds = sum(n * p.seconds for n, p in zip(whole.steps, made.phases, strict=True))
    assert whole.seconds == pytest.approx(seconds)
    assert whole.cost == pytest.approx(2.0 * seconds / 3600)
    assert budget.seconds == pytest.approx(24 * 3600, rel=1e-3)
    assert budget.seconds <= 24 * 3600
    assert budget.epochs / whole.epochs == pytest.approx(budget.seconds / seconds, rel=1e-3)
    assert any("MFU of 30%" in text for text in made.assumed)


def test_flags_say_how_to_make_it_fit_and_how_to_keep_to_the_budget() -> None:
    made = named_plan(name="a10", hours=5)
    cut = max(phase.fit.micro_batches for phase in made.phases)
    steps = made.answers[1].steps
    assert cut > 1
    assert made.flags[:2] == (
        f"--training.accumulate {cut}",
        f"--phases.steps {steps[0]} {steps[1]}",
    )
    again = read_recipe(PretrainRecipe, "base", " ".join(made.flags).split())
    assert named_plan(again, "a10").answers[0].seconds < 5 * 3600
    assert named_plan(again, "a10").phases[0].fit.memory.peak <= USABLE * 22 * GIB


def test_flags_that_a_run_would_refuse_are_not_printed() -> None:
    phases = replace(RECIPE.phases, batch_sizes=(4096, 16))
    with pytest.raises(BertkitError, match="the smallest has only 16 sequences"):
        named_plan(replace(RECIPE, phases=phases), "t4")
    late = replace(SMALL.training, warmup_steps=99)
    [*_, steps, warmup] = named_plan(replace(SMALL, training=late), hours=1e-8).flags
    assert (steps, warmup) == ("--phases.steps 1", "--training.warmup-steps 0")


@pytest.mark.parametrize("hours", [0.0, -3.0, float("nan"), 1e308])
def test_impossible_budgets(hours: float) -> None:
    with pytest.raises(BertkitError, match="--hours must be above 0"):
        plan(RECIPE, CorpusSize(store=Path("nowhere")), hours=hours)  # before anything is measured


def test_the_shortest_budget_is_named_and_suffices() -> None:
    phases = named_plan().phases
    with pytest.raises(BertkitError, match=r"that takes (\S+) hours") as error:
        budget_steps(phases, 1e-6)
    least = float(str(error.value).split("takes ")[1].split()[0])
    assert min(budget_steps(phases, 1.1 * least)) == 1


def test_machines_and_their_errors() -> None:
    assert find_machine("h100", "bf16", 0.5).mfu == {"bf16": 0.5}
    with pytest.raises(BertkitError, match="no machine is called 'h10'; did you mean 'h100'"):
        find_machine("h10", "bf16")
    with pytest.raises(BertkitError, match=r"V100 .* does not support bf16; add --training"):
        find_machine("v100", "bf16")
    assert find_machine("v100", "fp32").peak["fp32"] > 1e13
    assert find_machine("v100", "auto").precision("auto") == "fp32"
    assert find_machine("h100", "auto", 0.5).mfu == {"bf16": 0.5}
    for share in (0.0, 1.5):
        with pytest.raises(BertkitError, match="--mfu is a share"):
            find_machine("h100", "bf16", share)


def test_calibration_extrapolates_a_known_law(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are replaced by a known law, which must come back at another depth and batch."""
    made: list[int] = []

    def seconds(self: Trial, batch: PretrainingBatch) -> float:
        made.append(self.layers)
        tokens = len(batch.packed.ids)
        return 0.01 + 1e-4 * tokens + (self.layers - 1) * 5e-5 * tokens

    monkeypatch.setattr(Trial, "seconds", seconds)
    config = replace(SMALL.model.config(200), num_hidden_layers=6)
    sample = LengthSample(lengths=(10, 20, 32, 32), epoch_tokens=1.0)
    state = torch.get_rng_state()
    speed = calibrate(config, SMALL, {32: (sample, 8, 5)}, CPU, 0.2)
    assert torch.equal(torch.get_rng_state(), state)
    assert set(made) == {1, 4}
    assert speed(32, 6, 1000.0) == pytest.approx(0.01 + 0.1 + 5 * 0.05)


def test_a_plan_of_this_machine(store: TokenStore) -> None:
    machine = this_machine(CPU, SMALL)
    assert 0.05 * GIB < machine.program < machine.memory
    told: list[str] = []
    corpus = store_corpus(store, SMALL.phases.lengths)
    made = make_plan(SMALL, corpus, machine, CPU, hours=1.0, seconds=0.3, progress=told.append)
    assert [text.split()[-1] for text in told] == ["32"]
    assert not machine.mfu
    for phase in made.phases:
        assert 0 < phase.seconds < 600
        assert phase.mfu > 0  # how high depends on what else the machine does
    assert [len(found.steps) for found in made.answers] == [1, 1]


def test_text_is_sampled(
    corpus_text: str, tokenizer: Tokenizer, store: TokenStore, tmp_path: Path
) -> None:
    tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.txt").write_text(corpus_text)
    with gzip.open(tmp_path / "a" / "two.txt.gz", "wt") as file:
        file.write(corpus_text)
    (tmp_path / "a" / "notes.pdf").write_text("x")
    held_out = TokenStore(store.folder, "held_out")
    tokens = 2 * (store.tokens + held_out.tokens)
    text = (str(tmp_path / "a"),)
    found = measure_corpus(CorpusSize(text=text, tokenizer=tmp_path / "tokenizer"), [32], "nsp")
    assert found.tokens == pytest.approx(tokens, rel=0.03)
    assert "as in a sample" in found.assumed[0]
    assert found.vocabulary_size == tokenizer.size
    assert "2 files" in found.title
    assert "1 of unknown type left out" in found.title
    (tmp_path / "a" / "three.txt.gz").write_bytes((tmp_path / "a" / "two.txt.gz").read_bytes()[:-9])
    with pytest.raises(BertkitError, match=r"three\.txt\.gz cannot be read .*restore"):
        measure_corpus(CorpusSize(text=text, tokenizer=tmp_path / "tokenizer"), [32], "nsp")
    (tmp_path / "a" / "three.txt.gz").unlink()
    blind = measure_corpus(CorpusSize(text=text), [32], "nsp")
    assert blind.tokens == pytest.approx(2 * len(corpus_text) / 4.7, rel=0.01)
    assert "4.7 bytes" in blind.assumed[0]


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (CorpusSize(), "say how much text there is by one of --store"),
        (CorpusSize(tokens=5, text=("x",)), "say how much text there is by one of --store"),
        (CorpusSize(text=("nowhere.txt",)), r"nowhere\.txt does not exist"),
        (CorpusSize(store=Path("nowhere")), "nowhere is not a token store"),
        (CorpusSize(text=("hf:some",)), "does not tell its amount"),
        (CorpusSize(tokens=0), "at least 1 token"),
        (CorpusSize(tokens=5, vocabulary_size=0), "--vocabulary-size"),
        (CorpusSize(tokens=5, column="y"), "are for --text"),
        (CorpusSize(store=Path("nowhere"), vocabulary_size=9), "remove --vocabulary-size"),
    ],
)
def test_corpora_that_are_not_there(size: CorpusSize, message: str) -> None:
    with pytest.raises(BertkitError, match=message) as error:
        measure_corpus(size, [128], "nsp")
    assert "\n" not in str(error.value)


def test_the_verb_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan_command(
        machine="h100",
        hours=8,
        price=3,
        corpus=CorpusSize(tokens=10**9),
        json=tmp_path / "plan.json",
    )
    shown = capsys.readouterr().out
    for part in ("110,106,428 parameters", "the recipe", "8.0 hours", "cost at 3/h", "24.00"):
        assert part in shown, shown
    written = json.loads((tmp_path / "plan.json").read_text())
    assert written["parameters"] == 110_106_428
    mine = tmp_path / "my tiny.toml"
    mine.write_text(find_recipe("tiny").read_text())
    given = ["--training.no-bias-correction", "--phases.batch-sizes", "16", "8"]
    run("plan", mine, "--machine", "h100", "--hours", "0.001", "--tokens", "1000000", *given)
    [command] = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("bertkit pretrain")
    ]
    words = shlex.split(command)
    assert words[:3] == ["bertkit", "pretrain", str(mine)]
    planned = read_recipe(PretrainRecipe, words[2], words[3:])
    assert planned.phases.batch_sizes == (16, 8)
    assert not planned.training.bias_correction
    assert planned.model == read_recipe(PretrainRecipe, "tiny").model
    assert [len(found["steps"]) for found in written["answers"]] == [2, 2]
    assert written["phases"][0]["fit"]["memory"]["peak"] > 0
    for wrong in ({"price": -1.0}, {"seconds": 0.0}, {"device": "cpu"}, {"seconds": 9.0}):
        with pytest.raises(BertkitError, match="--" + next(iter(wrong))):
            plan_command(machine="h100", corpus=CorpusSize(tokens=5), **wrong)
    with pytest.raises(BertkitError, match="--mfu is for a named"):
        plan_command(mfu=0.3, corpus=CorpusSize(tokens=5))


def test_numbers_for_people() -> None:
    assert [amount(n) for n in (5, 1234, 3.3e9, 2e12)] == ["5", "1.2 k", "3.3 G", "2.0 T"]
    times = [1.5, 100, 7200, 4 * 86400, 3e8]
    assert [duration(s) for s in times] == [
        "1.5 s",
        "100.0 s",
        "2.0 hours",
        "4.0 days",
        "9.5 years",
    ]


def test_objectives_decide_the_targets() -> None:
    examples = LengthSample(lengths=(8, 20, 40, 40), epoch_tokens=1.0)
    causal = replace(PretrainRecipe(), objectives=Objectives(token="clm", pair="none"))
    assert typical_batch(examples, 4, causal, 0).targets == 7 + 19 + 39 + 39
    assert largest_batch(3, causal, 0).targets == 3 * 127
    assert largest_batch(3, PretrainRecipe(), 0).targets == 3 * 19


def test_two_networks_are_not_planned_as_one() -> None:
    two = replace(PretrainRecipe(), objectives=Objectives(token="rtd", pair="single-segment"))
    corpus = assumed_corpus("x", 1e6, 100, [128, 512])
    with pytest.raises(BertkitError, match="rtd trains two"):
        make_plan(two, corpus, find_machine("a100-80", "bf16", None), None)
