"""Loading of models: Hugging Face directories, runs of bertkit, models of the hub, and Google's.

| file                  | content                                                |
|-----------------------|--------------------------------------------------------|
| `config.json`         | the sizes, under transformers' field names             |
| `model.safetensors`   | the weights in fp32, under transformers' names         |
| the tokenizer's files | `vocab.txt`, `tokenizer.json`, `tokenizer_config.json` |
| `bertkit.json`        | task, label names, how the model was made              |

A legacy `pytorch_model.bin`, 16-bit weights and older names are read, too.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from bertkit.checkpoints.names import BERT, OWN_FIELDS, family_of, file_names, require
from bertkit.checkpoints.save import no_model, read_weights, shown_names
from bertkit.errors import BertkitError
from bertkit.files import from_home, read_object, read_optional
from bertkit.model.encoder import Encoder, ModelConfig, check_vocabulary, initialize
from bertkit.model.heads import PretrainingModel
from bertkit.tokenizer.wordpiece import Tokenizer

Model = TypeVar("Model", bound=nn.Module)

ACTIVATION_NAMES = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""transformers' activation names -> bertkit's."""
SUPPORTED = {
    "position_embedding_type": "absolute",
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}
"""The required values of these `config.json` fields if present; others mean another network."""
MAX_SHARED_LAYERS = 1000
"""The maximum depth if layers share weights: no file's size limits what a config then asks for."""
TUNED_PREFIXES = ("classifier.", "qa_outputs.", "output_weights", "output_bias", "cls.squad.")
"""The beginnings of the names of tensors in heads of fine-tuned models, ours and Google's."""
COMMIT_FOLDER = re.compile(r"models--(?P<repo>.+)/snapshots/(?P<commit>[0-9a-f]{40})")
"""The end of the path of a model in the hub's cache."""


@dataclass(frozen=True)
class LoadResult(Generic[Model]):
    """A loaded model, and the names that did not match, which callers should report."""

    model: Model
    """The model in evaluation mode, in fp32, on the CPU."""
    missing_keys: list[str]
    """Parameters of heads or the pooler that the file lacks: random, or 0 if not `trainable`."""
    unexpected_keys: list[str]
    """Tensors in the file that belong to other heads."""


@dataclass(frozen=True)
class PretrainedWeights:
    """The weights, config and tokenizer of a model, in memory."""

    path: Path
    config: ModelConfig
    tensors: Mapping[str, Tensor]
    """The weights, by bertkit's names."""
    tokenizer: Tokenizer
    details: Mapping[str, Any]
    """The content of `bertkit.json`; empty for models that bertkit did not write."""

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of the weights, the vocabulary and the config, in hex."""
        digest = hashlib.sha256(f"{self.tokenizer.content_hash} {self.config}".encode())
        for name in sorted(self.tensors):
            digest.update(name.encode())
            tensor = self.tensors[name].detach().cpu().contiguous()
            digest.update(tensor.flatten().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    @property
    def hub(self) -> str:
        """`ORG/NAME@COMMIT` of a model of the hub; "" for others."""
        return hub_commit(self.path)

    @property
    def origin(self) -> str:
        """Where the weights are from: `ORG/NAME@COMMIT` on the hub, else the path."""
        return self.hub or str(self.path)

    @property
    def pair(self) -> str:
        """The objective of the pair head."""
        return pair_objective(self.details, self.config)

    def with_dropout(self, share: float) -> PretrainedWeights:
        """Return the same weights with another dropout probability in the config."""
        config = replace(self.config, hidden_dropout_prob=share, attention_probs_dropout_prob=share)
        return replace(self, config=config)

    def build(
        self, make: Callable[[ModelConfig], Model], *, keep_head: bool, copy: bool = True
    ) -> LoadResult[Model]:
        """Build a model with these weights, copied or shared; a head that is not kept is new."""
        tensors = {
            name: tensor.clone() if copy else tensor
            for name, tensor in self.tensors.items()
            if keep_head or not is_optional_weight(name) or name.startswith("encoder.pooler.")
        }
        return load_into(self.config, tensors, make, self.path)


def read_pretrained(path: Path | str) -> PretrainedWeights:
    """Read a Hugging Face directory, a model of the hub, a bertkit run or a Google checkpoint."""
    path = resolve_model(path)
    folder, home = model_folder(path), tokenizer_folder(path)
    config, tensors = load_parts(folder)
    tokenizer = Tokenizer.load(home)
    check_vocabulary(config, tokenizer.size)
    return PretrainedWeights(path, config, tensors, tokenizer, read_details(home))


def load_pretraining_model(directory: Path) -> PretrainingModel:
    """Load an encoder with its pre-training heads; `pairs=False` if that for pairs is missing."""
    config, tensors = load_parts(directory)
    if not any(name.startswith("mlm.") for name in tensors):
        heads = [name for name in tensors if not name.startswith("encoder.")]
        raise BertkitError(
            f"{directory} lacks the head that predicts tokens, and has {shown_names(heads)}; "
            "choose a pre-trained masked language model",
            code="no-language-head",
        )
    pairs = "nsp.dense.weight" in tensors
    build = partial(PretrainingModel, pairs=pairs)
    loaded = load_into(config, tensors, build, directory, trainable=False)
    return require_all_weights(loaded, directory, pooler=pairs)


def load_model(
    directory: Path, build: Callable[[ModelConfig], Model], *, trainable: bool = True
) -> LoadResult[Model]:
    """Build a model, and load the directory's weights into it; heads and pooler may be missing."""
    return load_into(*load_parts(directory), build, directory, trainable=trainable)


