"""Pooling of hidden states into one vector per text, and the files that configure it.

The paper uses the state of [CLS] for a text (section 4.1). Without fine-tuning the mean over all
tokens is the better vector; sentence-transformers (Reimers and Gurevych 2019, section 3) fine-tunes
models for either. Such a model directory describes its pooling in these files:

| file                               | what is read from it                                     |
|------------------------------------|----------------------------------------------------------|
| `modules.json`                     | the modules: transformer, pooling, normalisation         |
| `1_Pooling/config.json`            | cls, mean or last token                                  |
| `sentence_bert_config.json`        | `max_seq_length`, `do_lower_case`                        |
| `config_sentence_transformers.json`| the prompt to prepend to every text, if there is one     |
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bertkit.checkpoints.huggingface import load_config
from bertkit.errors import BertkitError, check_known
from bertkit.files import (
    MOST_OBJECT_BYTES,
    check_file_size,
    read_json,
    read_object,
    read_optional,
    write_json,
)
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import Pooled
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS

POOLINGS = ("cls", "mean", "pooler", "mean-last-four")
"""cls: the last layer's state of [CLS] (of the last [SEP] if the model reads left to right);
mean: the mean of the last layer's states, including [CLS] and [SEP]; pooler: the pooler's output,
computed from cls; mean-last-four: the mean over all tokens and over the last four layers."""

OVER_TOKENS = ("mean", "mean-last-four")

THEIR_MODES = ("cls", "mean", "lasttoken")
"""The modes of sentence-transformers' Pooling module that bertkit supports."""
OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""The flags by which sentence-transformers before version 6 selects a mode."""

SPECIAL = re.compile(f"({'|'.join(map(re.escape, SPECIAL_TOKENS))})")


@dataclass(frozen=True)
class TextPooling:
    """Settings for turning texts into vectors."""

    pooling: str = "mean"
    """One of `POOLINGS`."""
    normalize: bool = True
    """Whether to divide vectors by their L2 norm, so that dot products are cosines."""
    max_length: int = 0
    """Tokens per window, including special tokens; 0 for as many as the model has positions."""
    prompt: str = ""
    """A prefix for every text."""
    lowercase: bool = False
    """Whether to lowercase prompt and text before tokenization."""

    def whole_texts(self, texts: Sequence[str], *, special: bool) -> list[str]:
        """Return the texts to tokenize: with the prompt, and in lower case if that is set.

        If the tokenizer reads `special` tokens in raw text, such as "[MASK]", as one token, these
        stay in upper case, as in sentence-transformers.
        """
        found = [self.prompt + text for text in texts]
        if not self.lowercase:
            return found
        return [lower_around(text) if special else lower(text) for text in found]


def lower(text: str) -> str:
    """Lowercase a text letter by letter, like the `tokenizers` library.

    `str.lower` depends on context: it uses a different sigma at the end of a word.
    """
    return text.lower() if text.isascii() else "".join(map(str.lower, text))


def lower_around(text: str) -> str:
    """Lowercase a text, except for its special tokens."""
    pieces = SPECIAL.split(text)
    pieces[::2] = map(lower, pieces[::2])
    return "".join(pieces)


def check_pooling(pooling: str, config: ModelConfig) -> None:
    """Raise a BertkitError if a pooling is unknown or the model has too few layers for it."""
    check_known("pooling", pooling, POOLINGS)
    if pooling == "mean-last-four" and config.num_hidden_layers < 4:
        raise BertkitError(
            f"'{pooling}' needs 4 layers and the model has {config.num_hidden_layers}; choose mean"
        )


def summary_vectors(encoder: Encoder, packed: Packed, pooling: str) -> Pooled:
    """Return (sequences, width) vectors for "cls" or "pooler", skipping rows that are not needed.

    The last layer is computed only for the summary tokens, except for its attention.
    """
    summary = encoder(packed, encoder.summary_tokens(packed))
    return encoder.pool(summary) if pooling == "pooler" else summary


def weighted_vectors(encoder: Encoder, packed: Packed, pooling: str, weights: Tensor) -> Pooled:
    """Return (sequences, width) vectors for "mean" or "mean-last-four": weighted sums in fp32.

    The weights, (tokens,), are those of each token in its sequence's sum.
    """
    if pooling == "mean":
        states = encoder(packed).float()
    else:
        states = torch.stack([one.float() for one in encoder.layers_of(packed)[-4:]]).mean(0)
    sums = states.new_zeros(len(packed.first_tokens), states.shape[-1])
    return sums.index_add_(0, packed.owners, states * weights[:, None])


def is_embedder(folder: Path) -> bool:
    """Return whether a directory configures how texts become vectors; see `read_pooling`.

    sentence-transformers writes `modules.json` for its cross-encoders, too, which are classifiers.
    """
    modules = (folder / "modules.json").is_file()
    path = folder / "config_sentence_transformers.json"
    theirs = modules and read_optional(path).get("model_type") != "CrossEncoder"
    return theirs or "embedding" in read_optional(folder / "bertkit.json")


def read_pooling(folder: Path, pooling: str = "auto") -> tuple[Path, TextPooling]:
    """Return the folder with the weights, and the settings that a model directory configures.

    A directory without sentence-transformers' files gives itself and the settings in its
    `bertkit.json`, where a pooling is saved that sentence-transformers does not have, or the
    normalised mean. Unless it is "auto", `pooling` replaces the directory's, which then need not be
    supported.

    Raises:
        BertkitError: a file is damaged, a module or mode is not supported, or the mode reads a
            token that cannot attend to the others in the model's direction.
    """
    if not (folder / "modules.json").is_file():
        settings = vars(TextPooling())
        saved = read_optional(folder / "bertkit.json").get("embedding", settings)
        types = {name: type(value) for name, value in settings.items()}
        if not isinstance(saved, dict) or {n: type(v) for n, v in saved.items()} != types:
            raise BertkitError(f"{folder / 'bertkit.json'}: embedding is not valid; save it again")
        return folder, TextPooling(**saved | ({} if pooling == "auto" else {"pooling": pooling}))
    modules = dict(read_modules(folder, encoder_alone=pooling != "auto"))
    weights = folder / modules.get("Transformer", "")
    transformer = read_optional(weights / "sentence_bert_config.json")
    described = read_optional(folder / "config_sentence_transformers.json")
    prompts, chosen = described.get("prompts") or {}, str(described.get("default_prompt_name"))
    prompt = (prompts.get(chosen) if isinstance(prompts, dict) else prompts) or ""
    if not isinstance(prompt, str):
        raise BertkitError(f"{folder}: the prompts are not texts by name; copy the directory again")
    if pooling == "auto":
        pooling = configured_pooling(folder / modules["Pooling"] / "config.json", weights, prompt)
    return weights, TextPooling(
        pooling=pooling,
        normalize="Normalize" in modules,
        max_length=read_max_length(weights, transformer),
        prompt=prompt,
        lowercase=bool(transformer.get("do_lower_case")),
    )


def configured_pooling(path: Path, weights: Path, prompt: str) -> str:
    """Return the pooling that a file of sentence-transformers' Pooling module configures."""
    if not path.is_file():
        raise BertkitError(
            f"modules.json names a pooling, and {path} is missing; copy the whole directory, or "
            "choose --pooling"
        )
    settings = read_object(path)
    if prompt and not settings.get("include_prompt", True):
        raise BertkitError(
            f"{path}: include_prompt false is not supported with a prompt; choose --pooling, which "
            "reads the prompt, too"
        )
    return pooling_name(pooling_mode(settings, path), load_config(weights), path)


