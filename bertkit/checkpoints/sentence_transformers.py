"""How the texts of a model become vectors: the files of sentence-transformers.

| file                               | content                                                    |
|------------------------------------|------------------------------------------------------------|
| `modules.json`                     | the modules: transformer, pooling, and those that follow   |
| `1_Pooling/config.json`            | the poolings whose vectors are concatenated                |
| `2_Dense/`, `3_LayerNorm/`, ...    | sizes and weights of the modules that follow               |
| `sentence_bert_config.json`        | `max_seq_length`, `do_lower_case`                          |
| `config_sentence_transformers.json`| the prompt to prepend to every text, if there is one       |
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from bertkit.checkpoints.pretrained import load_config, read_details
from bertkit.checkpoints.save import WEIGHT_FILES, read_tensors
from bertkit.errors import BertkitError
from bertkit.files import read_json, read_object, read_optional

MODULES = ("Transformer", "Pooling", "Dense", "LayerNorm", "Dropout", "Normalize")
"""sentence-transformers' modules that bertkit supports."""
MODES = ("cls", "max", "mean", "mean_sqrt_len", "weightedmean", "lasttoken")
"""The modes of the Pooling module, in the order in which flags of old versions concatenate them."""
TEXT_VECTOR = "sentence_embedding"
ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid", "LeakyReLU", "ELU")
"""torch's classes that a Dense module may name; no other code is run."""


@dataclass(frozen=True)
class TextPooling:
    """Settings for turning texts into vectors."""

    pooling: str = "mean"
    """One of `bertkit.model.outputs.POOLINGS`, or several joined by "+"."""
    normalize: bool = True
    """Whether to divide vectors by their L2 norm, so that dot products are cosines."""
    max_length: int = 0
    """Tokens per window, including special tokens; 0 for as many as the model has positions."""
    prompt: str = ""
    """A prefix for every text."""
    modules: tuple[nn.Module, ...] = ()
    """What is applied to pooled vectors before they are normalised: (texts, width) to the same."""


class Normalize(nn.Module):
    """Divides each vector by its L2 norm."""

    def forward(self, vectors: Tensor) -> Tensor:
        """Map (texts, width) to the same shape."""
        return nn.functional.normalize(vectors)


def is_embedder(folder: Path) -> bool:
    """Return whether a directory says how texts become vectors; a cross-encoder is a classifier."""
    described = read_optional(folder / "config_sentence_transformers.json")
    return (folder / "modules.json").is_file() and described.get("model_type") != "CrossEncoder"


def read_pooling(folder: Path, pooling: str = "auto") -> tuple[Path, TextPooling]:
    """Return the folder with the weights, and the settings that a model directory configures.

    Unless it is "auto", `pooling` replaces the directory's and the modules that follow it.
    """
    if not (folder / "modules.json").is_file():
        usual, saved = TextPooling(), read_details(folder).get("embedding")
        saved = saved if isinstance(saved, dict) else {}  # an earlier version wrote it
        known = {n: saved[n] for n, v in vars(usual).items() if type(saved.get(n)) is type(v)}
        return folder, replace(usual, **known | ({"pooling": pooling} if pooling != "auto" else {}))
    modules = read_modules(folder, encoder_alone=pooling != "auto")
    names = dict(modules)
    weights = folder / names.get("Transformer", "")
    transformer = read_optional(weights / "sentence_bert_config.json")
    max_length = transformer.get("max_seq_length") or tokenizer_limit(weights)
    described = read_optional(folder / "config_sentence_transformers.json")
    prompts, chosen = described.get("prompts") or {}, str(described.get("default_prompt_name"))
    prompt = (prompts.get(chosen) if isinstance(prompts, dict) else prompts) or ""
    if not isinstance(prompt, str) or type(max_length) is not int:
        raise BertkitError(
            f"{folder}: the prompt or the maximum length is not valid; copy it again"
        )
    cased = read_optional(weights / "tokenizer_config.json").get("do_lower_case") is False
    if cased and transformer.get("do_lower_case"):
        raise BertkitError(
            f"{weights} lowercases texts for a cased tokenizer; do_lower_case in its "
            "sentence_bert_config.json must be false"
        )
    settings = TextPooling(pooling, "Normalize" in names, max_length, prompt)
    if pooling != "auto":
        return weights, settings
    config = load_config(weights)
    path = folder / names["Pooling"] / "config.json"
    pooling = configured_pooling(path, config.direction, prompt)
    width, layers = config.hidden_size * len(pooling.split("+")), list[nn.Module]()
    for name, inside in modules[2:]:
        if name != "Dropout":
            layers.append(read_layer(folder / inside, name, width))
            width = layers[-1](torch.zeros(1, width)).shape[1]
    normalize = bool(layers) and isinstance(layers[-1], Normalize)
    layers = layers[: len(layers) - normalize]
    return weights, replace(settings, pooling=pooling, normalize=normalize, modules=tuple(layers))