def load_parts(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """Read the config of a directory or a Google checkpoint, and its weights by bertkit's names."""
    path = config_file(folder)
    config = read_model_config(path)
    if path.name == "config.json":
        tensors = read_weights(folder, family_of(read_object(path), path))
    else:
        from bertkit.checkpoints.tensorflow import google_tensors

        tensors = google_tensors(folder)
    check_config_sizes(config, tensors, folder)
    return config, tensors


def require_all_weights(loaded: LoadResult[Model], source: Path, *, pooler: bool = True) -> Model:
    """Return the loaded model, or raise a BertkitError if a weight (of the `pooler`) is missing."""
    needed = [n for n in loaded.missing_keys if pooler or not n.startswith("encoder.pooler.")]
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
    """Build a model and give it tensors with bertkit's names, after checking their shapes.

    The tensors are removed from the dictionary, so that memory holds them once. What is missing is
    drawn from torch's generator, which other threads may be using; if the model is not `trainable`,
    it is 0.
    """
    with torch.device("meta"):
        model = build(config)
    prefix = "encoder." if isinstance(model, Encoder) else ""
    wanted = {f"{prefix}{name}": tensor.shape for name, tensor in model.state_dict().items()}
    missing = [name for name in wanted if name not in tensors]
    if needed := [name for name in missing if not is_optional_weight(name)]:
        raise BertkitError(f"{source} lacks {file_list(needed)}; the file is not a complete BERT")
    unexpected = [name for name in tensors if name not in wanted]
    if unknown := [name for name in unexpected if not is_optional_weight(name)]:
        raise BertkitError(f"{source} holds {shown_names(unknown)}, which BERT does not have")
    state = {}
    for name, shape in wanted.items():
        tensor = tensors.pop(name) if name in tensors else torch.zeros(shape)
        check_shape(name, tensor, tuple(shape), source)
        state[name.removeprefix(prefix)] = tensor
    model.load_state_dict(state, assign=True)
    if trainable:
        initialize_missing(model, {name.removeprefix(prefix) for name in missing}, config)
    return LoadResult(model.eval(), missing, unexpected)


def initialize_missing(model: nn.Module, missing: set[str], config: ModelConfig) -> None:
    """Draw the parameters of modules that a file lacks from torch's generator."""
    for path, module in model.named_modules():
        names = {f"{path}.{name}".lstrip(".") for name, _ in module.named_parameters(recurse=False)}
        if names & missing and hasattr(module, "reset_parameters"):
            module.reset_parameters()
            initialize(module, config)


def check_shape(name: str, tensor: Tensor, wanted: tuple[int, ...], source: Path) -> None:
    """Raise a BertkitError if a tensor has another shape than the config says."""
    if tuple(tensor.shape) != wanted:
        raise BertkitError(
            f"{source}: {file_list([name])} has shape {tuple(tensor.shape)}, the config says "
            f"{wanted}; config and weights do not belong together"
        )


def check_config_sizes(config: ModelConfig, tensors: Mapping[str, Tensor], source: Path) -> None:
    """Compare a config, which may demand a trillion parameters, with the tensors of the files."""
    width = config.embedding_width
    wanted = {
        "encoder.word_embeddings.weight": (config.vocab_size, width),
        "encoder.position_embeddings.weight": (config.max_position_embeddings, width),
        "encoder.segment_embeddings.weight": (config.type_vocab_size, width),
        "encoder.layers.0.intermediate.weight": (config.intermediate_size, config.hidden_size),
    }
    for name, shape in wanted.items():
        if name in tensors:
            check_shape(name, tensors[name], shape, source)
    layers = sum(name.endswith("intermediate.weight") for name in tensors)
    if layers != (1 if config.share_layers else config.num_hidden_layers):
        raise BertkitError(f"{source}: the weights have {layers} layers, and config.json says more")


def file_list(names: Iterable[str]) -> str:
    """Return the names of parameters as a file of a BERT has them, for messages."""
    return shown_names(theirs for name in names for theirs in file_names(name, BERT))


def is_optional_weight(name: str) -> bool:
    """Return whether a file may lack a parameter, or have one more: of a head or the pooler."""
    encoder = ("encoder.", "embeddings.", "bert.", "albert.", "electra.")
    return name.startswith("encoder.pooler.") or not name.startswith(encoder)


def tuned_tensors(names: Iterable[str]) -> list[str]:
    """Return the names that belong to the head of a fine-tuned model."""
    return [name for name in names if name.startswith(TUNED_PREFIXES)]


def load_config(directory: Path) -> ModelConfig:
    """Read the model config of a directory or a Google checkpoint."""
    return read_model_config(config_file(directory))


def config_file(folder: Path) -> Path:
    """Return a model's `config.json`, or the `bert_config.json` of a Google checkpoint."""
    home = folder if folder.is_dir() else folder.parent  # the prefix of a checkpoint
    google = home / "bert_config.json"
    if google.is_file() and not (folder / "config.json").is_file():
        return google
    if not folder.is_dir():
        raise BertkitError(f"there is no model directory {folder}; check the path")
    return folder / "config.json"


def read_model_config(path: Path) -> ModelConfig:
    """Read the known fields of a `config.json` or Google's `bert_config.json`."""
    values = read_object(path)
    family = family_of(values, path)
    if "vocab_size" not in values:
        raise BertkitError(f"{path} has no vocab_size; it is not a BERT config")
    values = {**family.defaults, **values}
    types = {f.name: f.type for f in dataclasses.fields(ModelConfig) if f.name not in OWN_FIELDS}
    fields = {name: values[name] for name in types if name in values}
    for name, value in fields.items():
        if types[name] == "float" and type(value) is int:  # such as a dropout of 0
            fields[name] = float(value)
    act = str(fields.get("hidden_act", "gelu"))
    try:
        require(values, SUPPORTED)
        fields |= family.read_config(values)
        if act not in ACTIVATION_NAMES:
            raise ValueError(f"hidden_act is {act!r}; known: {', '.join(ACTIVATION_NAMES)}")
        config = ModelConfig(**{**fields, "hidden_act": ACTIVATION_NAMES[act]})
        if config.share_layers and config.num_hidden_layers > MAX_SHARED_LAYERS:
            raise ValueError(f"num_hidden_layers is {config.num_hidden_layers:,}, far too many")
    except (BertkitError, ValueError) as error:
        raise BertkitError(f"{path}: {error}") from None
    return config


def model_folder(path: Path | str) -> Path:
    """Return the model directory that a path or a hub name means, such as `model/` in a run."""
    path = resolve_model(path)
    modules = sorted(path.glob("0_*")) if (path / "modules.json").is_file() else []  # old versions
    for folder in (path, path / "model", *modules):
        if (folder / "config.json").is_file() or (folder / "bert_config.json").is_file():
            return folder
    if not path.is_dir():  # the prefix of a Google checkpoint
        return path
    raise no_model(path, "neither config.json nor bert_config.json")


def tokenizer_folder(path: Path | str) -> Path:
    """Return the folder with the tokenizer of a model, given what `model_folder` takes."""
    folder = model_folder(path)
    return folder if folder.is_dir() else folder.parent  # beside a Google checkpoint's files


def resolve_model(name: Path | str) -> Path:
    """Return the path itself if it exists, else the folder of the hub's model of that name."""
    path = Path(from_home(name))
    if path.suffix == ".index" and path.is_file():
        path = path.with_suffix("")  # a Google checkpoint
    if path.is_dir() or (path.name and path.with_name(f"{path.name}.index").is_file()):
        return path
    if path.exists():
        raise BertkitError(f"{path} is a file; give the folder of a model")
    from bertkit.checkpoints.hub import download_model, parse_hub_name

    if not str(name).startswith(("./", "../")) and (hub := parse_hub_name(str(path))):
        return download_model(hub)
    raise BertkitError(f"there is no model directory {path}; check the path")


def hub_commit(folder: Path) -> str:
    """Return `ORG/NAME@COMMIT` of a folder in the hub's cache, "" for any other folder."""
    match = COMMIT_FOLDER.search(folder.as_posix())
    return f"{match['repo'].replace('--', '/', 1)}@{match['commit']}" if match else ""


def read_details(folder: Path) -> dict[str, Any]:
    """Return the content of a model's `bertkit.json`; {} if there is none."""
    return read_optional(folder / "bertkit.json")


def pair_objective(details: Mapping[str, Any], config: ModelConfig) -> str:
    """Return the objective of a pair head, "nsp" or "sop"; without a record, ALBERT's is "sop"."""
    recipe = details.get("recipe")
    objectives = recipe.get("objectives") if isinstance(recipe, dict) else None
    usual = "sop" if config.share_layers else "nsp"
    pair = objectives.get("pair", usual) if isinstance(objectives, dict) else usual
    return "sop" if pair == "sop" else "nsp"
