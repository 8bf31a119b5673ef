"""Families of networks in Hugging Face's files: one encoder computes them, and a table names each.

| `model_type` | network                                                                      |
|--------------|------------------------------------------------------------------------------|
| bert         | BERT; a left-to-right model if `is_decoder` is set                           |
| albert       | layers that share their weights, factorised embeddings                       |
| electra      | a discriminator or generator; a pooler with GELU in fine-tuned models        |
| bertkit      | all other combinations, which transformers cannot load                       |

In memory tensors have bertkit's names, those of `state_dict()`: "encoder.layers.0.output.weight".
Query, key and value are one matrix there and three in the files. A new family is one more table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig

Fields = dict[str, Any]

TUNED_HEADS = {
    "sequence": "ForSequenceClassification",
    "choice": "ForMultipleChoice",
    "token": "ForTokenClassification",
    "span": "ForQuestionAnswering",
}
"""Head of a fine-tuned model -> the end of its class's name, in every family."""
POOLED_HEADS = frozenset({"sequence", "choice", "pairs"})
"""The heads that read the pooler's output."""
OWN_FIELDS = ("direction", "embedding_size", "share_layers", "pooler_act")
"""Fields of `ModelConfig` that BERT's `config.json` does not have."""
SUMMARY = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
"""The defaults of ElectraForMultipleChoice, and the only supported values."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A `model_type` of Hugging Face: its configuration both ways, its tensors and classes."""

    model_type: str
    prefix: str
    """The start of the names of the encoder's tensors; files of an encoder alone leave it out."""
    classes: Mapping[str, str]
    """Head -> transformers' class."""
    poolers: frozenset[str]
    """The heads whose classes have a pooler."""
    modules: Mapping[str, tuple[str, ...]]
    """bertkit's module -> the file's, N a layer's number; several of them are concatenated."""
    variants: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)
    """Class -> the modules that this class names differently."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """transformers' values of fields that a `config.json` leaves out, where they are not BERT's."""
    read_config: Callable[[Mapping[str, Any]], Fields]
    """Content of config.json -> the `OWN_FIELDS`; a ValueError names what is not supported."""
    write_config: Callable[[ModelConfig], Fields]
    """The config -> the fields of `config.json` beside those of all families."""
    supports: Callable[[ModelConfig, str], bool]
    """(config, head) -> whether this family's class for the head computes the same."""


