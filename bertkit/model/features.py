"""Frozen encoders as feature extractors (paper section 5.3 and table 7).

The hidden states of chosen layers are the input of a new network, and only that one is trained. In
the paper it is a two-layer BiLSTM with 768 units in each direction, followed by a linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bertkit.checkpoints.card import Card
from bertkit.checkpoints.pretrained import load_model, read_details
from bertkit.checkpoints.save import save_model
from bertkit.checkpoints.weights import (
    check_finite_weights,
    read_tensors,
    shown_names,
    write_tensors,
)
from bertkit.errors import BertkitError, check_known
from bertkit.model.bilstm import BiLSTM
from bertkit.model.encoder import Dropout, Encoder, ModelConfig, initialize
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import ClassLogits
from bertkit.tokenizer.wordpiece import Tokenizer

LAYERS = (
    "embeddings",
    "second-to-last",
    "last",
    "sum",
    "sum-last-four",
    "weighted-sum",
    "weighted-sum-last-four",
    "concat-last-four",
)
"""Names for choices of hidden states; `sum` and `weighted-sum` exclude the embeddings."""

HEADS = ("linear", "bilstm")
UNITS = 768
HEAD_FILE = "head.safetensors"


def check_layers(layers: str, config: ModelConfig) -> None:
    """Raise a BertkitError if a choice of layers is unknown or the model has too few for it."""
    check_known("choice of layers", layers, LAYERS)
    needed = 4 if layers.endswith("last-four") else 2 if layers == "second-to-last" else 1
    if config.num_hidden_layers < needed:
        raise BertkitError(
            f"'{layers}' needs {needed} layers and the model has {config.num_hidden_layers}; "
            "choose last"
        )


def is_weighted(layers: str) -> bool:
    """Return whether this choice of layers is a sum with learned weights."""
    return layers.startswith("weighted")


def feature_width(layers: str, config: ModelConfig) -> int:
    """Return the width of a token's feature vector."""
    return config.hidden_size * (4 if layers.startswith("concat") else 1)


def new_mix(layers: str, config: ModelConfig) -> Tensor:
    """Return an initial `mix` for `combine`, (layers + 1,): equal scores and a scale of 1."""
    count = 4 if layers.endswith("last-four") else config.num_hidden_layers
    return torch.cat([torch.zeros(count), torch.ones(1)])


def combine(states: list[Tensor], layers: str, mix: Tensor | None = None) -> Tensor:
    """Combine the states of all layers into one vector per token, (..., `feature_width`).

    A weighted sum is scale * sum(softmax(scores) * states), as in ELMo (Peters et al. 2018,
    equation 1).

    Args:
        states: the states, (..., width), after the embeddings and after each layer.
        layers: one of `LAYERS`.
        mix: for weighted sums, (layers + 1,): the scores of the layers, lowest layer first, and
            then the scale.

    Raises:
        BertkitError: the layers are a weighted sum, and `mix` is None.
    """
    if layers == "embeddings":
        return states[0]
    if layers == "second-to-last":
        return states[-2]
    if layers == "last":
        return states[-1]
    chosen = states[-4:] if layers.endswith("last-four") else states[1:]
    if layers.startswith("concat"):
        return torch.cat(chosen, dim=-1)
    if not is_weighted(layers):
        return torch.stack(chosen).sum(0)
    if mix is None:
        raise BertkitError(
            f"the weights of '{layers}' are learned; choose sum, or a model fine-tuned with "
            f"--frozen --layers {layers}"
        )
    stacked = torch.stack(chosen).to(mix.dtype)  # on a GPU, states may be in bf16
    return mix[-1] * torch.einsum("l,l...w->...w", mix[:-1].softmax(0), stacked)


def encoder_features(
    encoder: Encoder, packed: Packed, layers: str, mix: Tensor | None = None
) -> Tensor:
    """Run an encoder without gradients, and `combine` its states to (tokens, `feature_width`)."""
    with torch.no_grad():
        only_first = layers == "embeddings"
        states = [encoder.embed(packed)] if only_first else encoder.layers_of(packed)
    return combine(states, layers, mix)


