"""BERT's encoder (paper section 3; Vaswani et al. 2017, section 3.1) on packed batches.

Token, segment and position embeddings are summed and normalised. Each layer consists of attention
and a two-layer feed-forward network, each followed by dropout, the residual sum and LayerNorm
("post-LN"). Hidden states are (tokens, width): all tokens of all sequences without padding. Only
`attention` reads the sequence boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bertkit.errors import BertkitError, nearest
from bertkit.model.native import Dropout, add_norm, attention
from bertkit.pretraining_data.batch import Hidden, Packed, Pooled, Rows, TargetIndices, TokenIndices

ACTIVATIONS = ("gelu", "gelu_tanh")
DIRECTIONS = ("bidirectional", "left_to_right")
POOLER_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"tanh": torch.tanh, "gelu": F.gelu}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """An encoder's sizes and settings; most fields are named as in `config.json`."""

    vocab_size: int
    """The number of word embeddings: at least the size of the tokenizer's vocabulary."""
    hidden_size: int = 768
    """The width of a hidden state; H in the paper."""
    num_hidden_layers: int = 12
    """The number of layers; L in the paper."""
    num_attention_heads: int = 12
    """The number of attention heads; A in the paper. It must divide `hidden_size`."""
    intermediate_size: int = 3072
    """The inner width of the feed-forward network; 4H in the paper."""
    hidden_act: str = "gelu"
    """"gelu" (with erf, the first release) or "gelu_tanh" (Google's code since February 2019)."""
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    """The maximum sequence length in tokens."""
    type_vocab_size: int = 2
    """The number of segments; BERT has A and B."""
    initializer_range: float = 0.02
    """Standard deviation of the normal distribution, truncated at 2 of them, of initial weights."""
    layer_norm_eps: float = 1e-12
    direction: str = "bidirectional"
    """Which other tokens a token attends to: all, or only those before it ("left_to_right", the
    ablation in the paper's section 5.1)."""
    embedding_size: int = 0
    """The width of the embeddings if a matrix projects them to `hidden_size` (ALBERT, Lan et al.
    2019, section 3.1). 0: they are as wide as hidden states, and there is no such matrix."""
    share_layers: bool = False
    """Whether all layers share the same weights (ALBERT)."""
    pooler_act: str = "tanh"
    """The pooler's activation: "tanh", or "gelu" (with erf) as in ELECTRA's classification head."""

    @property
    def embedding_width(self) -> int:
        """The actual width of the embeddings, also if `embedding_size` is 0."""
        return self.embedding_size or self.hidden_size

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            BertkitError: a field is invalid; the message names it.
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
        acts = {"hidden_act": ACTIVATIONS, "pooler_act": tuple(POOLER_ACTIVATIONS)}
        for name, known in {"direction": DIRECTIONS, **acts}.items():
            value = getattr(self, name)
            if value not in known:
                hint = nearest(str(value), known)
                raise BertkitError(f"model config: unknown {name} {value!r}{hint}")
        for name in REAL_FIELDS:
            value = getattr(self, name)
            if not isinstance(value, float | int) or isinstance(value, bool) or not 0 <= value < 1:
                raise BertkitError(f"model config: {name} must be in [0, 1), not {value!r}")
        if not self.initializer_range:
            raise BertkitError("model config: initializer_range must be above 0")
        if self.hidden_size % self.num_attention_heads:
            raise BertkitError(
                f"model config: hidden_size {self.hidden_size} is not a multiple of "
                f"num_attention_heads {self.num_attention_heads}; change one of them"
            )


SIZE_FIELDS = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"),
    *("intermediate_size", "max_position_embeddings", "type_vocab_size"),
)
REAL_FIELDS = (
    *("hidden_dropout_prob", "attention_probs_dropout_prob"),
    *("initializer_range", "layer_norm_eps"),
)


