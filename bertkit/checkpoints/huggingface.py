"""Loading of model directories: self-contained Hugging Face directories.

| file                  | content                                                |
|-----------------------|--------------------------------------------------------|
| `config.json`         | the sizes, under transformers' field names             |
| `model.safetensors`   | the weights in fp32, under transformers' names         |
| the tokenizer's files | `vocab.txt`, `tokenizer.json`, `tokenizer_config.json` |
| `bertkit.json`        | task, label names, how the model was made              |

Also supported: sharded weights, the older `pytorch_model.bin` (through torch's restricted loader,
which creates tensors but runs no code), 16-bit weights (converted to fp32), names without the
leading "bert.", and LayerNorm parameters called gamma and beta.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from bertkit.checkpoints.families import DEFAULTS, OWN_FIELDS, parameter_names, read_family
from bertkit.checkpoints.pretrained import is_optional_weight, tuned_tensors
from bertkit.checkpoints.weights import load_state, shown_names, weight_files
from bertkit.errors import BertkitError
from bertkit.files import read_object
from bertkit.model.encoder import ModelConfig, skip_weight_init
from bertkit.model.heads import PretrainingModel

Model = TypeVar("Model", bound=nn.Module)

ACTIVATION_NAMES = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""transformers' activation names → bertkit's."""

