"""bertkit: BERT from raw text to answers.

The story, in the order of the packages: text → tokens → corpus → examples → model → training →
tasks → predict. The names below are the public interface; they are imported when first used, so
that `import bertkit` is instant.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from bertkit.corpus.prepare import prepare
    from bertkit.corpus.store import TokenStore
    from bertkit.errors import BertkitError
    from bertkit.examples.packed import Packed, pack
    from bertkit.model.encoder import Encoder, ModelConfig
    from bertkit.model.heads import PretrainingModel
    from bertkit.predict.embedding import load_embedder
    from bertkit.predict.load import load
    from bertkit.tasks.finetune import finetune
    from bertkit.tasks.grid import Grid
    from bertkit.tasks.own import Files, Lengths
    from bertkit.tasks.own_files import Columns
    from bertkit.tasks.tune import Tuning
    from bertkit.tokens.learn import learn_vocabulary
    from bertkit.tokens.tokenizer import Tokenizer
    from bertkit.training.pretrain import pretrain
    from bertkit.training.recipe import PretrainRecipe

_HOMES = {
    "BertkitError": "bertkit.errors",
    "Columns": "bertkit.tasks.own_files",
    "Encoder": "bertkit.model.encoder",
    "Files": "bertkit.tasks.own",
    "Grid": "bertkit.tasks.grid",
    "Lengths": "bertkit.tasks.own",
    "ModelConfig": "bertkit.model.encoder",
    "Packed": "bertkit.examples.packed",
    "PretrainRecipe": "bertkit.training.recipe",
    "PretrainingModel": "bertkit.model.heads",
    "TokenStore": "bertkit.corpus.store",
    "Tokenizer": "bertkit.tokens.tokenizer",
    "Tuning": "bertkit.tasks.tune",
    "finetune": "bertkit.tasks.finetune",
    "learn_vocabulary": "bertkit.tokens.learn",
    "load": "bertkit.predict.load",
    "load_embedder": "bertkit.predict.embedding",
    "pack": "bertkit.examples.packed",
    "prepare": "bertkit.corpus.prepare",
    "pretrain": "bertkit.training.pretrain",
}

__all__ = [
    "BertkitError",
    "Columns",
    "Encoder",
    "Files",
    "Grid",
    "Lengths",
    "ModelConfig",
    "Packed",
    "PretrainRecipe",
    "PretrainingModel",
    "TokenStore",
    "Tokenizer",
    "Tuning",
    "finetune",
    "learn_vocabulary",
    "load",
    "load_embedder",
    "pack",
    "prepare",
    "pretrain",
]


def __getattr__(name: str) -> Any:
    """Import a public name from its home."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'bertkit' has no attribute '{name}'")


def __dir__() -> list[str]:
    """The public names."""
    return [*__all__, "__version__"]
