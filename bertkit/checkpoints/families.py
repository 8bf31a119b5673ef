"""Model families: the network that a directory holds, and the names of its parameters.

One encoder covers several published networks; Hugging Face has a class and names for each:

| `model_type` | network                                                                      |
|--------------|------------------------------------------------------------------------------|
| bert         | BERT; a left-to-right model if `is_decoder` is set                           |
| albert       | layers that share their weights, factorised embeddings (Lan et al. 2019)     |
| electra      | a discriminator, or factorised embeddings alone (Clark et al. 2020); its     |
|              | fine-tuned models pool [CLS] with GELU, whereas BERT uses tanh               |
| bertkit      | all others, such as right-to-left models; transformers cannot load these     |

bertkit reads and writes tensors by BERT's names and translates them from and to other families'.
Its own modules differ substantially in one point: query, key and value are one matrix there and
three in the files. `tensorflow.py` has the names in Google's checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from bertkit.errors import BertkitError
from bertkit.model.encoder import Encoder, ModelConfig

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
"""Prefixes of BERT's names, and ALBERT's for them; the first match applies."""

ELECTRA = (
    ("bert.", "electra."),
    ("cls.predictions.transform.", "generator_predictions."),
    ("cls.predictions.decoder.", "generator_lm_head."),
    ("cls.predictions.", "generator_lm_head."),
)
"""Prefixes of BERT's names, and ELECTRA's for them; the first match applies."""

ATTENTION = re.compile(
    re.escape(f"albert.{GROUP}attention.") + r"(query|key|value|dense|LayerNorm)\."
)
ELECTRA_POOLERS = {
    "ElectraForSequenceClassification": (
        ("bert.pooler.dense.", "classifier.dense."),
        ("classifier.", "classifier.out_proj."),
    ),
    "ElectraForMultipleChoice": (("bert.pooler.dense.", "sequence_summary.summary."),),
}
"""ELECTRA has no pooler, but the heads of these classes contain one with GELU: prefixes of BERT's
names, and theirs."""
SUMMARY = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
"""The defaults of ElectraForMultipleChoice, and the only values supported here."""

OWN_FIELDS = ("direction", "embedding_size", "share_layers", "pooler_act")
"""Fields of `ModelConfig` that BERT's `config.json` does not have."""