def require(values: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raise a ValueError for the first field that is present with another value."""
    for name, value in wanted.items():
        if values.get(name, value) != value:
            raise ValueError(f"{name} is {values[name]!r}; only {value!r} is supported")


def bert_modules(prefix: str) -> dict[str, tuple[str, ...]]:
    """Return BERT's modules with the encoder's under a prefix such as "bert."."""
    layer = f"{prefix}encoder.layer.N"
    attention = f"{layer}.attention"
    return {
        "encoder.word_embeddings": (f"{prefix}embeddings.word_embeddings",),
        "encoder.position_embeddings": (f"{prefix}embeddings.position_embeddings",),
        "encoder.segment_embeddings": (f"{prefix}embeddings.token_type_embeddings",),
        "encoder.embedding_norm": (f"{prefix}embeddings.LayerNorm",),
        "encoder.projection": (f"{prefix}embeddings_project",),
        "encoder.layers.N.query_key_value": tuple(
            f"{attention}.self.{part}" for part in ("query", "key", "value")
        ),
        "encoder.layers.N.attention_output": (f"{attention}.output.dense",),
        "encoder.layers.N.attention_norm": (f"{attention}.output.LayerNorm",),
        "encoder.layers.N.intermediate": (f"{layer}.intermediate.dense",),
        "encoder.layers.N.output": (f"{layer}.output.dense",),
        "encoder.layers.N.output_norm": (f"{layer}.output.LayerNorm",),
        "encoder.pooler": (f"{prefix}pooler.dense",),
        "mlm": ("cls.predictions",),
        "mlm.dense": ("cls.predictions.transform.dense",),
        "mlm.norm": ("cls.predictions.transform.LayerNorm",),
        "mlm.decoder": ("cls.predictions.decoder",),
        "nsp.dense": ("cls.seq_relationship",),
        "rtd.dense": ("discriminator_predictions.dense",),
        "rtd.output": ("discriminator_predictions.dense_prediction",),
    }


def direction_of(values: Mapping[str, Any]) -> str:
    """Return the direction of a network: `is_decoder` makes it read left to right."""
    return "left_to_right" if values.get("is_decoder") else "bidirectional"


def is_bert(config: ModelConfig, head: str) -> bool:
    """Heads on a summary or a span read the first token, which sees no other left to right."""
    return (
        not config.share_layers
        and not config.embedding_size
        and config.pooler_act == "tanh"
        and (config.direction == "bidirectional" or head in ("words", "encoder", "token"))
    )


BERT = Family(
    model_type="bert",
    prefix="bert.",
    classes={
        "pairs": "BertForPreTraining",
        "words": "BertForMaskedLM",
        "causal": "BertLMHeadModel",
        "encoder": "BertModel",
        **{head: f"Bert{name}" for head, name in TUNED_HEADS.items()},
    },
    poolers=POOLED_HEADS | {"encoder"},
    modules=bert_modules("bert."),
    read_config=lambda values: {"direction": direction_of(values)},
    write_config=lambda config: {"is_decoder": True} if config.direction == "left_to_right" else {},
    supports=is_bert,
)


def read_albert(values: Mapping[str, Any]) -> Fields:
    """Read ALBERT's own fields; groups of layers are supported only if there is one."""
    require(values, {"num_hidden_groups": 1, "inner_group_num": 1})
    return {"embedding_size": values.get("embedding_size", 128), "share_layers": True}


def is_albert(config: ModelConfig, head: str) -> bool:
    """ALBERT's layers share their weights, and its pooler has tanh."""
    return (
        config.share_layers
        and config.embedding_size > 0  # ALBERT always projects its embeddings
        and config.direction == "bidirectional"
        and (config.pooler_act == "tanh" or head not in POOLED_HEADS)
    )


ALBERT_LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"
ALBERT = Family(
    model_type="albert",
    prefix="albert.",
    classes={
        "pairs": "AlbertForPreTraining",
        "words": "AlbertForMaskedLM",
        "encoder": "AlbertModel",
        **{head: f"Albert{name}" for head, name in TUNED_HEADS.items()},
    },
    poolers=POOLED_HEADS | {"encoder"},
    modules={
        **bert_modules("albert."),
        "encoder.projection": ("albert.encoder.embedding_hidden_mapping_in",),
        "encoder.layers.N.query_key_value": tuple(
            f"{ALBERT_LAYER}.attention.{part}" for part in ("query", "key", "value")
        ),
        "encoder.layers.N.attention_output": (f"{ALBERT_LAYER}.attention.dense",),
        "encoder.layers.N.attention_norm": (f"{ALBERT_LAYER}.attention.LayerNorm",),
        "encoder.layers.N.intermediate": (f"{ALBERT_LAYER}.ffn",),
        "encoder.layers.N.output": (f"{ALBERT_LAYER}.ffn_output",),
        "encoder.layers.N.output_norm": (f"{ALBERT_LAYER}.full_layer_layer_norm",),
        "encoder.pooler": ("albert.pooler",),
        "mlm": ("predictions",),
        "mlm.dense": ("predictions.dense",),
        "mlm.norm": ("predictions.LayerNorm",),
        "mlm.decoder": ("predictions.decoder",),
        "nsp.dense": ("sop_classifier.classifier",),
    },
    defaults={
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    read_config=read_albert,
    write_config=lambda config: {
        "embedding_size": config.embedding_width,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
    },
    supports=is_albert,
)


def read_electra(values: Mapping[str, Any]) -> Fields:
    """Read ELECTRA's own fields; the generator's head always has the GELU with erf."""
    [architecture, *_] = values.get("architectures") or [""]
    if architecture == "ElectraForMultipleChoice":
        require(values, SUMMARY)
    if architecture in ("ElectraForMaskedLM", "ElectraForCausalLM"):
        require(values, {"hidden_act": "gelu"})
    width = values.get("embedding_size", 128)
    return {
        "embedding_size": 0 if width == values.get("hidden_size", 256) else width,
        "direction": direction_of(values),
        "pooler_act": "gelu",
    }


def is_electra(config: ModelConfig, head: str) -> bool:
    """ELECTRA projects embeddings of another width, and the pooler of its heads has GELU."""
    return (
        not config.share_layers
        and config.embedding_size != config.hidden_size
        and config.direction == "bidirectional"
        and (config.pooler_act == "gelu" or head not in POOLED_HEADS)
        and (config.hidden_act == "gelu" or head != "words")
    )


ELECTRA = Family(
    model_type="electra",
    prefix="electra.",
    classes={
        "words": "ElectraForMaskedLM",
        "replaced": "ElectraForPreTraining",
        "encoder": "ElectraModel",
        **{head: f"Electra{name}" for head, name in TUNED_HEADS.items()},
    },
    poolers=frozenset({"sequence", "choice"}),
    modules={
        **bert_modules("electra."),
        "mlm": ("generator_lm_head",),
        "mlm.dense": ("generator_predictions.dense",),
        "mlm.norm": ("generator_predictions.LayerNorm",),
        "mlm.decoder": ("generator_lm_head",),
    },
    variants={
        "ElectraForSequenceClassification": {
            "encoder.pooler": ("classifier.dense",),
            "classifier": ("classifier.out_proj",),
        },
        "ElectraForMultipleChoice": {"encoder.pooler": ("sequence_summary.summary",)},
    },
    defaults={"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
    read_config=read_electra,
    write_config=lambda config: {
        "embedding_size": config.embedding_width,
        **SUMMARY,
        "summary_last_dropout": config.hidden_dropout_prob,
    },
    supports=is_electra,
)
BERTKIT = replace(
    BERT,
    model_type="bertkit",
    classes={},
    read_config=lambda values: {n: values[n] for n in OWN_FIELDS if n in values},
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
    """Return the family and transformers' class that compute the same; BERTKIT if there is none."""
    kind = "causal" if head == "words" and config.direction == "left_to_right" else head
    for family in FAMILIES.values():
        if kind in family.classes and family.supports(config, head):
            return family, family.classes[kind]
    return BERTKIT, "bertkit"


def heads_of_class(architecture: str) -> set[str]:
    """Return the heads that one of transformers' classes has; empty for unknown classes."""
    pairs = [pair for family in FAMILIES.values() for pair in family.classes.items()]
    return {head for head, name in pairs if name == architecture}


def has_pooler(family: Family, architecture: str) -> bool:
    """Return whether a family's class has a pooler."""
    return family is BERTKIT or bool(heads_of_class(architecture) & family.poolers)


def file_names(parameter: str, family: Family, architecture: str = "") -> tuple[str, ...]:
    """Return the names in files of a tensor of bertkit: one, or those of query, key and value."""
    module, _, kind = parameter.rpartition(".")
    pattern, number = without_number(module)
    modules = {**family.modules, **family.variants.get(architecture, {})}
    return tuple(
        f"{name.replace('.N', f'.{number}')}.{kind}" for name in modules.get(pattern, (module,))
    )


def without_number(module: str) -> tuple[str, str]:
    """Return a module's name with its layer number replaced by N, and the number."""
    match = re.search(r"\blayers?\.(\d+)(?=\.)", module)
    if match is None:
        return module, "0"  # layers that share weights have no number in files
    return f"{module[: match.start(1)]}N{module[match.end(1) :]}", match[1]


@cache
def modules_in_files(family: Family) -> dict[str, tuple[str, int, int]]:
    """Return, for each module in files, bertkit's, which of its parts it is, and of how many."""
    return {
        theirs: (ours, part, len(parts))
        for table in (family.modules, *family.variants.values())
        for ours, parts in table.items()
        for part, theirs in enumerate(parts)
    }


def own_name(name: str, family: Family) -> tuple[str, int, int]:
    """Return bertkit's name of a tensor in a file, which of its parts it is, and of how many."""
    current = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)  # an older name
    current = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", current)
    module, _, kind = current.rpartition(".")
    pattern, number = without_number(module)
    known = modules_in_files(family)
    for candidate in (pattern, f"{family.prefix}{pattern}"):  # files of an encoder lack the prefix
        if candidate in known:
            module_name, part, count = known[candidate]
            return f"{module_name.replace('.N', f'.{number}')}.{kind}", part, count
    return current, 0, 1


def own_tensors(tensors: dict[str, Tensor], family: Family, source: object) -> dict[str, Tensor]:
    """Return a file's tensors by bertkit's names; the dictionary is emptied, which saves memory."""
    named: dict[str, Tensor] = {}
    parts: dict[str, dict[int, tuple[str, Tensor]]] = {}
    for name in list(tensors):
        parameter, part, count = own_name(name, family)
        if parameter in named or part in parts.get(parameter, {}):
            raise BertkitError(f"{source}: {name} is a second {parameter}; remake the file")
        tensor = tensors.pop(name)
        if count == 1:
            named[parameter] = tensor
            continue
        group = parts.setdefault(parameter, {})
        if any(other.shape != tensor.shape for _, other in group.values()):
            raise BertkitError(f"{source}: {name} has shape {tuple(tensor.shape)}, unlike the rest")
        group[part] = name, tensor
        if len(group) == count:
            named[parameter] = torch.cat([group[i][1] for i in range(count)])
            del parts[parameter]
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
    """Rename tensors to a family's names; `bare` drops the prefix, as in files of an encoder."""
    named: dict[str, Tensor] = {}
    for parameter, tensor in tensors.items():
        names = file_names(parameter, family, architecture)
        for name, part in zip(names, tensor.chunk(len(names)), strict=True):
            short = name.removeprefix(family.prefix) if bare else name
            named[short] = part.clone(memory_format=torch.contiguous_format)
    return named
