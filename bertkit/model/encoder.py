"""BERT's encoder (paper section 3; Vaswani et al. 2017, section 3.1) on packed batches.

Embeddings of piece, segment and position are summed and normalised; each layer then is attention
and a two-layer network, each followed by dropout, the residual sum and LayerNorm ("post-LN").
Hidden states are (tokens, width): all tokens of all sequences, none of them padding. Nothing but
`attention` knows where a sequence ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.errors import BertkitError, nearest
from bertkit.model.attention import DIRECTIONS, attention
from bertkit.model.cpu import Dropout
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import Hidden, Pooled, Rows, TargetIndices

ACTIVATIONS = ("gelu", "gelu_tanh")
POOLER_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The size of a network; field names are those of `config.json` and `bert_config.json`."""

    vocab_size: int
    """Rows of the word embeddings: at least the number of pieces of the tokenizer."""
    hidden_size: int = 768
    """Width of a hidden state; H in the paper."""
    num_hidden_layers: int = 12
    """L in the paper."""
    num_attention_heads: int = 12
    """A in the paper; divides `hidden_size`."""
    intermediate_size: int = 3072
    """Width inside the feed-forward network; 4H in the paper."""
    hidden_act: str = "gelu"
    """"gelu" (with erf, the first release) or "gelu_tanh" (Google's code since February 2019)."""
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    """The longest sequence, in tokens."""
    type_vocab_size: int = 2
    """Segments: A and B."""
    initializer_range: float = 0.02
    """Standard deviation of the normal distribution that, cut at 2 deviations, gives weights."""
    layer_norm_eps: float = 1e-12
    direction: str = "bidirectional"
    """What a token sees: everything, or only "left_to_right" what is before it (the paper's
    ablation of section 5.1), or only "right_to_left" what is after it."""
    embedding_size: int = 0
    """Width of the embeddings where it is another than `hidden_size`: a matrix leads from one to
    the other (ALBERT, Lan et al. 2019, section 3.1). 0: the same width, no matrix."""
    share_layers: bool = False
    """All layers have the same weights (ALBERT)."""
    pooler_act: str = "tanh"
    """After the pooler's matrix: "tanh", or "gelu" (with erf) as in ELECTRA's heads on texts."""

    @property
    def embedding_width(self) -> int:
        """Width of the embeddings, whatever `embedding_size` says."""
        return self.embedding_size or self.hidden_size

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            BertkitError: a field is out of range; the message names it.
        """
        for name in SIZE_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise BertkitError(
                    f"model config: {name} must be a positive integer, not {value!r}"
                )
        if type(self.embedding_size) is not int or self.embedding_size < 0:
            raise BertkitError(
                f"model config: embedding_size must be 0 or more, not {self.embedding_size!r}"
            )
        if self.direction not in DIRECTIONS:
            hint = nearest(str(self.direction), DIRECTIONS)
            raise BertkitError(f"model config: unknown direction {self.direction!r}{hint}")
        for name in REAL_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, float | int) or isinstance(value, bool) or not 0 <= value < 1:
                raise BertkitError(f"model config: {name} must be in [0, 1), not {value!r}")
        if not self.initializer_range:
            raise BertkitError("model config: initializer_range must be above 0")
        if self.hidden_act not in ACTIVATIONS:
            hint = nearest(str(self.hidden_act), ACTIVATIONS)
            raise BertkitError(f"model config: unknown hidden_act {self.hidden_act!r}{hint}")
        if self.pooler_act not in POOLER_ACTIVATIONS:
            hint = nearest(str(self.pooler_act), POOLER_ACTIVATIONS)
            raise BertkitError(f"model config: unknown pooler_act {self.pooler_act!r}{hint}")
        if self.hidden_size % self.num_attention_heads:
            raise BertkitError(
                f"model config: hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}; change one of them"
            )


SIZE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "max_position_embeddings",
    "type_vocab_size",
)
REAL_FIELDS = (
    "hidden_dropout_prob",
    "attention_probs_dropout_prob",
    "initializer_range",
    "layer_norm_eps",
)


class Layer(nn.Module):
    """Attention and feed-forward, each as LayerNorm(dropout(f(x)) + x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, inner = config.hidden_size, config.intermediate_size
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(width, inner)
        self.output = nn.Linear(inner, width)
        self.output_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Hidden, packed: Packed, rows: TargetIndices | None = None) -> Rows:
        """One layer: (tokens, width) to (tokens, width), or to (rows, width) of chosen tokens."""
        attended = self.attend(hidden, packed)
        if rows is not None:
            attended, hidden = attended.index_select(0, rows), hidden.index_select(0, rows)
        hidden = self.attention_norm(self.dropout(self.attention_output(attended)) + hidden)
        expanded = activation(self.intermediate(hidden), self.config)
        return self.output_norm(self.dropout(self.output(expanded)) + hidden)

    def attend(self, hidden: Hidden, packed: Packed) -> Hidden:
        """Multi-head attention before its output matrix."""
        heads = self.config.num_attention_heads
        projected = self.query_key_value(hidden).unflatten(-1, (3, heads, -1))
        query, key, value = projected.unbind(1)  # each (tokens, heads, head width)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        direction = self.config.direction
        return attention(query, key, value, packed, direction=direction, dropout=dropout).flatten(1)


