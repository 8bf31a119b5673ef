"""A frozen BERT as a source of features (paper section 5.3 and table 7).

Hidden states of chosen layers go into a new network, and only that one is trained. The paper reads
them with a BiLSTM of two layers with 768 units in each direction, and then a linear layer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from bertkit.errors import BertkitError, nearest
from bertkit.examples.packed import Packed
from bertkit.model.directory import SavedTokenizer, load_encoder, save_model
from bertkit.model.dropout import Dropout
from bertkit.model.encoder import Encoder, ModelConfig, initialize
from bertkit.model.start import read_details
from bertkit.model.weights import read_tensors, some, write_tensors
from bertkit.shapes import ClassLogits, Hidden

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
"""Which hidden states; `sum` and `weighted-sum` are over all layers without the embeddings."""

HEADS = ("linear", "bilstm")
UNITS = 768
HEAD_FILE = "head.safetensors"


def check_layers(layers: str, config: ModelConfig) -> None:
    """Refuse a choice of layers that is unknown or that the model is too shallow for.

    Raises:
        BertkitError: says what to choose instead.
    """
    if layers not in LAYERS:
        raise BertkitError(f"no layers are called '{layers}'{nearest(layers, LAYERS)}")
    needed = 4 if layers.endswith("last-four") else 2 if layers == "second-to-last" else 1
    if config.num_hidden_layers < needed:
        raise BertkitError(
            f"'{layers}' needs {needed} layers and the model has {config.num_hidden_layers}; "
            "choose last"
        )


def is_weighted(layers: str) -> bool:
    """Whether these layers are added with learned weights."""
    return layers.startswith("weighted")


def width_of(layers: str, config: ModelConfig) -> int:
    """Numbers in the vector of a token."""
    return config.hidden_size * (4 if layers.startswith("concat") else 1)


def new_mix(layers: str, config: ModelConfig) -> Tensor:
    """(layers + 1,) equal scores and a scale of 1; see `combine`."""
    count = 4 if layers.endswith("last-four") else config.num_hidden_layers
    return torch.cat([torch.zeros(count), torch.ones(1)])


def combine(states: list[Hidden], layers: str, mix: Tensor | None = None) -> Tensor:
    """One vector for each token, (tokens, `width_of`), from the states of all layers.

    A weighted sum is scale * sum(softmax(scores) * states), as in ELMo (Peters et al. 2018,
    equation 1).

    Args:
        states: of `Encoder.layers_of`: embeddings first.
        layers: one of `LAYERS`.
        mix: for weighted sums: (layers + 1,) the scores of the layers, lowest first, then the
            scale.

    Raises:
        BertkitError: a weighted sum without its weights.
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
            f"the weights of '{layers}' are learned; choose sum, or a model tuned with "
            f"--frozen --layers {layers}"
        )
    return mix[-1] * torch.einsum("l,ltw->tw", mix[:-1].softmax(0), torch.stack(chosen))


def encoder_features(
    encoder: Encoder, packed: Packed, layers: str, mix: Tensor | None = None
) -> Tensor:
    """`combine` of an encoder's states; (tokens, `width_of`). No gradient reaches the encoder."""
    with torch.no_grad():
        only_first = layers == "embeddings"
        states = [encoder.embed(packed)] if only_first else encoder.layers_of(packed)
    return combine(states, layers, mix)