class Layer(nn.Module):
    """A transformer layer: attention and feed-forward, each as LayerNorm(dropout(f(x)) + x)."""

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
        """Map (tokens, width) to (tokens, width), or to (rows, width) for the chosen tokens.

        The result has the dtype of `hidden`.
        """
        return self.attend(self.project(hidden), hidden, packed, rows)

    def project(self, hidden: Hidden) -> Tensor:
        """Return (tokens, 3 width): the queries, keys and values of tokens."""
        return self.query_key_value(hidden)

    def attend(
        self, projected: Tensor, hidden: Hidden, packed: Packed, rows: TargetIndices | None
    ) -> Rows:
        """Return the layer's output, given its input and what `project` returned for it."""
        heads = projected.view(len(projected), 3, self.config.num_attention_heads, -1)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        causal = self.config.direction == "left_to_right"
        attended = attention(heads, packed, causal=causal, dropout=dropout).flatten(1)
        if rows is not None:
            attended, hidden = attended.index_select(0, rows), hidden.index_select(0, rows)
        return self.complete(attended, hidden)

    def complete(self, attended: Rows, hidden: Rows) -> Rows:
        """Return the output at some tokens, given their attention and the layer's input there."""
        hidden = add_norm(
            self.attention_output(attended), hidden, self.attention_norm, self.dropout
        )
        expanded = activation(self.intermediate(hidden), self.config)
        return add_norm(self.output(expanded), hidden, self.output_norm, self.dropout)


RESIDUAL_DTYPE: ContextVar[torch.dtype | None] = ContextVar("residual dtype", default=None)


@contextmanager
def residual_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """Set the dtype of the hidden states that layers pass on; None for that of the first input."""
    token = RESIDUAL_DTYPE.set(dtype)
    try:
        yield
    finally:
        RESIDUAL_DTYPE.reset(token)


def as_residual(embedded: Tensor) -> Hidden:
    """Convert the first layer's input to the dtype set by `residual_dtype`."""
    return embedded.to(RESIDUAL_DTYPE.get() or embedded.dtype)


class Encoder(nn.Module):
    """Embeddings, layers and pooler: the part of the pre-trained model that every task reuses."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        narrow, width = config.embedding_width, config.hidden_size
        distinct = 1 if config.share_layers else config.num_hidden_layers
        self.word_embeddings = embedding(config.vocab_size, narrow)
        self.position_embeddings = embedding(config.max_position_embeddings, narrow)
        self.segment_embeddings = embedding(config.type_vocab_size, narrow)
        self.embedding_norm = nn.LayerNorm(narrow, eps=config.layer_norm_eps)
        self.projection = nn.Linear(narrow, width) if config.embedding_size else None
        self.layers = nn.ModuleList(Layer(config) for _ in range(distinct))
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.pooler = nn.Linear(width, width)
        initialize(self, config)

    def forward(
        self,
        packed: Packed,
        rows: TargetIndices | None = None,
        token_embeddings: Tensor | None = None,
    ) -> Rows:
        """Return the last layer's hidden states, (rows, width).

        Args:
            packed: the batch.
            rows: (rows,) indices of the tokens whose states to return, in this order; None for all.
                In the last layer, everything after attention is computed only for these.
            token_embeddings: (tokens, embedding width), used in place of those of the ids.

        Raises:
            BertkitError: a sequence is longer than the model has positions.
        """
        return run_layers(self.stack, self.embed(packed, token_embeddings), packed, rows)

    @property
    def stack(self) -> list[nn.Module]:
        """The layers in the order of use; a shared layer appears repeatedly."""
        return layer_sequence(self.layers, self.config)

    def summary_tokens(self, packed: Packed) -> TargetIndices:
        """Return (sequences,) the index of the token of each sequence that attends to all others.

        This is [CLS], or the last [SEP] if the model reads from left to right.
        """
        left_to_right = self.config.direction == "left_to_right"
        return packed.last_tokens if left_to_right else packed.first_tokens

    def layers_of(self, packed: Packed) -> list[Hidden]:
        """Return `num_hidden_layers` + 1 tensors: the embeddings and each layer's hidden states.

        Raises:
            BertkitError: a sequence is longer than the model has positions.
        """
        states = [self.embed(packed)]
        for layer in self.stack:
            states.append(layer(states[-1], packed))
        return states

    def embed(self, packed: Packed, token_embeddings: Tensor | None = None) -> Hidden:
        """Return the first layer's input, (tokens, width): the embeddings, projected if needed."""
        embedded = self.embeddings(packed, token_embeddings)
        return as_residual(embedded if self.projection is None else self.projection(embedded))

    def embeddings(self, packed: Packed, token_embeddings: Tensor | None = None) -> Hidden:
        """Return the normalised sum of token, position and segment embeddings (paper figure 2)."""
        check_length(packed, self.config)
        if token_embeddings is None:
            token_embeddings = self.word_embeddings(packed.ids)
        positions = self.position_embeddings(packed.position_ids)
        segments = self.embed_segments(packed.segment_ids)
        return self.dropout(self.embedding_norm(token_embeddings + positions + segments))

    @torch.no_grad()
    def copy_positions(self, trained: int, count: int) -> None:
        """Fill the positions from `trained` to `count` with copies of positions 1 to `trained` - 1.

        Position 0 is left out, because it has only ever been that of [CLS].
        """
        weight = self.position_embeddings.weight
        new = torch.arange(trained, max(trained, count), device=weight.device)
        weight[new] = weight[1 + (new - 1) % (trained - 1)]

    def embed_segments(self, segment_ids: TokenIndices) -> Hidden:
        """Look up segment embeddings, (tokens, embedding width).

        On CUDA the gradient of a look-up adds the rows of equal indices one after the other, which
        takes long for two rows; the gradient of a selection is two sums over all tokens.
        """
        if segment_ids.is_cuda and self.config.type_vocab_size == 2:
            return select_row(self.segment_embeddings.weight, segment_ids)
        return self.segment_embeddings(segment_ids)

    def pool(self, summary: Pooled) -> Pooled:
        """Return the pooler's output: a linear layer and an activation on each summary state."""
        return POOLER_ACTIVATIONS[self.config.pooler_act](self.pooler(summary))


