"""What the parameters are called here and in Hugging Face's files; Google's: `tensorflow.py`.

Ours follow `encoder.py` and `heads.py`. The one difference of substance: query, key and value are
one matrix here and three there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn

from bertkit.model.encoder import Encoder
from bertkit.model.families import bert_name

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
"""Our modules → Hugging Face's; each has a `weight` or a `bias` or both. N is a layer's number."""


def parameter_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Hugging Face's name, or three of them, for each entry of `model.state_dict()`."""
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
    """BERT's name of today for an older one or another family's; `weight` and `bias` at the end."""
    name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", name)
    name = re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name)
    name = bert_name(name)
    return f"bert.{name}" if re.match(r"(embeddings|encoder|pooler)\.", name) else name


TUNED = re.compile(r"output_(weights|bias)$|cls[./]squad[./]|classifier\.|qa_outputs\.")
"""Tensors of the heads of tuned models, Google's and others'."""


def tuned_tensors(names: Iterable[str]) -> list[str]:
    """Those of the head of a tuned model."""
    return [name for name in names if TUNED.match(name)]


def optional(name: str) -> bool:
    """Whether a file may lack a parameter (Hugging Face's name): heads, and the pooler.

    Models trained without next-sentence prediction have no pooler.
    """
    return name.startswith("bert.pooler.") or not name.startswith("bert.")
