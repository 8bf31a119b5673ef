"""BERT (Devlin et al. 2019) in Hugging Face's files, and what the table of a family holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from bertkit.model.encoder import ModelConfig

TUNED_HEADS = {
    "sequence": "ForSequenceClassification",
    "choice": "ForMultipleChoice",
    "token": "ForTokenClassification",
    "span": "ForQuestionAnswering",
}
"""Head of a fine-tuned model -> the end of its class's name, in every family."""
POOLED_HEADS = frozenset({"sequence", "choice", "pairs"})
"""The heads that read the pooler's output."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Family:
    """A `model_type` of Hugging Face: its configuration both ways, its tensors and classes.

    A new family is a module beside this one with one such table.
    """

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
    read_config: Callable[[Mapping[str, Any], object], dict[str, Any]]
    """(content of config.json, file) -> the fields of `ModelConfig` that BERT does not have.

    It raises a BertkitError if bertkit does not support the network."""
    write_config: Callable[[ModelConfig], dict[str, Any]]
    """The config -> the fields of `config.json` beside those of all families."""
    supports: Callable[[ModelConfig, str], bool]
    """(config, head) -> whether this family's class for the head computes the same."""


LAYER = "encoder.layer.N"


def bert_modules(prefix: str) -> dict[str, tuple[str, ...]]:
    """Return BERT's modules with the encoder's under a prefix such as "bert."."""
    layer = f"{prefix}{LAYER}"
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


def read_direction(values: Mapping[str, Any], source: object) -> dict[str, Any]:
    """A BERT whose `is_decoder` is set is a left-to-right network."""
    return {"direction": "left_to_right" if values.get("is_decoder") else "bidirectional"}


def write_direction(config: ModelConfig) -> dict[str, Any]:
    """Return the field that says in which direction the network reads."""
    return {"is_decoder": True} if config.direction == "left_to_right" else {}


def is_bert(config: ModelConfig, head: str) -> bool:
    """Heads on a summary or a span read the first token, which sees no other left to right."""
    causal = config.direction == "left_to_right"
    return (
        not config.share_layers
        and not config.embedding_size
        and config.pooler_act == "tanh"
        and config.direction in ("bidirectional", "left_to_right")
        and not (causal and head not in ("words", "encoder", "token"))
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
    read_config=read_direction,
    write_config=write_direction,
    supports=is_bert,
)
