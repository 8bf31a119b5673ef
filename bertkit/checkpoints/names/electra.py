"""ELECTRA (Clark et al. 2020): a discriminator, its generator, and factorised embeddings.

The encoder has no pooler. The heads of two classes contain one with GELU, whereas BERT's has tanh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bertkit.checkpoints.names.bert import POOLED_HEADS, TUNED_HEADS, Family, bert_modules
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig

SUMMARY = {"summary_type": "first", "summary_use_proj": True, "summary_activation": "gelu"}
"""The defaults of ElectraForMultipleChoice, and the only values supported here."""


def read_config(values: Mapping[str, Any], source: object) -> dict[str, Any]:
    """The generator's head always has the GELU with erf, so its encoder must have it, too."""
    [architecture, *_] = values.get("architectures") or [""]
    if architecture == "ElectraForMultipleChoice":
        for name, value in SUMMARY.items():
            if values.get(name, value) != value:
                raise BertkitError(
                    f"{source}: {name} is {values[name]!r}; only {value!r} is supported"
                )
    language = architecture in ("ElectraForMaskedLM", "ElectraForCausalLM")
    if language and values.get("hidden_act", "gelu") != "gelu":
        raise BertkitError(
            f"{source}: hidden_act is {values['hidden_act']!r}; only 'gelu' is supported for "
            f"{architecture}"
        )
    width = values.get("embedding_size", 128)
    return {
        "embedding_size": 0 if width == values.get("hidden_size", 256) else width,
        "direction": "left_to_right" if values.get("is_decoder") else "bidirectional",
        "pooler_act": "gelu",
    }


def write_config(config: ModelConfig) -> dict[str, Any]:
    """The fields of the summary are those of `ElectraForMultipleChoice`."""
    dropout = config.hidden_dropout_prob  # of multiple choice, 0.1 by default
    return {"embedding_size": config.embedding_width, **SUMMARY, "summary_last_dropout": dropout}


def is_electra(config: ModelConfig, head: str) -> bool:
    """ELECTRA projects embeddings of another width, and its pooler has GELU."""
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
    read_config=read_config,
    write_config=write_config,
    supports=is_electra,
)
