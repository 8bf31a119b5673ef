"""Which network a directory holds, and what its weights are called there.

One encoder covers several published networks; Hugging Face has a class and names for each:

| `model_type` | network                                                                      |
|--------------|------------------------------------------------------------------------------|
| bert         | BERT; from left to right with `is_decoder`                                   |
| albert       | layers that share their weights, factorised embeddings (Lan et al. 2019)     |
| electra      | a discriminator, or factorised embeddings alone (Clark et al. 2020)          |
| bertkit      | what none of these is, such as right to left; transformers refuses to load it |

Inside bertkit all tensors go by BERT's names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig

GROUP = "encoder.albert_layer_groups.0.albert_layers.0."
ALBERT = (
    ("bert.embeddings_project.", "albert.encoder.embedding_hidden_mapping_in."),
    ("bert.encoder.layer.0.attention.self.", f"albert.{GROUP}attention."),
    ("bert.encoder.layer.0.attention.output.", f"albert.{GROUP}attention."),
    ("bert.encoder.layer.0.intermediate.dense.", f"albert.{GROUP}ffn."),
    ("bert.encoder.layer.0.output.dense.", f"albert.{GROUP}ffn_output."),
    ("bert.encoder.layer.0.output.LayerNorm.", f"albert.{GROUP}full_layer_layer_norm."),
    ("bert.pooler.dense.", "albert.pooler."),
    ("bert.embeddings.", "albert.embeddings."),
    ("cls.predictions.transform.", "predictions."),
    ("cls.predictions.", "predictions."),
    ("cls.seq_relationship.", "sop_classifier.classifier."),
)
"""How BERT's names begin, and ALBERT's; the first that fits counts."""

ELECTRA = (
    ("bert.", "electra."),
    ("cls.predictions.transform.", "generator_predictions."),
    ("cls.predictions.decoder.", "generator_lm_head."),
    ("cls.predictions.", "generator_lm_head."),
)
"""How BERT's names begin, and ELECTRA's."""

ATTENTION = re.compile(
    re.escape(f"albert.{GROUP}attention.") + r"(query|key|value|dense|LayerNorm)\."
)
OWN_FIELDS = ("direction", "embedding_size", "share_layers")
"""Fields of `ModelConfig` that BERT's `config.json` does not have."""

FAMILIES = ("bert", "albert", "electra", "bertkit")
CLASSES = {
    "pairs": ("BertForPreTraining", "AlbertForPreTraining", "bertkit"),
    "words": ("BertForMaskedLM", "AlbertForMaskedLM", "ElectraForMaskedLM"),
    "causal": ("BertLMHeadModel", "bertkit", "bertkit"),
    "replaced": ("bertkit", "bertkit", "ElectraForPreTraining"),
    "encoder": ("BertModel", "AlbertModel", "ElectraModel"),
    "sequence": ("BertForSequenceClassification", "AlbertForSequenceClassification", "bertkit"),
    "choice": ("BertForMultipleChoice", "AlbertForMultipleChoice", "bertkit"),
    "token": (
        "BertForTokenClassification",
        "AlbertForTokenClassification",
        "ElectraForTokenClassification",
    ),
    "span": (
        "BertForQuestionAnswering",
        "AlbertForQuestionAnswering",
        "ElectraForQuestionAnswering",
    ),
}
"""Head → transformers' classes in the order of `FAMILIES`; "bertkit" where it has none like it."""

WITHOUT_POOLER = {"words", "causal", "replaced", "token", "span"}
"""Heads whose classes have no pooler; of ELECTRA's no class has one."""


def heads_of(architecture: str) -> set[str]:
    """The heads that one of transformers' classes may have; none for a class that is not known."""
    known = architecture != "bertkit"
    return {head for head, names in CLASSES.items() if known and architecture in names}


def has_pooler(family: str, architecture: str) -> bool:
    """Whether one of transformers' classes has a pooler."""
    return family != "electra" and not heads_of(architecture) & WITHOUT_POOLER


