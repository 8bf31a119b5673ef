"""A pre-training run whose weights come from an existing model.

It may be any BERT, such as one whose vocabulary was extended with domain words.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

from bertkit.checkpoints.pretrained import PretrainedWeights, read_pretrained
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.tokenizer.wordpiece import Tokenizer
from bertkit.training.recipe import ModelSize, PretrainRecipe


class InitialWeights(NamedTuple):
    """What a run begins with."""

    recipe: PretrainRecipe
    """With the sizes of the model."""
    config: ModelConfig
    start: PretrainedWeights
    missing_keys: list[str]
    """Parameters that the model lacks, drawn at random, such as heads."""
    unexpected_keys: list[str]
    """Parameters of the model that these objectives have no use for."""
    network: nn.Module


def init_from(path: Path, recipe: PretrainRecipe, tokenizer: Tokenizer) -> InitialWeights:
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
    start = read_pretrained(path)
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
        start.config,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        pooler_act=ModelConfig.pooler_act,  # pre-training reads pairs as BERT does
    )
    tensors = dict(start.tensors)
    if (start.pairs == "order") != (recipe.objectives.sentences == "order"):
        tensors = {n: t for n, t in tensors.items() if not n.startswith("cls.seq_relationship.")}
    given = replace(start, config=config, tensors=tensors)
    loaded = given.build(recipe.objectives.model, keep_head=True)
    left = [name for name in start.tensors if name not in tensors]
    return InitialWeights(
        recipe,
        config,
        start,
        loaded.missing_keys,
        [*loaded.unexpected_keys, *left],
        loaded.model.train(),
    )
