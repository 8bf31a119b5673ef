"""ViLBERT: BERT beside a stream of image regions, with co-attention (Lu et al. 2019).

    python -m experiments.multimodal.vilbert questions|retrieval|pretraining [--model DIRECTORY]

Text and image are a sequence each. Before chosen layers of the text's encoder, each stream attends
to the other: the queries are its own, the keys and values those of the other stream. Each of these
co-attention layers is followed by a layer of attention within the text, which is BERT's, and one
within the image. The input of the head is the element-wise product of the pooled text and the
pooled image. The image stream is as wide as the text's; its feed-forward networks are as wide as
the stream.

`questions` prints the accuracy on questions about held-out digits (see `digits.py`). `retrieval`
trains with the alignment objective on scenes and captions, and prints the recall of held-out scenes
and captions; each of 100 captions is read with each of 100 scenes. `pretraining` trains half of the
epochs with masked tokens and masked regions, too, before it does the same.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bertkit.model.encoder import Encoder, Layer, ModelConfig, initialize
from bertkit.model.heads import LanguageHead
from bertkit.pretraining_data.batch import Packed, pack
from bertkit.tokenizer.wordpiece import Tokenizer
from experiments.multimodal.digits import (
    ANSWERS,
    BOXES,
    Examples,
    as_patches,
    initial_encoder,
    questions,
    scenes,
    summary,
    train,
)

PATCH_SIZE = 2
SCENES, HELD_OUT_SCENES = 2000, 100
RANDOM, ALIGNED = 0, 1
"""The classes of the alignment objective."""
TARGET_SHARE = 0.15
"""The share of tokens, and of regions, that are predicted in pre-training."""
MASK_SHARE, RANDOM_SHARE = 0.8, 0.1
"""The shares of the predicted tokens that become [MASK] and a random token, as in BERT."""
REGION_MASK_SHARE = 0.9
"""The share of the predicted regions whose vectors become 0; the others stay as they are."""
CUTOFFS = (1, 5)


class CrossLayer(nn.Module):
    """A transformer layer whose keys and values are the hidden states of the other stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.heads, self.attention_dropout = (
            config.num_attention_heads,
            config.attention_probs_dropout_prob,
        )
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.attention_output = nn.Linear(width, width)
        self.attention_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.intermediate = nn.Linear(width, inner)
        self.output = nn.Linear(inner, width)
        self.output_norm = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden: Tensor, packed: Packed, others: Tensor, other: Packed) -> Tensor:
        """Map the states of a stream, (tokens, width), given those of the other stream.

        `packed` and `other` have the boundaries of as many sequences, in the same order.
        """
        dropout = self.attention_dropout if self.training else 0.0
        query = self.query(hidden).unflatten(-1, (self.heads, -1))
        key, value = self.key_value(others).unflatten(-1, (2, self.heads, -1)).unbind(1)
        attended = cross_attention(query, key, value, packed, other, dropout).flatten(1)
        hidden = self.attention_norm(hidden + self.dropout(self.attention_output(attended)))
        expanded = F.gelu(self.intermediate(hidden))
        return self.output_norm(hidden + self.dropout(self.output(expanded)))


def cross_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: Packed, other: Packed, dropout: float
) -> Tensor:
    """Return softmax(query key^T / sqrt(head width)) value from each sequence to its partner.

    Args:
        query: (tokens of `packed`, heads, head width).
        key: (tokens of `other`, heads, head width).
        value: of the shape of `key`.
        packed: the boundaries of the sequences that attend.
        other: the boundaries of their partners.
        dropout: the probability of setting an attention weight to 0.
    """
    padded = [
        pad_sequence(rows.split(boundaries.lengths), batch_first=True).transpose(1, 2)
        for rows, boundaries in ((query, packed), (key, other), (value, other))
    ]
    inside = [
        torch.arange(boundaries.max_seqlen) < boundaries.cu_seqlens.diff()[:, None]
        for boundaries in (packed, other)
    ]
    mask = inside[1][:, None, None]
    attended = F.scaled_dot_product_attention(*padded, attn_mask=mask, dropout_p=dropout)
    return attended.transpose(1, 2)[inside[0]]


class CoAttention(nn.Module):
    """A co-attention layer of both streams, and the layer of the image stream that follows it."""

    def __init__(self, config: ModelConfig, image_config: ModelConfig) -> None:
        super().__init__()
        self.text = CrossLayer(config)
        self.image = CrossLayer(image_config)
        self.layer = Layer(image_config)