def read_modules(folder: Path, *, encoder_alone: bool = False) -> list[tuple[str, str]]:
    """Return the class name and the folder of each module in `modules.json`.

    With `encoder_alone`, the modules after the encoder need not be supported.

    Raises:
        BertkitError: the file is damaged, or a module is not supported.
    """
    path = folder / "modules.json"
    check_file_size(path, MOST_OBJECT_BYTES)
    try:
        found = [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in read_json(path)]
    except (TypeError, KeyError):
        raise BertkitError(f"{path} is not a list of modules; copy it again") from None
    for _, place in found:
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise BertkitError(f"{path}: the module {place} is not inside the directory")
    known, named = {"Transformer", "Pooling", "Normalize"}, {name for name, _ in found}
    wrong = sorted(named - known) or sorted({"Transformer", "Pooling"} - named)
    if wrong and not encoder_alone:
        raise BertkitError(
            f"{path}: {wrong[0]} is missing or not supported; known: {', '.join(sorted(known))}; "
            "choose --pooling to read the encoder alone"
        )
    return found


def pooling_mode(settings: Mapping[str, Any], source: Path) -> str:
    """Return the mode of a sentence-transformers Pooling config, by that library's name.

    Raises:
        BertkitError: the mode is not supported, or several modes are concatenated.
    """
    found = settings.get("pooling_mode")
    if found is None:
        found = [mode for flag, mode in OLD_MODES.items() if settings.get(flag)] or ["mean"]
    modes = found if isinstance(found, list) else [found]
    if len(modes) != 1 or not isinstance(modes[0], str) or modes[0] not in THEIR_MODES:
        raise BertkitError(
            f"{source}: pooling by {' and '.join(map(str, modes))} is not supported; choose "
            "--pooling cls or mean"
        )
    return modes[0]