def select_row(table: Tensor, indices: TokenIndices) -> Hidden:
    """Return rows of a (2, width) table for indices 0 and 1, as an embedding does."""
    first, second = table.unbind(0)
    return torch.where(indices[:, None] == 0, first, second)


def embedding(rows: int, width: int) -> nn.Embedding:
    """Return an embedding matrix, which is not initialised if it is on the meta device."""
    if torch.get_default_device().type == "meta":  # initialising would import torch's compiler
        return nn.Embedding(rows, width, _weight=torch.empty(rows, width))
    return nn.Embedding(rows, width)


def layer_sequence(layers: nn.ModuleList, config: ModelConfig) -> list[nn.Module]:
    """Return the layers in the order of use; a shared layer is repeated."""
    depth = config.num_hidden_layers
    return list(layers) if len(layers) == depth else [layers[0]] * depth


def run_layers(
    stack: list[nn.Module], hidden: Hidden, packed: Packed, rows: TargetIndices | None
) -> Rows:
    """Run hidden states through layers, and return the chosen rows of the last one's output."""
    *lower, last = stack
    if hasattr(last, "run_stack"):  # compiled layers, which prepare a batch once for all of them
        compiled: Rows = last.run_stack(stack, hidden, packed, rows)  # type: ignore[operator]
        return compiled
    for layer in lower:
        hidden = layer(hidden, packed)
    return last(hidden, packed, rows)


def activation(hidden: Tensor, config: ModelConfig) -> Tensor:
    """Apply GELU (Hendrycks and Gimpel 2016), exact (with erf) or in its tanh approximation."""
    return F.gelu(hidden, approximate="tanh" if config.hidden_act == "gelu_tanh" else "none")


def initialize(module: nn.Module, config: ModelConfig) -> None:
    """Draw weights from a normal distribution truncated at two deviations; set biases to 0.

    LayerNorm gets weight 1 and bias 0. `torch.manual_seed` determines the result.
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
    """Raise a BertkitError if a sequence is longer than the number of position embeddings."""
    if packed.max_seqlen > config.max_position_embeddings:
        raise BertkitError(
            f"a sequence has {packed.max_seqlen} tokens, but the model has only "
            f"{config.max_position_embeddings} positions; split it into windows or shorten it"
        )


ONE_SEGMENT = (
    "the model has one segment (type_vocab_size 1), and pairs, choices and questions with their "
    "context need two; choose another model"
)


def check_vocabulary(config: ModelConfig, tokenizer_size: int) -> None:
    """Raise a BertkitError if a tokenizer has more tokens than the model has embeddings.

    The ids without embeddings would give garbage on some devices.
    """
    if tokenizer_size > config.vocab_size:
        raise BertkitError(
            f"the tokenizer has {tokenizer_size} tokens but the model only {config.vocab_size} "
            "embeddings (vocab_size); use the tokenizer that the model was made with"
        )
