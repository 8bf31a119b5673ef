"""What needs a CUDA device, and that what is written for one runs as far as a CPU can tell.

Compiled code is tried in a process of its own, without the shape checks of the tests, which
torch.compile does not follow: `python -m tests.test_gpu DEVICE KERNEL`.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bertkit.pretraining_data.buckets import on_rounded_batches, round_batch

from benchmarks import gpu as benchmark
from benchmarks.gpu_batches import make_batch, make_batches
from benchmarks.gpu_cases import GraphEncoder, rounded
from bertkit.corpus.store import TokenStore
from bertkit.errors import BertkitError
from bertkit.model import attention as attention_module
from bertkit.model.attention import DIRECTIONS, attention, choose_kernel
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.objectives import pretraining_objective
from bertkit.predict.likelihood import SentenceScorer
from bertkit.pretraining_data.batch import pack
from bertkit.pretraining_data.loader import PretrainingBatch
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.device import autocast
from bertkit.training.journal import read_journal
from bertkit.training.parallel import compile_in_training, compile_layers
from bertkit.training.pretrain import pretrain
from bertkit.training.recipe import Logging, ModelSize, Phases, PretrainRecipe, Training

ROOT = Path(__file__).resolve().parents[1]
CPU = torch.device("cpu")
CONFIG = ModelConfig(
    vocab_size=500,
    hidden_size=128,
    num_hidden_layers=3,
    num_attention_heads=2,
    intermediate_size=512,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    max_position_embeddings=128,
)
TOY = PretrainRecipe(
    model=ModelSize(
        hidden_size=64, num_hidden_layers=2, num_attention_heads=2, max_position_embeddings=64
    ),
    phases=Phases(lengths=(32, 64), steps=(20, 10), batch_sizes=(16, 8), max_predictions=(5, 9)),
    training=Training(learning_rate=1e-3, warmup_steps=5, accumulate=2),
    logging=Logging(log_every=10, evaluate_every=15, held_out_sequences=16, checkpoint_every=30),
)


def gpu(test: Callable[..., None]) -> Any:
    """Marks a test that needs a CUDA device."""
    absent = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    return pytest.mark.gpu(absent(test))


def batches(count: int, sequences: int = 16) -> list[PretrainingBatch]:
    """Random pre-training batches of one shape when rounded."""
    return [both.packed for both in make_batches(CONFIG, sequences, 128, count)]


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """||got - wanted|| / ||wanted||: below 1e-5 in fp32, 1e-2 in bf16."""
    wanted = wanted.detach().double().cpu()
    return float((got.detach().double().cpu() - wanted).norm() / wanted.norm())


def learn(
    model: Any, batch: PretrainingBatch, precision: str, objective: Any
) -> dict[str, torch.Tensor]:
    """The losses of a batch and all gradients, by name."""
    device = model.mlm.bias.device
    model.zero_grad()
    with autocast(device, precision):
        sums = objective(model, batch.to(device))
    (sums["mlm_loss"].value + sums["nsp_loss"].value).backward()
    gradients = {name: value.grad.clone() for name, value in model.named_parameters()}
    return {
        name: value.value.detach() for name, value in sums.items() if "loss" in name
    } | gradients


@gpu
def test_the_network_equals_the_cpus() -> None:
    torch.manual_seed(0)
    model = PretrainingModel(CONFIG)
    [batch] = batches(1)
    wanted = learn(model, batch, "fp32", pretraining_objective)
    got = learn(model.to("cuda"), batch, "fp32", pretraining_objective)
    for name in wanted:
        if "query_key_value.bias" not in name:  # the key's part is 0 but for rounding
            assert distance(got[name], wanted[name]) < 1e-4, name


@gpu
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("kernel", ["varlen", "padded"])
def test_kernels_agree_forward_and_backward(kernel: str, direction: str) -> None:
    """In bf16, against the definition in fp32."""
    packed = pack([[0] * length for length in (128, 64, 64, 17, 3, 1)]).to("cuda")
    generator = torch.Generator().manual_seed(0)
    together = torch.randn(277, 3, 4, 64, generator=generator).to("cuda", torch.bfloat16)
    weights = torch.randn(277, 4, 64, generator=generator).to("cuda")
    found: list[tuple[Any, Any]] = []
    for name, dtype in ((kernel, torch.bfloat16), ("reference", torch.float32)):
        own = together.to(dtype).clone().requires_grad_()
        query, key, value = own.unbind(1)
        output = attention(query, key, value, packed, direction=direction, kernel=name)
        torch.autograd.backward((output.float() * weights).sum())
        found.append((output, own.grad))
    assert choose_kernel(together[:, 0], 0.0) == "varlen"
    for got, wanted in zip(*found, strict=True):
        assert got.isfinite().all()
        assert distance(got, wanted) < 1e-2


@gpu
def test_rounding_changes_nothing_in_bf16() -> None:
    torch.manual_seed(0)
    encoder = Encoder(CONFIG).to("cuda", torch.bfloat16).eval()
    packed = batches(1)[0].packed.to("cuda")
    with torch.inference_mode():
        plain, longer = encoder(packed), encoder(rounded(packed, CONFIG))
    assert len(longer) > len(plain)
    assert longer.isfinite().all(), "rows that nobody reads are still multiplied with"
    assert distance(longer[: len(plain)], plain) < 1e-2


@gpu
def test_packed_takes_less_memory_than_padded() -> None:
    sizes = replace(CONFIG, hidden_size=512, num_attention_heads=8, intermediate_size=2048)
    model = Encoder(sizes).to("cuda").train()
    ragged = batches(1, sequences=128)[0].packed
    full = pack([[1] * ragged.max_seqlen] * 128)
    peaks = []
    for packed in (ragged.to("cuda"), full.to("cuda")):
        model.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with autocast(torch.device("cuda"), "bf16"):
            hidden = model(packed)
        hidden.float().square().sum().backward()
        del hidden
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert len(ragged.ids) < 0.5 * len(full.ids)
    assert peaks[0] < 0.7 * peaks[1]


@gpu
def test_a_recorded_graph_gives_what_the_encoder_gives() -> None:
    torch.manual_seed(0)
    encoder = Encoder(CONFIG).to("cuda", torch.bfloat16).eval()
    shaped = [rounded(batch.packed.to("cuda"), CONFIG) for batch in batches(3)]
    with torch.inference_mode():
        wanted = [encoder(packed) for packed in shaped]
        graph = GraphEncoder(encoder, rounded(batches(1)[0].packed.to("cuda"), CONFIG))
        for packed, hidden in zip(shaped, wanted, strict=True):
            assert distance(graph(packed), hidden) < 1e-3


def compare_compiled(device: torch.device, kernel: str) -> dict[str, Any]:
    """Losses and gradients with compiled layers against those without, on batches of one shape.

    Returns:
        The largest distance by name of the worst, the graphs compiled, and the graph breaks.
    """
    from torch._dynamo.utils import counters

    if kernel != "auto":
        attention_module.choose_kernel = lambda query, dropout: kernel
    precision = "fp32" if device.type == "cpu" else "bf16"
    torch.manual_seed(0)
    model = PretrainingModel(CONFIG).to(device).train()
    three = batches(3)
    wanted = [learn(model, batch, precision, pretraining_objective) for batch in three]
    if device.type == "cuda":
        objective = compile_layers(model.encoder, pretraining_objective, device)
    else:
        objective = on_rounded_batches(pretraining_objective, 128)
        for layer in model.encoder.layers:
            compile_in_training(layer, backend="aot_eager", fullgraph=True)
    got = [learn(model, batch, precision, objective) for batch in three]
    skipped = "query_key_value.bias"  # the key's part is 0 but for rounding
    distances = {
        name: max(distance(own[name], other[name]) for own, other in zip(got, wanted, strict=True))
        for name in wanted[0]
        if skipped not in name
    }
    worst = max(distances, key=lambda name: distances[name])
    graphs = counters["stats"]["unique_graphs"]
    with torch.no_grad():
        model.eval()(three[0].packed.to(device), three[0].target_positions.to(device))
    return {
        "worst": worst,
        "distance": distances[worst],
        "graphs": graphs,
        "graphs_after_evaluation": counters["stats"]["unique_graphs"],
        "breaks": dict(counters["graph_break"]),
    }


def trace_varlen() -> dict[str, Any]:
    """Trace the layers as on CUDA without attention dropout: on the meta device, nothing runs."""
    from torch._dynamo.testing import CompileCounter

    attention_module.choose_kernel = lambda query, dropout: "varlen"
    counter = CompileCounter()
    with torch.device("meta"):
        model = PretrainingModel(replace(CONFIG, hidden_dropout_prob=0.1)).bfloat16().train()
    for layer in model.encoder.layers:
        compile_in_training(layer, backend=counter, fullgraph=True)
    for batch in batches(3):
        shaped = round_batch(batch, 128).to("meta")
        output = model(shaped.packed, shaped.target_positions)
        output.mlm_logits.float().sum().backward()
    return {"graphs": counter.frame_count, "shape": list(output.mlm_logits.shape)}


def alone(*arguments: str) -> Any:
    """Run this file with some arguments in a process without shape checks; what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "BERTKIT_CHECK_SHAPES"}
    command = [sys.executable, "-m", "tests.test_gpu", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@gpu
def test_sentence_scores_equal_the_cpus(tokenizer: Tokenizer) -> None:
    torch.manual_seed(0)
    config = replace(CONFIG, vocab_size=tokenizer.size, initializer_range=0.2)
    network = PretrainingModel(config, pairs=False)
    texts = ["River stone bridge.", "The kettle mirror walking, singing!", "winter"]
    found = []
    for device in (CPU, torch.device("cuda")):
        scorer = SentenceScorer(copy.deepcopy(network), tokenizer, device, "fp32")
        scores = scorer.score(scorer.encode(texts), "within-word-l2r")
        found.append([float(one.sum()) for one in scores])
    assert found[1] == pytest.approx(found[0], abs=1e-3)


@pytest.mark.slow
def test_compiled_layers_equal_the_others_on_a_cpu() -> None:
    """By the kernel that CUDA takes with dropout, but without the code generator."""
    found = alone("cpu", "padded")
    assert found["distance"] < 1e-4, found
    # one for the layers between, one for the last, which computes chosen rows
    assert found["graphs"] == found["graphs_after_evaluation"] == 2
    assert found["breaks"] == {}


@pytest.mark.slow
def test_the_varlen_path_is_traced_whole() -> None:
    found = alone("meta", "varlen")
    assert found["graphs"] == 2
    assert found["shape"][1] == CONFIG.vocab_size


@gpu
@pytest.mark.slow
def test_compiled_layers_equal_the_others() -> None:
    """By the kernel that is chosen (varlen), and by the one with dropout."""
    for kernel in ("auto", "padded"):
        found = alone("cuda", kernel)
        assert found["distance"] < 5e-2, found
        assert found["graphs"] == found["graphs_after_evaluation"] == 2
        assert found["breaks"] == {}


def test_compiling_is_refused_on_a_cpu(store: TokenStore, tmp_path: Path) -> None:
    with pytest.raises(BertkitError, match=r"compiled training needs a CUDA device; .* on cpu"):
        pretrain(TOY, store, tmp_path / "run", device="cpu", compiled=True)
    assert not (tmp_path / "run").exists()


@gpu
def test_pretraining_from_a_store(store: TokenStore, tmp_path: Path) -> None:
    """With the paper's dropout, accumulation, two phases and loader processes."""
    assert pretrain(TOY, store, tmp_path / "run", device="cuda", workers=2) is None
    check_run(tmp_path / "run")


@gpu
@pytest.mark.slow
def test_pretraining_with_compiled_layers(store: TokenStore, tmp_path: Path) -> None:
    alone("pretrain", str(store.folder), str(tmp_path / "run"))
    check_run(tmp_path / "run")


def check_run(folder: Path) -> None:
    """The run is finished and has learnt."""
    records = read_journal(folder / "journal.jsonl")
    steps = [record for record in records if record["kind"] == "step"]
    evaluations = [record for record in records if record["kind"] == "evaluation"]
    assert records[-1]["reason"] == "finished"
    assert steps[-1]["mlm_loss"] < steps[0]["mlm_loss"]
    assert len(evaluations) == 2
    assert 0 < steps[-1]["mfu"] < 1
    assert (folder / "model" / "model.safetensors").is_file()


@gpu
def test_fine_tuning_and_prediction(tokenizer: Tokenizer, tmp_path: Path) -> None:
    from bertkit import DataFiles, FinetuneSettings, TrainingSettings, finetune, load
    from bertkit.checkpoints.save import save_model
    from bertkit.finetuning.settings import Grid

    torch.manual_seed(0)
    config = replace(CONFIG, vocab_size=tokenizer.size, hidden_dropout_prob=0.1)
    save_model(tmp_path / "start", PretrainingModel(config), tokenizer, {"task": "pretraining"})
    rows = [
        f"{word} {other},{label}"
        for word, label in (("river stone", "wet"), ("candle forest", "dry"))
        for other in ("bridge", "lantern", "harvest", "winter", "garden", "letter")
    ]
    (tmp_path / "data.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    data = str(tmp_path / "data.csv")
    best = finetune(
        "classification",
        tmp_path / "start",
        tmp_path / "run",
        files=DataFiles(train=data, dev=data),
        settings=FinetuneSettings(
            grid=Grid(learning_rate=(1e-3,), batch_size=(8,), epochs=(15,)),
            training=TrainingSettings(precision="bf16"),
            device="cuda",
        ),
    )
    assert best.scores["dev"]["accuracy"] == 1.0
    for device in ("cuda", "cpu"):
        predict: Any = load(tmp_path / "run", device=device)
        assert predict("river stone").label == "wet"


def test_the_benchmark_goes_on_when_a_contestant_fails() -> None:
    tiny = make_batches(CONFIG, 4, 32, 3)
    calls = 0

    def breaks_later(batch: object) -> None:
        nonlocal calls
        calls += 1
        if calls > 4:
            raise RuntimeError("the device\nis gone")

    def no_setup() -> Any:
        raise ImportError("absent")

    measured, failed = benchmark.race(
        {"good": lambda: lambda batch: None, "late": lambda: breaks_later, "never": no_setup},
        tiny,
        CPU,
    )
    assert list(measured) == ["good"]
    assert len(measured["good"]["seconds"]) == 3
    assert failed == {"late": "RuntimeError: the device is gone", "never": "ImportError: absent"}


def test_the_benchmark_says_what_it_had_no_time_for() -> None:
    found = benchmark.all_cases(benchmark.CASES, [], minutes=0)
    assert found["rows"] == {}
    assert found["failed"] == dict.fromkeys(benchmark.CASES, "there was no time left")


def test_the_benchmark_stops_a_case_that_hangs(tmp_path: Path) -> None:
    options = ["--cpu-dry-run", "--out", str(tmp_path / "gpu.json")]
    found = benchmark.in_own_process("training tiny 64", options, seconds=0.2)
    assert found == {"rows": {}, "failed": {"case": "stopped after 0 s"}}


@pytest.mark.slow
def test_the_benchmark_runs_dry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One case in a process of its own, as all are; the others here, which is faster."""
    *here, there = benchmark.DRY_CASES
    out = tmp_path / "gpu.json"
    options = ["--cpu-dry-run", "--repeats", "2", "--out", str(out)]
    monkeypatch.setattr(benchmark, "DRY_CASES", (there,))
    monkeypatch.setattr(sys, "argv", ["gpu", *options])
    benchmark.main()
    rows = json.loads(out.read_text())["rows"]
    failed: dict[str, str] = {}
    for case in here:
        for found in benchmark.run_case(case, 2, CPU):
            rows |= {f"{case}, {name}": row for name, row in found["rows"].items()}
            failed |= {f"{case}, {name}": error for name, error in found["failed"].items()}
    assert {name.partition(", ")[2] for name in rows} == {
        *("padded", "packed", "packed, no attention dropout", "loaders alone"),
        *("training from memory", "training with loaders", "training without loaders"),
    }
    for row in rows.values():
        assert 0 < row["tokens_per_second"]["lowest"] <= row["tokens_per_second"]["highest"]
    # exactly what needs CUDA has failed, and says so
    assert len(failed) == 5
    assert all("CUDA" in error for error in failed.values())


def test_the_benchmarks_batches_are_variable_and_of_one_shape() -> None:
    import numpy as np

    batch = make_batch(CONFIG, 64, 128, np.random.default_rng(0))
    lengths = batch.packed.lengths
    assert lengths == sorted(lengths, reverse=True)
    assert (max(lengths), min(lengths)) == (128, 8) or min(lengths) > 8
    assert 0.25 < sum(lengths) / len(lengths) / 128 < 0.45
    assert abs(len(batch.target_ids) / sum(lengths) - 0.15) < 0.01
    shapes = {len(round_batch(one, 128).packed.ids) for one in batches(4)}
    assert len(shapes) == 1
    assert len({len(one.packed.ids) for one in batches(4)}) > 1
    for both in make_batches(CONFIG, 8, 64, 2):
        inside = both.padded["attention_mask"].bool()
        assert torch.equal(both.padded["input_ids"][inside], both.packed.packed.ids)
        assert torch.equal(
            both.padded["labels"][both.padded["labels"] >= 0], both.packed.target_ids
        )


if __name__ == "__main__":
    if sys.argv[1] == "pretrain":
        pretrain(TOY, sys.argv[2], sys.argv[3], device="cuda", compiled=True)
        print("{}")
    elif sys.argv[1] == "meta":
        print(json.dumps(trace_varlen()))
    else:
        print(json.dumps(compare_compiled(torch.device(sys.argv[1]), sys.argv[2])))