TO_COME: ContextVar[bool] = ContextVar("weights to come", default=False)


@contextmanager
def skip_weight_init() -> Iterator[None]:
    """Encoders built inside draw weights for the pooler only; a file brings the others."""
    token = TO_COME.set(True)
    try:
        yield
    finally:
        TO_COME.reset(token)


class Encoder(nn.Module):
    """Embeddings, layers and pooler: what pre-training leaves for every task to start from."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        narrow, width = config.embedding_width, config.hidden_size
        distinct = 1 if config.share_layers else config.num_hidden_layers
        with torch.device("meta") if TO_COME.get() else nullcontext():
            self.word_embeddings = embedding(config.vocab_size, narrow)
            self.position_embeddings = embedding(config.max_position_embeddings, narrow)
            self.segment_embeddings = embedding(config.type_vocab_size, narrow)
            self.embedding_norm = nn.LayerNorm(narrow, eps=config.layer_norm_eps)
            self.projection = nn.Linear(narrow, width) if config.embedding_size else None
            self.layers = nn.ModuleList(Layer(config) for _ in range(distinct))
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.pooler = nn.Linear(width, width)
        initialize(self, config)

    def forward(self, packed: Packed, rows: TargetIndices | None = None) -> Rows:
        """The last layer's hidden states, (rows, width).

        Args:
            packed: the batch.
            rows: (rows,) the tokens whose states are wanted, in this order; None for all. What
                follows attention in the last layer is computed for these alone.

        Raises:
            BertkitError: a sequence is longer than the model has positions.
        """
        return run_layers(self.stack, self.embed(packed), packed, rows)

    @property
    def stack(self) -> list[nn.Module]:
        """The layers in the order of use; where they are shared, one again and again."""
        return layer_sequence(self.layers, self.config)

    def summary_tokens(self, packed: Packed) -> TargetIndices:
        """(sequences,) tokens that have seen all of theirs: [CLS]; left to right the last [SEP]."""
        left_to_right = self.config.direction == "left_to_right"
        return packed.last_tokens if left_to_right else packed.first_tokens

    def layers_of(self, packed: Packed) -> list[Hidden]:
        """Hidden states after the embeddings and after every layer: `num_hidden_layers` + 1.

        Raises:
            BertkitError: a sequence is longer than the model has positions.
        """
        states = [self.embed(packed)]
        for layer in self.stack:
            states.append(layer(states[-1], packed))
        return states

    def embed(self, packed: Packed) -> Hidden:
        """What the first layer reads, (tokens, width): embeddings, as wide as hidden states."""
        embedded = self.embeddings(packed)
        return embedded if self.projection is None else self.projection(embedded)

    def embeddings(self, packed: Packed) -> Hidden:
        """Piece + position + segment, normalised (paper figure 2): (tokens, embedding width)."""
        check_length(packed, self.config)
        words = self.word_embeddings(packed.ids)
        positions = self.position_embeddings(packed.position_ids)
        segments = self.segment_embeddings(packed.segment_ids)
        return self.dropout(self.embedding_norm(words + positions + segments))

    def pool(self, summary: Pooled) -> Pooled:
        """One vector for each sequence: an activation of a matrix on its summary token's state."""
        return POOLER_ACTIVATIONS[self.config.pooler_act](self.pooler(summary))


