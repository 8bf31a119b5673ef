"""Whether an image and a text belong together: ViLBERT's pre-training and retrieval.

Training has only pairs that belong together. In each batch, every text is also read with the image
of another one ("multi-modal alignment prediction", Lu et al. 2019, section 3.1); the order of the
data, and with it the other text, changes in every epoch. In pre-training, 15 % of the tokens and of
the regions are masked, too, and predicted from the pairs that belong together ("masked multi-modal
modelling"). Masks are drawn like dropout, by the seed of the step.

The target of a masked region is its vector, normalised to mean 0 and variance 1 as in masked
autoencoders (He et al. 2022, section 4), so that the loss does not depend on the features' scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from bertkit.checkpoints.pretrained import PretrainedWeights
from bertkit.datasets.examples import TextExample
from bertkit.datasets.image_columns import ALIGNED
from bertkit.errors import BertkitError
from bertkit.model.encoder import ModelConfig
from bertkit.multimodal.regions import PackedStreams, changed, draw_rows
from bertkit.multimodal.vilbert import TwoStreamModel
from bertkit.objectives import LossSum, Sums, cross_entropy_sums
from bertkit.pretraining_data.batch import to_device
from bertkit.pretraining_data.masking import MaskingOptions, count_targets
from bertkit.pretraining_data.rng import DATA_SPLIT, keyed_rng
from bertkit.tasks.images import ImageClassification, image_settings
from bertkit.tasks.task import ItemPart, Items, TaskBatch, TaskInputs

RANDOM = "random"
"""The label of an image with the text of another one."""
MASKING = MaskingOptions()
REGION_MASK_SHARE = 0.9
"""The share of the targets among regions that become 0; the others stay as they are."""


@dataclass(frozen=True)
class Alignment(ImageClassification):
    """The task of telling whether an image and a text belong together."""

    masked: bool = False
    """Whether to train on masked tokens and regions, too."""
    mask_id: int = 0
    """The id of [MASK]."""

    @classmethod
    def from_data(cls, data: TaskInputs) -> Self:
        """See `Task`; the data has no labels."""
        return cls(
            (RANDOM, ALIGNED),
            max_length=data.max_length,
            stride=data.windows.stride,
            masked=data.columns.image_task == "pretraining",
            **image_settings(data),
        )

    @property
    def predicts_tokens(self) -> bool:
        """See `Task`; masked tokens are predicted from the whole vocabulary."""
        return self.masked

    def initialised_from(self, start: PretrainedWeights) -> Self:
        """See `Task`; the network must have two streams."""
        made = super().initialised_from(start)
        if made.network != "vilbert":
            raise BertkitError(
                "--image-task alignment and pretraining need --image-network vilbert",
                code="image-task",
            )
        return replace(made, mask_id=start.tokenizer.mask_id)

    def build(self, config: ModelConfig) -> TwoStreamModel:
        """See `Task`."""
        return self.build_streams(config, 2, masked=self.masked)

    def balanced_weights(self, items: Items) -> np.ndarray:
        """See `Task`; every text is read with one image of each class."""
        raise BertkitError("--image-task alignment has balanced classes", code="class-weights")

    def scored_inputs(self, inputs: Sequence[TextExample]) -> Sequence[TextExample]:
        """See `Task`; every text is added once more, with the image of another one."""
        order = keyed_rng(0, DATA_SPLIT).permutation(len(inputs)).tolist()
        added = []
        for place, number in enumerate(order):
            own = inputs[number]
            after = (inputs[order[(place + step) % len(order)]] for step in range(1, len(order)))
            texts = (one for one in after if one.text != own.text)
            other = next((one for one in texts if not np.array_equal(one.image, own.image)), None)
            if other is not None and own.label == ALIGNED:
                image = other.image
                added.append(own._replace(id=f"{own.id}-{RANDOM}", label=RANDOM, image=image))
        return [*inputs, *added]

    def targets(
        self, parts: Sequence[ItemPart], place: np.ndarray, starts: np.ndarray
    ) -> tuple[dict[str, Tensor], dict[str, int]]:
        """See `Task`; in pre-training also how many tokens and regions of each pair are masked."""
        tensors, counts = super().targets(parts, place, starts)
        if not self.masked:
            return tensors, counts
        words, regions = [], []
        for part in (parts[i] for i in np.argsort(place)):
            tokens, vectors = len(part.sequences[0].ids), len(part.image.vectors)
            words.append(count_targets(tokens, MASKING.probability, tokens - 2))
            regions.append(count_targets(vectors, MASKING.probability, vectors))
        tensors |= {"text_targets": torch.tensor(words), "region_targets": torch.tensor(regions)}
        return tensors, {**counts, "targets": sum(words), "regions": sum(regions)}

    def objective(self, model: Any, batch: TaskBatch) -> Sums:
        """See `Task`; the sums of alignment and, in pre-training, of masked tokens and regions."""
        packed = batch.packed
        assert isinstance(packed, PackedStreams)
        own = list(range(len(packed.partners)))
        others = [one if other < 0 else other for one, other in enumerate(packed.partners)]
        pairs = own * 2, own + others
        if not self.masked:
            return self.alignment_sums(model.pair_logits(packed, pairs), batch)
        words = draw_rows(
            packed, batch.tensors["text_targets"], batch.counts["targets"], last=False
        )
        regions = draw_rows(
            packed.images, batch.tensors["region_targets"], batch.counts["regions"], last=True
        )
        hidden = self.with_masks(packed, words, regions, model.config.vocab_size)
        logits, found_words, found_regions = model.pretrain(hidden, pairs, words, regions)
        vectors = packed.images.vectors[regions]
        errors = (found_regions.float() - F.layer_norm(vectors, vectors.shape[1:])) ** 2
        return {
            **self.alignment_sums(logits, batch),
            **cross_entropy_sums("mlm", found_words, packed.ids[words], "targets"),
            "region_loss": LossSum(errors.mean(-1).sum(), "regions"),
        }

    def alignment_sums(self, logits: Tensor, batch: TaskBatch) -> Sums:
        """Return the sums of logits (2 x sequences, 2): of all texts with their own image first."""
        assert isinstance(batch.packed, PackedStreams)
        weights, known = batch.tensors["weights"], torch.tensor(batch.packed.partners) >= 0
        labels = batch.tensors["targets"]
        labels = torch.cat([labels, torch.zeros_like(labels)])
        losses = F.cross_entropy(logits.float(), labels, reduction="none")
        paired = weights * to_device(known, weights.device)
        shares = torch.cat([weights, paired]) / 2
        total = (losses * shares).sum()
        right = ((logits.argmax(-1) == labels) * shares).sum()
        return {
            "alignment_loss": LossSum(total, "examples"),
            "alignment_accuracy": LossSum(right, "examples"),
        }

    def with_masks(
        self, packed: PackedStreams, words: Tensor, regions: Tensor, vocabulary: int
    ) -> PackedStreams:
        """Return a batch whose targets are replaced, as BERT does with tokens.

        The first vector of an image, the mean of its regions, becomes that of the regions that are
        no targets, from which the targets cannot be computed.
        """
        draw = torch.rand(len(words), device=words.device)
        old = packed.ids[words]
        random = torch.randint_like(old, vocabulary)
        shown = torch.where(draw < MASKING.mask_share + MASKING.random_share, random, old)
        shown = torch.where(draw < MASKING.mask_share, self.mask_id, shown)
        kept = torch.rand(len(regions), 1, device=regions.device) >= REGION_MASK_SHARE
        images = packed.images
        vectors = images.vectors.index_copy(0, regions, images.vectors[regions] * kept)
        firsts, owners = images.first_tokens.long(), images.owners
        known = torch.ones(len(vectors), 1, device=vectors.device)
        known = known.index_fill(0, torch.cat([firsts, regions]), 0.0)
        sums, numbers = (
            torch.zeros(len(firsts), part.shape[1], device=part.device).index_add(0, owners, part)
            for part in (vectors * known, known)
        )
        vectors = vectors.index_copy(0, firsts, sums / numbers.clamp(min=1))
        return changed(
            packed,
            ids=packed.ids.index_copy(0, words, shown),
            images=changed(images, vectors=vectors),
        )