DEFAULTS: dict[str, dict[str, Any]] = {
    "albert": {
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
        "hidden_act": "gelu_new",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    },
    "electra": {"hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024},
}
"""transformers' values of fields that a `config.json` leaves out, where they are not BERT's."""
FAMILIES = ("bert", "albert", "electra", "bertkit")
CLASSES = {
    "pairs": ("BertForPreTraining", "AlbertForPreTraining", "bertkit"),
    "words": ("BertForMaskedLM", "AlbertForMaskedLM", "ElectraForMaskedLM"),
    "causal": ("BertLMHeadModel", "bertkit", "bertkit"),
    "replaced": ("bertkit", "bertkit", "ElectraForPreTraining"),
    "encoder": ("BertModel", "AlbertModel", "ElectraModel"),
    "sequence": (
        "BertForSequenceClassification",
        "AlbertForSequenceClassification",
        "ElectraForSequenceClassification",
    ),
    "choice": ("BertForMultipleChoice", "AlbertForMultipleChoice", "ElectraForMultipleChoice"),
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
"""Head → transformers' classes in the order of `FAMILIES`; "bertkit" if it has no such class."""

WITHOUT_POOLER = {"words", "causal", "replaced", "token", "span"}
"""Heads whose classes have no pooler; of ELECTRA's classes, only `ELECTRA_POOLERS` have one."""


def heads_of_class(architecture: str) -> set[str]:
    """Return the heads that one of transformers' classes may have; empty for unknown classes."""
    known = architecture != "bertkit"
    return {head for head, names in CLASSES.items() if known and architecture in names}


def has_pooler(family: str, architecture: str) -> bool:
    """Return whether one of transformers' classes has a pooler."""
    if family == "electra":
        return architecture in ELECTRA_POOLERS
    return not heads_of_class(architecture) & WITHOUT_POOLER


def choose_class(config: ModelConfig, head: str) -> tuple[str, str]:
    """Return the `model_type` and transformers class that compute the same; "bertkit" if none does.

    The head is a key of `CLASSES`.
    """
    causal = config.direction == "left_to_right"
    factorised = config.embedding_size not in (0, config.hidden_size)
    if config.share_layers:
        family = "albert"
    elif config.embedding_size or head == "replaced" or config.pooler_act == "gelu":
        family = "electra" if factorised or not config.embedding_size else "bertkit"
    else:
        family = "bert"
    if config.direction == "right_to_left" or (causal and family != "bert"):
        family = "bertkit"
    if family == "electra" and head == "words" and config.hidden_act != "gelu":
        family = "bertkit"  # transformers' generator head always has the GELU with erf
    reads_pooler = head in ("sequence", "choice", "pairs")
    if reads_pooler and config.pooler_act != ("gelu" if family == "electra" else "tanh"):
        family = "bertkit"
    # transformers always reads the first token for these, in spans to score "no answer"
    if causal and head in ("sequence", "choice", "pairs", "span"):
        family = "bertkit"
    head = "causal" if causal and head == "words" else head
    name = "bertkit" if family == "bertkit" else CLASSES[head][FAMILIES.index(family)]
    return ("bertkit", "bertkit") if name == "bertkit" else (family, name)


def family_fields(config: ModelConfig, family: str) -> dict[str, Any]:
    """Return the family's fields of `config.json`, in addition to those of all families."""
    width = config.embedding_width
    if family == "albert":
        return {"embedding_size": width, "num_hidden_groups": 1, "inner_group_num": 1}
    if family == "electra":
        dropout = config.hidden_dropout_prob  # multiple choice defaults to 0.1
        return {"embedding_size": width, **SUMMARY, "summary_last_dropout": dropout}
    if family == "bertkit":
        return {name: getattr(config, name) for name in OWN_FIELDS}
    return {"is_decoder": True} if config.direction == "left_to_right" else {}


def read_family(values: Mapping[str, Any], source: object) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that a `config.json` implies by its family.

    Raises:
        BertkitError: bertkit does not support the network.
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
        check_summary(values, source)
        if values.get("hidden_act", "gelu") != "gelu" and values.get("architectures") in (
            ["ElectraForMaskedLM"],
            ["ElectraForCausalLM"],
        ):
            raise BertkitError(
                f"{source}: hidden_act is {values['hidden_act']!r}, but the head of ELECTRA's "
                "generator always has the GELU with erf; that mixture is not supported"
            )
        same = width == values.get("hidden_size", 256)
        size = 0 if same else width
        return {"embedding_size": size, "direction": direction, "pooler_act": "gelu"}
    return {"direction": direction}


def check_summary(values: Mapping[str, Any], source: object) -> None:
    """Raise a BertkitError unless an ELECTRA multiple-choice head pools [CLS] with GELU."""
    if values.get("architectures") != ["ElectraForMultipleChoice"]:
        return
    for name, value in SUMMARY.items():
        if values.get(name, value) != value:
            raise BertkitError(
                f"{source}: {name} is {values[name]!r}; for ElectraForMultipleChoice only "
                f"{value!r} is supported"
            )


def family_name(name: str, family: str, architecture: str = "") -> str:
    """Translate BERT's name of a tensor to a family's; the class matters if heads differ."""
    families = {"albert": ALBERT, "electra": ELECTRA}
    for ours, theirs in (*ELECTRA_POOLERS.get(architecture, ()), *families.get(family, ())):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def family_names(
    tensors: Mapping[str, Tensor], family: str, architecture: str = "", *, bare: bool
) -> dict[str, Tensor]:
    """Return tensors by a family's names; `bare` drops the prefix, as in files of an encoder."""
    prefix = {"albert": "albert.", "electra": "electra."}.get(family, "bert.") if bare else ""
    named = {family_name(name, family, architecture): tensor for name, tensor in tensors.items()}
    return {name.removeprefix(prefix): tensor for name, tensor in named.items()}


def bert_name(name: str) -> str:
    """Translate any family's name of a tensor to BERT's."""
    if re.match(r"(encoder\.(albert|embedding_hidden)|pooler\.(weight|bias))", name):
        name = f"albert.{name}"
    if name.startswith("embeddings_project."):
        name = f"electra.{name}"
    if found := ATTENTION.match(name):
        part = "output" if found[1] in ("dense", "LayerNorm") else "self"
        return f"bert.encoder.layer.0.attention.{part}.{name[found.start(1) :]}"
    if re.match(r"(generator_)?predictions\.(dense|LayerNorm)\.", name):
        return f"cls.predictions.transform.{name.partition('.')[2]}"
    poolers = (pair for pairs in ELECTRA_POOLERS.values() for pair in pairs)
    for ours, theirs in (*ALBERT, *ELECTRA, *poolers):
        if name.startswith(theirs) and ".transform." not in ours:
            return ours + name.removeprefix(theirs)
    return name


LAYER = "bert.encoder.layer.N"
HUGGING_FACE = {
    "encoder.word_embeddings": ("bert.embeddings.word_embeddings",),
    "encoder.position_embeddings": ("bert.embeddings.position_embeddings",),
    "encoder.segment_embeddings": ("bert.embeddings.token_type_embeddings",),
    "encoder.embedding_norm": ("bert.embeddings.LayerNorm",),
    "encoder.projection": ("bert.embeddings_project",),
    "encoder.layers.N.query_key_value": (
        f"{LAYER}.attention.self.query",
        f"{LAYER}.attention.self.key",
        f"{LAYER}.attention.self.value",
    ),
    "encoder.layers.N.attention_output": (f"{LAYER}.attention.output.dense",),
    "encoder.layers.N.attention_norm": (f"{LAYER}.attention.output.LayerNorm",),
    "encoder.layers.N.intermediate": (f"{LAYER}.intermediate.dense",),
    "encoder.layers.N.output": (f"{LAYER}.output.dense",),
    "encoder.layers.N.output_norm": (f"{LAYER}.output.LayerNorm",),
    "encoder.pooler": ("bert.pooler.dense",),
    "mlm.dense": ("cls.predictions.transform.dense",),
    "mlm.norm": ("cls.predictions.transform.LayerNorm",),
    "mlm": ("cls.predictions",),
    "nsp.dense": ("cls.seq_relationship",),
    "rtd.dense": ("discriminator_predictions.dense",),
    "rtd.output": ("discriminator_predictions.dense_prediction",),
    "classifier": ("classifier",),
    "qa_outputs": ("qa_outputs",),
}
"""bertkit's modules → Hugging Face's; each has a weight, a bias or both. N is a layer's number."""


def parameter_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return Hugging Face's one or three names for each entry of `model.state_dict()`."""
    prefix = "encoder." if isinstance(model, Encoder) else ""
    names: dict[str, tuple[str, ...]] = {}
    for own in model.state_dict():
        module, _, kind = f"{prefix}{own}".rpartition(".")
        number = "".join(re.findall(r"\.(\d+)\.", module))
        foreign = HUGGING_FACE.get(re.sub(r"\.\d+\.", ".N.", module), (module,))
        full = [f"{name}.{kind}".replace(".N.", f".{number}.").lstrip(".") for name in foreign]
        names[own] = tuple(full)
    return names


def canonical_name(name: str) -> str:
    """Return BERT's current name for an older one or another family's, ending in weight or bias."""
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    name = bert_name(name)
    return f"bert.{name}" if re.match(r"(embeddings|encoder|pooler)\.", name) else name


TUNED = re.compile(r"output_(weights|bias)$|cls[./]squad[./]|classifier\.|qa_outputs\.")
"""Tensors in the heads of fine-tuned models, both Google's and others'."""


def tuned_tensors(names: Iterable[str]) -> list[str]:
    """Return the names that belong to the head of a fine-tuned model."""
    return [name for name in names if TUNED.match(name)]


def is_optional_weight(name: str) -> bool:
    """Return whether a file may lack a parameter (Hugging Face's name) of a head or the pooler.

    Models that were trained without next-sentence prediction have no pooler.
    """
    return name.startswith("bert.pooler.") or not name.startswith("bert.")