def step_order(lengths: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The order in which a recurrent network takes tokens that lie sequence by sequence.

    First the first token of every sequence, longest sequence first, then all second tokens, ...

    Returns:
        (tokens,) indices of tokens, and (longest,) how many sequences have a token at each step.
    """
    sizes = np.asarray(lengths)
    starts = np.cumsum(sizes) - sizes
    longest_first = np.argsort(-sizes, kind="stable")
    steps = np.arange(sizes.max())
    alive = len(sizes) - np.searchsorted(np.sort(sizes), steps, side="right")
    rank = np.arange(sizes.sum()) - np.repeat(np.cumsum(alive) - alive, alive)
    return starts[longest_first][rank] + np.repeat(steps, alive), alive


class BiLSTM(nn.Module):
    """Two bidirectional layers over each sequence of a batch; no padding.

    Args:
        width: of the input.
        units: of each direction.
        dropout: between the layers.
    """

    def __init__(self, width: int, units: int = UNITS, dropout: float = 0.0) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, units, num_layers=2, bidirectional=True, dropout=dropout)

    def forward(self, hidden: Hidden, packed: Packed) -> Tensor:
        """(tokens, width) to (tokens, 2 * units), forward direction first.

        The sequences may come in any order; both ways are the same work.
        """
        order, alive = step_order(packed.lengths)
        there = torch.from_numpy(order).to(hidden.device)
        back = torch.from_numpy(np.argsort(order)).to(hidden.device)
        steps = PackedSequence(hidden.float().index_select(0, there), torch.from_numpy(alive))
        return self.lstm(steps)[0].data.index_select(0, back)


class FeatureModel(nn.Module):
    """A frozen encoder, chosen layers of it, a BiLSTM if wanted, dropout and a linear layer.

    The encoder has no gradients and stays in evaluation mode, without dropout, in training, too.

    Args:
        config: of the encoder.
        classes: outputs for each token.
        layers: one of `LAYERS`.
        head: "linear" or "bilstm".

    Raises:
        BertkitError: unknown layers or head, or a model with too few layers.
    """

    def __init__(
        self, config: ModelConfig, classes: int, layers: str = "last", head: str = "linear"
    ) -> None:
        super().__init__()
        check_layers(layers, config)
        if head not in HEADS:
            raise BertkitError(f"no head is called '{head}'{nearest(head, HEADS)}")
        self.config, self.layers, self.head = config, layers, head
        self.encoder = Encoder(config).requires_grad_(False).eval()
        width = width_of(layers, config)
        self.mix = nn.Parameter(new_mix(layers, config)) if is_weighted(layers) else None
        self.bilstm: BiLSTM | None = None
        if head == "bilstm":
            self.bilstm = BiLSTM(width, UNITS, config.hidden_dropout_prob)
            width = 2 * UNITS
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(width, classes)
        initialize(self.classifier, config)

    def train(self, mode: bool = True) -> FeatureModel:
        """Training mode for the head alone."""
        super().train(mode)
        self.encoder.eval()
        return self

    def forward(self, packed: Packed) -> ClassLogits:
        """Logits (tokens, classes)."""
        hidden = encoder_features(self.encoder, packed, self.layers, self.mix)
        if self.bilstm is not None:
            hidden = self.bilstm(hidden, packed)
        return self.classifier(self.dropout(hidden))

    def head_state(self) -> dict[str, Tensor]:
        """The parameters that are trained, by name."""
        state = self.state_dict()
        return {name: t for name, t in state.items() if not name.startswith("encoder.")}


def save_feature_model(
    directory: Path, model: FeatureModel, tokenizer: SavedTokenizer, details: Mapping[str, Any]
) -> None:
    """Write a model directory of the encoder, with the head in `head.safetensors` beside it.

    transformers loads the encoder (BertModel). `bertkit.json` also says which layers and head.

    Args:
        directory: made, or replaced where it is a model directory already.
        model: on any device.
        tokenizer: the one whose ids the model knows.
        details: the content of `bertkit.json`.

    Raises:
        BertkitError: see `save_model`.
    """
    tensors = {n: t.detach().to("cpu", torch.float32) for n, t in model.head_state().items()}
    save_model(
        directory,
        model.encoder,
        tokenizer,
        {**details, "layers": model.layers, "head": model.head},
        extra=lambda folder: write_tensors(folder / HEAD_FILE, tensors, format="pt"),
    )


def load_feature_model(directory: Path) -> FeatureModel:
    """What `save_feature_model` wrote: on the CPU, in evaluation mode.

    Raises:
        BertkitError: a file is missing or damaged, or head and encoder do not belong together.
    """
    details = read_details(directory)
    encoder = load_encoder(directory)
    tensors = read_tensors(directory / HEAD_FILE)
    classes = len(tensors["classifier.bias"]) if "classifier.bias" in tensors else 0
    with torch.device("meta"):
        layers, head = str(details.get("layers")), str(details.get("head"))
        model = FeatureModel(encoder.config, classes, layers, head)
    wanted = {name: tuple(tensor.shape) for name, tensor in model.head_state().items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if wanted != found:
        wrong = sorted(n for n in {*wanted, *found} if wanted.get(n) != found.get(n))
        raise BertkitError(
            f"{directory / HEAD_FILE}: {some(wrong)} missing, unknown or of another shape than "
            f"'{layers}' with '{head}' has; restore or remake the model"
        )
    model.encoder = encoder.requires_grad_(False)
    model.load_state_dict(tensors, strict=False, assign=True)
    return model.eval()
