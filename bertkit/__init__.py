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
    from bertkit.checkpoints.vocabulary import extend_vocabulary
    from bertkit.corpus.build import PrepareOptions, prepare
    from bertkit.corpus.clean import CleanOptions, clean
    from bertkit.corpus.from_text import TextOptions, store_from_text
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
    from bertkit.doctor.run import diagnose
    from bertkit.errors import BertkitError
    from bertkit.explain.trace import trace_example
    from bertkit.export.export import export_model
    from bertkit.finetuning.finetune import finetune
    from bertkit.finetuning.settings import FinetuneSettings, Grid, TrainingSettings
    from bertkit.model.encoder import Encoder, ModelConfig
    from bertkit.model.heads import PretrainingModel
    from bertkit.planning.plan import CorpusSize, plan
    from bertkit.predict.embeddings import load_embedder
    from bertkit.predict.evaluate import evaluate
    from bertkit.predict.features import Extraction
    from bertkit.predict.files import predict_file
    from bertkit.predict.load import load, model_info
    from bertkit.predict.minimal_pairs import evaluate_minimal_pairs
    from bertkit.predict.retrieval import evaluate_retrieval
    from bertkit.predict.text_vectors import embed_file, extract_file
    from bertkit.pretraining_data.batch import Packed, pack
    from bertkit.report.pretraining import write_report
    from bertkit.reproduce.reproduce import reproduce_tables
    from bertkit.serve.app import serving_app
    from bertkit.tasks.predictions import to_frame
    from bertkit.tasks.windows import QuestionWindows, WindowLengths, WordWindows
    from bertkit.tokenizer.learn import LearnOptions, learn_tokenizer
    from bertkit.tokenizer.train import learn_vocabulary, measure_vocabulary
    from bertkit.tokenizer.wordpiece import Tokenizer
    from bertkit.training.pretrain import pretrain
    from bertkit.training.recipe import PretrainRecipe

_HOMES = {
    "BertkitError": "bertkit.errors",
    "ChoiceColumns": "bertkit.datasets.columns",
    "CleanOptions": "bertkit.corpus.clean",
    "CorpusSize": "bertkit.planning.plan",
    "DataFiles": "bertkit.datasets.benchmarks",
    "Encoder": "bertkit.model.encoder",
    "Extraction": "bertkit.predict.features",
    "FinetuneSettings": "bertkit.finetuning.settings",
    "Grid": "bertkit.finetuning.settings",
    "LabelSetColumns": "bertkit.datasets.columns",
    "LearnOptions": "bertkit.tokenizer.learn",
    "ModelConfig": "bertkit.model.encoder",
    "NumberColumns": "bertkit.datasets.columns",
    "Packed": "bertkit.pretraining_data.batch",
    "PrepareOptions": "bertkit.corpus.build",
    "PretrainRecipe": "bertkit.training.recipe",
    "PretrainingModel": "bertkit.model.heads",
    "QuestionColumns": "bertkit.datasets.columns",
    "QuestionWindows": "bertkit.tasks.windows",
    "TextColumns": "bertkit.datasets.columns",
    "TextOptions": "bertkit.corpus.from_text",
    "TokenStore": "bertkit.corpus.store",
    "Tokenizer": "bertkit.tokenizer.wordpiece",
    "TrainingSettings": "bertkit.finetuning.settings",
    "WindowLengths": "bertkit.tasks.windows",
    "WordColumns": "bertkit.datasets.columns",
    "WordWindows": "bertkit.tasks.windows",
    "clean": "bertkit.corpus.clean",
    "diagnose": "bertkit.doctor.run",
    "embed_file": "bertkit.predict.text_vectors",
    "evaluate": "bertkit.predict.evaluate",
    "evaluate_minimal_pairs": "bertkit.predict.minimal_pairs",
    "evaluate_retrieval": "bertkit.predict.retrieval",
    "export_model": "bertkit.export.export",
    "extend_vocabulary": "bertkit.checkpoints.vocabulary",
    "extract_file": "bertkit.predict.text_vectors",
    "finetune": "bertkit.finetuning.finetune",
    "learn_tokenizer": "bertkit.tokenizer.learn",
    "learn_vocabulary": "bertkit.tokenizer.train",
    "load": "bertkit.predict.load",
    "load_embedder": "bertkit.predict.embeddings",
    "measure_vocabulary": "bertkit.tokenizer.train",
    "model_info": "bertkit.predict.load",
    "pack": "bertkit.pretraining_data.batch",
    "plan": "bertkit.planning.plan",
    "predict_file": "bertkit.predict.files",
    "prepare": "bertkit.corpus.build",
    "pretrain": "bertkit.training.pretrain",
    "push": "bertkit.checkpoints.publish",
    "reproduce_tables": "bertkit.reproduce.reproduce",
    "serving_app": "bertkit.serve.app",
    "store_from_text": "bertkit.corpus.from_text",
    "to_frame": "bertkit.tasks.predictions",
    "trace_example": "bertkit.explain.trace",
    "write_report": "bertkit.report.pretraining",
}

__all__ = [
    "BertkitError",
    "ChoiceColumns",
    "CleanOptions",
    "CorpusSize",
    "DataFiles",
    "Encoder",
    "Extraction",
    "FinetuneSettings",
    "Grid",
    "LabelSetColumns",
    "LearnOptions",
    "ModelConfig",
    "NumberColumns",
    "Packed",
    "PrepareOptions",
    "PretrainRecipe",
    "PretrainingModel",
    "QuestionColumns",
    "QuestionWindows",
    "TextColumns",
    "TextOptions",
    "TokenStore",
    "Tokenizer",
    "TrainingSettings",
    "WindowLengths",
    "WordColumns",
    "WordWindows",
    "clean",
    "diagnose",
    "embed_file",
    "evaluate",
    "evaluate_minimal_pairs",
    "evaluate_retrieval",
    "export_model",
    "extend_vocabulary",
    "extract_file",
    "finetune",
    "learn_tokenizer",
    "learn_vocabulary",
    "load",
    "load_embedder",
    "measure_vocabulary",
    "model_info",
    "pack",
    "plan",
    "predict_file",
    "prepare",
    "pretrain",
    "push",
    "reproduce_tables",
    "serving_app",
    "store_from_text",
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
