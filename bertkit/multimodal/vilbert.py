"""The network of ViLBERT (Lu et al. 2019, section 2): BERT beside a stream of image regions.

Before chosen layers of the text's encoder, each stream attends to the other: the queries are its
own, the keys and values those of the other stream. Each such co-attention layer is followed by a
layer of attention within the text, which is BERT's, and one within the image. The element-wise
product of the pooled text and the pooled image is the input of the head.

The image stream is as wide as the text's, and the inner width of its feed-forward networks equals
its width, as in ViLBERT.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from bertkit.errors import BertkitError
from bertkit.model.attention import HAS_FLASH, choose_kernel, pad_rows, padding
from bertkit.model.encoder import Dropout, Layer, ModelConfig, activation, as_residual, initialize
from bertkit.model.features import in_fp32
from bertkit.model.heads import LanguageHead
from bertkit.model.task_heads import ClassificationModel
from bertkit.multimodal.regions import PackedRegions, PackedStreams, take_sequences
from bertkit.pretraining_data.batch import Packed
from bertkit.shapes import ClassLogits, Heads, Hidden, Pooled, Rows, TargetIndices

Pairs = tuple[Sequence[int], Sequence[int]]
"""The numbers of texts, and of the image that each is read with."""


def cross_attention(
    query: Heads, key: Heads, value: Heads, queries: Packed, keys: Packed, dropout: float = 0.0
) -> Heads:
    """Return softmax(query key^T / sqrt(head width)) value from each sequence to its partner.

    Args:
        query: (tokens of `queries`, heads, head width).
        key: (tokens of `keys`, heads, head width).
        value: of the shape of `key`.
        queries: the boundaries of the sequences that attend.
        keys: the boundaries of as many sequences that are attended to, in the same order.
        dropout: the probability of setting an attention weight to 0; pass 0 for evaluation.
    """
    if HAS_FLASH and choose_kernel(query) in ("flash", "triton"):
        found: Tensor = torch.ops.aten._flash_attention_forward(
            *(query, key, value, queries.cu_seqlens, keys.cu_seqlens),
            *(queries.max_seqlen, keys.max_seqlen, dropout, False, False),
            scale=None,
            window_size_left=-1,
            window_size_right=-1,
        )[0]
        return found
    (own, _), (inside, mask) = padding(queries), padding(keys)
    count = len(queries.cu_seqlens) - 1
    q = pad_rows(query, own, count, queries.max_seqlen)
    k, v = (pad_rows(rows, inside, count, keys.max_seqlen) for rows in (key, value))
    output = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
    rows = output.transpose(1, 2).flatten(0, 1)
    return rows if own is None else rows.index_select(0, own)


class CrossLayer(nn.Module):
    """A transformer layer whose keys and values are the hidden states of the other stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        width, inner = config.hidden_size, config.intermediate_size
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(width, inner)
        self.output = nn.Linear(inner, width)
        self.output_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Hidden, packed: Packed, others: Hidden, other: Packed) -> Hidden:
        """Map a stream (tokens, width) to (tokens, width), given the other stream."""
        dtype = hidden.dtype
        hidden, others = (x.to(self.query.weight.dtype) for x in (hidden, others))
        hidden = self.attend(hidden, packed, others, other)
        expanded = activation(self.intermediate(hidden), self.config)
        return self.output_norm(self.dropout(self.output(expanded)) + hidden).to(dtype)

    def attend(self, hidden: Hidden, packed: Packed, others: Hidden, other: Packed) -> Hidden:
        """Compute attention to the other stream with its residual sum and LayerNorm."""
        heads = self.config.num_attention_heads
        query = self.query(hidden).unflatten(-1, (heads, -1))
        key, value = self.key_value(others).unflatten(-1, (2, heads, -1)).unbind(1)
        dropout = self.config.attention_probs_dropout_prob if self.training else 0.0
        attended = cross_attention(query, key, value, packed, other, dropout).flatten(1)
        return self.attention_norm(self.dropout(self.attention_output(attended)) + hidden)