class FeatureModel(nn.Module):
    """A frozen encoder with a trainable head: an optional BiLSTM, dropout and a linear layer.

    The encoder has no gradients and stays in evaluation mode, without dropout, even in training.
    The features of an optional second frozen encoder are appended: a left-to-right and a
    right-to-left encoder together resemble ELMo (paper section 3.1, figure 3).

    Args:
        config: the encoder's config.
        classes: the number of outputs for each token.
        layers: one of `LAYERS`.
        head: "linear" or "bilstm".
        beside: the second encoder, which will be frozen.
        units: the BiLSTM's units in each direction; 0 for the paper's 768.

    Raises:
        BertkitError: the layers or head are unknown, a model has too few layers, or a weighted sum
            is chosen for two encoders.
    """

    def __init__(
        self,
        config: ModelConfig,
        classes: int,
        layers: str = "last",
        head: str = "linear",
        beside: Encoder | None = None,
        units: int = 0,
    ) -> None:
        super().__init__()
        check_layers(layers, config)
        check_known("head", head, HEADS)
        self.config, self.layers, self.head = config, layers, head
        self.encoder = Encoder(config).requires_grad_(False).eval()
        width = feature_width(layers, config)
        self.beside = None if beside is None else beside.requires_grad_(False).eval()
        if beside is not None:
            check_layers(layers, beside.config)
            if is_weighted(layers):
                raise BertkitError(
                    f"'{layers}' is for one encoder; choose last or concat-last-four"
                )
            width += feature_width(layers, beside.config)
        self.mix = nn.Parameter(new_mix(layers, config)) if is_weighted(layers) else None
        self.bilstm: BiLSTM | None = None
        if head == "bilstm":
            units = units or UNITS
            self.bilstm = BiLSTM(width, units, config.hidden_dropout_prob)
            width = 2 * units
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(width, classes)
        initialize(self.classifier, config)

    def train(self, mode: bool = True) -> FeatureModel:
        """Set the training mode of the head; the encoders stay in evaluation mode."""
        super().train(mode)
        self.encoder.eval()
        if self.beside is not None:
            self.beside.eval()
        return self

    def forward(self, packed: Packed) -> ClassLogits:
        """Return (tokens, classes) logits."""
        hidden = encoder_features(self.encoder, packed, self.layers, self.mix)
        if self.beside is not None:
            second = encoder_features(self.beside, packed, self.layers)
            hidden = torch.cat([hidden, second], dim=-1)
        if self.bilstm is not None:
            hidden = self.bilstm(hidden, packed)
        return in_fp32(self.classifier, self.dropout(hidden))


def in_fp32(layer: nn.Linear, hidden: Tensor) -> Tensor:
    """Apply a layer in fp32, outside autocast: in bf16 different inputs would get equal scores."""
    with torch.autocast(hidden.device.type, enabled=False):
        return layer(hidden.float())


def head_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the head's part of the state dict: all tensors outside the encoders, by name."""
    encoders = ("encoder.", "beside.")
    return {name: t for name, t in model.state_dict().items() if not name.startswith(encoders)}


def save_with_head(
    directory: Path,
    model: Any,
    tokenizer: Tokenizer,
    details: Mapping[str, Any],
    card: Card | None = None,
) -> None:
    """Write the encoder as a model directory, with the head next to it in `head.safetensors`.

    transformers can load the encoder (BertModel). A second encoder is written to `beside/`. The
    "head" in the details names the type of head, that of a `FeatureModel` by itself, with its
    layers; for the rest see `save_model`.
    """
    if isinstance(model, FeatureModel):
        details = {**details, "layers": model.layers, "head": model.head}
    tensors = {n: t.detach().to("cpu", torch.float32) for n, t in head_state(model).items()}
    beside = getattr(model, "beside", None)

    def write_head(folder: Path) -> None:
        write_tensors(folder / HEAD_FILE, tensors, format="pt")
        if beside is not None:
            save_model(folder / "beside", beside, tokenizer, {"task": "features"})

    save_model(directory, model.encoder, tokenizer, details, extra=write_head, card=card)


def load_feature_model(directory: Path) -> FeatureModel:
    """Load a `FeatureModel` that `save_with_head` wrote, on the CPU and in evaluation mode.

    Raises:
        BertkitError: a file is missing or damaged, or the head does not fit the encoder.
    """
    details = read_details(directory)
    encoder = load_model(directory, Encoder, trainable=False).model  # its pooler may be missing
    second = directory / "beside"
    beside = load_model(second, Encoder, trainable=False).model if second.is_dir() else None
    tensors = read_tensors(directory / HEAD_FILE)
    bias = tensors.get("classifier.bias")
    classes = 0 if bias is None or bias.dim() != 1 else len(bias)
    with torch.device("meta"):
        layers, head = str(details.get("layers")), str(details.get("head"))
        model = FeatureModel(encoder.config, classes, layers, head, beside, bilstm_units(tensors))
    model.encoder = encoder.requires_grad_(False)
    take_head(model, tensors, f"'{layers}' with '{head}'", directory)
    return model.eval()


def bilstm_units(tensors: Mapping[str, Tensor]) -> int:
    """Return the units of a head file's BiLSTM in each direction; 0 if there is no BiLSTM."""
    recurrent = tensors.get("bilstm.lstm.weight_hh_l0")
    return 0 if recurrent is None or recurrent.dim() != 2 else recurrent.shape[-1]


def take_head(model: nn.Module, tensors: dict[str, Tensor], what: str, directory: Path) -> None:
    """Load the tensors of a head file into a model; `what` names the head in messages.

    Raises:
        BertkitError: names, shapes or dtypes differ from the head's, or a value is not finite.
    """
    wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in head_state(model).items()}
    found = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    if wanted != found:
        wrong = sorted(n for n in {*wanted, *found} if wanted.get(n) != found.get(n))
        raise BertkitError(
            f"{directory / HEAD_FILE}: {shown_names(wrong)} missing, unknown or of another "
            f"shape or type than in {what}; restore or remake the model"
        )
    for name, tensor in tensors.items():
        check_finite_weights(tensor, name, directory / HEAD_FILE)
    model.load_state_dict(tensors, strict=False, assign=True)
