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

    from bertkit.corpus.clean import clean as clean
    from bertkit.corpus.prepare import prepare as prepare
    from bertkit.corpus.store import TokenStore as TokenStore
    from bertkit.errors import BertkitError as BertkitError
    from bertkit.export.export import export_model as export_model
    from bertkit.finetuning.finetune import finetune as finetune
    from bertkit.finetuning.runs import FinetuneSettings as FinetuneSettings
    from bertkit.finetuning.runs import Grid as Grid
    from bertkit.finetuning.runs import TrainingSettings as TrainingSettings
    from bertkit.predict.embeddings import load_embedder as load_embedder
    from bertkit.predict.evaluate import evaluate as evaluate
    from bertkit.predict.features import embed_file as embed_file
    from bertkit.predict.files import predict_file as predict_file
    from bertkit.predict.load import load as load
    from bertkit.report.pretraining import write_report as write_report
    from bertkit.serve.app import serving_app as serving_app
    from bertkit.text.sources import TextSource as TextSource
    from bertkit.tokenizer.learn import learn_tokenizer as learn_tokenizer
    from bertkit.tokenizer.wordpiece import Tokenizer as Tokenizer
    from bertkit.training.pretrain import pretrain as pretrain

MODULES = {
    "BertkitError": "errors",
    "FinetuneSettings": "finetuning.runs",
    "Grid": "finetuning.runs",
    "TextSource": "text.sources",
    "TokenStore": "corpus.store",
    "Tokenizer": "tokenizer.wordpiece",
    "TrainingSettings": "finetuning.runs",
    "clean": "corpus.clean",
    "embed_file": "predict.features",
    "evaluate": "predict.evaluate",
    "export_model": "export.export",
    "finetune": "finetuning.finetune",
    "learn_tokenizer": "tokenizer.learn",
    "load": "predict.load",
    "load_embedder": "predict.embeddings",
    "predict_file": "predict.files",
    "prepare": "corpus.prepare",
    "pretrain": "training.pretrain",
    "serving_app": "serve.app",
    "write_report": "report.pretraining",
}
"""Public name -> the module that defines it."""
__all__ = list(MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name from the module that defines it."""
    if name in MODULES:
        return getattr(import_module(f"bertkit.{MODULES[name]}"), name)
    raise AttributeError(f"module 'bertkit' has no attribute '{name}'")


def __dir__() -> list[str]:
    """Return the public names of the package."""
    return [*__all__, "__version__"]
