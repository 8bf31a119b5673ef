"""Write directories for transformers, sentence-transformers and Google's code.

Google's fine-tuning scripts (google-research/bert, `run_classifier.py` and `run_squad.py`) name the
variables of their heads differently, and have no heads for tagging and multiple choice.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from bertkit.checkpoints.families import OWN_FIELDS
from bertkit.checkpoints.huggingface import load_into
from bertkit.checkpoints.save import foreign_tensors, model_details, save_model
from bertkit.checkpoints.tensorflow import (
    from_google_name,
    google_name,
    read_checkpoint,
    write_checkpoint,
    write_google_config,
)
from bertkit.errors import BertkitError
from bertkit.export.onnx import open_module, silence
from bertkit.export.padded import OUTPUTS, PADDED_INPUTS, PaddedModel
from bertkit.export.source import ExportSource, read_export_source
from bertkit.export.verify import Arrays, Opened
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.model.features import FeatureModel
from bertkit.model.heads import PretrainingModel
from bertkit.model.pooling import write_pooling
from bertkit.model.task_heads import extra_head

CHECKPOINT = "bert_model.ckpt"
GOOGLE_HEADS = {
    "classifier.weight": "output_weights",
    "classifier.bias": "output_bias",
    "qa_outputs.weight": "cls/squad/output_weights",
    "qa_outputs.bias": "cls/squad/output_bias",
}
"""Hugging Face's names → variables of Google's scripts, which do not transpose these matrices."""
IN_GOOGLE = {"classification", "multi-label-classification", "regression", "question-answering"}
IN_GOOGLE |= {"pretraining", "words", "encoder"}
OTHER_OUTPUT_NAMES = {"sop_logits": "seq_relationship_logits"}
"""The name of an output in transformers' ALBERT class → its name in `OUTPUTS`."""


def write_hugging_face(source: ExportSource, folder: Path) -> Opened:
    """Write a directory for transformers, or for sentence-transformers if the head is "embedding".

    Raises:
        BertkitError: the library has no class for the network or its head.
    """
    check_plain(source)
    details, pad_id = dict(source.details), source.tokenizer.pad_id
    [architecture] = model_details(source.model, source.config, details, pad_id)["architectures"]
    if architecture == "bertkit":
        raise BertkitError(
            f"transformers has no class for this network with the head '{source.head}' "
            f"({unusual(source.config) or 'plain'}); choose --to onnx"
        )

    def extra(inside: Path) -> None:
        if source.pooling is not None:
            pooling = dataclasses.replace(source.pooling, max_length=source.max_length)
            write_pooling(inside, pooling, source.config)

    pooler = source.pooler or source.head not in ("encoder", "embedding")
    save_model(folder, source.model, source.tokenizer, details, extra=extra, pooler=pooler)
    reader = "sentence_transformers" if source.head == "embedding" else "transformers"
    if importlib.util.find_spec(reader) is None:
        return read_back(read_export_source(folder).padded())
    if source.head == "embedding":
        return open_sentence_transformer(folder)
    return open_transformer(folder, architecture)


def unusual(config: ModelConfig) -> str:
    """Describe the config fields in which a network differs from BERT; "" if there are none."""
    plain = ModelConfig(vocab_size=1)
    found = [name for name in OWN_FIELDS if getattr(config, name) != getattr(plain, name)]
    return ", ".join(f"{name} {getattr(config, name)}" for name in found)


def check_plain(source: ExportSource) -> None:
    """Check that other libraries have the model's head.

    Raises:
        BertkitError: the head reads chosen layers or a BiLSTM, or scores ends given starts.
    """
    if isinstance(source.model, FeatureModel) or extra_head(source.model):
        raise BertkitError(
            "no other library has a head that reads chosen layers or a BiLSTM, or that scores ends "
            "given starts; export the encoder with --head encoder"
        )


