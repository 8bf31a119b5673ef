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

    from bertkit.checkpoints.extend import extend_vocabulary as extend_vocabulary
    from bertkit.checkpoints.publish import push as push
    from bertkit.corpus.clean import CleanOptions as CleanOptions
    from bertkit.corpus.clean import clean as clean
    from bertkit.corpus.prepare import prepare as prepare
    from bertkit.corpus.prepare import store_from_text as store_from_text
    from bertkit.corpus.store import TokenStore as TokenStore
    from bertkit.errors import BertkitError as BertkitError
    from bertkit.export.export import export_model as export_model
    from bertkit.finetuning.finetune import finetune as finetune
    from bertkit.finetuning.settings import FinetuneSettings as FinetuneSettings
    from bertkit.finetuning.settings import Grid as Grid
    from bertkit.finetuning.settings import TrainingSettings as TrainingSettings
    from bertkit.model.encoder import Encoder as Encoder
    from bertkit.model.encoder import ModelConfig as ModelConfig
    from bertkit.model.heads import PretrainingModel as PretrainingModel
    from bertkit.predict.embeddings import load_embedder as load_embedder
    from bertkit.predict.embeddings import nearest_texts as nearest_texts
    from bertkit.predict.evaluate import evaluate as evaluate
    from bertkit.predict.features import Extraction as Extraction
    from bertkit.predict.features import embed_file as embed_file
    from bertkit.predict.features import extract_file as extract_file
    from bertkit.predict.files import predict_file as predict_file
    from bertkit.predict.load import load as load
    from bertkit.predict.load import model_info as model_info
    from bertkit.pretraining_data.batch import Packed as Packed
    from bertkit.pretraining_data.batch import pack as pack
    from bertkit.report.pretraining import write_report as write_report
    from bertkit.serve.app import serving_app as serving_app
    from bertkit.tasks.data import DataFiles as DataFiles
    from bertkit.tasks.types import TASKS as TASKS
    from bertkit.tasks.windows import WindowLengths as WindowLengths
    from bertkit.text.sources import TextSource as TextSource
    from bertkit.tokenizer.learn import LearnOptions as LearnOptions
    from bertkit.tokenizer.learn import learn_tokenizer as learn_tokenizer
    from bertkit.tokenizer.learn import learn_vocabulary as learn_vocabulary
    from bertkit.tokenizer.learn import measure_vocabulary as measure_vocabulary
    from bertkit.tokenizer.wordpiece import Tokenizer as Tokenizer
    from bertkit.training.plan import plan as plan
    from bertkit.training.pretrain import pretrain as pretrain
    from bertkit.training.recipe import PretrainRecipe as PretrainRecipe

_NAMES = {
    "checkpoints.publish": ("push",),
    "checkpoints.extend": ("extend_vocabulary",),
    "corpus.clean": ("CleanOptions", "clean"),
    "corpus.prepare": ("prepare", "store_from_text"),
    "corpus.store": ("TokenStore",),
    "errors": ("BertkitError",),
    "export.export": ("export_model",),
    "finetuning.finetune": ("finetune",),
    "finetuning.settings": ("FinetuneSettings", "Grid", "TrainingSettings"),
    "model.encoder": ("Encoder", "ModelConfig"),
    "model.heads": ("PretrainingModel",),
    "predict.embeddings": ("load_embedder", "nearest_texts"),
    "predict.evaluate": ("evaluate",),
    "predict.features": ("Extraction", "embed_file", "extract_file"),
    "predict.files": ("predict_file",),
    "predict.load": ("load", "model_info"),
    "pretraining_data.batch": ("Packed", "pack"),
    "report.pretraining": ("write_report",),
    "serve.app": ("serving_app",),
    "tasks.data": ("DataFiles",),
    "tasks.types": ("TASKS",),
    "tasks.windows": ("WindowLengths",),
    "text.sources": ("TextSource",),
    "tokenizer.learn": (
        "LearnOptions",
        "learn_tokenizer",
        "learn_vocabulary",
        "measure_vocabulary",
    ),
    "tokenizer.wordpiece": ("Tokenizer",),
    "training.plan": ("plan",),
    "training.pretrain": ("pretrain",),
    "training.recipe": ("PretrainRecipe",),
}
"""Module -> the public names that it defines."""
_HOMES = dict(sorted((name, module) for module, names in _NAMES.items() for name in names))
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name in _HOMES:
        return getattr(import_module(f"bertkit.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'bertkit' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return the public names of the package."""
    return [*__all__, "__version__"]