def embedding(rows: int, width: int) -> nn.Embedding:
    """An embedding matrix; without memory nothing is drawn."""
    if torch.get_default_device().type == "meta":  # to draw, torch would import its compiler
        return nn.Embedding(rows, width, _weight=torch.empty(rows, width))
    return nn.Embedding(rows, width)


def layer_sequence(layers: nn.ModuleList, config: ModelConfig) -> list[nn.Module]:
    """Layers in the order of use: one again and again where they are shared."""
    depth = config.num_hidden_layers
    return list(layers) if len(layers) == depth else [layers[0]] * depth


def run_layers(
    stack: list[nn.Module], hidden: Hidden, packed: Packed, rows: TargetIndices | None
) -> Rows:
    """Hidden states through some layers; of the last one, the wanted rows alone."""
    *lower, last = stack
    for layer in lower:
        hidden = layer(hidden, packed)
    return last(hidden, packed, rows)


def activation(hidden: Tensor, config: ModelConfig) -> Tensor:
    """GELU (Hendrycks and Gimpel 2016): with erf, or the tanh approximation of it."""
    return F.gelu(hidden, approximate=gelu_form(config))


def gelu_form(config: ModelConfig) -> str:
    """Torch's word for the form of GELU: "none" (with erf) or "tanh"."""
    return "tanh" if config.hidden_act == "gelu_tanh" else "none"


def initialize(module: nn.Module, config: ModelConfig) -> None:
    """Weights from a normal distribution cut at two deviations, biases 0, LayerNorm 1 and 0.

    Draws from torch's generator, so `torch.manual_seed` decides the result.
    """
    deviation = config.initializer_range
    for part in module.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.trunc_normal_(part.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
        if isinstance(part, nn.LayerNorm):
            part.reset_parameters()


def check_length(packed: Packed, config: ModelConfig) -> None:
    """Refuse sequences that are longer than the position embeddings.

    Raises:
        BertkitError: says the length and the limit.
    """
    if packed.max_seqlen > config.max_position_embeddings:
        raise BertkitError(
            f"a sequence has {packed.max_seqlen} tokens, but the model has only "
            f"{config.max_position_embeddings} positions; split it into windows or shorten it"
        )


ONE_SEGMENT = (
    "the model has one segment (type_vocab_size 1), and pairs, choices and questions with their "
    "context need two; choose another model"
)


def check_batch(packed: Packed, config: ModelConfig) -> None:
    """Refuse ids that the embeddings do not have: on a GPU they would be garbage or a crash.

    Reads the ids, so on a GPU it waits for the device: call it where batches enter, not per step.

    Raises:
        BertkitError: names the token, its place and the size it exceeds.
    """
    check_length(packed, config)
    for name, indices, size in (
        ("token id", packed.ids, config.vocab_size),
        ("segment", packed.segment_ids, config.type_vocab_size),
        ("position", packed.position_ids, config.max_position_embeddings),
    ):
        wrong = ((indices < 0) | (indices >= size)).nonzero()
        if len(wrong):
            place = int(wrong[0, 0])
            sequence = int((packed.cu_seqlens[1:] <= place).sum())
            if name == "segment" and size == 1:
                raise BertkitError(ONE_SEGMENT)
            raise BertkitError(
                f"{name} {int(indices[place])} at token {place - int(packed.cu_seqlens[sequence])} "
                f"of sequence {sequence} is outside the model's 0 to {size - 1}; "
                "use the tokenizer that this model was made with"
            )


def check_vocabulary(config: ModelConfig, tokenizer_size: int) -> None:
    """Refuse a tokenizer whose ids go beyond the embeddings (silent garbage on some devices).

    Raises:
        BertkitError: says both sizes.
    """
    if tokenizer_size > config.vocab_size:
        raise BertkitError(
            f"the tokenizer has {tokenizer_size} pieces but the model only {config.vocab_size} "
            "embeddings (vocab_size); use the tokenizer that the model was made with"
        )
