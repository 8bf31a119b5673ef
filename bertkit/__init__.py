"""bertkit: BERT from raw text to answers.

The packages follow the data: text → tokens → corpus → examples → model → training → tasks →
predict. The names below are the public interface. Each is imported when it is first used, so that
`import bertkit` is instant.
"""

from __future__ import annotations

from importlib import import_module

__version__ = "0.1.0"

TYPE_CHECKING = False  # importing typing would take longer than everything else here
if TYPE_CHECKING:
    from typing import Any

    from bertkit.checkpoints.publish import push
    from bertkit.corpus.build import prepare
    from bertkit.corpus.clean import clean
    from bertkit.corpus.store import TokenStore
    from bertkit.datasets.benchmarks import DataFiles
    from bertkit.datasets.columns import (
        ChoiceColumns,
        LabelSetColumns,
        NumberColumns,
        QuestionColumns,
        TextColumns,
        WordColumns,
    )
    from bertkit.errors import BertkitError
    from bertkit.explain.trace import trace_example
    from bertkit.finetuning.finetune import finetune
    from bertkit.finetuning.grid import FinetuneSettings, Grid
    from bertkit.finetuning.settings import TrainingSettings
    from bertkit.model.encoder import Encoder, ModelConfig
    from bertkit.model.heads import PretrainingModel
    from bertkit.predict.embeddings import load_embedder
    from bertkit.predict.evaluate import evaluate
    from bertkit.predict.files import predict_file
    from bertkit.predict.load import load
    from bertkit.predict.text_vectors import embed_file, extract_file
    from bertkit.pretraining_data.batch import Packed, pack
    from bertkit.report.pretraining import write_report
    from bertkit.tasks.predictions import to_frame
    from bertkit.tasks.windows import QuestionWindows, WindowLengths, WordWindows
    from bertkit.tokenizer.train import learn_vocabulary
    from bertkit.tokenizer.wordpiece import Tokenizer
    from bertkit.training.pretrain import pretrain
    from bertkit.training.recipe import PretrainRecipe

_HOMES = {
    "BertkitError": "bertkit.errors",
    "ChoiceColumns": "bertkit.datasets.columns",
    "DataFiles": "bertkit.datasets.benchmarks",
    "Encoder": "bertkit.model.encoder",
    "FinetuneSettings": "bertkit.finetuning.grid",
    "Grid": "bertkit.finetuning.grid",
    "LabelSetColumns": "bertkit.datasets.columns",
    "ModelConfig": "bertkit.model.encoder",
    "NumberColumns": "bertkit.datasets.columns",
    "Packed": "bertkit.pretraining_data.batch",
    "PretrainRecipe": "bertkit.training.recipe",
    "PretrainingModel": "bertkit.model.heads",
    "QuestionColumns": "bertkit.datasets.columns",
    "QuestionWindows": "bertkit.tasks.windows",
    "TextColumns": "bertkit.datasets.columns",
    "TokenStore": "bertkit.corpus.store",
    "Tokenizer": "bertkit.tokenizer.wordpiece",
    "TrainingSettings": "bertkit.finetuning.settings",
    "WindowLengths": "bertkit.tasks.windows",
    "WordColumns": "bertkit.datasets.columns",
    "WordWindows": "bertkit.tasks.windows",
    "clean": "bertkit.corpus.clean",
    "embed_file": "bertkit.predict.text_vectors",
    "evaluate": "bertkit.predict.evaluate",
    "extract_file": "bertkit.predict.text_vectors",
    "finetune": "bertkit.finetuning.finetune",
    "learn_vocabulary": "bertkit.tokenizer.train",
    "load": "bertkit.predict.load",
    "load_embedder": "bertkit.predict.embeddings",
    "pack": "bertkit.pretraining_data.batch",
    "predict_file": "bertkit.predict.files",
    "prepare": "bertkit.corpus.build",
    "pretrain": "bertkit.training.pretrain",
    "push": "bertkit.checkpoints.publish",
    "to_frame": "bertkit.tasks.predictions",
    "trace_example": "bertkit.explain.trace",
    "write_report": "bertkit.report.pretraining",
}

__all__ = [
    "BertkitError",
    "ChoiceColumns",
    "DataFiles",
    "Encoder",
    "FinetuneSettings",
    "Grid",
    "LabelSetColumns",
    "ModelConfig",
    "NumberColumns",
    "Packed",
    "PretrainRecipe",
    "PretrainingModel",
    "QuestionColumns",
    "QuestionWindows",
    "TextColumns",
    "TokenStore",
    "Tokenizer",
    "TrainingSettings",
    "WindowLengths",
    "WordColumns",
    "WordWindows",
    "clean",
    "embed_file",
    "evaluate",
    "extract_file",
    "finetune",
    "learn_vocabulary",
    "load",
    "load_embedder",
    "pack",
    "predict_file",
    "prepare",
    "pretrain",
    "push",
    "to_frame",
    "trace_example",
    "write_report",
]


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'bertkit' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return the public names of the package."""
    return [*__all__, "__version__"]