class RegionEmbedding(nn.Module):
    """The input of the image stream: the sum of projected vectors, boxes and learned positions.

    The first token stands for the whole image; its vector is the mean of the regions'.

    Args:
        config: the encoder's config.
        width: the width of a region's vector.
        num_positions: the number of learned positions (patches); 0 for regions with boxes alone.
    """

    def __init__(self, config: ModelConfig, width: int, num_positions: int) -> None:
        super().__init__()
        self.vectors = nn.Linear(width, config.hidden_size)
        self.boxes = nn.Linear(5, config.hidden_size)
        learned = nn.Embedding(1 + num_positions, config.hidden_size) if num_positions else None
        self.positions = learned
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, images: Tensor, boxes: Tensor, means: Tensor) -> Tensor:
        """Return (images, 1 + regions, hidden size).

        Args:
            images: (images, regions, width).
            boxes: (regions, 4) left, top, right, bottom, as fractions of the image's sides.
            means: (images, width) the vectors that stand for whole images.
        """
        boxes = torch.cat([torch.tensor([[0.0, 0.0, 1.0, 1.0]]), boxes])
        areas = (boxes[:, 2:] - boxes[:, :2]).prod(dim=1, keepdim=True)
        embedded = self.vectors(torch.cat([means[:, None], images], dim=1))
        embedded = embedded + self.boxes(torch.cat([boxes, areas], dim=1))
        if self.positions is not None:
            embedded = embedded + self.positions.weight
        return self.dropout(self.norm(embedded))


class ViLBERT(nn.Module):
    """Two streams with co-attention, a classifier of pairs, and the heads of pre-training.

    Args:
        encoder: the text's encoder, a BERT encoder whose weights are trained further.
        tokenizer: the encoder's tokenizer.
        classes: the number of classes of a text with an image.
        width: the width of a region's vector.
        boxes: (regions, 4) the boxes of an image's regions.
        num_positions: the number of learned positions; see `RegionEmbedding`.
        co_layers: the text's layers, from 0, before which the streams attend to each other.
    """

    def __init__(
        self,
        encoder: Encoder,
        tokenizer: Tokenizer,
        classes: int,
        width: int,
        boxes: Tensor,
        *,
        num_positions: int = 0,
        co_layers: Sequence[int] = (0, 1),
    ) -> None:
        super().__init__()
        config, hidden = encoder.config, encoder.config.hidden_size
        image_config = replace(config, intermediate_size=hidden)
        self.tokenizer, self.boxes, self.co_layers = tokenizer, boxes, co_layers
        self.embedding = RegionEmbedding(config, width, num_positions)
        self.blocks = nn.ModuleList(CoAttention(config, image_config) for _ in co_layers)
        self.pooler = nn.Linear(hidden, hidden)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(hidden, classes)
        self.token_head = LanguageHead(config)
        self.region_head = nn.Sequential(
            *(nn.Linear(hidden, hidden), nn.GELU()),
            *(nn.LayerNorm(hidden, eps=config.layer_norm_eps), nn.Linear(hidden, width)),
        )
        initialize(self, config)
        self.encoder = encoder  # after what is new, because its weights are trained

    def forward(self, texts: Sequence[Sequence[int]], images: Tensor) -> Tensor:
        """Return (texts, classes) logits of each text with its image.

        Args:
            texts: the token ids of each text, without special tokens.
            images: (texts, regions, width).
        """
        packed = self.pack(texts)
        text, image = self.streams(packed, images, images.mean(dim=1))
        return self.classify(text[packed.first_tokens], image[:, 0])

    def pack(self, texts: Sequence[Sequence[int]]) -> Packed:
        """Return the sequences [CLS] text [SEP]."""
        return pack([[self.tokenizer.cls_id, *text, self.tokenizer.sep_id] for text in texts])

    def classify(self, text: Tensor, image: Tensor) -> Tensor:
        """Return (pairs, classes) logits for the states at the first tokens, (pairs, width)."""
        pooled = self.encoder.pool(text) * torch.tanh(self.pooler(image))
        return self.classifier(self.dropout(pooled))

    def streams(self, packed: Packed, images: Tensor, means: Tensor) -> tuple[Tensor, Tensor]:
        """Run both streams; see `RegionEmbedding` for `images` and `means`.

        Returns:
            The states of the texts, (tokens, width), and of the images, (images, 1 + regions,
            width).
        """
        regions = pack([[0] * (1 + images.shape[1])] * len(images))  # ids have no use
        text = self.encoder.embed(packed)
        image = self.embedding(images, self.boxes, means).flatten(0, 1)
        blocks = dict(zip(self.co_layers, self.blocks, strict=True))
        for number, layer in enumerate(self.encoder.stack):
            if (block := blocks.get(number)) is not None:
                attending = block.image(image, regions, text, packed)
                text = block.text(text, packed, image, regions)
                image = block.layer(attending, regions)
            text = layer(text, packed)
        return text, image.unflatten(0, (len(images), -1))