def open_transformer(folder: Path, architecture: str) -> Opened:
    """Load a directory with transformers."""
    import transformers
    from transformers.utils import logging as their_logging

    their_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with silence():
        model: Any = getattr(transformers, architecture).from_pretrained(folder).eval()

    @torch.inference_mode()
    def run(arrays: Arrays) -> Arrays:
        with silence():
            outputs = model(**{name: torch.from_numpy(arrays[name]) for name in PADDED_INPUTS})
        named = {OTHER_OUTPUT_NAMES.get(name, name): value for name, value in outputs.items()}
        wanted = {name for names in OUTPUTS.values() for name in names}
        return {name: value.numpy() for name, value in named.items() if name in wanted}

    return Opened(("transformers",), run)


def open_sentence_transformer(folder: Path) -> Opened:
    """Load a directory with sentence-transformers, with the pooling that its files configure."""
    from transformers.utils import logging as their_logging

    their_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with silence():
        from sentence_transformers import SentenceTransformer

        model = SentenceTransformer(str(folder), device="cpu", local_files_only=True).eval()

    @torch.inference_mode()
    def run(arrays: Arrays) -> Arrays:
        with silence():
            outputs = model({name: torch.from_numpy(arrays[name]) for name in PADDED_INPUTS})
        return {"sentence_embedding": outputs["sentence_embedding"].numpy()}

    return Opened(("sentence-transformers", "transformers"), run)


def read_back(model: PaddedModel) -> Opened:
    """Wrap a bertkit model so that it runs like an exported one."""
    return open_module(model.eval().requires_grad_(False), model.outputs, "bertkit")


def write_google(source: ExportSource, folder: Path) -> Opened:
    """Write `bert_config.json`, `vocab.txt` and `bert_model.ckpt.*`, and read them back.

    Raises:
        BertkitError: Google's code does not support the head or the network.
    """
    check_plain(source)
    if source.head not in IN_GOOGLE:
        raise BertkitError(
            f"Google's code has no head '{source.head}'; choose --to onnx, or --head encoder"
        )
    config = source.config
    if not reads_pooler(source):
        config = dataclasses.replace(config, pooler_act=ModelConfig.pooler_act)
    write_google_config(config, folder)
    write_checkpoint(folder / CHECKPOINT, google_variables(source))
    source.tokenizer.save(folder)
    (folder / "tokenizer.json").unlink()  # Google's code reads only vocab.txt
    (folder / "tokenizer_config.json").unlink()
    again = read_google(source, folder)
    return read_back(PaddedModel(again, source.head, source.outputs))


def reads_pooler(source: ExportSource) -> bool:
    """Return whether an output depends on the pooler."""
    return (
        source.head not in ("question-answering", "words")
        and source.outputs[-1] != "last_hidden_state"
    )


def google_variables(source: ExportSource) -> dict[str, np.ndarray]:
    """Return the parameters as variables of a Google checkpoint, which transposes kernels.

    A pooler that no output depends on is untrained, and is left out.
    """
    variables = {}
    for name, tensor in foreign_tensors(source.model, "bert", pooler=reads_pooler(source)).items():
        bare = not name.startswith(("bert.", "cls.")) and name not in GOOGLE_HEADS
        full = f"bert.{name}" if bare else name
        variable, array = GOOGLE_HEADS.get(full) or google_name(full), tensor.numpy()
        variables[variable] = array.T if variable.endswith("/kernel") else array
    return variables


def read_google(source: ExportSource, folder: Path) -> nn.Module:
    """Return a model of the source's class, with its head, and the weights of a checkpoint."""
    heads = {variable: name for name, variable in GOOGLE_HEADS.items()}
    tensors = {}
    for variable, array in read_checkpoint(folder / CHECKPOINT, slots=False).items():
        plain = np.array(array.T if variable.endswith("/kernel") else array, order="C")
        tensors[heads.get(variable) or from_google_name(variable)] = torch.from_numpy(plain)

    def build(config: ModelConfig) -> Any:
        if source.task is not None:
            return source.task.build(config)
        if isinstance(source.model, Encoder):
            return Encoder(config)
        return PretrainingModel(config, pairs=source.model.nsp is not None)

    return load_into(source.config, tensors, build, folder, trainable=False).model