def summary_mode(config: ModelConfig) -> str:
    """Return sentence-transformers' name for pooling the token that attends to all others."""
    return "lasttoken" if config.direction == "left_to_right" else "cls"


def pooling_name(mode: str, config: ModelConfig, source: Path) -> str:
    """Return bertkit's name for a mode; its "cls" is the token that attends to all others.

    Raises:
        BertkitError: the mode reads the token at the other end, which does not see the others.
    """
    if mode == "mean":
        return mode
    own = summary_mode(config)
    if mode != own:
        raise BertkitError(
            f"{source}: pooling by {mode} is not supported for a {config.direction} model; choose "
            f"--pooling mean, or cls for what sentence-transformers calls {own}"
        )
    return "cls"


def read_max_length(weights: Path, transformer: Mapping[str, Any]) -> int:
    """Return how many tokens of a text sentence-transformers reads; 0 if no file limits it."""
    path, name = weights / "tokenizer_config.json", "model_max_length"
    max_length = transformer.get("max_seq_length") or read_optional(path).get(name) or 0
    if not isinstance(max_length, int | float):
        raise BertkitError(f"{weights}: the maximum length {max_length!r} is not a number")
    return int(max_length) if max_length < 1e6 else 0  # transformers writes 1e30 for "no limit"


def write_pooling(folder: Path, pooling: TextPooling, config: ModelConfig) -> None:
    """Write the files that make a model directory readable by sentence-transformers.

    They have the format of version 2, which all later versions read.

    Raises:
        BertkitError: that library has no such pooling, or the files cannot be written.
    """
    if pooling.pooling not in ("cls", "mean"):
        raise BertkitError(
            f"sentence-transformers has no pooling '{pooling.pooling}'; choose --pooling cls or "
            "mean, or export to onnx"
        )
    mode = "mean" if pooling.pooling == "mean" else summary_mode(config)
    names = ["Transformer", "Pooling", *(["Normalize"] if pooling.normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": paths[i], "type": f"sentence_transformers.models.{name}"}
        for i, name in enumerate(names)
    ]
    write_json(folder / "modules.json", modules)
    flags = {flag: found == mode for flag, found in OLD_MODES.items()}
    pooled = {"word_embedding_dimension": config.hidden_size, **flags}
    write_json(folder / "1_Pooling" / "config.json", pooled)
    max_length = pooling.max_length or config.max_position_embeddings
    transformer = {"max_seq_length": max_length, "do_lower_case": pooling.lowercase}
    write_json(folder / "sentence_bert_config.json", transformer)
    if pooling.prompt:
        prompts = {"prompts": {"default": pooling.prompt}, "default_prompt_name": "default"}
        write_json(folder / "config_sentence_transformers.json", prompts)