class CoAttention(nn.Module):
    """A co-attention layer, and the layer of the image stream that follows it."""

    def __init__(self, config: ModelConfig, image_config: ModelConfig) -> None:
        super().__init__()
        self.text = CrossLayer(config)
        self.image = CrossLayer(image_config)
        self.layer = Layer(image_config)


class RegionHead(nn.Module):
    """The head that predicts the vectors of masked regions."""

    def __init__(self, config: ModelConfig, width: int) -> None:
        super().__init__()
        self.config = config
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.decoder = nn.Linear(config.hidden_size, width)

    def forward(self, hidden: Rows) -> Tensor:
        """Return (regions, width of a vector)."""
        return self.decoder(self.norm(activation(self.dense(hidden), self.config)))


class ImageStream(nn.Module):
    """What ViLBERT adds to BERT: the embedding of regions, its layers and its pooler.

    It has a number of `blocks` of co-attention; see `TwoStreamModel` for the other arguments. The
    patches of pictures get learned embeddings of their places beside those of their boxes.
    """

    def __init__(
        self, config: ModelConfig, width: int, blocks: int, *, patches: int, masked: bool
    ) -> None:
        super().__init__()
        hidden = config.hidden_size
        own = replace(config, intermediate_size=hidden)
        self.features = nn.Linear(width, hidden)
        self.boxes = nn.Linear(5, hidden)
        self.places = nn.Embedding(1 + patches, hidden) if patches else None
        self.norm = nn.LayerNorm(hidden, eps=config.layer_norm_eps)
        self.dropout = Dropout(config.hidden_dropout_prob)
        self.blocks = nn.ModuleList(CoAttention(config, own) for _ in range(blocks))
        self.pooler = nn.Linear(hidden, hidden)
        self.head = RegionHead(config, width) if masked else None
        initialize(self, config)

    def embed(self, images: PackedRegions) -> Hidden:
        """Return (tokens, width): the normalised sum of projected vectors, boxes and places."""
        embedded = self.features(images.vectors) + self.boxes(images.boxes)
        if self.places is not None:
            embedded = embedded + self.places(images.position_ids)
        return as_residual(self.dropout(self.norm(embedded)))


