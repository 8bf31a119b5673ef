"""Families of networks in Hugging Face's files: one encoder computes them, and a table names each.

| `model_type` | network                                                                      |
|--------------|------------------------------------------------------------------------------|
| bert         | BERT; a left-to-right model if `is_decoder` is set                           |
| albert       | layers that share their weights, factorised embeddings                       |
| electra      | a discriminator or generator; a pooler with GELU in fine-tuned models        |
| bertkit      | all other combinations, which transformers cannot load                       |

In memory tensors have bertkit's names, those of `state_dict()`: "encoder.layers.0.output.weight".
Query, key and value are one matrix there and three in the files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bertkit.checkpoints.names.albert import ALBERT
from bertkit.checkpoints.names.bert import BERT, Family
from bertkit.checkpoints.names.electra import ELECTRA
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig

OWN_FIELDS = ("direction", "embedding_size", "share_layers", "pooler_act")
"""Fields of `ModelConfig` that BERT's `config.json` does not have."""
BERTKIT = replace(
    BERT,
    model_type="bertkit",
    classes={},
    read_config=lambda values, source: {n: values[n] for n in OWN_FIELDS if n in values},
    write_config=lambda config: {name: getattr(config, name) for name in OWN_FIELDS},
    supports=lambda config, head: True,
)
FAMILIES = {family.model_type: family for family in (BERT, ALBERT, ELECTRA, BERTKIT)}
"""By `model_type`; the first that supports a network is the one to write it as."""
TIED = {
    "mlm.decoder.weight": "encoder.word_embeddings.weight",
    "mlm.decoder.bias": "mlm.bias",
}
"""Copies of tensors in files -> the tensor that they must equal."""


def family_of(values: Mapping[str, Any], source: object) -> Family:
    """Return the family of a `config.json`, or raise a BertkitError if bertkit does not read it."""
    name = values.get("model_type", "bert")
    if name not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BertkitError(f"{source}: model_type is {name!r}; it must be one of {known}")
    return FAMILIES[name]


def choose_class(config: ModelConfig, head: str) -> tuple[Family, str]:
    """Return the family and transformers' class that compute the same as a network with a head.

    The heads are those of `Family.classes`. The family is `BERTKIT`, and the class "bertkit", if
    transformers has none.
    """
    kind = "causal" if head == "words" and config.direction == "left_to_right" else head
    for family in FAMILIES.values():
        if kind in family.classes and family.supports(config, head):
            return family, family.classes[kind]
    return BERTKIT, "bertkit"


def heads_of_class(architecture: str) -> set[str]:
    """Return the heads that one of transformers' classes has; empty for unknown classes."""
    return {
        head
        for family in FAMILIES.values()
        for head, name in family.classes.items()
        if name == architecture
    }


def has_pooler(family: Family, architecture: str) -> bool:
    """Return whether a family's class has a pooler."""
    return family is BERTKIT or bool(heads_of_class(architecture) & family.poolers)


def file_names(own: str, family: Family, architecture: str = "") -> tuple[str, ...]:
    """Return the names in files of a tensor of bertkit: one, or those of query, key and value."""
    module, _, kind = own.rpartition(".")
    pattern, number = without_number(module)
    modules = {**family.modules, **family.variants.get(architecture, {})}
    return tuple(
        f"{name.replace('.N', f'.{number}')}.{kind}" for name in modules.get(pattern, (module,))
    )


def without_number(module: str) -> tuple[str, str]:
    """Return a module's name with N for the number of its layer, and this number."""
    found = re.search(r"\blayers?\.(\d+)(?=\.)", module)
    if found is None:
        return module, "0"  # layers that share weights have no number in files
    return f"{module[: found.start(1)]}N{module[found.end(1) :]}", found[1]


@cache
def modules_in_files(family: Family) -> dict[str, tuple[str, int, int]]:
    """Return, for each module in files, bertkit's, which of its parts it is, and of how many."""
    return {
        theirs: (own, part, len(parts))
        for table in (family.modules, *family.variants.values())
        for own, parts in table.items()
        for part, theirs in enumerate(parts)
    }


def own_name(name: str, family: Family) -> tuple[str, int, int]:
    """Return bertkit's name of a tensor in a file, which of its parts it is, and of how many.

    Older names (gamma, beta) and those of an encoder alone, without the family's prefix, are known,
    too. A name that no table has is returned as it is.
    """
    current = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    current = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", current)
    module, _, kind = current.rpartition(".")
    pattern, number = without_number(module)
    known = modules_in_files(family)
    for candidate in (pattern, f"{family.prefix}{pattern}"):
        if candidate in known:
            own, part, count = known[candidate]
            return f"{own.replace('.N', f'.{number}')}.{kind}", part, count
    return current, 0, 1


def own_tensors(
    tensors: dict[str, Tensor],
    family: Family,
    source: object,
    convert: Callable[[Tensor, str], Tensor] = lambda tensor, name: tensor,
) -> dict[str, Tensor]:
    """Return a file's tensors by bertkit's names, each converted; the dictionary is emptied.

    Raises:
        BertkitError: two tensors belong to one parameter, or the decoder is not tied.
    """
    named: dict[str, Tensor] = {}
    parts: dict[str, dict[int, tuple[str, Tensor]]] = {}
    for name in list(tensors):
        own, part, count = own_name(name, family)
        if own in named or part in parts.get(own, {}):
            raise BertkitError(f"{source}: {name} is a second {own}; remake the file")
        tensor = convert(tensors.pop(name), name)
        if count == 1:
            named[own] = tensor
            continue
        group = parts.setdefault(own, {})
        if any(other.shape != tensor.shape for _, other in group.values()):
            raise BertkitError(f"{source}: {name} has shape {tuple(tensor.shape)}, unlike the rest")
        group[part] = name, tensor
        if len(group) == count:
            named[own] = torch.cat([group[i][1] for i in range(count)])
            del parts[own]
    for incomplete in parts.values():
        named.update(incomplete.values())
    for copy, original in TIED.items():
        if copy in named:
            tensor = named.pop(copy)
            if not torch.equal(named.setdefault(original, tensor), tensor):
                theirs = file_names(copy, family)[0]
                raise BertkitError(
                    f"{source}: {theirs} differs from the tensor that BERT ties it to"
                )
    return named


def file_tensors(
    tensors: Mapping[str, Tensor], family: Family, architecture: str = "", *, bare: bool = False
) -> dict[str, Tensor]:
    """Return tensors by a family's names; `bare` drops the prefix, as in files of an encoder."""
    named: dict[str, Tensor] = {}
    for own, tensor in tensors.items():
        names = file_names(own, family, architecture)
        for name, part in zip(names, tensor.chunk(len(names)), strict=True):
            short = name.removeprefix(family.prefix) if bare else name
            named[short] = part.clone(memory_format=torch.contiguous_format)
    return named
