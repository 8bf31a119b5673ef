"""Pre-training that goes on from an existing model, such as one with domain words added."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.model.start import Start, read_start
from bertkit.tokens.tokenizer import Tokenizer
from bertkit.training.recipe import ModelSize, PretrainRecipe


class Beginning(NamedTuple):
    """What a run begins with."""

    recipe: PretrainRecipe
    """With the sizes of the model."""
    config: ModelConfig
    start: Start
    new: list[str]
    """Parameters that the model lacks, drawn at random, such as heads."""
    unused: list[str]
    """Parameters of the model that these objectives have no use for."""
    network: nn.Module


def begin_with(path: Path, recipe: PretrainRecipe, tokenizer: Tokenizer) -> Beginning:
    """Read a model, and build the recipe's network with its weights.

    Its sizes take the place of the recipe's; dropout and all else is the recipe's.

    Args:
        path: a model directory, a run, or a Google checkpoint.
        recipe: what is to be done.
        tokenizer: of the corpus.

    Raises:
        BertkitError: there is no such model, or it has another tokenizer or direction than the
            corpus and the recipe.
    """
    start = read_start(path)
    if start.tokenizer.content_hash != tokenizer.content_hash:
        raise BertkitError(
            f"{path} has another tokenizer than the store; prepare the text with --tokenizer {path}"
        )
    if start.config.direction != recipe.objectives.direction:
        raise BertkitError(
            f"{path} is {start.config.direction} and the recipe's objectives.words is "
            f"{recipe.objectives.words}; choose the same"
        )
    sizes: dict[str, Any] = {
        name: getattr(start.config, name)
        for name in ModelSize.__dataclass_fields__
        if name != "dropout"
    }
    recipe = replace(recipe, model=replace(recipe.model, **sizes))
    dropout = recipe.model.dropout
    config = replace(
        start.config, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout
    )
    tensors = dict(start.tensors)
    if (start.pairs == "order") != (recipe.objectives.sentences == "order"):
        tensors = {n: t for n, t in tensors.items() if not n.startswith("cls.seq_relationship.")}
    given = replace(start, config=config, tensors=tensors)
    loaded = given.build(recipe.objectives.model, keep_head=True)
    left = [name for name in start.tensors if name not in tensors]
    return Beginning(
        recipe, config, start, loaded.new, [*loaded.unused, *left], loaded.model.train()
    )