SUPPORTED = {
    "position_embedding_type": "absolute",
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""The required values of these `config.json` fields if present; others mean another network."""


@dataclass(frozen=True)
class LoadResult(Generic[Model]):
    """A loaded model, and the names that did not match, which callers should report."""

    model: Model
    """The model in evaluation mode, in fp32, on the CPU."""
    missing_keys: list[str]
    """Parameters of heads or the pooler that the file lacks: random, or 0 if not `trainable`."""
    unexpected_keys: list[str]
    """Tensors in the file that belong to other heads."""


def load_pretraining_model(directory: Path) -> PretrainingModel:
    """Load an encoder with its pre-training heads, in evaluation mode.

    The head for sentence pairs may be missing; the model then has `pairs=False`.

    Raises:
        BertkitError: a file is missing or damaged, or is not a BERT with a masked-language head.
    """
    config, tensors = load_parts(directory)
    if not any(name.startswith("cls.predictions.") for name in tensors):
        raise BertkitError(no_language_head(tensors, directory), code="no-language-head")
    pairs = "cls.seq_relationship.weight" in tensors
    build = partial(PretrainingModel, pairs=pairs)
    loaded = load_into(config, tensors, build, directory, trainable=False)
    return require_all_weights(loaded, directory, pooler=pairs)


def no_language_head(tensors: Iterable[str], source: Path) -> str:
    """Return the message for a model without a masked-language head: what it is instead."""
    names = list(tensors)
    if any(name.startswith("discriminator_predictions.") for name in names):
        what = "is an ELECTRA discriminator, which tells replaced tokens from original ones"
    elif tuned := tuned_tensors(names):
        what = (
            f"holds the head of a fine-tuned model ({shown_names(tuned)}), whose class config.json "
            "must name in architectures to predict with that head"
        )
    elif "cls.seq_relationship.weight" in names:
        what = "has only the one that predicts next sentences"
    elif "bert.embeddings.word_embeddings.weight" in names:
        what = "is an encoder alone"
    else:
        what = f"its tensors have names that bertkit does not know ({shown_names(names)})"
    return (
        f"{source} lacks cls.predictions, the head that predicts tokens, and {what}; choose a "
        "pre-trained masked language model"
    )


def load_model(
    directory: Path, build: Callable[[ModelConfig], Model], *, trainable: bool = True
) -> LoadResult[Model]:
    """Build a model, and load the directory's weights into it.

    Heads and pooler may be missing, so `load_model(folder, lambda c: ClassificationModel(c, 3))`
    returns a model ready for fine-tuning. If it is not `trainable`, what is missing is 0, so that
    no random numbers are drawn, which another thread may be training with.

    Raises:
        BertkitError: a file is missing or damaged, the network is not a BERT, or tensors of the
            encoder are missing, unknown or of another shape; the message names them.
    """
    return load_into(*load_parts(directory), build, directory, trainable=trainable)


def load_parts(directory: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read a directory's config and weights, after checking that their sizes agree."""
    from bertkit.checkpoints.limits import check_parameters

    config = load_config(directory)
    check_parameters(config, weight_files(directory), directory)
    return config, load_state(directory)


def require_all_weights(loaded: LoadResult[Model], source: Path, *, pooler: bool = True) -> Model:
    """Return the loaded model, or raise BertkitError if a weight of it is missing.

    `pooler` says whether the weights of the pooler, which many heads do not read, are needed.
    """
    needed = [n for n in loaded.missing_keys if pooler or not n.startswith("bert.pooler.")]
    if needed:
        tuned = tuned_tensors(loaded.unexpected_keys)
        what = f" and holds the head of a fine-tuned model ({shown_names(tuned)})" if tuned else ""
        raise BertkitError(
            f"{source} lacks {shown_names(needed)}{what}; fine-tune it, or choose a complete model"
        )
    return loaded.model


def load_into(
    config: ModelConfig,
    tensors: dict[str, Tensor],
    build: Callable[[ModelConfig], Model],
    source: Path,
    trainable: bool = True,
) -> LoadResult[Model]:
    """Build a model and give it tensors with Hugging Face's names, after checking their shapes.

    The tensors are removed from the dictionary and become the model's, so memory holds them once.
    """
    check_config_sizes(config, tensors, source)
    with torch.device("meta"):
        model = build(config)
    state: dict[str, Tensor] = {}
    new: list[str] = []
    unused = dict.fromkeys(tensors)
    for own, names in parameter_names(model).items():
        missing = [name for name in names if name not in tensors]
        if missing and not all(is_optional_weight(name) for name in missing):
            raise BertkitError(
                f"{source} lacks {shown_names(missing)}; the file is not a complete BERT"
            )
        new += missing
        if not missing:
            state[own] = matching_tensors(tensors, names, model.get_parameter(own).shape, source)
        elif not trainable:
            state[own] = torch.zeros(model.get_parameter(own).shape)
        for name in names:
            unused.pop(name, None)
    if unknown := [name for name in unused if not is_optional_weight(name)]:
        raise BertkitError(f"{source} holds {shown_names(unknown)}, which BERT does not have")
    if new and trainable:
        with skip_weight_init():
            model = build(config)  # initialises the missing ones; the others are replaced
    model.load_state_dict(state, strict=not new, assign=True)
    return LoadResult(model.eval(), new, list(unused))


def matching_tensors(
    tensors: dict[str, Tensor], names: tuple[str, ...], shape: torch.Size, source: Path
) -> Tensor:
    """Remove the named tensors, check that they add up to `shape`, and concatenate them."""
    parts = [tensors.pop(name) for name in names]
    wanted = (shape[0] // len(parts), *shape[1:])
    for name, part in zip(names, parts, strict=True):
        if tuple(part.shape) != wanted:
            raise BertkitError(
                f"{source}: {name} has shape {tuple(part.shape)}, the model needs {wanted}; "
                "config.json and weights do not belong together"
            )
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def check_config_sizes(config: ModelConfig, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Raise a BertkitError if a config and the tensors differ in sizes, before a network is built.

    A damaged config may demand a trillion parameters.
    """
    width, inner = config.embedding_width, config.intermediate_size
    embeddings, first = "bert.embeddings.", "bert.encoder.layer.0.intermediate.dense.weight"
    wanted = {
        f"{embeddings}word_embeddings.weight": (config.vocab_size, width),
        f"{embeddings}position_embeddings.weight": (config.max_position_embeddings, width),
        f"{embeddings}token_type_embeddings.weight": (config.type_vocab_size, width),
        first: (inner, config.hidden_size),
    }
    for name, shape in wanted.items():
        if name not in tensors:
            raise BertkitError(f"{source} lacks {name}; the file is not a complete BERT")
        if tuple(tensors[name].shape) != shape:
            raise BertkitError(
                f"{source}: {name} has shape {tuple(tensors[name].shape)}, config.json says "
                f"{shape}; config and weights do not belong together"
            )
    layers = sum(name.endswith("attention.self.query.weight") for name in tensors)
    wanted_layers = 1 if config.share_layers else config.num_hidden_layers
    if layers != wanted_layers:
        raise BertkitError(
            f"{source}: the weights have {layers} layers, config.json says "
            f"{wanted_layers}; config and weights do not belong together"
        )


def load_config(directory: Path) -> ModelConfig:
    """Read the model config from a directory's `config.json`.

    Raises:
        BertkitError: the directory or file is missing, is not valid JSON, or describes a network
            that bertkit does not support.
    """
    named_by_prefix = Path(f"{directory}.index").is_file()
    if not named_by_prefix and not directory.is_dir():
        raise BertkitError(f"there is no model directory {directory}; check the path")
    configured = (directory / "config.json").is_file()
    if named_by_prefix or (not configured and any(directory.glob("*.ckpt*.index"))):
        raise BertkitError(
            f"{directory} is a Google checkpoint; make it a model directory first: "
            f"bertkit export {directory} --to huggingface --out DIR"
        )
    return read_model_config(directory / "config.json")


def read_model_config(path: Path) -> ModelConfig:
    """Read the model config from a `config.json` or Google's `bert_config.json`.

    Fields that bertkit does not know are ignored.
    """
    values = read_object(path)
    for name, value in SUPPORTED.items():
        if values.get(name, value) != value:
            raise BertkitError(f"{path}: {name} is {values[name]!r}; only {value!r} is supported")
    if "vocab_size" not in values:
        raise BertkitError(f"{path} has no vocab_size; it is not a BERT config")
    known = [field for field in dataclasses.fields(ModelConfig) if field.name not in OWN_FIELDS]
    types = {field.name: field.type for field in known}
    values = DEFAULTS.get(str(values.get("model_type")), {}) | values
    fields = {name: values[name] for name in types if name in values}
    for name, value in fields.items():
        if types[name] == "float" and type(value) is int:  # such as a dropout of 0
            fields[name] = float(value)
    fields |= read_family(values, path)
    act = str(fields.get("hidden_act", "gelu"))
    if act not in ACTIVATION_NAMES:
        raise BertkitError(
            f"{path}: the activation hidden_act {act!r} is not supported, and with another one the "
            f"model would give wrong results; supported: {', '.join(ACTIVATION_NAMES)}"
        )
    try:
        return ModelConfig(**{**fields, "hidden_act": ACTIVATION_NAMES[act]})
    except BertkitError as error:
        raise BertkitError(f"{path}: {error}") from None
