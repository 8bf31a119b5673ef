"""From hidden states to one vector for a text, and the files that say how.

The paper pools a text into the state of [CLS] (section 4.1). Without tuning the mean over all
tokens is the better vector, and sentence-transformers (Reimers and Gurevych 2019, section 3) tunes
models for one or the other. A directory of that library says in `modules.json` which it is:

| file                               | what is read                                             |
|------------------------------------|----------------------------------------------------------|
| `modules.json`                     | the modules: transformer, pooling, normalisation         |
| `1_Pooling/config.json`            | cls, mean or last token                                  |
| `sentence_bert_config.json`        | `max_seq_length`, `do_lower_case`                        |
| `config_sentence_transformers.json`| the prompt before every text, where there is one         |
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
from bertkit.errors import BertkitError, nearest
from bertkit.files import MOST_OBJECT_BYTES, check_file_size, read_json, read_object, write_json
from bertkit.model.encoder import Encoder, ModelConfig
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import Pooled
from bertkit.tokenizer.wordpiece import SPECIAL_TOKENS

POOLINGS = ("cls", "mean", "pooler", "mean-last-four")
"""cls: the last layer's state of [CLS] (of the last [SEP], where the model reads left to right);
mean: the mean of the last layer's states, [CLS] and [SEP] too; pooler: what a head on texts reads,
tanh of a matrix on cls; mean-last-four: the mean over tokens and over the last four layers."""

OVER_TOKENS = ("mean", "mean-last-four")

THEIR_MODES = ("cls", "mean", "lasttoken")
"""Modes of sentence-transformers' Pooling that are known here."""
OLD_MODES = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""How versions before 6 say it: a flag for each mode."""

SPECIAL = re.compile(f"({'|'.join(map(re.escape, SPECIAL_TOKENS))})")


@dataclass(frozen=True)
class TextPooling:
    """How texts become vectors."""

    pooling: str = "mean"
    """One of `POOLINGS`."""
    normalize: bool = True
    """Whether vectors are divided by their length, so that products are cosines."""
    max_length: int = 0
    """Tokens of a window, special ones included; 0 for as many as the model has positions."""
    prompt: str = ""
    """Stands before every text."""
    lowercase: bool = False
    """Prompt and text are lower-cased first, where the tokenizer does not do it."""

    def whole_texts(self, texts: Sequence[str], *, special: bool) -> list[str]:
        """Texts as the tokenizer gets them: after the prompt, in lower case where that is wanted.

        Args:
            texts: as they come.
            special: whether the tokenizer reads "[MASK]" in raw text as one token; it then keeps
                its capitals, as in sentence-transformers.
        """
        found = [self.prompt + text for text in texts]
        if not self.lowercase:
            return found
        return [lower_around(text) if special else lower(text) for text in found]


def lower(text: str) -> str:
    """Lower case letter by letter, as the `tokenizers` library has it.

    `str.lower` looks around, and ends a word with another sigma.
    """
    return text.lower() if text.isascii() else "".join(map(str.lower, text))


def lower_around(text: str) -> str:
    """Lower case outside of the special tokens."""
    pieces = SPECIAL.split(text)
    pieces[::2] = map(lower, pieces[::2])
    return "".join(pieces)


def check_pooling(pooling: str, config: ModelConfig) -> None:
    """Refuse a pooling that is unknown or that the model is too shallow for.

    Raises:
        BertkitError: says what to choose instead.
    """
    if pooling not in POOLINGS:
        raise BertkitError(f"no pooling is called '{pooling}'{nearest(pooling, POOLINGS)}")
    if pooling == "mean-last-four" and config.num_hidden_layers < 4:
        raise BertkitError(
            f"'{pooling}' needs 4 layers and the model has {config.num_hidden_layers}; choose mean"
        )


def summary_vectors(encoder: Encoder, packed: Packed, pooling: str) -> Pooled:
    """(sequences, width) of "cls" or "pooler"; the last layer is computed for these rows alone."""
    summary = encoder(packed, encoder.summary_tokens(packed))
    return encoder.pool(summary) if pooling == "pooler" else summary


def weighted_vectors(encoder: Encoder, packed: Packed, pooling: str, weights: Tensor) -> Pooled:
    """(sequences, width) of "mean" or "mean-last-four": sums of weighted states, in fp32.

    Args:
        encoder: in evaluation mode.
        packed: the batch.
        pooling: one of `OVER_TOKENS`.
        weights: (tokens,) of each token in its sequence's sum.
    """
    if pooling == "mean":
        states = encoder(packed).float()
    else:
        states = torch.stack([one.float() for one in encoder.layers_of(packed)[-4:]]).mean(0)
    numbers = torch.arange(len(packed.cu_seqlens) - 1, device=states.device)
    owners = numbers.repeat_interleave(packed.cu_seqlens.diff(), output_size=len(weights))
    sums = states.new_zeros(len(numbers), states.shape[-1])
    return sums.index_add_(0, owners, states * weights[:, None])


def read_pooling(folder: Path) -> tuple[Path, TextPooling]:
    """The folder of the weights, and how a directory of sentence-transformers pools.

    Any other model directory: itself, and the mean, normalised.

    Raises:
        BertkitError: a file is damaged, a module or mode is none that is known here, or the mode
            reads a token that the model's direction keeps from seeing the others.
    """
    if not (folder / "modules.json").is_file():
        return folder, TextPooling()
    modules = read_modules(folder)
    weights = folder / modules["Transformer"]
    where = folder / modules["Pooling"] / "config.json"
    transformer = read_optional_json(weights / "sentence_bert_config.json")
    described = read_optional_json(folder / "config_sentence_transformers.json")
    prompts, chosen = described.get("prompts") or {}, str(described.get("default_prompt_name"))
    prompt = (prompts.get(chosen) if isinstance(prompts, dict) else prompts) or ""
    if not isinstance(prompt, str):
        raise BertkitError(f"{folder}: the prompts are not texts by name; copy the directory again")
    pooling = read_optional_json(where)
    if prompt and not pooling.get("include_prompt", True):
        raise BertkitError(
            f"{where}: the prompt is left out of the mean, which is not supported; choose --pooling"
        )
    return weights, TextPooling(
        pooling=pooling_name(pooling_mode(pooling, where), load_config(weights), where),
        normalize="Normalize" in modules,
        max_length=read_max_length(weights, transformer),
        prompt=prompt,
        lowercase=bool(transformer.get("do_lower_case")),
    )


def read_modules(folder: Path) -> dict[str, str]:
    """The modules of `modules.json` by the last word of their type, and their folders."""
    path = folder / "modules.json"
    check_file_size(path, MOST_OBJECT_BYTES)
    try:
        found = {str(one["type"]).rpartition(".")[2]: str(one["path"]) for one in read_json(path)}
    except (TypeError, KeyError):
        raise BertkitError(f"{path} is no list of modules; copy it again") from None
    for place in found.values():
        if Path(place).is_absolute() or ".." in Path(place).parts:
            raise BertkitError(f"{path}: the module {place} is not inside the directory")
    known = {"Transformer", "Pooling", "Normalize"}
    if wrong := sorted({*found} - known) or sorted({"Transformer", "Pooling"} - {*found}):
        raise BertkitError(
            f"{path}: {wrong[0]} is missing or not supported; known: {', '.join(sorted(known))}; "
            "choose --pooling to read the encoder alone"
        )
    return found


def pooling_mode(settings: Mapping[str, Any], source: Path) -> str:
    """The mode of their Pooling, in their words.

    Raises:
        BertkitError: there is none, or several are joined.
    """
    found = settings.get("pooling_mode")
    if found is None:
        found = [mode for flag, mode in OLD_MODES.items() if settings.get(flag)] or ["mean"]
    modes = [found] if isinstance(found, str) else list(found)
    if len(modes) != 1 or modes[0] not in THEIR_MODES:
        raise BertkitError(
            f"{source}: pooling by {' and '.join(map(str, modes))} is not supported; choose "
            "--pooling cls or mean"
        )
    return modes[0]


def summary_mode(config: ModelConfig) -> str:
    """Their word for the token that has seen all others."""
    return "lasttoken" if config.direction == "left_to_right" else "cls"


def pooling_name(mode: str, config: ModelConfig, source: Path) -> str:
    """Our word for a mode of theirs: "cls" is here the token that has seen all others.

    Raises:
        BertkitError: the mode is of the token at the other end.
    """
    if mode == "mean":
        return mode
    own = summary_mode(config)
    if mode != own:
        raise BertkitError(
            f"{source}: pooling by {mode} is not supported of a {config.direction} model; choose "
            f"--pooling mean, or cls for what is called {own} there"
        )
    return "cls"


def read_max_length(weights: Path, transformer: Mapping[str, Any]) -> int:
    """Tokens that sentence-transformers reads of a text; 0 where the files do not say."""
    max_length = transformer.get("max_seq_length")
    if not max_length:
        max_length = (
            read_optional_json(weights / "tokenizer_config.json").get("model_max_length") or 0
        )
    if not isinstance(max_length, int | float):
        raise BertkitError(f"{weights}: the longest text is {max_length!r}, no number of tokens")
    return int(max_length) if max_length < 1e6 else 0  # transformers writes 1e30 for "no limit"


def read_optional_json(path: Path) -> dict[str, Any]:
    """The JSON object of a file that may be absent."""
    return read_object(path) if path.exists() else {}


def write_pooling(folder: Path, pooling: TextPooling, config: ModelConfig) -> None:
    """Write what makes a model directory one of sentence-transformers, in the words of version 2.

    All versions since read those.

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