# Alignment and masks ----------------------------------------------------------------------------


def partners(texts: Sequence[Sequence[int]], images: Tensor) -> list[int]:
    """Return for each pair the next one, in a circle, with another text and another image.

    It is the pair itself if there is none.
    """
    count = len(texts)
    return [
        next(
            (
                other
                for other in chain(range(index + 1, count), range(index))
                if texts[other] != texts[index] and not torch.equal(images[other], images[index])
            ),
            index,
        )
        for index in range(count)
    ]


def alignment_loss(model: ViLBERT, texts: Sequence[Sequence[int]], images: Tensor) -> Tensor:
    """Return the mean cross entropy of telling pairs from texts with the image of another one."""
    others = partners(texts, images)
    logits = model([*texts, *texts], torch.cat([images, images[others]]))
    return F.cross_entropy(logits, alignment_labels(others))


def alignment_labels(others: Sequence[int]) -> Tensor:
    """Return the labels of all pairs, and then of the texts with the images of others."""
    again = [ALIGNED if other == index else RANDOM for index, other in enumerate(others)]
    return torch.tensor([ALIGNED] * len(others) + again)


def pretraining_loss(model: ViLBERT, texts: Sequence[Sequence[int]], images: Tensor) -> Tensor:
    """Return the sum of the mean losses of alignment, masked tokens and masked regions.

    The target of a masked region is its vector, normalised to mean 0 and variance 1 as in masked
    autoencoders (He et al. 2022, section 4), so that the loss does not depend on its scale.
    """
    others, count = partners(texts, images), len(texts)
    shown, token_rows, token_targets = mask_tokens(texts, model.tokenizer)
    masked, means, is_target = mask_regions(images)
    packed = model.pack([*shown, *shown])
    order = [*range(count), *others]
    text, image = model.streams(packed, masked[order], means[order])
    logits = model.classify(text[packed.first_tokens], image[:, 0])
    tokens = model.token_head(text[token_rows], model.encoder.word_embeddings)
    regions = model.region_head(image[:count, 1:][is_target])
    return (
        F.cross_entropy(logits, alignment_labels(others))
        + F.cross_entropy(tokens, token_targets)
        + F.mse_loss(regions, F.layer_norm(images[is_target], images.shape[-1:]))
    )


def mask_tokens(
    texts: Sequence[Sequence[int]], tokenizer: Tokenizer
) -> tuple[list[list[int]], Tensor, Tensor]:
    """Replace tokens as BERT does.

    Returns:
        The texts with masks; the indices of the targets in the batch of [CLS] text [SEP]; and the
        ids that were there.
    """
    shown, rows, targets, start = [], [], [], 0
    for text in texts:
        new = list(text)
        count = min(len(text), max(1, round(TARGET_SHARE * (len(text) + 2))))
        for position in torch.randperm(len(text))[:count].tolist():
            rows.append(start + 1 + position)
            targets.append(text[position])
            draw = float(torch.rand(()))
            if draw < MASK_SHARE:
                new[position] = tokenizer.mask_id
            elif draw < MASK_SHARE + RANDOM_SHARE:
                new[position] = int(torch.randint(tokenizer.size, ()))
        shown.append(new)
        start += len(text) + 2
    return shown, torch.tensor(rows), torch.tensor(targets)


