"""Fixtures shared by all tests, and the switch that lets beartype check tensor shapes."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

os.environ["BERTKIT_CHECK_SHAPES"] = "1"  # before bertkit.pretraining_data.batch is imported
# Without bytecode every worker of the tests, and every command that they start, compiles it all.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_NUM_THREADS", "1")  # networks this small lose by sharing their work
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # as in a background job of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)

import numpy as np
import pytest

if TYPE_CHECKING:  # only the processes that run tests import torch, not the one that starts them
    from bertkit.corpus.store import TokenStore
    from bertkit.model.encoder import Encoder, ModelConfig
    from bertkit.tokenizer.wordpiece import Tokenizer


def pytest_collectstart() -> None:
    """Import torch before what is instrumented, or its bytecode is not found."""
    import torch  # noqa: F401

    gc.disable()  # while modules are imported; collections would traverse all of them


def pytest_collection_finish() -> None:
    """Leave what has been imported out of every later collection."""
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Each test begins with one thread, also after one that has left another number behind."""
    import torch

    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


GROUPED = (
    *("crash/test_crashes.py", "training/test_ranks.py", "training/test_pretrain.py"),
    *("checkpoints/test_hub.py", "checkpoints/test_publish.py"),
    *("corpus/test_prepare.py", "corpus/test_executors.py", "report/test_pretraining.py"),
    *("serve/test_page.py", "serve/test_process.py", "export/test_export.py"),
)
"""The modules of which one worker runs all tests, because their fixtures take long to make."""
ORACLES = pytest.mark.xdist_group("oracles")
"""Of tests that import large libraries to compare with; one worker runs them all."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of some modules together; these begin first, so that none is left alone."""
    for item in items:
        module = item.path.relative_to(Path(__file__).parent).as_posix()
        if module in GROUPED:
            item.add_marker(pytest.mark.xdist_group(module))
        elif "transformers" in getattr(item, "fixturenames", ()):
            item.add_marker(ORACLES)
    items.sort(key=lambda item: item.get_closest_marker("xdist_group") is None)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the seconds that the tests of each folder took, the longest first."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if type(report) is pytest.TestReport:  # and not a part of one
                folder = Path(report.nodeid.partition("::")[0]).parent.as_posix()
                seconds[folder] += report.duration  # type: ignore[assignment]
    for folder, time in seconds.most_common():
        terminalreporter.write_line(f"{time:7.1f} s  {folder}")


@pytest.fixture(scope="session", autouse=True)
def plain_curves() -> Iterator[None]:
    """What every run would repeat for half a second: drawing curves, as the tests of reports do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bertkit.report.page.render_svg", lambda *_, **__: "<svg></svg>")
        yield


def tiny_config(vocabulary: Tokenizer | int, **changes: Any) -> ModelConfig:
    """The sizes of a network that is made and run in milliseconds, with changes."""
    from bertkit.model.encoder import ModelConfig  # instrumented, so not before pytest has begun

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 64, "max_position_embeddings": 40}
    size = vocabulary if isinstance(vocabulary, int) else vocabulary.size
    return ModelConfig(vocab_size=size, **{**sizes, **changes})


def need_precision(name: str, config: ModelConfig) -> None:
    """Skip a test if this processor does not compute networks of this shape in a precision."""
    from bertkit.model.native import possible_modes

    if name not in possible_modes(config):
        pytest.skip(f"the processor has no {name} for this network")


@pytest.fixture(scope="session")
def transformers() -> Any:
    """The library, which takes seconds to import."""
    return pytest.importorskip("transformers")


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of real data sets; tests that need it are skipped where it is absent."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("BERTKIT_DATA", default))
    if not folder.is_dir():
        pytest.skip(f"no data folder: {folder} is absent and BERTKIT_DATA is not set")
    return folder


WORDS = [
    *("river", "stone", "bridge", "lantern", "harvest", "winter", "garden", "letter", "sailor"),
    *("mountain", "window", "copper", "thread", "market", "evening", "shadow", "candle", "forest"),
    *("silver", "meadow", "orchard", "harbour", "thunder", "blanket", "kettle", "pigeon", "saddle"),
    *("barley", "cotton", "mirror", "walking", "singing", "running", "quickly", "slowly"),
]


CHOICES = np.array(WORDS)


def make_document(rng: np.random.Generator, sentences: int) -> str:
    """One document of invented sentences, one sentence a line."""
    lines = []
    for _ in range(sentences):
        words = rng.choice(CHOICES, int(rng.integers(3, 16)))
        lines.append(" ".join(words).capitalize() + ".")
    return "\n".join(lines)


@pytest.fixture(scope="session")
def corpus_text() -> str:
    """Sixty documents of 1 to 40 sentences, blank lines between them."""
    rng = np.random.default_rng(0)
    return "\n\n".join(make_document(rng, int(rng.integers(1, 41))) for _ in range(60)) + "\n"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Whole words for the first twenty words, pieces for the rest."""
    from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS, Tokenizer

    pieces = list(WORDS[:20]) + [word[:3] for word in WORDS[20:]]
    continuations = [f"##{word[3:]}" for word in WORDS[20:]]
    letters = list("abcdefghijklmnopqrstuvwxyz.,")
    vocabulary = dict.fromkeys(
        [*SPECIAL_TOKENS, *letters, *(f"##{c}" for c in letters), *pieces, *continuations]
    )
    return Tokenizer.from_vocabulary(list(vocabulary), lowercase=True)


@pytest.fixture(scope="session")
def store(
    corpus_text: str, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory
) -> TokenStore:
    """A small token store with held-out documents; tests must not write into it."""
    from bertkit.corpus.prepare import prepare

    folder = tmp_path_factory.mktemp("store")
    text = folder / "corpus.txt"
    text.write_text(corpus_text)
    return prepare([str(text)], tokenizer, folder / "store", held_out=0.2)


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file of one's own: `write("train.csv", "text,label...")`."""

    def make(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return make


def load_encoder(directory: Path) -> Encoder:
    """Load the encoder and pooler of a BERT directory; raise if it lacks one of their weights."""
    from bertkit.checkpoints.pretrained import load_model, require_all_weights
    from bertkit.model.encoder import Encoder

    return require_all_weights(load_model(directory, Encoder), directory)


def run(*words: object, status: int = 0) -> None:
    """Run a command in this process; it must end with a status."""
    from bertkit.cli.app import main

    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert ended.value.code == status


def read_rows(*words: Any, **options: Any) -> Iterator[tuple[str, Any]]:
    """Yield the location and the fields of every usable row of a file."""
    from bertkit.tasks.columns import read_rows as rows_of_file

    for _, place, row in rows_of_file(*words, **options):
        yield place, row


def python(*words: object, check: bool = False, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run Python in a process of its own, and keep what it prints."""
    command = [sys.executable, *map(str, words)]
    options = {"capture_output": True, "text": True, "timeout": 300, **options}
    return subprocess.run(command, check=check, **options)


class Bomb:
    """Would make a file if a plain pickle loader met it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))
