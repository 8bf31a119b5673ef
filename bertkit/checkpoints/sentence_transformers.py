"""How the texts of a model become vectors: the files of sentence-transformers.

| file                               | content                                                  |
|------------------------------------|----------------------------------------------------------|
| `modules.json`                     | the modules: transformer, pooling, normalisation         |
| `1_Pooling/config.json`            | cls, mean or last token                                  |
| `sentence_bert_config.json`        | `max_seq_length`, `do_lower_case`                        |
| `config_sentence_transformers.json`| the prompt to prepend to every text, if there is one     |
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from bertkit.checkpoints.pretrained import load_config
from bertkit.errors import BertkitError
from bertkit.files import read_json, read_object, read_optional

MODULES = ("Transformer", "Pooling", "Normalize")
"""sentence-transformers' modules that bertkit supports."""


@dataclass(frozen=True)
class TextPooling:
    """Settings for turning texts into vectors."""

    pooling: str = "mean"
    """One of `bertkit.model.outputs.POOLINGS`."""
    normalize: bool = True
    """Whether to divide vectors by their L2 norm, so that dot products are cosines."""
    max_length: int = 0
    """Tokens per window, including special tokens; 0 for as many as the model has positions."""
    prompt: str = ""
    """A prefix for every text."""


def is_embedder(folder: Path) -> bool:
    """Return whether a directory says how texts become vectors.

    sentence-transformers writes `modules.json` for its cross-encoders, too, which are classifiers.
    """
    described = read_optional(folder / "config_sentence_transformers.json")
    return (folder / "modules.json").is_file() and described.get("model_type") != "CrossEncoder"


def read_pooling(folder: Path, pooling: str = "auto") -> tuple[Path, TextPooling]:
    """Return the folder with the weights, and the settings that a model directory configures.

    A directory without sentence-transformers' files gives itself and the normalised mean. Unless it
    is "auto", `pooling` replaces the directory's, which then need not be supported.

    Raises:
        BertkitError: a file is damaged, a module or mode is not supported, or the mode reads a
            token that cannot attend to the others in the model's direction.
    """
    if not (folder / "modules.json").is_file():
        return folder, TextPooling("mean" if pooling == "auto" else pooling)
    modules = dict(read_modules(folder, encoder_alone=pooling != "auto"))
    weights = folder / modules.get("Transformer", "")
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
            f"{weights} lowercases texts for a cased tokenizer (do_lower_case in "
            "sentence_bert_config.json), which is not supported; set it to false to embed them as "
            "they are"
        )
    if pooling == "auto":
        pooling = configured_pooling(folder / modules["Pooling"] / "config.json", weights, prompt)
    return weights, TextPooling(
        pooling=pooling,
        normalize="Normalize" in modules,
        max_length=max_length,
        prompt=prompt,
    )


def tokenizer_limit(folder: Path) -> int:
    """Return the `model_max_length` of a tokenizer; 0 if there is no limit, or 1e30."""
    limit = read_optional(folder / "tokenizer_config.json").get("model_max_length")
    return int(limit) if isinstance(limit, int | float) and 0 < limit < 1e6 else 0


def configured_pooling(path: Path, weights: Path, prompt: str) -> str:
    """Return bertkit's name of the mode in a file of the Pooling module.

    sentence-transformers pools the first ("cls") or last token; bertkit's "cls" is the one that
    attends to all others.
    """
    settings = read_object(path)
    if prompt and not settings.get("include_prompt", True):
        raise BertkitError(
            f"{path}: include_prompt false is not supported with a prompt; choose --pooling, which "
            "reads the prompt, too"
        )
    flags = [flag for flag, value in settings.items() if value and flag.startswith("pooling_mode_")]
    old = [re.sub("pooling_mode_|_tokens?$", "", flag) for flag in flags]  # before version 6
    mode = settings.get("pooling_mode") or old
    modes = mode if isinstance(mode, list) else [mode]
    if modes in (["mean"], []):
        return "mean"
    left_to_right = load_config(weights).direction == "left_to_right"
    if modes != ["lasttoken" if left_to_right else "cls"]:
        raise BertkitError(
            f"{path}: pooling by {' and '.join(map(str, modes))} is not supported for this model; "
            "choose --pooling cls or mean"
        )
    return "cls"


def read_modules(folder: Path, *, encoder_alone: bool = False) -> list[tuple[str, str]]:
    """Return the class name and the folder of each module in `modules.json`.

    With `encoder_alone`, the modules after the encoder need not be supported.
    """
    path = folder / "modules.json"
    try:
        modules = [(str(m["type"]).rpartition(".")[2], str(m["path"])) for m in read_json(path)]
    except (TypeError, KeyError):
        raise BertkitError(f"{path} is not a list of modules; copy it again") from None
    for _, inside in modules:
        if Path(inside).is_absolute() or ".." in Path(inside).parts:
            raise BertkitError(f"{path}: the module {inside} is not inside the directory")
    names = {name for name, _ in modules}
    wrong = sorted(names - set(MODULES)) or sorted({"Transformer", "Pooling"} - names)
    if wrong and not encoder_alone:
        raise BertkitError(
            f"{path}: {wrong[0]} is missing or not supported; known: {', '.join(MODULES)}; choose "
            "--pooling to read the encoder alone"
        )
    return modules