def tokenizer_limit(folder: Path) -> int:
    """Return the `model_max_length` of a tokenizer; 0 if there is no limit, or 1e30."""
    limit = read_optional(folder / "tokenizer_config.json").get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and 0 < limit < 1e6 else 0


def configured_pooling(path: Path, direction: str, prompt: str) -> str:
    """Return bertkit's name of the mode, or modes, in a file of the Pooling module."""
    settings = read_object(path)
    if prompt and not settings.get("include_prompt", True):
        raise BertkitError(
            f"{path}: include_prompt false is not supported with a prompt; choose --pooling, which "
            "reads the prompt, too"
        )
    set_flags = {name.removeprefix("pooling_mode_") for name, value in settings.items() if value}
    flags = {re.sub("_tokens?$", "", name) for name in set_flags}  # before version 6
    mode = settings.get("pooling_mode") or [mode for mode in MODES if mode in flags] or "mean"
    modes = [re.sub("_tokens$", "", str(m)) for m in (mode if isinstance(mode, list) else [mode])]
    left_to_right = direction == "left_to_right"
    if unknown := [m for m in modes if m not in MODES or (m == "cls" and left_to_right)]:
        raise BertkitError(
            f"{path}: pooling by {' and '.join(unknown)} is not supported for this model; "
            "choose --pooling cls or mean"
        )
    # our "cls" is the token that attends to all others
    return "+".join("cls" if m == "lasttoken" and left_to_right else m for m in modes)


def read_layer(folder: Path, name: str, width: int) -> nn.Module:
    """Read a module that follows the pooling, whose vectors have `width` dimensions."""
    if name == "Normalize":
        return Normalize()
    config, layer = read_object(folder / "config.json"), nn.Sequential()
    home, _, activation = str(config.get("activation_function", "torch.nn.Tanh")).rpartition(".")
    key = config.get("module_input_name", TEXT_VECTOR)
    known = activation in ACTIVATIONS and home.startswith("torch.") and key == TEXT_VECTOR
    if not known or config.get("use_residual"):
        raise BertkitError(
            f"{folder} applies {home}.{activation} to {key}, which is not supported; choose "
            "--pooling to read the encoder alone"
        )
    try:
        if name == "LayerNorm":
            layer.add_module("norm", nn.LayerNorm(config["dimension"]))
        else:
            sizes = config["in_features"], config["out_features"]
            layer.add_module("linear", nn.Linear(*sizes, bias=config.get("bias", True)))
            layer.add_module("activation", getattr(nn, activation)())
        files = [path for file in WEIGHT_FILES if (path := folder / file).is_file()]
        layer.load_state_dict(read_tensors((files or [folder / WEIGHT_FILES[0]])[0]))
        layer.float().eval().requires_grad_(False)(torch.zeros(1, width))
    except (KeyError, TypeError, RuntimeError) as error:
        reason = str(error).splitlines()[-1].strip()
        raise BertkitError(f"{folder} is not a valid {name} ({reason}); copy it again") from None
    return layer


def read_modules(folder: Path, *, encoder_alone: bool = False) -> list[tuple[str, str]]:
    """Return the class and folder of each module; with `encoder_alone`, any may follow it."""
    path = folder / "modules.json"
    try:
        modules = [(str(m["type"]).rpartition(".")[2], str(m["path"])) for m in read_json(path)]
    except (TypeError, KeyError):
        raise BertkitError(f"{path} is not a list of modules; copy it again") from None
    for _, inside in modules:
        if Path(inside).is_absolute() or ".." in Path(inside).parts:
            raise BertkitError(f"{path}: the module {inside} is not inside the directory")
    names = [name for name, _ in modules]
    wrong = sorted({*names} - {*MODULES}) or sorted({"Transformer", "Pooling"} - {*names})
    if not encoder_alone and (wrong or names[:2] != ["Transformer", "Pooling"]):
        raise BertkitError(
            f"{path}: {(wrong or names)[0]} is missing or not supported; known: "
            f"{', '.join(MODULES)}, in this order; choose --pooling to read the encoder alone"
        )
    return modules
