"""A loaded model is in memory of its own, once, whatever becomes of its files."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bertkit.checkpoints.pretrained import read_pretrained
from bertkit.checkpoints.save import save_model
from bertkit.model.encoder import ModelConfig
from bertkit.model.heads import PretrainingModel
from bertkit.predict.embeddings import load_embedder
from bertkit.predict.load import load
from bertkit.tasks.classification import Classification
from bertkit.tokenizer.wordpiece import Tokenizer
from tests.conftest import load_encoder
from tests.networks import save_task

TEXT = "river stone"


@pytest.fixture
def sized(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    return ModelConfig(**{**vars(config), "vocab_size": tokenizer.size, "initializer_range": 0.3})


def pretrained(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    save_model(folder, PretrainingModel(config), tokenizer, {"task": "pretraining"})


def classifier(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
    task = Classification(("dry", "damp", "wet"), max_length=32)
    save_task(folder, task, config, tokenizer)


def as_bin(write: Callable[..., None]) -> Callable[..., None]:
    """The same model with its weights in `pytorch_model.bin`."""

    def save(folder: Path, config: ModelConfig, tokenizer: Tokenizer) -> None:
        write(folder, config, tokenizer)
        weights = folder / "model.safetensors"
        torch.save(load_file(weights), folder / "pytorch_model.bin")
        weights.unlink()

    return save


def fill_mask(folder: Path) -> Callable[[], Any]:
    predictor = load(folder, device="cpu")
    return lambda: predictor.fill_mask("river [MASK]")


def predict(folder: Path) -> Callable[[], Any]:
    predictor = load(folder, device="cpu", precision="fp32")
    return lambda: predictor(TEXT)


def embed(folder: Path) -> Callable[[], Any]:
    embedder = load_embedder(folder, device="cpu", precision="fp32")
    return lambda: embedder.encode([TEXT]).tolist()


def weights(folder: Path) -> Callable[[], Any]:
    encoder = load_encoder(folder)
    return lambda: [float(tensor.double().sum()) for tensor in encoder.state_dict().values()]


def start(folder: Path) -> Callable[[], Any]:
    begun = read_pretrained(folder)
    return lambda: [float(tensor.double().sum()) for tensor in begun.tensors.values()]


@pytest.mark.parametrize(
    ("write", "use"),
    [
        (pretrained, fill_mask),
        (pretrained, embed),
        (pretrained, weights),
        (pretrained, start),
        (classifier, predict),
        (as_bin(pretrained), weights),
    ],
    ids=["masks", "embed", "encoder", "start", "classify", "bin"],
)
def test_files_may_be_overwritten_and_cut_while_the_model_is_in_use(
    write: Callable[..., None],
    use: Callable[[Path], Callable[[], Any]],
    sized: ModelConfig,
    tokenizer: Tokenizer,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    write(tmp_path / "model", sized, tokenizer)
    answer = use(tmp_path / "model")
    before = answer()
    files = [*tmp_path.rglob("*.safetensors"), *tmp_path.rglob("*.bin")]
    for path in files:  # in place, as `cp` does it
        with path.open("r+b") as file:
            file.seek(path.stat().st_size // 4)
            file.write(os.urandom(path.stat().st_size // 2))
    assert answer() == before
    for path in files:
        os.truncate(path, 0)
    assert answer() == before


PEAK = """
import sys
from pathlib import Path

from bertkit.predict.load import load

def memory(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))

load(sys.argv[1], device="cpu", precision="fp32")  # what is imported and made once
before = memory("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
model = load(sys.argv[2], device="cpu", precision="fp32")
model("river stone")
print(memory("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="asks Linux for its peak")
def test_a_model_takes_its_size_in_memory_once(
    sized: ModelConfig, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    classifier(tmp_path / "small", sized, tokenizer)
    sizes = {"hidden_size": 512, "num_attention_heads": 8, "intermediate_size": 2048}
    large = ModelConfig(**{**vars(sized), **sizes, "num_hidden_layers": 6})
    with torch.device("meta"):  # nothing is drawn, which would take seconds
        model = Classification(("a", "b")).build(large)
    model = model.to_empty(device="cpu").requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(0.01)
    details = {"task": "classification", "labels": ["a", "b"], "settings": {"max_length": 32}}
    save_model(tmp_path / "large", model, tokenizer, details)
    held = (tmp_path / "large" / "model.safetensors").stat().st_size
    arguments = [sys.executable, "-c", PEAK, tmp_path / "small", tmp_path / "large"]
    found = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert held > 70e6
    assert int(found.stdout) < 1.35 * held