def choose_class(config: ModelConfig, head: str) -> tuple[str, str]:
    """(`model_type`, class) under which transformers computes the same; "bertkit" where none does.

    Args:
        config: the sizes.
        head: a key of `CLASSES`.
    """
    causal = config.direction == "left_to_right"
    factorised = config.embedding_size not in (0, config.hidden_size)
    if config.share_layers:
        family = "albert"
    elif config.embedding_size or head == "replaced":
        family = "electra" if factorised or not config.embedding_size else "bertkit"
    else:
        family = "bert"
    if config.direction == "right_to_left" or (causal and family != "bert"):
        family = "bertkit"
    if family == "electra" and head == "words" and config.hidden_act != "gelu":
        family = "bertkit"  # its generator's head always has the GELU with erf
    # transformers reads the first token there, of spans for the odds that there is no answer
    if causal and head in ("sequence", "choice", "pairs", "span"):
        family = "bertkit"
    head = "causal" if causal and head == "words" else head
    name = "bertkit" if family == "bertkit" else CLASSES[head][FAMILIES.index(family)]
    return ("bertkit", "bertkit") if name == "bertkit" else (family, name)


def family_fields(config: ModelConfig, family: str) -> dict[str, Any]:
    """What `config.json` says beyond the sizes that all families have."""
    width = config.embedding_width
    if family == "albert":
        return {"embedding_size": width, "num_hidden_groups": 1, "inner_group_num": 1}
    if family == "electra":
        return {"embedding_size": width}
    if family == "bertkit":
        return {name: getattr(config, name) for name in OWN_FIELDS}
    return {"is_decoder": True} if config.direction == "left_to_right" else {}


def read_family(values: Mapping[str, Any], source: object) -> dict[str, Any]:
    """The fields of `ModelConfig` that say which network a `config.json` describes.

    Raises:
        BertkitError: it is no network that this project knows.
    """
    family = values.get("model_type", "bert")
    if family not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise BertkitError(f"{source}: model_type is {family!r}; it must be one of {known}")
    width = values.get("embedding_size", 128)
    if family == "albert":
        for name in ("num_hidden_groups", "inner_group_num"):
            if values.get(name, 1) != 1:
                raise BertkitError(f"{source}: {name} is {values[name]!r}; only 1 is supported")
        return {"embedding_size": width, "share_layers": True}
    if family == "bertkit":
        return {name: values[name] for name in OWN_FIELDS if name in values}
    direction = "left_to_right" if values.get("is_decoder") else "bidirectional"
    if family == "electra":
        same = width == values.get("hidden_size", 256)
        return {"embedding_size": 0 if same else width, "direction": direction}
    return {"direction": direction}


def family_name(name: str, family: str) -> str:
    """BERT's name of a tensor as the family has it."""
    for ours, theirs in {"albert": ALBERT, "electra": ELECTRA}.get(family, ()):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def family_names(tensors: Mapping[str, Tensor], family: str, *, bare: bool) -> dict[str, Tensor]:
    """Tensors under a family's names; `bare` without the prefix, as those of encoders alone."""
    prefix = {"albert": "albert.", "electra": "electra."}.get(family, "bert.") if bare else ""
    named = {family_name(name, family): tensor for name, tensor in tensors.items()}
    return {name.removeprefix(prefix): tensor for name, tensor in named.items()}


def bert_name(name: str) -> str:
    """Any family's name of a tensor as BERT has it."""
    if re.match(r"(encoder\.(albert|embedding_hidden)|pooler\.(weight|bias))", name):
        name = f"albert.{name}"
    if name.startswith("embeddings_project."):
        name = f"electra.{name}"
    if found := ATTENTION.match(name):
        part = "output" if found[1] in ("dense", "LayerNorm") else "self"
        return f"bert.encoder.layer.0.attention.{part}.{name[found.start(1) :]}"
    if re.match(r"(generator_)?predictions\.(dense|LayerNorm)\.", name):
        return f"cls.predictions.transform.{name.partition('.')[2]}"
    for ours, theirs in (*ALBERT, *ELECTRA):
        if name.startswith(theirs) and ".transform." not in ours:
            return ours + name.removeprefix(theirs)
    return name