class TwoStreamModel(ClassificationModel):
    """A `ClassificationModel` that reads an image in a stream beside that of the text.

    Args:
        config: the text encoder's config.
        classes: the number of outputs.
        width: the width of a region's vector.
        co_layers: the text's layers, from 0, before which the streams attend to each other; ()
            for the upper half.
        patches: the number of patches of a picture; 0 for features.
        masked: whether to add the heads for masked tokens, which is BERT's, and masked regions.

    Raises:
        BertkitError: there are no such layers, or the text is read in one direction (code
            "image-network").
    """

    def __init__(
        self,
        config: ModelConfig,
        classes: int,
        width: int,
        co_layers: Sequence[int] = (),
        *,
        patches: int = 0,
        masked: bool = False,
    ) -> None:
        super().__init__(config, classes)
        depth = config.num_hidden_layers
        self.co_layers = sorted(set(co_layers)) or upper_half(depth)
        if not 0 <= self.co_layers[0] <= self.co_layers[-1] < depth:
            raise BertkitError(
                f"--co-layers {' '.join(map(str, co_layers))}: the model's layers are 0 to "
                f"{depth - 1}; name some of them",
                code="image-network",
            )
        if config.direction != "bidirectional":
            raise BertkitError(
                "ViLBERT needs a text encoder that reads in both directions; choose another model",
                code="image-network",
            )
        blocks = len(self.co_layers)
        self.image = ImageStream(config, width, blocks, patches=patches, masked=masked)
        self.mlm = LanguageHead(config) if masked else None

    def forward(self, packed: Packed, words: Tensor | None = None) -> ClassLogits:
        """Return (sequences, classes) logits of each text with its image."""
        assert isinstance(packed, PackedStreams), "the batch has no images"
        return self.classify(*self.streams(packed))

    def pair_logits(self, packed: PackedStreams, pairs: Pairs) -> ClassLogits:
        """Return (pairs, classes) logits of texts and images of a batch that are combined anew."""
        return self.classify(*self.streams(packed, pairs))

    def pretrain(
        self,
        packed: PackedStreams,
        pairs: Pairs,
        text_rows: TargetIndices,
        image_rows: TargetIndices,
    ) -> tuple[ClassLogits, Tensor, Tensor]:
        """Return the outputs for pairs, of which the first are the batch's own.

        Args:
            packed: the batch with masks.
            pairs: each text with its own image, in order, and then others.
            text_rows: the indices of masked tokens.
            image_rows: the indices of masked regions.

        Returns:
            (pairs, 2) logits of whether text and image belong together, (masked tokens, vocabulary)
            logits, and (masked regions, width) predicted features.
        """
        assert self.mlm is not None
        assert self.image.head is not None
        text, image = self.streams(packed, pairs, text_rows, image_rows)
        count = len(pairs[0])
        return (
            self.classify(text[:count], image[:count]),
            self.mlm(text[count:], self.encoder.word_embeddings),
            self.image.head(image[count:]),
        )

    def classify(self, text: Rows, image: Rows) -> ClassLogits:
        """Return the logits for states at the first token of each sequence."""
        return in_fp32(self.classifier, self.dropout(self.pool(text, image)))

    def pool(self, text: Rows, image: Rows) -> Pooled:
        """Return the element-wise product of the pooled text and the pooled image."""
        dtype = self.image.pooler.weight.dtype
        return self.encoder.pool(text).to(dtype) * torch.tanh(self.image.pooler(image.to(dtype)))

    def streams(
        self,
        packed: PackedStreams,
        pairs: Pairs | None = None,
        text_rows: TargetIndices | None = None,
        image_rows: TargetIndices | None = None,
    ) -> tuple[Rows, Rows]:
        """Run both streams; return the states at the first tokens, then those at more rows.

        Args:
            packed: the batch.
            pairs: the pairs to read; None for each text with its own image. Layers below the first
                co-attention layer process each text once, in however many pairs it is.
            text_rows: further indices of tokens of the paired texts.
            image_rows: further indices of tokens of the paired images.
        """
        stack, first = self.encoder.stack, self.co_layers[0]
        texts: Packed = packed
        images: Packed = packed.images
        text, image = self.encoder.embed(packed), self.image.embed(packed.images)
        for layer in stack[:first]:
            text = layer(text, texts)
        if pairs is not None:
            texts, rows = take_sequences(packed, pairs[0])
            images, others = take_sequences(packed.images, pairs[1])
            text, image = text.index_select(0, rows), image.index_select(0, others)
        read_text = with_first(texts, text_rows)
        read_image = with_first(images, image_rows)
        blocks = dict(zip(self.co_layers, self.image.blocks, strict=True))
        for number, layer in enumerate(stack[first:], first):
            if isinstance(block := blocks.get(number), CoAttention):
                attending = block.image(image, images, text, texts)
                text = block.text(text, texts, image, images)
                top = number == self.co_layers[-1]
                image = block.layer(attending, images, read_image if top else None)
            text = layer(text, texts, read_text if number == len(stack) - 1 else None)
        return text, image


def upper_half(depth: int) -> tuple[int, ...]:
    """Return the numbers of the upper half of a stack of layers."""
    return tuple(range(depth // 2, depth))


def with_first(packed: Packed, rows: TargetIndices | None) -> TargetIndices:
    """Return the indices of the first tokens, and then further ones."""
    return packed.first_tokens if rows is None else torch.cat([packed.first_tokens.long(), rows])
