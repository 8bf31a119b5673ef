"""ALBERT (Lan et al. 2019): layers that share their weights, and factorised embeddings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertkit.checkpoints.names.bert import POOLED_HEADS, TUNED_HEADS, Family, bert_modules
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig

LAYER = "albert.encoder.albert_layer_groups.0.albert_layers.0"


def read_config(values: Mapping[str, Any], source: object) -> dict[str, Any]:
    """ALBERT's groups of layers are supported only if there is one."""
    for name in ("num_hidden_groups", "inner_group_num"):
        if values.get(name, 1) != 1:
            raise BertkitError(f"{source}: {name} is {values[name]!r}; only 1 is supported")
    return {"embedding_size": values.get("embedding_size", 128), "share_layers": True}


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Embeddings may be of any width, and there is one group of layers."""
    return {
        "embedding_size": config.embedding_width,
        "num_hidden_groups": 1,
        "inner_group_num": 1,
    }


def is_albert(config: ModelConfig, head: str) -> bool:
    """ALBERT's layers share their weights, and its pooler has tanh."""
    return (
        config.share_layers
        and config.embedding_size > 0  # ALBERT always projects its embeddings
        and config.direction == "bidirectional"
        and (config.pooler_act == "tanh" or head not in POOLED_HEADS)
    )


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
            f"{LAYER}.attention.{part}" for part in ("query", "key", "value")
        ),
        "encoder.layers.N.attention_output": (f"{LAYER}.attention.dense",),
        "encoder.layers.N.attention_norm": (f"{LAYER}.attention.LayerNorm",),
        "encoder.layers.N.intermediate": (f"{LAYER}.ffn",),
        "encoder.layers.N.output": (f"{LAYER}.ffn_output",),
        "encoder.layers.N.output_norm": (f"{LAYER}.full_layer_layer_norm",),
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
    read_config=read_config,
    write_config=write_config,
    supports=is_albert,
)