def mask_regions(images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Set the vectors of most targets to 0.

    The vector of a whole image becomes the mean of its regions that are no targets, from which the
    targets cannot be computed.

    Returns:
        (images, regions, width) the vectors; (images, width) the means; and (images, regions)
        whether a region is a target.
    """
    count, regions, _ = images.shape
    targets = max(1, round(TARGET_SHARE * regions))
    is_target = torch.rand(count, regions).argsort(dim=1).argsort(dim=1) < targets
    hidden = is_target & (torch.rand(count, regions) < REGION_MASK_SHARE)
    known = (~is_target)[..., None]
    means = (images * known).sum(dim=1) / known.sum(dim=1).clamp(min=1)
    return images * ~hidden[..., None], means, is_target


# The experiments --------------------------------------------------------------------------------


def patch_boxes(side: int) -> Tensor:
    """Return the boxes of `side` x `side` patches, (patches, 4)."""
    row, column = np.divmod(np.arange(side**2), side)
    corners = np.stack([column, row, column + 1, row + 1], axis=1) / side
    return torch.from_numpy(corners.astype(np.float32))


def answer_questions(folder: str, epochs: int, seed: int, most: int) -> float:
    """Train on questions about digits; return the accuracy on held-out ones."""
    encoder, tokenizer = initial_encoder(folder)
    data, held_out = (
        questions(tokenizer, lambda batch: as_patches(batch, PATCH_SIZE), held_out=held, most=most)
        for held in (False, True)
    )
    _, patches, width = data.images.shape
    torch.manual_seed(seed)
    boxes = patch_boxes(round(patches**0.5))
    model = ViLBERT(encoder, tokenizer, len(ANSWERS), width, boxes, num_positions=patches)

    def loss_of(rows: list[int]) -> Tensor:
        logits = model([data.texts[row] for row in rows], data.images[rows])
        return F.cross_entropy(logits, data.labels[rows])

    train(model, loss_of, len(data), epochs, seed)
    right = 0
    with torch.inference_mode():
        for rows in torch.arange(len(held_out)).split(256):
            logits = model([held_out.texts[row] for row in rows], held_out.images[rows])
            right += int((logits.argmax(-1) == held_out.labels[rows]).sum())
    return right / len(held_out)


def retrieve(
    folder: str, epochs: int, seed: int, most: int, *, pretrain: bool
) -> tuple[list[float], list[float]]:
    """Train on captions; return the recalls at `CUTOFFS` of held-out scenes, and of captions.

    With `pretrain`, half of the epochs are pre-training.
    """
    encoder, tokenizer = initial_encoder(folder)
    data = scenes(tokenizer, min(SCENES, most), held_out=False)
    torch.manual_seed(seed)
    model = ViLBERT(encoder, tokenizer, 2, data.images.shape[-1], BOXES)
    for objective in (pretraining_loss, alignment_loss) if pretrain else (alignment_loss,):

        def loss_of(rows: list[int], objective=objective) -> Tensor:
            return objective(model, [data.texts[row] for row in rows], data.images[rows])

        train(model, loss_of, len(data), epochs // 2 if pretrain else epochs, seed)
    scores = pair_scores(model, scenes(tokenizer, min(HELD_OUT_SCENES, most), held_out=True))
    return recalls(scores), recalls(scores.T)


@torch.inference_mode()
def pair_scores(model: ViLBERT, examples: Examples) -> Tensor:
    """Return (texts, images) the differences of the two logits of each text with each image."""
    count, scores = len(examples), []
    for text in examples.texts:
        logits = model([text] * count, examples.images)
        scores.append(logits[:, ALIGNED] - logits[:, RANDOM])
    return torch.stack(scores)


def recalls(scores: Tensor) -> list[float]:
    """Return the shares of rows whose own column is among the k best, for k of `CUTOFFS`.

    Equal scores count against the model, so that one that tells nothing apart finds nothing.
    """
    ranks = (scores >= scores.diagonal()[:, None]).sum(dim=1)
    return [float((ranks <= cutoff).float().mean()) for cutoff in CUTOFFS]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run an experiment with all seeds, and print its scores."""
    parser = argparse.ArgumentParser(description="Digits, read by ViLBERT.")
    parser.add_argument("experiment", choices=["questions", "retrieval", "pretraining"])
    parser.add_argument("--model", default="", help="a model directory; else random weights")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--images", type=int, default=10_000, help="the most images or scenes")
    options = parser.parse_args(arguments)
    seeds = range(options.seeds)
    settings = [(options.model, options.epochs, seed, options.images) for seed in seeds]
    if options.experiment == "questions":
        print(f"accuracy {summary([answer_questions(*setting) for setting in settings])}")
        return
    pretrain = options.experiment == "pretraining"
    recalls = [retrieve(*setting, pretrain=pretrain) for setting in settings]
    for name, each in zip(("scene", "caption"), zip(*recalls, strict=True), strict=True):
        for cutoff, values in zip(CUTOFFS, zip(*each, strict=True), strict=True):
            print(f"{name} recall at {cutoff}: {summary(values)}")


if __name__ == "__main__":
    main()
